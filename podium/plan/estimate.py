"""The closed form: memory, operations and traffic of every phase, per device, from a config's numbers alone.

It answers before the compiler does, and where there is none (GPUs). It describes the programs as they are written
(`podium.train.step`, `podium.rollout.programs`) and as compilers were seen to treat them; the compiled programs are the
truth. Multiply-adds count as two operations, attention without the saving that a causal mask allows.

B rows and S slots below are a device's own; `a` is the size of an activation's number in bytes.
"""

import dataclasses
from collections.abc import Mapping

from podium.accelerators import GIB, Accelerator
from podium.config.schema import Config
from podium.models.architecture import DecoderConfig
from podium.models.params import param_specs
from podium.plan.sizes import F32, RunSizes, layer_matmul, local_count, make_sizes

Parts = dict[str, int]

MARGIN = 1.5  # past so many times the memory there is, the closed form alone is enough to refuse
BATCH_ARRAYS = 9  # of podium.train.batch.Batch, [K, B, T] of 4 bytes each, without old and reference log-probabilities
SAMPLER_LOGITS = 3  # logits, what is weighed of them, and their blocks
MLP_FORWARD, MLP_BACKWARD = 2, 6  # arrays [B, T, F] alive at once
MLP_SAVED, MLP_BACKWARD_SAVED = 6, 3  # the same of each layer, and at once, where nothing is made again
SCORES_SAVED = 2  # float32 arrays [B, H, T, T] of each layer, there too
RESIDUAL_BACKWARD = 2  # arrays [B, T, D] beside them
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
        ici_bytes=whole - own * run.rollout_activation,
    )


def prefill_phase(run: RunSizes, bucket: int) -> PhaseEstimate:
    """One call for `prefill_rows` prompts of a bucket."""
    rows, a, decoder = -(-run.config.rollout.prefill_rows // run.rollout_shards), run.rollout_activation, run.decoder
    tokens = rows * bucket
    scored = tokens if run.config.rollout.layout == "legacy" else rows
    logits = F32 * scored * decoder.vocab
    flops = tokens * 2 * layer_matmul(decoder) * decoder.layers + 2 * scored * decoder.vocab * decoder.width
    flops += _attention_flops(run, tokens, bucket, split=1)
    traffic = _layers_traffic(run, "forward", rows, bucket, a, split=1)
    return PhaseEstimate(
        name="prefill",
        parts=_rollout_residents(run)
        | {"logits": logits, "gathered_weights": run.gathered_in_rollout}
        | _forward_peak(run, rows, bucket, a),
        flops=flops,
        hbm_bytes=run.rollout_weight_bytes + traffic + run.kv_bytes(tokens) + logits,
        ici_bytes=run.rollout_ici(tokens),
    )


def decode_phase(run: RunSizes) -> PhaseEstimate:
    """One step of all slots; attention reads whole slots, however full they are."""
    slots, a, decoder = -(-run.config.rollout.slots // run.rollout_shards), run.rollout_activation, run.decoder
    cache, logits = run.kv_bytes(slots * run.cache_length), F32 * slots * decoder.vocab
    scores = F32 * slots * decoder.heads * run.cache_length
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
        flops=slots * 2 * run.matmul_count + _attention_flops(run, slots, run.cache_length, split=1),
        hbm_bytes=run.matmul_count * a + cache + calls + 2 * SAMPLER_LOGITS * logits,
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
        | {"working_weights": run.working_weights, "gathered_weights": _copied(run, head)}
        | max(_logits(run), _forward_peak(run, run.rows, run.row_tokens, a), key=_total),
        flops=_forward_flops(run),
        hbm_bytes=passes + run.own_count * (F32 + a),
        ici_bytes=(layers + head) * a * (run.fsdp - 1) // run.fsdp + 2 * run.tp_ici(tokens),
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
        + (6 if remat == "layer" else 4) * run.tp_ici(tokens),
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
    always = {"working_weights": run.working_weights, "gathered_weights": _copied(run, head)}
    kept = {"layer_inputs": decoder.layers * tokens * decoder.width * a}
    if saved := run.config.train.remat == "none":
        kept |= _saved(run)
    elif run.config.train.remat == "products":
        kept |= _saved_products(run)
    at_head = kept | {"gradients": gradients + head * a} | _logits(run, all_tokens=saved)
    in_layers = kept | {"gradients": gradients + F32 * run.own_layers} | _backward_peak(run)
    in_layers["gathered_weights"] = _copied(run, layers // decoder.layers)
    embedding = head if decoder.tied else head // 2
    # The layers' activations are gone by then, and what was gathered.
    at_embedding = {"gradients": gradients + F32 * (run.own_layers + embedding), "gathered_weights": 0}
    return max((always | each for each in (at_head, in_layers, at_embedding)), key=_total)


def _copied(run: RunSizes, count: int) -> int:
    """Bytes of this many parameters in the compute format; none where they compute as and where they are stored."""
    return 0 if run.fsdp == 1 and run.activation == F32 else count * run.activation


def _logits(run: RunSizes, *, all_tokens: bool = False) -> Parts:
    """Float32 logits of a chunk of tokens, or of all."""
    tokens = run.rows * run.row_tokens
    chunk = tokens if all_tokens else min(tokens, max(run.rows, run.config.train.head_chunk_tokens))
    return {"logits": chunk * run.decoder.vocab // run.tp * F32}


def _forward_peak(run: RunSizes, rows: int, length: int, a: int) -> Parts:
    """One layer of a forward pass: the scores of its attention, or its MLP, which begins when they are gone."""
    decoder, tokens = run.decoder, rows * length
    mask = {"attention_mask": tokens * length}
    scores = mask | {"attention_scores": F32 * tokens * length * decoder.heads}
    return max(scores, mask | {"layer_activations": MLP_FORWARD * tokens * decoder.mlp_width * a}, key=_total)


def _backward_peak(run: RunSizes) -> Parts:
    """One layer of a backward pass: its scores, recomputed, beside the MLP's gradients, or beside their own."""
    tokens, decoder, a = run.rows * run.row_tokens, run.decoder, run.activation
    scores = F32 * tokens * run.row_tokens * decoder.heads // run.tp
    arrays = MLP_BACKWARD if run.config.train.remat == "layer" else MLP_BACKWARD_SAVED
    mlp = arrays * tokens * decoder.mlp_width // run.tp * a
    return {
        "attention_mask": tokens * run.row_tokens,
        "attention_scores": scores + (scores if scores > mlp else 0),
        "layer_activations": RESIDUAL_BACKWARD * tokens * decoder.width * a + (0 if scores > mlp else mlp),
    }


def _saved(run: RunSizes) -> Parts:
    """What `remat: none` keeps of every layer for the backward pass, its gathered weights and its scores among it."""
    decoder, a, tokens = run.decoder, run.activation, run.rows * run.row_tokens
    layers, _ = run.gathered_counts
    width = 4 * decoder.width + 2 * (decoder.heads + decoder.kv_heads) * decoder.head_dim // run.tp
    return {
        "saved_activations": decoder.layers * tokens * (width + MLP_SAVED * decoder.mlp_width // run.tp) * a,
        "saved_scores": decoder.layers * tokens * run.row_tokens * decoder.heads // run.tp * SCORES_SAVED * F32,
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


def _attention_flops(run: RunSizes, queries: int, keys: int, *, split: int) -> int:
    """Scores and weighted sums of all layers. Where the scores do not fit in VMEM, the softmax makes them again."""
    decoder = run.decoder
    again = run.platform == "tpu" and F32 * queries * keys * decoder.heads // split >= VMEM
    return (6 if again else 4) * queries * keys * decoder.heads * decoder.head_dim * decoder.layers // split


def _forward_flops(run: RunSizes) -> int:
    """One forward pass of a micro-batch, logits included."""
    attention = _attention_flops(run, run.rows * run.row_tokens, run.row_tokens, split=run.tp)
    return _matmul_flops(run) // run.tp + attention


def _matmul_flops(run: RunSizes) -> int:
    """Operations of the forward pass's weights."""
    return 2 * run.rows * run.row_tokens * run.matmul_count


def _update_flops(run: RunSizes) -> int:
    """Forward, backward, and what is made again: of a whole layer all but its last product, which no gradient needs."""
    decoder, tokens = run.decoder, run.rows * run.row_tokens
    attention = 4 * tokens * run.row_tokens * decoder.heads * decoder.head_dim * decoder.layers
    again = {
        "none": 0,
        "layer": _matmul_flops(run) + attention - 2 * tokens * decoder.width * decoder.mlp_width * decoder.layers,
        "products": attention + 2 * tokens * decoder.vocab * decoder.width,
    }[run.config.train.remat]
    return _forward_flops(run) + (2 * (_matmul_flops(run) + attention) + again) // run.tp


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
    scores = F32 * rows * length**2 * run.decoder.heads // split
    traffic = MLP_TRAFFIC[kind] * (mlp if mlp > free else 0) + SCORE_TRAFFIC[kind] * (scores if scores > free else 0)
    return run.decoder.layers * traffic


def _total(parts: Parts) -> int:
    return sum(parts.values())
