"""`podium.grpo` and `podium.train`: start runs from Python."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from podium.api.given_data import Questions, Rewards, overrides, task_settings
from podium.api.rows import Data, is_task
from podium.api.run_handle import Run
from podium.config.load import Override
from podium.config.schema import Config
from podium.files import as_path, in_bucket
from podium.malloc import giving_back_memory
from podium.observe.run_dir import DATA, Fork, parse_fork
from podium.settings import Settings, load_settings
from podium.tasks.question_sets import math_equal

if TYPE_CHECKING:
    from podium.train.recorder import OnStep


def grpo(
    model: str,
    data: Data | None = None,
    *,
    eval_data: Data | None = None,
    rewards: Rewards = (math_equal,),
    tools: Sequence[Callable[..., object] | str] = (),
    environment: Callable[..., object] | str | None = None,
    on_step: "OnStep | None" = None,
    subset: str | None = None,
    question: str | None = None,
    answer: str = "answer",
    system_prompt: str | None = None,
    name: str | None = None,
    **settings: object,
) -> Run:
    """Train a model on questions with GRPO, or another recipe; returns the run when its steps are done.

    Args:
        model: a Hugging Face id, a folder, a .gguf file, or `demo`.
        data: rows, each a question: dicts, a dict of columns, a datasets.Dataset or DatasetDict (its `train` split), or
            a DataFrame; a .jsonl, .json, .csv or .parquet file; a hub data set as `owner/name`; or a task's class. Data
            may be omitted if there is an environment.
        eval_data: held-out rows of the same kinds (the `test` or `validation` split); unset: no evaluation.
        rewards: the parts of the reward: functions (TRL's work too) or names of built-in parts (`format`, `tags`,
            `length`), each alone or as `(reward, weight)`. `podium.math_equal` and `podium.text_equal` compare the
            answer with the row's. Without these two, rows need no answer, and evaluation uses the first function,
            clipped to 0..1.
        tools: functions that the model may call before it answers, or names of built-in ones (`calculator`).
        environment: a class that the model talks to, in TRL's form or gym's (docs/environments.md). Its reward is the
            `correct` part of the reward.
        on_step: called after each step with the number of steps done, the step's metrics, and its samples.
        subset: configuration of a hub data set; unset: the default one, or `main` for `openai/gsm8k`.
        question: column of the question, text or a list of messages; unset: whichever of `question`, `prompt` and
            `problem` exists.
        answer: column of the answer; for published sets, such as GSM8K and MATH, the part of it that is compared.
        system_prompt: system message of every conversation that has none.
        name: name of the run's folder in `runs_dir`; an existing run with this name and the same settings is continued.
            Unset: start a new run.
        settings: any setting of the config (docs/config.md): `steps=100`, `rollout={"max_new_tokens": 64}`, or the same
            as `rollout__max_new_tokens=64`.

    Returns:
        The run. After Ctrl-C, the run up to the last finished step; the same call with its name continues it.

    Raises:
        ValueError: an argument, a setting or a row is invalid; raised before anything is compiled.
        SystemExit: SIGTERM was received (status 143): the run is saved, and the script should end.
    """
    runs_dir = str(settings.get("runs_dir", Config.model_fields["runs_dir"].default))
    name = name or _new_name(runs_dir)
    folder = as_path(runs_dir) / name / DATA
    if in_bucket(folder):
        _check_written_nowhere(data=data, eval_data=eval_data)
    questions = Questions(data, eval_data, subset, question, answer)
    tasks = task_settings(
        questions, rewards, folder=folder, system_prompt=system_prompt, tools=tools, environment=environment
    )
    own_questions = eval_data is None and data is not None and not is_task(data)
    never = [Override("eval.at_end", False, "no eval_data")] if own_questions else []
    given = [Override("model", str(model), "argument model"), Override("name", name, "argument name")]
    return _train(load_settings([], [*given, *tasks, *never, *overrides(settings)], os.environ), None, on_step)


def train(
    config: str | Path | Sequence[str | Path],
    *,
    on_step: "OnStep | None" = None,
    source: str | None = None,
    **settings: object,
) -> Run:
    """Train a run from a config file, as `podium train` does; returns it when its steps are done.

    Args:
        config: a YAML file, or several; later files override earlier ones.
        on_step: as for `podium.grpo`.
        source: `RUN@STEP` of another run; this run starts from its checkpoint.
        settings: overrides of the file's settings, as for `podium.grpo`.

    Raises:
        ValueError: an argument or a setting is invalid; raised before anything is compiled.
        SystemExit: as from `podium.grpo`.
    """
    files = [config] if isinstance(config, str | Path) else list(config)
    loaded = load_settings(files, list(overrides(settings)), os.environ)
    return _train(loaded, None if source is None else parse_fork(source), on_step)


def _train(loaded: Settings, fork: Fork | None, on_step: "OnStep | None") -> Run:
    config = loaded.config
    print(f"run {config.runs_dir}/{config.name}: loading jax and the model", flush=True)
    from podium.plan.report.deviation import RunCheck
    from podium.train.loop import train as train_run
    from podium.train.recorder import unheard

    with giving_back_memory():
        check, heard = RunCheck(force=False), on_step or unheard
        status = train_run(config, recipe=loaded.recipe, fork=fork, check=check, on_step=heard)
    if status == 128 + signal.SIGTERM:  # the machine will disappear soon, so the script must not continue
        sys.exit(status)
    return Run(as_path(config.runs_dir) / str(config.name))


def _check_written_nowhere(**data: Data | None) -> None:
    """Raise ValueError if data is given as rows; used if the run's folder is in a bucket, where rows cannot be
    written.
    """
    for name, given in data.items():
        if given is not None and not isinstance(given, str | Path) and not is_task(given):
            rule = (
                "rows are written into the run's folder, which must then be on a disk, not in a bucket; write the "
                "rows to a file"
            )
            raise ValueError(f"{name}: {rule}")


def _new_name(runs_dir: str) -> str:
    """A run name that is not used in the folder yet."""
    name = time.strftime("grpo-%Y%m%d-%H%M%S")
    taken = sum(1 for _ in as_path(runs_dir).glob(f"{name}*")) if as_path(runs_dir).is_dir() else 0
    return f"{name}-{taken + 1}" if taken else name
