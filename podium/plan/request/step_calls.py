"""The number of calls of every program in a step, each with its closed form. No jax."""

import dataclasses
import math
from collections.abc import Iterable

import podium.plan.traced.estimate as closed_form
from podium.config.sizes import steps_at_once
from podium.plan.request.phase_sizes import OwnRows, RunSizes
from podium.plan.request.planned_rows import packed
from podium.plan.request.workload import SequenceLengths, Workload, longer_prompts
from podium.plan.traced.estimate import PhaseEstimate
from podium.run.run_spec import SCORE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The calls of one program in a step."""

    phase: str
    program: str  # as `podium.plan.compiled.phases` names it
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


def step_calls(run: RunSizes, workload: Workload, micro_batches: int) -> list[Call]:
    """Every program of a run, with its calls in a step: those of the rollout, then those of the update."""
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


def update_calls(run: RunSizes, micro_batches: int) -> list[Call]:
    """The programs that score a step's batch and train on it."""
    recipe = run.spec.recipe
    batches, own = recipe.minibatches, micro_batches / recipe.minibatches
    mismatched = 2 if recipe.data_form == "label" else 0  # KTO's KL: two models score other rows' completions
    scores = batches * (len(recipe.scorers) + mismatched)
    updates = batches * recipe.updates_per_batch
    made = [_call(run, SCORE, closed_form.score_phase(run), scores, rounds=own, repeats=scores * own)] if scores else []
    for role in run.spec.scoring_models:
        if role.phase != SCORE:
            rows = own * run.own_rows[role.name].micro_batches if role.name in run.own_rows else own
            form = closed_form.role_phase(run, role)
            made.append(_call(run, role.phase, form, batches, rounds=rows, repeats=batches * rows))
        if role.learning is not None:
            form, times = closed_form.learning_phase(run, role, own), batches * role.learning.updates
            made.append(_call(run, role.name, form, times, rounds=own, repeats=times * own))
    form = closed_form.update_phase(run, own)
    made.append(_call(run, "update", form, updates, rounds=own, repeats=updates * own))
    attended = {run.spec.roles[name].phase: rows.attended for name, rows in run.own_rows.items()}
    return [dataclasses.replace(each, attended=attended.get(each.program, run.attended)) for each in made]


def packed_run(run: RunSizes, drawn: SequenceLengths) -> tuple[RunSizes, int]:
    """The sizes, updated by packing a step's completions, and the number of the step's micro-batches."""
    spec, attention = run.spec, run.update.attention
    count, attended = packed(drawn, spec.batch, minibatches=spec.recipe.minibatches, attention=attention)
    own_rows: dict[str, OwnRows] = {}
    for role in spec.scoring_models:
        if role.longer_prompts is not None:
            batch = spec.batch_of(role)
            longer = longer_prompts(drawn, batch.row_tokens - spec.batch.row_tokens)
            own, seen = packed(longer, batch, minibatches=spec.recipe.minibatches, attention=attention)
            own_rows[role.name] = OwnRows(own / count, seen)
    return dataclasses.replace(run, attended=attended, own_rows=own_rows), count


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
