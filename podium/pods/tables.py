"""Slices and workers as tables for a terminal and as JSON, with their cost by podium/prices.yaml."""

import dataclasses
import datetime
from collections.abc import Sequence

from podium.accelerators import find_accelerator
from podium.job.job_records import JsonObject, Status
from podium.pods.inventory import Slice
from podium.prices import HOUR_S, load_prices

_SLICES = ("NAME", "ZONE", "TYPE", "KIND", "STATE", "WORKERS", "LEASE", "COST")
_WORKERS = ("WORKER", "HOST", "JOB", "STATE", "EXIT", "STEP", "PHASE", "METRIC")
_METRICS = ("train-reward/total/mean", "time/train/step_s")
"""The first of these that a worker reports is shown."""


def slice_json(tpu_slice: Slice, now: float) -> JsonObject:
    """Everything known about a slice at a time in Unix seconds, as JSON values: its fields, with times in ISO 8601 and
    UTC, its `owner`, its `title`, its `lease` in seconds, and the `hours` charged so far.

    `usd` is the on-demand list price of these hours; spot costs less. None if the price is unknown.
    """
    hours, usd = _cost(tpu_slice, now)
    times = {"created": tpu_slice.created, "requested": tpu_slice.requested}
    return {
        **dataclasses.asdict(tpu_slice),
        **{name: time.astimezone(datetime.UTC).isoformat() if time else None for name, time in times.items()},
        "owner": tpu_slice.owner,
        "title": tpu_slice.title,
        "lease": tpu_slice.idle_s,
        "hours": hours,
        "usd": usd,
    }


def _cost(tpu_slice: Slice, now: float) -> tuple[float, float | None]:
    """The hours charged so far, and their list price."""
    created = tpu_slice.created
    hours = max(0.0, now - created.timestamp()) / HOUR_S if created and tpu_slice.billed else 0.0
    try:
        accelerator = find_accelerator(tpu_slice.accelerator)
    except ValueError:  # another owner's slice of an unknown type
        return hours, None
    price = load_prices(None).get(accelerator.generation)
    return hours, price.usd_per_chip_hour * accelerator.chips * hours if price else None


def slice_table(slices: Sequence[Slice], owner: str, now: float) -> str:
    """One line for each slice: type, state, lease, cost by list prices."""
    return _table([_SLICES, *(_slice_row(each, owner, now) for each in slices)])


def worker_table(workers: Sequence[Status | None]) -> str:
    """One line for each worker: job, state, progress and a metric."""
    return _table([_WORKERS, *(_worker_row(worker, status) for worker, status in enumerate(workers))])


def _slice_row(tpu_slice: Slice, owner: str, now: float) -> tuple[str, ...]:
    hours, usd = _cost(tpu_slice, now)
    lease = "none" if tpu_slice.idle_s is None else f"{tpu_slice.idle_s / HOUR_S:.1f} h"
    of = tpu_slice.owner
    whose = "" if of == owner else f" (of {of})" if of else " (not podium's)"
    cost = "not charged" if not tpu_slice.billed else f"{hours:.1f} h"
    if tpu_slice.billed and usd is not None:
        cost += f", < ${usd:.2f} (spot)" if tpu_slice.spot else f", ${usd:.2f}"
    return (
        tpu_slice.name + whose,
        tpu_slice.zone,
        tpu_slice.accelerator,
        "spot" if tpu_slice.spot else "on demand",
        f"{tpu_slice.state}: {tpu_slice.detail}" if tpu_slice.state in ("dead", "failed") else tpu_slice.state,
        str(len(tpu_slice.addresses)),
        lease,
        cost,
    )


def _worker_row(worker: int, status: Status | None) -> tuple[str, ...]:
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
