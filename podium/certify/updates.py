"""Runs an update by the trainer's compiled program in a given form, or by the naive objective, and keeps its gradient.

A form (`Form`) is a choice that must not change the result: packing, rows per micro-batch, mesh, memory and kernels.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike

from podium.algorithms.recipes import Recipe
from podium.certify.check_result import largest
from podium.certify.naive import (
    Sequences,
    Weights,
    continuation_values,
    distributions,
    in_float32,
    in_float64,
    kl_values,
    objective,
    scores,
    value_objective,
    wide,
)
from podium.certify.naive_rules import VALUES, Rules
from podium.certify.numbers_task import LONGEST_PROMPT
from podium.certify.subject import (
    HINT,
    MAX_NEW_TOKENS,
    PROMPTS,
    ROW_TOKENS,
    SHORT,
    NaiveModel,
    Subject,
    one_device,
)
from podium.certify.tiny import Arrays
from podium.hosts.platform import machine_of
from podium.models.architecture import DecoderConfig
from podium.models.params import trained_specs
from podium.run.resolve import resolve_update
from podium.run.run_spec import SCORE, RowRules, pair_cost
from podium.sampling.groups import Group
from podium.sharding import Params
from podium.train.batches.batch import Batch, BatchSizes, take
from podium.train.batches.packing import Packing
from podium.train.batches.prepare import pack_step, prepare_step
from podium.train.scorers import (
    OwnPrompts,
    Scorer,
    compared_head,
    make_role_scorer,
    make_scorers,
    role_settings,
    with_scores,
)
from podium.train.state import TrainState, init_state
from podium.train.step import (
    TrainPrograms,
    TrainSettings,
    make_train_programs,
    make_value_step,
    shard_batch,
)

PLAIN: Mapping[str, Any] = {
    "remat": "none",
    "head": "chunked",
    "head_chunk_tokens": 4096,
    "attention": "reference",
    "layer_chunk_tokens": None,
}
"""The simplest settings of `train`: nothing in chunks, nothing recomputed."""
HALF_STEP = 2.0**-24  # largest relative rounding error of a stored float32 number


class Update(NamedTuple):
    """Loss and gradient of an update, and the weights after it."""

    loss: float
    gradient: Arrays
    weights: Arrays


class Sizes(NamedTuple):
    """The sizes of a loss and of its gradient without the cancellation of their terms.

    Advantages of a group sum to 0, so the terms of the loss and of each gradient nearly cancel, and rounding in a
    term can be large beside the sum. It is small beside the terms, whose absolute values these are.
    """

    loss: float
    """Sum of the absolute values of the loss's terms."""
    gradient: Mapping[str, float]
    """Norm of each parameter's gradient of that sum, or of the loss where that is larger."""


class NaiveUpdate(NamedTuple):
    """Loss and gradient of an update by the naive objective, and the sizes that errors of them are relative to."""

    loss: float
    gradient: Arrays
    sizes: Sizes
    entropy: float
    """Mean over the trained tokens, in nats."""
    kl: float
    """Mean of the loss's KL over the trained tokens, in nats; 0 without one."""
    tokens: int
    """Number of trained tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A way to pack, split and compute a batch; the result of an update must not depend on it."""

    packing: Packing = "shared_prompts"
    rows: int = 16
    """Rows of a micro-batch, over all devices; 16 hold the whole step."""
    devices: jax.sharding.Mesh | None = None
    """The mesh; None: the first device only."""
    row_tokens: int = ROW_TOKENS
    train: Mapping[str, Any] = dataclasses.field(default_factory=lambda: PLAIN)
    """Replacements for settings in the config's section `train`."""

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh that it runs on."""
        return self.devices or one_device()


PAIR_ROW_TOKENS = (LONGEST_PROMPT - 1 + 2 * SHORT.completion, LONGEST_PROMPT + 2 * MAX_NEW_TOKENS)
"""Tokens per row for pairs, which must lie in one row: in the simplest form, and in all others."""
UNPACKED, PACKED = Form(packing="none"), Form()
"""The simplest form, which is compared with the naive update; and the form with which most others are compared."""


def usable_form(form: Form, recipe: Recipe) -> Form:
    """The form itself; for a recipe that learns from pairs, with a packing that keeps both completions of a pair in one
    row.
    """
    if recipe.data_form != "pair":
        return form
    least, most = PAIR_ROW_TOKENS
    length = least if form.packing == "none" else max(form.row_tokens, most)
    return dataclasses.replace(form, packing="shared_prompts", row_tokens=length)


class Updates:
    """Runs updates of a subject (the model under test) in different forms; forms with equal programs compile once."""

    def __init__(self, subject: Subject, recipe: Recipe | None = None) -> None:
        """Train with `recipe` (None: the subject's), keeping groups of equal rewards."""
        self.subject = subject
        self.recipe = dataclasses.replace(recipe or subject.recipe, zero_variance="keep")
        self._programs: dict[TrainSettings, TrainPrograms] = {}

    @functools.cached_property
    def unpacked(self) -> list[Update]:
        """Two consecutive updates on the same batch, with one sequence per row."""
        return self.run(UNPACKED, times=2)

    @functools.cached_property
    def packed(self) -> Update:
        """The first of those updates with packed rows, in one micro-batch on one device."""
        return self.run(PACKED)[0]

    def batch(self, form: Form) -> Batch:
        """Pack the subject's completions into a batch of this form, on the host; advantages are still 0."""
        (minibatch,) = pack_step(self.subject.groups, self.recipe, sizes_of(form, self.subject)).minibatches
        return minibatch.batch

    def run(self, form: Form, *, times: int = 1, groups: list[Group] | None = None) -> list[Update]:
        """Run `times` consecutive updates on one batch, made of `groups` (None: the subject's)."""
        form = usable_form(form, self.recipe)
        settings, programs = self.programs(form)
        subject = self.subject
        params, frozen = subject.trained(form.mesh), subject.frozen(form.mesh)
        placed = self._prepared(form, settings, programs, groups or subject.groups, params | frozen)
        taught = self._compared_head(form.mesh)
        state, found = init_state(params, DESCENT), []
        for _ in range(times):
            state, metrics = programs.train_step(state, placed, frozen | taught)
            found.append(Update(float(metrics["loss"]), last_gradient(state), _host(state.params | frozen)))
        return found

    def _prepared(
        self, form: Form, settings: TrainSettings, programs: TrainPrograms, groups: list[Group], policy: Params
    ) -> Batch[jax.Array]:
        """The batch of these groups on the devices, with scores and advantages, as the trainer prepares it."""
        (placed,), _ = prepare_step(
            groups,
            self.recipe,
            sizes_of(form, self.subject),
            rules=settings.computing,
            scorers=self._scorers(form, settings, programs),
            policy=policy,
        )
        return placed

    def scores(self, form: Form) -> dict[str, np.ndarray]:
        """The scores of the subject's completions by the models that read the policy's prompts, [S, n] by name."""
        settings, programs = self.programs(form)
        subject = self.subject
        (minibatch,) = pack_step(subject.groups, self.recipe, sizes_of(form, subject)).minibatches
        own = [each for each in self._scorers(form, settings, programs) if each.own_prompts is None]
        placed = shard_batch(minibatch.batch, settings.computing)
        scored = with_scores(placed, own, subject.params(form.mesh)).scores
        found: dict[str, np.ndarray] = {}
        for name in (name for name, x in scored.items() if x.ndim == 3):  # not hidden states
            found[name] = np.zeros(np.asarray(subject.sequences.valid).shape)
            for (n, g), each in zip(minibatch.places, take(np.asarray(scored[name]), minibatch.spans), strict=True):
                found[name][n * len(subject.groups[n].transcripts) + g, : len(each)] = each
        return found

    def _scorers(self, form: Form, settings: TrainSettings, programs: TrainPrograms) -> tuple[Scorer, ...]:
        """The trainer's scorers, with those of the subject's models."""
        subject = self.subject
        others: list[Scorer] = []
        for role, model in ((each.role, each) for each in subject.models.values()):
            alike = role.phase == SCORE
            if alike and role.scores not in self.recipe.scorers:
                continue
            own = None
            if role.longer_prompts is not None:
                own = OwnPrompts(of=subject.rollouts.feed.privileged, sizes=privileged_sizes(form, subject))
            program = programs.score if alike else None
            others.append(make_role_scorer(role, settings, model.params(form.mesh), own, program))
        return make_scorers(self.recipe, settings, programs.score, others)

    def _compared_head(self, mesh: jax.sharding.Mesh) -> Params:
        """The head of a model whose whole distributions updates compare with the policy's; empty without one."""
        compared = next((each for each in self.subject.models.values() if each.role.compared), None)
        return {} if compared is None else compared_head(compared.params(mesh))

    def value_update(self, name: str, form: Form, *, clip: float | None) -> tuple[Update, Update]:
        """An update, in this form, of the model in the role `name` that estimates values, and the naive one in float64.

        Both are given values before the step that differ from the model's own by `moved`, so that the clip holds some.
        """
        settings, programs = self.programs(form)
        subject = self.subject
        model = subject.models[name]
        placed = self._prepared(form, settings, programs, subject.groups, subject.params(form.mesh))
        late = jnp.asarray(moved(np.asarray(placed.positions), np.asarray(placed.targets)), jnp.float32)
        placed = dataclasses.replace(placed, scores={**placed.scores, VALUES: placed.scores[VALUES] + late})
        step = make_value_step(role_settings(model.role, settings), DESCENT, clip=clip)
        state, metrics = step(init_state(model.params(form.mesh), DESCENT), placed)
        found = Update(float(metrics["loss"]), last_gradient(state), _host(state.params))
        return found, naive_value_update(_with_moved_values(subject.sequences), model, clip)

    def programs(self, form: Form) -> tuple[TrainSettings, TrainPrograms]:
        """The trainer's settings and compiled programs for this form."""
        config = self.subject.config
        changed = config.model_copy(update={"train": config.train.model_copy(update=dict(form.train))})
        update = resolve_update(changed, self.subject.recipe, machine_of(list(form.mesh.devices.flat)), form.mesh.shape)
        chunk = min(update.head_chunk_tokens, form.rows * form.row_tokens)  # larger chunks give the same program
        update = dataclasses.replace(update, head_chunk_tokens=chunk)
        settings = TrainSettings(self.subject.decoder, form.mesh, update)
        if settings not in self._programs:
            self._programs[settings] = make_train_programs(settings, self.recipe, DESCENT)
        return settings, self._programs[settings]

    def naive(self, weights: Arrays) -> NaiveUpdate:
        """Loss and gradient of the naive update from these weights, in float64."""
        return naive_update(self.subject, self.subject.sequences, weights)

    def bar(self, difference: float, weights: Arrays | None = None) -> float:
        """Tolerance of this difference of a gradient at these weights (None: the subject's own).

        It is `Subject.gradient_bar`, or if the difference exceeds that, twice what float32 changes the naive gradient
        by, if larger: two correct programs differ by at most the sum of their roundings. These are larger in deep
        models than in a tiny clone (1.9e-5 with SmolLM2-135M's 30 layers), and if a loss is a difference of sums (ipo).
        """
        least = self.subject.gradient_bar
        if difference <= least:
            return least
        return max(least, 2 * (self._own_rounding if weights is None else self._rounding(weights)))

    @functools.cached_property
    def _own_rounding(self) -> float:
        return self._rounding(self.subject.weights)

    def _rounding(self, weights: Arrays) -> float:
        """How much float32 changes the naive gradient from these weights."""
        exact = self.naive(weights)
        rounded = naive_update(self.subject, self.subject.sequences, weights, precision=in_float32)
        return gradient_difference(rounded.gradient, exact.gradient, exact.sizes)


def naive_update(
    subject: Subject,
    sequences: Sequences[np.ndarray],
    weights: Arrays,
    *,
    precision: Callable[[], AbstractContextManager[None]] = in_float64,
) -> NaiveUpdate:
    """Loss and gradient of an optimizer step from these weights, by the naive objective."""
    with precision():
        gradient = _naive_gradient(subject.decoder, subject.rules, subject.config.rollout.temperature)
        found, of_loss, of_size = gradient(wide(weights), jax.tree.map(jnp.asarray, sequences))
        gradients = {name: np.asarray(of_loss[name]) for name in trained_specs(subject.decoder)}
        norms = {name: max(_norm(value), _norm(np.asarray(of_size[name]))) for name, value in gradients.items()}
        loss, size, entropy, kl = (float(x) for x in found)
        return NaiveUpdate(
            loss, gradients, Sizes(size, norms), entropy=entropy, kl=kl, tokens=int(sequences.valid.sum())
        )


def added(one: NaiveUpdate, other: NaiveUpdate) -> NaiveUpdate:
    """An update whose loss is the sum of both; its statistics are those of the first."""
    gradient = {name: x + other.gradient[name] for name, x in one.gradient.items()}
    norms = {name: x + other.sizes.gradient[name] for name, x in one.sizes.gradient.items()}
    sizes = Sizes(one.sizes.loss + other.sizes.loss, norms)
    return one._replace(loss=one.loss + other.loss, gradient=gradient, sizes=sizes)


def moved(positions: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The difference of made-up values before a step from the model's own, by position and target token."""
    return np.sin(1.3 * positions + 0.7 * targets)


def naive_value_update(sequences: Sequences[np.ndarray], model: NaiveModel, clip: float | None) -> Update:
    """Loss and gradient of an optimizer step of a model that estimates values, by the naive objective in float64."""
    with in_float64():
        own = jax.tree.map(jnp.asarray, sequences)
        value, gradient = _naive_value_gradient(model.decoder, clip)(wide(model.weights), own)
        return Update(float(value), _host(gradient), model.weights)


class _NaiveValueGradient(Protocol):
    def __call__(self, weights: Weights, sequences: Sequences[jax.Array], /) -> tuple[jax.Array, Weights]: ...


@functools.cache
def _naive_value_gradient(decoder: DecoderConfig, clip: float | None) -> _NaiveValueGradient:
    """Compile the naive loss of estimated values with its gradient."""

    def loss(weights: Weights, sequences: Sequences[jax.Array]) -> jax.Array:
        n = sequences.valid.shape[1]
        return value_objective(
            continuation_values(weights, sequences.tokens, sequences.starts, decoder, n), sequences, clip
        )

    return jax.jit(jax.value_and_grad(loss))


def _with_moved_values(found: Sequences[np.ndarray]) -> Sequences[np.ndarray]:
    """The optimizer step, whose values before it differ from the model's by `moved`."""
    positions = found.starts[:, None] - 1 + np.arange(found.valid.shape[1])[None]  # [S, n]
    targets = np.take_along_axis(found.tokens, np.minimum(positions + 1, found.tokens.shape[1] - 1), axis=1)
    values = found.scores[VALUES] + moved(positions, targets)
    return dataclasses.replace(found, scores={**found.scores, VALUES: values})


def sizes_of(form: Form, subject: Subject) -> BatchSizes:
    """The sizes of a form's batches, with the experts of tokens if the form says whether to repeat them."""
    return BatchSizes(
        row_tokens=form.row_tokens,
        rows=form.rows,
        max_rows=PROMPTS * subject.config.group_size,
        packing=form.packing,
        max_new_tokens=subject.longest,
        devices=form.mesh.size,
        pairs=subject.recipe.data_form == "pair",
        rules=RowRules(pair_cost=pair_cost(subject.decoder)),
        choices=subject.decoder.choices if "replay_routing" in form.train else 0,
        choice_format=subject.decoder.choice_format,
    )


def privileged_sizes(form: Form, subject: Subject) -> BatchSizes:
    """The sizes of the batches that a model with prompts of its own scores."""
    return dataclasses.replace(sizes_of(form, subject), row_tokens=form.row_tokens + HINT, choices=0)


def loss_difference(found: float, expected: float, sizes: Sizes) -> float:
    """The error of a loss, relative to the size of its terms, or absolute if all of them are 0."""
    return abs(found - expected) / (sizes.loss or 1.0)


def gradient_difference(found: Arrays, expected: Arrays, sizes: Sizes) -> float:
    """The error of the worst parameter's gradient, relative to the size of its terms, or absolute if that is 0."""
    return largest(
        _norm(np.asarray(found[name], np.float64) - value) / (sizes.gradient[name] or 1.0)
        for name, value in expected.items()
    )


def relative(found: ArrayLike, expected: ArrayLike) -> float:
    """Norm of the difference divided by the norm of the expected array, or by 1 if that norm is 0."""
    norm = float(np.linalg.norm(np.asarray(expected, np.float64)))
    return float(np.linalg.norm(np.asarray(found, np.float64) - np.asarray(expected, np.float64))) / (norm or 1.0)


def weight_difference(found: Mapping[str, ArrayLike], before: Arrays, expected: Arrays) -> float:
    """The error of the worst parameter's new weights, relative to the norm of its expected change.

    Storing weights in float32 rounds them, however small their change; an error of 2^-24 of their norm is ignored.

    Args:
        found: new weights by the trainer.
        before: weights before the update.
        expected: new weights by the naive implementation.
    """
    return largest(
        (_norm(np.asarray(found[name], np.float64) - value) - HALF_STEP * _norm(value))
        / (_norm(value - before[name]) or 1.0)
        for name, value in expected.items()
    )


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


def keeping_gradient(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that the first entry of its state is the last gradient that it received."""

    def init(params: optax.Params) -> optax.OptState:
        inner: Any = optimizer.init(params)
        return (jax.tree.map(jnp.zeros_like, params), *inner)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        kept: Any = state
        changes, inner = optax.with_extra_args_support(optimizer).update(updates, tuple(kept[1:]), params, **extra)
        links: Any = inner
        return changes, (updates, *links)

    return optax.GradientTransformationExtraArgs(init, update)


def last_gradient(state: TrainState) -> Arrays:
    """Copy the last gradient from the state of an optimizer that `keeping_gradient` wraps, by parameter name."""
    links: Any = state.opt_state
    return {name: np.array(value) for name, value in links[0].items()}


DESCENT = keeping_gradient(optax.sgd(0.1))
"""The optimizer that leads from one update to the next."""


class _Values(NamedTuple):
    """Numbers of an optimizer step by the naive implementation, [] each."""

    loss: jax.Array
    size: jax.Array
    entropy: jax.Array
    kl: jax.Array


class _NaiveGradient(Protocol):
    def __call__(
        self, weights: Weights, sequences: Sequences[jax.Array], /
    ) -> tuple[_Values, dict[str, jax.Array], dict[str, jax.Array]]: ...


@functools.cache
def _naive_gradient(decoder: DecoderConfig, rules: Rules, temperature: float) -> _NaiveGradient:
    """Compile the naive loss and its size with the gradients of both."""

    def values_of(weights: Weights, sequences: Sequences[jax.Array]) -> _Values:
        n, starts = sequences.valid.shape[1], sequences.starts
        table = distributions(
            weights, sequences.tokens, starts=starts, decoder=decoder, temperature=temperature, penalty=1.0, n=n
        )
        found = scores(table, sequences.tokens, starts)
        loss, size = objective(rules, found, sequences, table)
        count = jnp.sum(sequences.valid)
        kl = kl_values(rules, found.logprobs, sequences)
        means = [jnp.sum(jnp.where(sequences.valid, x, 0.0)) / count for x in (found.entropy, kl)]
        return _Values(loss, size, *means)

    @jax.jit
    def gradients(weights: Weights, sequences: Sequences[jax.Array]) -> tuple[_Values, Any, Any]:
        values, pull = jax.vjp(lambda each: values_of(each, sequences), weights)
        none = jnp.zeros(2)
        (both,) = jax.vmap(pull)(_Values(jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0]), none, none))
        return values, {name: each[0] for name, each in both.items()}, {name: each[1] for name, each in both.items()}

    return gradients


def _host(params: Any) -> Arrays:
    return {name: np.asarray(value) for name, value in params.items()}
