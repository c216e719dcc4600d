"""Completions that are carried over updates: partial rollouts, which prompts make a step, and how they are saved.

A step takes the prompts whose completions are complete, the oldest first; the rest continue under the new weights
in the next step. Nothing is dropped for its age: a step waits for what may not become older. Keys and values are not
saved: they are computed again from the tokens, so a resumed run does what an uninterrupted one does.
"""

import base64
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NotRequired, TypedDict

import numpy as np

from podium.observe.record_check import Extent
from podium.rollout.request import Completion, FinishReason
from podium.tasks.task import Reward
from podium.train.feed import EncodedPrompt, Feed


class CompletionRecord(TypedDict):
    """A completion as JSON; the bits of arrays, 4 bytes a token, are in base 64."""

    tokens: str
    sampled_logprobs: str
    full_logprobs: str
    versions: str
    text: str
    finish_reason: FinishReason | None


class RewardRecord(TypedDict):
    """A `Reward` as JSON."""

    total: float
    parts: dict[str, float]
    timed_out: bool


class PendingRecord(TypedDict):
    """A `Pending` as JSON; `number` is that of its prompt."""

    number: int
    completions: list[CompletionRecord]
    rewards: list[RewardRecord]


class PositionRecord(TypedDict):
    """A `Position` as JSON; older checkpoints have no `in_flight`."""

    cursor: int
    in_flight: NotRequired[list[PendingRecord]]


class HostState(PositionRecord):
    """What a checkpoint holds beside the state: the position in the prompts, and what the run was made with."""

    versions: dict[str, str]
    """Versions of packages."""
    base: NotRequired[str | None]
    """Fingerprint of the frozen weights; None: there are none."""
    records: NotRequired[Mapping[str, Extent]]
    """What the run's records held; older checkpoints do not say."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """A prompt that is not trained on yet."""

    prompt: EncodedPrompt
    completions: tuple[Completion, ...] = ()
    """What has been drawn of each; none: they have not begun."""
    rewards: tuple[Reward, ...] = ()
    """Rewards of the completions, once all have ended."""

    @property
    def first_version(self) -> int | None:
        """Version of the weights that drew its first token; None: there is no token."""
        return min((int(each.versions[0]) for each in self.completions if len(each.versions)), default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands in its prompts."""

    cursor: int
    """Prompts drawn so far, too long ones included."""
    pending: tuple[Pending, ...] = ()
    """Prompts that are not trained on yet, in their order."""

    def record(self) -> PositionRecord:
        """The position as JSON, with the bits of arrays in base 64."""
        return {"cursor": self.cursor, "in_flight": [_pending_record(each) for each in self.pending]}

    @classmethod
    def read(cls, record: PositionRecord, feed: Feed) -> "Position":
        """Read what `record` made; the feed makes the prompts again."""
        pending = tuple(_read_pending(each, feed) for each in record.get("in_flight", ()))
        return cls(cursor=record["cursor"], pending=pending)


def chosen(
    first_versions: Sequence[int | None],
    complete: Sequence[bool],
    count: int,
    *,
    per_step: int,
    version: int,
    max_staleness: int,
) -> list[int] | None:
    """The prompts of a step, the oldest first, by their index; None: decoding must go on.

    A prompt's age is counted from the version of its first token: a step of weights `version` takes none from before
    `version - max_staleness`, nor leaves more of them than later steps can take in time. What must be taken now is
    waited for; the rest of the `count` are the oldest complete ones.

    Args:
        first_versions: of all prompts in flight, in the run's order; None: no token had been drawn before this step.
        complete: whether all completions of each have ended.
        count: prompts that are taken now.
        per_step: prompts that each later step takes.
        version: of the weights.
        max_staleness: in versions.
    """
    ages = [0 if first is None else version - first for first in first_versions]
    oldest = sorted(range(len(ages)), key=lambda index: -ages[index])  # of equals the first
    due = max(
        (
            sum(age >= max_staleness - later for age in ages) - later * per_step
            for later in range(max_staleness)
            if len(ages) - count > later * per_step  # else the steps until then take all that is left
        ),
        default=0,
    )
    ready = [index for index in oldest if complete[index]]
    if len(ready) < count or not all(complete[index] for index in oldest[: min(due, count)]):
        return None
    return ready[:count]


def drawn_lengths(before: Sequence[Pending], now: Sequence[Sequence[Completion]]) -> Iterator[int]:
    """Yield the number of tokens of each completion that has ended since `before`."""
    for pending, completions in zip(before, now, strict=True):
        for index, completion in enumerate(completions):
            begun = pending.completions[index] if pending.completions else None
            if completion.finish_reason is not None and (begun is None or begun.finish_reason is None):
                yield len(completion.tokens)


def _pending_record(pending: Pending) -> PendingRecord:
    return {
        "number": pending.prompt.number,
        "completions": [_completion_record(each) for each in pending.completions],
        "rewards": [
            {
                "total": float(each.total),
                "parts": {name: float(value) for name, value in each.parts.items()},
                "timed_out": each.timed_out,
            }
            for each in pending.rewards
        ],
    }


def _completion_record(completion: Completion) -> CompletionRecord:
    return {
        "tokens": _bits(completion.tokens),
        "sampled_logprobs": _bits(completion.sampled_logprobs),
        "full_logprobs": _bits(completion.full_logprobs),
        "versions": _bits(completion.versions),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }


def _bits(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _read_pending(record: PendingRecord, feed: Feed) -> Pending:
    return Pending(
        prompt=feed.at(record["number"]),
        completions=tuple(_read_completion(each) for each in record["completions"]),
        rewards=tuple(Reward(**each) for each in record["rewards"]),
    )


def _read_completion(record: CompletionRecord) -> Completion:
    def array(bits: str, dtype: type[np.generic]) -> np.ndarray:
        return np.frombuffer(base64.b64decode(bits), dtype)

    return Completion(
        tokens=array(record["tokens"], np.int32),
        sampled_logprobs=array(record["sampled_logprobs"], np.float32),
        full_logprobs=array(record["full_logprobs"], np.float32),
        versions=array(record["versions"], np.int32),
        text=record["text"],
        finish_reason=record["finish_reason"],
    )
