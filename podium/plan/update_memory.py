"""The closed form of an update's memory at the worst of its moments; `podium.plan.estimate` has the rest.

B rows are a device's own; `a` is the size of an activation's number in bytes.
"""

from collections.abc import Mapping

from podium.models.architecture import DecoderConfig
from podium.models.blocks.attention import Attention
from podium.models.blocks.kind import Place
from podium.plan.sizes import F32, RunSizes, ends_count, fetched_bytes, fused_chunks, head_number, reduced_number

Parts = dict[str, int]

BACKWARD: Mapping[str, tuple[int, int, int]] = {"tpu": (3, 5, 3), "gpu": (3, 6, 5), "reference": (1, 4, 0)}
"""What a layer's backward pass holds at its peak: arrays [B, T, F], [B, T, D], and of all queries and keys together;
beside arrays of all scores fewer. Fitted to programs at the limit of the memory, as are the numbers of such arrays."""
MLP_SAVED = 3  # arrays [B, T, F] of each layer, where nothing but what lies between its products is made again
OFFLOADING = 3  # layers whose inputs are on their way to the host's memory, or back
NORMS_SAVED = {"tpu": 3.0, "gpu": 3.5}  # arrays [B, T, D], beside the layers' inputs
SCORES_SAVED = 2  # float32 arrays [B, H, T, T] of each layer, there too; GPUs keep one in the products' format besides
RESIDUAL_GROUPS = 3  # arrays [B, T, D] beside those of a group, where rows are cut into groups
SCORES = {"tpu": 2.0, "v5e": 1.65, "v6e": 4.25, "gpu": 2.85}
"""Arrays of float32 scores [B, H, T, T] that it holds where no kernel spares them; v6e: of rows too long for VMEM."""
LONG_ROW = 4096
LANES = 128  # of a TPU: numbers to which its attention kernel pads a head


def update_peak(run: RunSizes) -> Parts:
    """What an update makes at its worst: at the logits, in a layer's backward pass, after both, in the optimizer."""
    a, decoder = run.activation, run.decoder
    tokens = run.tokens
    layers, head = run.gathered_counts
    several = run.spec.batch.max_micro_batches > 1  # of a lone micro-batch there is no sum
    gradients = F32 * run.own_count if several else 0
    always = {"working_weights": working_weights(run), "gathered_weights": copied(run, head, head_number(run))}
    offload = run.update.remat == "offload"
    kept = {"layer_inputs": (OFFLOADING if offload else decoder.layers) * tokens * decoder.width * a}
    if saved := run.update.remat == "none":
        kept |= _saved(run)
    elif run.update.remat == "products":
        kept |= _saved_products(run)
    frozen = decoder.lora is not None
    if frozen:  # no gradients but the adapters', which are no part of the ends
        head = 0
    at_head = kept | {"gradients": gradients + head * reduced_number(run)} | loss_logits(run, all_tokens=saved)
    of_layers = F32 * own_layers(run) + (0 if frozen else _relaid(run))
    in_layers = kept | {"gradients": gradients + of_layers + head * reduced_number(run)} | _backward_peak(run)
    in_layers["gathered_weights"] = copied(run, layers // decoder.layers)
    if run.update.row_groups > 1:  # a layer's weights, and the sum of their gradients
        in_layers["gathered_weights"] += (1 if reduced_number(run) > a else 2) * F32 * layers // decoder.layers
    embedding = head if decoder.tied else head // 2
    # The layers' activations are gone by then, and what was gathered.
    at_embedding = {"gradients": gradients + F32 * (own_layers(run) + embedding), "gathered_weights": 0}
    at_optimizer = {"gradients": F32 * run.own_count, "gathered_weights": 0, "fetched_moments": fetched_bytes(run)}
    moments = (at_head, in_layers, at_embedding, *([at_optimizer] if at_optimizer["fetched_moments"] else []))
    return max((always | each for each in moments), key=lambda parts: sum(parts.values()))


def _relaid(run: RunSizes) -> int:
    """Bytes of gradients that a GPU's compiler lays out anew for their sum over devices: one of each kind of matrix."""
    if run.platform != "gpu" or run.shards * run.tp == 1:
        return 0
    layers = run.decoder.width * run.decoder.total(lambda work: work.inner)
    return F32 * (layers // (run.shards * run.tp) + ends_count(run.decoder, run.train_parts))


def copied(run: RunSizes, count: int, number: int = 0) -> int:
    """Bytes of this many parameters in the compute format; none where they compute as and where they are stored."""
    number, stored = number or run.activation, F32 if run.decoder.lora is None else 2
    return 0 if run.shards == 1 and number == stored else count * number


def own_layers(run: RunSizes) -> int:
    """Trained parameters of the layers, without embedding and head, that a device stores."""
    return run.own_count - (ends_count(run.decoder, run.train_parts) if run.decoder.lora is None else 0)


def working_weights(run: RunSizes) -> int:
    """Bytes of a device's parameters in the format of the products; none where that is float32, or made layer by layer.

    A GPU's compiler makes them in the loop over the layers.
    """
    return run.activation * run.own_count if run.activation < F32 and run.platform != "gpu" else 0


def loss_logits(run: RunSizes, *, all_tokens: bool = False) -> Parts:
    """Float32 logits of a chunk of tokens, or of all and the gradient of a chunk's; of a fused head that alone."""
    if run.update.head == "fused":
        return {"logits": fused_chunks(run)[1] * run.decoder.vocab * head_number(run)}
    of_column = run.rows * run.decoder.vocab // run.tp
    length = run.row_tokens // run.sp
    columns = max(1, min(length, run.update.head_chunk_tokens // run.rows))
    if not all_tokens:
        return {"logits": columns * of_column * F32}
    gradient = run.activation if run.platform == "gpu" else F32
    return {"logits": of_column * (-(-length // columns) * columns * F32 + columns * gradient)}


def _backward_peak(run: RunSizes) -> Parts:
    """One layer of a backward pass, recomputed, with the gradients that are made of it."""
    decoder = run.decoder
    a = run.activation
    tokens = run.tokens // run.update.row_groups
    mlp, width, heads = BACKWARD[run.update.attention if run.update.attention == "reference" else _compiler(run)]
    split = max(
        mlp * feed_forward_inner(decoder, place) + heads * _attended_heads(run, place) for place in decoder.places
    )
    activations = tokens * (width * decoder.width + split // run.tp) * a
    if run.update.row_groups > 1:
        activations += RESIDUAL_GROUPS * run.tokens * decoder.width * a
    if run.update.attention != "reference":
        return {"layer_activations": activations}
    scores = F32 * tokens * run.row_tokens * decoder.heads // run.tp
    return {"attention_scores": int(_score_arrays(run) * scores), "layer_activations": activations}


def feed_forward_inner(decoder: DecoderConfig, place: Place) -> int:
    """Numbers of a token between the products of the feed-forward at a place."""
    return place.block.feed_forward.work(decoder.width).inner


def _attended_heads(run: RunSizes, place: Place) -> int:
    """Numbers of a token's queries and keys at a place, as attention has them; each device has one key at least."""
    mixer = place.block.mixer
    if not isinstance(mixer, Attention):
        return 0
    return (mixer.heads + max(mixer.kv_heads, min(run.sp, mixer.heads))) * _lanes(run, mixer)


def _lanes(run: RunSizes, attention: Attention) -> int:
    """Numbers that a head takes in memory."""
    return max(attention.head_dim, LANES) if run.update.attention == "tpu_kernel" else attention.head_dim


def _score_arrays(run: RunSizes) -> float:
    """How many arrays of scores a layer's backward pass holds."""
    kind = "gpu" if run.platform == "gpu" else run.accelerator.generation
    return SCORES["tpu"] if kind == "v6e" and run.row_tokens <= LONG_ROW else SCORES.get(kind, SCORES["tpu"])


def _compiler(run: RunSizes) -> str:
    """Whose constants hold: a CPU's programs are counted as a TPU's."""
    return "gpu" if run.platform == "gpu" else "tpu"


def _saved(run: RunSizes) -> Parts:
    """What `remat: none` keeps of every layer for the backward pass, its gathered weights and its scores among it."""
    decoder = run.decoder
    a = run.activation
    tokens = run.tokens
    layers, _ = run.gathered_counts
    # What the norms give, and the second's input; queries, what is attended, keys and values; heads before their norm.
    width = int(NORMS_SAVED[_compiler(run)] * decoder.width * a)
    activations = 0
    for place in decoder.places:
        split = MLP_SAVED * feed_forward_inner(decoder, place) * a
        if isinstance(mixer := place.block.mixer, Attention):
            split += (mixer.heads + mixer.kv_heads) * _lanes(run, mixer) * (2 + mixer.norm) * a
        activations += len(place.layers) * tokens * (width + split // run.tp)
    per_pair = SCORES_SAVED * F32 + (run.platform == "gpu") * a
    of_query = run.row_tokens * per_pair if run.update.attention == "reference" else F32  # the logarithm of their sum
    heads = sum(count * attention.heads for count, attention in decoder.attention_layers())
    return {
        "saved_activations": activations,
        "saved_scores": tokens * heads // run.tp * of_query,
        "saved_weights": layers * a,
    }


def _saved_products(run: RunSizes) -> Parts:
    """What `remat: products` keeps of every layer: the results of its products with weights."""
    decoder, tokens = run.decoder, run.tokens
    numbers = 0
    for place in decoder.places:
        split = place.block.feed_forward.work(decoder.width).outputs
        if isinstance(mixer := place.block.mixer, Attention):
            split += (mixer.heads + 2 * mixer.kv_heads) * _lanes(run, mixer)
        numbers += len(place.layers) * (decoder.width + split // run.tp)
    return {"saved_activations": tokens * numbers * run.activation}
