"""The settings of a reward model: a frozen decoder that scores each conversation with one number."""

from typing import Annotated, Literal

from pydantic import Field

from podium.config.lora import Base
from podium.config.section import Positive, Section


class RewardModelConfig(Section):
    """A reward model; it grades the tasks whose `rewards` name it (docs/rewards.md)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")]
    """Name of the reward model as a part in `tasks[].rewards`, which sets its weight, and in metrics and samples."""
    model: str
    """Folder or hub id of a `...ForSequenceClassification` model with one label. It is loaded from there again when a
    run continues: checkpoints do not contain it."""
    chat_template: str | None = None  # TRL: reward_processing_classes
    """Jinja file of the chat template; unset: the one of its tokenizer."""
    max_tokens: Positive | None = None
    """Longest conversation in tokens of the reward model's tokenizer, chat template included; longer ones get no score
    and are counted in `grading/unscored`. Unset: a quarter more than the policy's longest sequence, up to the reward
    model's number of positions."""
    standardise: Literal["none", "batch"] = "none"  # OpenRLHF: normalize_reward
    """none: the reward grows by weight x score. batch: by weight x (score - mean) / deviation, over all answers that it
    scores in the step; metrics and samples show the score itself."""
    base: Base = "bfloat16"
    """Storage format of the matrices in the model's layers, except experts, which stay bfloat16. int8: half the
    memory, with a scale per output; nf4: 0.28 of the memory, with a scale per 64 numbers (`lora.base`)."""
