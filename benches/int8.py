"""Rollouts from int8 weights: decode steps and memory, compiled for TPUs that are not there, and how far they sample
from the trained policy.

    python -m benches.int8              (ten minutes of CPU time: some eight compilations, each kept, and demo steps)
    python -m benches.int8 --curves     (one to two hours of CPU time: nine demo runs of 20 steps)

`planned` are milliseconds of a decode step on v6e-8, by the roofline of the compiled program at the chip's published
bandwidths: Qwen2.5-3B replicated, 32 sequences on a chip, and Qwen2.5-7B in the layout that `auto` chooses for each
format, 256 sequences, which attend to 256 and to 512 tokens. `memory` are bytes of the rollout's weights over those in
bfloat16: of the layers, and with embedding and head, which are bfloat16 in all. `gap` is `policy/logprob_gap/mean` of
the demo's first steps: SmolLM2-135M on this CPU. `--curves` trains the demo for 20 steps, and compares the mean reward
of the last five with that of unrounded runs: means of three seeds may differ by twice the standard error.

Writes benches/results/int8-planned.json and int8-cpu.json (and with `--curves` int8-curves-cpu.json); exit status 1
where a bar is missed: 0.65 of the milliseconds for 3B, 0.75 for 7B at 256 tokens, 0.55 of the layers' memory, 0.03 nat.
"""

import dataclasses
import gzip
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from benches.decode_layouts import TPU, chosen, measure, run_config
from benches.record import ROOT, arguments, record, recorded, train_command, within_noise
from podium.accelerators import find_accelerator
from podium.config.lora import MATRICES
from podium.config.rollout_weights import RolloutWeights
from podium.models.params import LAYERS, rollout_dtype, rollout_specs
from podium.observe.metrics import GAP_METRIC, REWARD
from podium.plan.compiled.compile import compile_phases
from podium.plan.planner import make_jobs
from podium.plan.request.phase_sizes import Planned
from podium.run.roles import find_decoder

FORMATS: Sequence[RolloutWeights] = get_args(RolloutWeights)
ROUNDED = FORMATS[1:]
TOKENS = (256, 512)
CASES = {"3B": ("Qwen/Qwen2.5-3B-Instruct", "replicated"), "7B": ("Qwen/Qwen2.5-7B-Instruct", "auto")}
ROWS = 256
BARS = {"3B": 0.65, "7B": 0.75, "memory": 0.55, "gap": 0.03}
SIZES = {"int8": 1, "float32": 4}
CURVES = "int8-curves-cpu"
DEMO = ROOT / "configs" / "demo.yaml"
STEPS, CURVE_STEPS, LAST, SEEDS = 3, 20, 5, (0, 1, 2)


def planned(case: str) -> dict[str, dict[str, Any]]:
    """Milliseconds of a decode step by format and tokens, and over those of the unrounded format."""
    (model, layout), accelerator = CASES[case], find_accelerator(TPU)
    found: dict[str, dict[str, Any]] = {}
    for tokens in TOKENS:
        milliseconds: dict[str, float] = {}
        for weights in FORMATS:
            here = chosen(model, ROWS, accelerator, weights) if layout == "auto" else layout
            row = measure(model, ROWS, here, accelerator, weights, tokens)
            milliseconds[weights] = row["planned_ms"]
            ratio = round(row["planned_ms"] / milliseconds["dtype"], 3)
            found[f"{weights}, {tokens} tokens"] = {**row, "over_dtype": ratio}
            print(f"{case} {weights} {here}, {tokens} tokens: {row['planned_ms']} ms, {ratio} x", flush=True)
    return found


def weight_bytes(case: str, weights: RolloutWeights) -> tuple[int, int]:
    """Bytes of the layers' weights in the rollout, and of all."""
    model, _ = CASES[case]
    decoder = find_decoder(run_config(model, ROWS, "auto", weights))
    sizes = {
        name: SIZES.get(rollout_dtype(name, decoder, "bfloat16"), 2) * math.prod(spec.shape)
        for name, spec in rollout_specs(decoder, 1).items()
    }
    return sum(size for name, size in sizes.items() if name.startswith(LAYERS)), sum(sizes.values())


def memory(case: str) -> dict[str, float]:
    """Bytes over those in bfloat16."""
    rounded, plain = weight_bytes(case, "int8"), weight_bytes(case, "dtype")
    return {name: round(rounded[at] / plain[at], 3) for at, name in enumerate(("layers", "all"))}


def gap(weights: RolloutWeights) -> float:
    """Mean gap between trainer and sampler in the demo's first steps, in nat."""
    (values,) = run_demo(weights, 0, GAP_METRIC, steps=STEPS).values()
    return round(statistics.mean(values), 5)


def run_demo(weights: RolloutWeights, seed: int, metric: str, steps: int | None = None) -> dict[str, list[float]]:
    """Train the demo in a process of its own; returns a metric's values, by the metric's name."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"rollout.weights={weights}", f"seed={seed}", f"runs_dir={folder}", "name=run"]
        settings += ["eval.at_start=false", "eval.at_end=false", *([f"steps={steps}"] if steps else [])]
        process = subprocess.run(train_command(DEMO, *settings), cwd=ROOT, capture_output=True, text=True)
        if process.returncode:
            sys.exit(process.stdout[-2000:] + process.stderr[-3000:])
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {metric: [each[metric] for each in records if metric in each]}


def curves(results: Path) -> bool:
    """Train the demo for each format and seed that has not run; whether the last rewards of all formats are alike.

    Writes the results after each run, so that a bench that is broken off goes on.
    """
    runs: dict[str, dict[str, list[float]]] = recorded(CURVES, "runs", results) or {name: {} for name in FORMATS}
    for seed, weights in itertools.product(map(str, SEEDS), FORMATS):
        if seed not in runs[weights]:
            runs[weights][seed] = run_demo(weights, int(seed), REWARD, steps=CURVE_STEPS)[REWARD]
            print(f"{weights}, seed {seed}: {[round(each, 2) for each in runs[weights][seed]]}", flush=True)
            record(CURVES, {"steps": CURVE_STEPS, "runs": runs, **compared(runs)}, results)
    return all(compared(runs)["within_noise"].values())


def compared(runs: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """The mean rewards of each run's last steps, and whether those of a format with all seeds are as without it."""
    last = {name: [statistics.mean(each[-LAST:]) for each in found.values()] for name, found in runs.items()}
    whole = [name for name in ROUNDED if len(last[name]) == len(last["dtype"]) == len(SEEDS)]
    return {"last": last, "within_noise": {name: within_noise(last[name], last["dtype"]) for name in whole}}


def int8_products(case: str) -> int:
    """The products of int8 operands, summed in int32, in the loop over layers of the compiled program."""
    model, layout = CASES[case]
    config = run_config(model, ROWS, layout, "w8a8")
    with tempfile.TemporaryDirectory() as folder:
        programs = {f"decode:{ROWS}": 1.0}
        jobs = make_jobs(Planned.of(config, find_accelerator(TPU)), programs)
        compile_phases([dataclasses.replace(job, programs=Path(folder)) for job in jobs], folder=Path(folder))
        (text,) = (gzip.decompress(path.read_bytes()).decode() for path in Path(folder).glob("*.hlo.gz"))
    return len(re.findall(r"= s32\[[\d,]*\]\S* (?:convolution|dot)\(", text))


def main() -> None:
    """Compile, count and sample; or train."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--curves", action="store_true", help="train nine demo runs for 20 steps, and compare their rewards"
    )
    args = parser.parse_args()
    if args.curves:
        sys.exit(not curves(args.results))
    steps = {case: planned(case) for case in CASES}
    kept = {case: memory(case) for case in CASES}
    products = int8_products("3B")
    print(f"memory {kept}, products of int8 operands {products}", flush=True)
    first = f"{TOKENS[0]} tokens"
    met = {case: all(steps[case][f"{each}, {first}"]["over_dtype"] <= BARS[case] for each in ROUNDED) for case in CASES}
    met["products"] = products >= len(MATRICES)
    met["memory"] = all(each["layers"] <= BARS["memory"] for each in kept.values())
    result = {"tpu": TPU, "rows": ROWS, "steps": steps, "memory": kept, "int8_products_3b": products}
    record("int8-planned", {**result, "bars": BARS, "met": met}, args.results)
    gaps = {weights: gap(weights) for weights in FORMATS}
    met["gap"] = all(gaps[each] <= BARS["gap"] for each in ROUNDED)
    record("int8-cpu", {"gap": gaps, "bar": BARS["gap"], "met": met["gap"]}, args.results)
    print(f"gap {gaps}; met {met}")
    sys.exit(not all(met.values()))


if __name__ == "__main__":
    main()
