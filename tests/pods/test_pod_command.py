"""`podium pod` from renting to giving back, on a fake cloud and hosts that are folders."""

import functools
import json
import re
import threading

import pytest

from podium.pods import commands
from podium.pods.recover import Policy
from tests.pods.clock import wait_for
from tests.pods.pod_world import ZONES, PodWorld, git, rent


def test_one_command_each_from_renting_to_giving_back(make_world, pod, checkout):
    world = make_world()
    status, out, err = pod("up", "demo", "--type", "v6e-16", "--zone", ZONES[0])
    assert (status, out) == (0, "demo is ready in us-east1-d: v6e-16, 4 machines\n")
    status, out, err = pod(*world.run_arguments())
    assert status == 0
    assert "step 4 of 4" in out
    assert "starting job-" in err
    assert [line["step"] for line in world.metrics()] == [1, 2, 3, 4]
    assert all(f"worker {worker} began" in world.log(worker) for worker in range(4))
    commit = git(checkout, "rev-parse", "HEAD").strip()
    for home in world.hosts.homes:
        (code,) = (home / "podrun" / "code").iterdir()
        assert git(code, "rev-parse", "HEAD").strip() == commit
        assert code.name.startswith(commit[:12])
    status, out, err = pod("logs", "--worker", "3")
    assert "worker 3 began" in out
    status, out, err = pod("status")
    assert re.search(r"3 +\S+ +job-\w+-1 +finished +0 +4/4", out), out
    assert out.strip().endswith(": done")
    name = json.loads(pod("ls", "--json")[1])[0]["name"]
    assert re.fullmatch("demo-[0-9a-f]{8}", name)
    assert pod("down", "demo")[:2] == (0, f"deleted {name} in us-east1-d; it is no longer listed\n")
    assert world.fake.everything() == []
    assert pod("ls")[:2] == (0, "you have no slices\n")


def test_run_rents_and_given_again_finds_what_it_started_and_then_what_it_finished(make_world, pod):
    world = make_world(workers=2)
    world.plan(steps=3, hold=True)
    status, _, err = pod(*world.run_arguments("--detach", "--type", "v4-16", "--zone", ZONES[1]))
    assert status == 0
    assert "us-east5-b: asking for v4-16, spot" in err
    assert json.loads(pod("ls", "--json")[1])[0]["title"] == "job"
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


def stopped_while_kept_alive(world: PodWorld, pod, *more: str) -> tuple[object, str]:
    """Status and words of a keeper whose run is stopped, on another laptop, after its first step."""
    results = []
    keeper = threading.Thread(target=lambda: results.append(pod(*world.run_arguments("--keep-alive", *more))))
    keeper.start()
    wait_for(world.metrics)
    commands.stop(name="demo", project=None, dry_run=False)
    keeper.join(300)
    return results[0][0], results[0][2]


@pytest.mark.long
@pytest.mark.parametrize("rented_by", ["run", "up"])
def test_a_stop_whose_save_outlasts_the_grace_is_not_undone(make_world, pod, monkeypatch, rented_by):
    """It gives signs of life while it writes; the keeper then gives back what it rented, and keeps the user's own."""
    monkeypatch.setattr("podium.pods.launch.STOP_S", 0.2)
    world = make_world(workers=2)
    world.plan(steps=5000, step_s=0.2, save_s=1.5)
    if rented_by == "up":
        rent(world, pod)
        status, err = stopped_while_kept_alive(world, pod)
    else:
        status, err = stopped_while_kept_alive(world, pod, "--slice", "demo", "--type", world.type, "--zone", ZONES[0])
    assert status == 143
    assert re.search("is saving on workers? ", err)  # on a busy machine, one may be done when the other is looked at
    assert "stopped on request" in err
    assert sum(line["step"] == 1 for line in world.metrics()) == 1
    kept = re.search(r"demo-\w+ is still rented; podium pod down demo deletes it", err)
    assert (kept is not None, bool(world.fake.everything())) == (rented_by == "up",) * 2, err


def test_reap_keeps_what_a_run_is_on_and_asks_no_mute_machines_away(make_world, pod):
    world = make_world(workers=1)
    world.plan(steps=3, hold=True)
    assert pod("up", "demo", "--type", "v6e-8", "--zone", ZONES[0], "--lease", "2h")[0] == 0
    assert pod(*world.run_arguments("--detach"))[0] == 0
    world.clock.sleep(7300)
    assert pod("reap")[:2] == (0, "nothing was deleted\n")
    world.hosts.gone.add(0)
    assert "its machines do not respond" in pod("reap")[2]
    world.hosts.gone.clear()
    world.release()
    wait_for(lambda: "step 3 of 3" in world.log(0))
    wait_for(lambda: json.loads(pod("status", "--json")[1])["outcome"] == "done")
    assert re.fullmatch(r"deleted demo-\w+\n", pod("reap")[1])


@pytest.mark.long
def test_another_config_does_not_disturb_a_job(make_world, pod):
    world = make_world(workers=1)
    world.plan(steps=2, hold=True)
    rent(world, pod)
    assert pod(*world.run_arguments("--detach"))[0] == 0
    status, _, err = pod(*world.run_arguments("--set", "seed=7"))
    assert status == 1
    assert re.search(r"demo-\w+ is busy with job job-\w+-1; wait for it, or: podium pod stop demo", err)
    status, out, _ = pod("stop")
    assert status == 0
    assert "has ended on all 1 workers (stopped)" in out
    assert pod(*world.run_arguments("--detach", "--set", "seed=7"))[0] == 0


def test_status_shows_a_running_job_and_logs_follow_it_to_its_end(make_world, pod):
    world = make_world(workers=2)
    world.plan(steps=5, hold=True, save_every=100)
    rent(world, pod)
    assert pod(*world.run_arguments("--detach"))[0] == 0
    wait_for(lambda: all("step 4 of 5" in world.log(worker) for worker in range(2)))
    world.clock.sleep(3600)
    found = json.loads(pod("status", "demo", "--json")[1])
    assert (found["outcome"], len(found["workers"]), found["slice"]["state"]) == ("running", 2, "ready")
    assert found["workers"][1]["progress"]["steps"] == 5
    table = pod("status")[1]
    row = r"demo-\w+ +us-east1-d +v4-16 +spot +ready +2 +24\.0 h +1\.0 h, < \$25\.\d\d \(spot\)"
    assert re.search(row, table), table
    assert re.search(r"0 +\S+ +job-\w+-1 +running +4/5 +start +train-reward/total/mean [\d.]+", table), table
    world.on_command("agent logs", lambda: world.on_command("agent status", world.release))
    out = pod("logs", "-f", "--worker", "1")[1]
    assert [int(line.split()[1]) for line in out.splitlines() if line.startswith("step ")] == [1, 2, 3, 4, 5]
    assert pod("logs", "--tail", "2")[1].splitlines() == ["step 4 of 5", "step 5 of 5"]


def test_a_failure_is_told_with_its_worker_and_ends_the_following(make_world, pod, monkeypatch):
    patient = functools.partial(Policy, ends_s=1e9)  # the others end when they end, however slow this machine is
    monkeypatch.setattr("podium.pods.run_command.Policy", patient)
    world = make_world(workers=2)
    world.plan(steps=50, save_every=100)  # a worker that starts late begins at step 1 too
    for worker, step, status in ((1, 2, 1), (0, 6, 134)):
        (world.shared / f"fail-{worker}-{step}").write_text(str(status))
    rent(world, pod)
    status, _, err = pod(*world.run_arguments())
    assert status == 1
    ended = r"worker 1 \(\S+\) failed first.*told to fail at step 2.*worker 0 ended after it"
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


def test_reap_deletes_what_nothing_has_run_on_for_its_lease(make_world, pod):
    world = make_world(workers=1)
    assert pod("up", "demo", "--type", "v6e-8", "--zone", ZONES[0], "--lease", "2h")[0] == 0
    assert pod("reap")[1] == "nothing was deleted\n"
    world.clock.sleep(7300)
    assert re.search(r"demo-\w+ +us-east1-d .* 2\.0 h +2\.0 h", pod("ls")[1])
    assert re.fullmatch(r"deleted demo-\w+\n", pod("reap")[1])
    assert world.fake.everything() == []


def test_up_again_finds_the_slice(make_world, pod):
    world = make_world(workers=1)
    rent(world, pod)
    rent(world, pod)
    assert len(world.fake.queued) == 1


def test_ctrl_c_in_up_says_what_stays_requested_and_what_withdraws_it(make_world, pod):
    world = make_world(workers=1)
    world.fake.provision_s = 1e6

    def interrupt() -> None:
        raise KeyboardInterrupt

    world.gcloud.before = lambda argv: interrupt() if world.fake.queued and "list" in argv else None
    status, _, err = pod("up", "demo", "--type", "v6e-8", "--zone", ZONES[0])
    assert status == 130
    assert "the request stays, and may be granted and cost money later: podium pod down demo" in err
    assert len(world.fake.queued) == 1
    world.gcloud.before = lambda argv: None
    assert pod("down", "demo")[0] == 0
    assert world.fake.everything() == []


@pytest.mark.long
def test_who_comes_back_to_a_long_log_sees_its_end_first_and_gets_all_on_request(make_world, pod):
    """Ten megabytes: two commands, not forty."""
    world = make_world(workers=1)
    world.plan(steps=3, hold=True, save_every=100)
    rent(world, pod)
    assert pod(*world.run_arguments("--detach"))[0] == 0
    wait_for(lambda: "step 2 of 3" in world.log(0))
    with (world.hosts.homes[0] / "podrun" / "latest.log").open("a") as log:
        log.writelines(f"line {number:07} {'x' * 80}\n" for number in range(100_000))
    reads: list[int] = []

    def before(argv: tuple[str, ...]) -> None:
        if any("agent logs" in word for word in argv):
            reads.append(1)
            world.release()

    world.gcloud.before = before
    status, out, err = pod(*world.run_arguments())
    assert status == 0
    assert "MB of the log are left out: podium pod logs --all]" in err
    assert "line 0099999 " in out
    assert "line 0000000 " not in out
    assert len(reads) <= 4
    whole = pod("logs", "--all")[1]
    assert "line 0000000 " in whole
    assert "line 0099999 " in whole
