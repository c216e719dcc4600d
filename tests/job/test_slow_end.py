"""A run that is done on several hosts, where the first takes longer to end: it hands its metrics to a service."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from podium.hosts.distributed import CLEAN_UP_S, SHUTDOWN_S
from podium.observe.services import FINISH_TIMEOUT_S

ROOT = Path(__file__).parents[2]
SLOW_S = 35
"""Longer than jax's barrier lasted when such runs were told as failed."""
PROCESS = f"""
import os, time
from podium.job.job_context import join_job
from podium.hosts.distributed import joined
with join_job(os.environ) as job:
    job.guard.agree({{}}, None)
    with joined(job):
        time.sleep({SLOW_S} if os.environ["PODRUN_WORKER"] == "0" else 0)
    job.report.end("done", "done", 0)
"""


def test_the_barrier_outlasts_the_slowest_end():
    assert SHUTDOWN_S > FINISH_TIMEOUT_S + CLEAN_UP_S


@pytest.mark.long
def test_the_others_wait_for_a_first_process_that_ends_slowly(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for worker in range(2):
        told = {"PODRUN_WORKER": str(worker), "PODRUN_WORKERS": "2", "PODRUN_COORDINATOR": f"127.0.0.1:{port}"}
        environment = {**os.environ, **told, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        with (tmp_path / f"log{worker}").open("wb") as log:
            command = [sys.executable, "-c", PROCESS]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    assert [process.wait(300) for process in processes] == [0, 0], (tmp_path / "log1").read_text()[-2000:]
