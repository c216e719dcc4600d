"""Translates a YAML file of the seed system (`podium.compat`) to Podium's format, and lists what changed or is lost.

Settings keep their meaning: where the systems' defaults differ, or the seed system hard-coded a number, the value is
written out. Files are read by the seed system's rules (aliases must agree, `$NAME` in a value is replaced from the
environment). Its keys and defaults, and the settings whose values are copied unchanged, are in `seed_keys.yaml`.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.compat.seed_keys import read_seed, seed_keys, spellings, trl_keys
from podium.config.document import Node, dump_value, parse_text
from podium.config.errors import ConfigError, nearest, wrong
from podium.config.load import validate
from podium.config.mesh import mesh_sizes
from podium.config.show import to_yaml
from podium.settings import Checks

SHOWN = 5
"""Keys listed in an error."""
TYPING_ERROR = 0.85
"""Similarity from which an unknown key is taken for a misspelt one of the seed system."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Migration:
    """The result of translating a file."""

    text: str
    """The new YAML, which loads without errors."""
    changed: tuple[str, ...]
    """One line per old setting whose name, value or meaning differs, with its replacement."""
    lost: tuple[str, ...]
    """One line per old setting without a counterpart, with advice."""


def migrate(path: Path, environ: Mapping[str, str]) -> Migration:
    """Translate a file of the seed system.

    Args:
        path: the old file.
        environ: values for `$NAME` in the file, as in the seed system.

    Raises:
        ConfigError: the file cannot be read, is not one of the seed system's, its aliases disagree, or a value is
            invalid.
    """
    old = _Translation(_of_the_seed(path, environ))
    old.fix("tasks.0.name", "gsm8k", "the seed system had no other task; the system prompt is this task's own")
    for key, about in seed_keys().items():
        if about.becomes and (value := old.get(key)) is not None:
            old.put(key, about.becomes, value, about.why)
    for translate in (
        _rewards,
        _prompts,
        _sampling,
        _update,
        _optimizer,
        _schedule,
        _algorithm,
        _discounts,
        _evaluation,
    ):
        translate(old)
    old.put("mesh_shape", "mesh", *_mesh(old))
    old.lose_the_rest()
    first = dict.fromkeys(("model", "steps", "prompts_per_step", "group_size", "mesh"))
    settings = first | _nested(old.new)
    validate(Node.of(settings, str(path)), [], rules=[Checks(reads_disk=False)])
    head = f"# Translated from the seed system's {path.name} by `podium config migrate`.\n"
    return Migration(text=head + to_yaml(settings, old.comments), changed=tuple(old.changed), lost=tuple(old.lost))


def _of_the_seed(path: Path, environ: Mapping[str, str]) -> dict[str, tuple[str, Node]]:
    """Read a file as `read_seed` does. Raises ConfigError if it is not a config of the seed system."""
    written = read_seed(path, environ)
    strange = [
        spelling
        for key, (spelling, _) in written.items()
        if key not in seed_keys() and nearest(key, spellings(), TYPING_ERROR) is None
    ]
    if 2 * len(strange) >= len(written):  # other formats share some keys, such as `steps`
        listed = f": {', '.join(strange[:SHOWN])}{', ...' if len(strange) > SHOWN else ''}" if strange else ""
        many = f"{len(strange)} of its {len(written)} keys are not the seed system's" if written else "it has no keys"
        hint = "; the names of TRL's settings here are in docs/from-trl.md" if trl_keys().keys() & set(strange) else ""
        raise wrong(str(path), f"not a config of the seed system: {many}{listed}{hint}")
    return written


_TRUE, _FALSE = ("true", "1", "yes", "on", "t", "y"), ("false", "0", "no", "off", "f", "n")
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "text": "text", "list": "a list"}


class _Translation:
    """A translation in progress: the old settings by full name, and the new settings so far."""

    def __init__(self, written: dict[str, tuple[str, Node]]):
        self.written = written
        self.new: dict[str, Any] = {}
        self.comments: dict[str, str] = {}
        self.changed: list[str] = []
        self.lost: list[str] = []
        self.used = {key for key, about in seed_keys().items() if not about.gone}

    def get(self, key: str) -> Any:
        """The setting as the seed system read it: from the file, or its default."""
        about = seed_keys()[key]
        if key not in self.written or self.written[key][1].value in (None, ""):
            return about.default
        value = self.convert(key, about.kind)
        return about.zero if value == 0 and about.zero is not None else value

    def convert(self, key: str, kind: str) -> Any:
        """Convert a value of the file as the seed system's parsers did: "8" is 8, and yes is true."""
        value = self.written[key][1].plain()
        value = parse_text(value, "").plain() if isinstance(value, str) and kind not in ("text", "list") else value
        text = str(value).lower()
        if kind == "bool" and text in _TRUE + _FALSE:
            return text in _TRUE
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if (kind == "float" and number) or (kind == "int" and number and value == int(value)):
            return int(value) if kind == "int" else float(value)
        if (kind == "text" and not isinstance(value, dict | list)) or (
            kind == "list" and isinstance(value, list | str)
        ):
            return value if kind == "list" else str(value)
        raise self.wrong(key, f"expected {_KINDS[kind]}")

    def wrong(self, key: str, rule: str) -> ConfigError:
        """The error about an invalid value."""
        spelling, node = self.written[key]
        return wrong(spelling, f"{node.plain()!r}: {rule}", node.origin)

    def put(self, key: str, path: str, value: object, why: str = "") -> None:
        """Set the new setting `path` that replaces the old setting `key`."""
        self.new[path] = value
        self.used.add(key)
        self.comments[path] = f"the seed system's default of {key}"
        if key in self.written:
            spelling, node = self.written[key]
            was, now = f"{spelling}: {dump_value(node.plain())}", f"{path}: {dump_value(value)}"
            self.comments[path] = f"was {was}"
            if was != now:
                self.changed.append(f"{was} -> {now}" + (f" ({why})" if why else ""))

    def fix(self, path: str, value: object, why: str) -> None:
        """Set a new setting to a value that the seed system hard-coded."""
        self.new[path] = value
        self.comments[path] = why
        self.changed.append(f"{path}: {dump_value(value)} ({why})")

    def lose(self, key: str, why: str) -> None:
        """Report an old setting as lost if the file sets it."""
        if key in self.written:
            spelling, node = self.written[key]
            self.lost.append(f"{spelling}: {dump_value(node.plain())} ({node.origin}): {why}")

    def lose_the_rest(self) -> None:
        """Report every remaining setting without a counterpart as lost."""
        for key in self.written:
            if key in seed_keys() and key not in self.used:
                self.lose(key, seed_keys()[key].gone)
            elif key not in seed_keys():
                near = nearest(key, spellings())
                self.lose(key, "the seed system did not know it" + (f"; it may have meant {near}" if near else ""))


def _rewards(old: _Translation) -> None:
    weights = old.get("reward_weights")
    if len(weights) != 3 or not all(isinstance(weight, int | float) for weight in weights):
        raise old.wrong("reward_weights", "expected three numbers (correct, format, tags)")
    rewards = dict(zip(("correct", "format", "tags"), map(float, weights), strict=True))
    old.put("reward_weights", "tasks.0.rewards", rewards, "numbers are graded with signs and thousands separators now")


def _prompts(old: _Translation) -> None:
    """Set the number of prompts per step, from the batch size or from another setting that implies it."""
    key, prompts = "rollout.batch_size", old.get("rollout.batch_size")
    others = ("global_prompt_batch_size", "prompt_batch_size", "global_sequence_batch_size")
    written = [f"rollout.{name}" for name in others if f"rollout.{name}" in old.written]
    for other in () if key in old.written else written:
        share, rest = divmod(old.convert(other, "int"), old.new["group_size"] if "sequence" in other else 1)
        if share and not rest:
            key, prompts = other, share
            break
    why = "prompts of a step over all hosts; early branches counted sequences, or prompts of one process"
    old.put(key, "prompts_per_step", prompts, why)


_LAYOUTS = {"legacy": "legacy"} | dict.fromkeys(
    ("maxtext", "dp_only", "dp-only", "maxtext_dp_only", "maxtext-dp-only"), "maxtext"
)


def _sampling(old: _Translation) -> None:
    """Set lengths and sampling, and the layout if the file set one; all layouts give the same completions."""
    prompt, key = old.get("rollout.global_length"), "rollout.sharding_style"
    why = "the seed system padded prompts to at least this length; Podium drops longer prompts and counts them"
    if prompt < 512:
        why += "; raised to 512 because the seed system took any prompt, and those of GSM8K have up to 400 tokens"
    old.put("rollout.global_length", "rollout.max_prompt_tokens", max(prompt, 512), why)
    old.fix(
        "rollout.top_k",
        0,
        "the seed system sampled among the 50 likeliest tokens, which biases the gradient",
    )
    if key in old.written:
        if (style := old.get(key).lower()) not in _LAYOUTS:
            raise old.wrong(key, f"expected one of {', '.join(_LAYOUTS)}")
        why = "Podium's default, replicated, gives the same completions faster where a device holds the whole model"
        old.put(key, "rollout.layout", _LAYOUTS[style], why)


_REMAT = {"everything_saveable": "none", "dots_with_no_batch_dims": "products"}


def _update(old: _Translation) -> None:
    if "train.remat_policy" in old.written:  # its default kept the results of all products
        remat = _REMAT.get(old.get("train.remat_policy"), "layer")
        why = (
            ""
            if remat == "none"
            else ("Podium's default, layer, recomputes each layer from its input and so needs the least memory")
        )
        old.put("train.remat_policy", "train.remat", remat, why)
    if beta := old.get("train.beta"):
        why = "the seed system never added its KL to the loss, so none is set; to add one: "
        old.lose("train.beta", f"{why}algorithm.kl: k3, algorithm.kl_coef: {dump_value(beta)}")


_OPTAX_BETA2 = {"lion": 0.99, "adamw": 0.999}


def _optimizer(old: _Translation) -> None:
    name, clip = old.get("train.optimizer.name").lower(), old.get("train.optimizer.clip_norm")
    old.put("train.optimizer.name", "train.optimizer.name", name)
    old.put("train.optimizer.clip_norm", "train.optimizer.clip_norm", max(clip, 0.0))
    if name in _OPTAX_BETA2:
        old.fix("train.optimizer.beta2", _OPTAX_BETA2[name], f"optax's own for {name}, as in the seed system")


def _schedule(old: _Translation) -> None:
    schedule, steps = "train.optimizer.lr_schedule", old.get("steps")
    peak, end = old.get(f"{schedule}.peak_value"), old.get(f"{schedule}.end_value")
    kind = old.get(f"{schedule}.type").lower()
    shape = {"constant": "constant", "warmup_linear": "linear"}.get(kind, "cosine")
    old.put(f"{schedule}.type", "train.optimizer.schedule", shape)
    if old.get(f"{schedule}.init_value"):
        old.lose(f"{schedule}.init_value", "warm-up starts at the peak divided by warmup_steps")
    if kind == "constant":
        return
    fraction = min(1.0, end / peak) if peak else 0.0
    old.put(f"{schedule}.end_value", "train.optimizer.final_fraction", fraction, "a fraction of the peak")
    key, why = f"{schedule}.warmup_steps", "at most all steps"
    if (warmup := old.get(key)) is None:
        key, why = f"{schedule}.warmup_ratio", f"a number of optimizer steps: {steps} steps x the ratio"
        warmup = round(steps * old.get(key))
    old.put(key, "train.optimizer.warmup_steps", min(warmup, steps), why)


_RECIPES = {
    "grpo": ("grpo", "the seed system's advantages and its clip, set below"),
    "dapo": (
        "grpo",
        (
            "the seed system's dapo was GRPO with a batch term; set recipe dapo for the paper's algorithm, including "
            "refills"
        ),
    ),
    "rloo": (
        "reinforce_pp_baseline",
        ("the seed system whitened over the batch (rloo_whiten), as this recipe does; set rloo for the paper's"),
    ),
    "reinforce": ("reinforce_pp", "rewards whitened over the batch and PPO's clip, as in the seed system"),
    "reinforce++": ("reinforce_pp_baseline", "a group baseline, whitened over the batch, as in the seed system"),
    "gae": ("ppo", "with a value model of its own, which shares no weights with the policy"),
}
_OTHER_NAMES = {"reinforcepp": "reinforce++", "reinforce_plus_plus": "reinforce++", "ppo": "gae"}
_OTHER_NAMES |= {"pg": "reinforce", "policy_gradient": "reinforce"}


def _algorithm(old: _Translation) -> None:
    name, key = old.get("algo.name"), "algo.name"
    if (estimator := old.get("algo.estimator.name")) not in (None, "auto"):
        name, key = estimator, "algo.estimator.name"
        old.lose("algo.name", f"algo.estimator.name decided: {estimator}")
    name = _OTHER_NAMES.get(name.lower(), name.lower())
    if name not in _RECIPES:
        raise old.wrong(key, f"expected one of {', '.join(_RECIPES)}, ppo")
    recipe, why = _RECIPES[name]
    if name == "rloo" and not old.get("algo.estimator.rloo_whiten"):
        recipe, why = "rloo", "without whitening"
    if old.new["group_size"] < 2 and recipe not in ("reinforce_pp", "ppo"):
        recipe, why = (
            "reinforce_pp",
            ("with one completion per prompt, every advantage was 0 in the seed system; this recipe learns from it"),
        )
    if key == "algo.name" and name != "grpo" and old.written["algo.name"][0] == "algo.name":
        why += "; in the seed system, algo as a section ran grpo's estimator"
    old.put(key, "algorithm.recipe", recipe, why)
    if recipe == "grpo":
        old.fix("algorithm.std", "group", "as in the seed system")
        old.fix("algorithm.std_ddof", 0, "population standard deviation, as in the seed system")
    if recipe != "rloo":
        old.put("algo.estimator.eps", "algorithm.std_eps", old.get("algo.estimator.eps"))
    old.fix("algorithm.mean", "token", "the seed system's loss was the mean over all tokens of the batch")
    old.fix("algorithm.clip_low", 0.2, "fixed in the seed system's code")
    old.fix("algorithm.clip_high", 0.3, "fixed in the seed system's code")
    old.fix("algorithm.old_logprobs", "trainer", "the seed system's ratio was to the trainer's own log-probabilities")


def _discounts(old: _Translation) -> None:
    """Set the discounts of generalised advantages, which only PPO has."""
    for option, key in {"gamma": "algo.estimator.gae_gamma", "lam": "algo.estimator.gae_lambda"}.items():
        if key in old.written and old.new["algorithm.recipe"] == "ppo":
            old.put(key, f"algorithm.advantage_options.{option}", old.convert(key, "float"))


def _mesh(old: _Translation) -> tuple[str, str]:
    """Set `mesh:`; returns its text and a list of differences."""
    value = old.get("mesh_shape")
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value).lower()
    mesh = re.sub(r"\s", "", text).lstrip("!")
    mesh = "host_local" if mesh in ("host_local", "host-local", "auto_host_local") else mesh or "auto"
    try:
        sizes = mesh_sizes(mesh)
    except ValueError as error:
        raise old.wrong("mesh_shape", str(error).partition(": ")[2]) from None
    axes = re.findall(r"[a-z]+(?=:)", mesh)
    reasons = {
        "all devices in fsdp; on the branches main, test_rl and feat-kernel auto was host_local": mesh == "auto",
        "devices are always ordered by their topology": text.startswith("!"),
        "the order of axes is always dp, fsdp, tp": axes != sorted(axes),
        "with tp above 1, the seed system sampled wrong tokens": sizes["tp"] != 1,
    }
    return mesh, "; ".join(reason for reason, holds in reasons.items() if holds)


def _evaluation(old: _Translation) -> None:
    old.put("eval_every_steps", "eval.every_steps", max(old.get("eval_every_steps"), 0))
    questions = max(1, old.get("eval_batches_per_process")) * old.new["prompts_per_step"]
    why = "a number of questions, the same each time; the seed system took batches per process, different each time"
    old.put("eval_batches_per_process", "eval.questions", questions, why)
    old.fix("eval.samples", old.new["group_size"], "as many answers per question as the rollout, as in the seed system")
    old.fix("eval.greedy", False, "the seed system's evaluation during training was sampled")
    old.fix("eval.at_start", False, "the seed system did not evaluate before the first step")
    mode = old.get("wandb_mode").lower()
    if mode not in ("online", "offline", "disabled"):
        old.lose("wandb_mode", "expected online, offline or disabled")
        mode = "disabled"
    if "wandb_mode" in old.written and old.written["wandb_mode"][1].value in (None, ""):
        mode = "disabled"
    old.put(
        "wandb_mode",
        "metrics.wandb.mode",
        mode,
        "the seed system took an empty mode as online if WANDB_API_KEY was set",
    )


def _nested(settings: Mapping[str, object]) -> dict[str, Any]:
    """Turn dotted paths into a tree; `tasks`, with its single entry, becomes a list."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, last = path.replace("tasks.0.", "tasks.").split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return tree | {"tasks": [tree["tasks"]]}
