"""Every command that README, docs, configs and Podium's own hints show is run here, in the words in which it is shown.

Names of the reader's own (my.yaml, runs/my) are there, around a tiny model, and the environment makes the shipped
configs as small. `SHORTER` lists what is not done whole, and why; a line for which there is no way to run it fails.
"""

import contextlib
import fcntl
import functools
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from scripted import TEMPLATE
from shown_commands import ROOT, documented, mentioned
from starlette.testclient import TestClient
from typer.core import TyperGroup

from podium import cli
from podium.config.load import Override
from podium.settings import load_settings
from podium.train.loop import train
from tests.plan.test_check import write_run
from tests.pods.pod_world import git, make_checkout

pytestmark = pytest.mark.usefixtures("one_device")

READERS = {  # what the reader puts in the place of a word
    "CONFIG": "my.yaml", "FILE": "my.yaml", "OLD.yaml": "old.yaml", "{file}": "old.yaml", "NEW.yaml": "new.yaml",
    "{request.subject}": "my.yaml", "{run.request.subject}": "my.yaml", "run.yaml": "my.yaml",
    "MODEL": "tiny", "FOLDER": "data", "DIR": "out", "RUN": "runs/a", "{run.run_dir.path}": "runs/a",
    "T": "v6e-8", "{machine.name}": "v6e-8", "{found.outcomes[0].case.machine.name}": "v6e-8", "{compiles}": "",
    "Z": "us-east5-b", "N": "0", "I": "image", "IMAGE": "image", "CLAIM": "claim", "NAME": "first",
    "runs/NAME-sft": "runs/demo-sft",
    "{tpu_slice.accelerator}": "v6e-8", "{tpu_slice.zone}": "us-east5-b",
    "{tpu_slice.title}": "first",
}  # fmt: skip
SHORTER: list[tuple[str, str, str, str]] = [  # (where it matches, what is replaced, by what, why)
    (r"^podium plan (?!.*--fast|.*--check)", "$", " --fast", "compiles for minutes; tests/plan compiles what is small"),
    (r"^podium plan .*--compile", "--compile", "", "the same"),
    (r"^podium pod (?!slurm|k8s|sky)", "$", " --dry-run", "rents machines; tests/pods has a fake Google Cloud"),
    (r"^podium bench", "$", " --help", "measures for minutes; tests/bench runs each with tiny shapes"),
    (r"^podium (train|eval) .*gs://", "gs://BUCKET/runs", "runs", "tests/train/test_bucket.py has a fake bucket"),
    (r"^podium sandbox", "$", " --help", "needs namespaces; tests/sandbox runs both where they are permitted"),
    (r"^make ", "make", "make -n", "installs, trains or tests for minutes"),
    (r"^podium tasks first", "first", "arithmetic", "NAME is a task here"),
    (r"^podium pod k8s(?!.*--claim)", "--type", "--set runs_dir=gs://b/r --type", "it names a bucket here"),
    (r"^podium pod k8s.*--claim", "--type", "--set runs_dir=/runs --type", "it names what is mounted"),
    (r"^podium export .*--merge", " --merge", "", "is for a run with adapters; tests/train/test_lora_run.py merges"),
    (r"^podium dpo", "my.yaml", "pairs.yaml", "CONFIG is one with pairs here"),
    (r"^podium filter", "$", " --help", "measures every prompt; tests/train/test_filter.py runs it"),
    (r"^podium doctor", "$", " --help", "measures for minutes; tests/doctor runs it with tiny shapes"),
    (r"^podium calibrate", "$", " --help", "plans what a CPU's runs took; tests/doctor has runs of a TPU"),
    (r"^podium plan .*--on cpu", "--on cpu", "--on v6e-8", "this CPU is not calibrated; tests/doctor"),
    (r"^podium plan --check", "runs/a", "runs/planned", "RUN is a run on a TPU here"),
]  # fmt: skip
ELSEWHERE = {  # what is not run at all, and why
    "gcloud": "needs an account of Google Cloud",
    "ssh": "needs another machine",
}
TINY = {
    "MODEL": "tiny", "STEPS": "1", "PROMPTS_PER_STEP": "2", "GROUP_SIZE": "4", "MESH": "auto", "EVAL__QUESTIONS": "2",
    "GRADING__WORKERS": "0", "ROLLOUT__MAX_PROMPT_TOKENS": "60", "ROLLOUT__MAX_NEW_TOKENS": "3", "ROLLOUT__SLOTS": "8",
    "TRAIN__ROWS_PER_DEVICE": "2", "TRAIN__ROW_TOKENS": "null", "TRAIN__REMAT": "none",
}  # fmt: skip
ALSO = {  # of commands with these words
    "gsm8k": {"TASKS__0__PATH": "data"},
    "qwen25_3b_ppo": {"CRITIC__WARMUP_STEPS": "0"},
    "gsm8k.yaml": {"TRAIN__OPTIMIZER__WARMUP_STEPS": "0"},
    "gsm8k_qwen": {"TRAIN__OPTIMIZER__WARMUP_STEPS": "0"},
    "gsm8k_gemma3": {"TRAIN__OPTIMIZER__WARMUP_STEPS": "0"},
    "gsm8k_gpt_oss": {"TRAIN__OPTIMIZER__WARMUP_STEPS": "0"},
    "qwen3_30b_a3b.yaml": {"ROLLOUT__LAYOUT": "auto", "ROLLOUT__GROUP_CHIPS": "null"},
    "qwen3_8b": {"GRADING__OVERLONG_BUFFER_TOKENS": "1"},
    "qwen35_9b.yaml": {"GRADING__OVERLONG_BUFFER_TOKENS": "1"},
    "--profile": {"STEPS": "12"},
    "configs/tools.yaml": {"ROLLOUT__MAX_EPISODE_TOKENS": "null", "CHAT_TEMPLATE": "chat.jinja"},
    "dpo_short_answers": {"GROUP_SIZE": "2", "ROLLOUT__MAX_PROMPT_TOKENS": "22", "ROLLOUT__MAX_NEW_TOKENS": "42"},
    "configs/tools_sft.yaml": {"GROUP_SIZE": "1", "TRAIN__OPTIMIZER__WARMUP_STEPS": "0"},
}
SETTINGS_ONLY = {  # the settings are loaded and checked; (the function that then does the work, why it is left out)
    "podium certify": ("podium.certify.command.certify", "takes a minute; tests/certify runs it"),
    "podium train (?!runs|configs/demo.yaml(?! --profile))": (
        "podium.train.loop.train",
        "as the demo's; long: all are run",
    ),
}
WRITES = ("train", "sft", "dpo", "export", "init", "config", "report")
DONE: set[str] = set()
"""Lines that were run: several that are shown may come to the same."""


def typed(line: str) -> str:
    """The line as a reader types it."""
    for word, instead in sorted(READERS.items(), key=lambda pair: -len(pair[0])):
        line = (
            line.replace(word, instead) if "{" in word else re.sub(rf"(?<![\w./-]){re.escape(word)}\b", instead, line)
        )
    return re.sub(r"\{[\w.]*name\}", "first", line)


def shorter(line: str) -> str:
    """The line with what `SHORTER` says of it."""
    for where, what, instead, _ in SHORTER:
        if re.search(where, line):
            line = re.sub(what, instead, line, count=1)
    return line


@pytest.fixture(scope="module")
def made(tiny_model, tmp_path_factory, one_device) -> Path:
    """A folder that has what the pages take for granted: configs, data, a model, runs, a git checkout."""
    folder = make_checkout(tmp_path_factory.mktemp("shown") / "desk")
    shutil.copytree(ROOT / "configs", folder / "configs")
    shutil.copytree(tiny_model, folder / "tiny")
    (folder / "data").mkdir()
    for split in ("train", "test"):
        rows = (f'{{"question": "What is {n} + 1?", "answer": "#### {n + 1}"}}\n' for n in range(4))
        (folder / "data" / f"{split}.jsonl").write_text("".join(rows))
    (folder / "chat.jinja").write_text(TEMPLATE)  # by which conversations can be continued
    tiny = {f"PODIUM_{name}": value for name, value in TINY.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = load_settings(["configs/demo.yaml"], [Override("name", "a", "here")], tiny).config
        assert train(config, plain=True) == 0
    for name in {"demo-sft", *re.findall(r"runs/(\w+)", "\n".join(map(typed, documented() | mentioned())))} - {"a"}:
        shutil.copytree(folder / "runs" / "a", folder / "runs" / name)
    for file in ("my.yaml", "config.yaml", "base.yaml"):
        settings = config.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
        (folder / file).write_text(yaml.safe_dump(settings))
    (folder / "mine.yaml").write_text("seed: 1\n")
    tasks = "[{name: preferences, path: pairs.jsonl, eval_path: pairs.jsonl}]"
    (folder / "pairs.yaml").write_text(f"model: tiny\ntasks: {tasks}\n")
    row = '{"prompt": "What is 1 + 1 ?", "chosen": "2", "rejected": "3"}\n'
    (folder / "pairs.jsonl").write_text(4 * row)
    (folder / "old.yaml").write_text("rollout: {n: 4}\n")
    (folder / "runs" / "planned").mkdir()
    write_run(folder / "runs" / "planned")
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "-m", "mine")
    return folder


class Desk:
    """Where a reader sits who types a line."""

    def __init__(self, made: Path, own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        """`made` is looked at; what a command changes is copied to `own` first."""
        self.made, self.own, self.monkeypatch, self.capsys = made, own, monkeypatch, capsys

    def run(self, line: str, *, whole: bool) -> None:
        """Do what a line says, which is a command of Podium or of a shell; not `whole`: as far as SETTINGS_ONLY."""
        what = re.sub(r"(?<=eval |chat )runs/\w+|(?<=serve )runs/\w+", "RUN", line)
        if what in DONE and not whole:
            return
        DONE.add(what)
        line, _, into = line.partition(" > ")
        program, *words = shlex.split(line)
        if program == "podium":
            status = self.podium(words, line, whole)
            assert status in ((0, 2) if words[0] == "plan" else (0,)), "\n".join(self.capsys.readouterr())
            assert not into or self.capsys.readouterr().out
        elif program == "make":
            subprocess.run([program, "-C", ROOT, *words], check=True, capture_output=True)
        else:
            assert program in CHECKED or program in ELSEWHERE, f"no way to run {line!r}: add one, or say why not"
            CHECKED.get(program, lambda words: None)(words)

    def podium(self, words: list[str], line: str, whole: bool) -> Any:
        """Runs a command line in this process; its status."""
        folder = self.own if words[0] in WRITES else self.made
        if words[0] in WRITES:
            named = [*re.findall(r"runs/([\w-]+)", line)]
            unnamed = {path.name for path in (self.made / "runs").iterdir()} - set(named)
            shutil.copytree(self.made, folder, ignore=lambda _, names: unnamed & set(names) | {".git", "podium"})
        if words[0] in ("train", "sft", "dpo", "eval", "certify"):
            for settings in (TINY, *(more for word, more in ALSO.items() if word in line)):
                for name, value in settings.items():
                    self.monkeypatch.setenv(f"PODIUM_{name}", value)
        for pattern, (function, _) in SETTINGS_ONLY.items():
            if re.match(pattern, line) and not whole:
                self.monkeypatch.setattr(function, lambda config, **options: 0)
        self.monkeypatch.chdir(folder)
        self.monkeypatch.setenv("XDG_CACHE_HOME", str(self.own.parent / "cache"))
        self.monkeypatch.setattr("podium.observe.listening.make_server", OneClient)
        self.monkeypatch.setattr("podium.api.chat.typed", lambda console: iter(["What is 2 + 3?"]))
        self.monkeypatch.setattr(sys, "argv", ["podium", *words])
        with contextlib.ExitStack() as stack:
            if words[0] in ("serve", "watch"):  # on one port, in tests that run at the same time
                lock = stack.enter_context(open(Path(tempfile.gettempdir()) / "podium-default-port.lock", "w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(SystemExit) as stopped:
                cli.main()
        return stopped.value.code or 0


@pytest.fixture
def desk(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(made, tmp_path / "desk", monkeypatch, capsys)


class OneClient:
    """Instead of a server: one client looks at its first page, or whether it lives, and goes."""

    def __init__(self, app: Any, *, ready: Callable[[], None], ending: object = None) -> None:
        self.app, self.ready = app, ready

    def run(self, sockets: list[socket.socket]) -> None:
        self.ready()
        client = TestClient(self.app, base_url="http://localhost")
        assert 200 in [client.get(path).status_code for path in ("/", "/health")]
        for each in sockets:
            each.close()


def check_pip(words: list[str]) -> None:
    """The package is ours with an extra that there is, or one that the Makefile installs."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in (word for word in words[1:] if not word.startswith("-")):
        found = re.fullmatch(r"(?:podium-rl|\.)(?:\[([\w,-]+)\])?", word)
        known = set(found[1].split(",")) <= extras.keys() if found and found[1] else bool(found)
        assert known or word in (ROOT / "Makefile").read_text(), word


def check_module(words: list[str]) -> None:
    """The module is there, and has the options; tests/test_benches.py has each print its help. Or it is an example."""
    if words[0] != "-m":
        assert Path(words[0]).parent.name == "examples" and (ROOT / words[0]).exists(), words
        return
    path = ROOT / words[1].replace(".", "/")
    source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    if "from benches.record import" in source:  # its parser has options that all benches share
        source += (ROOT / "benches/record.py").read_text()
    assert all(f'"{word}"' in source for word in words[2:] if word.startswith("--")), words


def check_clone(words: list[str]) -> None:
    """Into the folder that the next line enters."""
    assert words[0] == "clone" and words[-1] == "podium", words


def check_touch(words: list[str]) -> None:
    """A file in the folder of a run; tests/train/test_profile.py touches it."""
    assert Path(words[0]).match("runs/*/profile-now"), words


def check_source(words: list[str]) -> None:
    """The environment that the Makefile makes."""
    assert words == [".venv/bin/activate"], words


CHECKED = {
    "pip": check_pip, "python": check_module, "git": check_clone, "cd": lambda words: None, "touch": check_touch,
    "source": check_source,
}  # fmt: skip


@functools.cache
def whole_program() -> Any:
    return typer.main.get_command(cli.app)


def find(words: list[str]) -> tuple[Any, list[str]]:
    """The command that is named, and the words behind it."""
    command: Any = whole_program()
    while isinstance(command, TyperGroup) and words:
        command, words = command.get_command(None, words[0]), words[1:]  # pyright: ignore[reportArgumentType]
        assert command is not None
    return command, words


def by_command() -> Iterator[Any]:
    """All lines that are shown; the first of each command of Podium runs with `make test`, however long it takes."""
    seen = {""}
    for line in documented():
        words = line.split()
        name = " ".join(words[: -len(find(words[1:])[1]) or None]) if words[0] == "podium" else ""
        yield line if name in seen else pytest.param(line, marks=pytest.mark.core)
        seen.add(name)


@pytest.mark.parametrize("line", list(by_command()), ids=str)
def test_a_command_that_is_shown_works(line, desk):
    for part in typed(line).split(" && "):
        desk.run(shorter(part), whole=False)


@pytest.mark.long
@pytest.mark.parametrize("line", [line for line in documented() if re.match("|".join(SETTINGS_ONLY), line)], ids=str)
def test_a_command_that_trains_does_so_to_its_end(line, desk):
    desk.run(shorter(typed(line)), whole=True)


@pytest.mark.parametrize("line", sorted(mentioned().keys() - documented().keys()), ids=str)
def test_a_command_within_a_sentence_works_or_names_what_there_is(line, request):
    line = typed(line)
    if line.startswith("podium ") and not complete(shlex.split(line)[1:]):
        names_what_there_is(shlex.split(line)[1:])
    else:
        request.getfixturevalue("desk").run(shorter(line), whole=False)


def complete(words: list[str]) -> bool:
    """Whether a command can be run as it stands; in a sentence it may only be named."""
    command, rest = find(words)
    if isinstance(command, TyperGroup) or (words[0] == "plan" and not {"--on", "--tpu", "--check"} & {*words}):
        return False
    try:
        command.make_context(command.name, rest)
    except typer.BadParameter.__base__:  # click's error for wrong usage; typer does not export it
        return False
    return True


def names_what_there_is(words: list[str]) -> None:
    """The command's options exist."""
    command, rest = find(words)
    options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    assert {word for word in rest if word.startswith("-")} <= options, words
