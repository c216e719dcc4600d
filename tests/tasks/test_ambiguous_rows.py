"""Rows that can be read in two ways, or that hold less than they seem to: an error, or the one right reading."""

import decimal
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import podium
from podium.api.given_data import Questions, task_settings
from podium.config.imports import name_of
from podium.config.schema import TaskConfig
from podium.tasks.functions import RewardFunction
from podium.tasks.registry import make_task
from podium.tasks.task import Graded, Prompt

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "6x7?"}
CALL = {"type": "function", "function": {"name": "times", "arguments": {"a": 6, "b": 7}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
REPLY = {"role": "tool", "name": "times", "content": "42"}
SEVENTH = np.float32(0.1)


def read(rows: list[dict[str, Any]], folder: Path, name: str = "jsonl", **options: Any) -> list[Prompt]:
    """The prompts of rows in a .jsonl file."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"environment": "podium.tasks.games.frozen_lake:FrozenLake"} if name == "environment" else {}
    return list(make_task(TaskConfig(name=name, path=str(path), options=options, **config)).prompts("train"))


def given(data: Any, folder: Path, **changes: Any) -> list[Prompt]:
    """The prompts of `podium.grpo(model, data)`."""
    found = task_settings(Questions(data, **changes), podium.math_equal, folder=folder)[0].value
    return list(make_task(TaskConfig.model_validate(found[0])).prompts("train"))


@pytest.mark.parametrize("name", ["jsonl", "environment"])
def test_question_and_prompt_together_are_an_error_until_one_is_named(name, tmp_path):
    rows = [{"question": "6x7", "prompt": [SYSTEM, USER], "answer": "42"}]
    with pytest.raises(
        ValueError, match=r"'question' and 'prompt' are both there.*options\.question.*question='prompt'"
    ):
        read(rows, tmp_path, name)
    (prompt,) = read(rows, tmp_path, name, question="prompt")
    assert (prompt.question, prompt.messages) == ("6x7?", [SYSTEM, USER])
    assert read(rows, tmp_path, name, question="question")[0].messages is None


def test_rows_of_which_some_ask_in_one_column_and_some_in_another_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="both there"):
        read([{"question": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}], tmp_path)
    (first, second) = read([{"question": None, "prompt": p, "answer": "1"} for p in "ab"], tmp_path)
    assert (first.question, second.question) == ("a", "b")  # a table's empty column is none


def test_reward_functions_get_the_messages_of_the_prompt_that_is_named(tmp_path):
    def reward(prompts, **kwargs):
        return [0.0] * len(prompts)

    rows = [{"question": "6x7", "prompt": [SYSTEM, USER], "answer": "42"}]
    (prompt,) = given(rows, tmp_path, question="prompt")
    (call,) = RewardFunction(name_of(reward)).arguments(prompt, [Graded(text="42", tokens=(1,))])
    assert call["prompts"] == [[SYSTEM, USER]] and call["completions"] == [[{"role": "assistant", "content": "42"}]]


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (CALLING, CALLING),
        ({"role": "assistant", "content": None, "tool_calls": [CALL], "name": None}, CALLING),
        ({"role": "assistant", "tool_calls": [CALL["function"]]}, CALLING),
        (
            {**CALLING, "tool_calls": [{**CALL, "function": {"name": "times", "arguments": '{"a": 6, "b": 7}'}}]},
            CALLING,
        ),
        (
            {
                **CALLING,
                "tool_calls": [{**CALL, "function": {"name": "times", "arguments": {"a": 6, "b": 7, "c": None}}}],
            },
            CALLING,
        ),
        ({**CALLING, "reasoning_content": "easy"}, {**CALLING, "reasoning_content": "easy"}),
    ],
)
def test_calls_of_messages_are_kept_in_the_form_of_chat_templates(written, kept, tmp_path):
    (prompt,) = read([{"prompt": [USER, written, REPLY], "answer": "42"}], tmp_path)
    assert prompt.messages == [USER, kept, REPLY]


def test_content_in_parts_is_their_text_and_other_parts_are_an_error(tmp_path):
    parts = [{"type": "text", "text": "6x"}, {"type": "text", "text": "7?"}]
    (prompt,) = read([{"prompt": [{"role": "user", "content": parts}], "answer": "42"}], tmp_path)
    assert (prompt.question, prompt.messages) == ("6x7?", [USER])
    image = [{"type": "image"}, *parts]
    with pytest.raises(ValueError, match=r"message 1: its content is .*image.*read text only"):
        read([{"prompt": [{"role": "user", "content": image}], "answer": "42"}], tmp_path)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "assistant", "tool_calls": "times"}, "tool_calls is 'times'; expected a list"),
        ({"role": "assistant", "tool_calls": [{"name": 3}]}, r"a call is \{'name': 3\}; expected"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{6"}}]},
            "arguments are '{6', not a JSON object",
        ),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}, r"arguments are \[1\], not an object"),
    ],
)
def test_calls_that_no_template_can_write_are_errors(message, said, tmp_path):
    with pytest.raises(ValueError, match=rf"rows.jsonl:1: the question .*: message 2: .*{said}"):
        read([{"prompt": [USER, message, REPLY], "answer": "42"}], tmp_path)


@pytest.mark.parametrize(
    "text", [json.dumps([SYSTEM, USER]), repr([SYSTEM, USER]), '[{"from": "human", "value": "?"}]']
)
def test_a_conversation_written_as_text_is_an_error(text, tmp_path):
    with pytest.raises(ValueError, match=r"column 'prompt'\) is .*a conversation written as text"):
        read([{"prompt": text, "answer": "42"}], tmp_path)
    with pytest.raises(ValueError, match=r"column 'chosen' is .*a conversation written as text"):
        read([{"prompt": "6x7?", "chosen": text, "rejected": "41"}], tmp_path, "preferences")


@pytest.mark.parametrize("answer", [math.nan, math.inf, "nan", "NaN", "<NA>", True, ["42"], {"value": 42}, None])
def test_an_answer_that_is_neither_text_nor_a_number_is_an_error(answer, tmp_path):
    rows = [{"question": "6x7?", "answer": "42"}, {"question": "b", "answer": answer}]
    for found in (lambda: read(rows, tmp_path), lambda: given(rows, tmp_path)):
        with pytest.raises(ValueError, match=r"jsonl:2: the answer \(column 'answer'\) is .*name another column"):
            found()


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (np.int64(42), "42"),
        (np.float64(4.5), "4.5"),
        (SEVENTH, "0.1"),
        (np.array(42), "42"),
        (decimal.Decimal("4.50"), "4.50"),
        (42.0, "42"),
        (1e22, "1e+22"),
        (10**40, "1" + 40 * "0"),
        (" 42 ", "42"),
    ],
)
def test_a_number_is_written_as_it_was_meant(answer, reference, tmp_path):
    assert given([{"question": "?", "answer": answer}], tmp_path)[0].answer == reference


@pytest.mark.parametrize("kind", ["frame", "dataset", "parquet"])
def test_narrow_floats_are_the_numbers_that_were_written(kind, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(
        {"question": ["a", "b"], "answer": pyarrow.array([0.1, 2.0], pyarrow.float32()), "x": [None, 1]}
    )
    data: Any = {
        "frame": lambda: pytest.importorskip("pandas").DataFrame(
            {"question": ["a", "b"], "answer": [SEVENTH, np.float32(2)]}
        ),
        "dataset": lambda: pytest.importorskip("datasets").Dataset(table),
        "parquet": lambda: parquet.write_table(table, tmp_path / "a.parquet") or tmp_path / "a.parquet",
    }[kind]()
    assert [each.answer for each in given(data, tmp_path)] == ["0.1", "2"]


def test_a_dict_of_columns_is_rows_and_a_dict_of_splits_is_splits(tmp_path):
    columns = {"prompt": [[USER], [USER]], "answer": np.array([42, 43]), "reward_model": [{"a": 1}, {"a": 2}]}
    found = given(columns, tmp_path)
    assert [(each.messages, each.answer, each.metadata["reward_model"]) for each in found] == [
        ([USER], "42", {"a": 1}),
        ([USER], "43", {"a": 2}),
    ]
    rows = [{"question": "a", "answer": "1"}]
    frame = pytest.importorskip("pandas").DataFrame(rows)
    for splits in ({"train": rows, "test": []}, {"train": (row for row in rows)}, {"train": frame, "test": frame}):
        assert [each.question for each in given(splits, tmp_path)] == ["a"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"question": ["a", "b"], "answer": [1]},
            "it is a dict of columns, and these differ in length: question 2, answer 1",
        ),
        ({"question": "a", "answer": "1"}, "it is a single row, .*; give a list of rows"),
        ({"question": {0: "a"}, "answer": {0: 1}}, "its entry 'question' is a dict"),
        ({"dev": [{"question": "a"}]}, "it has the splits dev, and train is needed"),
        (["a"], "row 0 is 'a'; expected a dict"),
        ([{1: "a", "1": "b"}], "row 0: the column name 1 is not text; rename it"),
        ([{"question": "a", "answer": object()}], "row 0 cannot be written as JSON"),
    ],
)
def test_data_that_is_no_rows_is_an_error(data, said, tmp_path):
    with pytest.raises(ValueError, match=f"data: {said}"):
        given(data, tmp_path)


def test_a_frame_with_two_columns_of_one_name_is_an_error(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([["a", 1, 2]], columns=["question", "answer", "answer"])
    with pytest.raises(ValueError, match="data: column 'answer' is there twice"):
        given(frame, tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_an_object_with_two_values_of_one_name_is_an_error(name, tmp_path):
    text = '{"question": "a", "answer": 1, "answer": 2}'
    (tmp_path / name).write_text(f"[{text}]" if name == "a.json" else text)
    with pytest.raises(ValueError, match=rf"{name}.*'answer' occurs twice in an object"):
        given(tmp_path / name, tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "question;answer\na;1\n", "a.csv: the first line separates columns by ';'"),
        ("a.json", '{"question": ["a", "b"], "answer": [1, 2]}', "a list of texts, as in a table of columns"),
        ("a.jsonl", '{"question": "a", "choices": ["x", "y"], "answer": 0}', "column 'choices' is a list"),
    ],
)
def test_tables_of_other_forms_are_errors_that_name_the_form(name, text, said, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        given(tmp_path / name, tmp_path)


def test_a_whole_number_may_have_hundreds_of_digits(tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{{"question": "a", "answer": {"7" * 400}}}')
    assert given(tmp_path / "a.jsonl", tmp_path)[0].answer == "7" * 400


def test_a_parquet_table_with_two_columns_of_one_name_is_an_error(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table([["a"], ["1"], ["2"]], names=["question", "answer", "answer"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: column 'answer' is there twice"):
        given(tmp_path / "a.parquet", tmp_path)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_all_kinds_of_file_give_the_same_prompts(ending, tmp_path):
    """With a byte order mark where there can be one."""
    rows, path = [{"question": "a, b", "answer": "1"}, {"question": "c", "answer": "0.5"}], tmp_path / f"a.{ending}"
    text = {
        "jsonl": "\ufeff" + "".join(json.dumps(row) + "\n" for row in rows),
        "json": "\ufeff" + json.dumps(rows),
        "csv": '\ufeffquestion,answer\r\n"a, b",1\r\nc,0.5\r\n',
    }
    if ending == "parquet":
        parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(text[ending], encoding="utf-8")
    assert [(each.question, each.answer) for each in given(path, tmp_path)] == [("a, b", "1"), ("c", "0.5")]


def test_json_that_is_nested_too_deeply_is_an_error_of_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"a.jsonl:1: not a line of JSON"):
        given(tmp_path / "a.jsonl", tmp_path)


PAIR = {"prompt": "6x7?", "chosen": "42", "rejected": "41"}


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("labelled", PAIR | {"completion": "42", "label": True}, "is a pair and has a label too"),
        ("preferences", PAIR | {"chosen": [CALLING]}, "column 'chosen' has an assistant's message with tool_calls"),
        ("labelled", {"prompt": "?", "completion": [CALLING], "label": True}, "message with tool_calls, and only text"),
        ("chat", {"messages": [USER, CALLING, REPLY, {"role": "assistant", "content": "42"}]}, "with tool_calls"),
        ("preferences", PAIR | {"tools": [{"type": "function"}]}, "column 'tools' gives the row its own tools"),
        ("chat", {"messages": [USER, {"role": "assistant", "content": "42"}], "tools": [{}]}, "column 'tools'"),
        (
            "preferences",
            {"chosen": [USER, CALLING, CALLING], "rejected": [USER, CALLING, SYSTEM]},
            "differ in the last",
        ),
    ],
)
def test_what_cannot_be_learned_as_it_is_written_is_an_error(name, row, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        read([row], tmp_path, name)


def test_empty_cells_of_a_table_of_pairs_and_labels_are_none(tmp_path):
    whole = {
        "chosen": [USER, {"role": "assistant", "content": "42"}],
        "rejected": [USER, {"role": "assistant", "content": "41"}],
    }
    (prompt,) = read([{"prompt": None, "label": None, **whole}], tmp_path, "preferences")
    assert prompt.messages == [USER] and prompt.answer == "42"
    assert len(read([{"prompt": None, "completion": None, "label": None, **whole}], tmp_path, "labelled")) == 2


def test_an_environments_rows_may_have_any_answer_for_the_environment_itself(tmp_path):
    answers = [["a", "b"], {"x": 1}, True, math.nan, None, 7, "seven"]
    rows = [{"prompt": "go", "answer": answer} for answer in answers]
    assert [each.answer for each in read(rows, tmp_path, "environment")] == ["", "", "", "", "", "7", "seven"]
