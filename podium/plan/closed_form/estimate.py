"""The closed form: memory, operations and traffic per device of every phase, as sums over what the config says. No jax.

It gives the first answer about a run, which must come without jax, orders the candidates of searches, of which
hundreds are estimated, and counts each call of a step. It has no constant that was fitted to a compiler: it counts the
arrays, products and transfers of the programs as they are written in `podium.train.step` and `podium.rollout.programs`,
each array once where it is made and once where it is read. What compilers keep and move beyond that, traced programs
(`podium.plan.traced`) and compiled ones show. A multiply-add counts as two operations. Attention counts all blocks of a
row, as if the row were one sequence.

Here B rows and S slots are those of one device, and `a` is the bytes per element of an activation.
"""

import dataclasses

import podium.plan.closed_form.least_bytes as floor
from podium.accelerators import GIB, Accelerator
from podium.models.architecture import rollout_decoder
from podium.models.blocks.experts import SPARE, Experts
from podium.models.blocks.spec import is_matrix
from podium.models.params import own_name, param_specs
from podium.plan.closed_form.batch_arrays import (
    batch_bytes,
    chunk_logits,
    copied_bytes,
    forward_numbers,
    layer_numbers,
    moved_bytes,
    score_bytes,
    total_bytes,
    update_peak,
    working_weights,
)
from podium.plan.closed_form.operations import forward_flops, logits_flops, rule_flops, update_flops
from podium.plan.closed_form.resident_memory import Parts, frozen_bytes, residents
from podium.plan.closed_form.sent_bytes import sp_ici, tp_ici
from podium.plan.request.phase_sizes import (
    ENDS,
    F32,
    RunSizes,
    cast_bytes,
    ends_count,
    fused_chunks,
    head_number,
    offloaded_bytes,
    reduced_number,
)
from podium.run.run_spec import SCORE, Role

SAMPLER_LOGITS = 2
"""The rollout's logits and their scaled copy."""
MARGIN = 1.5  # above this multiple of the device's memory, the closed form alone refuses a run
MOVED = {"forward": 2, "update": 6}
"""How often an array of a layer passes through main memory: written and read; in an update also read once more, with
its gradient written, and read by two products."""
LOGITS_MOVED = {"forward": 2, "update": 5}
"""How often a chunk's float32 logits pass through main memory: written and read; in an update their gradient is also
written, and read by two products."""
AGAIN = 2
"""How often an array of a layer passes through main memory in addition, if the backward pass computes it again."""
ADDED = 3
"""How often gradients pass through main memory to be added to the sum over micro-batches: both read, one written."""
RECOMPUTES = ("layer", "offload")
"""The values of `remat` with which whole layers are recomputed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseEstimate:
    """Resources that one device needs for a phase."""

    name: str
    parts: Parts  # bytes alive at the peak, by kind of array
    flops: int = 0
    hbm_bytes: int
    ici_bytes: int = 0  # bytes that a device sends to others
    hidden_bytes: int = 0
    """The bytes of `ici_bytes` that are sent while the device computes, if that takes as long."""
    least_bytes: int
    """The bytes of `hbm_bytes` that no compiler can avoid (`podium.plan.closed_form.least_bytes`)."""
    once_bytes: int = 0
    """Like `least_bytes`, once per call, before or after the iterations of its loop."""
    passes: int = 0
    """The bytes of `hbm_bytes` that instructions without products move, whose time adds to that of products."""
    copies: tuple[tuple[float, int, float], ...] = ()
    """Copies between device and host: how often, bytes of each, and the share of all work that overlaps with it."""
    kernels: int = 0
    """Kernels that take at least as long as a launch; counted where launches bound the phase."""

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.parts.values())


def estimate(run: RunSizes) -> list[PhaseEstimate]:
    """Estimate every phase of a step, in order of execution; includes `score` only if the recipe needs it.

    The work is that of one call: a prefill of the longest chunks, a copy for every slot, one decode step with all slots
    at their longest, and one micro-batch of score and update.
    """
    longest = max(run.buckets)
    copies = -(-run.rollout.slots // run.rollout_shards)
    phases = [sync_phase(run), prefill_phase(run, longest), copy_phase(run, copies), decode_phase(run)]
    phases += [role_phase(run, role) for role in run.spec.rollout.grading_models]
    if run.spec.recipe.scorers:
        phases.append(score_phase(run))
    for role in run.spec.scoring_models:
        phases += [] if role.phase == SCORE else [role_phase(run, role)]
        phases += [] if role.learning is None else [learning_phase(run, role)]
    return [*phases, update_phase(run), checkpoint_phase(run)]


def far_too_large(run: RunSizes) -> str | None:
    """Why a run is refused without trying: a phase needs over 1.5 times the memory. None if no phase does."""
    accelerator, worst = run.accelerator, max(estimate(run), key=lambda phase: phase.total)
    if worst.total <= MARGIN * accelerator.hbm_bytes:
        return None
    largest = sorted(worst.parts.items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    return (
        f"{worst.name} needs about {worst.total / GIB:.1f} GiB on each device and {accelerator.name} has"
        f" {accelerator.hbm_bytes / GIB:.1f}; the largest parts, in GiB: {parts}. {offer(accelerator)}; --force trains"
        " anyway"
    )


def offer(accelerator: Accelerator) -> str:
    """The command that finds settings for a run that does not fit."""
    return f"`podium plan CONFIG --on {accelerator.name} --fit` finds the fastest settings that fit"


# Phases of the rollout


def sync_phase(run: RunSizes) -> PhaseEstimate:
    """Make the rollout's weights from the trainer's: gather all of them, then copy them to their place."""
    least = floor.sync_bytes(run)
    if run.decoder.lora is not None and not run.decoder.lora.merged:
        moved = 2 * F32 * run.own_count
        parts = residents(run, "sync")
        return PhaseEstimate(name="sync", parts=parts, hbm_bytes=moved, least_bytes=least)
    held, whole = cast_bytes(run) + frozen_bytes(run), run.rollout_weight_bytes
    # Stacked weights are gathered in place; embedding and head are gathered into separate buffers.
    beside = ends_count(run.decoder, run.rollout_parts) * run.rollout_activation
    return PhaseEstimate(
        name="sync",
        parts=residents(run, "sync") | {"gathered_weights": beside if whole > held else 0},
        hbm_bytes=F32 * (run.own_count + frozen_bytes(run) // run.rollout_activation) + 2 * whole,
        ici_bytes=max(whole - held, whole - whole // run.shards if run.layout.group > 1 else 0),
        least_bytes=least,
    )


def prefill_phase(run: RunSizes, bucket: int) -> PhaseEstimate:
    """One prefill call: `prefill_rows` prompt chunks of `bucket` tokens each."""
    rows, heads, a = -(-run.rollout.prefill_rows // run.rollout_shards), run.rollout_heads, run.rollout_activation
    tokens, cached = rows * bucket, run.in_blocks(bucket)
    scored = tokens if run.layout.name == "legacy" else 0
    logits = floor.logits_bytes(run, scored)
    matmul = (
        2 * tokens * run.decoder.total(lambda work: work.active) + 2 * scored * run.decoder.vocab * run.decoder.width
    )
    pairs = 2 * tokens * run.cached_pairs(cached, bucket)
    passes = MOVED["forward"] * tokens * a * layer_numbers(run, heads) + 2 * logits
    return PhaseEstimate(
        name="prefill",
        parts=residents(run, "rollout")
        | {"logits": logits, "gathered_weights": run.gathered_in_rollout}
        | {"attention_scores": _block_scores(run, tokens, cached), "layer_activations": _prefill_layer(run, tokens)},
        flops=(matmul + pairs + rule_flops(run, tokens)) // heads,
        hbm_bytes=run.rollout_weight_bytes + run.kv_bytes(tokens) + passes,
        ici_bytes=run.rollout_ici(tokens),
        least_bytes=floor.prefill_bytes(run, tokens, scored),
        passes=passes,
    )


def decode_phase(run: RunSizes, size: int = 0, context: float = 0.0) -> PhaseEstimate:
    """One decode step of `size` slots (0: all); attention reads up to `context` tokens of each slot.

    With `context` 0, it reads as many tokens as the longest possible sequence has.
    """
    slots, heads = -(-(size or run.rollout.slots) // run.rollout_shards), run.rollout_heads
    read = run.in_blocks(context or run.rollout.longest)
    logits, least = floor.logits_bytes(run, slots), floor.decode_bytes(run, slots, read)
    multiplied = run.decoder.multiplied(slots * run.layout.group // heads)
    return PhaseEstimate(
        name="decode",
        parts=residents(run, "rollout")
        | {
            "attention_scores": _block_scores(run, slots, read),
            "logits": SAMPLER_LOGITS * logits,
            "gathered_weights": run.gathered_in_rollout,
        },
        flops=(2 * slots * (multiplied + run.cached_pairs(read)) + rule_flops(run, slots)) // heads,
        hbm_bytes=least + (2 * SAMPLER_LOGITS - 1) * logits,
        ici_bytes=run.rollout_ici(slots),
        least_bytes=least,
        once_bytes=floor.first_bytes(run, slots),
        kernels=_decode_kernels(run),
    )


def first_flops(run: RunSizes, size: int) -> int:
    """Operations of the head that draw the first tokens of `size` slots in a decode call, before its steps."""
    slots = -(-size // run.rollout_shards)
    return 2 * slots * run.decoder.vocab * run.decoder.width // run.rollout_heads


def copy_phase(run: RunSizes, pages: float) -> PhaseEstimate:
    """One call in which each device copies `pages` pages, each with the states of a sequence if there are any."""
    moved = floor.copy_bytes(run, pages)
    return PhaseEstimate(name="copy", parts=residents(run, "rollout"), hbm_bytes=moved, least_bytes=moved)


def _block_scores(run: RunSizes, tokens: int, cached: int) -> int:
    """Bytes of float32 scores of `tokens` queries with a block of the cache, and of the block's keys and values."""
    scores = F32 * tokens * run.decoder.heads * min(run.block, cached) // run.rollout_heads
    return scores + run.kv_bytes(tokens * run.block) // run.decoder.layers


def _prefill_layer(run: RunSizes, tokens: int) -> int:
    """Bytes at the peak of a layer for `tokens` tokens of a prefill.

    If experts are split over devices, each multiplies the rows for its own in windows larger than an even share.
    """
    parts, heads, width = run.rollout_parts.get("experts", 1), run.rollout_heads, run.decoder.width
    kinds = [place.block.feed_forward for place in run.decoder.places]
    experts = [kind for kind in kinds if isinstance(kind, Experts)]
    if parts == 1 or not experts:
        return tokens * run.rollout_activation * forward_numbers(run, heads)
    gathered = tokens * run.layout.group // heads
    row = max(min(1.0, SPARE / parts) * kind.top * (width + 2 * kind.width) for kind in experts)
    # The layer's input with and without norm, the sum of the windows, and that of one.
    return int(run.rollout_activation * gathered * (4 * width + row))


def _decode_kernels(run: RunSizes) -> int:
    """Number of kernels that a GPU launches in a decode step: one for each product, and one between every two products.

    0 on other devices, on which a step is launched as a whole.
    """
    if run.platform != "gpu":
        return 0
    joined = run.decoder.lora is None or not run.decoder.lora.shared
    decoder = dataclasses.replace(rollout_decoder(run.decoder), joined=joined)
    specs = param_specs(decoder).items()
    products = sum(spec.shape[0] for name, spec in specs if is_matrix(spec) and own_name(name) not in ENDS)
    attention = 2 * sum(count for count, _ in decoder.attention_layers())
    return 2 * (products + attention)


# Phases that compute a batch


def score_phase(run: RunSizes) -> PhaseEstimate:
    """Log-probabilities of a batch under frozen weights: a forward pass."""
    return _scoring("score", run, residents(run, "update") | batch_bytes(run))


def role_phase(run: RunSizes, role: Role) -> PhaseEstimate:
    """One call of the program with which a model other than the policy scores a micro-batch.

    It scores the policy's batch, or a separate batch of its own, or a batch of whole conversations during the rollout.
    """
    own = run.of(role)
    batch, beside = batch_bytes(run), residents(run, "update")
    if role.conversations is not None:
        batch, beside = batch_bytes(own), residents(run, "rollout")
    elif role.longer_prompts is not None:
        batch = {"batch": batch["batch"] + batch_bytes(own)["batch"]}
    return _scoring(role.phase.partition(":")[0], own, beside | batch, logits=not role.compared)


def learning_phase(run: RunSizes, role: Role, micro_batches: float = 1) -> PhaseEstimate:
    """Like `update_phase` for a model other than the policy, whose weights and state stay in memory."""
    own = run.of(role)
    parts = residents(run, "update") | batch_bytes(run) | update_peak(own)
    return dataclasses.replace(update_phase(own, micro_batches), name=role.name, parts=parts)


def _scoring(name: str, run: RunSizes, beside: Parts, *, logits: bool = True) -> PhaseEstimate:
    """A forward pass of a batch through the decoder of `run`; `beside` is what else is on a device.

    Without `logits`, it ends with hidden states, from which the update computes logits.
    """
    a, tokens, groups = run.activation, run.tokens, run.update.row_groups
    layers, head = run.gathered_counts
    of_head = LOGITS_MOVED["forward"] * F32 * tokens * run.decoder.outputs // run.tp if logits else 0
    passes = moved_bytes(run, MOVED["forward"]) + (0 if run.update.head == "fused" else of_head)
    layer = {"layer_activations": tokens // groups * a * forward_numbers(run, run.tp)} | score_bytes(run)
    if groups > 1:  # the inputs and outputs of all groups of a layer
        layer["layer_inputs"] = 2 * tokens * run.decoder.width * a
    weights = 2 * sum(run.gathered_counts) * a + run.own_count * (F32 + a)
    return PhaseEstimate(
        name=name,
        parts=beside
        | {"working_weights": working_weights(run), "gathered_weights": copied_bytes(run, head, head_number(run))}
        | max(chunk_logits(run), layer, key=total_bytes),
        flops=forward_flops(run) - (0 if logits else logits_flops(run)),
        hbm_bytes=weights + passes,
        ici_bytes=(layers + head) * a * (run.shards - 1) // run.shards + 2 * tp_ici(run, tokens) + sp_ici(run),
        least_bytes=floor.forward_bytes(run),
        passes=passes,
    )


def update_phase(run: RunSizes, micro_batches: float = 1) -> PhaseEstimate:
    """One optimizer step: accumulate the micro-batches' gradients, then apply them. The work is for one micro-batch."""
    a, tokens, remat = run.activation, run.tokens, run.update.remat
    layers, head = run.gathered_counts
    own, sends = run.own_count, (run.shards - 1) / run.shards
    # Weights are gathered in the compute format; gradients are reduced in theirs.
    gathers = (1 if remat == "none" else 2) * layers * a + 2 * head * head_number(run)
    if run.decoder.lora is None:  # the adapters' gradients are negligible
        gathers += (layers + head) * reduced_number(run)
    gathered = int(gathers * sends)
    replicas = run.mesh["dp"]
    reduced = 2 * own * F32 * (replicas - 1) // replicas
    several = run.spec.batch.max_micro_batches > 1
    adding = ADDED * F32 * own if several else 0
    passes = moved_bytes(run, MOVED["update"] + AGAIN * (remat in RECOMPUTES)) + _update_logits_moved(run) + adding
    least, once = floor.micro_batch_bytes(run), floor.optimizer_step_bytes(run)
    return PhaseEstimate(
        name="update",
        parts=residents(run, "update") | batch_bytes(run) | update_peak(run),
        flops=update_flops(run),
        # Of gradients `least` has two movements: one is that by the product that makes them, one is in `adding`.
        hbm_bytes=int(least + 2 * layers * a + passes - (F32 * own if several else 0) + once / micro_batches),
        ici_bytes=gathered
        + reduced
        + (6 if remat in RECOMPUTES else 4) * tp_ici(run, tokens)
        + (2 if remat == "none" else 3) * sp_ici(run),
        hidden_bytes=gathered if run.platform == "tpu" else 0,  # a GPU's program waits for most of them
        least_bytes=least,
        once_bytes=once,
        passes=int(passes + once / micro_batches),
        copies=host_copies(run, micro_batches),
    )


def _update_logits_moved(run: RunSizes) -> int:
    """Bytes of a micro-batch's logits that an update moves; of a fused head, their gradient, and for each chunk the
    head and its gradient, read and written.
    """
    if run.update.head != "fused":
        return LOGITS_MOVED["update"] * F32 * run.tokens * run.decoder.outputs // run.tp
    chunks, tokens = fused_chunks(run)
    number = head_number(run)
    return chunks * run.decoder.vocab * (3 * tokens * number + 2 * (F32 + number) * run.decoder.width)


def checkpoint_phase(run: RunSizes) -> PhaseEstimate:
    """Copying the state to the host; allocates nothing on the device."""
    parts = residents(run, "sync")
    roles = [role.kind for role in run.spec.scoring_models if role.weights in ("trained", "moving")]
    saved = {"parameters", "optimizer", *(f"{kind}_{what}" for kind in roles for what in ("weights", "optimizer"))}
    moved = sum(size for name, size in parts.items() if name in saved)
    return PhaseEstimate(name="checkpoint", parts=parts, hbm_bytes=moved, least_bytes=moved)


def host_copies(run: RunSizes, micro_batches: float) -> tuple[tuple[float, int, float], ...]:
    """Copies to and from the host per micro-batch: the layers' inputs, and its share of the optimizer's moments."""
    moments = (1 / micro_batches, 2 * offloaded_bytes(run), 0.0)
    if run.update.remat != "offload" or run.platform == "cpu":
        return (moments,)
    layers, one = run.decoder.layers, run.tokens * run.decoder.width * run.activation
    forward = forward_flops(run) / update_flops(run)
    return (layers, one, forward / layers), (layers, one, (1 - forward) / layers), moments
