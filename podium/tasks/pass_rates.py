"""How often a model solves each training prompt: the file that `podium filter` writes and training reads.

The first line says what was measured: the model, the data of each task, and the number of answers to each prompt. Each
further line is a prompt. Prompts are identified by task and id; a file of other data or of another model is refused.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

from podium.config.data import FilterConfig
from podium.files import read_lines
from podium.tasks.task import Prompt


class Measured(TypedDict):
    """The first line of the file."""

    model: dict[str, str]
    """Size and digest of each file of the model, by name."""
    data: dict[str, str]
    """Number and digest of each task's training prompts, by the task's label."""
    samples: int
    """Number of answers to each prompt."""
    sampling: dict[str, float]
    """Sampling settings of the answers; only for information."""


class PassRate(TypedDict):
    """Each further line of the file: a prompt."""

    task: str
    prompt: str
    """Id of the prompt."""
    right: float
    """Mean of its answers' correctness, 0 to 1."""


class PassRates(NamedTuple):
    """The content of a file."""

    path: Path
    measured: Measured
    right: Mapping[str, Mapping[str, float]]
    """The share of right answers, by label and id."""

    def kept(self, label: str, prompts: Sequence[Prompt], config: FilterConfig) -> list[Prompt]:
        """The prompts of a task whose pass rates are within the configured range, in their order.

        Raises ValueError if the file is of other prompts or another number of samples, is incomplete, or leaves no
        prompts.
        """
        again = f"measure again: podium filter CONFIG, after moving {self.path} away"
        if self.measured["samples"] != config.samples:
            found = f"{self.path} has {self.measured['samples']} samples of each prompt"
            raise ValueError(f"data.filter.samples is {config.samples}, and {found}; set that, or {again}")
        if (theirs := self.measured["data"].get(label)) != (ours := digest_of(prompts)):
            raise ValueError(f"{label} has {ours}, and {self.path} is of {theirs or 'no task of this name'}; {again}")
        right = self.right.get(label, {})
        missing = sum(prompt.id not in right for prompt in prompts)
        if missing:
            raise ValueError(
                f"{self.path} lacks {missing:,} of the {len(prompts):,} prompts of {label}: measuring was interrupted;"
                " podium filter CONFIG measures the rest"
            )
        least, most = config.pass_rate
        found = [prompt for prompt in prompts if least <= right[prompt.id] <= most]
        if not found:
            raise ValueError(
                f"data.filter.pass_rate [{least:g}, {most:g}] leaves none of the {len(prompts):,} prompts of {label};"
                " widen it, or leave the task out"
            )
        return found

    def check_model(self, files: Mapping[str, str]) -> None:
        """Raise ValueError unless the pass rates were measured with a model of these files."""
        theirs = self.measured["model"]
        other = next((name for name in sorted({*theirs, *files}) if theirs.get(name) != files.get(name)), None)
        if other is not None:
            raise ValueError(
                f"{self.path} was measured with another model: {other} is {files.get(other, 'missing')} here and was"
                f" {theirs.get(other, 'missing')}; set another data.filter.file, and measure again: podium filter"
                " CONFIG"
            )


def read_pass_rates(path: Path) -> PassRates:
    """Read the file. Raises ValueError if it is missing, or was not written by `podium filter`."""
    lines = read_lines(path)
    if not lines:
        raise ValueError(f"data.filter.file {path} does not exist; podium filter CONFIG measures and writes it")
    if not isinstance(lines[0].get("data"), dict) or not isinstance(lines[0].get("model"), dict):
        raise ValueError(f"data.filter.file {path} was not written by podium filter; name another file")
    right: dict[str, dict[str, float]] = {}
    for line in cast(list[PassRate], lines[1:]):
        right.setdefault(line["task"], {})[line["prompt"]] = line["right"]
    return PassRates(path, cast(Measured, lines[0]), right)


def digest_of(prompts: Sequence[Prompt]) -> str:
    """Number of prompts, and a digest of them and their answers."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.id, prompt.question, prompt.answer, prompt.messages)).encode("utf-8", "replace"))
    return f"{len(prompts):,} prompts with digest {digest.hexdigest()[:16]}"
