"""Times a decode step or an update on this machine, traces it, and prints where the time goes, as JSON.

    python -m benches.children.gpu_step WORK [--looks N [--unrolled]] [--set KEY=VALUE ...] [--tiny]

WORK is `decode:MODEL` or `update:CONFIG`; a config is named as in `configs/`. A decode call is timed without a trace
first, since tracing slows it: `call_ms` is a step of such a call, and `traced_ms` the same under the trace. All figures
of the trace are milliseconds of a step (of an update as a whole):

- `kernel_ms`: the durations of all kernels and copies, added up; `busy_ms`: the time in which at least one runs;
- `gap_ms`: the time between the first and the last kernel in which none runs; `long_gap_ms`: its gaps over 5 us;
- `outside_ms`: what is left of `traced_ms`: launching the first kernel, and reading the results.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import numpy as np

import podium.rollout.programs
from benches.record import ROOT, machine
from podium.doctor.benchmarks import update
from podium.doctor.benchmarks.rollout import (
    device_of,
    full_requests,
    make_engine,
    measure,
    rollout_config,
    run_lengths,
)
from podium.doctor.machine_subject import smollm2
from podium.hosts.platform import prepare_platform
from podium.models.architecture import DecoderConfig, with_layers
from podium.models.presets import find_architecture
from podium.observe.summary import versions
from podium.plan.request.workload import SequenceLengths
from podium.rollout.programs import DecodeProgram, Where
from podium.run.roles import find_decoder
from podium.settings import load_settings
from podium.sharding import make_mesh
from podium.train.profile import start_trace
from podium.train.setup import run_spec

Carry = TypeVar("Carry")
SLOTS, TINY_SLOTS = 64, 4
PROMPT = 128
"""Tokens of each prompt that is decoded after."""
REPEATS = 3
LONG_US = 5.0
"""A gap between two kernels that is longer is counted apart: launching a kernel of a graph takes less."""
SHOWN = 12
HOST_CALL = re.compile(r"cu(da)?[A-Z]\w+")
"""Names of CUDA's functions, as a trace has the host's calls of them."""


class Span(NamedTuple):
    """An event of a trace, in nanoseconds."""

    begin: float
    end: float
    name: str


def device_spans(folder: Path) -> list[Span]:
    """What the device did in a trace, in order of time: kernels and copies of a GPU; on a CPU, programs' operations."""
    found: list[Span] = []
    for plane, line, spans in _lines(folder):
        if plane.startswith("/device:GPU") and line.startswith("Stream"):
            found += spans
    if not found:
        operations = [spans for plane, _, spans in _lines(folder, with_stat="hlo_op") if plane == "/host:CPU"]
        found = [span for spans in operations for span in innermost(spans)]
    return sorted(found)


def host_calls(folder: Path) -> list[Span]:
    """The host's calls of CUDA's functions in a trace."""
    return [
        span
        for plane, _, spans in _lines(folder)
        if plane.startswith("/host:")
        for span in spans
        if HOST_CALL.fullmatch(span.name)
    ]


def _lines(folder: Path, with_stat: str | None = None) -> Iterator[tuple[str, str, list[Span]]]:
    """Yield plane, line and events of each line of a trace; `with_stat`: only events that have this property."""
    for path in sorted(folder.glob("**/*.xplane.pb")):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                events = (each for each in line.events if with_stat is None or with_stat in dict(each.stats))
                spans = [Span(each.start_ns, each.start_ns + each.duration_ns, each.name) for each in events]
                yield plane.name or "", line.name or "", spans


def innermost(spans: Iterable[Span]) -> Iterator[Span]:
    """Those events of one thread that contain no other: a loop's event contains those of its body."""
    ordered = sorted(spans, key=lambda span: (span.begin, -span.end))
    for span, after in itertools.zip_longest(ordered, ordered[1:]):
        if after is None or after.begin >= span.end or after.end > span.end:
            yield span


def where_time_goes(spans: list[Span], calls: list[Span], steps: int, traced_s: float) -> dict[str, object]:
    """The figures of a trace of `steps` steps that took `traced_s` seconds by the host's clock; see the module."""
    if not spans:
        raise ValueError("the trace has no events of a device; jax's profiler may lack the rights that CUPTI needs")
    each_ms = lambda nanoseconds: round(nanoseconds / 1e6 / steps, 4)  # noqa: E731
    gaps, busy_until = [], spans[0].begin
    for span in spans:
        gaps += [span.begin - busy_until] if span.begin > busy_until else []
        busy_until = max(busy_until, span.end)
    whole = busy_until - spans[0].begin
    return {
        "traced_ms": round(1e3 * traced_s / steps, 4),
        "kernel_ms": each_ms(sum(span.end - span.begin for span in spans)),
        "busy_ms": each_ms(whole - sum(gaps)),
        "gap_ms": each_ms(sum(gaps)),
        "long_gap_ms": each_ms(sum(gap for gap in gaps if gap > 1e3 * LONG_US)),
        "long_gaps": round(sum(gap > 1e3 * LONG_US for gap in gaps) / steps, 2),
        "outside_ms": round(1e3 * traced_s / steps - each_ms(whole), 4),
        "kernels": round(len(spans) / steps, 1),
        "median_kernel_us": round(statistics.median(span.end - span.begin for span in spans) / 1e3, 2),
        "median_gap_us": round(statistics.median(gaps) / 1e3, 2) if gaps else 0.0,
        "largest": _by_name(spans, steps),
        "host_calls": _by_name(calls, steps),
    }


def _by_name(spans: Iterable[Span], steps: int) -> list[tuple[str, float, float]]:
    """Names, times a step and milliseconds a step of the events that take longest in sum."""
    took: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for span in spans:
        took[span.name] += round(span.end - span.begin)
        times[span.name] += 1
    return [(name, times[name] / steps, round(ns / 1e6 / steps, 4)) for name, ns in took.most_common(SHOWN)]


@dataclasses.dataclass
class Timed:
    """A decode program that times each of its calls alone, and traces one."""

    program: DecodeProgram
    folder: Path
    calls: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    """Steps and seconds of each call with steps."""
    traced: tuple[int, float] | None = None

    def __call__(self, *given: object) -> object:
        """Run the program and wait for it; the third call with steps is traced."""
        jax.block_until_ready(given)
        tracing = len(self.calls) == 2 and self.traced is None
        if tracing:
            start_trace(self.folder)
        begun = time.perf_counter()
        made = jax.block_until_ready(self.program(*given))  # pyright: ignore[reportArgumentType]  # passed on
        took = int(made[3]), time.perf_counter() - begun
        if tracing:
            jax.profiler.stop_trace()
            self.traced = took
        elif took[0]:
            self.calls.append(took)
        return made

    def _cache_size(self) -> int:
        return self.program._cache_size()


def unroll_steps(loop: Callable[..., Carry], first: int, last: int, body: Callable[..., Carry], carry: Carry) -> Carry:
    """Like `jax.lax.fori_loop`, here `loop`, but with the steps of a decode call one after another in the program."""
    if not (isinstance(carry, tuple) and any(isinstance(part, Where) for part in carry)):
        return loop(first, last, body, carry)
    for index in range(first, last):
        carry = body(index, carry)
    return carry


def decode(
    model: str, looks: int | None, settings: dict[str, int], *, unrolled: bool, tiny: bool, folder: Path
) -> dict[str, object]:
    """Time decode steps of all slots, within a rollout and each call alone, and trace a call."""
    if looks is not None:
        podium.rollout.programs.steps_at_once = lambda steps, shards: looks
    if unrolled:
        jax.lax.fori_loop = functools.partial(unroll_steps, jax.lax.fori_loop)
    mesh, slots = make_mesh("auto"), TINY_SLOTS if tiny else SLOTS
    config = rollout_config("demo" if tiny else model, slots, "auto", 32 if tiny else 128, slots, shards=mesh.size)
    rollout = config.rollout.model_copy(update={"reproducible": True, **settings})  # one prefill and one decode program
    spec = run_spec(config.model_copy(update={"rollout": rollout}), _tiny() if tiny else find_architecture(model), mesh)
    engine = make_engine(spec, mesh)
    group = spec.group_size
    lengths = SequenceLengths(
        prompts=np.full(slots // group, PROMPT), completions=np.full((slots // group, group), rollout.max_new_tokens)
    )
    found = measure(spec, engine, lengths)
    device = device_of(engine)
    timed = Timed(device.programs.decode, folder)
    device.programs = device.programs._replace(decode=timed)
    while timed.traced is None:
        engine.generate(full_requests(rollout, lengths, spec.decoder.vocab))
    steps, seconds = timed.traced
    return {
        "floor_ms": round(found.full["floor_ms"], 4),
        "rollout_ms": round(found.rollout["ms_per_step"], 4),
        "call_ms": round(min(1e3 * took / steps for steps, took in timed.calls), 4),
        **where_time_goes(device_spans(folder), host_calls(folder), steps, seconds),
    }


def update_of(config: str, settings: list[str], *, tiny: bool, folder: Path) -> dict[str, object]:
    """Time an update of a config, and trace another."""
    small = ["prompts_per_step=2", "group_size=2", "rollout.max_new_tokens=8", "rollout.slots=4"] if tiny else []
    loaded = load_settings([ROOT / "configs" / f"{config}.yaml"], ["mesh=auto", *small, *settings], {}).config
    mesh = make_mesh(loaded.mesh)
    spec = run_spec(loaded, _tiny() if tiny else find_decoder(loaded), mesh)
    lengths = run_lengths("fixed:8" if tiny else "gsm8k", spec)
    found = update.measure(spec, mesh, lengths, 1 if tiny else REPEATS, trace=folder)
    kept = ("wall_s", "mfu", "micro_batches", "real_tokens", "padding_tokens")
    own = where_time_goes(device_spans(folder), host_calls(folder), 1, float(str(found["traced_s"])))
    return {"rows": spec.batch.rows, "row_tokens": spec.batch.row_tokens, **{name: found[name] for name in kept}, **own}


def _tiny() -> DecoderConfig:
    return dataclasses.replace(with_layers(smollm2(), 1), vocab=512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", help="decode:MODEL or update:CONFIG")
    parser.add_argument("--looks", type=int, help="decode steps between two looks at whether a slot is live")
    parser.add_argument("--unrolled", action="store_true", help="the steps between two looks without a loop")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting; of decode: rollout's"
    )
    parser.add_argument("--tiny", action="store_true", help="one small layer")
    args = parser.parse_args()
    prepare_platform()
    kind, _, name = args.work.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        if kind == "decode":
            settings = {key: int(value) for key, value in (each.split("=") for each in args.set)}
            found = decode(name, args.looks, settings, unrolled=args.unrolled, tiny=args.tiny, folder=Path(folder))
        else:
            found = update_of(name, args.set, tiny=args.tiny, folder=Path(folder))
    print(json.dumps({**found, "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
