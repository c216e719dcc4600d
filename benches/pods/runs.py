"""Bars a, d and e: a run from one command, preempted machines, and one copy of a job whatever is repeated."""

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benches.kill_resume import differences
from benches.pods.bench import DEVICES, TYPE, WORKERS, Bench, Row, on_cpu, rented, seconds_since, wait
from podium.observe.run_dir import CHECKPOINTS, METRICS, saved_steps
from tests.pods.network_world import ZONES
from tests.pods.unreliable import SIGNS

WHOLE_S = 180.0
"""Bar a: seconds that all commands may take."""
TAKEN, TAKEN_DEVICES = {"v6e-1": 8, "v4-16": 2}, {"v6e-1": 1, "v4-16": 4}
"""Bar d: instants, and devices of a machine, by the slice: one machine, or two."""
KEPT_STEPS, SAVE_EVERY = 16, 2


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
    """Figures of the run in one process that has as many devices as all workers."""
    variables = {**on_cpu(WORKERS * DEVICES), SIGNS: bench.signs, "PODRUN_WORKER": 0}
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    command = [sys.executable, "-m", "podium.cli", "train", str(bench.config("alone", steps=3)), "--plain"]
    subprocess.run(command, cwd=bench.world.checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
    return [figures(line) for line in bench.metrics("alone")]


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
    """However often the transport repeats a command, one copy of the job is started."""
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
