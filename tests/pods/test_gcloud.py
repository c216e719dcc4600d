"""gcloud's command lines and what it answers: recorded, faked, and, where it is installed, real."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from podium.pods.gcloud import Argv, Finished, Gcloud, GcloudError, failure, run_process
from podium.pods.inventory import Slice, read_slices
from tests.pods.clock import Clock
from tests.pods.fake_gcloud import FakeGcloud
from tests.pods.fake_tpu import FakeTpu
from tests.pods.gcloud_cases import CASES, DIRECT, ORDER, ZONE
from tests.pods.hosts import gcloud_environment
from tests.pods.record_gcloud import RECORDED, real_answer

recorded = json.loads(RECORDED.read_text())
needs_gcloud = pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
ASKED_AGAIN = (
    *("create", "list_queued", "lost_reply", "rate", "no_project"),
    *(pytest.param(name, marks=pytest.mark.long) for name in ("exists", "quota", "stockout")),
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Finished, FakeTpu]]:
    """What the real gcloud answers in a case, and the API that it asked; each is run once."""
    return functools.cache(lambda name: real_answer(CASES[name], tmp_path_factory.mktemp("gcloud")))


def as_recorded(name: str) -> Finished:
    kept = recorded[name]
    argv = tuple(kept["argv"])
    return Finished(argv=argv, returncode=kept["returncode"], stdout=kept["stdout"], stderr=kept["stderr"])


def faked(name: str) -> Finished:
    clock = Clock()
    fake = FakeTpu(clock=clock.time, zones=(ZONE, "us-east5-b"), provision_s=0.6, operation_s=0.1)
    gcloud = FakeGcloud(fake, clock, project="p" if CASES[name].project else None)
    for argv in CASES[name].before:
        assert gcloud(argv, 60.0).returncode == 0
    CASES[name].prepare(fake)
    return gcloud(CASES[name].argv, 60.0)


def told(finished: Finished) -> object:
    """What an answer means to us: the kind of failure, or the slices of a list."""
    if finished.returncode != 0:
        return failure(finished).kind
    answer = json.loads(finished.stdout.replace("TIME", "2026-01-01T00:00:00Z"))
    if "tpu-vm" in finished.argv and "list" in finished.argv:
        return [essence(each) for each in read_slices(answer, [])]
    if "queued-resources" in finished.argv and "list" in finished.argv:
        return [essence(each) for each in read_slices([], answer)]
    return sorted(each["locationId"] for each in answer) if "locations" in finished.argv else "done"


def essence(one: Slice) -> tuple[object, ...]:
    return (one.name, one.zone, one.state, one.accelerator, one.runtime, one.spot, len(one.addresses), dict(one.labels))


@pytest.mark.parametrize("name", CASES)
def test_what_gcloud_said_is_understood(name):
    finished = as_recorded(name)
    assert list(finished.argv) == list(CASES[name].argv)
    if CASES[name].kind is None:
        assert finished.returncode == 0
    else:
        assert (finished.returncode, failure(finished).kind) == (1, CASES[name].kind)


@pytest.mark.parametrize("name", CASES)
def test_the_fake_says_what_gcloud_said(name):
    assert told(faked(name)) == told(as_recorded(name))


@needs_gcloud
@pytest.mark.parametrize("name", ASKED_AGAIN)
def test_gcloud_still_says_what_it_said(name, real):
    finished, _ = real(name)
    assert told(finished) == told(as_recorded(name))


@needs_gcloud
def test_gcloud_asks_the_api_for_what_is_meant(real):
    _, fake = real("create")
    (body,) = [body for method, path, _, body in fake.requests if method == "POST" and path.endswith("queuedResources")]
    assert body["spot"] == {}
    assert "provisioningModel" not in body  # which the alpha track adds, and contradicts itself
    assert body["queueingPolicy"] == {"validUntilDuration": "3600s"}
    (spec,) = body["tpu"]["nodeSpec"]
    assert spec["nodeId"] == "run"
    assert spec["node"]["labels"] == dict(ORDER.labels)


@needs_gcloud
def test_gcloud_sends_a_request_again_that_got_no_reply_and_then_fails_though_it_was_done(real):
    finished, fake = real("lost_reply")
    assert sum(method == "POST" for method, *_ in fake.requests) == 2
    assert (finished.returncode, failure(finished).kind) == (1, "exists")
    assert [name.rpartition("/")[2] for name in fake.queued] == ["run"]


@needs_gcloud
def test_gcloud_does_not_make_a_refused_request_again(real):
    _, fake = real("rate")
    assert sum(method == "POST" for method, *_ in fake.requests) == 1


@needs_gcloud
def test_gcloud_lists_objects_with_their_times(tmp_path):
    pytest.importorskip("google_crc32c", reason="the extra gcs is not installed")
    from fake_gcs import running

    with running() as (store, environment):
        store.put("bucket", "podium-over/run-1.143.word", b"")
        store.put("bucket", "podium-over/run-12.0.word", b"")
        url = f"{environment['STORAGE_EMULATOR_HOST']}/storage/v1/"
        env = {**os.environ, **gcloud_environment(tmp_path, ""), "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": url}
        argv = Argv().objects("gs://bucket/podium-over/run-1.")
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout) == [
        {"name": "podium-over/run-1.143.word", "creation_time": "2026-01-01T00:00:00+0000"}
    ], done.stderr


@needs_gcloud
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="its own network needs root")
def test_a_user_without_a_network_is_not_told_to_log_in(tmp_path):
    """The real gcloud with a user's credentials, in a network that has nothing: it says `gcloud auth login`."""
    credentials = {"type": "authorized_user", "client_id": "x", "client_secret": "y", "refresh_token": "1//z"}
    (tmp_path / "user.json").write_text(json.dumps(credentials))
    settings = gcloud_environment(tmp_path, "http://127.0.0.1:1/") | {
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "false",
        "CLOUDSDK_AUTH_CREDENTIAL_FILE_OVERRIDE": str(tmp_path / "user.json"),
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    finished = run_process(("unshare", "--net", "env", *words, *Argv().nodes()), 120.0)
    assert "gcloud auth login" in finished.stderr
    error = failure(finished)
    assert (finished.returncode, error.kind, error.transient) == (1, "unavailable", True)


def test_a_login_that_has_expired_is_no_matter_of_the_network():
    text = "There was a problem refreshing your current auth tokens: ('invalid_grant: Bad Request', {'error': 'invalid_"
    text += "grant'})\nPlease run:\n\n  $ gcloud auth login"
    finished = Finished(argv=("gcloud", "x"), returncode=1, stdout="", stderr=f"ERROR: (gcloud.x) {text}\n")
    assert failure(finished).kind == "login"


def test_errors_say_what_was_said_and_what_to_do():
    texts = {name: str(failure(as_recorded(name))) for name in ("quota", "no_project", "stockout", "denied")}
    assert "Quota limit 'TPUV6EPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded" in texts["quota"]
    assert "iam-admin/quotas" in texts["quota"]
    assert "gcloud config set project" in texts["no_project"]
    assert "no more capacity" in texts["stockout"]
    assert "roles/tpu.admin" in texts["denied"]
    assert not any("This command is" in text or "\n" in text for text in texts.values())


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("(gcloud.x) You do not currently have an active account selected.\nPlease run: $ gcloud auth login", "login"),
        ("(gcloud.x) UNAUTHENTICATED: Request had invalid authentication credentials.", "login"),
        (
            "(gcloud.x) PERMISSION_DENIED: Cloud TPU API has not been used in project 7 before or it is disabled.",
            "disabled",
        ),
        ("(gcloud.x) RESOURCE_EXHAUSTED: Quota 'TPUV4sPodPerProjectPerRegionForTPUAPI' exhausted. Limit 0", "quota"),
        ("(gcloud.x) RESOURCE_EXHAUSTED: Quota exceeded for 'Create requests per minute'", "rate"),
        ("(gcloud.x) NOT_FOUND: Reservation not found.", "not_found"),
        ('(gcloud.x) This TPU has terminal state "PREEMPTED", so it cannot be used anymore.', "unusable"),
        ('(gcloud.x) SSH Key is not present in the SSH agent. Please run "ssh-add key"', "ssh_key"),
        ("(gcloud.x) argument --valid-until-duration: Invalid duration", "invalid"),
        ("(gcloud.x) Something new", "unknown"),
    ],
)
def test_kinds_of_failures(text, kind):
    finished = Finished(argv=("gcloud", "x"), returncode=1, stdout="", stderr=f"WARNING: old\nERROR: {text}\n")
    assert failure(finished).kind == kind
    assert "WARNING" not in str(failure(finished))


def test_after_which_failures_nobody_knows_whether_it_was_done():
    assert failure(as_recorded("no_connection")).uncertain
    assert failure(Finished(argv=("x",), returncode=None, stdout="", stderr="")).uncertain
    assert not failure(as_recorded("rate")).uncertain
    assert failure(as_recorded("rate")).transient
    assert not failure(as_recorded("quota")).transient


def test_the_exact_command_lines():
    argv = Argv("p")
    end = "--project=p --format=json --quiet"
    assert " ".join(argv.create(ORDER, ORDER.name, ZONE)) == (
        f"gcloud compute tpus queued-resources create run --node-id=run --runtime-version=image "
        f"--valid-until-duration=3600s --zone={ZONE} --accelerator-type=v6e-8 "
        f"--labels=podium-lease=2000000000,podium-owner=ada --spot {end}"
    )
    assert " ".join(argv.create(DIRECT, DIRECT.name, ZONE)).startswith(
        "gcloud compute tpus tpu-vm create run --version=image --zone="
    )
    assert argv.delete("run", ZONE, queued=True)[-4:] == ("--force", *end.split())
    assert argv.ssh("run", ZONE, "all", "true")[4:] == (
        "ssh",
        "run",
        f"--zone={ZONE}",
        "--worker=all",
        "--ssh-flag=-o ConnectTimeout=10",
        "--ssh-flag=-o ServerAliveInterval=10",
        "--ssh-flag=-o ServerAliveCountMax=3",
        "--command=true",
        "--project=p",
        "--quiet",
    )
    assert all(word != "alpha" for command in (argv.nodes(), argv.zones(), argv.queued(ZONE)) for word in command)


def test_no_command_may_hold_a_secret():
    gcloud = Gcloud(lambda argv, timeout_s: pytest.fail("it was run"), is_secret=lambda word: "hf_secret_value" in word)
    with pytest.raises(AssertionError):
        gcloud.checked(("gcloud", "ssh", "--command=echo hf_secret_value"), 1.0)


def test_an_answer_that_is_not_json_is_an_error():
    done = Finished(argv=("gcloud",), returncode=0, stdout="Listed 0 items.", stderr="")
    with pytest.raises(GcloudError, match="not JSON"):
        Gcloud(lambda argv, timeout_s: done).ask(Argv().nodes())


def test_without_gcloud_it_is_said_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GcloudError, match=r"gcloud is not installed.*cloud.google.com/sdk") as error:
        Gcloud().ask(Argv().nodes())
    assert error.value.kind == "missing"


SLEEPER = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
print("begun", flush=True)
time.sleep(60)
"""


def test_a_command_that_takes_too_long_is_killed_with_all_it_started(tmp_path):
    finished = run_process((sys.executable, "-c", SLEEPER, str(tmp_path / "pids")), 4.0)
    assert (finished.returncode, finished.stdout) == (None, "begun\n")
    assert_ended(tmp_path / "pids")


def test_ctrl_c_ends_the_command_too(tmp_path):
    code = (
        "import sys\nfrom podium.pods.gcloud import run_process\n"
        "run_process((sys.executable, '-c', sys.argv[1], sys.argv[2]), 60.0)\n"
    )
    command = [sys.executable, "-c", code, SLEEPER, str(tmp_path / "pids")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2]) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "pids").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) != 0
    assert_ended(tmp_path / "pids")


def assert_ended(pids: Path) -> None:
    """No process of those in a file runs."""
    deadline = time.monotonic() + 60
    for pid in map(int, pids.read_text().split()):
        while (stat := Path(f"/proc/{pid}/stat")).exists() and ") Z " not in stat.read_text():
            assert time.monotonic() < deadline, f"{pid} lives"
            time.sleep(0.05)
