"""Compares what a watched run drew with the naive form: each token, with its random numbers and log-probabilities."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from podium.certify.check_result import Check, largest
from podium.certify.naive_draws import (
    NO_CUT,
    Cut,
    DrawErrors,
    after_cut,
    draw_errors,
    normal_scores,
    random_numbers,
    request_seed,
    turn_seed,
)
from podium.certify.naive_step import Episode, padded_tokens
from podium.certify.subject import Subject, episode_of
from podium.certify.tiny import Arrays
from podium.certify.training import Step, Training
from podium.rollout.transcript import Transcript
from podium.sampling.groups import Group
from podium.tasks.task import FAILED

OF_MODEL = ("log-probabilities", "temperature")
OF_SAMPLER = ("sampling", "sampler", "long completions", "later turns")
DRAW_BAR = 1e-4
"""How far a random number may lie outside the range of its token: the ends of ranges are sums of probabilities, each as
far off as its log-probability may be, which is 1e-5 of about 10 nats."""
DEVIATIONS = 5.0
"""How many standard deviations a sum over all draws may be from its mean; correct code exceeds it once in a million."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """An episode, and what determines its draws."""

    transcript: Transcript
    seed: int
    """The seed of its prompt's request."""
    completion: int
    """Index of the completion among those of its request."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution that tokens are drawn from."""

    temperature: float
    penalty: float = 1.0
    cut: Cut = NO_CUT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """The tokens that one version of the weights drew, with what the naive form computes for them, [n] each."""

    recorded: np.ndarray
    """Log-probabilities by the sampler, before penalty and cuts."""
    naive: np.ndarray
    """Log-probabilities of the same tokens by the naive form."""
    errors: DrawErrors
    """Errors of the draws, and of log-probabilities under the distribution drawn from."""
    behind: np.ndarray
    """By how many nats each token is less likely than the likeliest one."""
    scores: np.ndarray
    """Position of each token in its distribution, as a standard normal number (`normal_scores`)."""
    rows: np.ndarray
    """Index of the episode of each token."""
    places: np.ndarray
    """Index of each token in its sequence."""


def sampling_checks(
    subject: Subject, training: Training, numbers: Sequence[Sequence[Sequence[int]]], talk: tuple[str, ...]
) -> Iterator[Check]:
    """Check the tokens that a run drew.

    For each step, `numbers` lists the possible places of its groups in the run's sequence of prompts. `talk` names the
    checks of conversations.
    """
    rollout = training.config.rollout
    sampling = Sampling(
        temperature=rollout.temperature,
        penalty=rollout.repetition_penalty,
        cut=Cut(rollout.top_k, rollout.top_p, rollout.min_p),
    )
    steps = [
        _of_step(subject, training, step, own, sampling) for step, own in zip(training.steps, numbers, strict=True)
    ]
    drawn = [each for step in steps for each in step]
    highest = max(float(np.abs(each.naive).max()) for each in drawn)
    yield Check(
        name="hand-over",
        claim="after every update, a sampled token's log-probability is that of the weights that drew it",
        difference=largest(float(np.abs(each.recorded - each.naive).max()) for each in drawn) / highest,
        after=(*OF_MODEL, *OF_SAMPLER, *talk),
    )
    if "baselines" in subject.recipe.reads:
        yield _greedy_check(subject, training, sampling, highest)
    other = ("cuts",) if sampling.cut.cuts else ("repetition penalty",) if sampling.penalty != 1 else ()
    for name in other:
        before = "repetition penalty, and the cuts top_k, top_p and min_p," if name == "cuts" else "repetition penalty"
        yield Check(
            name=name,
            claim=f"tokens are drawn from the softmax after the {before} renormalised",
            difference=largest(float(each.errors.logprobs.max()) for each in drawn) / highest,
            after=(*OF_SAMPLER, "hand-over"),
        )
    causes = (*OF_SAMPLER, "hand-over", *other, "order of prompts", "mixture of tasks")
    yield Check(
        name="draws",
        claim="every token is the one that the random number of its seed, completion and position draws",
        difference=largest(float(each.errors.tokens.max()) for each in drawn),
        bar=DRAW_BAR,
        after=causes,
    )
    yield Check(
        name="independent draws",
        claim="tokens at neighbouring positions are independent, and so are tokens of different completions",
        difference=_dependence(steps),
        bar=DEVIATIONS,
        after=(*causes, "draws"),
    )


def experts_check(subject: Subject, training: Training) -> Check:
    """Check the experts that were recorded with a run's tokens, also of those that an older version drew."""
    every = [each for step in training.steps for group in step.groups for each in group.transcripts]
    size = subject.room.episodes
    return Check(
        name="recorded experts",
        claim="with each drawn token those experts are recorded that its weights' router chose for the token before it",
        difference=largest(
            _experts_error(subject, training, every[first : first + size]) for first in range(0, len(every), size)
        ),
        after=("hand-over",),
    )


def _experts_error(subject: Subject, training: Training, transcripts: Sequence[Transcript]) -> float:
    """By how much the share of a recorded expert is below the least one that is chosen; infinite if one is missing."""
    tokens, _ = padded_tokens([episode_of(each, FAILED) for each in transcripts], subject.room)
    spans = [
        (row, sum(len(other.tokens) for other in each.spans[:place]), span)
        for row, each in enumerate(transcripts)
        for place, span in enumerate(each.spans)
        if span.drawn
    ]
    errors: list[float] = []
    for version in {number for _, _, span in spans for number in span.versions.tolist()}:
        shares = subject.naive_router_shares(tokens, training.version(version))  # [S, T, K, E]
        least = np.sort(shares, axis=3)[..., -subject.decoder.routed[0][1].top]
        for row, begin, span in spans:
            if span.choices is None:
                return np.inf
            own = np.flatnonzero(span.versions == version)
            if not len(own):
                continue
            at = begin + own - 1
            chosen = span.choices[own].reshape(len(own), shares.shape[2], -1).astype(int)  # [n, K, top]
            if (chosen >= shares.shape[3]).any() or (np.diff(np.sort(chosen, axis=2), axis=2) == 0).any():
                return np.inf
            found = np.take_along_axis(shares[row, at], chosen, axis=2)
            errors.append(float((least[row, at][..., None] - found).max(initial=0.0)))
    return largest(errors)


def _greedy_check(subject: Subject, training: Training, sampling: Sampling, highest: float) -> Check:
    """Check greedy completions; `highest` is the largest log-probability of a run's tokens, as an absolute value."""
    greedy = [group.greedy for step in training.steps for group in step.groups if group.greedy is not None]
    drawings = [Drawing(transcript=each.transcript, seed=0, completion=0) for each in greedy]
    behind = (float(each.behind.max()) for each in compared(subject, training.version, drawings, sampling))
    return Check(
        name="greedy completions",
        claim="each token of a greedy completion is the likeliest under the weights that drew it",
        difference=largest(behind) / highest,
        after=("hand-over",),
    )


def _of_step(
    subject: Subject, training: Training, step: Step, numbers: Sequence[Sequence[int]], sampling: Sampling
) -> list[Drawn]:
    """The drawn tokens of a step's groups, at whichever of the possible places fits them best."""

    def at(places: Sequence[int]) -> list[Drawn]:
        drawings = [
            Drawing(transcript=each, seed=request_seed(training.config.seed, "train", place), completion=index)
            for place, group in zip(places, step.groups, strict=True)
            for index, each in enumerate(group.transcripts)
        ]
        return list(compared(subject, training.version, drawings, sampling))

    found = [at(places) for places in numbers]
    return min(found, key=lambda drawn: largest(float(each.errors.tokens.max()) for each in drawn))


def _dependence(steps: Sequence[Sequence[Drawn]]) -> float:
    """The largest correlation of pairs of tokens, in standard deviations: 0 is expected if they are independent."""
    found: dict[str, list[float]] = {}
    for step in steps:
        scores = {
            (row, place): score
            for each in step
            for row, place, score in zip(each.rows.tolist(), each.places.tolist(), each.scores.tolist(), strict=True)
        }
        for (row, place), score in scores.items():
            for apart in (1, 2):
                _pair(found, f"{apart} positions apart", score, scores.get((row, place + apart)))
            for other in range(row + 1, max(row for row, _ in scores) + 1):
                parity = "even" if place % 2 == 0 else "odd"
                _pair(found, f"other completions, {parity} positions", score, scores.get((other, place)))
    return max((abs(sum(each)) / np.sqrt(len(each)) for each in found.values()), default=0.0)


def _pair(found: dict[str, list[float]], kind: str, one: float, other: float | None) -> None:
    if other is not None:
        found.setdefault(kind, []).append(one * other)


def fits(subject: Subject, groups: Sequence[Group]) -> bool:
    """Whether all answers fit into the naive form's arrays; one that does not is longer than the run allows."""
    answers = [each for group in groups for each in group.transcripts]
    answers += [group.greedy.transcript for group in groups if group.greedy is not None]
    room = subject.room
    return all(
        len(each.prompt) <= room.prompt and each.num_tokens - len(each.prompt) <= room.continuation for each in answers
    )


def compared(
    subject: Subject, version: Callable[[int], Arrays], drawings: Sequence[Drawing], sampling: Sampling
) -> Iterator[Drawn]:
    """Yield the tokens of episodes, once for each `version` of the weights that drew some of them."""
    size = subject.room.episodes
    for first in range(0, len(drawings), size):
        for each in _of_some(subject, version, drawings[first : first + size], sampling):
            yield dataclasses.replace(each, rows=each.rows + first)


def _of_some(
    subject: Subject, version: Callable[[int], Arrays], drawings: Sequence[Drawing], sampling: Sampling
) -> Iterator[Drawn]:
    """Like `compared`, for at most as many episodes as the naive form's arrays have rows."""
    episodes = [episode_of(each.transcript, FAILED) for each in drawings]
    tokens, starts = padded_tokens(episodes, subject.room)
    known = [_known(*pair) for pair in zip(drawings, episodes, strict=True)]
    rows = np.concatenate([np.full(len(each.places), row) for row, each in enumerate(known)])
    every = _Known(*map(np.concatenate, zip(*known, strict=True)))
    completions = np.array([each.completion for each in drawings])[rows]
    numbers = random_numbers(every.seeds, completions, every.places)
    evenly = np.random.default_rng(int(every.seeds.sum())).uniform(size=len(rows))
    drawn = tokens[rows, every.places]
    for number in np.unique(every.versions).tolist():
        own = every.versions == number
        at = rows[own], every.places[own] - starts[rows[own]]
        weights = version(number)
        plain = subject.naive_table(tokens, starts, weights, sampling.temperature)[at]
        table = plain
        if sampling.penalty != 1:
            table = subject.naive_table(tokens, starts, weights, sampling.temperature, sampling.penalty)[at]
        yield Drawn(
            recorded=every.recorded[own],
            naive=np.take_along_axis(plain, drawn[own][:, None], axis=1)[:, 0],
            errors=draw_errors(table, sampling.cut, drawn[own], every.logprobs[own], numbers[own]),
            behind=table.max(axis=1) - np.take_along_axis(table, drawn[own][:, None], axis=1)[:, 0],
            scores=normal_scores(after_cut(table, sampling.cut)[0], drawn[own], evenly[own]),
            rows=rows[own],
            places=every.places[own],
        )


class _Known(NamedTuple):
    """The drawn tokens of an episode, [n] each."""

    places: np.ndarray
    seeds: np.ndarray
    versions: np.ndarray
    recorded: np.ndarray
    logprobs: np.ndarray


def _known(drawing: Drawing, episode: Episode) -> _Known:
    own = np.flatnonzero(episode.drawn)
    turns = np.array(episode.turns)[own].tolist()
    return _Known(
        places=len(episode.prompt) + own,
        seeds=np.array([turn_seed(drawing.seed, turn) for turn in turns], np.int64),
        versions=versions_of(drawing.transcript)[own],
        recorded=np.array(episode.logprobs)[own],
        logprobs=np.array(episode.drawn_logprobs)[own],
    )


def versions_of(transcript: Transcript) -> np.ndarray:
    """The weight version of each token after the prompt, [n]."""
    return np.concatenate([span.versions for span in transcript.spans[1:]])
