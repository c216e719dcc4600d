"""The settings of a teacher: a frozen model whose distributions the policy learns, on its own completions."""

from collections.abc import Iterator
from typing import Literal

from podium.config.errors import Contradiction
from podium.config.lora import Base
from podium.config.message_template import template_names
from podium.config.section import Fraction, Positive, PositiveFloat, Section


class TeacherConfig(Section):
    """On-policy distillation: the teacher's model, and what it adds to the recipe (docs/algorithms.md)."""

    model: str
    """The teacher, named like `model`, or `model` itself behind another prompt. Its tokenizer must be the same, token
    by token. It is read again, and not saved with the run's checkpoints."""
    weight: PositiveFloat = 1.0  # prime-rl: teacher_tau
    """Weight of the teacher beside the recipe's own advantages, which are about 1 after GRPO's normalisation."""
    loss: Literal["sampled", "full"] = "sampled"
    """sampled: each token's advantage grows by weight x (teacher's - policy's log-probability of it). full: the loss
    grows by weight x the KL between both distributions over the whole vocabulary, which has less variance; the update
    holds the teacher's hidden states of the batch, and computes its logits beside the policy's."""
    reverse: Fraction = 1.0  # TRL: GKD's beta
    """Share of KL(policy || teacher) in `loss: full`; the rest is KL(teacher || policy)."""
    base: Base = "bfloat16"
    """Storage format of its layers' matrices, except experts: these are bfloat16. int8: half the memory, with a scale
    per output; nf4: 0.28 of it, with a scale per 64 numbers (`lora.base`)."""
    prompt: Literal["same", "privileged"] = "same"
    """What the teacher reads before a completion. same: the policy's prompt; privileged: the same messages, but the
    last one of the user is made from `template`, which may tell the solution. Only with `loss: sampled`."""
    template: str | None = None  # SDPO: reprompt_template
    """The privileged message: `{question}` is the policy's message, `{answer}` the reference answer, and any other name
    a column of the task's data, such as `{solution}`; `{{` is a brace."""
    max_prompt_tokens: Positive | None = None
    """Longest privileged prompt in tokens; unset: rollout.max_prompt_tokens. Prompts whose privileged form is longer
    are treated as `rollout.long_prompts` says."""


def teacher_contradictions(teacher: TeacherConfig) -> Iterator[Contradiction]:
    """What is wrong with the settings of a teacher: those that nothing reads, or that are missing."""
    if teacher.loss == "sampled" and teacher.reverse != 1:
        rule = f"{teacher.reverse:g}, and tokens that the policy draws estimate KL(policy || teacher) alone"
        yield Contradiction(("teacher.reverse", "teacher.loss"), f"{rule}; set teacher.loss to full, or leave this out")
    this = "teacher.prompt"
    if teacher.prompt == "same":
        for name, value in (("template", teacher.template), ("max_prompt_tokens", teacher.max_prompt_tokens)):
            if value is not None:
                rule = f"{value!r}, and the teacher reads the policy's prompt, so nothing reads it"
                yield Contradiction((f"teacher.{name}", this), f"{rule}; set {this} to privileged, or leave it out")
        return
    if teacher.loss == "full":
        rule = "privileged puts completions in other rows than the policy's, and full compares states place by place"
        yield Contradiction((this, "teacher.loss"), f"{rule}; set teacher.loss to sampled, or {this} to same")
    if teacher.template is None:
        rule = "privileged needs the text of the teacher's message"
        yield Contradiction((this, "teacher.template"), f'{rule}; set teacher.template, as "{{question}} {{solution}}"')
        return
    try:
        template_names(teacher.template)
    except ValueError as error:
        yield Contradiction(("teacher.template",), str(error))
