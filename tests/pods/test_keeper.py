"""`podium pod run --keep-alive --on-vm`: a small machine follows the run, and the laptop is needed no more."""

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from podium.pods.gcloud import Argv, Gcloud, GcloudError, failure, run_process
from podium.pods.inventory import OWNER, RUN, owner_label
from tests.pods import far_podium
from tests.pods.fake_tpu import ApiError, FakeTpu, Fault, serve
from tests.pods.hosts import ROOT, LocalHosts, gcloud_environment
from tests.pods.pod_world import CANARIES, ZONES, PodWorld, rent

MACHINE = "podium-demo"
PYTHON = """#!/bin/sh
# A Python whose environments are made at once, and whose podium is that of the test.
case "$1 $2" in
"-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;
"-m pip") ;;
"-m podium.cli") shift 2; exec {python} {far} podium "$@";;
*) exec {python} "$@";;
esac
"""
SUDO = "#!/bin/sh\necho sudo >> {home}/sudo\n"
GCLOUD = '#!/bin/sh\nexec {python} {far} gcloud "$@"\n'


@pytest.fixture
def world(make_world, tmp_path) -> Iterator[PodWorld]:
    """Two workers, and what becomes of any ordinary machine that is rented: a folder."""
    world = make_world(workers=2)
    (tmp_path / "machine").mkdir()
    machine = LocalHosts(tmp_path / "machine", ["127.1.1.1"])
    home = machine.homes[0]
    tools = {"python3.13": PYTHON, "sudo": SUDO, "gcloud": GCLOUD}
    for name, text in tools.items():
        path = home / "bin" / name
        path.write_text(text.format(python=sys.executable, far=ROOT / "tests" / "pods" / "far_podium.py", home=home))
        path.chmod(0o755)
    world.gcloud.machine, world.gcloud.machine_address, world.machine = machine, "127.1.1.1", machine
    world.fake.provision_s = 0.2
    with far_podium.listening(world.gcloud) as address:
        machine.variables = {far_podium.ADDRESS: address}
        yield world
    machine.close()


def wait_for(condition: Callable[[], Any], world: PodWorld) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        logs = world.machine.homes[0].glob("podrun/jobs/*/log")
        assert time.monotonic() < deadline, [log.read_text() for log in logs]
        time.sleep(0.1)


def keep(world: PodWorld, *more: str) -> list[str]:
    own = ["--keep-alive", "--on-vm", "--slice", "demo", "--type", world.type, "--zone", ZONES[0]]
    return world.run_arguments(*own, *more)


@pytest.mark.long
def test_a_machine_rents_follows_replaces_and_leaves_nothing(world, pod):
    world.plan(steps=4, hold=True)
    status, out, err = pod(*keep(world))
    assert status == 0, err
    assert out == f"{MACHINE} in {ZONES[0]} keeps job alive on demo; this machine is no longer needed\n"
    wait_for(lambda: len(world.metrics()) == 3, world)
    listed = json.loads(pod("ls", "--json")[1])
    assert [each["title"] for each in listed] == ["demo", MACHINE], "they are its owner's, not the machine's own"
    again = pod(*keep(world))
    assert again[0] == 0
    assert "is already running" in again[2]
    world.hosts.renew()
    world.fake.preempt("demo")
    world.release()
    wait_for(lambda: not world.gcloud.vms, world)
    assert world.fake.everything() == []
    assert {line["step"] for line in world.metrics()} == {1, 2, 3, 4}
    (log,) = world.machine.homes[0].glob("podrun/jobs/keep-job-*/log")
    said = log.read_text()
    assert "replace: the slice is lost" in said
    assert "deleted demo" in said
    files = [path.read_bytes() for path in world.machine.homes[0].rglob("*") if path.is_file()]
    assert not any(value.encode() in data for value in CANARIES.values() for data in files)
    assert not list((world.machine.homes[0] / "shm").rglob("secrets*"))
    assert not (world.machine.homes[0] / "sudo").exists(), "the tools were there"


def test_down_deletes_the_machine_too_so_that_nothing_is_rented_again(world, pod):
    world.plan(steps=4, hold=True)
    assert pod(*keep(world))[0] == 0
    wait_for(lambda: len(world.metrics()) == 3, world)
    status, _, err = pod(*keep(world, "--set", "seed=7"))
    assert status == 1
    assert re.search(rf"{MACHINE} is busy with job keep-job-\w+-1; wait for it, or: podium pod down demo", err), err
    status, _, err = pod("down", "demo")
    assert status == 0
    assert f"deleted {MACHINE}, which kept its run alive" in err
    assert (world.gcloud.vms, world.fake.everything()) == ({}, [])


@pytest.mark.long
def test_a_machine_that_no_zone_gave_a_slice_is_turned_off_and_tells_why(world, pod):
    world.plan(steps=1)
    world.fake.faults = [Fault(f"POST {ZONES[0]}", "403", times=1000)]
    assert pod(*keep(world))[0] == 0
    wait_for(lambda: world.gcloud.vms[MACHINE]["status"] == "TERMINATED", world)
    told = rf"{MACHINE} .* dead: TERMINATED, it ended with: +{ZONES[0]}: .*Permission .* denied"
    assert re.search(told, pod("ls")[1])
    status, out, err = pod("status", "demo")
    assert (status, "no slice of yours is named demo" in err) == (1, True)
    assert re.search(told, out)
    world.fake.faults = []
    status, _, err = pod(*keep(world))
    assert status == 0, err
    assert f"deleting {MACHINE}: TERMINATED, it ended with" in err
    wait_for(lambda: not world.gcloud.vms, world)
    assert {line["step"] for line in world.metrics()} == {1}


@pytest.mark.long
@pytest.mark.parametrize(("made_by", "ends"), [("up", None), ("another run", "TERMINATED")])
def test_a_machine_deletes_only_what_was_rented_for_its_run(world, pod, made_by, ends):
    world.plan(steps=1)
    where = ("--type", world.type, "--zone", ZONES[0])
    if made_by == "up":
        rent(world, pod)
    else:
        assert pod(*world.run_arguments("--keep-alive", "--keep", "--slice", "demo", *where))[0] == 0
    there = world.fake.everything()
    assert pod(*keep(world, "--set", "seed=7"))[0] == 0
    wait_for(lambda: world.gcloud.vms.get(MACHINE, {}).get("status") == ends, world)
    assert world.fake.everything() == there


def test_a_run_that_is_stopped_leaves_no_machine(world, pod):
    world.plan(steps=4, hold=True)
    assert pod(*keep(world))[0] == 0
    wait_for(lambda: len(world.metrics()) == 3, world)
    assert pod("stop", "demo")[0] == 0
    wait_for(lambda: not world.gcloud.vms, world)
    assert world.fake.everything() == []


def test_a_machine_of_somebody_else_is_not_touched(world, pod):
    world.gcloud.vms[MACHINE] = {"name": MACHINE, "zone": f"zones/{ZONES[0]}", "status": "RUNNING"}
    status, _, err = pod(*keep(world))
    assert status == 1
    assert f"error: {MACHINE} in {ZONES[0]} is not yours and was not changed; choose another --slice" in err
    assert pod("down", "demo")[:2] == (0, "no slice of yours is named demo\n")
    assert list(world.gcloud.vms) == [MACHINE]


UNTOLD = " WARNING: Some requests did not succeed.\n - {}\n\n"
REFUSALS = {
    "no permission": UNTOLD.format("Required 'compute.instances.list' permission for 'projects/p'"),
    "no API": UNTOLD.format("Compute Engine API has not been used in project p before or it is disabled."),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_ls_and_down_work_for_who_may_not_see_machines(make_world, pod, case):
    world = make_world(workers=1)
    assert pod("up", "demo", "--type", "v6e-8", "--zone", ZONES[0])[0] == 0
    world.gcloud.vms_refused = REFUSALS[case]
    status, out, err = pod("ls")
    assert (status, out.splitlines()[1].startswith("demo-")) == (0, True)
    assert ("it cannot be seen whether machines keep runs alive" in err) == (case == "no permission")
    status, _, err = pod("down", "demo")
    assert (status, world.fake.everything()) == (0, [])
    assert ("it cannot be seen whether there is a machine podium-demo" in err) == (case == "no permission")


def test_ls_shows_the_machine_and_what_deletes_it(make_world, pod):
    world = make_world(workers=1)
    mine = {OWNER: owner_label("ada@example.org"), RUN: "demo"}
    for name, labels in ((MACHINE, mine), ("podium-theirs", {OWNER: "bob"}), ("web", {})):
        world.gcloud.vms[name] = {
            "name": name,
            "zone": f"zones/{ZONES[0]}",
            "status": "RUNNING",
            "labels": labels,
            "creationTimestamp": "2020-01-01T00:00:00.000-07:00",
        }
    status, out, err = pod("ls")
    assert status == 0
    assert re.search(rf"{MACHINE} +{ZONES[0]} +e2-micro +on demand +ready +1 +none +\d+\.\d h", out), out
    assert f"{MACHINE} keeps the run on demo alive; podium pod down demo deletes both" in err
    assert "theirs" not in out
    assert re.search(r"podium-theirs \(of bob\)", pod("ls", "--all")[1])
    assert [each["name"] for each in json.loads(pod("ls", "--json")[1])] == [MACHINE]
    assert pod("ls", "--zone", ZONES[1])[1] == "you have no slices\n"


def test_down_deletes_nothing_while_it_cannot_see_whether_a_machine_would_rent_it_again(make_world, pod):
    world = make_world(workers=1)
    assert pod("up", "demo", "--type", "v6e-8", "--zone", ZONES[0])[0] == 0
    world.gcloud.vms_refused = UNTOLD.format("The service is currently unavailable.")
    status, _, err = pod("down", "demo")
    assert (status, len(world.fake.everything())) == (1, 2)
    assert "gcloud: The service is currently unavailable.; run the command again" in err


class Unavailable(FakeTpu):
    """An API that answers nothing today."""

    def handle(self, method, path, query, body):
        raise ApiError(503, "UNAVAILABLE", "The service is unavailable.")


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_a_list_that_failed_is_no_empty_list_though_gcloud_says_so(tmp_path, monkeypatch):
    with serve(Unavailable()) as api:
        for name, value in gcloud_environment(tmp_path, api).items():
            monkeypatch.setenv(name, value)
        gcloud = Gcloud(run_process)
        finished = gcloud.run(Argv("p").vms(), 60.0)
        assert (finished.returncode, finished.stdout.strip()) == (0, "[]"), "gcloud tells it now"
        assert (failure(finished).kind, failure(finished).text) == ("unavailable", "The service is unavailable.")


@pytest.mark.parametrize("more", [[], ["--keep-alive", "--detach"]], ids=["alone", "detached"])
def test_it_is_for_a_run_that_is_kept_alive(make_world, pod, more):
    world = make_world(workers=1)
    status, _, err = pod(*world.run_arguments("--on-vm", "--type", "v6e-8", "--zone", ZONES[0], *more))
    assert (status, world.gcloud.commands) == (2, [])
    assert "--on-vm follows a run for you: give it with --keep-alive and without --detach" in err


def test_a_dry_run_prints_the_recipe(make_world, pod):
    world = make_world(workers=1)
    status, out, _ = pod(*keep(world, "--dry-run"))
    assert (status, world.gcloud.commands) == (0, [])
    lines = [line for line in out.splitlines() if not line.startswith("#")]
    assert any(line.startswith(f"gcloud compute instances create {MACHINE} ") for line in lines)
    assert any(line.startswith("gcloud compute scp ") and "/keep.sh " in line for line in lines)
    assert f"keep.sh {MACHINE} {ZONES[0]} demo" in out


COMMANDS = {
    "create": Argv("p").create_vm(MACHINE, ZONES[0], {"podium-owner": "ada"}, "a@b.c"),
    "list": Argv("p").vms(MACHINE),
    "list all": Argv("p").vms(),
    "delete": Argv("p").delete_vm(MACHINE, ZONES[0]),
    "ssh": Argv("p", vm=True).ssh(MACHINE, ZONES[0], "all", "true"),
    "scp": Argv("p", vm=True).scp([__file__], MACHINE, ZONES[0], "all", "podrun/"),
}


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
@pytest.mark.parametrize(
    "verb", ["create", *(pytest.param(verb, marks=pytest.mark.long) for verb in list(COMMANDS)[1:])]
)
def test_gcloud_itself_understands_the_commands(verb, tmp_path, monkeypatch):
    """It fails only when it asks Google, which is not there."""
    for name, value in gcloud_environment(tmp_path, "http://127.0.0.1:9/").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GcloudError) as error:
        Gcloud(run_process).checked(COMMANDS[verb], 60.0)
    assert error.value.kind == "unavailable", error.value.text
