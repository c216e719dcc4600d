"""A run with a curriculum: solved levels are drawn less often, and an interrupted run keeps what it knows of them."""

import pytest
from scripted import ROOMY
from test_episodes import opened
from tiny_runs import assert_same_run, make_config, trained

from podium.observe.records import read_samples
from podium.observe.run_dir import SAMPLES
from podium.sampling.sampler import Sampler
from podium.train.loop import train

pytestmark = pytest.mark.usefixtures("one_device")


SEED = 9
SHARES = [0.5, 0.25, 0.25, 0.25, 0.25]
"""Share of the first level in each step: a half until it is known to be solved, then less.

A run that forgot after step 2 what it knew would draw 0.5, 1 and 0.25 in steps 3 to 5.
"""


def known(answer: str) -> float:
    """Whatever the model says, sums of one digit are right, and of the others every second: levels follow from that."""
    return float(int(answer) < 20 or int(answer) % 2)


def short(num_tokens: int) -> float:
    """Something to learn."""
    return -0.1 * num_tokens


def config(model, runs, steps: int = 5):
    curriculum = {"levels": [{}, {"digits": 2}], "window": 3, "spread": 0.1}
    parts = {f"test_curriculum_run:{name}": 1.0 for name in ("known", "short")}
    task = {"name": "arithmetic", "curriculum": curriculum, "rewards": parts, "correct": next(iter(parts))}
    return make_config(
        model,
        runs,
        seed=SEED,
        steps=steps,
        tasks=[task],
        checkpoint={"every_steps": 1},
        eval={"at_start": False, "questions": 4},
        metrics={"samples_every": 1},
    )


@pytest.fixture(scope="module")
def unbroken(tiny_model, tmp_path_factory):
    runs = tmp_path_factory.mktemp("unbroken")
    assert train(config(tiny_model, runs), plain=True) == 0
    return runs / "run"


def shares(run) -> list[float]:
    return [line.get("curriculum/arithmetic-level1/share", 0.0) for line in trained(run)]


def test_a_level_that_is_solved_gives_way_and_the_last_is_evaluated(unbroken):
    assert shares(unbroken) == SHARES
    for line in trained(unbroken):
        level1 = line.get("curriculum/arithmetic-level1/share", 0.0)
        assert level1 + line.get("curriculum/arithmetic-level2/share", 0.0) == pytest.approx(1)
        assert line.get("curriculum/arithmetic-level1/correct", 1.0) == 1.0
    samples = read_samples(unbroken / SAMPLES)
    drawn = {(line["task"], len(line["prompt"])) for line in samples if line["split"] == "train"}
    assert drawn == {("arithmetic-level1", len("arithmetic/train/1+1")), ("arithmetic-level2", 22)}
    evaluated = {line["task"] for line in samples if line["split"] == "eval"}
    assert evaluated == {"arithmetic"}


def break_off_in(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a run after the rollout of a step, counted from 1."""
    answer, left = Sampler.answer, [step]

    def break_off(self, prompts, settings=None):
        found = answer(self, prompts, settings)  # what was learned in this step is lost with it
        left[0] -= settings is None
        if not left[0]:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Sampler, "answer", break_off)


def test_a_run_broken_off_in_a_rollout_goes_on_as_if_nothing_had_happened(tiny_model, tmp_path, unbroken, monkeypatch):
    break_off_in(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(config(tiny_model, tmp_path), plain=True)
    monkeypatch.undo()
    assert train(config(tiny_model, tmp_path), plain=True) == 0
    assert_same_run(tmp_path / "run", unbroken)


def test_conversations_of_a_level_are_held_with_its_options(roomy_model, template, tmp_path):
    """A game of level 1 is lost after one guess, and one of level 2 after two."""
    levels = [{"turns": 1}, {"turns": 2}]
    game = {"name": "guess", "options": {"largest": 10**6}, "curriculum": {"levels": levels}}
    config = make_config(
        roomy_model,
        tmp_path,
        chat_template=template,
        steps=1,
        tasks=[game],
        prompts_per_step=8,
        environments={"workers": 1},
        rollout={**ROOMY, "stop": [" "]},
    )
    turns: dict[int, set[int]] = {}
    with opened(config) as rollouts:
        groups, _ = rollouts.answer(rollouts.feed.next(8))
    for group in groups:
        ended = (each for each in group.transcripts if each.finish_reason == "stop")
        turns.setdefault(group.prompt.task, set()).update(each.num_turns for each in ended)
    assert turns == {0: {1}, 1: {2}}
