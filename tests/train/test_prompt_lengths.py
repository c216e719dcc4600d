"""The longest prompt: what the data needs if it is unset, and compared with the data before anything is compiled."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from published import published_tokenizer
from tiny_runs import make_config

from podium.config.schema import Config
from podium.models.files.source import resolve as find_source
from podium.models.text.tokenizer import load_tokenizer
from podium.run.resolve import resolve_prompts, resolve_recipe
from podium.sampling.feed import Feed
from podium.sampling.prompt_lengths import check_prompt_lengths, longest_first, with_prompt_tokens
from podium.train.loop import train

QWEN = "Qwen/Qwen2.5-0.5B-Instruct"
SUMS = [{"prompt": f"What is {a} + 1 ?", "answer": str(a + 1)} for a in range(1, 9)]
"""The rows of docs/from-trl.md: 37 tokens with Qwen2.5's published template, by TRL."""


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a * b


class Riddle:
    """An environment whose first message is not known before it is reset."""

    def reset(self, **row: object) -> str:
        return "Guess."

    def guess(self, number: int) -> str:
        """Guess the number."""
        return "no"


def written(rows: list[dict[str, Any]], folder: Path, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config_of(path: str, *, model: str = QWEN, task: dict[str, Any] | None = None, **settings: Any) -> Config:
    tasks = [{"name": "jsonl", "path": path, "eval_path": path, **(task or {})}]
    return Config.model_validate({"name": "r", "model": model, "tasks": tasks, **settings})


def feed_of(config: Config) -> Feed:
    source = find_source(config.model)
    return Feed(resolve_prompts(config), load_tokenizer(source, config.chat_template))


def chosen(config: Config, **asked: bool) -> tuple[int | None, str | None]:
    found, line = with_prompt_tokens(config, resolve_recipe(config), **{"trains": True, "evaluates": False, **asked})
    return found.rollout.max_prompt_tokens, line


def test_the_vocabulary_is_qwens():
    """Tokens of these texts as transformers' documentation and Qwen's own have them."""
    tokenizer = published_tokenizer(QWEN)
    assert tokenizer.encode("Hello world") == [9707, 1879]
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>", "<tool_call>"]) == [151643, 151645, 151657]
    assert len(tokenizer) == 151665 and len(published_tokenizer("Qwen/Qwen3-0.6B")) == 151669


@pytest.mark.usefixtures("published_models")
def test_an_unset_length_is_the_longest_of_the_data_rounded_up_and_said(tmp_path):
    config = config_of(written(SUMS, tmp_path), rollout={"max_new_tokens": 16})
    line = "rollout.max_prompt_tokens is unset: 64, because the longest of 8 prompts has 37 tokens"
    assert chosen(config) == (64, line)
    tools = {"tools": [f"{__name__}:multiply"]}
    config = config_of(written(SUMS, tmp_path), model="Qwen/Qwen3-0.6B", task=tools)
    assert chosen(config)[0] == 192 and "has 178 tokens" in str(chosen(config)[1])


@pytest.mark.usefixtures("published_models")
def test_evaluation_questions_count_and_a_set_length_stays(tmp_path):
    long = [{"prompt": "What is 1 + 1 ? " * 40, "answer": "2"}]
    config = config_of(written(SUMS, tmp_path), task={"eval_path": written(long, tmp_path, "long.jsonl")})
    assert chosen(config)[0] == 64
    assert (chosen(config, evaluates=True)[0] or 0) > 300
    config = config_of(written(SUMS, tmp_path), rollout={"max_prompt_tokens": 20})
    assert chosen(config) == (20, None)


@pytest.mark.usefixtures("published_models")
def test_the_chosen_length_is_what_other_settings_leave(tmp_path):
    path = written([{"prompt": "What is 1 + 1 ? " * 200, "answer": "2"}, *SUMS], tmp_path)
    assert (chosen(config_of(path))[0] or 0) > 1500
    rollout = {"max_new_tokens": 16, "max_episode_tokens": 116, "long_prompts": "drop"}
    length, line = chosen(config_of(path, rollout=rollout))
    assert (
        length == 100
        and "100, as rollout.max_episode_tokens 116 and rollout.max_new_tokens 16 allow; the longest" in str(line)
    )
    with pytest.raises(ValueError, match=r"max_episode_tokens 116 and .* leave room for 100"):
        chosen(config_of(path, rollout={**rollout, "long_prompts": "error"}))
    rows = {"rollout": {"max_new_tokens": 16, "long_prompts": "drop"}, "train": {"row_tokens": 80}}
    assert chosen(config_of(path, **rows))[0] == 64
    pairs = {"algorithm": {"recipe": "dpo"}, "group_size": 2, **rows}
    assert chosen(config_of(path, **pairs))[0] == 48  # a row holds both completions


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        (
            {"max_episode_tokens": 48},
            "37 tokens .*; rollout.max_episode_tokens 48 and answers of rollout.max_new_tokens 16 leave room for 32",
        ),
        (
            {"max_new_tokens": 32740},
            "the 32768 positions of Qwen/Qwen2.5-0.5B-Instruct and answers of .* leave room for 28",
        ),
    ],
)
@pytest.mark.usefixtures("published_models")
def test_prompts_that_leave_no_room_for_an_answer_name_the_limit(rollout, said, tmp_path):
    path = written(SUMS, tmp_path)
    config = config_of(path, rollout={"max_new_tokens": 16, **rollout})
    with pytest.raises(ValueError, match=said):
        chosen(config)


@pytest.mark.usefixtures("published_models")
def test_prompts_that_an_environment_adds_to_have_room(tmp_path):
    environment = {"name": "environment", "environment": f"{__name__}:Riddle"}
    config = config_of(written(SUMS, tmp_path), task=environment, rollout={"max_new_tokens": 16})
    assert chosen(config)[0] == 512


@pytest.mark.usefixtures("published_models")
def test_a_teachers_longest_prompt_is_that_of_its_own_prompts(tmp_path):
    rows = [row | {"hint": "Add one to it. " * 30} for row in SUMS]
    teacher = {"model": QWEN, "prompt": "privileged", "template": "{question} {hint}"}
    config = config_of(written(rows, tmp_path), teacher=teacher, rollout={"max_new_tokens": 16})
    found, _ = with_prompt_tokens(config, resolve_recipe(config), trains=True, evaluates=False)
    assert found.teacher is not None and found.rollout.max_prompt_tokens == 64
    feed = feed_of(found)
    own = max(len(feed.privileged(each)) for each in feed.tasks.train_prompts()["jsonl"])
    assert 0 <= (found.teacher.max_prompt_tokens or 0) - own < 32


@pytest.mark.usefixtures("published_models")
def test_few_prompts_are_encoded_to_find_the_longest(tmp_path):
    """Against all lengths, with texts of few bytes a token and of many, and conversations."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abc 12+?\u00e9\u4e2d", k=draw.randint(1, 300))) + "?" for _ in range(300)]
    rows: list[dict[str, Any]] = [{"prompt": text, "answer": "1"} for text in texts]
    rows += [
        {"prompt": [{"role": "system", "content": text}, {"role": "user", "content": "?"}], "answer": "1"}
        for text in texts
    ]
    feed = feed_of(config_of(written(rows, tmp_path)))
    prompts = feed.tasks.train_prompts()["jsonl"]
    lengths = sorted((feed.num_tokens(each) for each in prompts), reverse=True)
    found = list(longest_first(feed, prompts, 0))
    assert max(found) == lengths[0] and len(found) < 400
    limit = lengths[20]
    above = sorted((each for each in longest_first(feed, prompts, limit) if each > limit), reverse=True)
    assert above == [each for each in lengths if each > limit]


@pytest.mark.usefixtures("published_models")
def test_prompts_above_a_set_length_are_counted_and_if_none_fits_it_is_an_error(tmp_path):
    rows = [*SUMS, {"prompt": "What is 1 + 1 ? " * 40, "answer": "2"}]
    rollout: dict[str, Any] = {"max_prompt_tokens": 40}
    feed = feed_of(config_of(written(rows, tmp_path), rollout=rollout))
    long = feed.num_tokens(feed.tasks.train_prompts()["jsonl"][8])

    def check(feed: Feed) -> list[str]:
        return check_prompt_lengths(feed, feed.tasks.train_prompts(), "training prompts", "are left out")

    (line,) = check(feed)
    assert (
        f"1 of the 9 training prompts of jsonl have {long} tokens and rollout.max_prompt_tokens is 40, so they are"
        in line
    )
    feed = feed_of(config_of(written(rows, tmp_path), rollout=rollout | {"long_prompts": "error"}))
    with pytest.raises(ValueError, match=r"1 of the 9 training prompts .*rollout\.long_prompts to drop"):
        check(feed)
    feed = feed_of(config_of(written(rows, tmp_path), rollout={"max_prompt_tokens": 32}))
    with pytest.raises(
        ValueError,
        match=rf"is 32, and none of the 9 training prompts of jsonl fits: .* have 37 to {long} tokens; set it",
    ):
        check(feed)


def test_a_run_that_cannot_ask_its_data_ends_before_weights_are_read(tiny_model, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("podium.train.setup.load_frozen", refuse)
    short = [{"question": "What is 1", "answer": "1"}]
    for name, rows, said in (
        ("long", [{"question": "What is 1 " * 9, "answer": "1"}], "none of the 1 training prompts of jsonl fits"),
        (
            "wrong",
            [*short, {"question": "What is 2", "answer": "it. #### 2\nor 3"}],
            "no answer can equal the reference",
        ),
    ):
        tasks = [
            {"name": "jsonl", "path": written(rows, tmp_path), "eval_path": written(short, tmp_path, "eval.jsonl")}
        ]
        with pytest.raises(ValueError, match=said):
            train(make_config(tiny_model, tmp_path, name=name, tasks=tasks), plain=True)


@pytest.mark.usefixtures("one_device")
def test_a_run_says_what_it_chose_and_its_config_leaves_it_open(tiny_model, tmp_path, capsys):
    config = make_config(tiny_model, tmp_path, rollout={"max_prompt_tokens": None}, steps=1)
    assert train(config, plain=True) == 0
    assert "rollout.max_prompt_tokens is unset: 32, because the longest of" in capsys.readouterr().err
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert kept["rollout"]["max_prompt_tokens"] is None


def test_lengths_that_leave_no_room_are_errors_of_the_config():
    with pytest.raises(ValueError, match="prompt with one turn"):
        config_of("", rollout={"max_episode_tokens": 16, "max_new_tokens": 16})
