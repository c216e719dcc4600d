r"""Extracts the result that a completion states.

The final answer is the first of these that exists: the last `\boxed{}`, the last `<answer>`, the last `####` line, the
text after the last "answer is". It is extracted without knowing the reference, and so is its number: a completion has
one answer, and cannot be right for two different references. A retracted answer ("5. Wait, that is wrong") does not
count, and neither does a denied one ("not \boxed{5}").
"""

import re

from podium.tasks.math_answers.forms import read_choice
from podium.tasks.math_answers.notation import MATH_SPAN, plain_notation
from podium.tasks.math_answers.number_text import (
    TAIL_CHARS,
    Number,
    is_changed_after,
    last_number,
    last_sentence,
    read_number,
    same_number,
)
from podium.tasks.math_answers.quantities import restated_quantity

MAX_ANSWER_CHARS = 500
"""A longer final answer counts as wrong, because no reference is that long."""
MAX_BOXES = 20
"""Maximum number of boxes that are one list: `\\boxed{1}, \\boxed{2} and \\boxed{3}`."""
BEFORE_CHARS = 120
"""Number of characters before an answer that are searched for a denial."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>-?[0-9][^\s{}$\\]*))")
_BETWEEN_BOXES = re.compile(
    r"[\s$.]*(?:[,;/|&]|\b(?:and|or)\b|\\text\{\s*(?:and|or)\s*\})[\s$,]*(?:(?:and|or|maybe|perhaps|possibly|even)\b[\s$,]*)*"
    r"(?:[A-Za-z]\s*=[\s$]*)?"
)
_PHRASE = re.compile(
    r"\banswers?\W{0,8}(?:is|are|would be|will be|must be|should be)\b[\s:*=]*|\banswers?[\s*]{0,4}[:=][\s:*=]*"
    r"|\u7b54\u6848\s*(?:\u5e94?(?:\u8be5|\u5f53)?[\u662f\u4e3a]|[:\uff1a])\s*[:\uff1a]?\s*"
    r"|\u9009\u62e9?\s*(?=[A-J(])|\u7b54\u3048\s*(?:\u306f|[:\uff1a])\s*",
    re.IGNORECASE,
)
_CORRECTED = re.compile(r"not\s[^\n]{1,60}?,?\s+but\s+(?:rather\s+)?", re.IGNORECASE)
_CONFIRMED = re.compile(
    r"(.{1,100}?)\s+(?:is|are)\s+(?:(?:the|clearly|indeed)\s+){0,2}"
    r"(?:correct|right|answer|(?:correct|right|best|final) (?:answer|option|choice|one))[.!]?",
    re.IGNORECASE,
)
_LETTER = re.compile(r"\s*[A-J]\s*")
_SENTENCE_END = re.compile(r"\n|(?<!\\)[.!?](?=\s|\**$)|\u3002|$")
_EXPLANATION = re.compile(
    r"(?<=\S)[,;]?\s+(?:since|because|as|so|given|which|where|when|thus|hence|therefore|that is|i\.e\.)\s"
    r"|(?<=\S),\s+(?:but |obviously |certainly |clearly |definitely )?not\s|(?<=\S),?\s+(?:rather than|instead of)\s",
    re.IGNORECASE,
)
_ASIDE = re.compile(  # 12 apples (after giving 5 away).
    r"\s\((?:check:|not|after|before|since|because|as|when|once|given|including|counting|excluding|with|without)\s"
    r"[^()\n]{1,200}\)(?=[\s.!*$]*$)",
    re.IGNORECASE,
)
_LEAD_IN = re.compile(r"^(?:so|thus|hence|therefore|then|finally|and)\b,?\s+", re.IGNORECASE)
_BOLD = re.compile(r"\*\*(?=[^\s:])([^*\n]{1,200})(?<!:)\*\*(?!:)")
_DISPLAY = re.compile(
    r"\$\$((?:[^$\\]|\\.){1,500}?)\$\$|(?<!\\)\\\[((?:[^\\]|\\[^\[\]]){1,500}?)\\\]"
    r"|(\\begin\{align\*?\}[^$]{1,500}?\\end\{align\*?\})",
    re.DOTALL,
)
_MATH_WORD = re.compile(
    r"(?:[^A-Za-z\s\\]|\\(?:[A-Za-z]+|[^A-Za-z\s])"
    r"|(?<![A-Za-z])(?:[A-Za-z]|sin|cos|tan|log|ln|sqrt|and|or|[AaPp]\.?[Mm])(?![A-Za-z]))+"
)
_NO_ANSWER = re.compile(
    r"\b(?:I|we)(?:['\u2019]m| am| was| were|['\u2019]re| are)? (?:unable to|not able to"
    r"|(?:can|could|do)(?:n['\u2019]t|['\u2019]t| ?not)) (?:\w+ )?"
    r"(?:solve|determine|answer|find|help|know|work|open|view|tell|see|compute|have enough)\b|\bI give up\b"
    r"|\b(?:cannot|can['\u2019]t|could not|impossible to) (?:be )?(?:determined?|solved?|answer(?:ed)?)\b"
    r"|(?:not|n['\u2019]t) enough information\b|\bplease (?:provide|share|attach)\b",
    re.IGNORECASE,
)
_TEXT_COMMAND = re.compile(r"\\(?:text|mbox|textbf|textrm)\s?\{([^{}]*)\}")

_TAKEN_BACK = re.compile(
    r"\bwait\b(?=\s*[,.!:;\u2026\u2014\u2013-]|\s+(?:no|actually)\b)|\bscratch that\b|\bcorrection\s*:"
    r"|(?:^|[.!?}\n]\s*|\b(?:actually|no|sorry|but),? )(?:that|this|it|(?:my|the) answer)(?:'s|\u2019s| is| was)"
    r" (?:wrong|incorrect|false|a mistake|not (?:right|correct))(?! that)"
    r"|\bI (?:have )?(?:made|found) an? (?:\w{1,20} )?(?:mistake|error)|\bI was wrong|\bon second thought"
    r"|\bnever ?mind\b"
    r"|\bI take (?:that|it) back|\bsorry\b|\boops\b|\?\s*No\b(?![,.]? of)"
    r"|(?<=[\w.,!?;)$}\u2026-][ \n])no, (?=it\b|the\b|that\b|actually\b|make\b|[-$0-9\\])"
    r"|\b(?:it|this|that) should (?:be|have been) (?=[-$0-9\\])|\bhold on\b"
    r"|(?:^|[.!?;,]\s|\n)\s*actually\b|\bbut (?:it|that|this) (?:is|was)(?:n['\u2019]t| not)\b"
    r"|\blet me (?:redo|correct|recompute|recalculate|reconsider|fix|rethink|start over)\b"
    r"|\u4e0d\u5bf9|\u7b49\u7b49|\u7b49\u4e00\u4e0b",
    re.IGNORECASE,
)
_CONFIRMS = re.compile(
    r"\b(?:is|was|are|looks|seems|that['\u2019]s) (?:indeed |still |all )?"
    r"(?:correct|right|fine|consistent|confirmed|verified)\b"
    r"|\bchecks out\b",
    re.IGNORECASE,
)
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|except|cannot be|(?:other|rather) than|instead of)|n['\u2019]t"
    r"|\b(?:anything|everything|all|any|any (?:number|value)) but|\\neq?|\u2260|\u4e0d\u662f|\u4e0d\u7b49\u4e8e)\s*"
    r"(?:(?:be|equal|equals|to|the|really|actually|certainly|definitely|simply|just|exactly|=)\s+){0,4}[\s$*({]*$",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"[\s$}*]*(?:(?:is|was|are) (?:not|wrong|incorrect|false|never|impossible)|isn['\u2019]t|cannot|\u4e0d)\b",
    re.IGNORECASE,
)
_DENIED_CLAIM = re.compile(
    r"(?:\b(?:not|never|doubt|nobody|no one|if|suppose|assume|assuming|unless|false|wrong|whether)|n['\u2019]t)\s+"
    r"(?:(?:think|thinks|believe|believes|say|says|claim|true|the case|sure|certain|clear|whether|mean|conclude|that|if"
    r"|it|is|would|know)\s+){0,6}(?:(?:the|my|our|its)\s+)?(?:(?:final|correct|right)\s+)?$",
    re.IGNORECASE,
)
_NOT_PLAIN = re.compile(
    r"\b(?:or|not|never|neither|nor|except|cannot|but|wrong|incorrect|false|impossible|fail(?:s|ed)?|exclud\w*|reject\w*"
    r"|eliminat\w*|rule[sd]? out)\b|n['\u2019]t\b|\\neq?|\u2260|[\u4e0d\u6216\u975e]",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(r"\b(?:if|suppose|assum(?:e|ing)|let|try|whether)\b", re.IGNORECASE)
YES_NO = re.compile(r"(yes|no)\b\s*[,.:;\u2014-](?!\s*(?:and|or|but|maybe|yes|no)\b)", re.IGNORECASE)
_VERB = re.compile(
    r"\b(?:is|are|was|were|equals|choose|pick|select)\b\s*:?|[:\uff1a](?!\S*[0-9])|\u662f|\u4e3a", re.IGNORECASE
)


def answer_text(completion: str) -> str:
    """The part of a completion that may hold the answer: the text after its last `</think>`, or all of it."""
    return completion.rpartition("</think>")[2]


def stated_text(completion: str) -> str:
    """The part of a completion that its final answer is read from: what follows the last "wait" or "that is wrong".

    If only a check follows that confirms the answer, the answer still counts.
    """
    text = answer_text(completion)
    end = 0
    for found in _TAKEN_BACK.finditer(text):
        end = found.end()
    confirms = _CONFIRMS.search(text, end) and not _BOX.search(text, end)
    return text if confirms else text[end:]


def final_answer(text: str) -> str | None:
    """The result that a text states; None if it states no result; empty if it denies the result or ends inside a
    box.
    """
    boxes = list(_BOX.finditer(text))
    if boxes:
        return _boxed(text, boxes[-MAX_BOXES:])
    before, tag, rest = text.rpartition("<answer>")
    if tag:
        return _only_marked(rest.partition("</answer>")[0].strip()) if not _is_joined(before) else ""
    _, hashes, rest = text.rpartition("####")
    if hashes:
        return rest.strip().partition("\n")[0]
    tail = _one_line(text)
    phrases = list(_PHRASE.finditer(tail))
    if phrases:
        if _DENIED_CLAIM.search(tail[max(phrases[-1].start() - BEFORE_CHARS, 0) : phrases[-1].start()]):
            return ""
        rest = tail[phrases[-1].end() :]
        end = _SENTENCE_END.search(rest)
        said = rest[: end.start()] if end else rest
        if end and end[0] == "?":
            return ""
        if _LETTER.fullmatch(said):
            return rest.partition("\n")[0]  # C. Paris
        return _only_marked(_EXPLANATION.split(_CORRECTED.sub("", said, count=1), maxsplit=1)[0].strip(" *"))
    return None


def closing_statement(text: str) -> str:
    """What a text without a final answer ends with: the formula or the bold words in its last sentence, its yes or no,
    what follows its `is`, the formula at its end, or the whole line. Empty if the text says that it has no answer.
    """
    text = _one_line(text)
    line = text.rpartition("\n")[2].strip()
    if line.endswith("?") or _NO_ANSWER.search(line):
        return ""
    sentence = _LEAD_IN.sub("", last_sentence(text), count=1)
    confirmed = _CONFIRMED.fullmatch(sentence)
    if confirmed:
        return confirmed[1]
    if decided := YES_NO.match(line.strip(" *")):
        return decided[1]
    marked = _only_marked(sentence)
    if marked != sentence:
        return marked
    verbs = list(_VERB.finditer(sentence))
    if len(verbs) == 1 and not _NOT_PLAIN.search(sentence[: verbs[0].start()]):
        return _only_marked(sentence[verbs[0].end() :].strip(" *"))
    return _formula_at_end(sentence) or sentence.strip(" *")


def _one_line(text: str) -> str:
    """The end of a text, with each displayed formula in one line between single dollar signs."""
    end = text[-5 * TAIL_CHARS :]  # more than is kept, so that the signs around formulas are paired
    end = _DISPLAY.sub(lambda found: f"${' '.join(found[found.lastindex or 0].split()).rstrip(' .')}$", end)
    return end[-TAIL_CHARS:].strip(" \n#")


def _formula_at_end(sentence: str) -> str | None:
    """The numbers, signs and letters that a sentence ends with, if it states them: `it holds for x > 3`."""
    words = sentence.strip(" .*").split()
    start = len(words)
    while start and _MATH_WORD.fullmatch(words[start - 1]):
        start -= 1
    formula = " ".join(words[start:])
    before = " ".join(words[:start])
    is_more = re.search(r"[A-Za-z=<>\\\u0391-\uffff].*\S|[,:]", formula)  # than a number
    starts = re.match(r"[-\u2212(\[|\\.]?\w|\\", formula)
    return formula if starts and is_more and _is_statement(before, "") else None


def final_number(completion: str) -> Number | None:
    """The number that a completion gives as its result; None if its final answer is not exactly one number.

    For a completion that states no answer, it is the number at its end.
    """
    text = stated_text(completion)
    answer = final_answer(text)
    if answer is None:
        text = without_aside(text[-TAIL_CHARS:].rstrip())
        if text.endswith("?") or _NO_ANSWER.search(text.rpartition("\n")[2]):  # a question states no answer
            return None
        restated = restated_quantity(text.rpartition("\n")[2])
        return last_number(text) if restated is None else read_number(restated)
    if len(answer) > MAX_ANSWER_CHARS:
        return None
    answer = without_aside(answer)
    choice = read_choice(plain_notation(answer))
    answer = choice.value if choice is not None and choice.value else answer
    return read_number(restated_quantity(answer) or answer)


def without_aside(text: str) -> str:
    """The text without a remark in brackets at its end that begins as an explanation: `(after giving 5 away)`."""
    return _ASIDE.sub("", text)


def _boxed(text: str, boxes: list[re.Match[str]]) -> str:
    """The content of the last box, or of the last boxes if they are one list; empty if the box is denied or
    unfinished.
    """
    last = boxes.pop()
    contents, start = [_content(text, last)], last.start()
    end = _end(text, last)
    if contents[0] is None or _DENIED_AFTER.match(text[end : end + BEFORE_CHARS]):
        return ""
    while boxes:
        box = boxes.pop()
        content = _content(text, box)
        if content is None or not _BETWEEN_BOXES.fullmatch(text, min(_end(text, box), start), start):
            break
        if not _is_same_number(content, contents[-1] or ""):
            contents.append(content)
        start = box.start()
    if _DENIED_BEFORE.search(text[max(start - BEFORE_CHARS, 0) : start]):
        return ""
    return _without_phrase(", ".join(content or "" for content in reversed(contents)))


def _is_same_number(first: str, second: str) -> bool:
    """Whether two boxes hold the same number, perhaps written differently."""
    numbers = read_number(first), read_number(second)
    return numbers[0] is not None and numbers[1] is not None and same_number(numbers[0], numbers[1])


def _without_phrase(content: str) -> str:
    r"""What a box states, if it holds a sentence: `\boxed{\text{The answer is } 5}`."""
    words = _TEXT_COMMAND.sub(r"\1", content)
    phrase = _PHRASE.search(words)
    return words[phrase.end() :].strip(" .*") if phrase else content


def _content(text: str, box: re.Match[str]) -> str | None:
    """The content of a box; None if it is never closed, or not within the length of an answer."""
    return box["bare"] or _until_closed(text[box.end() : box.end() + MAX_ANSWER_CHARS + 1])


def _end(text: str, box: re.Match[str]) -> int:
    content = _content(text, box)
    return box.end() + (0 if box["bare"] else len(content or "") + 1)


def _until_closed(text: str) -> str | None:
    """The text up to its closing brace; None if there is none."""
    depth = 1
    for found in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return text[: found.start()]
    return None


def _is_joined(before: str) -> bool:
    """Whether the preceding `<answer>` belongs to the same list: `<answer>5</answer> or <answer>6</answer>`."""
    return bool(re.search(r"</answer>\s*(?:or|and|,)\s*$", before[-BEFORE_CHARS:], re.IGNORECASE))


def _only_marked(text: str) -> str:
    """The only formula in a sentence, or else its only bold words, if it states them; otherwise the sentence."""
    spans = list(MATH_SPAN.finditer(text[: TAIL_CHARS + 1])) or list(_BOLD.finditer(text[: TAIL_CHARS + 1]))
    if len(spans) != 1 or not _is_statement(text[: spans[0].start()], text[spans[0].end() :]):
        return text
    return "".join(group or "" for group in spans[0].groups())


def _is_statement(before: str, after: str) -> bool:
    r"""Whether the text around a part of a sentence neither denies nor supposes it, nor changes its value: `at least
    3\pi`.
    """
    if _NOT_PLAIN.search(before) or _NOT_PLAIN.search(after) or _SUPPOSED.search(before):
        return False
    return not is_changed_after(before.lower().split())
