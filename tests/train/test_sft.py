"""`podium sft`: completions of the data, trained on by the program that trains on sampled ones."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import make_config, read_records, spec_of

from podium import cli
from podium.config.errors import ConfigError
from podium.config.schema import TaskConfig
from podium.models.files.source import resolve
from podium.models.text.tokenizer import load_tokenizer
from podium.observe.run_dir import Fork
from podium.sampling.demonstrations import completion_text, demonstrate
from podium.sampling.feed import Feed
from podium.settings import load_settings
from podium.tasks.mixture import TaskMixture
from podium.tasks.task import Prompt
from podium.train.loop import train
from tests.chat_formats import backend_of, format_of, stop_tokens_of

pytestmark = pytest.mark.usefixtures("one_device")
SFT = {"algorithm": {"recipe": "sft"}, "group_size": 1}


def test_it_learns_the_data_and_a_run_begins_from_it(tiny_model, tmp_path):
    config = make_config(tiny_model, tmp_path, name="warm", steps=12, prompts_per_step=8, **SFT)
    assert train(config, plain=True) == 0
    lines = [line for line in read_records(tmp_path / "warm" / "metrics.jsonl") if "train-other/loss" in line]
    losses = [line["train-other/loss"] for line in lines]
    assert len(losses) == 12 and np.mean(losses[-3:]) < 0.6 * losses[0]
    assert losses[0] == pytest.approx(np.log(40), rel=1.0)  # of a random model, in nat
    assert not any(name.startswith(("policy/logprob_gap", "rollout/entropy")) for name in lines[0])
    assert {line["train-reward/total/mean"] for line in lines} == {1.0}
    after = make_config(tiny_model, tmp_path, name="after", steps=1)
    assert train(after, plain=True, fork=Fork(str(tmp_path / "warm"), 12)) == 0


def test_groups_are_the_data_with_an_end(tiny_model):
    config = make_config(tiny_model, **SFT)
    tokenizer = load_tokenizer(resolve(str(tiny_model)))
    prompts = Feed(spec_of(config).rollout.prompts, tokenizer).next(3)
    groups, rolled = demonstrate(prompts, spec_of(config).rollout, tokenizer)
    for each, group in zip(prompts, groups, strict=True):
        (completion,) = group.transcripts
        assert tokenizer.decode(completion.drawn_tokens.tolist()) == each.prompt.prompt.answer == completion.text
        assert completion.drawn_tokens[-1] == tokenizer.eos_tokens[0] and completion.finish_reason == "stop"
    assert rolled.completion_tokens == sum(group.transcripts[0].num_drawn for group in groups)
    shorter = make_config(tiny_model, rollout={"max_new_tokens": 1}, **SFT)
    (cut, *_), _ = demonstrate(prompts, spec_of(shorter).rollout, tokenizer)
    assert (cut.transcripts[0].num_drawn, cut.transcripts[0].finish_reason) == (1, "length")


def test_a_control_token_that_the_data_spells_stays_text():
    format_, tokenizer = format_of("smollm2"), backend_of("smollm2")
    text = "Type <|im_end|> at the end: <|im_end|>"
    tokens = format_.encode_answer(text)
    assert not set(tokens) & set(stop_tokens_of("smollm2"))
    assert tokenizer.decode(tokens) == text
    assert format_.encode_answer("4 + 4") == tokenizer.encode("4 + 4", add_special_tokens=False)


def test_the_column_of_the_completion():
    prompt = Prompt(id="a/0", question="q", answer="4", metadata={"solution": "2 + 2 = 4", "rank": 3})
    assert completion_text(prompt, None) == "4" and completion_text(prompt, "solution") == "2 + 2 = 4"
    with pytest.raises(ValueError, match="no column 'solved'; choose one of answer, solution, rank"):
        completion_text(prompt, "solved")
    with pytest.raises(ValueError, match="its completion is 3, and must be text"):
        completion_text(prompt, "rank")


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2 + 2"},
    {"role": "assistant", "content": "4"},
]


def test_each_message_of_an_assistant_is_learned(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n")
    mixture = TaskMixture([TaskConfig(name="chat", path=str(path), eval_path=str(path))], seed=0)
    found = sorted((each.prompt for each in mixture.next(2)), key=lambda each: each.id)
    assert [each.answer for each in found] == ["2", "4"]
    assert [list(each.messages) for each in found] == [CHAT[:2], CHAT[:4]]


def test_a_reference_out_of_a_longer_text_is_not_learned_alone_without_a_word(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"question": "6x7?", "answer": "6*7=42\n#### 42"}) + "\n")
    for name in ("gsm8k", "jsonl"):
        (found,) = TaskMixture([TaskConfig(name=name, path=str(path))], seed=0).next(1)
        with pytest.raises(
            ValueError, match=r"answer '42' is only a part of column 'answer'; set tasks\.completion to answ"
        ):
            completion_text(found.prompt, None)
        assert completion_text(found.prompt, "answer") == "6*7=42\n#### 42"


@pytest.mark.parametrize("messages", [None, [], "hi", CHAT[:2], [{"role": "bot", "content": "x"}], [{"role": "user"}]])
def test_rows_that_are_no_conversation_are_named(messages, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(
        ValueError,
        match=r"chat.jsonl:1: column 'messages'.* is .*(expected a list of|expected {role, cont|an assistant must)",
    ):
        TaskMixture([TaskConfig(name="chat", path=str(path))], seed=0).next(1)


@pytest.mark.parametrize(
    ("settings", "name"),
    [([], "demo-sft"), (["--set", "name=mine"], "mine-sft"), (["--set", "name=mine-sft"], "mine-sft")],
)
def test_the_command_sets_the_recipe_and_a_name(monkeypatch, settings, name):
    seen = []
    monkeypatch.setattr("podium.train.loop.train", lambda config, **_: seen.append(config) or 0)
    demo = str(Path(__file__).parents[2] / "configs" / "demo.yaml")
    monkeypatch.setattr("sys.argv", ["podium", "sft", demo, *settings])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert (seen[0].name, seen[0].group_size, seen[0].algorithm.recipe) == (name, 1, "sft")


def test_groups_of_several_are_refused():
    with pytest.raises(ConfigError, match="set group_size to 1"):
        load_settings([], ["model=a/b", "tasks=[{name: arithmetic}]", "algorithm.recipe=sft"], {})
