"""Runs in a bucket, against Google Cloud Storage and S3 on loopback."""

import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import TINY, make_config, merged, metrics_of, weights_of

from podium.config.schema import Config
from podium.observe.run_dir import saved_steps
from podium.train.checkpoints.step_files import seal
from podium.train.loop import train

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]
SETTINGS: dict[str, Any] = {"steps": 4, "eval": {"every_steps": 2}, "checkpoint": {"every_steps": 2}}


@pytest.fixture(params=["gs", "s3"])
def store(request):
    """Where `store.runs` is; `environment` has what finds it there."""
    pytest.importorskip({"gs": "gcsfs", "s3": "moto"}[request.param], reason="its extra is not installed")
    fake = importlib.import_module({"gs": "fake_gcs", "s3": "fake_s3"}[request.param])
    with fake.running() as (store, environment):
        store.environment, store.runs = environment, f"{request.param}://bucket/team/runs"
        yield store


@pytest.fixture
def podium(store, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line on its own machine, whose cache is what `machine` names."""

    def run(*arguments: str, machine: str = "one", **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            **store.environment,
            "XDG_CACHE_HOME": str(tmp_path / machine),
            "JAX_PLATFORMS": "cpu",
            **variables,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        command = [sys.executable, "-m", "podium.cli", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    return run


def config_file(store: Any, tmp_path: Path, model: Path, **changes: Any) -> str:
    path = tmp_path / "config.yaml"
    settings = {"model": str(model), "runs_dir": store.runs, **merged(merged(TINY, SETTINGS), changes)}
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def download(store: Any, folder: Path) -> Path:
    """What the bucket has of the run, as files."""
    for (bucket, name), data in store.objects.items():
        assert bucket == "bucket"
        path = folder / name.removeprefix("team/runs/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder / "run"


def test_a_run_in_a_bucket_goes_on_on_another_machine_and_ends_as_one_on_a_disk(
    store, podium, tiny_model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    done = podium("train", config_file(store, tmp_path, tiny_model, steps=2), "--plain")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("*:"))
    names = {name for _, name in store.objects}
    assert {f"team/runs/run/{name}" for name in ("config.yaml", "metrics.jsonl", "samples.jsonl")} <= names
    assert "team/runs/run/checkpoints/2/commit_success.txt" in names
    assert "team/runs/run/run.lease" not in names
    done = podium("train", config_file(store, tmp_path, tiny_model), "--plain", machine="two")
    assert done.returncode == 0, done.stderr
    assert "continuing after step 2" in done.stderr
    config = make_config(tiny_model, tmp_path / "local", **SETTINGS)
    assert train(Config.model_validate(config.model_dump()), plain=True) == 0
    found, expected = download(store, tmp_path / "downloaded"), tmp_path / "local" / "run"
    assert metrics_of(found) == metrics_of(expected)
    for name in ("samples.jsonl", "lengths.jsonl"):
        assert (found / name).read_bytes() == (expected / name).read_bytes()
    (found / "config.yaml").write_text((expected / "config.yaml").read_text())
    for step in saved_steps(found / "checkpoints"):  # the digests that were downloaded are the bucket's
        seal(found / "checkpoints" / str(step), step, lambda: None)
    assert weights_of(found) == weights_of(expected)
    exported = podium("export", f"{store.runs}/run@2", str(tmp_path / "exported"), machine="three")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    evaluated = podium(
        "eval", f"{store.runs}/run", "--task", "arithmetic", "--questions", "4", "--json", machine="three"
    )
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["target"] == f"{store.runs}/run@4"


def test_a_damaged_checkpoint_in_a_bucket_is_put_aside(store, podium, tiny_model, tmp_path):
    assert podium("train", config_file(store, tmp_path, tiny_model), "--plain").returncode == 0
    key = next(key for key in store.objects if re.search("checkpoints/4/params/ocdbt.*/d/", key[1]))
    data = bytearray(store.objects[key])
    data[len(data) // 2] ^= 1
    store.put(*key, bytes(data))
    shutil.rmtree(tmp_path / "one")
    done = podium("train", config_file(store, tmp_path, tiny_model), "--plain")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "checkpoint 4 is damaged (params/" in said
    assert "continuing from step 2" in said
    names = {name for _, name in store.objects}
    assert "team/runs/run/checkpoints/4.damaged/commit_success.txt" in names
    assert "team/runs/run/checkpoints/4/commit_success.txt" in names


def test_a_run_that_another_machine_trains_is_refused(store, podium, tiny_model, tmp_path):
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.2):
            lease = {"owner": "process 1 on host elsewhere", "time": time.time()}
            store.put("bucket", "team/runs/run/run.lease", json.dumps(lease).encode())

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        done = podium("train", config_file(store, tmp_path, tiny_model), "--plain")
    finally:
        ended.set()
        thread.join()
    assert done.returncode == 1
    assert f"error: {store.runs}/run is in use by process 1 on host elsewhere; wait for it, stop it" in done.stderr


def test_two_hosts_that_share_nothing_but_the_bucket_train_one_run(store, podium, tiny_model, tmp_path):
    """The guard's file, the records, and the checkpoint to which both write are objects."""
    config, coordinator = config_file(store, tmp_path, tiny_model, steps=2), f"127.0.0.1:{free_port()}"

    def host(worker: int) -> subprocess.CompletedProcess[str]:
        job = tmp_path / f"job{worker}"
        job.mkdir()
        variables = {"PODRUN_WORKER": str(worker), "PODRUN_WORKERS": "2", "PODRUN_COORDINATOR": coordinator}
        return podium("train", config, machine=f"host{worker}", PODRUN_JOB_DIR=str(job), **variables)

    with ThreadPoolExecutor(2) as hosts:
        first, second = hosts.map(host, range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    names = {name for _, name in store.objects}
    assert "team/runs/run/checkpoints/2/commit_success.txt" in names
    assert any(name.startswith("team/runs/run/checkpoints/2/params/ocdbt.process_1/") for name in names)
    assert not any(".guard-" in name for name in names)
    assert json.loads(store.objects["bucket", "team/runs/run/summary.json"])["steps"] == 2
    done = podium("train", config_file(store, tmp_path, tiny_model, steps=4), "--plain", machine="alone")
    assert done.returncode == 0, done.stderr
    assert "continuing after step 2" in done.stderr


@pytest.mark.parametrize("store", ["gs"], indirect=True)
@pytest.mark.parametrize("command", ["eval RUN", "export RUN out", "chat RUN", "train CONFIG --from RUN"])
def test_an_expired_login_is_one_line_with_the_command_that_renews_it(store, podium, tiny_model, tmp_path, command):
    words = {"RUN": f"{store.runs}/run", "CONFIG": config_file(store, tmp_path, tiny_model)}
    store.refuses = 401
    done = podium(*(words.get(word, word) for word in command.split()))
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "renew the login" in line]
    assert line.startswith(f"error: {store.runs}/run/config.yaml cannot be read: ")
    assert line.endswith("; renew the login: gcloud auth application-default login")
    assert "Traceback" not in done.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
