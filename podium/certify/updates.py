"""One update of the trainer's compiled program in any of its forms, with its gradient kept; and the naive one beside.

A form is what must not change the result: packing, rows of a micro-batch, mesh, and settings of memory and kernels.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike

from podium.algorithms.recipes import Recipe
from podium.certify.naive import Sequences, Weights, in_float64, objective, scores
from podium.certify.naive_rules import Rules
from podium.certify.subject import COMPLETIONS, MAX_NEW_TOKENS, PROMPTS, ROW_TOKENS, Arrays, Subject, one_device
from podium.models.architecture import DecoderConfig
from podium.models.params import trained_specs
from podium.run.resolve import resolve_update
from podium.train.batch import Batch, BatchSizes
from podium.train.generate import Group
from podium.train.packing import Packing
from podium.train.platform import machine_of
from podium.train.prepare import pack_step, prepare_step
from podium.train.scorers import make_scorers
from podium.train.setup import make_train_settings
from podium.train.state import init_state
from podium.train.step import TrainPrograms, TrainSettings, make_train_programs

PLAIN: Mapping[str, Any] = {
    "remat": "none",
    "head": "chunked",
    "head_chunk_tokens": 4096,
    "attention": "reference",
    "layer_chunk_tokens": None,
}
"""Settings of `train` that compute everything at once and recompute nothing."""
HALF_STEP = 2.0**-24  # of a float32 number, over the number: the most that storing it changes it
RATE = 0.1  # of the plain descent between an update and the next


class Update(NamedTuple):
    """Loss and gradient of an update, and the weights after it."""

    loss: float
    gradient: Arrays
    weights: Arrays
    loss_size: float = 0.0
    """Sum of the sizes of the loss's terms, of which differences of losses are a part; the naive update knows it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How a batch is split and computed."""

    packing: Packing = "shared_prompts"
    rows: int = 16
    """Of a micro-batch, over all devices; all rows there are fit in 16."""
    devices: jax.sharding.Mesh | None = None
    """None: the first device alone."""
    row_tokens: int = ROW_TOKENS
    train: Mapping[str, Any] = dataclasses.field(default_factory=lambda: PLAIN)
    """Changes of the config's section `train`."""

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices that it runs on."""
        return self.devices or one_device()


UNPACKED, PACKED = Form(packing="none"), Form()
"""The simplest form, which is compared with the naive update; and that which most others are compared with."""


class Updates:
    """Updates of a subject; forms whose programs are the same compile once."""

    def __init__(self, subject: Subject, recipe: Recipe | None = None) -> None:
        """`recipe`: another one than the subject's."""
        self.subject = subject
        self.recipe = dataclasses.replace(recipe or subject.recipe, zero_variance="keep")
        self._programs: dict[TrainSettings, TrainPrograms] = {}

    @functools.cached_property
    def unpacked(self) -> list[Update]:
        """Two updates on the same batch of one sequence a row."""
        return self.run(UNPACKED, times=2)

    @functools.cached_property
    def packed(self) -> Update:
        """The same update, packed, in one micro-batch on one device."""
        return self.run(PACKED)[0]

    def batch(self, form: Form) -> Batch:
        """The completions in a batch of this form, on the host, as the trainer packs it; without advantages."""
        (minibatch,) = pack_step(self.subject.groups, self.recipe, sizes_of(form)).minibatches
        return minibatch.batch

    def run(self, form: Form, *, times: int = 1, groups: list[Group] | None = None) -> list[Update]:
        """Several updates on the same batch, each from the weights that the one before it left."""
        settings, programs = self.programs(form)
        subject = self.subject
        params, frozen = subject.trained(form.mesh), subject.frozen(form.mesh)
        reference = None
        if subject.reference is not None and self.recipe.needs_reference:
            reference = subject.params(form.mesh, subject.reference)
        (placed,), _ = prepare_step(
            groups or subject.groups,
            self.recipe,
            sizes_of(form),
            rules=settings.computing,
            scorers=make_scorers(self.recipe, settings, programs.score, reference),
            policy=params | frozen,
        )
        state, found = init_state(params, _keeping_gradient(RATE)), []
        for _ in range(times):
            state, metrics = programs.train_step(state, placed, frozen)
            found.append(Update(float(metrics["loss"]), _host(state.opt_state), _host(state.params | frozen)))
        return found

    def programs(self, form: Form) -> tuple[TrainSettings, TrainPrograms]:
        """The trainer's programs as this form has them, and what they share."""
        config = self.subject.config
        changed = config.model_copy(update={"train": config.train.model_copy(update=dict(form.train))})
        update = resolve_update(changed, machine_of(form.mesh), form.mesh.shape)
        settings = make_train_settings(update, self.subject.decoder, form.mesh)
        chunk = min(settings.head_chunk_tokens, form.rows * form.row_tokens)  # more are the same program
        settings = settings._replace(head_chunk_tokens=chunk)
        if settings not in self._programs:
            self._programs[settings] = make_train_programs(settings, self.recipe, _keeping_gradient(RATE))
        return settings, self._programs[settings]

    def naive(self, weights: Arrays) -> Update:
        """The update from these weights, by the naive objective in float64; the weights that it leaves are not made."""
        return naive_update(self.subject, self.subject.sequences, weights)


def naive_update(subject: Subject, sequences: Sequences, weights: Arrays) -> Update:
    """Loss and gradient of an optimizer step from these weights, by the naive objective in float64."""
    with in_float64():
        wide = {name: jnp.asarray(np.asarray(value, np.float64)) for name, value in weights.items()}
        gradient = _naive_gradient(subject.decoder, subject.rules, subject.config.rollout.temperature)
        (loss, size), found = gradient(wide, sequences)
        gradients = {name: np.asarray(found[name]) for name in trained_specs(subject.decoder)}
        return Update(float(loss), gradients, {}, float(size))


def sizes_of(form: Form) -> BatchSizes:
    """The sizes of a form's batches."""
    return BatchSizes(
        row_tokens=form.row_tokens,
        rows=form.rows,
        max_rows=PROMPTS * COMPLETIONS,
        packing=form.packing,
        max_new_tokens=MAX_NEW_TOKENS,
    )


def distance(found: Arrays, expected: Arrays) -> float:
    """Norm of the difference over the norm of what is expected, of the parameter that is worst."""
    return max(relative(found[name], value) for name, value in expected.items())


def relative(found: ArrayLike, expected: ArrayLike) -> float:
    """Norm of the difference over the norm of what is expected; the norm itself where nothing is expected."""
    norm = float(np.linalg.norm(np.asarray(expected, np.float64)))
    return float(np.linalg.norm(np.asarray(found, np.float64) - np.asarray(expected, np.float64))) / (norm or 1.0)


def weight_difference(found: Mapping[str, ArrayLike], before: Arrays, expected: Arrays) -> float:
    """How far new weights are from what is expected, over the size of the expected change; of the worst parameter.

    A float32 weight is rounded to one of 2^24 steps of its size, however small its change: that much is no difference.
    """
    return max(
        max(0.0, _norm(np.asarray(found[name], np.float64) - value) - HALF_STEP * _norm(value))
        / (_norm(value - before[name]) or 1.0)
        for name, value in expected.items()
    )


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


def _keeping_gradient(rate: float) -> optax.GradientTransformation:
    """Plain descent whose state is the last gradient, so that it can be read exactly."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda g: -rate * g, updates), updates

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


class _NaiveGradient(Protocol):
    def __call__(
        self, weights: Weights, sequences: Sequences, /
    ) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array]]: ...


@functools.cache
def _naive_gradient(decoder: DecoderConfig, rules: Rules, temperature: float) -> _NaiveGradient:
    def loss(weights: Weights, sequences: Sequences) -> tuple[jax.Array, jax.Array]:
        n = sequences.valid.shape[1]
        found = scores(weights, sequences.tokens, sequences.starts, decoder, temperature, n)
        return objective(rules, found, sequences)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def _host(params: Any) -> Arrays:
    return {name: np.asarray(value) for name, value in params.items()}
