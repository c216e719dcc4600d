"""A completion that is being made: what may be asked for, what is there so far, and where it ends."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from podium.rollout.lanes import Lane
from podium.rollout.request import Completion, FinishReason, Key, SamplingParams

MAX_STOP_TOKENS = 8


class TextDecoder(Protocol):
    """What the engine needs of a tokenizer."""

    eos_tokens: tuple[int, ...]

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """By their texts, which `decode` leaves out."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; special tokens are left out."""
        ...


@dataclasses.dataclass(kw_only=True)
class Draft:
    """A completion, or a turn of one."""

    key: Key
    lane: Lane
    sampling: SamplingParams
    seed: int
    keep: bool
    ledger: list[int]
    """All tokens of the sequence: prompt, turns and what was drawn."""
    begin: int
    """Tokens before those that this turn draws."""
    logprobs: list[float] = dataclasses.field(default_factory=list)
    full_logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    """Of the weights, by token of this turn, as the two above."""
    before: int = 0
    """Tokens of this turn that were there when it was submitted."""
    finish_reason: FinishReason | None = None
    """None: not finished."""

    @property
    def last(self) -> int:
        """Position of the last token that may be drawn."""
        return self.begin + self.sampling.max_new_tokens - 1

    def take(
        self,
        tokens: list[int],
        logprobs: list[float],
        full_logprobs: list[float],
        tokenizer: TextDecoder,
        *,
        version: int = 0,
    ) -> int:
        """Add what weights of a version drew, up to where it ends; how many tokens that are."""
        before = len(self.ledger)
        self.ledger += tokens
        self.logprobs += logprobs
        self.full_logprobs += full_logprobs
        self.versions += [version] * len(tokens)
        if self.ledger[-1] in stop_tokens(self.sampling, tokenizer):
            self.finish_reason = "stop"
        elif len(self.ledger) > self.last:
            self.finish_reason = "length"
        self._stop_at_string(before, tokenizer)
        return len(self.ledger) - before

    def go_on(self, made: Completion) -> None:
        """Begin behind what there is of it."""
        self.ledger += made.tokens.tolist()
        self.logprobs, self.full_logprobs = made.sampled_logprobs.tolist(), made.full_logprobs.tolist()
        self.versions, self.before = made.versions.tolist(), len(made.tokens)

    def completion(self, tokenizer: TextDecoder) -> Completion:
        """What has come of it so far."""
        tokens = self.ledger[self.begin :]
        return Completion(
            tokens=np.array(tokens, np.int32),
            sampled_logprobs=np.array(self.logprobs, np.float32),
            full_logprobs=np.array(self.full_logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            text="" if self.finish_reason is None else tokenizer.decode(tokens),
            finish_reason=self.finish_reason,
        )

    def _stop_at_string(self, before: int, tokenizer: TextDecoder) -> None:
        """End with the token that completes a stop string, if one behind the first `before` does."""
        stops = [stop for stop in self.sampling.stop if stop not in tokenizer.special_tokens]
        if not stops:
            return
        longest = max(len(stop.encode()) for stop in stops)  # a token holds at least one byte of it
        begin = max(self.begin, before - longest)
        for length in range(before + 1, len(self.ledger) + 1):
            text = tokenizer.decode(self.ledger[begin:length])
            if any(stop in text for stop in stops):
                made = length - self.begin
                del self.ledger[length:], self.logprobs[made:], self.full_logprobs[made:], self.versions[made:]
                self.finish_reason = "stop"
                return


def stop_tokens(sampling: SamplingParams, tokenizer: TextDecoder) -> tuple[int, ...]:
    """The tokens that end a completion: the model's, the request's, and special tokens named by their text."""
    named = (tokenizer.special_tokens[stop] for stop in sampling.stop if stop in tokenizer.special_tokens)
    return tuple(dict.fromkeys((*tokenizer.eos_tokens, *sampling.stop_tokens, *named)))


def check_ledger(tokens: Sequence[int], vocab: int, room: int, rule: str) -> None:
    """Raises ValueError for tokens that cannot be gone on from: none, more than the rule allows, not the model's."""
    if not tokens:
        raise ValueError("prompt is empty; it needs at least one token")
    if len(tokens) > room:
        raise ValueError(f"prompt has {len(tokens)} tokens and {rule} is {room}; raise it, or drop the prompt")
    if not all(0 <= token < vocab for token in tokens):
        raise ValueError(
            f"prompt has a token outside the model's vocabulary of {vocab}; does the tokenizer belong to the model?"
        )


def check_sampling(sampling: SamplingParams, tokenizer: TextDecoder, max_new_tokens: int) -> None:
    """Raises ValueError for settings by which nothing can be drawn, or that contradict each other."""
    cut = {"top_k": (sampling.top_k, 0), "top_p": (sampling.top_p, 1.0), "min_p": (sampling.min_p, 0.0)}
    used = [f"{name} {value}" for name, (value, unused) in cut.items() if value != unused]
    num_stops = len(stop_tokens(sampling, tokenizer))
    hidden = [
        (stop, text)
        for stop in sampling.stop
        for text in tokenizer.special_tokens
        if text in stop and stop not in tokenizer.special_tokens
    ]
    if not 1 <= sampling.max_new_tokens <= max_new_tokens:
        problem = f"max_new_tokens is {sampling.max_new_tokens} and must be 1 to rollout.max_new_tokens,"
        problem += f" {max_new_tokens}; raise that, or ask for less"
    elif not (sampling.temperature >= 0 and math.isfinite(sampling.temperature)):
        problem = f"temperature is {sampling.temperature}; it must be 0 (greedy) or more"
    elif sampling.top_k < 0 or not 0 < sampling.top_p <= 1 or not 0 <= sampling.min_p < 1:
        problem = f"{', '.join(used)}: top_k must be 0 (all) or more, top_p above 0 and at most 1, min_p 0 to below 1"
    elif not sampling.temperature and used:
        problem = f"temperature is 0, which takes the likeliest token and does not use {', '.join(used)};"
        problem += " leave that out, or set a temperature"
    elif "" in sampling.stop:
        problem = "a stop string is empty and would end every completion at once; leave it out"
    elif hidden:
        stop, text = hidden[0]
        problem = f"stop string {stop!r} holds the special token {text!r}, which is never part of a completion's text;"
        problem += f" write {text!r} alone, which ends the completion at that token, or the text without it"
    elif num_stops > MAX_STOP_TOKENS:
        problem = f"there are {num_stops} stop tokens, the model's own included, and at most {MAX_STOP_TOKENS} are"
        problem += " possible; name fewer"
    else:
        return
    raise ValueError(problem)
