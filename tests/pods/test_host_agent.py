"""What the agent on a host is told, refuses and answers, also where the disk is full."""

import json
import os
import subprocess
import sys
import time

import pytest

from podium.pods.host.jobs import Host, JobSpec
from tests.pods.host_agent import ROOT, SLEEP, shell


def test_each_worker_is_told_its_place(agent):
    arguments = ("--worker", "2", "--peers", "10.0.0.1,10.0.0.2,10.0.0.3", "--accelerator", "v4-24")
    script = "env | grep -E '^(PODRUN|JAX_COORD|JAX_PLAT|MODE)_?' | sort"
    agent.ask("start", "a-1", *arguments, "--env", "MODE=fast", "--cwd", str(agent.home.parent), *shell(script))
    agent.ended("a-1")
    assert agent.run("logs").stdout.splitlines() == [
        "JAX_COORDINATOR_PORT=8476",
        *([f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}"] if "JAX_PLATFORMS" in os.environ else []),
        "MODE=fast",
        "PODRUN_ACCELERATOR=v4-24",
        "PODRUN_COORDINATOR=10.0.0.1:8476",
        "PODRUN_JOB=a-1",
        f"PODRUN_JOB_DIR={agent.home}/jobs/a-1",
        "PODRUN_WORKER=2",
        "PODRUN_WORKERS=3",
    ]


def test_secrets_reach_the_job_and_nothing_else(agent, tmp_path):
    secret = tmp_path / "secrets"
    secret.write_text("# keys\nWANDB_API_KEY=s3cr3t-value-1\nHF_TOKEN=hf_canary\n")
    secret.chmod(0o600)
    script = 'rm ../secrets 2>/dev/null; echo "key $WANDB_API_KEY $WANDB_API_KEY and ${#HF_TOKEN}"; exit 1'
    assert agent.ask("start", "a-1", "--env-file", str(secret), *shell(script))[0] == 0
    secret.unlink()  # as soon as the job has started
    agent.ended("a-1")
    assert agent.run("logs").stdout == "key [redacted] [redacted] and 9\n"
    for path in agent.home.rglob("*"):
        if path.is_file():
            assert b"s3cr3t-value-1" not in path.read_bytes(), path
            assert b"hf_canary" not in path.read_bytes(), path


@pytest.fixture
def small_home(tmp_path, request):
    """A host whose home has 256 KB, and as many files as the test's parameter says."""
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    home = tmp_path / "home"
    home.mkdir()
    files = getattr(request, "param", 0)  # 0: no limit
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size=256k,nr_inodes={files}", "tmpfs", str(home)], check=True)
    yield home
    subprocess.run(["umount", "--lazy", str(home)], check=True)


def test_a_job_that_fills_the_disk_is_told_and_not_taken_for_killed(small_home, agent):
    script = f"dd if=/dev/zero of={small_home}/big bs=4096 2>/dev/null; echo cannot write the checkpoint; exit 3"
    assert agent.ask("start", "a-1", *shell(script))[0] == 0
    found = agent.ended("a-1")
    assert (found["state"], found["exit"]) == ("finished", 3)
    message = found["record"]["message"]
    assert message.startswith("exit status 3; the log ends with: cannot write the checkpoint; the disk of ")
    assert "is full: delete something there" in message


SLOW = """#!{python}
import runpy, sys, time
sys.path.insert(0, "{root}")
from podium.pods.host import supervisor
begin = supervisor._forward_stop
supervisor._forward_stop = lambda *given: time.sleep(1) or begin(*given)
del sys.argv[1:3]  # -m and the module
runpy.run_module("podium.pods.host.agent", run_name="__main__")
"""
"""A Python whose supervisor, once it has started the command, has no time for a second."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its supervisor outlives the start
def test_a_command_that_fills_the_disk_at_once_has_started(small_home, agent, tmp_path, monkeypatch):
    slow = tmp_path / "python"
    slow.write_text(SLOW.format(python=sys.executable, root=ROOT))
    slow.chmod(0o700)
    spec = JobSpec(
        job="a-1",
        command=shell(f"dd if=/dev/zero of={small_home}/big bs=4096 2>/dev/null; sleep 2; exit 3")[1:],
        worker=0,
        workers=1,
        coordinator=None,
        accelerator=None,
        cwd=str(tmp_path),
        env={},
        env_file=None,
    )
    monkeypatch.setattr(sys, "executable", str(slow))
    assert Host(small_home).start(spec) == "started"
    monkeypatch.undo()
    assert agent.ended("a-1")["exit"] == 3


def test_a_start_on_a_full_disk_says_so_and_works_once_there_is_room(small_home, agent):
    assert agent.ask("probe")  # makes the home
    (small_home / "big").write_bytes(bytes(240 * 1024))
    status, found = agent.ask("start", "a-1", *SLEEP)
    assert status == 1
    assert "No space left on device" in found["error"]
    (small_home / "big").unlink()
    assert agent.ask("start", "a-1", *SLEEP)[1]["state"] == "started"


@pytest.mark.parametrize("small_home", [40], indirect=True)
def test_a_start_without_a_free_inode_does_not_speak_of_megabytes(small_home, agent):
    with pytest.raises(OSError, match="No space left"):
        for number in range(40):
            (small_home / f"file{number}").touch()
    status, found = agent.ask("start", "a-1", *SLEEP)
    assert status == 1
    assert "all of its 40 inodes are in use" in found["error"]
    assert "has 0 files (inodes) free and needs 50,000" in str(agent.ask("probe")[1]["problems"])


def test_secrets_that_others_can_read_are_refused(agent, tmp_path):
    secret = tmp_path / "secrets"
    secret.write_text("HF_TOKEN=hf_canary\n")
    secret.chmod(0o644)
    status, found = agent.ask("start", "a-1", "--env-file", str(secret), *SLEEP)
    assert status == 1
    assert "mode 644); run: chmod 600" in found["error"]
    assert agent.ask("status", "a-1")[1]["exit"] == 1


def test_a_command_that_does_not_exist_is_an_error_of_the_start(agent):
    status, found = agent.ask("start", "a-1", "--", "no-such-command")
    assert status == 1
    assert "job a-1 did not start" in found["error"]
    assert "no-such-command" in found["error"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("start", "a-1"), "no command was given; write it after --"),
        (("start", "../a", *SLEEP), "'../a' is not a job name"),
        (("start", "a", "--env", "PODRUN_WORKER=1", *SLEEP), "--env PODRUN_WORKER"),
        (("start", "a", "--env", "HF_TOKEN=x", *SLEEP), "put it in a file, and use --env-file"),
        (("start", "a", "--peers", "198.51.100.1,198.51.100.2", *SLEEP), "must match exactly one of --peers"),
        (("start", "a", "--peers", "198.51.100.1", "--worker", "1", *SLEEP), "must match exactly one of --peers"),
        (("dance",), "invalid choice: 'dance'"),
    ],
)
def test_wrong_usage_is_told_as_json(agent, arguments, error):
    status, found = agent.ask(*arguments)
    assert status == 2
    assert error in found["error"]
    assert "hf" not in found["error"]


def test_the_log_can_be_read_from_a_byte_on(agent):
    agent.ask("start", "a-1", *shell("for i in 1 2 3; do echo line $i; done"))
    agent.ended("a-1")
    assert agent.run("logs").stdout == "line 1\nline 2\nline 3\n"
    assert agent.run("logs", "--from-byte", "14").stdout == "line 3\n"
    missing = agent.run("logs", "b-1")
    assert (missing.returncode, missing.stderr) == (1, "error: no job b-1 on this host\n")


def test_a_host_is_probed_with_the_standard_library_alone(agent):
    """Nothing is installed yet when it is."""
    begun = time.time()
    done = agent.run("probe", python=("-S", "-E"))
    ended = time.time()
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert (found["job"], found["problems"]) == (None, [])
    assert found["python"].startswith("3.")
    assert begun - 1 <= found["time"] <= ended + 1  # whatever it is rounded to


def test_a_probe_tells_what_is_wrong(agent):
    agent.ask("start", "a-1", *SLEEP)
    status, found = agent.ask("probe", "--expect-devices", "64")
    assert status == 1
    assert found["job"] == "a-1"
    assert found["problems"][0].endswith("and should have 64; recreate the slice")
    assert found["problems"][1] == "job a-1 is running here"


def test_nothing_was_ever_started(agent):
    status, found = agent.ask("status")
    assert (status, found["state"], found["job"], found["exit"]) == (0, "none", None, None)
    assert agent.ask("stop")[0] == 0
    assert agent.run("logs").stderr == "error: no job has been started on this host\n"
