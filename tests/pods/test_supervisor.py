"""One job per host, by the agent's own commands; each test is a host with its own home."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from podium.pods.host import jobs
from podium.pods.host.jobs import Host, JobSpec, unit_command
from podium.pods.host.processes import kill
from tests.pods.clock import wait_for
from tests.pods.host_agent import ROOT, SLEEP, shell


def test_a_job_runs_to_its_end_and_leaves_its_files(agent):
    status, found = agent.ask("start", "a-1", *shell("echo out; echo err >&2; pwd; echo $PODRUN_JOB; exit 3"))
    assert (status, found["state"], found["job"], found["worker"], found["workers"]) == (0, "started", "a-1", 0, 1)
    found = agent.ended("a-1")
    assert (found["state"], found["exit"]) == ("finished", 3)
    assert found["record"]["kind"] == "exit"
    assert found["record"]["message"] == "exit status 3; the log ends with: a-1"
    assert agent.run("logs").stdout == f"out\nerr\n{ROOT}\na-1\n"
    assert (agent.home / "latest.exit").read_text() == "3\n"
    assert (agent.home / "latest.log").read_text().startswith("out\n")
    assert int((agent.home / "latest.pid").read_text()) == found["pid"]
    assert os.readlink(agent.home / "latest") == "jobs/a-1"
    assert agent.home.stat().st_mode & 0o777 == 0o700


def test_the_same_job_is_started_once_and_another_not_at_all(agent):
    assert agent.ask("start", "a-1", *SLEEP)[1]["state"] == "started"
    status, found = agent.ask("start", "a-1", *SLEEP)
    assert (status, found["state"]) == (0, "running")
    status, found = agent.ask("start", "b-1", *SLEEP)
    assert (status, found["state"], found["job"]) == (75, "busy", "a-1")
    assert "job a-1 is running on this host; stop it first" in found["error"]
    assert agent.state("b-1") == "none"


def test_a_job_that_has_ended_is_told_and_not_run_again(agent):
    agent.ask("start", "a-1", *shell(f"echo x >> {agent.home}/runs; exit 7"))
    agent.ended("a-1")
    status, found = agent.ask("start", "a-1", *shell("exit 0"))
    assert (status, found["state"], found["exit"]) == (0, "finished", 7)
    assert (agent.home / "runs").read_text() == "x\n"
    assert agent.ask("start", "a-2", *SLEEP)[1]["state"] == "started"  # the host is free at once


def test_many_starts_at_once_make_one_copy(agent):
    """gcloud runs a command again after a lost connection, up to ten times."""
    command = [sys.executable, "-m", "podium.pods.host.agent", "--home", str(agent.home), "start", "a-1"]
    command += shell(f"echo x >> {agent.home}/runs; sleep 100")
    starts = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    states = [json.loads(start.communicate(timeout=300)[0])["state"] for start in starts]
    assert sorted(states) == ["running"] * 5 + ["started"]
    wait_for((agent.home / "runs").exists)
    assert (agent.home / "runs").read_text() == "x\n"


def test_exit_255_is_kept_and_never_the_agent_s_own(agent):
    status, _ = agent.ask("start", "a-1", *shell("exit 255"))
    assert status == 0
    assert agent.ended("a-1")["exit"] == 255
    assert agent.ask("status", "a-1")[0] == 0


def test_kill_9_of_the_command_is_told_by_its_supervisor(agent):
    agent.ask("start", "a-1", *shell("exec sleep 100"))
    processes = Host(agent.home).processes  # only this host's: other tests run jobs of the same name
    (process,) = wait_for(lambda: [each for each in processes("a-1") if name_of(each) == "sleep"])
    os.kill(process, signal.SIGKILL)
    found = agent.ended("a-1")
    assert (found["state"], found["exit"], found["record"]["kind"]) == ("finished", 137, "signal")
    assert found["record"]["message"] == "signal 9 (SIGKILL): kill -9, or the host was out of memory"


def name_of(process: int) -> str:
    """The name of a process's program; empty if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip()
    return ""


def test_kill_9_of_the_supervisor_leaves_the_host_taken_until_the_job_is_gone(agent):
    found = agent.ask("start", "a-1", *SLEEP)[1]
    os.kill(found["pid"], signal.SIGKILL)
    wait_for(lambda: found["pid"] not in Host(agent.home).processes("a-1"))
    assert agent.state("a-1") == "running"
    assert agent.ask("start", "b-1", *SLEEP)[0] == 75
    status, found = agent.ask("stop", "a-1", "--grace", "5")
    assert (status, found["state"], found["left"]) == (0, "killed", [])
    assert agent.ask("start", "a-1", *SLEEP)[1]["state"] == "killed"
    assert agent.ask("start", "b-1", *SLEEP)[1]["state"] == "started"


def test_kill_9_of_all_is_a_state_of_its_own(agent):
    supervisor = agent.ask("start", "a-1", *SLEEP)[1]["pid"]
    os.kill(supervisor, signal.SIGKILL)  # first: it would record the end of the others
    assert kill(Host(agent.home).processes("a-1")) == []
    found = agent.ended("a-1")
    assert (found["state"], found["exit"], found["record"]) == ("killed", None, None)


def test_stop_lets_a_job_save(agent):
    script = "trap 'echo saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    agent.ask("start", "a-1", *shell(script))
    wait_for(lambda: "ready" in agent.run("logs").stdout)
    status, found = agent.ask("stop", "--grace", "20")
    assert (status, found["state"], found["exit"], found["left"]) == (0, "finished", 143, [])
    assert agent.run("logs").stdout == "ready\nsaved\n"
    assert agent.ask("stop")[0] == 0  # again: nothing is left to stop


SLOW_SAVE = """
import json, os, signal, sys, time
def save(number, frame):
    for _ in range(8):
        time.sleep(0.5)
        with open(os.environ["PODRUN_JOB_DIR"] + "/new", "w") as file:
            json.dump({"beat": time.time()}, file)
        os.replace(file.name, os.environ["PODRUN_JOB_DIR"] + "/progress.json")
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def test_stop_waits_for_a_save_that_gives_signs_of_life(agent):
    """Longer than the grace, and in several commands, as the laptop gives them."""
    agent.ask("start", "a-1", "--", sys.executable, "-c", SLOW_SAVE)
    wait_for(lambda: "ready" in agent.run("logs").stdout)
    status, found = agent.ask("stop", "--grace", "2.5", "--wait", "0.5")
    assert (status, found["state"]) == (0, "running")
    assert found["left"]
    status, found = agent.ask("stop", "--grace", "2.5")
    assert (status, found["exit"], found["left"]) == (0, 143, [])
    assert agent.run("logs").stdout == "ready\nsaved\n"


def test_a_job_leaves_no_core_file(agent):
    agent.ask("start", "a-1", *shell("ulimit -c"))
    agent.ended("a-1")
    assert agent.run("logs").stdout == "0\n"


def test_the_log_is_copied_into_the_run_s_folder(agent, tmp_path):
    """So that it outlives the machine; the last lines too."""
    run = tmp_path / "run"
    run.mkdir()
    script = (
        f"""echo '{{"run_dir": "{run}"}}' > $PODRUN_JOB_DIR/progress.json; echo begun; sleep 0.2; echo failed; exit 1"""
    )
    agent.ask("start", "a-1", "--worker", "0", *shell(script))
    agent.ended("a-1")
    copy = run / "logs" / "a-1-worker0.log"
    wait_for(lambda: copy.exists() and copy.read_text() == "begun\nfailed\n")


def test_the_log_is_copied_into_a_bucket_in_parts(agent, tmp_path, monkeypatch):
    """By the job's own Python; the last lines too."""
    pytest.importorskip("gcsfs", reason="the extra gcs is not installed")
    import fake_gcs

    program = (
        "import json, os, sys; from pathlib import Path\n"
        "Path(os.environ['PODRUN_JOB_DIR'], 'progress.json').write_text(json.dumps({'run_dir': 'gs://bucket/runs/r'}))\n"
        "print('begun'); sys.stdout.write('x' * (9 << 20)); print(); print('failed'); sys.exit(1)"
    )
    with fake_gcs.running() as (store, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        agent.ask("start", "a-1", "--worker", "0", "--env", f"PYTHONPATH={ROOT}", "--", sys.executable, "-c", program)
        assert agent.ended("a-1")["exit"] == 1
        last = ("bucket", "runs/r/logs/a-1-worker0.1.log")
        wait_for(lambda: store.objects.get(last, b"").endswith(b"failed\n"))
        first = store.objects["bucket", "runs/r/logs/a-1-worker0.log"]
        assert first.startswith(b"begun\nxxx")
        assert len(first) + len(store.objects[last]) == (agent.home / "latest.log").stat().st_size


def test_stop_ends_what_ignores_it_and_what_has_run_away(agent):
    """A child in its own session, whose parents are gone, and which ignores SIGTERM, is still the job's."""
    stubborn = "trap '' TERM; echo $$; while :; do sleep 1; done"
    script = f'(setsid bash -c "{stubborn}" &); {stubborn}'
    agent.ask("start", "a-1", *shell(script))
    wait_for(lambda: agent.run("logs").stdout)
    before = Host(agent.home).processes("a-1")
    assert len(before) >= 3
    status, found = agent.ask("stop", "a-1", "--grace", "0.3")
    assert (status, found["left"], found["exit"]) == (0, [], 137)
    assert found["record"]["message"] == "signal 9 (SIGKILL): it did not end when asked to stop"
    assert Host(agent.home).processes("a-1") == []


def test_a_job_that_ends_takes_its_children_with_it(agent):
    agent.ask("start", "a-1", *shell("(setsid sleep 100 &); exit 0"))
    found = agent.ended("a-1")
    assert (found["exit"], found["record"]["kind"]) == (0, "done")
    assert wait_for(lambda: not Host(agent.home).processes("a-1"))


def test_processes_of_others_are_left_alone(agent, tmp_path):
    other = subprocess.Popen(["sleep", "100"], env={**os.environ, "PODRUN_JOB_DIR": str(tmp_path / "elsewhere")})
    try:
        agent.ask("start", "a-1", *SLEEP)
        agent.ask("stop", "a-1", "--grace", "0.1")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_record_that_the_job_wrote_stays(agent):
    agent.ask("start", "a-1", *shell('echo \'{"kind": "exception"}\' > $PODRUN_JOB_DIR/record.json; exit 1'))
    assert agent.ended("a-1")["record"] == {"kind": "exception"}


def test_terminal_sequences_and_split_secrets_do_not_reach_the_log(agent, tmp_path):
    secret = tmp_path / "secrets"
    secret.write_text("HF_TOKEN=hf_canary0123456789\n")
    secret.chmod(0o600)
    script = (
        r"printf '\033[2J\033]0;owned\007red \033[31mtext\033[0m \377\n';"
        'printf "a ${HF_TOKEN:0:8}"; sleep 0.3; echo "${HF_TOKEN:8} b"; echo "${HF_TOKEN:0:9}"; echo "${HF_TOKEN:9}";'
        "echo -n $HF_TOKEN | base64; echo -n user:$HF_TOKEN | base64; echo -n $HF_TOKEN | od -An -tx1; exit 1"
    )
    assert agent.ask("start", "a-1", "--env-file", str(secret), *shell(script))[0] == 0
    found = agent.ended("a-1")
    log = agent.file("a-1", "log").read_text()
    assert log.startswith("red text \\xff\na [redacted] b\n[redacted]\n")
    assert "\x1b" not in log
    assert log.count("[redacted]") == 5
    assert "canary" not in json.dumps(found)


def test_a_unit_of_systemd_holds_the_job_where_there_is_one(tmp_path, monkeypatch):
    """A stand-in for systemd-run, which does as that does: it starts the command elsewhere and ends."""
    stand_in = tmp_path / "bin" / "systemd-run"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f'#!/bin/bash\necho "$@" > {tmp_path}/arguments\nwhile [ "$1" != -- ]; do shift; done; shift\n'
        'setsid "$@" >/dev/null 2>&1 < /dev/null &\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    assert unit_command("a-1") == []  # no systemd yet
    monkeypatch.setattr(jobs, "SYSTEMD", tmp_path)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert unit_command("a-1") == []  # not ours to use
    monkeypatch.setattr("os.geteuid", lambda: 0)
    host = Host(tmp_path / "home")
    spec = JobSpec(
        job="a-1",
        command=("bash", "-c", "echo done"),
        worker=0,
        workers=1,
        coordinator=None,
        accelerator=None,
        cwd=str(tmp_path),
        env={},
        env_file=None,
    )
    assert host.start(spec) == "started"
    wait_for(lambda: host.state("a-1") == "finished")
    assert host.status("a-1")["exit"] == 0
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("--unit=podrun-a-1 --collect --quiet --property=KillMode=mixed")
    assert f"--property=WorkingDirectory={ROOT}" in arguments
    assert "--setenv=PODRUN_JOB_DIR" in arguments
