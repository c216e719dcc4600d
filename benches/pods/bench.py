"""What all bars share: four machines, a project, a model, and the commands of `podium pod`."""

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from benches.recipes import write_tiny_model
from podium.observe.run_dir import METRICS
from podium.pods.gcloud import Gcloud
from podium.pods.inventory import read_slices
from podium.pods.remote import Remote
from tests.pods.hosts import fake_python
from tests.pods.network_world import ZONES, NetworkWorld, job_processes
from tests.pods.unreliable import SIGNS, TEACHING

Row = dict[str, Any]
"""A case: what was measured of it, and whether that is `good`."""
SETTINGS: dict[str, Any] = {
    "steps": 100_000,
    "prompts_per_step": 8,
    "group_size": 4,
    "algorithm": TEACHING,
    "tasks": [{"name": "tests.pods.unreliable:Unreliable"}],
    "grading": {"workers": 0},
    "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 3, "slots": 16, "prefill_rows": 16},
    "train": {"rows_per_device": 2, "optimizer": {"learning_rate": 1e-2}},
    "eval": {"at_start": False, "at_end": False},
    "checkpoint": {"every_steps": 0},
}
TYPE, WORKERS, DEVICES = "v6e-16", 4, 4
LIMIT_S = 300.0
POLL_S = 0.2


class Bench:
    """A project with a checkout of what is measured, and a model, in a folder of its own."""

    def __init__(self, folder: Path, world: NetworkWorld, compiled: Path) -> None:
        self.folder, self.world = folder, world
        self.signs = world.shared / "signs"
        self.signs.mkdir()
        cache = {"JAX_COMPILATION_CACHE_DIR": compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0}
        self.compiled_once: dict[str, Any] = cache
        """Variables with which runs find the programs of those before them."""
        self._prepare = folder / "prepare.sh"
        self._prepare.write_text("echo prepared\n")  # so that every run has a setup, as every user's has
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

    def run_words(self, config: Path, *more: str, devices: int = DEVICES) -> list[str]:
        """`run` of a config, on CPU."""
        settings = {**on_cpu(devices), **self.compiled_once, SIGNS: self.signs}
        return ["run", str(config), *self._with_setup(sys.executable), *options(settings), *more]

    def counting_words(self, name: str, **plan: Any) -> list[str]:
        """`run` of a job that only counts steps (tests/pods/fake_job.py), in `shared/NAME`."""
        folder = self.world.shared / name
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps(plan))
        config = self.config(name, runs_dir=str(folder))
        return ["run", str(config), *self._with_setup(str(fake_python(self.folder))), *options(on_cpu(1))]

    def _with_setup(self, python: str) -> list[str]:
        return ["--python", python, "--prepare", str(self._prepare)]

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
        (tpu_slice,) = read_slices(gcloud.ask(gcloud.argv.nodes(ZONES[0])), [])
        return Remote(gcloud, tpu_slice)

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


@contextlib.contextmanager
def rented(bench: Bench, type_name: str = TYPE, *more: str) -> Iterator[None]:
    """A slice, given back after the block."""
    bench.pod("up", "demo", "--type", type_name, "--zone", ZONES[0], *more)
    try:
        yield
    finally:
        bench.pod("down", "demo")
