import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from podium.config.schema import TaskConfig
from podium.tasks.registry import make_task
from podium.tasks.task import Prompt

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def write(path: Path, *rows) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def qa(question="1+1?", answer="2") -> dict:
    return {"question": question, "answer": answer}


def read(split: str = "train", **config) -> list[Prompt]:
    return list(make_task(TaskConfig(**{"name": "jsonl", **config})).prompts(split))


def test_rows_become_prompts_with_stable_ids_and_blank_lines_do_not_count(tmp_path):
    path = write(tmp_path / "train.jsonl", qa(), "\n", qa("2+2?", 4))
    assert read(path=path) == [
        Prompt(id="jsonl/train/0", question="1+1?", answer="2", metadata=qa()),
        Prompt(id="jsonl/train/1", question="2+2?", answer="4", metadata=qa("2+2?", 4)),
    ]


def test_options_name_the_columns(tmp_path):
    path = write(tmp_path / "a.jsonl", {"q": "1+1?", "a": 2})
    (prompt,) = read(path=path, options={"question": "q", "answer": "a"})
    assert (prompt.question, prompt.answer) == ("1+1?", "2")


def test_a_folder_has_one_file_for_each_split(tmp_path):
    write(tmp_path / "train.jsonl", qa("train"))
    write(tmp_path / "test.jsonl", qa("test"))
    assert [prompt.question for prompt in read(path=str(tmp_path))] == ["train"]
    assert [prompt.question for prompt in read("eval", path=str(tmp_path))] == ["test"]
    with pytest.raises(
        ValueError, match=r"has no dev.jsonl, dev.json, dev.csv or dev.parquet \(it holds test.jsonl, train.jsonl\)"
    ):
        read("eval", path=str(tmp_path), eval_split="dev")


def test_eval_path_is_read_for_evaluation_only(tmp_path):
    train, held_out = write(tmp_path / "a.jsonl", qa("a")), write(tmp_path / "b.jsonl", qa("b"))
    assert [prompt.question for prompt in read(path=train, eval_path=held_out)] == ["a"]
    assert [prompt.question for prompt in read("eval", path=train, eval_path=held_out)] == ["b"]


def test_a_prompt_column_is_text_or_a_conversation(tmp_path):
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}
    path = write(tmp_path / "a.jsonl", {"prompt": "2+2?", "answer": 4}, {"prompt": [system, user], "answer": 2})
    text, conversation = read(path=path)
    assert (text.question, text.answer, text.messages) == ("2+2?", "4", None)
    assert (conversation.question, conversation.messages) == ("1+1?", [system, user])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "expected a list of {role: system"),
        ([{"role": "user"}], "message 1: its content is None; expected {role, content: text}"),
        ([{"role": "robot", "content": "a"}], "expected a list of {role: system"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "ends with a message of the assis"),
    ],
)
def test_a_conversation_that_cannot_be_answered_is_an_error(tmp_path, messages, message):
    path = write(tmp_path / "a.jsonl", {"prompt": messages, "answer": 4})
    with pytest.raises(ValueError, match=rf"a.jsonl:1: the question \(column 'prompt'\).*{message}"):
        read(path=path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", '\ufeffquestion,answer\n"1+1,\nplease",2\n2+2?,4\n'),
        ("a.json", '[{"question": "1+1,\\nplease", "answer": 2}, {"question": "2+2?", "answer": 4}]'),
        ("b.json", '{"question": "1+1,\\nplease", "answer": 2}\n{"question": "2+2?", "answer": 4}\n'),
    ],
)
def test_tables_and_lists_are_read(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    found = read(path=str(tmp_path / name))
    assert [(each.question, each.answer) for each in found] == [("1+1,\nplease", "2"), ("2+2?", "4")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "question,answer\n1+1\n", r"a.csv:2: 1 values for 2 columns; quote"),
        ("a.csv", "question,answer\n1+1,2,3\n", r"a.csv:2: 3 values for 2 columns; quote"),
        ("a.csv", "question,answer,answer\n1,2,3\n", "column 'answer' is there twice"),
        ("a.csv", 'question,answer\n"1,2\n', "not a readable table"),
        ("a.csv", "question,answer\n1+1?,\n", "the answer .* is None"),
        ("a.csv", b"question,answer\n\xff,1\n", "not text in UTF-8"),
        ("a.csv", "", "has no questions"),
        ("a.json", "[1]", "row 1 is 1; expected an object"),
        ("a.json", "[{]", "not a readable list of JSON"),
        ("a.json", "[" * 100_000, "not a readable list of JSON"),
    ],
)
def test_a_damaged_table_or_list_is_an_error_that_names_it(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=message):
        read(path=str(tmp_path / name))


def test_the_test_file_beside_the_train_file_is_used(tmp_path, caplog):
    train = write(tmp_path / "train.jsonl", qa("train"))
    write(tmp_path / "test.jsonl", qa("test"))
    assert [prompt.question for prompt in read("eval", path=train)] == ["test"]
    assert not caplog.records


def test_one_file_for_both_is_said(tmp_path, caplog):
    path = write(tmp_path / "all.jsonl", qa("all"))
    assert [prompt.question for prompt in read("eval", path=path)] == ["all"]
    assert "used for both training and evaluation; set eval_path" in caplog.text


def test_parquet_is_read_like_jsonl(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    for shard in (0, 1):
        table = pyarrow.Table.from_pylist([qa(f"{shard}/{i}", str(i)) for i in range(3)])
        parquet.write_table(table, tmp_path / f"train-0000{shard}-of-00002.parquet")
    prompts = read(path=str(tmp_path))
    assert [prompt.question for prompt in prompts] == ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2"]
    assert prompts[-1].id == "jsonl/train/5"
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(ValueError, match="not a readable parquet file"):
        read(path=str(tmp_path / "torn.parquet"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "has no questions; an empty data set"),
        (("\n\n",), "has no questions; an empty data set"),
        ((qa(), qa(answer="")), "data.jsonl:2: the answer .column 'answer'. is empty"),
        ((qa(), qa(answer=None)), "data.jsonl:2: the answer .* is None, neither text nor a number"),
        ((qa(), qa(answer=True)), "data.jsonl:2: the answer .* is True"),
        ((qa(question=" "),), "data.jsonl:1: the question .* not text"),
        ((qa(), {"question": "?"}), "data.jsonl:2: no column 'answer' .*expected one of question"),
        (({"questions": "?", "answer": "1"},), "no column 'question' .*did you mean 'questions'"),
        ((qa(), "{'a': 1}\n"), "data.jsonl:2: not a line of JSON"),
        ((qa(), "[1]\n"), "data.jsonl:2: expected a JSON object, got b'.1."),
    ],
)
def test_a_bad_row_is_an_error_that_names_file_and_line(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        read(path=write(tmp_path / "data.jsonl", *rows))


def test_bytes_that_are_not_text_are_an_error(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(ValueError, match=r"data\.jsonl:1: not a line of JSON"):
        read(path=str(tmp_path / "data.jsonl"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "jsonl: path must be set"),
        ({"path": "no/such.jsonl"}, "jsonl: path: there is no file or folder no/such.jsonl"),
        ({"path": __file__}, "is not .jsonl, .json, .csv or .parquet"),
    ],
)
def test_a_path_that_is_wrong_or_missing_is_an_error(config, message):
    with pytest.raises(ValueError, match=message):
        read(**config)


def test_a_gsm8k_answer_without_hashes_is_an_error(tmp_path):
    path = write(tmp_path / "train.jsonl", qa(answer="2+2 #### 4"), qa(answer="four"))
    with pytest.raises(ValueError, match=r"train\.jsonl:2: the answer .* has no '#### result' line: 'four'"):
        read(name="gsm8k", path=path)


def test_a_math_reference_may_be_a_boxed_solution(tmp_path):
    path = write(tmp_path / "train.jsonl", {"problem": "?", "solution": "so \\boxed{\\frac{1}{2}}."})
    (prompt,) = read(name="math", path=path, options={"answer": "solution"})
    assert prompt.answer == "\\frac{1}{2}"
    path = write(tmp_path / "train.jsonl", {"problem": "?", "solution": "so \\boxed{1"})
    with pytest.raises(ValueError, match="holds no answer"):
        read(name="math", path=path, options={"answer": "solution"})


def test_text_answers_are_compared_as_words():
    task = make_task(TaskConfig(name="jsonl", options={"match": "text"}))
    prompt = Prompt(id="0", question="?", answer="New York")
    texts = ["new  york.", "<answer>New York</answer>", "The answer is New York.", "York", "<think>New York</think>"]
    assert [task.grade(prompt, text) for text in texts] == [1, 1, 1, 0, 0]


def test_a_data_set_that_cannot_be_loaded_is_an_error_with_a_way_out(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(name, subset, *, split):
        raise FileNotFoundError(f"Couldn't reach {name!r} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"could not load split 'train' of openai/gsm8k from the hub: .*; or set path"):
        read(name="gsm8k")


def test_a_data_set_of_the_hub_is_read_by_split(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = {"train": [qa("t", "#### 1")], "test": [qa("e", "x #### 2"), qa("e2", "3")]}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, *, split: rows[split])
    assert read(name="gsm8k") == [
        Prompt(id="gsm8k/train/0", question="t", answer="1", within="answer", metadata=rows["train"][0])
    ]
    with pytest.raises(ValueError, match=r"openai/gsm8k \(test\) row 2: the answer .* has no '#### result' line"):
        read("eval", name="gsm8k")


@pytest.mark.parametrize(("name", "count"), [("gsm8k", 1319), ("math500", 500)])
def test_the_real_test_sets_are_read_whole(name, count):
    if not (SHARED / name / "test.jsonl").is_file():
        pytest.skip(f"needs ../shared/data/{name}")
    prompts = read("eval", name=name, path=str(SHARED / name))
    assert len({prompt.id for prompt in prompts}) == count


def test_a_row_that_no_environment_variable_holds_is_an_error_before_a_program_starts(tmp_path):
    path, command = tmp_path / "rows.jsonl", [sys.executable, "-c", ""]

    def prompts(size: int) -> Sequence[Prompt]:
        """Of a row with this many bytes as JSON."""
        path.write_text(json.dumps({"text": "a" * (size - len('{"text": ""}'))}) + "\n")
        return make_task(TaskConfig(name="program", path=str(path), options={"command": command})).prompts("train")

    (longest,) = prompts(131_060)
    row = json.dumps(dict(longest.metadata))
    subprocess.run(command, env={"PODIUM_ROW": row}, check=True)
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(command, env={"PODIUM_ROW": f"{row} "}, check=True)
    with pytest.raises(
        ValueError, match=r"rows.jsonl:1: the row has 131,061 bytes as JSON, and .* holds 131,060; short"
    ):
        prompts(131_061)
