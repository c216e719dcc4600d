"""Formats lines of samples.jsonl and lengths.jsonl, and chooses the groups to keep as samples."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NotRequired, TypeAlias, TypedDict, cast

import numpy as np

from podium.files import read_lines
from podium.rollout.request import StopReason
from podium.rollout.transcript import Transcript
from podium.tasks.task import Prompt, Reward

Split = Literal["train", "eval"]


class CompletionRecord(TypedDict):
    """An answer in a line of samples.jsonl."""

    text: str
    reward: float
    parts: dict[str, float]
    """Each part of the reward before its weight."""
    finish_reason: StopReason | None
    tokens: int
    """Number of tokens that the model generated."""
    messages: NotRequired[list[Mapping[str, object]]]
    """The conversation after its prompt: the model's answers and calls, and the replies."""
    turn_rewards: NotRequired[list[float]]
    """The reward of each turn of a conversation; they add up to `reward`."""
    advantage: NotRequired[float]
    pieces: NotRequired[list[str]]
    """The text of each token."""
    logprobs: NotRequired[list[float]]
    """The log-probability with which each token was sampled."""


class SampleRecord(TypedDict):
    """A line of samples.jsonl: a question with all its answers."""

    step: int
    """Steps done when the line was recorded; for `eval`, the step of the evaluated weights."""
    split: Split
    task: str
    prompt: str
    """The prompt's id."""
    question: str
    answer: str
    """The row's answer."""
    completions: list[CompletionRecord]
    greedy: NotRequired[CompletionRecord]
    """The greedy answer that the others are compared with; only with recipe remax."""


class LengthsRecord(TypedDict):
    """A line of lengths.jsonl, in tokens."""

    step: int
    prompt_lengths: list[int]  # [N]
    completion_lengths: list[int]  # [N * G]
    drawn_lengths: NotRequired[list[int]]
    """Lengths of all completions that ended in this step, even if a later one trains on them; only with carry-over."""


MetricsRecord: TypeAlias = dict[str, float]
"""A line of metrics.jsonl: `step`, and each metric by name."""


def step_of(line: MetricsRecord) -> int:
    """The number of steps done when a line of metrics.jsonl was written; 0 if the line has no step."""
    return int(line.get("step", 0))


def read_samples(path: Path) -> list[SampleRecord]:
    """Read the lines of a samples.jsonl file, oldest first; `sample_record` makes them."""
    return cast(list[SampleRecord], read_lines(path))


def read_metrics(path: Path) -> list[MetricsRecord]:
    """Read the lines of a metrics.jsonl file, oldest first; numbers that were not finite become NaN."""
    return [{name: math.nan if value is None else value for name, value in line.items()} for line in read_lines(path)]


def sample_record(
    step: int,
    split: Split,
    task: str,
    prompt: Prompt,
    completions: Sequence[CompletionRecord],
    greedy: tuple[Transcript, Reward] | None = None,
) -> SampleRecord:
    """Make a line of samples.jsonl: one question with all its answers, from `completion_records`.

    `step` is the number of steps done when the line was recorded; for `eval`, the step of the evaluated weights.
    `greedy` is the group's greedy answer, if it has one.
    """
    record: SampleRecord = {
        "step": step,
        "split": split,
        "task": task,
        "prompt": prompt.id,
        "question": prompt.question,
        "answer": prompt.answer,
        "completions": list(completions),
    }
    if greedy is not None:
        record["greedy"] = _completion_record(*greedy)
    return record


def completion_records(
    transcripts: Sequence[Transcript],
    rewards: Sequence[Reward],
    *,
    advantages: Sequence[float] | np.ndarray | None = None,
    pieces: Callable[[Sequence[int]], list[str]] | None = None,
) -> list[CompletionRecord]:
    """The answers of a group with their rewards.

    With `advantages` (for a trained group), each record has the answer's advantage. With `pieces`, which splits tokens
    into texts, each record has the text of the answer's tokens and their log-probabilities under the sampler.
    """
    found: list[CompletionRecord] = [_completion_record(*each) for each in zip(transcripts, rewards, strict=True)]
    if advantages is not None:
        found = [{**each, "advantage": float(a)} for each, a in zip(found, advantages, strict=True)]
    if pieces is not None:
        logprobs = [[round(float(x), 4) for x in each.sampled_logprobs] for each in transcripts]
        texts = [pieces(each.drawn_tokens.tolist()) for each in transcripts]
        found = [{**each, "pieces": t, "logprobs": x} for each, t, x in zip(found, texts, logprobs, strict=True)]
    return found


def _completion_record(transcript: Transcript, reward: Reward) -> CompletionRecord:
    """The record of an answer with its reward."""
    made: CompletionRecord = {
        "text": transcript.text,
        "reward": reward.total,
        "parts": dict(reward.parts),
        "finish_reason": transcript.finish_reason,
        "tokens": transcript.num_drawn,
    }
    if transcript.messages:
        made["messages"] = list(transcript.messages)
        made["turn_rewards"] = list(reward.turns)
    return made


def lengths_record(
    step: int,
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    drawn_lengths: Sequence[int] | None = None,
) -> LengthsRecord:
    """Make a line of lengths.jsonl: lengths in tokens of each prompt [N] and completion [N * G], for `podium plan`.

    With carry-over, also the lengths of all completions that ended in the step, whichever step trains on them.
    """
    record: LengthsRecord = {
        "step": step,
        "prompt_lengths": list(prompt_lengths),
        "completion_lengths": list(completion_lengths),
    }
    if drawn_lengths is not None:
        record["drawn_lengths"] = list(drawn_lengths)
    return record


def sampled_groups(step: int, *, prompts_per_step: int, samples_every: int) -> range:
    """Indices of the groups of step `step` (counted from 1) that go to samples.jsonl: every k-th group of the run."""
    first = -(step - 1) * prompts_per_step % samples_every
    return range(first, prompts_per_step, samples_every)
