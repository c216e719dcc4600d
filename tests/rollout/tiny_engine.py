"""A random two-layer model, a tokenizer of letters, and engines over them: what the rollout tests share."""

import functools
import string

import jax
import jax.numpy as jnp
import numpy as np
from tiny_decoder import DECODER

from podium.config.schema import RolloutConfig
from podium.models.architecture import DecoderConfig
from podium.models.attention.packed_attention import causal_attention
from podium.models.decoder import PassSettings, forward, head_weights
from podium.models.logprobs import logits_at
from podium.models.params import ROLLOUT_AXES, TRAIN_AXES, param_specs
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request, SamplingParams
from podium.sharding import ShardingRules, init_params, make_mesh

EOS = 299
ROUNDING = 1e-5
"""How far log-probabilities of equal tokens may differ, in float32: what docs/design.md promises."""
CONFIG = RolloutConfig(max_prompt_tokens=48, max_new_tokens=12, slots=8, refill_steps=3, prefill_rows=4)
ALL_DEVICES_CONFIG = CONFIG.model_copy(update={"slots": 16, "prefill_rows": 8})
ONE_BUCKET = CONFIG.model_copy(update={"max_prompt_tokens": 32})
"""Its engines have one program that prefills."""


class Letters:
    """Every token is a letter; the end of a sequence is no text."""

    def __init__(self, *eos_tokens: int, special_tokens: dict[str, int] | None = None) -> None:
        self.eos_tokens, self.special_tokens = eos_tokens, special_tokens or {}

    def decode(self, tokens: list[int]) -> str:
        return "".join(string.ascii_letters[token % 52] for token in tokens if token not in self.eos_tokens)


class OfGpu(ShardingRules):
    """Rules of a mesh that claims to be of GPUs."""

    @property
    def platform(self) -> str:
        return "gpu"


@functools.cache
def mesh_of(devices: int):
    return make_mesh("auto", jax.devices()[:devices])


def tiny_params(seed: int = 0, devices: int = 1):
    """Weights large enough that the model has opinions."""
    params = init_params(seed, param_specs(DECODER), ShardingRules(mesh_of(devices), TRAIN_AXES))
    return {name: value if "norm" in name else 10 * value for name, value in params.items()}


def make_engine(config=CONFIG, *, devices=1, dtype=jnp.float32, eos_tokens=(EOS,), seed=0):
    rules = ShardingRules(mesh_of(devices), ROLLOUT_AXES)
    engine = RolloutEngine(Device(config, DECODER, rules, dtype=dtype), Letters(*eos_tokens))
    engine.load(tiny_params(seed, devices))
    return engine


def answers_of(engine, requests):
    """The completions of each request, without what they took."""
    return engine.generate(requests)[0]


def random_requests(
    count: int, *, seed: int = 0, completions: int = 3, max_new_tokens: int = 12, config=CONFIG, **settings
):
    """Requests whose prompts have any length that `config` allows."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            prompt=tuple(rng.integers(0, 299, rng.integers(1, config.max_prompt_tokens + 1)).tolist()),
            sampling=SamplingParams(max_new_tokens=max_new_tokens, **settings),
            seed=int(rng.integers(2**40)),
            completions=completions,
        )
        for _ in range(count)
    ]


@functools.cache
def _plain_pass(dtype):
    rules, T = ShardingRules(mesh_of(1), ROLLOUT_AXES), CONFIG.max_prompt_tokens + CONFIG.max_new_tokens
    mask = jnp.tri(T, dtype=bool)[None]

    def attend(kv, layer, q, k, v):
        return kv, causal_attention(q, k, v, mask)

    def run(params, tokens):
        hidden, _, _ = forward(
            params, tokens, jnp.arange(T)[None], attend, settings=PassSettings(config=DECODER, rules=rules, dtype=dtype)
        )
        return logits_at(hidden, head_weights(params, rules, dtype), 1.0)[0]

    return jax.jit(run), T


def plain_logits(params, tokens, dtype=jnp.float32):
    """Logits [n, V] float32 behind each token of one sequence, by one pass over all of it."""
    run, T = _plain_pass(jnp.dtype(dtype))
    padded = np.zeros((1, T), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(run(params, padded))[: len(tokens)]


def same(left, right) -> bool:
    """Whether two answers to the same requests are equal: tokens exactly, log-probabilities to ROUNDING."""
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    return all(
        np.array_equal(a.tokens, b.tokens)
        and np.allclose(a.sampled_logprobs, b.sampled_logprobs, rtol=0, atol=ROUNDING)
        and np.allclose(a.full_logprobs, b.full_logprobs, rtol=0, atol=ROUNDING)
        and (a.text, a.finish_reason) == (b.text, b.finish_reason)
        for a, b in pairs
    )


def make_pass(decoder: DecoderConfig, rules: ShardingRules, *, from_stacks: bool = False):
    """The jitted forward pass over two sequences of T tokens, `params -> [2, T, D]`."""
    T = 12
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, T)), jnp.int32)
    mask = jnp.broadcast_to(jnp.tri(T, dtype=bool)[None], (2, T, T))

    def run(params):
        return forward(
            params,
            tokens,
            jnp.broadcast_to(jnp.arange(T)[None], (2, T)),
            lambda carried, at, q, k, v: (carried, causal_attention(q, k, v, mask, at.sinks)),
            recur=lambda carried, at, initial, advance: (carried, advance.append(initial, jnp.full(2, T))[1]),
            settings=PassSettings(config=decoder, rules=rules, dtype=jnp.dtype("float32"), from_stacks=from_stacks),
        )[0]

    return jax.jit(run)
