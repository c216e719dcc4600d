import base64
import random
import textwrap
import urllib.parse

import pytest

from podium.job.job_records import read_json, write_record
from podium.job.redact import HIDDEN, Redactor, filtered, without_controls

TOKEN = "hf_QaZwSxEdCrFvTgB/yHn+UjM"
KEY = "0123456789abcdef0123456789abcdef01234567"


def written(value: str) -> dict[str, str]:
    """A value in every form that a log has shown it in."""
    data = value.encode()
    basic = base64.b64encode(f"user:{value}".encode()).decode()
    return {
        "plain": value,
        "upper case": value.upper(),
        "base64": base64.b64encode(data).decode(),
        "base64 for URLs": base64.urlsafe_b64encode(b"x" + data).decode(),
        "base64 in lines": base64.encodebytes(data * 3).decode(),
        "basic authorisation": f"Authorization: Basic {basic}",
        "hexadecimal": data.hex(),
        "hexadecimal, upper case": data.hex(" ").upper(),
        "URL": f"https://user:{urllib.parse.quote(value, safe='')}@host/path",
        "URL, all quoted": "".join(f"%{byte:02X}" for byte in data),
        "bytes": "".join(f"\\x{byte:02x}" for byte in data),
        "JSON": "".join(f"\\u{ord(character):04x}" for character in value),
        "two lines": f"{value[:11]}\n{value[11:]}",
        "wrapped in a panel": "\n".join(f"│ {line} │" for line in textwrap.wrap(f"bad token {value}", 16)),
        "coloured inside": f"{value[:9]}\x1b[1;31m{value[9:]}\x1b[0m",
        "two strings": f"'{value[:9]}'\n  '{value[9:]}'",
    }


def letters(text: str) -> str:
    return "".join(filter(str.isalnum, text)).lower()


def leaks(text: str, form: str, value: str) -> bool:
    """Whether half of what was written is still there."""
    whole, shown = letters(without_controls(form)), letters(text)
    half = len(letters(value)) // 2
    middle = whole[len(whole) // 2 - half // 2 :][:half]
    return middle in shown or letters(value)[3 : 3 + half] in shown


@pytest.mark.parametrize("value", [TOKEN, KEY])
@pytest.mark.parametrize("name", list(written("x")))
def test_a_value_is_hidden_in_every_form(name, value):
    form = written(value)[name]
    text = f"before {form} after\n"
    hidden = Redactor([value]).redact(without_controls(text))
    assert not leaks(hidden, form, value), hidden
    assert hidden.startswith("before ")
    assert hidden.endswith(" after\n")
    assert HIDDEN in hidden


@pytest.mark.parametrize("name", list(written("x")))
def test_a_value_is_hidden_however_it_is_split_over_writes(name):
    form, rng = written(TOKEN)[name], random.Random(0)
    text = f"one\ntwo {form} three\nfour {KEY} five\n"
    for pieces in (1, 2, 3, 7, len(text)):
        for _ in range(8):
            cuts = sorted(rng.sample(range(1, len(text)), pieces - 1))
            parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            shown = "".join(filtered(parts, Redactor([TOKEN, KEY])))
            assert not leaks(shown, form, TOKEN), (cuts, shown)
            assert letters(KEY) not in letters(shown)
            assert shown.startswith("one\ntwo ")
            assert shown.endswith(" five\n")


def test_a_value_that_a_kill_cut_off_is_hidden_too():
    assert "".join(filtered(["token ", TOKEN[:-3]], Redactor([TOKEN]))) == f"token {HIDDEN}"


def test_other_text_stays_and_comes_at_once():
    lines = ["step 1 reward 0.5\n", "hf hf_ hf_Q\n", "deadbeef \u00e9\u4e16\n", "\n", "0123 done\n"]
    shown = filtered(iter(lines), Redactor([TOKEN, KEY]))
    assert [next(shown) for _ in lines] == [*lines[:4], "0123 done\n"]
    assert "".join(filtered(lines, Redactor([]))) == "".join(lines)


def test_values_that_occur_in_any_text_are_left_alone():
    assert Redactor(["short", "--------"]).redact("a short text --------") == "a short text --------"


def test_only_variables_with_a_secrets_name_are_hidden():
    environment = {"MY_TOKEN": TOKEN, "db_password": "correct-horse-battery", "PATH": "/usr/local/sbin"}
    hidden = Redactor.from_environment(environment).redact(f"{TOKEN} correct-horse-battery /usr/local/sbin")
    assert hidden == f"{HIDDEN} {HIDDEN} /usr/local/sbin"


HOSTILE = {
    "colour": ("a\x1b[31;1mb\x1b[0m", "ab"),
    "screen cleared": ("a\x1b[2J\x1b[Hb", "ab"),
    "title": ("a\x1b]0;owned\x07b", "ab"),
    "clipboard": ("a\x1b]52;c;ZXZpbA==\x1b\\b", "ab"),
    "link": ("\x1b]8;;http://evil\x1b\\text\x1b]8;;\x1b\\", "text"),
    "device control": ("a\x1bPq#0\x1b\\b", "ab"),
    "one character": ("a\x9b31mb\x9d0;t\x9cc", "abc"),
    "keyboard": ("a\x1b=b\x1bcc\x1b(0d", "abcd"),
    "bell and backspace": ("a\x07b\x08\x08c\x00\x7f", "abc"),
    "carriage return": ("10 %\r20 %\r\ndone\n", "10 %\n20 %\ndone\n"),
    "order of reading": ("a\u202eb\u2066c", "abc"),
    "never ended": ("a\x1b]0;title without end", "atitle without end"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_that_drives_a_terminal_passes(name):
    text, harmless = HOSTILE[name]
    if name == "never ended":
        assert "\x1b" not in without_controls(text)
    else:
        assert without_controls(text) == harmless
        assert "".join(filtered(text, Redactor([]))) == harmless  # one character at a time
    assert "\x1b" not in "".join(filtered(text, Redactor([])))


def test_a_record_is_written_without_secrets_and_in_one_printable_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    message = f"401 for https://user:{urllib.parse.quote(TOKEN, safe='')}@hub\n\x1b[31mtoken {TOKEN}\x1b[0m"
    write_record(tmp_path, "exception", message, 1, worker=0, progress={})
    record = read_json(tmp_path / "record.json")
    assert record["message"] == f"401 for https://user:{HIDDEN}@hub token {HIDDEN}"
