"""The closed form of the bytes that an update moves through main memory in addition to the operands of its products. No
jax.

These are passes over activations, arrays saved for the backward pass, the thin products of adapters, gradients, and the
optimizer's step. A program that is bound by operations in its products waits for these bytes too, since other
instructions move them. Counts of arrays are those of compiled programs.

Here T are the tokens of a device's micro-batch, and `a` is the bytes per element of an activation.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from podium.config.attention_blocks import cut
from podium.models.blocks.experts import Experts
from podium.models.blocks.kind import Place
from podium.models.blocks.spec import ParamSpec
from podium.models.params import (
    GATHERED_AXES,
    LORA_A,
    LORA_B,
    NF4_CODES,
    axis_parts,
    frozen_dtype,
    frozen_specs,
    param_specs,
    trained_specs,
)
from podium.plan.request.phase_sizes import F32, RunSizes, local_count, optimizer_bytes, reduced_number
from podium.plan.traced.update_memory import LANES, expert_rows, feed_forward_inner, saved_bytes

PASSES: Mapping[str, int] = {"width": 20, "inner": 2, "rows": 22}
"""Arrays that a program moves in each layer, in addition to those of products: [T, D] (norms, residuals, copies into
other layouts and into fast memory), [T, F], and a token's rows for its experts, [T, k, D]."""
BEHIND_PASSES = 7
"""Additional arrays [T, D] per layer if mixer and feed-forward are followed by a norm."""
PADDED_PASSES = 2
"""Arrays of the heads' elements, and as many of the padded ones, for each of queries, outputs, keys, values and
gradients that a TPU's attention kernel takes or gives: they are padded, or cut, and put in its order."""
GROUP_PASSES = 12
"""Additional arrays [T, D] per layer if it computes rows in groups: groups are cut from the layer's rows and joined
again."""
SAVED_PASSES: Mapping[str, int] = {"tpu": 1, "gpu": 4}
"""How often a saved array is moved in addition to the products that make and read it: on a TPU, these read it where it
is; a GPU's program writes it into the stack of all layers, reads it there, and copies it for each."""
GROUPS_SAVED = 2
"""Additional times if rows are in groups, which have their own stack."""
RECOMPUTES = ("layer", "offload")
"""The values of `remat` with which whole layers are recomputed."""


class Thin(NamedTuple):
    """Passes of an adapter's two low-rank products over the inputs and outputs of its matrix."""

    inputs: int
    outputs: int


FORWARD = Thin(inputs=1, outputs=2)
"""The input is read; the sum with the frozen product is read and written."""
BACKWARD = Thin(inputs=4, outputs=3)
"""The input is read, its gradient read and written, by two products; the output's gradient is read by two, and made."""
SUMMED = 3
"""Arrays of a gradient that are moved to add it to the sum over micro-batches: two read, one written."""
STEPPED = 4
"""Arrays of a parameter's size that an optimizer step moves in addition to its state: the gradient, for the norm and
for the step, and the parameter, read and written."""
GATHERED = 2
"""Arrays of gathered weights that are moved in a micro-batch: one copied into another layout, read and written."""
UPDATE_KERNELS = 60
"""Kernels of a layer, forward and backward, that take no longer than a launch on a GPU: of some 150, those that slice
stacks of small arrays, reduce norms' gradients, or add to sums."""
BLOCK_KERNELS = 7
"""Kernels for each product of a pair of blocks of a row, the product's own among them, where attention is in blocks."""
REDUCED = 5
"""Arrays of gathered weights' gradients that are moved as devices reduce them: made, added in a ring, and kept."""


def update_passes(run: RunSizes, micro_batches: float) -> dict[str, int]:
    """Bytes that a device moves for a micro-batch in addition to the operands of products, by kind."""
    own = F32 * run.own_count
    several = run.spec.batch.max_micro_batches > 1
    step = STEPPED * own + 2 * optimizer_bytes(run)
    return {
        "activations": _layer_passes(run),
        "heads": _padded_heads(run),
        "saved": _saved(run),
        "adapters": _adapters(run),
        "joined": _joined(run),
        "codes": _decoded(run),
        "exchanged": _exchanged(run),
        "gradients": SUMMED * own if several else 0,
        "optimizer": int(step / micro_batches),
    }


def update_kernels(run: RunSizes, products: int) -> int:
    """Kernels of a micro-batch that a GPU launches for next to no work; on other devices, launches take no time.

    Attention in blocks takes one row and one pair of blocks after another, each with `products` of queries and keys.
    """
    found = UPDATE_KERNELS * run.decoder.layers * run.update.row_groups
    if run.update.attention != "blocks":
        return found
    blocks, _ = cut("blocks", run.row_tokens)
    layers = sum(count for count, _ in run.decoder.attention_layers())
    return found + BLOCK_KERNELS * products * layers * run.rows * blocks * (blocks + 1) // 2


def _layer_passes(run: RunSizes) -> int:
    """Passes over the activations of all layers."""
    width = PASSES["width"] + (GROUP_PASSES if run.update.row_groups > 1 else 0)
    numbers = 0
    for place in run.decoder.places:
        inner = PASSES["inner"] * feed_forward_inner(run.decoder, place) // run.tp
        rows = PASSES["rows"] * expert_rows(run.decoder, place)
        norms = BEHIND_PASSES * place.block.norms_behind
        numbers += len(place.layers) * ((width + norms) * run.decoder.width + inner + rows)
    return run.tokens * numbers * run.activation


def _padded_heads(run: RunSizes) -> int:
    """Passes around a TPU's attention kernel that pad rows to whole blocks, or heads to whole tiles, and cut results.

    Forward, it takes queries, keys and values and gives outputs, once more if layers are computed again; backward, it
    takes these and gives three gradients from one: of queries and outputs four, and as many of keys and values.
    """
    if run.update.attention != "tpu_kernel":
        return 0
    blocks, tokens = cut("tpu_kernel", run.row_tokens)
    arrays = (2 + 4) + 2 * (run.update.remat in RECOMPUTES)
    numbers = 0.0
    for count, attention in run.decoder.attention_layers():
        padding = blocks * tokens / run.row_tokens * max(1, LANES / attention.head_dim)
        heads = (attention.heads + attention.kv_heads) * attention.head_dim
        numbers += count * heads * PADDED_PASSES * (1 + padding) * (padding > 1)
    return int(arrays * run.tokens * numbers * run.activation) // run.tp


def _adapters(run: RunSizes) -> int:
    """The thin products of adapters, which are bound by the activations that they read and write."""
    if run.decoder.lora is None:
        return 0
    forward = 2 if run.update.remat in RECOMPUTES else 1
    into, out = (forward * first + second for first, second in zip(FORWARD, BACKWARD, strict=True))
    parts = axis_parts(GATHERED_AXES, run.mesh)
    numbers = 0
    for place in run.decoder.places:
        for name, spec in own_weights(trained_specs(run.decoder), place):
            passes = into if name.endswith(LORA_A) else out if name.endswith(LORA_B) else 0
            numbers += passes * _per_token(spec, place, parts)
    return int(run.tokens * numbers * run.activation)


def _saved(run: RunSizes) -> int:
    """Arrays that the forward pass saves for the backward pass."""
    passes = SAVED_PASSES["gpu" if run.platform == "gpu" else "tpu"]
    return (passes + GROUPS_SAVED * (run.update.row_groups > 1)) * sum(saved_bytes(run).values())


def _joined(run: RunSizes) -> int:
    """Bytes moved to join frozen weights in copies, which a GPU's compiler makes if there are adapters: forward and
    backward, for each group of rows.

    Experts are not copied: Pallas kernels read them in place.
    """
    if run.decoder.lora is None or run.platform != "gpu":
        return 0
    layers, _ = run.gathered_counts
    parts = axis_parts(GATHERED_AXES, run.mesh)
    experts = sum(local_count(spec, parts) for spec in param_specs(run.decoder).values() if "experts" in spec.axes)
    return run.update.row_groups * 2 * 2 * (layers - experts) * run.activation


def own_weights(specs: Mapping[str, ParamSpec], place: Place) -> Iterator[tuple[str, ParamSpec]]:
    """The weights of a place's layers."""
    return ((name, spec) for name, spec in specs.items() if name.startswith(place.prefix))


def _per_token(spec: ParamSpec, place: Place, parts: Mapping[str, int]) -> float:
    """Elements per token, over all of a place's layers, that an adapter's factor reads or writes, except along its
    rank.
    """
    pairs = zip(spec.shape, spec.axes, strict=True)
    own = [size / parts.get(axis or "", 1) for size, axis in list(pairs)[spec.stacked :] if axis != "rank"]
    kind = place.block.feed_forward
    times = kind.top if spec.stacked > 1 and isinstance(kind, Experts) else 1
    return len(place.layers) * math.prod(own) * times


def _decoded(run: RunSizes) -> int:
    """Frozen weights stored as codes: read, then written and read in the products' format, forward and backward."""
    parts = axis_parts(GATHERED_AXES, run.mesh)
    numbers = {"int8": 1, NF4_CODES: 2}  # in a code
    read = written = 0
    for name, spec in frozen_specs(run.decoder).items():
        codes = local_count(spec, parts)
        in_each = numbers.get(frozen_dtype(name, run.decoder), 0)
        read += codes * (in_each > 0)
        written += codes * in_each
    return 2 * (read + 2 * run.activation * written)


def _exchanged(run: RunSizes) -> int:
    """Weights that devices gather for products, and gradients that they reduce."""
    if run.shards == 1:
        return 0
    parts, reduced = axis_parts(GATHERED_AXES, run.mesh), reduced_number(run) if run.decoder.lora is None else 0
    moved = 0
    for spec in param_specs(run.decoder).values():
        copied = 0 if "experts" in spec.axes else GATHERED * run.activation  # experts keep their layout
        moved += local_count(spec, parts) * (copied + REDUCED * reduced)
    return moved
