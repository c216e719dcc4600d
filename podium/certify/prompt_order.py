"""Follows a watched run's queue of prompts: which are drawn when, which a step takes, and which it leaves."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from podium.certify.naive_draws import prompt_index
from podium.certify.numbers_task import QUESTIONS
from podium.certify.subject import Subject
from podium.certify.training import Step, Training
from podium.sampling.conversations.carry import Pending
from podium.sampling.groups import Group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """The prompts of a step."""

    numbers: Sequence[Sequence[int]]
    """The places of its groups in the run's sequence of prompts: several possible lists if groups ask the same
    question."""
    errors: int
    """Number of wrong prompts: with a question other than their place's, lost, drawn twice, too old, left although
    newer ones were taken, left so long that a later step cannot take them in time, or drawn when there were enough."""


def taken_prompts(subject: Subject, training: Training) -> list[Taken]:
    """The prompts of each step of a run."""
    found: list[Taken] = []
    before: Mapping[int, Pending] = {}
    drawn = 0
    for version, step in enumerate(training.steps):
        left = {each.prompt.number: each for each in step.position.pending}
        here = [*before, *range(drawn, step.position.cursor)]
        numbers, errors = _of_groups(training.config.seed, step.groups, [each for each in here if each not in left])
        errors += len(set(left) - set(here)) + superfluous(subject, training, step)
        errors += _not_replaced(subject, training, step)
        errors += sum(each.prompt.prompt.prompt.id != question(training.config.seed, n) for n, each in left.items())
        if not subject.recipe.demonstrations:
            errors += _wrongly_left(training, step, numbers, version) + _number_in_flight(training, step, before, drawn)
        found.append(Taken(numbers=list(_arrangements(step.groups, numbers)), errors=errors))
        before, drawn = left, step.position.cursor
    return found


def _arrangements(groups: Sequence[Group], numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield the places of groups, and again with any two exchanged that ask the same question."""
    yield list(numbers)
    asked = [group.prompt.prompt.id for group in groups]
    for one, other in itertools.combinations(range(len(asked)), 2):
        if asked[one] == asked[other]:
            found = list(numbers)
            found[one], found[other] = found[other], found[one]
            yield found


def question(seed: int, number: int) -> str:
    """The id of the question at this place in the run's sequence of prompts."""
    return str(prompt_index(seed, number, QUESTIONS))


def _of_groups(seed: int, groups: Sequence[Group], numbers: Sequence[int]) -> tuple[list[int], int]:
    """The place of each group, one of `numbers` or -1, and how many groups and places remain without a partner."""
    free = sorted(numbers)
    found: list[int] = []
    missing = 0
    for group in groups:
        own = next((number for number in free if question(seed, number) == group.prompt.prompt.id), None)
        if own is None:
            missing += 1
            found.append(-1)
        else:
            free.remove(own)
            found.append(own)
    return found, missing + len(free)


def superfluous(subject: Subject, training: Training, step: Step) -> int:
    """How many groups a step has beyond those that it trains on; with refills, others may have equal rewards."""
    return max(0, _num_wanted(subject, step) - training.config.prompts_per_step)


def _num_wanted(subject: Subject, step: Step) -> int:
    """How many of a step's groups count: with refills, those whose rewards differ."""
    metric, groups = subject.rules.zero_variance_metric, step.groups
    if subject.rules.zero_variance != "refill":
        return len(groups)
    judged = [
        {np.float32(reward.total if metric is None else reward.parts[metric]) for reward in group.rewards}
        for group in groups
    ]
    return sum(len(rewards) > 1 for rewards in judged)


def _not_replaced(subject: Subject, training: Training, step: Step) -> int:
    """How many groups too few a step has: each further round replaces all that were missing before it."""
    rounds = subject.rules.max_refills if subject.rules.zero_variance == "refill" else 0
    per_step = training.config.prompts_per_step
    missing = max(0, per_step - _num_wanted(subject, step))
    return max(0, per_step + rounds * missing - len(step.groups))


def _number_in_flight(training: Training, step: Step, before: Mapping[int, Pending], drawn: int) -> int:
    """By how many prompts the number in flight is wrong; 0 if prompts were replaced, since it is unknown then."""
    if len(step.groups) > training.config.prompts_per_step:
        return 0
    return abs(len(before) + step.position.cursor - drawn - training.spec.rollout.training.in_flight)


def _wrongly_left(training: Training, step: Step, numbers: Sequence[int], version: int) -> int:
    """How many prompts a step with weights `version` took too late, or left although it had to take them."""
    stale, per_step = training.config.rollout.max_staleness, training.config.prompts_per_step
    ages = {n: _first_version(group) for n, group in zip(numbers, step.groups, strict=True)}
    wrong = sum(not version - stale <= first <= version for first in ages.values())
    left = {each.prompt.number: min(_versions(each), default=version) for each in step.position.pending}
    order = sorted((first, number) for number, first in left.items())
    for place, (first, _) in enumerate(order):  # later steps take the oldest
        wrong += version + 1 + place // per_step - first > stale
    complete = [each.prompt.number for each in step.position.pending if each.rewards]
    if len(step.groups) == per_step:  # else some were taken before others were complete
        newest = max((first, number) for number, first in ages.items())
        wrong += sum((left[number], number) < newest for number in complete)
    return wrong


def _versions(pending: Pending) -> list[int]:
    """The versions of the weights that drew the tokens so far of a prompt's answers."""
    drawn = [each.versions for each in pending.completions]
    for episode in pending.episodes:
        drawn += [span.versions for span in episode.transcript.drawn]
        drawn += [] if episode.drawing is None else [episode.drawing.versions]
    return [version for versions in drawn for version in versions.tolist()]


def _first_version(group: Group) -> int:
    """The version of the weights that drew the first token of one of a group's episodes."""
    greedy = [] if group.greedy is None else [group.greedy.transcript]
    return min(int(each.drawn[0].versions[0]) for each in (*group.transcripts, *greedy))
