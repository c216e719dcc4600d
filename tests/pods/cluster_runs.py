"""Tiny runs of two processes by the scripts for clusters, for tests and benches/clusters.py."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from benches.recipes import write_tiny_model
from podium.job.report import main as report
from tests.pods.slurm_cluster import Slurm
from tests.pods.unreliable import TEACHING

ROOT = Path(__file__).parents[2]
STEPS, LEAST_LOSS = 3, 1e-5
Figures = list[list[float]]
"""Loss and reward, of several steps or processes."""
SETTINGS: dict[str, Any] = {
    "prompts_per_step": 4,
    "group_size": 4,
    "algorithm": TEACHING,
    "tasks": [{"name": "tests.pods.unreliable:Nearness"}],
    "grading": {"workers": 0},
    "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 3, "slots": 16, "prefill_rows": 8},
    "train": {"rows_per_device": 2, "optimizer": {"learning_rate": 1e-3}},
    "eval": {"at_start": False, "at_end": False},
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def config(folder: Path, **settings: Any) -> Path:
    """The config of a tiny run."""
    (folder / "model").mkdir(exist_ok=True)
    write_tiny_model(folder / "model")
    path = folder / "job.yaml"
    own = {"name": "job", "model": str(folder / "model"), "runs_dir": str(folder / "runs"), "steps": STEPS}
    path.write_text(yaml.safe_dump({**SETTINGS, **own, **settings}))
    return path


def podium(*words: str) -> str:
    """What `podium pod` prints."""
    command = [sys.executable, "-m", "podium.cli", "pod", *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def figures(metrics: list[dict[str, float]]) -> Figures:
    """Loss and reward of each."""
    return [[each["train-other/loss"], each["train-reward/total/mean"]] for each in metrics]


def of_steps(folder: Path) -> Figures:
    """Of each step, as the first process recorded them."""
    return figures([json.loads(line) for line in (folder / "runs" / "job" / "metrics.jsonl").read_text().splitlines()])


def of_processes(folder: Path) -> Figures:
    """Of the last step, as each of the two processes had them."""
    return figures([json.loads((folder / str(each) / "progress.json").read_text())["metrics"] for each in range(2)])


def submit(slurm: Slurm, folder: Path, *, limit: str = "1:00:00", **settings: Any) -> str:
    """Hand a tiny run to Slurm; the job's number."""
    slurm.environment |= on_cpu(1)
    words = ("--nodes", "2", "--python", sys.executable, "--time", limit)
    script = podium("slurm", str(config(folder, **settings)), *words)
    path = folder / "job.sh"
    path.write_text(script.replace(":8476", f":{free_port()}"))
    return slurm.run("sbatch", "--parsable", str(path), cwd=folder)


def container(folder: Path, *words: str, **settings: Any) -> dict[str, Any]:
    """The container of the JobSet of a tiny run."""
    written = podium("k8s", str(config(folder, **settings)), "--image", "podium:1", "--claim", "runs", *words)
    _, jobset = yaml.safe_load_all(written)
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]


def on_cpu(devices: int) -> dict[str, str]:
    """Variables of a process with so many devices."""
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)}


def run_alone(folder: Path, devices: int = 2) -> Figures:
    """Train in one process that has as many devices as two; the figures of its steps."""
    command = [sys.executable, "-m", "podium.cli", "train", str(config(folder)), "--plain"]
    subprocess.run(command, cwd=folder, env={**os.environ, **on_cpu(devices)}, check=True, stdout=subprocess.DEVNULL)
    return of_steps(folder)


def run_by_slurm(slurm: Slurm, folder: Path) -> tuple[Figures, Figures]:
    """Have Slurm train in two processes; the figures of the steps, and each process's of the last."""
    number = submit(slurm, folder)
    job = slurm.ended(number, 300)
    log = (folder / f"job-{number}.log").read_text()
    assert job["JobState"] == "COMPLETED", log[-3000:]
    assert log.splitlines()[-1] == "podium: done"
    return of_steps(folder), of_processes(folder / "podium-jobs" / f"{number}-0")


def run_by_jobset(folder: Path) -> tuple[Figures, Figures]:
    """The same of two pods: the container's own command and variables, with the first's address instead of its name."""
    own = container(folder, "--type", "h100-1", "--nodes", "2")
    return _run_pods(folder, own, [{"JOB_COMPLETION_INDEX": str(index)} for index in range(2)], devices=1)


SLICE_DEVICES = 4


def run_by_slices(folder: Path) -> tuple[Figures, Figures]:
    """The same of two slices, of which each is one pod of four devices instead of four pods.

    The config's mesh is refused unless the run has two slices, and so is a job whose slices are not its type's.
    """
    own = container(folder, "--type", "2xv6e-16", mesh="dcn:2,fsdp:-1")
    own["args"] = [own["args"][0].replace(":-0} * 4", ":-0} * 1")]
    slices = [{"MEGASCALE_SLICE_ID": str(index), "JOB_COMPLETION_INDEX": "0"} for index in range(2)]
    smaller = {"PODRUN_WORKERS": "2", "PODRUN_ACCELERATOR": f"2xv6e-{SLICE_DEVICES}"}
    return _run_pods(folder, own, [each | smaller for each in slices], devices=SLICE_DEVICES)


def _run_pods(
    folder: Path, own: dict[str, Any], places: list[dict[str, str]], *, devices: int
) -> tuple[Figures, Figures]:
    """Run a container's command in a process for each of `places`, the variables that its pod alone has."""
    (script,) = own["args"]
    script = script.replace("/etc/podium/config.yaml", str(folder / "job.yaml"))
    script = script.replace("exec python", f"exec {sys.executable}")
    given = {each["name"]: each.get("value", "0") for each in own["env"]}
    assert given["PODRUN_COORDINATOR"] == "job-workers-0-0.job:8476"
    given |= {"PODRUN_COORDINATOR": f"127.0.0.1:{free_port()}", **on_cpu(devices)}
    processes = []
    for index, place in enumerate(places):
        with (folder / f"log{index}").open("wb") as log:
            command, environment = [*own["command"], script], {**os.environ, **given, **place}
            processes.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log))
    ends = [process.wait(400) for process in processes]
    assert ends == [0, 0], "\n".join((folder / f"log{index}").read_text()[-3000:] for index in range(len(places)))
    jobs = folder / "runs" / "jobs" / "job-0"
    assert report([str(jobs)]) == 0
    return of_steps(folder), of_processes(jobs)
