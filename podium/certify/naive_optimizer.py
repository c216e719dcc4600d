"""Naive optimizer, from a gradient to new weights: clipping, update rule, weight decay and learning rate.

Works on whole arrays with optax's own rules; decides by name which weights are matrices.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from podium.config.imports import imported, is_path
from podium.config.optimizer import OptimizerConfig

Arrays = dict[str, np.ndarray]
INPUTS = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1, "router": 1}
INPUTS |= {"q_gate": 1, "z": 1, "a": 1, "b": 1, "shared_router": 1}
"""Number of input dimensions of each layer's matrix, after the dimension L; the remaining ones are outputs."""
EXPERTS = ("expert_gate", "expert_up", "expert_down")
"""Stacks of matrices with one input dimension, for each layer and expert."""
MUON_RMS = 0.2  # arXiv:2502.16982
ADAFACTOR_RMS = 1.0  # arXiv:1804.04235


def scheduled_rate(config: OptimizerConfig, total: int, step: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0, in a run of `total` optimizer steps."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = min((step - config.warmup_steps) / max(1, total - 1 - config.warmup_steps), 1.0)
    left = 1 - done if config.schedule == "linear" else (1 + np.cos(np.pi * done)) / 2
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * left)


def gradient_norm(gradients: Arrays) -> float:
    """The L2 norm of all gradients together."""
    return float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in gradients.values())))


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter of this name: to matrices, not to norms and vectors."""
    vector = name == "score" or "norm" in name  # a head that gives values is one vector
    return not vector and not name.endswith(("_bias", "sinks", "_taps", "log_decay", "out_scale"))


class NaiveOptimizer:
    """The optimizer of a config, with its state. Use it within `in_float64`."""

    def __init__(self, config: OptimizerConfig, total: int, weights: Arrays) -> None:
        """Start before the first of a run's `total` optimizer steps."""
        self._config = config
        self._total = total
        self._rule, self._sign = _rule(config, weights)
        self._state = self._rule.init(_flat(weights))
        self._apply = jax.jit(self._rule.update)

    def update(self, weights: Arrays, gradients: Arrays, step: int) -> Arrays:
        """The weights after optimizer step `step` of the run, counted from 0."""
        config = self._config
        norm = gradient_norm(gradients)
        shrink = config.clip_norm / norm if 0 < config.clip_norm < norm else 1.0
        clipped = {name: shrink * np.asarray(x, np.float64) for name, x in gradients.items()}
        found, self._state = self._apply(_flat(clipped), self._state, _flat(weights))
        direction = {name: self._sign * np.asarray(x).reshape(weights[name].shape) for name, x in dict(found).items()}
        rate = scheduled_rate(config, self._total, step)
        return {
            name: w - rate * (direction[name] + config.weight_decay * w * decays(name)) for name, w in weights.items()
        }


def _rule(config: OptimizerConfig, weights: Arrays) -> tuple[optax.GradientTransformation, float]:
    """Optax's rule at a learning rate of 1, and the sign that turns its output into the direction to subtract."""
    if is_path(config.name):
        make: Callable[[OptimizerConfig], optax.GradientTransformation] = imported(config.name, what="an optimizer")
        return make(config), 1.0
    if config.name == "adamw":
        return optax.adam(1.0, b1=config.beta1, b2=config.beta2, eps=config.eps), -1.0
    if config.name == "lion":
        return optax.lion(1.0, b1=config.beta1, b2=config.beta2, weight_decay=0.0), -1.0
    if config.name == "sgd":
        return optax.sgd(1.0, momentum=config.beta1), -1.0
    if config.name == "adafactor":
        return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(ADAFACTOR_RMS)), 1.0
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    muon = optax.contrib.muon(
        learning_rate=1.0,
        beta=config.beta1,
        eps=config.eps,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        consistent_rms=MUON_RMS,
        # optax accepts a tree here but does not declare it
        muon_weight_dimension_numbers={name: matrix if _inputs(name) else None for name in weights},  # pyright: ignore[reportArgumentType]
    )
    return muon, -1.0


def _inputs(name: str) -> int | None:
    """Number of input dimensions of a layer's matrix; None for norms, biases, embedding and head."""
    *_, last = name.removesuffix(".lora_a").removesuffix(".lora_b").split(".")
    return 1 if name.endswith(".lora_b") or last in EXPERTS else INPUTS.get(last)


def _flat(weights: Arrays) -> dict[str, jnp.ndarray]:
    """Reshape the layers' matrices to [n, inputs, outputs]; other arrays are unchanged."""

    def flat(name: str, x: np.ndarray) -> np.ndarray:
        inputs = _inputs(name)
        if inputs is None:
            return x
        if name.endswith(EXPERTS):
            x = x.reshape(-1, *x.shape[2:])
        first = int(np.prod(x.shape[1 : 1 + inputs]))
        return x.reshape(len(x), first, -1)

    return {name: jnp.asarray(flat(name, np.asarray(x, np.float64))) for name, x in weights.items()}
