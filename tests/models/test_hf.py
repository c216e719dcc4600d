import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from others_code import others_code
from safetensors.numpy import load_file, save_file
from tiny_models import (
    CASES,
    LOGITS_TOLERANCE,
    error_of_scale,
    hf_config,
    hf_shapes,
    hf_tensors,
    logits_of,
    rules_on,
    tokens_of,
    write_model,
)

from podium.models.architecture import ModelError
from podium.models.files import hf
from podium.models.files.hf import load_params, new_folder, save_model
from podium.models.files.source import ModelSource, read_architecture, resolve
from podium.models.params import param_specs
from podium.sharding import Params

GOLDEN = Path(__file__).parents[1] / "golden" / "logits.npz"


def load(source: ModelSource, mesh: str = "auto", devices: int = 1, dtype=jnp.float32) -> Params:
    return load_params(source, read_architecture(source), rules_on(mesh, devices), dtype)


def assert_same_bits(found: Params, expected: Params) -> None:
    assert set(found) == set(expected)
    for name in expected:
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(expected[name]), err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_recorded_from_transformers(case: str, tmp_path: Path):
    found = logits_of(write_model(tmp_path, case), tokens_of(case))
    assert error_of_scale(found, np.load(GOLDEN)[case]) <= LOGITS_TOLERANCE


def test_stretched_rope_shows_in_the_recorded_logits(tmp_path: Path):
    plain = logits_of(write_model(tmp_path, "llama3", rope_scaling=None), tokens_of("llama3"))
    assert error_of_scale(plain, np.load(GOLDEN)["llama3"]) > 100 * LOGITS_TOLERANCE


def torch_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    torch = others_code("torch")
    import transformers

    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(tokens.astype(np.int64))).logits.numpy()


@pytest.mark.parity
@pytest.mark.parametrize(
    "case",
    [
        "llama_tied",
        "llama3",
        "qwen2_tied",
        "qwen3",
        "qwen3_moe",
        "qwen3_moe_sparse_step",
        "mistral_window",
        "ministral",
        "ministral3",
        "gpt_oss",
        "qwen3_5",
        "qwen3_5_three_taps_tied",
        "qwen3_5_moe",
        "gemma3_tied",
    ],
)
def test_transformers_loads_an_export_with_equal_logits(case: str, tmp_path: Path):
    source = write_model(tmp_path / "model", case)
    config = read_architecture(source)
    save_model(load(source), config, None, tmp_path / "export", dtype="float32", max_shard_bytes=20_000)
    found = torch_logits(tmp_path / "export", tokens_of(case))
    np.testing.assert_array_equal(found, torch_logits(tmp_path / "model", tokens_of(case)))
    assert error_of_scale(logits_of(source, tokens_of(case)), found) <= LOGITS_TOLERANCE


@pytest.mark.parity
@pytest.mark.parametrize(
    "case",
    [
        "llama3_rope_parameters",
        "llama_tied",
        "qwen2",
        "qwen3_tied",
        "qwen3_moe",
        "gpt_oss",
        "qwen3_5",
        "qwen3_5_moe",
        "gemma3_tied",
    ],
)
def test_folder_that_transformers_wrote_is_read(case: str, tmp_path: Path):
    torch = others_code("torch")
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    changes = {"initializer_range": 0.2} | ({} if "head_dim" in CASES[case] else {"head_dim": 8})
    config = transformers.AutoConfig.for_model(**hf_config(case), **changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    with torch.no_grad():
        expected = model(torch.tensor(tokens_of(case).astype(np.int64))).logits.numpy()
    assert error_of_scale(logits_of(resolve(str(tmp_path)), tokens_of(case)), expected) <= LOGITS_TOLERANCE


def test_each_weight_lands_where_the_einsums_expect_it(tmp_path: Path):
    source = write_model(tmp_path, "qwen2")
    stored, params = hf_tensors("qwen2"), load(source)
    layer, head, q = 1, 3, 5
    row = head * 8 + q  # of a projection's output: heads of 8
    prefix = f"model.layers.{layer}."
    same = np.testing.assert_array_equal
    same(params["embed"][7], stored["model.embed_tokens.weight"][7])
    same(params["head"][7], stored["lm_head.weight"][7])
    same(params["layers.q"][layer, :, head, q], stored[prefix + "self_attn.q_proj.weight"][row])
    same(params["layers.k"][layer, :, 1, q], stored[prefix + "self_attn.k_proj.weight"][8 + q])
    same(params["layers.q_bias"][layer, head, q], stored[prefix + "self_attn.q_proj.bias"][row])
    same(params["layers.o"][layer, head, q], stored[prefix + "self_attn.o_proj.weight"][:, row])
    same(params["layers.gate"][layer, :, 9], stored[prefix + "mlp.gate_proj.weight"][9])
    same(params["layers.down"][layer, 9], stored[prefix + "mlp.down_proj.weight"][:, 9])
    same(params["layers.mlp_norm"][layer], stored[prefix + "post_attention_layernorm.weight"])
    same(params["final_norm"], stored["model.norm.weight"])


@pytest.mark.parametrize("mesh", ["auto", "dp:8", "fsdp:4,tp:2", "dp:2,fsdp:2,tp:2"])
def test_weights_are_the_same_on_any_mesh_and_lie_as_the_rules_say(mesh: str, tmp_path: Path):
    source = write_model(tmp_path, "qwen2")
    config, rules = read_architecture(source), rules_on(mesh)
    params = load_params(source, config, rules)
    assert_same_bits(params, load(source))
    for name, spec in param_specs(config).items():
        assert params[name].sharding.is_equivalent_to(rules.sharding(*spec.axes), len(spec.shape)), name


@pytest.mark.parametrize("mesh", ["dp:8", "fsdp:4,tp:2"])
def test_size_of_the_pieces_does_not_matter(mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_model(tmp_path, "qwen3")
    whole = load(source, mesh, 8)
    monkeypatch.setattr(hf, "PIECE_BYTES", 5 * 2 * 32 * 4)  # 5 rows do not divide 32 or 64
    assert_same_bits(load(source, mesh, 8), whole)


def test_parameters_have_the_dtype_asked_for_whatever_the_file_has(tmp_path: Path):
    source = write_model(tmp_path, "llama")
    expected = {name: value.astype(jnp.bfloat16) for name, value in load(source).items()}
    assert_same_bits(load(source, dtype=jnp.bfloat16), expected)
    tensors = {name: value.astype(np.float16) for name, value in hf_tensors("llama").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    half = load(source)
    assert {value.dtype for value in half.values()} == {jnp.dtype(jnp.float32)}
    np.testing.assert_array_equal(half["embed"], tensors["model.embed_tokens.weight"].astype(np.float32))


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("case", ["llama_tied", "qwen2", "qwen3", "ministral", "gemma3_rope_parameters_tied"])
def test_float32_round_trip_is_bit_equal(case: str, max_shard_bytes: int, tmp_path: Path):
    source = write_model(tmp_path / "model", case)
    params, config = load(source), read_architecture(source)
    save_model(params, config, None, tmp_path / "export", dtype="float32", max_shard_bytes=max_shard_bytes)
    files = list((tmp_path / "export").glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_bytes == 20_000)
    exported = resolve(str(tmp_path / "export"))
    assert read_architecture(exported) == config
    assert_same_bits(load(exported), params)
    stored = {name: value for file in files for name, value in load_file(file).items()}
    assert_same_bits(stored, hf_tensors(case))


def test_bfloat16_round_trip_of_bfloat16_weights_is_bit_equal(tmp_path: Path):
    source = write_model(tmp_path / "model", "qwen3")
    config = read_architecture(source)
    params = {name: value.astype(jnp.bfloat16).astype(jnp.float32) for name, value in load(source).items()}
    save_model(params, config, None, tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"
    assert_same_bits(load(resolve(str(tmp_path / "export"))), params)


def test_export_of_sharded_parameters_is_the_same(tmp_path: Path):
    source = write_model(tmp_path / "model", "llama")
    config = read_architecture(source)
    save_model(load(source, "fsdp:4,tp:2", 8), config, None, tmp_path / "export", dtype="float32")
    assert_same_bits(load_file(tmp_path / "export" / "model.safetensors"), hf_tensors("llama"))


def test_export_lists_shards_with_their_size(tmp_path: Path):
    source = write_model(tmp_path / "model", "llama")
    save_model(load(source), read_architecture(source), None, tmp_path / "export", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(value.size for value in hf_tensors("llama").values())
    for file in set(index["weight_map"].values()):
        tensors = load_file(tmp_path / "export" / file)
        assert set(tensors) == {name for name, where in index["weight_map"].items() if where == file}
        assert len(tensors) == 1 or sum(value.nbytes for value in tensors.values()) <= 20_000


@pytest.mark.parametrize("name", ["file/out", "n" * 300], ids=["below a file", "too long a name"])
def test_a_folder_that_cannot_be_made_is_named(name: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=f"{name}: cannot be written"), new_folder(tmp_path / name):
        pass


def test_export_does_not_overwrite(tmp_path: Path):
    source = write_model(tmp_path / "model", "llama")
    with pytest.raises(ModelError, match="exists and is not an empty folder"):
        save_model(load(source), read_architecture(source), None, source.path)
    (tmp_path / "empty").mkdir()
    save_model(load(source), read_architecture(source), None, tmp_path / "empty")
    assert resolve(str(tmp_path / "empty")).kind == "folder"


def test_export_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_model(tmp_path / "model", "llama")

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(hf, "save_file", full)
    with pytest.raises(ModelError, match="export: cannot be written: No space left on device; free some space"):
        save_model(load(source), read_architecture(source), None, tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_weights_can_be_read_by_whoever_can_read_the_config(tmp_path: Path):
    source = write_model(tmp_path / "model", "llama")
    save_model(load(source), read_architecture(source), None, tmp_path / "export")
    assert len({path.stat().st_mode for path in (tmp_path / "export").iterdir()}) == 1


def without(tensors: dict, name: str) -> dict:
    return {key: value for key, value in tensors.items() if key != name}


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: without(t, UP), rf"tensor {UP} is missing from .*; expected shape \[48, 32\]"),
        (lambda t: without(t, "lm_head.weight"), r"tensor lm_head\.weight is missing"),
        (lambda t: t | {"visual.weight": t[UP]}, r"tensor visual\.weight in .*model\.safetensors is unexpected"),
        (lambda t: t | {UP: t[UP].T.copy()}, rf"tensor {UP} in .*: expected shape \[48, 32\], found \[32, 48\]"),
        (lambda t: t | {UP: t[UP].astype(np.int8)}, rf"tensor {UP} in .*: expected dtype F32, F16, BF16, found I8"),
    ],
)
def test_wrong_tensor_is_named(change, message: str, tmp_path: Path):
    source = write_model(tmp_path, "llama")
    save_file(change(hf_tensors("llama")), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(source)


def test_several_wrong_tensors_are_one_error(tmp_path: Path):
    source = write_model(tmp_path, "llama", num_hidden_layers=5)
    with pytest.raises(ModelError, match=r"model\.layers\.3\.[\s\S]*and 13 more"):
        load(source)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_names_with_a_prefix_are_shown_beside_those_that_are_missing(prefix: str, tmp_path: Path):
    source = write_model(tmp_path, "llama")
    save_file({prefix + name: each for name, each in hf_tensors("llama").items()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as failure:
        load(source)
    lines = str(failure.value).splitlines()
    assert [" is missing from " in line for line in lines] == [False, True, True, True, False, False, False]
    assert [f"tensor {prefix}" in line for line in lines] == [False, False, False, False, True, True, False]
    assert lines[-1] == f"and {2 * len(hf_tensors('llama')) - 5} more"


def test_copies_of_what_the_config_and_the_embedding_say_are_left_out(tmp_path: Path):
    source = write_model(tmp_path, "llama_tied")  # a theta of 500, heads of 8
    expected = load(source)
    extra = {
        "lm_head.weight": hf_tensors("llama_tied")["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": (500.0 ** -np.array([0, 0.25, 0.5, 0.75])).astype(np.float32),
    }
    save_file(hf_tensors("llama_tied") | extra, tmp_path / "model.safetensors")
    assert_same_bits(load(source), expected)


@pytest.mark.parametrize("kept", [4, 100, -1])
def test_truncated_safetensors_is_named(kept: int, tmp_path: Path):
    source = write_model(tmp_path, "llama")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated or damaged .*the file has [\d,]+ bytes"):
        load(source)


def test_missing_shard_is_named(tmp_path: Path):
    source = write_model(tmp_path / "model", "llama")
    save_model(load(source), read_architecture(source), None, tmp_path / "export", max_shard_bytes=20_000)
    first = sorted((tmp_path / "export").glob("*.safetensors"))[0]
    first.unlink()
    with pytest.raises(ModelError, match=rf"index\.json: lists {first.name}, which the folder does not have"):
        load(resolve(str(tmp_path / "export")))


def test_folder_without_safetensors_is_refused(tmp_path: Path):
    source = write_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor .*; Podium reads safetensors only"):
        load(source)


def test_logits_do_not_depend_on_the_mesh(tmp_path: Path):
    source, tokens = write_model(tmp_path, "qwen3"), tokens_of("qwen3")
    found = logits_of(source, tokens, rules_on("fsdp:2", 2))
    assert error_of_scale(found, logits_of(source, tokens)) <= 1e-5


MEASURE = """
import sys
import jax, jax.numpy as jnp
from podium.models.files.hf import load_params
from podium.models.files.source import read_architecture, resolve
from podium.models.params import TRAIN_AXES
from podium.sharding import ShardingRules, make_mesh

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

source = resolve(sys.argv[1])
rules = ShardingRules(make_mesh("auto"), TRAIN_AXES)
jax.block_until_ready(jnp.ones(8) * 2)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts anew
before = status("VmRSS")
params = load_params(source, read_architecture(source), rules)
assert jax.device_count() == int(sys.argv[2])
own = sum(shard.data.nbytes for value in params.values() for shard in value.addressable_shards)
print(status("VmHWM") - before - own, max(value.nbytes for name, value in params.items() if "layers" not in name))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 4])
def test_loading_needs_little_memory_beside_the_shards(devices: int, tmp_path: Path):
    """A model of 360 MiB whose largest tensor has 128 MiB: the bound is 1.3 x the largest tensor, all included."""
    sizes = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2048, "head_dim": 64}
    source = write_model(tmp_path, "llama", **sizes)
    tensors = {name: np.ones(shape, np.float32) for name, shape in hf_shapes(hf_config("llama") | sizes).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PATH": ""}
    command = [sys.executable, "-c", MEASURE, str(source.path), str(devices)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    beside, largest = (int(number) for number in output.split())
    assert largest == 128 * 2**20
    assert beside <= 1.3 * largest


def test_a_second_load_traces_nothing_new(tmp_path: Path):
    source = write_model(tmp_path, "llama")
    load(source)
    made = hf._make_write.cache_info().misses
    load(source)
    assert hf._make_write.cache_info().misses == made
