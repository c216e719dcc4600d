import importlib.util
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from podium.compiler import (
    EXPERTS_OPTIONS,
    FUSED_GATHERS,
    OFFLOADED_OPTIONS,
    SPARSE_CORE,
    TPU7X_OPTIONS,
    TPU_OPTIONS,
    WHOLE_GATHERS,
    WHOLE_GATHERS_FROM,
    add_xla_flags,
    compiler_options,
    engine_options,
    hide_plugin_errors,
)
from podium.config.schema import Config
from podium.run.resolve import resolve_recipe
from podium.run.token_sizes import tokens_per_gather


@pytest.mark.parametrize(
    ("libtpu", "fused"), [("0.0.42.1", True), ("0.0.50.1", False), ("0.0.51", False), ("0.1.0", False)]
)
def test_gathers_are_fused_where_the_compiler_takes_it(libtpu, fused):
    options = compiler_options("tpu", libtpu)
    assert (FUSED_GATHERS in options) == fused
    assert options.keys() | {FUSED_GATHERS} == TPU_OPTIONS.keys()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_other_devices_have_no_options_of_the_tpu(platform):
    assert not compiler_options(platform).keys() & TPU_OPTIONS.keys()


def test_only_programs_with_arrays_in_the_hosts_memory_have_more_room_before_something_is_made_again():
    assert {**compiler_options("tpu"), **OFFLOADED_OPTIONS} == compiler_options("tpu", offloaded=True)
    assert compiler_options("gpu", offloaded=True) == compiler_options("gpu")
    assert not OFFLOADED_OPTIONS.keys() & compiler_options("tpu").keys()


def test_weights_come_whole_where_a_device_has_many_tokens_for_them():
    few, many = (compiler_options("tpu", tokens=WHOLE_GATHERS_FROM - more) for more in (1, 0))
    assert {**few, **WHOLE_GATHERS} == many != few == compiler_options("tpu")
    assert compiler_options("cpu", tokens=WHOLE_GATHERS_FROM) == compiler_options("cpu")


@pytest.mark.parametrize(
    ("kind", "takes"),
    [("v6e", True), ("TPU v6 lite", True), ("TPU v6e", True), ("TPU7x", True), ("v5e", False), ("TPU v4", False)],
)
def test_where_collectives_have_a_core_of_their_own_weights_always_come_whole(kind, takes):
    options = compiler_options("tpu", "0.0.42.1", kind=kind)  # which takes FUSED_GATHERS on every TPU
    assert (options.items() >= {**SPARSE_CORE, **WHOLE_GATHERS}.items()) == takes
    assert (FUSED_GATHERS in options) != takes  # that would gather on the other core
    assert takes or not SPARSE_CORE.keys() & options.keys()


@pytest.mark.parametrize(("kind", "takes"), [("v6e", True), ("v5e", False)])
def test_only_where_collectives_have_a_core_of_their_own_are_layers_of_experts_scheduled_for_them(kind, takes):
    plain, experts = (compiler_options("tpu", kind=kind, experts=some) for some in (False, True))
    assert not EXPERTS_OPTIONS.keys() & plain.keys()
    assert experts == plain | (EXPERTS_OPTIONS if takes else {})


def test_what_the_environment_says_of_an_option_holds(monkeypatch):
    (first, *_), whole = SPARSE_CORE, compiler_options("tpu", kind="v6e")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_other=1 --{first}=false")
    assert compiler_options("tpu", kind="v6e") == {name: value for name, value in whole.items() if name != first}


@pytest.mark.parametrize("options", [compiler_options, engine_options])
@pytest.mark.parametrize(("kind", "takes"), [("tpu7x", True), ("TPU7x", True), ("v6e", False), ("TPU v5", False)])
def test_only_programs_of_a_tpu7x_read_weights_in_the_tiles_in_which_jax_stores_them(options, kind, takes, monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert (options("tpu", kind=kind).items() >= TPU7X_OPTIONS.items()) == takes
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "".join(f"--{name}=true " for name in TPU7X_OPTIONS))
    assert not TPU7X_OPTIONS.keys() & options("tpu", kind=kind).keys()


@pytest.mark.parametrize("options", [compiler_options, engine_options])
def test_a_gpu_s_programs_repeat_their_bits_unless_the_environment_says_otherwise(options, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert options("gpu")["xla_gpu_deterministic_ops"] == "True"
    monkeypatch.setenv("XLA_FLAGS", "--xla_other=1 --xla_gpu_deterministic_ops=false")
    assert "xla_gpu_deterministic_ops" not in options("gpu")


@pytest.mark.parametrize(
    ("sp", "tp", "chunk", "tokens"), [(1, 1, None, 4096), (4, 1, None, 1024), (1, 2, None, 0), (1, 1, 1024, 0)]
)
def test_tokens_for_which_weights_are_gathered_are_those_of_a_devices_rows(sp, tp, chunk, tokens):
    train = {"rows_per_device": 8, "layer_chunk_tokens": chunk}
    settings = {"model": "none", "tasks": [{"name": "arithmetic"}], "train": train}
    config = Config.model_validate({**settings, "rollout": {"max_prompt_tokens": 128, "max_new_tokens": 384}})
    assert tokens_per_gather(config, resolve_recipe(config), sp=sp, tp=tp) == tokens


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "--xla_a=1 --xla_b=2"),
        ("--xla_c", "--xla_c --xla_a=1 --xla_b=2"),
        ("--xla_b=5  --xla_aa=3", "--xla_b=5 --xla_aa=3 --xla_a=1"),
        ("--xla_a --xla_b=", "--xla_a --xla_b="),
    ],
)
def test_flags_that_the_user_has_set_stand(monkeypatch, given, expected):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if given is not None:
        monkeypatch.setenv("XLA_FLAGS", given)
    add_xla_flags("--xla_a=1", "--xla_b=2")
    assert os.environ["XLA_FLAGS"] == expected


def test_tests_run_with_the_flags_of_the_environment():
    """A user who asks for AVX2 alone gets it: XLA takes the last of two flags, so conftest must not add a second."""
    code = "import conftest, os; print(os.environ['XLA_FLAGS'])"
    environment = {**os.environ, "XLA_FLAGS": "--xla_cpu_max_isa=AVX2", "PYTHONPATH": str(Path(__file__).parent)}
    flags = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert re.findall(r"max_isa=\w+", flags.stdout) == ["max_isa=AVX2"]


def test_a_plugin_that_does_not_start_is_no_traceback(caplog):
    hide_plugin_errors()
    bridge = logging.getLogger("jax._src.xla_bridge")
    with caplog.at_level(logging.INFO, logger=bridge.name):
        try:
            raise RuntimeError("Unable to load cuFFT. Is it installed?")
        except RuntimeError:  # as in jax's discovery of plugins
            bridge.exception("Jax plugin configuration error: Exception when calling %s.initialize()", "a plugin")
        bridge.warning("another message")
    assert [record.getMessage() for record in caplog.records] == ["another message"]


def test_jax_still_words_that_message_so():
    bridge = Path(importlib.util.find_spec("jax").submodule_search_locations[0]) / "_src" / "xla_bridge.py"
    assert '"Jax plugin configuration error: Exception when "' in bridge.read_text()
