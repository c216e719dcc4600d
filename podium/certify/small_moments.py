"""Checks moments that are stored in bfloat16: they are rounded up or down at random, independently and unbiased."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podium.certify.check_result import Check, largest
from podium.config.optimizer import OptimizerConfig
from podium.models.blocks.spec import ParamSpec
from podium.train.optimizer.transforms import make_optimizer

UPDATES = 4
SHAPE = (64, 96)
WEIGHTS = ("one", "other")
BETAS = {"mu": 0.9, "nu": 0.99}
"""Adam's betas, by the names that optax gives to its moments."""
DEVIATIONS = 5.0
"""How many standard deviations the mean rounding error may be from 0; correct code exceeds it once in a million."""
NEARLY = 1e-3  # of the distance between two numbers in bfloat16, for float32's own rounding


def moments_check() -> Check:
    """Compare the moments that several updates of adamw store with the exact ones, from those stored before."""
    return Check(
        name="moments in bfloat16",
        claim="moments in bfloat16 are rounded up or down at random, independently and unbiased (standard deviations)",
        difference=_moments_error(),
        bar=DEVIATIONS,
        after=("optimizer adamw",),
    )


class Rounding(NamedTuple):
    """How an array was rounded, compared with what is expected of chance; both fields have the array's shape."""

    excess: np.ndarray
    """1 where a number was rounded away from 0 and 0 elsewhere, minus the probability of rounding away from 0."""
    variance: np.ndarray

    def deviation(self, by: np.ndarray | float) -> float:
        """How many standard deviations the sum of the excess, weighted by `by`, is from 0."""
        return float(abs(np.sum(self.excess * by)) / np.sqrt(np.sum(self.variance * np.square(by))))

    def correlation(self, other: "Rounding") -> float:
        """How many standard deviations the sum of products with another array's excess is from 0."""
        size = np.sqrt(np.sum(self.variance * other.variance))
        return float(abs(np.sum(self.excess * other.excess)) / size)


def _moments_error() -> float:
    """The largest deviation from independent, unbiased rounding; infinite if a number is not one of the two nearest."""
    options = {"moments": "bfloat16", "beta1": BETAS["mu"], "beta2": BETAS["nu"], "clip_norm": 0.0}
    optimizer = make_optimizer(
        OptimizerConfig(name="adamw").model_copy(update=options),
        UPDATES,
        dict.fromkeys(WEIGHTS, ParamSpec(SHAPE, ("width", "mlp"), 1.0)),
    )
    random = np.random.default_rng(0)
    params = {name: jnp.asarray(random.normal(0.0, 1.0, SHAPE), jnp.float32) for name in WEIGHTS}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    before = {(name, weight): np.zeros(SHAPE) for name in BETAS for weight in WEIGHTS}
    errors: list[float] = []
    roundings: list[Rounding] = []
    for _ in range(UPDATES):
        gradient = {name: random.normal(0.0, 1.0, SHAPE).astype(np.float32) for name in WEIGHTS}
        _, state = update({name: jnp.asarray(x) for name, x in gradient.items()}, state, params)
        for name, weight in before:
            power = 1 if name == "mu" else 2
            wide = gradient[weight].astype(np.float64) ** power
            exact = BETAS[name] * before[name, weight] + (1 - BETAS[name]) * wide
            (stored,) = _named(state, name, weight)
            found = before[name, weight] = np.asarray(stored, np.float64)
            errors.append(0.0 if stored.dtype == jnp.bfloat16 and _is_near(found, exact) else np.inf)
            roundings.append(own := _rounding(found, exact))
            # Rounding to the nearest has the right mean too, but correlates with the upper half: the second deviation.
            errors += [own.deviation(1.0), own.deviation(_chance(exact) - 0.5)]
    errors += [one.correlation(other) for one, other in itertools.combinations(roundings, 2)]
    return largest(errors)


def _named(state: object, name: str, weight: str) -> list[jax.Array]:
    """The moments of this name of a weight, among the arrays of an optimizer's state."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [leaf for path, leaf in leaves if jax.tree_util.keystr(path).endswith(f".{name}['{weight}']")]


def _is_near(stored: np.ndarray, exact: np.ndarray) -> bool:
    """Whether each stored number is one of the two in bfloat16 that are nearest to the exact one."""
    moved = _moved(stored, exact)
    same_sign = np.all(stored * exact >= 0)
    return bool(same_sign and np.all(np.minimum(np.abs(moved), np.abs(moved - 1)) <= NEARLY))


def _rounding(stored: np.ndarray, exact: np.ndarray) -> Rounding:
    chance = _chance(exact)
    return Rounding(_moved(stored, exact) - chance, np.maximum(chance * (1 - chance), 1e-12))


def _chance(exact: np.ndarray) -> np.ndarray:
    """The probability with which each number is rounded away from 0."""
    return _moved(exact, exact)


def _moved(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Position of numbers between the two bfloat16 numbers around the exact ones: 0 at the one nearer to 0, 1 at the
    other.
    """
    size = np.abs(exact).astype(np.float32)
    towards_zero = (size.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    apart = 2.0 ** (np.floor(np.log2(np.maximum(towards_zero, 1e-30))) - 7)
    return (np.abs(found) - towards_zero) / apart
