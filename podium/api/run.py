"""A run, as Python sees it: what it recorded, and what its weights can do."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from podium.api.data import Data, Rewards
from podium.config.schema import Config
from podium.files import as_path, read_lines
from podium.observe.run_dir import METRICS, SAMPLES, parse_fork, read_config
from podium.train.step_files import saved_steps

if TYPE_CHECKING:  # a call of `podium.grpo` speaks before it has imported jax
    from podium.api.answers import Answer, Evaluated


class Run:
    """A run's folder. Everything is read from it anew, so a run that still trains can be looked at too."""

    def __init__(self, path: str | Path) -> None:
        """The run in a folder. Raises ValueError where there is none."""
        self.path = as_path(str(path))
        self._fork = parse_fork(str(path))

    @property
    def config(self) -> Config:
        """Its settings."""
        return read_config(self.path)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A dict for each step and each evaluation, as in metrics.jsonl; names are in docs/metrics.md."""
        return read_lines(self.path / METRICS)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """A dict for each recorded prompt with its completions and their rewards, as in samples.jsonl."""
        return read_lines(self.path / SAMPLES)

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint, oldest first."""
        return sorted(saved_steps(self._fork.checkpoints))

    def generate(self, prompts: Sequence[str], *, step: int | None = None, **options: Any) -> "list[Answer]":
        """Answers of its weights (of `step`, or the newest) to prompts; options as of `podium.generate`."""
        from podium.api.answers import generate

        return generate(self._at(step), prompts, **options)

    def evaluate(
        self, data: Data | None = None, *, rewards: Rewards | None = None, step: int | None = None, **options: Any
    ) -> "Evaluated":
        """How many questions its weights answer: of `data`, or its own; options as of `podium.evaluate`."""
        from podium.api.answers import evaluate

        return evaluate(self._at(step), data, rewards=rewards, **options)

    def export(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        push: str | None = None,
        private: bool = False,
    ) -> Path:
        """Write its weights (of `step`, or the newest) as a Hugging Face model with a model card; the folder.

        `push` is the `user/name` on the hub to upload it to as well.

        Raises ValueError where there is no such checkpoint, or the folder holds something.
        """
        from podium.train.export import export_run

        export_run(self.path, Path(folder), step=step, dtype=dtype, push=push, private=private)
        return Path(folder)

    def report(self, out: str | Path = "report.html") -> Path:
        """Write the page of `podium report`; the file."""
        from podium.observe.report.page import write_report

        write_report([self.path], Path(out))
        return Path(out)

    def _at(self, step: int | None) -> str:
        return str(self.path) if step is None else f"{self.path}@{step}"

    def __repr__(self) -> str:
        """Its folder and its newest checkpoint."""
        steps = self.steps
        return f"Run({str(self.path)!r}, step {steps[-1] if steps else 0})"


def load_run(path: str | Path) -> Run:
    """The run in a folder, such as `runs/demo`. Raises ValueError where there is none."""
    return Run(path)
