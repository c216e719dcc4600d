"""What an update has to compute, whatever a program computes: the one count behind every share of a peak. No jax.

6 operations for each matrix element and real token (2 forward, 4 backward), and causal attention's, half of all
pairs. A prompt counts once for all its completions, in any packing; padding and what is made again never count.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from podium.models.architecture import DecoderConfig
from podium.models.params import count, trained_specs

PASSES = 3
"""Forward, and twice as much backward."""


class Work(NamedTuple):
    """Tokens that go through the layers, and pairs of a token and one that it sees, itself included."""

    tokens: int
    pairs: int


def group_work(prompt: int, completions: Iterable[int]) -> Work:
    """Of one prompt with its completions, in tokens.

    As rows hold them: the prompt without its last token once, and each completion, whose tokens are predicted from the
    prompt's last and its own without its last.
    """
    shown = prompt - 1
    tokens, pairs = shown, shown * (shown + 1) // 2
    for length in completions:
        tokens += length
        pairs += length * shown + length * (length + 1) // 2
    return Work(tokens, pairs)


def step_work(prompts: Sequence[int], completions: Sequence[Sequence[int]]) -> Work:
    """Of a step's groups: lengths [N] and [N][G]; a completion that is not trained on has 0."""
    groups = [group_work(int(prompt), map(int, own)) for prompt, own in zip(prompts, completions, strict=True)]
    return Work(sum(each.tokens for each in groups), sum(each.pairs for each in groups))


def update_flops(decoder: DecoderConfig, work: Work) -> int:
    """Operations of an update on this work, a multiply-add as two: 6 N a token, and attention.

    With LoRA 4 N, as the frozen matrices have no gradient, and 6 for each number of the adapters.
    """
    whole = PASSES * forward_flops(decoder, work)
    if decoder.lora is None:
        return whole
    return whole + 2 * work.tokens * (PASSES * count(trained_specs(decoder)) - matrix_elements(decoder))


def forward_flops(decoder: DecoderConfig, work: Work) -> int:
    """Operations of one forward pass on it, logits of every token included."""
    return 2 * matrix_elements(decoder) * work.tokens + pair_flops(decoder) * work.pairs


def matrix_elements(decoder: DecoderConfig) -> int:
    """N, elements of the matrices that every token is multiplied with: the layers' and the head."""
    return decoder.active


def pair_flops(decoder: DecoderConfig) -> int:
    """Operations of a forward pass for a query and a key: their product and the value's weight, in all heads."""
    return 2 * decoder.total(lambda work: work.pair)
