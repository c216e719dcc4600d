import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.observe.text import BARS, ago, bucket_means, clock, cut, shown, sparkline
from podium.sampling.sampler import FailingEnvironmentError
from podium.tasks.functions import FunctionError
from podium.tasks.grading import GradingError
from podium.terminal import harmless, printable


def test_control_sequences_are_written_out():
    assert printable("\x1b[2J\r\x07a\tb\nc") == "\\x1b[2J\\r\\x07a\\tb\u21b5c"


def test_text_of_several_lines_keeps_them():
    assert harmless("a\n\tb\x1b[31m\r\n\x9b2J") == "a\n\tb\\x1b[31m\\r\n\\x9b2J"


@pytest.mark.parametrize("error", [GradingError, FunctionError, FailingEnvironmentError])
def test_errors_that_quote_a_model_are_harmless(error: type[Exception]):
    assert str(error("it wrote \x1b]0;title\x07\nand more")) == "it wrote \\x1b]0;title\\x07\nand more"


def test_warnings_and_exceptions_of_the_command_are_harmless():
    code = (
        "import logging\nfrom podium.terminal import guard_errors\nguard_errors()\n"
        "logging.getLogger('x').warning('warned of %s', '\\x1b[2J')\nclass E(Exception): pass\nraise E('\\x1b[1m')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "\x1b" not in done.stderr
    assert "warned of \\x1b[2J\nTraceback" in done.stderr
    assert done.stderr.endswith("E: \\x1b[1m\n")


def test_warnings_of_libraries_and_exceptions_of_threads_are_harmless():
    code = (
        "import threading, warnings\nfrom podium.terminal import guard_errors\nguard_errors()\n"
        "warnings.warn('warned of \\x1b[2J')\ndef f(): raise ValueError('\\x1b[1m')\n"
        "t = threading.Thread(target=f, name='t')\nt.start()\nt.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "\x1b" not in done.stderr
    assert "UserWarning: warned of \\x1b[2J" in done.stderr
    assert "Exception in thread t:\nTraceback" in done.stderr
    assert done.stderr.endswith("ValueError: \\x1b[1m\n")


def test_bidirectional_overrides_and_surrogates_are_written_out():
    assert printable("a\u202eb\ud800\u2028") == "a\\u202eb\\ud800\\u2028"


def test_other_languages_stay_as_they_are():
    text = "\u0928\u092e\u0938\u094d\u0924\u0947 \u4f60\u597d \u0645\u0631\u062d\u0628\u0627 \U0001f600"
    assert printable(text) == text


@given(st.text(alphabet=st.characters(codec=None, max_codepoint=sys.maxunicode)))
def test_nothing_that_a_terminal_obeys_is_left(text):
    for character in printable(text):
        assert unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
    printable(text).encode("utf-8")


@given(st.text(), st.integers(20, 200))
def test_a_shown_text_is_at_most_as_long_as_asked(text, length):
    assert len(shown(text, length)) <= length


def test_a_long_text_keeps_its_beginning_and_its_end():
    assert cut("a" * 50 + "answer: 12", 30) == "a" * 13 + " [...] " + "answer: 12"
    assert cut("short", 30) == "short"


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([1.0], BARS[1]), ([0, 7], BARS[1] + BARS[8]), ([0, 1, 2, 7], "\u2581\u2582\u2583\u2588")],
)
def test_a_sparkline_goes_from_the_lowest_to_the_highest_bar(values, bars):
    assert sparkline(values, 10) == bars


def test_a_sparkline_of_many_values_is_as_wide_as_asked_and_skips_what_is_not_finite():
    assert sparkline([float("nan"), *range(100), float("inf")], 8) == BARS[1:]


def test_buckets_are_means_of_neighbours():
    assert bucket_means([1, 3, 5, 7], 2) == [2, 6]
    assert bucket_means([1, 2], 5) == [1, 2]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (245, "4:05"), (3845, "1:04:05"), (-1, "0:00")]
)
def test_seconds_read_as_clock_time(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s ago"),
        (90, "90 s ago"),
        (125, "2 min ago"),
        (7199, "119 min ago"),
        (86_400, "24 h ago"),
        (3e5, "3 days ago"),
    ],
)
def test_how_long_ago_has_one_unit(seconds, text):
    assert ago(seconds) == text
