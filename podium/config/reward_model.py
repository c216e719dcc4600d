"""The settings of a reward model: a frozen decoder that scores each conversation with one number."""

from typing import Annotated, Literal

from pydantic import Field

from podium.config.lora import Base
from podium.config.section import Positive, Section


class RewardModelConfig(Section):
    """A reward model; it grades the tasks whose `rewards` name it (docs/rewards.md)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")]
    """Its name among the parts in `tasks[].rewards`, where its weight is, and in metrics and samples."""
    model: str
    """Folder or hub id of a `...ForSequenceClassification` model with one label. It is read again, and not saved with
    the run's checkpoints."""
    chat_template: str | None = None  # TRL: reward_processing_classes
    """Jinja file of its chat template; unset: its tokenizer's own."""
    max_tokens: Positive | None = None
    """Longest conversation in tokens of its own tokenizer, chat template included; a longer one gets no score, counted
    in `grading/unscored`. Unset: a quarter more than the policy's longest sequence, as far as it has positions."""
    standardise: Literal["none", "batch"] = "none"  # OpenRLHF: normalize_reward
    """none: the reward grows by weight x score. batch: by weight x (score - mean) / deviation, over all answers of the
    step that it scores; metrics and samples show the score itself."""
    base: Base = "bfloat16"
    """Storage format of its layers' matrices, except experts: these are bfloat16. int8: half the memory, with a scale
    per output; nf4: 0.28 of it, with a scale per 64 numbers (`lora.base`)."""
