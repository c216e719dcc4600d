"""Checks that all hosts of a run read the same model and the same questions.

The launch guard compares settings before jax starts, but files at equal paths may differ. With different weights or
questions on one host, training would silently go wrong. So before the weights are loaded, the hosts exchange hashes of
what they read.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from podium.hosts.distributed import gather
from podium.job.guard import GuardError
from podium.models.files.source import ModelSource
from podium.tasks.mixture import TaskMixture, TaskPrompt

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.gguf", "*.model", "*.txt")
BLOCK, BLOCKS = 4096, 64
"""Bytes per sample of a file, and the number of samples, evenly spaced over the file."""
QUESTIONS = 20_000
"""Maximum number of questions compared per split; of larger splits, evenly spaced ones."""
SHOWN = 3


def check_same_inputs(
    source: ModelSource,
    adapter: str | None,
    others: Mapping[str, ModelSource],
    tasks: TaskMixture,
    *,
    evaluates: bool,
    columns: Sequence[str] = (),
    demonstrations: TaskMixture | None = None,
) -> None:
    """Compare models, adapter and questions with those of the other hosts; every process must call this.

    Args:
        source: the source of the model on this host.
        adapter: folder of the adapter that training begins with, if any.
        others: the sources of the run's other models, by title.
        tasks: the tasks, whose data is read here.
        evaluates: whether the run will read evaluation questions.
        columns: further columns of the training data that the run reads.
        demonstrations: the tasks of the demonstrations that the run mixes in; None if the run has none.

    Raises:
        GuardError: a host reads other files or data than process 0; the message names host and file or task.
    """
    found = model_files(source.path)
    if adapter is not None:
        found |= {f"lora.adapter {name}": each for name, each in model_files(Path(adapter)).items()}
    for what, other in others.items():
        found |= {f"{what}'s {name}": each for name, each in model_files(other.path).items()}
    if demonstrations is not None:
        own = questions(demonstrations, evaluates=False)
        found |= {f"demonstrations, {name}": digest for name, digest in own.items()}
    compare(gather(found | questions(tasks, evaluates=evaluates, columns=columns)))


def compare(found: Sequence[Mapping[str, str]]) -> None:
    """Raise GuardError unless all hosts have read the same as the first."""
    first = found[0]
    problems: list[str] = []
    for worker, theirs in enumerate(found[1:], start=1):
        differences = [
            f"{name} is {theirs.get(name, 'missing')} on worker {worker} and {first.get(name, 'missing')} on worker 0"
            for name in dict.fromkeys((*first, *theirs))
            if first.get(name) != theirs.get(name)
        ]
        more = [f"and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
        problems += differences[:SHOWN] + more
    if problems:
        raise GuardError(
            f"workers read different models or data: {'; '.join(problems)}; copy the same files to all workers"
        )


def model_files(path: Path) -> dict[str, str]:
    """Size and sampled digest of each file of a model, by name; `path` is a folder or a single file."""
    files = [path] if path.is_file() else sorted({file for pattern in MODEL_FILES for file in path.glob(pattern)})
    return {f"model file {file.name}": file_fingerprint(file) for file in files}


def file_fingerprint(path: Path) -> str:
    """The size of a file and a digest of samples of it, all of a small one: cheap however large the file is."""
    digest, size = hashlib.sha256(), path.stat().st_size
    last = max(0, size - BLOCK)
    with path.open("rb") as file:
        if size <= BLOCK * BLOCKS:
            digest.update(file.read())
        else:
            for index in range(BLOCKS):
                os.lseek(file.fileno(), last * index // (BLOCKS - 1), os.SEEK_SET)
                digest.update(os.read(file.fileno(), BLOCK))
    return f"{size:,} bytes with digest {digest.hexdigest()[:12]}"


def questions(tasks: TaskMixture, *, evaluates: bool, columns: Sequence[str] = ()) -> dict[str, str]:
    """Number and digest of the questions of each task and split; digests of training questions include `columns`."""
    trained = tasks.train_prompts()
    found = {f"training questions of {label}": _digest(each, columns) for label, each in trained.items()}
    if evaluates:
        found |= {f"evaluation questions of {label}": _digest(each, ()) for label, each in tasks.eval_prompts().items()}
    return found


def _digest(prompts: Sequence[TaskPrompt], columns: Sequence[str]) -> str:
    digest, count = hashlib.sha256(), len(prompts)
    compared = min(count, QUESTIONS)
    for index in range(compared):
        prompt = prompts[index * count // compared].prompt
        parts = (prompt.id, prompt.question, prompt.answer, prompt.messages)
        digest.update(repr(parts).encode("utf-8", "surrogatepass"))
        for name in columns:
            digest.update(repr(prompt.metadata.get(name)).encode("utf-8", "surrogatepass"))
    return f"{count:,} questions with digest {digest.hexdigest()[:12]}"
