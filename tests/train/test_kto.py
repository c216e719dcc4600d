"""KTO: labelled completions of the data, the loss by hand, the estimate of the KL, and runs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import DECODER
from tiny_runs import assert_same_run, config_of, make_config, read_records, spec_of

from podium.algorithms.losses import Tokens, policy_loss
from podium.algorithms.recipe_options import make_recipe
from podium.config.errors import ConfigError
from podium.config.schema import AlgorithmConfig, TaskConfig
from podium.models.files.source import resolve
from podium.models.params import TRAIN_AXES
from podium.models.text.tokenizer import load_tokenizer
from podium.sampling.demonstrations import demonstrate
from podium.sampling.feed import Feed
from podium.settings import load_settings, preference_overrides
from podium.sharding import ShardingRules, make_mesh
from podium.tasks.mixture import TaskMixture
from podium.train.batches.batch import take
from podium.train.batches.prepare import pack_step, reference_point
from podium.train.loop import train
from podium.train.scorers import Scorer

pytestmark = pytest.mark.usefixtures("one_device")
ROWS = [{"prompt": f"{n} + 1", "completion": str(n + 1 if n % 2 else 0), "label": n % 2 == 1} for n in range(1, 9)]
KTO = {"algorithm": {"recipe": "dpo", "loss": "kto"}, "group_size": 1}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("options", [{}, {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.6}])
@pytest.mark.parametrize("point", [0.0, 1.7])
def test_loss_and_gradient_are_those_of_the_paper(options, point):
    """Two rows with two completions each, of which one lies in its prompt's segment; lengths differ."""
    algorithm = AlgorithmConfig(recipe="dpo", loss="kto", loss_options=options or None)
    recipe = make_recipe(algorithm, group_size=1, prompts_per_step=4)
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 2, 2, 2, 2, 2, 2, 2]])
    sign = np.array([[0, 1, 1, 1, 0, 0, -1, -1, 0], [0, -1, 0, 0, 1, 1, 1, 1, 1]], np.float32)
    mask = (sign != 0).astype(np.float32)
    random = np.random.default_rng(0)
    logprobs, reference = (random.normal(-2, 1.5, sign.shape).astype(np.float32) for _ in range(2))
    beta = options.get("beta", 0.1)
    weights, value, slope = np.zeros(sign.shape), 0.0, np.zeros(sign.shape)
    rewards = {1: [], -1: []}
    for row, segment in ((0, 1), (0, 2), (1, 1), (1, 2)):
        own = (np.arange(2)[:, None] == row) & (segments == segment) & (sign != 0)
        side = int(sign[own][0])
        weight = options.get("desirable_weight" if side > 0 else "undesirable_weight", 1.0)
        ratio = float((logprobs.astype(np.float64) - reference)[own].sum())
        rewards[side].append(beta * ratio)
        weights[own] = 1 / (4 * own.sum())
        inner = sigmoid(beta * side * (ratio - point))
        value += weight * (1 - inner) / 4
        slope[own] = -weight * beta * side * inner * (1 - inner) / 4

    def ours(logprobs):
        tokens = Tokens(
            logprobs,
            old_logprobs=jnp.zeros_like(logprobs),
            advantages=jnp.asarray(sign),
            segments=jnp.asarray(segments),
            mask=jnp.asarray(mask),
            scores={
                "reference_logprobs": jnp.asarray(reference),
                "reference_point": jnp.full(sign.shape, point, jnp.float32),
            },
        )
        found, stats = policy_loss(recipe, tokens)
        return jnp.sum(found * weights), stats

    (found, stats), gradient = jax.value_and_grad(ours, has_aux=True)(jnp.asarray(logprobs))
    np.testing.assert_allclose(found, value, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-7)
    sums = {name: float(jnp.sum(x * mask)) for name, x in stats.items()}
    assert (sums["chosen"], sums["rejected"]) == (pytest.approx(2), pytest.approx(2))
    assert sums["pairs_chosen"] == pytest.approx(sum(rewards[1]), rel=1e-4)
    assert sums["pairs_rejected"] == pytest.approx(sum(rewards[-1]), rel=1e-4)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [TaskConfig(name="labelled", path=str(path), eval_path=str(path)).model_dump()]


def run_config(tiny_model, tmp_path, **changes):
    tasks = write(tmp_path / "labelled.jsonl", ROWS)
    plain = {"eval": {"at_start": False, "at_end": False}, "prompts_per_step": 4, "tasks": tasks, **KTO}
    return make_config(tiny_model, tmp_path, **(plain | changes))


def prompts_of(path, row):
    write(path, [row])
    task = TaskConfig(name="labelled", path=str(path))
    return [each.prompt for each in TaskMixture([task], seed=0).train_prompts()["labelled"]]


USER, RIGHT, WRONG = (
    {"role": role, "content": text} for role, text in (("user", "1 + 1"), ("assistant", "2"), ("assistant", "3"))
)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "1 + 1", "completion": "2", "label": True}, [("2", True)]),
        ({"prompt": [USER], "completion": [WRONG], "label": False}, [("3", False)]),
        ({"prompt": "1 + 1", "chosen": "2", "rejected": "3"}, [("2", True), ("3", False)]),
        ({"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, [("2", True), ("3", False)]),
    ],
)
def test_trl_s_forms_become_labelled_answers(row, found, tmp_path):
    prompts = prompts_of(tmp_path / "labelled.jsonl", row)
    assert [(each.metadata["completion"], each.metadata["label"]) for each in prompts] == found
    assert all(each.messages == [USER] for each in prompts)
    assert len({each.id for each in prompts}) == len(found)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1", "completion": "2"}, "no column 'label'; a row has prompt, completion and label"),
        ({"prompt": "1", "completion": "2", "label": 1}, "the label is 1; it must be true or false"),
        ({"prompt": "1", "completion": "", "label": True}, "the completion is empty"),
        ({"prompt": [USER, RIGHT], "completion": "2", "label": True}, "ends with a message of the assistant's"),
        ({"prompt": "1", "chosen": "2"}, "no column 'rejected'"),
    ],
)
def test_rows_without_a_label_say_which_and_why(row, said, tmp_path):
    with pytest.raises(ValueError, match=rf"labelled.jsonl:1.*{said}"):
        prompts_of(tmp_path / "labelled.jsonl", row)


def test_the_reference_point_is_the_mean_log_ratio_of_the_next_row_s_prompt(tiny_model, tmp_path):
    """The program is a table of target and position; the policy's numbers are thrice the reference's."""
    config = run_config(tiny_model, tmp_path)
    tokenizer, spec = load_tokenizer(resolve(str(tiny_model))), spec_of(config)
    groups, _ = demonstrate(Feed(spec.rollout.prompts, tokenizer).next(4), spec.rollout, tokenizer, form="label")
    assert [group.rewards[0].total for group in groups] == [
        1.0 if group.prompt.prompt.metadata["label"] else -1.0 for group in groups
    ]
    (minibatch,) = pack_step(groups, spec.recipe, spec.batch).minibatches

    def program(params, batch):
        return params["factor"] * (0.01 * batch.positions + 0.001 * batch.targets)

    first = {"factor": jnp.float32(1.0)}
    reference = Scorer(name="reference_logprobs", decoder=DECODER, params=first, program=program)
    rules = ShardingRules(make_mesh("auto", jax.devices()[:1]), TRAIN_AXES)
    found = reference_point(minibatch.samples, spec.batch, rules, [reference], {"factor": jnp.float32(3.0)})
    prompts = [group.tokens for group in groups]
    drawn = [group.transcripts[0].continuation[0].tokens for group in groups]
    ratios = []
    for row, prompt in enumerate(prompts):
        tokens = drawn[row - 1]  # of the row before it, and of the last one at first
        positions = len(prompt) - 1 + np.arange(len(tokens))
        ratios.append(2.0 * float(np.sum(0.01 * positions + 0.001 * tokens)))
    assert len({round(each, 6) for each in ratios}) > 1
    assert found == pytest.approx(np.mean(ratios), rel=1e-5)
    below = reference_point(minibatch.samples, spec.batch, rules, [reference], {"factor": jnp.float32(0.5)})
    assert below == 0.0
    assert take(minibatch.batch.targets, minibatch.spans)[0].tolist() == drawn[0].tolist()  # nothing else changed


def test_a_run_without_labels_ends_before_anything_is_compiled(tiny_model, tmp_path, capsys):
    sums = run_config(tiny_model, tmp_path, name="sums", tasks=[{"name": "arithmetic"}])
    with pytest.raises(ValueError, match=r"has no completion with a label; train on them with `tasks: \[\{name: lab"):
        train(sums, plain=True)
    with pytest.raises(ValueError, match=r"its completion has more than rollout\.max_new_tokens 1 tokens"):
        train(run_config(tiny_model, tmp_path, name="long", rollout={"max_new_tokens": 1}), plain=True)
    assert "the first compiles" not in capsys.readouterr().err


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 4}, marks=pytest.mark.long)])
def test_a_run_learns_from_labels_and_resumes_bit_for_bit(run_of, tmp_path, lora):
    changes = {
        "tasks": write(tmp_path / "labelled.jsonl", ROWS),
        "prompts_per_step": 8,
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"every_steps": 2},
        "train": {"optimizer": {"learning_rate": 1e-2}},
        "lora": lora,
        **KTO,
    }
    whole = run_of(**changes, steps=5)
    lines = [line for line in read_records(whole / "metrics.jsonl") if "rewards/margins" in line]
    assert len(lines) == 5
    assert lines[0]["train-other/loss"] == pytest.approx(0.5, abs=1e-4)  # policy = reference
    assert lines[0]["rewards/reference_point"] == pytest.approx(0, abs=1e-3)
    assert "rewards/accuracies" not in lines[0]
    assert lines[-1]["train-other/loss"] < 0.498 and lines[-1]["rewards/margins"] > 0.01
    assert lines[-1]["rewards/margins"] == pytest.approx(lines[-1]["rewards/chosen"] - lines[-1]["rewards/rejected"])
    stopped = run_of(**changes, steps=2)
    assert train(config_of(stopped, steps=5), plain=True) == 0
    assert_same_run(stopped, whole)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["group_size=2"], "loss kto uses one completion of each row, got group_size 2; set it to 1"),
        (["prompts_per_step=3", "algorithm.minibatches=2"], "set prompts_per_step to 2 or more for each of 2"),
        (["algorithm.loss_options={desirable_weight: 0}"], "desirable_weight 0 must be above 0"),
        (["algorithm.mean=token"], "token would weigh them by length"),
        (["algorithm.recipe=sft"], "kto learns from labelled answers of the data, and recipe sft does not use them"),
    ],
)
def test_settings_that_labels_do_not_allow(settings, said):
    base = ["model=a/b", "tasks=[{name: labelled, path: x.jsonl}]", "algorithm.recipe=dpo", "algorithm.loss=kto"]
    with pytest.raises(ConfigError, match=said):
        load_settings([], [*base, "group_size=1", *settings], {})


@pytest.mark.parametrize(("loss", "size"), [("kto", 1), ("ipo", 2), ("dpo", 2)])
def test_the_command_sets_the_group_size_of_the_loss(loss, size):
    given = ["model=a/b", "tasks=[{name: arithmetic}]", f"algorithm.loss={loss}"]
    assert [each.value for each in preference_overrides([], given)] == ["dpo", size]
