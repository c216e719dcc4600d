"""Adapters in both directions with PEFT itself, which is no dependency of ours: `make parity` installs it."""

import dataclasses

import jax
import numpy as np
import pytest
from others_code import others_code
from tiny_models import LOGITS_TOLERANCE, error_of_scale, make_logits, rules_on, tokens_of, write_model

from podium.config.lora import EXPERTS, MATRICES, TARGETS
from podium.models.architecture import Lora
from podium.models.files.hf import load_params
from podium.models.files.peft import load_adapter, save_adapter
from podium.models.files.source import read_architecture
from podium.models.params import trained_specs

pytestmark = [
    pytest.mark.long,
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # PEFT 0.21 in transformers 5.23
]
CASES = ["llama", "qwen2_tied", "qwen3"]
LORA = Lora(rank=4, alpha=6.0, targets=MATRICES)


@pytest.fixture(params=CASES)
def model(request, tmp_path):
    """A tiny model on disk with its decoder, with adapters, and its weights."""
    source = write_model(tmp_path / "model", request.param)
    decoder = read_architecture(source)
    base = load_params(source, decoder, rules_on("auto", 1))
    return source, dataclasses.replace(decoder, lora=LORA), base


def random_adapters(decoder):
    random = np.random.default_rng(5)
    specs = trained_specs(decoder).items()
    return {name: jax.device_put(random.normal(0, 0.2, spec.shape).astype(np.float32)) for name, spec in specs}


def hf_model(source):
    torch = others_code("torch")
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)


def logits_of_torch(model, tokens):
    torch = others_code("torch")
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def test_peft_loads_our_export_and_its_logits_are_ours(model, tmp_path):
    peft = others_code("peft")
    source, decoder, base = model
    adapters, tokens = random_adapters(decoder), tokens_of(source.name)
    save_adapter(adapters, base, decoder, tmp_path / "adapter", model=str(source.path))
    theirs = logits_of_torch(peft.PeftModel.from_pretrained(hf_model(source), tmp_path / "adapter"), tokens)
    ours = np.asarray(make_logits(decoder, rules_on("auto", 1))(base | adapters, tokens))
    assert error_of_scale(ours, theirs) < LOGITS_TOLERANCE
    plain = logits_of_torch(hf_model(source), tokens)
    assert error_of_scale(plain, theirs) > 100 * LOGITS_TOLERANCE


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # its own, when it joins them
def test_peft_loads_our_adapters_of_experts_and_its_logits_are_ours(tmp_path):
    """PEFT joins those of single experts, of gate and of up, as transformers 5 joins their matrices."""
    peft = others_code("peft")
    source = write_model(tmp_path / "model", "qwen3_moe")
    plain = read_architecture(source)
    decoder = dataclasses.replace(plain, lora=Lora(rank=4, alpha=6.0, targets=(*TARGETS["attention"], *EXPERTS)))
    base = load_params(source, plain, rules_on("auto", 1))
    adapters, tokens = random_adapters(decoder), tokens_of(source.name)
    save_adapter(adapters, base, decoder, tmp_path / "adapter", model=str(source.path))
    theirs = logits_of_torch(peft.PeftModel.from_pretrained(hf_model(source), tmp_path / "adapter"), tokens)
    ours = np.asarray(make_logits(decoder, rules_on("auto", 1))(base | adapters, tokens))
    assert error_of_scale(ours, theirs) < LOGITS_TOLERANCE
    attention = {name: x * (0 if "expert" in name else 1) for name, x in adapters.items()}
    without = np.asarray(make_logits(decoder, rules_on("auto", 1))(base | attention, tokens))
    assert error_of_scale(without, theirs) > 100 * LOGITS_TOLERANCE


def test_peft_loads_our_adapters_of_delta_nets_and_gated_attention(tmp_path):
    """One tensor has the queries, keys and values of a delta net, another the queries and gates of attention."""
    peft = others_code("peft")
    source = write_model(tmp_path / "model", "qwen3_5")
    plain = read_architecture(source)
    decoder = dataclasses.replace(plain, lora=LORA)
    base = load_params(source, plain, rules_on("auto", 1))
    adapters, tokens = random_adapters(decoder), tokens_of(source.name)
    save_adapter(adapters, base, decoder, tmp_path / "adapter", model=str(source.path))
    adapted = peft.PeftModel.from_pretrained(hf_model(source), tmp_path / "adapter")
    theirs = logits_of_torch(adapted, tokens)
    ours = np.asarray(make_logits(decoder, rules_on("auto", 1))(base | adapters, tokens))
    assert error_of_scale(ours, theirs) < LOGITS_TOLERANCE
    assert error_of_scale(logits_of_torch(hf_model(source), tokens), theirs) > 100 * LOGITS_TOLERANCE
    adapted.save_pretrained(tmp_path / "again")
    found = load_adapter(tmp_path / "again", decoder, rules_on("auto", 1), base)
    for name, value in adapters.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_we_load_what_peft_saves_of_delta_nets_and_our_logits_are_its(tmp_path):
    peft = others_code("peft")
    source = write_model(tmp_path / "model", "qwen3_5")
    plain = read_architecture(source)
    decoder = dataclasses.replace(plain, lora=dataclasses.replace(LORA, targets=("q", "k", "v", "o")))
    base = load_params(source, plain, rules_on("auto", 1))
    targets = ["in_proj_qkv", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
    described = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(hf_model(source), described).eval()
    torch = others_code("torch")
    with torch.no_grad():  # Podium's gates have no adapter
        for name, x in adapted.named_parameters():
            if "q_proj.lora_B" in name:
                x.view(-1, 2, plain.head_dim, 4)[:, 1] = 0
    adapted.save_pretrained(tmp_path / "adapter")
    found = load_adapter(tmp_path / "adapter", decoder, rules_on("auto", 1), base)
    tokens = tokens_of(source.name)
    ours = np.asarray(make_logits(decoder, rules_on("auto", 1))(base | found, tokens))
    assert error_of_scale(ours, logits_of_torch(adapted, tokens)) < LOGITS_TOLERANCE


def test_we_load_what_peft_saves_and_our_logits_are_its(model, tmp_path):
    peft = others_code("peft")
    source, decoder, base = model
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    described = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, lora_dropout=0.05, init_lora_weights=False)
    adapted = peft.get_peft_model(hf_model(source), described).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = tokens_of(source.name)
    found = load_adapter(tmp_path / "adapter", decoder, rules_on("auto", 1), base)
    ours = np.asarray(make_logits(decoder, rules_on("auto", 1))(base | found, tokens))
    assert error_of_scale(ours, logits_of_torch(adapted, tokens)) < LOGITS_TOLERANCE


def test_peft_s_own_refusals_are_not_ours_alone(model, tmp_path):
    """An option that changes what an adapter computes is refused as PEFT writes it."""
    peft = others_code("peft")
    source, decoder, base = model
    described = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], use_rslora=True)
    peft.get_peft_model(hf_model(source), described).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"use_rslora True is not supported"):
        load_adapter(tmp_path / "adapter", decoder, rules_on("auto", 1), base)
