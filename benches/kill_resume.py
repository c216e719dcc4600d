"""A run killed with SIGKILL at any instant, also inside a save, and continued ends as if nothing had happened.

    python -m benches.kill_resume --kills 20        (CPU; a minute or two per kill)
    python -m benches.kill_resume --carry-over      (with completions in flight over updates: rollout.in_flight 1.5)
    python -m benches.kill_resume --tools --kills 10   (prompts are conversations, killed while tools run)
    python -m benches.kill_resume --tools --carry-over --kills 10   (conversations in flight over updates)

A tiny random model learns sums, with a checkpoint every second step and after the best evaluations. One run is left
alone. Each other one is killed: a quarter inside saves, a quarter in the first compilations (of the evaluation, the
rollout and the update), some in later evaluations, the others anywhere; every fourth once more while it is being
continued. The instants are others each time this runs, unless `--seed` is given. Then it is continued by the same
command until it is done; then its records (but for times, speeds and memory), its checkpoints' steps and every array of
the last checkpoint are compared bit by bit with those of the first. Prints a line per run, where the kills landed and
what differs, and writes benches/results/kill-resume-cpu.json, or with `-carry-over`, `-tools` or
`-tools-carry-over` before `-cpu`; exit status 1 where anything differs, or a process is left.

With `--tools` each kill is at an instant when tools run, in two processes that have started one more each.
"""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import yaml

from benches.recipes import write_tiny_model
from benches.record import arguments, record
from podium.job.job_records import PROGRESS, read_json
from podium.models.params import param_specs
from podium.observe.run_dir import CHECKPOINTS, CONFIG, LENGTHS, METRICS, SAMPLES, read_config, saved_steps
from podium.run.token_sizes import optimizer_steps
from podium.sharding import abstract_params
from podium.train.checkpoints.checkpoint import restore_state
from podium.train.optimizer.transforms import make_optimizer
from podium.train.setup import make_model
from podium.train.state import abstract_state

STEPS = 14
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "prompts_per_step": 16,
    "group_size": 8,
    "tasks": [{"name": "arithmetic"}],
    "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 6, "slots": 32},
    "train": {"rows_per_device": 8, "optimizer": {"learning_rate": 1e-2, "schedule": "cosine"}},
    "eval": {"every_steps": 5, "samples": 2},
    "checkpoint": {"every_steps": 2, "keep_last": 2, "keep_best": 1},
    "metrics": {"samples_every": 1},
}
CARRY_OVER: dict[str, Any] = {"rollout": {"in_flight": 1.5, "max_new_tokens": 12, "refill_steps": 2}}
"""Eight prompts of each step go on in the next, most in the middle of their completions."""
TALKING: dict[str, Any] = {
    "tasks": [{"name": "arithmetic", "environment": "benches.children.talking:Talking"}],
    "environments": {"workers": 2},
    "rollout": {"max_prompt_tokens": 20, "max_episode_tokens": 60, "reproducible": True},
}
"""Each prompt starts a conversation of up to three turns; between them tools run for unpredictable times."""
CARRIED_TALKS: dict[str, Any] = {**TALKING, "rollout": {**TALKING["rollout"], **CARRY_OVER["rollout"]}}
"""Conversations that go on in the next step: in the middle of turns, waiting for tools, or ended before others."""
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ ' <end> ' if message.role == 'assistant' else ' ' }}{% endfor %}"
)
"""A chat template by which a conversation can be continued, unlike the tiny model's own."""
VOLATILE = (
    "async/waited_s",
    "async/rebuild_s",
    "time/",
    "throughput/",
    "memory/",
    "plan/",
    "rollout/prefill_s",
    "rollout/decode_s",
    "rollout/tokens_per_s",
)
BY_THE_SCHEDULE = ("rollout/", "env/reply_s", "env/begin_s", "env/idle_s")
"""What two runs with conversations do not share: replies come when they come, and the engine goes on meanwhile."""
COMPILATIONS = "rollout/compilations"  # a continued run compiles anew
COMPILED = ("evaluation", "rollout", "update")
"""Phases that compile programs when they come first."""
EVALUATED = (6, 12)
"""Lines of metrics.jsonl when a later evaluation begins: those of five or ten steps, and of the evaluations before."""
POLL_S = 0.001
LIMIT_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """When to kill: `delay_s` after metrics.jsonl has `lines` lines and, if asked for, a save or a phase has begun."""

    lines: int
    delay_s: float
    in_save: bool = False
    in_tool: bool = False
    """Whether a tool of a conversation must run."""
    in_phase: str | None = None
    """As the run tells its launcher; it does so every second, so only phases that compile are met."""
    again_s: float | None = None
    """Seconds after its start at which the continued run is killed too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Landing:
    """Where a kill landed, read from what it left."""

    phase: str
    continued_from: int
    children: list[int]
    """Processes below the run's (graders, environments and theirs); the bench does not kill them."""


def write_config(folder: Path, name: str, changes: Mapping[str, Any]) -> Path:
    """The config of a run below `folder`, and the model it names where that is not there yet."""
    model = folder / "model"
    if not model.exists():
        model.mkdir(parents=True)
        write_tiny_model(model)
    path = folder / f"{name}.yaml"
    places = {"name": name, "runs_dir": str(folder), "model": str(model)}
    if "environments" in changes:
        (folder / "chat.jinja").write_text(TEMPLATE)
        places["chat_template"] = str(folder / "chat.jinja")
    path.write_text(yaml.safe_dump({**places, **settings_with(changes)}))
    return path


def settings_with(changes: Mapping[str, Any]) -> dict[str, Any]:
    """SETTINGS with changes; those of the rollout are laid over its own."""
    return {**SETTINGS, **changes, "rollout": SETTINGS["rollout"] | changes.get("rollout", {})}


def start(config: Path) -> subprocess.Popen[bytes]:
    """`podium train`, its output in a file beside the config."""
    command = [sys.executable, "-m", "podium.cli", "train", str(config), "--plain"]
    job = config.with_suffix(".job")
    shutil.rmtree(job, ignore_errors=True)
    job.mkdir()
    with config.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PODRUN_JOB_DIR": str(job)})


def finish(config: Path) -> None:
    """Run to the end, or on to the end."""
    if status := start(config).wait(LIMIT_S):
        raise RuntimeError(
            f"{config.stem} ended with status {status}:\n{config.with_suffix('.log').read_text()[-4000:]}"
        )


def disturb(config: Path, kill: Kill) -> Landing | None:
    """Start the run, or continue it, and kill it; None if it ended before that."""
    run = config.with_suffix("")
    process = start(config)

    def reached() -> bool:
        saving = not kill.in_save or bool(_unfinished(run))
        running = not kill.in_tool or bool(_tools(run))
        return _lines(run) >= kill.lines and saving and running and kill.in_phase in (None, _told_phase(run))

    if not _wait(process, reached):
        return None
    time.sleep(kill.delay_s)
    if kill.in_tool and not _wait(process, lambda: bool(_tools(run))):
        return None
    tools, children = len(_tools(run)), _children(process.pid)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        return None
    where = f"compiling the first {kill.in_phase}" if kill.in_phase else phase(run)
    if kill.in_tool:
        where += f", with {tools} tools running"
    return Landing(phase=where, continued_from=max(saved_steps(run / CHECKPOINTS), default=0), children=children)


def phase(run: Path) -> str:
    """Where a killed run was, as far as its files tell."""
    if unfinished := _unfinished(run):
        return f"inside the save of step {unfinished[0].name.partition('.')[0]}"
    if not (run / CONFIG).exists():
        return "before the run's folder was made"
    if not _lines(run):
        return "loading, compiling or evaluating before the first step"
    text = (run / METRICS).read_text()
    if not text.endswith("\n"):
        return "inside a line of metrics.jsonl"
    last = json.loads(text.splitlines()[-1])
    return f"after {'the update' if 'train-other/loss' in last else 'the evaluation'} of step {last['step']}"


def differences(run: Path, other: Path, volatile: tuple[str, ...] = VOLATILE) -> list[str]:
    """List what differs between two runs that should be equal; metrics that begin with `volatile` may."""
    found = [name for name in (SAMPLES, LENGTHS) if (run / name).read_bytes() != (other / name).read_bytes()]
    ours, theirs = _records(run, volatile), _records(other, volatile)
    if len(ours) != len(theirs):
        found.append(f"{METRICS}: {len(ours)} and {len(theirs)} lines")
    for left, right in zip(ours, theirs, strict=False):
        names = [name for name in {**left, **right} if left.get(name) != right.get(name)]
        found += [f"step {left['step']}: {name}" for name in names]
    steps, other_steps = saved_steps(run / CHECKPOINTS), saved_steps(other / CHECKPOINTS)
    if steps != other_steps:
        found.append(f"checkpoints of steps {steps} and {other_steps}")
    state, other_state = _last_state(run), _last_state(other)
    found += [name for name in state if state[name] != other_state.get(name)]
    return found


def draw_kills(count: int, seed: int) -> list[Kill]:
    """Instants of every kind, for each eight: two saves, two compilations, a later evaluation, three anywhere."""
    draw = random.Random(seed)
    kills = []
    for index in range(count):
        kind = ("save", "compilation", "anywhere", "evaluation")[index % 4]
        again_s = draw.uniform(0.0, 15.0) if (index // 4 + index) % 4 == 3 else None
        if kind == "save":
            kill = Kill(lines=draw.randrange(STEPS), delay_s=draw.uniform(0.0, 0.03), in_save=True)
        elif kind == "compilation":
            kill = Kill(lines=0, delay_s=draw.uniform(0.0, 1.0), in_phase=draw.choice(COMPILED))
        elif kind == "evaluation":  # begins when the line of its step is written
            kill = Kill(lines=draw.choice(EVALUATED), delay_s=draw.uniform(0.0, 0.1))
        else:  # a step takes about 0.1 s, starting some seconds
            lines = draw.randrange(STEPS + 1)
            kill = Kill(lines=lines, delay_s=draw.uniform(0.0, 0.2 if lines else 15.0))
        kills.append(dataclasses.replace(kill, again_s=again_s))
    draw.shuffle(kills)
    return kills


def draw_tool_kills(count: int, seed: int) -> list[Kill]:
    """Instants at which tools run, of all steps and of the evaluation before the first."""
    draw = random.Random(seed)
    return [Kill(lines=draw.randrange(STEPS), delay_s=draw.uniform(0.0, 0.02), in_tool=True) for _ in range(count)]


def measure(folder: Path, kill: Kill, index: int, changes: Mapping[str, Any]) -> dict[str, Any] | None:
    """A row of the table, against the run `undisturbed` in `folder`; None if a kill came too late."""
    config = write_config(folder, f"killed-{index}", changes)
    landings = [disturb(config, kill)]
    if landings[0] is not None and kill.again_s is not None:
        again = disturb(config, Kill(lines=0, delay_s=kill.again_s))
        where = f"{kill.again_s:.1f} s after the continued run was started"  # its files may be the first kill's
        landings.append(again and dataclasses.replace(again, phase=where))
    landed = [landing for landing in landings if landing is not None]
    if len(landed) < len(landings):
        shutil.rmtree(config.with_suffix(""))
        return None
    finish(config)
    return {
        "phases": [landing.phase for landing in landed],
        "continued_from": [landing.continued_from for landing in landed],
        "differences": differences(
            folder / "undisturbed",
            config.with_suffix(""),
            (*VOLATILE, *BY_THE_SCHEDULE) if kill.in_tool else VOLATILE,
        ),
        "orphans": [child for landing in landed for child in landing.children if _alive(child)],
    }


def _wait(process: subprocess.Popen[bytes], reached: Callable[[], bool]) -> bool:
    """Whether the condition came true while the process lived."""
    deadline = time.monotonic() + LIMIT_S
    while not reached():
        if process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError(f"process {process.pid} did not get there in {LIMIT_S:g} s")
        time.sleep(POLL_S)
    return True


def _lines(run: Path) -> int:
    path = run / METRICS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _told_phase(run: Path) -> str | None:
    """The phase that the run has told its launcher last, before its first step was done."""
    progress = read_json(run.with_suffix(".job") / PROGRESS)
    return progress["phase"] if progress and not progress["step"] else None


def _unfinished(run: Path) -> list[Path]:
    """Checkpoints that orbax is writing, or was."""
    return list((run / CHECKPOINTS).glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"))


def _records(run: Path, volatile: tuple[str, ...]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what no two runs share."""
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    kept = lambda name: not name.startswith(volatile) and name != COMPILATIONS  # noqa: E731
    return [{name: value for name, value in line.items() if kept(name)} for line in lines]


def _last_state(run: Path) -> dict[str, Any]:
    """Shape, dtype and bytes of every array of the last checkpoint, and what the loop stored with them.

    Without the extent of the records, since metrics.jsonl holds times, and without the settings, which hold the run's
    name.
    """
    config = read_config(run)
    model = make_model(config)
    specs = param_specs(model.decoder)
    optimizer = make_optimizer(config.train.optimizer, optimizer_steps(config), specs)
    abstract = abstract_state(abstract_params(specs, jnp.float32, model.rules), optimizer)
    state, host_state = restore_state(run / CHECKPOINTS, None, abstract)
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return {name: (x.shape, str(x.dtype), x.tobytes()) for name, x in arrays.items()} | {
        name: value for name, value in host_state.items() if name not in ("records", "settings")
    }


def _tools(run: Path) -> list[Path]:
    """A file for each tool that runs."""
    return list((run.with_suffix(".job") / "tools").glob("*"))


def _children(pid: int) -> list[int]:
    """The processes below a process, where the system tells (Linux)."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    own = [int(child) for file in files for child in file.read_text().split()]
    return [*own, *(each for child in own for each in _children(child))]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def table(
    folder: Path, kills: Sequence[Kill], changes: Mapping[str, Any] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """A row per kill that landed, printed as they come; one that came too late is repeated with fewer lines.

    `changes` are settings over SETTINGS.
    """
    finish(write_config(folder, "undisturbed", changes))
    rows: list[dict[str, Any]] = []
    for index, kill in enumerate(kills):
        while (row := measure(folder, kill, index, changes)) is None:
            again_s = None if kill.again_s is None else kill.again_s / 2
            lines = max(0, kill.lines - 1)
            kill = dataclasses.replace(kill, lines=lines, delay_s=kill.delay_s / 2, again_s=again_s)
        rows.append({"kill": dataclasses.asdict(kill), **row})
        verdict = "equal" if not row["differences"] else f"differs: {', '.join(row['differences'][:3])}"
        orphans = f", orphans {row['orphans']}" if row["orphans"] else ""
        places = ", then ".join(
            f"{phase} (continued from {step})" for phase, step in zip(row["phases"], row["continued_from"], strict=True)
        )
        print(f"{index + 1:3} {places}: {verdict}{orphans}", flush=True)
    return rows


def main() -> None:
    """Prints and writes the table; exit status 1 where a run differs or leaves a process behind."""
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="of the instants; unset: another one each time")
    parser.add_argument("--carry-over", action="store_true", help="with completions in flight over updates")
    parser.add_argument("--tools", action="store_true", help="with conversations, at instants when tools run")
    args = parser.parse_args()
    changes = {
        (False, False): {},
        (False, True): CARRY_OVER,
        (True, False): TALKING,
        (True, True): CARRIED_TALKS,
    }[args.tools, args.carry_over]
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    kills = draw_tool_kills(args.kills, seed) if args.tools else draw_kills(args.kills, seed)
    with tempfile.TemporaryDirectory() as folder:
        rows = table(Path(folder), kills, changes)
    equal = sum(not row["differences"] and not row["orphans"] for row in rows)
    print(f"{equal} of {len(rows)} equal, bit by bit")
    settings = settings_with(changes)
    result = {"seed": seed, "steps": STEPS, "settings": settings, "kills": len(rows), "equal": equal, "rows": rows}
    name = "kill-resume" + "-tools" * args.tools + "-carry-over" * args.carry_over
    record(f"{name}-{jax.default_backend()}", result, args.results)
    sys.exit(equal < len(rows))


if __name__ == "__main__":
    main()
