"""The resolved tree as text, and the schema for editors."""

import json
from pathlib import Path

import pytest

from podium.config.load import load
from podium.config.schema import Config, Section
from podium.config.show import file_schema, to_yaml
from podium.settings import NAMES

TASKS = [
    {"name": "arithmetic", "options": {"operations": ["add"], "deep": {"a": None}}},
    {"name": "gsm8k", "rewards": {}},
]


def test_the_tree_says_where_each_setting_comes_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("model: demo\ntasks:\n- name: arithmetic\n  options: {digits: 2}\n")
    loaded = load(["a.yaml"], ["rollout.stop=[x, y]"], {"PODIUM_SEED": "3"})
    lines = to_yaml(loaded.config.model_dump(), loaded.provenance).splitlines()
    assert lines[0] == "name: a  # name of a.yaml"
    assert "seed: 3  # environment PODIUM_SEED" in lines
    assert "  - name: arithmetic  # a.yaml:3" in lines
    assert "      digits: 2  # a.yaml:4" in lines
    assert "  stop: [x, y]  # --set rollout.stop=[x, y]" in lines
    assert "steps: 100" in lines


def test_what_is_shown_loads_as_the_same_config(tmp_path):
    settings = {
        "model": "demo",
        "name": "1e5",
        "tasks": [*TASKS[:1], {"name": "gsm8k", "system_prompt": "a: b # c\n  'd' \"e\"\n"}],
        "rollout": {"stop": ["\n", "yes", "# x"]},
        "train": {"optimizer": {"learning_rate": 1e-6}},
    }
    config = Config.model_validate(settings)
    file = tmp_path / "shown.yaml"
    file.write_text(to_yaml(config.model_dump(), {"name": "somebody", "tasks.1.system_prompt": "two\nlines"}))
    assert load([file], [], {}).config == config


def test_empty_sections_and_lists_stand_in_one_line():
    assert to_yaml({"a": {}, "b": [], "c": [{}, {"d": 1}]}) == "a: {}\nb: []\nc:\n  - {}\n  - d: 1\n"


def sections(section: type[Section]) -> dict[str, type[Section]]:
    """Every class of settings below a section, by name."""
    found = {section.__name__: section}
    for field in section.model_fields.values():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, Section):
                found |= sections(part)
    return found


@pytest.mark.parametrize("name", sections(Config))
def test_every_setting_has_a_description(name):
    section = sections(Config)[name]
    schema = section.model_json_schema()
    assert section.__doc__ and schema["additionalProperties"] is False
    for key, field in section.model_fields.items():
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        assert field.description or is_section, f"{name}.{key} has no docstring"


def test_the_schema_describes_files_that_include_others():
    schema = json.loads(json.dumps(file_schema(NAMES)))
    assert "base" in schema["properties"] and "required" not in schema
    assert schema["properties"]["steps"] == {
        "default": 100,
        "description": "Training steps; each is rollout, grading and update.",
        "minimum": 1,
        "title": "Steps",
        "type": "integer",
    }
    references = {each["$ref"] for each in schema["properties"].values() if "$ref" in each}
    assert references <= {f"#/$defs/{name}" for name in schema["$defs"]} and len(references) == 9
