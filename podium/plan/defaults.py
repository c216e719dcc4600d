"""Default settings for `podium plan MODEL` without a config: GSM8K, with rows and slots that fit. No jax."""

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path

from podium.accelerators import Accelerator
from podium.config.load import Loaded
from podium.models.presets import find_architecture, find_decoder
from podium.models.source import HUB_ID
from podium.plan.estimate import estimate
from podium.plan.result import judge
from podium.plan.sizes import make_sizes
from podium.run.divisible import check_divisible

PROMPTS = 16
GROUP = 8
PREFILL_ROWS = 16
PROMPT_TOKENS, NEW_TOKENS = 512, 1024
ROWS = (4, 2, 1)
"""Candidate micro-batch rows per device, largest first."""
SHARES = (1, 2, 4, 8)
"""Candidate numbers of slots, each as a divisor of a step's completions; most slots first."""

Load = Callable[..., Loaded]
"""`load(more, base)`: load the user's settings, with `more` overriding them and `base` as their defaults."""


def names_model(text: str) -> bool:
    """Whether an argument names a model rather than a config: a hub id, a model folder, a .gguf file, or `demo`."""
    path = Path(text)
    if path.is_dir() or path.suffix == ".gguf":
        return True
    return not path.exists() and path.suffix not in (".yaml", ".yml") and re.fullmatch(HUB_ID, text) is not None


def with_defaults(load: Load, model: str | None, accelerator: Accelerator) -> tuple[Load, tuple[str, ...]]:
    """Put default settings for one machine under the user's. Returns the loader and the defaults (none with a config).

    Takes the most rows and slots that fit by the closed form, or the fewest if none fit.

    Raises:
        ValueError: the model is unknown, or settings conflict with each other or with the machine.
    """
    if model is None:
        return load, ()
    base = _settings(model, accelerator)
    for rows, share in itertools.product(ROWS, SHARES):
        base = _settings(model, accelerator, rows=rows, share=share)
        config = load((), base).config
        decoder = find_decoder(config)
        check_divisible(config, decoder, accelerator)
        needed = (phase.total for phase in estimate(make_sizes(config, decoder, accelerator)))
        if judge(needed, accelerator.hbm_bytes, compiled=False) == "fits":
            break
    return functools.partial(load, base=base), tuple(base)


def _settings(model: str, accelerator: Accelerator, *, rows: int = 1, share: int = 1) -> list[str]:
    positions = find_architecture(model).max_positions
    prompt = min(PROMPT_TOKENS, positions // 2)
    sequences = max(PROMPTS * GROUP, share * accelerator.devices)
    slots = -(-sequences // (share * accelerator.devices)) * accelerator.devices
    return [
        f"model={model}",
        "tasks=[{name: gsm8k}]",
        f"prompts_per_step={-(-sequences // GROUP)}",
        f"group_size={GROUP}",
        f"rollout.max_prompt_tokens={prompt}",
        f"rollout.max_new_tokens={min(NEW_TOKENS, positions - prompt)}",
        f"rollout.slots={slots}",
        f"rollout.prefill_rows={-(-PREFILL_ROWS // accelerator.devices) * accelerator.devices}",
        f"train.rows_per_device={rows}",
    ]
