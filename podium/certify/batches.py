"""Checks of batches, without a model: which tokens are trained, and their weights, advantages and log-probabilities.

The trainer's own `prepare_step` makes the batches; a table of numbers stands in for its scorers. They are compared with
what `podium.certify.naive_step` computes from the same episodes and the same table.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.algorithms.advantages import RETURNS, VALUES
from podium.algorithms.recipes import (
    COVARIANT,
    DRAWN_LOGPROBS,
    OLD_LOGPROBS,
    RECIPES,
    REFERENCE_LOGPROBS,
    REFERENCE_POINT,
    TEACHER_HIDDEN,
    TEACHER_LOGPROBS,
    UNCERTAIN,
    Recipe,
    Teaching,
)
from podium.certify.check_result import Check, largest
from podium.certify.naive import Sequences
from podium.certify.naive_rules import RULES, Rules
from podium.certify.naive_step import optimizer_steps
from podium.certify.subject import RIGHT, Subject, episodes_of
from podium.certify.updates import Form, Updates, privileged_sizes, sizes_of, usable_form
from podium.rollout.transcript import Transcript
from podium.sampling.groups import Group
from podium.sharding import Params
from podium.tasks.mixture import TaskPrompt
from podium.train.batches.batch import Batch
from podium.train.batches.prepare import prepare_step
from podium.train.scorers import OwnPrompts, Scorer, make_scorers

Prediction = tuple[int, int, int, float]
"""Identifies a trained token: its position, input token, target token and sampled log-probability."""
FORMS = (Form(packing="none"), Form(packing="sequences"), Form(), Form(rows=2))
MOST_SHIFT = 2
POLICY = 0
REFERENCE = 1
TEACHER = 2
CRITIC = 3
"""Arguments of `table`: the made-up log-probabilities of the policy, of the reference model and of a teacher, and the
values of a critic."""
TEACHER_WEIGHT = 0.7
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
"""Names of the checks of batches, which explain red checks of updates."""


class Variant(NamedTuple):
    """One algorithm, as the trainer's recipe and as the rules of the naive implementation."""

    recipe: Recipe
    rules: Rules


class Values(NamedTuple):
    """A batch's numbers for one trained token."""

    weight: float
    advantage: float
    old: float
    reference: float
    returned: float
    uncertain: float
    """Whether the policy term counts, 1 or 0."""
    point: float
    covariant: float
    """Whether the loss treats it otherwise, 1 or 0."""
    drawn: float
    """Its log-probability under the distribution drawn from."""
    taught: float
    """Of a teacher whose whole distributions the loss compares with: the one number of a made-up state."""


def batch_checks(updates: Updates) -> Iterator[Check]:
    """Check batches of the config's algorithm in every packing, and of every recipe with options that affect them."""
    subject = updates.subject
    own = _usable(Variant(subject.recipe, subject.rules))
    pairs = [(form, each) for form in FORMS for each in own]
    others: list[Variant] = []
    segmented: list[Compared] = []
    if subject.rules.preferences:  # whose rewards are labels, not those of completions of one prompt
        pairs += [(FORMS[-1], _in_halves(each)) for each in own]
    else:
        others += variants()
        segmented += [Compared(updates, form, each, subject.groups, segmented=True) for form, each in SEGMENTED]
    pairs += [(FORMS[-1], each) for each in others]
    compared = segmented + [Compared(updates, form, each, subject.groups) for form, each in pairs]
    compared += [Compared(updates, FORMS[-1], each, subject.failing_groups) for each in others if _may_fail(each)]
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
    placed = ("mask", "every token once", "prompts untrained", "positions")
    yield Check(
        name="denominators",
        claim="token weights are those of each recipe's mean over its optimizer step",
        difference=largest(each.errors.weight for each in compared),
        after=placed,
    )
    yield Check(
        name="scores",
        claim="the log-probabilities in the denominators of ratios and in the KL are those of the same token, and so is"
        " the choice of tokens by entropy, and what a teacher says of it",
        difference=largest(
            largest((errors.old, errors.reference, errors.uncertain, errors.drawn, errors.taught))
            for errors in (each.errors for each in compared)
        ),
        bar=0,
        after=placed,
    )
    if subject.rules.loss == "kto":
        yield Check(
            name="reference point",
            claim="KTO's KL is the mean log-ratio of each prompt with the completion of the row before it, at least 0",
            difference=largest(each.errors.point for each in compared),
            after=(*placed, "scores"),
        )
    yield Check(
        name="advantages",
        claim="each token has the advantage, and a critic's target, that the recipe's formula gives it",
        difference=largest(each for found in compared for each in (found.errors.advantage, found.errors.returned)),
        after=(*placed, "scores"),
    )
    yield Check(
        name="chosen by covariance",
        claim="clip_cov and kl_cov choose the tokens with the largest covariance of log-probability and advantage",
        difference=largest(each.errors.covariant for each in compared),
        bar=0,
        after=(*placed, "scores", "advantages"),
    )


def _in_halves(own: Variant) -> Variant:
    """The algorithm with two minibatches."""
    return Variant(dataclasses.replace(own.recipe, minibatches=2), dataclasses.replace(own.rules, minibatches=2))


def variants() -> Iterator[Variant]:
    """Yield every recipe with two minibatches, and variants that set options that affect a batch."""
    halves = {"minibatches": 2}
    dropping = {**halves, "zero_variance": "drop"}
    for name in (each for each in RECIPES if not RECIPES[each].preferences):
        # With a k as large as a group, all advantages of pass@k would be 0.
        yield _variant(name, halves, {"k": 2} if name == "pass_at_k" else {})
    yield _variant("grpo", dropping)
    yield _variant("dr_grpo", dropping)
    yield _variant("grpo", {**dropping, "zero_variance_metric": RIGHT})
    yield _variant("dapo", {"minibatches": 3, "zero_variance": "refill"})
    yield _variant("grpo", {**halves, "mask_truncated": True, "old_logprobs": "trainer"})
    yield _variant("grpo", {**halves, "old_logprobs": "trainer", "correction": "mask", "penalised": True})
    yield _variant("grpo", {"std": "batch", "std_ddof": 0, "std_eps": 0.1, "kl": "k3", "kl_coef": 0.1})
    for name in ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"):
        yield _variant(name, {**halves, "kl": "k1_reward", "kl_coef": 0.05})
    for name in ("grpo", "dr_grpo", "rloo", "gspo"):
        yield _variant(name, {**halves, "credit": "turn", "gamma": 0.5})
    yield _variant("dapo", {**halves, "zero_variance": "drop", "credit": "turn"})
    yield _variant("dapo", {**halves, "top_entropy": 0.2})
    for loss in ("clip_cov", "kl_cov"):
        share = {"cov_share": 0.1, **({"cov_low": 0.01} if loss == "clip_cov" else {})}
        yield _variant("grpo", {**halves, "loss": loss, "loss_options": share})
    yield _variant("ppo", {"std": "none", "mask_truncated": True}, {"gamma": 0.9, "lam": 0.8})
    yield _variant("ppo", {"kl": "k1_reward", "kl_coef": 0.05})
    taught_by: list[tuple[str, Literal["sampled", "full"]]]
    taught_by = [("distill", "sampled"), ("grpo", "sampled"), ("distill", "full")]
    for name, loss in taught_by:
        plain = _variant(name, halves)
        taught = dataclasses.replace(plain.recipe, teacher=Teaching(weight=TEACHER_WEIGHT, loss=loss))
        rules = dataclasses.replace(plain.rules, teacher_weight=TEACHER_WEIGHT, teacher_loss=loss)
        yield Variant(taught, rules)
        if loss == "sampled":
            yield Variant(taught, dataclasses.replace(rules, teacher_privileged=True))


def _may_fail(variant: Variant) -> bool:
    """Whether the recipe is checked with an episode that fails: once for each way to compute advantages."""
    rules = variant.rules
    return (rules.kl, rules.old_logprobs, rules.zero_variance) == ("none", "sampler", "keep")


def _variant(name: str, changes: Mapping[str, Any], options: Mapping[str, float] = MappingProxyType({})) -> Variant:
    """Change a recipe's settings; `options` are `advantage_options`, bound to its advantage as those named `std...`."""
    recipe, rules = RECIPES[name], RULES[name]
    bound = {key: value for key, value in changes.items() if key.startswith("std")} | dict(options)
    others = {key: value for key, value in changes.items() if not key.startswith("std")}
    advantage = functools.partial(recipe.advantage, **bound)
    numbers = {**rules.advantage_options, **options}
    return Variant(
        dataclasses.replace(recipe, advantage=advantage, **others),
        dataclasses.replace(rules, advantage_options=numbers, **changes),
    )


SEGMENTED = tuple(
    (form, _variant(name, {"minibatches": 2, **changes}))
    for form in FORMS
    for name, changes in (("grpo", {}), ("dr_grpo", {"credit": "turn", "gamma": 0.5}))
)
"""Algorithms for conversations of several segments; neither scores tokens by a model."""


def _usable(own: Variant) -> list[Variant]:
    """The algorithm with all groups kept; and unchanged as a second variant if it drops groups of equal rewards."""
    whole = Variant(
        dataclasses.replace(own.recipe, zero_variance="keep"), dataclasses.replace(own.rules, zero_variance="keep")
    )
    return [whole] if own.rules.zero_variance == "keep" else [whole, own]


class Compared:
    """The batches that the trainer makes of a step, beside those of the naive implementation."""

    def __init__(
        self, updates: Updates, form: Form, variant: Variant, groups: list[Group], *, segmented: bool = False
    ) -> None:
        """Prepare the step both ways.

        `segmented`: the trainer is given conversations in which every turn goes on from its own prompt. Their
        tokens then have the values of the conversations as they are, in other places; none of these values may be a
        score by a model.
        """
        subject = updates.subject
        given = [_segmented(each) for each in groups] if segmented else groups
        self._batches = list(_prepared(updates, form, variant, given))
        cells = [_cells(each) for group in given for each in group.transcripts]
        self._expected = [
            {
                cells[row][own] if segmented else cell: value
                for (row, own), cell, value in _predictions(each, variant.rules)
            }
            for each in _naive_steps(subject, variant.rules, groups)
        ]
        self._found = [_trained(batch, variant.rules) for batch in self._batches]

    @property
    def shift(self) -> int:
        """The largest shift, in positions, at which a batch's mask best matches the expected tokens; 0: aligned."""
        wanted = {cell for each in self._expected for cell in each}
        return max((abs(_shift(batch, wanted)) for batch in self._batches), default=0)

    @property
    def missing(self) -> float:
        """Number of expected tokens missing from their optimizer step, as a fraction of all expected tokens.

        A token is known by its input, its target and its sampled log-probability, wherever it is.
        """
        return self._share(lambda expected, found: _unplaced(expected) - _unplaced(cell for cell, _ in found))

    @property
    def added(self) -> float:
        """Number of trained tokens that their optimizer step should not train, as a fraction of all expected tokens."""
        return self._share(lambda expected, found: _unplaced(cell for cell, _ in found) - _unplaced(expected))

    @property
    def misplaced(self) -> float:
        """Share of the expected tokens that are trained at another position."""

        def unlike(expected: Any, found: Any) -> Counter[Prediction]:
            return Counter(list(expected)) - Counter([cell for cell, _ in found])

        return self._share(unlike) - self.missing

    @property
    def errors(self) -> Values:
        """The largest error of each value: of weights relative to the expected one, of advantages to the largest.

        Errors of log-probabilities are absolute. 1 for each if no trained token was expected.
        """
        pairs = [
            (own, expected[cell])
            for expected, found in zip(self._expected, self._found, strict=False)
            for cell, own in found
            if cell in expected
        ]
        if not pairs:
            return Values(*[float(bool(self._expected))] * len(Values._fields))
        ours, naive = (np.array(each) for each in zip(*pairs, strict=True))
        sizes = np.abs(naive).max(axis=0)
        errors = np.abs(ours - naive)
        errors[:, 0] /= naive[:, 0]  # weights of long episodes count as those of short ones
        errors[:, 1] /= sizes[1] or 1.0
        errors[:, 4] /= sizes[4] or 1.0
        return Values(*errors.max(axis=0).tolist())

    def _share(self, missing: Any) -> float:
        if len(self._expected) != len(self._found):
            return 1.0
        wrong = sum(sum(missing(*pair).values()) for pair in zip(self._expected, self._found, strict=True))
        return wrong / max(1, sum(map(len, self._expected)))


def _unplaced(cells: Iterable[Prediction]) -> Counter[tuple[int, int, float]]:
    """How often each token is among these, whatever its position."""
    return Counter(cell[1:] for cell in cells)


def table(positions: np.ndarray, targets: np.ndarray, which: float) -> np.ndarray:
    """Made-up log-probabilities, a function of position and target token, in float32; `which` selects the model."""
    return (-2 - np.sin(1.7 * positions + 0.37 * targets + 2.1 * which)).astype(np.float32)


def _prepared(updates: Updates, form: Form, variant: Variant, groups: list[Group]) -> Sequence[Batch]:
    """The batches that the trainer makes of groups, scored by `table`."""
    recipe = variant.recipe
    form = usable_form(form, recipe)
    settings, _ = updates.programs(form)

    def score(params: Params, batch: Batch) -> jax.Array:
        (which,) = params.values()
        return jnp.asarray(table(np.asarray(batch.positions), np.asarray(batch.targets), float(which)))

    whole = recipe.teacher is not None and recipe.teacher.loss == "full"
    teacher = Scorer(
        name=TEACHER_HIDDEN if whole else TEACHER_LOGPROBS,
        decoder=settings.decoder,
        params={"table": jnp.float32(TEACHER)},
        program=(lambda *given: score(*given)[..., None]) if whole else score,
        own_prompts=OwnPrompts(of=_privileged, sizes=privileged_sizes(form, updates.subject))
        if variant.rules.teacher_privileged
        else None,
        follows_choices=False,
    )
    params = {"table": jnp.float32(CRITIC)}
    critic = Scorer(name=VALUES, decoder=settings.decoder, params=params, program=score, follows_choices=False)
    params = {"table": jnp.float32(REFERENCE)}
    reference = Scorer(name=REFERENCE_LOGPROBS, decoder=settings.decoder, params=params, program=score)
    others = [reference] if recipe.needs_reference else []
    others += [teacher] if recipe.teacher is not None else []
    made = make_scorers(recipe, settings, score, others, entropy=score)
    batches, _ = prepare_step(
        groups,
        recipe,
        sizes_of(form, updates.subject),
        rules=settings.computing,
        scorers=(*made, critic) if recipe.learns_values else made,
        policy={"table": jnp.float32(POLICY)},
    )
    return batches


def _privileged(prompt: TaskPrompt) -> tuple[int, ...]:
    """The tokens of a question and its answer, which are numbers."""
    return tuple(map(int, f"{prompt.prompt.question} {prompt.prompt.answer}".split()))


def _naive_steps(subject: Subject, rules: Rules, groups: list[Group]) -> list[Sequences]:
    room = subject.room

    def model(which: float, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
        positions = starts[:, None] - 1 + np.arange(room.continuation)[None]  # [S, n], that predict the tokens
        at = np.minimum(positions + 1, tokens.shape[1] - 1)
        return table(positions, np.take_along_axis(tokens, at, axis=1), which).astype(np.float64)

    return optimizer_steps(
        rules,
        [episodes_of(group) for group in groups],
        room,
        max_new_tokens=subject.longest,
        policy=lambda tokens, starts: model(POLICY, tokens, starts),
        reference=lambda tokens, starts: model(REFERENCE, tokens, starts),
        teacher=lambda tokens, starts: (
            model(TEACHER, tokens, starts)[..., None]
            if rules.teacher_loss == "full"
            else model(TEACHER, tokens, starts)
        ),
        critic=lambda tokens, starts: model(CRITIC, tokens, starts),
        entropy=lambda tokens, starts: model(POLICY, tokens, starts),
    )


def _segmented(group: Group) -> Group:
    """The group's conversations, with prompts in the place of the environment's replies."""
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


def _predictions(step: Sequences, rules: Rules) -> Iterator[tuple[tuple[int, int], Prediction, Values]]:
    """Yield the tokens that an optimizer step should train: sequence and index after its prompt, and their values."""
    for row, own in zip(*np.nonzero(step.valid), strict=True):
        position = int(step.starts[row]) - 1 + int(own)
        before, target = (int(step.tokens[row, position + offset]) for offset in (0, 1))
        cell = (position, before, target, float(np.float32(step.sampled_logprobs[row, own])))
        values = Values(
            weight=float(step.weights[row, own]),
            advantage=float(step.advantages[row, own]),
            old=float(step.old_logprobs[row, own]) if _keeps_old(rules) else 0.0,
            reference=float(step.reference_logprobs[row, own]) if _keeps_reference(rules) else 0.0,
            returned=float(step.returns[row, own]),
            uncertain=float(step.uncertain[row, own]),
            point=float(step.point),
            covariant=float(step.covariant[row, own]),
            drawn=float(step.drawn_logprobs[row, own]) if _keeps_drawn(rules) else 0.0,
            taught=float(step.teacher[row, own].sum()),
        )
        yield (int(row), int(own)), cell, values


def _keeps_old(rules: Rules) -> bool:
    """Whether a batch stores the trainer's log-probabilities from before the step.

    With a single optimizer step per batch they equal the current ones, so they are not stored.
    """
    several = rules.updates_per_batch * rules.minibatches > 1
    return rules.old_logprobs == "trainer" and several and not rules.preferences  # whose losses have no ratio


def _keeps_drawn(rules: Rules) -> bool:
    """Whether a batch stores the log-probabilities under the distribution drawn from."""
    return rules.penalised and rules.correction != "none"


def _keeps_reference(rules: Rules) -> bool:
    """Whether a batch stores the reference's log-probabilities."""
    return rules.kl in ("k2", "k3", "k3+") or rules.preferences


def _fields(batch: Batch) -> tuple[np.ndarray, ...]:
    """Positions, inputs, targets, sampled log-probabilities, mask of the used rows, [R, T] each."""
    used = int(batch.num_micro_batches)
    fields = (batch.positions, batch.tokens, batch.targets, batch.sampled_logprobs, batch.mask)
    return tuple(np.concatenate(np.asarray(x)[:used]) for x in fields)


def _trained(batch: Batch, rules: Rules) -> list[tuple[Prediction, Values]]:
    """The tokens that a batch trains (nonzero mask or weight), with their values."""
    *what, mask = _fields(batch)
    used = int(batch.num_micro_batches)
    nothing = np.zeros(batch.tokens.shape, np.float32)
    arrays = (
        batch.weights,
        batch.advantages,
        batch.scores[OLD_LOGPROBS] if _keeps_old(rules) else nothing,
        batch.scores[REFERENCE_LOGPROBS] if _keeps_reference(rules) else nothing,
        batch.scores[RETURNS] if rules.advantage == "values" else nothing,
        batch.scores[UNCERTAIN] if rules.top_entropy < 1 else nothing + 1,
        batch.scores[REFERENCE_POINT] if rules.loss == "kto" else nothing,
        batch.scores[COVARIANT] if rules.loss in ("clip_cov", "kl_cov") else nothing,
        batch.scores[DRAWN_LOGPROBS] if _keeps_drawn(rules) else nothing,
        batch.scores[TEACHER_HIDDEN][..., 0] if rules.teacher_weight and rules.teacher_loss == "full" else nothing,
    )
    values = [np.concatenate(np.asarray(x)[:used]) for x in arrays]
    chosen = (mask != 0) | (values[0] != 0)
    cells = zip(*(x[chosen].tolist() for x in what), strict=True)
    return [
        (cell, Values(*own))
        for cell, own in zip(cells, zip(*(x[chosen].tolist() for x in values), strict=True), strict=True)
    ]


def _shift(batch: Batch, expected: set[Prediction]) -> int:
    """The shift, in positions, at which the batch's mask best matches the expected tokens; 0 wins a tie."""
    *what, mask = _fields(batch)
    rows, T = mask.shape
    cells = zip(*(x.ravel().tolist() for x in what), strict=True)
    wanted = np.array([cell in expected for cell in cells]).reshape(rows, T)

    def agreement(shift: int) -> int:
        return int(np.sum(np.roll(mask > 0, shift, axis=1) & wanted))

    return max((0, *range(-MOST_SHIFT, 0), *range(1, MOST_SHIFT + 1)), key=agreement)
