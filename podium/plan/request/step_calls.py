"""The number of calls of every program in a step, each with its closed form. No jax."""

import dataclasses
import math
import re
from collections.abc import Iterable

import podium.plan.closed_form.estimate as closed_form
from podium.config.sizes import steps_at_once
from podium.plan.closed_form.estimate import PhaseEstimate
from podium.plan.request.phase_sizes import OwnRows, RunSizes
from podium.plan.request.planned_rows import ShapeShare, packed_step
from podium.plan.request.workload import SequenceLengths, Workload, longer_prompts
from podium.run.run_spec import SCORE, RowShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The calls of one program in a step."""

    phase: str
    program: str  # as `podium.plan.compiled.phases` names it, and `shaped` for other shapes than the config's own
    calls: float
    rounds: float  # of its loop per call: groups of decode steps, micro-batches, or pages copied per device
    blocks: float = 1.0  # of the cache, read by attention
    closed_form: PhaseEstimate | None = None
    repeats: float = 0.0  # how often a step does the work of `closed_form`
    once_flops: int = 0  # operations per call before its rounds
    attended: float = 1.0  # share of the blocks that attention computes

    @property
    def closed_form_flops(self) -> float:
        """Operations in a step, by the closed form."""
        each = self.closed_form.flops if self.closed_form else 0
        return self.repeats * each + self.calls * self.once_flops


def step_calls(run: RunSizes, workload: Workload, micro_batches: float) -> list[Call]:
    """Every program of a run, with its calls in a step: those of the rollout, then those of the update.

    `micro_batches` are those of a step's batches, of all shapes of the run.
    """
    return [*rollout_calls(run, workload), *update_calls(run, micro_batches)]


def largest_calls(calls: Iterable[Call]) -> dict[str, Call]:
    """For each phase, the call that needs most memory by the closed form; `init` is left out, as it has no closed
    form.
    """
    found: dict[str, Call] = {}
    for call in calls:
        form, held = call.closed_form, found.get(call.phase)
        if form and (held is None or held.closed_form is None or form.total > held.closed_form.total):
            found[call.phase] = call
    return found


def rollout_calls(run: RunSizes, workload: Workload) -> list[Call]:
    """The programs that make a step's completions and score them for rewards.

    Includes the longest prefill chunk and the decode of all slots even if this step has none: they must fit in memory,
    for evaluation too.
    """
    prefills, copies = workload.prefill_calls, workload.copy_calls
    chunks = sorted({*prefills, max(run.buckets)})
    at_once = steps_at_once(run.rollout.refill_steps, run.rollout_shards)
    sizes = sorted({*workload.decodes, run.rollout.slots}, reverse=True)
    found = [
        Call(phase="init", program="init", calls=0, rounds=0),
        _call(run, "sync", closed_form.sync_phase(run), not run.spec.recipe.demonstrations),
    ]
    found += [
        _call(run, f"prefill:{T}", closed_form.prefill_phase(run, T), prefills.get(T, 0), tokens=T) for T in chunks
    ]
    pages = workload.copied_pages / copies / run.rollout_shards if copies else 0.0
    found.append(_call(run, "copy", closed_form.copy_phase(run, pages), copies, rounds=pages))
    for size in sizes:
        calls, steps, tokens = workload.decodes.get(size, (0, 0, 0.0))
        form = closed_form.decode_phase(run, size, tokens)
        rounds = steps / calls / at_once if calls else 0.0
        decode = _call(run, f"decode:{size}", form, calls, rounds=rounds, repeats=steps, tokens=tokens)
        found.append(dataclasses.replace(decode, once_flops=closed_form.first_flops(run, size)))
    for role in run.spec.rollout.grading_models:
        read = workload.completion_tokens + run.spec.rollout.training.completions * workload.prompt_tokens
        batch = run.spec.batch_of(role)
        calls = max(1, math.ceil(read / (batch.rows * batch.row_tokens)))  # rows are nearly full
        found.append(_call(run, role.phase, closed_form.role_phase(run, role), calls))
    return found


class _Rows:
    """The batches of a step whose micro-batches have one shape; a shape that no step takes still has programs."""

    def __init__(self, run: RunSizes, share: ShapeShare, micro_batches: float) -> None:
        self.run, self.attended = run.in_shape(share), share.attended
        self.shape = None if share.shape == run.spec.batch.shape else share.shape
        """None: the config's own."""
        self.batches = run.spec.recipe.minibatches * share.updates
        """Batches of optimizer steps, in a step."""
        self.rounds = micro_batches * share.micro_batches / self.batches if self.batches else 1.0
        """Micro-batches of each."""

    def call(self, program: str, form: PhaseEstimate, times: float = 1.0) -> Call:
        """The calls of a program that runs `times` times on each of these batches."""
        calls = self.batches * times
        name = shaped(program, self.shape)
        found = _call(self.run, name, form, calls, rounds=self.rounds, repeats=calls * self.rounds)
        return dataclasses.replace(found, attended=self.attended)


def update_calls(run: RunSizes, micro_batches: float) -> list[Call]:
    """The programs that score a step's batch and train on it, for every shape of the run."""
    recipe, own = run.spec.recipe, run.spec.batch.shape
    rows = [_Rows(run, share, micro_batches) for share in run.shapes or (ShapeShare(own),)]
    mismatched = 2 if recipe.data_form == "label" else 0  # KTO's KL: two models score other rows' completions
    scores = len(recipe.scorers) + mismatched
    made = [each.call(SCORE, closed_form.score_phase(each.run), scores) for each in rows] if scores else []
    for role in run.spec.scoring_models:
        if (alone := run.own_rows.get(role.name)) is not None:
            whole = ShapeShare(own, attended=alone.attended)
            found = _Rows(run, whole, micro_batches * alone.micro_batches)
            made.append(found.call(role.phase, closed_form.role_phase(run, role)))
        elif role.phase != SCORE:
            made += [each.call(role.phase, closed_form.role_phase(each.run, role)) for each in rows]
        if (learning := role.learning) is not None:
            made += [
                each.call(role.name, closed_form.learning_phase(each.run, role, each.rounds), learning.updates)
                for each in rows
            ]
    return made + [
        each.call("update", closed_form.update_phase(each.run, each.rounds), recipe.updates_per_batch) for each in rows
    ]


def shaped(program: str, shape: RowShape | None) -> str:
    """The name of a program for micro-batches of another shape than the config's own: `update:24x1280`."""
    return program if shape is None else f"{program}:{shape.rows}x{shape.row_tokens}"


def unshaped(name: str) -> tuple[str, RowShape | None]:
    """The program and the shape of a name that `shaped` has made."""
    found = re.fullmatch(r"(.+):(\d+)x(\d+)", name)
    return (name, None) if found is None else (found[1], RowShape(int(found[2]), int(found[3])))


def packed_run(run: RunSizes, drawn: SequenceLengths) -> tuple[RunSizes, float]:
    """The sizes with the shapes of a step's micro-batches, and the number of these, by packing its completions."""
    spec, attention, minibatches = run.spec, run.update.attention, run.spec.recipe.minibatches
    found = packed_step(drawn, spec.batch, minibatches=minibatches, attention=attention)
    own_rows: dict[str, OwnRows] = {}
    for role in spec.scoring_models:
        if role.longer_prompts is not None:
            batch = spec.batch_of(role)
            longer = longer_prompts(drawn, batch.row_tokens - spec.batch.row_tokens)
            own = packed_step(longer, batch, minibatches=minibatches, attention=attention, chooses=False)
            own_rows[role.name] = OwnRows(own.micro_batches / found.micro_batches, own.shapes[0].attended)
    attended = found.shapes[0].attended
    return dataclasses.replace(run, attended=attended, shapes=found.shapes, own_rows=own_rows), found.micro_batches


def _call(
    run: RunSizes,
    program: str,
    form: PhaseEstimate,
    calls: float,
    *,
    rounds: float = 0,
    repeats: float | None = None,
    tokens: float = 0,
) -> Call:
    """A call of a program; `tokens` is the longest cached context that attention reads."""
    return Call(
        phase=form.name,
        program=program,
        calls=calls,
        rounds=rounds,
        blocks=max(1, run.in_blocks(tokens) / run.block),
        closed_form=form,
        repeats=calls if repeats is None else repeats,
    )
