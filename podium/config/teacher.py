"""The settings of a teacher: a frozen model whose distribution the policy learns from, at its own completions."""

from podium.config.lora import Base
from podium.config.section import PositiveFloat, Section


class TeacherConfig(Section):
    """On-policy distillation: the teacher's model, and what it adds to the recipe (docs/algorithms.md)."""

    model: str
    """The teacher, named like `model`. Its tokenizer must be the same, token by token. It is read again, and not saved
    with the run's checkpoints."""
    weight: PositiveFloat = 1.0
    """Each token's advantage grows by weight x (teacher's - policy's log-probability of it), beside the recipe's own
    advantages, which are about 1 after GRPO's normalisation."""
    base: Base = "bfloat16"
    """Storage format of its layers' matrices, except experts: these are bfloat16. int8: half the memory, with a scale
    per output."""
