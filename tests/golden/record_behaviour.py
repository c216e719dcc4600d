"""Record what a user can see of Podium: a run's numbers, plans, settings, commands. A refactor must reproduce it.

    python tests/golden/record_behaviour.py          # writes tests/golden/behaviour/*.json
    python tests/golden/record_behaviour.py --check  # compares exactly and lists the differences

`make test` checks settings and commands; `make test-long` also checks training and compiled plans. The numbers of a run
are equal to the last bit on one kind of CPU and one version of jax, which the file names; elsewhere they may round
differently and are not compared. Compiled plans need libtpu, and take minutes.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import io
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from podium import cli
from podium.accelerators import cpu_flags

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "behaviour"
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("**/*.yaml"))
STEPS = 3
TRAINING = (
    f"steps={STEPS}", "train.dtype=float32", "rollout.dtype=float32", "eval.at_start=false", "eval.at_end=false",
    "eval.every_steps=0", "metrics.samples_every=1", 'tasks=[{"name": "tests.golden.former_split:arithmetic"}]',
)  # fmt: skip
MANY = ("train.rows_per_device=1", "train.remat=layer", "rollout.layout=legacy")
"""With 8 devices on one machine: weights and rows have to share its memory."""
MEASURED = ("time/", "throughput/", "memory/", "rollout/prefill_s", "rollout/decode_s", "rollout/tokens_per_s")
"""Metrics that are of the clock."""
PLANS = (
    ("configs/demo.yaml", "v6e-1"),
    ("configs/gsm8k_smollm2.yaml", "v4-8"),
    ("configs/gsm8k_qwen25_3b.yaml", "v6e-8"),
    ("configs/gsm8k_qwen3_8b.yaml", "v6e-16"),
)
CODE = 1e-3
"""Share by which a compiled plan's numbers may differ: a program's code holds the names of functions."""
NO_SOURCE = {"JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"}
"""For compilations: a program's code holds no stack of calls, which is an eighth of it, and another one after each
change of a function that is called, and in another folder."""
NOW = 1_790_000_000.0
"""The time at which the commands are shown, in seconds since 1970."""
USER = "tester"
POD = ("--project", "example", "--dry-run")
COMMANDS = (
    ("pod", "up", "first", "--type", "v6e-8", "--zone", "us-east5-b", "--lease", "4h", *POD),
    ("pod", "up", "first", "--type", "v6e-16", "--zone", "us-east5-b", "--on-demand", "--now", *POD),
    ("pod", "down", "first", *POD),
    ("pod", "status", "first", *POD),
    ("pod", "ls", *POD),
    ("pod", "reap", *POD),
    ("pod", "stop", "first", *POD),
    ("pod", "logs", "first", *POD),
    ("pod", "ssh", "first", "--command", "ls", *POD),
    ("pod", "sky", "configs/gsm8k_qwen25_3b.yaml", "--type", "v6e-16"),
    ("tasks",),
    ("tasks", "gsm8k"),
    ("tasks", "arithmetic"),
    ("config", "schema"),
)


def rounding() -> dict[str, Any]:
    """What decides how the numbers of a run are rounded: the CPU's vector instructions and the version of jax."""
    vectors = sorted(flag for flag in cpu_flags() if flag.startswith(("avx", "amx", "fma", "sve")))
    return {"cpu": vectors, "jax": importlib.metadata.version("jax")}


def training(devices: int) -> dict[str, Any]:
    """Metrics, samples and weights of the demo's first steps in float32."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [*TRAINING, *(MANY if devices > 1 else ()), f"runs_dir={folder}", "name=golden"]
        environ = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        _podium("train", "configs/demo.yaml", "--plain", *(f"--set={each}" for each in settings), environ=environ)
        run = Path(folder) / "golden"
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
        _podium("export", str(run), f"{folder}/hf", "--dtype", "float32", environ=environ)
        weights = hashlib.sha256((Path(folder) / "hf" / "model.safetensors").read_bytes()).hexdigest()
    kept = [{name: x for name, x in line.items() if not name.startswith(MEASURED)} for line in metrics]
    return {"metrics": kept, "samples": samples, "weights": weights}


def plan(config: str, machine: str) -> dict[str, Any]:
    """The planner's answer, compiled anew, without versions and seconds of compilation."""
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": cache, **NO_SOURCE}),
    ):
        status, text, error = shown("plan", config, "--tpu", machine, "--json", "--no-suggest")
    if not text:
        return {"error": error, "status": status}
    answer = json.loads(text)
    answer.pop("versions", None)
    for phase in answer["phases"]:
        phase.pop("compile_s", None)
    return answer


def shown(*arguments: str) -> list[Any]:
    """Exit status, standard output and standard error of a command, at a fixed time and by a fixed user."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["podium", *arguments]),
        mock.patch("time.time", return_value=NOW),
        mock.patch.dict(os.environ, {"LOGNAME": USER, "COLUMNS": "120"}),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            cli.main()
            status: Any = 0
        except SystemExit as end:
            status = end.code
    return [status or 0, output.getvalue(), errors.getvalue()]


GOLDENS: dict[str, Callable[[], Any]] = {
    "training": lambda: {"rounding": rounding()} | {f"{devices} devices": training(devices) for devices in (1, 8)},
    "settings": lambda: {config: shown("config", "show", config)[1] for config in CONFIGS},
    "commands": lambda: {" ".join(command): shown(*command) for command in COMMANDS},
    "plans": lambda: {f"{config} {machine}": plan(config, machine) for config, machine in PLANS},
}


def recorded(name: str) -> Any:
    """What the file of this name holds."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def measured(name: str) -> Any:
    """The same, made by the code as it is now."""
    return json.loads(json.dumps(GOLDENS[name]()))


def differences(old: Any, new: Any, path: str = "", *, within: float = 0.0) -> Iterator[str]:
    """Every leaf that is not the same in two trees; numbers may differ by the share `within`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            yield from differences(old.get(key, "nothing"), new.get(key, "nothing"), f"{path}/{key}", within=within)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{path}/{index}", within=within)
    elif isinstance(old, float) and isinstance(new, float) and math.isclose(old, new, rel_tol=within):
        return
    elif old != new:
        yield f"{path}: {old!r:.300} -> {new!r:.300}"


def main() -> int:
    """Record, or compare; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare with what is recorded")
    parser.add_argument("names", nargs="*", default=list(GOLDENS), help=", ".join(GOLDENS))
    arguments, found = parser.parse_args(), 0
    for name in arguments.names:
        new = measured(name)
        if arguments.check:
            lines = list(differences(recorded(name), new, within=CODE if name == "plans" else 0.0))
            print(f"{name}: {f'{len(lines)} differ' if lines else 'equal'}", *lines, sep="\n  ", flush=True)
            found += len(lines)
        else:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{name}.json").write_text(json.dumps(new, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 1 if found else 0


def _podium(*arguments: str, environ: dict[str, str]) -> None:
    """Run a command in its own process, with its own devices. SystemExit with its output if it fails."""
    command = [sys.executable, "-m", "podium.cli", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 2):
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
