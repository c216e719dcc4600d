"""Requests, completions and statistics of the rollout engine: plain data, no jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import numpy as np


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


Counts = TypeVar("Counts", bound=_Dataclass)
FinishReason = Literal["stop", "length"]
StopReason = Literal["stop", "length", "turns", "drawn", "calls", "timeout", "failed"]
"""Why a conversation ended: its natural end, a full context, a limit of `rollout.limits`, or a failure."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request."""

    max_new_tokens: int
    temperature: float = 1.0
    """Sampling temperature; 0: greedy (the likeliest token; the lowest index on ties), which excludes top_k, top_p and
    min_p."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """For tokens that the sequence already contains, prompt included, divides positive logits and multiplies negative
    ones, before the temperature (arXiv:1909.05858); 1: no penalty. Greedy sampling then takes the likeliest token after
    the penalty."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion; its text and tokens include them, up to the end of the last token. If the text
    is that of a special token, that token ends the completion and is not part of its text."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the completion, in addition to the model's end-of-sequence tokens; at most 8 in total."""
    greedy_completion: int | None = None
    """Index of the one completion of a request that is greedy even if the others are not; None if there is none."""

    def of(self, completion: int) -> "SamplingParams":
        """The settings of one completion of a request."""
        if completion != self.greedy_completion:
            return self
        return dataclasses.replace(self.at(0.0), greedy_completion=None)

    def at(self, temperature: float) -> "SamplingParams":
        """A copy with another temperature; at 0, top_k, top_p and min_p are unset, because they have no effect."""
        cuts = (self.top_k, self.top_p, self.min_p) if temperature else (0, 1.0, 0.0)
        top_k, top_p, min_p = cuts
        return dataclasses.replace(self, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptScores:
    """Log-probabilities of a prompt's own tokens, each given the preceding tokens, at temperature 1."""

    logprobs: np.ndarray
    """Log-probabilities of the prompt's tokens, [c] float32; NaN for the first token."""
    best_tokens: np.ndarray
    """The likeliest token at each position, [c] int32 (the lowest index on ties); -1 at the first position."""
    best_logprobs: np.ndarray
    """Log-probability of the likeliest token, [c] float32; NaN at the first position."""

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The three arrays, [c] each."""
        return self.logprobs, self.best_tokens, self.best_logprobs


def unscored(count: int) -> PromptScores:
    """Scores of a prompt of `count` tokens, to be filled in."""
    return PromptScores(
        logprobs=np.full(count, np.nan, np.float32),
        best_tokens=np.full(count, -1, np.int32),
        best_logprobs=np.full(count, np.nan, np.float32),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer of the model."""

    tokens: np.ndarray
    """Token ids, [n] int32, including the end-of-sequence token; n >= 1 once the completion has ended."""
    sampled_logprobs: np.ndarray
    """Log-probability of each token under the distribution it was sampled from, [n] float32."""
    full_logprobs: np.ndarray
    """Log-probability of each token under the softmax at the request's temperature (1 if greedy), before repetition
    penalty, top-k, top-p and min-p, [n] float32; comparable with a trainer's log-probabilities. Without these settings,
    equal to `sampled_logprobs`."""
    versions: np.ndarray
    """Version of the weights that sampled each token, as passed to `RolloutEngine.load`, [n] int32."""
    text: str
    """Text without special tokens (`podium.rollout.answer`); empty until the completion has ended."""
    finish_reason: FinishReason | None
    """Why the completion ended; None until it has ended."""
    choices: np.ndarray | None = None
    """For each token, the experts in all layers of the token before it, [n, C];
    `podium.models.blocks.choices.unknown_choice` if they were not recorded. None without experts."""
    context_choices: np.ndarray | None = None
    """Like `choices`, for the c tokens before the completion, [c, C]; the first row is unknown. Must not be modified,
    because a prompt's completions share it."""
    prompt_scores: PromptScores | None = None
    """Scores of the prompt's tokens; None unless the request asks for them (`Request.score_prompt`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to prefill once and complete `completions` times."""

    prompt: tuple[int, ...]
    """Token ids after the chat template; at least one."""
    sampling: SamplingParams
    seed: int
    """Seed of the sampling. Together with the completion's index and the position, it determines every draw, whatever
    else runs."""
    completions: int = 1
    keep: bool = False
    """Whether to park each ended completion for `RolloutEngine.extend`, until `RolloutEngine.cancel`."""
    score_prompt: bool = False
    """Whether to compute how likely the prompt's own tokens are; requires a single completion without `begun` or
    `ledgers`."""
    begun: Mapping[int, Completion] = dataclasses.field(default_factory=dict[int, Completion])
    """The completions so far, by completion index: those without a finish reason continue after their last token, the
    others are returned unchanged."""
    ledgers: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict[int, tuple[int, ...]])
    """Conversations to restore, by completion index (which determines the draws): all tokens before the turn to
    generate, starting with the prompt. Completions without an entry start from the prompt. If `begun` or `ledgers` has
    entries, only the completions that they name are generated."""

    @property
    def unfinished(self) -> dict[int, Completion | None]:
        """The completions to generate, by index, each with the tokens sampled so far (None if none).

        Raises ValueError if an index is wrong, or a ledger does not start with the prompt.
        """
        for index, ledger in self.ledgers.items():
            if not 0 <= index < self.completions or ledger[: len(self.prompt)] != self.prompt:
                raise ValueError(
                    f"the ledger of completion {index} of {self.completions} must begin with the prompt's"
                    f" {len(self.prompt)} tokens; give the completion's own index and all its tokens"
                )
        if wrong := [index for index in self.begun if not 0 <= index < self.completions]:
            raise ValueError(
                f"begun names completion {wrong[0]}, but the request has {self.completions}, numbered from 0"
            )
        named = sorted({*self.begun, *self.ledgers}) or range(self.completions)
        found = {index: self.begun.get(index) for index in named}
        return {index: each for index, each in found.items() if each is None or each.finish_reason is None}


class Key(NamedTuple):
    """Identifies a completion of the engine."""

    request: int
    """Request number returned by `RolloutEngine.submit`."""
    completion: int
    """Index of the completion in the request."""


class Drawing(NamedTuple):
    """The tokens sampled so far of a completion."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token under the distribution it was sampled from."""


class Finished(NamedTuple):
    """A completion that has ended, or one of its turns."""

    key: Key
    completion: Completion


@dataclasses.dataclass(kw_only=True)
class CallCounts:
    """Counts and seconds of an engine's calls."""

    slots: int = 0
    decoded_tokens: int = 0
    """Tokens drawn by decode steps, including those cut off by a stop string."""
    decode_steps: int = 0
    slot_steps: int = 0
    """Rows of the decode program summed over steps: an upper bound of `decoded_tokens`."""
    compilations: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    generate_s: float = 0.0
    """Prefill, decode, and the host's work between them."""


@dataclasses.dataclass(kw_only=True)
class ScheduleCounts:
    """What an engine's scheduler counts."""

    prefill_tokens: int = 0
    """Prefilled tokens: those of prompts and turns, and recomputed ones."""
    rebuilt_tokens: int = 0
    """Prefilled tokens whose keys and values existed before: computed with older weights, or evicted since."""
    pages_peak: int = 0
    """Largest number of cache pages in use."""
    preempted: int = 0
    """Running sequences that lost their slot and pages to older ones and returned to the queue."""
    evicted: int = 0
    """Parked or waiting sequences whose pages were freed; they are prefilled again."""
    parked: int = 0
    """Largest number of parked sequences at a time, with or without pages."""


class JudgeCounts(NamedTuple):
    """Counts of requests to judges."""

    requests: int = 0
    """Requests sent, including retries."""
    tokens: int = 0
    """Tokens of requests and replies, as the servers count them."""
    cached: int = 0
    """Grades taken from stored replies."""
    ungraded: int = 0
    """Replies without a number."""

    def __add__(self, other: object) -> "JudgeCounts":
        assert isinstance(other, JudgeCounts), "counts are added to counts"
        return JudgeCounts(*(mine + its for mine, its in zip(self, other, strict=True)))


NO_REQUESTS = JudgeCounts()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradingCounts:
    """Counts and seconds of grading."""

    reward_s: float = 0.0
    """Time spent waiting for grades after the last completion."""
    scored_s: float = 0.0
    """Time in which models of the run graded answers."""
    unscored: int = 0
    """Answers that were too long for a model that grades them, counted once for each such model."""
    judged: JudgeCounts = NO_REQUESTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """Counts and times (in seconds) of answering prompts, over one or several calls."""

    prompt_tokens: int = 0
    """Prompt tokens, counted once per group."""
    completion_tokens: int = 0
    """Tokens sampled, including those of unfinished completions."""
    calls: CallCounts = dataclasses.field(default_factory=CallCounts)
    scheduled: ScheduleCounts = dataclasses.field(default_factory=ScheduleCounts)
    grading: GradingCounts = GradingCounts()
    answer_s: float = 0.0
    """Time from prompts to graded completions, over all hosts."""
    dropped_prompts: int = 0
    """Prompts longer than `rollout.max_prompt_tokens`, replaced by the next prompts."""
    refill_rounds: int = 0
    retired: int = 0
    """Prompts that are no longer drawn because they were solved (`data.retire`)."""
    in_flight: int = 0
    """Prompts that are carried over to the next step, unfinished or complete."""
    waited_s: float = 0.0
    """Decoding time after enough prompts were complete, spent on a prompt that must not become staler."""
    drawn_lengths: tuple[int, ...] = ()
    """Lengths in tokens of the completions that ended in these calls, over all hosts."""

    @property
    def rebuild_s(self) -> float:
        """`prefill_s` times the share of prefilled tokens that were rebuilt; 0 without prefill."""
        counts = self.scheduled
        return self.calls.prefill_s * counts.rebuilt_tokens / counts.prefill_tokens if counts.prefill_tokens else 0.0

    @property
    def slot_utilisation(self) -> float:
        """Share of `slot_steps` that drew a token; 0 without steps."""
        return self.calls.decoded_tokens / self.calls.slot_steps if self.calls.slot_steps else 0.0

    @property
    def slots_busy(self) -> float:
        """Share of all slots that drew a token, averaged over steps; 0 without steps."""
        calls = self.calls
        return calls.decoded_tokens / (calls.decode_steps * calls.slots) if calls.decode_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second of `generate`; 0 if no tokens were sampled."""
        return self.completion_tokens / self.calls.generate_s if self.calls.generate_s else 0.0

    def then(self, later: "RolloutStats") -> "RolloutStats":
        """Statistics of this call followed by `later` on the same slots."""
        return _merged(self, later, larger=("slots", "pages_peak", "parked", "in_flight"))

    def beside(self, other: "RolloutStats") -> "RolloutStats":
        """Statistics of two simultaneous calls on different hosts, as if of a single engine.

        A host without work (no slots) does not change the other's.
        """
        return _merged(self, other, larger=_SHARED_BY_HOSTS)


_SHARED_BY_HOSTS = (
    "decode_steps", "compilations", "prefill_s", "decode_s", "generate_s", "reward_s", "answer_s", "waited_s",
)  # fmt: skip


def _merged(one: Counts, other: Counts, *, larger: tuple[str, ...]) -> Counts:
    """Sum each field, but take the larger value of the fields in `larger`; groups of fields likewise."""

    def merge(name: str) -> object:
        values = getattr(one, name), getattr(other, name)
        if dataclasses.is_dataclass(values[0]):
            return _merged(*values, larger=larger)
        return max(values) if name in larger else values[0] + values[1]

    return dataclasses.replace(one, **{each.name: merge(each.name) for each in dataclasses.fields(one)})
