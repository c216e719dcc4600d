"""The group `podium pod`. Its commands (`podium.pods.commands`) are imported only when one is used."""

import typer
from typer.core import TyperGroup


class _PodGroup(TyperGroup):
    def list_commands(self, ctx):
        return _group().list_commands(ctx)

    def get_command(self, ctx, cmd_name):
        return _group().get_command(ctx, cmd_name)


def _group() -> TyperGroup:
    from podium.pods.commands import app

    return typer.main.get_group(app)


pod_app = typer.Typer(
    cls=_PodGroup, help="TPU slices of Google Cloud: rent, run, watch, give back.", no_args_is_help=True
)
