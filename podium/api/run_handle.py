"""A run in Python: its records, and functions that use its weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from podium.api.given_data import Rewards
from podium.api.rows import Data
from podium.config.schema import Config
from podium.files import as_path
from podium.observe.history import Point, read_history
from podium.observe.html_table import table
from podium.observe.metrics import ACCURACY, REWARD
from podium.observe.notebook import curve_image
from podium.observe.records import MetricsRecord, SampleRecord, read_metrics, read_samples, step_of
from podium.observe.run_dir import METRICS, SAMPLES, parse_fork, read_config, saved_steps
from podium.observe.summary import times

if TYPE_CHECKING:  # `podium.grpo` prints a line before it imports jax
    from podium.api.answers import Answer, Evaluated


class Run:
    """A run's folder. Every access reads the files again, so a run that is still training can be inspected."""

    def __init__(self, path: str | Path) -> None:
        """Open the run in a folder. Raises ValueError if the folder does not contain a run."""
        self.path = as_path(str(path))
        self._fork = parse_fork(str(path))

    @property
    def config(self) -> Config:
        """The run's settings."""
        return read_config(self.path)

    @property
    def metrics(self) -> list[MetricsRecord]:
        """One dict per step, including the metrics of its evaluation, if any; names are in docs/metrics.md.

        Step 0 is the evaluation before training.
        """
        steps: dict[int, MetricsRecord] = {}
        for line in read_metrics(self.path / METRICS):
            steps.setdefault(step_of(line), {}).update(line)
        return list(steps.values())

    @property
    def samples(self) -> list[SampleRecord]:
        """One dict per recorded prompt, with its completions and their rewards, as in samples.jsonl."""
        return read_samples(self.path / SAMPLES)

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint, oldest first."""
        return sorted(saved_steps(self._fork.checkpoints))

    def generate(
        self,
        prompts: Sequence[str],
        *,
        step: int | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        system_prompt: str | None = None,
        seed: int = 0,
        **settings: object,
    ) -> "list[Answer]":
        """Answer prompts as the run does, with its weights of `step` or the newest; see `podium.generate`."""
        from podium.api.answers import generate

        return generate(
            self._at(step),
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            system_prompt=system_prompt,
            seed=seed,
            **settings,
        )

    def evaluate(
        self,
        data: Data | None = None,
        *,
        rewards: Rewards | None = None,
        step: int | None = None,
        subset: str | None = None,
        question: str | None = None,
        answer: str = "answer",
        system_prompt: str | None = None,
        **settings: object,
    ) -> "Evaluated":
        """Evaluate the run's weights on `data`, or on the run's held-out questions; other arguments as in
        `podium.evaluate`.
        """
        from podium.api.answers import evaluate

        return evaluate(
            self._at(step),
            data,
            rewards=rewards,
            subset=subset,
            question=question,
            answer=answer,
            system_prompt=system_prompt,
            **settings,
        )

    def export(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        push: str | None = None,
        private: bool = False,
    ) -> Path:
        """Export the run's weights (of `step`, or the newest) as a Hugging Face model; returns the folder.

        `push` is the `user/name` on the hub to upload the folder to.

        Raises ValueError if the checkpoint does not exist, or if the folder is not empty.
        """
        from podium.train.export import export_run

        export_run(self.path, Path(folder), step=step, dtype=dtype, push=push, private=private)
        return Path(folder)

    def report(self, out: str | Path = "report.html") -> Path:
        """Write the page of `podium report`; returns its path."""
        from podium.observe.report.report_page import write_report

        write_report([self.path], Path(out))
        return Path(out)

    def _at(self, step: int | None) -> str:
        return str(self.path) if step is None else f"{self.path}@{step}"

    def _repr_html_(self) -> str:
        """Show the reward curve and the improvement in a notebook."""
        history = read_history(self.path)
        rewards, accuracies = history.points(REWARD), history.points(ACCURACY)
        curve = curve_image(self.path.name, rewards, accuracies) if rewards else ""
        gained = {"mean reward": rewards, "held-out accuracy": accuracies}
        facts = [(name, _first_and_last(points)) for name, points in gained.items() if points]
        checkpoints = self.steps
        facts += [
            ("steps", str(history.steps)),
            ("time", times(history)),
            ("newest checkpoint", f"step {checkpoints[-1]}" if checkpoints else "none"),
            ("folder", str(self.path)),
        ]
        return curve + table((), facts)

    def __repr__(self) -> str:
        """Show the run's folder and its newest checkpoint."""
        steps = self.steps
        return f"Run({str(self.path)!r}, step {steps[-1] if steps else 0})"


def _first_and_last(points: Sequence[Point]) -> str:
    (_, first), (step, last) = points[0], points[-1]
    return f"{first:.3f}" if len(points) == 1 else f"{first:.3f} to {last:.3f} (step {step})"


def load_run(path: str | Path) -> Run:
    """Open the run in a folder, such as `runs/demo`. Raises ValueError if the folder does not contain a run."""
    return Run(path)
