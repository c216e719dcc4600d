"""Turns graded groups into samples: the tokens of an episode with what the update needs to know. Numpy only.

groups -> transcripts -> samples -> batches

A sample is the part of an episode after the prompt, with a mask of the tokens that the model drew. The model reads the
other tokens (an environment's replies) but is not trained on them: lengths, means and denominators count only drawn
tokens.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from podium.models.blocks.choices import unknown_choice
from podium.rollout.transcript import Span, Transcript, joined
from podium.train.batches.balance import Lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One episode as training data, or a segment of it."""

    group: int
    """Index of the prompt within the step."""
    episode: int = 0
    """Index of the episode in its group."""
    start: int = 0
    """Tokens in the episode's previous segments, without their prompts."""
    prompt: tuple[int, ...]
    tokens: np.ndarray  # [n] int32, the tokens after the prompt
    mask: np.ndarray  # [n] bool, whether the model drew the token
    sampled_logprobs: np.ndarray  # [n] float32, of the policy that drew the tokens
    drawn_logprobs: np.ndarray  # [n] float32, under the distribution drawn from, after penalty and truncation
    ages: np.ndarray  # [n] int32, number of weight updates since the token was drawn
    turns: np.ndarray  # [n] int32, turn that drew the token; for given tokens, the number of turns before
    advantages: np.ndarray  # [n] float32
    weights: np.ndarray  # [n] float32, factor of each token's loss in the batch's loss; 0 if not drawn
    likelihoods: np.ndarray | None = None  # [n] float32, factor of each token's -logprob; None if not imitated
    choices: np.ndarray | None = None  # [n, C], as in `Completion.choices`; None if unknown
    prompt_choices: np.ndarray | None = None  # [p - 1, C], experts of the p prompt tokens but the last

    @property
    def num_drawn(self) -> int:
        """Number of tokens to train on."""
        return int(np.count_nonzero(self.mask))

    @property
    def lengths(self) -> Lengths:
        """The sample's lengths, for packing."""
        return Lengths(group=self.group, shown=len(self.prompt) - 1, own=len(self.tokens))


def single_answer(
    *,
    group: int,
    prompt: tuple[int, ...],
    tokens: np.ndarray,
    sampled_logprobs: np.ndarray,
    advantage: float = 0.0,
    weight: float = 0.0,
) -> Sample:
    """Make a sample with one drawn span, whose tokens share an advantage and a weight."""
    size = len(tokens)
    return Sample(
        group=group,
        prompt=prompt,
        tokens=tokens,
        mask=np.ones(size, bool),
        sampled_logprobs=sampled_logprobs,
        drawn_logprobs=sampled_logprobs,
        ages=np.zeros(size, np.int32),
        turns=np.zeros(size, np.int32),
        advantages=np.full(size, advantage, np.float32),
        weights=np.full(size, weight, np.float32),
    )


def transcript_sample(
    transcript: Transcript, *, group: int, version: int, masked: bool = False, episode: int = 0, start: int = 0
) -> Sample:
    """Make the sample of an episode, or of a segment; advantages and weights are still 0.

    Args:
        transcript: the episode, if it has one segment, or else a segment.
        group: index of the prompt within the step.
        version: weight version at the start of the step; a token's age is this minus the token's version.
        masked: if true, the sample has no tokens.
        episode: index of the episode in its group.
        start: tokens in the episode's segments before this one, without their prompts.
    """
    spans: Sequence[Span] = () if masked else transcript.continuation
    tokens = joined([span.tokens for span in spans], np.int32)
    return Sample(
        group=group,
        episode=episode,
        start=start,
        prompt=tuple(transcript.prompt.tolist()),
        tokens=tokens,
        mask=joined([np.full(len(span.tokens), span.drawn) for span in spans], np.bool_),
        sampled_logprobs=joined([span.full_logprobs for span in spans], np.float32),
        drawn_logprobs=joined([span.sampled_logprobs for span in spans], np.float32),
        ages=joined([version - span.versions if span.drawn else 0 * span.versions for span in spans], np.int32),
        turns=joined([np.full(len(span.tokens), span.turn) for span in spans], np.int32).astype(np.int32),
        advantages=np.zeros(len(tokens), np.float32),
        weights=np.zeros(len(tokens), np.float32),
        choices=_choices(spans),
        prompt_choices=None if transcript.spans[0].choices is None else transcript.spans[0].choices[1:],
    )


def _choices(spans: Sequence[Span]) -> np.ndarray | None:
    """The experts of each token that precedes a token of the spans, as far as they are known."""
    known = next((span.choices for span in spans if span.choices is not None), None)
    if known is None:
        return None
    nothing = np.full_like(known[:1], unknown_choice(known.dtype))  # [1, C]
    return np.concatenate(
        [np.repeat(nothing, len(span.tokens), axis=0) if span.choices is None else span.choices for span in spans]
    )


def with_advantage(sample: Sample, advantage: float | np.ndarray) -> Sample:
    """A copy with one advantage for all drawn tokens, or one per token, [n]."""
    spread = np.broadcast_to(np.asarray(advantage, np.float32), sample.tokens.shape)
    return dataclasses.replace(sample, advantages=np.where(sample.mask, spread, np.float32(0)))


def with_weight(sample: Sample, weight: float) -> Sample:
    """A copy in which each drawn token has this weight."""
    return dataclasses.replace(sample, weights=np.where(sample.mask, np.float32(weight), np.float32(0)))


def imitated(sample: Sample, weight: float) -> Sample:
    """A copy for imitation: each token to learn gets this factor of -logprob, and no token counts as drawn."""
    likelihoods = np.where(sample.mask, np.float32(weight), np.float32(0))
    return dataclasses.replace(sample, likelihoods=likelihoods, mask=np.zeros_like(sample.mask))
