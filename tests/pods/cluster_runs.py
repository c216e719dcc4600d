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
    "train": {"rows_per_device": 2, "optimizer": {"learning_rate": 1e-2}},
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


def submit(slurm: Slurm, folder: Path, **settings: Any) -> str:
    """Hand a tiny run to Slurm; the job's number."""
    slurm.environment |= on_cpu(1)
    words = ("--nodes", "2", "--python", sys.executable, "--time", "1:00:00")
    script = podium("slurm", str(config(folder, **settings)), *words)
    path = folder / "job.sh"
    path.write_text(script.replace(":8476", f":{free_port()}"))
    return slurm.run("sbatch", "--parsable", str(path), cwd=folder)


def manifest(folder: Path, *words: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(podium("k8s", str(config(folder)), "--image", "podium:1", *words)))


def on_cpu(devices: int) -> dict[str, str]:
    """Variables of a process with so many devices."""
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)}


def run_alone(folder: Path) -> Figures:
    """Train in one process that has as many devices as two; the figures of its steps."""
    command = [sys.executable, "-m", "podium.cli", "train", str(config(folder)), "--plain"]
    subprocess.run(command, cwd=folder, env={**os.environ, **on_cpu(2)}, check=True, stdout=subprocess.DEVNULL)
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
    jobset = manifest(folder, "--type", "h100-1", "--nodes", "2", "--claim", "runs")[1]
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    (script,) = container["args"]
    script = script.replace("/etc/podium/config.yaml", str(folder / "job.yaml")).replace(
        "exec python", f"exec {sys.executable}"
    )
    given = {each["name"]: each.get("value", "0") for each in container["env"]}
    assert given["PODRUN_COORDINATOR"] == "job-workers-0-0.job:8476"
    given |= {"PODRUN_COORDINATOR": f"127.0.0.1:{free_port()}", **on_cpu(1)}
    processes = []
    for index in range(2):
        environment = {**os.environ, **given, "JOB_COMPLETION_INDEX": str(index)}
        with (folder / f"log{index}").open("wb") as log:
            command = [*container["command"], script]
            processes.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log))
    assert [process.wait(400) for process in processes] == [0, 0], (folder / "log0").read_text()[-3000:]
    jobs = folder / "runs" / "jobs" / "job-0"
    assert report([str(jobs)]) == 0
    return of_steps(folder), of_processes(jobs)
