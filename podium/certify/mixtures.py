"""Checks which prompts are drawn: by weights, curricula and progress; and which a step takes of those in flight."""

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from podium.certify.check_result import Check
from podium.certify.naive_draws import request_seed
from podium.certify.naive_mixture import Draw, NaiveMixture
from podium.certify.numbers_task import (
    EVALUATED,
    LONGEST_PROMPT,
    NAME,
    QUESTIONS,
    SYSTEM_PROMPT,
    LetterBackend,
    Numbers,
)
from podium.config.data import DataConfig, ProgressConfig, RetireConfig
from podium.config.schema import CurriculumConfig, TaskConfig
from podium.models.text.tokenizer import Tokenizer
from podium.rollout.request import Completion
from podium.rollout.transcript import transcript_of
from podium.run.run_spec import PromptSpec, RolloutSpec
from podium.sampling.conversations.carry import Pending, Position, chosen
from podium.sampling.conversations.episode import Episode
from podium.sampling.feed import EncodedPrompt, Feed
from podium.sampling.partial_rollouts import PartialRollouts
from podium.tasks.mixture import TaskPrompt
from podium.tasks.task import Prompt, TaskSource

FIRSTS: Sequence[tuple[Sequence[Sequence[int]], int | None]] = (
    ([[3, 3, 4], [4, 5]], 3),
    ([[4, 6], [5, 5, 6]], 4),
    ([[2, 2], []], 2),
    ([[], []], None),
    ([], None),
)
"""For a prompt: the versions of the weights that drew the tokens of each of its answers, some of which were carried
over updates; and the version of the prompt's first token, None if none has been drawn."""
DRAWS, RESUMED, IN_FLIGHT = 90, 2, 6
"""Prompts that are drawn, after how many a run is resumed, and how many are in flight."""
STEPS = 60
WINDOW, SPREAD = 4, 0.3
RETIRE = RetireConfig(pass_rate=0.9, keep=4)
SEED = 11
VOCAB = 100
WEIGHTS = (1.0, 0.75, 2.0)
SYSTEM_PROMPTS = (None, "7 6 5", "")
"""Of each task: its own, another one, and none."""


def mixture_check(spec: RolloutSpec) -> Check:
    """Count the drawn prompts that differ from those of the naive form; `spec` is that of a run."""
    return Check(
        name="mixture of tasks",
        claim="prompts are of the task, level and round that weights, curricula and progress choose, unless too long or"
        " solved, and those in flight are the same in a resumed run",
        difference=float(_wrong(spec, levels=1) + _wrong(spec, levels=3) + _wrong(spec, levels=1, by_progress=True)),
        bar=0,
    )


def _wrong(spec: RolloutSpec, *, levels: int, by_progress: bool = False) -> int:
    """How many draws differ in a mixture whose last task has this many levels.

    The last few prompts are in flight. The run is resumed again and again from what a checkpoint says of it. Where
    neither levels nor progress choose, the longest prompt of each task with a system prompt is too long.
    """
    plain = levels == 1 and not by_progress
    progress = ProgressConfig(window=WINDOW, spread=SPREAD) if by_progress else None
    data = DataConfig(progress=progress, retire=RETIRE)
    tasks = _tasks(levels)
    prompts = dataclasses.replace(
        spec.prompts, tasks=tasks, data=data, seed=SEED, max_tokens=LONGEST_PROMPT - plain, privileged=None
    )
    sizes = [[QUESTIONS]] * (len(tasks) - 1) + [[QUESTIONS] * levels]
    known = _tokens(levels)
    naive = NaiveMixture(SEED, WEIGHTS, sizes, window=WINDOW, spread=SPREAD, by_progress=by_progress, retire=RETIRE)
    run = _run(spec, prompts)
    expected: list[tuple[int, Draw]] = []  # of the prompts in flight
    last = [*range(len(tasks) - 1), len(tasks) + levels - 2]  # the level of each task that is evaluated
    asked = [[(each.task, each.prompt.id) for each in own] for own in run.feed.tasks.eval_prompts(2).values()]
    number, wrong = 0, int(asked != [[(level, each) for each in EVALUATED[:2]] for level in last])
    for drawn in range(DRAWS):
        if drawn % RESUMED == RESUMED - 1:
            saved = json.loads(json.dumps(run.position.record()))
            run = _run(spec, prompts)
            run.position = Position.read(saved, run.feed)
        (prompt,) = run.feed.next(1)
        own = naive.draw()
        while own in naive.retired or len(known[own]) > LONGEST_PROMPT - plain:
            number, own = number + 1, naive.draw()
        expected.append((number, own))
        number += 1
        run.pending = (*run.pending, Pending(prompt=prompt))
        found = [(*_known(each.prompt), each.prompt.tokens) for each in run.pending]
        wrong += found != [(*_naive(*each), known[each[1]]) for each in expected]
        if len(expected) < IN_FLIGHT:
            continue
        (first, *left), (_, learned), mean = run.pending, expected.pop(0), (3 * own.task + 5 * drawn) % 8 / 7
        run.pending = tuple(left)
        run.feed.tasks.learn(first.prompt.prompt, mean)
        naive.learn(learned, mean)
    return wrong


def _run(spec: RolloutSpec, prompts: PromptSpec) -> PartialRollouts:
    """The beginning of a run, without its engine."""
    feed = Feed(prompts, Tokenizer(LetterBackend(), eos_tokens=()))
    return PartialRollouts(feed, spec)


def _known(prompt: EncodedPrompt) -> tuple[int, int, str, int]:
    """Number, task or level, id and seed of a prompt."""
    return prompt.number, prompt.prompt.task, prompt.prompt.prompt.id, prompt.seed


def _naive(number: int, draw: Draw) -> tuple[int, int, str, int]:
    """The same of a naive one."""
    return number, draw.task, str(draw.place), request_seed(SEED, "train", number)


def _tokens(levels: int) -> dict[Draw, tuple[int, ...]]:
    """The tokens of every prompt of `_tasks`: the system prompt of its task, and the question."""
    found: dict[Draw, tuple[int, ...]] = {}
    for task, own in enumerate([*SYSTEM_PROMPTS[:-1], *SYSTEM_PROMPTS[-1:] * levels]):
        source = Numbers(TaskSource(), vocab=VOCAB, shortest=max(1, 2 + task - len(WEIGHTS)))
        for place, prompt in enumerate(source.prompts("train")):
            text = f"{SYSTEM_PROMPT if own is None else own} {prompt.question}"
            found[Draw(task, place)] = tuple(map(int, text.split()))
    return found


def _tasks(levels: int) -> tuple[TaskConfig, ...]:
    options: dict[str, object] = {"vocab": VOCAB}
    tasks = [
        TaskConfig(name=NAME, weight=weight, options=options, system_prompt=own)
        for weight, own in zip(WEIGHTS, SYSTEM_PROMPTS, strict=True)
    ]
    if levels > 1:
        own: list[dict[str, object]] = [{"shortest": 1 + level} for level in range(levels)]
        curriculum = CurriculumConfig(levels=own, window=WINDOW, spread=SPREAD)
        tasks[-1] = tasks[-1].model_copy(update={"curriculum": curriculum})
    return tuple(tasks)


def choice_check() -> Check:
    """Let made-up queues of prompts run for many steps, and count the steps that take or leave wrong ones."""
    return Check(
        name="choice of prompts",
        claim="a step takes the oldest complete prompts, by the weights that drew their first token, and waits only"
        " where one would become too old",
        difference=float(sum(_wrong_choices(*each) for each in ((4, 1), (3, 2), (2, 3), (2, 0))) + _wrong_firsts()),
        bar=0,
    )


def _wrong_choices(per_step: int, max_staleness: int) -> int:
    """Number of steps for which a queue chooses wrong prompts, if its prompts are completed in random order."""
    random = np.random.default_rng(per_step)
    firsts: list[int] = []  # version of the first token of each prompt in flight
    wrong = 0
    for version in range(STEPS):
        new = per_step * (max_staleness + 1) - len(firsts)
        given = [*firsts, *[None] * new]
        firsts = [*firsts, *[version] * new]
        oldest = sorted(range(len(firsts)), key=lambda index: (firsts[index], index))
        complete = [False] * len(firsts)
        for index in random.permutation(len(firsts)).tolist():
            complete[index] = True
            ready = [each for each in oldest if complete[each]][:per_step]
            sizes = {"per_step": per_step, "version": version, "max_staleness": max_staleness}
            taken = chosen(given, complete, per_step, **sizes)
            if taken is not None:
                break
            wrong += len(ready) == per_step and complete[oldest[0]] and ready == oldest[:per_step]
        else:
            return STEPS  # no prompts were taken although all are complete
        left = [firsts[index] for index in oldest if index not in taken]
        late = [version + 1 + place // per_step - first > max_staleness for place, first in enumerate(left)]
        wrong += taken != ready or any(late)
        firsts = [first for index, first in enumerate(firsts) if index not in taken]
    return wrong


def _wrong_firsts() -> int:
    """Number of made-up prompts in flight, with single answers or conversations, whose `first_version` is wrong."""
    asked = TaskPrompt(task=0, prompt=Prompt(id="0", question="1", answer="1"), system_prompt=None)
    prompt = EncodedPrompt(prompt=asked, tokens=(1,), seed=0)
    wrong = 0
    for versions, first in FIRSTS:
        drawn = [_completion(each) for each in versions]
        talks = tuple(Episode(state="drawing", drawing=each) for each in drawn)
        replied = tuple(Episode(transcript=transcript_of((1,), each)) for each in drawn)
        given = (
            Pending(prompt=prompt, completions=tuple(drawn)),
            Pending(prompt=prompt, episodes=talks),
            Pending(prompt=prompt, episodes=replied),
        )
        wrong += sum(each.first_version != first for each in given)
    return wrong


def _completion(versions: Sequence[int]) -> Completion:
    """An unfinished completion whose tokens these versions of the weights drew."""
    nothing = np.zeros(len(versions), np.float32)
    return Completion(
        tokens=np.ones(len(versions), np.int32),
        sampled_logprobs=nothing,
        full_logprobs=nothing,
        versions=np.array(versions, np.int32),
        text="",
        finish_reason=None,
    )
