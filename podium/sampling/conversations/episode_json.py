"""Completions, conversations and rewards as JSON, for checkpoints of runs with carry-over. No jax."""

import base64
import json
import math
from collections.abc import Mapping
from typing import NotRequired, TypedDict

import numpy as np
from numpy.typing import DTypeLike

from podium.files import to_json
from podium.rollout.request import Completion, FinishReason, StopReason
from podium.rollout.transcript import Source, Span, Transcript
from podium.sampling.conversations.episode import Episode, State
from podium.tasks.task import Reward


class CompletionRecord(TypedDict):
    """A completion as JSON; arrays are stored as base64, 4 bytes a token."""

    tokens: str
    sampled_logprobs: str
    full_logprobs: str
    versions: str
    text: str
    finish_reason: FinishReason | None
    choices: NotRequired[str]
    context_choices: NotRequired[str]
    """The experts of each token, in `choice_format`; absent in models without experts."""
    choice_format: NotRequired[str]
    """Integer format of `choices`; absent if it is uint8."""
    choice_width: NotRequired[int]
    """Number of experts per token; only present if there are no tokens to infer it from."""


class SpanRecord(TypedDict):
    """A `Span` of a transcript as JSON; tokens that the model did not sample have no log-probabilities or versions."""

    source: Source
    tokens: str
    text: str
    sampled_logprobs: NotRequired[str]
    full_logprobs: NotRequired[str]
    versions: NotRequired[str]
    choices: NotRequired[str]
    choice_format: NotRequired[str]


class EpisodeRecord(TypedDict):
    """An `Episode` as JSON, without its environment."""

    state: State
    spans: list[SpanRecord]
    messages: list[Mapping[str, object]]
    finish_reason: StopReason | None
    turn_rewards: list[float]
    final_reward: float | None
    drawing: CompletionRecord | None
    first: str | None
    replies: int
    attempt: int
    seconds: float


class RewardRecord(TypedDict):
    """A `Reward` as JSON."""

    total: float | None
    """The total reward; None if the conversation failed, or no reward function could grade the answer."""
    parts: dict[str, float]
    weights: NotRequired[dict[str, float]]
    """Weight of each part; absent in records of older versions."""
    timed_out: bool
    turns: NotRequired[list[float]]
    """Reward of each turn; absent for a single answer."""


def completion_record(completion: Completion) -> CompletionRecord:
    """Serialise a completion."""
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
        if completion.choices.dtype != np.uint8:
            record["choice_format"] = completion.choices.dtype.name
        if not len(completion.tokens):
            record["choice_width"] = completion.choices.shape[1]
    if completion.context_choices is not None:
        record["context_choices"] = _bits(completion.context_choices)
    return record


def read_completion(record: CompletionRecord) -> Completion:
    """Read the result of `completion_record`."""
    tokens = _array(record["tokens"], np.int32)
    choices, of_context = record.get("choices"), record.get("context_choices")
    own_format = record.get("choice_format", "uint8")
    own = None if choices is None else _rows(_array(choices, own_format), len(tokens), record.get("choice_width", 0))
    width = 0 if own is None else own.shape[1]
    return Completion(
        tokens=tokens,
        sampled_logprobs=_array(record["sampled_logprobs"], np.float32),
        full_logprobs=_array(record["full_logprobs"], np.float32),
        versions=_array(record["versions"], np.int32),
        text=record["text"],
        finish_reason=record["finish_reason"],
        choices=own,
        context_choices=_array(of_context, own_format).reshape(-1, width) if of_context and width else None,
    )


def episode_record(episode: Episode) -> EpisodeRecord:
    """Serialise an episode."""
    transcript = episode.transcript
    return {
        "state": episode.state,
        "spans": [_span_record(span) for span in transcript.spans],
        "messages": json.loads(to_json({"messages": transcript.messages}))["messages"],
        "finish_reason": transcript.finish_reason,
        "turn_rewards": [float(each) for each in episode.turn_rewards],
        "final_reward": None if episode.final_reward is None else float(episode.final_reward),
        "drawing": None if episode.drawing is None else completion_record(episode.drawing),
        "first": episode.first,
        "replies": episode.replies,
        "attempt": episode.attempt,
        "seconds": episode.seconds,
    }


def read_episode(record: EpisodeRecord) -> Episode:
    """Read the result of `episode_record`."""
    transcript = Transcript()
    for span in record["spans"]:
        transcript = _with_span(transcript, span)
    drawing = record["drawing"]
    return Episode(
        transcript=Transcript(
            spans=transcript.spans, finish_reason=record["finish_reason"], messages=tuple(record["messages"])
        ),
        turn_rewards=tuple(record["turn_rewards"]),
        final_reward=record["final_reward"],
        state=record["state"],
        drawing=None if drawing is None else read_completion(drawing),
        first=record["first"],
        replies=record["replies"],
        attempt=record["attempt"],
        seconds=record["seconds"],
    )


def reward_record(reward: Reward) -> RewardRecord:
    """Serialise a reward."""
    record: RewardRecord = {
        "total": None if reward.failed else float(reward.total),
        "parts": {name: float(value) for name, value in reward.parts.items()},
        "weights": dict(reward.weights),
        "timed_out": reward.timed_out,
    }
    if reward.turns:
        record["turns"] = [float(each) for each in reward.turns]
    return record


def read_reward(record: RewardRecord) -> Reward:
    """Read the result of `reward_record`."""
    total = math.nan if record["total"] is None else record["total"]
    turns = tuple(record.get("turns", ()))
    weights = record.get("weights", {})
    return Reward(total=total, parts=record["parts"], weights=weights, timed_out=record["timed_out"], turns=turns)


def _span_record(span: Span) -> SpanRecord:
    record: SpanRecord = {"source": span.source, "tokens": _bits(span.tokens), "text": span.text}
    if span.drawn:
        record["sampled_logprobs"] = _bits(span.sampled_logprobs)
        record["full_logprobs"] = _bits(span.full_logprobs)
        record["versions"] = _bits(span.versions)
    if span.choices is not None:
        record["choices"] = _bits(span.choices)
        if span.choices.dtype != np.uint8:
            record["choice_format"] = span.choices.dtype.name
    return record


def _with_span(transcript: Transcript, record: SpanRecord) -> Transcript:
    tokens = _array(record["tokens"], np.int32)
    found = record.get("choices")
    drawn = record["source"] == "drawn"

    def of_each(name: str, dtype: type[np.generic]) -> np.ndarray:
        return _array(record[name], dtype) if drawn else np.zeros(len(tokens), dtype)

    span = Span(
        source=record["source"],
        turn=transcript.num_turns,
        tokens=tokens,
        sampled_logprobs=of_each("sampled_logprobs", np.float32),
        full_logprobs=of_each("full_logprobs", np.float32),
        versions=of_each("versions", np.int32),
        text=record["text"],
        choices=None if found is None else _rows(_array(found, record.get("choice_format", "uint8")), len(tokens)),
    )
    return Transcript(spans=(*transcript.spans, span))


def _rows(values: np.ndarray, rows: int, width: int = 0) -> np.ndarray:
    """Reshape values to rows; `width` is the row length if there are no rows."""
    return values.reshape(rows, len(values) // rows if rows else width)


def _bits(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(bits: str, dtype: DTypeLike) -> np.ndarray:
    return np.frombuffer(base64.b64decode(bits), dtype)
