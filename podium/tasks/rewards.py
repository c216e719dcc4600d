"""Reward parts that a config can weight, such as `correct`, `format` and `length`, and their weighted sum.

Parts that are the user's functions are in `podium.tasks.functions`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from podium.config.imports import is_path
from podium.config.schema import TaskConfig
from podium.tasks.functions import Part, RewardFunction
from podium.tasks.task import Graded, Reward

REPEATED_WORDS = 3
"""Length of the runs that the repetition part counts."""
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class RewardOptions(NamedTuple):
    """What built-in parts of the reward read of a config."""

    max_new_tokens: int
    overlong_buffer_tokens: int
    """Length in tokens of the zone in which the length part falls to -1."""


def format_reward(graded: Graded, options: RewardOptions) -> float:
    """1 if the text is exactly `<think>...</think>` followed by `<answer>...</answer>`, each tag once; else 0."""
    text = graded.text.strip()
    if any(text.count(tag) != 1 for tag in TAGS):
        return 0.0
    think, think_end, answer, answer_end = (text.index(tag) for tag in TAGS)
    between = text[think_end + len("</think>") : answer]
    whole = think == 0 and answer_end + len("</answer>") == len(text)
    return float(whole and think < think_end < answer < answer_end and not between.strip())


def tags_reward(graded: Graded, options: RewardOptions) -> float:
    """A quarter for each of the four tags that occurs exactly once."""
    return 0.25 * sum(graded.text.count(tag) == 1 for tag in TAGS)


def length_reward(graded: Graded, options: RewardOptions) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), -1 to 0.

    0 up to `max_new_tokens - overlong_buffer_tokens`, then linear to -1 at `max_new_tokens`.
    """
    buffer = options.overlong_buffer_tokens
    return max(-1.0, min(0.0, (options.max_new_tokens - buffer - graded.num_tokens) / buffer))


def repetition_reward(graded: Graded, options: RewardOptions) -> float:
    """Minus the share of runs of three words that occurred earlier in the text, -1 to 0.

    arXiv:2502.03373, appendix C.2. 0 for a text of fewer words. Words are in lower case, between spaces, as in open-r1
    with its defaults.
    """
    words = graded.text.lower().split()
    runs = list(zip(*(words[begin:] for begin in range(REPEATED_WORDS)), strict=False))
    return len(set(runs)) / len(runs) - 1 if runs else 0.0


def cosine_length_reward(graded: Graded, options: RewardOptions, correct: float) -> float:
    """A reward that falls with the length of a right answer, from 1 to 0.5, and rises with the length of a wrong
    answer, from -1 to -0.5 (arXiv:2502.03373).

    It follows half a cosine, up to `max_new_tokens` tokens; an answer is right if `correct` is 1. The numbers are those
    of open-r1's `cosine` reward, which measures characters.
    """
    share = min(1.0, graded.num_tokens / options.max_new_tokens)
    size = 0.5 + 0.25 * (1 + math.cos(math.pi * share))
    return size if correct >= 1 else -size


TEXT_REWARDS: dict[str, Callable[[Graded, RewardOptions], float]] = {
    "format": format_reward,
    "tags": tags_reward,
    "length": length_reward,
    "repetition": repetition_reward,
}
"""Built-in parts other than `correct`, which is the task's grade."""
GRADED_REWARDS: dict[str, Callable[[Graded, RewardOptions, float], float]] = {"cosine_length": cosine_length_reward}
"""Built-in parts that depend on whether the answer is right."""
BUILT_IN = ("correct", *TEXT_REWARDS, *GRADED_REWARDS)


def own_functions(task: TaskConfig) -> list[str]:
    """A task's reward parts that are functions given by import path."""
    return [name for name in task.rewards if is_path(name)]


def named_parts(task: TaskConfig) -> list[str]:
    """A task's reward parts that are names of judges or reward models; scores of reward models are added at the end."""
    return [name for name in task.rewards if name not in BUILT_IN and not is_path(name)]


def asks_for_environment(task: TaskConfig) -> bool:
    """Whether a reward function of the task asks for its environment."""
    return task.environment is not None and any(RewardFunction(name).of_environment for name in own_functions(task))


def make_reward(
    task: TaskConfig,
    graded: Graded,
    options: RewardOptions,
    *,
    correct: float | None,
    own: Mapping[str, Part] | None = None,
    timed_out: bool = False,
) -> Reward:
    """Combine a completion's `correct` part and the values of the user's functions to its reward.

    `correct` is always among the parts; None, where it does not apply, is 0 there and not in the sum. If the task uses
    a function's value as correctness, it is that value, clipped to 0 to 1; if that function does not apply to the
    prompt, the next function that does is used; 0 if none applies.
    """
    own = own or {}
    names = [name for name in task.rewards if name in own or name in TEXT_REWARDS]
    values = {name: own[name].value if name in own else TEXT_REWARDS[name](graded, options) for name in names}
    parts = {name: value for name, value in values.items() if value is not None}
    if task.correct != "correct":
        applying = [parts[name] for name in (task.correct, *own) if name in parts]
        correct = min(1.0, max(0.0, applying[0])) if applying else 0.0
    known = correct or 0.0
    parts |= {name: judge(graded, options, known) for name, judge in GRADED_REWARDS.items() if name in task.rewards}
    counted = parts if correct is None else {"correct": correct, **parts}
    weights = {name: weight for name, weight in task.rewards.items() if name in counted}
    total = sum(weight * counted[name] for name, weight in weights.items()) if weights else math.nan
    timed_out = timed_out or any(part.timed_out for part in own.values())
    return Reward(
        total=total,
        parts={label(name): value for name, value in {"correct": known, **parts}.items()},
        weights={label(name): weight for name, weight in weights.items()},
        timed_out=timed_out,
    )


def with_score(reward: Reward, task: TaskConfig, name: str, score: float) -> Reward:
    """A reward to which a reward model's weighted score is added as a part; a failed conversation's reward is
    unchanged.

    Where the score counts as correctness, `correct` is the logistic function of it: the probability, by the model of
    Bradley and Terry, that the answer is preferred to one with score 0.
    """
    if not reward.parts:
        return reward
    weight = task.rewards[name]
    correct = {"correct": 0.5 + 0.5 * math.tanh(score / 2)} if task.correct == name else {}
    graded = dataclasses.replace(
        reward,
        total=0.0 if math.isnan(reward.total) else reward.total,
        parts={**reward.parts, **correct, name: score},
        weights={**reward.weights, name: weight},
    )
    return raised(graded, weight * score)


def raised(reward: Reward, by: float) -> Reward:
    """The reward with a larger total; in a conversation, the last turn gets the increase."""
    turns = (*reward.turns[:-1], reward.turns[-1] + by) if reward.turns else ()
    return dataclasses.replace(reward, total=reward.total + by, turns=turns)


def label(part: str) -> str:
    """The name of a part in metrics and samples; for a function, its name without the module."""
    return part.rpartition(":")[2]
