"""Reads and writes adapters in the format of PEFT (https://github.com/huggingface/peft), without the library.

adapter_config.json            rank, alpha, targets, and the name of the base model
adapter_model.safetensors      base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight [r, in], lora_B [out, r]
podium.json                    Podium's own file with the fingerprint of the base model's weights; PEFT ignores it
"""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from podium.models.adapters import fingerprint
from podium.models.architecture import DecoderConfig, Lora, ModelError
from podium.models.blocks.spec import ParamSpec
from podium.models.hf import new_folder, write_json
from podium.models.names import layers_of, layout_of
from podium.models.params import LAYERS, LORA_A, own_name, trained_specs
from podium.models.source import read_json
from podium.sharding import Params, ShardingRules, param_shardings

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
OWN = "podium.json"
PREFIX = "base_model.model."
PARTS = {".lora_a": "lora_A", ".lora_b": "lora_B"}
# Keys of a PEFT config that do not change what an adapter computes; all other keys must be empty, false or absent.
ANY = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_alpha", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "r", "revision", "target_modules", "task_type",
}  # fmt: skip
ONLY: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # other values change the base model
}


def save_adapter(params: Params, frozen: Params, config: DecoderConfig, folder: Path, *, model: str) -> None:
    """Export a folder that `PeftModel.from_pretrained(base, folder)` loads, adapters in float32; complete or not at
    all.

    `model` is the config's name of the base model. Raises ModelError if the folder is not empty.
    """
    lora, specs = _lora_of(config), trained_specs(config)
    tensors = {}
    for name, value in params.items():
        stacked = np.asarray(value, np.float32)
        for index in np.ndindex(stacked.shape[: specs[name].stacked]):
            one = stacked[index]
            matrix = one.reshape(-1, lora.rank) if name.endswith(LORA_A) else one.reshape(lora.rank, -1)
            tensors[_tensor(name, index, config)] = np.ascontiguousarray(matrix.T)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [_module(name, config) for name in lora.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    with new_folder(folder) as unfinished:
        write_json(unfinished / CONFIG, described)
        write_json(unfinished / OWN, {"base": fingerprint(frozen), "kept": lora.base})
        save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})
        (unfinished / WEIGHTS).chmod((unfinished / CONFIG).stat().st_mode)


def load_adapter(folder: Path, config: DecoderConfig, rules: ShardingRules, frozen: Params) -> Params:
    """Load the adapters of a PEFT folder in float32, each into its shards.

    Raises ModelError if the folder has no adapter, or if the adapter has numbers or targets other than the config's,
    has unsupported options, or was trained on another base than `frozen`.
    """
    lora = _lora_of(config)
    _check_described(read_json(folder / CONFIG), lora, folder / CONFIG)
    _check_base(folder, lora, frozen)
    specs = trained_specs(config)
    shardings = param_shardings(specs, rules)
    found = _read(folder, specs, config)
    return {
        name: jax.make_array_from_callback(spec.shape, shardings[name], lambda index, name=name: found[name][index])
        for name, spec in specs.items()
    }


def _lora_of(config: DecoderConfig) -> Lora:
    assert config.lora is not None, "only a decoder with adapters has some to read or write"
    return config.lora


def _module(target: str, config: DecoderConfig) -> str:
    """PEFT's name of a matrix: `q_proj`."""
    return layout_of(LAYERS + target, config).hf.split(".")[-2]


def _tensor(name: str, index: tuple[int, ...], config: DecoderConfig) -> str:
    """PEFT's name of a factor of a layer, or of one of a layer's experts. Raises ModelError if PEFT has no name."""
    matrix, part = name.rsplit(".", 1)
    layout = layout_of(matrix, config)
    others = [each for each in layout.joined or layout.lanes if each != own_name(matrix)]
    if others:
        raise ModelError(
            f"{matrix}: PEFT has an adapter for each tensor, and a {config.model_type} stores this matrix in one tensor"
            f" with {', '.join(others)}; export the merged model"
        )
    if layout.whole:
        raise ModelError(
            f"{matrix}: PEFT has no name for the adapters of experts that a {config.model_type} stores in one tensor;"
            " export the merged model, or leave experts out of lora.targets"
        )
    module = layout.hf.format(layers_of(name, config)[index[0]], *index[1:]).removesuffix(".weight")
    return f"{PREFIX}{module}.{PARTS['.' + part]}.weight"


def _check_described(raw: Mapping[str, object], lora: Lora, where: Path) -> None:
    for key, value in raw.items():
        if key in ONLY and value not in ONLY[key]:
            allowed = " or ".join(map(repr, ONLY[key]))
            raise ModelError(f"{where}: {key} {value!r} is not supported; it must be {allowed}")
        if key not in ONLY and key not in ANY and value not in (None, False, {}, [], ""):
            raise ModelError(f"{where}: {key} {value!r} is not supported; it must be absent, false or empty")
    for key, ours, name in (("r", lora.rank, "lora.rank"), ("lora_alpha", lora.alpha, "lora.alpha")):
        if raw.get(key) != ours:
            raise ModelError(f"{where}: {key} is {raw.get(key)!r} and {name} is {ours:g}; set {name} to the adapter's")


def _check_base(folder: Path, lora: Lora, frozen: Params) -> None:
    """Raises ModelError if the adapter records its base weights and they are not `frozen`."""
    if not (folder / OWN).exists():
        return
    own = read_json(folder / OWN)
    if own.get("kept") == lora.base and own.get("base") != (found := fingerprint(frozen)):
        raise ModelError(
            f"{folder}: the adapter was trained on base weights {own.get('base')}, but those of the config's model"
            f" are {found}; set model to {read_json(folder / CONFIG).get('base_model_name_or_path')!r}"
        )


def _read(folder: Path, specs: Mapping[str, ParamSpec], config: DecoderConfig) -> dict[str, np.ndarray]:
    """Read all factors in our layout. Raises ModelError if one is missing, unexpected or of the wrong shape."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise ModelError(f"{folder}: has no {WEIGHTS}; Podium reads adapters in safetensors only")
    wanted = {
        _tensor(name, index, config): (name, index)
        for name, spec in specs.items()
        for index in np.ndindex(spec.shape[: spec.stacked])
    }
    found = {name: np.empty(spec.shape, np.float32) for name, spec in specs.items()}
    try:
        with safe_open(path, framework="flax") as file:
            stored = {_plain(name): name for name in file.keys()}  # noqa: SIM118 (not a dict)
            _check_names(set(wanted), set(stored), path)
            for tensor, (name, index) in wanted.items():
                value = np.asarray(file.get_tensor(stored[tensor]).astype(jnp.float32)).T
                shape = specs[name].shape[specs[name].stacked :]
                flat = (int(np.prod(shape[:-1])), shape[-1]) if name.endswith(LORA_A) else (shape[0], -1)
                expected = np.empty(shape, np.bool_).reshape(flat).shape
                if value.shape != expected:
                    raise ModelError(
                        f"tensor {stored[tensor]} in {path}: expected shape {list(expected[::-1])}, found"
                        f" {list(value.shape[::-1])}; it is an adapter of another model, or of another rank"
                    )
                found[name][index] = value.reshape(shape)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: truncated or damaged ({error})") from error
    return found


def _plain(name: str) -> str:
    """A tensor's name without the adapter's name: `lora_A.default.weight` becomes `lora_A.weight`."""
    return name.replace(".default.weight", ".weight")


def _check_names(wanted: set[str], stored: set[str], path: Path) -> None:
    missing, beyond = sorted(wanted - stored), sorted(stored - wanted)
    if missing:
        raise ModelError(
            f"tensor {missing[0]} is missing from {path}, and {len(missing) - 1} more: the adapter is of another model,"
            " or of fewer matrices; set lora.targets to its target_modules"
        )
    if beyond:
        raise ModelError(
            f"tensor {beyond[0]} in {path} is unexpected, and {len(beyond) - 1} more: the adapter is of another model,"
            " or of more matrices; set lora.targets to its target_modules"
        )
