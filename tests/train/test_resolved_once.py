"""How often one `podium train` makes the choices that follow from its settings: once."""

import sys

import pytest
import typer
import yaml
from tiny_runs import make_config

from podium import cli
from podium.run import resolve


@pytest.mark.usefixtures("one_device")
def test_one_command_resolves_its_recipe_once(tiny_model, tmp_path, monkeypatch):
    calls = []
    original = resolve.resolve_recipe

    def counted(*arguments, **options):
        calls.append(sys._getframe(1).f_code.co_qualname)
        return original(*arguments, **options)

    for name, module in list(sys.modules.items()):
        if name.startswith("podium.") and getattr(module, "resolve_recipe", None) is original:
            monkeypatch.setattr(module, "resolve_recipe", counted)
    config = make_config(tiny_model, tmp_path, steps=1, eval={"at_start": False, "at_end": False})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with pytest.raises(typer.Exit):
        cli.train([file], plain=True)
    assert len(calls) == 1, calls
