"""docs/metrics.md, made from the list of metrics: `python -m tools.metrics_page > docs/metrics.md`."""

import re
from pathlib import Path

from podium.observe.metric_table import METRICS, Metric
from podium.observe.run_dir import MAY_CHANGE

PACKAGE = Path(__file__).parents[1] / "podium"

INTRODUCTION = """\
# Metrics

Every run writes `metrics.jsonl`: `{"step": 3, "train-reward/total/mean": 0.41, ...}`, one line per step, and one more
per evaluation. `step` counts finished steps: the line of step 3 describes step 3, the evaluation of step 3 uses the
weights after it, and the evaluation of step 0 uses the initial model. A value that is not finite is `null`. All numbers
are global: over all hosts and devices. Weights & Biases, TensorBoard and trackio get the same names at the same steps
(config section `metrics`); if one fails, the run says so once and continues.

A run that is continued from step k drops the lines after k and writes them again. W&B accepts each step
only once, so steps that were trained twice keep their first values there.

`<task>` is a task's name, `<part>` a part of the reward (`correct`, `format`, ...). `{mean,max}` stands for two
metrics. The last column is where Podium measures it.

This page is generated from `podium/observe/metric_table.py` by `python -m tools.metrics_page > docs/metrics.md`.
"""

RECORDS = f"""
## Other files of a run

| file | a line, or the object |
|---|---|
| `samples.jsonl` | `step`, `split` (train, eval), `task`, `prompt` (its id), `question`, `answer`, `completions`: \
list of `text`, `reward`, `parts`, `finish_reason` (stop, length), `tokens`, `advantage` (of groups in the update), \
and for the first group of a step `pieces` (the text of each token) with `logprobs` (when it was sampled). Every \
`metrics.samples_every`-th group of the run, and the first questions of each evaluation. |
| `lengths.jsonl` | `step`, `prompt_lengths` (N), `completion_lengths` (N x G), in tokens. |
| `summary.json` | `name`, `model`, `steps`, `steps_without_update` (nothing to train on), `wall_s`, `cpu_s`, \
`reward.first`, `reward.last`, `eval.initial.{{step,accuracy}}`, `eval.final.{{step,accuracy}}` (null if there was no \
such evaluation), `versions`, `commit` (of the checkout; null for an installed package). |
| `config.yaml` | The resolved config. |
| `machine.json` | `text`: the devices that the run was last trained on. |
| `shapes.json` | `own` and `shapes`: rows, over all devices, and tokens of the config's micro-batches and of the \
others that steps may take; `from_step`: the number of steps done after which they do. |
| `curve.svg` | Reward of each step and accuracy of each evaluation, written at the end. |

A run can only be continued with its own config, except for these keys and sections, which do not change what is
learned (beyond rounding from a different order of sums); the stored config then takes the new values: \
{", ".join(f"`{key}`" for key in MAY_CHANGE)}, and `steps` while `train.optimizer.schedule` is constant.
"""

SEED = (
    ("time/train/rollout_generate_s", "time/train/rollout_s", "one pass per step"),
    ("time/train/rollout_sync_s", "time/train/sync_s", "once per step, after the update"),
    ("time/train/rollout_flush_s, time/train/rollout_release_s", "none", "the engine keeps its cache"),
    ("time/train/shard_s", "time/train/batch_s", "packing is part of it"),
    ("time/train/step_s", "the same", "it now ends with the new weights in the engine (was: before the next rollout)"),
    ("train-other/loss", "the same", "of the whole batch (was: of the last micro-batch)"),
    ("train-other/entropy", "policy/entropy", "over all tokens in the loss (was: sequence means, last micro-batch)"),
    ("train-other/batch_local", "none", "numbers do not depend on hosts"),
    (
        "train-reward/func/{reward_correct,reward_format,tag_count_reward}/mean",
        "train-reward/func/{correct,format,tags}/mean",
        "before its weight (was: weighted), so that weights can be compared",
    ),
    ("train-ppo/*", "critic/*", "of the step, before its first update"),
    ("tpu/mem/*", "memory/train/*", "the largest over devices, in GiB, on GPUs too"),
    ("eval/reward/*, eval_full/*/mean_per_completion", "eval/<task>/avg_at_k", "by task"),
    ("eval_full/accuracy, eval/accuracy/accuracy", "eval/<task>/accuracy", "unweighted, by task, with its interval"),
    ("eval_full/accuracy/pass_at_1, eval/accuracy/pass_at_1", "eval/<task>/pass_at_k", "k is eval.samples"),
    ("eval_full/questions_global", "eval/<task>/questions", "by task"),
    ("eval_full/{enabled,split,epoch,samples_per_question}", "config.yaml", "settings are not metrics"),
    ("time/eval/rollout_*_s, time/eval_full/*", "time/eval/{rollout_s,reward_s,step_s}", "one kind of evaluation"),
)
"""Name in the seed, ours, and why."""


def metrics_page() -> str:
    """The text of docs/metrics.md."""
    lines = [INTRODUCTION]
    for section, entries in METRICS.items():
        lines += [f"## {section}\n", "| name | unit | definition | computed in |", "|---|---|---|---|"]
        lines += [_row(metric) for metric in entries]
        lines.append("")
    lines += ["## Names in the seed\n", "Names that are not listed here have not changed, nor have their meanings.\n"]
    lines += ["| there | here | why |", "|---|---|---|"]
    lines += [f"| `{there}` | {_code(here)} | {why} |" for there, here, why in SEED]
    return "\n".join(lines) + "\n" + RECORDS


SOURCES = {
    "completions": "podium/train/recorder.py",
    "rolled": "podium/rollout/engine.py, podium/sampling/sampler.py",
    "batched": "podium/train/trainer.py",
    "updated": "podium/train/trainer.py, podium/train/step.py",
    "step_s": "podium/train/recorder.py",
    "mean_step_s": "podium/train/recorder.py",
    "cpu_s": "podium/train/recorder.py",
    "sync_s": "podium/sampling/sampler.py",
    "checkpoint_s": "podium/train/checkpoints/checkpoint.py",
    "carried": "podium/train/recorder.py",
    "memory": "podium/train/recorder.py",
    "host_memory": "podium/train/recorder.py",
    "conversations": "podium/train/recorder.py, podium/sampling/conversations/conversations.py",
    "levels": "podium/train/recorder.py",
}
"""Who measures each part of `podium.observe.stats.StepStats`."""


def find_sources(metric: Metric) -> list[str]:
    """The modules of Podium that compute this metric.

    A reader of a step's statistics tells by the parts that it reads; what has no reader is where its name is written.
    """
    if metric.evaluation or metric.task:
        return ["podium/train/evaluate.py"]
    if metric.step:
        parts = [part for part in metric.step.__code__.co_names if part in SOURCES]
        return list(dict.fromkeys(path for part in parts for path in SOURCES[part].split(", ")))
    written = re.compile(f"[\"']{re.escape(metric.name)}[\"']")
    files = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "metric_table.py")
    return [str(path.relative_to(PACKAGE.parent)) for path in files if written.search(path.read_text())]


def _row(metric: Metric) -> str:
    parts = f"/{{{','.join(metric.parts)}}}" if metric.parts else ""
    definition = metric.definition.replace("|", "\\|")
    sources = ", ".join(f"`{source}`" for source in find_sources(metric))
    return f"| `{metric.name}{parts}` | {metric.unit} | {definition} | {sources} |"


def _code(name: str) -> str:
    return name if name in ("none", "the same") else f"`{name}`"


if __name__ == "__main__":
    print(metrics_page(), end="")
