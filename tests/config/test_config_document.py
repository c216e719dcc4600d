"""YAML as we read and write it."""

import itertools
import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from podium.config.document import Node, dump_value, parse_text, read_document
from podium.config.errors import ConfigError


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path.relative_to(tmp_path) / "a.yaml"

    def read(text: str | bytes) -> Node:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_document(path)

    return read


def refused(read, text: str | bytes) -> str:
    with pytest.raises(ConfigError) as error:
        read(text)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("12", 12),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("True", True),
        ("yes", "yes"),
        ("no", "no"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("!!str 1", "1"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(read, text, value):
    found = read(f"key: {text}\n").plain()["key"]
    assert found == value and type(found) is type(value)


def test_every_value_knows_its_line(read):
    root = read("# comment\na: 1\nb:\n  c: |\n    text\n  d: [1,\n    2]\n  e: &x {f: 1}\ng: *x\n")
    assert root.origins() == {
        "a": "a.yaml:2",
        "b": "a.yaml:3",
        "b.c": "a.yaml:4",
        "b.d": "a.yaml:6",
        "b.d.0": "a.yaml:6",
        "b.d.1": "a.yaml:7",
        "b.e": "a.yaml:8",
        "b.e.f": "a.yaml:8",
        "g": "a.yaml:9",
        "g.f": "a.yaml:8",
    }


def test_an_empty_file_is_an_empty_mapping(read):
    assert read("# nothing\n").plain() == {}


def test_a_key_written_twice_is_an_error(read):
    assert refused(read, "a:\n  b: 1\n  c: 2\n  b: 3\n") == (
        "b: written twice in one section; keep one\n    a.yaml:2\n    a.yaml:4"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "a.yaml:1: not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'"),
        (
            "a: 1\n\tb: 2",
            "a.yaml:2: not YAML: while scanning for the next token, found character '\\t' that cannot start any token",
        ),
        ("a: 1\n---\nb: 2", "a.yaml:2: not YAML: expected a single document in the stream, but found another document"),
        ("- a\n", "a.yaml:1: expected `key: value` lines at the top of the file"),
        ("a: !x 1", "a.yaml:1: '1' has the tag '!x'; write a plain value"),
        ("a: !!int x", "a.yaml:1: 'x' has the tag 'tag:yaml.org,2002:int'; write a plain value"),
        ("b: {[a]: 1}", "a.yaml:1: a key must be plain text, not a list or a mapping"),
        ("a: &x [*x]", "a.yaml:1: an alias (*name) is inside its own anchor (&name)"),
        (b"a: \xff", "a.yaml: is not UTF-8 text (byte 3); save it as UTF-8"),
        ("a: 1\nb: \x01", "a.yaml:2: not YAML: the character '\\x01'; remove it"),
    ],
)
def test_what_is_not_ours_is_refused_with_its_line(read, text, message):
    assert refused(read, text) == message


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(VALUES)
def test_what_is_written_reads_back_the_same(value):
    assert parse_text(f"[{dump_value(value)}]", "").plain() == [value]


@given(VALUES)
def test_what_is_written_reads_the_same_in_yaml_1_1(value):
    assert yaml.safe_load(f"[{dump_value(value)}]") == [value]


def test_a_document_of_aliases_is_refused_before_it_fills_memory(read):
    """330 bytes that mean 9^9 values: PyYAML shares them, and whoever writes them out does not end."""
    levels = "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefghi"))
    message = refused(read, f"a: &a [{', '.join(['x'] * 9)}]\n{levels}")
    assert "a.yaml: has more than 100,000 values with its aliases (*name) written out" in " ".join(message.split())


@pytest.mark.parametrize("depth", [100, 3_000, 100_000])
def test_nesting_that_would_take_all_of_the_stack_is_refused(read, depth):
    assert "nested too deep: at most 40" in refused(read, "a: " + "[" * depth + "]" * depth)
    with pytest.raises(ConfigError, match="nested too deep"):
        parse_text("[" * depth + "]" * depth, "--set a=[...]")


def test_aliases_that_repeat_a_section_stay_allowed(read):
    assert read("a: &a {x: [1, 2]}\nb: *a\nc: [*a, *a]\n").plain()["c"] == [{"x": [1, 2]}] * 2
