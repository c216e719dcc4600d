"""Plan runs for machines you do not have: `podium.plan("configs/demo.yaml", on="v6e-8")`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import podium

if TYPE_CHECKING:
    from podium.plan.result import Plan

podium.make_verb(__name__)


def plan(config: str, on: str, *, settings: Sequence[str] = (), fast: bool = False, lengths: str = "gsm8k") -> "Plan":
    """Plan a run: whether it fits a machine, what limits it, and how long a step takes. Same figures as `podium plan`.

    Args:
        config: a YAML file, or a model: a hub id, a folder or a .gguf file, with the default settings.
        on: the machine, as `v6e-8` or `h100-8`.
        settings: `key=value`, as after `--set`.
        fast: trace the programs and compile only those that decide, which takes seconds; otherwise compile every
            program, which takes minutes once.
        lengths: source of prompt and completion lengths: `gsm8k`, `fixed:N` or the folder of a run.

    Raises:
        ValueError: the config, the machine or the lengths are invalid.
        CompilerError: a program could not be compiled.
    """
    from podium.compat.foreign_keys import foreign_key
    from podium.config.hints import offer
    from podium.plan.calibration import find_machine
    from podium.plan.planner import make_plan
    from podium.plan.request.candidate import Case
    from podium.plan.request.plan_subject import Subject
    from podium.plan.search.study import Study
    from podium.run.divisible import check_divisible

    offer(foreign_key)
    run = Study(Subject.named([config], settings), lengths=lengths).run(Case(find_machine(on)))
    check_divisible(run.sizes.spec)
    return make_plan(run, by="trace" if fast else "compiler", lengths=lengths)
