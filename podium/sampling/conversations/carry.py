"""Completions and conversations that are carried over updates (partial rollouts): which ones form a step, and how the
others are saved.

A step takes the oldest prompts whose completions have all ended; the rest continue under the new weights in the next
step. Nothing is dropped because of its age: a step waits for prompts that would become too old. Keys and values are not
saved but recomputed from the tokens, so a resumed run is identical to an uninterrupted one.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NotRequired, TypedDict

from pydantic import JsonValue

from podium.observe.record_check import Extent
from podium.rollout.request import Completion
from podium.sampling.conversations.episode import Episode
from podium.sampling.conversations.episode_json import (
    CompletionRecord,
    EpisodeRecord,
    RewardRecord,
    completion_record,
    episode_record,
    read_completion,
    read_episode,
    read_reward,
    reward_record,
)
from podium.sampling.feed import EncodedPrompt, Feed
from podium.tasks.task import Reward


class PendingRecord(TypedDict):
    """A `Pending` as JSON; `number` is the index of its prompt."""

    number: int
    level: NotRequired[int]
    """The prompt's curriculum level; absent without a curriculum."""
    completions: list[CompletionRecord]
    rewards: list[RewardRecord]
    episodes: NotRequired[list[EpisodeRecord]]
    """Episodes in progress; absent in runs without conversations."""


class PositionRecord(TypedDict):
    """A `Position` as JSON; older checkpoints have no `in_flight`."""

    cursor: int
    in_flight: NotRequired[list[PendingRecord]]
    curriculum: NotRequired[dict[str, list[float]]]
    """`Position.curriculum`; absent without curricula."""
    retired: NotRequired[dict[str, list[str]]]
    """`Position.retired`; absent if no prompt is retired."""
    demonstrations: NotRequired[int]
    """`Position.demonstrations`; absent in runs without demonstrations."""


class HostState(PositionRecord):
    """What a checkpoint stores in addition to the training state: position in the prompts, package versions, base
    model, records.
    """

    versions: dict[str, str]
    """Versions of packages."""
    base: NotRequired[str | None]
    """Fingerprint of the frozen weights; None if all weights are trained."""
    records: NotRequired[Mapping[str, Extent]]
    """Extents of the run's record files when the checkpoint was made; absent in older checkpoints."""
    settings: NotRequired[Mapping[str, JsonValue]]
    """The run's settings; absent in older checkpoints."""
    data: NotRequired[Mapping[str, str]]
    """Digests of the questions in the run's training data, by task; absent in older checkpoints."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """A prompt that no step has trained on yet."""

    prompt: EncodedPrompt
    completions: tuple[Completion, ...] = ()
    """The completions so far; empty if generation has not begun."""
    rewards: tuple[Reward, ...] = ()
    """Rewards of the completions; empty until all have ended."""
    episodes: tuple[Episode, ...] = ()
    """In a run with conversations, the prompt's episodes so far, instead of `completions`."""

    @property
    def first_version(self) -> int | None:
        """Weight version that sampled the first token; None if there is no token yet."""
        versions = [int(each.versions[0]) for each in self.completions if len(each.versions)]
        versions += [each.first_version for each in self.episodes if each.first_version is not None]
        return min(versions, default=None)


class Answer(NamedTuple):
    """The completions of a prompt (in a run with conversations, its episodes) with their rewards."""

    completions: list[Completion]
    rewards: list[Reward]
    """One reward per completion or episode; empty until all have ended."""
    episodes: list[Episode]

    def of(self, pending: Pending) -> Pending:
        """A copy of `pending` with this answer."""
        return dataclasses.replace(
            pending,
            completions=tuple(self.completions),
            rewards=tuple(self.rewards),
            episodes=tuple(self.episodes),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """A run's position in its sequence of prompts."""

    cursor: int
    """Number of prompts drawn so far, including those that were too long."""
    pending: tuple[Pending, ...] = ()
    """Prompts that no step has trained on yet, in order."""
    curriculum: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    """Mean rewards of recent groups, by label of the curriculum level or, with `data.progress`, of the task."""
    retired: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Ids of prompts that are no longer drawn, by label of the task or level."""
    demonstrations: int = 0
    """Number of demonstrations read so far."""

    def record(self) -> PositionRecord:
        """Serialise the position to JSON, with arrays in base64."""
        record: PositionRecord = {
            "cursor": self.cursor,
            "in_flight": [_pending_record(each) for each in self.pending],
        }
        if self.curriculum:
            record["curriculum"] = {label: list(means) for label, means in self.curriculum.items()}
        if self.retired:
            record["retired"] = {label: list(ids) for label, ids in self.retired.items()}
        if self.demonstrations:
            record["demonstrations"] = self.demonstrations
        return record

    @classmethod
    def read(cls, record: PositionRecord, feed: Feed) -> "Position":
        """Read the result of `record`; `feed` recreates the prompts."""
        pending = tuple(_read_pending(each, feed) for each in record.get("in_flight", ()))
        curriculum = {label: tuple(means) for label, means in record.get("curriculum", {}).items()}
        retired = {label: tuple(ids) for label, ids in record.get("retired", {}).items()}
        return cls(
            cursor=record["cursor"],
            pending=pending,
            curriculum=curriculum,
            retired=retired,
            demonstrations=record.get("demonstrations", 0),
        )


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
    that must be taken now; the others are the oldest complete prompts.

    Args:
        first_versions: weight version of the first token of each prompt in flight, in the run's order; None if no token
            was sampled before this step.
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


def drawn_lengths(before: Sequence[Pending], now: Sequence[Pending]) -> Iterator[int]:
    """Yield the number of sampled tokens of each completion or episode that has ended between `before` and `now`."""
    for earlier, later in zip(before, now, strict=True):
        for index, completion in enumerate(later.completions):
            begun = earlier.completions[index] if earlier.completions else None
            if completion.finish_reason is not None and (begun is None or begun.finish_reason is None):
                yield len(completion.tokens)
        for index, episode in enumerate(later.episodes):
            if episode.ended and not (earlier.episodes and earlier.episodes[index].ended):
                yield episode.transcript.num_drawn


def _pending_record(pending: Pending) -> PendingRecord:
    level = pending.prompt.prompt.level
    record: PendingRecord = {
        "number": pending.prompt.number,
        "completions": [completion_record(each) for each in pending.completions],
        "rewards": [reward_record(each) for each in pending.rewards],
    }
    if level is not None:
        record["level"] = level
    if pending.episodes:
        record["episodes"] = [episode_record(each) for each in pending.episodes]
    return record


def _read_pending(record: PendingRecord, feed: Feed) -> Pending:
    return Pending(
        prompt=feed.at(record["number"], record.get("level")),
        completions=tuple(read_completion(each) for each in record["completions"]),
        rewards=tuple(read_reward(each) for each in record["rewards"]),
        episodes=tuple(read_episode(each) for each in record.get("episodes", ())),
    )
