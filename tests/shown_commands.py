"""Commands that README, docs, configs and Podium itself show, as they are written, and where each stands."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import typer.main
from typer.core import TyperGroup

from podium import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "podium" / "project" / "README.md"]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELL = ("", "bash", "sh")
INLINE = re.compile(r"`((?:podium|make|pip install|python -m|git clone) [^`]+)`")
HINT = re.compile(r"\bpodium (?=[a-z])([^`\n]*)")
PROSE = ("in", "sets", "rents", "draws", "serves")  # "podium pod rents TPUs" is a sentence


def fenced(page: Path, *languages: str) -> list[str]:
    """The code blocks of a page in these languages."""
    return [text for kind, text in FENCE.findall(page.read_text(encoding="utf-8")) if kind in languages]


def documented() -> dict[str, str]:
    """Every line that is there for a shell, without its comment, and the page that shows it first."""
    found: dict[str, str] = {}
    for page in PAGES:
        for line in (line for block in fenced(page, *SHELL) for line in block.splitlines()):
            if command := re.sub(r"(^|\s+)#.*", "", line).strip():
                found.setdefault(command, str(page.relative_to(ROOT)))
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        found.setdefault(re.sub(r"\s+\(.*", "", first), f"configs/{path.name}")
    return found


def mentioned() -> dict[str, str]:
    """Commands within sentences of the pages and in strings of Podium's own, and the file that has them first.

    What a string fills in stands as `{expression}`. Some of them only name a command, without what it needs.
    """
    found: dict[str, str] = {}
    for page in PAGES:
        for line in INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            found.setdefault(" ".join(line.split()), str(page.relative_to(ROOT)))
    for path in sorted((ROOT / "podium").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for text in _strings(ast.parse(source)) if HINT.search(source) else ():
            for rest in HINT.findall(text):
                if line := _command_in(rest):
                    found.setdefault(line, str(path.relative_to(ROOT)))
    return found


def _strings(tree: ast.Module) -> Iterator[str]:
    """All strings of a program, docstrings too (`--help` prints them); what an f-string fills in is in braces."""
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inner = {id(part) for node in joined for part in node.values}
    for node in joined:
        yield "".join(_part(part) for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


def _part(part: ast.expr) -> str:
    return f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else ast.literal_eval(part)


@functools.cache
def _podium() -> TyperGroup:
    command = typer.main.get_command(cli.app)
    assert isinstance(command, TyperGroup)
    return command


def _command_in(rest: str) -> str | None:
    """The command that text behind "podium " begins with: names of commands, then words that can be no sentence's."""
    words, command = [], _podium()
    for word in re.sub(r"\{[^}]*\}", lambda found: found[0].replace(" ", ""), rest).split():
        bare = word.rstrip(".,;:)]")
        if isinstance(command, TyperGroup):
            if bare in PROSE or not bare:
                break
            group, command = command, command.get_command(None, bare)  # pyright: ignore[reportArgumentType]
            assert command is not None, f"podium {rest}: {group.name} has no command {bare}"
        elif word.startswith("(") or not re.search(r"^-|[{/.=\dA-Z]", bare):
            break
        words.append(bare)
        if bare != word:
            break
    return " ".join(["podium", *words]) if words else None
