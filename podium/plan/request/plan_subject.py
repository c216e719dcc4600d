"""What the user names: configs, or a model with default settings: GSM8K, with rows and slots that fit. No jax."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from podium.accelerators import Accelerator
from podium.config.document import Plain
from podium.config.load import Loaded, Override
from podium.models.files.source import HUB_ID
from podium.models.presets import find_architecture
from podium.plan.request.phase_sizes import Planned
from podium.plan.search.fit_candidates import Halves, fastest
from podium.run.divisible import check_divisible
from podium.settings import Settings, load_settings

ORIGIN = "default of podium plan"
PROMPTS = 16
GROUP = 8
PREFILL_ROWS = 16
PROMPT_TOKENS, NEW_TOKENS = 512, 1024
LEAST = 8
"""Divisor of a step's completions that gives the slots of a model that does not fit."""


def names_model(text: str) -> bool:
    """Whether an argument names a model rather than a config: a hub id, a model folder, a .gguf file, or `demo`."""
    path = Path(text)
    if path.is_dir() or path.suffix == ".gguf":
        return True
    return not path.exists() and path.suffix not in (".yaml", ".yml") and re.fullmatch(HUB_ID, text) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is planned, as the user names it: configs, or a model with default settings."""

    files: Sequence[str] = ()
    """Configs; later ones win."""
    model: str | None = None
    """The model to plan with default settings; None with configs."""
    settings: Sequence[str] = ()
    """`key=value`, as after `--set`."""

    @classmethod
    def named(cls, names: Sequence[str], settings: Sequence[str]) -> "Subject":
        """The subject of a command's arguments: configs, or a single model."""
        if len(names) == 1 and names_model(names[0]):
            return cls(model=names[0], settings=settings)
        return cls(files=names, settings=settings)

    def __str__(self) -> str:
        """The arguments as the user wrote them."""
        return self.model or " ".join(self.files)

    def load(self, more: Sequence[str | Override] = (), base: Sequence[str | Override] = ()) -> Settings:
        """Load the user's settings, with `more` overriding them and `base` as their defaults.

        Raises ConfigError if they contradict each other.
        """
        return load_settings(self.files, [*base, *self.settings, *more])

    def defaults(self, machine: Accelerator, lengths: str = "gsm8k") -> tuple[Override, ...]:
        """The default settings of a model for one machine, to be put under the user's; none with a config.

        Rows, slots and memory-saving settings are the fastest that fit by the closed form for these lengths; if nothing
        fits, as little as possible is computed at once.

        Raises:
            ValueError: the model is unknown, or settings conflict with each other or with the machine.
        """
        if self.model is None:
            return ()
        base = _settings(self.model, machine)
        loaded = self.load(base=base)
        run = Planned.of(loaded.config, machine, recipe=loaded.recipe)
        check_divisible(run.sizes.spec)
        found = fastest(Halves(run, lengths, given(loaded)))
        if found is None:
            return tuple(_settings(self.model, machine, rows=1, share=LEAST))
        chosen = {each.key: Override(each.key, each.value, ORIGIN) for each in found}
        return (*(chosen.pop(each.key, each) for each in base), *chosen.values())


def given(loaded: Loaded) -> frozenset[str]:
    """The settings that the user gave on the command line or in the environment, which a search leaves as they are."""
    origins = loaded.provenance.items()
    return frozenset(key for key, origin in origins if origin.startswith(("--set ", "environment ")))


def _settings(model: str, accelerator: Accelerator, *, rows: int = 4, share: int = 1) -> list[Override]:
    positions = find_architecture(model).max_positions
    prompt = min(PROMPT_TOKENS, positions // 2)
    sequences = max(PROMPTS * GROUP, share * accelerator.devices)
    settings: dict[str, Plain] = {
        "model": model,
        "tasks": [{"name": "gsm8k"}],
        "prompts_per_step": -(-sequences // GROUP),
        "group_size": GROUP,
        "rollout.max_prompt_tokens": prompt,
        "rollout.max_new_tokens": min(NEW_TOKENS, positions - prompt),
        "rollout.slots": -(-sequences // (share * accelerator.devices)) * accelerator.devices,
        "rollout.prefill_rows": -(-PREFILL_ROWS // accelerator.devices) * accelerator.devices,
        "train.rows_per_device": rows,
    }
    return [Override(key, value, ORIGIN) for key, value in settings.items()]
