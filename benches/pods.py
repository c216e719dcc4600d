"""`podium pod` when things go wrong: who is named as the cause, how soon, and what is left; all but Google is real.

    python -m benches.pods                 (Linux, as root, with gcloud, sshd and ip; a quiet machine)
    python -m benches.pods --bar a --bar f

Four machines are network namespaces with an sshd; Google's API is tests/pods/fake_tpu.py, to which the real gcloud
talks; jobs are `podium train` of a tiny random model over jax.distributed on CPU, four devices on each machine.

    a  up, run (3 steps), logs, down: one command each; the losses of all machines, and those of one process
    b  one machine is missing, there twice, or has another config, commit or folder: named by the launch guard
    c  kill -9 of a worker or of worker 0, a cut cable, an exception, a hang: named on the laptop, and nothing left
    d  --keep-alive while machines are taken at random instants: metrics go on bit for bit
    e  a job that ends with 255, ssh sessions that drop, a laptop that is killed and starts again: one copy of the job
    f  lost replies, stock-outs, 429, deleting what is being made; 200 random fault sequences: nothing is left rented
    g  planted secrets: in no file, no request and no output of all that the other bars leave

Prints a line per case and writes benches/results/pods-BAR-cpu.json; exit status 1 where a case misses its bar.
"""

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from benches.kill_resume import differences
from benches.recipes import write_tiny_model
from benches.record import arguments, record
from podium.observe.run_dir import CHECKPOINTS, METRICS
from podium.pods.gcloud import Gcloud, Order, run_process
from podium.pods.inventory import LEASE, OWNER, read_slices
from podium.pods.launch import AGENT, look
from podium.pods.records import GUARD, first_failure
from podium.pods.remote import Remote
from podium.pods.slices import Slices
from podium.train.checkpoint import saved_steps
from podium.train.setup import prepare_platform
from tests.pods.fake_tpu import FakeTpu, Fault, serve
from tests.pods.hosts import ROOT, fake_python, gcloud_environment
from tests.pods.network_world import ZONES, NetworkWorld, job_processes, network_world, why_no_network
from tests.pods.test_slices import one_story
from tests.pods.unreliable import SIGNS

Row = dict[str, Any]
"""A case: what was measured of it, and whether that is `good`."""
SETTINGS: dict[str, Any] = {
    "steps": 100_000,
    "prompts_per_step": 8,
    "group_size": 4,
    "algorithm": {"recipe": "dr_grpo"},
    "tasks": [{"name": "tests.pods.unreliable:Unreliable"}],
    "grading": {"workers": 0},
    "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 3, "slots": 16, "prefill_rows": 16},
    "train": {"rows_per_device": 2, "optimizer": {"learning_rate": 1e-2}},
    "eval": {"at_start": False, "at_end": False},
    "checkpoint": {"every_steps": 0},
}
TYPE, WORKERS, DEVICES = "v6e-16", 4, 4
TAKEN, TAKEN_DEVICES = {"v6e-1": 8, "v4-16": 2}, {"v6e-1": 1, "v4-16": 4}
"""Of bar d: instants, and devices of a machine, by the slice: one machine, or two."""
HANG_S = 8
NAMED_S, GUARD_S, WHOLE_S = 40.0, 10.0, 180.0
"""The bars: seconds until a cause, or the guard's, is named, and for all commands of bar a."""
LIMIT_S = 300.0
POLL_S = 0.2
KEPT_STEPS, SAVE_EVERY = 16, 2
STORIES = 200
PLANTED = {
    "HF_TOKEN": "hf_CANARYofTheEnvironment0123",
    "WANDB_API_KEY": "CANARY0123456789abcdef0123456789abcdef02",
    "AWS_SECRET_ACCESS_KEY": "CANARYnotAllowed0123456789abcdefghij0003",
}
IN_FILE, IN_OPTION = "hf_CANARYofTheFile/+45678901234", "CANARYinAnOption456789012345"


class Bench:
    """A project with a checkout of what is measured, and a model, in a folder of its own."""

    def __init__(self, folder: Path, world: NetworkWorld, compiled: Path) -> None:
        self.folder, self.world = folder, world
        self.signs = world.shared / "signs"
        self.signs.mkdir()
        cache = {"JAX_COMPILATION_CACHE_DIR": compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0}
        self.compiled_once: dict[str, Any] = cache
        """Variables with which runs find the programs of those before them."""
        self.outputs: list[str] = []
        self._model = world.shared / "model"
        self._model.mkdir()
        write_tiny_model(self._model)
        self._numbers = itertools.count(1)

    def config(self, name: str, **settings: Any) -> Path:
        """A config whose run is `name` in the folder that all machines see."""
        path = self.folder / f"{name}.yaml"
        own = {"name": name, "model": str(self._model), "runs_dir": str(self.world.shared / "runs")}
        path.write_text(yaml.safe_dump({**SETTINGS, **own, **settings}))
        return path

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """What a run has written."""
        path = self.world.shared / "runs" / name / METRICS
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pod(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """`podium pod ...` that must succeed."""
        done = self.world.podium(*words)
        self.outputs.append(done.stdout + done.stderr)
        if done.returncode:
            raise RuntimeError(f"podium pod {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return done

    def run_words(self, config: Path, *more: str, devices: int = DEVICES) -> list[str]:
        """`run` of a config, on CPU."""
        settings = {**on_cpu(devices), **self.compiled_once, SIGNS: self.signs}
        return ["run", str(config), "--python", sys.executable, *options(settings), *more]

    def counting_words(self, name: str, **plan: Any) -> list[str]:
        """`run` of a job that only counts steps (tests/pods/fake_job.py), in `shared/NAME`."""
        folder = self.world.shared / name
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps(plan))
        config = self.config(name, runs_dir=str(folder))
        return ["run", str(config), "--python", str(fake_python(self.folder)), *options(on_cpu(1))]

    @contextlib.contextmanager
    def following(self, *words: str) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
        """`podium pod ...` beside the block, with the file of what it says."""
        out = self.folder / f"laptop-{next(self._numbers)}.log"
        with self.world.following(out, *words) as laptop:
            try:
                yield laptop, out
            finally:
                laptop.kill()
                self.outputs.append(out.read_text())

    def remote(self) -> Remote:
        """The workers of the only slice."""
        gcloud = Gcloud(self.world.run)
        (one,) = read_slices(gcloud.nodes(ZONES[0]), [])
        return Remote(gcloud, one)

    def left(self) -> int:
        """Processes of jobs, on all machines."""
        return sum(len(job_processes(home)) for home in self.world.hosts.homes)


def on_cpu(devices: int) -> dict[str, Any]:
    """Variables with which a process has so many devices."""
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": devices}


def options(variables: dict[str, Any]) -> list[str]:
    """As `--env` takes them."""
    return [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]


def wait(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """What the condition gives as soon as it is something; None: it did not in time."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return found or None


def seconds_since(begun: float) -> float:
    """To a tenth."""
    return round(time.monotonic() - begun, 1)


def figures(metrics: dict[str, Any]) -> list[float]:
    """What a step must have in common on all machines and in one process: its loss and its reward."""
    return [metrics["train-other/loss"], metrics["train-reward/total/mean"]]


def bar_a(bench: Bench) -> Iterator[Row]:
    """One command each, in less than three minutes."""
    config, begun, took = bench.config("whole", steps=3), time.monotonic(), {}
    commands = {
        "up": ["up", "demo", "--type", TYPE, "--zone", ZONES[0]],
        "run": bench.run_words(config),
        "status": ["status", "--json"],
        "logs": ["logs", "--worker", "3"],
        "down": ["down", "demo"],
    }
    said = {}
    for name, words in commands.items():
        at = time.monotonic()
        said[name] = bench.pod(*words).stdout
        took[name] = seconds_since(at)
    took["all"] = seconds_since(begun)
    workers = json.loads(said["status"])["workers"]
    together = [figures(line) for line in bench.metrics("whole")]
    expected = one_process(bench)
    pairs = zip(itertools.chain(*together), itertools.chain(*expected), strict=True)
    furthest = max(abs(one - other) for one, other in pairs)
    of_hosts = [figures(each["progress"]["metrics"]) for each in workers]
    left = bench.world.fake.everything()
    equal = of_hosts == [together[-1]] * WORKERS and len(together) == 3 and all(map(all, together))
    yield {
        "case": "up, run, status, logs, down",
        "seconds": took,
        "losses_and_rewards": together,
        "of_one_process": expected,
        "furthest": furthest,
        "last_of_each_host": of_hosts,
        "left": left,
        "good": equal and took["all"] < WHOLE_S and furthest <= 1e-6 and not left,
    }


def one_process(bench: Bench) -> list[list[float]]:
    """The same run in one process with as many devices."""
    variables = {**on_cpu(WORKERS * DEVICES), SIGNS: bench.signs, "PODRUN_WORKER": 0}
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    command = [sys.executable, "-m", "podium.cli", "train", str(bench.config("alone", steps=3)), "--plain"]
    subprocess.run(command, cwd=bench.world.checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
    return [figures(line) for line in bench.metrics("alone")]


@contextlib.contextmanager
def rented(bench: Bench, type_name: str = TYPE, *more: str) -> Iterator[None]:
    """A slice, given back after the block."""
    bench.pod("up", "demo", "--type", type_name, "--zone", ZONES[0], *more)
    try:
        yield
    finally:
        bench.pod("down", "demo")


UNLIKE = {
    "missing": (2, "worker 2 is missing"),
    "there twice": (1, "worker 1 was started twice"),
    "other config": (2, r"learning_rate is '0\.5' on worker 2"),
    "other commit": (3, "commit is 'None' on worker 3"),
    "unshared folder": (3, r"worker 3 \(.*does not see what worker 0 writes"),
}
"""Which machine is not like the others, and how that must be told."""


def bar_b(bench: Bench) -> Iterator[Row]:
    """The guard names the machine that is not like the others."""
    config = bench.config("guarded", runs_dir="runs", steps=1)
    with rented(bench):
        bench.pod(*bench.counting_words("before", steps=1))  # leaves code and agent on the machines
        remote = bench.remote()
        for what, (guilty, named) in UNLIKE.items():
            job = f"guard-{what.replace(' ', '-')}"
            commands = guard_commands(bench, remote, config, job, what, guilty)
            cases = " ".join(f"{worker}) {command};;" for worker, command in enumerate(commands))
            begun = time.monotonic()
            remote.ask_all(f"case $worker in {cases} esac", "starting", timeout_s=60.0)
            line = wait(lambda job=job: first_failure(look(remote, job).statuses), 60.0)
            named_s = seconds_since(begun)
            guard_s = guards_seconds(remote, job)
            started = [worker for worker in range(WORKERS) if what != "missing" or worker != guilty]
            ends = wait(lambda job=job, started=started: exits(remote, job, started), 60.0)
            left = wait(lambda: bench.left() == 0, 10.0) is None
            yield {
                "case": what,
                "guard_s": guard_s,
                "named_on_laptop_s": named_s,
                "line": line,
                "exits": ends,
                "good": bool(line and re.search(named, line) and guard_s < GUARD_S and set(ends or ()) == {GUARD})
                and not left,
            }


def guard_commands(bench: Bench, remote: Remote, config: Path, job: str, what: str, guilty: int) -> list[str]:
    """What starts the job on each machine, where one is not like the others."""

    def start(worker: int, *, agent: str = AGENT, code: str = "$HOME/podrun/code/*", more: str = "") -> str:
        folder = "$HOME" if (what, worker) == ("unshared folder", guilty) else str(bench.world.shared)
        told = " ".join(options({**on_cpu(DEVICES), SIGNS: bench.signs, "PYTHONPATH": "$code"}))
        train = f"{sys.executable} -m podium.cli train {config} --plain{more}"
        place = f"--worker {worker} --peers {','.join(remote.addresses)} --cwd {folder}"
        return f"code=$(echo {code}); {agent} start {job} {place} {told} -- {train}"

    commands = [start(worker) for worker in range(WORKERS)]
    if what == "missing":
        commands[guilty] = "true"
    elif what == "there twice":
        again = start(guilty, agent=f"{AGENT} --home $HOME/again")  # first: one that comes late ends alone
        commands[guilty + 1] = f"{again}; {commands[guilty + 1]}"
    elif what == "other config":
        commands[guilty] = start(guilty, more=" --set train.optimizer.learning_rate=0.5")
    elif what == "other commit":
        copied = "cp -rT $HOME/podrun/code/* $HOME/copy && rm -rf $HOME/copy/.git"
        commands[guilty] = f"{copied}; {start(guilty, code='$HOME/copy')}"
    return commands


def guards_seconds(remote: Remote, job: str) -> float:
    """From the first worker's start to the first verdict of the guard, by the machines' clocks."""
    statuses = [status for status in look(remote, job).statuses if status and status["job"]]
    verdicts = [status["record"]["time"] for status in statuses if status["record"]]
    return round(min(verdicts) - min(status["created"] for status in statuses), 1) if verdicts else LIMIT_S


def exits(remote: Remote, job: str, workers: Sequence[int]) -> list[int] | None:
    """Of these workers, once all have ended."""
    statuses = look(remote, job).statuses
    found = [(statuses[worker] or {}).get("exit") for worker in workers]
    return None if None in found else [int(each or 0) for each in found]


FAILURES = {
    "kill -9 of a worker": (2, r"worker 2 \(.*signal 9 \(SIGKILL\)"),
    "kill -9 of worker 0": (0, r"worker 0 \(.*signal 9 \(SIGKILL\)"),
    "kill -9 of all of a machine's": (1, r"worker 1 \(.*was killed with all its processes"),
    "cut cable": (2, "worker 2 does not answer"),
    "exception": (1, r"worker 1 \(.*a bug that one host alone meets"),
    "hang": (3, r"worker 3 \(.*was stuck in rollout"),
}
"""On which machine something goes wrong, and how that must be told."""


def bar_c(bench: Bench) -> Iterator[Row]:
    """The laptop that follows a run is told who failed first, and of what."""
    with rented(bench):
        for number, (what, (guilty, named)) in enumerate(FAILURES.items()):
            name = f"failing-{number}"
            impatient = options({"PODRUN_HANG_S": HANG_S} if what == "hang" else {})
            with bench.following(*bench.run_words(bench.config(name), *impatient)) as (laptop, out):
                if not wait(lambda name=name: len(bench.metrics(name)) >= 3):
                    raise RuntimeError(f"the run did not begin:\n{out.read_text()[-3000:]}")
                time.sleep(10.0)  # the laptop has looked at it running
                begun = time.monotonic()
                fail(bench, what, guilty)
                found = wait(lambda out=out, named=named: re.search(named + ".*", out.read_text()), LIMIT_S)
                named_s = seconds_since(begun)
                ended = wait(lambda: bench.left() == 0, 120.0) is not None
                ended_s = seconds_since(begun) if ended else None
                if what == "cut cable":
                    bench.world.hosts.mend(guilty)
                status = wait(lambda laptop=laptop: laptop.poll() is not None) and laptop.returncode
            for sign in bench.signs.iterdir():
                sign.unlink()
            limit_s = NAMED_S + (HANG_S if what == "hang" else 0.0)
            yield {
                "case": what,
                "named_s": named_s,
                "line": found and found[0],
                "all_ended_s": ended_s,
                "status": status,
                "good": bool(found and named_s < limit_s and ended and status),
            }


def fail(bench: Bench, what: str, guilty: int) -> None:
    """Have it happen to a machine."""
    if what == "cut cable":
        bench.world.hosts.cut(guilty)
    elif what in ("exception", "hang"):
        (bench.signs / str(guilty)).write_text("raise" if what == "exception" else "hang")
    else:
        home = bench.world.hosts.homes[guilty]
        everything = "all of" in what
        for process in job_processes(home):
            supervises = b"\0supervise\0" in Path(f"/proc/{process}/cmdline").read_bytes()
            if everything or not supervises:
                os.kill(process, 9)


def bar_d(bench: Bench) -> Iterator[Row]:
    """Machines that are taken away at random, with their disks; the run goes on on others."""
    draw = random.Random(0)
    for kind, instants in TAKEN.items():
        settings = {"steps": KEPT_STEPS, "checkpoint": {"every_steps": SAVE_EVERY}}
        with rented(bench, kind):
            words = bench.run_words(bench.config(f"undisturbed-{kind}", **settings), devices=TAKEN_DEVICES[kind])
            bench.pod(*words)
        for number in range(instants):
            config = bench.config(f"taken-{kind}-{number}", **settings)
            with rented(bench, kind):
                yield taken(bench, config, kind, draw.randrange(KEPT_STEPS - 2), draw.uniform(0.0, 1.0))


def taken(bench: Bench, config: Path, kind: str, after: int, later_s: float) -> Row:
    """A run whose machines are taken a while after it has done so many steps, or none: while it starts."""
    name, runs = config.stem, bench.world.shared / "runs"
    words, begun = bench.run_words(config, "--keep-alive", devices=TAKEN_DEVICES[kind]), time.monotonic()
    with bench.following(*words) as (laptop, out):
        reached = wait(lambda: bench.left() > 0 and len(bench.metrics(name)) >= after)
        time.sleep(later_s if after else 10 * later_s)
        bench.world.fake.preempt("demo")
        bench.world.hosts.renew()
        done = len(bench.metrics(name))
        kept = max(saved_steps(runs / name / CHECKPOINTS), default=0)
        status = wait(lambda: laptop.poll() is not None) and laptop.returncode
        replaced = "replace: the slice is lost" in out.read_text()
    differs = differences(runs / name, runs / f"undisturbed-{kind}") if status == 0 else ["it did not end well"]
    return {
        "case": f"{kind}, taken after step {done}",
        "continued_from": kept,
        "lost_steps": done - kept,
        "seconds": seconds_since(begun),
        "status": status,
        "differences": differs,
        "good": bool(reached and replaced) and status == 0 and not differs and done - kept <= 2 * SAVE_EVERY,
    }


def bar_e(bench: Bench) -> Iterator[Row]:
    """However often the transport repeats what it was told, one copy of the job is started."""
    with rented(bench):
        yield once(bench, "ended-with-255", None, fails=True)
        yield once(bench, "dropped", lambda laptop: drop_sessions(bench, laptop))
        for number, after_s in enumerate((4.0, 8.0, 12.0, 16.0)):
            yield once(bench, f"laptop-killed-{number}", lambda laptop, after_s=after_s: kill_after(laptop, after_s))


def once(bench: Bench, name: str, disturb: Callable[..., dict[str, Any]] | None, *, fails: bool = False) -> Row:
    """A job of which steps only are counted, disturbed while it is started, then asked for again."""
    words, folder = bench.counting_words(name, steps=40, step_s=0.2), bench.world.shared / name
    if fails:
        (folder / "fail-1-20").write_text("255")
    before = [len(jobs) for jobs in bench.world.jobs()]
    happened: dict[str, Any] = {}
    if disturb is not None:
        with bench.following(*words) as (laptop, _):
            happened = disturb(laptop)
    done = bench.world.podium(*words)
    bench.outputs.append(done.stdout + done.stderr)
    copies = [len(jobs) - old for jobs, old in zip(bench.world.jobs(), before, strict=True)]
    steps = [json.loads(line)["step"] for line in (folder / METRICS).read_text().splitlines()]
    ended = wait(lambda: bench.left() == 0, 30.0) is not None
    return {
        "case": name.replace("-", " "),
        **happened,
        "status": done.returncode,
        "copies": copies,
        "steps": len(steps),
        "good": copies == [1] * WORKERS
        and steps == list(range(1, len(steps) + 1))
        and ended
        and (done.returncode == 255 if fails else (done.returncode, len(steps)) == (0, 40)),
    }


def drop_sessions(bench: Bench, laptop: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """End ssh sessions on a machine, each time another, until the laptop has what it wants."""
    dropped = 0
    for worker in itertools.cycle(range(WORKERS)):
        if laptop.poll() is not None or dropped >= 8:
            break
        dropped += bench.world.hosts.drop_connections(worker)
        time.sleep(0.3)
    wait(lambda: laptop.poll() is not None)
    return {"sessions_dropped": dropped}


def kill_after(laptop: "subprocess.Popen[bytes]", after_s: float) -> dict[str, Any]:
    """End the laptop's command."""
    time.sleep(after_s)
    laptop.kill()
    return {"after_s": after_s}


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
                slices.gcloud.create(order, "us-a")
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
    labels = {OWNER: "ada", LEASE: "2000000000"}
    return Order(
        name="demo",
        accelerator=TYPE,
        runtime="image",
        spot=True,
        queued=queued,
        valid_until_s=3600,
        labels=labels,
    )


def bar_g(bench: Bench) -> Iterator[Row]:
    """A run with a failure in it, with W&B's files, and then a search for what was planted."""
    secrets = bench.folder / "secrets.env"
    secrets.write_text(f"HF_TOKEN={IN_FILE}\nAWS_SECRET_ACCESS_KEY={PLANTED['AWS_SECRET_ACCESS_KEY']}\n")
    secrets.chmod(0o600)
    with rented(bench):
        metrics = {"wandb": {"mode": "offline", "project": "p"}}
        config = bench.config("secret", steps=6, checkpoint={"every_steps": 2}, metrics=metrics)
        words = bench.run_words(config, "--keep-alive", "--env-file", str(secrets))
        refused = bench.world.podium(*words, "--env", f"SOME_API_KEY={IN_OPTION}")
        with bench.following(*words) as (laptop, out):
            wait(lambda: len(bench.metrics("secret")) >= 2)
            (bench.signs / "1").write_text("raise")
            wait(lambda: "restart:" in out.read_text())
            (bench.signs / "1").unlink()
            status = wait(lambda: laptop.poll() is not None) and laptop.returncode
        for words in (["status", "--json"], ["logs"], ["logs", "--worker", "1"]):
            bench.pod(*words)
    bench.outputs.append(refused.stdout + refused.stderr)
    secrets.unlink()
    planted = [*PLANTED.values(), IN_FILE, IN_OPTION]
    places = [str(path) for path in files_below(bench.folder) if holds(path.read_bytes(), planted)]
    told = [word for word in bench.outputs if holds(word.encode(), planted)]
    asked = [str(request)[:80] for request in bench.world.fake.requests if holds(str(request).encode(), planted)]
    yield {
        "case": f"{len(planted)} secrets, {len(list(files_below(bench.folder)))} files",
        "status": status,
        "found_in_files": places,
        "found_in_outputs": len(told),
        "found_in_requests": asked,
        "good": (status, refused.returncode) == (0, 2) and not (places or told or asked),
    }


def files_below(folder: Path) -> Iterator[Path]:
    """All files, once each."""
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def holds(data: bytes, texts: Sequence[str]) -> bool:
    """Whether there is one of the texts in it."""
    return any(text.encode() in data for text in texts)


def make_checkout(folder: Path) -> Path:
    """What is measured, as a clean git checkout."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "podium", "tests/pods", "*.toml", "*.txt"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "--quiet"], ["add", "--all"], [*who, "commit", "--quiet", "-m", "all"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return folder


BARS = {"a": bar_a, "b": bar_b, "c": bar_c, "d": bar_d, "e": bar_e, "f": bar_f, "g": bar_g}


def main() -> None:
    """Prints a line per case and writes a file per bar."""
    parser = arguments(__doc__)
    parser.add_argument("--bar", action="append", choices=list(BARS), help="only this one; repeatable")
    parser.add_argument("--compiled", type=Path, metavar="FOLDER", help="programs that an earlier bench compiled")
    args = parser.parse_args()
    if (why := why_no_network()) is not None:
        sys.exit(f"no bench of pods here: {why}")
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    prepare_platform()
    missed = 0
    for bar in args.bar or BARS:
        begun = time.monotonic()
        rows = []
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "checkout").mkdir()
            with network_world(Path(name), make_checkout(Path(name) / "checkout"), workers=WORKERS) as world:
                world.environment |= PLANTED
                bench = Bench(Path(name), world, args.compiled or Path(name) / "compiled")
                for row in BARS[bar](bench):
                    rows.append(row)
                    print(f"{bar} {'good' if row['good'] else 'MISSED'} {json.dumps(row)}", flush=True)
        record(f"pods-{bar}-cpu", {"bar": bar, "seconds": seconds_since(begun), "rows": rows}, args.results)
        missed += sum(not row["good"] for row in rows)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
