"""Finds the code in an answer: which of its fenced blocks is the solution, and which others the solution may need.

Fences are Markdown's: three or more backticks or tildes, closed by at least as many of the same, at any indentation.
Beyond Markdown, a fence may follow text on its line, a closing fence may end the last line of code, and the last one
may be missing.
"""

import re
import textwrap
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

OPENING = re.compile(r"(?P<before>[ \t>]*+(?:(?:[-*+]|\d{1,9}[.)]) [ \t]*+)?)(?P<fence>`{3,}+|~{3,}+)(?P<info>[^`]*+)$")
OPENING_BEHIND_TEXT = re.compile(r"(?<!`)(?P<fence>`{3,}+)(?P<info>[\w+#.-]++)[ \t]*+$")
"""Both patterns take linear time on any line."""
PYTHON = re.compile(r"[{.]*(?:i?python|py|pypy)[\d.]*(?![\w+#-])", re.IGNORECASE)
ANSWER = "<answer>"


class Code(NamedTuple):
    """The code found in an answer."""

    text: str
    others: Sequence[str] = ()
    """The answer's other Python blocks, which may define functions that `text` uses."""


class _Block(NamedTuple):
    language: str
    text: str

    def rank(self) -> int:
        """2 for Python, 1 for a block without a language, 0 for another language or an interactive session with
        `>>>`.
        """
        if self.text.lstrip().startswith(">>> "):
            return 0
        return 2 if PYTHON.match(self.language) else int(not self.language)


def code_of(completion: str, name: str = "") -> Code:
    """The code in an answer.

    The model's thoughts are skipped, and if the answer has an `<answer>` element with code, only that is read. Of
    several blocks, those in Python count, or else those without a language, or else all. The last of them is the code;
    for a function, the last one that defines it. An answer without blocks is treated as code in full.

    Args:
        completion: the answer.
        name: name of the function, which may be a method of a class `Solution`; empty for a program.
    """
    answer = completion.rpartition("</think>")[2]
    if answer == completion and "<think>" in answer:
        answer = answer.partition("<think>")[0]  # the answer was cut off inside its thoughts
    _, tag, inner = answer.rpartition(ANSWER)
    inner = inner.partition("</answer>")[0]
    if tag and inner.strip():
        code = _code(inner, name)
        if not name or defines(code.text, name):
            return code
    return _code(answer, name)


def defines(code: str, name: str) -> bool:
    """Whether the code defines a function of this name, or a class `Solution` that may have it as a method."""
    word = re.escape(name)
    function = rf"(?:async[ \t]+)?def[ \t]+{word}\b"
    value = rf"{word}[ \t]*(?::[^=\n]*)?=(?!=)"
    return re.search(rf"^(?:{function}|{value}|class[ \t]+Solution\b)", code, re.MULTILINE) is not None


def _code(answer: str, name: str) -> Code:
    blocks = [_Block(block.language, _dedented(block.text, name)) for block in _blocks(answer)]
    blocks = [block for block in blocks if block.text.strip()]
    if not blocks:
        return Code(_dedented(answer, name))
    best = max(block.rank() for block in blocks)
    meant = [block for block in blocks if block.rank() == best]
    if name:
        defining = [block for block in sorted(blocks, key=_Block.rank) if defines(block.text, name)]
        meant = defining or meant
    chosen = meant[-1]
    return Code(chosen.text, [block.text for block in blocks if block is not chosen and block.rank() == chosen.rank()])


def _dedented(text: str, name: str) -> str:
    """The text without the indentation common to its lines, unless it is a function body whose header comes later."""
    if not re.match(r"\s*^[ \t]", text, re.MULTILINE):
        return text  # there is no indentation to remove, and blank lines within strings stay unchanged
    dedented = textwrap.dedent(text)
    return dedented if not name or defines(dedented, name) else text


def _blocks(text: str) -> list[_Block]:
    """The fenced blocks of a text, in order."""
    found: list[_Block] = []
    lines = deque(re.split(r"\r?\n", text))
    while lines:
        line = lines.popleft()
        quoted = line.lstrip().startswith(">")
        margin = 0 if quoted else len(line) - len(line.lstrip())
        opening = OPENING.match(line)
        if opening and not quoted:
            margin = opening.end("before")
        opening = opening or OPENING_BEHIND_TEXT.search(line)
        if opening:
            found.append(_Block(opening["info"].strip(), _inside(lines, opening["fence"], margin, quoted)))
    return found


def _inside(lines: deque[str], fence: str, margin: int, quoted: bool) -> str:
    """Take the lines up to the end of a block, without its margin or quotation marks (`>`). A fence that opens a Python
    block also ends a block whose closing fence is missing.
    """
    inside: list[str] = []
    while lines:
        original = line = lines.popleft()
        if quoted:
            line = re.sub(r"^[ \t]*> ?", "", line)
        indented = len(line) - len(line.lstrip(" \t"))
        end = line.strip()
        if set(end) == {fence[0]} and len(end) >= len(fence) and indented <= margin + 3:
            break
        if end.startswith(fence) and PYTHON.match(end.lstrip(fence[0]).lstrip()) and indented <= margin + 3:
            lines.appendleft(original)
            break
        line = line[min(margin, indented) :]
        if set(end) != {fence[0]} and end.endswith(fence) and end[-len(fence) - 1] != fence[0]:
            inside.append(line.rstrip()[: -len(fence)])
            break
        inside.append(line)
    return "\n".join(inside)
