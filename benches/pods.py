"""`podium pod` when things go wrong: who is named as the cause, how soon, and what is left; all but Google is real.

    python -m benches.pods                 (Linux, as root, with gcloud, sshd and ip; half an hour on two cores)
    python -m benches.pods --bar a --bar f

Four machines are network namespaces with an sshd; Google's API is tests/pods/fake_tpu.py, to which the real gcloud
talks; jobs are `podium train` of a tiny random model over jax.distributed on CPU, four devices on each machine.

    a  up, run (3 steps), logs, down: one command each; the losses of all machines, and those of one process
    b  one machine is missing, there twice, or has another config, commit or folder: named by the launch guard
    c  kill -9 of a worker or of worker 0, a cut cable, an exception, a hang: named on the laptop, and nothing left
    d  --keep-alive while machines are taken at random instants: metrics go on bit for bit
    e  a job that ends with 255, ssh sessions that drop, a laptop that is killed and starts again: one copy of the job
    f  lost replies, stock-outs, 429, deleting what is being made; 200 random fault sequences: nothing is left rented
    g  planted secrets: in no file, no request and no output of all that the other bars leave

Prints a line per case and writes benches/results/pods-BAR-cpu.json; exit status 1 where a case misses its bar.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from benches.kill_resume import differences
from benches.recipes import write_tiny_model
from benches.record import arguments, record
from podium.observe.run_dir import CHECKPOINTS, METRICS
from podium.pods.gcloud import Gcloud, Order, run_process
from podium.pods.inventory import LEASE, OWNER, read_slices
from podium.pods.launch import AGENT, look, stop
from podium.pods.records import GUARD, first_failure
from podium.pods.remote import Remote
from podium.pods.slices import Slices
from podium.train.checkpoint import saved_steps
from podium.train.setup import prepare_platform
from tests.pods.fake_tpu import FakeTpu, Fault, serve
from tests.pods.hosts import ROOT, fake_python, gcloud_environment
from tests.pods.network_world import ZONES, NetworkWorld, job_processes, network_world, why_no_network
from tests.pods.test_slices import one_story
from tests.pods.unreliable import SIGNS

Row = dict[str, Any]
"""A case: what was measured of it, and whether that is `good`."""
SETTINGS: dict[str, Any] = {
    "steps": 100_000,
    "prompts_per_step": 8,
    "group_size": 2,
    "tasks": [{"name": "tests.pods.unreliable:Unreliable"}],
    "grading": {"workers": 0},
    "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 3, "slots": 8, "prefill_rows": 8},
    "train": {"rows_per_device": 1},
    "eval": {"at_start": False, "at_end": False},
    "checkpoint": {"every_steps": 0},
}
TYPE, WORKERS, DEVICES = "v6e-16", 4, 4
SMALL_TYPE, SMALL_WORKERS = "v4-16", 2
HANG_S = 8
NAMED_S, GUARD_S, WHOLE_S = 40.0, 10.0, 180.0
"""The bars: seconds until a cause, or the guard's, is named, and for all commands of bar a."""
LIMIT_S = 300.0
POLL_S = 0.2
KEPT_STEPS, SAVE_EVERY = 16, 2
STORIES = 200
PLANTED = {
    "HF_TOKEN": "hf_CANARYofTheEnvironment0123",
    "WANDB_API_KEY": "CANARY0123456789abcdef0123456789abcdef02",
    "AWS_SECRET_ACCESS_KEY": "CANARYnotAllowed0123456789abcdefghij0003",
}
IN_FILE, IN_OPTION = "hf_CANARYofTheFile/+45678901234", "CANARYinAnOption456789012345"


class Bench:
    """A project with a checkout of what is measured, and a model, in a folder of its own."""

    def __init__(self, folder: Path, world: NetworkWorld) -> None:
        self.folder, self.world = folder, world
        self.signs = world.shared / "signs"
        self.signs.mkdir()
        self.outputs: list[str] = []
        self._model = world.shared / "model"
        self._model.mkdir()
        write_tiny_model(self._model)
        self._numbers = itertools.count(1)

    def config(self, name: str, **settings: Any) -> Path:
        """A config whose run is `name` in the folder that all machines see."""
        path = self.folder / f"{name}.yaml"
        own = {"name": name, "model": str(self._model), "runs_dir": str(self.world.shared / "runs")}
        path.write_text(yaml.safe_dump({**SETTINGS, **own, **settings}))
        return path

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """What a run has written."""
        path = self.world.shared / "runs" / name / METRICS
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pod(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """`podium pod ...` that must succeed."""
        done = self.world.podium(*words)
        self.outputs.append(done.stdout + done.stderr)
        if done.returncode:
            raise RuntimeError(f"podium pod {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return done

    def run_words(self, config: Path, *more: str) -> list[str]:
        """`run` of a config, on CPU."""
        settings = {**on_cpu(DEVICES), SIGNS: self.signs, "PODRUN_HANG_S": HANG_S}
        return ["run", str(config), "--python", sys.executable, *options(settings), *more]

    @contextlib.contextmanager
    def following(self, *words: str) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
        """`podium pod ...` beside the block, with the file of what it says."""
        out = self.folder / f"laptop-{next(self._numbers)}.log"
        with self.world.following(out, *words) as laptop:
            try:
                yield laptop, out
            finally:
                laptop.kill()
                self.outputs.append(out.read_text())

    def remote(self) -> Remote:
        """The workers of the only slice."""
        gcloud = Gcloud(self.world.run)
        (one,) = read_slices(gcloud.nodes(ZONES[0]), [])
        return Remote(gcloud, one)

    def left(self) -> int:
        """Processes of jobs, on all machines."""
        return sum(len(job_processes(home)) for home in self.world.hosts.homes)


def on_cpu(devices: int) -> dict[str, Any]:
    """Variables with which a process has so many devices."""
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": devices}


def options(variables: dict[str, Any]) -> list[str]:
    """As `--env` takes them."""
    return [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]


def wait(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """What the condition gives as soon as it is something; None: it did not in time."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return found or None


def seconds_since(begun: float) -> float:
    """To a tenth."""
    return round(time.monotonic() - begun, 1)


def loss(metrics: dict[str, Any]) -> float:
    """Of a step."""
    return metrics["train-other/loss"]


def bar_a(bench: Bench) -> Iterator[Row]:
    """One command each, in less than three minutes."""
    config, begun, took = bench.config("whole", steps=3), time.monotonic(), {}
    commands = {
        "up": ["up", "demo", "--type", TYPE, "--zone", ZONES[0]],
        "run": bench.run_words(config),
        "status": ["status", "--json"],
        "logs": ["logs", "--worker", "3"],
        "down": ["down", "demo"],
    }
    said = {}
    for name, words in commands.items():
        at = time.monotonic()
        said[name] = bench.pod(*words).stdout
        took[name] = seconds_since(at)
    took["all"] = seconds_since(begun)
    of_hosts = [loss(each["progress"]["metrics"]) for each in json.loads(said["status"])["workers"]]
    together = [loss(line) for line in bench.metrics("whole")]
    alone = bench.config("alone", steps=3)
    environment = {**os.environ, SIGNS: str(bench.signs), "PODRUN_WORKER": "0"}
    environment |= {name: str(value) for name, value in on_cpu(WORKERS * DEVICES).items()}
    command = [sys.executable, "-m", "podium.cli", "train", str(alone), "--plain"]
    subprocess.run(command, cwd=bench.world.checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
    expected = [loss(line) for line in bench.metrics("alone")]
    furthest = max(abs(one - other) for one, other in zip(together, expected, strict=True))
    left = [*bench.world.fake.everything()]
    yield {
        "case": "up, run, status, logs, down",
        "seconds": took,
        "losses": together,
        "losses_of_one_process": expected,
        "furthest": furthest,
        "last_loss_of_each_host": of_hosts,
        "left": left,
        "good": took["all"] < WHOLE_S
        and len(together) == 3
        and len(of_hosts) == WORKERS
        and set(of_hosts) == {together[-1]}
        and furthest <= 1e-6
        and not left,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unlike:
    """A machine that is not as the others, and how it must be told."""

    name: str
    guilty: int
    named: str
    shell: str
    """Said to that machine, before it starts: it may change `$code`, `$more`, `$folder` and `$start`."""


UNLIKE = (
    Unlike(name="missing", guilty=2, named="worker 2 is missing", shell="start="),
    Unlike(name="there twice", guilty=1, named="worker 1 was started twice", shell='$start --home "$HOME/again" $words'),
    Unlike(name="other config", guilty=2, named=r"learning_rate is '0\.5' on worker 2", shell='more="$set=0.5"'),
    Unlike(
        name="other commit",
        guilty=3,
        named=r"commit is 'None' on worker 3",
        shell="cp -r $code $HOME/copy; rm -rf $HOME/copy/.git; code=$HOME/copy",
    ),
    Unlike(name="unshared folder", guilty=3, named=r"worker 3 \(.*does not see what worker 0 writes", shell="folder=$HOME"),
)


def bar_b(bench: Bench) -> Iterator[Row]:
    """The guard names who is not like the others."""
    with rented(bench):
        config = bench.config("guarded", runs_dir="runs", steps=1, checkpoint={"every_steps": 0})
        bench.pod(*bench.run_words(bench.config("first", steps=1)))  # leaves code and agent on the machines
        remote = bench.remote()
        for unlike in UNLIKE:
            yield guarded(bench, remote, config, unlike)


def guarded(bench: Bench, remote: Remote, config: Path, unlike: Unlike) -> Row:
    """A job of which one machine is not like the others."""
    job = f"guard-{unlike.name.replace(' ', '-')}"
    settings = {**on_cpu(DEVICES), SIGNS: bench.signs, "PYTHONPATH": "$code"}
    lines = (
        f"code=$(ls -d $HOME/podrun/code/*); folder={bench.world.shared}; start={AGENT}; more=",
        "set='--set train.optimizer.learning_rate'",
        f"words='start {job} --peers {','.join(remote.addresses)}'",
        f'if [ $worker = {unlike.guilty} ]; then start="$start"; fi',
    )
    train = f"{sys.executable} -m podium.cli train {config} --plain $more"
    command = (
        f'{"; ".join(lines[:3])}; words="$words --worker $worker"; '
        f'words="$words --cwd $folder {" ".join(options(settings))} -- {train}"; '
        f"if [ $worker = {unlike.guilty} ]; then GUILTY; fi; "
        '[ -z "$start" ] || $start $words'
    )
    return {"command": command, "good": False}
