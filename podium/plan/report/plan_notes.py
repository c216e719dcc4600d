"""The notes of a plan: sentences about what its figures do not show."""

from collections.abc import Iterator, Sequence

from podium.accelerators import ALLOCATOR_RESERVE, GIB, GPUS, POOL_VARIABLE, Accelerator, pool_share
from podium.config.attention_blocks import LANES, slower_decode
from podium.config.schema import TaskConfig
from podium.config.sizes import cache_pages
from podium.plan.calibration import load_chip
from podium.plan.closed_form.over_floor import spread
from podium.plan.report.formatting import LITTLE
from podium.plan.request.phase_sizes import F32, RunSizes, offloaded_bytes, optimizer_bytes, reduced_number
from podium.plan.request.planned_rows import packed_step
from podium.plan.request.workload import Replies, SequenceLengths, Workload
from podium.plan.result import Phase, judge, margin
from podium.tasks.conversations.environment_forms import conversing

LEAST_AGAIN = 0.01  # share of prefilled tokens that are prefilled again from which a plan has a note
MUCH = 2.0  # token places for each needed token above which a plan says how to have fewer


def explain(
    run: RunSizes, phases: Sequence[Phase], workload: Workload, replies: Replies | None = None
) -> tuple[str, ...]:
    """The notes of a plan, most important first; `replies` are the environment's replies in conversations."""
    found = [*_verdict(phases, run.accelerator), *spread(phases), *_decode(phases, workload)]
    found += _conversations(run, workload, replies)
    host = (F32 * run.own_count + optimizer_bytes(run)) * run.accelerator.devices_per_host
    checkpoint = f"a checkpoint copies {host / GIB:.1f} GiB to each host's memory"
    return (*found, *_padding(run), *_rollout(run, workload), *_reduction(run), *_offload(run), checkpoint)


def _verdict(phases: Sequence[Phase], accelerator: Accelerator) -> Iterator[str]:
    compiled = any(phase.compiled for phase in phases)
    open_phases = [phase for phase in phases if phase.low_bytes <= accelerator.hbm_bytes <= phase.high_bytes]
    for phase in open_phases:
        yield (
            f"compile to be sure (--compile): {phase.name} may need {phase.low_bytes / GIB:.1f} to"
            f" {phase.high_bytes / GIB:.1f} GiB, as far as traces of its kind were off"
        )
    plain = (phase.bytes for phase in phases if not phase.traced)
    if not open_phases and judge(plain, accelerator.hbm_bytes, compiled=compiled) == "too_close":
        way_out = "" if compiled else ", as far as the closed form errs; --compile asks the compiler"
        yield f"within {margin(compiled):.0%} of the memory limit: it may or may not fit on the device{way_out}"
    if accelerator.chip_devices > 1:
        yield (
            f"{accelerator.name} has {accelerator.chips} chips of {accelerator.chip_devices} devices each: memory is"
            " given per device, rates and prices per chip"
        )
    if not accelerator.compiled:
        yield (
            f"planned by the figures of {accelerator.generation} alone: Podium cannot compile for it where there is"
            " none, and has not run on one"
        )
    if accelerator.platform == "gpu":
        yield (
            f"usable is {pool_share():.0%} of {GPUS[accelerator.generation].memory / GIB:.1f} GiB, what jax takes for"
            f" arrays ({POOL_VARIABLE} sets another share), less {ALLOCATOR_RESERVE:.0%} for its allocator; CUDA's"
            " context is outside. Only an H100 was measured, and briefly: docs/planner.md"
        )


def shapes_note(run: RunSizes, drawn: SequenceLengths) -> Iterator[str]:
    """What the shapes of micro-batches save that are chosen from a step's lengths; and advice if padding is left."""
    batch, recipe = run.spec.batch, run.spec.recipe
    found = packed_step(drawn, batch, minibatches=recipe.minibatches, attention=run.update.attention)
    own, *others = (f"{each.shape.rows} x {each.shape.row_tokens}" for each in found.shapes)
    if others:
        yield (
            f"micro-batches of {', '.join(others)} tokens take {found.places / found.needed:.2f} token places for each"
            f" token that an update needs, the config's own of {own} alone {found.own_places / found.needed:.2f}; the"
            " lengths of a run's first step choose them"
        )
    if found.places > MUCH * found.needed:
        fewest = batch.rules.row_step
        yield (
            f"{1 - found.needed / found.places:.0%} of an update's token places are padding, as its micro-batches have"
            f" at least {fewest} rows over {batch.devices} devices: raise prompts_per_step, or take fewer devices"
        )


def _conversations(run: RunSizes, workload: Workload, replies: Replies | None) -> Iterator[str]:
    """The assumptions about conversations, and whether parked conversations keep their pages."""
    if replies is None:
        if any(map(_converses, run.spec.rollout.prompts.tasks)):
            yield (
                "tasks have conversations, and each prompt is planned with one answer: --lengths"
                " LENGTHS,turns:T,reply:R,seconds:S plans T answers, and replies of R tokens after S seconds"
            )
        return
    pages = cache_pages(run.rollout, run.rollout_shards)
    yield (
        f"conversations of {replies.turns} answers, replies of {replies.tokens} tokens after {replies.seconds:g} s;"
        f" with those that wait for replies they fill {workload.pages_peak / pages:.0%} of the cache"
    )
    again = workload.rebuilt_tokens / max(workload.prefill_tokens, 1)
    if again > LEAST_AGAIN:
        yield (
            f"{again:.0%} of the prefilled tokens are of conversations that lost their pages while they waited: raise"
            " rollout.cache_tokens"
        )


def _converses(task: TaskConfig) -> bool:
    try:
        return conversing(task) is not None
    except (ValueError, OSError):  # code that is on another machine
        return bool(task.tools or task.environment)


def _reduction(run: RunSizes) -> Iterator[str]:
    """What `train.reduce_dtype: bfloat16` would save, if gradients are reduced in float32."""
    more = reduced_number(run) - run.activation
    layers, head = run.gathered_counts
    if more > 0 and run.shards > 1 and run.decoder.lora is None:
        sent, held = more * (layers + head) * (run.shards - 1) // run.shards, more * head
        yield (
            f"shares of gradients are float32: train.reduce_dtype=bfloat16 would send {sent / 1e9:.1f} GB less from"
            f" every device per micro-batch, and hold {held / GIB:.1f} GiB less at the head"
        )


def _offload(run: RunSizes) -> Iterator[str]:
    accelerator, streams, moments = run.accelerator, run.update.remat == "offload", offloaded_bytes(run)
    if streams:
        inputs = run.decoder.layers * run.tokens * run.decoder.width * run.activation
        yield (
            f"during an update the layers' inputs take {inputs * accelerator.devices_per_host / GIB:.1f} GiB of each"
            " host's memory"
        )
    if moments:
        yield (
            f"between updates the optimizer's moments take {moments * accelerator.devices_per_host / GIB:.1f} GiB of"
            f" each host's memory; an update copies {moments / GIB:.2f} GiB to each device and back"
        )
    if moments and accelerator.platform == "gpu":
        yield "estimated, not compiled: jax cannot use the host memory of an absent GPU, which holds the moments"
    if (streams or moments) and accelerator.platform != "cpu":
        chip = load_chip(accelerator.generation)
        link, peak = chip.calibration["host"], chip.peaks.host_bandwidth / 1e9
        yield (
            f"copies between a device and its host are taken to reach {link.value:.2f} ({link.low:.2f}-{link.high:.2f})"
            f" of {peak:.0f} GB/s, and to be waited for where no work hides them: not measured yet"
        )


def _decode(phases: Sequence[Phase], workload: Workload) -> Iterator[str]:
    phase = next(phase for phase in phases if phase.name == "decode")
    steps = workload.decode_steps
    if not phase.compiled or not steps:
        return
    sent = sum(each.sent for each in phase.collectives) / steps
    waits = f"{sum(each.calls for each in phase.collectives) / steps:.2g} collectives"
    if sent < LITTLE:
        yield f"a decode step sends next to nothing between devices: {waits}"
        return
    kinds = ", ".join(
        f"{each.calls / steps:.0f} {each.kind} over {' and '.join(each.axes)}"
        for each in phase.collectives
        if each.sent / steps >= LITTLE
    )
    yield f"each decode step sends {sent / 1e9:.2f} GB from every device in {waits}: {kinds}"


def _padding(run: RunSizes) -> Iterator[str]:
    """How much memory the padding of the cache's rows takes."""
    numbers = run.decoder.total(lambda work: 2 * work.kv_heads * work.head_dim)
    stored = run.decoder.cached(run.platform)
    if stored > numbers:
        yield (
            f"the KV cache takes {stored / numbers:.2f} times the memory of its keys and values: heads of"
            f" {run.decoder.head_dim} are stored in rows of {LANES} numbers, which fill a TPU's tiles"
        )


def _rollout(run: RunSizes, workload: Workload) -> Iterator[str]:
    rollout, recipe = run.rollout, run.spec.recipe
    if recipe.demonstrations:
        return
    if slower := slower_decode(run.spec.machine.kernels, rollout.page_tokens, run.decoder.head_dim):
        yield slower
    if run.layout.why:
        yield f"rollout.layout {'auto ' if run.rollout.layout == 'auto' else ''}is {run.layout.why}"
    if (own := run.spec.rollout.demonstrations) is not None:
        yield f"{own.per_step} demonstrations a step are counted in its rows, each as long as a completion"
    busy, ran = workload.slots_busy(rollout.slots), workload.slot_utilisation
    yield f"slots are {busy:.0%} busy over {workload.decode_steps} decode steps, and {ran:.0%} of the programs' rows"
    if recipe.zero_variance == "refill":
        yield "groups of equal rewards are replaced: refills generate completions that are not counted here"
    elif recipe.zero_variance == "drop":
        yield "groups of equal rewards are dropped from the update, which then takes less time than shown here"
