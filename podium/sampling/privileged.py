"""The messages of a model that reads more than the policy: the user's last one is made from a template."""

import json
from collections.abc import Sequence

from podium.config.message_template import ANSWER, QUESTION, template_names
from podium.models.text.chat_format import Message
from podium.run.run_spec import PrivilegedSpec
from podium.tasks.task import Prompt


def privileged_messages(spec: PrivilegedSpec, prompt: Prompt, messages: Sequence[Message]) -> list[Message]:
    """The messages with another text in the last one of the user.

    Args:
        spec: has the template of that text; its names are QUESTION, the text that it replaces, ANSWER, and columns of
            the row. A value that is no text is written as JSON.
        prompt: with the row.
        messages: what the policy reads.

    Raises:
        ValueError: there is no message of the user, or the row has no column of some name.
    """
    last = max((place for place, each in enumerate(messages) if each.get("role") == "user"), default=None)
    if last is None:
        raise ValueError(f"{spec.role}.template: prompt {prompt.id} has no message of the user to write again")
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
