"""Exports a run's weights as a Hugging Face model, or its adapter in PEFT's format."""

import dataclasses
import re
import tempfile
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from podium.config.errors import UsageError
from podium.files import as_path, in_bucket
from podium.models.adapters import merged
from podium.models.files.hf import save_model
from podium.models.files.model_licence import base_of, name_for_others
from podium.models.files.peft import save_adapter
from podium.models.params import LAYERS, own_name
from podium.observe.bucket import copy_records
from podium.observe.card import model_card
from podium.observe.run_dir import Fork, parse_fork, read_config, saved_steps
from podium.patience import patiently
from podium.sharding import Params
from podium.train.setup import Model, load_frozen, load_trained, load_weights, make_model

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


class PushError(ValueError):
    """The hub rejected the upload or could not be reached; the folder itself is complete."""


def export_run(
    run: str | Path,
    folder: Path,
    *,
    step: int | None,
    dtype: Literal["bfloat16", "float32"],
    merge: bool = False,
    push: str | None = None,
    private: bool = False,
) -> int:
    """Export a run's checkpoint to `folder`: config, tokenizer, safetensors, model card; returns the exit status.

    A run with LoRA is exported as an adapter in PEFT's format, or with `merge` as a model with the adapter merged. The
    run is a folder or `RUN@STEP`; `step` overrides STEP; without either, the newest checkpoint is exported. `push` is
    the `user/name` on the hub to upload the folder to, `private` or public.

    Raises:
        ValueError: the checkpoint does not exist or is damaged, `folder` is not empty, the hub rejects the upload, or
            there is no adapter to merge.
    """
    if push is not None and not REPOSITORY.fullmatch(push):
        raise UsageError(f"--push {push}: expected USER/NAME, such as me/my-model")
    fork = parse_fork(str(run))
    fork = fork if step is None else fork._replace(step=step)
    config = read_config(as_path(fork.run))
    model = make_model(config)
    loads = _save(model, fork, folder, dtype, merge=merge)
    written = fork.step if fork.step is not None else saved_steps(fork.checkpoints)[-1]
    with tempfile.TemporaryDirectory() as temporary:
        records = home = as_path(fork.run)
        if in_bucket(home):  # this machine may not have trained the run
            records = Path(temporary) / home.name
            copy_records(home, records)
        adapter = model.decoder.lora is not None and not merge
        card = model_card(records, config, step=written, adapter=adapter, base=base_of(model.source))
        (folder / "README.md").write_text(card, encoding="utf-8")
    print(f"{fork.run}@{written} -> {folder}: {loads} loads it")
    if adapter and not base_of(model.source).same_weights:
        print(f"its base model is local: to use the adapter elsewhere, also copy {name_for_others(model.source)}")
    if push is not None:
        print(f"uploaded: {_upload(folder, push, private=private)}")
    return 0


def _save(model: Model, fork: Fork, folder: Path, dtype: Literal["bfloat16", "float32"], *, merge: bool) -> str:
    """Write the trained weights, and return the code that loads them."""
    lora = model.decoder.lora
    if lora is not None and not merge:
        frozen = load_frozen(model)
        save_adapter(
            load_trained(model, fork, frozen), frozen, model.decoder, folder, model=name_for_others(model.source)
        )
        return f"PeftModel.from_pretrained(model, {str(folder)!r})"
    if merge and lora is None:
        raise ValueError(f"{fork.run} was trained without lora, so it has no adapter to merge; leave out --merge")
    params, decoder = load_weights(model, fork), dataclasses.replace(model.decoder, lora=None)
    params = merged_model(params, lora.scale, jnp.dtype(dtype)) if lora is not None else params
    save_model(params, decoder, model.tokenizer, folder, dtype=dtype)
    return f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"


def merged_model(params: Params, scale: float, dtype: jnp.dtype) -> Params:
    """A model's weights with its adapters merged; the layers' weights are in `dtype`, rounded once.

    Quantised matrices are dequantised first, since the adapters were trained on the dequantised values.
    """

    def layer(carry: None, weights: Params) -> tuple[None, Params]:
        return carry, {name: value.astype(dtype) for name, value in merged(weights, scale).items()}

    made: Params = {}
    for prefix in sorted({name.removesuffix(own_name(name)) for name in params if name.startswith(LAYERS)}):
        layers = {name: value for name, value in params.items() if name.startswith(prefix)}
        made |= jax.jit(lambda layers: jax.lax.scan(layer, None, layers)[1])(layers)
    return made | {name: value for name, value in params.items() if not name.startswith(LAYERS)}


def _upload(folder: Path, repository: str, *, private: bool) -> str:
    """Upload the folder's files, waiting while the hub does not answer; returns the repository's page."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]  # of httpx, later httpx2
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    def upload() -> str:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Trained with Podium")
        return str(url)

    api = HfApi(library_name="podium")
    later = f"the export is complete in {folder}; push it later with: hf upload {repository} {folder}"
    try:
        url = patiently(upload, "the hub")
    except (HfHubHTTPError, HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        token = "set HF_TOKEN to a token that may write there, or run `hf auth login`; " if status in (401, 403) else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        what = "the hub rejected it" if status is not None else "the hub could not be reached"
        raise PushError(f"--push {repository}: {what} ({reason}); {token}{later}") from error
    return url
