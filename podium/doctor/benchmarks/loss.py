"""`podium bench loss`: time and memory of GRPO's loss on logits on this machine."""

import dataclasses
import functools
import importlib
import importlib.util
import json
import sys
import time
from typing import Literal, Protocol

import jax
import jax.numpy as jnp

from podium.accelerators import kernels_of
from podium.algorithms.logits_loss import grpo_loss_of_logits
from podium.algorithms.losses import Tokens, clipped_policy_loss
from podium.hosts.platform import prepare_platform
from podium.kernels.logits import LogitsOptions, logprobs_of_logits
from podium.kernels.tiles import Tiles
from podium.train.optimizer.gather_memory import DTYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossBench:
    """What to time: the mean loss of all tokens and its gradient with respect to the logits."""

    impl: Literal["jax", "ref", "kernel"]
    on_policy: bool
    shape: tuple[int, int, int]  # [B, T, V]
    dtype: str
    seed: int
    iters: int
    warmup: int
    noise: float  # nat; standard deviation of the old log-probabilities around the new ones
    clip: tuple[float, float]  # low, high
    temperature: float
    tile: tuple[int | None, int | None]  # tokens, vocabulary; None: the kernels' own

    @property
    def options(self) -> LogitsOptions:
        """Kernel or XLA, and the tiles; without a TPU or GPU the TPU's kernel is interpreted."""
        tokens, vocab = (given or own for given, own in zip(self.tile, Tiles(), strict=True))
        here = kernels_of(jax.devices()[0])
        way = "xla" if self.impl != "kernel" else "tpu" if here == "none" else here
        interpret = way not in ("xla", here)
        tiles = Tiles(tokens, vocab)
        return LogitsOptions(self.temperature, in_place=True, way=way, tiles=tiles, interpret=interpret)


def bench(options: LossBench, *, project: str, mode: str, name: str | None) -> int:
    """Print the figures as one object of JSON, and send them to W&B unless `mode` is disabled.

    Raises:
        ValueError: W&B is asked for and not installed, or the kernel does not support the tiles.
    """
    if mode != "disabled" and importlib.util.find_spec("wandb") is None:
        raise ValueError("--wandb_mode: wandb is not installed; pip install 'podium-rl[wandb]', or leave it out")
    prepare_platform()
    if options.options.interpret:
        print(
            f"{jax.default_backend()} has no kernel: the TPU's kernel is interpreted, and its time is meaningless",
            file=sys.stderr,
        )
    found = measure(options)
    print(json.dumps(found))
    if mode != "disabled":
        wandb = importlib.import_module("wandb")
        run = wandb.init(project=project, name=name, mode=mode, config=dataclasses.asdict(options))
        run.log({key: found[key] for key in ("loss", "first_call_s", "avg_step_ms")})
        run.finish()
    return 0


def measure(options: LossBench) -> dict[str, object]:
    """Time the loss. Each call gets new logits, made before the clock starts; its gradient reuses their memory."""
    step, device = make_step(options), jax.devices()[0]
    make_logits = jax.jit(functools.partial(random_logits, options.shape, DTYPES[options.dtype]))
    make_tokens = jax.jit(functools.partial(random_tokens, options))
    logits = make_logits(options.seed)
    tokens = jax.block_until_ready(make_tokens(logits))
    after_alloc = device.memory_stats() or {}
    start = time.perf_counter()
    compiled = step.lower(logits, *tokens).compile()
    loss = float(compiled(logits, *tokens)[0])
    first_call_s = time.perf_counter() - start
    times: list[float] = []
    for call in range(options.warmup + options.iters):
        logits = make_logits(options.seed + call + 1)
        tokens = jax.block_until_ready(make_tokens(logits))
        start = time.perf_counter()
        jax.block_until_ready(compiled(logits, *tokens))
        times.append(time.perf_counter() - start)
    memory = compiled.memory_analysis()
    assert memory is not None, "compiled programs know their memory"
    return {
        "impl": options.impl,
        "mode": "on_policy" if options.on_policy else "off_policy",
        "device": device.device_kind,
        "shape": dict(zip(("batch", "time", "vocab"), options.shape, strict=True)),
        "dtype": options.dtype,
        "loss": loss,
        "kernel": {
            "way": options.options.way,
            "interpret": options.options.interpret,
            "time_block": options.options.tiles.tokens,
            "block_size": options.options.tiles.vocab,
            "compute_dtype": "f32",
        },
        "grpo": {
            "epsilon_low": options.clip[0],
            "epsilon_high": options.clip[1],
            "temperature": options.temperature,
            "old_logp_noise_scale": options.noise,
        },
        "first_call_s": first_call_s,
        "avg_step_ms": 1e3 * sum(times[options.warmup :]) / options.iters,
        "mem_after_alloc": after_alloc,
        "mem_after_run": device.memory_stats() or {},
        "mem_compiled": {
            "arguments": memory.argument_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "peak": memory.peak_memory_in_bytes,
        },
    }


def random_logits(shape: tuple[int, ...], dtype: jnp.dtype, seed: int) -> jax.Array:
    """Draw normal logits with a standard deviation of 3, typical of a trained model."""
    return (3 * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype)


def random_tokens(options: LossBench, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Targets, advantages and old log-probabilities [B, T]; the last are None if on-policy."""
    keys, tokens = jax.random.split(jax.random.key(options.seed), 3), options.shape[:2]
    targets = jax.random.randint(keys[0], tokens, 0, options.shape[2], jnp.int32)
    advantages = jax.random.normal(keys[1], tokens)
    if options.on_policy:
        return targets, advantages, None
    logprobs, _ = logprobs_of_logits(logits, targets, options.options)
    return targets, advantages, logprobs + options.noise * jax.random.normal(keys[2], tokens)


class LossStep(Protocol):
    """The jitted `(logits, targets, advantages, old_logprobs) -> (loss [], gradient [B, T, V])`."""

    def __call__(
        self, logits: jax.Array, targets: jax.Array, advantages: jax.Array, old: jax.Array | None, /
    ) -> tuple[jax.Array, jax.Array]:
        """Compute the loss and its gradient with respect to the logits, which are donated."""
        ...

    def lower(
        self, logits: jax.Array, targets: jax.Array, advantages: jax.Array, old: jax.Array | None, /
    ) -> jax.stages.Lowered:
        """Like `lower` of a function from `jax.jit`."""
        ...


def make_step(options: LossBench) -> LossStep:
    """The loss that `options` describe, with its gradient."""
    low, high = options.clip

    def loss(logits: jax.Array, targets: jax.Array, advantages: jax.Array, old: jax.Array | None) -> jax.Array:
        if options.impl != "ref":
            found = grpo_loss_of_logits(
                logits,
                targets,
                advantages,
                old_logprobs=old,
                clip_low=low,
                clip_high=high,
                options=options.options,
            )
            return jnp.mean(found.losses)
        table = jax.nn.log_softmax(logits.astype(jnp.float32) / options.temperature)
        logprobs = jnp.take_along_axis(table, targets[..., None], axis=-1)[..., 0]
        old = jax.lax.stop_gradient(logprobs) if old is None else old
        every = jnp.ones_like(targets)
        tokens = Tokens(logprobs, old, advantages, every, every)
        terms = clipped_policy_loss(tokens, clip_low=low, clip_high=high, dual_clip=None)
        return jnp.mean(terms.values)

    return jax.jit(jax.value_and_grad(loss), donate_argnums=0)
