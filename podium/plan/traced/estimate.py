"""The closed form: memory, operations and traffic per device of every phase, computed from the config alone.

It answers before the compiler does, and also works without one. It models the programs as written in
`podium.train.step` and `podium.rollout.programs`, with constants fitted to what compilers were seen to do with them;
where it disagrees with a compiled program, the program is right. A multiply-add counts as two operations. Attention
counts all blocks of a row, as if the row were one sequence.

Here B rows and S slots are those of one device, and `a` is the bytes per element of an activation.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import podium.plan.traced.least_bytes as floor
from podium.accelerators import GIB, Accelerator
from podium.config.attention_blocks import attended_pairs, cut
from podium.config.lora import MATRICES
from podium.models.architecture import rollout_decoder
from podium.models.blocks.delta import DeltaNet
from podium.models.blocks.experts import SPARE, Experts
from podium.models.params import NF4_CODES, frozen_dtype, own_name, param_specs
from podium.plan.request.phase_sizes import (
    F32,
    RunSizes,
    cast_bytes,
    ends_count,
    fused_chunks,
    fused_padding,
    head_number,
    local_count,
    offloaded_bytes,
    reduced_number,
    rollout_number,
)
from podium.plan.traced.gpu_forward import (
    decode_kernels,
    operand_bytes,
    prefill_attention,
    prefill_passes,
    prefill_products,
    scoring_passes,
    scoring_products,
)
from podium.plan.traced.resident_memory import Parts, frozen_bytes, residents
from podium.plan.traced.update_memory import (
    EXPERT_ROWS,
    copied,
    expert_rows,
    feed_forward_inner,
    has_kernel,
    loss_logits,
    rule_bytes,
    update_peak,
    working_weights,
)
from podium.plan.traced.update_traffic import RECOMPUTES, update_kernels, update_passes
from podium.run.run_spec import SCORE, Role

MARGIN = 1.5  # above this multiple of the device's memory, the closed form alone refuses a run
BATCH_ARRAYS = (
    9  # arrays [K, B, T] of 4 bytes in podium.train.batches.batch.Batch, without old and reference log-probabilities
)
GPU_APART = 0.9
"""Share of the HBM traffic of passes over many tokens that a GPU spends in kernels without products, whose time adds to
that of products. A TPU's compiler joins about half of it with products, and hides about as much in transfers."""
SAMPLER_LOGITS = 3  # logits, their scaled copy, and its blocks
MLP_FORWARD = 2  # arrays [B, T, F] alive at once
TOKEN_ARRAYS = 4
"""Arrays [N, D] of a mixture's tokens alive at the same time as a window of their rows: the layer's input with and
without norm, the sum of the windows, and the sum of one."""
# Products of queries with keys (or their gradients): forward, recomputed, and backward; kernels compute scores twice.
PRODUCTS: Mapping[str, int] = {"forward": 2, "again": 2, "reference": 4, "blocks": 5, "tpu_kernel": 7, "gpu_kernel": 7}
# HBM traffic of a layer in arrays: [tokens, F] of `a` bytes, and float32 scores; fitted to compiled v6e programs.
MLP_TRAFFIC: Mapping[str, int] = {"forward": 4, "update": 30}
EXPERT_TRAFFIC: Mapping[str, tuple[int, int]] = {"forward": (4, 9), "update": (8, 8)}
"""HBM traffic of a mixture of experts: arrays between its products, and passes over a token's rows for all its experts;
in an update only the passes of its products. Counted for gpt-oss-20b and Qwen3-30B-A3B."""
SCORE_TRAFFIC: Mapping[str, int] = {"forward": 1, "update": 11}
BLOCK_TRAFFIC: Mapping[str, int] = {"forward": 20, "update": 37}
"""Arrays [B, t, H, Q] that attention in blocks of t tokens moves for each pair of blocks: the block's queries, keys and
values, float32 scores and sums, and their gradients; where attention is computed again, its forward pass is added."""
LOGITS_TRAFFIC: Mapping[str, int] = {"forward": 4, "update": 12}
LOGITS_READ = 2
"""Passes over logits on a GPU: for each token's maximum, and for the sum."""
EXACT_PASSES = 6
"""Number of bfloat16 products that make up a float32 product at full precision, on a TPU."""
VMEM = 128 * 2**20
"""On-chip memory of a TPU core. Arrays under a quarter of it cost no HBM traffic; scores over it are computed twice."""
EXPANDED = {"v5p": 8 * 2**20}
"""The smallest expanded matrix of a layer, in bytes per device, that a TPU of this generation writes to main memory;
others: half of VMEM."""


class Piece(NamedTuple):
    """Work that takes as long as its operations or its traffic, whichever is longer, without overlap with other
    pieces.
    """

    flops: int
    hbm_bytes: int
    kernels: int = 0
    """Kernels on a GPU that do the work, each of which takes at least as long as a launch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseEstimate:
    """Resources that one device needs for a phase."""

    name: str
    parts: Parts  # bytes alive at the peak, by kind of array
    flops: int
    hbm_bytes: int
    ici_bytes: int  # bytes that a device sends to others
    hidden_bytes: int = 0
    """The bytes of `ici_bytes` that are sent while the device works on its first piece, if that takes as long."""
    least_bytes: int
    """The bytes of `hbm_bytes` that no compiler can avoid (`podium.plan.traced.least_bytes`)."""
    once_bytes: int = 0
    """Like `least_bytes`, once per call, before or after the iterations of its loop."""
    pieces: tuple[Piece, ...] = ()
    """The operations and bytes in pieces that do not overlap with each other; empty: all overlap."""
    copies: tuple[tuple[float, int, float], ...] = ()
    """Copies between device and host: how often, bytes of each, and the share of all work that overlaps with it."""
    kernels: tuple[int, int] = (0, 0)
    """Kernels that do next to nothing, and those that do the work; counted where their launches bound the phase."""

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


def sync_phase(run: RunSizes) -> PhaseEstimate:
    """Make the rollout's weights from the trainer's: gather all of them, then copy them to their place."""
    if run.decoder.lora is not None and not run.decoder.lora.merged:
        return PhaseEstimate(
            name="sync",
            parts=residents(run, "sync"),
            flops=0,
            hbm_bytes=2 * F32 * run.own_count,
            ici_bytes=0,
            least_bytes=floor.sync_bytes(run),
        )
    held, whole = cast_bytes(run) + frozen_bytes(run), run.rollout_weight_bytes
    # Stacked weights are gathered in place; embedding and head are gathered into separate buffers.
    beside = ends_count(run.decoder, run.rollout_parts) * run.rollout_activation
    return PhaseEstimate(
        name="sync",
        parts=residents(run, "sync") | {"gathered_weights": beside if whole > held else 0},
        flops=0,
        hbm_bytes=F32 * (run.own_count + frozen_bytes(run) // run.rollout_activation) + 2 * whole,
        ici_bytes=max(whole - held, whole - whole // run.shards if run.layout.group > 1 else 0),
        least_bytes=floor.sync_bytes(run),
    )


def _expanded_bytes(run: RunSizes) -> int:
    """Bytes that a pass of a TPU's rollout moves to expand nf4, in addition to reading the codes.

    A matrix that is too large for fast memory is written and read again, and so are its codes, which are taken out of
    the stack of all layers.
    """
    decoder, size = rollout_decoder(run.decoder), 0
    if run.platform != "tpu":
        return 0
    least = EXPANDED.get(run.accelerator.generation, VMEM // 2)
    for name, spec in param_specs(decoder).items():
        if frozen_dtype(name, decoder) == NF4_CODES:
            codes, expanded = local_count(spec, run.rollout_parts), 2 * run.rollout_activation
            size += (1 + expanded) * codes if expanded * codes // spec.shape[0] >= least else 0
    return 2 * size


def prefill_phase(run: RunSizes, bucket: int) -> PhaseEstimate:
    """One prefill call: `prefill_rows` prompt chunks of `bucket` tokens each."""
    rows = -(-run.rollout.prefill_rows // run.rollout_shards)
    a = run.rollout_activation
    decoder = run.decoder
    tokens = rows * bucket
    scored = tokens if run.layout.name == "legacy" else 0
    heads = run.rollout_heads
    logits = floor.logits_bytes(run, scored)
    matmul = 2 * tokens * decoder.total(lambda work: work.active) + 2 * scored * decoder.vocab * decoder.width
    scores = 2 * tokens * run.cached_pairs(run.in_blocks(bucket), bucket)
    flops = (matmul + scores + _rule_flops(run, tokens)) // heads
    if run.platform == "gpu":
        attended = prefill_attention(run, rows, bucket, run.in_blocks(bucket))
        pieces = (
            Piece(flops - scores // heads, prefill_products(run, tokens)),
            Piece(scores // heads, attended.products + attended.passes, attended.kernels),
            Piece(0, prefill_passes(run, tokens) + logits),
        )
        kernels = attended.small, 0
    else:
        layers = _layers_traffic(run, "forward", rows, bucket, a, split=heads)
        read = run.rollout_weight_bytes + _expanded_bytes(run)
        pieces = (Piece(flops, read + layers + run.kv_bytes(tokens) + logits),)
        kernels = 0, 0
    return PhaseEstimate(
        name="prefill",
        parts=residents(run, "rollout")
        | {"logits": logits, "gathered_weights": run.gathered_in_rollout}
        | _forward_peak(run, rows, bucket, a, split=heads, mixture=_windows(run, tokens * run.layout.group // heads)),
        flops=flops,
        hbm_bytes=sum(piece.hbm_bytes for piece in pieces),
        ici_bytes=run.rollout_ici(tokens),
        least_bytes=floor.prefill_bytes(run, tokens, scored),
        pieces=pieces,
        kernels=kernels,
    )


def decode_phase(run: RunSizes, size: int = 0, context: float = 0.0) -> PhaseEstimate:
    """One decode step of `size` slots (0: all); attention reads up to `context` tokens of each slot.

    With `context` 0, it reads as many tokens as the longest possible sequence has.
    """
    decoder = run.decoder
    rollout = run.rollout
    slots = -(-(size or rollout.slots) // run.rollout_shards)
    heads, weights = run.rollout_heads, run.layer_bytes + run.head_bytes
    read = run.in_blocks(context or rollout.longest)
    cache, logits = run.read_bytes(slots, read), floor.logits_bytes(run, slots)
    block = run.kv_bytes(slots * run.block) // decoder.layers
    # Weights that the compiler copies into another layout in every call: for TPUs the stacked q, k and v, for GPUs
    # those that are multiplied as integers.
    integers = MATRICES if decoder.rollout_weights == "w8a8" else ()
    relaid_names = {"tpu": ("q", "k", "v"), "gpu": integers}.get(run.platform, ())
    relaid = sum(
        rollout_number(run, name) * local_count(spec, run.rollout_parts)
        for name, spec in param_specs(decoder).items()
        if own_name(name) in relaid_names
    )
    calls = 2 * relaid // rollout.refill_steps
    on_gpu = run.platform == "gpu"
    operands = operand_bytes(run) if on_gpu else _expanded_bytes(run)
    return PhaseEstimate(
        name="decode",
        parts=residents(run, "rollout")
        | {
            "relaid_weights": relaid,
            "attention_scores": F32 * slots * decoder.heads * run.block // heads + block,
            "logits": SAMPLER_LOGITS * logits,
            "gathered_weights": run.gathered_in_rollout,
        },
        flops=2 * slots * (decoder.multiplied(slots * run.layout.group // heads) + run.cached_pairs(read)) // heads
        + _rule_flops(run, slots) // heads,
        hbm_bytes=weights + cache + calls + 2 * SAMPLER_LOGITS * logits + operands,
        ici_bytes=run.rollout_ici(slots),
        least_bytes=floor.decode_bytes(run, slots, read),
        once_bytes=floor.first_bytes(run, slots),
        kernels=decode_kernels(run) if on_gpu else (0, 0),
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
    form = update_phase(own, micro_batches)
    parts = residents(run, "update") | _batch(run) | update_peak(own)
    return dataclasses.replace(form, name=role.name, parts=parts)


def _scoring(name: str, run: RunSizes, beside: Parts, *, logits: bool = True) -> PhaseEstimate:
    """A forward pass of a batch through the decoder of `run`; `beside` is what else is on a device.

    Without `logits`, it ends with hidden states, from which the update computes logits.
    """
    a, tokens, groups = run.activation, run.tokens, run.update.row_groups
    layers, head = run.gathered_counts
    pieces = _scoring_pieces(run, logits=logits)
    layer = _forward_peak(run, run.rows // groups, run.row_tokens // run.sp, a)
    if groups > 1:  # the inputs and outputs of all groups of a layer
        layer["layer_inputs"] = 2 * tokens * run.decoder.width * a
    return PhaseEstimate(
        name=name,
        parts=beside
        | {"working_weights": working_weights(run), "gathered_weights": copied(run, head, head_number(run))}
        | max(
            {} if run.update.head == "fused" else loss_logits(run),
            layer,
            key=_total,
        ),
        flops=sum(piece.flops for piece in pieces),
        hbm_bytes=sum(piece.hbm_bytes for piece in pieces),
        ici_bytes=(layers + head) * a * (run.shards - 1) // run.shards + 2 * _tp_ici(run, tokens) + _sp_ici(run),
        least_bytes=floor.forward_bytes(run),
        pieces=pieces,
    )


def _scoring_pieces(run: RunSizes, *, logits: bool) -> tuple[Piece, ...]:
    """The work of a forward pass of a micro-batch: on a GPU, products, passes, and the logits, made and read."""
    head, of_head = (_logits_flops(run), _head_traffic(run, "forward")) if logits else (0, 0)
    flops = _forward_flops(run) - _logits_flops(run)
    weights = 2 * sum(run.gathered_counts) * run.activation + run.own_count * (F32 + run.activation)
    scores = _scores_traffic(run, "forward", run.rows, run.row_tokens, split=run.tp * run.sp)
    if run.platform == "gpu":
        made = of_head // LOGITS_TRAFFIC["forward"]
        layers = Piece(flops, weights + scoring_products(run)), Piece(0, scoring_passes(run) + scores)
        return *layers, Piece(head, made), Piece(0, LOGITS_READ * made)
    layers = _layers_traffic(run, "forward", run.rows, run.row_tokens, run.activation, split=run.tp * run.sp)
    return (Piece(flops + head, layers + scores + of_head + weights),)


def update_phase(run: RunSizes, micro_batches: float = 1) -> PhaseEstimate:
    """One optimizer step: accumulate the micro-batches' gradients, then apply them. The work is for one micro-batch."""
    a, tokens = run.activation, run.tokens
    layers, head = run.gathered_counts
    own, sends = run.own_count, (run.shards - 1) / run.shards
    # Weights are gathered in the compute format; gradients are reduced in theirs.
    remat = run.update.remat
    gathers = (1 if remat == "none" else 2) * layers * a + 2 * head * head_number(run)
    if run.decoder.lora is None:  # the adapters' gradients are negligible
        gathers += (layers + head) * reduced_number(run)
    gathered = int(gathers * sends)
    reduced = 2 * own * F32 * (run.dp - 1) // run.dp
    pieces = _update_pieces(run, micro_batches)
    return PhaseEstimate(
        name="update",
        parts=residents(run, "update") | _batch(run) | update_peak(run),
        flops=sum(piece.flops for piece in pieces),
        hbm_bytes=sum(piece.hbm_bytes for piece in pieces),
        ici_bytes=gathered
        + reduced
        + (6 if remat in RECOMPUTES else 4) * _tp_ici(run, tokens)
        + (2 if remat == "none" else 3) * _sp_ici(run),
        hidden_bytes=gathered if run.platform == "tpu" else 0,  # a GPU's program waits for most of them
        least_bytes=floor.micro_batch_bytes(run),
        once_bytes=floor.optimizer_step_bytes(run),
        copies=_host_copies(run, micro_batches),
        pieces=pieces,
        kernels=(update_kernels(run, sum(_update_attention_products(run))), 0),
    )


def _pieces(run: RunSizes, flops: int, traffic: int) -> tuple[Piece, ...]:
    """The work of passes over many tokens: on a GPU, most of the traffic is not that of products."""
    apart = int(GPU_APART * traffic) if run.platform == "gpu" else 0
    return Piece(flops, traffic - apart), Piece(0, apart)


def _update_pieces(run: RunSizes, micro_batches: float) -> tuple[Piece, ...]:
    """The work of a micro-batch: products of the layers, attention, the head, and passes over arrays."""
    attention, head = _update_attention_flops(run), _update_head_flops(run)
    # A fused head's kernel computes all logits for their sums, and moves none; chunks compute them again.
    scored = _logits_flops(run) + fused_padding(run) if run.update.head == "fused" else 0
    gathered = 4 * sum(run.gathered_counts) * run.activation
    layers = _layers_traffic(run, "update", run.rows, run.row_tokens, run.activation, split=run.tp * run.sp)
    return (
        *_pieces(run, _update_flops(run) - attention - head, layers + gathered),
        Piece(attention, _scores_traffic(run, "update", run.rows, run.row_tokens, split=run.tp * run.sp)),
        Piece(scored, 0),
        Piece(head - scored, _head_traffic(run, "update")),
        Piece(0, sum(update_passes(run, micro_batches).values())),
    )


def _host_copies(run: RunSizes, micro_batches: float) -> tuple[tuple[float, int, float], ...]:
    """Copies to and from the host per micro-batch: the layers' inputs, and its share of the optimizer's moments."""
    moments = (1 / micro_batches, 2 * offloaded_bytes(run), 0.0)
    if run.update.remat != "offload" or run.platform == "cpu":
        return (moments,)
    layers, one = run.decoder.layers, run.tokens * run.decoder.width * run.activation
    forward = _forward_flops(run) / _update_flops(run)
    return (layers, one, forward / layers), (layers, one, (1 - forward) / layers), moments


def checkpoint_phase(run: RunSizes) -> PhaseEstimate:
    """Copying the state to the host; allocates nothing on the device."""
    parts = residents(run, "sync")
    roles = [role.kind for role in run.spec.scoring_models if role.weights in ("trained", "moving")]
    saved = {"parameters", "optimizer", *(f"{kind}_{what}" for kind in roles for what in ("weights", "optimizer"))}
    moved = sum(size for name, size in parts.items() if name in saved)
    return PhaseEstimate(name="checkpoint", parts=parts, flops=0, hbm_bytes=moved, ici_bytes=0, least_bytes=moved)


def _forward_peak(run: RunSizes, rows: int, length: int, a: int, *, split: int = 1, mixture: int = 0) -> Parts:
    """Peak arrays of one layer's forward pass: those of its attention or those of its MLP, whichever is larger.

    `mixture` are the bytes of a mixture's arrays if experts are split over devices; 0 if each device has all experts.
    """
    widest = max(feed_forward_inner(run.decoder, place) for place in run.decoder.places)
    spread = EXPERT_ROWS * max(expert_rows(run.decoder, place) for place in run.decoder.places)
    whole = MLP_FORWARD * rows * length * widest * a // split + rows * length * spread * a
    mlp = {"layer_activations": mixture or whole}
    arrays = _attention_arrays(run, rows, length, a)
    attention = {name: size // (1 if name == "attention_mask" else split) for name, size in arrays.items()}
    rule = {"recurrence": rows * length * max(rule_bytes(place) for place in run.decoder.places) // split}
    return max(
        attention, attention | mlp | {"attention_scores": 0}, *([rule] if rule["recurrence"] else []), key=_total
    )


def _windows(run: RunSizes, tokens: int) -> int:
    """Bytes of a mixture's arrays in a prefill of `tokens` tokens if the experts are split over devices; otherwise 0.

    A device multiplies the rows for its experts in windows twice as large as an even share of all rows.
    """
    parts, width = run.rollout_parts.get("experts", 1), run.decoder.width
    if parts == 1:
        return 0
    found = [0]
    for place in run.decoder.places:
        if isinstance(kind := place.block.feed_forward, Experts):
            window = min(1.0, SPARE / parts) * tokens * kind.top
            row = max(EXPERT_ROWS * width, width + MLP_FORWARD * kind.width)  # adding rows up, or their products
            found.append(int(run.rollout_activation * (window * row + TOKEN_ARRAYS * tokens * width)))
    return max(found)


def _attention_arrays(run: RunSizes, rows: int, length: int, a: int) -> Parts:
    """Arrays that one layer's attention allocates in a forward pass over `rows` rows."""
    decoder, tokens = run.decoder, rows * length
    if run.update.attention == "reference":
        return {"attention_mask": tokens * length, "attention_scores": F32 * tokens * length * decoder.heads}
    n, t = cut(run.update.attention, length)
    heads = 2 * decoder.heads + 2 * decoder.kv_heads  # queries, keys and values in blocks, and the outputs
    return {"attention_scores": rows * n * t * heads * decoder.head_dim * a}


def _batch(run: RunSizes) -> Parts:
    """Bytes of the batch of an optimizer step."""
    scores = run.spec.recipe.loss_scores
    batch = run.spec.batch
    arrays = BATCH_ARRAYS + len(scores) + batch.demonstrations
    of_token = 4 * arrays + batch.choices * (1 if batch.choice_format == "uint8" else 2)
    if (compared := run.spec.compared) is not None:
        of_token += run.activation * compared.decoder.width - 4
    return {"batch": of_token * batch.max_micro_batches * run.tokens}


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
    last = sum(len(place.layers) * feed_forward_inner(decoder, place) for place in decoder.places)
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


def _head_traffic(run: RunSizes, kind: str) -> int:
    """HBM traffic in bytes of a micro-batch's logits."""
    if run.update.head == "fused":
        return _fused_head_traffic(run) if kind == "update" else 0
    return LOGITS_TRAFFIC[kind] * F32 * run.tokens * run.decoder.outputs // run.tp


def _fused_head_traffic(run: RunSizes) -> int:
    """HBM traffic in bytes of a fused head's chunks: the logits' gradient (written, read twice), the head's, in float32
    (read, written), and the head, read for the logits and for the gradient of hidden states.
    """
    chunks, tokens = fused_chunks(run)
    number = head_number(run)
    of_chunk = 3 * tokens * number + 2 * (F32 + number) * run.decoder.width
    return chunks * run.decoder.vocab * of_chunk


def _layers_traffic(run: RunSizes, kind: str, rows: int, length: int, a: int, *, split: int) -> int:
    """HBM traffic in bytes of all layers' activations; on a TPU, arrays that fit in VMEM cost none."""
    free = VMEM // 4 if run.platform == "tpu" else 0
    traffic = 0
    for place in run.decoder.places:
        inner = rows * length * feed_forward_inner(run.decoder, place) // split * a
        spread = rows * length * expert_rows(run.decoder, place) * a
        of_inner, of_rows = EXPERT_TRAFFIC[kind] if spread else (MLP_TRAFFIC[kind], 0)
        traffic += len(place.layers) * of_inner * (inner if inner > free else 0)
        traffic += len(place.layers) * of_rows * (spread if spread > free else 0)
    return traffic


def _scores_traffic(run: RunSizes, kind: str, rows: int, length: int, *, split: int) -> int:
    """HBM traffic in bytes of attention without a kernel: of scores if all exist at once, else of each block of
    queries.

    A CPU's cache holds the intermediate results of a block.
    """
    if run.update.attention not in ("reference", "blocks") or (run.platform, run.update.attention) == ("cpu", "blocks"):
        return 0
    free = VMEM // 4 if run.platform == "tpu" else 0
    blocks, tokens = cut(run.update.attention, length)
    again = kind == "update" and run.update.remat != "none"  # whatever else is saved, attention is computed again
    moved = BLOCK_TRAFFIC[kind] + again * BLOCK_TRAFFIC["forward"]
    pairs, traffic = blocks * (blocks + 1) // 2, 0
    for count, attention in run.decoder.attention_layers():
        scores = F32 * rows * length**2 * attention.heads // split
        queries = run.activation * rows * tokens * attention.heads * attention.head_dim // split
        if run.update.attention == "blocks":
            traffic += count * moved * pairs * queries
        else:
            traffic += count * SCORE_TRAFFIC[kind] * (scores if scores > free else 0)
    return traffic


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


def computed_in_loops(run: RunSizes) -> bool:
    """Whether an update's attention or recurrence is compiled to loops instead of kernels on an accelerator."""
    if run.platform == "cpu":
        return False
    nets = [place for place in run.decoder.places if isinstance(place.block.mixer, DeltaNet)]
    blocks = run.platform == "tpu" and run.update.attention == "blocks"
    return blocks or not all(has_kernel(run, place) for place in nets)


def _total(parts: Parts) -> int:
    return sum(parts.values())
