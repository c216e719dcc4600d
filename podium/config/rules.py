"""What must hold between settings. Each rule names the settings that it compares, so that an error can show them all.

Rules about one setting (type, range) are its type in `podium.config.schema`. What needs a model on disk or a task's
code is in `podium.config.checks`. Nothing here imports jax.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from podium.config.errors import nearest
from podium.config.mesh import mesh_sizes

if TYPE_CHECKING:
    from podium.config.schema import Config


@dataclasses.dataclass(frozen=True)
class Contradiction:
    """Settings that do not go together."""

    keys: tuple[str, ...]
    """Dotted paths of all that the rule compares; the first is the one to blame."""
    message: str
    """Values, rule and way out."""
    needs: tuple[str, ...] = ()
    """More that the rule reads: while one of these is wrong in itself, the rule says nothing."""


def contradictions(config: Config) -> list[Contradiction]:
    """Every rule between settings that this config breaks."""
    return [found for rule in RULES for found in rule(config)]


def _algorithm(config: Config) -> Iterator[Contradiction]:
    """What the recipes say of themselves; the settings that a message names are shown with it."""
    from podium.algorithms.recipes import conflicts

    scope = ("algorithm", "group_size", "prompts_per_step")
    settings = [f"algorithm.{name}" for name in type(config.algorithm).model_fields] + list(scope[1:])
    for key, message in conflicts(
        config.algorithm, group_size=config.group_size, prompts_per_step=config.prompts_per_step
    ):
        words = set(re.findall(r"\w+", message))
        named = [other for other in settings if other != key and other.rpartition(".")[2] in words]
        yield Contradiction((key, *named), message, scope)


def _rows(config: Config) -> Iterator[Contradiction]:
    train, rollout = config.train, config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    lengths = ("rollout.max_prompt_tokens", "rollout.max_new_tokens")
    summed = f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}"
    if train.row_tokens is not None and train.row_tokens < longest:
        yield Contradiction(
            ("train.row_tokens", *lengths),
            f"{train.row_tokens} is less than {summed}, so the longest sequence has no row; "
            f"set {longest} or more, or leave it unset",
        )
    row = train.row_tokens or longest
    if train.tokens_per_device is not None and train.tokens_per_device < row:
        rule = f"train.row_tokens {row}" if train.row_tokens else f"one row of {summed}"
        yield Contradiction(
            ("train.tokens_per_device", *(("train.row_tokens",) if train.row_tokens else lengths)),
            f"{train.tokens_per_device} is less than {rule}; set {row} or more, or shorten the rows",
        )
    if train.tokens_per_device is not None and train.rows_per_device is not None:
        yield Contradiction(
            ("train.rows_per_device", "train.tokens_per_device"),
            "both set the size of a micro-batch; keep one",
        )


def _rewards(config: Config) -> Iterator[Contradiction]:
    from podium.tasks.rewards import TEXT_REWARDS

    known = ("correct", *TEXT_REWARDS)
    buffer, longest = config.grading.overlong_buffer_tokens, config.rollout.max_new_tokens
    buffer_key, shaped = "grading.overlong_buffer_tokens", []
    for index, task in enumerate(config.tasks):
        for part in task.rewards:
            if part not in known:
                near = nearest(part, known)
                way_out = f"did you mean {near}?" if near else f"the parts are {', '.join(known)}"
                yield Contradiction((f"tasks.{index}.rewards.{part}",), f"no part of the reward; {way_out}")
        if "length" in task.rewards:
            shaped.append(f"tasks.{index}.rewards.length")
    if shaped and not buffer:
        yield Contradiction(
            (shaped[0], buffer_key),
            f"the length reward falls over the last {buffer_key} tokens, and that is 0; "
            f"set {buffer_key}, for example to {max(1, longest // 5)}, or remove the reward",
        )
    if shaped and buffer >= longest:
        yield Contradiction(
            (buffer_key, "rollout.max_new_tokens"),
            f"{buffer} is not less than rollout.max_new_tokens {longest}: every completion would be overlong; lower it",
        )
    if buffer and not shaped:
        yield Contradiction(
            (buffer_key,), f"{buffer} has no effect: no task has a length reward; add `length: 1.0` to its rewards"
        )
    if not any(weight for task in config.tasks for weight in task.rewards.values()):
        yield Contradiction(
            ("tasks.0.rewards",), "every weight is 0: nothing would be rewarded; set one, as `correct: 1.0`"
        )


def _schedule(config: Config) -> Iterator[Contradiction]:
    algorithm, warmup = config.algorithm, config.train.optimizer.warmup_steps
    updates = config.steps * algorithm.updates_per_batch * algorithm.minibatches
    if warmup > updates:
        yield Contradiction(
            ("train.optimizer.warmup_steps", "steps", "algorithm.updates_per_batch", "algorithm.minibatches"),
            f"{warmup} is more than the run's {updates} optimizer steps "
            "(steps x updates_per_batch x minibatches); lower it, or raise steps",
        )


def _evaluation(config: Config) -> Iterator[Contradiction]:
    if not config.eval.greedy and not config.eval.samples:
        yield Contradiction(
            ("eval.samples", "eval.greedy"),
            "0, and eval.greedy is false: no question would be answered; set samples to 1 or more, or greedy to true",
        )


def _checkpoints(config: Config) -> Iterator[Contradiction]:
    checkpoint, eval_every = config.checkpoint, config.eval.every_steps
    for name, value in (("keep_best", checkpoint.keep_best), ("keep_every", checkpoint.keep_every)):
        if value and not checkpoint.every_steps:
            yield Contradiction(
                (f"checkpoint.{name}", "checkpoint.every_steps"),
                f"{value} chooses among checkpoints, and checkpoint.every_steps 0 makes only the last; set every_steps",
            )
    if checkpoint.keep_best and not eval_every:
        yield Contradiction(
            ("checkpoint.keep_best", "eval.every_steps"),
            f"{checkpoint.keep_best} needs scores to choose by, and eval.every_steps is 0; "
            f"set eval.every_steps, for example to {checkpoint.every_steps or 20}",
        )
    if checkpoint.every_steps and checkpoint.keep_every % checkpoint.every_steps:
        yield Contradiction(
            ("checkpoint.keep_every", "checkpoint.every_steps"),
            f"{checkpoint.keep_every} is no multiple of checkpoint.every_steps {checkpoint.every_steps}, so most of "
            f"its steps have no checkpoint; set a multiple, for example {2 * checkpoint.every_steps}",
        )


def _mesh(config: Config) -> Iterator[Contradiction]:
    try:
        mesh_sizes(config.mesh)
    except ValueError as error:
        yield Contradiction(("mesh",), str(error).removeprefix("mesh "))


RULES: tuple[Callable[[Config], Iterator[Contradiction]], ...] = (
    _mesh,
    _algorithm,
    _rows,
    _rewards,
    _schedule,
    _evaluation,
    _checkpoints,
)
