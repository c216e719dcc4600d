"""Every wrong request of `podium pod` is told before anything is rented, and nobody else's slice is touched."""

import re

import pytest

from podium.pods.world import World
from tests.pods.fake_tpu import Fault
from tests.pods.pod_world import ZONES, rent

NAMES = ("$(id)", "-x", ".hid")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_job_can_have_is_refused_before_anything_is_sent(make_world, pod, name):
    world = make_world(workers=1)
    status, _, err = pod(*world.run_arguments("--set", f"name={name}", "--type", "v6e-8", "--zone", ZONES[0]))
    assert status == 2
    assert "name: " in err
    assert "cannot name a job" in err
    assert world.gcloud.commands == []


WRONG = {
    "no type": (["up", "x", "--zone", ZONES[0]], 2, "which TPU\\? Give --type, such as v6e-8"),
    "no such type": (["up", "x", "--type", "v6e-7", "--zone", ZONES[0]], 2, "nearest: v6e-8, v6e-4"),
    "no TPU": (["up", "x", "--type", "h100-8", "--zone", ZONES[0]], 2, "this is not a TPU"),
    "no TPU VM": (["up", "x", "--type", "tpu7x-8", "--zone", ZONES[0]], 2, "GKE and Compute Engine, not as Cloud TPU"),
    "several slices": (
        ["up", "x", "--type", "2xv6e-16", "--zone", ZONES[0]],
        2,
        "run as one job on GKE; podium pod k8s",
    ),
    "no zone": (["up", "x", "--type", "v6e-8"], 2, "which zone\\? Give --zone"),
    "no such zone": (["up", "x", "--type", "v6e-8", "--zone", "us-east1-e"], 2, "did you mean us-east1-d\\?"),
    "no name": (["up", "My_Run", "--type", "v6e-8", "--zone", ZONES[0]], 2, "lower-case letters, digits and '-'"),
    "no time": (["up", "x", "--type", "v6e-8", "--zone", ZONES[0], "--lease", "soon"], 2, "as 90m or 4h"),
    "no slice": (["status"], 1, "you have no slices; podium pod ls"),
    "no such slice": (["logs", "x"], 1, "no slice of yours is named x"),
    "no such worker": (["logs", "demo", "--worker", "9"], 2, r"demo-\w+ has workers 0 to 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_requests_are_told_and_nothing_is_rented(make_world, pod, case):
    world = make_world(workers=1)
    arguments, expected, message = WRONG[case]
    if "demo" in arguments:
        rent(world, pod)
    before = world.fake.everything()
    status, _, err = pod(*arguments)
    assert (status, world.fake.everything()) == (expected, before)
    assert re.search(message, err), err
    assert "Traceback" not in err


RUN_WRONG = {
    "config": (["--set", "steps=0"], "steps: expected a whole number of at least 1"),
    "runs_dir": (
        ["--set", "runs_dir=runs"],
        "runs_dir: 'runs' is below each machine's own home, and 4 workers need one",
    ),
    "secret in env": (["--env", "MY_TOKEN=x"], "secrets must not appear in a command"),
    "no name in env": (["--env", "A B=1"], "write NAME=VALUE; a name has letters"),
    "a command in env": (["--env", "$(id)=1"], "write NAME=VALUE; a name has letters"),
    "detached down": (["--detach", "--down"], "--down needs a run that is followed"),
    "setting in env": (["--env", "PODIUM_STEPS=3"], "use --set"),
    "secret in config": (
        ["--set", "chat_template=hf_CANARYaaaaBBBBccccDDDD1234"],
        "the settings contain the value of HF_TOKEN",
    ),
    "data": (
        ["--set", "tasks=[{name: jsonl, path: here.jsonl}]"],
        "tasks.0.path: here.jsonl exists only on this machine",
    ),
    "env file": (["--env-file", "none.env"], "--env-file none.env cannot be read"),
    "slots": (
        ["--env", "JAX_PLATFORMS=tpu", "--set", "rollout.slots=40"],
        "on v6e-16: rollout.slots is 40 and is split over 16 devices",
    ),
    "wheel": (["--wheel", "none.whl"], "--wheel none.whl: the file does not exist"),
}


@pytest.mark.parametrize("case", RUN_WRONG)
def test_a_wrong_run_is_refused_before_anything_is_rented(make_world, pod, case, checkout):
    world = make_world()
    more, message = RUN_WRONG[case]
    (checkout / ".git" / "info" / "exclude").write_text("here.jsonl\n")
    (checkout / "here.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    try:
        status, _, err = pod(*world.run_arguments("--type", "v6e-16", "--zone", ZONES[0], *more))
    finally:
        (checkout / "here.jsonl").unlink()
    assert status == 2, err
    assert message in err
    assert world.fake.everything() == []
    assert world.gcloud.commands == []


LOST_FOLDERS = {
    "keep-alive": (["--keep-alive", "--set", "runs_dir=runs"], "'runs' is below each machine's own home, and --keep-"),
    "keep-alive, absolute": (
        ["--keep-alive"],
        "is on each machine's own disk unless something is mounted",
    ),
    "down": (["--down", "--set", "runs_dir=runs"], "--down deletes the machines and their disks"),
    "down, absolute": (["--down"], "--down deletes the machines and their disks"),
}


@pytest.mark.parametrize("case", LOST_FOLDERS)
def test_a_folder_that_would_go_with_the_machines_is_refused_before_anything_is_rented(make_world, pod, case):
    world = make_world(workers=1)
    more, message = LOST_FOLDERS[case]
    unprepared = [word for word in world.run_arguments() if word not in ("--prepare", str(world.prepare))]
    status, _, err = pod(*unprepared, *more, "--type", "v6e-8", "--zone", ZONES[0])
    assert (status, world.gcloud.commands) == (2, [])
    assert message in err
    assert "write to a bucket, as --set runs_dir=gs://BUCKET/runs, or mount a file system on all" in err


def test_without_gcloud_or_project_it_is_said_what_to_do(make_world, pod, monkeypatch, tmp_path):
    world = make_world()
    world.gcloud.project = None
    status, _, err = pod("ls")
    assert (status, err) == (
        1,
        "error: gcloud: no project is set; name a project with --project, or run: gcloud config set project PROJECT\n",
    )
    monkeypatch.setattr("podium.pods.world.WORLD", World())
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = pod("ls")
    assert status == 1
    assert "gcloud is not installed" in err


def test_no_quota_is_passed_on_with_what_to_do(make_world, pod):
    world = make_world(workers=1)
    world.fake.faults = [Fault("POST", "quota", times=9)]
    status, _, err = pod("up", "x", "--type", "v6e-8", "--zone", ZONES[0], "--zone", ZONES[1])
    assert status == 1
    for zone in ZONES[:2]:
        assert re.search(
            rf"    {zone}: .*Quota limit .* has been exceeded. Limit: 0 in zone {zone}.*iam-admin/quotas", err
        )
    assert world.fake.everything() == []


def test_somebody_elses_node_is_left_alone(make_world, pod):
    world = make_world(workers=1)
    node = world.fake.stranger(ZONES[0], "demo")
    rented = ["up", "demo", "--type", "v6e-8", "--zone", ZONES[0]]
    for command in (["down", "demo"], rented, ["reap"], ["down", "demo"]):
        pod(*command)
    assert world.fake.everything() == [node]
    assert "demo (not podium's)" in pod("ls", "--all")[1]
