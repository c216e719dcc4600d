"""Every setting has a user: one of our configs or examples sets it, or users of another system set the same there.

What others call it is in the tables of `podium.compat`, in docs/algorithms.md and docs/from-trl.md, or in a comment
beside the setting in the schema.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml

from podium.config.schema import Config
from podium.config.section import Section

ROOT = Path(__file__).parents[2]
COMMENT = r"# [\w&-]+(?: \w+)?: \w"
ALONE = {
    "chat_template_date": "templates write the date, which must not change when a run is resumed",
    "checkpoint.every_minutes": "machines that may be taken away",
    "data.filter.file": "where `podium filter` writes",
    "data.retire.keep": "few prompts: with its default, data of up to 64 never has one left out",
    "environments.group_seed": "few prompts: of 4 a step, a game is learned only from several beginnings each",
    "environments.max_failed": "code of the user's may fail",
    "environments.retries": "code of the user's may fail",
    "environments.timeout_s": "code of the user's may hang",
    "grading.judges.concurrency": "a server has a limit",
    "grading.judges.highest": "a judge's scale",
    "grading.judges.lowest": "a judge's scale",
    "grading.judges.retries": "a server may fail",
    "grading.judges.timeout_s": "a server may hang",
    "grading.timeout_s": "code of the user's may hang",
    "reward_models.max_tokens": "conversations may be longer than a reward model reads",
    "rollout.limits.episode_timeout_s": "code of the user's may hang",
    "rollout.limits.max_drawn_tokens": "replies are not counted",
    "tasks.correct": "tasks without a reference answer",
    "tasks.curriculum.levels": "levels of a task are its own options",
}
"""Settings that only Podium has, and what they are for."""


def leaves(section: type[Section], path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path of each setting, without places in lists, and the source of its line with the one above."""
    for name, field in section.model_fields.items():
        parts = (field.annotation, *get_args(field.annotation))
        inner = [each for part in parts for each in (part, *get_args(part)) if isinstance(each, type)]
        below = next((each for each in inner if issubclass(each, Section)), None)
        if below is not None:
            yield from leaves(below, f"{path}{name}.")
            continue
        found = re.search(rf"(?:^    #.*\n)?^    {name}: .*$", inspect.getsource(section), re.MULTILINE)
        assert found is not None, name
        yield f"{path}{name}", found[0]


def set_in(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of the settings in a document, without places in lists."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from set_in(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for child in value:
            yield from set_in(child, path)
    yield path


def ours() -> set[str]:
    """The settings of our configs and examples; in Python, any argument or key of that name."""
    files = [*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("examples/**/*.yaml")]
    found = {path for file in files for path in set_in(yaml.safe_load(file.read_text()))}
    text = "".join(file.read_text() for file in ROOT.glob("examples/**/*.py"))
    named = set(re.findall(r"[\"']?(\w+)[\"']?\s*[:=]", text))
    return found | {path for path, _ in leaves(Config) if path.rpartition(".")[2] in named}


def others() -> set[str]:
    """The last names of the settings in tables of other systems."""
    compat = "".join(file.read_text() for file in (ROOT / "podium" / "compat").glob("*") if file.is_file())
    page = (ROOT / "docs" / "algorithms.md").read_text()
    page = page[page.index("## The same in other systems") : page.index("## How each differs")]
    rows = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("|"))
    trl = " ".join(re.findall(r"`[^`\n]+`", (ROOT / "docs" / "from-trl.md").read_text()))
    dotted = {each.rpartition(".")[2] for each in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)+", compat)}
    return dotted | set(re.findall(r"\w+", f"{rows} {trl}"))


def test_a_setting_that_no_config_and_no_example_sets_has_a_user_elsewhere():
    own, elsewhere = ours(), others()
    found = {
        path
        for path, line in leaves(Config)
        if path not in own and path.rpartition(".")[2] not in elsewhere and not re.search(COMMENT, line)
    }
    assert found == set(ALONE)
