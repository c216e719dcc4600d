"""Reads and writes adapters in the format of PEFT (https://github.com/huggingface/peft), without the library.

adapter_config.json            rank, alpha, targets, and the name of the base model
adapter_model.safetensors      base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight [r, in], lora_B [out, r]
podium.json                    Podium's own file with the fingerprint of the base model's weights; PEFT ignores it

PEFT has one adapter for a tensor that holds several of our matrices, such as the queries, keys and values of Qwen3.5's
delta nets. We write one of the sum of their ranks (`rank_pattern`), in which each matrix has its own part of both
factors; one of the configured rank is read as adapters that share their first factor.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from podium.models.adapters import fingerprint
from podium.models.architecture import DecoderConfig, Lora, ModelError
from podium.models.blocks.spec import ParamSpec
from podium.models.files.folder import ADAPTER_CONFIG, FLOATS, read_json, text_name
from podium.models.files.hf import new_folder, write_json
from podium.models.files.names import layers_of, layout_of
from podium.models.files.tensor_layout import LANE, Layout
from podium.models.params import LORA_A, LORA_B, own_name, param_specs, trained_specs
from podium.sharding import Params, ShardingRules, param_shardings

logger = logging.getLogger(__name__)
CONFIG = ADAPTER_CONFIG
WEIGHTS = "adapter_model.safetensors"
OWN = "podium.json"
PREFIX = "base_model.model."
# Keys of a PEFT config that do not change what an adapter computes; all other keys must be empty, false or absent.
ANY = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_alpha", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "r", "revision", "target_modules", "task_type",
}  # fmt: skip
MERGE = (
    "merge the adapter into its base model with PEFT (merge_and_unload, save_pretrained), and set model to the result"
)
RANKS = "rank_pattern"
ONLY: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # other values change the base model
}


def save_adapter(params: Params, frozen: Params, config: DecoderConfig, folder: Path, *, model: str) -> None:
    """Export a folder that `PeftModel.from_pretrained(base, folder)` loads, with adapters in float32. The folder
    appears only once complete.

    `model` is the name by which others load the base model. Raises ModelError if the folder is not empty.
    """
    lora, targets = _lora_of(config), _targets(config)
    tensors: dict[str, np.ndarray] = {}
    for target in targets:
        for index in np.ndindex(target.stacked):
            first, second = target.joined(params, index, lora.rank)
            tensors[target.tensor(index, "lora_A")] = first
            tensors[target.tensor(index, "lora_B")] = second
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(dict.fromkeys(target.module for target in targets)),
        **_patterns(targets, lora),
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
    described, targets = read_json(folder / CONFIG), _targets(config)
    _check_described(described, lora, _patterns(targets, lora), folder / CONFIG)
    _check_base(folder, lora, frozen)
    specs = trained_specs(config)
    shardings = param_shardings(specs, rules)
    found = _read(folder, specs, targets, lora.rank, apart=bool(described.get(RANKS)))
    return {
        name: jax.make_array_from_callback(spec.shape, shardings[name], lambda index, name=name: found[name][index])
        for name, spec in specs.items()
    }


def _lora_of(config: DecoderConfig) -> Lora:
    assert config.lora is not None, "only a decoder with adapters has some to read or write"
    return config.lora


class _Target(NamedTuple):
    """A tensor that has an adapter in PEFT, in each layer and perhaps for each expert."""

    hf: str  # its name; {} is the layer, a second {} the expert
    matrices: tuple[str, ...]  # our matrices in it that have adapters, in its order
    rows: tuple[np.ndarray, ...]  # rows of each in the tensor
    size: int  # rows of the tensor
    stacked: tuple[int, ...]  # number of layers, and of experts
    layers: Sequence[int]

    @property
    def module(self) -> str:
        """PEFT's name for it in all layers: `q_proj`."""
        return self.hf.split(".")[-2]

    def tensor(self, index: tuple[int, ...], part: str) -> str:
        """PEFT's name of a factor, lora_A or lora_B."""
        module = self.hf.format(self.layers[index[0]], *index[1:]).removesuffix(".weight")
        return f"{PREFIX}{module}.{part}.weight"

    def joined(self, params: Params, index: tuple[int, ...], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """The factors [R, in] and [out, R] as PEFT has them, each matrix in its own rows of the first."""
        firsts = [np.asarray(params[name + LORA_A][index], np.float32).reshape(-1, rank).T for name in self.matrices]
        second = np.zeros((self.size, rank * len(self.matrices)), np.float32)
        for name, rows, columns in self.blocks(rank):
            second[rows, columns] = np.asarray(params[name + LORA_B][index], np.float32).reshape(rank, -1).T
        return np.ascontiguousarray(np.concatenate(firsts)), second

    def blocks(self, rank: int) -> Sequence[tuple[str, np.ndarray, slice]]:
        """Each matrix with its rows and columns in the second factor."""
        pairs = enumerate(zip(self.matrices, self.rows, strict=True))
        return [(name, rows, slice(number * rank, (number + 1) * rank)) for number, (name, rows) in pairs]


def _targets(config: DecoderConfig) -> list[_Target]:
    """The tensors with adapters. Raises ModelError if PEFT has no name for one."""
    specs, trained = param_specs(config), trained_specs(config)
    found: list[_Target] = []
    for matrix in (name.removesuffix(LORA_A) for name in trained if name.endswith(LORA_A)):
        layout, prefix = layout_of(matrix, config), matrix.removesuffix(own_name(matrix))
        if layout.whole:
            raise ModelError(
                f"{matrix}: PEFT has no name for the adapters of experts that a {config.model_type} stores in one"
                " tensor; export the merged model, or leave experts out of lora.targets"
            )
        members = [prefix + name for name in layout.joined or layout.lanes or (own_name(matrix),)]
        adapted = tuple(name for name in members if name + LORA_A in trained)
        if matrix != adapted[0]:
            continue  # the tensor is already there
        rows = _rows_of(members, layout, specs, config)
        found.append(
            _Target(
                hf=layout.hf,
                matrices=adapted,
                rows=tuple(rows[name] for name in adapted),
                size=sum(map(len, rows.values())),
                stacked=specs[matrix].shape[: specs[matrix].stacked],
                layers=layers_of(matrix, config),
            )
        )
    return found


def _rows_of(
    members: Sequence[str], layout: Layout, specs: Mapping[str, ParamSpec], config: DecoderConfig
) -> dict[str, np.ndarray]:
    """The rows of each parameter in the tensor that holds these."""
    counts = [layout_of(name, config).file_rows(specs[name]) for name in members]
    if not layout.lanes:
        return dict(zip(members, np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1]), strict=True))
    spec, letters = specs[members[0]], layout.file.split()[0]
    sizes = {LANE: len(members), **dict(zip(layout.ours, spec.shape[spec.stacked :], strict=True))}
    every = np.arange(counts[0]).reshape([sizes[letter] for letter in letters])
    return {name: every.take(lane, letters.index(LANE)).reshape(-1) for lane, name in enumerate(members)}


def _patterns(targets: Sequence[_Target], lora: Lora) -> Mapping[str, Mapping[str, float]]:
    """`rank_pattern` and `alpha_pattern` (for the same scale) of tensors that hold several matrices with adapters."""
    several = {target.module: len(target.matrices) for target in targets if len(target.matrices) > 1}
    if not several:
        return {}
    ranks = {module: lora.rank * count for module, count in several.items()}
    return {RANKS: ranks, "alpha_pattern": {module: lora.alpha * count for module, count in several.items()}}


def _check_described(
    raw: Mapping[str, object], lora: Lora, patterns: Mapping[str, Mapping[str, float]], where: Path
) -> None:
    for key, ours in patterns.items():
        if raw.get(key) not in (None, {}, ours) or bool(raw.get(key)) != bool(raw.get(RANKS)):
            raise ModelError(
                f"{where}: {key} {raw.get(key)!r} is not supported; it must be {dict(ours)!r}, which gives each matrix"
                f" the rank {lora.rank}, or with every other pattern absent"
            )
    for key, value in raw.items():
        if key in patterns:
            continue
        if key in ONLY and value not in ONLY[key]:
            allowed = " or ".join(map(repr, ONLY[key]))
            raise ModelError(f"{where}: {key} {value!r} is not supported; it must be {allowed}")
        if key not in ONLY and key not in ANY and value not in (None, False, {}, [], ""):
            raise ModelError(f"{where}: {key} {value!r} is not supported; {MERGE}")
    for key, ours, name in (("r", lora.rank, "lora.rank"), ("lora_alpha", lora.alpha, "lora.alpha")):
        if raw.get(key) != ours:
            raise ModelError(f"{where}: {key} is {raw.get(key)!r} and {name} is {ours:g}; set {name} to the adapter's")


def _check_base(folder: Path, lora: Lora, frozen: Params) -> None:
    """Raises ModelError if the adapter records its base weights and they are not `frozen`."""
    if not (folder / OWN).exists():
        return
    own = read_json(folder / OWN)
    if own.get("kept") != lora.base:
        logger.warning(
            "%s: the adapter was trained on weights stored in %s, and lora.base is %s, so it is not checked whether"
            " they are of the same model",
            *(folder, own.get("kept"), lora.base),
        )
        return
    if own.get("base") != (found := fingerprint(frozen)):
        raise ModelError(
            f"{folder}: the adapter was trained on base weights {own.get('base')}, but those of the config's model"
            f" are {found}; set model to {read_json(folder / CONFIG).get('base_model_name_or_path')!r}"
        )


def _read(
    folder: Path, specs: Mapping[str, ParamSpec], targets: Sequence[_Target], rank: int, *, apart: bool
) -> dict[str, np.ndarray]:
    """Read all factors in our layout; with `apart`, matrices in one tensor get separate parts of its factors.

    Raises ModelError if a factor is missing, unexpected, of the wrong shape, or changes a matrix without an adapter.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise ModelError(f"{folder}: has no {WEIGHTS}; Podium reads adapters in safetensors only")
    pairs = [(target, index) for target in targets for index in np.ndindex(target.stacked)]
    wanted = {target.tensor(index, part) for target, index in pairs for part in ("lora_A", "lora_B")}
    found = {name: np.empty(spec.shape, np.float32) for name, spec in specs.items()}
    try:
        with safe_open(path, framework="flax") as file:
            stored = _by_plain_name(list(file.keys()), path)
            _check_names(wanted, set(stored), path)

            def read(tensor: str, shape: tuple[int, int]) -> np.ndarray:
                if (dtype := file.get_slice(stored[tensor]).get_dtype()) not in FLOATS:
                    raise ModelError(
                        f"tensor {stored[tensor]} in {path}: expected dtype {', '.join(FLOATS)}, found {dtype}"
                    )
                value = np.asarray(file.get_tensor(stored[tensor]).astype(jnp.float32))
                if value.shape != shape:
                    raise ModelError(
                        f"tensor {stored[tensor]} in {path}: expected shape {list(shape)}, found {list(value.shape)};"
                        " it is an adapter of another model, or of another rank"
                    )
                return value

            for target, index in pairs:
                width = rank * len(target.matrices) if apart else rank
                inputs = found[target.matrices[0] + LORA_A][index].size // rank
                first = read(target.tensor(index, "lora_A"), (width, inputs))
                second = read(name := target.tensor(index, "lora_B"), (target.size, width))
                if not _taken_apart(target, index, (first, second), found, apart=apart):
                    raise ModelError(
                        f"tensor {stored[name]} in {path}: it changes more than {' and '.join(target.matrices)}, whose"
                        " tensor holds matrices without an adapter or with one of their own; merge the adapter into"
                        " the model, or leave this module out"
                    )
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: truncated or damaged ({error})") from error
    return found


def _taken_apart(
    target: _Target,
    index: tuple[int, ...],
    factors: tuple[np.ndarray, np.ndarray],
    found: Mapping[str, np.ndarray],
    *,
    apart: bool,
) -> bool:
    """Write the factors of a target's matrices, split from those of the tensor.

    Returns False if the tensor's adapter cannot be split in this way.
    """
    (first, second), rest = factors, np.array(factors[1])
    rank = found[target.matrices[0] + LORA_A].shape[-1]
    for matrix, rows, own in target.blocks(rank):
        columns = own if apart else slice(None)
        a, b = found[matrix + LORA_A][index], found[matrix + LORA_B][index]
        a[...] = first[columns].T.reshape(a.shape)
        b[...] = second[rows, columns].T.reshape(b.shape)
        rest[rows, columns] = 0
    return not rest.any()


def _by_plain_name(stored: Sequence[str], path: Path) -> dict[str, str]:
    """The names of a file's tensors by their plain ones. Raises ModelError if two have the same."""
    found: dict[str, str] = {}
    for name in stored:
        if (plain := _plain(name)) in found:
            raise ModelError(
                f"tensor {name} in {path}: its name is used twice, also by {found[plain]}; remove the one that does"
                " not belong to the adapter"
            )
        found[plain] = name
    return found


def _plain(name: str) -> str:
    """A tensor's name as for a text-only model, without the adapter's name (`default` in `lora_A.default.weight`)."""
    plain = name.replace(".default.weight", ".weight")
    return PREFIX + text_name(plain.removeprefix(PREFIX)) if plain.startswith(PREFIX) else plain


def _is_factor_of_layer(name: str) -> bool:
    """Whether a tensor of an adapter belongs to a layer's matrix rather than to the head or the embedding."""
    return ".layers." in name and (".lora_A." in name or ".lora_B." in name)


def _check_names(wanted: set[str], stored: set[str], path: Path) -> None:
    missing, beyond = sorted(wanted - stored), sorted(stored - wanted)
    if missing:
        raise ModelError(
            f"tensor {missing[0]} is missing from {path}, and {len(missing) - 1} more: the adapter is of another model,"
            " or of fewer matrices; set lora.targets to its target_modules"
        )
    if whole := [name for name in beyond if not _is_factor_of_layer(name)]:
        raise ModelError(
            f"tensor {whole[0]} in {path} is unexpected, and {len(whole) - 1} more: Podium trains adapters beside the"
            f" matrices of layers, and neither head nor embedding with them; {MERGE}"
        )
    if beyond:
        raise ModelError(
            f"tensor {beyond[0]} in {path} is unexpected, and {len(beyond) - 1} more: the adapter is of another model,"
            " or of more matrices; set lora.targets to its target_modules"
        )
