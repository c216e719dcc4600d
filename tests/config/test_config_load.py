"""Where settings come from: layers, includes, lists, and who said what."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from podium.config.document import Node
from podium.config.errors import ConfigError
from podium.config.load import Override, load, merge
from podium.config.schema import Config, TaskConfig
from podium.settings import evaluation_overrides, load_settings

BASE = "model: demo\ntasks: [{name: arithmetic}]\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files into an empty working folder, so that errors show short names."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
        return name

    return write


def problems(*args) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(*args)
    return [str(problem) for problem in error.value.problems]


def test_defaults_are_overridden_by_files_then_environment_then_command_line(write):
    file = write("a.yaml", BASE + "steps: 1\nseed: 1\nprompts_per_step: 1\n")
    environ = {"PODIUM_SEED": "2", "PODIUM_PROMPTS_PER_STEP": "2", "HOME": "/"}
    loaded = load([file], ["prompts_per_step=3"], environ)
    config = loaded.config
    assert (config.group_size, config.steps, config.seed, config.prompts_per_step) == (8, 1, 2, 3)
    assert loaded.provenance["steps"] == "a.yaml:3"
    assert loaded.provenance["seed"] == "environment PODIUM_SEED"
    assert loaded.provenance["prompts_per_step"] == "--set prompts_per_step=3"
    assert "group_size" not in loaded.provenance


def test_later_files_win_key_by_key(write):
    first = write("a.yaml", BASE + "rollout: {slots: 8, top_k: 3}\n")
    second = write("b.yaml", "rollout:\n  slots: 16\n")
    loaded = load([first, second], [], {})
    assert (loaded.config.rollout.slots, loaded.config.rollout.top_k) == (16, 3)
    assert loaded.provenance["rollout.slots"] == "b.yaml:2"
    assert loaded.provenance["rollout.top_k"] == "a.yaml:3"


def test_lists_are_replaced_whole(write):
    first = write("a.yaml", "model: demo\ntasks: [{name: arithmetic, weight: 2.0}, {name: gsm8k}]\n")
    second = write("b.yaml", "tasks: [{name: math}]\n")
    config = load([first, second], [], {}).config
    assert [(task.name, task.weight) for task in config.tasks] == [("math", 1.0)]


def test_base_is_read_first_and_stands_relative_to_its_file(write):
    write("common/model.yaml", "model: demo\nsteps: 1\nseed: 1\n")
    write("common/task.yaml", "tasks: [{name: arithmetic}]\nseed: 2\n")
    write("common/both.yaml", "base: [model.yaml, task.yaml]\ngroup_size: 4\n")
    file = write("run.yaml", "base: common/both.yaml\nsteps: 5\n")
    loaded = load([file], [], {})
    config = loaded.config
    assert (config.model, config.seed, config.group_size, config.steps) == ("demo", 2, 4, 5)
    assert loaded.provenance["seed"] == "common/task.yaml:2"
    assert "base" not in loaded.provenance


def test_one_base_may_be_included_twice(write):
    write("base.yaml", BASE)
    write("left.yaml", "base: base.yaml\nsteps: 2\n")
    write("right.yaml", "base: base.yaml\nseed: 3\n")
    config = load([write("a.yaml", "base: [left.yaml, right.yaml]\n")], [], {}).config
    assert (config.steps, config.seed) == (2, 3)


def test_files_that_include_each_other_are_an_error(write, tmp_path):
    write("a.yaml", "base: b.yaml\n")
    write("b.yaml", "base: a.yaml\n")
    (message,) = problems(["a.yaml"], [], {})
    a, b = tmp_path.resolve() / "a.yaml", tmp_path.resolve() / "b.yaml"
    assert message == (
        f"base: files include each other: {a} -> {b} -> {a}; remove one base:\n"
        "    included at b.yaml:1\n    included at a.yaml:1"
    )


def test_a_missing_base_names_the_line_that_includes_it(write):
    write("a.yaml", "\nbase: gone.yaml\n")
    assert problems(["a.yaml"], [], {}) == [
        "gone.yaml: cannot be read: No such file or directory; check the path\n    included at a.yaml:2"
    ]


def test_a_base_that_is_no_file_name_is_an_error(write):
    write("a.yaml", "base: [3]\n")
    assert problems(["a.yaml"], [], {}) == ["base: expected a file name or a list of them, got [3]\n    a.yaml:1"]


def test_list_elements_are_set_by_index(write):
    file = write("a.yaml", "model: demo\ntasks: [{name: arithmetic}, {name: gsm8k}]\n")
    environ = {"PODIUM_TASKS__0__WEIGHT": "3.0"}
    loaded = load([file], ["tasks.1.path=data", "rollout.stop=[a, b]", "rollout.stop.1=c"], environ)
    assert [(task.weight, task.path) for task in loaded.config.tasks] == [(3.0, None), (1.0, "data")]
    assert loaded.config.rollout.stop == ["a", "c"]
    assert loaded.provenance["tasks.1.path"] == "--set tasks.1.path=data"
    assert loaded.provenance["tasks.0.weight"] == "environment PODIUM_TASKS__0__WEIGHT"


@pytest.mark.parametrize("index", ["1", "-1", "x", "99999999999999999999"])
def test_an_index_that_is_not_there_is_an_error(write, index):
    file = write("a.yaml", BASE)
    assert problems([file], [f"tasks.{index}.path=x"], {}) == [
        f"tasks.{index}: tasks is a list of 1, index 0; to set the whole list write tasks=[...]\n"
        f"    --set tasks.{index}.path=x"
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", "7"),
        ("1e5", "1e5"),
        ("true", "true"),
        ("a: b", "a: b"),
        ("a # b", "a # b"),
        ("'7'", "7"),
        ("!x", "!x"),
        ("[", "["),
        ("- a", "- a"),
    ],
)
def test_text_on_the_command_line_needs_no_quotes(write, text, expected):
    file = write("a.yaml", BASE)
    assert load([file], [f"name={text}"], {}).config.name == expected
    assert load([file], [], {"PODIUM_NAME": text}).config.name == expected


def test_null_on_the_command_line_unsets(write):
    file = write("a.yaml", BASE + "train: {row_tokens: 4096}\n")
    assert load([file], ["train.row_tokens=null"], {}).config.train.row_tokens is None


def test_whole_numbers_are_taken_where_floats_are_expected(write):
    file = write("a.yaml", BASE + "train: {optimizer: {learning_rate: 1}}\n")
    assert load([file], [], {}).config.train.optimizer.learning_rate == 1.0


def test_a_run_is_named_after_its_last_file(write):
    files = [write("a.yaml", BASE), write("sub/b.yaml", "steps: 1\n")]
    loaded = load(files, [], {})
    assert (loaded.config.name, loaded.provenance["name"]) == ("b", "name of sub/b.yaml")
    assert load(files, ["name=mine"], {}).config.name == "mine"


def test_overrides_with_an_origin_show_it():
    overrides = [Override("model", "demo", "argument demo"), Override("tasks", [{"name": "math"}], "--task math")]
    loaded = load([], [*overrides, "tasks.0.weight=2.0"], {})
    assert loaded.config.name is None
    assert loaded.provenance["tasks.0.name"] == "--task math"
    assert loaded.config.tasks[0].weight == 2.0


SECTIONS = ("p", "q")
TREES = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)),
    lambda inner: st.tuples(
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)), st.dictionaries(st.sampled_from(SECTIONS), inner)
    ).map(lambda parts: parts[0] | parts[1]),
    max_leaves=8,
)


@given(TREES, TREES, TREES)
def test_merging_does_not_depend_on_grouping(first, second, third):
    a, b, c = (Node.of(tree, str(index)) for index, tree in enumerate((first, second, third)))
    left, right = merge(merge(a, b), c), merge(a, merge(b, c))
    assert left.plain() == right.plain()
    assert left.origins() == right.origins()


@given(TREES, TREES)
def test_the_upper_layer_decides_what_it_says_and_nothing_else(below, above):
    merged = merge(Node.of(below, "below"), Node.of(above, "above"))
    leaves = {path for path, origin in merged.origins().items() if origin == "above"}
    assert leaves == set(Node.of(above, "above").origins())


@pytest.mark.parametrize("folder", ["az://bucket/runs", "gs:/bucket/runs", "gs:///runs", "GS://bucket/runs"])
def test_a_bucket_of_another_kind_is_refused_before_anything_starts(folder):
    with pytest.raises(ValidationError, match=f"'{folder}' is neither a folder nor gs://BUCKET/FOLDER nor s3://"):
        Config(model="demo", tasks=[TaskConfig(name="arithmetic")], runs_dir=folder)


def test_a_greedy_evaluation_of_a_run_that_samples_leaves_its_temperature_out(tmp_path):
    """`podium eval RUN --samples 0`; a temperature without samples would be an error."""
    file = tmp_path / "config.yaml"
    file.write_text("model: demo\ntasks: [{name: arithmetic}]\neval: {samples: 2, temperature: 0.5}\n")
    for samples, expected in ((None, (2, 0.5)), (0, (0, 1.0))):
        options = {"eval.samples": samples, "eval.greedy": None, "eval.questions": None}
        chosen = evaluation_overrides(str(tmp_path), [file], task=None, given={}, options=options)
        evaluation = load_settings([file], chosen, {}, elsewhere=True).config.eval
        assert (evaluation.samples, evaluation.temperature) == expected
