"""The engine as on a TPU, where a kernel (emulated here) advances states in the cells that store them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.certify.tiny import random_weights, tiny_clone
from podium.config.schema import RolloutConfig
from podium.models.layouts import Layout
from podium.models.params import TRAIN_AXES, param_specs
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
