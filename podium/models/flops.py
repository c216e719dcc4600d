"""The operations that an update needs, independent of any program; used for every utilization figure (MFU). No jax.

6 operations per matrix element and real token (2 forward, 4 backward), plus those of recurrences, and of causal
attention, half of all pairs. A prompt counts once for all its completions, whatever the packing; padding and
recomputation never count.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from podium.models.architecture import DecoderConfig
from podium.models.params import count, trained_specs

PASSES = 3
"""Forward once, and backward twice as much."""


Window = int | None
"""Number of keys that a query sees, including its own; None for all previous keys."""
ALL: Collection[Window] = (None,)


class Work(NamedTuple):
    """Numbers of tokens that pass through the layers and of query-key pairs, including each token's pair with
    itself.
    """

    tokens: int
    pairs: Mapping[Window, int]
    """Query-key pairs, by the window of a layer's attention."""


def group_work(prompt: int, completions: Iterable[int], windows: Collection[Window] = ALL) -> Work:
    """The work of one prompt with its completions, given their lengths in tokens.

    Counted as rows hold them: the prompt without its last token once; and for each completion the prompt's last token
    and the completion without its last token, from which its tokens are predicted.
    """
    shown, lengths = prompt - 1, list(completions)
    tokens = shown + sum(lengths)
    return Work(tokens, {window: _group_pairs(shown, lengths, window) for window in windows})


def _group_pairs(shown: int, lengths: Sequence[int], window: Window) -> int:
    alone = _causal_pairs(shown, window)
    return alone + sum(_causal_pairs(shown + length, window) - alone for length in lengths)


def _causal_pairs(tokens: int, window: Window) -> int:
    """Query-key pairs of a sequence: token i, counted from 1, attends to i tokens, or at most a window's."""
    growing = tokens if window is None else min(tokens, window)
    return growing * (growing + 1) // 2 + (tokens - growing) * growing


def step_work(prompts: Sequence[int], completions: Sequence[Sequence[int]], windows: Collection[Window] = ALL) -> Work:
    """The work of a step's groups, with lengths [N] and [N][G]; a completion that is not trained on has length 0."""
    groups = [group_work(int(prompt), map(int, own), windows) for prompt, own in zip(prompts, completions, strict=True)]
    pairs = {window: sum(each.pairs[window] for each in groups) for window in windows}
    return Work(sum(each.tokens for each in groups), pairs)


def update_flops(decoder: DecoderConfig, work: Work) -> int:
    """Operations of an update, a multiply-add counting as two: 6 N per token, plus attention.

    With LoRA it is 4 N, as the frozen matrices have no gradient, plus 6 per adapter element.
    """
    whole = PASSES * forward_flops(decoder, work)
    if decoder.lora is None:
        return whole
    return whole + 2 * work.tokens * (PASSES * trained_elements(decoder) - decoder.active)


def forward_flops(decoder: DecoderConfig, work: Work) -> int:
    """Operations of one forward pass, including logits for every token."""
    attention = sum(_windowed_pair_flops(decoder, window) * work.pairs[window] for window in decoder.windows)
    return 2 * (decoder.active + decoder.total(lambda work: work.per_token)) * work.tokens + attention


def pair_flops(decoder: DecoderConfig, tokens: int = 1) -> int:
    """Operations of a forward pass for a query with up to `tokens` visible keys, over all layers and heads.

    A pair of query and key takes two products: the score and the weighted value.
    """
    return 2 * decoder.total(lambda work: work.pair * min(tokens, work.window or tokens))


def _windowed_pair_flops(decoder: DecoderConfig, window: Window) -> int:
    """`pair_flops` of the layers with this window."""
    return 2 * decoder.total(lambda work: work.pair if work.window == window else 0)


def trained_elements(decoder: DecoderConfig) -> int:
    """Number of adapter elements that a token is multiplied with; for experts, only those of the token's experts."""
    of_all = trained_specs(decoder)
    every = count({name: spec for name, spec in of_all.items() if "experts" not in spec.axes})
    for place, kind in decoder.routed:
        own = {name: spec for name, spec in of_all.items() if name.startswith(place.prefix) and "experts" in spec.axes}
        every += count(own) * kind.top // kind.count
    return every
