"""The closed form of an update's peak memory; `podium.plan.traced.estimate` has the rest.

B rows are those of one device; `a` is the bytes per element of an activation.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

from podium.config.recurrence import whole_tiles
from podium.models.architecture import DecoderConfig
from podium.models.blocks.attention import Attention
from podium.models.blocks.delta import CHUNK, DeltaNet
from podium.models.blocks.experts import Experts
from podium.models.blocks.kind import Place
from podium.models.params import (
    GATHERED_AXES,
    LORA_B,
    NF4_CODES,
    axis_parts,
    frozen_dtype,
    frozen_specs,
    own_name,
    trained_specs,
)
from podium.plan.request.phase_sizes import (
    F32,
    RunSizes,
    ends_count,
    fetched_bytes,
    fused_chunks,
    head_number,
    local_count,
    reduced_number,
)

Parts = dict[str, int]

BACKWARD: Mapping[str, tuple[int, int, int]] = {"tpu": (3, 5, 3), "gpu": (3, 6, 5), "reference": (1, 4, 0)}
"""Arrays alive at the peak of a layer's backward pass: [B, T, F], [B, T, D], and [B, T, (H + K) Q]; fewer with the
reference attention, which holds the scores too. Fitted, like the counts below, to programs near the memory limit."""
ADAPTED_MLP = 1
"""Additional arrays [B, T, F] at that peak on a TPU if the MLP's matrices have adapters, whose products are added."""
EXPERT_ROWS = 2
"""Arrays of a token's rows for each of its experts, [B, T, k, D], alive at that peak; fitted to Qwen3-30B-A3B."""
MLP_SAVED = 3  # arrays [B, T, F] saved per layer with `remat: none`; arrays between the MLP's products are recomputed
OFFLOADING = 3  # layers whose inputs are being copied to or from host memory
NORMS_SAVED = {"tpu": 3.0, "gpu": 3.5}  # arrays [B, T, D] saved per layer with `remat: none`, beside the layer's input
# Float32 arrays [B, H, T, T] of each layer that `remat: none` saves beside one in compute format.
SCORES_SAVED = {"tpu": 1, "gpu": 2}
RESIDUAL_GROUPS = 3  # arrays [B, T, D] beside those of a row group
SCORES = {"tpu": 2.0, "v5e": 1.65, "v6e": 4.25, "gpu": 2.85}
"""Float32 score arrays [B, H, T, T] alive at once without a kernel; v6e: for rows too long for VMEM. Updates on
GPUs had 2.5 (Qwen2.5-1.5B) to 3.0 (Qwen2.5-7B, Qwen3-8B), with and without adapters."""
LONG_ROW = 4096
MLP = ("gate", "up", "down")
RULE_ARRAYS = 4
"""Arrays of each shape alive in a forward pass of the delta rule, counted in its program."""
RULE_BACKWARD = {"tpu": 2.0, "gpu": 3.2}
"""Ratio of the arrays alive in its backward pass to those in its forward pass."""
RULE_OF_GROUP = 1.75
"""Like RULE_BACKWARD, on a GPU where a layer computes its rows in groups, one per iteration of a loop."""
IN_ORDER: Mapping[str, tuple[int, int]] = {"tpu": (1, 4), "gpu": (4, 5)}
"""Additional arrays [B, T, F] and [B, T, D] at that peak if the layers of a pattern are recomputed one after another,
with barriers between them; counted in updates of Gemma 3 1B and 4B and Qwen3.5-9B, with and without adapters."""
AHEAD, AHEAD_IN_LOOP = 2, 1
"""Layers of a pattern that a TPU recomputes before they are needed with `remat: offload`, and how many where several
micro-batches are computed in a loop. Counted in nine updates of Gemma 3 1B, 4B and 12B."""
KERNEL_ARRAYS, KERNEL_VALUES = 5, 3
"""Arrays of the sizes of queries, keys and values around a TPU kernel of the delta rule, before and after convolution,
activation and a change of layout, and of the values' alone: gates, results, normed results. Counted in Qwen3.5-9B's."""
KERNEL_SAVED: Mapping[str, tuple[int, int]] = {"all": (14, 12), "adapters": (6, 8)}
"""Float32 arrays of the sizes of keys and of values that `remat: none` saves around such a kernel, in addition to the
states of chunks: with all weights trained, and with adapters, for which the inputs of frozen convolutions are not
needed."""
KERNEL_SAVED_NARROW = 2, 3
"""Like KERNEL_SAVED, for arrays in the compute format."""
RULE_SAVED = 2.45
"""Ratio of what `remat: none` saves of a delta rule without a kernel to its arrays in a forward pass; counted in
Qwen3.5-9B on a GPU."""
CODE = 100 * 2**20
"""Bytes of a TPU's programs for each layer of a pattern beyond the first, since each has its own instructions. The
updates of Gemma 3 1B, gpt-oss-20b, Qwen3.5-9B and 35B-A3B have 41 to 76 MiB per layer, and plans with all their
programs at least 100 for each layer beyond the first; the first layer's are included in the fits above."""
LANES = 128  # a TPU's attention kernel pads heads to this many elements


def update_peak(run: RunSizes) -> Parts:
    """Arrays at an update's peak: at the logits, in a layer's backward pass, after it, or in the optimizer."""
    a, decoder = run.activation, run.decoder
    tokens = run.tokens
    layers, head = run.gathered_counts
    several = run.spec.batch.max_micro_batches > 1  # a single micro-batch needs no accumulated sum
    gradients = F32 * run.own_count if several else 0
    ends = 1 if decoder.tied or decoder.scores != "none" else 2  # embedding and head are one matrix, or two of one size
    gathered = copied(run, head // ends, head_number(run))  # rows of the embedding are taken where it is stored
    always = {"working_weights": working_weights(run), "gathered_weights": gathered}
    if run.platform == "tpu" and len(decoder.places) > 1:
        always["code"] = CODE * (len(decoder.places) - 1)
    offload = run.update.remat == "offload"
    kept = {"layer_inputs": (OFFLOADING if offload else decoder.layers) * tokens * decoder.width * a}
    if saved := run.update.remat == "none":
        kept |= _saved(run)
    elif run.update.remat == "products":
        kept |= _saved_products(run)
    frozen = decoder.lora is not None
    if frozen:  # only the adapters have gradients, and embedding and head have no adapters
        head = 0
    at_head = kept | {"gradients": gradients + head * reduced_number(run)} | loss_logits(run, all_tokens=saved)
    if run.spec.compared is not None:
        at_head["logits"] *= 2
    of_layers = F32 * own_layers(run) + (0 if frozen else _relaid(run))
    embedding = head // ends
    # A TPU's compiler computes the embedding's own gradient after the layers', and for a v5p has reduced the head's.
    early = embedding if _compiler(run) == "tpu" else head
    early //= run.shards if run.accelerator.generation == "v5p" else 1
    in_layers = kept | {"gradients": gradients + of_layers + early * reduced_number(run)} | _backward_peak(run)
    in_layers["gathered_weights"] = copied(run, layers // decoder.layers)
    if run.update.row_groups > 1:  # a layer's weights, and the sum of their gradients
        in_layers["gathered_weights"] += (1 if reduced_number(run) > a else 2) * F32 * layers // decoder.layers
    # By then, the layers' activations and gathered weights are freed.
    at_embedding = {"gradients": gradients + F32 * (own_layers(run) + embedding), "gathered_weights": 0}
    at_optimizer = {"gradients": F32 * run.own_count, "gathered_weights": 0, "fetched_moments": fetched_bytes(run)}
    moments = (at_head, in_layers, at_embedding, *([at_optimizer] if at_optimizer["fetched_moments"] else []))
    return max((always | each for each in moments), key=lambda parts: sum(parts.values()))


def _relaid(run: RunSizes) -> int:
    """Bytes of gradients that a GPU's compiler copies into another layout to reduce them: one of each matrix kind."""
    if run.platform != "gpu" or run.shards * run.tp == 1:
        return 0
    layers = run.decoder.width * run.decoder.total(lambda work: work.inner)
    return F32 * (layers // (run.shards * run.tp) + ends_count(run.decoder, run.train_parts))


def copied(run: RunSizes, count: int, number: int = 0) -> int:
    """Bytes of `count` parameters copied into the compute format; 0 if they are used in place, as stored."""
    number, stored = number or run.activation, F32 if run.decoder.lora is None else 2
    return 0 if run.shards == 1 and number == stored else count * number


def own_layers(run: RunSizes) -> int:
    """Number of trained parameters of the layers, without embedding and head, that a device stores."""
    return run.own_count - (ends_count(run.decoder, run.train_parts) if run.decoder.lora is None else 0)


def working_weights(run: RunSizes) -> int:
    """Bytes of a device's parameters in the compute format; 0 if that is float32.

    Also 0 on a GPU, whose compiler converts them layer by layer inside the loop.
    """
    return run.activation * run.own_count if run.activation < F32 and run.platform != "gpu" else 0


def loss_logits(run: RunSizes, *, all_tokens: bool = False) -> Parts:
    """Float32 logits of one chunk; with `all_tokens`, of all plus a chunk's gradient. Fused: a chunk's gradient."""
    if run.update.head == "fused":
        return {"logits": fused_chunks(run)[1] * run.decoder.vocab * head_number(run)}
    of_column = run.rows * run.decoder.outputs // run.tp
    length = run.row_tokens // run.sp
    columns = max(1, min(length, run.update.head_chunk_tokens // run.rows))
    if not all_tokens:
        return {"logits": columns * of_column * F32}
    gradient = run.activation if run.platform == "gpu" else F32
    return {"logits": of_column * (-(-length // columns) * columns * F32 + columns * gradient)}


def _backward_peak(run: RunSizes) -> Parts:
    """Arrays of recomputed layers in the backward pass."""
    decoder, a = run.decoder, run.activation
    tokens = run.tokens // run.update.row_groups
    places = iter(decoder.places)
    patterns = [list(itertools.islice(places, len(stack.pattern))) for stack in decoder.stacks]
    activations = tokens * max(_pattern_peak(run, pattern) for pattern in patterns)
    if run.update.row_groups > 1:
        arrays = RESIDUAL_GROUPS - (run.update.remat == "offload")  # one is among the inputs that are being copied
        activations += arrays * run.tokens * decoder.width * a
    if run.update.attention != "reference":
        return {"layer_activations": activations}
    scores = F32 * tokens * run.row_tokens * decoder.heads // run.tp
    return {"attention_scores": int(_score_arrays(run) * scores), "layer_activations": activations}


def _ahead(run: RunSizes, places: Sequence[Place]) -> int:
    """The largest number of layers of a pattern that are recomputed before they are needed.

    This happens only if their inputs are copied from the host, because no barrier holds back these copies, and not with
    the delta rule: an update of Gemma 3 1B took 23.2 GiB on v6e-8, where recomputing one by one would take 12.0;
    Qwen3.5-9B's took no more than that.
    """
    held = run.update.row_groups > 1 or any(isinstance(place.block.mixer, DeltaNet) for place in places)
    if _compiler(run) != "tpu" or run.update.remat != "offload" or held:
        return 0
    return AHEAD_IN_LOOP if run.spec.batch.max_micro_batches > 1 else AHEAD


def _pattern_peak(run: RunSizes, places: Sequence[Place]) -> int:
    """Bytes per token of a pattern's recomputed layers: the largest sum of a layer in its backward pass and those ahead
    of it.
    """
    ahead = _ahead(run, places)
    recomputed = [_recomputed_bytes(run, place) for place in places]
    peaks = enumerate(_backward_bytes(run, place) for place in places)
    return max(peak + sum(recomputed[max(0, number - ahead) : number]) for number, peak in peaks)


def _backward_bytes(run: RunSizes, place: Place) -> int:
    """Bytes per token of the arrays of one recomputed layer at the peak of its backward pass."""
    decoder = run.decoder
    mlp, width, heads = BACKWARD[run.update.attention if run.update.attention == "reference" else _compiler(run)]
    if _compiler(run) == "tpu" and any(own_name(name).startswith(MLP) for name in trained_specs(decoder)):
        mlp += ADAPTED_MLP if decoder.lora is not None else 0
    alone = run.update.remat == "none" or (_compiler(run) == "gpu" and run.update.row_groups > 1)
    if any(len(stack.pattern) > 1 for stack in decoder.stacks) and not alone:
        more = IN_ORDER[_compiler(run)]
        mlp, width = mlp + more[0], width + more[1]
    split = mlp * feed_forward_inner(decoder, place) + heads * _attended_heads(run, place)
    numbers = width * decoder.width + split // run.tp + EXPERT_ROWS * expert_rows(decoder, place)
    return numbers * run.activation + _rule_backward(run, place) // run.tp


def _recomputed_bytes(run: RunSizes, place: Place) -> int:
    """Bytes per token that a recomputed layer holds until its backward pass, including the inputs of norms."""
    a = run.activation
    split = a * (MLP_SAVED * feed_forward_inner(run.decoder, place) + _saved_heads(run, place))
    return _norm_bytes(run, place) + (split + _rule_recomputed(run, place)) // run.tp


def _norm_bytes(run: RunSizes, place: Place) -> int:
    """Bytes per token of the outputs of norms, and of the inputs of the second norm and of norms after a mixer or
    MLP.
    """
    norms = NORMS_SAVED[_compiler(run)] + 2 * place.block.norms_behind
    return int(norms * run.decoder.width * run.activation)


def feed_forward_inner(decoder: DecoderConfig, place: Place) -> int:
    """Elements per token between the products of the feed-forward at a place."""
    return place.block.feed_forward.work(decoder.width).inner


def rule_bytes(place: Place) -> int:
    """Bytes per token of a forward pass's arrays in the recurrence at a place; 0 where it has attention.

    Per value head, in float32: arrays within chunks, keys for both states, values, and the states of each chunk.
    """
    net = place.block.mixer
    if not isinstance(net, DeltaNet):
        return 0
    states = 2 * net.key_dim * net.value_dim // CHUNK
    return F32 * net.value_heads * (RULE_ARRAYS * (CHUNK + 2 * net.key_dim + net.value_dim) + states)


def _rule_backward(run: RunSizes, place: Place) -> int:
    """Bytes per token of the arrays in the backward pass of the recurrence at a place; 0 where it has attention."""
    found = _rule_recomputed(run, place)
    if has_kernel(run, place):
        return found
    of_group = _compiler(run) == "gpu" and run.update.row_groups > 1
    return int((RULE_OF_GROUP if of_group else RULE_BACKWARD[_compiler(run)]) * found)


def _rule_recomputed(run: RunSizes, place: Place) -> int:
    """Bytes per token of the arrays that a recurrence holds for its backward pass; 0 where a place has attention."""
    net = place.block.mixer
    if not isinstance(net, DeltaNet):
        return 0
    if not has_kernel(run, place):
        return rule_bytes(place)
    values = net.value_heads * net.value_dim
    inputs = 2 * net.key_heads * net.key_dim + values
    return (KERNEL_ARRAYS * inputs + KERNEL_VALUES * values) * run.activation + F32 * _states(net)


def _rule_saved(run: RunSizes, place: Place) -> int:
    """Bytes per token that `remat: none` saves of a recurrence at a place; 0 where a place has attention."""
    net = place.block.mixer
    if not isinstance(net, DeltaNet):
        return 0
    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    trained, frozen, narrow = (
        of_keys * keys + of_values * values
        for of_keys, of_values in (KERNEL_SAVED["all"], KERNEL_SAVED["adapters"], KERNEL_SAVED_NARROW)
    )
    adapters = run.decoder.lora is not None
    if has_kernel(run, place):
        return F32 * ((frozen if adapters else trained) + _states(net)) + run.activation * narrow
    return int(RULE_SAVED * rule_bytes(place)) - F32 * adapters * (trained - frozen)


def _states(net: DeltaNet) -> int:
    """Elements per token of the states before each chunk."""
    return 2 * net.value_heads * net.key_dim * net.value_dim // CHUNK


def has_kernel(run: RunSizes, place: Place) -> bool:
    """Whether a kernel computes the delta rule at a place."""
    net = place.block.mixer
    whole = isinstance(net, DeltaNet) and whole_tiles((net.value_heads, net.key_dim, net.value_dim))
    return run.platform == "tpu" and whole


def expert_rows(decoder: DecoderConfig, place: Place) -> int:
    """Elements per token of the rows for all of its experts; 0 if a place has no experts."""
    kind = place.block.feed_forward
    return kind.top * decoder.width if isinstance(kind, Experts) else 0


def _attended_heads(run: RunSizes, place: Place) -> int:
    """Elements per token of queries and keys at a place, in attention; each device has at least one key head."""
    mixer = place.block.mixer
    if not isinstance(mixer, Attention):
        return 0
    return (mixer.heads + max(mixer.kv_heads, min(run.sp, mixer.heads))) * _lanes(run, mixer)


def _saved_heads(run: RunSizes, place: Place) -> int:
    """Elements per token of queries, attention outputs, keys and values, and of heads before their norm."""
    mixer = place.block.mixer
    if not isinstance(mixer, Attention):
        return 0
    return (mixer.heads + mixer.kv_heads) * _lanes(run, mixer) * (2 + mixer.norm)


def _lanes(run: RunSizes, attention: Attention) -> int:
    """Elements that a head takes in memory, padding included."""
    return max(attention.head_dim, LANES) if run.update.attention == "tpu_kernel" else attention.head_dim


def _score_arrays(run: RunSizes) -> float:
    """Number of score arrays alive in a layer's backward pass."""
    kind = "gpu" if run.platform == "gpu" else run.accelerator.generation
    return SCORES["tpu"] if kind == "v6e" and run.row_tokens <= LONG_ROW else SCORES.get(kind, SCORES["tpu"])


def _compiler(run: RunSizes) -> str:
    """The compiler whose constants apply; CPU programs are estimated like a TPU's."""
    return "gpu" if run.platform == "gpu" else "tpu"


def _saved(run: RunSizes) -> Parts:
    """Bytes that `remat: none` saves of every layer for the backward pass: activations, scores and gathered weights."""
    decoder = run.decoder
    a = run.activation
    tokens = run.tokens
    layers, _ = run.gathered_counts
    parts = axis_parts(GATHERED_AXES, run.mesh)
    # Weights are saved as products read them: a code of nf4 holds two numbers.
    frozen = frozen_specs(decoder).items()
    layers += sum(local_count(spec, parts) for name, spec in frozen if frozen_dtype(name, decoder) == NF4_CODES)
    activations = 0
    for place in decoder.places:
        split = MLP_SAVED * feed_forward_inner(decoder, place) * a
        split += _saved_heads(run, place) * a + _rule_saved(run, place)
        activations += len(place.layers) * tokens * (_norm_bytes(run, place) + split // run.tp)
    per_pair = SCORES_SAVED[_compiler(run)] * F32 + a
    of_query = run.row_tokens * per_pair if run.update.attention == "reference" else F32  # the logsumexp of its scores
    heads = sum(count * attention.heads for count, attention in decoder.attention_layers())
    return {
        "saved_activations": activations,
        "saved_scores": tokens * heads // run.tp * of_query,
        "saved_weights": layers * a,
    }


def _saved_products(run: RunSizes) -> Parts:
    """Bytes that `remat: products` saves of every layer: the results of products with weights, except those of
    experts.
    """
    decoder, tokens = run.decoder, run.tokens
    numbers = 0
    for place in decoder.places:
        kind = place.block.feed_forward
        split = kind.work(decoder.width).outputs
        if isinstance(kind, Experts):  # grouped products' results are computed again
            split -= 2 * kind.top * kind.width
        if isinstance(mixer := place.block.mixer, Attention):
            split += (mixer.heads + 2 * mixer.kv_heads) * _lanes(run, mixer)
        else:
            split += mixer.work(decoder.width).outputs
        outputs = 2 if place.block.norms_behind else 1  # the feed-forward's is kept for its norm, or only added
        numbers += len(place.layers) * (outputs * decoder.width + split // run.tp)
    return {"saved_activations": tokens * (numbers + _adapter_products(run)) * run.activation}


def saved_bytes(run: RunSizes) -> Parts:
    """Bytes that an update's forward pass saves for its backward pass, by kind; in device memory, or copied to the
    host.
    """
    found = {"layer_inputs": run.decoder.layers * run.tokens * run.decoder.width * run.activation}
    if run.update.remat == "none":
        found |= _saved(run)
        del found["saved_weights"]  # gathered, not made
    elif run.update.remat == "products":
        found |= _saved_products(run)
    return found


def _adapter_products(run: RunSizes) -> int:
    """Elements per token of the results of both products of each adapter, without those of its frozen matrix.

    Adapters of experts are left out.
    """
    numbers = 0
    for name, spec in trained_specs(run.decoder).items():
        if name.endswith(LORA_B) and "expert" not in name:
            rank, *outputs = spec.shape[spec.stacked :]
            parts = 1 if spec.axes[-1] == "width" else run.tp
            numbers += math.prod(spec.shape[: spec.stacked]) * (rank + math.prod(outputs) // parts)
    return numbers
