"""A run's weights as a Hugging Face model, for everybody else."""

from pathlib import Path
from typing import Literal

from podium.files import as_path
from podium.models.hf import save_model
from podium.observe.run_dir import parse_fork, read_config
from podium.train.setup import load_weights, make_model
from podium.train.step_files import saved_steps


def export_run(run: str | Path, folder: Path, *, step: int | None, dtype: Literal["bfloat16", "float32"]) -> int:
    """Write config, tokenizer and safetensors of a run's checkpoint to `folder`; the exit status of `podium export`.

    The run is a folder, or `RUN@STEP`, where `step` overrides STEP; without either it is the newest checkpoint.

    Raises:
        ValueError: there is no such checkpoint, it is damaged, or `folder` holds something.
    """
    fork = parse_fork(str(run))
    fork = fork if step is None else fork._replace(step=step)
    model = make_model(read_config(as_path(fork.run)))
    save_model(load_weights(model, fork), model.decoder, model.tokenizer, folder, dtype=dtype)
    written = fork.step if fork.step is not None else saved_steps(fork.checkpoints)[-1]
    print(f"{fork.run}@{written} -> {folder}: AutoModelForCausalLM.from_pretrained({str(folder)!r}) loads it")
    return 0
