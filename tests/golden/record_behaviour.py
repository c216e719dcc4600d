"""Records what a user can see of Podium: a run's numbers, plans, settings, commands. A restructuring must reproduce it.

    python tests/golden/record_behaviour.py          # writes tests/golden/behaviour/*.json
    python tests/golden/record_behaviour.py --check  # compares, exactly, and lists what differs

Numbers of a run are equal to the last bit on one machine; another CPU may round otherwise. Plans are the compiler's:
they need libtpu, and minutes the first time.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "behaviour"
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("**/*.yaml"))
STEPS = 3
TRAINING = (
    f"steps={STEPS}", "train.dtype=float32", "rollout.dtype=float32", "eval.at_start=false", "eval.at_end=false",
    "eval.every_steps=0", "metrics.samples_every=1",
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


def plan(config: str, machine: str, *, fast: bool) -> dict[str, Any]:
    """What the planner says, but for versions and how long it took."""
    done = _podium(
        "plan", config, "--tpu", machine, "--json", "--no-suggest", *(["--fast"] if fast else []), check=False
    )
    if not done.stdout:
        return {"error": done.stderr}
    found = json.loads(done.stdout)
    found.pop("versions", None)
    for phase in found["phases"]:
        phase.pop("compile_s", None)
    return found


def show(config: str) -> str:
    """The settings of a config with where they come from."""
    return _podium("config", "show", config).stdout


def told(command: tuple[str, ...]) -> list[Any]:
    """Exit status, and what a command prints."""
    done = _podium(*command, check=False)
    return [done.returncode, done.stdout, done.stderr]


GOLDENS: dict[str, Callable[[], Any]] = {
    "training": lambda: {f"{devices} devices": training(devices) for devices in (1, 8)},
    "settings": lambda: {config: show(config) for config in CONFIGS},
    "commands": lambda: {" ".join(command): told(command) for command in COMMANDS},
    "plans_fast": lambda: {
        f"{config} {machine}": plan(config, machine, fast=True)
        for config in CONFIGS if "seeds" not in config for machine in ("v4-16", "v6e-8", "v5p-64", "h100-8")
    },
    "plans": lambda: {f"{config} {machine}": plan(config, machine, fast=False) for config, machine in PLANS},
}  # fmt: skip


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Every leaf that is not the same in two trees."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            yield from differences(old.get(key, "nothing"), new.get(key, "nothing"), f"{path}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{path}/{index}")
    elif old != new:
        yield f"{path}: {old!r:.300} -> {new!r:.300}"


def main() -> int:
    """Record, or compare; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare with what is recorded")
    parser.add_argument("names", nargs="*", default=list(GOLDENS), help=", ".join(GOLDENS))
    arguments, found = parser.parse_args(), 0
    for name in arguments.names:
        path, new = FOLDER / f"{name}.json", json.loads(json.dumps(GOLDENS[name]()))
        if arguments.check:
            lines = list(differences(json.loads(path.read_text()), new))
            print(f"{name}: {f'{len(lines)} differ' if lines else 'equal'}", *lines, sep="\n  ", flush=True)
            found += len(lines)
        else:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
    return 1 if found else 0


def _podium(*arguments: str, environ: dict[str, str] | None = None, check: bool = True):
    command = [sys.executable, "-m", "podium.cli", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environ or os.environ, capture_output=True, text=True, check=False)
    if check and done.returncode not in (0, 2):
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done


if __name__ == "__main__":
    sys.exit(main())
