"""Sets of the hub as they are published: their rows are read rightly by name and by columns. Rows are made up."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.api.given_data import Questions, task_settings
from podium.config.schema import TaskConfig
from podium.tasks.code.code_grading import Program
from podium.tasks.code.code_task import parsed
from podium.tasks.mixture import TaskMixture
from podium.tasks.registry import make_task
from podium.tasks.task import Prompt

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
ASK = "Solve the following problem. The last line is 'Answer: $Answer'.\n\nWhat is 6 x 7?"
BOX = "Six sevens are \\boxed{42}."

MATHEMATICS: dict[str, tuple[str, dict[str, Any], str, str]] = {  # id: (subset, a row, question, reference)
    "openai/gsm8k": ("main", {"question": "6 bags of 7?", "answer": "6*7=<<6*7=42>>42\n#### 42"}, "6 bags of 7?", "42"),
    "DigitalLearningGmbH/MATH-lighteval": (
        "",
        {"problem": "6x7?", "level": "Level 1", "type": "Algebra", "solution": BOX},
        "6x7?",
        "42",
    ),
    "HuggingFaceH4/MATH-500": (
        "",
        {"problem": "6x7?", "solution": BOX, "answer": "42", "subject": "Algebra", "level": 1, "unique_id": "a"},
        "6x7?",
        "42",
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        "",
        {
            "data_source": "math_dapo",
            "prompt": [{"content": ASK, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b"},
        },
        ASK,
        "42",
    ),
    "open-r1/DAPO-Math-17k-Processed": (
        "all",
        {
            "prompt": "6x7?",
            "solution": "42",
            "data_source": "math_dapo",
            "source_prompt": [{"content": ASK, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b"},
        },
        "6x7?",
        "42",
    ),
    "agentica-org/DeepScaleR-Preview-Dataset": (
        "",
        {"problem": "6x7?", "answer": "\\frac{84}{2}", "solution": ""},
        "6x7?",
        "\\frac{84}{2}",
    ),
    "AI-MO/NuminaMath-CoT": (
        "",
        {
            "source": "olympiads",
            "problem": "6x7?",
            "solution": BOX,
            "messages": [{"content": "6x7?", "role": "user"}, {"content": BOX, "role": "assistant"}],
        },
        "6x7?",
        "42",
    ),
    "AI-MO/NuminaMath-1.5": (
        "",
        {
            "problem": "6x7?",
            "solution": "It is 42.",
            "answer": "42",
            "problem_type": "Algebra",
            "question_type": "math-word-problem",
            "problem_is_valid": "Yes",
            "solution_is_valid": "Yes",
            "source": "olympiads",
            "synthetic": False,
        },
        "6x7?",
        "42",
    ),
    "trl-lib/DeepMath-103K": ("", {"prompt": [{"role": "user", "content": "6x7?"}], "solution": "42"}, "6x7?", "42"),
}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x: int) -> int:\n    """Twice x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    "entry_point": "double",
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to double a number.",
    "code": "def double(x):\n    return 2 * x",
    "test_list": ["assert double(2) == 4"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
PRIVATE = [
    {"input": "3\n", "output": "6\n", "testtype": "stdin"},
    {"input": "4\n", "output": "8\n", "testtype": "stdin"},
]
LIVE_CODE_BENCH = {
    "question_title": "Double",
    "question_content": "Read a number and print twice the number.",
    "platform": "atcoder",
    "question_id": "abc001_a",
    "contest_date": "2024-01-01T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
    "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(json.dumps(PRIVATE)))).decode(),
    "metadata": "{}",
}
CODE = {
    "openai/openai_humaneval": HUMAN_EVAL,
    "google-research-datasets/mbpp": MBPP,
    "livecodebench/code_generation_lite": LIVE_CODE_BENCH,
}


def settings_of(data: Any, tmp_path: Path, **changes: Any) -> TaskConfig:
    """The task that `podium.grpo(model, data)` makes."""
    found = task_settings(Questions(data, **changes), podium.math_equal, folder=tmp_path)[0].value
    return TaskConfig.model_validate(found[0])


def prompts_of(config: TaskConfig) -> list[Prompt]:
    mixture = TaskMixture([config], seed=0)
    mixture.data.check_answers(trains=True, evaluates=False)
    return [each.prompt for own in mixture.train_prompts().values() for each in own]


@pytest.fixture
def hub(monkeypatch) -> list[tuple[str, str | None]]:
    """A hub with one row of each set; returns what is loaded: names and subsets."""
    datasets, loaded = pytest.importorskip("datasets"), []
    rows = {name: row for name, (_, row, *_) in MATHEMATICS.items()} | CODE

    def load_dataset(name: str, subset: str | None, *, split: str) -> Any:
        loaded.append((name, subset))
        return datasets.Dataset.from_list([rows[name]] * 2)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return loaded


@pytest.mark.parametrize("name", MATHEMATICS)
def test_a_set_of_mathematics_is_read_by_its_name(name, hub, tmp_path):
    subset, _, question, reference = MATHEMATICS[name]
    (first, _) = prompts_of(settings_of(name, tmp_path))
    assert (first.question, first.answer) == (question, reference)
    assert hub == [(name, subset or None)]


@pytest.mark.parametrize("name", MATHEMATICS)
@pytest.mark.parametrize("kind", ["rows", "jsonl", "parquet"])
def test_a_copy_of_a_set_of_mathematics_is_read_by_its_columns(name, kind, tmp_path):
    _, row, question, reference = MATHEMATICS[name]
    data: Any = [row, row]
    if kind == "jsonl":
        data = tmp_path / "mine.jsonl"
        data.write_text(2 * (json.dumps(row) + "\n"))
    elif kind == "parquet":
        parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        data = tmp_path / "mine.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([row, row]), data)
    (first, _) = prompts_of(settings_of(data, tmp_path))
    assert (first.question, first.answer) == (question, reference)


@pytest.mark.parametrize("name", CODE)
@pytest.mark.parametrize("by", ["name", "columns"])
def test_a_set_of_code_is_read_by_the_task_code(name, by, hub, tmp_path):
    config = settings_of(name if by == "name" else [CODE[name]] * 2, tmp_path)
    assert config.name == "code"
    assert len(make_task(config).prompts("train")) == 2


def test_private_tests_of_live_code_bench_are_read_and_run_no_code(tmp_path):
    tests = parsed(LIVE_CODE_BENCH).tests
    assert tests == [Program("2\n", "4\n"), Program("3\n", "6\n"), Program("4\n", "8\n")]
    hostile = base64.b64encode(zlib.compress(pickle.dumps(Path))).decode()
    with pytest.raises(ValueError, match=r"private_test_cases: .*it refers to pathlib.*, but only text is read"):
        parsed(LIVE_CODE_BENCH | {"private_test_cases": hostile})


def test_code_in_task_jsonl_is_an_error_that_names_the_task(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(MBPP) + "\n")
    task = make_task(TaskConfig(name="jsonl", path=str(tmp_path / "a.jsonl"), options={"question": "text"}))
    with pytest.raises(ValueError, match=r"rows of code with tests .*; read them with task `code`"):
        task.prompts("train")


@pytest.mark.parametrize(
    ("rows", "count", "said"),
    [
        (
            [{"problem": "a", "solution": BOX}, {"problem": "b", "solution": "Hence proved."}],
            1,
            "1 of 2 solutions have",
        ),
        (
            [
                {"problem": "a", "answer": "42", "problem_is_valid": "Yes"},
                {"problem": "b", "answer": "proof", "problem_is_valid": "Yes"},
                {"problem": "c", "answer": "notfound", "problem_is_valid": "Yes"},
            ],
            1,
            "2 of 3 rows have `proof` or `notfound`",
        ),
    ],
)
def test_proofs_of_published_sets_are_left_out_and_counted(rows, count, said, tmp_path, caplog):
    assert len(prompts_of(settings_of(rows, tmp_path))) == count
    assert said in caplog.text


def test_what_was_read_as_the_reference_is_said(tmp_path, caplog):
    prompts_of(settings_of([MATHEMATICS["openai/gsm8k"][1]], tmp_path))
    assert "the reference is what follows #### in column 'answer'" in caplog.text


def test_a_set_with_hashes_in_some_answers_is_no_gsm8k(tmp_path):
    rows = [{"question": "a", "answer": "1 #### 2"}, {"question": "b", "answer": "7"}]
    with pytest.raises(ValueError, match=r"no answer can equal the reference '1 #### 2'"):
        prompts_of(settings_of(rows, tmp_path))


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ("It is 6 x 7, so the answer is unclear. #### see above\nand below", "math"),
        ("42 " * 400, "math"),
        ("<answer>4</answer> and <answer>2</answer>", "text"),
        ("?!", "text"),
    ],
)
def test_a_reference_that_no_answer_or_every_answer_equals_is_an_error(answer, match, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({"question": "a", "answer": "5"}) + "\n" + json.dumps({"question": "b", "answer": answer})
    )
    with pytest.raises(
        ValueError, match=r"jsonl/train/1: (no answer can equal|the reference .* equals an empty answer)"
    ):
        prompts_of(TaskConfig(name="jsonl", path=str(path), options={"match": match}))


def test_references_are_not_compared_where_functions_grade(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "a", "answer": "42 " * 400}))
    mine = TaskConfig(name="jsonl", path=str(path), rewards={"length": 1.0}, correct="length")
    assert len(prompts_of(mine)) == 1


@pytest.mark.parametrize("name", ["gsm8k", "math500"])
def test_every_reference_of_the_real_sets_equals_itself(name):
    path = SHARED / name / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"needs ../shared/data/{name}")
    mixture = TaskMixture([TaskConfig(name="jsonl", path=str(path), eval_path=str(path))], seed=0)
    mixture.data.check_answers(trains=True, evaluates=True)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    results = [row["answer"].rpartition("#### ")[2].strip() for row in rows]
    assert [each.prompt.answer for own in mixture.train_prompts().values() for each in own] == results
