"""A teacher that reads another prompt than the policy: its messages, its rows, and a run with one."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from shown_commands import ROOT, fenced
from tiny_decoder import tiny
from tiny_runs import assert_same_run, config_of, groups_of, make_config, make_trainer, teacher_role, trained

from podium.algorithms.recipes import Teaching
from podium.certify.naive import Weights, distributions, in_float64, scores
from podium.certify.tiny import Arrays, random_weights
from podium.config.message_template import template_names
from podium.models.architecture import DecoderConfig
from podium.models.files.source import resolve as find_source
from podium.models.text.tokenizer import load_tokenizer
from podium.run.machine import Machine
from podium.run.resolve import resolve, resolve_recipe, resolve_rollout
from podium.run.run_spec import PrivilegedSpec
from podium.sampling.feed import Feed
from podium.sampling.privileged import privileged_messages
from podium.tasks.task import Prompt
from podium.train.batches.batch import take
from podium.train.batches.prepare import pack_step, prepare_step
from podium.train.loop import train
from podium.train.scorers import OwnPrompts, make_role_scorer, make_scorers

pytestmark = pytest.mark.usefixtures("one_device")
TEMPLATE = "{question} Answer with {answer} ."
PRIVILEGED = {"prompt": "privileged", "template": TEMPLATE, "max_prompt_tokens": 24}


def test_a_template_s_names_are_those_in_its_braces():
    assert template_names("{question} and {a column}, {question}, {{x}}") == ("question", "a column")
    for text in ("no name", "{} {question}", "{0}", "{a.b}", "{a[0]}", "{a!r}", "{a:>5}", "{question", "}"):
        with pytest.raises(ValueError, match=r"name|cannot be read"):
            template_names(text)


def spec_of(template: str) -> PrivilegedSpec:
    return PrivilegedSpec(role="teacher", template=template, max_tokens=64)


def test_a_privileged_prompt_rewrites_the_last_message_of_the_user():
    prompt = Prompt(
        id="7", question="unused", answer="12", metadata={"solution": "3 * 4", "steps": [1, "b"], "no": None}
    )
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q?"}]
    made = privileged_messages(spec_of("{question} {solution} = {answer} {{{steps}}}"), prompt, messages)
    assert made == [messages[0], {"role": "user", "content": 'Q? 3 * 4 = 12 {[1, "b"]}'}]
    after = [*messages, {"role": "assistant", "content": "A"}]
    assert privileged_messages(spec_of("{answer}"), prompt, after)[1:] == [{"role": "user", "content": "12"}, after[2]]
    with pytest.raises(
        ValueError, match=r"teacher\.template: prompt 7 has no column 'hint'; it has answer, no, question, solution, st"
    ):
        privileged_messages(spec_of("{hint}"), prompt, messages)
    with pytest.raises(ValueError, match="no column 'no'"):
        privileged_messages(spec_of("{no}"), prompt, messages)
    with pytest.raises(ValueError, match="prompt 7 has no user message"):
        privileged_messages(spec_of("{answer}"), prompt, messages[:1])


@pytest.mark.parametrize("packing", ["none", "shared_prompts"])
def test_each_token_is_taught_by_its_own_score_behind_the_teacher_s_prompt(packing):
    """In float64, each sequence alone; prompts of the teacher have 1 to 14 tokens, the policy's have 6."""
    trainer, state = make_trainer(algorithm={"recipe": "grpo"}, train={"packing": packing})
    decoder, groups, random = tiny(width=16, layers=1, heads=2, kv_heads=1), groups_of(), np.random.default_rng(3)
    own = {str(index): tuple(random.integers(0, 300, 1 + 13 * index // 3).tolist()) for index in range(4)}
    weights = random_weights(decoder, seed=5)
    params = {name: jnp.asarray(x) for name, x in weights.items()}
    recipe = dataclasses.replace(trainer.recipe, teaching=Teaching(weight=0.5))
    behind = OwnPrompts(
        of=lambda prompt: own[prompt.prompt.id], sizes=dataclasses.replace(trainer.sizes, row_tokens=22)
    )
    teacher = make_role_scorer(teacher_role(decoder), trainer.settings, params, behind)
    scorers = make_scorers(recipe, trainer.settings, trainer.score, [teacher])
    rules = trainer.settings.computing
    (batch,), stats = prepare_step(groups, recipe, trainer.sizes, rules=rules, scorers=scorers, policy=state.params)
    (plain,), _ = trainer.prepare(state, groups)
    (minibatch,) = pack_step(groups, recipe, trainer.sizes).minibatches
    policy = {name: np.asarray(x) for name, x in state.params.items()}
    found, expected, late = [], [], []
    arrays = [take(np.asarray(x), minibatch.spans) for x in (batch.advantages, plain.advantages)]
    for (n, _), sample, taught, before in zip(minibatch.places, minibatch.samples, *arrays, strict=True):
        theirs = scored(decoder, weights, own[str(n)], sample.tokens)
        mine = scored(trainer.settings.decoder, policy, sample.prompt, sample.tokens)
        found.append(taught)
        expected.append(before + 0.5 * (theirs - mine))
        late.append(before + 0.5 * (np.roll(theirs, 1) - mine))
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), atol=2e-5)
    several = [len(each) > 1 for each in found]
    assert all(np.abs(x - y).max() > 1e-3 for x, y, many in zip(found, late, several, strict=True) if many)
    assert sum(several) > 8
    assert stats.taught_kl is not None


def scored(decoder: DecoderConfig, weights: Arrays, prompt: tuple[int, ...], tokens: np.ndarray) -> np.ndarray:
    """The naive log-probability of each token behind a prompt, in float64."""
    whole = np.zeros((1, 24), np.int32)
    whole[0, : len(prompt) + len(tokens)] = (*prompt, *tokens)
    with in_float64():
        wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in weights.items()}
        found = naive_scorer(decoder)(wide, jnp.asarray(whole), jnp.asarray([len(prompt)]))
        return np.asarray(found)[0, : len(tokens)]


@functools.cache
def naive_scorer(decoder: DecoderConfig):
    def of(weights: Weights, tokens: jax.Array, starts: jax.Array) -> jax.Array:
        return scores(distributions(weights, tokens, starts, decoder, 1.0, 1.0, 8), tokens, starts).logprobs

    return jax.jit(of)


def test_prompts_that_are_too_long_for_the_teacher_are_left_out_of_training_alone(tiny_model):
    config = make_config(tiny_model, teacher={"model": str(tiny_model), **PRIVILEGED})
    tokenizer = load_tokenizer(find_source(str(tiny_model)))
    spec = resolve_rollout(config, resolve_recipe(config), tiny(), Machine(platform="cpu", devices=1))
    feed = Feed(spec.prompts, tokenizer)
    (first,) = feed.next(1)
    added = tokenizer.encode(f"Answer with {first.prompt.prompt.answer} .")
    assert feed.privileged(first.prompt) == (*first.tokens, *added)
    short = dataclasses.replace(spec.prompts, privileged=dataclasses.replace(spec.prompts.privileged, max_tokens=5))
    feed = Feed(short, tokenizer)
    with pytest.raises(
        ValueError, match=r"as the teacher reads it, in teacher.max_prompt_tokens 5; raise what is too low"
    ):
        feed.next(1)
    assert feed.encode(first.prompt, 0) is not None, "as evaluation does"
    with pytest.raises(ValueError, match=r"has \d+ tokens and teacher.max_prompt_tokens is 5; raise it"):
        Feed(dataclasses.replace(short, long_prompts="error"), tokenizer).next(1)


def test_a_teacher_s_rows_have_room_for_its_longest_prompt():
    def spec_of_teacher(sp=1, rollout=None, **own):
        config = make_config(teacher={"model": "Qwen/Qwen3-0.6B", **own}, rollout=rollout or {}, mesh=f"sp:{sp}")
        return resolve(config, tiny(), Machine(platform="cpu", devices=sp))

    def own_batch(**given):
        spec = spec_of_teacher(**given, **PRIVILEGED)
        return spec.batch_of(spec.roles["teacher"])

    sizes = own_batch()
    assert (sizes.row_tokens, sizes.rows, sizes.max_rows) == (24 + 3, 2, 16)
    assert own_batch(rollout={"max_episode_tokens": 40}).row_tokens == 24 + 40
    assert own_batch(sp=4).row_tokens == 28
    alike = spec_of_teacher()
    assert alike.batch_of(alike.roles["teacher"]) is alike.batch


@pytest.mark.long
def test_the_page_s_teacher_that_reads_the_solution_is_the_model_itself_and_the_run_resumes(
    run_of, tiny_model, tmp_path
):
    (block,) = [each for each in fenced(ROOT / "docs" / "algorithms.md", "yaml") if "prompt: privileged" in each]
    shown = yaml.safe_load(block)
    assert shown["model"] == shown["teacher"]["model"]
    rows = [
        {"question": f"What is {a} + {b} ?", "answer": str(a + b), "solution": f"{a} + {b} is {a + b} ."}
        for a in range(1, 5)
        for b in range(1, 4)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    changes = {
        "algorithm": shown["algorithm"],
        "teacher": {**shown["teacher"], "model": str(tiny_model), "max_prompt_tokens": 48},
        "tasks": [{"name": "jsonl", "path": str(tmp_path / "train.jsonl")}],
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"every_steps": 2},
    }
    whole = run_of(**changes, steps=4)
    assert min(record["policy/kl_teacher"] for record in trained(whole)) > 0.01
    stopped = run_of(**changes, steps=2)
    assert train(config_of(stopped, steps=4), plain=True) == 0
    assert_same_run(stopped, whole)


def test_a_template_that_the_data_cannot_fill_stops_a_run_before_its_first_step(run_of, tiny_model):
    teacher = {"model": str(tiny_model), **PRIVILEGED, "template": "{question} {hint}"}
    with pytest.raises(ValueError, match=r"teacher.template: prompt arithmetic/train/.* has no column 'hint'"):
        run_of(teacher=teacher)
