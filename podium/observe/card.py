"""Writes the model card of an export, from the run's records: what was trained, how, and the results."""

from pathlib import Path
from typing import Protocol

import yaml

from podium.config.schema import Config
from podium.config.show import to_yaml
from podium.observe.history import read_history
from podium.observe.metrics import ACCURACY
from podium.observe.summary import make_summary
from podium.observe.text import clock


class Base(Protocol):
    """The model that a run started from."""

    @property
    def hub_id(self) -> str | None:
        """The model's name on the hub; None if it is not there."""
        ...

    @property
    def same_weights(self) -> bool:
        """Whether the run started from the hub's weights as they are; otherwise from weights derived from them."""
        ...

    @property
    def license(self) -> str | None:
        """The hub's short name of the model's licence; None if unknown."""
        ...


def model_card(folder: Path, config: Config, *, step: int, adapter: bool, base: Base) -> str:
    """The README.md for a run's weights after `step` steps, with front matter for the hub.

    `adapter`: whether the weights are a LoRA adapter, which PEFT adds to the base model.
    """
    summary, history = make_summary(folder), read_history(folder)
    recipe = config.algorithm.recipe.rpartition(":")[2]
    tasks = ", ".join(dict.fromkeys(task.name for task in config.tasks))
    results = [f"| {at} | {accuracy:.3f} |" for at, accuracy in history.points(ACCURACY) if at <= step]
    table = ["| step | accuracy on held-out questions |", "|---:|---:|", *results] if results else ["No evaluation."]
    what = f"`{base.hub_id or Path(config.model).name}`, trained with {recipe} on {tasks}"
    version = summary["versions"].get("podium-rl", "")
    licence = f"`{base.license}`, that of the base model" if base.license else "that of the base model"
    return "\n".join(
        [
            "---",
            yaml.safe_dump(_front_matter(recipe, adapter=adapter, base=base), sort_keys=False).strip(),
            "---",
            "",
            f"# {config.name}",
            "",
            f"{what} for {step} steps ({clock(summary['wall_s'])}) with Podium {version}. Licence: {licence}.",
            "",
            "```python",
            *_snippet(adapter=adapter, base=base.hub_id if base.same_weights else None),
            "```",
            "",
            *table,
            "",
            "Answers are greedy if `eval.greedy` is on, otherwise sampled; questions that are too long count as wrong.",
            "",
            "## Settings that are not defaults",
            "",
            "```yaml",
            to_yaml(config.model_dump(mode="json", exclude_defaults=True)).strip(),
            "```",
            "",
        ]
    )


def _front_matter(recipe: str, *, adapter: bool, base: Base) -> dict[str, object]:
    front: dict[str, object] = {"library_name": "peft" if adapter else "transformers"}
    front["pipeline_tag"] = "text-generation"
    front["tags"] = ["podium", "reinforcement-learning", recipe, *(["lora"] if adapter else [])]
    if base.hub_id is not None:
        front["base_model"] = base.hub_id
        front["base_model_relation"] = "adapter" if adapter else "finetune"
    if base.license is not None:
        front["license"] = base.license
    return front


def _snippet(*, adapter: bool, base: str | None) -> list[str]:
    """Python that loads the weights and asks a question; `THIS` in the code is the folder or repository of the card.

    `base`: the base model's hub id; None if its weights are not on the hub.
    """
    this = 'THIS = "..."  # the folder with this file, or its repository on the hub'
    question = 'messages = [{"role": "user", "content": "What is 3 + 4?"}]'
    if adapter:
        load = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            this,
            f'BASE = "{base}"' if base else 'BASE = "..." # the model that the adapter was trained on',
            "model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), THIS)",
            "tokenizer = AutoTokenizer.from_pretrained(BASE)",
        ]
    else:
        load = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            this,
            "model = AutoModelForCausalLM.from_pretrained(THIS)",
            "tokenizer = AutoTokenizer.from_pretrained(THIS)",
        ]
    return [
        *load,
        question,
        'options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}',
        "inputs = tokenizer.apply_chat_template(messages, **options)",
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))",
    ]
