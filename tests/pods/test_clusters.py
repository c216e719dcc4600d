"""Scripts for clusters: Slurm's by a real Slurm, Kubernetes' by its schemas, kubectl, and its own command lines."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from podium.job.report import statuses
from tests.pods.cluster_runs import (
    ROOT,
    config,
    free_port,
    jobset_losses,
    manifest,
    podium,
    slurm_losses,
    submit,
)
from tests.pods.slurm_cluster import Slurm, slurm_cluster, why_no_slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(folder, (free_port(), free_port(), free_port())) as cluster:
        yield cluster


needs_slurm = pytest.mark.skipif(why_no_slurm() is not None, reason=why_no_slurm() or "")


@needs_slurm
def test_slurm_trains_three_steps_in_two_processes_with_equal_losses(slurm, tmp_path):
    one, other = slurm_losses(slurm, tmp_path)
    assert one == other
    assert all(one)


@needs_slurm
def test_slurm_has_a_run_save_at_its_notice_and_continues_it_when_requeued(slurm, tmp_path):
    number = submit(slurm, tmp_path, steps=100_000, checkpoint={"every_steps": 0})
    metrics = tmp_path / "runs" / "job" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)
    slurm.run("scancel", "--signal=USR1", "--batch", number)  # as Slurm does when the time is nearly over
    wait_for(lambda: slurm.job(number)["Restarts"] == "1")
    first = tmp_path / "podium-jobs" / f"{number}-0"
    assert [each["exit"] for each in statuses(first)] == [143, 143]
    saved = max(int(path.name) for path in (tmp_path / "runs" / "job" / "checkpoints").iterdir())
    slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    log = tmp_path / f"job-{number}.log"
    wait_for(lambda: f"continuing after step {saved}" in log.read_text())
    slurm.run("scancel", number)
    assert slurm.ended(number, 120)["JobState"] == "CANCELLED"
    assert "podium: stopped" in log.read_text()


def wait_for(condition: Any) -> None:
    import time

    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_a_jobset_asks_for_the_machines_of_a_slice(tmp_path):
    settings, jobset = manifest(tmp_path, "--type", "v6e-16", "--claim", "runs")
    assert yaml.safe_load(settings["data"]["config.yaml"])["steps"] == 3
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 0)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}}
    gpus = manifest(tmp_path, "--type", "h100-8", "--nodes", "2", "--claim", "runs", "--on-demand")[1]
    job = gpus["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == 2
    assert job["template"]["spec"]["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert job["template"]["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}


def test_two_pods_of_a_jobset_train_three_steps_with_equal_losses(tmp_path):
    one, other = jobset_losses(tmp_path)
    assert one == other
    assert all(one)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("words", [("--type", "v6e-16"), ("--type", "h100-8", "--nodes", "2")])
def test_kubectl_takes_the_manifest(tmp_path, words):
    """A dry run in the client, which asks a server only for which kinds there are."""
    from tests.pods.fake_kubernetes import discovery

    path = tmp_path / "job.yaml.out"
    path.write_text(podium("k8s", str(config(tmp_path)), "--image", "podium:1", "--claim", "runs", *words))
    with discovery() as server:
        flags = ("--server", server, "--dry-run=client", "--validate=false", "--output=name")
        command = ("kubectl", "create", *flags, "--filename", str(path))
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HOME": str(tmp_path)})
    assert done.stdout.split() == ["configmap/job-config", "jobset.jobset.x-k8s.io/job"], done.stderr


@pytest.mark.parametrize(
    "words", [("--type", "v6e-16"), ("--type", "v5litepod-8"), ("--type", "h100-8", "--nodes", "2")]
)
def test_the_published_schema_takes_the_manifest(tmp_path, words):
    """JobSet's own (its CRD at 08dfbdfd, Apache 2.0), and in it Kubernetes' of jobs and pods; no field is unknown."""
    schema = json.loads((Path(__file__).parent / "jobset_schema.json").read_text())
    jobset = manifest(tmp_path, *words, "--claim", "runs")[1]
    assert violations(jobset, schema) == []
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"] |= {"completion": 1, "completions": "4"}
    assert violations(jobset, schema) == [
        "spec.replicatedJobs[0].template.spec.completions: '4' is no integer",
        "spec.replicatedJobs[0].template.spec.completion: unknown",
    ]


TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "number": (int, float),
}


def violations(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """What is wrong with a value by a schema of the kind that Kubernetes publishes."""
    names = schema.get("type", [])
    wanted = [kind for name in ([names] if isinstance(names, str) else names) for kind in TYPES[name]]
    if wanted and not isinstance(value, tuple(wanted)):
        return [f"{where}: {value!r} is no {names}"]
    found = [] if value in schema.get("enum", [value]) else [f"{where}: {value!r} is none of {schema['enum']}"]
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += violations(item, schema.get("items", {}), f"{where}[{index}]")
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        found += [f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in value]
        for name, item in value.items():
            path = f"{where}.{name}".lstrip(".")
            if name not in known and others is False:
                found.append(f"{path}: unknown")
            else:
                found += violations(item, known.get(name) or (others if isinstance(others, dict) else {}), path)
    return found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("k8s", "--type", "v6e-16"), "would be lost with the pods"),
        (("k8s", "--type", "v6e-17", "--claim", "runs"), "unknown accelerator"),
        (("k8s", "--type", "v6e-16", "--claim", "runs", "--nodes", "3"), "v6e-16 has 4 machines; leave it out"),
        (("slurm", "--time", "soon"), "write HH:MM:SS"),
    ],
)
def test_what_cannot_run_there_is_refused(tmp_path, words, message):
    more = ("--image", "podium:1") if words[0] == "k8s" else ()
    command = [sys.executable, "-m", "podium.cli", "pod", words[0], str(config(tmp_path)), *words[1:], *more]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 2
    assert re.search(message, done.stderr)
    assert "Traceback" not in done.stderr


pytestmark = pytest.mark.long  # minutes; `make test-long` runs it
