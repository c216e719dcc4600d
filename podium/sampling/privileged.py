"""The messages of a model that reads more than the policy: the user's last message is made from a template."""

import json
from collections.abc import Sequence

from podium.config.message_template import ANSWER, QUESTION, template_names
from podium.models.text.chat_format import Message
from podium.run.run_spec import PrivilegedSpec
from podium.tasks.task import Prompt


def privileged_messages(spec: PrivilegedSpec, prompt: Prompt, messages: Sequence[Message]) -> list[Message]:
    """Replace the text of the user's last message by one made from the template.

    Args:
        spec: has the template, which may contain the names QUESTION (the replaced text), ANSWER, and columns of the
            row. Values that are not text are written as JSON.
        prompt: has the row and its answer.
        messages: the messages that the policy reads.

    Raises:
        ValueError: the messages have no user message, or the row lacks a column that the template names.
    """
    last = max((place for place, each in enumerate(messages) if each.get("role") == "user"), default=None)
    if last is None:
        raise ValueError(
            f"{spec.role}.template: prompt {prompt.id} has no user message to replace; add one, or set"
            f" {spec.role}.prompt to same"
        )
    known = {**prompt.metadata, QUESTION: messages[last]["content"], ANSWER: prompt.answer}
    missing = [name for name in template_names(spec.template) if known.get(name) is None]
    if missing:
        raise ValueError(
            f"{spec.role}.template: prompt {prompt.id} has no column {missing[0]!r}; it has {', '.join(sorted(known))}:"
            " name one of these, or add the column to the task's data"
        )
    texts = {name: x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for name, x in known.items()}
    own = {**messages[last], "content": spec.template.format_map(texts)}
    return [*messages[:last], own, *messages[last + 1 :]]
