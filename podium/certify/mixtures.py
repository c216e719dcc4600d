"""Checks which prompts a mixture of tasks draws: by weights, curricula and progress, also where a run is resumed."""

from collections.abc import Sequence

from podium.certify.naive_mixture import NaiveMixture
from podium.certify.result import Check
from podium.certify.task import NAME, QUESTIONS
from podium.config.data import DataConfig, ProgressConfig, RetireConfig
from podium.config.schema import CurriculumConfig, TaskConfig
from podium.tasks.mixture import TaskMixture

DRAWS = 90
WINDOW, SPREAD = 4, 0.3
SOLVED, KEPT = 0.9, 4
"""Share of right answers from which on a prompt is not drawn again, and prompts of a level that are drawn anyway."""
SEED = 11
VOCAB = 100
WEIGHTS = (1.0, 0.75, 2.0)


def mixture_check() -> Check:
    """Count the prompts that are other ones than those of the naive form."""
    return Check(
        name="mixture of tasks",
        claim="prompts are of the task, level and round that weights, curricula and progress choose, until solved",
        difference=float(_wrong(levels=1) + _wrong(levels=3) + _wrong(levels=1, by_progress=True)),
        bar=0,
    )


def _wrong(*, levels: int, by_progress: bool = False) -> int:
    """How many draws differ in a mixture whose last task has this many levels; half of them after resuming."""
    tasks = _tasks(levels)
    progress = ProgressConfig(window=WINDOW, spread=SPREAD) if by_progress else None
    data = DataConfig(progress=progress, retire=RetireConfig(pass_rate=SOLVED, keep=KEPT))
    found = TaskMixture(tasks, seed=SEED, data=data)
    sizes = [[QUESTIONS]] * (len(tasks) - 1) + [[QUESTIONS] * levels]
    naive = NaiveMixture(
        SEED, WEIGHTS, sizes, window=WINDOW, spread=SPREAD, by_progress=by_progress, solved=SOLVED, kept=KEPT
    )
    wrong = 0
    for number in range(DRAWS):
        if number == DRAWS // 2:
            resumed = TaskMixture(tasks, seed=SEED, data=data)
            resumed.cursor, resumed.means, resumed.retired = found.cursor, found.means, found.retired
            found = resumed
        (prompt,) = found.next(1)
        expected = naive.draw()
        wrong += (prompt.task, prompt.prompt.id) != (expected.task, str(expected.place))
        wrong += found.is_retired(prompt) != (expected in naive.retired)
        mean = (3 * prompt.task + 5 * number) % 8 / 7
        found.learn(prompt, mean)
        naive.learn(expected, mean)
    return wrong


def _tasks(levels: int) -> Sequence[TaskConfig]:
    options: dict[str, object] = {"vocab": VOCAB}
    tasks = [TaskConfig(name=NAME, weight=weight, options=options) for weight in WEIGHTS]
    if levels > 1:
        own: list[dict[str, object]] = [{"shortest": 1 + level} for level in range(levels)]
        curriculum = CurriculumConfig(levels=own, window=WINDOW, spread=SPREAD)
        tasks[-1] = tasks[-1].model_copy(update={"curriculum": curriculum})
    return tasks
