"""Rotary settings of a config.json, read and written, in the keys of transformers 4 and 5. No jax."""

import math
from collections.abc import Mapping

from podium.models.architecture import ModelError, real_number, shown, whole_number
from podium.models.blocks.attention import Attention, Sharpening
from podium.models.blocks.rope import LinearScaling, Rope, RopeScaling, Scaling, YarnScaling
from podium.models.files.model_settings import EMPTY, Keys, ModelSettings

ORIGINAL = "original_max_position_embeddings"
SHARPENING = "llama_4_scaling_beta"
ROPE_IGNORED = ("finetuned", "max_position_embeddings", "mrope_interleaved", "mrope_section")
"""Keys of rotary settings that do not affect text: comments, and how Qwen splits the positions of images."""
SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "linear": ("factor",),
    "yarn": ("factor", ORIGINAL),
}
"""The supported types of frequency scaling, and the keys that each requires."""
SCALING_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
"""The optional keys of each type of frequency scaling."""


def rotation(settings: ModelSettings) -> Keys:
    """The rotary settings of all layers, as transformers resolves them.

    transformers 5 writes them into `rope_parameters`, version 4 into `rope_theta` and `rope_scaling`, which takes
    precedence if both exist. Raises ModelError if a key is unknown, a required one is missing, or the type of scaling
    is not supported.
    """
    scaling, parameters = settings.object("rope_scaling"), settings.object("rope_parameters")
    rope = dict(scaling or parameters)
    original = settings[ORIGINAL]
    if original is not None and ORIGINAL in SCALINGS.get(str(_type_of(rope)), ()):
        rope[ORIGINAL] = original
    return completed(rope, settings, theta=settings["rope_theta"])


def completed(rope: Keys, settings: ModelSettings, *, theta: object, unread: frozenset[str] = frozenset()) -> Keys:
    """Rotary settings with what they leave out taken from the rest of config.json, checked as for `rotation`.

    Args:
        rope: the settings, of which the type and the base may be missing.
        settings: those of the whole model.
        theta: the base, if `rope` has none.
        unread: options that transformers does not find in these settings.
    """
    found = {"rope_theta": theta, **rope, "rope_type": _type_of(rope)}
    if ORIGINAL in SCALINGS.get(str(found["rope_type"]), ()):
        found.setdefault(ORIGINAL, settings["max_position_embeddings"])
    if "partial_rotary_factor" in settings.keys:
        found.setdefault("partial_rotary_factor", settings["partial_rotary_factor"])
    _check_rotation(found, settings, unread)
    return found


def _type_of(rope: Keys) -> object:
    return rope.get("rope_type", rope.get("type", "default"))


def _check_rotation(rope: Keys, settings: ModelSettings, unread: frozenset[str]) -> None:
    """Raises ModelError if rotary settings have an unknown type or key, or lack one."""
    kind, where = rope["rope_type"], settings.where
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ModelError(f"{where}: rope_type {shown(kind)} is not supported; Podium computes {', '.join(SCALINGS)}")
    if missing := [key for key in SCALINGS[kind] if key not in rope]:
        raise ModelError(f"{where}: rope_type {kind} needs {', '.join(missing)}")
    if "partial_rotary_factor" not in settings.keys and rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"{where}: partial_rotary_factor {shown(rope['partial_rotary_factor'])} is not supported; it must be 1.0 or"
            " absent"
        )
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", ORIGINAL, SHARPENING, *ROPE_IGNORED}
    known |= {*SCALINGS[kind], *SCALING_OPTIONS.get(kind, ())} - unread
    for key, value in rope.items():
        asks = value not in EMPTY or key == "truncate"  # false is a valid value
        if key not in known and asks:
            raise ModelError(
                f"{where}: {key} {shown(value)} of rotary embeddings is not supported with rope_type {kind}: Podium"
                " does not know whether it changes what the model computes; remove it if it changes nothing"
            )


def rope_of(rope: Keys, head_dim: int, where: str) -> Rope:
    """The rotary embedding of `rotation`, in heads of `head_dim` elements."""
    share = real_number(rope, "partial_rotary_factor", where, 1.0)
    return Rope(theta=real_number(rope, "rope_theta", where), dims=int(head_dim * share), scaling=_scaling(rope, where))


def sharpening_of(rope: Keys, where: str) -> Sharpening | None:
    """The position-dependent scale of the queries; None without one."""
    if not rope.get(SHARPENING):
        return None
    return Sharpening(beta=real_number(rope, SHARPENING, where), period=whole_number(rope, ORIGINAL, where))


def _scaling(rope: Keys, where: str) -> Scaling | None:
    """The scaling of the rotary frequencies; None without one."""
    kind = rope["rope_type"]
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=real_number(rope, "factor", where))
    if kind == "yarn":
        return _yarn(rope, where)
    scaling = RopeScaling(
        factor=real_number(rope, "factor", where),
        low_freq_factor=real_number(rope, "low_freq_factor", where),
        high_freq_factor=real_number(rope, "high_freq_factor", where),
        original_max_positions=whole_number(rope, ORIGINAL, where),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        raise ModelError(f"{where}: low_freq_factor {low:g} must be below high_freq_factor, which is {high:g}")
    return scaling


def _yarn(rope: Keys, where: str) -> YarnScaling:
    """Read YaRN's settings; the default factor of cosines and sines is the one that transformers computes."""
    factor = real_number(rope, "factor", where)
    given = {key: value for key, value in rope.items() if value not in (None, 0)}  # both mean the default
    factors = {key: value for key, value in rope.items() if value is not None}  # for which 0 is a valid number

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    length = grown(1.0)
    if "mscale" in given and "mscale_all_dim" in given:
        length = grown(real_number(given, "mscale", where)) / grown(real_number(given, "mscale_all_dim", where))
    fast, slow = real_number(given, "beta_fast", where, 32.0), real_number(given, "beta_slow", where, 1.0)
    if fast <= slow:
        raise ModelError(f"{where}: beta_fast {fast:g} must be above beta_slow, which is {slow:g}")
    return YarnScaling(
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        original_max_positions=whole_number(rope, ORIGINAL, where),
        length=real_number(factors, "attention_factor", where, length),
        truncate=bool(rope.get("truncate", True)),
    )


def rope_keys(attention: Attention) -> Keys:
    """The rotary settings of config.json in the keys of transformers 4, which lacks those of YaRN."""
    rope = attention.rope
    if isinstance(rope.scaling, YarnScaling):
        return {"rope_parameters": rope_parameters(attention)}
    return {"rope_theta": rope.theta, "rope_scaling": scaling_keys(rope.scaling)}


def rope_parameters(attention: Attention) -> Keys:
    """The rotary settings of config.json in the keys of transformers 5."""
    rope = attention.rope
    found: dict[str, object] = {"rope_type": "default", **(scaling_keys(rope.scaling) or {}), "rope_theta": rope.theta}
    if (sharpening := attention.sharpening) is not None:
        found |= {SHARPENING: sharpening.beta, ORIGINAL: sharpening.period}
    return found


def scaling_keys(scaling: Scaling | None) -> dict[str, object] | None:
    """The value of `rope_scaling` in config.json; None without scaling."""
    if scaling is None:
        return None
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, YarnScaling):
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "original_max_position_embeddings": scaling.original_max_positions,
            "attention_factor": scaling.length,
            "truncate": scaling.truncate,
        }
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }
