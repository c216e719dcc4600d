"""Slices and workers as tables for a terminal, and as JSON."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from podium.pods.inventory import Slice
from podium.pods.prices import cost_text

_SLICES = ("NAME", "ZONE", "TYPE", "KIND", "STATE", "WORKERS", "LEASE", "COST")
_WORKERS = ("WORKER", "HOST", "JOB", "STATE", "EXIT", "STEP", "PHASE", "METRIC")
_METRICS = ("train-reward/total/mean", "time/train/step_s")
"""The first of these that there is stands for all."""


def slice_table(slices: Sequence[Slice], owner: str, now: float) -> str:
    """One line for each slice: what it is, how it is, how long it may stand, what it has cost by list prices."""
    return _table([_SLICES, *(_slice_row(each, owner, now) for each in slices)])


def worker_table(statuses: Sequence[Mapping[str, Any] | None]) -> str:
    """One line for each worker: its job, how far it is, and a metric."""
    return _table([_WORKERS, *(_worker_row(worker, status) for worker, status in enumerate(statuses))])


def slice_json(one: Slice, now: float) -> dict[str, Any]:
    """All that is known of a slice, as JSON values."""
    created = one.created.astimezone(datetime.UTC).isoformat() if one.created else None
    more = {"created": created, "owner": one.owner, "lease": one.lease, "cost": cost_text(one, now)}
    return dataclasses.asdict(one) | more


def _slice_row(one: Slice, owner: str, now: float) -> tuple[str, ...]:
    lease = "none" if one.lease is None else "past" if one.lease < now else f"{(one.lease - now) / 3600:.1f} h"
    whose = "" if one.owner == owner else f" (of {one.owner})" if one.owner else " (not podium's)"
    told = f"{one.state}: {one.told}" if one.state in ("dead", "failed") else one.state
    kind = "spot" if one.spot else "on demand"
    return (
        one.name + whose,
        one.zone,
        one.accelerator,
        kind,
        told,
        str(len(one.addresses)),
        lease,
        cost_text(one, now),
    )


def _worker_row(worker: int, status: Mapping[str, Any] | None) -> tuple[str, ...]:
    if status is None:
        return (str(worker), "?", "", "no answer", "", "", "", "")
    progress = status.get("progress") or {}
    metrics = progress.get("metrics") or {}
    metric = next((name for name in _METRICS if name in metrics), None)
    return (
        str(worker),
        status.get("host") or "",
        status.get("job") or "",
        status["state"],
        "" if status.get("exit") is None else str(status["exit"]),
        "" if progress.get("step") is None else f"{progress['step']}/{progress.get('steps') or '?'}",
        progress.get("phase") or "",
        f"{metric} {metrics[metric]:.4g}" if metric else "",
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
