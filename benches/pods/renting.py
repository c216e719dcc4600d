"""Bars f and g: nothing stays rented whatever the API does, and secrets are nowhere."""

import time
from collections.abc import Iterator
from pathlib import Path

from benches.pods.bench import TYPE, Bench, Row, rented, seconds_since, wait
from podium.pods.gcloud import Gcloud, Order, run_process
from podium.pods.inventory import OWNER
from podium.pods.slices import Slices
from tests.pods.fake_tpu import FakeTpu, Fault, serve
from tests.pods.hosts import MACHINES_KEY, gcloud_environment
from tests.pods.test_secrets import leaked
from tests.pods.test_slices import one_story

STORIES = 200
PLANTED = {
    "HF_TOKEN": "hf_CANARYofTheEnvironment0123",
    "WANDB_API_KEY": "CANARY0123456789abcdef0123456789abcdef02",
    "AWS_SECRET_ACCESS_KEY": "CANARYnotAllowed0123456789abcdefghij0003",
}
IN_FILE, IN_OPTION = "hf_CANARYofTheFile/+45678901234", "CANARYinAnOption456789012345"
NOT_ALLOWED = "CANARYofAThirdService/+0123456789"
LEAST_HIDDEN = 16
"""Places in logs where a secret was told: two of worker 1's, in eight forms."""
RENTED_FAULTS: dict[str, list[Fault]] = {
    "lost reply": [Fault("POST", "lost_reply")],
    "429": [Fault("POST", "429", times=2)],
    "stock-out in two of three zones": [Fault("POST us-a nodes", "operation"), Fault("POST us-b nodes", "operation")],
    "no fault": [],
}


def bar_f(bench: Bench) -> Iterator[Row]:
    """Renting and giving back while the API breaks: by the real gcloud, then 200 times by the fake one."""
    for case, faults in RENTED_FAULTS.items():
        begun = time.monotonic()
        fake = FakeTpu(provision_s=0.6, operation_s=0.1)
        folder = bench.folder / case.replace(" ", "-")
        folder.mkdir()
        with serve(fake) as api:
            slices = of_real_gcloud(folder, api)
            queued = "stock-out" not in case
            fake.faults = faults
            order = an_order(queued=queued)
            if case == "no fault":  # deleted while its machines are being made
                slices.gcloud.checked(slices.gcloud.argv.create(order, order.name, "us-a"))
                wait(lambda fake=fake: fake.tick() or fake.nodes, 10.0)
                got = "deleted while being made"
            else:
                got = slices.up(order, ["us-a", "us-b", "eu-c"]).zone
            held = {(each.split("/")[3], each.rpartition("/")[2]) for each in (*fake.nodes, *fake.queued)}
            listed = {(each.zone, each.name) for each in slices.survey()}
            slices.down("demo")
            left = fake.everything()
        yield {
            "case": f"{case}, real gcloud",
            "got": got,
            "seconds": seconds_since(begun),
            "left": left,
            "good": not left and len(held) == 1 and listed == held,
        }
    begun = time.monotonic()
    for seed in range(STORIES):
        one_story(seed)
    yield {"case": f"{STORIES} random fault sequences", "seconds": seconds_since(begun), "good": True}


def of_real_gcloud(folder: Path, api: str) -> Slices:
    """Ada's slices, by the real gcloud."""
    settings = [f"{name}={value}" for name, value in gcloud_environment(folder, api).items()]
    gcloud = Gcloud(lambda argv, timeout_s: run_process(("env", *settings, *argv), timeout_s))
    return Slices(gcloud, owner="ada")


def an_order(*, queued: bool) -> Order:
    """What is rented in bar f."""
    labels = {OWNER: "ada"}
    return Order(
        name="demo",
        accelerator=TYPE,
        runtime="image",
        spot=True,
        queued=queued,
        valid_until_s=3600,
        labels=labels,
    )


PLANTING = ("sshd_config", "hosts.py", "test_secrets.py")
"""Files that hold what is planted before anything runs: the machines' own, and the tests' code, which is pushed."""


def bar_g(bench: Bench) -> Iterator[Row]:
    """A run that prints and fails with all it finds, with W&B's files, and then a search for what was planted.

    Eight kinds of secrets: of the environment (two), of a .env file, of names that are not allowed there and there, in
    --env, in a setting, and the machines' own; told in six encodings, over lines and over writes.
    """
    secrets = bench.folder / "secrets.env"
    secrets.write_text(f"HF_TOKEN={IN_FILE}\nOPENAI_API_KEY={NOT_ALLOWED}\n")
    secrets.chmod(0o600)
    with rented(bench):
        metrics = {"wandb": {"mode": "offline", "project": "p"}}
        config = bench.config("secret", steps=6, checkpoint={"every_steps": 2}, metrics=metrics)
        words = bench.run_words(config, "--keep-alive", "--keep", "--env-file", str(secrets))
        wrong = [("--env", f"SOME_API_KEY={IN_OPTION}"), ("--set", f"metrics.wandb.project={IN_FILE}")]
        refused = [bench.world.podium(*words, *each) for each in wrong]
        with bench.following(*words) as (laptop, out):
            wait(lambda: len(bench.metrics("secret")) >= 2)
            (bench.signs / "1").write_text("spill")
            wait(lambda: "restart:" in out.read_text())
            (bench.signs / "1").unlink()
            status = wait(lambda: laptop.poll() is not None) and laptop.returncode
        for words in (["status", "--json"], ["logs"], ["logs", "--worker", "1"]):
            bench.pod(*words)
    bench.outputs += [each.stdout + each.stderr for each in refused]
    secrets.unlink()
    planted = [*PLANTED.values(), IN_FILE, NOT_ALLOWED, IN_OPTION, MACHINES_KEY]
    files = [path for path in files_below(bench.folder) if path.name not in PLANTING]
    places = [str(path.relative_to(bench.folder)) for path in files if leaked(path.read_text("latin-1"), planted)]
    outputs = [word for word in bench.outputs if leaked(word, planted) or "\x1b" in word]
    asked = [str(request)[:80] for request in bench.world.fake.requests if leaked(str(request), planted)]
    hidden = sum(path.read_text("latin-1").count("[redacted]") for path in files if path.name == "log")
    yield {
        "case": f"{len(planted)} secrets of 8 kinds in 6 encodings, {len(files)} files",
        "status": status,
        "hidden_in_logs": hidden,
        "found_in_files": places,
        "found_in_outputs": len(outputs),
        "found_in_requests": asked,
        "good": [status, *(each.returncode for each in refused)] == [0, 2, 2]
        and hidden >= LEAST_HIDDEN
        and not (places or outputs or asked),
    }


def files_below(folder: Path) -> Iterator[Path]:
    """All files, once each."""
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
