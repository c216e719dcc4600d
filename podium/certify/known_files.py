"""Checks how weights are read from files, and written to them: a made-up model of each form, in shards and in GGUF.

The names and shapes of tensors are those that transformers and PEFT write, and here they are read anew.
"""

import dataclasses
import importlib.util
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from podium.certify.check_result import Check
from podium.certify.known_models import IN_GGUF
from podium.certify.subject import one_device
from podium.models.architecture import DecoderConfig, Lora
from podium.models.files.hf import load_params, save_model
from podium.models.files.hf_config import from_hf_config
from podium.models.files.peft import load_adapter, save_adapter
from podium.models.files.source import read_architecture, resolve
from podium.models.params import TRAIN_AXES
from podium.sharding import Params, ShardingRules

Arrays = Mapping[str, np.ndarray]
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 3, 64, 4, 2, 32, 96  # those of IN_GGUF
VOCAB, EXPERTS, RANK = 40, 4, 2
SIZES: Mapping[str, object] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": HIDDEN,
    "vocab_size": VOCAB,
}


class Form(NamedTuple):
    """What a made-up model's files hold, beside the tensors that all of them have."""

    tied: bool = False
    biased: bool = False
    normed: bool = False
    routed: bool = False


FORMS: Mapping[str, Form] = {
    "llama": Form(),
    "qwen2": Form(tied=True, biased=True),
    "qwen3": Form(normed=True),
    "qwen3_moe": Form(normed=True, routed=True),
}
"""By `model_type`."""
OF_EXPERTS = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN, "norm_topk_prob": True}
MATRICES: Mapping[str, tuple[str, tuple[int, int], Callable[[np.ndarray], np.ndarray]]] = {
    "q": ("self_attn.q_proj", (HEADS * HEAD_DIM, WIDTH), lambda x: x.T.reshape(WIDTH, HEADS, HEAD_DIM)),
    "k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, WIDTH), lambda x: x.T.reshape(WIDTH, KV_HEADS, HEAD_DIM)),
    "v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, WIDTH), lambda x: x.T.reshape(WIDTH, KV_HEADS, HEAD_DIM)),
    "o": ("self_attn.o_proj", (WIDTH, HEADS * HEAD_DIM), lambda x: x.T.reshape(HEADS, HEAD_DIM, WIDTH)),
    "gate": ("mlp.gate_proj", (HIDDEN, WIDTH), np.transpose),
    "up": ("mlp.up_proj", (HIDDEN, WIDTH), np.transpose),
    "down": ("mlp.down_proj", (WIDTH, HIDDEN), np.transpose),
}
"""Of a layer: the name in files, the shape there, and how it is turned into ours."""
GGUF_NAMES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
GGUF_NAMES |= {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}


class _Files(NamedTuple):
    """Tensors as files hold them, and as we hold them."""

    stored: dict[str, np.ndarray]
    ours: dict[str, np.ndarray]


def _made_up(form: Form) -> _Files:
    """Random weights; those of layers are stacked in ours."""
    random = np.random.default_rng(0)
    stored: dict[str, np.ndarray] = {}

    def new(name: str, *shape: int) -> np.ndarray:
        stored[name] = random.standard_normal(shape).astype(np.float32)
        return stored[name]

    ours = {"embed": new("model.embed_tokens.weight", VOCAB, WIDTH), "final_norm": new("model.norm.weight", WIDTH)}
    if not form.tied:
        ours["head"] = new("lm_head.weight", VOCAB, WIDTH)
    rows: dict[str, list[np.ndarray]] = {}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found = {
            "attention_norm": new(f"{at}.input_layernorm.weight", WIDTH),
            "mlp_norm": new(f"{at}.post_attention_layernorm.weight", WIDTH),
        }
        for name, (tensor, shape, turned) in MATRICES.items():
            if form.routed and tensor.startswith("mlp."):
                parts = [
                    turned(new(f"{at}.mlp.experts.{n}.{tensor.removeprefix('mlp.')}.weight", *shape))
                    for n in range(EXPERTS)
                ]
                found[f"expert_{name}"] = np.stack(parts)
            else:
                found[name] = turned(new(f"{at}.{tensor}.weight", *shape))
        if form.routed:
            found["router"] = new(f"{at}.mlp.gate.weight", EXPERTS, WIDTH).T
        for name, heads in {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}.items() if form.biased else ():
            found[f"{name}_bias"] = new(f"{at}.self_attn.{name}_proj.bias", heads * HEAD_DIM).reshape(heads, HEAD_DIM)
        for name in ("q", "k") if form.normed else ():
            found[f"{name}_norm"] = new(f"{at}.self_attn.{name}_norm.weight", HEAD_DIM)
        for name, value in found.items():
            rows.setdefault(f"layers.{name}", []).append(value)
    return _Files(stored, ours | {name: np.stack(values) for name, values in rows.items()})


def files_check() -> Check:
    """Count the made-up models that are read or written wrongly."""
    with tempfile.TemporaryDirectory(prefix="podium-certify-") as folder:
        wrong = [name for name, form in FORMS.items() if _is_misread(Path(folder) / name, name, form)]
        adapted = _is_adapter_misread(Path(folder) / "adapter")
        gguf = importlib.util.find_spec("gguf") is not None and _is_gguf_misread(Path(folder) / "made-up.gguf")
    return Check(
        name="files of weights",
        claim="weights are those of the tensors in files, in shards, adapters and GGUF, and are written as these",
        difference=float(len(wrong) + adapted + gguf),
        bar=0,
        after=("architectures",),
    )


def _is_misread(folder: Path, model_type: str, form: Form) -> bool:
    """Whether a model in two shards is not read as it is, or not written as it was."""
    made = _made_up(form)
    folder.mkdir()
    described = {
        "model_type": model_type,
        "tie_word_embeddings": form.tied,
        **SIZES,
        **(OF_EXPERTS if form.routed else {}),
    }
    (folder / "config.json").write_text(json.dumps(described))
    names = sorted(made.stored)
    shards = {f"model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    for file, own in shards.items():
        save_file({name: made.stored[name] for name in own}, folder / file)
    placed = {name: file for file, own in shards.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    decoder, found = _loaded(folder)
    save_model(found, decoder, None, folder / "written", dtype="float32", max_shard_bytes=10_000)
    again = [load_file(file) for file in (folder / "written").glob("*.safetensors")]
    written = {name: value for each in again for name, value in each.items()}
    return len(again) < 2 or _differ(found, made.ours) or _differ(written, made.stored)


def _loaded(path: Path) -> tuple[DecoderConfig, Params]:
    source = resolve(str(path))
    decoder = read_architecture(source)
    return decoder, load_params(source, decoder, ShardingRules(one_device(), TRAIN_AXES))


def _differ(found: Mapping[str, np.ndarray | jax.Array], expected: Arrays) -> bool:
    """Whether two sets of arrays have other names or other numbers."""
    return found.keys() != expected.keys() or not all(
        np.array_equal(np.asarray(found[name]), x) for name, x in expected.items()
    )


def _is_adapter_misread(folder: Path) -> bool:
    """Whether adapters of all matrices are not read as they are in PEFT's files, or not written as they were."""
    lora = Lora(rank=RANK, alpha=3.0, targets=tuple(MATRICES))
    decoder = dataclasses.replace(from_hf_config({"model_type": "llama", **SIZES}, "made up"), lora=lora)
    random = np.random.default_rng(1)
    stored: dict[str, np.ndarray] = {}
    rows: dict[str, list[np.ndarray]] = {}
    for layer, (name, (tensor, (out, into), turned)) in itertools.product(range(LAYERS), MATRICES.items()):
        first, second = (random.standard_normal(shape).astype(np.float32) for shape in ((RANK, into), (out, RANK)))
        at = f"base_model.model.model.layers.{layer}.{tensor}"
        stored |= {f"{at}.lora_A.weight": first, f"{at}.lora_B.weight": second}
        shape = turned(np.zeros((out, into))).shape  # of the matrix; both factors have all of its other dimensions
        inputs = 2 if name == "o" else 1
        rows.setdefault(f"layers.{name}.lora_a", []).append(first.T.reshape(*shape[:inputs], RANK))
        rows.setdefault(f"layers.{name}.lora_b", []).append(second.T.reshape(RANK, *shape[inputs:]))
    ours = {name: np.stack(values) for name, values in rows.items()}
    folder.mkdir()
    names = [tensor.rpartition(".")[2] for tensor, _, _ in MATRICES.values()]
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": lora.alpha, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    save_file(stored, folder / "adapter_model.safetensors")
    found = load_adapter(folder, decoder, ShardingRules(one_device(), TRAIN_AXES), {})
    save_adapter(found, {}, decoder, folder / "written", model="made up")
    written = load_file(folder / "written" / "adapter_model.safetensors")
    return _differ(found, ours) or _differ(written, stored)


def _is_gguf_misread(path: Path) -> bool:
    """Whether a GGUF file is not read as it is; llama.cpp stores the rotated pairs of llama's heads side by side."""
    import gguf

    made = _made_up(FORMS["llama"])
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in IN_GGUF.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{name}", value)  # pyright: ignore[reportArgumentType]  # a whole number where it is no float
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inner = {tensor: GGUF_NAMES[name] for name, (tensor, _, _) in MATRICES.items()}
    inner |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, value in made.stored.items():
        stem = name.removesuffix(".weight")
        if stem in outer:
            writer.add_tensor(f"{outer[stem]}.weight", value)
            continue
        _, _, layer, tensor = stem.split(".", 3)
        if inner[tensor] in ("attn_q", "attn_k"):  # of each head, first the even numbers of pairs, then the odd ones
            value = value.reshape(-1, 2, HEAD_DIM // 2, WIDTH).swapaxes(1, 2).reshape(value.shape)
        writer.add_tensor(f"blk.{layer}.{inner[tensor]}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _differ(_loaded(path)[1], made.ours)
