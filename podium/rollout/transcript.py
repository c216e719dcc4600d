"""The tokens of one episode in order: what was given and what the model drew. No jax.

An episode begins with its prompt. The model draws a span of tokens, an environment may reply with a span of its own,
and so on; an answer to a question is one drawn span behind the prompt. A transcript is only ever appended to, so the
tokens that are trained are the tokens that the model read and drew.
"""

import dataclasses
from typing import Literal

import numpy as np

from podium.rollout.request import Completion, FinishReason

Source = Literal["prompt", "drawn", "environment"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Span:
    """Consecutive tokens of one source."""

    source: Source
    turn: int
    """The number of drawn spans before this one."""
    tokens: np.ndarray  # [n] int32
    sampled_logprobs: np.ndarray  # [n] float32, under the distribution that each was drawn from; 0 where given
    full_logprobs: np.ndarray  # [n] float32, under the softmax before top-k, top-p and min-p; 0 where given
    versions: np.ndarray  # [n] int32, of the weights that drew each token; 0 where given
    text: str = ""
    """Without special tokens; empty where it is not known."""

    @property
    def drawn(self) -> bool:
        """Whether the model drew these tokens."""
        return self.source == "drawn"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Transcript:
    """An episode so far. Each `add_*` returns a longer one; nothing that is in a transcript ever changes."""

    spans: tuple[Span, ...] = ()
    finish_reason: FinishReason | None = None
    """Why the last drawn span ended; None: it has not ended, or nothing has been drawn."""

    def add_prompt(self, tokens: tuple[int, ...] | np.ndarray, *, text: str = "") -> "Transcript":
        """Begin with these tokens. Raises ValueError where there are tokens already."""
        if self.spans:
            raise ValueError(f"a prompt comes first, and this transcript has {self.num_tokens} tokens already")
        return self._add_given("prompt", tokens, text)

    def add_environment(self, tokens: tuple[int, ...] | np.ndarray, *, text: str = "") -> "Transcript":
        """Append tokens that the model reads and did not draw. Raises ValueError where no token has been drawn."""
        if not any(span.drawn for span in self.spans):
            raise ValueError("an environment replies to the model, and this transcript has no drawn token; add_prompt")
        return self._add_given("environment", tokens, text)

    def add_drawn(
        self,
        tokens: np.ndarray,
        *,
        sampled_logprobs: np.ndarray,
        full_logprobs: np.ndarray,
        versions: np.ndarray,
        finish_reason: FinishReason | None,
        text: str = "",
    ) -> "Transcript":
        """Append tokens that the model drew, each with its log-probabilities and weight version, [n] each.

        Raises ValueError without a prompt, or where lengths differ.
        """
        if not self.spans:
            raise ValueError("a model draws behind a prompt, and this transcript is empty; add_prompt first")
        sizes = [len(x) for x in (tokens, sampled_logprobs, full_logprobs, versions)]
        if len(set(sizes)) > 1:
            raise ValueError(f"tokens, sampled_logprobs, full_logprobs and versions have {sizes} entries; give as many")
        span = Span(
            source="drawn",
            turn=self.num_turns,
            tokens=np.asarray(tokens, np.int32),
            sampled_logprobs=np.asarray(sampled_logprobs, np.float32),
            full_logprobs=np.asarray(full_logprobs, np.float32),
            versions=np.asarray(versions, np.int32),
            text=text,
        )
        return Transcript(spans=(*self.spans, span), finish_reason=finish_reason)

    def add_completion(self, completion: Completion) -> "Transcript":
        """Append what the engine drew."""
        return self.add_drawn(
            completion.tokens,
            sampled_logprobs=completion.sampled_logprobs,
            full_logprobs=completion.full_logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=completion.text,
        )

    def _add_given(self, source: Source, tokens: tuple[int, ...] | np.ndarray, text: str) -> "Transcript":
        given = np.asarray(tokens, np.int32)
        nothing = np.zeros(len(given), np.float32)
        span = Span(
            source=source,
            turn=self.num_turns,
            tokens=given,
            sampled_logprobs=nothing,
            full_logprobs=nothing,
            versions=np.zeros(len(given), np.int32),
            text=text,
        )
        return dataclasses.replace(self, spans=(*self.spans, span))

    @property
    def prompt(self) -> np.ndarray:
        """Tokens before the first that was drawn or replied, [p] int32."""
        return self.spans[0].tokens

    @property
    def drawn(self) -> tuple[Span, ...]:
        """The spans that the model drew."""
        return tuple(span for span in self.spans if span.drawn)

    @property
    def continuation(self) -> tuple[Span, ...]:
        """What follows the prompt, up to the last drawn token: what there is to train on."""
        last = max((place for place, span in enumerate(self.spans) if span.drawn), default=0)
        return self.spans[1 : last + 1]

    @property
    def num_turns(self) -> int:
        """Drawn spans."""
        return len(self.drawn)

    @property
    def num_tokens(self) -> int:
        """All tokens: prompt, drawn and replied."""
        return sum(len(span.tokens) for span in self.spans)

    @property
    def num_drawn(self) -> int:
        """Tokens that the model drew."""
        return sum(len(span.tokens) for span in self.drawn)

    @property
    def text(self) -> str:
        """What the model wrote, without special tokens."""
        return "".join(span.text for span in self.drawn)

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, [n] int32."""
        return np.concatenate([span.tokens for span in self.spans])

    @property
    def mask(self) -> np.ndarray:
        """Which of `tokens` the model drew, [n] bool."""
        return np.concatenate([np.full(len(span.tokens), span.drawn) for span in self.spans])

    @property
    def drawn_tokens(self) -> np.ndarray:
        """The tokens that the model drew, [n] int32."""
        return joined([span.tokens for span in self.drawn], np.int32)

    @property
    def sampled_logprobs(self) -> np.ndarray:
        """Of the drawn tokens, [n] float32, under the distribution that each was drawn from."""
        return joined([span.sampled_logprobs for span in self.drawn], np.float32)

    @property
    def full_logprobs(self) -> np.ndarray:
        """Of the drawn tokens, [n] float32, under the softmax before top-k, top-p and min-p."""
        return joined([span.full_logprobs for span in self.drawn], np.float32)

    @property
    def versions(self) -> np.ndarray:
        """Of the drawn tokens, [n] int32, the version of the weights that drew each."""
        return joined([span.versions for span in self.drawn], np.int32)


def joined(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """The arrays in a row; an empty one of `dtype` where there are none."""
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def transcript_of(prompt: tuple[int, ...], completion: Completion) -> Transcript:
    """The episode of a single answer: the prompt, and one drawn span."""
    return Transcript().add_prompt(prompt).add_completion(completion)
