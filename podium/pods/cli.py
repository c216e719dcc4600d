"""The group `podium pod`. Its commands (`podium.pods.commands`) are imported when one of them is asked for."""

from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup


class _PodGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(_commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _commands().get(cmd_name)


def _commands() -> Mapping[str, Any]:
    from podium.pods.commands import app

    return typer.main.get_group(app).commands


pod_app = typer.Typer(
    cls=_PodGroup, help="TPU slices of Google Cloud: rent, run, watch, give back.", no_args_is_help=True
)
