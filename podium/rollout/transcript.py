"""The tokens of one episode in order: given to the model, or drawn (sampled) by it. No jax.

An episode begins with its prompt. The model draws a span of tokens, an environment may reply with another span, and so
on; a single answer is one drawn span after the prompt. Transcripts only grow, so the model is trained on exactly the
tokens that it read and drew. With `rollout.thinking: segment`, a conversation may continue from another prompt, which
is its history as rendered by the chat template. Each prompt begins a segment, which is trained as a separate sequence.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from podium.rollout.recorded_routes import known
from podium.rollout.request import Completion, FinishReason, StopReason

Source = Literal["prompt", "drawn", "environment"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Span:
    """Consecutive tokens of one source."""

    source: Source
    turn: int
    """Number of drawn spans before this one."""
    tokens: np.ndarray  # [n] int32
    sampled_logprobs: np.ndarray  # [n] float32, under the distribution sampled from; 0 for given tokens
    full_logprobs: np.ndarray  # [n] float32, under the softmax before top-k, top-p and min-p; 0 for given tokens
    versions: np.ndarray  # [n] int32, weight version that drew each token; 0 for given tokens
    text: str = ""
    """Text without special tokens; empty if unknown."""
    choices: np.ndarray | None = None  # [n, C], as in `Completion.choices`; None: unknown, or no experts

    @property
    def drawn(self) -> bool:
        """Whether the model drew these tokens."""
        return self.source == "drawn"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Transcript:
    """An episode so far. Immutable: each `add_*` method returns a longer transcript."""

    spans: tuple[Span, ...] = ()
    finish_reason: StopReason | None = None
    """Why the last drawn span, or the conversation, ended; None if it has not ended, or nothing was drawn."""
    messages: tuple[Mapping[str, object], ...] = ()
    """The messages after the prompt (answers, calls and replies), for records and reward functions; empty for a single
    answer."""

    def add_prompt(self, tokens: tuple[int, ...] | np.ndarray, *, text: str = "") -> "Transcript":
        """Start with these tokens. Raises ValueError if the transcript is not empty."""
        if self.spans:
            raise ValueError(f"a prompt must come first, but this transcript already has {self.num_tokens} tokens")
        return self._add_given("prompt", tokens, text)

    def add_segment(self, tokens: tuple[int, ...] | np.ndarray, *, text: str = "") -> "Transcript":
        """Continue from this prompt instead of the tokens so far. Raises ValueError if the model has not drawn a token
        yet.
        """
        if not any(span.drawn for span in self.spans):
            raise ValueError("a segment must follow drawn tokens, and this transcript has none; call add_prompt")
        return self._add_given("prompt", tokens, text)

    def add_environment(self, tokens: tuple[int, ...] | np.ndarray, *, text: str = "") -> "Transcript":
        """Append tokens of an environment's reply. Raises ValueError if the model has not drawn a token yet."""
        if not any(span.drawn for span in self.spans):
            raise ValueError("an environment's reply must follow drawn tokens, and this transcript has none")
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
        choices: np.ndarray | None = None,
    ) -> "Transcript":
        """Append tokens that the model drew, with their log-probabilities and weight versions, [n] each.

        Raises ValueError without a prompt, or if the lengths differ.
        """
        if not self.spans:
            raise ValueError("drawn tokens must follow a prompt, and this transcript has none; call add_prompt first")
        sizes = [len(x) for x in (tokens, sampled_logprobs, full_logprobs, versions)]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"tokens, sampled_logprobs, full_logprobs and versions have {sizes} entries; give equally many"
            )
        span = Span(
            source="drawn",
            turn=self.num_turns,
            tokens=np.asarray(tokens, np.int32),
            sampled_logprobs=np.asarray(sampled_logprobs, np.float32),
            full_logprobs=np.asarray(full_logprobs, np.float32),
            versions=np.asarray(versions, np.int32),
            text=text,
            choices=choices,
        )
        return dataclasses.replace(self, spans=(*self.spans, span), finish_reason=finish_reason)

    def add_completion(self, completion: Completion) -> "Transcript":
        """Append a completion of the engine; experts that it reports for earlier tokens are added to their spans."""
        return self._told(completion.context_choices).add_drawn(
            completion.tokens,
            sampled_logprobs=completion.sampled_logprobs,
            full_logprobs=completion.full_logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=completion.text,
            choices=completion.choices,
        )

    def _told(self, choices: np.ndarray | None) -> "Transcript":
        """A copy with unknown experts filled in from `choices` [n, C]; unchanged if `choices` is None."""
        if choices is None:
            return self
        first = max(place for place, span in enumerate(self.spans) if span.source == "prompt")
        spans = list(self.spans[:first])
        for span in self.spans[first:]:
            told, choices = choices[: len(span.tokens)], choices[len(span.tokens) :]
            if span.choices is not None:
                told = np.where(known(span.choices)[:, None], span.choices, told)
            spans.append(dataclasses.replace(span, choices=told))
        return dataclasses.replace(self, spans=tuple(spans))

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
    def segments(self) -> tuple["Transcript", ...]:
        """The parts that each begin with a prompt; only one, unless the conversation continued from another prompt."""
        starts = [place for place, span in enumerate(self.spans) if span.source == "prompt"]
        ends = [*starts[1:], len(self.spans)]
        return tuple(
            dataclasses.replace(self, spans=self.spans[start:end]) for start, end in zip(starts, ends, strict=True)
        )

    @property
    def prompt(self) -> np.ndarray:
        """Tokens before the first drawn span, [p] int32."""
        return self.spans[0].tokens

    @property
    def drawn(self) -> tuple[Span, ...]:
        """The spans that the model drew."""
        return tuple(span for span in self.spans if span.drawn)

    @property
    def continuation(self) -> tuple[Span, ...]:
        """The spans after a segment's prompt, up to the last drawn token; only these can be trained on."""
        last = max((place for place, span in enumerate(self.spans) if span.drawn), default=0)
        return self.spans[1 : last + 1]

    @property
    def num_turns(self) -> int:
        """Number of drawn spans."""
        return len(self.drawn)

    @property
    def num_tokens(self) -> int:
        """Number of all tokens: of the prompt, the model, and the environment."""
        return sum(len(span.tokens) for span in self.spans)

    @property
    def num_drawn(self) -> int:
        """Number of tokens that the model drew."""
        return sum(len(span.tokens) for span in self.drawn)

    @property
    def text(self) -> str:
        """The text that the model wrote, without special tokens."""
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
        """Log-probabilities of the drawn tokens, [n] float32, under the distribution each was sampled from."""
        return joined([span.sampled_logprobs for span in self.drawn], np.float32)

    @property
    def full_logprobs(self) -> np.ndarray:
        """Log-probabilities of the drawn tokens, [n] float32, under the softmax before top-k, top-p and min-p."""
        return joined([span.full_logprobs for span in self.drawn], np.float32)

    @property
    def versions(self) -> np.ndarray:
        """Weight version of each drawn token, [n] int32."""
        return joined([span.versions for span in self.drawn], np.int32)


def joined(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """Concatenate arrays; an empty list gives an empty array of `dtype`."""
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def transcript_of(prompt: tuple[int, ...], completion: Completion) -> Transcript:
    """The transcript of a single answer: the prompt and one drawn span."""
    return Transcript().add_prompt(prompt).add_completion(completion)
