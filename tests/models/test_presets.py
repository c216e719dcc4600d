import json
import math
from pathlib import Path

import pytest

from podium.models.architecture import ModelError, with_layers
from podium.models.blocks.attention import Attention
from podium.models.files.hf_config import from_hf_config, to_hf_config
from podium.models.params import param_specs
from podium.models.presets import PRESETS, find_architecture, preset_decoder
from podium.settings import load_settings

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("**/*.yaml"))
# As the models' makers count them, a tied head once.
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "Qwen/Qwen3.5-9B": 8_953_803_264,  # without the vision tower and the layers that predict ahead
    "Qwen/Qwen3.5-35B-A3B": 34_660_610_688,
    "openai/gpt-oss-20b": 20_914_757_184,  # 20.91 and 116.83 billion (arXiv:2508.10925)
    "openai/gpt-oss-120b": 116_829_156_672,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "mistralai/Mistral-7B-Instruct-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai/Ministral-8B-Instruct-2410": 8_019_808_256,
    "google/gemma-3-270m-it": 268_098_176,
    "google/gemma-3-1b-it": 999_885_952,
    "google/gemma-3-4b-it": 4_300_079_472 - 419_816_304,  # the vision tower and its projector
    "google/gemma-3-12b-it": 11_766_034_176,
    "google/gemma-3-27b-it": 27_009_346_304,
}
# What the number of parameters does not show, as the makers' config.json says it: the longest context, the bases of
# rotations, the norms' epsilon, windows (None: all earlier tokens).
Published = tuple[int, set[float], float, set[int | None]]
QWEN_2: Published = (32_768, {1e6}, 1e-6, {None})
QWEN_3: Published = (40_960, {1e6}, 1e-6, {None})
LLAMA_3: Published = (131_072, {5e5}, 1e-5, {None})
GEMMA_3: Published = (131_072, {1e4, 1e6}, 1e-6, {1024, None})
GEMMA_3_SMALL: Published = (32_768, {1e4, 1e6}, 1e-6, {512, None})
GPT_OSS: Published = (131_072, {150_000.0}, 1e-5, {128, None})
PUBLISHED = {
    **dict.fromkeys((f"Qwen/Qwen2.5-{size}B-Instruct" for size in ("0.5", "1.5", "3", "7")), QWEN_2),
    **dict.fromkeys((f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "32B", "30B-A3B")), QWEN_3),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (262_144, {1e7}, 1e-6, {None}),
    "Qwen/Qwen3.5-9B": (262_144, {1e7}, 1e-6, {None}),
    "Qwen/Qwen3.5-35B-A3B": (262_144, {1e7}, 1e-6, {None}),
    "openai/gpt-oss-20b": GPT_OSS,
    "openai/gpt-oss-120b": GPT_OSS,
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA_3,
    "meta-llama/Llama-3.2-3B-Instruct": LLAMA_3,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_3,
    "mistralai/Mistral-7B-Instruct-v0.1": (32_768, {1e4}, 1e-5, {4096}),
    "mistralai/Mistral-7B-Instruct-v0.3": (32_768, {1e6}, 1e-5, {None}),
    "mistralai/Mistral-Nemo-Instruct-2407": (131_072, {1e6}, 1e-5, {None}),
    "mistralai/Ministral-8B-Instruct-2410": (32_768, {1e8}, 1e-5, {32_768}),
    "google/gemma-3-270m-it": GEMMA_3_SMALL,
    "google/gemma-3-1b-it": GEMMA_3_SMALL,
    **dict.fromkeys((f"google/gemma-3-{size}b-it" for size in (4, 12, 27)), GEMMA_3),
}
LLAMA_3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_positions": 4096, "truncate": False}
SCALINGS = {
    "meta-llama/Llama-3.2-1B-Instruct": {"factor": 32.0, **LLAMA_3_SCALING},
    "meta-llama/Llama-3.2-3B-Instruct": {"factor": 32.0, **LLAMA_3_SCALING},
    "meta-llama/Llama-3.1-8B-Instruct": {"factor": 8.0, **LLAMA_3_SCALING},
    **{f"google/gemma-3-{size}b-it": {"factor": 8.0} for size in (4, 12, 27)},
    "openai/gpt-oss-20b": YARN,
    "openai/gpt-oss-120b": YARN,
}
"""How models stretch their rotations; the others do not."""


@pytest.mark.parametrize("model", PRESETS)
def test_a_preset_has_as_many_parameters_as_its_makers_say(model):
    specs = param_specs(preset_decoder(model)).values()
    assert sum(math.prod(spec.shape) for spec in specs) == PARAMETERS[model]


@pytest.mark.parametrize("model", PRESETS)
def test_a_preset_has_the_context_and_rotations_of_its_makers_config(model):
    decoder = preset_decoder(model)
    attentions = [block.mixer for block in decoder.blocks if isinstance(block.mixer, Attention)]
    windows = {attention.window for attention in attentions}
    bases = {rope.theta for rope in decoder.ropes}
    assert (decoder.max_positions, bases, decoder.norm_eps, windows) == PUBLISHED[model]
    scalings = [rope.scaling for rope in decoder.ropes if rope.scaling is not None]
    assert len(scalings) == (model in SCALINGS)
    assert all(getattr(each, name) == value for each in scalings for name, value in SCALINGS[model].items())


@pytest.mark.parametrize("model", PRESETS)
def test_a_preset_is_a_config_that_could_have_been_read(model):
    assert from_hf_config(to_hf_config(preset_decoder(model)), model) == preset_decoder(model)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_of_ours_can_be_planned_without_a_network(path):
    model = load_settings([path], [], {}).config.model
    if model != "demo":
        assert model in PRESETS


def test_what_is_on_disk_counts_more_than_a_preset(tmp_path, monkeypatch):
    """A folder may be named as a model is."""
    changed = with_layers(preset_decoder("Qwen/Qwen3-0.6B"), 3)
    folder = tmp_path / "Qwen" / "Qwen3-0.6B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(to_hf_config(changed)))
    monkeypatch.chdir(tmp_path)
    assert find_architecture("Qwen/Qwen3-0.6B") == changed
    monkeypatch.chdir(tmp_path / "Qwen")
    assert find_architecture("Qwen/Qwen3-0.6B") == preset_decoder("Qwen/Qwen3-0.6B")


def test_an_unknown_model_without_a_network_names_the_way_out():
    with pytest.raises(ModelError, match=r"'nobody/nothing': not a local folder.*Qwen/Qwen2.5-3B-Instruct"):
        find_architecture("nobody/nothing")
