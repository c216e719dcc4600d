"""Requests, completions and statistics of the rollout engine: plain data, no jax."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy: the likeliest token, the first of equals; not with top_k, top_p or min_p."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end the completion; its text and tokens include them, to the end of the last token. The text of a
    special token means that token, which ends the completion and is not part of its text."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end it, besides the model's end-of-sequence tokens; at most 8 together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer of the model."""

    tokens: np.ndarray
    """[n] int32, the end-of-sequence token included; n >= 1 once it has ended."""
    sampled_logprobs: np.ndarray
    """[n] float32, of each token under the distribution it was drawn from."""
    full_logprobs: np.ndarray
    """[n] float32, of each token under the softmax at the request's temperature (1 where it is greedy), before top-k,
    top-p and min-p: what a trainer's log-probabilities are compared with. Equal to `sampled_logprobs` without those."""
    versions: np.ndarray
    """[n] int32, version of the weights that drew each token, as given to `RolloutEngine.load`."""
    text: str
    """Without special tokens; empty if it has not ended."""
    finish_reason: FinishReason | None
    """None if it has not ended."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to be completed `completions` times and prefilled once."""

    prompt: tuple[int, ...]
    """Token ids, chat template applied; at least one."""
    sampling: SamplingParams
    seed: int
    """With the completion's index and the position it determines every draw, whatever else runs."""
    completions: int = 1
    keep: bool = False
    """Park each completion when it ends, for `RolloutEngine.extend`, until `RolloutEngine.cancel`."""
    begun: tuple[Completion, ...] = ()
    """What has been drawn of each completion: one without a finish reason continues behind its last token, the others
    stay as they are. Empty: nothing has been drawn."""
    ledgers: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict[int, tuple[int, ...]])
    """Conversations to restore, by the completion's index, which decides its draws: all tokens before the turn that is
    to be drawn, the prompt first. A completion without one stands behind the prompt; if none has begun, only these are
    completed."""

    @property
    def unfinished(self) -> dict[int, Completion | None]:
        """The completions to be drawn, by index, with what has been drawn of them.

        Raises ValueError where only some have begun, or a ledger is not of a completion or starts otherwise.
        """
        for index, ledger in self.ledgers.items():
            if not 0 <= index < self.completions or ledger[: len(self.prompt)] != self.prompt:
                raise ValueError(
                    f"the ledger of completion {index} of {self.completions} must begin with the prompt's"
                    f" {len(self.prompt)} tokens; give the completion's own index and all its tokens"
                )
        if not self.begun:
            return dict.fromkeys(self.ledgers or range(self.completions))
        if len(self.begun) != self.completions:
            raise ValueError(f"{len(self.begun)} of {self.completions} completions have begun; give all, or none")
        return {index: each for index, each in enumerate(self.begun) if each.finish_reason is None}


class Key(NamedTuple):
    """A completion that the engine knows."""

    request: int
    """What `RolloutEngine.submit` returned."""
    completion: int
    """Its index in the request."""


class Finished(NamedTuple):
    """A completion that has ended, or a turn of it."""

    key: Key
    completion: Completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """Counts and seconds of answering prompts, in one call or several."""

    prompt_tokens: int = 0
    """Tokens of the prompts, once per group."""
    completion_tokens: int = 0
    """Tokens drawn in these calls, those of unfinished completions included."""
    prefill_tokens: int = 0
    """Tokens that were prefilled: of prompts and turns, and those whose keys and values were made again."""
    rebuilt_tokens: int = 0
    """Of these, tokens whose keys and values had been made before: by older weights, or evicted since."""
    decoded_tokens: int = 0
    """Tokens drawn by decode steps, those cut off by a stop string included."""
    decode_steps: int = 0
    slots: int = 0
    slot_steps: int = 0
    """Rows of the decode program, summed over steps: an upper bound of `decoded_tokens`."""
    pages_peak: int = 0
    """Largest number of the cache's pages in use."""
    preempted: int = 0
    """Running sequences that lost slot and pages to older ones, and waited again."""
    evicted: int = 0
    """Parked or waiting sequences whose pages were freed, to be prefilled again."""
    compilations: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    generate_s: float = 0.0
    """Prefill, decode, and what the host does between them."""
    reward_s: float = 0.0
    """Seconds spent waiting for grades after the last completion."""
    answer_s: float = 0.0
    """From prompts to graded completions of all hosts."""
    dropped_prompts: int = 0
    """Longer than `rollout.max_prompt_tokens`, replaced by the next ones."""
    refill_rounds: int = 0
    in_flight: int = 0
    """Prompts that continue in the next step, or are complete and wait for it."""
    waited_s: float = 0.0
    """Decoding after enough prompts were complete, for one that must not become older."""
    drawn_lengths: tuple[int, ...] = ()
    """Tokens of each completion that ended in these calls, of all hosts."""

    @property
    def rebuild_s(self) -> float:
        """Share of `prefill_s` in proportion to `rebuilt_tokens`; 0 without prefill."""
        return self.prefill_s * self.rebuilt_tokens / self.prefill_tokens if self.prefill_tokens else 0.0

    @property
    def slot_utilisation(self) -> float:
        """Share of `slot_steps` that drew a token, counting the slots of each program; 0 without steps."""
        return self.decoded_tokens / self.slot_steps if self.slot_steps else 0.0

    @property
    def slots_busy(self) -> float:
        """Share of all slots that drew a token in a step, on average; 0 without steps."""
        return self.decoded_tokens / (self.decode_steps * self.slots) if self.decode_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second of `generate`; 0 without any."""
        return self.completion_tokens / self.generate_s if self.generate_s else 0.0

    def then(self, later: "RolloutStats") -> "RolloutStats":
        """Both calls, one after the other on the same slots."""
        return _merged(self, later, larger=("slots", "pages_peak", "in_flight"))

    def beside(self, other: "RolloutStats") -> "RolloutStats":
        """Both calls as if one engine had made them: they ran at the same time, on different hosts.

        A host that had nothing to do (no slots) leaves the other's unchanged.
        """
        return _merged(self, other, larger=_SHARED_BY_HOSTS)


_SHARED_BY_HOSTS = (
    "decode_steps", "compilations", "prefill_s", "decode_s", "generate_s", "reward_s", "answer_s", "waited_s",
)  # fmt: skip


def _merged(one: RolloutStats, other: RolloutStats, *, larger: tuple[str, ...]) -> RolloutStats:
    """The sum of each field, or the larger value of some."""

    def merge(name: str) -> float:
        values = getattr(one, name), getattr(other, name)
        return max(values) if name in larger else values[0] + values[1]

    return dataclasses.replace(one, **{each.name: merge(each.name) for each in dataclasses.fields(RolloutStats)})
