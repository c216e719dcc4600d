"""Completions carried over updates (partial rollouts): which prompts form a step, and how the others are saved.

A step takes the oldest prompts whose completions are all complete; the rest continue under the new weights in the next
step. Nothing is dropped because of its age: a step waits for prompts that would become too old. Keys and values are not
saved but recomputed from the tokens, so a resumed run is identical to an uninterrupted one.
"""

import base64
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NotRequired, TypedDict

import numpy as np

from podium.observe.record_check import Extent
from podium.rollout.request import Completion, FinishReason
from podium.rollout.transcript import Transcript
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
    choices: NotRequired[str]
    context_choices: NotRequired[str]
    """A byte for each choice of an expert; absent in models without experts."""


class RewardRecord(TypedDict):
    """A `Reward` as JSON."""

    total: float
    parts: dict[str, float]
    timed_out: bool


class PendingRecord(TypedDict):
    """A `Pending` as JSON; `number` is that of its prompt."""

    number: int
    level: NotRequired[int]
    """Its level in a curriculum; missing without."""
    completions: list[CompletionRecord]
    rewards: list[RewardRecord]


class PositionRecord(TypedDict):
    """A `Position` as JSON; older checkpoints have no `in_flight`."""

    cursor: int
    in_flight: NotRequired[list[PendingRecord]]
    curriculum: NotRequired[dict[str, list[float]]]
    """Missing without curricula."""


class HostState(PositionRecord):
    """What a checkpoint stores besides the state: the position in the prompts, package versions, and the base model."""

    versions: dict[str, str]
    """Versions of packages."""
    base: NotRequired[str | None]
    """Fingerprint of the frozen weights; None: there are none."""
    records: NotRequired[Mapping[str, Extent]]
    """Extents of the run's record files when it was saved; missing in older checkpoints."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """A prompt that no step has trained on yet."""

    prompt: EncodedPrompt
    completions: tuple[Completion, ...] = ()
    """The completions as drawn so far; empty: generation has not begun."""
    rewards: tuple[Reward, ...] = ()
    """Rewards of the completions; empty until all have ended."""
    transcripts: tuple[Transcript, ...] = ()
    """The whole conversations of a prompt that is answered more than once; they are never carried over."""

    @property
    def first_version(self) -> int | None:
        """Weight version that drew its first token; None: no token yet."""
        return min((int(each.versions[0]) for each in self.completions if len(each.versions)), default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """A run's position in its sequence of prompts."""

    cursor: int
    """Number of prompts drawn so far, including those that were too long."""
    pending: tuple[Pending, ...] = ()
    """Prompts that no step has trained on yet, in order."""
    curriculum: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    """Means of the last groups of each level of curricula, by label."""

    def record(self) -> PositionRecord:
        """Serialise the position to JSON, with arrays in base64."""
        record: PositionRecord = {
            "cursor": self.cursor,
            "in_flight": [_pending_record(each) for each in self.pending],
        }
        if self.curriculum:
            record["curriculum"] = {label: list(means) for label, means in self.curriculum.items()}
        return record

    @classmethod
    def read(cls, record: PositionRecord, feed: Feed) -> "Position":
        """Read the result of `record`; `feed` recreates the prompts."""
        pending = tuple(_read_pending(each, feed) for each in record.get("in_flight", ()))
        curriculum = {label: tuple(means) for label, means in record.get("curriculum", {}).items()}
        return cls(cursor=record["cursor"], pending=pending, curriculum=curriculum)


def chosen(
    first_versions: Sequence[int | None],
    complete: Sequence[bool],
    count: int,
    *,
    per_step: int,
    version: int,
    max_staleness: int,
) -> list[int] | None:
    """Choose the prompts of a step, oldest first, by index; None if decoding must continue.

    A prompt's age is counted from the version of its first token. A step with weights `version` takes no prompt from
    before `version - max_staleness`, and leaves no more prompts than later steps can take in time. It waits for prompts
    that must be taken now; the rest of the `count` are the oldest complete ones.

    Args:
        first_versions: weight version of the first token of each prompt in flight, in the run's order; None: no
            token was drawn before this step.
        complete: whether all completions of each prompt have ended.
        count: number of prompts to take now.
        per_step: number of prompts that each later step takes.
        version: version of the current weights.
        max_staleness: maximum age in versions.
    """
    ages = [0 if first is None else version - first for first in first_versions]
    oldest = sorted(range(len(ages)), key=lambda index: -ages[index])  # stable: earlier prompts first among equals
    due = max(
        (
            sum(age >= max_staleness - later for age in ages) - later * per_step
            for later in range(max_staleness)
            if len(ages) - count > later * per_step  # otherwise later steps can take all that remain
        ),
        default=0,
    )
    ready = [index for index in oldest if complete[index]]
    if len(ready) < count or not all(complete[index] for index in oldest[: min(due, count)]):
        return None
    return ready[:count]


def drawn_lengths(before: Sequence[Pending], now: Sequence[Sequence[Completion]]) -> Iterator[int]:
    """Yield the length in tokens of each completion that has ended since `before`."""
    for pending, completions in zip(before, now, strict=True):
        for index, completion in enumerate(completions):
            begun = pending.completions[index] if pending.completions else None
            if completion.finish_reason is not None and (begun is None or begun.finish_reason is None):
                yield len(completion.tokens)


def _pending_record(pending: Pending) -> PendingRecord:
    level = pending.prompt.prompt.level
    record: PendingRecord = {
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
    if level is not None:
        record["level"] = level
    return record


def _completion_record(completion: Completion) -> CompletionRecord:
    record: CompletionRecord = {
        "tokens": _bits(completion.tokens),
        "sampled_logprobs": _bits(completion.sampled_logprobs),
        "full_logprobs": _bits(completion.full_logprobs),
        "versions": _bits(completion.versions),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
    if completion.choices is not None:
        record["choices"] = _bits(completion.choices)
    if completion.context_choices is not None:
        record["context_choices"] = _bits(completion.context_choices)
    return record


def _bits(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _read_pending(record: PendingRecord, feed: Feed) -> Pending:
    return Pending(
        prompt=feed.at(record["number"], record.get("level")),
        completions=tuple(_read_completion(each) for each in record["completions"]),
        rewards=tuple(Reward(**each) for each in record["rewards"]),
    )


def _read_completion(record: CompletionRecord) -> Completion:
    def array(bits: str, dtype: type[np.generic]) -> np.ndarray:
        return np.frombuffer(base64.b64decode(bits), dtype)

    tokens = array(record["tokens"], np.int32)
    choices, of_context = record.get("choices"), record.get("context_choices")
    own = None if choices is None else array(choices, np.uint8).reshape(len(tokens), -1)
    width = 0 if own is None else own.shape[1]
    return Completion(
        tokens=tokens,
        sampled_logprobs=array(record["sampled_logprobs"], np.float32),
        full_logprobs=array(record["full_logprobs"], np.float32),
        versions=array(record["versions"], np.int32),
        text=record["text"],
        finish_reason=record["finish_reason"],
        choices=own,
        context_choices=array(of_context, np.uint8).reshape(-1, width) if of_context and width else None,
    )
