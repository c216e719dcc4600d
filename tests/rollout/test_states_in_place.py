"""The engine as on a TPU, where a kernel (emulated here) advances states in the cells that store them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.certify.tiny import random_weights, tiny_clone
from podium.config.schema import RolloutConfig
from podium.models.blocks.kind import At
from podium.models.layouts import Layout
from podium.models.params import ROLLOUT_AXES, TRAIN_AXES, param_specs
from podium.models.presets import preset_decoder
from podium.rollout import cache
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request, SamplingParams
from podium.sampling.sampler import rollout_rules
from podium.sharding import ShardingRules, make_mesh, param_shardings

pytestmark = pytest.mark.usefixtures("whole_slots")

DECODER = tiny_clone(preset_decoder("Qwen/Qwen3.5-9B"))
CONFIG = RolloutConfig(max_prompt_tokens=24, max_new_tokens=8, slots=8, prefill_rows=8, page_tokens=2)
PROMPTS = [tuple(np.random.default_rng(n).integers(0, DECODER.vocab, n).tolist()) for n in (1, 4, 11)]


class Letters:
    eos_tokens, special_tokens = (), {}

    def decode(self, tokens):
        return "".join(chr(97 + token % 26) for token in tokens)


def answers(layout: Layout, devices: int, refill_steps: int):
    """Of more completions than slots, which end at different steps; an engine of the same settings is compiled once."""
    config = CONFIG.model_copy(update={"refill_steps": refill_steps})
    mesh = make_mesh("auto", jax.devices()[:devices])
    engine = RolloutEngine(
        Device(config, DECODER, rollout_rules(layout, DECODER, mesh), dtype=jnp.dtype("float32")), Letters()
    )
    shardings = param_shardings(param_specs(DECODER), ShardingRules(mesh, TRAIN_AXES))
    weights = random_weights(DECODER, seed=0)
    engine.load({name: jax.device_put(value, shardings[name]) for name, value in weights.items()})
    requests = [
        Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=n), seed=1, completions=4)
        for n, prompt in zip((8, 3, 5), PROMPTS, strict=True)
    ]
    return [each for group in engine.generate(requests)[0] for each in group]


class OneMore:
    """Stands for a layer that can update its last state in its cells: adds 1 to the others; its output is these."""

    def append(self, states, counts):
        raise AssertionError("all states would be read and written")

    packed = append

    def step(self, states, stored, counts):
        return tuple(x + 1 for x in states), stored, jnp.concatenate(states, axis=1)


def test_the_states_beside_the_one_in_its_cells_are_read_and_written(monkeypatch):
    """Of two layers with four cells: the second layer's cells 2 and 0, of which the latter has no new token."""
    monkeypatch.setattr(cache, "_in_place", lambda *_: True)
    first, second = np.arange(24.0).reshape(2, 4, 3), 100 + np.arange(16.0).reshape(2, 4, 2)
    states = tuple(jnp.asarray(x) for x in (first, second, np.zeros((2, 4, 1, 8, 8))))
    axes = tuple((None, "batch", *[None] * (x.ndim - 2)) for x in states)
    kept = cache.PlaceCache(kv=None, states=states, axes=axes)
    cells, starts, counts = (jnp.array(x, jnp.int32) for x in ([2, 0], [5, 1], [1, 0]))
    rules = ShardingRules(make_mesh("auto", jax.devices()[:1]), ROLLOUT_AXES)
    rows = cache.Rows(tables=cells[:, None], cells=cells, starts=starts, counts=counts, rules=rules, single=True)
    initial = tuple(jnp.zeros((2, *x.shape[2:])) for x in states)
    found, y = jax.jit(lambda kept: rows.recur(kept, At(jnp.int32(1), None), initial, OneMore()))(kept)
    assert y.tolist() == [[18, 19, 20, 112, 113], [12, 13, 14, 108, 109]]
    first[1, 2] += 1
    second[1, 2] += 1
    for value, expected in zip(found.states, (first, second, states[2]), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(
    ("layout", "devices"),
    [(Layout(name="replicated"), 1), pytest.param(Layout(name="hybrid", group=4), 8, marks=pytest.mark.long)],
)
def test_states_that_stay_in_their_cells_give_the_same_tokens(layout, devices, monkeypatch):
    expected = answers(layout, devices, 3)
    stepped = []

    def in_place(*_):
        stepped.append(True)
        return True

    monkeypatch.setattr(cache, "_in_place", in_place)
    found = answers(layout, devices, 2)
    assert stepped
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.full_logprobs, other.full_logprobs, rtol=0, atol=1e-5)
