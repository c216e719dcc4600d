"""The settings that choose prompts, by what was measured before the run or is learned during it."""

from typing import Annotated

from pydantic import Field

from podium.config.section import Fraction, Positive, Section


class FilterConfig(Section):
    """Selects training prompts by how often the run's model solves them before the run, as measured by `podium
    filter`.
    """

    file: str
    """File of the measured shares of right answers, written by `podium filter` for one model, data set and number of
    samples."""
    # prime-rl: easy_threshold, hard_threshold
    pass_rate: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.1, 0.9]
    """Lowest and highest share of right answers at which a prompt is kept."""
    samples: Positive = 8
    """Answers sampled per prompt, with the settings of `rollout`."""


class RetireConfig(Section):
    """Stops drawing prompts once they are solved."""

    pass_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9  # prime-rl: easy_threshold
    """A prompt is not drawn again once this share of its group's answers is right."""
    keep: Positive = 64
    """Prompts per task, or per curriculum level, that are never retired, however often they are solved."""


class ProgressConfig(Section):
    """Draws tasks more often the faster they are learned (arXiv:1707.00183, whose code is TSCL)."""

    window: Annotated[int, Field(ge=4)] = 32  # TSCL: window_size
    """Recent groups per task from which progress is computed: how far the mean share of right answers in the newer half
    is from that in the older half."""
    spread: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2  # TSCL: epsilon
    """Share of prompts drawn by the tasks' weights alone, so that no task is forgotten; 1: all prompts."""


class DataConfig(Section):
    """Which prompts are drawn (docs/tasks.md). What a run has measured about its prompts is saved in checkpoints."""

    filter: FilterConfig | None = None
    """Leave out prompts that the model solves too often or too rarely; unset: train on all."""
    retire: RetireConfig | None = None
    """Leave out prompts once they are solved; unset: leave none out."""
    progress: ProgressConfig | None = None
    """Draw tasks by their progress instead of by their weights alone; unset: by weight."""
