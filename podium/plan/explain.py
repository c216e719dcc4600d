"""The notes of a plan: in sentences, what its numbers do not say."""

from collections.abc import Iterator, Sequence

from podium.accelerators import GIB, Accelerator
from podium.plan.formatting import LITTLE
from podium.plan.result import TOO_CLOSE, Phase, judge
from podium.plan.sizes import F32, RunSizes
from podium.plan.workload import Workload

MORE_OPERATIONS = 1.02  # times the closed form's operations, from which on a program does something again


def explain(run: RunSizes, accelerator: Accelerator, phases: Sequence[Phase], workload: Workload) -> tuple[str, ...]:
    """The notes of a plan, most important first."""
    found = [*_verdict(phases, accelerator), *_recomputation(phases), *_decode(phases, workload)]
    host = F32 * (run.own_count + run.optimizer_count) * accelerator.devices_per_host
    checkpoint = f"a checkpoint copies {host / GIB:.1f} GiB to each host's memory"
    return (*found, *_rollout(run, workload), checkpoint)


def _verdict(phases: Sequence[Phase], accelerator: Accelerator) -> Iterator[str]:
    compiled = any(phase.compiled for phase in phases)
    if judge((phase.bytes for phase in phases), accelerator.hbm_bytes) == "too_close":
        yield f"within {TOO_CLOSE:.0%} of the memory limit: it may or may not fit on the device"
    if not compiled and not accelerator.compiles:
        yield f"programs for {accelerator.name} cannot be compiled in advance: every figure is an estimate"


def _recomputation(phases: Sequence[Phase]) -> Iterator[str]:
    for phase in phases:
        if phase.compiled and phase.flops > MORE_OPERATIONS * phase.closed_form_flops > 0:
            more = phase.flops / phase.closed_form_flops - 1
            yield f"{phase.name} does {more:.0%} more operations than the code asks for: the compiler recomputes some"


def _decode(phases: Sequence[Phase], workload: Workload) -> Iterator[str]:
    phase = next(phase for phase in phases if phase.name == "decode")
    steps = workload.decode_steps
    if not phase.compiled or not steps:
        return
    sent = sum(each.sent for each in phase.collectives) / steps
    if sent < LITTLE:
        yield "a decode step sends next to nothing between devices"
        return
    kinds = ", ".join(
        f"{each.calls / steps:.0f} {each.kind} over {' and '.join(each.axes)}"
        for each in phase.collectives
        if each.sent / steps >= LITTLE
    )
    yield f"each decode step sends {sent / 1e9:.2f} GB from every device: {kinds}"


def _rollout(run: RunSizes, workload: Workload) -> Iterator[str]:
    rollout, recipe = run.config.rollout, run.recipe
    busy = workload.slot_utilisation(rollout.slots)
    yield f"slots are {busy:.0%} busy over {workload.decode_steps} decode steps"
    if recipe.zero_variance == "refill":
        yield "groups of equal rewards are replaced: refills generate completions that are not counted here"
    elif recipe.zero_variance == "drop":
        yield "groups of equal rewards are dropped from the update, which then takes less time than shown here"
