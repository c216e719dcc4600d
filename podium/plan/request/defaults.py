"""Default settings for `podium plan MODEL` without a config: GSM8K, with rows and slots that fit. No jax."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

from podium.accelerators import Accelerator
from podium.config.document import Plain
from podium.config.load import Loaded, Override
from podium.models.files.source import HUB_ID
from podium.models.presets import find_architecture
from podium.plan.request.phase_sizes import Planned
from podium.plan.search.fit import fastest
from podium.plan.search.fit_candidates import Halves
from podium.run.divisible import check_divisible

ORIGIN = "default of podium plan"
PROMPTS = 16
GROUP = 8
PREFILL_ROWS = 16
PROMPT_TOKENS, NEW_TOKENS = 512, 1024
LEAST = 8
"""Divisor of a step's completions that gives the slots of a model that does not fit."""

Load = Callable[..., Loaded]
"""`load(more, base)`: load the user's settings, with `more` overriding them and `base` as their defaults."""


def names_model(text: str) -> bool:
    """Whether an argument names a model rather than a config: a hub id, a model folder, a .gguf file, or `demo`."""
    path = Path(text)
    if path.is_dir() or path.suffix == ".gguf":
        return True
    return not path.exists() and path.suffix not in (".yaml", ".yml") and re.fullmatch(HUB_ID, text) is not None


def with_defaults(
    load: Load, model: str | None, accelerator: Accelerator, lengths: str = "gsm8k"
) -> tuple[Load, tuple[Override, ...]]:
    """Put default settings for one machine under the user's. Returns the loader and the defaults (none with a config).

    Rows, slots and memory-saving settings are the fastest that fit by the closed form for these lengths; if nothing
    fits, as little as possible is computed at once.

    Raises:
        ValueError: the model is unknown, or settings conflict with each other or with the machine.
    """
    if model is None:
        return load, ()
    base = _settings(model, accelerator)
    loaded = load((), base)
    run = Planned.of(loaded.config, accelerator)
    check_divisible(run.sizes.spec)
    found = fastest(Halves(run, lengths, given(loaded)))
    if found is None:
        base = _settings(model, accelerator, rows=1, share=LEAST)
    else:
        chosen = {each.key: Override(each.key, each.value, ORIGIN) for each in found}
        base = [chosen.pop(each.key, each) for each in base] + list(chosen.values())
    return functools.partial(load, base=base), tuple(base)


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
