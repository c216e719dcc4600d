"""Reads a decoder's architecture from the metadata of a GGUF file, as llama.cpp's converter writes it. No jax."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from podium.models.architecture import MAX_LAYERS, MAX_SIZE, DecoderConfig, ModelError, real_number, shown, whole_number
from podium.models.files.config_keys import FULL, SLIDING, check_family
from podium.models.files.gguf import ROPE_FACTORS, GgufHeader, rope_divisors
from podium.models.files.hf_config import from_hf_config

MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "mistral3": "ministral3",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3moe": "qwen3_moe",
}
"""Model types by llama.cpp's name of the architecture, where the names differ. Mistral is a `llama`, or a `mistral3`
without YaRN."""
GEMMA3_27B_LAYERS = 62
Raw = dict[str, object]
"""Keys of a config.json."""


class _Said:
    """The architecture's metadata in a GGUF file."""

    def __init__(self, header: GgufHeader):
        self.where = str(header.path)
        self.name = str(header.metadata.get("general.architecture"))
        self._metadata = header.metadata

    @property
    def kind(self) -> object:
        """What the file contains, such as `model`, `adapter` or a vision tower."""
        return self._metadata.get("general.type", "model")

    @property
    def parts(self) -> int:
        """The number of files that the model is split into; 0 or 1 if it is not split."""
        return whole_number({"split.count": self._metadata.get("split.count") or 1}, "split.count", self.where)

    def items(self) -> Iterator[tuple[str, object]]:
        """Yield the architecture's keys, without the prefix of its name, and their values."""
        prefix = f"{self.name}."
        return ((key.removeprefix(prefix), value) for key, value in self._metadata.items() if key.startswith(prefix))

    def is_width_of_values(self, key: str, value: object) -> bool:
        """Whether a key gives attention's values the same width as its keys."""
        width = self.number("embedding_length") // self.number("attention.head_count")
        return key == "attention.value_length" and value == self.number("attention.key_length", width)

    def get(self, key: str, default: object = None) -> object:
        return self._metadata.get(f"{self.name}.{key}", default)

    def number(self, key: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        return whole_number(self._metadata, f"{self.name}.{key}", self.where, default, most=most)

    def real(self, key: str, default: float | None = None) -> float:
        return _shortest(real_number(self._metadata, f"{self.name}.{key}", self.where, default))


def read_config(header: GgufHeader) -> DecoderConfig:
    """Read the decoder from a GGUF header. Raises ModelError as `from_hf_config` does."""
    said = _Said(header)
    where = said.where
    model_type = MODEL_TYPES.get(said.name, header.metadata.get("general.architecture"))
    check_family(model_type, where)
    _check_file(said)
    _check_keys(said)
    if "token_embd.weight" not in header.tensors:
        raise ModelError(f"{where}: tensor token_embd.weight is missing")
    width, heads = said.number("embedding_length"), said.number("attention.head_count")
    head_dim = said.number("attention.key_length", width // heads)
    if said.number("rope.dimension_count", head_dim) != head_dim and not said.name.startswith("qwen35"):
        raise ModelError(f"{where}: {said.name}.rope.dimension_count: only rotation of the whole head is supported")
    raw: Raw = {
        "model_type": model_type,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "num_hidden_layers": said.number("block_count", most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": said.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": said.number("context_length"),
        "rope_theta": said.real("rope.freq_base", 10000.0),
        "rope_scaling": _llama3(header),
        "rms_norm_eps": said.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    raw |= _experts(said) if said.name in GATES else {"intermediate_size": said.number("feed_forward_length")}
    own = OF_ARCHITECTURE.get(said.name)
    return from_hf_config(raw | (own(said, raw) if own else {}), where)


GATES: Mapping[str, int] = {"gpt-oss": 3, "qwen35moe": 1, "qwen3moe": 1}
"""Architectures with a mixture of experts, and llama.cpp's number of their gating function: 1 is a softmax over all
experts, 3 over the chosen ones. llama.cpp assumes these for the architectures, and normalises the gates of the first to
sum to 1."""


READ = (
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "block_count", "context_length", "embedding_length", "feed_forward_length", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type",
)  # fmt: skip
"""Keys that are read in every architecture, without the prefix of its name."""
_MIXTURE = ("expert_count", "expert_feed_forward_length", "expert_used_count")
_WINDOWS = ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa", "rope.scaling.factor")
_YARN = (
    "rope.scaling.factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
)  # fmt: skip
_NET = (
    "full_attention_interval", "nextn_predict_layers", "ssm.conv_kernel", "ssm.group_count", "ssm.inner_size",
    "ssm.state_size", "ssm.time_step_rank",
)  # fmt: skip
READ_BY: Mapping[str, tuple[str, ...]] = {
    "gemma3": _WINDOWS,
    "gpt-oss": (*_MIXTURE, *_WINDOWS, *_YARN),
    "mistral3": (*_YARN, "attention.temperature_scale"),
    "qwen35": _NET,
    "qwen35moe": (*_NET, *_MIXTURE, "expert_shared_feed_forward_length"),
    "qwen3moe": _MIXTURE,
}
"""Further keys that are read, by architecture."""
SCALINGS: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("none", "linear"),
    "gpt-oss": ("none", "yarn"),
    "mistral3": ("none", "yarn"),
}
"""The types of rotary scaling that an architecture may have."""
IGNORED = (
    "attention.layer_norm_epsilon",  # of norms that these architectures do not have
    "decoder_start_token_id",
    "pooling_type",  # of text embedding models
    "rope.dimension_sections",  # of positions in images
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",  # used with YaRN only
    "tensor_data_layout",
    "vocab_size",  # follows from the rows of the embedding
)
"""Keys that do not affect what llama.cpp computes with these architectures."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (1.0, 0.0),
    "logit_scale": (1.0, 0.0),
    "rope.scale_linear": (1.0, 0.0),
    "rope.scaling.attn_factor": (1.0, 0.0),
    "rope.scaling.factor": (1.0, 0.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
}
"""The only values supported for keys that an architecture does not read. A scaling factor without a type means division
by it in llama.cpp."""
NOTHING = (0, False, "", [])
"""Values with which any other key is accepted, because they enable nothing."""


def _check_file(said: _Said) -> None:
    """Raises ModelError if a file does not contain a model, or contains only a part of one."""
    if said.kind != "model":
        raise ModelError(f"{said.where}: general.type is {shown(said.kind)}; Podium trains models")
    if said.parts > 1:
        raise ModelError(
            f"{said.where}: the model is split into {said.parts} files; merge them first (llama-gguf-split --merge)"
        )


def _check_keys(said: _Said) -> None:
    """Raises ModelError if a key of the architecture is unknown, or has a value that Podium does not support."""
    read = {*READ, *READ_BY.get(said.name, ())}
    accepted = {key: values for key, values in NEUTRAL.items() if key not in read}
    accepted["rope.scaling.type"] = SCALINGS.get(said.name, ("none",))
    if said.name in GATES:
        accepted |= {"expert_gating_func": (GATES[said.name],), "expert_shared_count": (1, 0)}
    for key, value in said.items():
        if key in accepted and value not in accepted[key]:
            wanted = " or ".join(map(repr, accepted[key]))
            raise ModelError(f"{said.where}: {said.name}.{key} {shown(value)} is not supported; it must be {wanted}")
        known = key in accepted or key in read or key in IGNORED or value in NOTHING
        if not known and not said.is_width_of_values(key, value):
            raise ModelError(
                f"{said.where}: {said.name}.{key} {shown(value)} is not supported: Podium does not know whether it"
                f" changes what a {said.name} computes"
            )
    factor = said.get("rope.scaling.factor", 1.0)
    if factor not in (0, 1) and said.get("rope.scaling.type") is None and said.name != "gemma3":
        raise ModelError(
            f"{said.where}: {said.name}.rope.scaling.factor {shown(factor)} without a rope.scaling.type means linear to"
            " llama.cpp, which is not supported in this architecture"
        )


def _experts(said: _Said) -> Raw:
    """The keys of config.json for a mixture of experts in every layer, whose gates sum to 1."""
    return {
        "num_experts": said.number("expert_count"),
        "num_experts_per_tok": said.number("expert_used_count"),
        "intermediate_size" if said.name == "gpt-oss" else "moe_intermediate_size": said.number(
            "expert_feed_forward_length"
        ),
        "norm_topk_prob": True,
    }


def _gemma3(said: _Said, raw: Raw) -> Raw:
    """The keys of config.json that only Gemma 3 has.

    Two of them are not in every file but fixed in llama.cpp's code: the rotary base of layers with a window, and the
    scale of scores of the 27B model.
    """
    largest = raw["num_hidden_layers"] == GEMMA3_27B_LAYERS
    factor = said.get("rope.scaling.factor")
    scaling = said.get("rope.scaling.type", "linear" if factor else "none")  # as in llama.cpp
    return {
        "layer_types": _layer_types(said, said.number("block_count"), 6),
        "sliding_window": said.get("attention.sliding_window"),
        "rope_local_base_freq": said.real("rope.freq_base_swa", 1e4),
        "rope_scaling": None if scaling == "none" else {"rope_type": scaling, "factor": factor},
        "query_pre_attn_scalar": (
            said.number("embedding_length") // said.number("attention.head_count") if largest else raw["head_dim"]
        ),
    }


def _gpt_oss(said: _Said, raw: Raw) -> Raw:
    """The keys of config.json that only gpt-oss has. That YaRN does not round its range is in no file."""
    if said.real("rope.freq_base_swa", base := said.real("rope.freq_base")) != base:
        raise ModelError(f"{said.where}: gpt-oss.rope.freq_base_swa: only one rotary base for all layers is supported")
    return {
        "layer_types": _layer_types(said, said.number("block_count"), 2),
        "sliding_window": said.number("attention.sliding_window"),
        "rope_scaling": _yarn(said) | {"truncate": False} if _has_yarn(said) else {"rope_type": "default"},
    }


def _mistral3(said: _Said, raw: Raw) -> Raw:
    """The keys of config.json of Ministral 3, which uses YaRN, or of Mistral Small 3, which does not."""
    if not _has_yarn(said):
        return {"model_type": "mistral", "sliding_window": None}
    sharpening = said.get("attention.temperature_scale", 0.0)
    beta = {"llama_4_scaling_beta": said.real("attention.temperature_scale")} if sharpening else {}
    return {"rope_parameters": {"rope_theta": raw["rope_theta"], **_yarn(said), **beta}}


def _qwen35(said: _Said, raw: Raw) -> Raw:
    """The keys of config.json that only Qwen3.5 has; blocks for multi-token prediction do not count as layers."""
    heads, inner = said.number("ssm.time_step_rank"), said.number("ssm.inner_size")
    ahead = said.number("nextn_predict_layers") if said.get("nextn_predict_layers", 0) else 0
    if inner % heads:
        raise ModelError(f"{said.where}: {said.name}.ssm.inner_size {inner} is not a multiple of its {heads} heads")
    dims, head_dim = said.number("rope.dimension_count"), said.number("attention.key_length")
    return {
        "num_hidden_layers": said.number("block_count", most=MAX_LAYERS) - ahead,
        "full_attention_interval": said.number("full_attention_interval", 4),
        "partial_rotary_factor": dims / head_dim,
        "linear_conv_kernel_dim": said.number("ssm.conv_kernel"),
        "linear_key_head_dim": said.number("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_num_key_heads": said.number("ssm.group_count"),
        "linear_num_value_heads": heads,
    }


def _qwen35_moe(said: _Said, raw: Raw) -> Raw:
    """The keys of config.json that only Qwen3.5's mixture of experts has."""
    return _qwen35(said, raw) | {"shared_expert_intermediate_size": said.number("expert_shared_feed_forward_length")}


OF_ARCHITECTURE: Mapping[str, Callable[[_Said, Raw], Raw]] = {
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "mistral3": _mistral3,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35_moe,
}


def _layer_types(said: _Said, layers: int, every: int) -> list[str]:
    """The layers' types: a window in all layers but every n-th, or in those that a list names."""
    pattern = said.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, list):
        return [SLIDING if slides else FULL for slides in pattern]
    every = said.number("attention.sliding_window_pattern", every)
    return [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]


def _has_yarn(said: _Said) -> bool:
    return said.get("rope.scaling.type") == "yarn"


def _yarn(said: _Said) -> Raw:
    """The keys of YaRN. llama.cpp has defaults for the betas, and uses 1 for `mscale`, which GGUF does not store."""
    log_multiplier = said.get("rope.scaling.yarn_log_multiplier", 0.0)
    grown = {"mscale": 1.0, "mscale_all_dim": said.real("rope.scaling.yarn_log_multiplier")} if log_multiplier else {}
    return {
        "rope_type": "yarn",
        "factor": said.real("rope.scaling.factor"),
        "original_max_position_embeddings": said.number("rope.scaling.original_context_length"),
        "beta_fast": said.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": said.real("rope.scaling.yarn_beta_slow", 1.0),
        **grown,
    }


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to this float32; GGUF stores 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _llama3(header: GgufHeader) -> Raw | None:
    """Reconstruct Llama 3's frequency scaling from the divisors [Q/2] that GGUF stores; the largest one is the factor.

    The other three parameters are the same in Llama 3.1, 3.2 and 3.3; `load_params` verifies the divisors.
    """
    if (divisors := rope_divisors(header)) is None:
        return None
    factor = float(divisors.max())
    if not (divisors.min() > 0 and factor < np.inf):
        raise ModelError(f"{header.path}: tensor {ROPE_FACTORS} must hold finite numbers above 0")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
