"""Frozen matrices as codes and scales: int8 by output, NF4 by block. Expectations are loops over single numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from others_code import others_code
from tiny_decoder import tiny
from tiny_models import error_of_scale, make_logits, rules_on

from podium.config.lora import MATRICES
from podium.models.adapters import merged
from podium.models.architecture import Lora, ModelError
from podium.models.attention.packed_attention import causal_attention
from podium.models.blocks.spec import matrix_outputs
from podium.models.decoder import PassSettings, forward
from podium.models.files.hf import load_params
from podium.models.files.source import read_architecture, resolve
from podium.models.params import LAYERS, frozen_dtype, is_adapter, param_specs
from podium.models.quantised import NF4_LEVELS, dequantised, make_quantise
from podium.models.quantised import nf4 as quantised_nf4

LORA = Lora(rank=4, alpha=6.0, targets=MATRICES)
PLAIN = tiny(width=128, heads=4, kv_heads=2, head_dim=64, mlp_width=256, tied=False)
TOKENS = np.random.default_rng(3).integers(0, PLAIN.vocab, (2, 24)).astype(np.int32)


def stored_in(base):
    return dataclasses.replace(PLAIN, lora=dataclasses.replace(LORA, base=base))


def random_matrix(name):
    spec = param_specs(PLAIN)[LAYERS + name]
    return np.random.default_rng(len(name)).standard_normal(spec.shape).astype(np.float32), spec


def whole(name, kept):
    """The values of a stack of matrices, layer by layer as the decoder takes them."""
    codes, scale = kept[LAYERS + name], kept[f"{LAYERS}{name}.scale"]
    layers = [dequantised({"w": w, "w.scale": s}, jnp.float32)["w"] for w, s in zip(codes, scale, strict=True)]
    return np.stack([np.asarray(layer) for layer in layers])


@pytest.mark.parametrize("name", MATRICES)
def test_int8_is_within_half_a_step_of_the_weights_and_exact_for_those_on_its_grid(name):
    value, spec = random_matrix(name)
    quantise = make_quantise(LAYERS + name, stored_in("int8"), rules_on("auto", 1))
    kept = quantise(value)
    w, scale = kept[LAYERS + name], np.asarray(kept[f"layers.{name}.scale"])
    assert w.dtype == jnp.int8
    assert scale.shape == spec.shape[:1] + spec.shape[matrix_outputs(spec) :]
    back = whole(name, kept)
    steps = scale.reshape(len(w), *[1] * (matrix_outputs(spec) - 1), *scale.shape[1:])
    assert np.all(np.abs(back - value) <= 0.5 * steps * (1 + 1e-5))
    assert np.abs(back - value).max() > 0.4 * scale.min()
    np.testing.assert_array_equal(quantise(jnp.asarray(back))[LAYERS + name], w)


@pytest.mark.parametrize("name", MATRICES)
def test_nf4_is_the_nearest_level_of_each_block_of_64_inputs(name):
    value, spec = random_matrix(name)
    value[1, ..., 3] = 0.0  # a block without a largest number
    kept = make_quantise(LAYERS + name, stored_in("nf4"), rules_on("auto", 1))(value)
    assert (kept[LAYERS + name].dtype, kept[LAYERS + name].size) == (jnp.uint8, value.size // 2)
    assert kept[f"layers.{name}.scale"].size == value.size // 64
    back = whole(name, kept)
    dim = matrix_outputs(spec) - 1
    rows, found = (np.moveaxis(x, dim, -1).reshape(-1, 64) for x in (value, back))
    for block, given in zip(rows, found, strict=True):
        largest = np.abs(block).max()
        distance = np.abs(block[:, None] - largest * np.array(NF4_LEVELS, np.float32))
        np.testing.assert_allclose(np.abs(given - block), distance.min(axis=1), atol=1e-6)
    np.testing.assert_array_equal(
        make_quantise(LAYERS + name, stored_in("nf4"), rules_on("auto", 1))(back)[LAYERS + name], kept[LAYERS + name]
    )


def parameters(base, rules):
    """Random weights with the layers' matrices as codes, adapters included; and the same with the values of the codes,
    by a loop over blocks."""
    random, config = np.random.default_rng(0), stored_in(base)
    plain = {
        name: (spec.mean + 0.1 * random.standard_normal(spec.shape)).astype(np.float32)
        for name, spec in param_specs(dataclasses.replace(config, lora=LORA)).items()
    }
    codes = {}
    for name in plain:
        if frozen_dtype(name, config) in ("int8", "uint8") and not is_adapter(name):
            codes |= make_quantise(name, config, rules)(plain[name])
            plain[name] = whole(name.removeprefix(LAYERS), codes)
    return plain | codes, plain


def adapters_gradient(config, params, *, remat, groups):
    """The gradient of adapters: of a weighted sum of the hidden states of whole rows."""
    rules = rules_on("dp:1", 1)
    length = TOKENS.shape[1]
    mask = jnp.tri(length, dtype=bool)[None]
    weights = np.random.default_rng(5).standard_normal((*TOKENS.shape, PLAIN.width)).astype(np.float32)

    def total(adapters):
        hidden, _, _ = forward(
            {name: jnp.asarray(value) for name, value in params.items()} | adapters,
            jnp.asarray(TOKENS),
            jnp.broadcast_to(jnp.arange(length)[None], TOKENS.shape),
            lambda carried, at, q, k, v: (carried, causal_attention(q, k, v, mask, at.sinks)),
            settings=PassSettings(config=config, rules=rules, dtype=jnp.dtype("float32"), remat=remat, groups=groups),
        )
        return (hidden * weights).sum()

    return jax.jit(jax.grad(total))({name: jnp.asarray(value) for name, value in params.items() if is_adapter(name)})


@pytest.mark.parametrize(("base", "remat", "groups"), [("int8", "none", 1), ("int8", "layer", 2), ("nf4", "layer", 2)])
def test_codes_give_adapters_the_gradients_of_their_values(base, remat, groups):
    stored, plain = parameters(base, rules_on("dp:1", 1))
    found = adapters_gradient(stored_in(base), stored, remat=remat, groups=groups)
    expected = adapters_gradient(dataclasses.replace(PLAIN, lora=LORA), plain, remat="none", groups=1)
    assert len(expected) == 2 * len(MATRICES)
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, atol=2e-5 * np.abs(gradient).max(), err_msg=name)


@pytest.mark.parametrize(
    ("base", "mesh"),
    [
        ("int8", "dp:1"),
        ("nf4", "dp:1"),
        ("nf4", "fsdp:2,tp:2"),
        pytest.param("int8", "fsdp:2,tp:2", marks=pytest.mark.long),  # int8 has no blocks that a device could cut
    ],
)
def test_codes_apart_and_merged_give_the_logits_of_their_values(base, mesh):
    devices = 4 if "tp" in mesh else 1
    rules = rules_on(mesh, devices)
    stored, plain = parameters(base, rules)
    expected = np.asarray(make_logits(dataclasses.replace(PLAIN, lora=LORA), rules_on("dp:1", 1))(plain, TOKENS))
    found = np.asarray(make_logits(stored_in(base), rules)(stored, TOKENS))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    here = {name.removeprefix(LAYERS): np.asarray(value) for name, value in stored.items() if name.startswith(LAYERS)}
    layers = [{name: jnp.asarray(value[i]) for name, value in here.items()} for i in range(2)]
    sums = [merged(layer, LORA.scale) for layer in layers]
    folded = {name: value for name, value in plain.items() if not name.startswith(LAYERS)}
    folded |= {LAYERS + name: jnp.stack([layer[name] for layer in sums]) for name in sums[0]}
    np.testing.assert_allclose(
        make_logits(PLAIN, rules_on("dp:1", 1))(folded, TOKENS), expected, atol=1e-5 * np.abs(expected).max()
    )


def test_inputs_that_are_no_multiple_of_a_block_are_refused():
    with pytest.raises(ModelError, match=r"^o: nf4 stores blocks of 64 .* this model has 8 there; set base to int8"):
        param_specs(tiny(width=64, mlp_width=64, lora=dataclasses.replace(LORA, base="nf4")))


@pytest.mark.parity
def test_nf4_has_the_codes_and_values_of_bitsandbytes():
    torch, library = others_code("torch"), others_code("bitsandbytes")
    value, spec = random_matrix("gate")  # [L, D, W]; torch's are [W, D], with blocks along D
    codes, scale = (np.asarray(x) for x in quantised_nf4(jnp.asarray(value), spec))
    back = whole("gate", {LAYERS + "gate": jnp.asarray(codes), "layers.gate.scale": jnp.asarray(scale)})
    for layer in range(len(value)):
        theirs = torch.tensor(np.ascontiguousarray(value[layer].T))
        packed, state = library.functional.quantize_4bit(theirs, blocksize=64, quant_type="nf4")
        np.testing.assert_array_equal(state.absmax.numpy().reshape(scale[layer].T.shape), scale[layer].T)
        pairs = packed.numpy().reshape(-1)
        ordered = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(value[layer].T.shape).T
        blocks = codes[layer].reshape(-1, 32, value.shape[2])
        ours = np.concatenate([blocks >> 4, blocks & 15], axis=1).reshape(value[layer].shape)
        np.testing.assert_array_equal(ours, ordered)
        np.testing.assert_array_equal(
            back[layer].T, library.functional.dequantize_4bit(packed, state, quant_type="nf4").numpy()
        )


@pytest.mark.parity
def test_nf4_has_the_logits_of_transformers_with_the_weights_of_bitsandbytes(tmp_path):
    """transformers' model gets what bitsandbytes makes of its matrices in 4 bits and back; ours reads them in full."""
    torch, library = others_code("torch"), others_code("bitsandbytes")
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 24)).astype(np.int32)
    with torch.no_grad():
        in_full = model(torch.tensor(tokens.astype(np.int64))).logits.numpy()
        for module in (each for each in model.model.layers.modules() if isinstance(each, torch.nn.Linear)):
            packed, state = library.functional.quantize_4bit(module.weight, blocksize=64, quant_type="nf4")
            module.weight.copy_(library.functional.dequantize_4bit(packed, state, quant_type="nf4"))
        expected = model(torch.tensor(tokens.astype(np.int64))).logits.numpy()

    source, rules = resolve(str(tmp_path)), rules_on("auto", 1)
    plain = read_architecture(source)
    stored = dataclasses.replace(plain, lora=dataclasses.replace(LORA, base="nf4"))
    params = {}
    for name, value in load_params(source, plain, rules).items():
        quantised = frozen_dtype(name, stored) == "uint8"
        params |= make_quantise(name, stored, rules)(value) if quantised else {name: value}
    adapters = {name: spec for name, spec in param_specs(stored).items() if is_adapter(name)}
    params |= {name: jnp.zeros(spec.shape) for name, spec in adapters.items()}
    found = np.asarray(make_logits(stored, rules)(params, tokens))
    assert error_of_scale(found, expected) <= 1e-5
    assert error_of_scale(in_full, expected) > 1e-2, "four bits show"
