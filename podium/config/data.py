"""The settings of which prompts are drawn: measured before the run, and learned during it."""

from typing import Annotated

from pydantic import Field

from podium.config.section import Fraction, Positive, Section


class FilterConfig(Section):
    """Prompts to train on, by how often the run's model solves them before the run; `podium filter` measures it."""

    file: str
    """File of the measured shares, which `podium filter` writes: for one model, one set of data and one number of
    samples."""
    # prime-rl: easy_threshold, hard_threshold
    pass_rate: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.1, 0.9]
    """Least and largest share of right answers of a prompt that is kept."""
    samples: Positive = 8
    """Answers to each prompt, drawn with the settings of `rollout`."""


class RetireConfig(Section):
    """Prompts that are solved are not drawn again."""

    pass_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9  # prime-rl: easy_threshold
    """Share of right answers in one group from which on its prompt is not drawn again."""
    keep: Positive = 64
    """Prompts of each task, or of each level of a curriculum, that are drawn on however well they go."""


class ProgressConfig(Section):
    """Tasks are drawn by how fast they are learned (arXiv:1707.00183, whose code is TSCL)."""

    window: Annotated[int, Field(ge=4)] = 32  # TSCL: window_size
    """Groups of each task that count, the last ones: progress is how far the mean of the newer half is from that of the
    older."""
    spread: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2  # TSCL: epsilon
    """Share of prompts that are drawn by the tasks' weights alone, so that none is forgotten; 1: all of them."""


class DataConfig(Section):
    """Which prompts are drawn (docs/tasks.md). What a run learns of them is saved with its checkpoints."""

    filter: FilterConfig | None = None
    """Leave out prompts that the model solves always or never; unset: train on all."""
    retire: RetireConfig | None = None
    """Leave out prompts once they are solved; unset: none."""
    progress: ProgressConfig | None = None
    """Draw tasks by their progress instead of by their weights alone; unset: by weight."""
