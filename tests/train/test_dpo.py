"""`podium dpo`: pairs of the data, their losses by hand, and runs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import assert_same_run, config_of, make_config, read_records, spec_of

from podium.algorithms.losses import Tokens, policy_loss
from podium.algorithms.recipe_options import make_recipe
from podium.config.errors import ConfigError
from podium.config.schema import AlgorithmConfig, TaskConfig
from podium.models.files.source import resolve
from podium.models.text.tokenizer import load_tokenizer
from podium.sampling.demonstrations import demonstrate
from podium.sampling.feed import Feed
from podium.settings import load_settings
from podium.tasks.mixture import TaskMixture
from podium.train.loop import train

pytestmark = pytest.mark.usefixtures("one_device")
ROWS = [{"prompt": f"{n} + 1", "chosen": str(n + 1), "rejected": str(n) * 2} for n in range(1, 9)]
DPO = {"algorithm": {"recipe": "dpo"}, "group_size": 2}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_hand(loss, beta, smoothing, margin, mean_margin):
    """The mean over pairs, and its slope by the margin of sums or of means, in float64."""
    if loss == "dpo":
        value = -(1 - smoothing) * np.log(sigmoid(beta * margin)) - smoothing * np.log(sigmoid(-beta * margin))
        return value, -beta * (1 - smoothing) * sigmoid(-beta * margin) + beta * smoothing * sigmoid(beta * margin)
    if loss == "ipo":
        return (mean_margin - 1 / (2 * beta)) ** 2, 2 * (mean_margin - 1 / (2 * beta))
    return np.maximum(0, 1 - beta * margin), np.where(beta * margin < 1, -beta, 0.0)


@pytest.mark.parametrize(
    ("loss", "options"),
    [("dpo", {}), ("dpo", {"beta": 0.5, "label_smoothing": 0.2}), ("ipo", {"beta": 0.3}), ("dpo_hinge", {"beta": 0.7})],
)
def test_losses_and_gradients_are_those_of_the_papers(loss, options):
    """Two rows, two pairs in the first, with a prompt before each; lengths differ, and some tokens are not trained."""
    recipe = make_recipe(
        AlgorithmConfig(recipe="dpo", loss=loss, loss_options=options or None), group_size=2, prompts_per_step=4
    )
    segments = np.array([[1, 2, 2, 2, 3, 3, 4, 5, 6, 6, 6, 0], [1, 1, 2, 3, 3, 3, 3, 3, 0, 0, 0, 0]])
    prompts = np.array([[1, 1, 1, 1, 1, 1, 4, 4, 4, 4, 4, 0], [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]])
    sign = np.array([[0, 1, 1, 1, -1, -1, 0, 1, -1, -1, -1, 0], [0, 0, 1, -1, -1, -1, -1, -1, 0, 0, 0, 0]], np.float32)
    mask = (sign != 0).astype(np.float32)
    random = np.random.default_rng(0)
    logprobs, reference = (random.normal(-2, 1.5, sign.shape).astype(np.float32) for _ in range(2))
    places = [(r, p) for r in range(2) for p in sorted({*prompts[r]} - {0})]
    weights = np.zeros(sign.shape)
    value, slope = 0.0, np.zeros(sign.shape)
    beta, smoothing = options.get("beta", 0.1), options.get("label_smoothing", 0.0)
    for row, prompt in places:
        own = (np.arange(2)[:, None] == row) & (prompts == prompt) & (sign != 0)
        sides = [own & (sign == 1), own & (sign == -1)]
        for side in sides:
            weights[side] = 1 / (2 * len(places) * side.sum())
        ratio = logprobs.astype(np.float64) - reference
        sums = [ratio[side].sum() for side in sides]
        means = [ratio[side].mean() for side in sides]
        one, by_margin = by_hand(loss, beta, smoothing, sums[0] - sums[1], means[0] - means[1])
        value += one / len(places)
        for side, direction in zip(sides, (1, -1), strict=True):
            slope[side] += direction * by_margin / len(places) / (side.sum() if loss == "ipo" else 1)

    def ours(logprobs):
        tokens = Tokens(
            logprobs,
            old_logprobs=jnp.zeros_like(logprobs),
            advantages=jnp.asarray(sign),
            segments=jnp.asarray(segments),
            mask=jnp.asarray(mask),
            scores={"reference_logprobs": jnp.asarray(reference)},
            prompts=jnp.asarray(prompts),
        )
        found, stats = policy_loss(recipe, tokens)
        return jnp.sum(found * weights), stats

    (found, stats), gradient = jax.value_and_grad(ours, has_aux=True)(jnp.asarray(logprobs))
    np.testing.assert_allclose(found, value, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-6)
    assert float(jnp.sum(stats["pairs"] * mask)) == pytest.approx(len(places))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [TaskConfig(name="preferences", path=str(path), eval_path=str(path)).model_dump()]


def prompts_of(path, row):
    write(path, [row])
    return TaskMixture([TaskConfig(name="preferences", path=str(path))], seed=0).next(1)[0].prompt


USER, RIGHT, WRONG = (
    {"role": role, "content": text} for role, text in (("user", "1 + 1"), ("assistant", "2"), ("assistant", "3"))
)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1 + 1", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
        {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
    ],
)
def test_trl_s_forms_of_a_pair_are_one(row, tmp_path):
    found = prompts_of(tmp_path / "pairs.jsonl", row)
    assert (list(found.messages), found.answer) == ([USER], "2")
    assert dict(found.metadata) == {"chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1", "chosen": "2"}, "no column 'rejected'"),
        ({"prompt": "1", "chosen": " ", "rejected": "3"}, "the chosen answer is empty"),
        ({"prompt": "1", "chosen": "2", "rejected": "2"}, "are equal, '2'; drop the row"),
        ({"chosen": "a 2", "rejected": "a 3"}, "no column 'prompt', which is required if chosen and rejected are text"),
        ({"chosen": [USER, RIGHT], "rejected": [WRONG]}, "differ in the last message alone"),
        ({"prompt": [USER], "chosen": [USER, RIGHT], "rejected": "3"}, "text or one assistant message"),
        ({"prompt": [USER, RIGHT], "chosen": "2", "rejected": "3"}, "ends with a message of the assistant's"),
    ],
)
def test_rows_that_are_no_pair_say_which_and_why(row, said, tmp_path):
    with pytest.raises(ValueError, match=rf"pairs.jsonl:1.*{said}"):
        prompts_of(tmp_path / "pairs.jsonl", row)


def run_config(tiny_model, tmp_path, **changes):
    tasks = write(tmp_path / "pairs.jsonl", ROWS)
    plain = {"eval": {"at_start": False, "at_end": False}, "prompts_per_step": 4, "tasks": tasks, **DPO}
    return make_config(tiny_model, tmp_path, **(plain | changes))


def test_a_pair_shares_a_row_and_one_that_is_too_long_is_an_error(tiny_model, tmp_path):
    config = run_config(tiny_model, tmp_path)
    tokenizer = load_tokenizer(resolve(str(tiny_model)))
    spec = spec_of(config)
    prompts = Feed(spec.rollout.prompts, tokenizer).next(4)
    groups, _ = demonstrate(prompts, spec.rollout, tokenizer, form="pair")
    for each, group in zip(prompts, groups, strict=True):
        pair = each.prompt.prompt.metadata
        assert [x.text for x in group.transcripts] == [pair["chosen"], pair["rejected"]]
        assert [x.total for x in group.rewards] == [1.0, -1.0]
    assert spec.batch.row_tokens == config.rollout.max_prompt_tokens + 2 * config.rollout.max_new_tokens
    short = spec_of(run_config(tiny_model, tmp_path, rollout={"max_new_tokens": 1}))
    with pytest.raises(ValueError, match=r"chosen completion has more than rollout\.max_new_tokens 1 tokens"):
        demonstrate(prompts, short.rollout, tokenizer, form="pair")


def test_a_run_without_fitting_pairs_ends_before_anything_is_compiled(tiny_model, tmp_path, capsys):
    unpaired = run_config(tiny_model, tmp_path, name="sums", tasks=[{"name": "arithmetic"}], eval={"at_start": True})
    with pytest.raises(ValueError, match=r"has no pair of completions; train on pairs with `tasks: \[\{name: pref"):
        train(unpaired, plain=True)
    with pytest.raises(ValueError, match=r"completion has more than rollout\.max_new_tokens 1 tokens"):
        train(run_config(tiny_model, tmp_path, name="long", rollout={"max_new_tokens": 1}), plain=True)
    assert "the first compiles" not in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_run_prefers_what_was_chosen_and_resumes_bit_for_bit(run_of, tmp_path, lora):
    changes = {
        "tasks": write(tmp_path / "pairs.jsonl", ROWS),
        "prompts_per_step": 4,
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"every_steps": 2},
        "train": {"optimizer": {"learning_rate": 1e-2}},
        "lora": lora,
        **DPO,
    }
    whole = run_of(**changes, steps=6)
    lines = [line for line in read_records(whole / "metrics.jsonl") if "rewards/margins" in line]
    assert len(lines) == 6
    assert lines[0]["train-other/loss"] == pytest.approx(np.log(2), abs=1e-4)  # policy = reference
    assert lines[0]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert lines[-1]["rewards/margins"] > 0.05 and lines[-1]["rewards/accuracies"] == 1.0
    assert lines[-1]["rewards/margins"] == pytest.approx(lines[-1]["rewards/chosen"] - lines[-1]["rewards/rejected"])
    stopped = run_of(**changes, steps=2)
    assert train(config_of(stopped, steps=6), plain=True) == 0
    assert_same_run(stopped, whole)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["group_size=8"], "compares two completions of a prompt, got group_size 8; set it to 2"),
        (
            ["algorithm.loss=clipped"],
            "of the data, and clipped does not; set dpo or ipo or dpo_hinge",
        ),
        (["algorithm.old_logprobs=sampler"], "samples nothing and compares with the first model; leave it unset"),
        (["algorithm.mean=token"], "token would weigh them by length"),
        (["algorithm.loss_options={beta: 0}"], "beta 0 must be above 0"),
        (["algorithm.loss_options={label_smoothing: 0.5}"], "0.5 must be 0 or more, and below 0.5"),
        (["train.packing=sequences"], "in different rows; set it to shared_prompts"),
        (["train.row_tokens=1600"], "1600 is less than a prompt with both completions, 2049"),
        (
            ["algorithm.recipe=grpo", "algorithm.loss=ipo"],
            "ipo learns from pairs of the data, and recipe grpo does not use them",
        ),
    ],
)
def test_settings_that_pairs_do_not_allow(settings, said):
    base = ["model=a/b", "tasks=[{name: arithmetic}]", "algorithm.recipe=dpo", "group_size=2"]
    with pytest.raises(ConfigError, match=said):
        load_settings([], [*base, *settings], {})
