"""Files with a head that was trained by itself, beside a config.json that ties it to the embedding."""

import json
import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from others_code import others_code
from safetensors.numpy import load_file, save_file
from test_hf import torch_logits
from tiny_models import (
    LOGITS_TOLERANCE,
    error_of_scale,
    hf_config,
    hf_tensors,
    logits_of,
    rules_on,
    tokens_of,
    write_model,
)

from podium.config.lora import LoraConfig
from podium.models.architecture import ModelError, with_lora
from podium.models.files import folder as folder_module
from podium.models.files.hf import load_params, save_model
from podium.models.files.source import ModelSource, read_architecture, resolve
from podium.models.params import frozen_specs
from podium.models.presets import find_architecture

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = ["llama_tied", "qwen2_tied", "qwen3_tied", "qwen3_moe_mixed_tied", "gemma3_tied", "gpt_oss_layer_types_tied"]


def other_head(case: str) -> np.ndarray:
    """A head that is not the embedding."""
    shape = hf_tensors(case)[EMBED].shape
    return (0.2 * np.random.default_rng(7).standard_normal(shape)).astype(np.float32)


def write(folder: Path, case: str, head: np.ndarray, **changes: Any) -> ModelSource:
    """A case whose files have this head too."""
    source = write_model(folder, case, **changes)
    save_file(hf_tensors(case) | {HEAD: head}, folder / "model.safetensors")
    return source


def untied(folder: Path, case: str, head: np.ndarray) -> ModelSource:
    """The same model in words that cannot be misread: its config.json ties nothing."""
    return write(folder, case, head, tie_word_embeddings=False)


@pytest.mark.parametrize("case", TIED)
def test_a_head_that_differs_from_the_embedding_is_loaded(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    expected = untied(tmp_path / "untied", case, other_head(case))
    with caplog.at_level(logging.WARNING):
        source = write(tmp_path / "model", case, other_head(case))
        config = read_architecture(source)
        again = read_architecture(source)
    assert config == again == read_architecture(expected) and not config.tied
    said = [each.getMessage() for each in caplog.records if "lm_head" in each.getMessage()]
    assert len(said) == 1  # once, however often the folder is read
    assert "lm_head.weight differs from model.embed_tokens.weight" in said[0] and "tie_word_embeddings" in said[0]
    params = load_params(source, config, rules_on("auto", 1))
    np.testing.assert_array_equal(params["head"], other_head(case))
    np.testing.assert_array_equal(params["embed"], hf_tensors(case)[EMBED])


def test_logits_are_those_of_the_files_head(tmp_path: Path):
    case, tokens = "qwen2_tied", tokens_of("qwen2_tied")
    found = logits_of(write(tmp_path / "model", case, other_head(case)), tokens)
    assert error_of_scale(found, logits_of(untied(tmp_path / "untied", case, other_head(case)), tokens)) == 0
    assert error_of_scale(found, logits_of(write_model(tmp_path / "tied", case), tokens)) > 0.5


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_head_equal_to_the_embedding_is_tied(dtype: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    case = "qwen3_tied"
    tensors = {name: value.astype(dtype) for name, value in hf_tensors(case).items()}
    source = write_model(tmp_path, case)
    save_file(tensors | {HEAD: tensors[EMBED].copy()}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        config = read_architecture(source)
    assert config.tied and caplog.text == ""
    assert "head" not in load_params(source, config, rules_on("auto", 1))


@pytest.mark.parametrize("row", [0, 37, 63])
def test_one_number_is_a_difference_wherever_it_is(row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder_module, "COMPARED_BYTES", 5 * 32 * 4)  # of five rows
    head = hf_tensors("llama_tied")[EMBED].copy()
    head[row, 31] = np.nextafter(head[row, 31], 1)
    assert not read_architecture(write(tmp_path, "llama_tied", head)).tied


def test_number_formats_are_compared_by_their_numbers(tmp_path: Path):
    """PEFT saves a trained head in float32, beside a model in bfloat16."""
    case = "llama_tied"
    narrow = {name: value.astype(ml_dtypes.bfloat16) for name, value in hf_tensors(case).items()}
    for name, head in (("equal", narrow[EMBED].astype(np.float32)), ("trained", other_head(case))):
        source = write_model(tmp_path / name, case)
        save_file(narrow | {HEAD: head}, tmp_path / name / "model.safetensors")
        assert read_architecture(source).tied == (name == "equal")


def test_head_and_embedding_in_different_shards(tmp_path: Path):
    case = "llama_tied"
    source = write(tmp_path, case, other_head(case))
    shard(tmp_path, load_file(tmp_path / "model.safetensors"))
    config = read_architecture(source)
    assert not config.tied
    np.testing.assert_array_equal(load_params(source, config, rules_on("auto", 1))["head"], other_head(case))


def shard(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write the tensors as three files with an index; the embedding is in the first, the head in the last."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    files: dict[str, dict[str, np.ndarray]] = {f"model-{number}.safetensors": {} for number in (1, 2, 3)}
    for name, value in tensors.items():
        number = 1 if name == EMBED else 3 if name == HEAD else 2
        files[f"model-{number}.safetensors"][name] = value
    for file, part in files.items():
        save_file(part, folder / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_model_with_a_vision_tower_has_its_own_head_too(tmp_path: Path):
    case = "gemma3_tied"
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": hf_config(case)}))
    tensors = {name.replace("model.", "model.language_model."): value for name, value in hf_tensors(case).items()}
    save_file(tensors | {HEAD: other_head(case)}, tmp_path / "model/model.safetensors")
    assert not read_architecture(resolve(str(tmp_path / "model"))).tied


def test_a_plan_of_the_folder_sees_the_head(tmp_path: Path):
    """The planner, a teacher and a rollout find the architecture by the model's name."""
    write(tmp_path, "llama_tied", other_head("llama_tied"))
    decoder = find_architecture(str(tmp_path))
    assert not decoder.tied
    adapted = with_lora(decoder, LoraConfig(rank=2))
    assert frozen_specs(adapted)["head"].shape == (64, 32)


def test_where_only_the_config_is_there_it_is_believed(tmp_path: Path):
    source = write_model(tmp_path, "llama_tied")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    assert read_architecture(source).tied
    shard(tmp_path, tensors | {HEAD: other_head("llama_tied")})
    (tmp_path / "model-3.safetensors").unlink()  # half a download
    assert read_architecture(source).tied
    with pytest.raises(ModelError, match=r"lists model-3\.safetensors, which the folder does not have"):
        load_params(source, read_architecture(source), rules_on("auto", 1))


def test_a_decoder_that_ties_what_the_files_have_apart_is_refused(tmp_path: Path):
    tied = read_architecture(write_model(tmp_path / "tied", "llama_tied"))
    source = write(tmp_path / "own", "llama_tied", other_head("llama_tied"))
    with pytest.raises(ModelError, match=r"head differs from its embedding, and the decoder was read from another"):
        load_params(source, tied, rules_on("auto", 1))


def test_an_export_has_the_head_and_a_config_that_says_so(tmp_path: Path):
    case = "qwen3_tied"
    source = write(tmp_path / "model", case, other_head(case))
    config = read_architecture(source)
    params = load_params(source, config, rules_on("auto", 1))
    save_model(params, config, None, tmp_path / "export", dtype="float32")
    assert json.loads((tmp_path / "export/config.json").read_text())["tie_word_embeddings"] is False
    np.testing.assert_array_equal(load_file(tmp_path / "export/model.safetensors")[HEAD], other_head(case))
    assert read_architecture(resolve(str(tmp_path / "export"))) == config


def test_a_critic_leaves_the_head_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    source = write(tmp_path, "llama_tied", other_head("llama_tied"))
    with caplog.at_level(logging.WARNING):
        params = load_params(source, read_architecture(source, "scores"), rules_on("auto", 1))
    assert "head" not in params
    assert "lm_head.weight is left out: the head of scores takes its place" in caplog.text


@pytest.mark.parametrize("case", ["llama_tied", "gemma3_tied"])
def test_a_tied_embedding_under_the_head_s_name_is_read(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """What writes each shared tensor once may keep the head's name."""
    expected = logits_of(write_model(tmp_path / "both", case), tokens_of(case))
    source = write_model(tmp_path / "head", case)
    tensors = hf_tensors(case)
    save_file(
        {HEAD if name == EMBED else name: each for name, each in tensors.items()}, source.path / "model.safetensors"
    )
    with caplog.at_level(logging.WARNING):
        assert read_architecture(source).tied
        np.testing.assert_array_equal(logits_of(source, tokens_of(case)), expected)
        scorer = load_params(source, read_architecture(source, "scores"), rules_on("auto", 1))
    np.testing.assert_array_equal(scorer["embed"], tensors[EMBED])
    assert "left out" not in caplog.text


def test_an_untied_embedding_is_not_taken_from_the_head(tmp_path: Path):
    source = write_model(tmp_path, "llama")
    tensors = hf_tensors("llama")
    del tensors[EMBED]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor model\.embed_tokens\.weight is missing"):
        load_params(source, read_architecture(source), rules_on("auto", 1))


def test_a_missing_head_names_the_key_that_ties_it(tmp_path: Path):
    source = write_model(tmp_path, "llama_tied", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing .* set tie_word_embeddings to true"):
        load_params(source, read_architecture(source), rules_on("auto", 1))


def test_two_tensors_of_one_name_are_refused(tmp_path: Path):
    case = "llama_tied"
    source = write_model(tmp_path, case)
    shard(tmp_path, hf_tensors(case) | {HEAD: other_head(case)})
    save_file({HEAD: other_head(case), "model.norm.weight": np.ones(32, np.float32)}, tmp_path / "model-3.safetensors")
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight in .*model-3.*: the name is used twice"):
        load_params(source, read_architecture(source), rules_on("auto", 1))


def test_both_of_a_whole_file_and_shards_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    source = write_model(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with caplog.at_level(logging.WARNING):
        load_params(source, read_architecture(source), rules_on("auto", 1))
    assert "has both model.safetensors and model.safetensors.index.json; only the first is read" in caplog.text


@pytest.mark.parametrize("name", ["vision_tower.a.weight", "model.visual.b", "mtp.norm.weight"])
def test_a_tower_beside_a_model_that_has_none_is_refused(name: str, tmp_path: Path):
    source = write_model(tmp_path, "llama")
    save_file(hf_tensors("llama") | {name: np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor {name} in .* is unexpected.*a llama does not have this weight"):
        load_params(source, read_architecture(source), rules_on("auto", 1))


def frequencies(theta: float, size: int) -> np.ndarray:
    return np.array([theta ** -(2 * i / size) for i in range(size // 2)], np.float32)


ROTATION = "model.layers.0.self_attn.rotary_emb.inv_freq"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_rotary_frequencies_of_old_files_are_compared(dtype: Any, tmp_path: Path):
    source = write_model(tmp_path, "llama")  # a theta of 500, heads of 8
    for theta, right in ((500.0, True), (10000.0, False)):
        tensors = hf_tensors("llama") | {ROTATION: frequencies(theta, 8).astype(dtype)}
        save_file(tensors, tmp_path / "model.safetensors")
        if right:
            load_params(source, read_architecture(source), rules_on("auto", 1))
        else:
            with pytest.raises(ModelError, match=rf"tensor {ROTATION} in .*: its rotary frequencies are not those of"):
                load_params(source, read_architecture(source), rules_on("auto", 1))


def test_an_adapter_s_folder_is_no_model(tmp_path: Path):
    write_model(tmp_path, "llama")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has adapter_config\.json, so it is an adapter; set model to its base"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has adapter_config\.json, so it is an adapter; set model to its base"):
        resolve(str(tmp_path))


@pytest.mark.parity
@pytest.mark.parametrize("case", ["llama_tied", "gemma3_tied"])
def test_transformers_reads_a_tied_embedding_under_the_head_s_name(case: str, tmp_path: Path):
    source = write_model(tmp_path, case)
    tensors = {HEAD if name == EMBED else name: each for name, each in hf_tensors(case).items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = torch_logits(tmp_path, tokens_of(case))
    assert error_of_scale(logits_of(source, tokens_of(case)), expected) <= LOGITS_TOLERANCE


@pytest.mark.parity
@pytest.mark.parametrize("case", TIED)
@pytest.mark.parametrize("equal", [False, True])
def test_transformers_keeps_both_or_ties_them_alike(case: str, equal: bool, tmp_path: Path):
    head = hf_tensors(case)[EMBED].copy() if equal else other_head(case)
    source = write(tmp_path / "model", case, head)
    expected = torch_logits(source.path, tokens_of(case))
    assert error_of_scale(logits_of(source, tokens_of(case)), expected) <= LOGITS_TOLERANCE
    config = read_architecture(source)
    save_model(load_params(source, config, rules_on("auto", 1)), config, None, tmp_path / "out", dtype="float32")
    assert error_of_scale(torch_logits(tmp_path / "out", tokens_of(case)), expected) <= 1e-6


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_head_or_embedding_that_peft_trained_and_merged(module: str, tmp_path: Path):
    peft, torch = others_code("peft"), others_code("torch")
    import transformers

    case, tokens = "qwen2_tied", tokens_of("qwen2_tied")
    base = write_model(tmp_path / "base", case)
    model = transformers.AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32)
    described = peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=[module], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, described).eval()
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "modules_to_save" in name:
                value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
        theirs = adapted(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    reread = torch_logits(tmp_path / "merged", tokens)
    found = logits_of(resolve(str(tmp_path / "merged")), tokens)
    assert error_of_scale(found, reread) <= LOGITS_TOLERANCE
    if module == "lm_head":
        assert error_of_scale(found, theirs) <= LOGITS_TOLERANCE
