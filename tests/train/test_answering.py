"""A run answers by all its settings at every door, and what a caller says wins."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tiny_runs import make_config
from typer.testing import CliRunner

import podium
from podium import cli
from podium.api.answers import open_model
from podium.api.chat import chat as talk
from podium.config.load import Override
from podium.observe.run_dir import Fork, parse_fork
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import SamplingParams
from podium.run.answering import Asked, resolve_answering
from podium.serve.bodies import ChatBody, CompletionBody, GenerateBody, read_body
from podium.serve.command import model_of
from podium.settings import load_settings
from podium.train.evaluate import evaluate_weights

pytestmark = pytest.mark.usefixtures("one_device")

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
DRAWING = {"temperature": 0.7, "top_k": 1, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.5, "stop": ["7"]}
QUESTION = "What is 3 + 4 ?"
SYSTEM = "What"
"""The system prompt of the run: a word of the tiny vocabulary."""


@pytest.fixture(scope="module")
def run(run_of, template) -> Path:
    """A run whose every setting that shapes an answer is unusual."""
    task = {"name": "arithmetic", "system_prompt": SYSTEM}
    rollout = {**DRAWING, "max_prompt_tokens": 20}
    return run_of("drawn", rollout=rollout, tasks=[task], steps=1, eval={"at_end": False}, chat_template=template)


@pytest.fixture
def submitted(monkeypatch):
    """Prompt and settings of each request that the engine gets."""
    found = []
    submit = RolloutEngine.submit

    def noted(engine, request):
        found.append((request.prompt, request.sampling))
        return submit(engine, request)

    monkeypatch.setattr(RolloutEngine, "submit", noted)
    return found


def usual(**changes) -> SamplingParams:
    """What DRAWING says, with the three tokens that the tiny config's answers have."""
    return SamplingParams(**{**DRAWING, "stop": ("7",), "max_new_tokens": 3, **changes})


def test_generate_draws_by_the_run_and_says_its_system_prompt_first(run, submitted):
    podium.load_run(run).generate([QUESTION])
    podium.generate(run, [QUESTION], system_prompt="", temperature=0.25, rollout={"min_p": 0.1})
    podium.load_run(run).generate([QUESTION], max_new_tokens=2, temperature=0)
    (first, drawn), (bare, said), (again, greedy) = submitted
    assert drawn == usual()
    assert said == usual(temperature=0.25, min_p=0.1)
    assert greedy == SamplingParams(max_new_tokens=2, temperature=0.0, repetition_penalty=1.5, stop=("7",))
    assert first == again and first[-len(bare) :] == bare and len(first) == len(bare) + 1


def test_the_settings_of_a_call_are_obeyed_for_a_model_too(tiny_model, submitted):
    rollout = {"max_prompt_tokens": 16, "top_k": 1}
    answers = podium.generate(tiny_model, [QUESTION] * 4, max_new_tokens=4, rollout=rollout)
    assert {sampling.top_k for _, sampling in submitted} == {1}
    assert len({tuple(answer.tokens) for answer in answers}) == 1  # one token is kept, whatever the seed
    assert all(np.all(answer.sampled_logprobs == 0) for answer in answers)
    podium.generate(tiny_model, [QUESTION], rollout={"max_prompt_tokens": 16, "max_new_tokens": 2, "stop": ["3"]})
    assert submitted[-1][1] == SamplingParams(max_new_tokens=2, stop=("3",))


def test_prompts_have_the_room_that_they_need(tiny_model, submitted):
    """The model has 64 positions, fewer than are assumed for prompts whose lengths are not known."""
    podium.generate(tiny_model, [QUESTION, "3 " * 50], max_new_tokens=4)
    assert [len(tokens) for tokens, _ in submitted] == [len(QUESTION.split()), 50]
    with pytest.raises(ValueError, match=r"4, with rollout\.max_prompt_tokens 61, makes sequences of 65 tokens"):
        podium.generate(tiny_model, ["3 " * 61], max_new_tokens=4)


@pytest.mark.parametrize("key", ["temperature", "repetition_penalty"])
def test_an_evaluation_refuses_what_it_does_not_read(key, tiny_model):
    said = rf"rollout\.{key}: evaluations ignore this setting; set eval\.{key}"
    with pytest.raises(ValueError, match=said):
        podium.evaluate(tiny_model, [{"question": QUESTION, "answer": "3"}], rollout={key: 0.5})
    done = CliRunner().invoke(cli.app, ["eval", "demo", "--task", "arithmetic", "--set", f"rollout.{key}=0.5"])
    assert re.search(said, str(done.exception))


def test_a_setting_that_is_given_twice_is_an_error(tiny_model):
    with pytest.raises(ValueError, match=r"temperature: given as an argument and as rollout\.temperature; keep one"):
        podium.generate(tiny_model, [QUESTION], temperature=0.5, rollout={"temperature": 0.7})


def test_a_server_s_prompts_have_no_length_of_their_own(tiny_model):
    setting = "rollout.max_prompt_tokens=9"
    with (
        pytest.raises(ValueError, match=r"rollout\.max_prompt_tokens: prompts and answers share the context here"),
        open_model(tiny_model, setting, asked=Asked(), slots=1, context=48),
    ):
        pass


def test_chat_draws_by_the_run(run, submitted):
    console = Console(file=io.StringIO(), width=200)
    for asked in (Asked(), Asked(system_prompt="", temperature=1.0)):
        assert talk(str(run), asked=asked, seed=0, console=console, lines=[QUESTION]) == 0
    (first, drawn), (bare, said) = submitted
    assert (drawn, said) == (usual(), usual(temperature=1.0)) and len(first) == len(bare) + 1


def test_a_server_draws_by_the_run_what_a_request_does_not_say(run):
    with open_model(str(run), "rollout.top_p=0.8", asked=Asked(), slots=1, context=48, new_tokens=48) as opened:
        model = model_of(opened, "drawn", max_queue=4)
    asking = {"messages": [{"role": "user", "content": QUESTION}]}

    def chat(**fields):
        (request,) = model.chat(read_body(ChatBody, json.dumps({**asking, **fields}).encode())).requests
        return request

    assert chat().sampling == usual(top_p=0.8)
    assert chat(max_tokens=7, temperature=0, stop=[]).sampling == SamplingParams(
        max_new_tokens=7, temperature=0.0, repetition_penalty=1.5
    )
    assert chat(top_k=5, stop="3", repetition_penalty=1).sampling == usual(
        top_p=0.8, top_k=5, stop=("3",), repetition_penalty=1.0
    )
    own = [{"role": "system", "content": "is"}, *asking["messages"]]
    system = model.tokenizer.encode(SYSTEM)
    assert list(chat().prompt[:1]) == system and list(chat(messages=own).prompt[:1]) == model.tokenizer.encode("is")
    (text,) = model.completions(read_body(CompletionBody, b'{"prompt": "3"}')).requests
    (tokens,) = model.generate(read_body(GenerateBody, b'{"token_ids": [3]}'))
    assert text.sampling == usual(top_p=0.8, max_new_tokens=16) and tokens.sampling == usual(top_p=0.8)


def test_sampled_answers_of_an_evaluation_are_cut_as_in_training(run, submitted):
    asked = {"samples": 2, "greedy": True, "questions": 2, "temperature": 0.5}
    config = load_settings([run / "config.yaml"], [Override(f"eval.{key}", each, "") for key, each in asked.items()])
    evaluate_weights(config.config, parse_fork(str(run)))
    greedy = {sampling for _, sampling in submitted if not sampling.temperature}
    sampled = {sampling for _, sampling in submitted if sampling.temperature}
    assert greedy == {SamplingParams(max_new_tokens=3, temperature=0.0, stop=("7",))}
    assert sampled == {usual(temperature=0.5, repetition_penalty=1.0)}


def test_an_evaluation_of_other_rows_and_of_the_runs_own_says_the_system_prompt_that_is_given(run, submitted):
    rows = [{"question": QUESTION, "answer": 7}]
    few = {"eval": {"questions": 1}}
    podium.evaluate(run, rows, **few)
    podium.evaluate(run, rows, system_prompt="", **few)
    podium.evaluate(run, **few)
    podium.evaluate(run, system_prompt="", **few)
    lengths = [len(prompt) for prompt, _ in submitted]
    assert lengths[0] == lengths[1] + 1 and lengths[2] == lengths[3] + 1
    with pytest.raises(ValueError, match="question need data"):
        podium.evaluate(run, question="text")


def test_podium_eval_asks_another_task_with_the_run_s_system_prompt(run, monkeypatch):
    evaluated = []
    monkeypatch.setattr(
        "podium.train.evaluate.evaluate_command", lambda config, **options: evaluated.append(config) or 0
    )
    for task in ("gsm8k", "arithmetic"):
        assert CliRunner().invoke(cli.app, ["eval", str(run), "--task", task, "--questions", "1"]).exit_code == 0
    assert [config.tasks[0].system_prompt for config in evaluated] == [SYSTEM, SYSTEM]


def test_the_system_prompt_is_the_task_s_own_or_the_config_s(tiny_model, tmp_path):
    def prompt(*tasks, asked=None):
        config = make_config(tiny_model, tmp_path, tasks=list(tasks))
        return resolve_answering(config, asked or Asked())

    assert prompt({"name": "gsm8k"}).system_prompt.startswith("Solve the problem step by step.")
    assert prompt({"name": "gsm8k", "system_prompt": ""}).system_prompt is None
    two = prompt({"name": "arithmetic", "system_prompt": "A"}, {"name": "arithmetic", "system_prompt": "B"})
    assert (two.system_prompt, two.notice[:48]) == ("A", "the run's tasks have different system prompts; a")
    assert prompt({"name": "arithmetic"}, {"name": "arithmetic", "system_prompt": ""}).notice == ""
    lost = {"name": "no_such_module:Task"}
    with pytest.raises(ValueError, match=r"task Task of the run cannot be created here.*give a system prompt"):
        prompt(lost)
    assert prompt(lost, asked=Asked(system_prompt="C")).system_prompt == "C"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"temperature": "hot"}, "temperature: expected a number of at least 0 .* got 'hot'"),
        ({"temperature": float("nan")}, "temperature: expected a number"),
        ({"temperature": -1}, "temperature: expected a number"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected a number above 0 .* got 0.0"),
        ({"system_prompt": 3}, "system_prompt: expected a text, got 3"),
    ],
)
def test_what_no_answer_can_have_is_an_error_before_a_model_is_loaded(asked, said):
    with pytest.raises(ValueError, match=said):
        resolve_answering(make_config("no-such-model"), Asked(**asked))


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([[{"role": "user", "content": "2 + 3"}]], {}, "prompts: expected texts, got .*content.* at 0"),
        (["2 + 3", 5], {}, "prompts: expected texts, got 5 at 1"),
        (["2 + 3"], {"seed": "x"}, "seed: expected a whole number, got 'x'"),
        (["2 + 3"], {"rollout": {"stop": [""]}}, r"rollout\.stop"),
        (["2 + 3"], {"rollout": {"min_p": 1.0}}, r"rollout\.min_p: expected a number .*below 1"),
    ],
)
def test_questions_and_settings_of_other_kinds_are_errors_before_a_model_is_loaded(prompts, options, said):
    with pytest.raises(ValueError, match=said):
        podium.generate("no-such-model", prompts, **options)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_run_of_every_config_can_be_opened_to_answer(path, monkeypatch):
    """Sizes of training, and what only training needs, do not stand in the way of an engine of another size."""
    opened = []

    def make_model(config):
        opened.append(config)
        raise InterruptedError

    monkeypatch.setattr("podium.api.answers.CONFIG", path.name)
    monkeypatch.setattr("podium.api.answers.run_of", lambda model: Fork(str(path.parent), None))
    monkeypatch.setattr("podium.api.answers.make_model", make_model)
    for context in (None, 2048):
        with pytest.raises(InterruptedError), open_model("run", asked=Asked(), slots=4, context=context):
            pass
    (alone, shared) = opened
    assert shared.rollout.longest == 2048 and alone.rollout.slots == shared.rollout.slots
    assert alone.model == shared.model and alone.lora == shared.lora


def test_a_run_that_was_rewarded_for_length_is_opened_to_give_shorter_answers(tmp_path, monkeypatch):
    """Its rewards do not matter here, and neither does the length over which they fell."""
    opened = []

    def make_model(config):
        opened.append(config)
        raise InterruptedError

    rewarded = {"name": "arithmetic", "rewards": {"correct": 1.0, "length": 1.0}}
    settings = {"model": "demo", "tasks": [rewarded], "grading": {"overlong_buffer_tokens": 128}}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    monkeypatch.setattr("podium.api.answers.run_of", lambda model: Fork(str(tmp_path), None))
    monkeypatch.setattr("podium.api.answers.make_model", make_model)
    shorter = {"rollout": {"max_new_tokens": 64}}
    with pytest.raises(InterruptedError), open_model("run", asked=Asked(), slots=4, settings=shorter):
        pass
    assert opened[0].rollout.max_new_tokens == 64
