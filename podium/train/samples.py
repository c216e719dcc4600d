"""From graded groups to samples: what an episode's tokens are to the update. Numpy alone.

    groups -> transcripts -> samples -> batches

A sample is what follows a prompt, with a mask of the tokens that the model drew. The others (replies of an environment)
are read by the model and never trained: lengths, means and denominators count drawn tokens only.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from podium.rollout.transcript import Span, Transcript, joined
from podium.train.balance import Lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One episode, ready to be trained on."""

    group: int
    """Which prompt of the step it answers."""
    prompt: tuple[int, ...]
    tokens: np.ndarray  # [n] int32, what follows the prompt
    mask: np.ndarray  # [n] bool, whether the model drew the token
    sampled_logprobs: np.ndarray  # [n] float32
    ages: np.ndarray  # [n] int32, steps that trained the weights since they drew the token
    advantages: np.ndarray  # [n] float32
    weights: np.ndarray  # [n] float32, what each token's loss counts in the batch's loss; 0 where not drawn

    @property
    def num_drawn(self) -> int:
        """Tokens that are trained on."""
        return int(np.count_nonzero(self.mask))

    @property
    def lengths(self) -> Lengths:
        """What it takes in a row."""
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
    """A sample of one drawn span, whose tokens share an advantage and a weight."""
    size = len(tokens)
    return Sample(
        group=group,
        prompt=prompt,
        tokens=tokens,
        mask=np.ones(size, bool),
        sampled_logprobs=sampled_logprobs,
        ages=np.zeros(size, np.int32),
        advantages=np.full(size, advantage, np.float32),
        weights=np.full(size, weight, np.float32),
    )


def transcript_sample(transcript: Transcript, *, group: int, version: int, masked: bool = False) -> Sample:
    """The sample of an episode, its advantages and weights still 0.

    Args:
        transcript: The episode.
        group: Which prompt of the step it answers.
        version: Of the weights that the step began with; a token is as old as its own version is less.
        masked: Leave all of it out: the sample has no tokens.
    """
    spans: Sequence[Span] = () if masked else transcript.continuation
    tokens = joined([span.tokens for span in spans], np.int32)
    return Sample(
        group=group,
        prompt=tuple(transcript.prompt.tolist()),
        tokens=tokens,
        mask=joined([np.full(len(span.tokens), span.drawn) for span in spans], np.bool_),
        sampled_logprobs=joined([span.full_logprobs for span in spans], np.float32),
        ages=joined([version - span.versions if span.drawn else 0 * span.versions for span in spans], np.int32),
        advantages=np.zeros(len(tokens), np.float32),
        weights=np.zeros(len(tokens), np.float32),
    )


def with_advantage(sample: Sample, advantage: float | np.ndarray) -> Sample:
    """The sample with one advantage for all its drawn tokens, or with one for each of its tokens, [n]."""
    spread = np.broadcast_to(np.asarray(advantage, np.float32), sample.tokens.shape)
    return dataclasses.replace(sample, advantages=np.where(sample.mask, spread, np.float32(0)))


def with_weight(sample: Sample, weight: float) -> Sample:
    """The sample with this weight at each of its drawn tokens."""
    return dataclasses.replace(sample, weights=np.where(sample.mask, np.float32(weight), np.float32(0)))
