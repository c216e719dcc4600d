"""The engine's form on GPUs, computed on the CPU: each layer has its own weights and cache."""

import dataclasses
import functools
from unittest.mock import Mock

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from mixed_decoder import MIXED, weights
from tiny_decoder import DECODER
from tiny_engine import ONE_BUCKET, Letters, OfGpu, mesh_of, random_requests, same

from podium.certify.tiny import random_weights, tiny_clone
from podium.kernels import gpu_decode
from podium.models import decoder as decoder_module
from podium.models.architecture import Lora, unrolled, with_layers
from podium.models.decoder import PassSettings, forward
from podium.models.params import ROLLOUT_AXES, TRAIN_AXES, frozen_specs, is_adapter, param_specs
from podium.models.presets import preset_decoder
from podium.rollout import cache as caches
from podium.rollout.device import Device
from podium.rollout.engine import NonFiniteError, RolloutEngine
from podium.rollout.engine_weights import engine_decoder, engine_specs, keeps
from podium.rollout.request import Request, SamplingParams
from podium.rollout.scheduler import PrefillCall
from podium.sharding import ShardingRules, init_params

pytestmark = pytest.mark.usefixtures("whole_slots")

LORA = Lora(rank=2, alpha=4.0, targets=("q", "v", "up"), base="bfloat16", merged=False)


@pytest.fixture(autouse=True)
def without_kernel(monkeypatch: pytest.MonkeyPatch):
    """The decode kernel is for devices that are GPUs; a test below emulates it."""
    monkeypatch.setattr(caches, "gpu_kernel_decodes", lambda page_tokens, head_dim: False)


def make_engine(kind, decoder, config=ONE_BUCKET, tokenizer=None):
    rules = kind(mesh_of(1), ROLLOUT_AXES)
    return RolloutEngine(Device(config, decoder, rules, dtype=jnp.float32), tokenizer or Letters(299))


def opinionated(decoder, seed):
    params = init_params(seed, param_specs(decoder), ShardingRules(mesh_of(1), TRAIN_AXES))
    return {name: value if "norm" in name else 10 * value for name, value in params.items()}


def test_a_gpu_has_each_layer_apart_and_others_stack_them():
    cpu, gpu = (kind(mesh_of(1), ROLLOUT_AXES) for kind in (ShardingRules, OfGpu))
    assert engine_decoder(DECODER, cpu) is DECODER
    assert [len(place.layers) for place in engine_decoder(DECODER, gpu).places] == [1] * DECODER.layers
    assert engine_specs(DECODER, cpu)["layers.q"].shape[0] == DECODER.layers
    assert engine_specs(DECODER, gpu)["layers.1.o"].shape == (1, *engine_specs(DECODER, cpu)["layers.o"].shape[1:])


def test_an_unrolled_decoder_has_the_same_layers_in_the_same_order():
    assert unrolled(MIXED).blocks == MIXED.blocks
    assert unrolled(unrolled(MIXED)) == unrolled(MIXED)


def test_it_draws_what_a_loop_over_stacks_draws_and_takes_new_weights():
    requests = random_requests(5, completions=2, config=ONE_BUCKET)
    stacked, apart = make_engine(ShardingRules, DECODER), make_engine(OfGpu, DECODER)
    answers = []
    for seed in (0, 1):
        for engine in (stacked, apart):
            engine.load(opinionated(DECODER, seed))
        answers.append(stacked.generate(requests)[0])
        assert same(answers[-1], apart.generate(requests)[0])
    assert not same(*answers)


def test_the_decode_kernel_reads_the_pages_that_the_engine_writes(monkeypatch):
    emulated = functools.partial(gpu_decode.paged_attention, interpret=True)
    monkeypatch.setattr(caches, "gpu_kernel_decodes", lambda page_tokens, head_dim: True)
    monkeypatch.setattr(gpu_decode, "paged_attention", emulated)
    config = ONE_BUCKET.model_copy(update={"max_new_tokens": 5, "slots": 4, "prefill_rows": 2})
    requests = random_requests(3, completions=2, max_new_tokens=5, config=ONE_BUCKET)
    answers = []
    for kind in (ShardingRules, Kernel):
        engine = make_engine(kind, with_layers(DECODER, 1), config)
        engine.load(opinionated(with_layers(DECODER, 1), 0))
        answers.append(engine.generate(requests)[0])
    assert same(*answers)


def primitives(jaxpr):
    """The names of a program's operations, those of its inner programs too."""
    for each in jaxpr.eqns:
        yield each.primitive.name
        for inner in jax.extend.core.jaxprs_in_params(each.params):
            yield from primitives(inner)


@pytest.mark.parametrize(("capability", "runs_them"), [("7.0", False), ("7.5", False), ("8.0", True), ("8.9", True)])
def test_a_gpu_has_kernels_in_its_programs_only_if_it_runs_them(capability, runs_them, monkeypatch):
    monkeypatch.setattr("podium.sharding.capability_of", lambda device: capability)
    monkeypatch.setattr(caches, "gpu_kernel_decodes", lambda page_tokens, head_dim: True)
    rules, of = OfGpu(mesh_of(1), ROLLOUT_AXES), jax.ShapeDtypeStruct
    page = caches.abstract_cache(DECODER, ONE_BUCKET, dtype=jnp.dtype("float32"), rules=rules).places[0].kv
    rows, table = of((4,), jnp.int32), of((4, 2), jnp.int32)
    q, k = (of((4, 1, heads, DECODER.head_dim), jnp.float32) for heads in (DECODER.heads, DECODER.kv_heads))
    extend = functools.partial(caches.extend, rules=rules)
    spans, given = caches.Spans(table, rows, rows), caches.Heads(q, k, k)
    decoding = jax.make_jaxpr(extend)(page, of((), jnp.int32), spans, given)

    mixture = tiny_clone(preset_decoder("Qwen/Qwen3-30B-A3B"))
    tokens = of((2, 16), jnp.int32)
    params = {name: of(spec.shape, jnp.float32) for name, spec in param_specs(mixture).items()}
    compute = functools.partial(forward, settings=PassSettings(config=mixture, rules=rules, dtype=jnp.dtype("float32")))
    attend = lambda own, at, q, k, v: (own, q)  # noqa: E731
    layers = jax.make_jaxpr(lambda *given: compute(*given, attend)[0])(params, tokens, tokens)
    for program in (decoding, layers):
        assert ("pallas_call" in set(primitives(program.jaxpr))) == runs_them


class Kernel(OfGpu):
    """As `OfGpu`, with its own programs."""


class Counted(OfGpu):
    """As `OfGpu`, with its own programs."""


def test_layers_of_one_kind_are_traced_once_in_a_program(monkeypatch):
    layer = Mock(wraps=decoder_module._layer)
    monkeypatch.setattr(decoder_module, "_layer", layer)
    engine = make_engine(Counted, DECODER)
    engine.load(opinionated(DECODER, 0))
    engine.device.prefill(PrefillCall(chunk=ONE_BUCKET.max_prompt_tokens, fills=()))
    assert len(DECODER.blocks) > 1
    assert [call.kwargs["block"] for call in layer.call_args_list] == [DECODER.blocks[0]]


@pytest.mark.long  # compiles 15 layers of three kinds for each length; the last test has windows too
def test_windows_rings_and_states_of_several_places_are_each_layers_own():
    config = ONE_BUCKET.model_copy(update={"max_prompt_tokens": 40, "slots": 4, "prefill_rows": 2, "page_tokens": 4})
    random = np.random.default_rng(1)
    requests = [
        Request(
            prompt=tuple(random.integers(0, 64, n).tolist()),
            sampling=SamplingParams(max_new_tokens=12),
            seed=n,
            completions=2,
        )
        for n in (1, 13, 33, 40)
    ]
    answers = []
    for kind in (ShardingRules, OfGpu):
        engine = make_engine(kind, MIXED, config, Letters())
        engine.load(weights(ShardingRules(mesh_of(1), TRAIN_AXES)))
        answers.append(engine.generate(requests)[0])
    assert same(*answers)


@pytest.mark.parametrize("merged", [False, True])
def test_adapters_and_frozen_weights_come_from_the_trainers_stacks(merged):
    decoder = dataclasses.replace(DECODER, lora=dataclasses.replace(LORA, merged=merged))
    params = opinionated(decoder, 0)
    params = {name: 0.3 * value if is_adapter(name) else value for name, value in params.items()}
    own = {name: value for name, value in params.items() if is_adapter(name)}
    own = {name: value + 0.1 for name, value in own.items()}
    frozen = {name: params[name].astype(jnp.bfloat16) for name in frozen_specs(decoder)}
    answers = []
    for kind in (ShardingRules, OfGpu):
        engine = make_engine(kind, decoder)
        engine.device.freeze(frozen)
        engine.load(own)
        answers.append(engine.generate(random_requests(3, completions=2, config=ONE_BUCKET))[0])
    assert same(*answers)
    assert keeps(frozen, decoder, OfGpu(mesh_of(1), ROLLOUT_AXES), jnp.dtype(jnp.bfloat16)) == merged


def test_a_weight_that_is_not_finite_is_named_with_its_layer():
    engine = make_engine(OfGpu, DECODER)
    params = opinionated(DECODER, 0)
    engine.load(params | {"layers.up": params["layers.up"].at[1].set(jnp.nan)})
    with pytest.raises(NonFiniteError, match=r"weight layers\.1\.gate\+up of layer 1 is not finite"):
        engine.generate(random_requests(1, config=ONE_BUCKET))


def test_experts_of_several_places_are_recorded_layer_after_layer():
    """The trainer's stacks alternate; the engine on a GPU has every layer apart."""
    decoder = tiny_clone(preset_decoder("openai/gpt-oss-20b"))
    assert len(decoder.routed) > 1
    config = ONE_BUCKET.model_copy(update={"max_prompt_tokens": 24, "max_new_tokens": 4, "slots": 4, "prefill_rows": 4})
    values = {name: jnp.asarray(value) for name, value in random_weights(decoder, seed=0).items()}
    answers = []
    for kind in (ShardingRules, OfGpu):
        engine = make_engine(kind, decoder, config, Letters())
        engine.load(values)
        prompt = tuple(range(3, 20))
        request = Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=4), seed=1, completions=2)
        answers.append(engine.generate([request])[0])
    assert same(*answers)
    for one, other in zip(*(found[0] for found in answers), strict=True):
        assert one.choices.shape[1] == decoder.choices
        assert np.array_equal(one.choices, other.choices)
