"""Checks of batches, without a model: which tokens are trained, and their weights, advantages and log-probabilities.

The trainer's own `prepare_step` makes the batches; a table of numbers stands in for its scorers. The batches are
compared with what `podium.certify.naive_step` computes from the same episodes and the same table.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.certify.batch_variants import Variant, make_variant, variants
from podium.certify.check_result import Check, largest
from podium.certify.naive import Sequences
from podium.certify.naive_rules import COVARIANT, ENTROPY, KL_POINT, KL_TO, OLD_LOGPROBS, RETURNS, VALUES, Rules
from podium.certify.naive_step import optimizer_steps
from podium.certify.subject import Subject, episodes_of
from podium.certify.updates import Form, Updates, privileged_sizes, sizes_of, usable_form
from podium.rollout.transcript import Transcript
from podium.sampling.groups import Group
from podium.sharding import Params, make_mesh
from podium.tasks.mixture import TaskPrompt
from podium.train.batches.batch import Batch
from podium.train.batches.prepare import prepare_step
from podium.train.scorers import OwnPrompts, Scorer, make_scorers

Prediction = tuple[int, int, int, float]
"""Identifies a trained token: its position, input token, target token and sampled log-probability."""
FORMS = (Form(packing="none"), Form(packing="sequences"), Form(), Form(rows=2))
MOST_SHIFT = 2
TABLES = {OLD_LOGPROBS: 0, ENTROPY: 0, KL_TO: 1, VALUES: 3}
"""The argument `which` with which `table` makes up scores of each name."""
OTHER_TABLE = 2
"""The argument `which` for all other scores, which are those of a model that is distilled."""
WEIGHT, ADVANTAGE = "weight", "advantage"
"""Names of the numbers of a trained token that are not scores."""
OF_BATCH = (
    "mask",
    "every token once",
    "prompts untrained",
    "positions",
    "denominators",
    "scores",
    "reference point",
    "advantages",
    "chosen by covariance",
)
"""Names of the checks of batches; a red one explains red checks of updates."""


def batch_checks(updates: Updates) -> Iterator[Check]:
    """Check batches of the config's algorithm in every packing, and of every recipe with options that affect them."""
    subject = updates.subject
    own = Variant(subject.recipe, subject.rules).usable
    pairs = [(form, each) for form in (*FORMS, *_on_two_devices()) for each in own]
    others: list[Variant] = []
    compared: list[Compared] = []
    if subject.rules.preferences:  # whose rewards are labels, not those of completions of one prompt
        pairs += [(FORMS[-1], each.changed(minibatches=2)) for each in own]
    else:
        others += variants()
        compared += [Compared(updates, form, each, subject.groups, segmented=True) for form, each in SEGMENTED]
    pairs += [(FORMS[-1], each) for each in others]
    compared += [Compared(updates, form, each, subject.groups) for form, each in pairs]
    compared += [Compared(updates, FORMS[-1], each, subject.failing_groups) for each in others if each.may_fail]
    yield from _placing_checks(compared)
    yield from _number_checks(compared, subject.rules)


def _on_two_devices() -> list[Form]:
    """The form in which devices share the rows of micro-batches, whose work is balanced; empty if there is one
    device.
    """
    devices = jax.devices() if len(jax.devices()) > 1 else jax.devices("cpu")
    return [Form(rows=4, devices=make_mesh("dp:2", devices[:2]))] if len(devices) > 1 else []


def _placing_checks(compared: Sequence["Compared"]) -> Iterator[Check]:
    """Check which tokens batches train, and where these are."""
    yield Check(
        name="mask",
        claim="the trained positions are those of completions, not shifted",
        difference=largest(each.shift for each in compared),
        bar=0,
    )
    yield Check(
        name="every token once",
        claim="no token that the model drew is left out, and each is in the right minibatch",
        difference=largest(each.missing for each in compared),
        bar=0,
        after=("mask",),
    )
    yield Check(
        name="prompts untrained",
        claim="nothing else is trained: no prompt, no padding, no token twice, none from an environment",
        difference=largest(each.added for each in compared),
        bar=0,
        after=("mask", "every token once"),
    )
    yield Check(
        name="positions",
        claim="each trained token is at its position in its own sequence, counted from the start of its prompt",
        difference=largest(each.misplaced for each in compared),
        bar=0,
        after=("mask", "every token once", "prompts untrained"),
    )


def _number_checks(compared: Sequence["Compared"], rules: Rules) -> Iterator[Check]:
    """Check the numbers of trained tokens; `rules` are those of the config's own algorithm."""

    def error(*names: str) -> float:
        return largest(each.errors[name] for each in compared for name in names if name in each.errors)

    others = (WEIGHT, ADVANTAGE, RETURNS, KL_POINT, COVARIANT)
    placed = ("mask", "every token once", "prompts untrained", "positions")
    yield Check(
        name="denominators",
        claim="token weights are those of each recipe's mean over its optimizer step",
        difference=error(WEIGHT),
        after=placed,
    )
    yield Check(
        name="scores",
        claim="each score in a batch belongs to its own token, and tokens are chosen by their own entropy",
        difference=error(*{name for each in compared for name in each.errors} - set(others)),
        bar=0,
        after=placed,
    )
    if rules.loss == "kto":
        yield Check(
            name="reference point",
            claim="KTO's KL is the mean log-ratio of each prompt with the completion of the row before it, at least 0",
            difference=error(KL_POINT),
            after=(*placed, "scores"),
        )
    yield Check(
        name="advantages",
        claim="each token has the advantage, and if values are trained the target, that the recipe's formula gives it",
        difference=error(ADVANTAGE, RETURNS),
        after=(*placed, "scores"),
    )
    yield Check(
        name="chosen by covariance",
        claim="clip_cov and kl_cov choose the tokens with the largest covariance of log-probability and advantage",
        difference=error(COVARIANT),
        bar=0,
        after=(*placed, "scores", "advantages"),
    )


SEGMENTED = tuple(
    (form, make_variant(name, {"minibatches": 2, **changes}))
    for form in FORMS
    for name, changes in (("grpo", {}), ("dr_grpo", {"credit": "turn", "gamma": 0.5}))
)
"""Forms and algorithms for conversations of several segments; neither algorithm reads scores by a model."""


class Compared:
    """The trainer's batches of a step, and those of the naive implementation."""

    def __init__(
        self, updates: Updates, form: Form, variant: Variant, groups: list[Group], *, segmented: bool = False
    ) -> None:
        """Prepare the step both ways.

        With `segmented`, the trainer gets conversations in which every turn continues from a prompt of its own. Each
        token must still have the numbers that it has in the unchanged conversation. None of them may be a score by a
        model, which would depend on the prompt.
        """
        subject = updates.subject
        given = [_segmented(each) for each in groups] if segmented else groups
        self._batches = list(_prepared(updates, form, variant, given))
        self._names = (WEIGHT, ADVANTAGE, *variant.rules.kept_scores)
        cells = [_cells(each) for group in given for each in group.transcripts]
        self._expected = [
            {
                cells[row][own] if segmented else cell: value
                for (row, own), cell, value in _predictions(each, self._names)
            }
            for each in _naive_steps(subject, variant.rules, groups)
        ]
        self._found = [_trained(batch, self._names) for batch in self._batches]

    @property
    def shift(self) -> int:
        """The largest number of positions by which a batch's mask is shifted from the expected tokens; 0 if none is."""
        wanted = {cell for each in self._expected for cell in each}
        return max((abs(_shift(batch, wanted)) for batch in self._batches), default=0)

    @property
    def missing(self) -> float:
        """Number of expected tokens missing from their optimizer step, as a fraction of all expected tokens.

        A token is identified by its input, its target and its sampled log-probability, whatever its position.
        """
        return self._share(lambda expected, found: _unplaced(expected) - _unplaced(cell for cell, _ in found))

    @property
    def added(self) -> float:
        """Number of trained tokens that their optimizer step should not train, as a fraction of all expected tokens."""
        return self._share(lambda expected, found: _unplaced(cell for cell, _ in found) - _unplaced(expected))

    @property
    def misplaced(self) -> float:
        """Share of the expected tokens that are trained, but at another position."""

        def unlike(expected: Any, found: Any) -> Counter[Prediction]:
            return Counter(list(expected)) - Counter([cell for cell, _ in found])

        return self._share(unlike) - self.missing

    @functools.cached_property
    def errors(self) -> dict[str, float]:
        """The largest error of each number of a trained token, by its name; 1 if no trained token was expected.

        Errors of weights are relative to the expected weight, so that tokens of long episodes count as those of short
        ones; of advantages and returns, to the largest expected one; of all other scores, absolute.
        """
        pairs = [
            (own, expected[cell])
            for expected, found in zip(self._expected, self._found, strict=False)
            for cell, own in found
            if cell in expected
        ]
        if not pairs:
            return dict.fromkeys(self._names, float(bool(self._expected)))
        errors: dict[str, float] = {}
        for name, (ours, naive) in zip(self._names, np.array(pairs).transpose(2, 1, 0), strict=True):
            apart = np.abs(ours - naive)
            if name == WEIGHT:
                apart /= naive
            if name in (ADVANTAGE, RETURNS):
                apart /= np.abs(naive).max() or 1.0
            errors[name] = float(apart.max())
        return errors

    def _share(self, missing: Any) -> float:
        if len(self._expected) != len(self._found):
            return 1.0
        wrong = sum(sum(missing(*pair).values()) for pair in zip(self._expected, self._found, strict=True))
        return wrong / max(1, sum(map(len, self._expected)))


def _unplaced(cells: Iterable[Prediction]) -> Counter[tuple[int, int, float]]:
    """Count the predictions of each token, whatever its position."""
    return Counter(cell[1:] for cell in cells)


def table(positions: np.ndarray, targets: np.ndarray, which: float) -> np.ndarray:
    """Made-up log-probabilities, a function of position and target token, in float32; `which` selects the model."""
    return (-2 - np.sin(1.7 * positions + 0.37 * targets + 2.1 * which)).astype(np.float32)


def _prepared(updates: Updates, form: Form, variant: Variant, groups: list[Group]) -> Sequence[Batch]:
    """The trainer's batches of these groups, scored by `table`."""
    recipe = variant.recipe
    form = usable_form(form, recipe)
    settings, _ = updates.programs(form)

    def score(params: Params, batch: Batch) -> jax.Array:
        (which,) = params.values()
        return jnp.asarray(table(np.asarray(batch.positions), np.asarray(batch.targets), float(which)))

    def scorer(name: str) -> Scorer:
        params = {"table": jnp.float32(TABLES.get(name, OTHER_TABLE))}
        plain = Scorer(name=name, decoder=settings.decoder, params=params, program=score)
        distilled = variant.rules.distilled
        if name == variant.rules.compared:  # hidden states of width 1
            return dataclasses.replace(plain, program=lambda *given: score(*given)[..., None])
        if distilled is not None and name == distilled.score and distilled.own_prompts:
            own = OwnPrompts(of=_privileged, sizes=privileged_sizes(form, updates.subject))
            return dataclasses.replace(plain, own_prompts=own)
        return plain

    others = [scorer(name) for name in variant.rules.read_scores if name not in (OLD_LOGPROBS, ENTROPY)]
    batches, _ = prepare_step(
        groups,
        recipe,
        sizes_of(form, updates.subject),
        rules=settings.computing,
        scorers=make_scorers(recipe, settings, score, others, entropy=score),
        policy={"table": jnp.float32(TABLES[OLD_LOGPROBS])},
    )
    return batches


def _privileged(prompt: TaskPrompt) -> tuple[int, ...]:
    """The tokens of a privileged prompt: question and answer are numbers as text."""
    return tuple(map(int, f"{prompt.prompt.question} {prompt.prompt.answer}".split()))


def _naive_steps(subject: Subject, rules: Rules, groups: list[Group]) -> list[Sequences[np.ndarray]]:
    """The naive optimizer steps on these groups, scored by `table`."""
    room = subject.room

    def model(name: str, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
        positions = starts[:, None] - 1 + np.arange(room.continuation)[None]  # [S, n], that predict the tokens
        at = np.minimum(positions + 1, tokens.shape[1] - 1)
        targets = np.take_along_axis(tokens, at, axis=1)
        found = table(positions, targets, TABLES.get(name, OTHER_TABLE)).astype(np.float64)
        return found[..., None] if name == rules.compared else found

    models = {name: functools.partial(model, name) for name in (OLD_LOGPROBS, *rules.read_scores)}
    episodes = [episodes_of(group) for group in groups]
    return optimizer_steps(rules, episodes, room, models, max_new_tokens=subject.longest)


def _segmented(group: Group) -> Group:
    """The group's conversations, with prompts in place of the environment's replies."""
    changed = [
        dataclasses.replace(
            each,
            spans=tuple(
                dataclasses.replace(span, source="prompt") if span.source == "environment" else span
                for span in each.spans
            ),
        )
        for each in group.transcripts
    ]
    return dataclasses.replace(group, transcripts=changed)


def _cells(transcript: Transcript) -> dict[int, Prediction]:
    """The predictions of a transcript's drawn tokens, by their index after the first prompt.

    Positions are counted from the last prompt before a token, which begins a segment.
    """
    found: dict[int, Prediction] = {}
    position, before, index = 0, -1, -len(transcript.spans[0].tokens)
    for span in transcript.spans:
        position = 0 if span.source == "prompt" else position
        for token, logprob in zip(span.tokens.tolist(), span.full_logprobs.tolist(), strict=True):
            if span.drawn:
                found[index] = (position - 1, before, token, logprob)
            position, before, index = position + 1, token, index + 1
    return found


def _predictions(
    step: Sequences[np.ndarray], names: Sequence[str]
) -> Iterator[tuple[tuple[int, int], Prediction, tuple[float, ...]]]:
    """Yield the tokens that an optimizer step should train: sequence and index after its prompt, and their numbers."""
    arrays = {WEIGHT: step.weights, ADVANTAGE: step.advantages, **step.scores}
    for row, own in zip(*np.nonzero(step.valid), strict=True):
        position = int(step.starts[row]) - 1 + int(own)
        before, target = (int(step.tokens[row, position + offset]) for offset in (0, 1))
        cell = (position, before, target, float(np.float32(step.sampled_logprobs[row, own])))
        given = (arrays[name] for name in names)
        yield (int(row), int(own)), cell, tuple(float(x[row, own].sum() if x.ndim else x) for x in given)


def _fields(batch: Batch) -> tuple[np.ndarray, ...]:
    """Positions, inputs, targets, sampled log-probabilities, mask of the used rows, [R, T] each."""
    used = int(batch.num_micro_batches)
    fields = (batch.positions, batch.tokens, batch.targets, batch.sampled_logprobs, batch.mask)
    return tuple(np.concatenate(np.asarray(x)[:used]) for x in fields)


def _trained(batch: Batch, names: Sequence[str]) -> list[tuple[Prediction, tuple[float, ...]]]:
    """The tokens that a batch trains (nonzero mask or weight), with their numbers of these names."""
    *what, mask = _fields(batch)
    used = int(batch.num_micro_batches)
    given = {WEIGHT: batch.weights, ADVANTAGE: batch.advantages, **batch.scores}
    arrays = [np.concatenate(np.asarray(given[name])[:used]) for name in names]  # [R, T], or [R, T, 1] of a state
    chosen = (mask != 0) | (arrays[0] != 0)
    cells = zip(*(x[chosen].tolist() for x in what), strict=True)
    numbers = zip(*(x[chosen].ravel().tolist() for x in arrays), strict=True)
    return list(zip(cells, numbers, strict=True))


def _shift(batch: Batch, expected: set[Prediction]) -> int:
    """The shift, in positions, at which the batch's mask best matches the expected tokens; 0 wins a tie."""
    *what, mask = _fields(batch)
    rows, T = mask.shape
    cells = zip(*(x.ravel().tolist() for x in what), strict=True)
    wanted = np.array([cell in expected for cell in cells]).reshape(rows, T)

    def agreement(shift: int) -> int:
        return int(np.sum(np.roll(mask > 0, shift, axis=1) & wanted))

    return max((0, *range(-MOST_SHIFT, 0), *range(1, MOST_SHIFT + 1)), key=agreement)
