"""The settings of a teacher: a frozen model whose distributions the policy learns, on its own completions."""

from typing import Literal

from podium.config.lora import Base
from podium.config.section import Fraction, PositiveFloat, Section


class TeacherConfig(Section):
    """On-policy distillation: the teacher's model, and what it adds to the recipe (docs/algorithms.md)."""

    model: str
    """The teacher, named like `model`. Its tokenizer must be the same, token by token. It is read again, and not saved
    with the run's checkpoints."""
    weight: PositiveFloat = 1.0
    """Weight of the teacher beside the recipe's own advantages, which are about 1 after GRPO's normalisation."""
    loss: Literal["sampled", "full"] = "sampled"
    """sampled: each token's advantage grows by weight x (teacher's - policy's log-probability of it). full: the loss
    grows by weight x the KL between both distributions over the whole vocabulary, which has less variance; the update
    holds the teacher's hidden states of the batch, and computes its logits beside the policy's."""
    reverse: Fraction = 1.0
    """Share of KL(policy || teacher) in `loss: full`; the rest is KL(teacher || policy)."""
    base: Base = "bfloat16"
    """Storage format of its layers' matrices, except experts: these are bfloat16. int8: half the memory, with a scale
    per output; nf4: 0.28 of it, with a scale per 64 numbers (`lora.base`)."""
