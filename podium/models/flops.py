"""The operations that an update needs, independent of any program; used for every utilization figure (MFU). No jax.

6 operations per matrix element and real token (2 forward, 4 backward), plus those of causal attention, half of all
pairs. A prompt counts once for all its completions, whatever the packing; padding and recomputation never count.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from podium.models.architecture import DecoderConfig
from podium.models.params import count, trained_specs

PASSES = 3
"""Forward once, and backward twice as much."""


class Work(NamedTuple):
    """Number of tokens that pass through the layers, and of query-key pairs, each token's pair with itself included."""

    tokens: int
    pairs: int


def group_work(prompt: int, completions: Iterable[int]) -> Work:
    """The work of one prompt with its completions, given their lengths in tokens.

    Counted as rows hold them: the prompt without its last token once; and for each completion the prompt's last token
    and the completion without its last token, from which its tokens are predicted.
    """
    shown = prompt - 1
    tokens, pairs = shown, shown * (shown + 1) // 2
    for length in completions:
        tokens += length
        pairs += length * shown + length * (length + 1) // 2
    return Work(tokens, pairs)


def step_work(prompts: Sequence[int], completions: Sequence[Sequence[int]]) -> Work:
    """The work of a step's groups, with lengths [N] and [N][G]; a completion that is not trained on has length 0."""
    groups = [group_work(int(prompt), map(int, own)) for prompt, own in zip(prompts, completions, strict=True)]
    return Work(sum(each.tokens for each in groups), sum(each.pairs for each in groups))


def update_flops(decoder: DecoderConfig, work: Work) -> int:
    """Operations of an update, with a multiply-add as two: 6 N per token, and attention.

    With LoRA 4 N, as the frozen matrices have no gradient, plus 6 per adapter element.
    """
    whole = PASSES * forward_flops(decoder, work)
    if decoder.lora is None:
        return whole
    return whole + 2 * work.tokens * (PASSES * trained_elements(decoder) - matrix_elements(decoder))


def forward_flops(decoder: DecoderConfig, work: Work) -> int:
    """Operations of one forward pass, including logits for every token."""
    return 2 * matrix_elements(decoder) * work.tokens + pair_flops(decoder) * work.pairs


def matrix_elements(decoder: DecoderConfig) -> int:
    """N: number of matrix elements that every token is multiplied with, in layers and head."""
    return decoder.active


def pair_flops(decoder: DecoderConfig) -> int:
    """Operations of a forward pass per query-key pair, over all heads: the score and the weighted value."""
    return 2 * decoder.total(lambda work: work.pair)


def trained_elements(decoder: DecoderConfig) -> int:
    """Number of elements of the adapters that every token is multiplied with: of experts, those of a token's own."""
    of_all = trained_specs(decoder)
    every = count({name: spec for name, spec in of_all.items() if "experts" not in spec.axes})
    for place, kind in decoder.routed:
        own = {name: spec for name, spec in of_all.items() if name.startswith(place.prefix) and "experts" in spec.axes}
        every += count(own) * kind.top // kind.count
    return every
