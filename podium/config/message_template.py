"""Templates of a message, in which names in braces are replaced by values of a row of the task's data."""

import re
import string

QUESTION, ANSWER = "question", "answer"
"""Names that do not refer to columns: the text of the message that is replaced, and the row's answer."""
COLUMN = re.compile(r"[^\W\d][\w -]*")


def template_names(template: str) -> tuple[str, ...]:
    """The names in a template's braces, each once, in order.

    Raises ValueError if the template has no names, or braces that contain anything but a name.
    """
    try:
        fields = [each[1:] for each in string.Formatter().parse(template) if each[1] is not None]
    except ValueError as error:
        raise ValueError(f"{template!r} cannot be read ({error}); write a brace as {{{{ or }}}}") from None
    for name, format_spec, conversion in fields:
        if not name or not COLUMN.fullmatch(name) or format_spec or conversion:
            rule = (
                f"{template!r}: braces may contain only the name of a column, and {name!r} is not one, or is followed "
                "by more"
            )
            raise ValueError(
                f"{rule}; write {{question}}, {{answer}} or a column's name, and a literal brace as {{{{ or }}}}"
            )
    if not fields:
        raise ValueError(f"{template!r} has no name in braces, so it is the same for every prompt; write {{question}}")
    return tuple(dict.fromkeys(name for name, _, _ in fields if name))
