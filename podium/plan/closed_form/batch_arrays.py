"""Arrays of the programs that compute a batch, in bytes on a device, as the closed form counts them. No jax."""

import math
from typing import NamedTuple

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
    param_specs,
    trained_specs,
)
from podium.plan.closed_form.operations import holds_scores
from podium.plan.closed_form.resident_memory import Parts
from podium.plan.request.phase_sizes import (
    ENDS,
    F32,
    RunSizes,
    fetched_bytes,
    fused_chunks,
    head_number,
    local_count,
    reduced_number,
)

BATCH_ARRAYS = 9
"""Arrays [K, B, T] of 4 bytes in a batch (`podium.train.batches.batch`), without those that a loss names."""
COPIED_LAYERS = 2
"""Layers whose inputs are on the device if they are stored on the host: the one in use, and the one being copied."""


def batch_bytes(run: RunSizes) -> Parts:
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


def layer_numbers(run: RunSizes, split: int) -> int:
    """Elements per token of what all layers compute on a device."""
    return sum(len(place.layers) * sum(_layer(run, place, split)) for place in run.decoder.places)


def forward_numbers(run: RunSizes, split: int) -> int:
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


def moved_bytes(run: RunSizes, times: int) -> int:
    """Bytes that a device moves if each array that its layers compute for a micro-batch is moved `times` times."""
    return times * run.tokens * run.activation * layer_numbers(run, run.tp)


def score_bytes(run: RunSizes) -> Parts:
    """Bytes of a layer's float32 scores where attention holds those of whole rows."""
    if not holds_scores(run):
        return {}
    return {
        "attention_scores": F32 * run.tokens // run.update.row_groups * run.row_tokens * run.decoder.heads // run.tp
    }


def update_peak(run: RunSizes) -> Parts:
    """Arrays at an update's peak: at the logits, in a layer's backward pass, or in the optimizer."""
    several = run.spec.batch.max_micro_batches > 1
    layers, ends = run.gathered_counts
    one_matrix = run.decoder.tied or run.decoder.scores != "none"
    head = ends if one_matrix else ends // 2  # embedding and head are one matrix, or two of one size
    always = {"working_weights": working_weights(run), "gathered_weights": copied_bytes(run, head, head_number(run))}
    # A single micro-batch needs no accumulated sum; embedding and head have no adapters.
    gradients = F32 * run.own_count if several else 0
    of_head = 0 if run.decoder.lora is not None else head * reduced_number(run)
    kept = _saved(run)
    logits = chunk_logits(run)
    if run.spec.compared is not None:
        logits = {"logits": 2 * logits["logits"]}
    at_head = kept | {"gradients": gradients + of_head} | logits
    scores = {name: 2 * size for name, size in score_bytes(run).items()}  # with their gradient
    layer = run.tokens // run.update.row_groups * run.activation * _backward_numbers(run, run.tp)
    backward = {"layer_activations": layer} | scores
    in_layers = kept | backward | {"gradients": gradients + F32 * run.own_count}
    in_layers["gathered_weights"] = always["gathered_weights"] + 2 * copied_bytes(run, layers // run.decoder.layers)
    at_optimizer = {"gradients": F32 * run.own_count, "gathered_weights": 0, "fetched_moments": fetched_bytes(run)}
    return max((always | each for each in (at_head, in_layers, at_optimizer)), key=total_bytes)


def _saved(run: RunSizes) -> Parts:
    """What the forward pass of an update keeps on the device for the backward pass.

    With `remat: none` also the weights as they were gathered and the logits of all chunks, since gathers and products
    are not repeated.
    """
    remat, one = run.update.remat, run.tokens * run.decoder.width * run.activation
    inputs = {"layer_inputs": (COPIED_LAYERS if remat == "offload" else run.decoder.layers) * one}
    if remat == "none":
        # Softmax's gradient needs its float32 results, and the products' these in the compute format.
        scores = run.decoder.layers * run.update.row_groups * sum(score_bytes(run).values())
        scores += scores * run.activation // F32
        logits = F32 * run.tokens * run.decoder.outputs // run.tp if run.update.head != "fused" else 0
        saved = {"saved_activations": moved_bytes(run, 1), "saved_scores": scores, "saved_weights": _saved_weights(run)}
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


def chunk_logits(run: RunSizes) -> Parts:
    """Float32 logits of one chunk of an update's head. Fused: a chunk's gradient."""
    if run.update.head == "fused":
        return {"logits": fused_chunks(run)[1] * run.decoder.vocab * head_number(run)}
    columns = max(1, min(run.row_tokens // run.sp, run.update.head_chunk_tokens // run.rows))
    return {"logits": F32 * columns * run.rows * run.decoder.outputs // run.tp}


def copied_bytes(run: RunSizes, count: int, number: int = 0) -> int:
    """Bytes of `count` parameters copied into the compute format; 0 if they are used in place, as stored."""
    number, stored = number or run.activation, F32 if run.decoder.lora is None else 2
    return 0 if run.shards == 1 and number == stored else count * number


def working_weights(run: RunSizes) -> int:
    """Bytes of a device's parameters in the compute format; 0 if that is float32.

    Also 0 on a GPU, whose compiler converts them layer by layer inside the loop.
    """
    return run.activation * run.own_count if run.activation < F32 and run.platform != "gpu" else 0


def total_bytes(parts: Parts) -> int:
    """Bytes of all parts."""
    return sum(parts.values())
