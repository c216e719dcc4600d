"""Nothing of the size of a row squared is in the compiled programs that attend to rows, on CPU and TPU."""

import dataclasses
import gzip
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tiny_decoder import tiny

from podium.accelerators import GIB, Accelerator, find_accelerator
from podium.config.schema import Config
from podium.hlo.hlo_text import parse
from podium.plan.compiled.compile import compile_phases
from podium.plan.compiled.compile_worker import Job

T = 1000  # of rows and of the longest prompts, and of nothing else: it is larger than every other dimension
CPU = Accelerator(name="cpu-1", generation="cpu", devices=1, hosts=1, hbm_bytes=GIB)
MODEL = tiny(head_dim=64, max_positions=2048)
SETTINGS: dict[str, Any] = {
    "model": "none",
    "tasks": [{"name": "arithmetic"}],
    "prompts_per_step": 2,
    "group_size": 2,
    "rollout": {"max_prompt_tokens": T, "max_new_tokens": 8, "slots": 8, "prefill_rows": 8},
    "algorithm": {"old_logprobs": "trainer", "minibatches": 2},
    "train": {"row_tokens": T + 8, "rows_per_device": 2, "head_chunk_tokens": 128},
}
PHASES = ("update", "score", f"prefill:{T}")
with_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
V6E = pytest.param(find_accelerator("v6e-1"), marks=with_libtpu, id="v6e-1")


def squares(accelerator: Accelerator, folder: Path, phases: tuple[str, ...] = PHASES, **train: Any) -> list[str]:
    """Arrays of the programs that have two dimensions of a row, or one of its square."""
    config = Config.model_validate({**SETTINGS, "train": {**SETTINGS["train"], **train}})
    job = Job(phase="", config=config, decoder=MODEL, accelerator=accelerator, programs=folder / "programs")
    compile_phases([dataclasses.replace(job, phase=phase) for phase in phases], folder=folder)
    texts = [gzip.decompress(path.read_bytes()).decode() for path in (folder / "programs").glob("*.hlo.gz")]
    assert len(texts) == len(phases)
    shapes = {
        str(shape): shape.dims
        for text in texts
        for computation in parse(text).computations.values()
        for instruction in computation.instructions.values()
        for shape in instruction.shapes
    }
    assert shapes
    return [name for name, dims in shapes.items() if sum(dim >= T for dim in dims) > 1 or max(dims, default=0) >= T * T]


@pytest.mark.parametrize("accelerator", [pytest.param(CPU, id="cpu"), V6E])
def test_no_program_that_attends_to_rows_holds_all_their_scores(accelerator, tmp_path):
    assert squares(accelerator, tmp_path) == []


def test_the_reference_holds_them(tmp_path):
    assert squares(CPU, tmp_path, phases=("score",), attention="reference")


pytestmark = pytest.mark.long  # minutes; `make test-long` runs it
