"""Log-probabilities from existing logits: one pass over them forward and one backward, with float32 sums.

Podium's own training never materialises all logits (`podium.models.logprobs`); this module is for callers that do.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from podium.accelerators import kernels_of
from podium.kernels.gpu_logits import gpu_gradient, gpu_statistics
from podium.kernels.tiles import Gradients, Interpret, Statistics, Tiles
from podium.kernels.tpu_logits import tpu_gradient, tpu_statistics
from podium.kernels.xla_logits import xla_gradient, xla_statistics

Way = Literal["tpu", "gpu", "xla"]
STATISTICS = {"tpu": tpu_statistics, "gpu": gpu_statistics, "xla": xla_statistics}
GRADIENT = {"tpu": tpu_gradient, "gpu": gpu_gradient, "xla": xla_gradient}


class LogitsOptions(NamedTuple):
    """Options for computing log-probabilities from logits."""

    temperature: float = 1.0
    """Divides the logits before the softmax, as in the sampler."""
    entropy: bool = False
    """Whether to compute entropies and their gradient; otherwise they are 0."""
    in_place: bool = False
    """Whether the gradient may overwrite the logits' memory. Saves an array if the logits are donated, or made in the
    same program and not used again; otherwise XLA copies them first."""
    sharding: NamedSharding | None = None
    """The sharding of logits [B, T, V], over any of their dimensions; None: on one device."""
    way: Way | None = None
    """Implementation: the TPU kernel, the GPU kernel or XLA; None: by the devices (`kernels_of`)."""
    tiles: Tiles = Tiles()
    interpret: Interpret = False
    """Emulate a kernel without its device, slowly; for tests."""


DEFAULTS = LogitsOptions()


def logprobs_of_logits(
    logits: jax.Array, targets: jax.Array, options: LogitsOptions = DEFAULTS
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target, and entropy of its distribution.

    Args:
        logits: [B, T, V], of any B, T and V; bfloat16, float16 or float32. -inf is allowed.
        targets: [B, T] int32. One outside 0 to V - 1 gives a finite but meaningless number.
        options: what to compute, and on which devices.

    Returns:
        Both [B, T] float32; entropies in nats, 0 unless `options.entropy`.
    """
    return _logprobs(logits, targets, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _logprobs(logits: jax.Array, targets: jax.Array, options: LogitsOptions) -> tuple[jax.Array, jax.Array]:
    return _forward(logits, targets, options)[0]


def _forward(
    logits: jax.Array, targets: jax.Array, options: LogitsOptions
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    _check(options, logits.shape, targets.shape)
    tokens, whole = _specs(options)

    def of_device(logits: jax.Array, targets: jax.Array) -> Statistics:
        found = STATISTICS[_way(options)](
            logits,
            _own(targets, logits, options),
            scale=1 / options.temperature,
            entropy=options.entropy,
            tiles=options.tiles,
            interpret=options.interpret,
        )
        return _over_vocabulary(found, options)

    found = _on_devices(of_device, options, (whole, tokens), Statistics._make([tokens] * 4))(logits, targets)
    log_total = found.top + jnp.log(found.total)
    entropy = jnp.log(found.total) - found.weighted / found.total if options.entropy else jnp.zeros_like(log_total)
    return (found.chosen - log_total, entropy), (logits, targets, log_total, entropy)


def _backward(
    options: LogitsOptions, saved: tuple[jax.Array, ...], gradient: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    logits, targets, log_total, entropy = saved
    tokens, whole = _specs(options)

    def of_device(logits: jax.Array, targets: jax.Array, gradients: Gradients) -> jax.Array:
        return GRADIENT[_way(options)](
            logits,
            _own(targets, logits, options),
            gradients,
            scale=1 / options.temperature,
            entropy=options.entropy,
            tiles=options.tiles,
            in_place=options.in_place,
            interpret=options.interpret,
        )

    given = Gradients(log_total, *gradient, entropy)
    specs = (whole, tokens, Gradients._make([tokens] * 4))
    return _on_devices(of_device, options, specs, whole)(logits, targets, given), None


_logprobs.defvjp(_forward, _backward)


def _check(options: LogitsOptions, shape: tuple[int, ...], targets: tuple[int, ...]) -> None:
    """Raises ValueError if logits of this shape cannot be used with these options."""
    if len(shape) != 3 or targets != shape[:2]:
        raise ValueError(f"logits {shape} and targets {targets}: expected [B, T, V] and [B, T]")
    if not options.temperature > 0:
        raise ValueError(f"temperature {options.temperature}: expected more than 0; it divides the logits")
    if options.sharding is None:
        return
    for name, size, axes in zip(("rows", "tokens", "vocabulary"), shape, _axes(options.sharding), strict=True):
        devices = math.prod(options.sharding.mesh.shape[axis] for axis in axes)
        if size % devices:
            raise ValueError(
                f"{name} of {size} do not divide over {devices} devices ({', '.join(axes)}); pad the logits, the"
                " vocabulary with -inf, or split another dimension"
            )


def _axes(sharding: NamedSharding) -> list[tuple[str, ...]]:
    """The mesh axes that split rows, tokens and vocabulary, in this order."""
    parts = [*sharding.spec, None, None, None][:3]
    return [(part,) if isinstance(part, str) else tuple(part or ()) for part in parts]


def _specs(options: LogitsOptions) -> tuple[PartitionSpec, PartitionSpec]:
    """The partition specs of per-token arrays and of logits."""
    if options.sharding is None:
        return PartitionSpec(), PartitionSpec()
    rows, tokens, vocabulary = (axes or None for axes in _axes(options.sharding))
    return PartitionSpec(rows, tokens), PartitionSpec(rows, tokens, vocabulary)


def _on_devices(
    of_device: Callable, options: LogitsOptions, given: tuple, found: PartitionSpec | Statistics
) -> Callable:
    """Map `of_device` over the devices if the logits are sharded; otherwise return it unchanged."""
    if options.sharding is None:
        return of_device
    return jax.shard_map(of_device, mesh=options.sharding.mesh, in_specs=given, out_specs=found, check_vma=False)


def _way(options: LogitsOptions) -> Way:
    devices = jax.devices() if options.sharding is None else list(options.sharding.device_set)
    kernels = kernels_of(devices[0])
    return options.way or ("xla" if kernels == "none" else kernels)


def _own(targets: jax.Array, logits: jax.Array, options: LogitsOptions) -> jax.Array:
    """Target indices relative to the start of this device's part of the vocabulary."""
    if options.sharding is None or not (axes := _axes(options.sharding)[2]):
        return targets
    return targets - jax.lax.axis_index(axes) * logits.shape[-1]


def _over_vocabulary(found: Statistics, options: LogitsOptions) -> Statistics:
    """Combine the statistics of the devices' parts into those of the whole vocabulary."""
    if options.sharding is None or not (axes := _axes(options.sharding)[2]):
        return found
    top = jax.lax.pmax(found.top, axes)
    kept = jnp.exp(found.top - top)
    weighted = kept * (found.weighted + (found.top - top) * found.total)
    total, chosen, weighted = jax.lax.psum((kept * found.total, found.chosen, weighted), axes)
    return Statistics(top, total, chosen, weighted)
