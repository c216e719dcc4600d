"""Secrets travel to the workers, and stay nowhere."""

import base64
import os
import re
import stat
import subprocess
import urllib.parse
from pathlib import Path

import pytest

from podium.pods.secrets import LAST_LINE, SecretError, Secrets, _delete_leftovers, gather, written
from tests.pods.fake_tpu import Fault
from tests.pods.pod_world import CANARIES, ZONES, PodWorld

TOKEN = "hf_abcdefghijklmnop/+x"


def test_only_what_is_allowed_travels(tmp_path):
    file = tmp_path / ".env"
    file.write_text(f"# mine\nexport HF_TOKEN='{TOKEN}'\nAWS_SECRET_ACCESS_KEY=wontgoanywhere\n\nWANDB_API_KEY=\n")
    file.chmod(0o600)
    environ = {
        "WANDB_API_KEY": "wandb-key-0123456789",
        "HF_TOKEN": "hf_of_the_environment",
        "OTHER_TOKEN": "other-12345",
    }
    found = gather(environ, file)
    assert dict(found.values) == {"HF_TOKEN": TOKEN, "WANDB_API_KEY": "wandb-key-0123456789"}
    assert found.of_worker(0).names == ("HF_TOKEN", "WANDB_API_KEY")
    assert found.of_worker(3).names == ("HF_TOKEN",)
    assert not gather({}, None)


def test_a_file_that_others_can_read_is_refused(tmp_path):
    file = tmp_path / ".env"
    file.write_text(f"HF_TOKEN={TOKEN}\n")
    file.chmod(0o644)
    with pytest.raises(SecretError, match=r"mode 644\); run: chmod 600") as error:
        gather({}, file)
    assert TOKEN not in str(error.value)
    file.write_text("HF_TOKEN\n")
    file.chmod(0o600)
    with pytest.raises(SecretError, match=r"\.env:1 is not NAME=VALUE"):
        gather({}, file)


@pytest.mark.parametrize("value", ["short", "with space inside", "line\nline-line"])
def test_values_that_cannot_travel_are_refused_without_being_told(value):
    with pytest.raises(SecretError, match="HF_TOKEN is not a usable secret") as error:
        gather({"HF_TOKEN": value}, None)
    assert value not in str(error.value)


@pytest.mark.parametrize("before", ["", "a", "ab", "api:"])
def test_every_way_of_writing_a_value_is_hidden(before):
    secrets = Secrets({"HF_TOKEN": TOKEN})
    encoded = base64.b64encode(f"{before}{TOKEN}".encode()).decode()
    for text in (f"x{TOKEN}y", f"https://u:{urllib.parse.quote(TOKEN, safe='')}@host", f"Basic {encoded}"):
        hidden = secrets.redact(text)
        assert "[redacted]" in hidden
        assert TOKEN[4:18] not in hidden
        assert encoded[6:-6] not in hidden
        assert secrets.found_in(text) == ["HF_TOKEN"]
    assert secrets.redact("nothing here") == "nothing here"


def test_the_longest_secret_is_hidden_first():
    secrets = Secrets({"HF_TOKEN": "first-token", "WANDB_API_KEY": "first-token-and-more", "NONE": ""})
    assert secrets.redact("first-token-and-more and first-token") == "[redacted] and [redacted]"


def test_shown_it_has_no_values():
    assert TOKEN not in repr(Secrets({"HF_TOKEN": TOKEN}))


def test_the_file_is_ours_alone_and_gone_afterwards():
    with written(Secrets({"HF_TOKEN": TOKEN}), "all") as file:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert file.read_text() == f"HF_TOKEN={TOKEN}\n{LAST_LINE}\n"
    assert not file.parent.exists()


def forms_of(value: str) -> list[str]:
    """Letters and digits, lower case, that stay of a value in each encoding, whatever stands beside it."""
    data = value.encode()
    cores = [base64.b64encode(b"x" * shift + data).decode()[4:-4] for shift in range(3)]
    return [letters(form) for form in (value, data.hex(), urllib.parse.quote(value, safe=""), *cores)]


def letters(text: str) -> str:
    return re.sub("[^0-9a-z]", "", text.lower())


def leaked(text: str, values: list[str]) -> list[str]:
    """The values that a text has, in any encoding, on one line or on several."""
    plain = letters(re.sub(r"\x1b\[[0-9;]*m", "", text))
    return [value for value in values if any(form in plain for form in forms_of(value))]


def files_with(folders: list[Path], values: list[str]) -> list[str]:
    """Files below folders that hold one of the values, also packed ones."""
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    return [str(file) for file in files if leaked(file.read_bytes().decode("latin-1"), values)]


def test_planted_secrets_are_found_nowhere_after_a_run_with_failures(make_world, pod, tmp_path, monkeypatch):
    """Eight kinds: of the environment (two), of a .env file, of names that are not allowed there and there, in --env,
    in a setting, and the machines' own. The job prints and fails with what it finds, in six encodings.
    """
    world = make_world(workers=2)
    third = "hf_CANARYfromTheFile0123456789"
    file = tmp_path / "secret.env"
    unknown, other = "CANARYofAnotherService0123456789", "CANARYofAThirdService/+0123456789"
    file.write_text(f"HF_TOKEN={third}\nAWS_SECRET_ACCESS_KEY={unknown}\n")
    file.chmod(0o600)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", unknown)
    monkeypatch.setenv("OPENAI_API_KEY", other)
    machines = "CANARYthatTheMachineHas0123456789"
    world.hosts.variables["MACHINE_API_KEY"] = machines
    values = [third, unknown, other, machines, *CANARIES.values(), "CANARYinEnv12345"]
    world.plan(steps=12, save_every=100)
    world.fake.faults = [Fault("POST", "lost_reply")]
    (world.shared / "fail-1-3").write_text("1")
    (world.shared / "fail-0-8").write_text("134")
    said = [pod("up", "demo", "--type", world.type, "--zone", ZONES[0])]
    arguments = world.run_arguments("--keep-alive", "--env-file", str(file))
    said.append(pod(*arguments, "--env", "SOME_API_KEY=CANARYinEnv12345"))
    assert said[-1][0] == 2
    assert "CANARYinEnv" not in said[-1][2]
    said.append(pod(*arguments, "--set", f"metrics.wandb.project={third}"))
    assert said[-1][0] == 2
    said.append(pod(*arguments, "--dry-run"))
    said.append(pod(*arguments))
    assert said[-1][0] == 0
    assert re.search(r"starting job-\w+-2 on 2 workers", said[-1][2]), said[-1][2]  # after the failure
    records = [file for home in world.hosts.homes for file in home.rglob("record.json")]
    assert any("told to fail at step 3: " in file.read_text() for file in records)
    said += [pod("status"), pod("logs"), pod("logs", "--worker", "1"), pod("stop"), pod("down", "demo")]
    for worker in range(2):
        log = world.log(worker)
        assert log.count("[redacted]") >= 16, log  # two secrets, eight forms
        assert "\x1b" not in log
    told = "".join(f"{out}{err}" for _, out, err in said)
    assert leaked(told, values) == []
    assert "\x1b" not in told
    assert leaked("\n".join(word for argv in world.gcloud.commands for word in argv), values) == []
    assert leaked("\n".join(map(str, world.fake.requests)), values) == []
    assert files_with(list(world.hosts.homes), values) == []
    assert files_with([world.shared], values) == []
    assert left_in_memory() == []


def left_in_memory() -> list[Path]:
    """Files with secrets that this process's commands have left; those of other tests are theirs."""
    return list(Path("/dev/shm").glob(f"podium-{os.getpid()}_*"))


def test_what_a_killed_command_left_is_deleted_by_the_next(tmp_path):
    killed = subprocess.Popen(["true"])
    killed.wait()
    left, used, other = (tmp_path / name for name in (f"podium-{killed.pid}_a", f"podium-{os.getpid()}_b", "podium-c"))
    for folder in (left, used, other):
        folder.mkdir()
        (folder / "secrets.env").write_text(f"HF_TOKEN={TOKEN}")
    _delete_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted((used, other))
    with written(Secrets({"HF_TOKEN": TOKEN}), "secrets.env") as path:
        assert path.parent.name.startswith(f"podium-{os.getpid()}_")


def test_the_job_has_its_secrets_and_only_the_first_worker_has_them_all(make_world, pod):
    world = make_world(workers=2)
    world.plan(steps=2, hold=True)
    assert pod("up", "demo", "--type", "v4-16", "--zone", ZONES[0])[0] == 0
    assert pod(*world.run_arguments("--detach"))[0] == 0
    environments = [environment_of_job(world, worker) for worker in range(2)]
    assert {name: environments[0].get(name) for name in CANARIES} == CANARIES
    assert environments[1]["HF_TOKEN"] == CANARIES["HF_TOKEN"]
    assert "WANDB_API_KEY" not in environments[1]
    for home in world.hosts.homes:
        assert list((home / "shm").iterdir()) == []
        processes = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True).stdout
        assert not any(value in processes for value in CANARIES.values())


def environment_of_job(world: PodWorld, worker: int) -> dict[str, str]:
    """The environment of a worker's training process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                pairs = (entry / "environ").read_bytes().decode().split("\0")
            except OSError:
                continue
            environment = dict(pair.partition("=")[::2] for pair in pairs)
            if b"fake_job.py" in command and environment.get("HOME") == str(world.hosts.homes[worker]):
                return environment
    raise AssertionError(f"no job of worker {worker} among {len(os.listdir('/proc'))} processes")


def test_secrets_in_what_would_be_sent_are_refused(make_world, pod, tmp_path, monkeypatch):
    from tests.pods.pod_world import git, make_checkout

    world = make_world(workers=1)
    leaky = make_checkout(tmp_path / "leaky")
    monkeypatch.chdir(leaky)
    (leaky / "notes.txt").write_text(f"my token is {CANARIES['HF_TOKEN']}\n")
    status, _, err = pod(*world.run_arguments("--allow-dirty"))
    assert (status, world.gcloud.commands) == (2, [])
    assert "an uncommitted change contains the value of HF_TOKEN" in err
    git(leaky, "add", "--all")
    git(leaky, "commit", "--quiet", "-m", "oops")
    status, _, err = pod(*world.run_arguments())
    assert (status, world.gcloud.commands) == (2, [])
    assert re.search(r"the commit contains the value of HF_TOKEN in notes.txt; revoke it", err)


def test_a_secret_that_does_not_arrive_whole_starts_nothing(make_world, pod, monkeypatch):
    world = make_world(workers=2)
    assert pod("up", "demo", "--type", "v4-16", "--zone", ZONES[0])[0] == 0
    copy = world.hosts.copy

    def torn(worker, files, folder):
        status = copy(worker, files, folder)
        for file in world.hosts.homes[worker].glob("shm/*/*"):
            file.write_bytes(file.read_bytes()[:20])
        return status

    monkeypatch.setattr(world.hosts, "copy", torn)
    status, _, err = pod(*world.run_arguments())
    assert status == 1
    assert "starting job-" in err
    assert world.metrics() == []
    for home in world.hosts.homes:
        assert list((home / "shm").iterdir()) == []
