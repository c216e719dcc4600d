"""The closed form: memory, operations and traffic of every phase, per device, from a config's numbers alone.

It answers before the compiler does, and where none is installed. It describes the programs as they are written
(`podium.train.step`, `podium.rollout.programs`) and as compilers were seen to treat them; the compiled programs are the
truth. Multiply-adds count as two operations, attention in every block of a row that is one sequence.

B rows and S slots below are a device's own; `a` is the size of an activation's number in bytes.
"""

import dataclasses
from collections.abc import Mapping

from podium.accelerators import GIB, Accelerator
from podium.config.attention import attended_pairs, cut
from podium.config.schema import Config
from podium.models.architecture import DecoderConfig
from podium.models.flops import layer_elements
from podium.models.params import param_specs
from podium.plan.sizes import F32, RunSizes, local_count, make_sizes

Parts = dict[str, int]

MARGIN = 1.5  # past so many times the memory there is, the closed form alone is enough to refuse
BATCH_ARRAYS = 9  # of podium.train.batch.Batch, [K, B, T] of 4 bytes each, without old and reference log-probabilities
SAMPLER_LOGITS = 3  # logits, what is weighed of them, and their blocks
MLP_FORWARD, MLP_BACKWARD = 2, 5  # arrays [B, T, F] alive at once; where all scores are made, one more
MLP_SAVED, MLP_BACKWARD_SAVED = 6, 3  # the same of each layer, and at once, where nothing is made again
OFFLOADING = 3  # layers whose inputs are on their way to the host's memory, or back
# Products of queries with keys, or their like: forward, made again, and backward, where kernels make scores twice.
PRODUCTS: Mapping[str, int] = {"forward": 2, "again": 2, "reference": 4, "blocks": 5, "tpu_kernel": 7, "gpu_kernel": 7}
SCORES_SAVED = 2  # float32 arrays [B, H, T, T] of each layer, there too
RESIDUAL_BACKWARD, RESIDUAL_GROUPS = 2, 3  # arrays [B, T, D] beside them; where rows are cut into groups
# HBM traffic of a layer in arrays: [tokens, F] of `a` bytes, and float32 scores; fitted to compiled v6e programs.
MLP_TRAFFIC: Mapping[str, int] = {"forward": 4, "update": 30}
SCORE_TRAFFIC: Mapping[str, int] = {"forward": 1, "update": 11}
LOGITS_TRAFFIC: Mapping[str, int] = {"forward": 4, "update": 12}
OPTIMIZER_TRAFFIC = 4  # gradient: written, added to, read for its norm, read for the update
VMEM = 128 * 2**20
"""Memory of a core. Arrays under a quarter of it cost no HBM traffic, and scores that do not fit are made twice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseEstimate:
    """What a phase needs of each device."""

    name: str
    parts: Parts  # bytes that are alive at the peak, by what they are
    flops: int
    hbm_bytes: int
    ici_bytes: int  # bytes that a device sends to others

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.parts.values())


def estimate(run: RunSizes) -> list[PhaseEstimate]:
    """Every phase of a step, in its order; `score` only where the recipe needs it.

    Work is that of one call: prefill and insert of the largest bucket, one decode step of all slots, a score and an
    update of one micro-batch.
    """
    longest = max(run.buckets)
    phases = [sync_phase(run), prefill_phase(run, longest), insert_phase(run, longest), decode_phase(run)]
    if run.recipe.needs_reference or run.recipe.scores_old_logprobs:
        phases.append(score_phase(run))
    return [*phases, update_phase(run), checkpoint_phase(run)]


def far_too_large(config: Config, decoder: DecoderConfig, accelerator: Accelerator) -> str | None:
    """Why a run should not even be tried: a phase needs more than 1.5 times the memory; None where none does.

    Raises:
        ValueError: the mesh does not fit the machine.
    """
    worst = max(estimate(make_sizes(config, decoder, accelerator)), key=lambda phase: phase.total)
    if worst.total <= MARGIN * accelerator.hbm_bytes:
        return None
    largest = sorted(worst.parts.items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    return (
        f"{worst.name} needs about {worst.total / GIB:.1f} GiB on each device and {accelerator.name} has"
        f" {accelerator.hbm_bytes / GIB:.1f}; the largest parts, in GiB: {parts}. `podium plan` says what would fit;"
        " --force trains anyway"
    )


def trainers(run: RunSizes) -> Parts:
    """What the trainer holds on a device through every phase."""
    parameters = F32 * run.own_count
    parts = {"parameters": parameters, "optimizer": F32 * run.optimizer_count}
    return parts | ({"reference_weights": parameters} if run.recipe.needs_reference else {})


def residents(run: RunSizes) -> Parts:
    """What stays on a device between an update and the next: the rollout's weights too, which the update is without."""
    return trainers(run) | {"rollout_weights": run.rollout_weight_bytes}


def sync_phase(run: RunSizes) -> PhaseEstimate:
    """The rollout's weights, made of the trainer's: all are gathered, then copied to where they stay."""
    own, whole = run.own_count, run.rollout_weight_bytes
    # Stacked weights are gathered into their place, embedding and head beside it.
    beside = run.ends_count(run.rollout_parts) * run.rollout_activation
    return PhaseEstimate(
        name="sync",
        parts=residents(run) | {"gathered_weights": beside if whole > own * run.rollout_activation else 0},
        flops=0,
        hbm_bytes=own * F32 + 2 * whole,
        ici_bytes=max(whole - own * run.rollout_activation, whole - whole // run.fsdp if run.layout.group > 1 else 0),
    )


def prefill_phase(run: RunSizes, bucket: int) -> PhaseEstimate:
    """One call for `prefill_rows` prompts of a bucket."""
    rows, a, decoder = -(-run.config.rollout.prefill_rows // run.rollout_shards), run.rollout_activation, run.decoder
    tokens = rows * bucket
    scored = tokens if run.layout.name == "legacy" else rows
    heads = run.rollout_heads
    logits = F32 * scored * decoder.vocab // heads
    matmul = tokens * 2 * layer_elements(decoder) * decoder.layers + 2 * scored * decoder.vocab * decoder.width
    flops = matmul // heads + _attention_flops(run, rows, bucket, PRODUCTS["forward"], split=heads)
    traffic = _layers_traffic(run, "forward", rows, bucket, a, split=heads)
    return PhaseEstimate(
        name="prefill",
        parts=_rollout_residents(run)
        | {"logits": logits, "gathered_weights": run.gathered_in_rollout}
        | _forward_peak(run, rows, bucket, a, split=heads),
        flops=flops,
        hbm_bytes=run.rollout_weight_bytes + traffic + run.kv_bytes(tokens) + logits,
        ici_bytes=run.rollout_ici(tokens),
    )


def decode_phase(run: RunSizes) -> PhaseEstimate:
    """One step of all slots; attention reads whole slots, however full they are."""
    slots, a, decoder = -(-run.config.rollout.slots // run.rollout_shards), run.rollout_activation, run.decoder
    heads, matmul = run.rollout_heads, run.matmul_count // run.layout.group
    cache, logits = run.kv_bytes(slots * run.cache_length), F32 * slots * decoder.vocab // heads
    scores = F32 * slots * decoder.heads * run.cache_length // heads
    # The TPU's compiler lays the stacks of q, k and v out anew in each call.
    stacks = (param_specs(decoder)[f"layers.{name}"] for name in ("q", "k", "v") if run.platform == "tpu")
    relaid = a * sum(local_count(each, run.rollout_parts) for each in stacks)
    calls = 2 * relaid // run.config.rollout.refill_steps
    return PhaseEstimate(
        name="decode",
        parts=_rollout_residents(run)
        | {
            "relaid_weights": relaid,
            "attention_scores": scores,
            "logits": SAMPLER_LOGITS * logits,
            "gathered_weights": run.gathered_in_rollout,
        },
        flops=slots
        * (2 * run.matmul_count + 4 * run.cache_length * decoder.heads * decoder.head_dim * decoder.layers)
        // heads,
        hbm_bytes=matmul * a + cache + calls + 2 * SAMPLER_LOGITS * logits,
        ici_bytes=run.rollout_ici(slots),
    )


def insert_phase(run: RunSizes, bucket: int, *, crosses: bool = True) -> PhaseEstimate:
    """One call that copies the prompts of a bucket to their slots.

    Where some go to another device than the one that has prefilled them, every device sees all, a layer at a time.
    """
    prompts = run.kv_bytes(run.config.rollout.prefill_rows * bucket)
    gathered = prompts if crosses and run.rollout_shards > 1 else 0
    return PhaseEstimate(
        name="insert",
        parts=_rollout_residents(run) | {"gathered_prompts": gathered // run.decoder.layers},
        flops=0,
        hbm_bytes=2 * (gathered or prompts // run.rollout_shards),
        ici_bytes=gathered * (run.rollout_shards - 1) // run.rollout_shards,
    )


def score_phase(run: RunSizes) -> PhaseEstimate:
    """Log-probabilities of a batch under frozen weights: a forward pass."""
    a, tokens = run.activation, run.rows * run.row_tokens
    layers, head = run.gathered_counts
    passes = _passes(run, "forward")
    return PhaseEstimate(
        name="score",
        parts=trainers(run)
        | _batch(run)
        | {"working_weights": _working_weights(run), "gathered_weights": _copied(run, head)}
        | max(_logits(run), _forward_peak(run, run.rows, run.row_tokens, a), key=_total),
        flops=_forward_flops(run),
        hbm_bytes=passes + run.own_count * (F32 + a),
        ici_bytes=(layers + head) * a * (run.fsdp - 1) // run.fsdp + 2 * _tp_ici(run, tokens),
    )


def update_phase(run: RunSizes) -> PhaseEstimate:
    """One optimizer step: gradients of the micro-batches, summed, and the optimizer."""
    a, tokens = run.activation, run.rows * run.row_tokens
    layers, head = run.gathered_counts
    own, sends = run.own_count, (run.fsdp - 1) / run.fsdp
    # Weights come as they compute, and gradients go as they do.
    remat = run.config.train.remat
    gathers = (2 if remat == "none" else 3) * layers * a + head * 2 * a
    reduced = 2 * own * F32 * (run.dp - 1) // run.dp
    return PhaseEstimate(
        name="update",
        parts=trainers(run) | _batch(run) | _update_peak(run),
        flops=_update_flops(run),
        hbm_bytes=_passes(run, "update") + OPTIMIZER_TRAFFIC * own * F32 + 2 * F32 * (own + run.optimizer_count),
        ici_bytes=int(gathers * sends + head * a * sends)
        + reduced
        + (6 if remat in ("layer", "offload") else 4) * _tp_ici(run, tokens),
    )


def checkpoint_phase(run: RunSizes) -> PhaseEstimate:
    """The state copied to the host; nothing is made on the device."""
    parts = residents(run)
    return PhaseEstimate(
        name="checkpoint", parts=parts, flops=0, hbm_bytes=parts["parameters"] + parts["optimizer"], ici_bytes=0
    )


def _update_peak(run: RunSizes) -> Parts:
    """What an update makes, at the worst of its moments: at the logits, in a layer's backward pass, or after both."""
    a, decoder = run.activation, run.decoder
    tokens = run.rows * run.row_tokens
    layers, head = run.gathered_counts
    gradients = F32 * run.own_count
    always = {"working_weights": _working_weights(run), "gathered_weights": _copied(run, head)}
    offload = run.config.train.remat == "offload"
    kept = {"layer_inputs": (OFFLOADING if offload else decoder.layers) * tokens * decoder.width * a}
    if saved := run.config.train.remat == "none":
        kept |= _saved(run)
    elif run.config.train.remat == "products":
        kept |= _saved_products(run)
    at_head = kept | {"gradients": gradients + head * a} | _logits(run, all_tokens=saved)
    in_layers = kept | {"gradients": gradients + F32 * _own_layers(run)} | _backward_peak(run)
    in_layers["gathered_weights"] = _copied(run, layers // decoder.layers)
    if run.groups > 1:  # a layer's weights, and the sum of their gradients
        in_layers["gathered_weights"] += 2 * F32 * layers // decoder.layers
    embedding = head if decoder.tied else head // 2
    # The layers' activations are gone by then, and what was gathered.
    at_embedding = {"gradients": gradients + F32 * (_own_layers(run) + embedding), "gathered_weights": 0}
    return max((always | each for each in (at_head, in_layers, at_embedding)), key=_total)


def _copied(run: RunSizes, count: int) -> int:
    """Bytes of this many parameters in the compute format; none where they compute as and where they are stored."""
    return 0 if run.fsdp == 1 and run.activation == F32 else count * run.activation


def _logits(run: RunSizes, *, all_tokens: bool = False) -> Parts:
    """Float32 logits of a chunk of tokens, or of all."""
    tokens = run.rows * run.row_tokens
    chunk = tokens if all_tokens else min(tokens, max(run.rows, run.config.train.head_chunk_tokens))
    return {"logits": chunk * run.decoder.vocab // run.tp * F32}


def _forward_peak(run: RunSizes, rows: int, length: int, a: int, *, split: int = 1) -> Parts:
    """One layer of a forward pass: its attention, or its MLP, which begins when that is gone."""
    mlp = {"layer_activations": MLP_FORWARD * rows * length * run.decoder.mlp_width * a // split}
    arrays = _attention_arrays(run, rows, length, a, backward=False)
    attention = {name: size // (1 if name == "attention_mask" else split) for name, size in arrays.items()}
    return max(attention, attention | mlp | {"attention_scores": 0}, key=_total)


def _backward_peak(run: RunSizes) -> Parts:
    """One layer of a backward pass: its attention, recomputed, beside the MLP's gradients, or beside their own."""
    rows, decoder, a = run.rows // run.groups, run.decoder, run.activation
    tokens = rows * run.row_tokens  # of a group
    attention = _attention_arrays(run, rows, run.row_tokens, a, backward=True)
    scores = attention["attention_scores"]
    arrays = MLP_BACKWARD + (run.attention == "reference")
    if run.config.train.remat not in ("layer", "offload"):
        arrays = MLP_BACKWARD_SAVED
    mlp = arrays * tokens * decoder.mlp_width // run.tp * a
    if run.attention == "reference":
        attention["attention_scores"] += scores if scores > mlp else 0
    elif mlp > scores:
        attention["attention_scores"] = 0
    residual = (
        (RESIDUAL_BACKWARD if run.groups == 1 else RESIDUAL_GROUPS) * run.rows * run.row_tokens * decoder.width * a
    )
    return attention | {"layer_activations": residual + (0 if scores > mlp else mlp)}


def _attention_arrays(run: RunSizes, rows: int, length: int, a: int, *, backward: bool) -> Parts:
    """What the attention of one layer makes of so many rows."""
    decoder, tokens, split = run.decoder, rows * length, run.tp if backward else 1
    if run.attention == "reference":
        scores = F32 * tokens * length * decoder.heads // split
        return {"attention_mask": tokens * length, "attention_scores": scores}
    n, t = cut(run.attention, length)
    # Queries, keys and values in blocks and what comes of them; backward their gradients, and the result's, too.
    heads = (2 if backward else 1) * (2 * decoder.heads + 2 * decoder.kv_heads)
    return {"attention_scores": rows * n * t * heads * decoder.head_dim * a // split}


def _saved(run: RunSizes) -> Parts:
    """What `remat: none` keeps of every layer for the backward pass, its gathered weights and its scores among it."""
    decoder, a, tokens = run.decoder, run.activation, run.rows * run.row_tokens
    layers, _ = run.gathered_counts
    width = 4 * decoder.width + 2 * (decoder.heads + decoder.kv_heads) * decoder.head_dim // run.tp
    of_query = SCORES_SAVED * run.row_tokens if run.attention == "reference" else 1  # else the logarithm of their sum
    saved_scores = decoder.layers * tokens * decoder.heads // run.tp * of_query * F32
    return {
        "saved_activations": decoder.layers * tokens * (width + MLP_SAVED * decoder.mlp_width // run.tp) * a,
        "saved_scores": saved_scores,
        "saved_weights": layers * a,
    }


def _saved_products(run: RunSizes) -> Parts:
    """What `remat: products` keeps of every layer: the results of its products with weights."""
    decoder, tokens = run.decoder, run.rows * run.row_tokens
    split = (decoder.heads + 2 * decoder.kv_heads) * decoder.head_dim + 2 * decoder.mlp_width
    width = 2 * decoder.width + split // run.tp
    return {"saved_activations": decoder.layers * tokens * width * run.activation}


def _batch(run: RunSizes) -> Parts:
    """The batch of an optimizer step."""
    arrays = BATCH_ARRAYS + run.recipe.scores_old_logprobs + (run.recipe.kl not in ("none", "k1_reward"))
    return {"batch": arrays * run.max_micro_batches * run.rows * run.row_tokens * 4}


def _rollout_residents(run: RunSizes) -> Parts:
    """What stays through a rollout: besides the residents, the cache and the last prompts of each bucket."""
    rollout = run.config.rollout
    slots, rows = -(-rollout.slots // run.rollout_shards), -(-rollout.prefill_rows // run.rollout_shards)
    held = run.kv_bytes(rows * sum(run.buckets)) + F32 * rows * len(run.buckets) * run.decoder.vocab
    return residents(run) | {"kv_cache": run.kv_bytes(slots * run.cache_length), "prompts": held}


def _attention_flops(run: RunSizes, rows: int, length: int, products: int, *, split: int) -> int:
    """So many products of all layers' queries with keys. A TPU makes reference scores twice that do not fit."""
    decoder = run.decoder
    pairs = rows * attended_pairs(run.attention, length)
    if run.attention == "reference" and run.platform == "tpu" and products == PRODUCTS["forward"]:
        products += F32 * pairs * decoder.heads // split >= VMEM
    return 2 * products * pairs * decoder.heads * decoder.head_dim * decoder.layers // split


def _forward_flops(run: RunSizes) -> int:
    """One forward pass of a micro-batch, logits included."""
    attention = _attention_flops(run, run.rows, run.row_tokens, PRODUCTS["forward"], split=run.tp)
    return _matmul_flops(run) // run.tp + attention


def _matmul_flops(run: RunSizes) -> int:
    """Operations of the forward pass's weights."""
    return 2 * run.rows * run.row_tokens * run.matmul_count


def _update_flops(run: RunSizes) -> int:
    """Forward, backward, and what is made again: of a whole layer all but its last product, which no gradient needs."""
    decoder, tokens, remat = run.decoder, run.rows * run.row_tokens, run.config.train.remat
    whole = _matmul_flops(run) - 2 * tokens * decoder.width * decoder.mlp_width * decoder.layers
    again = {"none": 0, "products": 2 * tokens * decoder.vocab * decoder.width}.get(remat, whole)
    products = PRODUCTS[run.attention] + (PRODUCTS["again"] if remat != "none" else 0)
    attention = _attention_flops(run, run.rows, run.row_tokens, products, split=run.tp)
    return _forward_flops(run) + (2 * _matmul_flops(run) + again) // run.tp + attention


def _passes(run: RunSizes, kind: str) -> int:
    """HBM traffic of all layers and the head for a micro-batch."""
    decoder, tokens = run.decoder, run.rows * run.row_tokens
    logits = LOGITS_TRAFFIC[kind] * F32 * tokens * decoder.vocab // run.tp
    gathered = (2 if kind == "forward" else 4) * sum(run.gathered_counts) * run.activation
    layers = _layers_traffic(run, kind, run.rows, run.row_tokens, run.activation, split=run.tp)
    return layers + logits + gathered


def _layers_traffic(run: RunSizes, kind: str, rows: int, length: int, a: int, *, split: int) -> int:
    """HBM traffic of all layers' activations; on a TPU what fits in VMEM stays there."""
    free = VMEM // 4 if run.platform == "tpu" else 0
    mlp = rows * length * run.decoder.mlp_width // split * a
    scores = F32 * rows * length**2 * run.decoder.heads // split if run.attention == "reference" else 0
    traffic = MLP_TRAFFIC[kind] * (mlp if mlp > free else 0) + SCORE_TRAFFIC[kind] * (scores if scores > free else 0)
    return run.decoder.layers * traffic


def _own_layers(run: RunSizes) -> int:
    """Parameters of the layers, without embedding and head, that a device stores in training."""
    return run.own_count - run.ends_count(run.train_parts)


def _working_weights(run: RunSizes) -> int:
    """Bytes of a device's parameters in the format of the products; nothing where that is float32."""
    return run.activation * run.own_count if run.activation < F32 else 0


def _tp_ici(run: RunSizes, tokens: int) -> int:
    """Bytes that a device sends in one all-reduce of activations over tp in every layer."""
    return 2 * run.decoder.layers * tokens * run.decoder.width * run.activation * (run.tp - 1) // run.tp


def _total(parts: Parts) -> int:
    return sum(parts.values())
