"""Writes the model card of an export, from the run's records: what was trained, how, and the results."""

from pathlib import Path

import yaml

from podium.config.schema import Config
from podium.config.show import to_yaml
from podium.observe.history import read_history
from podium.observe.summary import make_summary
from podium.observe.text import clock


def model_card(folder: Path, config: Config, *, step: int) -> str:
    """The README.md for a run's weights after `step` steps, with front matter for the hub."""
    summary, history = make_summary(folder), read_history(folder)
    recipe = config.algorithm.recipe.rpartition(":")[2]
    tags = ["podium", "reinforcement-learning", recipe]
    front: dict[str, object] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    if config.model.count("/") == 1 and not Path(config.model).exists():
        front["base_model"] = config.model
    tasks = ", ".join(dict.fromkeys(task.name for task in config.tasks))
    accuracies = [point for point in history.accuracies if point[0] <= step]
    results = [f"| {at} | {accuracy:.3f} |" for at, accuracy in accuracies]
    table = ["| step | accuracy on held-out questions |", "|---:|---:|", *results] if results else ["No evaluation."]
    what, version = f"`{config.model}`, trained with {recipe} on {tasks}", summary["versions"].get("podium-rl", "")
    return "\n".join(
        [
            "---",
            yaml.safe_dump(front, sort_keys=False).strip(),
            "---",
            "",
            f"# {config.name}",
            "",
            f"{what} for {step} steps ({clock(summary['wall_s'])}) with Podium {version}.",
            "",
            *table,
            "",
            "Answers are greedy where `eval.greedy` is on, else sampled; questions too long to ask count as wrong.",
            "",
            "## Settings that are not defaults",
            "",
            "```yaml",
            to_yaml(config.model_dump(mode="json", exclude_defaults=True)).strip(),
            "```",
            "",
        ]
    )
