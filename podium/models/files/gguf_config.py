"""Reads a decoder's architecture from the metadata of a GGUF file, as llama.cpp's converter writes it. No jax."""

from collections.abc import Mapping

import numpy as np

from podium.models.architecture import MAX_LAYERS, DecoderConfig, ModelError, shown, whole_number
from podium.models.families import FAMILIES
from podium.models.family import Family, GgufForm
from podium.models.files.config_keys import check_family
from podium.models.files.gguf import ROPE_FACTORS, GgufHeader, rope_divisors
from podium.models.files.gguf_metadata import GgufMetadata
from podium.models.files.hf_config import from_hf_config
from podium.models.files.model_settings import Keys

READ = (
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "block_count", "context_length", "embedding_length", "feed_forward_length", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type",
)  # fmt: skip
"""Keys that are read in every architecture, without the prefix of its name."""
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


def read_config(header: GgufHeader) -> DecoderConfig:
    """Read the decoder from a GGUF header. Raises ModelError as `from_hf_config` does."""
    metadata = GgufMetadata(header)
    where, name = metadata.where, metadata.name
    form, family = gguf_form(header)
    _check_file(header)
    _check_keys(metadata, form)
    if "token_embd.weight" not in header.tensors:
        raise ModelError(f"{where}: tensor token_embd.weight is missing")
    width, heads = metadata.number("embedding_length"), metadata.number("attention.head_count")
    head_dim = metadata.number("attention.key_length", width // heads)
    rotates_parts = "partial_rotary_factor" in family.keys.reads
    if metadata.number("rope.dimension_count", head_dim) != head_dim and not rotates_parts:
        raise ModelError(f"{where}: {name}.rope.dimension_count: only rotation of the whole head is supported")
    raw: Keys = {
        "model_type": family.model_type,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "num_hidden_layers": metadata.number("block_count", most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.number("context_length"),
        "rope_theta": metadata.real("rope.freq_base", 10000.0),
        "rope_scaling": _llama3(header),
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    return from_hf_config({**raw, **form.keys(metadata, raw)}, where)


def gguf_form(header: GgufHeader) -> tuple[GgufForm, Family]:
    """The form of a file, and the family that declares it. Raises ModelError for an unknown architecture."""
    name = header.metadata.get("general.architecture")
    declared = [(family.gguf, family) for family in FAMILIES.values() if family.gguf is not None]
    for form, family in declared:
        if form.architecture == name:
            return form, family
    check_family(name, str(header.path))
    known = ", ".join(form.architecture for form, _ in declared)
    raise ModelError(f"{header.path}: {name} is not llama.cpp's name of an architecture that Podium reads: {known}")


def _check_file(header: GgufHeader) -> None:
    """Raises ModelError if a file does not contain a model, or contains only a part of one."""
    if (kind := header.metadata.get("general.type", "model")) != "model":
        raise ModelError(f"{header.path}: general.type is {shown(kind)}; Podium trains models")
    parts = whole_number({"split.count": header.metadata.get("split.count") or 1}, "split.count", str(header.path))
    if parts > 1:
        raise ModelError(
            f"{header.path}: the model is split into {parts} files; merge them first (llama-gguf-split --merge)"
        )


def _check_keys(metadata: GgufMetadata, form: GgufForm) -> None:
    """Raises ModelError if a key of the architecture is unknown, or has a value that Podium does not support."""
    where, name = metadata.where, metadata.name
    read = {*READ, *form.reads}
    accepted = {key: values for key, values in NEUTRAL.items() if key not in read}
    accepted["rope.scaling.type"] = form.scalings
    if form.gating is not None:
        accepted |= {"expert_gating_func": (form.gating,), "expert_shared_count": (1, 0)}
    for key, value in metadata.items():
        if key in accepted and value not in accepted[key]:
            wanted = " or ".join(map(repr, accepted[key]))
            raise ModelError(f"{where}: {name}.{key} {shown(value)} is not supported; it must be {wanted}")
        known = key in accepted or key in read or key in IGNORED or value in NOTHING
        if not known and not metadata.is_width_of_values(key, value):
            raise ModelError(
                f"{where}: {name}.{key} {shown(value)} is not supported: Podium does not know whether it"
                f" changes what a {name} computes"
            )
    factor = metadata.get("rope.scaling.factor", 1.0)
    if factor not in (0, 1) and metadata.get("rope.scaling.type") is None and "linear" not in form.scalings:
        raise ModelError(
            f"{where}: {name}.rope.scaling.factor {shown(factor)} without a rope.scaling.type means linear to"
            " llama.cpp, which is not supported in this architecture"
        )


def _llama3(header: GgufHeader) -> Keys | None:
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
