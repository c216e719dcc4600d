"""docs/pods.md names only commands and options that there are."""

import re
from pathlib import Path

import pytest
import typer

from podium.pods.commands import app

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "pods.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"podium pod ([a-z][a-z0-9]*)([^`|\n]*)", TEXT)))
OPTIONS = {
    name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for name, command in typer.main.get_command(app).commands.items()  # pyright: ignore[reportAttributeAccessIssue]
}


@pytest.mark.parametrize(("name", "words"), COMMANDS)
def test_a_command_of_the_docs_exists_with_its_options(name, words):
    assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", words)) <= OPTIONS[name]


def test_every_command_is_in_the_docs():
    assert set(OPTIONS) == {name for name, _ in COMMANDS}


def test_options_named_alone_exist():
    named = set(re.findall(r"`(--[a-z-]+)", TEXT))
    assert named <= set().union(*OPTIONS.values())


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
