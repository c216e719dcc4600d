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
import math
from collections.abc import Mapping
from typing import NamedTuple

import podium.plan.closed_form.least_bytes as floor
from podium.accelerators import GIB, Accelerator
from podium.config.attention_blocks import attended_pairs
from podium.models.architecture import rollout_decoder
from podium.models.blocks.delta import CHUNK, DeltaNet
from podium.models.blocks.experts import SPARE, Experts
from podium.models.blocks.kind import Place
from podium.models.blocks.spec import is_matrix
from podium.models.params import (
    GATHERED_AXES,
    LORA_B,
    NF4_CODES,
    axis_parts,
    frozen_dtype,
    frozen_specs,
    own_name,
    param_specs,
    trained_specs,
)
from podium.plan.closed_form.resident_memory import Parts, frozen_bytes, residents
from podium.plan.request.phase_sizes import (
    ENDS,
    F32,
    RunSizes,
    cast_bytes,
    ends_count,
    fetched_bytes,
    fused_chunks,
    fused_padding,
    head_number,
    local_count,
    offloaded_bytes,
    reduced_number,
)
from podium.run.run_spec import SCORE, Role

BATCH_ARRAYS = (
    9  # arrays [K, B, T] of 4 bytes in podium.train.batches.batch.Batch, without old and reference log-probabilities
)
SAMPLER_LOGITS = 2
"""The rollout's logits and their scaled copy."""
# Products of queries with keys (or their gradients): forward, recomputed, and backward; kernels compute scores twice.
PRODUCTS: Mapping[str, int] = {"forward": 2, "again": 2, "reference": 4, "blocks": 5, "tpu_kernel": 7, "gpu_kernel": 7}
EXACT_PASSES = 6
"""Number of bfloat16 products that make up a float32 product at full precision, on a TPU."""
MARGIN = 1.5  # above this multiple of the device's memory, the closed form alone refuses a run
VMEM = 128 * 2**20
"""On-chip memory of a TPU core; scores over it are computed twice."""
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
COPIED_LAYERS = 2
"""Layers whose inputs are on the device if they are stored on the host: the one in use, and the one being copied."""
RECOMPUTES = ("layer", "offload")
"""The values of `remat` with which whole layers are recomputed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseEstimate:
    """Resources that one device needs for a phase."""

    name: str
    parts: Parts  # bytes alive at the peak, by kind of array
    flops: int
    hbm_bytes: int
    ici_bytes: int  # bytes that a device sends to others
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
        return PhaseEstimate(name="sync", parts=parts, flops=0, hbm_bytes=moved, ici_bytes=0, least_bytes=least)
    held, whole = cast_bytes(run) + frozen_bytes(run), run.rollout_weight_bytes
    # Stacked weights are gathered in place; embedding and head are gathered into separate buffers.
    beside = ends_count(run.decoder, run.rollout_parts) * run.rollout_activation
    return PhaseEstimate(
        name="sync",
        parts=residents(run, "sync") | {"gathered_weights": beside if whole > held else 0},
        flops=0,
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
    passes = MOVED["forward"] * tokens * a * _layer_numbers(run, heads) + 2 * logits
    return PhaseEstimate(
        name="prefill",
        parts=residents(run, "rollout")
        | {"logits": logits, "gathered_weights": run.gathered_in_rollout}
        | {"attention_scores": _block_scores(run, tokens, cached), "layer_activations": _prefill_layer(run, tokens)},
        flops=(matmul + pairs + _rule_flops(run, tokens)) // heads,
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
        flops=(2 * slots * (multiplied + run.cached_pairs(read)) + _rule_flops(run, slots)) // heads,
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
    return PhaseEstimate(
        name="copy", parts=residents(run, "rollout"), flops=0, hbm_bytes=moved, ici_bytes=0, least_bytes=moved
    )


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
        return tokens * run.rollout_activation * _forward_numbers(run, heads)
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
    return _scoring("score", run, residents(run, "update") | _batch(run))


def role_phase(run: RunSizes, role: Role) -> PhaseEstimate:
    """One call of the program with which a model other than the policy scores a micro-batch.

    It scores the policy's batch, or a separate batch of its own, or a batch of whole conversations during the rollout.
    """
    own = run.of(role)
    batch, beside = _batch(run), residents(run, "update")
    if role.conversations is not None:
        batch, beside = _batch(own), residents(run, "rollout")
    elif role.longer_prompts is not None:
        batch = {"batch": batch["batch"] + _batch(own)["batch"]}
    return _scoring(role.phase.partition(":")[0], own, beside | batch, logits=not role.compared)


def learning_phase(run: RunSizes, role: Role, micro_batches: float = 1) -> PhaseEstimate:
    """Like `update_phase` for a model other than the policy, whose weights and state stay in memory."""
    own = run.of(role)
    parts = residents(run, "update") | _batch(run) | _update_peak(own)
    return dataclasses.replace(update_phase(own, micro_batches), name=role.name, parts=parts)


def _scoring(name: str, run: RunSizes, beside: Parts, *, logits: bool = True) -> PhaseEstimate:
    """A forward pass of a batch through the decoder of `run`; `beside` is what else is on a device.

    Without `logits`, it ends with hidden states, from which the update computes logits.
    """
    a, tokens, groups = run.activation, run.tokens, run.update.row_groups
    layers, head = run.gathered_counts
    of_head = LOGITS_MOVED["forward"] * F32 * tokens * run.decoder.outputs // run.tp if logits else 0
    passes = _moved(run, MOVED["forward"]) + (0 if run.update.head == "fused" else of_head)
    layer = {"layer_activations": tokens // groups * a * _forward_numbers(run, run.tp)} | _scores(run)
    if groups > 1:  # the inputs and outputs of all groups of a layer
        layer["layer_inputs"] = 2 * tokens * run.decoder.width * a
    weights = 2 * sum(run.gathered_counts) * a + run.own_count * (F32 + a)
    return PhaseEstimate(
        name=name,
        parts=beside
        | {"working_weights": _working_weights(run), "gathered_weights": _copied(run, head, head_number(run))}
        | max(_chunk_logits(run), layer, key=_total),
        flops=_forward_flops(run) - (0 if logits else _logits_flops(run)),
        hbm_bytes=weights + passes,
        ici_bytes=(layers + head) * a * (run.shards - 1) // run.shards + 2 * _tp_ici(run, tokens) + _sp_ici(run),
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
    reduced = 2 * own * F32 * (run.dp - 1) // run.dp
    several = run.spec.batch.max_micro_batches > 1
    adding = ADDED * F32 * own if several else 0
    passes = _moved(run, MOVED["update"] + AGAIN * (remat in RECOMPUTES)) + _update_logits_moved(run) + adding
    least, once = floor.micro_batch_bytes(run), floor.optimizer_step_bytes(run)
    return PhaseEstimate(
        name="update",
        parts=residents(run, "update") | _batch(run) | _update_peak(run),
        flops=_update_flops(run),
        # Of gradients `least` has two movements: one is that by the product that makes them, one is in `adding`.
        hbm_bytes=int(least + 2 * layers * a + passes - (F32 * own if several else 0) + once / micro_batches),
        ici_bytes=gathered
        + reduced
        + (6 if remat in RECOMPUTES else 4) * _tp_ici(run, tokens)
        + (2 if remat == "none" else 3) * _sp_ici(run),
        hidden_bytes=gathered if run.platform == "tpu" else 0,  # a GPU's program waits for most of them
        least_bytes=least,
        once_bytes=once,
        passes=int(passes + once / micro_batches),
        copies=_host_copies(run, micro_batches),
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
    return PhaseEstimate(name="checkpoint", parts=parts, flops=0, hbm_bytes=moved, ici_bytes=0, least_bytes=moved)


# Arrays of a batch's programs


def _batch(run: RunSizes) -> Parts:
    """Bytes of the batch of an optimizer step."""
    scores = run.spec.recipe.loss_scores
    batch = run.spec.batch
    arrays = BATCH_ARRAYS + len(scores) + batch.demonstrations
    of_token = 4 * arrays + batch.choices * (1 if batch.choice_format == "uint8" else 2)
    if (compared := run.spec.compared) is not None:
        of_token += run.activation * compared.decoder.width - 4
    return {"batch": of_token * batch.max_micro_batches * run.tokens}


class _Layer(NamedTuple):
    """Elements per token of the arrays that a layer computes on a device."""

    mixer: int
    """Results of its products, and what goes into the last."""
    feed_forward: int
    """Likewise, with a token's rows for its experts."""
    beside: int
    """The sums after mixer and feed-forward, and the results of norms."""


def _layer(run: RunSizes, place: Place, split: int) -> _Layer:
    """Count the arrays of a place's layer on one of the `split` devices that share its heads and hidden elements."""
    width, kind = run.decoder.width, place.block.feed_forward
    mixer, work = place.block.mixer.work(width), kind.work(width)
    rows = 2 * kind.top * width if isinstance(kind, Experts) else 0
    return _Layer(
        (mixer.outputs + mixer.inner + _rule_numbers(run, place)) // split,
        rows + (work.outputs + work.inner) // split,
        (4 + 2 * place.block.norms_behind) * width,
    )


def _layer_numbers(run: RunSizes, split: int) -> int:
    """Elements per token of what all layers compute on a device."""
    return sum(len(place.layers) * sum(_layer(run, place, split)) for place in run.decoder.places)


def _forward_numbers(run: RunSizes, split: int) -> int:
    """Elements per token at the peak of a forward pass: in mixer or feed-forward, beside the layer's input."""
    layers = [_layer(run, place, split) for place in run.decoder.places]
    return 2 * run.decoder.width + max(max(each.mixer, each.feed_forward) for each in layers)


def _backward_numbers(run: RunSizes, split: int) -> int:
    """Elements per token at the peak of a backward pass: it begins with the feed-forward, whose gradients exist beside
    all that the layer computed.
    """
    layers = [_layer(run, place, split) for place in run.decoder.places]
    return run.decoder.width + max(sum(each) + each.feed_forward for each in layers)


def _rule_numbers(run: RunSizes, place: Place) -> int:
    """Elements of `a` bytes per token of a recurrence's float32 arrays; 0 where a place has attention.

    These are for each value head the products within a chunk, queries, keys, values, and the states of each chunk.
    """
    net = place.block.mixer
    if not isinstance(net, DeltaNet):
        return 0
    numbers = CHUNK + 2 * net.key_dim + net.value_dim + 2 * net.key_dim * net.value_dim // CHUNK
    return net.value_heads * numbers * F32 // run.activation


def _moved(run: RunSizes, times: int) -> int:
    """Bytes that a device moves if each array that its layers compute for a micro-batch is moved `times` times."""
    return times * run.tokens * run.activation * _layer_numbers(run, run.tp)


def _scores(run: RunSizes) -> Parts:
    """Bytes of a layer's float32 scores where attention holds those of whole rows."""
    if run.update.attention != "reference":
        return {}
    return {
        "attention_scores": F32 * run.tokens // run.update.row_groups * run.row_tokens * run.decoder.heads // run.tp
    }


def _update_peak(run: RunSizes) -> Parts:
    """Arrays at an update's peak: at the logits, in a layer's backward pass, or in the optimizer."""
    several = run.spec.batch.max_micro_batches > 1
    layers, ends = run.gathered_counts
    one_matrix = run.decoder.tied or run.decoder.scores != "none"
    head = ends if one_matrix else ends // 2  # embedding and head are one matrix, or two of one size
    always = {"working_weights": _working_weights(run), "gathered_weights": _copied(run, head, head_number(run))}
    # A single micro-batch needs no accumulated sum; embedding and head have no adapters.
    gradients = F32 * run.own_count if several else 0
    of_head = 0 if run.decoder.lora is not None else head * reduced_number(run)
    kept = _saved(run)
    logits = _chunk_logits(run)
    if run.spec.compared is not None:
        logits = {"logits": 2 * logits["logits"]}
    at_head = kept | {"gradients": gradients + of_head} | logits
    scores = {name: 2 * size for name, size in _scores(run).items()}  # with their gradient
    layer = run.tokens // run.update.row_groups * run.activation * _backward_numbers(run, run.tp)
    backward = {"layer_activations": layer} | scores
    in_layers = kept | backward | {"gradients": gradients + F32 * run.own_count}
    in_layers["gathered_weights"] = always["gathered_weights"] + 2 * _copied(run, layers // run.decoder.layers)
    at_optimizer = {"gradients": F32 * run.own_count, "gathered_weights": 0, "fetched_moments": fetched_bytes(run)}
    return max((always | each for each in (at_head, in_layers, at_optimizer)), key=_total)


def _saved(run: RunSizes) -> Parts:
    """What the forward pass of an update keeps on the device for the backward pass.

    With `remat: none` also the weights as they were gathered and the logits of all chunks, since gathers and products
    are not repeated.
    """
    remat, one = run.update.remat, run.tokens * run.decoder.width * run.activation
    inputs = {"layer_inputs": (COPIED_LAYERS if remat == "offload" else run.decoder.layers) * one}
    if remat == "none":
        # Softmax's gradient needs its float32 results, and the products' these in the compute format.
        scores = run.decoder.layers * run.update.row_groups * sum(_scores(run).values())
        scores += scores * run.activation // F32
        logits = F32 * run.tokens * run.decoder.outputs // run.tp if run.update.head != "fused" else 0
        saved = {"saved_activations": _moved(run, 1), "saved_scores": scores, "saved_weights": _saved_weights(run)}
        return saved | {"saved_logits": logits}
    if remat == "products":
        return inputs | {"saved_activations": run.tokens * run.activation * _product_numbers(run)}
    return inputs


def _saved_weights(run: RunSizes) -> int:
    """Bytes of the layers' weights as products read them: each layer's part of a stack is a copy of its own."""
    parts, frozen, found = axis_parts(GATHERED_AXES, run.mesh), frozen_specs(run.decoder), 0
    for name, spec in param_specs(run.decoder).items():
        if name not in ENDS:
            codes = name in frozen and frozen_dtype(name, run.decoder) == NF4_CODES
            found += run.activation * (2 if codes else 1) * local_count(spec, parts)
    return found


def _product_numbers(run: RunSizes) -> int:
    """Elements per token of the results of all layers' products with weights that a gradient needs.

    Those of experts are computed again, and those of feed-forwards are only added, unless a norm follows.
    """
    width, numbers = run.decoder.width, 0
    for place in run.decoder.places:
        block, results = place.block, 0
        for kind in (block.mixer, block.feed_forward):
            results += kind.work(width).outputs - (2 * kind.top * kind.width if isinstance(kind, Experts) else 0)
        numbers += len(place.layers) * ((1 + block.norms_behind) * width + results // run.tp)
    for name, spec in trained_specs(run.decoder).items():
        if name.endswith(LORA_B) and "expert" not in name:  # both products of an adapter
            rank, *outputs = spec.shape[spec.stacked :]
            split = 1 if spec.axes[-1] == "width" else run.tp
            numbers += math.prod(spec.shape[: spec.stacked]) * (rank + math.prod(outputs) // split)
    return numbers


def _chunk_logits(run: RunSizes) -> Parts:
    """Float32 logits of one chunk of an update's head. Fused: a chunk's gradient."""
    if run.update.head == "fused":
        return {"logits": fused_chunks(run)[1] * run.decoder.vocab * head_number(run)}
    columns = max(1, min(run.row_tokens // run.sp, run.update.head_chunk_tokens // run.rows))
    return {"logits": F32 * columns * run.rows * run.decoder.outputs // run.tp}


def _copied(run: RunSizes, count: int, number: int = 0) -> int:
    """Bytes of `count` parameters copied into the compute format; 0 if they are used in place, as stored."""
    number, stored = number or run.activation, F32 if run.decoder.lora is None else 2
    return 0 if run.shards == 1 and number == stored else count * number


def _working_weights(run: RunSizes) -> int:
    """Bytes of a device's parameters in the compute format; 0 if that is float32.

    Also 0 on a GPU, whose compiler converts them layer by layer inside the loop.
    """
    return run.activation * run.own_count if run.activation < F32 and run.platform != "gpu" else 0


def _host_copies(run: RunSizes, micro_batches: float) -> tuple[tuple[float, int, float], ...]:
    """Copies to and from the host per micro-batch: the layers' inputs, and its share of the optimizer's moments."""
    moments = (1 / micro_batches, 2 * offloaded_bytes(run), 0.0)
    if run.update.remat != "offload" or run.platform == "cpu":
        return (moments,)
    layers, one = run.decoder.layers, run.tokens * run.decoder.width * run.activation
    forward = _forward_flops(run) / _update_flops(run)
    return (layers, one, forward / layers), (layers, one, (1 - forward) / layers), moments


# Operations


def _attention_flops(run: RunSizes, rows: int, length: int, products: int, *, split: int) -> int:
    """Operations of `products` query-key products in all layers; a TPU recomputes reference scores that exceed VMEM."""
    decoder = run.decoder
    pairs = int(rows * attended_pairs(run.update.attention, length) * run.attended)
    if run.update.attention == "reference" and run.platform == "tpu" and products == PRODUCTS["forward"]:
        products += F32 * pairs * decoder.heads // split >= VMEM
    return products * pairs * decoder.total(lambda work: work.pair) // split


def _forward_flops(run: RunSizes) -> int:
    """One forward pass of a micro-batch, logits included."""
    attention = _attention_flops(run, run.rows, run.row_tokens, PRODUCTS["forward"], split=run.tp * run.sp)
    return (_matmul_flops(run) + _rule_flops(run, run.tokens)) // run.tp + attention + fused_padding(run)


def _rule_flops(run: RunSizes, tokens: int) -> int:
    """Operations of recurrences for `tokens` tokens, in products of the activations' format."""
    passes = 1 if run.platform == "cpu" else EXACT_PASSES
    return 2 * passes * tokens * run.decoder.total(lambda work: work.per_token)


def _matmul_flops(run: RunSizes) -> int:
    """Operations of the products with weights in a forward pass."""
    return 2 * run.tokens * run.decoder.active


def _logits_flops(run: RunSizes) -> int:
    """Operations of a micro-batch's logits."""
    return 2 * run.tokens * run.decoder.outputs * run.decoder.width // run.tp


def _update_flops(run: RunSizes) -> int:
    """Operations of forward, backward and recomputation; a recomputed layer skips its last product."""
    decoder = run.decoder
    tokens = run.tokens
    remat = run.update.remat
    last = sum(len(place.layers) * place.block.feed_forward.work(decoder.width).inner for place in decoder.places)
    whole = _matmul_flops(run) - 2 * tokens * decoder.width * last
    again = {"none": 0, "products": 0}.get(remat, whole - _head_product(run))
    products = (1 + _backward(run)) * (_matmul_flops(run) - _head_product(run)) + again
    rule = (3 + (remat != "none")) * _rule_flops(run, tokens)
    return (products + rule) // run.tp + _update_attention_flops(run) + _update_head_flops(run)


def _backward(run: RunSizes) -> int:
    """Products per weight matrix in the backward pass; frozen ones have no gradient."""
    return 2 if run.decoder.lora is None else 1


def _head_product(run: RunSizes) -> int:
    """Operations of the head's product, over all devices that split it."""
    return 2 * run.tokens * run.decoder.outputs * run.decoder.width


def _update_attention_products(run: RunSizes) -> tuple[int, int]:
    """Numbers of query-key products in an update's first forward pass, and in recomputation and backward pass."""
    again = PRODUCTS["again"] if run.update.remat != "none" else 0
    return PRODUCTS["forward"], PRODUCTS[run.update.attention] + again


def _update_attention_flops(run: RunSizes) -> int:
    """Operations of an update's products of queries with keys and values."""
    split = run.tp * run.sp
    return sum(
        _attention_flops(run, run.rows, run.row_tokens, products, split=split)
        for products in _update_attention_products(run)
    )


def _update_head_flops(run: RunSizes) -> int:
    """Operations of an update's logits and their gradients; with `remat: none`, a chunked head saves its logits."""
    again = run.update.remat != "none" or run.update.head == "fused"
    own = (1 + _backward(run) + again) * _logits_flops(run) + (2 + _backward(run)) * fused_padding(run)
    if (compared := run.spec.compared) is None:
        return own
    return own + _logits_flops(run.of(compared)) * (1 if run.update.remat == "none" else 2)


# What is sent


def _tp_ici(run: RunSizes, tokens: int) -> int:
    """Bytes that a device sends for one all-reduce over tp in each layer."""
    return 2 * run.decoder.layers * tokens * run.decoder.width * run.activation * (run.tp - 1) // run.tp


def _sp_ici(run: RunSizes) -> int:
    """Bytes that a device sends in one pass through the layers, exchanging tokens for heads over sp."""
    numbers, sp = 0, run.sp
    for count, attention in run.decoder.attention_layers():
        queries, keys = 2 * attention.heads // run.tp, 2 * attention.kv_heads // run.tp  # with outputs; and with values
        # If sp does not divide the key heads, every device gets all of them.
        heads = queries + keys * (1 if attention.kv_heads // run.tp % sp == 0 else sp)
        numbers += count * heads * attention.head_dim
    for place in run.decoder.places:
        if isinstance(net := place.block.mixer, DeltaNet):  # queries, keys and values, and the outputs
            moved = 2 * net.key_heads * net.key_dim + 2 * net.value_heads * net.value_dim
            numbers += len(place.layers) * moved // run.tp
    return run.tokens * numbers * run.activation * (sp - 1) // sp


def _total(parts: Parts) -> int:
    return sum(parts.values())
