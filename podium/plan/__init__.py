"""Plan runs for machines you do not have: `podium.plan("configs/demo.yaml", on="v6e-8")`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import podium

if TYPE_CHECKING:
    from podium.config.load import Loaded, Override
    from podium.plan.result import Plan

podium.make_verb(__name__)


def plan(config: str, on: str, *, settings: Sequence[str] = (), fast: bool = False, lengths: str = "gsm8k") -> "Plan":
    """Plan a run: whether it fits a machine, what limits it, and how long a step takes. Same figures as `podium plan`.

    Args:
        config: a YAML file, or a model: a hub id, a folder or a .gguf file, with the default settings.
        on: the machine, as `v6e-8` or `h100-8`.
        settings: `key=value`, as after `--set`.
        fast: use the closed form, which takes seconds; otherwise compile every program, which takes minutes once.
        lengths: source of prompt and completion lengths: `gsm8k`, `fixed:N` or the folder of a run.

    Raises:
        ValueError: the config, the machine or the lengths are invalid.
        CompilerError: a program could not be compiled.
    """
    from podium.compat.foreign_keys import offer_hints
    from podium.plan.calibration import find_machine
    from podium.plan.planner import make_plan
    from podium.plan.request.defaults import names_model, with_defaults
    from podium.plan.request.phase_sizes import Planned
    from podium.run.divisible import check_divisible
    from podium.settings import load_settings

    offer_hints()
    model, machine = config if names_model(config) else None, find_machine(on)

    def load(more: Sequence["str | Override"] = (), base: Sequence["str | Override"] = ()) -> "Loaded":
        return load_settings([] if model else [config], [*base, *settings, *more])

    load, _ = with_defaults(load, model, machine, lengths)
    run = Planned.of(load(()).config, machine)
    check_divisible(run.sizes.spec)
    return make_plan(run, fast=fast, lengths=lengths)
