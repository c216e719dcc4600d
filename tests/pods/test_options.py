"""Options are declared once, as fields of a dataclass, and reach the commands as one."""

import dataclasses

import pytest
import typer
from typer.testing import CliRunner

from podium.pods.commands import app
from podium.pods.options import Common, Rent, flattened


def test_options_of_a_dataclass_arrive_as_one():
    got = []
    one_command = typer.Typer()

    @one_command.command()
    @flattened
    def rent(name: str, what: Rent, common: Common, times: int = 2) -> None:
        got.append((name, what, common, times))

    arguments = ["demo", "--type", "v6e-8", "--zone", "a", "--zone", "b", "--on-demand", "--project", "p"]
    result = CliRunner().invoke(one_command, arguments)
    assert result.exit_code == 0, result.output
    assert got == [("demo", Rent(type="v6e-8", zones=["a", "b"], spot=False), Common(project="p"), 2)]
    CliRunner().invoke(one_command, ["demo", "--times", "5"])
    assert got[1] == ("demo", Rent(), Common(), 5)


@pytest.mark.parametrize("command", ["up", "run"])
def test_whoever_rents_takes_every_option_for_renting(command):
    commands = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    names = {parameter.name for parameter in commands[command].params}
    assert {field.name for group in (Rent, Common) for field in dataclasses.fields(group)} <= names
