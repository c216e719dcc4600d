"""The settings of a teacher: a frozen model whose distributions the policy learns on its own completions."""

from collections.abc import Iterator
from typing import Literal

from podium.config.errors import Contradiction
from podium.config.lora import Base
from podium.config.message_template import template_names
from podium.config.section import Fraction, Positive, PositiveFloat, Section


class TeacherConfig(Section):
    """On-policy distillation: the teacher's model, and what it adds to the recipe (docs/algorithms.md)."""

    model: str
    """The teacher, named like `model`; it may be `model` itself, with another prompt. Its tokenizer must equal the
    policy's, token by token. It is loaded again when a run continues: checkpoints do not contain it."""
    weight: PositiveFloat = 1.0  # prime-rl: teacher_tau
    """Weight of the teacher relative to the recipe's own advantages, which are about 1 after GRPO's normalisation."""
    loss: Literal["sampled", "full"] = "sampled"
    """sampled: adds weight x (teacher's - policy's log-probability of the token) to each token's advantage. full: adds
    weight x the KL between both distributions over the whole vocabulary to the loss, which has less variance; the
    update holds the teacher's hidden states for the batch, and computes its logits as well as the policy's."""
    reverse: Fraction = 1.0  # TRL: GKD's beta
    """Share of KL(policy || teacher) in `loss: full`; the rest is KL(teacher || policy)."""
    base: Base = "bfloat16"
    """Storage format of the matrices in the teacher's layers, except experts, which stay bfloat16. int8: half the
    memory, with a scale per output; nf4: 0.28 of the memory, with a scale per 64 numbers (`lora.base`)."""
    prompt: Literal["same", "privileged"] = "same"
    """What the teacher reads before a completion. same: the policy's prompt; privileged: the same messages, but with
    the user's last message made from `template`, which may contain the solution. Only with `loss: sampled`."""
    template: str | None = None  # SDPO: reprompt_template
    """Template of the privileged message: `{question}` is the policy's message, `{answer}` the task's answer, and
    any other name a column of the task's data, such as `{solution}`; write a literal brace as `{{`."""
    max_prompt_tokens: Positive | None = None
    """Longest privileged prompt in tokens; unset: rollout.max_prompt_tokens. Prompts whose privileged form is longer
    are treated as `rollout.long_prompts` says."""


def teacher_contradictions(teacher: TeacherConfig) -> Iterator[Contradiction]:
    """Report settings of a teacher that have no effect, or that are missing."""
    if teacher.loss == "sampled" and teacher.reverse != 1:
        rule = f"{teacher.reverse:g}, and tokens that the policy draws estimate KL(policy || teacher) alone"
        yield Contradiction(("teacher.reverse", "teacher.loss"), f"{rule}; set teacher.loss to full, or leave this out")
    this = "teacher.prompt"
    if teacher.prompt == "same":
        for name, value in (("template", teacher.template), ("max_prompt_tokens", teacher.max_prompt_tokens)):
            if value is not None:
                rule = f"{value!r} has no effect, because the teacher reads the policy's prompt"
                yield Contradiction((f"teacher.{name}", this), f"{rule}; set {this} to privileged, or leave it out")
        return
    if teacher.loss == "full":
        rule = (
            "privileged places completions in other rows than the policy's, and full compares states position by "
            "position"
        )
        yield Contradiction((this, "teacher.loss"), f"{rule}; set teacher.loss to sampled, or {this} to same")
    if teacher.template is None:
        rule = "privileged needs a template for the teacher's message"
        yield Contradiction((this, "teacher.template"), f'{rule}; set teacher.template, as "{{question}} {{solution}}"')
        return
    try:
        template_names(teacher.template)
    except ValueError as error:
        yield Contradiction(("teacher.template",), str(error))
