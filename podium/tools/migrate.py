"""A YAML file of the former system, as one of ours, with a list of what changed and of what has no counterpart.

Settings keep what they did there, not what they were called: defaults that differ are written out, and so are numbers
that were fixed in its code. The former system's own rules (aliases must agree, `$NAME` in a value is the environment's)
hold while reading. Its keys and defaults are in `podium.tools.seed_keys`.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.config.document import Node, dump_value, parse_text
from podium.config.errors import ConfigError, Problem, nearest
from podium.config.load import validate
from podium.config.mesh import mesh_sizes
from podium.config.show import to_yaml
from podium.settings import RULES
from podium.tools.seed_keys import DEFAULTS, LOST, REJECTED, SPELLINGS, ZERO_MEANT, read_former


@dataclasses.dataclass(frozen=True, kw_only=True)
class Migration:
    """A translated file."""

    text: str
    """The new YAML; it loads."""
    changed: tuple[str, ...]
    """What each old setting became, where its name, value or meaning is not the same."""
    lost: tuple[str, ...]
    """Old settings that nothing here corresponds to, and what to do about it."""


def migrate(path: Path, environ: Mapping[str, str]) -> Migration:
    """The former system's file as ours.

    Args:
        path: the old file.
        environ: stands for `$NAME` in its values, as it did there.

    Raises:
        ConfigError: the file cannot be read, its aliases disagree, or a value makes no sense.
    """
    old = _Former(read_former(path, environ))
    for translate in (_model, _batch, _lengths, _layout, _update, _optimizer, _algorithm, _mesh, _evaluation, _metrics):
        translate(old)
    old.lose_the_rest()
    settings = {"model": None, "steps": None, "prompts_per_step": None, "group_size": None, "mesh": None} | _nested(
        old.new
    )
    validate(Node.of(settings, str(path)), [], rules=RULES)
    head = f"# Translated from the former system's {path.name} by `podium config migrate`.\n"
    return Migration(text=head + to_yaml(settings, old.comments), changed=tuple(old.changed), lost=tuple(old.lost))


_TRUE, _FALSE = ("true", "1", "yes", "on", "t", "y"), ("false", "0", "no", "off", "f", "n")
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}


class _Former:
    """The old settings by full name, and the new ones as they are made."""

    def __init__(self, written: dict[str, tuple[str, Node]]):
        self.written = written
        self.new: dict[str, Any] = {}
        self.comments: dict[str, str] = {}
        self.changed: list[str] = []
        self.lost: list[str] = []
        self.used = set(DEFAULTS)

    def get(self, key: str, kind: type = str) -> Any:
        """What the former system took the setting to be: the file's value, or its default."""
        if key not in self.written or self.written[key][1].value in (None, ""):
            return DEFAULTS[key]
        value = self.convert(key, kind)
        return ZERO_MEANT[key] if value == 0 and key in ZERO_MEANT else value

    def convert(self, key: str, kind: type) -> Any:
        """A value of the file as the former system's parsers read it: "8" is 8, and yes is true."""
        value = self.written[key][1].plain()
        value = parse_text(value, "").plain() if isinstance(value, str) and kind not in (str, list) else value
        words = str(value).lower()
        if kind is bool and words in _TRUE + _FALSE:
            return words in _TRUE
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if (kind is float and number) or (kind is int and number and value == int(value)):
            return kind(value)
        if (kind is str and not isinstance(value, dict | list)) or (kind is list and isinstance(value, list | str)):
            return value if kind is list else str(value)
        raise self.wrong(key, f"expected {_KINDS[kind]}")

    def wrong(self, key: str, rule: str) -> ConfigError:
        """The error of a value that makes no sense."""
        spelling, node = self.written[key]
        return ConfigError([Problem(key=spelling, message=f"{node.plain()!r}: {rule}", places=(node.origin,))])

    def put(self, key: str, path: str, value: Any, why: str = "") -> None:
        """Sets a new setting that stands for an old one."""
        self.new[path] = value
        self.used.add(key)
        self.comments[path] = f"the former default of {key}"
        if key in self.written:
            spelling, node = self.written[key]
            was, now = f"{spelling}: {dump_value(node.plain())}", f"{path}: {dump_value(value)}"
            self.comments[path] = f"was {was}"
            if was != now:
                self.changed.append(f"{was} -> {now}" + (f" ({why})" if why else ""))

    def fix(self, path: str, value: Any, why: str) -> None:
        """Sets a new setting for what was fixed in the former system's code."""
        self.new[path] = value
        self.comments[path] = why
        self.changed.append(f"{path}: {dump_value(value)} ({why})")

    def lose(self, key: str, why: str) -> None:
        """Says that an old setting is gone, if the file had it."""
        if key in self.written:
            spelling, node = self.written[key]
            self.lost.append(f"{spelling}: {dump_value(node.plain())} ({node.origin}): {why}")

    def lose_the_rest(self) -> None:
        """Says so of all settings that have no counterpart."""
        for key in self.written:
            if key not in self.used:
                near = nearest(key, SPELLINGS)
                unknown = "the former system did not know it" + (f"; it may have meant {near}" if near else "")
                self.lose(key, LOST.get(key) or REJECTED.get(key) or unknown)


def _model(old: _Former) -> None:
    old.put("model_path", "model", old.get("model_path"))
    old.put("steps", "steps", old.get("steps", int))
    old.fix("tasks.0.name", "gsm8k", "it had no other task; the system prompt is this task's own")
    weights = old.get("reward_weights", list)
    if (
        not isinstance(weights, list)
        or len(weights) != 3
        or not all(isinstance(weight, int | float) for weight in weights)
    ):
        raise old.wrong("reward_weights", "expected three numbers (correct, format, tags)")
    names = ("correct", "format", "tags")
    rewards = {name: float(weight) for name, weight in zip(names, weights, strict=True)}
    old.put("reward_weights", "tasks.0.rewards", rewards, "numbers are graded with signs and thousands separators now")
    old.put("eval_split", "tasks.0.eval_split", old.get("eval_split"))


def _batch(old: _Former) -> None:
    size = old.get("rollout.n", int)
    old.put("rollout.n", "group_size", size)
    key, prompts = _prompts_per_step(old, size)
    why = "prompts of a step over all hosts; early branches counted sequences, or prompts of one process"
    old.put(key, "prompts_per_step", prompts, why)


def _prompts_per_step(old: _Former, group_size: int) -> tuple[str, int]:
    """Which old setting gives the global number of prompts, and the number; a setting used here is not lost."""
    if "rollout.batch_size" not in old.written:
        for key in (
            "rollout.global_prompt_batch_size",
            "rollout.prompt_batch_size",
            "rollout.global_sequence_batch_size",
        ):
            if key in old.written:
                number = old.convert(key, int)
                prompts, rest = divmod(number, group_size) if "sequence" in key else (number, 0)
                if prompts and not rest:
                    return key, prompts
    return "rollout.batch_size", old.get("rollout.batch_size", int)


def _lengths(old: _Former) -> None:
    prompt, sample = old.get("rollout.global_length", int), old.get("rollout.max_length_sample", int)
    why = "the least padding there, the longest prompt here: longer ones are dropped and counted"
    if prompt < 512:
        why += "; raised to 512 because the former system took any prompt, and those of GSM8K have up to 400 tokens"
    old.put("rollout.global_length", "rollout.max_prompt_tokens", max(prompt, 512), why)
    why = "an exact limit; there it was rounded up to 128, 256, 512, ..."
    old.put("rollout.max_length_sample", "rollout.max_new_tokens", sample, why)
    old.fix("rollout.top_k", 0, "it sampled among the 50 likeliest tokens, which biases the gradient; 50 does so here")


_LAYOUTS = {"legacy": "legacy"} | dict.fromkeys(
    ("maxtext", "dp_only", "dp-only", "maxtext_dp_only", "maxtext-dp-only"), "maxtext"
)


def _layout(old: _Former) -> None:
    """Only where the file chose one: completions are the same in each, and the former default is the slowest."""
    key = "rollout.sharding_style"
    if key in old.written:
        style = old.get(key).lower()
        if style not in _LAYOUTS:
            raise old.wrong(key, f"expected one of {', '.join(_LAYOUTS)}")
        why = "replicated, the default here, makes the same completions sooner where a device holds the whole model"
        old.put(key, "rollout.layout", _LAYOUTS[style], why)


_REMAT = {"everything_saveable": "none", "dots_with_no_batch_dims": "products"}


def _update(old: _Former) -> None:
    rows = old.get("train.micro_batch_size_per_device", int)
    why = "rows of a micro-batch on a device; a row may hold several completions (train.packing)"
    old.put("train.micro_batch_size_per_device", "train.rows_per_device", rows, why)
    if "train.remat_policy" in old.written:  # its default kept the results of all products
        remat = _REMAT.get(old.get("train.remat_policy"), "layer")
        why = "" if remat == "none" else "layer, the default here, makes each layer again from its input: least memory"
        old.put("train.remat_policy", "train.remat", remat, why)
    old.put("train.ppo_epochs", "algorithm.updates_per_batch", old.get("train.ppo_epochs", int))
    if beta := old.get("train.beta", float):
        why = "its KL was never added to the loss, so none is set; to have one: "
        old.lose("train.beta", f"{why}algorithm.kl: k3, algorithm.kl_coef: {dump_value(beta)}")


def _optimizer(old: _Former) -> None:
    name, schedule = old.get("train.optimizer.name").lower(), "train.optimizer.lr_schedule"
    old.put("train.optimizer.name", "train.optimizer.name", name)
    if name in _OPTAX_BETA2:
        old.fix("train.optimizer.beta2", _OPTAX_BETA2[name], f"optax's own for {name}; it could not be set")
    peak, end = old.get(f"{schedule}.peak_value", float), old.get(f"{schedule}.end_value", float)
    old.put(f"{schedule}.peak_value", "train.optimizer.learning_rate", peak)
    kind = old.get(f"{schedule}.type").lower()
    shape = {"constant": "constant", "warmup_linear": "linear"}.get(kind, "cosine")
    old.put(f"{schedule}.type", "train.optimizer.schedule", shape)
    if kind != "constant":
        fraction = min(1.0, end / peak) if peak else 0.0
        old.put(f"{schedule}.end_value", "train.optimizer.final_fraction", fraction, "a fraction of the peak")
        old.put(*_warmup(old, schedule))
    if old.get(f"{schedule}.init_value", float):
        old.lose(f"{schedule}.init_value", "warm-up starts at 0")
    clip = old.get("train.optimizer.clip_norm", float)
    old.put("train.optimizer.clip_norm", "train.optimizer.clip_norm", max(clip, 0.0))
    old.put(
        "train.optimizer.weight_decay", "train.optimizer.weight_decay", old.get("train.optimizer.weight_decay", float)
    )


_OPTAX_BETA2 = {"lion": 0.99, "adamw": 0.999}


def _warmup(old: _Former, schedule: str) -> tuple[str, str, int, str]:
    steps = old.get("steps", int)
    if (warmup := old.get(f"{schedule}.warmup_steps", int)) is not None:
        return f"{schedule}.warmup_steps", "train.optimizer.warmup_steps", min(warmup, steps), "at most all steps"
    warmup = round(steps * old.get(f"{schedule}.warmup_ratio", float))
    why = f"a number of optimizer steps: {steps} steps x the ratio"
    return f"{schedule}.warmup_ratio", "train.optimizer.warmup_steps", min(warmup, steps), why


_RECIPES = {
    "grpo": ("grpo", "its advantages and its clip, set below"),
    "dapo": ("grpo", "its dapo was GRPO with a batch term; set dapo for the paper's algorithm, refilling and all"),
    "rloo": ("reinforce_pp_baseline", "whitened over the batch (rloo_whiten), which is this; set rloo for the paper's"),
    "reinforce": ("reinforce_pp", "rewards whitened over the batch and PPO's clip, which is this"),
    "reinforce++": ("reinforce_pp_baseline", "a group baseline, whitened over the batch, which is this"),
    "gae": ("grpo", "there is no value model, so no PPO; GRPO stands in"),
}
_OTHER_NAMES = {"reinforcepp": "reinforce++", "reinforce_plus_plus": "reinforce++", "ppo": "gae"}
_OTHER_NAMES |= {"pg": "reinforce", "policy_gradient": "reinforce"}


def _algorithm(old: _Former) -> None:
    name, key = old.get("algo.name").lower(), "algo.name"
    if (estimator := old.get("algo.estimator.name")) not in (None, "auto"):
        name, key = estimator.lower(), "algo.estimator.name"
    name = _OTHER_NAMES.get(name, name)
    if name not in _RECIPES:
        raise old.wrong(key, f"expected one of {', '.join(_RECIPES)}, ppo")
    recipe, why = _RECIPES[name]
    if name == "rloo" and not old.get("algo.estimator.rloo_whiten", bool):
        recipe, why = "rloo", "without whitening"
    if old.new["group_size"] < 2 and recipe != "reinforce_pp":
        recipe, why = "reinforce_pp", "one completion per prompt gave every advantage 0 there; this learns from it"
    if (
        key == "algo.name"
        and "algo.name" in old.written
        and old.written["algo.name"][0] == "algo.name"
        and name != "grpo"
    ):
        why += "; written as a section it ran grpo's estimator there"
    old.put(key, "algorithm.recipe", recipe, why)
    if key != "algo.name":
        old.lose("algo.name", f"algo.estimator.name decided: {estimator}")
    if recipe == "grpo":
        old.fix("algorithm.std", "group", "as there")
        old.fix("algorithm.std_ddof", 0, "population standard deviation, as there")
    if recipe != "rloo":
        old.put("algo.estimator.eps", "algorithm.std_eps", old.get("algo.estimator.eps", float))
    old.fix("algorithm.mean", "token", "its loss was the mean over all tokens of the batch")
    old.fix("algorithm.clip_low", 0.2, "fixed in its code")
    old.fix("algorithm.clip_high", 0.3, "fixed in its code")
    old.fix("algorithm.old_logprobs", "trainer", "its ratio was to the trainer's own log-probabilities")


def _mesh(old: _Former) -> None:
    value = old.get("mesh_shape", list)
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value).lower()
    mesh = re.sub(r"\s", "", text).lstrip("!")
    mesh = "host_local" if mesh in ("host_local", "host-local", "auto_host_local") else mesh or "auto"
    why = []
    try:
        sizes = mesh_sizes(mesh)
    except ValueError as error:
        raise old.wrong("mesh_shape", str(error).partition(": ")[2]) from None
    if mesh == "auto":
        why.append("all devices in fsdp; on the branches main, test_rl and feat-kernel auto was host_local")
    if text.startswith("!"):
        why.append("devices are always ordered by their topology")
    if re.findall(r"[a-z]+(?=:)", mesh) != sorted(re.findall(r"[a-z]+(?=:)", mesh)):
        why.append("the order of axes is always dp, fsdp, tp")
    if sizes[2] != 1:
        why.append("with tp above 1 it sampled wrong tokens")
    old.put("mesh_shape", "mesh", mesh, "; ".join(why))


def _evaluation(old: _Former) -> None:
    every, batches = old.get("eval_every_steps", int), old.get("eval_batches_per_process", int)
    old.put("eval_every_steps", "eval.every_steps", max(every, 0))
    questions = max(1, batches) * old.new["prompts_per_step"]
    why = "a number of questions, the same ones each time; there, batches of each process, other ones each time"
    old.put("eval_batches_per_process", "eval.questions", questions, why)
    old.fix("eval.samples", old.new["group_size"], "it sampled as many answers per question as the rollout")
    old.fix("eval.greedy", False, "its evaluation during training was sampled")
    old.fix("eval.at_start", False, "it did not evaluate before the first step")


def _metrics(old: _Former) -> None:
    if (name := old.get("wandb_name")) is not None:
        old.put("wandb_name", "name", name, "the run's name everywhere")
    mode = old.get("wandb_mode").lower()
    if mode not in ("online", "offline", "disabled"):
        old.lose("wandb_mode", "expected online, offline or disabled")
        mode = "disabled"
    if "wandb_mode" in old.written and old.written["wandb_mode"][1].value in (None, ""):
        mode = "disabled"
    old.put("wandb_mode", "metrics.wandb.mode", mode, "an empty mode was online where WANDB_API_KEY was set")
    old.put("wandb_project", "metrics.wandb.project", old.get("wandb_project"))


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted paths as a tree; the only list is that of tasks, which has one."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, last = path.replace("tasks.0.", "tasks.").split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return tree | {"tasks": [tree["tasks"]]}
