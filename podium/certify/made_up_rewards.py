"""Checks rewards without a model: built-in parts, functions, payments of environments, and scores of a model.

The texts are made up. Each part is computed by its definition, with other means than the trainer's.
"""

import itertools
import math
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from podium.certify.check_result import Check, largest
from podium.certify.numbers_task import NAME, grade
from podium.config.schema import GradingConfig, TaskConfig
from podium.rollout.transcript import Transcript
from podium.sampling.groups import Group
from podium.tasks.grading import Grader
from podium.tasks.mixture import TaskPrompt
from podium.tasks.rewards import with_score
from podium.tasks.task import FAILED, Graded, Prompt, Reward
from podium.train.grading_models import GradingModel

TEXTS = (
    "A B C A B C A B",
    "<think>B</think> <answer>C</answer>",
    "<think>B</think> then <answer>C</answer>",
    "<answer>C</answer><think>B</think>",
    " <think>B</think>\n<answer>C</answer>\n",
    "<think>B<think></think><answer>C</answer>",
    "D D D D d D",
    "D E",
    "",
)
LENGTHS = (3, 11, 14, 20, 23)
"""Tokens of the answers; the longest are beyond the limit."""
LIMIT, OVERLONG = 20, 8
QUESTIONS = ("0", "1")
PAID = 1.7
OWN = "podium.certify.made_up_rewards"
BUILT_IN = {"correct": 0.8, "format": 0.5, "tags": -0.3, "length": 0.2, "repetition": 0.7, "cosine_length": 0.4}
BY_FUNCTIONS = {f"{OWN}:words": 0.3, f"{OWN}:ranks": -0.2, "length": 0.1}
SCORED = "scorer"
"""Name of the part with scores."""


def words(completions: list[str], row: dict[str, object]) -> list[float | None]:
    """A function that does not apply to the last question: a tenth of each answer's number of words."""
    return [None if row["question"] == QUESTIONS[-1] else len(each.split()) / 10 for each in completions]


def ranks(completions: list[str], num_tokens: list[int]) -> list[float]:
    """A function of a group: how many of its answers are shorter in tokens."""
    return [float(sum(other < own for other in num_tokens)) for own in num_tokens]


class _Case(NamedTuple):
    """How a task grades."""

    rewards: Mapping[str, float]
    correct: str = "correct"
    paid: float | None = None


CASES = (_Case(BUILT_IN), _Case(BY_FUNCTIONS, f"{OWN}:words"), _Case({**BUILT_IN, f"{OWN}:ranks": 0.6}, paid=PAID))


def rewards_check() -> Check:
    """Compare rewards of made-up answers with the weighted sums of their parts."""
    return Check(
        name="rewards",
        claim="a reward is the weighted sum of its parts: grades, built-in parts, functions, payments and scores",
        difference=largest([*(_case_error(each) for each in CASES), _score_error("none"), _score_error("batch")]),
    )


def _case_error(case: _Case) -> float:
    """The largest error of a total, of a part, or of the share of right answers."""
    task = TaskConfig(name=NAME, options={"vocab": 100}, rewards=dict(case.rewards), correct=case.correct)
    grader = Grader([task], GradingConfig(workers=0, overlong_buffer_tokens=OVERLONG), max_new_tokens=LIMIT)
    answers = [
        (_asked(question), Graded(text=text, tokens=tuple(range(size)), paid=case.paid))
        for question in QUESTIONS
        for text, size in zip(TEXTS, itertools.cycle(LENGTHS), strict=False)
    ]
    try:
        found = grader.grade(answers)
    finally:
        grader.close()
    errors: list[float] = []
    for place, (reward, (asked, graded)) in enumerate(zip(found, answers, strict=True)):
        first = place - place % len(TEXTS)
        group = [len(each.tokens) for _, each in answers[first : first + len(TEXTS)]]
        parts = _parts(case, asked.prompt.question, graded, group)
        counted = {name: value for name, value in parts.items() if name in case.rewards and value is not None}
        total = sum(case.rewards[name] * value for name, value in counted.items())
        known = {name.split(":")[-1]: value for name, value in counted.items()}
        wanted = {"correct": _correct(case, parts), **{name: x for name, x in known.items() if name != "correct"}}
        errors.append(abs(reward.total - total) if reward.parts.keys() == wanted.keys() else math.inf)
        errors += [abs(reward.parts.get(name, math.inf) - value) for name, value in wanted.items()]
    return largest(errors)


def _asked(question: str) -> TaskPrompt:
    return TaskPrompt(task=0, prompt=Prompt(id=question, question=question, answer="B"), system_prompt=None)


def _parts(case: _Case, question: str, graded: Graded, group: list[int]) -> dict[str, float | None]:
    """Every part of an answer's reward by its definition; None if it does not apply."""
    text, size = graded.text, len(graded.tokens)
    correct = grade(question, text) if case.paid is None else case.paid
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    once = [len(re.findall(re.escape(tag), text)) == 1 for tag in tags]
    whole = re.fullmatch(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", text, re.DOTALL)
    lower = text.lower().split()
    runs = [" ".join(lower[place : place + 3]) for place in range(len(lower) - 2)]
    again = sum(run in runs[:place] for place, run in enumerate(runs))
    half_cosine = 0.5 + 0.5 * math.cos(math.pi / 2 * min(size, LIMIT) / LIMIT) ** 2
    return {
        "correct": correct,
        "format": float(whole is not None and all(once)),
        "tags": sum(once) / 4,
        "length": -float(np.interp(size, [LIMIT - OVERLONG, LIMIT], [0, 1])),
        "repetition": -again / len(runs) if runs else 0.0,
        "cosine_length": half_cosine if correct >= 1 else -half_cosine,
        f"{OWN}:words": None if question == QUESTIONS[-1] else len(text.split()) / 10,
        f"{OWN}:ranks": float(len([other for other in group if other < size])),
    }


def _correct(case: _Case, parts: Mapping[str, float | None]) -> float:
    """What counts as correctness: the grade, or the first function that applies, from 0 to 1."""
    if case.correct == "correct":
        return float(parts["correct"] or 0.0)
    applying = (parts[name] for name in (case.correct, *case.rewards) if ":" in name and parts[name] is not None)
    return float(np.clip(next(applying, 0.0) or 0.0, 0, 1))


def _score_error(standardise: str) -> float:
    """The largest error of a total to which the score of a model was added, and of its last turn's reward."""
    weight, others, scores = 0.5, [0.3, -0.2, 1.1, 0.0], [2.0, -1.0, 0.5, 4.0]
    task = TaskConfig(name=NAME, rewards={"correct": 1.0, SCORED: weight})
    given = [Reward(total=x, parts={"correct": x}, weights={"correct": 1.0}, turns=(x, 0.0)) for x in others]
    rewards = [with_score(reward, task, SCORED, score) for reward, score in zip(given, scores, strict=True)]
    groups = [
        Group(prompt=_asked("0"), transcripts=[Transcript()] * 3, rewards=[*rewards[2 * n : 2 * n + 2], FAILED])
        for n in range(2)
    ]
    model: Any = SimpleNamespace(spec=SimpleNamespace(part=SCORED, standardise=standardise))
    found = [each for group in GradingModel.standardised(model, groups) for each in group.rewards[:2]]
    scaled = np.array(scores) if standardise == "none" else (np.array(scores) - np.mean(scores)) / np.std(scores)
    totals = np.array(others) + weight * scaled
    errors = [abs(own.total - total) for own, total in zip(found, totals, strict=True)]
    errors += [abs(own.turns[1] - weight * score) for own, score in zip(found, scaled, strict=True)]
    return largest(errors)
