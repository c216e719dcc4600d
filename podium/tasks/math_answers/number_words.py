"""Whole numbers in English words: `forty-two`, `one hundred and twenty-five`, and `3 million`."""

import re

_SMALL_LIST = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_TENS_LIST = "twenty thirty forty fifty sixty seventy eighty ninety"
_TENS = {word: value for value, word in zip(range(20, 100, 10), _TENS_LIST.split(), strict=True)}
_VALUES = {word: value for value, word in enumerate(_SMALL_LIST.split())} | _TENS
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_WORD = "|".join(sorted((*_VALUES, *SCALES), key=len, reverse=True))
_WORDS = re.compile(
    rf"\b(?:an?\s+(?={'|'.join(SCALES)}))?(?:{_WORD})(?:(?:[\s-]|\s+and\s+)(?:{_WORD}))*\b", re.IGNORECASE
)


def in_figures(text: str) -> str:
    """The text with its numbers in words as figures: `forty-two apples` as `42 apples`; other words stay unchanged."""
    return _WORDS.sub(lambda found: _figures(found[0]), text)


def _figures(words: str) -> str:
    """The number in figures; the unchanged words if they do not form a number: `two five`."""
    total = group = 0
    last = 10**15  # the smallest scale so far, and the place value that may come next
    room = 1_000
    for word in re.findall("[a-z]+", words.lower()):
        if word in ("a", "an"):
            group = 1
        elif word == "hundred" and 0 < group < 10:
            group, room = group * 100, 100
        elif word in SCALES and word != "hundred" and group and SCALES[word] < last:
            total, last, group, room = total + group * SCALES[word], SCALES[word], 0, 1_000
        elif word in _VALUES and _VALUES[word] < room and (room > 10 or _VALUES[word] > 0):
            group, room = group + _VALUES[word], 10 if word in _TENS else 1
        elif word != "and":
            return words
    return str(total + group)
