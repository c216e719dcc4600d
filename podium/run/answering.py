"""How a run's weights answer questions, the same in evaluations, `podium.generate`, `chat` and `serve`. No jax."""

import dataclasses
from collections.abc import Sequence

from podium.config.schema import Config, EvalConfig
from podium.models.text.chat_format import Message, with_system_prompt
from podium.plain import number_of
from podium.rollout.request import SamplingParams
from podium.run.resolve import sampling_params
from podium.tasks.conversations.environment_forms import led_by_program
from podium.tasks.registry import make_task, task_labels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a caller sets about its answers; None: use the run's setting."""

    system_prompt: str | None = None
    """System message; an empty text for none."""
    max_new_tokens: int | None = None
    temperature: float | None = None
    """Sampling temperature; 0 for greedy."""
    repetition_penalty: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answering:
    """How answers are sampled, and the system prompt. Chat template and its options belong to the tokenizer."""

    system_prompt: str | None
    sampling: SamplingParams
    notice: str = ""
    """A sentence for the user if one of several tasks' system prompts had to be chosen; otherwise empty."""

    def messages(self, conversation: Sequence[Message]) -> list[Message]:
        """The conversation, preceded by the system prompt unless it has a system message already."""
        return with_system_prompt(conversation, self.system_prompt)


def resolve_answering(config: Config, asked: Asked) -> Answering:
    """Combine a run's settings for answers with those that the caller asks for.

    Raises ValueError if an asked value is invalid, or if a task of the run cannot be created, so that its system prompt
    is unknown.
    """
    _check(asked)
    sampling = sampling_params(config.rollout)
    if asked.temperature is not None:
        sampling = sampling.at(asked.temperature)
    if asked.max_new_tokens is not None:
        sampling = dataclasses.replace(sampling, max_new_tokens=asked.max_new_tokens)
    if asked.repetition_penalty is not None:
        sampling = dataclasses.replace(sampling, repetition_penalty=asked.repetition_penalty)
    if asked.system_prompt is not None:
        return Answering(system_prompt=asked.system_prompt or None, sampling=sampling)
    prompt, notice = _system_prompt(config)
    return Answering(system_prompt=prompt, sampling=sampling, notice=notice)


def _check(asked: Asked) -> None:
    """Raise ValueError for values of a wrong type or range: callers may pass anything."""
    if asked.system_prompt is not None and not isinstance(asked.system_prompt, str):
        raise ValueError(f"system_prompt: expected a text, got {asked.system_prompt!r:.80}")
    temperature, penalty = asked.temperature, asked.repetition_penalty
    if temperature is not None and ((found := number_of(temperature)) is None or found < 0):
        raise ValueError(f"temperature: expected a number of at least 0 (greedy), got {temperature!r:.80}")
    if penalty is not None and ((found := number_of(penalty)) is None or found <= 0):
        raise ValueError(f"repetition_penalty: expected a number above 0 (1: none), got {penalty!r:.80}")


def evaluation_sampling(sampling: SamplingParams, evaluation: EvalConfig, *, greedy: bool) -> SamplingParams:
    """Sampling settings for an evaluation's greedy or sampled answers, derived from those of training."""
    drawn = dataclasses.replace(sampling, repetition_penalty=evaluation.repetition_penalty, greedy_completion=None)
    return drawn.at(0.0 if greedy else evaluation.temperature)


def _system_prompt(config: Config) -> tuple[str | None, str]:
    """The system prompt of the run's conversations, and a notice if its tasks have different ones."""
    found: dict[str, str | None] = {}
    for label, task in zip(task_labels(config.tasks), config.tasks, strict=True):
        if task.system_prompt is not None:
            found[label] = task.system_prompt or None
            continue
        try:
            if not led_by_program(task):  # otherwise its programs write all messages
                found[label] = make_task(task).system_prompt or None
        except ValueError as error:
            raise ValueError(
                f"task {label} of the run cannot be created here, so its system prompt is unknown ({error}); give a "
                "system prompt, which may be empty: system_prompt=..., --system, or --set tasks.0.system_prompt=..."
            ) from error
    if not found:
        return None, ""
    first = next(iter(found))
    others = [label for label, prompt in found.items() if prompt != found[first]]
    notice = (
        f"the run's tasks have different system prompts; answers are given with that of {first}, not of"
        f" {', '.join(others)}: give a system prompt to choose"
    )
    return found[first], notice if others else ""
