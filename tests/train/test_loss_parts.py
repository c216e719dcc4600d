"""Losses of several parts: demonstrations beside completions, and functions of a user's own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import (
    SHORT,
    assert_same_run,
    config_of,
    groups_of,
    host,
    make_config,
    make_group,
    make_trainer,
    merged,
    read_records,
    spec_of,
    train_on,
    trained,
    with_logprobs,
)

from podium.algorithms.losses import Tokens
from podium.certify.checks import skipped
from podium.certify.small_run import make_subject
from podium.config.errors import ConfigError
from podium.models.files.source import resolve
from podium.models.text.tokenizer import load_tokenizer
from podium.plan.request.planned_rows import optimizer_steps
from podium.plan.request.workload import SequenceLengths
from podium.sampling.demonstrations import mixed_in
from podium.sampling.feed import Feed
from podium.sampling.groups import Group
from podium.settings import load_settings
from podium.train.batches.shapes import pack
from podium.train.loop import train

WEIGHT, RATE = 0.3, 1e5
SFT = {"recipe": "sft", "weight": WEIGHT, "prompts_per_step": 3}
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [0.5, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]]


def margin(tokens: Tokens) -> jax.Array:
    """A loss of its own: how far a token's ratio is from 1, squared, where its advantage is negative."""
    return (tokens.advantages < 0) * (tokens.ratio - 1.2) ** 2


def demonstrations(count: int = 3) -> list[Group]:
    """Rows of data, each with one completion, of which one was cut."""
    finish = ["stop", "length", "stop"]
    return [make_group([1.0], seed=100 + row, finish=finish[row % 3]) for row in range(count)]


def step(
    groups: list[Group], beside: Sequence[Group] = (), **changes: Any
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The negative gradient of each weight in a step, and its metrics.

    A step of plain descent is so long that the weights before it, and their rounding, are as nothing.
    """
    trainer, state = make_trainer(**merged(changes, {"train": {"optimizer": {"learning_rate": RATE}}}))
    before = host(state.params)
    state, metrics = train_on(trainer, state, groups, beside=beside)
    moved = {name: (np.array(x, np.float64) - before[name]) / RATE for name, x in state.params.items()}
    return moved, metrics


def sampled(**changes: Any) -> list[Group]:
    """Completions as the state's own weights would have drawn them, but for noise."""
    trainer, state = make_trainer(**changes)
    return with_logprobs(trainer, state, groups_of(REWARDS), shift=0.05)


def assert_sum(found: dict[str, np.ndarray], *parts: tuple[float, dict[str, np.ndarray]]) -> None:
    """Each gradient is the weighted sum of the parts' gradients, to 1e-6 of its largest number."""
    for name, own in found.items():
        expected = sum(factor * part[name] for factor, part in parts)
        bar = 1e-6 * float(sum(factor * np.abs(part[name]).max() for factor, part in parts))
        np.testing.assert_allclose(own, expected, rtol=0, atol=bar, err_msg=name)


MAIN: list[dict[str, Any]] = [
    {"algorithm": {"recipe": "grpo"}},
    {"algorithm": {"recipe": "dr_grpo", "entropy_bonus": 0.01}},
    {"algorithm": {"recipe": "gspo"}},
    {"algorithm": {"recipe": "dapo"}, "train": {"packing": "sequences"}},
    {"algorithm": {"recipe": "reinforce"}, "train": {"packing": "none"}},
    {"algorithm": {"recipe": "grpo", "kl": "k3", "kl_coef": 0.1, "top_entropy": 0.5}, "reference": True},
    {"algorithm": {"recipe": "grpo", "loss": "clip_cov"}, "devices": 2},
]


@pytest.mark.parametrize("main", MAIN, ids=lambda main: "-".join(map(str, main["algorithm"].values())))
def test_the_gradient_of_a_mixed_step_is_the_sum_of_its_parts(main: dict[str, Any]) -> None:
    groups, beside = sampled(**main), demonstrations()
    alone, before = step(groups, **main)
    imitated, sft = step(beside, algorithm={"recipe": "sft"}, group_size=1)
    both = {**main, "algorithm": {**main["algorithm"], "loss_parts": [SFT]}}
    mixed, metrics = step(groups, beside, **both)
    assert max(np.abs(x).max() for x in alone.values()) > 1e-5 < max(np.abs(x).max() for x in imitated.values())
    assert_sum(mixed, (1.0, alone), (WEIGHT, imitated))
    assert metrics["policy/likelihood_loss"] == pytest.approx(sft["train-other/loss"], rel=1e-5)
    total = before["train-other/loss"] + WEIGHT * sft["train-other/loss"]
    assert metrics["train-other/loss"] == pytest.approx(total, rel=1e-4, abs=1e-6)
    tokens = sum(group.transcripts[0].num_drawn for group in beside)
    assert metrics["tokens/demonstrations"] == tokens == sft["tokens/completion"]
    moved = ("loss", "gradient_norm", "update_norm", "likelihood", "tokens/", "time/", "throughput/", "learning_rate")
    for name in before:  # what is measured of completions does not change
        if not any(part in name for part in moved):
            assert metrics[name] == pytest.approx(before[name], rel=1e-5, abs=1e-7), name


def test_a_step_whose_groups_are_all_left_out_still_imitates() -> None:
    groups, beside = groups_of([[1.0] * 4, [0.0] * 4]), demonstrations()
    imitated, _ = step(beside, algorithm={"recipe": "sft"}, group_size=1)
    for options in ({"zero_variance": "drop"}, {"zero_variance": "drop", "top_entropy": 0.5}):
        mixed, metrics = step(groups, beside, algorithm={"recipe": "grpo", "loss_parts": [SFT], **options})
        assert_sum(mixed, (WEIGHT, imitated))
        assert metrics["optimizer/updates"] == 1 and np.isfinite(list(metrics.values())).all()


def test_minibatches_share_the_demonstrations() -> None:
    algorithm = {"recipe": "grpo", "minibatches": 2, "loss_parts": [{**SFT, "prompts_per_step": 4}]}
    trainer, state = make_trainer(algorithm=algorithm)
    beside = demonstrations(4)
    batches, batched = trainer.prepare(state, groups_of(REWARDS), beside)
    found = [np.count_nonzero(np.asarray(batch.likelihoods)) for batch in batches]
    lengths = [group.transcripts[0].num_drawn for group in beside]
    assert found == [sum(lengths[:2]), sum(lengths[2:])] and batched.tokens.demonstrated == sum(lengths)
    for batch in batches:
        assert float(np.sum(np.asarray(batch.likelihoods))) == pytest.approx(WEIGHT, rel=1e-6)
        assert not np.any(np.asarray(batch.likelihoods) * np.asarray(batch.mask))
        assert not np.any(np.asarray(batch.likelihoods) * np.asarray(batch.weights))


def test_the_gradient_of_a_part_of_ones_own_is_added_with_its_weight() -> None:
    groups = sampled()
    alone, _ = step(groups, algorithm={"recipe": "grpo"})
    own, by_itself = step(groups, algorithm={"recipe": "grpo", "loss": "test_loss_parts:margin"})
    parts = [{"loss": "test_loss_parts:margin", "weight": 2.0}]
    mixed, metrics = step(groups, algorithm={"recipe": "grpo", "loss_parts": parts})
    assert_sum(mixed, (1.0, alone), (2.0, own))
    assert max(np.abs(x).max() for x in own.values()) > 1e-5
    assert metrics["policy/loss_part/margin"] > 0 and by_itself["train-other/loss"] > 0


# Runs.


def rows(path: Path) -> str:
    """Five questions with solutions."""
    found = ({"question": f"What is {n} + 1?", "answer": str(n + 1), "solution": f"{n + 1}."} for n in range(5))
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(path)


def mixed_run(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of GRPO that imitates five rows beside, three a step."""
    task = {"name": "jsonl", "path": rows(folder / "rows.jsonl"), "completion": "solution"}
    part = {"recipe": "sft", "weight": 2.0, "prompts_per_step": 3, "tasks": [task]}
    algorithm = {"recipe": "grpo", "loss_parts": [part]}
    sizes = {"max_prompt_tokens": 32, "max_new_tokens": 4}
    return {**SHORT, "algorithm": algorithm, "steps": 4, "rollout": sizes, "eval": {"at_end": False}, **changes}


def test_demonstrations_are_rows_of_the_part_s_own_tasks(tiny_model: Path, tmp_path: Path) -> None:
    config = make_config(tiny_model, **mixed_run(tiny_model, tmp_path))
    spec, tokenizer = spec_of(config).rollout, load_tokenizer(resolve(str(tiny_model)))
    assert spec.demonstrations is not None
    found = mixed_in(spec.demonstrations, spec, Feed(spec.prompts, tokenizer)).next(3)
    written = [json.loads(line)["solution"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {group.transcripts[0].text for group in found.groups} <= set(written)


@pytest.mark.usefixtures("one_device")
def test_a_mixed_run_learns_its_data_and_goes_on_where_it_stopped(tiny_model: Path, tmp_path: Path) -> None:
    settings = mixed_run(tiny_model, tmp_path)
    whole = make_config(tiny_model, tmp_path, name="whole", **settings)
    assert train(whole, plain=True) == 0
    lines = trained(tmp_path / "whole")
    losses = [line["policy/likelihood_loss"] for line in lines]
    assert losses[-1] < 0.9 * losses[0] and all(line["tokens/demonstrations"] >= 6 for line in lines)
    assert all("policy/logprob_gap/mean" in line and line["policy/logprob_gap/mean"] < 1e-3 for line in lines)
    half = make_config(tiny_model, tmp_path, name="half", **{**settings, "steps": 2})
    assert train(half, plain=True) == 0
    assert train(config_of(tmp_path / "half", steps=4), plain=True) == 0
    assert_same_run(tmp_path / "half", tmp_path / "whole")
    assert read_records(tmp_path / "half" / "samples.jsonl")


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("main", ["ppo", "distill", "full"])
def test_it_is_mixed_with_a_critic_and_with_a_teacher(main: str, tiny_model: Path, tmp_path: Path) -> None:
    settings = mixed_run(tiny_model, tmp_path, steps=2)
    settings["algorithm"]["recipe"] = main if main == "ppo" else "distill"
    if main != "ppo":
        settings["teacher"] = {"model": str(tiny_model), "loss": "full" if main == "full" else "sampled"}
    assert train(make_config(tiny_model, tmp_path, name=main, **settings), plain=True) == 0
    for line in trained(tmp_path / main):
        assert line["policy/likelihood_loss"] > 0 and np.isfinite(list(line.values())).all()
        assert ("critic/loss" if main == "ppo" else "policy/kl_teacher") in line


@pytest.mark.usefixtures("one_device")
def test_prompts_of_demonstrations_are_measured_and_checked_like_others(tiny_model: Path, tmp_path: Path) -> None:
    settings = mixed_run(tiny_model, tmp_path, steps=1)
    unset = {**settings, "rollout": {"max_prompt_tokens": None, "max_new_tokens": 4}}
    longer = {"question": f"What is {'1 + ' * 5}1?", "answer": "6", "solution": "6."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(longer) + "\n")
    assert train(make_config(tiny_model, tmp_path, name="unset", **unset), plain=True) == 0
    assert json.loads(json.dumps(config_of(tmp_path / "unset").model_dump()))["algorithm"]["loss_parts"]
    short = {**settings, "rollout": {"max_prompt_tokens": 12, "max_new_tokens": 4}}
    with pytest.raises(ValueError, match=r"none of the 1 demonstrations of jsonl fits"):
        train(make_config(tiny_model, tmp_path, name="short", **short), plain=True)
    settings["algorithm"]["loss_parts"][0]["tasks"][0]["completion"] = "proof"
    with pytest.raises(ValueError, match=r"tasks\.completion: .* has no column 'proof'"):
        train(make_config(tiny_model, tmp_path, name="wrong", **settings), plain=True)


def test_a_plan_counts_the_rows_of_demonstrations() -> None:
    plain, mixed = (
        spec_of(make_config(algorithm={"recipe": "grpo", "loss_parts": parts}, train={"packing": "none"})).batch
        for parts in ([], [SFT])
    )
    assert (plain.max_rows, mixed.max_rows) == (16, 19)
    lengths = SequenceLengths(prompts=np.full(4, 5), completions=np.full((4, 4), 3))
    more = SequenceLengths(
        prompts=lengths.prompts, completions=lengths.completions, demonstrations=np.array([[5, 3], [6, 2], [4, 4]])
    )
    found = [[len(pack(step, plain).rows) for step in optimizer_steps(each, 1)] for each in (lengths, more)]
    assert found == [[16], [19]]


def test_certify_says_what_it_does_not_check() -> None:
    """Demonstrations are mixed into its run of other options, a loss of the user's own is not."""
    parts = [SFT, {"loss": "test_loss_parts:margin"}]
    config = make_config("Qwen/Qwen3-0.6B", algorithm={"recipe": "grpo", "loss_parts": parts})
    subject = make_subject(config)
    assert not subject.recipe.loss_parts
    said = "parts of the loss: test_loss_parts:margin have no naive form; the recipe is checked without them"
    assert said in list(skipped(subject))


# Errors of the config.


@pytest.mark.parametrize(
    ("main", "part", "key", "message"),
    [
        ("grpo", {}, "0", "a part has either a recipe, sft, or a loss"),
        ("grpo", {"recipe": "sft", "loss": "test_loss_parts:margin"}, "0", "set one of them"),
        ("sft", {"recipe": "sft"}, "0.recipe", "recipe sft imitates data already; add the part's tasks to tasks"),
        ("dpo", {"recipe": "sft"}, "0.recipe", "sft cannot be mixed with it: run podium sft first"),
        ("grpo", {"loss": "gspo"}, "0.loss", "a built-in loss is the policy term of a recipe"),
        ("grpo", {"loss": "test_loss_parts:margni"}, "0.loss", "did you mean 'margin'"),
        ("grpo", {"loss": "test_loss_parts:margin", "prompts_per_step": 2}, "0.prompts_per_step", "leave it out"),
        ("grpo", {"loss": "test_loss_parts:margin", "tasks": [{"name": "arithmetic"}]}, "0.tasks", "leave it out"),
    ],
)
def test_parts_that_cannot_be_mixed_are_named(main: str, part: dict[str, Any], key: str, message: str) -> None:
    size = {"dpo": 2, "sft": 1}.get(main, 8)
    algorithm = {"recipe": main, "loss_parts": [part]}
    with pytest.raises(ConfigError) as error:
        load_settings(
            [],
            ["model=a/b", "tasks=[{name: arithmetic}]", f"group_size={size}", f"algorithm={json.dumps(algorithm)}"],
            {},
        )
    assert f"algorithm.loss_parts.{key}: " in str(error.value) and message in str(error.value)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            ["first:cost", "second:cost"],
            r"loss_parts\.1: .*an earlier part has a function of the same name: second:cost",
        ),
        (["first:strict"], r"loss_parts\.0\.loss: first:strict asks for floor.*give the parameter a default"),
    ],
)
def test_functions_that_share_a_name_or_need_an_option_are_named_before_a_run(parts, message, tmp_path, monkeypatch):
    for module in ("first", "second"):
        (tmp_path / f"{module}.py").write_text("def cost(tokens): ...\ndef strict(tokens, *, floor): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = ", ".join(f"{{loss: '{path}'}}" for path in parts)
    with pytest.raises(ConfigError, match=message):
        load_settings([], ["model=a/b", "tasks=[{name: arithmetic}]", f"algorithm={{loss_parts: [{text}]}}"], {})


def test_a_part_that_stands_twice_and_shares_that_are_uneven_are_named() -> None:
    given = ["model=a/b", "tasks=[{name: arithmetic}]"]
    with pytest.raises(
        ConfigError, match=r"loss_parts\.1: sft occurs in two parts of the loss; mix the data by the weights"
    ):
        load_settings([], [*given, "algorithm={loss_parts: [{recipe: sft}, {recipe: sft, weight: 2}]}"], {})
    uneven = "algorithm={minibatches: 2, loss_parts: [{recipe: sft, prompts_per_step: 3}]}"
    with pytest.raises(ConfigError, match=r"prompts_per_step: 3 must be a multiple of minibatches 2"):
        load_settings([], [*given, uneven], {})


@pytest.mark.parametrize(
    ("recipe", "way_out"),
    [
        ("rloo", "set algorithm.recipe to rloo, or a loss of your own here"),
        ("ppo", "set algorithm.recipe to ppo"),
        ("distill", "set teacher, with its weight"),
        ("dpo", "run podium dpo separately"),
        ("sfd", "did you mean sft?"),
    ],
)
def test_only_sft_is_a_recipe_of_a_part(recipe: str, way_out: str) -> None:
    part = f"algorithm={{loss_parts: [{{recipe: {recipe}}}]}}"
    with pytest.raises(ConfigError, match=rf"algorithm\.loss_parts\.0\.recipe: .*{way_out}"):
        load_settings([], ["model=a/b", "tasks=[{name: arithmetic}]", part], {})
