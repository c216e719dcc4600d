"""Scripts for clusters: Slurm's by a real Slurm, Kubernetes' by kubectl and by its own command lines."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import numpy as np
import pytest

from podium.job.report import statuses
from tests.pods.clock import wait_for
from tests.pods.cluster_runs import (
    LEAST_LOSS,
    SLICE_DEVICES,
    STEPS,
    Figures,
    config,
    free_port,
    podium,
    run_alone,
    run_by_jobset,
    run_by_slices,
    run_by_slurm,
    submit,
)
from tests.pods.slurm_cluster import Slurm, slurm_cluster, why_no_slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(folder, (free_port(), free_port(), free_port())) as cluster:
        yield cluster


needs_slurm = pytest.mark.skipif(why_no_slurm() is not None, reason=why_no_slurm() or "")


def check(steps: Figures, processes: Figures) -> None:
    """Each step had something to learn from, and the processes agree."""
    assert len(steps) == STEPS
    assert all(abs(loss) > LEAST_LOSS and reward for loss, reward in steps), steps
    assert processes == [steps[-1]] * 2


@needs_slurm
def test_slurm_trains_three_steps_in_two_processes_with_equal_losses(slurm, tmp_path):
    check(*run_by_slurm(slurm, tmp_path))


@needs_slurm
@pytest.mark.parametrize("limit", ["5", "1:00:00"])
def test_slurm_has_a_run_save_at_its_notice_and_continues_it_when_requeued(slurm, tmp_path, limit):
    """Before the end of five minutes it is asked by itself; of a job with an hour, by a user's command."""
    number = submit(slurm, tmp_path, limit=limit, steps=100_000, checkpoint={"every_steps": 0})
    metrics = tmp_path / "runs" / "job" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)
    if limit == "1:00:00":
        slurm.run("scancel", "--signal=USR1", "--batch", number)
    wait_for(lambda: slurm.job(number)["Restarts"] == "1")
    first = tmp_path / "podium-jobs" / f"{number}-0"
    assert [each["exit"] for each in statuses(first)] == [143, 143]
    saved = max(int(path.name) for path in (tmp_path / "runs" / "job" / "checkpoints").iterdir())
    time.sleep(3.0)  # in the second of the requeue, slurmd would take the new start for the old one
    slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    log = tmp_path / f"job-{number}.log"
    wait_for(lambda: f"continuing after step {saved}" in log.read_text())
    slurm.run("scancel", number)
    assert slurm.ended(number, 120)["JobState"] == "CANCELLED"
    assert "podium: stopped" in log.read_text()


def test_two_pods_of_a_jobset_train_three_steps_with_equal_losses(tmp_path):
    check(*run_by_jobset(tmp_path))


def test_two_slices_train_as_one_slice_with_as_many_devices(tmp_path):
    """Over jax.distributed, by the JobSet's own commands: loss and reward of each step are equal to 1e-6."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    steps, processes = run_by_slices(tmp_path / "two")
    check(steps, processes)
    assert np.abs(np.array(steps) - np.array(run_alone(tmp_path / "one", 2 * SLICE_DEVICES))).max() <= 1e-6


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("words", [("--type", "2xv6e-16"), ("--type", "h100-8", "--nodes", "2")])
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


pytestmark = pytest.mark.long  # minutes; `make test-long` runs it
