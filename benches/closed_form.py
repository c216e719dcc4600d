"""How far `podium plan --fast` is from the compiler, in memory: random configurations, each compiled.

    python -m benches.closed_form          (an hour on two cores the first time; each program is kept)
    python -m benches.closed_form --count 4
    python -m benches.closed_form --at-limit         (needs podium-rl[plan-gpu] too)

Models, machines, meshes, batches, recipes and lengths are drawn with a fixed seed; a draw counts where the closed form
needs 0.4 to 1.4 times the memory, since elsewhere the answer is plain. Of each, the programs that may bind are
compiled: those of which the closed form says at least three quarters of the worst. Writes
benches/results/closed-form-planned.json and its part of docs/planner-measurements.md; exit status 1 where a bar is
missed.

With --at-limit 60 others, where the closed form is within a tenth of the memory, every third on GPUs: all presets,
every mesh (tp and sp too), up to 64k tokens, adapters on each base, each remat, row groups, moments on the host,
attention as a kernel and without; any that it says fits and the compiler says does not counts, however little is
missing. The seconds of the compiled programs are compared too: they should lie in the closed form's range. An
interrupted bench goes on where it was. The result of fewer than 60, `--count 6`, is closed-form-limit-some. Whoever
mends the closed form draws with another `--seed` than the one that judges it.
"""

import math
import random
import statistics
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benches.record import MEASUREMENTS, ROOT, arguments, record, write_section
from podium.accelerators import GIB, Accelerator, find_accelerator
from podium.config.schema import Config
from podium.models.presets import PRESETS
from podium.plan.calibration import load_chip
from podium.plan.closed_form.estimate import PhaseEstimate, estimate
from podium.plan.compiled.compile import compile_phases
from podium.plan.compiled.compile_worker import CompiledPhase
from podium.plan.planned_device import Device
from podium.plan.planner import is_compiled, make_jobs
from podium.plan.request.phase_sizes import Planned, RunSizes
from podium.plan.request.step_calls import Call, packed_run, step_calls
from podium.plan.request.workload import simulate_rollout
from podium.plan.result import Seconds, judge, total
from podium.run.divisible import check_divisible
from podium.run.roles import find_decoder
from podium.settings import load_settings

COUNT = 40
SEEN = 20
"""Configurations that were known when the closed form was last corrected; the later ones were not."""
NEAR = 0.4, 1.4
"""Share of the memory that the closed form must give for a configuration to be compiled."""
MAY_BIND = 0.75
"""Share of the worst phase's memory from which on a phase is compiled too."""
PROGRAMS = ("update", "decode", "prefill", "score")
"""Phases that make large arrays; what the others hold, these hold too."""
BARS = {"mean_error": 0.10, "false_fits": 0}
LIMIT_COUNT, LIMIT_NEAR, LIMIT_SEED = 60, (0.9, 1.1), 23
LIMIT_BARS = {"mean_error": 0.04, "worst_error": 0.10, "false_fits": 0, "seconds_outside": 0.10}
SHORT = 2048
"""Most new tokens of a run that is planned with GSM8K's lengths; longer ones with completions of this many."""
MODELS = (
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.2-1B-Instruct",
)
MACHINES = ("v6e-1", "v6e-4", "v6e-8", "v6e-16", "v5p-8", "v5p-16", "v5litepod-8", "v5litepod-16", "v4-8", "v4-16")
CHOICES: Mapping[str, Sequence[Any]] = {
    "group_size": (8, 16),
    "rollout.max_prompt_tokens": (128, 256, 512),
    "rollout.max_new_tokens": (256, 512, 1024, 2048),
    "train.rows_per_device": (1, 2, 4, 8, 16),
    "train.remat": ("layer", "layer", "products", "none"),
    "train.head_chunk_tokens": (512, 1024, 4096),
    "train.packing": ("shared_prompts", "sequences", "none"),
    "train.optimizer.name": ("adamw", "adamw", "lion", "sgd"),
    "algorithm.kl": ("none", "none", "k3"),
}


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
SHORT_NAMES = {"train.offload_optimizer": "moments on the host", "train.layer_chunk_tokens": "row groups"}
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
        base = ROOT / "configs" / "gsm8k.yaml"
        try:
            config = load_settings([base], [f"{key}={value}" for key, value in settings.items()], {}).config
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


def draws(count: int) -> Iterator[tuple[dict[str, Any], Config, Accelerator]]:
    """Draw `count` usable cases: settings, the config they make, and the machine."""
    source = random.Random(1)
    while count:
        accelerator = find_accelerator(source.choice(MACHINES))
        settings = {"model": source.choice(MODELS), **{key: source.choice(of) for key, of in CHOICES.items()}}
        devices = accelerator.devices
        settings["mesh"] = source.choice(["auto", "auto", f"fsdp:{devices // 2},tp:2"]) if devices > 1 else "auto"
        settings["rollout.slots"] = devices * source.choice((8, 16, 32, 64))
        settings["rollout.prefill_rows"] = devices * source.choice((1, 2, 4, 8))
        settings["prompts_per_step"] = devices * 2
        if settings["algorithm.kl"] != "none":
            settings["algorithm.kl_coef"] = 0.01
        base = ROOT / "configs" / "gsm8k.yaml"
        config = load_settings([base], [f"{key}={value}" for key, value in settings.items()], {}).config
        low, high = (share * accelerator.hbm_bytes for share in NEAR)
        if low <= max(each.total for each in estimates(config, accelerator)) <= high:
            yield settings, config, accelerator
            count -= 1


def estimates(config: Config, accelerator: Accelerator) -> list[PhaseEstimate]:
    """Every phase of a run by the closed form."""
    return estimate(Planned.of(config, accelerator).sizes)


def ask(settings: Mapping[str, Any], config: Config, accelerator: Accelerator) -> dict[str, Any]:
    """One configuration: bytes and seconds by the closed form and by the compiler."""
    decoder = find_decoder(config)
    run = Planned.of(config, accelerator, decoder).sizes
    drawn = run.draw_lengths(lengths := "gsm8k" if run.rollout.max_new_tokens <= SHORT else f"fixed:{SHORT}")
    workload = simulate_rollout(drawn, run.rollout, shards=run.rollout_shards, overlap=True)
    run, micro_batches = packed_run(run, drawn)
    forms = {each.name: each.total for each in estimate(run)}
    worst = max(forms.values())
    sized = {"prefill": f"prefill:{max(run.buckets)}", "decode": f"decode:{run.rollout.slots}"}
    names = [sized.get(name, name) for name in PROGRAMS if forms.get(name, 0) >= MAY_BIND * worst]
    calls = [call for call in step_calls(run, workload, micro_batches) if call.program in names]
    compiled = compile_phases(
        make_jobs(Planned.of(config, accelerator, decoder), {call.program: call.blocks for call in calls})
    )
    code = sum(each.memory.code for each in compiled.values())
    found = {call.phase: compiled[call.program].device_bytes + code for call in calls}
    truth = max(found.values())
    says = judge([worst], accelerator.hbm_bytes, compiled=False)
    refused = any(each.refused for each in compiled.values())
    estimated, measured = seconds(calls, compiled, run, accelerator)
    return {
        "tpu": accelerator.name,
        "settings": dict(settings) | {"lengths": lengths},
        "closed_form_gib": {call.phase: round(forms[call.phase] / GIB, 3) for call in calls},
        "compiled_gib": {name: round(size / GIB, 3) for name, size in found.items()},
        "hbm_gib": round(accelerator.hbm_bytes / GIB, 3),
        "error": round(worst / truth - 1, 4),
        "verdicts": [says, judge([truth], accelerator.hbm_bytes)],
        "false_fit": says == "fits" and (refused or truth > accelerator.hbm_bytes),
        "closed_form_s": [round(each, 4) for each in (estimated.low, estimated.value, estimated.high)],
        "compiled_s": round(measured.value, 4),
        "within_range": estimated.low <= measured.value <= estimated.high,
    }


def seconds(
    calls: Sequence[Call], compiled: Mapping[str, CompiledPhase], run: RunSizes, accelerator: Accelerator
) -> tuple[Seconds, Seconds]:
    """Seconds of the calls by the closed form, and of their compiled programs."""
    device = Device(accelerator, load_chip(accelerator.generation))
    estimated = [device.estimated_phase([call], run) for call in calls]
    measured = [device.compiled_phase([call], compiled, run) for call in calls]
    first, second = (total(each.seconds for each in phases if each.seconds) for phases in (estimated, measured))
    return first, second


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of all rows."""
    errors = [abs(row["error"]) for row in rows]
    return {
        "mean_error": round(statistics.mean(errors), 4),
        "mean_error_of_others": round(statistics.mean(errors[SEEN:]), 4) if errors[SEEN:] else math.nan,
        "worst_error": round(max(errors), 4),
        "false_fits": sum(row["false_fit"] for row in rows),
        "same_verdict": sum(len(set(row["verdicts"])) == 1 for row in rows),
        "seconds_outside": round(statistics.mean(not row["within_range"] for row in rows), 4),
    }


def lines(rows: Sequence[Mapping[str, Any]], figures: Mapping[str, float], seen: int) -> Iterator[str]:
    """The table for docs/planner-measurements.md; `seen` rows were used to adjust the closed form."""
    summary = (
        f"{len(rows)} configurations drawn at random: {figures['mean_error']:.1%} off on average,"
        f" {figures['worst_error']:.1%} at worst; {figures['false_fits']:.0f} predicted to fit where the compiler"
        f" disagrees; the same verdict for {figures['same_verdict']:.0f}; the compiled programs' seconds in the range"
        f" of the closed form for {1 - figures['seconds_outside']:.0%}."
    )
    if seen:
        summary += (
            f" The first {seen} were used when the closed form was last adjusted; the others are"
            f" {figures['mean_error_of_others']:.1%} off on average."
        )
    yield from textwrap.wrap(summary, 118)
    yield from (
        "",
        "| | machine | model, mesh | rows, tokens | remat, attention, more | largest | closed form, GiB | compiled"
        " | error | seconds (range) | compiled |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    )
    for number, row in enumerate(rows, 1):
        settings = row["settings"]
        binds = max(row["compiled_gib"], key=row["compiled_gib"].get)
        form, truth = max(row["closed_form_gib"].values()), max(row["compiled_gib"].values())
        tokens = settings["rollout.max_prompt_tokens"] + settings["rollout.max_new_tokens"]
        run = f"{row['tpu']} | {settings['model'].partition('/')[2]}, {settings['mesh']}"
        run += f" | {settings['train.rows_per_device']} x {tokens}"
        run += f" | {settings['train.remat']}, {settings.get('train.attention', 'auto')}{_more(settings)}"
        low, value, high = (f"{each:.3g}" for each in row["closed_form_s"])
        memory = f"{binds} | {form:.1f} | {truth:.1f} of {row['hbm_gib']:.1f} | {row['error']:+.1%}"
        yield f"| {number} | {run} | {memory} | {value} ({low}-{high}) | {row['compiled_s']:.3g} |"


def _more(settings: Mapping[str, Any]) -> str:
    """What else decides about an update's memory."""
    more = "".join(f", {name}" for key, name in SHORT_NAMES.items() if settings.get(key))
    return f"{more}, LoRA {settings['lora.rank']} {settings['lora.base']}" if "lora.rank" in settings else more


def main() -> None:
    """Prints every configuration, then the figures; exit status 1 where a bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, help=f"of configurations; unset: {COUNT}, or {LIMIT_COUNT}")
    parser.add_argument("--at-limit", action="store_true", help="draw where the memory ends")
    parser.add_argument("--seed", type=int, default=LIMIT_SEED, help="of the draws at the limit")
    args = parser.parse_args()
    count = args.count or (LIMIT_COUNT if args.at_limit else COUNT)
    name, bars = ("closed-form-limit", LIMIT_BARS) if args.at_limit else ("closed-form", BARS)
    name += "-some" if args.at_limit and count < LIMIT_COUNT else ""
    known = {"bars": bars, "asked": count} | ({"seed": args.seed} if args.at_limit else {})
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    drawn = limit_draws(count, args.seed) if args.at_limit else draws(count)
    for number, (settings, config, accelerator) in enumerate(drawn, 1):
        rows.append(row := ask(settings, config, accelerator))
        print(f"{number}: {row['tpu']} {settings}", flush=True)
        print(f"   {row['closed_form_gib']} compiled {row['compiled_gib']} {row['error']:+.1%}", flush=True)
        figures = summary(rows)
        record(f"{name}-planned", {**known, "figures": figures, "rows": rows}, args.results)
        if args.count is None or args.at_limit:
            table = list(lines(rows, figures, 0 if args.at_limit else SEEN))
            write_section(MEASUREMENTS, name, table, args.results)
    print(figures)
    sys.exit(any(figures[name] > bar for name, bar in bars.items()))


if __name__ == "__main__":
    main()
