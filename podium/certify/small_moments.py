"""Checks moments that are stored in bfloat16: each is rounded up or down by a chance that keeps the mean."""

import jax
import jax.numpy as jnp
import numpy as np

from podium.certify.result import Check, largest
from podium.config.optimizer import OptimizerConfig
from podium.models.blocks.spec import ParamSpec
from podium.train.optimizer import make_optimizer

UPDATES = 4
SHAPE = (64, 96)
BETAS = {"mu": 0.9, "nu": 0.99}
"""By the names that optax gives to Adam's moments."""
DEVIATIONS = 5.0
"""How many standard deviations the mean rounding may be from 0; correct code exceeds it once in a million."""
NEARLY = 1e-3  # of the distance between two numbers in bfloat16, for float32's own rounding


def moments_check() -> Check:
    """Compare the moments that several updates of adamw store with the exact ones, from those stored before."""
    return Check(
        name="moments in bfloat16",
        claim="moments in bfloat16 are rounded up or down by a chance that keeps the mean, in standard deviations",
        difference=_moments_error(),
        bar=DEVIATIONS,
        after=("optimizer adamw",),
    )


def _moments_error() -> float:
    """The largest deviation of a mean from its exact value; infinite if a moment is not one of the two nearest."""
    options = {"moments": "bfloat16", "beta1": BETAS["mu"], "beta2": BETAS["nu"], "clip_norm": 0.0}
    specs = {"w": ParamSpec(SHAPE, ("width", "mlp"), 1.0)}
    optimizer = make_optimizer(OptimizerConfig(name="adamw").model_copy(update=options), UPDATES, specs)
    random = np.random.default_rng(0)
    params = {"w": jnp.asarray(random.normal(0.0, 1.0, SHAPE), jnp.float32)}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    before = {name: np.zeros(SHAPE) for name in BETAS}
    errors: list[float] = []
    for _ in range(UPDATES):
        gradient = random.normal(0.0, 1.0, SHAPE).astype(np.float32)
        _, state = update({"w": jnp.asarray(gradient)}, state, params)
        for name, power in (("mu", 1), ("nu", 2)):
            exact = BETAS[name] * before[name] + (1 - BETAS[name]) * gradient.astype(np.float64) ** power
            (stored,) = _named(state, name)
            errors.append(np.inf if stored.dtype != jnp.bfloat16 else _rounding(np.asarray(stored, np.float64), exact))
            before[name] = np.asarray(stored, np.float64)
    return largest(errors)


def _named(state: object, name: str) -> list[jax.Array]:
    """The arrays of an optimizer's state whose path has this name."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [leaf for path, leaf in leaves if f".{name}[" in jax.tree_util.keystr(path)]


def _rounding(stored: np.ndarray, exact: np.ndarray) -> float:
    """How many standard deviations the roundings of numbers are from what chance makes of them."""
    size = np.abs(exact).astype(np.float32)
    towards_zero = (size.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    apart = 2.0 ** (np.floor(np.log2(np.maximum(towards_zero, 1e-30))) - 7)
    share = (np.abs(exact) - towards_zero) / apart  # the chance to be rounded away from 0
    moved = (np.abs(stored) - towards_zero) / apart  # 0, or 1 if it was
    if np.any(stored * exact < 0) or np.any(np.minimum(np.abs(moved), np.abs(moved - 1)) > NEARLY):
        return np.inf
    # To the nearest, the mean would be right, and a number rounded up whenever it is in the upper half.
    variance = np.maximum(share * (1 - share), 1e-12)
    found = [
        np.sum((moved - share) * by) / np.sqrt(np.sum(variance * by**2)) for by in (np.ones(size.shape), share - 0.5)
    ]
    return float(np.max(np.abs(found)))
