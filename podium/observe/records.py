"""Lines of samples.jsonl and lengths.jsonl, and the choice of groups that are kept as samples."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from podium.rollout.transcript import Transcript
from podium.tasks.task import Prompt, Reward

Split = Literal["train", "eval"]


def sample_record(
    step: int,
    split: Split,
    task: str,
    prompt: Prompt,
    transcripts: Sequence[Transcript],
    rewards: Sequence[Reward],
    *,
    advantages: Sequence[float] | np.ndarray | None = None,
    pieces: Callable[[Sequence[int]], list[str]] | None = None,
) -> dict[str, Any]:
    """A line of samples.jsonl: one question with all its answers, each with its reward.

    `step` is the number of steps done when the line was recorded; for `eval`, that of the evaluated weights. With
    `advantages` (of a trained group) each completion gets its own; with `pieces`, which splits tokens into texts, also
    each token's text and the log-probability with which it was sampled.
    """
    found = [
        {
            "text": transcript.text,
            "reward": reward.total,
            "parts": dict(reward.parts),
            "finish_reason": transcript.finish_reason,
            "tokens": transcript.num_drawn,
        }
        for transcript, reward in zip(transcripts, rewards, strict=True)
    ]
    if advantages is not None:
        found = [{**each, "advantage": float(a)} for each, a in zip(found, advantages, strict=True)]
    if pieces is not None:
        logprobs = [[round(float(x), 4) for x in each.sampled_logprobs] for each in transcripts]
        texts = [pieces(each.drawn_tokens.tolist()) for each in transcripts]
        found = [{**each, "pieces": t, "logprobs": x} for each, t, x in zip(found, texts, logprobs, strict=True)]
    return {
        "step": step,
        "split": split,
        "task": task,
        "prompt": prompt.id,
        "question": prompt.question,
        "answer": prompt.answer,
        "completions": found,
    }


def lengths_record(
    step: int,
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    drawn_lengths: Sequence[int] | None = None,
) -> dict[str, Any]:
    """A line of lengths.jsonl: the tokens of each prompt [N] and of each completion [N * G], for `podium plan`.

    With carry-over also the lengths of all completions that ended in the step, whichever step trains on them.
    """
    record = {"step": step, "prompt_lengths": list(prompt_lengths), "completion_lengths": list(completion_lengths)}
    return record if drawn_lengths is None else record | {"drawn_lengths": list(drawn_lengths)}


def sampled_groups(step: int, *, prompts_per_step: int, samples_every: int) -> range:
    """Indices of the groups of step `step` (counted from 1) that go to samples.jsonl: every k-th group of the run."""
    first = -(step - 1) * prompts_per_step % samples_every
    return range(first, prompts_per_step, samples_every)
