"""The closed form of forward passes on GPUs: traffic other than weights and cache, and kernel launches. No jax.

XLA's programs for GPUs keep nothing in fast memory between two kernels, so each pass over activations counts, and small
kernels take as long as a launch. Counts are those of compiled programs, kernel by kernel: prefills of Qwen2.5-0.5B and
of Gemma 3 27B with adapters, decode steps of these and of Qwen3-0.6B with adapters in bfloat16 and beside int8, whose
score was counted too.

Here R rows of T tokens are those of one device, and `a` is the bytes per element of an activation.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from podium.config.attention_blocks import cache_block_pages, window_blocks
from podium.config.sizes import ring_pages, ring_piece, table_pages, touched_pages
from podium.models.architecture import DecoderConfig, rollout_decoder
from podium.models.blocks.attention import Attention
from podium.models.blocks.experts import Experts
from podium.models.blocks.kind import Place
from podium.models.blocks.spec import ParamSpec, is_matrix
from podium.models.params import (
    GATHERED_AXES,
    LORA_A,
    LORA_B,
    NF4_CODES,
    SCALE,
    axis_parts,
    frozen_dtype,
    is_adapter,
    own_name,
    param_specs,
)
from podium.plan.request.phase_sizes import ENDS, F32, RunSizes, local_count
from podium.plan.traced.update_memory import expert_rows, feed_forward_inner
from podium.plan.traced.update_traffic import own_weights

WIDTH_PASSES, BEHIND_PASSES = 13, 5
"""Arrays [R, T, D] that a layer moves in norms and sums, and those of norms after mixer and MLP."""
QUERY_PASSES, KEY_PASSES, STORED_PASSES = 3, 4, 10
"""Arrays of queries and of keys that a layer moves to rotate them and to order outputs; and of keys to store these and
values in pages."""
INNER_PRODUCTS, INNER_PASSES = 3, 3
"""Arrays [R, T, F]: gate and up are written, and their product with a third matrix reads one; a pass makes it."""
EXPERT_PASSES = 9
"""Passes over a token's rows for all its experts."""
THIN: Mapping[str, int] = {LORA_A: 1, LORA_B: 2}
"""Passes of an adapter over its matrix's inputs (read again) and outputs (written and added)."""
ROUND_KERNELS, PIECE_KERNELS = 7, 3
"""Kernels of attention in a prefill that move next to nothing: for each block of the cache (counters, page numbers,
maxima and sums of rows), and for each piece of new tokens (numbers of pages)."""
STEP_KERNELS, DRAW_KERNELS = 7, 30
"""Kernels that move next to nothing in a decode step: per layer (rotations, norms, sums, joining parts of attention),
and for drawing a token."""
ADAPTER_KERNELS, SENT_KERNELS = 3, 3
"""Kernels of an adapter in a decode step: two products and the sum of the first one's parts; and three more that pack
what devices add up, the matrix's product and the adapter's first, and unpack both."""
STACKED_KERNELS, STACKED_FACTORS = 5, 2
"""Additional kernels per layer, and per adapter, that take arrays out of the stacks of all layers."""
MATRICES, STACKED_MATRICES = 4, 14
"""Kernels of a layer's products with weights in a decode step: matrices that share an input are one product; in stacks
each matrix has its own, preceded by a kernel that copies it."""
EXPANDING, STACKED_EXPANDING = 4, 12
"""Additional kernels per layer that expand nf4: one for each product; in stacks, scales are copied too."""


class Attended(NamedTuple):
    """The work of attention in a prefill: iterations over blocks of the cache, one kernel after another."""

    products: int = 0
    """Bytes that its products move."""
    passes: int = 0
    """Bytes that the kernels between them move."""
    kernels: int = 0
    """Kernels of products and passes."""
    small: int = 0
    """Kernels that move next to nothing."""


def decode_kernels(run: RunSizes) -> tuple[int, int]:
    """Numbers of kernels of a decode step: those that move next to nothing, and those that read weights or cache."""
    stacked, split, own = _stacked(run), run.rollout_heads > 1, _of_rollout(run)
    small = DRAW_KERNELS + STACKED_KERNELS * stacked * run.decoder.layers
    for place in run.decoder.places:
        mixer = place.block.mixer
        norm = isinstance(mixer, Attention) and mixer.norm
        small += len(place.layers) * (STEP_KERNELS + norm + place.block.norms_behind + split)
    for place, spec in _factors(own, LORA_A):
        sent = any(run.rollout_parts.get(axis or "", 1) > 1 for axis in spec.axes)
        small += len(place.layers) * (ADAPTER_KERNELS + STACKED_FACTORS * stacked + SENT_KERNELS * sent)
    expanded = own.lora is not None and own.lora.base == "nf4"
    matrices = STACKED_MATRICES if stacked else MATRICES
    matrices += (STACKED_EXPANDING if stacked else EXPANDING) * expanded
    return small, (1 + matrices) * run.decoder.layers


def operand_bytes(run: RunSizes) -> int:
    """Bytes that a rollout pass moves to turn stored matrices into operands of products, beyond reading them once.

    A matrix in the trainer's stacks is copied out of them as it is stored, and nf4 is expanded to the rollout's format
    wherever it is stored. Each copy or expansion is written and read back.
    """
    decoder, size = _of_rollout(run), 0
    for name, spec in param_specs(decoder).items():
        if is_matrix(spec) and own_name(name) not in ENDS and not is_adapter(name) and not name.endswith(SCALE):
            count, stored = local_count(spec, run.rollout_parts), frozen_dtype(name, decoder)
            if _stacked(run):
                size += count * (1 if stored in ("int8", NF4_CODES) else run.rollout_activation)
            if stored == NF4_CODES:
                size += count * 2 * run.rollout_activation  # a code has two numbers
    return 2 * size


def prefill_products(run: RunSizes, tokens: int) -> int:
    """Bytes that products with weights move in a prefill of `tokens` tokens on one device."""
    inner = INNER_PRODUCTS * _inner(run.decoder) // run.rollout_heads
    return run.layer_bytes + tokens * run.rollout_activation * inner


def prefill_passes(run: RunSizes, tokens: int) -> int:
    """Bytes that passes over activations, other than attention, move in a prefill of `tokens` tokens on one device."""
    stored = sum(count * attention.kv_heads * attention.head_dim for count, attention in run.decoder.attention_layers())
    numbers = STORED_PASSES * stored // run.rollout_heads
    numbers += _passed(_of_rollout(run), run.rollout_parts, run.rollout_heads)
    return tokens * run.rollout_activation * numbers + operand_bytes(run)


def scoring_passes(run: RunSizes) -> int:
    """Bytes that passes over activations move in a forward pass of a micro-batch."""
    numbers = _passed(run.decoder, axis_parts(GATHERED_AXES, run.mesh), run.tp)
    return run.tokens * run.activation * numbers


def scoring_products(run: RunSizes) -> int:
    """Bytes that products with the layers' weights move in a forward pass of a micro-batch."""
    return run.tokens * run.activation * INNER_PRODUCTS * _inner(run.decoder) // run.tp


def prefill_attention(run: RunSizes, rows: int, length: int, cached: int) -> Attended:
    """Attention of a prefill's R `rows` of T = `length` tokens over `cached` tokens of each row, in all layers.

    Each page of a block has its own products, whose scores are written in float32; the largest of a row, the
    exponentials and their sum each read all of a block's, and the weighted values of its pages are added up.
    """
    layers = [
        (count, _attended(run, attention, rows, length, cached)) for count, attention in run.decoder.attention_layers()
    ]
    return Attended(
        products=sum(count * each.products for count, each in layers),
        passes=sum(count * each.passes for count, each in layers),
        kernels=sum(count * each.kernels for count, each in layers),
        small=sum(count * each.small for count, each in layers),
    )


def _attended(run: RunSizes, attention: Attention, rows: int, length: int, cached: int) -> Attended:
    """`prefill_attention` of one layer."""
    rounds, pages, new = _rounds(run, attention.window, length, cached)
    pieces = -(-length // new)
    a, queries = run.rollout_activation, rows * new * attention.heads // run.rollout_heads
    scores = F32 * queries * pages * run.rollout.page_tokens
    values, read, shares = F32 * queries * attention.head_dim, a * queries * attention.head_dim, scores * a // F32
    return Attended(
        products=int(rounds * (pages * (read + values) + scores + shares)),
        passes=int(rounds * (3 * scores + shares + (pages + 2) * values)) + pieces * (values + read),
        kernels=int(rounds * (2 * pages + 4)) + pieces,
        small=int(rounds * ROUND_KERNELS) + pieces * PIECE_KERNELS,
    )


def _rounds(run: RunSizes, window: int | None, length: int, cached: int) -> tuple[float, int, int]:
    """Rounds of attention's loop, pages that each reads, and new tokens that are in it, as `rollout.cache` has them."""
    page_tokens = run.rollout.page_tokens
    pages = cache_block_pages(page_tokens, run.platform)
    if window is None:
        return cached / (pages * page_tokens), pages, length
    new = min(length, ring_piece(window, page_tokens)) if ring_pages(window, run.rollout) else length
    pieces, reach = -(-length // new), touched_pages(window - 1 + new, page_tokens)
    if reach >= table_pages(run.rollout):
        return pieces * cached / (pages * page_tokens), pages, new
    own = window_blocks(reach, pages)
    return pieces * min(cached / (own.pages * page_tokens), own.most), own.pages, new


def _passed(decoder: DecoderConfig, parts: Mapping[str, int], split: int) -> int:
    """Elements per token of the arrays that passes of all layers move, with heads and F over `split` devices."""
    numbers = INNER_PASSES * _inner(decoder) // split
    for place in decoder.places:
        width = WIDTH_PASSES + BEHIND_PASSES * place.block.norms_behind
        numbers += len(place.layers) * (width * decoder.width + EXPERT_PASSES * expert_rows(decoder, place))
    for count, attention in decoder.attention_layers():
        heads = QUERY_PASSES * attention.heads + KEY_PASSES * attention.kv_heads
        numbers += count * heads * attention.head_dim // split
    for suffix, passes in THIN.items():
        for place, spec in _factors(decoder, suffix):
            pairs = list(zip(spec.shape, spec.axes, strict=True))[spec.stacked :]
            own = [-(-size // parts.get(axis or "", 1)) for size, axis in pairs if axis != "rank"]
            kind = place.block.feed_forward
            experts = kind.top if spec.stacked > 1 and isinstance(kind, Experts) else 1
            numbers += len(place.layers) * experts * passes * math.prod(own)
    return numbers


def _inner(decoder: DecoderConfig) -> int:
    """Elements per token between the products of all layers' MLPs."""
    return sum(len(place.layers) * feed_forward_inner(decoder, place) for place in decoder.places)


def _stacked(run: RunSizes) -> bool:
    """Whether the rollout reads weights from the trainer's stacks of all layers."""
    return run.decoder.lora is not None and run.decoder.lora.shared


def _of_rollout(run: RunSizes) -> DecoderConfig:
    """The decoder of the rollout's weights, in which matrices that share an input are joined unless they are the
    trainer's.
    """
    return dataclasses.replace(rollout_decoder(run.decoder), joined=not _stacked(run))


def _factors(decoder: DecoderConfig, suffix: str) -> Iterator[tuple[Place, ParamSpec]]:
    """One factor of each adapter, with the place of its layers."""
    specs = param_specs(decoder)
    for place in decoder.places:
        yield from ((place, spec) for name, spec in own_weights(specs, place) if name.endswith(suffix))
