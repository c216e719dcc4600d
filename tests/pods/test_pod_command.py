"""`podium pod` from renting to giving back, on a fake cloud and hosts that are folders; and every wrong request."""

import functools
import json
import re
import shlex
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from podium.pods import commands
from podium.pods import gcloud as gcloud_module
from podium.pods.recover import Policy
from tests.pods.fake_tpu import Fault
from tests.pods.pod_world import ZONES, PodWorld, git


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rent(world: PodWorld, pod, name: str = "demo") -> None:
    assert pod("up", name, "--type", world.type, "--zone", ZONES[0])[0] == 0


def test_one_command_each_from_renting_to_giving_back(make_world, pod):
    world = make_world()
    status, out, err = pod("up", "demo", "--type", "v6e-16", "--zone", ZONES[0])
    assert (status, out) == (0, "demo is ready in us-east1-d: v6e-16, 4 machines\n")
    status, out, err = pod(*world.run_arguments())
    assert status == 0
    assert "step 4 of 4" in out
    assert "starting job-" in err
    assert [line["step"] for line in world.metrics()] == [1, 2, 3, 4]
    assert all(f"worker {worker} began" in world.log(worker) for worker in range(4))
    status, out, err = pod("logs", "--worker", "3")
    assert "worker 3 began" in out
    status, out, err = pod("status")
    assert re.search(r"3 +\S+ +job-\w+-1 +finished +0 +4/4", out), out
    assert out.strip().endswith(": done")
    assert pod("down", "demo")[:2] == (0, "deleted demo in us-east1-d; it is no longer listed\n")
    assert world.fake.everything() == []
    assert pod("ls")[:2] == (0, "you have no slices\n")


def test_run_rents_when_a_type_is_given(make_world, pod):
    world = make_world(workers=1)
    status, _, err = pod(*world.run_arguments("--type", "v6e-8", "--zone", ZONES[1]))
    assert (status, len(world.metrics())) == (0, 4)
    assert "us-east5-b: asking for v6e-8, spot" in err
    assert json.loads(pod("ls", "--json")[1])[0]["name"] == "job"


def test_given_again_it_finds_what_it_started_and_then_what_it_finished(make_world, pod):
    world = make_world(workers=2)
    world.plan(steps=3, hold=True)
    rent(world, pod)
    assert pod(*world.run_arguments("--detach"))[0] == 0
    world.on_command("agent logs", world.release)
    status, _out, err = pod(*world.run_arguments())
    assert (status, len(world.metrics())) == (0, 3)
    assert "is already running; following it" in err
    assert pod(*world.run_arguments())[0] == 0
    assert len(world.metrics()) == 3
    for home in world.hosts.homes:
        assert len([path for path in (home / "podrun" / "jobs").iterdir() if not path.name.startswith("setup-")]) == 1


def test_ctrl_c_in_the_first_setup_and_the_same_command_again(make_world, pod):
    """The setup goes on without the laptop; the next command waits for it, and trains."""
    world = make_world(workers=2)
    world.plan(steps=3)
    world.prepare.write_text('while [ ! -e "$HOME/go" ]; do sleep 0.05; done\n')
    rent(world, pod)

    def interrupt() -> None:
        raise KeyboardInterrupt

    world.on_command("agent status setup-", interrupt)
    assert pod(*world.run_arguments())[0] != 0
    assert pod("status", "--json")[1].count('"running"') >= 2
    world.on_command("agent status setup-", lambda: [(home / "go").touch() for home in world.hosts.homes])
    status, _, err = pod(*world.run_arguments())
    assert (status, len(world.metrics())) == (0, 3), err
    assert "is being set up; waiting for that" in err


def test_a_setup_that_failed_once_is_tried_again(make_world, pod):
    world = make_world(workers=2)
    rent(world, pod)
    world.prepare.write_text('mkdir "$HOME/tried" 2>/dev/null && exit 1; true\n')
    status, _, err = pod(*world.run_arguments())
    assert status == 1
    assert "the setup failed on worker(s) 0, 1" in err
    assert pod(*world.run_arguments())[0] == 0
    assert len(world.metrics()) == 4


def test_a_stop_whose_save_outlasts_the_grace_is_not_undone(make_world, pod, monkeypatch):
    """It gives signs of life while it writes; the keeper then ends, and gives the slice back."""
    monkeypatch.setattr("podium.pods.launch.STOP_S", 0.2)
    world = make_world(workers=2)
    world.plan(steps=5000, step_s=0.2, save_s=4.0)
    rent(world, pod)
    results = []
    keeper = threading.Thread(target=lambda: results.append(pod(*world.run_arguments("--keep-alive"))))
    keeper.start()
    wait_for(world.metrics)
    commands.stop(name="demo", project=None, dry_run=False)
    keeper.join(300)
    assert results[0][0] == 143
    assert "is saving on workers 0, 1" in results[0][2]
    assert "stopped on request" in results[0][2]
    assert sum(line["step"] == 1 for line in world.metrics()) == 1
    assert world.fake.everything() == []


def test_reap_keeps_what_a_run_is_on_and_asks_no_mute_machines_away(make_world, pod):
    world = make_world(workers=1)
    world.plan(steps=3, hold=True)
    assert pod("up", "demo", "--type", "v6e-8", "--zone", ZONES[0], "--lease", "2h")[0] == 0
    assert pod(*world.run_arguments("--detach"))[0] == 0
    world.clock.sleep(7300)
    status, out, err = pod("reap")
    assert (status, out) == (0, "nothing was deleted\n")
    assert re.search(r"demo in us-east1-d is kept, though its lease has expired: job-\w+-1 runs there, at step \d", err)
    world.hosts.gone.add(0)
    assert "its machines do not answer" in pod("reap")[2]
    world.hosts.gone.clear()
    world.release()
    wait_for(lambda: "step 3 of 3" in world.log(0))
    wait_for(lambda: json.loads(pod("status", "--json")[1])["outcome"] == "done")
    assert pod("reap")[1] == "deleted demo\n"


def test_who_follows_a_run_renews_the_lease_for_as_long_as_it_was(make_world, pod):
    world = make_world(workers=1)
    world.plan(steps=3, hold=True)
    assert pod("up", "demo", "--type", "v6e-8", "--zone", ZONES[0], "--lease", "2h")[0] == 0
    assert pod(*world.run_arguments("--detach"))[0] == 0
    world.clock.sleep(5400)
    world.on_command("agent logs", world.release)
    assert pod(*world.run_arguments())[0] == 0
    assert re.search(r" (2\.0|1\.9) h ", pod("ls")[1])


NAMES = ("$(id)", "-x", ".hid")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_job_can_have_is_refused_before_anything_is_sent(make_world, pod, name):
    world = make_world(workers=1)
    status, _, err = pod(*world.run_arguments("--set", f"name={name}", "--type", "v6e-8", "--zone", ZONES[0]))
    assert status == 2
    assert "name: " in err
    assert "cannot name a job" in err
    assert world.gcloud.commands == []


def test_another_config_does_not_disturb_a_job(make_world, pod):
    world = make_world(workers=1)
    world.plan(steps=2, hold=True)
    rent(world, pod)
    assert pod(*world.run_arguments("--detach"))[0] == 0
    status, _, err = pod(*world.run_arguments("--set", "seed=7"))
    assert status == 1
    assert re.search(r"demo is busy with job job-\w+-1; wait for it, or: podium pod stop demo", err)
    status, out, _ = pod("stop")
    assert status == 0
    assert "has ended on all 1 workers (stopped); demo is still rented" in out
    assert pod(*world.run_arguments("--detach", "--set", "seed=7"))[0] == 0


def test_status_shows_a_running_job_and_what_the_slice_costs(make_world, pod):
    world = make_world(workers=2)
    world.plan(steps=3, hold=True, save_every=100)
    rent(world, pod)
    assert pod(*world.run_arguments("--detach"))[0] == 0
    wait_for(lambda: all("step 2 of 3" in world.log(worker) for worker in range(2)))
    world.clock.sleep(3600)
    found = json.loads(pod("status", "demo", "--json")[1])
    assert (found["outcome"], len(found["workers"]), found["slice"]["state"]) == ("running", 2, "ready")
    assert found["workers"][1]["progress"]["steps"] == 3
    table = pod("status")[1]
    assert re.search(r"demo +us-east1-d +v4-16 +spot +ready +2 +2\d\.\d h +1\.0 h, < \$25\.\d\d \(spot\)", table), table
    assert re.search(r"0 +\S+ +job-\w+-1 +running +2/3 +start +train-reward/total/mean [\d.]+", table), table


def test_logs_follow_until_the_job_has_ended(make_world, pod):
    world = make_world(workers=2)
    world.plan(steps=5, hold=True, save_every=100)
    rent(world, pod)
    assert pod(*world.run_arguments("--detach"))[0] == 0
    wait_for(lambda: "step 4 of 5" in world.log(1))
    world.on_command("agent logs", lambda: world.on_command("agent status", world.release))
    out = pod("logs", "-f", "--worker", "1")[1]
    assert [int(line.split()[1]) for line in out.splitlines() if line.startswith("step ")] == [1, 2, 3, 4, 5]
    assert pod("logs", "--tail", "2")[1].splitlines() == ["step 4 of 5", "step 5 of 5"]


def test_a_failure_is_told_with_its_worker_and_ends_the_following(make_world, pod, monkeypatch):
    patient = functools.partial(Policy, ends_s=1e9)  # the others end when they end, however slow this machine is
    monkeypatch.setattr("podium.pods.run.Policy", patient)
    world = make_world()
    world.plan(steps=50, save_every=100)  # a worker that starts late begins at step 1 too
    for worker, step, status in ((2, 2, 1), (0, 6, 134), (1, 6, 134), (3, 6, 134)):
        (world.shared / f"fail-{worker}-{step}").write_text(str(status))
    rent(world, pod)
    status, _, err = pod(*world.run_arguments())
    assert status == 1
    ended = r"worker 2 \(\S+\) failed first.*told to fail at step 2.*workers 0, 1, 3 ended after it"
    assert re.search(ended, err, re.DOTALL), err


def test_a_guards_verdict_is_passed_on(make_world, pod):
    world = make_world(workers=2)
    for worker in range(2):
        (world.shared / f"fail-{worker}-1").write_text("78")
    rent(world, pod)
    status, _, err = pod(*world.run_arguments("--keep-alive"))
    assert status == 78
    assert "not restarted" in err
    assert world.metrics()[-1]["step"] == 1


def test_stop_is_not_undone_by_who_keeps_the_run_alive(make_world, pod):
    world = make_world(workers=2)
    world.plan(steps=3, hold=True)
    rent(world, pod)
    results = []
    keeper = threading.Thread(target=lambda: results.append(pod(*world.run_arguments("--keep-alive"))))
    keeper.start()
    wait_for(world.metrics)
    commands.stop(name="demo", project=None, dry_run=False)
    keeper.join(300)
    assert results[0][0] == 143
    assert "stopped on request" in results[0][2]


def test_the_code_is_that_of_the_commit_on_all_workers(make_world, pod, checkout):
    world = make_world(workers=2)
    rent(world, pod)
    assert pod(*world.run_arguments())[0] == 0
    commit = git(checkout, "rev-parse", "HEAD").strip()
    for home in world.hosts.homes:
        (code,) = (home / "podrun" / "code").iterdir()
        assert git(code, "rev-parse", "HEAD").strip() == commit
        assert code.name.startswith(commit[:12])


def test_changes_that_are_not_committed_are_refused_by_name_or_sent_and_kept(make_world, pod, tmp_path, monkeypatch):
    from tests.pods.pod_world import make_checkout

    world = make_world(workers=1)
    dirty = make_checkout(tmp_path / "dirty")
    monkeypatch.chdir(dirty)
    rent(world, pod)
    (dirty / "podium" / "__init__.py").write_text('__version__ = "0.0.0"\n')
    (dirty / "new.bin").write_bytes(bytes(range(256)))
    status, _, err = pod(*world.run_arguments())
    assert status == 2
    assert "uncommitted changes: podium/__init__.py, new.bin" in err
    assert "--allow-dirty" in err
    status, _, err = pod(*world.run_arguments("--allow-dirty"))
    assert status == 0
    assert "sent as a patch" in err
    (code,) = (world.hosts.homes[0] / "podrun" / "code").iterdir()
    assert (code / "new.bin").read_bytes() == bytes(range(256))
    assert '"0.0.0"' in (code / "podium" / "__init__.py").read_text()
    (sent,) = (world.hosts.homes[0] / "podrun" / "in").iterdir()
    assert "new.bin" in (sent / "changes.patch").read_text()
    assert git(dirty, "diff", "--cached") == ""


def test_a_wheel_instead_of_a_checkout(make_world, pod, tmp_path, monkeypatch, checkout):
    import zipfile

    world = make_world(workers=1)
    rent(world, pod)
    monkeypatch.chdir(tmp_path)
    status, _, err = pod(*world.run_arguments())
    assert status == 2
    assert "not in a git checkout of Podium; start there, or give --wheel FILE" in err
    wheel = tmp_path / "podium_rl-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in checkout.glob("podium/**/*.py"):
            archive.write(file, file.relative_to(checkout))
    assert pod(*world.run_arguments("--wheel", str(wheel)))[0] == 0
    (code,) = (world.hosts.homes[0] / "podrun" / "code").iterdir()
    assert code.name.startswith("wheel-")


def test_a_script_prepares_the_machines_first(make_world, pod, tmp_path):
    world = make_world(workers=2)
    rent(world, pod)
    script = tmp_path / "mount.sh"
    script.write_text('echo prepared > "$HOME/prepared"\n')
    assert pod(*world.run_arguments("--prepare", str(script)))[0] == 0
    assert all((home / "prepared").exists() for home in world.hosts.homes)
    script.write_text('echo no such share >&2; [ "$(hostname)" != t1v-n-fake-w-1 ]\n')
    status, _, err = pod(*world.run_arguments("--prepare", str(script), "--set", "seed=1"))
    assert status == 1
    assert "the setup failed on worker(s) 1: no such share" in err


def test_a_machine_without_its_chips_is_named_before_anything_starts(make_world, pod):
    world = make_world(workers=2)
    rent(world, pod)
    arguments = [word for word in world.run_arguments() if word not in ("--env", "JAX_PLATFORMS=cpu")]
    status, _, err = pod(*arguments)
    assert status == 1
    assert "worker 1: this host has 0 chips and should have 4; recreate the slice" in err
    assert world.metrics() == []


def test_a_worker_that_does_not_answer_is_named_and_nothing_starts(make_world, pod):
    world = make_world()
    rent(world, pod)
    world.hosts.gone.add(2)
    status, _, err = pod(*world.run_arguments())
    assert status == 1
    assert re.search(r"3 of 4 workers succeeded\n +worker 2 \(\S+\) did not answer", err), err
    assert world.metrics() == []


WRONG = {
    "no type": (["up", "x", "--zone", ZONES[0]], 2, "which TPU\\? Give --type, such as v6e-8"),
    "no such type": (["up", "x", "--type", "v6e-7", "--zone", ZONES[0]], 2, "nearest: v6e-8, v6e-4"),
    "no TPU": (["up", "x", "--type", "h100-8", "--zone", ZONES[0]], 2, "this is not a TPU"),
    "no zone": (["up", "x", "--type", "v6e-8"], 2, "which zone\\? Give --zone"),
    "no such zone": (["up", "x", "--type", "v6e-8", "--zone", "us-east1-e"], 2, "did you mean us-east1-d\\?"),
    "no name": (["up", "My_Run", "--type", "v6e-8", "--zone", ZONES[0]], 2, "lower-case letters, digits and '-'"),
    "no time": (["up", "x", "--type", "v6e-8", "--zone", ZONES[0], "--lease", "soon"], 2, "as 90m or 4h"),
    "no slice": (["status"], 1, "you have no slices; podium pod ls"),
    "no such slice": (["logs", "x"], 1, "no slice of yours is named x"),
    "no such worker": (["logs", "demo", "--worker", "9"], 2, "demo has workers 0 to 0"),
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
    "data": (["--set", "tasks=[{name: jsonl, path: here.jsonl}]"], "tasks.0.path: here.jsonl is only on this machine"),
    "env file": (["--env-file", "none.env"], "--env-file none.env cannot be read"),
    "slots": (
        ["--env", "JAX_PLATFORMS=tpu", "--set", "rollout.slots=40"],
        "on v6e-16: rollout.slots is 40 and is split over 16 devices",
    ),
    "wheel": (["--wheel", "none.whl"], "--wheel none.whl: no such file"),
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


def test_keep_alive_asks_for_a_folder_that_outlives_the_machines(make_world, pod):
    world = make_world(workers=1)
    status, _, err = pod(*world.run_arguments("--keep-alive", "--set", "runs_dir=runs", "--type", "v6e-8"))
    assert status == 2
    assert "--keep-alive replaces machines and their disks" in err


def test_without_gcloud_or_project_it_is_said_what_to_do(make_world, pod, monkeypatch, tmp_path):
    world = make_world()
    world.gcloud.project = None
    status, _, err = pod("ls")
    assert (status, err) == (
        1,
        "error: gcloud: no project is set; name a project with --project, or run: gcloud config set project PROJECT\n",
    )
    monkeypatch.setattr("podium.pods.project.RUNNER", gcloud_module.run_process)
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
    for command in (["down", "demo"], ["up", "demo", "--type", "v6e-8", "--zone", ZONES[0]], ["reap"]):
        pod(*command)
    assert world.fake.everything() == [node]
    assert "demo is not yours" not in pod("ls", "--all")[1]
    assert "demo (not podium's)" in pod("ls", "--all")[1]


def test_reap_deletes_what_is_past_its_lease(make_world, pod):
    world = make_world(workers=1)
    assert pod("up", "demo", "--type", "v6e-8", "--zone", ZONES[0], "--lease", "2h")[0] == 0
    assert pod("reap")[1] == "no lease has expired\n"
    world.clock.sleep(7300)
    assert re.search(r"demo +us-east1-d .* expired +2\.0 h", pod("ls")[1])
    assert pod("reap")[1] == "deleted demo\n"
    assert world.fake.everything() == []


def test_up_again_renews_the_lease(make_world, pod):
    world = make_world(workers=1)
    rent(world, pod)
    world.clock.sleep(20 * 3600)
    assert re.search(r" 4\.0 h ", pod("ls")[1])
    rent(world, pod)
    assert re.search(r" 24\.0 h ", pod("ls")[1])
    assert len(world.fake.queued) == 1


def normal(command: str) -> str:
    """A command without what is made up when it is not run, or differs from time to time."""
    command = re.sub(r"127\.\d+\.\d+\.\d+|ADDRESS\d", "ADDRESS", command)
    command = re.sub(r"\b[0-9a-f]{12}\b(?= \$worker)|MARK", "MARK", command)
    command = re.sub(r"(podium-(?:lease|stop))=\d+", r"\1=N", command)
    command = re.sub(r"(PODRUN_NONCE)=(NONCE|[0-9a-f]{16})", r"\1=N", command)
    command = re.sub(r"podium-owner=[\w-]+", "podium-owner=ME", command)
    return re.sub(r"/\S*?/(?=podium-|[^/ ]+\.(yaml|sh|bundle)|secrets-)|podium-\w+/", "", command)


def test_a_dry_run_prints_what_would_be_run_and_runs_nothing(make_world, pod):
    world = make_world(workers=1)
    commands = {
        "up": ["up", "demo", "--type", "v6e-8", "--zone", ZONES[0]],
        "run": world.run_arguments("--slice", "demo"),
        "stop": ["stop", "demo"],
        "down": ["down", "demo"],
    }
    printed = {}
    for name, command in commands.items():
        status, printed[name], _ = pod(*command, "--dry-run")
        assert status == 0
    assert world.gcloud.commands == []
    assert world.fake.everything() == []
    for name, command in commands.items():
        world.gcloud.commands.clear()
        assert pod(*command)[0] == 0
        promised = {normal(line) for line in re.sub(r"\bZONE\b", ZONES[0], printed[name]).splitlines()}
        if name == "stop":
            job = next((world.hosts.homes[0] / "podrun" / "jobs").glob("*")).name
            promised = {re.sub(r"\bJOB\b", job, line) for line in promised}
        done = [
            shlex.join(argv) for argv in world.gcloud.commands if CHANGES & set(argv) and "agent logs" not in argv[-2]
        ]
        assert len(done) >= 1
        for line in done:
            assert normal(line) in promised, line


def test_a_dry_run_says_what_a_command_depends_on(make_world, pod):
    make_world()
    out = pod("up", "x", "--type", "v6e-16", "--zone", ZONES[1], "--zone", ZONES[2], "--dry-run")[1]
    comments = [line for line in out.splitlines() if line.startswith("# ")]
    assert "# until it is ready:" in comments
    creates = [line for line in out.splitlines() if " create x " in line]
    assert [f"--zone={zone}" in line for zone, line in zip(ZONES[1:], creates, strict=True)] == [True, True]
    assert "--zone=ZONE" in pod("down", "x", "--dry-run")[1]
    assert "CANARY" not in pod("stop", "--dry-run")[1]


CHANGES = {"create", "delete", "update", "scp", "ssh"}


@pytest.mark.parametrize("command", ["status", "logs", "stop", "ls", "reap", "ssh"])
def test_every_command_has_a_dry_run(make_world, pod, command):
    world = make_world()
    status, out, _ = pod(command, "--dry-run")
    assert status == 0
    assert out.startswith("gcloud config list ")
    assert "\ngcloud compute tpus " in out
    assert world.gcloud.commands == []


def test_sky_writes_a_task_with_the_config_in_it(make_world, pod):
    import yaml

    world = make_world()
    status, out, _ = pod("sky", str(world.config), "--type", "v6e-16", "--zone", ZONES[1])
    task = yaml.safe_load(out)
    assert status == 0
    assert task["resources"]["accelerators"] == "tpu-v6e-16"
    assert task["resources"]["infra"] == f"gcp/us-east5/{ZONES[1]}"
    assert task["envs"] == {"JAX_COORDINATOR_PORT": "8476", "REQUIRE_JAX_PROCESS_COUNT": "4"}
    written = task["run"].partition("<<'END_OF_CONFIG'\n")[2].partition("\nEND_OF_CONFIG")[0]
    assert yaml.safe_load(written)["runs_dir"] == str(world.shared)
    assert "CANARY" not in out


def test_skypilots_own_parser_takes_the_task(make_world, pod, tmp_path):
    sky = pytest.importorskip("sky", reason="skypilot is not installed")
    world = make_world()
    path = tmp_path / "task.yaml"
    path.write_text(pod("sky", str(world.config), "--type", "v6e-16")[1])
    task = sky.Task.from_yaml(str(path))
    (resources,) = task.resources
    assert (list(resources.accelerators), resources.use_spot) == (["tpu-v6e-16"], True)
