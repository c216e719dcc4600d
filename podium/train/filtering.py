"""`podium filter`: measures how often the run's model solves each training prompt, once, for `data.filter`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from podium.config.schema import Config
from podium.files import as_path, to_json
from podium.hosts.same_inputs import model_files
from podium.run.run_spec import AnswerSettings
from podium.sampling.feed import request_seed
from podium.sampling.sampler import FailingEnvironmentError, Sampler
from podium.tasks.mixture import TaskPrompt
from podium.tasks.pass_rates import Measured, PassRate, PassRates, digest_of, read_pass_rates
from podium.train.evaluate import opened_rollouts
from podium.train.setup import Model, load_parts

PROMPTS_AT_ONCE = 256
"""Prompts whose answers are sampled and stored together; an interruption loses at most these."""


def filter_command(config: Config) -> int:
    """Run `podium filter`: measure, and print how many prompts of each task the filter keeps. Returns the exit status.

    Raises ValueError if the config has no filter, or if its file was measured with something else.
    """
    chosen = config.data.filter
    if chosen is None:
        raise ValueError(
            "data.filter is not set, so the result cannot be stored; set data.filter.file, such as pass_rates.jsonl"
        )
    asked = config.model_copy(update={"data": config.data.model_copy(update={"filter": None})})
    with opened_rollouts(asked, print, trains=True, evaluates=False) as (model, rollouts):
        found = measure(model, rollouts, as_path(chosen.file), chosen.samples)
    least, most = chosen.pass_rate
    for label, right in found.right.items():
        easy = sum(each > most for each in right.values())
        hard = sum(each < least for each in right.values())
        kept = len(right) - easy - hard
        print(f"{label}: {kept:,} of {len(right):,} prompts kept; {easy:,} solved too often, {hard:,} too rarely")
    return 0


def measure(model: Model, rollouts: Sampler, path: Path, samples: int) -> PassRates:
    """Sample `samples` answers to every training prompt, and store the shares of right answers in a file.

    If a file from an interrupted run exists, only the prompts that are missing in it are answered. Prints a line after
    every PROMPTS_AT_ONCE prompts. Raises ValueError if the file was measured with another model, other data or another
    number of samples.
    """
    tasks, sampling = rollouts.feed.tasks, rollouts.spec.training.sampling
    for line in rollouts.check(tasks.first_prompts()):
        print(line)
    prompts = tasks.train_prompts()
    measured = Measured(
        model=model_files(model.source.path),
        data={label: digest_of([each.prompt for each in own]) for label, own in prompts.items()},
        samples=samples,
        sampling={
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_new_tokens": sampling.max_new_tokens,
        },
    )
    known = _begun(path, measured)
    rollouts.compile_ahead()
    rollouts.load(*load_parts(model, None))
    settings = AnswerSettings(sampling=dataclasses.replace(sampling, greedy_completion=None), completions=samples)
    for label, own in prompts.items():
        left = [(n, each) for n, each in enumerate(own) if each.prompt.id not in known.right.get(label, {})]
        for first in range(0, len(left), PROMPTS_AT_ONCE):
            part = left[first : first + PROMPTS_AT_ONCE]
            lines = _rates(rollouts, label, part, settings)
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(to_json(line) + "\n" for line in lines))
            print(f"{label}: {len(own) - len(left) + first + len(part):,} of {len(own):,} prompts")
    return read_pass_rates(path)


def _begun(path: Path, measured: Measured) -> PassRates:
    """Read the shares that a file already contains, or create it. Raises ValueError if it was measured with something
    else.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(measured) + "\n", encoding="utf-8")
    found = read_pass_rates(path)
    other = [name for name, value in measured.items() if found.measured.get(name) != value]
    if other:
        raise ValueError(
            f"{path} was measured with another {' and '.join(other)}; name another data.filter.file, or move it away"
        )
    return found


def _rates(
    rollouts: Sampler, label: str, part: Sequence[tuple[int, TaskPrompt]], settings: AnswerSettings
) -> list[PassRate]:
    """The share of right answers to each prompt, numbered within the task; 0 for prompts that are too long."""
    seed = rollouts.spec.prompts.seed
    encoded = [rollouts.feed.encode(prompt, request_seed(seed, f"filter {label}", n)) for n, prompt in part]
    groups, _ = rollouts.answer([each for each in encoded if each is not None], settings)
    answered = iter(groups)
    lines: list[PassRate] = []
    for (_, prompt), asked in zip(part, encoded, strict=True):
        right = 0.0 if asked is None else next(answered).correct
        if right is None:
            raise FailingEnvironmentError(
                f"{label}: no answer to prompt {prompt.prompt.id} could be graded, through no fault of the model; fix "
                "its environment or reward function, then run the same command again to continue"
            )
        lines.append({"task": label, "prompt": prompt.prompt.id, "right": right})
    return lines
