"""Models of the hub, from a hub on loopback: what comes from it, and what is said when nothing does."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import ANSWERS, CUT, MODEL, SILENT, WRITER, fake_hub
from tiny_models import hf_config, write_model

from podium.api.answers import max_positions
from podium.models.files.hf_config import from_hf_config
from podium.models.files.source import resolve
from podium.patience import patiently
from podium.tasks.question_files import hub_data
from podium.train.export import PushError, _upload

ASK = """
import dataclasses, json, sys, time
from podium.models import presets
from podium.models.files import source
from podium.models.presets import find_architecture
source.HUB_TIMEOUT_S = presets.HUB_TIMEOUT_S = 0.3
pauses = []
time.sleep = pauses.append
found = {}
for model in sys.argv[1:]:
    for ask in (find_architecture, lambda model: source.read_architecture(source.resolve(model))):
        try:
            answer = dataclasses.asdict(ask(model))
        except source.ModelError as error:
            answer = str(error)
        found.setdefault(model, []).append((answer, sum(pauses)))
        pauses.clear()
print(json.dumps(found))
"""


def ask(cache: Path, *models: str, **environment: str) -> dict[str, list[tuple[Any, float]]]:
    """What a plan and a run each have of models, or its error, and the seconds that it paused before it asked again."""
    env = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    env |= {"HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", **environment}
    done = subprocess.run([sys.executable, "-c", ASK, *models], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Any, float]]]:
    """What one process is told of every model of the fake hub."""
    folder, cache = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("cache")
    write_model(folder, "llama")
    with fake_hub(folder) as address:
        return ask(cache, MODEL, SILENT, CUT, *ANSWERS, "not--valid", HF_ENDPOINT=address)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("podium/absent", "check the name, or set HF_TOKEN if it is private"),
        ("podium/gated", "accept the terms on its hub page and set HF_TOKEN"),
        ("podium/token", "renew the login: hf auth login, or set HF_TOKEN"),
        ("podium/forbidden", "not available from the hub (HfHubHTTPError: "),
        ("podium/broken", "not available from the hub (HfHubHTTPError: Server error '500"),
        ("podium/portal", "not available from the hub (JSONDecodeError: "),
        (SILENT, "not available from the hub (ReadTimeout: "),
        (CUT, "not available from the hub (RemoteProtocolError: "),
        ("not--valid", "neither a local folder nor a valid hub id"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_clear_error_and_soon(answers, model: str, message: str):
    for error, paused_s in answers[model]:
        assert error.startswith(f"model '{model}': ")
        assert message in error
        assert "\n" not in error
        assert paused_s == 0


def test_a_plan_names_the_models_that_it_needs_no_hub_for(answers):
    (planned, _), (run, _) = answers["podium/broken"]
    assert "Qwen/Qwen2.5-3B-Instruct" in planned
    assert "Qwen" not in run


def layers(decoder: dict) -> int:
    """Layers of a decoder that was printed as JSON."""
    return sum(stack["repeats"] * len(stack["pattern"]) for stack in decoder["stacks"])


def test_a_model_of_the_hub_is_read(answers):
    expected = from_hf_config(hf_config("llama"), "config.json")
    for decoder, _ in answers[MODEL]:
        assert decoder["width"] == expected.width
        assert layers(decoder) == expected.layers


def test_a_plan_downloads_one_small_file_and_a_run_the_weights(tmp_path: Path):
    write_model(tmp_path / "model", "llama")
    code = (
        "from podium.models.presets import find_architecture; from podium.models.files.source import resolve;"
        f"find_architecture({MODEL!r}); import glob, os;"
        "names = lambda: sorted(os.path.basename(p) for p in glob.glob(os.environ['HF_HOME'] + '/**/snapshots/*/*',"
        " recursive=True)); planned = names(); import json;"
        f"print(json.dumps([planned, sorted(os.listdir(resolve({MODEL!r}).path))]))"
    )
    with fake_hub(tmp_path / "model") as address:
        env = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == [["config.json"], ["config.json", "model.safetensors"]], done.stderr


def test_offline_is_said_and_at_once(tmp_path: Path):
    for error, paused_s in ask(tmp_path, "podium/absent", HF_HUB_OFFLINE="1")["podium/absent"]:
        assert "not available from the hub (HF_HUB_OFFLINE is set)" in error
        assert paused_s == 0


def test_without_a_network_it_is_said_at_once(tmp_path: Path):
    (answer, _), *_ = found = ask(tmp_path, "podium/absent", HF_ENDPOINT="http://127.0.0.1:9")["podium/absent"]
    assert "not available from the hub (ConnectError: " in answer
    assert all(paused_s == 0 for _, paused_s in found)


def test_what_was_downloaded_serves_when_the_hub_is_gone(tmp_path: Path):
    write_model(tmp_path / "model", "llama")
    with fake_hub(tmp_path / "model") as address:
        ask(tmp_path / "cache", MODEL, HF_ENDPOINT=address)
    for answer, _ in ask(tmp_path / "cache", MODEL, HF_ENDPOINT="http://127.0.0.1:9")[MODEL]:
        assert layers(answer) == 3


def test_a_plan_waits_two_seconds_even_for_a_name_server_that_does_not_answer():
    code = (
        "import socket, threading; from podium.models import presets; from podium.models.files import source;"
        "socket.getaddrinfo = lambda *_, **__: threading.Event().wait();\n"
        "try: presets.find_architecture('nobody/nothing')\n"
        "except source.ModelError as error: print(error)"
    )
    env = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert "no answer within 2 s" in done.stdout, done.stderr


class Clock:
    """A clock that passes when somebody waits; after ten minutes, the hub answers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.time = self.monotonic = lambda: self.now

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds
        if self.now >= 600.0:
            for each in REFUSED:
                ANSWERS.pop(each, None)


REFUSED = (MODEL, "repos/create")


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Clock]:
    """A hub on loopback, an empty cache, and a clock that passes when somebody waits."""
    from huggingface_hub import constants

    clock = Clock()
    monkeypatch.setitem(patiently.__kwdefaults__, "clock", clock)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    write_model(tmp_path / "model", "llama")
    with fake_hub(tmp_path / "model") as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + template)
        yield clock


def load(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], object]) -> object:
    """Load a data set of the hub, which gives this answer."""
    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", lambda name, subset, split: answer())
    return hub_data("task", "a/b", None, split="test")


def asked_of_the_hub(use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """What a command asks of the hub; `datasets` sends its requests through the hub's own client."""
    from huggingface_hub import HfApi

    api = HfApi()
    return {
        "weights": lambda: resolve(MODEL, waits=True),
        "longest sequence": lambda: max_positions(MODEL),
        "data": lambda: load(monkeypatch, lambda: api.model_info(MODEL)),
        "upload": lambda: _upload(tmp_path / "model", "me/tiny", private=False),
    }[use]


@pytest.mark.parametrize("use", ["weights", "longest sequence", "data", "upload"])
def test_ten_minutes_without_the_hub_end_nothing(hub, use, tmp_path, monkeypatch, capsys):
    for each in REFUSED:
        monkeypatch.setitem(ANSWERS, each, (503, {}, b""))
    assert asked_of_the_hub(use, tmp_path, monkeypatch)()
    assert 600.0 <= hub.now < 640.0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("waiting for the hub")]
    assert len(said) == 1


@pytest.mark.parametrize("use", ["weights", "longest sequence", "data", "upload"])
def test_a_token_that_the_hub_does_not_accept_ends_at_once_with_what_renews_it(hub, use, tmp_path, monkeypatch):
    for each in REFUSED:
        monkeypatch.setitem(
            ANSWERS, each, (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"")
        )
    with pytest.raises((ValueError, PushError)) as caught:
        asked_of_the_hub(use, tmp_path, monkeypatch)()
    assert hub.now == 0.0
    assert "hf auth login" in str(caught.value) and "\n" not in str(caught.value)
