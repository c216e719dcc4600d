"""How far the closed form is from the compiler, in memory and seconds: recorded programs, and fresh draws.

    python -m benches.closed_form                          (a minute of CPU; nothing is compiled)
    python -m benches.closed_form --draw 1901 --count 12   (an hour of two cores; needs podium-rl[plan-gpu] too)

The compiled figures are recorded ones: the plans of tests/golden, whose seconds are compared too, and the memory of two
files of random configurations. Writes benches/results/closed-form-planned.json and its part of
docs/planner-measurements.md.

With --draw SEED new configurations are drawn where the closed form is within a tenth of the memory, every third on
GPUs: all presets, every mesh (tp and sp too), up to 64k tokens, adapters on each base, each remat, row groups, moments
on the host, attention as a kernel and without. Of each, the programs that may bind are compiled: those of which the
closed form says at least three quarters of the worst. They replace benches/results/closed-form-limit-some-planned.json,
which this bench and `benches.traced` read. Use a seed for which no figures have been seen yet.
"""

import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benches.record import MEASUREMENTS, RESULTS, ROOT, arguments, record, recorded, write_section
from podium.accelerators import GIB, Accelerator, find_accelerator
from podium.config.schema import Config
from podium.models.presets import PRESETS
from podium.plan.closed_form.estimate import PhaseEstimate, estimate
from podium.plan.compiled.compile import compile_phases
from podium.plan.planner import is_compiled, make_jobs, make_plan
from podium.plan.request.phase_sizes import Planned
from podium.run.divisible import check_divisible
from podium.settings import load_settings

NAME, LIMIT, DRAWN = "closed-form", "closed-form-limit-planned", "closed-form-limit-some-planned"
LIMIT_ROWS = (LIMIT, DRAWN)
"""Files of random configurations at the limit: sixty of 23 November with models of one kind of layer, and the last."""
PLANS = ROOT / "tests" / "golden" / "behaviour" / "plans.json"
PATTERNS = ("gemma-3", "Qwen3.5", "gpt-oss")
"""Parts of the names of models whose layers are of several kinds."""
MAY_BIND = 0.75
"""Share of the worst phase's memory from which on a phase is compiled too."""
PROGRAMS = ("update", "decode", "prefill", "score")
"""Phases that make large arrays; what the others hold, these hold too."""
COUNT, LIMIT_NEAR = 12, (0.9, 1.1)
LIMIT_MACHINES = {
    "tpu": (
        "v6e-1",
        "v6e-4",
        "v6e-8",
        "v6e-16",
        "v5p-8",
        "v5p-16",
        "v5litepod-1",
        "v5litepod-8",
        "v5litepod-16",
        "v4-8",
    ),
    "gpu": ("h100-1", "h100-8", "h200-8", "a100-80-8", "l4-1", "l40s-8", "rtx4090-1", "b200-8"),
}
NEW_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65024)
LIMIT_CHOICES: Mapping[str, Sequence[Any]] = {
    "group_size": (8, 16),
    "rollout.max_prompt_tokens": (128, 256, 512),
    "rollout.in_flight": (1, 1, 2),
    "train.head_chunk_tokens": (512, 1024, 4096),
    "train.packing": ("shared_prompts", "sequences", "none"),
    "train.attention": ("auto", "auto", "auto", "auto", "blocks", "reference"),
    "train.optimizer.name": ("adamw", "adamw", "lion", "sgd"),
    "train.optimizer.moments": ("float32", "float32", "bfloat16"),
    "train.offload_optimizer": (False, False, True),
    "algorithm.kl": ("none", "none", "k3"),
}
RANKS = (None, None, 8, 32, 64)
BASES = ("bfloat16", "bfloat16", "int8", "nf4")
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 19, 24, 32, 40, 57)
LENGTH_OF_QUADRATIC = 4096
"""Longest rows with the reference attention, whose scores grow with their square."""


def limit_draws(count: int, seed: int) -> Iterator[tuple[dict[str, Any], Config, Accelerator]]:
    """Settings at the limit, the config they make, and the machine: a third of them GPUs."""
    source = random.Random(seed)
    for number in range(count):
        platform = "gpu" if number % 3 == 0 else "tpu"
        while (found := _at_limit(source, platform)) is None:
            pass
        yield found


def _at_limit(source: random.Random, platform: str) -> tuple[dict[str, Any], Config, Accelerator] | None:
    """One draw, with a number of rows that brings it to the limit; None if none does, or the settings exclude another.

    Drawn are a preset, a machine of the platform, its mesh with tp and sp, lengths, what a layer recomputes, adapters,
    and how the rollout is laid out.
    """
    accelerator = find_accelerator(source.choice(LIMIT_MACHINES[platform]))
    devices = accelerator.devices
    settings: dict[str, Any] = {"model": source.choice(list(PRESETS))}
    settings |= {key: source.choice(of) for key, of in LIMIT_CHOICES.items()}
    settings["rollout.max_new_tokens"] = source.choice(NEW_TOKENS)
    settings["train.remat"] = source.choice(("layer", "products", "none", "offload"))
    if (rank := source.choice(RANKS)) is not None:
        settings |= {"lora.rank": rank, "lora.base": source.choice(BASES)}
        settings |= {"lora.rollout": source.choice(("auto", "auto", "merged"))}
    tp, sp = (source.choice([size for size in (1, 1, 1, 2, 4) if size <= devices]) for _ in range(2))
    settings["mesh"] = f"fsdp:{devices // (tp * sp)},sp:{sp},tp:{tp}"
    settings["rollout.slots"] = devices * source.choice((4, 8, 16, 32))
    settings["rollout.prefill_rows"] = devices * source.choice((1, 2, 4))
    settings["prompts_per_step"] = devices * 4
    if settings["algorithm.kl"] != "none":
        settings["algorithm.kl_coef"] = 0.01
    longest = settings["rollout.max_prompt_tokens"] + settings["rollout.max_new_tokens"]
    if settings["train.attention"] == "reference" and longest > LENGTH_OF_QUADRATIC:
        return None
    grouped, between = source.random() < 0.3, source.sample(ROWS[1:-1], len(ROWS) - 2)
    low, high = (share * accelerator.hbm_bytes for share in LIMIT_NEAR)
    for rows in (ROWS[0], ROWS[-1], *between):
        settings["train.rows_per_device"] = rows
        if grouped and rows > 1:
            settings["train.layer_chunk_tokens"] = -(-rows // 4) * longest
        try:
            config = gsm8k(settings)
            run = Planned.of(config, accelerator).sizes
            check_divisible(run.spec)
            worst = max(each.total for each in estimates(config, accelerator))
        except ValueError:  # settings that exclude each other, or heads that do not divide over tp
            return None
        if low <= worst <= high:
            return (dict(settings), config, accelerator) if is_compiled(run) else None
        if (rows == ROWS[0] and worst > high) or (rows == ROWS[-1] and worst < low):
            return None
    return None


def estimates(config: Config, accelerator: Accelerator) -> list[PhaseEstimate]:
    """Every phase of a run by the closed form."""
    return estimate(Planned.of(config, accelerator).sizes)


def ask(settings: Mapping[str, Any], config: Config, accelerator: Accelerator) -> dict[str, Any]:
    """One configuration by its compiler."""
    planned = Planned.of(config, accelerator)
    run = planned.sizes
    forms = {each.name: each.total for each in estimate(run)}
    sized = {"prefill": f"prefill:{max(run.buckets)}", "decode": f"decode:{run.rollout.slots}"}
    names = {sized.get(name, name): name for name in PROGRAMS if forms.get(name, 0) >= MAY_BIND * max(forms.values())}
    compiled = compile_phases(make_jobs(planned, dict.fromkeys(names, 1.0)))
    code = sum(each.memory.code for each in compiled.values())
    return {
        "tpu": accelerator.name,
        "settings": dict(settings),
        "compiled_gib": {phase: round((compiled[name].device_bytes + code) / GIB, 3) for name, phase in names.items()},
        "hbm_gib": round(accelerator.hbm_bytes / GIB, 3),
        "refused": any(each.refused for each in compiled.values()),
    }


def limit_rows(name: str) -> Iterator[dict[str, Any]]:
    """The programs of a file of random configurations, compiled and by the closed form."""
    for row in recorded(name, "rows"):
        settings = {key: value for key, value in row["settings"].items() if key != "lengths"}
        config = gsm8k(settings)
        forms = {each.name: each.total / GIB for each in estimates(config, find_accelerator(row["tpu"]))}
        for phase, compiled in row["compiled_gib"].items():
            gib = (forms[phase], compiled, row["hbm_gib"])
            yield _row(row["tpu"], config.model, phase, gib) | {"file": name, "settings": settings}


def golden_rows() -> Iterator[dict[str, Any]]:
    """The programs of the recorded plans, compiled and by the closed form."""
    for name, golden in json.loads(PLANS.read_text()).items():
        path, machine = name.split()
        config = load_settings([ROOT / path], [], {}).config
        plan = make_plan(Planned.of(config, find_accelerator(machine)), by="closed_form")
        for phase in golden["phases"]:
            form = plan.find_phase(phase["name"])
            if not phase["compiled"] or form is None or form.seconds is None or phase["name"] == "copy":
                continue
            compiled = phase["gib"] - phase["parts_gib"]["code"]
            found = _row(machine, config.model, phase["name"], (form.bytes / GIB, compiled, plan.hbm_bytes / GIB))
            found |= {"file": "plans", "config": path}
            if form.seconds.value and (took := phase["seconds"]["value"]):
                own = form.seconds
                found |= {"closed_form_s": [own.low, own.value, own.high], "compiled_s": took}
                found["ratio"] = round(took / own.value, 3)
            yield found


def gsm8k(settings: Mapping[str, Any]) -> Config:
    """The config of settings over those of configs/gsm8k.yaml."""
    texts = [f"{key}={value}" for key, value in settings.items()]
    return load_settings([ROOT / "configs" / "gsm8k.yaml"], texts, {}).config


def _row(machine: str, model: str, phase: str, gib: tuple[float, float, float]) -> dict[str, Any]:
    """One program; GiB by the closed form, by the compiler, and of the device."""
    form, compiled, hbm = (round(each, 3) for each in gib)
    about = {"machine": machine, "model": model, "program": phase, "closed_form_gib": form, "compiled_gib": compiled}
    return about | {"hbm_gib": hbm, "error": round(form / compiled - 1, 4)}


def has_pattern(model: str) -> bool:
    """Whether a model's layers are of several kinds."""
    return any(part in model for part in PATTERNS)


def kind(row: Mapping[str, Any]) -> str:
    """The group of a row in the figures."""
    if row["program"] != "update":
        return row["program"]
    layers = "patterns" if has_pattern(row["model"]) else "one kind of layer"
    return f"update, {'TPU' if row['machine'][0] == 'v' else 'GPU'}, {layers}"


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The errors of some rows, and the ratios of compiled seconds to the closed form's where these are known."""
    errors, ratios = [row["error"] for row in rows], sorted(row["ratio"] for row in rows if "ratio" in row)
    return {
        "programs": len(rows),
        "mean": round(statistics.mean(map(abs, errors)), 4),
        "lowest": min(errors),
        "highest": max(errors),
        "false_fits": sum(row["closed_form_gib"] <= row["hbm_gib"] < row["compiled_gib"] for row in rows),
        "seconds": [ratios[0], round(statistics.median(ratios), 3), ratios[-1]] if ratios else None,
    }


def table(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The figures for docs/planner-measurements.md."""
    yield "| program | number | memory: mean error | lowest | highest | false fits | compiled seconds over its own |"
    yield "|---|---|---|---|---|---|---|"
    for name, each in found.items():
        errors = f"{each['mean']:.1%} | {each['lowest']:+.1%} | {each['highest']:+.1%} | {each['false_fits']}"
        low, middle, high = each["seconds"] or (0, 0, 0)
        took = f"{low:.2f} to {high:.2f}, median {middle:.2f}" if each["seconds"] else "-"
        yield f"| {name} | {each['programs']} | {errors} | {took} |"


def draw(seed: int, count: int) -> None:
    """Compile new configurations, and write their figures after each."""
    rows: list[dict[str, Any]] = []
    for number, (settings, config, accelerator) in enumerate(limit_draws(count, seed), 1):
        rows.append(row := ask(settings, config, accelerator))
        print(f"{number}: {row['tpu']} {settings} {row['compiled_gib']}", flush=True)
        record(DRAWN, {"seed": seed, "rows": rows}, RESULTS)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--draw", type=int, metavar="SEED", help="compile configurations that this seed draws")
    parser.add_argument("--count", type=int, default=COUNT, help="configurations to draw")
    args = parser.parse_args()
    if args.draw is not None:
        draw(args.draw, args.count)
    rows = [*golden_rows(), *(row for name in LIMIT_ROWS for row in limit_rows(name))]
    groups = {name: [row for row in rows if kind(row) == name] for name in sorted({kind(row) for row in rows})}
    found = {name: figures(each) for name, each in groups.items()}
    record(f"{NAME}-planned", {"figures": found, "rows": rows}, args.results)
    write_section(MEASUREMENTS, NAME, list(table(found)), args.results)
    print(*table(found), sep="\n")


if __name__ == "__main__":
    main()
