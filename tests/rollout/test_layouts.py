import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layout_traffic import CONFIG, DECODER, FEW, all_layouts, layers_weights
from tiny_engine import (
    ALL_DEVICES_CONFIG,
    EOS,
    ONE_BUCKET,
    Letters,
    answers_of,
    make_engine,
    random_requests,
    same,
    tiny_params,
)
from tiny_engine import DECODER as TINY

from podium.accelerators import find_accelerator
from podium.models.architecture import with_layers
from podium.models.layouts import Layout
from podium.models.linear import of_bits
from podium.models.params import ROLLOUT_LAYOUTS, TRAIN_AXES, VOCAB_BLOCK, param_specs
from podium.plan.request.topology import compiler_environment
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.engine_weights import engine_specs
from podium.rollout.programs import make_sync
from podium.sampling.sampler import rollout_rules
from podium.sharding import ShardingRules, abstract_params, make_mesh, param_shardings

pytestmark = pytest.mark.usefixtures("whole_slots")

MESHES = (*(pytest.param(mesh, marks=pytest.mark.long) for mesh in ("fsdp:8", "dp:2,fsdp:4")), "fsdp:4,tp:2")
REQUESTS = [
    *random_requests(4, seed=1, config=ONE_BUCKET),
    *random_requests(2, seed=2, temperature=0.6, top_k=7, config=ONE_BUCKET),
    *random_requests(2, seed=3, top_p=0.8, min_p=0.01, config=ONE_BUCKET),
    *random_requests(1, seed=4, temperature=0.0, config=ONE_BUCKET),
]
ALL_DEVICES = ALL_DEVICES_CONFIG.model_copy(update={"max_prompt_tokens": ONE_BUCKET.max_prompt_tokens})


def rules_of(layout, mesh):
    return ShardingRules(make_mesh(mesh), ROLLOUT_LAYOUTS[layout])


def trained_params(mesh):
    """The weights that one device has, split over 8 as in training."""
    shardings = param_shardings(param_specs(TINY), ShardingRules(make_mesh(mesh), TRAIN_AXES))
    return {name: jax.device_put(value, shardings[name]) for name, value in tiny_params().items()}


@functools.cache
def expected_answers():
    return answers_of(make_engine(ONE_BUCKET), REQUESTS)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("replicated", marks=pytest.mark.long),  # test_engine.py: eight devices give the tokens of one
        *(layout for layout in ROLLOUT_LAYOUTS if layout != "replicated"),
    ],
)
def test_every_layout_gives_the_tokens_and_log_probabilities_of_one_device(layout, mesh):
    engine = RolloutEngine(Device(ALL_DEVICES, TINY, rules_of(layout, mesh), dtype=jnp.float32), Letters(EOS))
    engine.load(trained_params(mesh))
    assert same(answers_of(engine, REQUESTS), expected_answers())


@pytest.mark.parametrize(
    ("layout", "group", "devices"),
    [*(pytest.param("tensor", n, n, marks=pytest.mark.long) for n in (1, 2)), ("hybrid", 2, 8)],
)
def test_groups_of_any_size_give_the_tokens_and_log_probabilities_of_one_device(layout, group, devices):
    mesh = make_mesh("auto", jax.devices()[:devices])
    rules = rollout_rules(Layout(name=layout, group=group), TINY, mesh)
    engine = RolloutEngine(Device(ALL_DEVICES, TINY, rules, dtype=jnp.float32), Letters(EOS))
    shardings = param_shardings(param_specs(TINY), ShardingRules(mesh, TRAIN_AXES))
    engine.load({name: jax.device_put(value, shardings[name]) for name, value in tiny_params().items()})
    assert same(answers_of(engine, REQUESTS), expected_answers())


@pytest.mark.parametrize(("layout", "mesh", "shards"), [("legacy", "dp:2,fsdp:4", 8), ("maxtext", "dp:2,fsdp:4", 2)])
def test_slots_must_divide_over_the_devices_that_a_layout_splits_them_over(layout, mesh, shards):
    config = ALL_DEVICES_CONFIG.model_copy(update={"slots": shards + 1})
    message = rf"rollout\.slots is {shards + 1} and is split over {shards} devices; .* multiple of {shards}"
    with pytest.raises(ValueError, match=message):
        RolloutEngine(Device(config, TINY, rules_of(layout, mesh), dtype=jnp.float32), Letters(EOS))
    fitting = config.model_copy(update={"slots": shards, "prefill_rows": shards})
    RolloutEngine(Device(fitting, TINY, rules_of(layout, mesh), dtype=jnp.float32), Letters(EOS))


@pytest.mark.parametrize("layout", ROLLOUT_LAYOUTS)
def test_sync_casts_and_lays_out_as_the_layout_says_in_buffers_of_its_own(layout):
    params, rules = trained_params("fsdp:4,tp:2"), rules_of(layout, "fsdp:4,tp:2")
    expected = {name: np.asarray(value.astype(jnp.bfloat16)) for name, value in params.items()}
    for dtype in (jnp.bfloat16, jnp.float32):
        synced = {name: of_bits(value) for name, value in make_sync(TINY, rules, jnp.dtype(dtype))(params).items()}
        wanted = param_shardings(engine_specs(TINY, rules), rules)
        assert {name: value.sharding for name, value in synced.items()} == wanted
        assert all(value.dtype == dtype for value in synced.values())
    for value in params.values():
        value.delete()
    for name, value in synced.items():
        found, rows = np.asarray(value.astype(jnp.bfloat16)), len(expected[name])
        assert np.array_equal(found[:rows], expected[name]), name
        assert not found[rows:].any(), name  # a padded vocabulary


def test_sync_needs_room_for_little_besides_its_result():
    """All layers at once would be held twice: as gathered and as stored."""
    decoder = with_layers(DECODER, 16)
    params = abstract_params(
        param_specs(decoder), jnp.dtype(jnp.float32), ShardingRules(make_mesh("fsdp:8"), TRAIN_AXES)
    )
    sync = make_sync(decoder, rules_of("replicated", "fsdp:8"), jnp.dtype(jnp.bfloat16))
    memory = sync.lower(params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.3 * memory.output_size_in_bytes


# What a decode step sends. `legacy`, sequences over all devices, brings the weights that read the width and the head
# over the wire for every token, and exchanges the results of the other two; `maxtext`, sequences over dp alone, brings
# sums instead. The CPU's compiler brings the head, which no step changes, before the steps, and sums what o makes over
# two axes one after the other; the TPU's does neither.


def check_traffic(found, itemsize, *, on_cpu):
    """Bytes that one of 8 devices sends, and its collectives, against counts by hand."""
    S, L, D, F, V = CONFIG.slots, DECODER.layers, DECODER.width, 1024, DECODER.vocab
    heads, kv_heads = DECODER.heads * DECODER.head_dim, DECODER.kv_heads * DECODER.head_dim
    read = layers_weights("q", "k", "v", "gate", "up") + (0 if on_cpu else V * D)
    inputs = S * L * (heads + F)  # of o and down, whole for every device
    sums = S * L * (heads + 2 * kv_heads + 2 * F) * itemsize + S * V * 4  # logits are float32
    calls = {layout: each["calls"] for layout, each in found.items()}
    sent = {layout: each["sent"] for layout, each in found.items()}
    assert sent["replicated"] == {}
    assert sum(calls["replicated"].values()) == 1 / 8  # whether anybody is left, once in eight tokens
    assert sent["legacy"].keys() == {"all-gather", "all-to-all"}
    assert sent["legacy"]["all-gather"] == pytest.approx(itemsize * (read + inputs) * 7 / 8, rel=1e-3)
    assert sent["legacy"]["all-to-all"] == itemsize * (2 * L + 1) * S * D / 8 * 7 / 8  # sums to who has the sequence
    assert sent["maxtext"].keys() == {"all-reduce", "all-gather"}
    assert sent["maxtext"]["all-reduce"] == pytest.approx(2 * sums * 7 / 8, rel=2e-3)  # and of each norm's squares
    gathers = 3 * L + 2 if on_cpu else 2 * L  # of what a layer adds, whole for every device; on CPU also around them
    assert sent["maxtext"]["all-gather"] == gathers * itemsize * S * D * 7 / 8

    kv_parts = DECODER.kv_heads
    for layout, group in (("tensor", 8), ("hybrid", 4)):
        rows, spare = S * group // 8, group // kv_parts
        draws = rows * V / VOCAB_BLOCK * 4 * (group - 1) / group  # how likely each block of the vocabulary is
        gathered = {"all-gather": draws} if draws > FEW else {}
        assert {kind: sent[layout][kind] for kind in sent[layout].keys() - {"all-reduce", "all-to-all"}} == gathered
        rounds = (2 * L + 1) * (group - 1) / group  # of o, down and the embedding
        if on_cpu:
            rounds += L * ((spare - 1) / spare + (kv_parts - 1) / kv_parts - (group - 1) / group)
        assert sent[layout]["all-reduce"] == pytest.approx(2 * rounds * rows * D * itemsize, rel=2e-3)
        swaps = L * rows * (2 * heads + 2 * kv_heads) * itemsize / group * (spare - 1) / spare
        cut = rows * V * 4 / group * (group - 1) / group  # where top-k or top-p cuts a row
        assert sent[layout]["all-to-all"] == swaps + cut
        assert calls[layout]["all-to-all"] == 2 * L + 1
        large = (3 if on_cpu else 2) * L + 1
        assert large <= calls[layout]["all-reduce"] <= large + 3
        assert calls[layout]["few"] <= 7


def test_a_decode_step_sends_what_its_layout_says():
    check_traffic(all_layouts(make_mesh("fsdp:8"), jnp.dtype(jnp.float32)), itemsize=4, on_cpu=True)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU's compiler, is not installed")
def test_a_decode_step_sends_what_its_layout_says_on_a_tpu():
    root = Path(__file__).parents[2]
    environment = {**os.environ, **compiler_environment(find_accelerator("v6e-8")), "PYTHONPATH": str(root)}
    command = [sys.executable, str(Path(__file__).with_name("layout_traffic.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_traffic(json.loads(done.stdout.splitlines()[-1]), itemsize=2, on_cpu=False)
