"""Reward models: the scores of conversations, what they add to rewards, and runs that learn from them."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from others_code import others_code
from safetensors.numpy import load_file, save_file
from tiny_runs import (
    assert_same_run,
    config_of,
    make_config,
    make_group,
    read_records,
    rollout_spec,
    rules_of,
    trained,
    write_tiny_model,
)

from benches.recipes import VOCAB
from podium.certify.naive import in_float64, values
from podium.config.errors import ConfigError
from podium.config.schema import TaskConfig
from podium.files import to_json
from podium.models.architecture import ModelError
from podium.models.files.hf import load_params
from podium.models.files.source import read_architecture, resolve
from podium.run.run_spec import PromptSpec, RolloutSpec
from podium.sampling.feed import Feed
from podium.settings import load_settings
from podium.tasks.conversations.environment_forms import conversing
from podium.tasks.rewards import with_score
from podium.tasks.task import FAILED, Reward
from podium.train.evaluate import evaluate_weights
from podium.train.grading_models import Conversation, GradingModel, load_grading_models
from podium.train.loop import train
from podium.train.setup import make_model, run_spec

pytestmark = pytest.mark.usefixtures("one_device")
TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'What', 'assistant': 'Answer', 'system': 'only'}[m.role] }}"
    " {{ m.content }} <end> {% endfor %}"
)
WORDS = [*VOCAB[:3], *reversed(VOCAB[3:])]
"""Those of the policy's tokenizer with other numbers."""
ROLES = {"user": "What", "assistant": "Answer", "system": "only"}


def write_reward_model(folder: Path, template: str = TEMPLATE, **changes: Any) -> Path:
    """A random reward model whose weights are numbers of bfloat16."""
    write_tiny_model(folder, WORDS, template)
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": WORDS.index("<pad>"),
    }
    path.write_text(json.dumps(raw | changes))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight")
    tensors["score.weight"] = np.random.default_rng(4).standard_normal((1, raw["hidden_size"])).astype(np.float32)
    rounded = {name: np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32)) for name, x in tensors.items()}
    save_file(rounded, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("reward") / "tiny")


def judged(reward_model: Path, *, rewards: dict[str, float] | None = None, **settings: Any) -> dict[str, Any]:
    """Settings of a run that a reward model of this folder grades as `helpful`."""
    return {
        "reward_models": [{"name": "helpful", "model": str(reward_model), **settings}],
        "tasks": [{"name": "arithmetic", "rewards": rewards or {"helpful": 0.5}}],
    }


def loaded(tiny_model: Path, reward_model: Path, devices: int = 1, **settings: Any) -> tuple[GradingModel, RolloutSpec]:
    config = make_config(tiny_model, **judged(reward_model, **settings))
    policy, mesh = make_model(config), rules_of(devices=devices).mesh
    spec = run_spec(config, policy.decoder, mesh)
    (model,) = load_grading_models(spec.rollout, spec.update, mesh)
    return model, rollout_spec(config, policy)


CONVERSATIONS = [
    [("user", "What is 1 + 2 ?"), ("assistant", "3")],
    [("system", "Answer with only the number ."), ("user", "What is 7 + 2 ?"), ("assistant", "9")],
    [("user", "1"), ("assistant", "2"), ("user", "3 + 4"), ("assistant", "the number is 7")],
    [("user", "What is 7 + 2 ?"), ("assistant", "12")],
    [("user", "1"), ("assistant", " ".join("1" * 19))],
    [("user", "1"), ("assistant", " ".join("1" * 20))],
]


def conversation(said: list[tuple[str, str]]) -> Conversation:
    return Conversation(messages=tuple({"role": role, "content": content} for role, content in said))


def tokens_by_hand(said: list[tuple[str, str]]) -> list[int]:
    words = " ".join(f"{ROLES[role]} {content} <end>" for role, content in said).split()
    return [WORDS.index(word) for word in words]


@pytest.mark.parametrize("devices", [1, 4])
def test_scores_are_those_of_the_last_tokens_by_its_own_tokenizer_template_and_weights(
    devices, tiny_model, reward_model
):
    """Against a naive forward pass in float64 of each conversation alone; the last is a token too long for a row."""
    model, _ = loaded(tiny_model, reward_model, devices, max_tokens=24)
    found = model.scores([conversation(each) for each in CONVERSATIONS])
    assert found[-1] is None
    decoder = read_architecture(resolve(str(reward_model)), "own scores")
    with in_float64():
        wide = load_params(resolve(str(reward_model)), decoder, rules_of())
        wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in wide.items()}
        compute, expected = jax.jit(lambda tokens: values(wide, tokens, decoder)), []
        for tokens in map(tokens_by_hand, CONVERSATIONS[:-1]):
            padded = np.pad(np.array(tokens, np.int32), (0, 24 - len(tokens)))  # one program for all lengths
            expected.append(float(np.asarray(compute(padded))[len(tokens) - 1]))
    np.testing.assert_allclose(np.array(found[:-1], np.float64), expected, atol=1e-5)
    assert np.ptp(expected) > 0.1


@pytest.mark.parity
def test_transformers_gives_the_same_scores(tiny_model, reward_model):
    torch = others_code("torch")
    import transformers

    model, _ = loaded(tiny_model, reward_model, max_tokens=64)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(reward_model)
    found = model.scores([conversation(each) for each in CONVERSATIONS])
    for said, score in zip(CONVERSATIONS, found, strict=True):
        messages = [{"role": role, "content": content} for role, content in said]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        with torch.no_grad():
            expected = theirs(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits
        assert score == pytest.approx(expected.item(), abs=1e-4)


def test_a_token_for_padding_at_the_end_has_no_score_like_in_transformers(tiny_model, tmp_path):
    folder = write_reward_model(tmp_path / "padded", pad_token_id=WORDS.index("<end>"))
    model, _ = loaded(tiny_model, folder)
    assert model.tokens(conversation(CONVERSATIONS[0])) == tokens_by_hand(CONVERSATIONS[0])[:-1]


def test_an_int8_reward_model_scores_about_the_same(tiny_model, reward_model):
    whole, small = (loaded(tiny_model, reward_model, base=base)[0] for base in ("bfloat16", "int8"))
    assert small.params["layers.q"].dtype == jnp.int8
    asked = [conversation(each) for each in CONVERSATIONS[:4]]
    expected, found = (np.array(each.scores(asked), np.float64) for each in (whole, small))
    assert 0 < np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


HELPFUL = TaskConfig(name="arithmetic", rewards={"correct": 1.0, "helpful": 0.5})


def test_a_score_is_added_by_its_weight_in_a_conversation_to_the_last_turn():
    graded = Reward(total=1.0, parts={"correct": 1.0}, weights={"correct": 1.0}, turns=(0.25, 0.75))
    found = with_score(graded, HELPFUL, "helpful", -3.0)
    assert (found.total, found.turns) == (-0.5, (0.25, -0.75))
    assert found.parts == {"correct": 1.0, "helpful": -3.0}
    assert found.weights == {"correct": 1.0, "helpful": 0.5}
    alone = with_score(Reward(total=math.nan, parts={"correct": 0.0}), HELPFUL, "helpful", 2.0)
    assert (alone.total, alone.weights) == (1.0, {"helpful": 0.5})
    assert with_score(FAILED, HELPFUL, "helpful", 2.0) is FAILED


def test_a_score_that_counts_as_correctness_is_a_probability():
    task = TaskConfig(name="arithmetic", rewards={"helpful": 1.0}, correct="helpful")
    graded = Reward(total=math.nan, parts={"correct": 0.0})
    found = [with_score(graded, task, "helpful", score).parts["correct"] for score in (0.0, math.log(3), -1e4)]
    assert found == pytest.approx([0.5, 0.75, 0.0])


def test_scores_of_a_batch_are_standardised_and_the_parts_are_not(tiny_model, reward_model):
    """By numpy, over both groups; an answer without a score keeps its total."""
    model, _ = loaded(tiny_model, reward_model, standardise="batch")
    scores = np.array([[1.0, 2.0], [4.0, -3.0]])
    groups = []
    for n, row in enumerate(scores):
        group = make_group([0.0, 1.0, 1.0], seed=n)
        for g, score in enumerate(row):
            group.rewards[g] = with_score(group.rewards[g], HELPFUL, "helpful", score)
        groups.append(group)
    found = model.standardised(groups)
    expected = np.array([0.0, 1.0]) + 0.5 * (scores - scores.mean()) / (scores.std() + 1e-6)
    np.testing.assert_allclose([group.totals[:2] for group in found], expected, rtol=1e-6)
    assert [group.rewards[2].total for group in found] == [1.0, 1.0]
    assert [each.parts["helpful"] for each in found[1].rewards[:2]] == [4.0, -3.0]
    plain, _ = loaded(tiny_model, reward_model)
    assert plain.standardised(groups) == groups


def test_a_run_learns_from_scores_and_resumes_bit_for_bit(run_of, reward_model):
    """Scores differ where grades do not, so no group of DAPO's is replaced; samples have score and total."""
    changes = {
        **judged(reward_model, rewards={"correct": 1.0, "helpful": 0.5}),
        "algorithm": {"recipe": "dapo", "max_refills": 1},
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"every_steps": 2},
        "metrics": {"samples_every": 1},
    }
    whole = run_of(**changes, steps=4)
    records = trained(whole)
    assert all(record["rollout/refill_rounds"] == 0 for record in records)
    assert all(record["grading/unscored"] == 0 and record["time/train/reward_model_s"] > 0 for record in records)
    samples = read_records(whole / "samples.jsonl")
    answers = [each for record in samples if record["split"] == "train" for each in record["completions"]]
    assert len(answers) == 4 * 4 * 4
    for each in answers:
        expected = each["parts"]["correct"] + 0.5 * each["parts"]["helpful"]
        assert each["reward"] == pytest.approx(expected, rel=1e-5)
    first = [each["parts"]["helpful"] for each in answers[:16]]
    assert records[0]["train-reward/func/helpful/mean"] == pytest.approx(np.mean(first), rel=1e-5)
    assert np.std(first) > 0.05
    stopped = run_of(**changes, steps=2)
    assert train(config_of(stopped, steps=4), plain=True) == 0
    assert_same_run(stopped, whole)


def test_an_evaluation_counts_scores(tiny_model, reward_model):
    changes = judged(reward_model, rewards={"helpful": 1.0})
    changes["tasks"][0]["correct"] = "helpful"
    evaluation, _ = evaluate_weights(make_config(tiny_model, **changes), None)
    (scores,) = evaluation.stats.tasks.values()
    (groups,) = evaluation.groups.values()
    found = np.array([reward.parts["helpful"] for group in groups for reward in group.rewards])
    assert scores.scores["helpful"] == pytest.approx(found.mean())
    assert scores.accuracy == pytest.approx(np.mean(1 / (1 + np.exp(-found))))


def refused(tmp_path: Path, changes: dict[str, Any]) -> str:
    """The errors that the settings give."""
    path = tmp_path / "run.yaml"
    path.write_text(to_json(make_config("none").model_dump(mode="json") | changes))
    with pytest.raises(ConfigError) as caught:
        load_settings([path], [], {})
    return str(caught.value)


def test_models_that_cannot_score_are_errors_in_the_settings(tiny_model, reward_model, tmp_path):
    base = judged(tiny_model)
    text = refused(tmp_path, base)
    assert "reward_models.0.model: " in text
    assert "config.json: this 'llama' model has no head of scores, so it says nothing of an answer; take a rew" in text
    labels = write_reward_model(tmp_path / "labels", id2label={"0": "bad", "1": "good"})
    text = refused(tmp_path, judged(labels))
    assert "LlamaForSequenceClassification has 2 labels" in text
    assert "reward_models.0.max_tokens: 65 is more than the 64 positions of" in refused(
        tmp_path, judged(reward_model, max_tokens=65)
    )
    short = write_reward_model(tmp_path / "short", max_position_embeddings=16)
    text = refused(tmp_path, judged(short))
    assert "reward_models.0.max_tokens: rollout.max_prompt_tokens + max_new_tokens is 19, and " in text
    assert "has 16 positions; lower that, or set at most 16 here: longer conversations then get no score" in text
    with pytest.raises(ModelError, match=r"^reward_models.0.model: Qwen/Qwen3-8B has no head of scores"):
        make_config("none")  # the settings allow it, and a plan does not
        config = make_config(tiny_model, **judged(Path("Qwen/Qwen3-8B")))
        rollout_spec(config, make_model(make_config(tiny_model)))


def test_names_that_mean_two_things_or_nothing_are_errors(reward_model, tmp_path):
    twice = judged(reward_model)
    twice["reward_models"] *= 2
    assert "reward_models.1.name: 'helpful' is the name of two reward models or judges; choose another" in refused(
        tmp_path, twice
    )
    built_in = judged(reward_model, name="format", rewards={"format": 1.0})
    assert "'format' is a built-in part of the reward; choose another" in refused(tmp_path, built_in)
    misspelt = judged(reward_model, rewards={"helpfull": 1.0})
    assert "tasks.0.rewards.helpfull: not a part of the reward; did you mean helpful?" in refused(tmp_path, misspelt)
    cosine = judged(reward_model, rewards={"helpful": 1.0, "cosine_length": 1.0})
    cosine["tasks"][0]["correct"] = "helpful"
    assert "helpful scores after the other parts, and cosine_length reads whether" in refused(tmp_path, cosine)


def test_a_reward_model_that_no_task_uses_is_refused_before_a_run(tiny_model, reward_model):
    config = make_config(tiny_model, **judged(reward_model, rewards={"correct": 1.0}))
    model = make_model(config)
    with pytest.raises(ValueError, match=r"^reward_models.0.name: no task's rewards contain 'helpful'"):
        run_spec(config, model.decoder, model.mesh)


def test_a_tokenizer_without_a_chat_template_needs_one(tiny_model, reward_model, tmp_path):
    folder = tmp_path / "plain"
    shutil.copytree(reward_model, folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(
        ValueError, match=r"^reward model helpful: the tokenizer of .*plain has no chat template; write"
    ):
        loaded(tiny_model, folder)
    own = tmp_path / "own.jinja"
    own.write_text(TEMPLATE)
    model, _ = loaded(tiny_model, folder, chat_template=str(own))
    assert model.tokens(conversation(CONVERSATIONS[1])) == tokens_by_hand(CONVERSATIONS[1])


def test_a_template_that_leaves_the_answer_out_is_refused(tiny_model, tmp_path):
    folder = write_reward_model(tmp_path / "deaf", "{{ messages[0].content }}")
    model, spec = loaded(tiny_model, folder)
    feed = Feed(spec.prompts, model.tokenizer)
    with pytest.raises(ValueError, match="its chat template leaves out answers; give the model another chat_template"):
        model.check(feed, feed.tasks.first_prompts())


CALLS = (
    "{% for m in messages %}{{ {'user': 'What', 'assistant': 'Answer', 'system': 'only', 'tool': 'number'}[m.role] }}"
    " {{ m.content }}{% for c in m.tool_calls or () %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %} <end> {% endfor %}"
)


@pytest.mark.parametrize("template", [TEMPLATE, CALLS])
def test_a_template_must_write_calls_of_tools_and_their_replies_where_a_task_has_tools(tiny_model, template, tmp_path):
    changes = judged(write_reward_model(tmp_path / "model", template))
    changes["tasks"][0]["tools"] = ["calculator"]
    config = make_config(tiny_model, **changes)
    policy, mesh = make_model(make_config(tiny_model)), rules_of().mesh
    spec, update = rollout_spec(config, policy), run_spec(config, policy.decoder, mesh).update
    (model,) = load_grading_models(spec, update, mesh)
    (task,) = spec.prompts.tasks
    held = conversing(task)
    assert held is not None
    prompts = Feed(make_spec_without_tools(spec), model.tokenizer).tasks.first_prompts()
    feed = SimpleNamespace(tasks=SimpleNamespace(levels=[task]), conversing=[held])
    if template == TEMPLATE:
        with pytest.raises(ValueError, match="its chat template leaves out calls of tools and their replies; give"):
            model.check(feed, prompts)  # pyright: ignore[reportArgumentType]
        return
    model.check(feed, prompts)  # pyright: ignore[reportArgumentType]
    call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": {"x": "1 + 2"}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    asked = Conversation(messages=({"role": "user", "content": "1 + 2"}, *messages), tools=tuple(held.tools))
    written = model.written(asked)
    assert written.startswith("only "), "tools are described in the system message"
    assert written.endswith(
        'What 1 + 2 <end> Answer <tool_call>{"name": "calculator", "arguments": {"x": "1 + 2"}}</tool_call> <end>'
        " number 3 <end> "
    )


def make_spec_without_tools(spec: RolloutSpec) -> PromptSpec:
    """Prompts of the same tasks for a model whose template is not the policy's."""
    return dataclasses.replace(
        spec.prompts, tasks=tuple(t.model_copy(update={"tools": []}) for t in spec.prompts.tasks)
    )
