r"""A grammar of answers: reads LaTeX and plain formulas (`3\sqrt{13}`, `3*sqrt(13)`) into trees.

    answer    = item { ("," | ";" | "and" | "or") item }
    item      = ratio { relation ratio } [unit]            x = 5, 1 < x <= 3, 5 cm
    ratio     = union { ":" union }
    union     = sum { (\cup | \cap | \setminus) sum }
    sum       = [sign] product { sign product }            a sign is + - \pm \mp
    product   = factor { [* | /] factor }
    factor    = [sign] primary { ! | % | degree } [^ factor]
    primary   = number | variable | function factor | \frac{}{} | brackets | matrix ...

Reading takes time in proportion to the text, which has at most MAX_CHARS characters, and brackets nested at most
MAX_DEPTH deep. Nothing is evaluated here (`podium.tasks.math_answers.formula_values` does), and nothing that is not in
the grammar is guessed at: the text is then no formula, and can be compared only as text.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, TypeGuard

from podium.tasks.math_answers.notation import plain_notation
from podium.tasks.math_answers.units import Unit, is_unit, read_unit

MAX_CHARS = 500
"""Maximum length of a formula: the longest reference in MATH has 60 characters."""
MAX_TOKENS = 200
"""Maximum number of numbers, letters and signs; a tree is at most as deep, and some functions follow it recursively."""
MAX_DEPTH = 25
"""Maximum nesting of brackets, powers and fractions."""


@dataclass(frozen=True)
class Number:
    """A number as written."""

    value: Fraction
    places: int = 0
    """Decimal places as written."""


@dataclass(frozen=True)
class Symbol:
    r"""A variable or constant (`x`, `a_1`, `pi`, `infinity`), or words, marked by spaces around them (` no solution
    `).
    """

    name: str


@dataclass(frozen=True)
class Apply:
    """An operation or a function on its arguments, or a list, tuple, set or matrix of its items."""

    name: str
    arguments: tuple["Node", ...]


@dataclass(frozen=True)
class Measured:
    """A value with the unit or words that follow it; `unit` is None if they are not a known unit: `5 apples`."""

    value: "Node"
    unit: Unit | None
    words: str
    """The unit as written."""


Node = Number | Symbol | Apply | Measured

LIST, ALL, ANY = "list", "all", "any"
"""Items with commas between them, with `and`, and with `or`."""
SET, UNION, DIFFERENCE, WHERE = "set", "union", "difference", "where"
RATIO, CHAIN, MATRIX, ROW = "ratio", "chain", "matrix", "row"
"""A chain of one or more relations: first a symbol with the signs, joined by spaces, and then the sides."""
TUPLES = ("()", "[]", "(]", "[)")
"""Brackets around several items: a point or an interval."""

_FUNCTION_LIST = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh exp ln log lg sqrt abs floor ceil"
FUNCTIONS = frozenset(_FUNCTION_LIST.split())
_SAME_FUNCTION = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_NAMED_FUNCTIONS = frozenset("fghFGHOo")
"""Letters that are functions before a bracket: `f(x)` is not a product."""
_GREEK_LIST = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau"
    " upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar"
)
_GREEK = frozenset(_GREEK_LIST.split())
_RELATIONS = {
    "=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", r"\lt": "<", r"\gt": ">", r"\le": "<=",
    r"\leq": "<=", r"\leqslant": "<=", r"\ge": ">=", r"\geq": ">=", r"\geqslant": ">=", r"\ne": "!=", r"\neq": "!=",
    r"\in": "in", r"\approx": "~", r"\equiv": "==", r"\to": "->", r"\rightarrow": "->", r"\mapsto": "->",
    r"\implies": "=>", r"\Rightarrow": "=>",
}  # fmt: skip
_SIGNS = {"+": "+", "-": "-", r"\pm": "pm", r"\mp": "mp"}
_TIMES = {
    "*": "*",
    r"\cdot": "*",
    r"\times": "*",
    r"\ast": "*",
    "/": "/",
    r"\div": "/",
    r"\bmod": "mod",
    r"\pmod": "mod",
}
_SEPARATORS = {",": LIST, ";": LIST, "and": ALL, r"\land": ALL, r"\wedge": ALL, "or": ANY, r"\lor": ANY, r"\vee": ANY}
_SET_OPERATIONS = {r"\cup": UNION, r"\cap": "intersection", r"\setminus": DIFFERENCE, r"\backslash": DIFFERENCE}
_CONSTANTS = {
    r"\pi": "pi", r"\infty": "infinity", r"\emptyset": "empty", r"\varnothing": "empty", r"\ldots": "...",
    r"\dots": "...", r"\cdots": "...", "...": "...", r"\imath": "i",
}  # fmt: skip
_WORD_CONSTANTS = {"pi": "pi", "infinity": "infinity", "inf": "infinity", "oo": "infinity"}
_OPENING = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle"}
_ROUNDING = {r"\lfloor": (r"\rfloor", "floor"), r"\lceil": (r"\rceil", "ceil")}
_MATRICES = frozenset(("matrix", "pmatrix", "bmatrix", "Bmatrix", "array", "smallmatrix"))

_TOKEN = re.compile(
    r"\s*(?:(?P<thousands>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])(?:\.[0-9]+)?)"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z.]))?)"
    r"|(?P<environment>\\(?:begin|end)\s?\{[a-zA-Z]+\*?\}(?:\{[lcr| ]*\})?)"
    r"|(?P<text>\\(?:text|mbox|textrm|mathrm|mathit|operatorname\*?)\s?\{[^{}]*\})"
    r"|(?P<field>\\mathbb\s?\{?\s?[A-Z]\s?\}?)"
    r"|(?P<command>\\[A-Za-z]+|\\.|<=|>=|!=|\*\*|\.\.\.)"
    r"|(?P<word>[A-Za-z]+)|(?P<sign>[-+*/^_!()\[\]{}|,;=<>:&%'\u00b0]))",
    re.DOTALL,
)


class NotAFormulaError(ValueError):
    """The text is outside the grammar."""


class _Token(NamedTuple):
    kind: str
    """`number`, `symbol` (a variable or constant), `function`, `text` (words), `matrix`, `sign` (all else), `end`."""
    text: str
    spaced: bool = False
    """Whether a space precedes it."""


def is_list(node: Node) -> TypeGuard[Apply]:
    """Whether it is several items without brackets."""
    return isinstance(node, Apply) and node.name in (LIST, ALL, ANY)


@functools.lru_cache(maxsize=512)
def read_formula(text: str) -> Node | None:
    """The tree of an answer, or None if it is not a formula. Dollar signs are read as spaces."""
    if len(text) > MAX_CHARS:
        return None
    try:
        return _Reader(_tokens(plain_notation(text).replace("$", " ").strip(" .,;\n"))).answer()
    except NotAFormulaError:
        return None


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position = depth = 0
    while text[position:].strip():
        found = _TOKEN.match(text, position)
        if found and found["thousands"] and depth:  # {100,200}
            found = re.compile(r"\s*(?P<number>[0-9]+)").match(text, position)
        if not found or len(tokens) >= MAX_TOKENS:
            raise NotAFormulaError
        kind, written = found.lastgroup or "", found[found.lastgroup or 0]
        spaced = found.end() - position > len(written)
        position = found.end()
        depth += (written in _OPENING) - (written in _OPENING.values())
        if kind in ("thousands", "number"):
            tokens.append(_Token("number", written.replace(",", ""), spaced))
        elif kind == "text":
            _add_words(tokens, written[written.index("{") + 1 : -1], spaced)
        elif kind == "environment":
            tokens.append(_Token("matrix", re.sub(r"\s|\{[lcr| ]*\}$", "", written)))
        elif kind == "field":
            tokens.append(_Token("symbol", f"field {re.sub(r'[^A-Z]', '', written)}"))
        elif kind == "word":
            _add_letters(tokens, written, spaced)
        else:
            tokens.append(_command(written, spaced))
    return [*tokens, _Token("end", "")]


def _add_words(tokens: list[_Token], words: str, spaced: bool) -> None:
    r"""The content of `\text{}`: `and` and `or` separate, a formula is read as one, anything else is words."""
    bare = words.strip(" .")
    if bare.strip(",") in ("and", "or"):
        tokens.append(_Token("sign", bare.strip(",")))
    elif bare.lower() in _WORD_CONSTANTS:
        tokens.append(_Token("symbol", _WORD_CONSTANTS[bare.lower()], spaced))
    elif bare in FUNCTIONS or bare in ("e", "i", "d") or re.search("[0-9]", bare):
        tokens.extend(_tokens(bare)[:-1])
    elif bare:
        tokens.append(_Token("text", " ".join(bare.split()), spaced or words[:1] == " "))


def _add_letters(tokens: list[_Token], word: str, spaced: bool) -> None:
    """Add the tokens of letters outside of commands: `and`, a function, a constant, a unit after a value, words, or
    variables.
    """
    after_value = bool(tokens) and (tokens[-1].kind in ("number", "symbol", "text") or tokens[-1].text in (")", "}"))
    in_unit = bool(tokens) and tokens[-1].text == "/" and len(tokens) > 1 and tokens[-2].kind == "text"
    name = _SAME_FUNCTION.get(word.lower(), word.lower())
    if word in ("and", "or"):
        tokens.append(_Token("sign", word))
    elif name in FUNCTIONS:
        tokens.append(_Token("function", name, spaced))
    elif word in _WORD_CONSTANTS:
        tokens.append(_Token("symbol", _WORD_CONSTANTS[word], spaced))
    elif in_unit or (after_value and len(word) > 1 and is_unit(word)) or len(word) > 3:
        tokens.append(_Token("text", word, spaced))
    else:
        found = re.match(r"(.*?)(sqrt|sin|cos|tan|exp|log|ln|pi)$", word)
        letters, rest = (found[1], found[2]) if found and found[1] else (word, "")
        for index, letter in enumerate(letters):
            tokens.append(_Token("symbol", letter, spaced and index == 0))
        if rest:
            _add_letters(tokens, rest, False)


def _command(written: str, spaced: bool) -> _Token:
    name = written[1:]
    if written in _CONSTANTS:
        return _Token("symbol", _CONSTANTS[written], spaced)
    if written.startswith("\\") and name in FUNCTIONS:
        return _Token("function", name, spaced)
    if written.startswith("\\") and name in _GREEK:
        return _Token("symbol", name, spaced)
    return _Token(
        "sign", {r"\lvert": "|", r"\rvert": "|", r"\vert": "|", r"\mid": "|", "**": "^"}.get(written, written)
    )


class _Reader:
    """Recursive descent over the tokens of one answer."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._position = 0
        self._depth = 0
        self._closing_bars = 0
        """Open absolute values: the next bar closes one."""
        self._in_set = False
        """Whether a bar would divide the set that is being read: `{x | x > 3}`."""

    def answer(self) -> Node:
        node = self._list("")
        self._expect("")
        return node

    # tokens

    @property
    def _next(self) -> _Token:
        return self._tokens[self._position]

    def _take(self) -> _Token:
        token = self._next
        self._position += token.kind != "end"
        return token

    def _takes(self, text: str) -> bool:
        """Take the next token if it is this sign."""
        if self._next.kind in ("sign", "matrix") and self._next.text == text:
            self._position += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if self._next.text != text or self._next.kind not in ("sign", "end", "matrix"):
            raise NotAFormulaError
        self._take()

    def _deeper(self, read: Callable[[], Node]) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotAFormulaError
        node = read()
        self._depth -= 1
        return node

    # rules

    def _list(self, end: str) -> Node:
        items, separators = [self._item()], set[str]()
        while self._next.kind == "sign" and self._next.text in _SEPARATORS:
            while self._next.kind == "sign" and self._next.text in _SEPARATORS:
                separators.add(_SEPARATORS[self._take().text])
            if self._next.text == end:
                break
            items.append(self._item())
        if len(items) == 1:
            return items[0]
        return Apply(ANY if ANY in separators else ALL if ALL in separators else LIST, tuple(items))

    def _item(self) -> Node:
        sides, relations = [self._relation_start()], list[str]()
        while self._next.kind == "sign" and self._next.text in _RELATIONS:
            relations.append(_RELATIONS[self._take().text])
            sides.append(self._ratio())
        return _chain(relations, sides) if relations else sides[0]

    def _relation_start(self) -> Node:
        """The first side of a relation; it may be missing: `= 5`, `> 5`."""
        if self._next.kind == "sign" and self._next.text in _RELATIONS:
            return Symbol("")
        return self._ratio()

    def _ratio(self) -> Node:
        parts = [self._union()]
        while self._next.text in (":", r"\colon") and not self._in_set:
            self._take()
            parts.append(self._union())
        return self._measured(parts[0] if len(parts) == 1 else Apply(RATIO, tuple(parts)))

    def _measured(self, value: Node) -> Node:
        """The value with the unit or the words that follow it."""
        words = list[str]()
        known = True
        while self._next.kind == "text" or (words and self._unit_sign()):
            token = self._take()
            if token.text == "^":
                token = _Token("text", f"^{self._exponent_of_unit()}")
            words.append(token.text)
        if not words:
            return value
        unit = read_unit(" ".join(words))
        known = unit is not None or all(re.fullmatch(r"[A-Za-z.,' -]+", word) for word in words)
        if not known or any(word in _NOT_COUNTED for words_ in words for word in words_.lower().split()):
            raise NotAFormulaError
        return Measured(value, unit, " ".join(words).lower())

    def _unit_sign(self) -> bool:
        """Whether the unit continues: `/s`, `^2`."""
        following = self._tokens[min(self._position + 1, len(self._tokens) - 1)]
        return self._next.text == "^" or (self._next.text in _TIMES and following.kind == "text")

    def _exponent_of_unit(self) -> str:
        braced = self._takes("{")
        sign = "-" if self._takes("-") else ""
        token = self._take()
        if token.kind != "number" or len(token.text) > 1:
            raise NotAFormulaError
        if braced:
            self._expect("}")
        return sign + token.text

    def _union(self) -> Node:
        node = self._sum()
        while self._next.kind == "sign" and self._next.text in _SET_OPERATIONS:
            name = _SET_OPERATIONS[self._take().text]
            node = Apply(name, (node, self._sum()))
        return node

    def _sum(self) -> Node:
        node: Node | None = None
        while node is None or (self._next.kind == "sign" and self._next.text in _SIGNS):
            sign = _SIGNS[self._take().text] if self._next.kind == "sign" and self._next.text in _SIGNS else ""
            term = self._product()
            first = term if sign in ("", "+") else Apply(sign, (term,))
            node = first if node is None else Apply(sign, (node, term))
        return node

    def _product(self) -> Node:
        node = self._factor()
        while True:
            if self._next.kind == "sign" and self._next.text in _TIMES:
                name = _TIMES[self._take().text]
                node = Apply(name, (node, self._factor()))
            elif self._next.text in (r"\over", r"\choose") and self._next.kind == "sign":
                name = "/" if self._take().text == r"\over" else "binom"
                return Apply(name, (node, self._product()))
            elif self._starts_primary():
                if isinstance(node, Number) and self._next.kind == "number":
                    raise NotAFormulaError  # 5 6
                node = self._mixed(node, self._factor())
            else:
                return node

    def _mixed(self, left: Node, right: Node) -> Node:
        r"""A product without a multiplication sign; but the mixed number `1\frac{1}{2}` is a sum."""
        match left, right:
            case Number(value=whole), Apply("frac", (Number(value=top), Number(value=bottom))) if (
                0 < top < bottom and all(value.denominator == 1 for value in (whole, top, bottom))
            ):
                return Apply("+", (left, right))
        return Apply("*", (left, right))

    def _starts_primary(self) -> bool:
        token = self._next
        if token.kind in ("number", "symbol", "function"):
            return True
        if token.kind == "matrix":
            return token.text.startswith(r"\begin")
        if token.text == "|":
            return not self._closing_bars and not self._in_set
        return token.kind == "sign" and (
            token.text in ("{", r"\frac", r"\sqrt", r"\binom", r"\overline") or token.text in (*_OPENING, *_ROUNDING)
        )

    def _factor(self) -> Node:
        if self._next.kind == "sign" and self._next.text in _SIGNS:
            sign = _SIGNS[self._take().text]
            inner = self._deeper(self._factor)
            return inner if sign == "+" else Apply(sign, (inner,))
        return self._power(self._postfix(self._primary()))

    def _power(self, base: Node) -> Node:
        if not self._takes("^"):
            return base
        if self._next.text in (r"\circ", r"\prime"):
            return self._power(Apply("degree" if self._take().text == r"\circ" else "prime", (base,)))
        exponent = self._deeper(self._script)
        if exponent == Apply("degree", (Symbol(""),)):
            return self._power(Apply("degree", (base,)))
        return self._postfix(Apply("^", (base, exponent)))

    def _script(self) -> Node:
        """What follows `^`: a group in braces, or one factor."""
        if self._next.text == "{" and self._tokens[self._position + 1].text == r"\circ":
            self._take()
            self._take()
            self._expect("}")
            return Apply("degree", (Symbol(""),))
        return self._factor()

    def _postfix(self, node: Node) -> Node:
        while self._next.kind == "sign" and self._next.text in ("!", "%", "\u00b0", "'"):
            name = {"!": "!", "%": "percent", "\u00b0": "degree", "'": "prime"}[self._take().text]
            if name == "!" and self._tokens[self._position - 2].text == "!":
                raise NotAFormulaError  # a double factorial
            node = Apply(name, (node,))
        return node

    def _primary(self) -> Node:
        token = self._take()
        if token.kind == "number":
            return self._subscripted(_number(token.text), token.text)
        if token.kind == "symbol":
            node = self._subscripted(Symbol(token.text), token.text)
            if self._next.text == "(" and (token.text in _NAMED_FUNCTIONS or self._is_defined()):
                return Apply(f"function {token.text}", (self._deeper(self._primary),))
            return node
        if token.kind == "function":
            return self._deeper(lambda: self._function(token.text))
        if token.kind == "matrix":
            return self._deeper(lambda: self._matrix(token.text))
        if token.kind == "text":
            return Symbol(f" {token.text} ")
        return self._deeper(lambda: self._bracketed(token.text))

    def _is_defined(self) -> bool:
        """Whether a letter in brackets and an equals sign come next: `P(x) = x^2` gives a function's value."""
        argument, *ends = self._tokens[self._position + 1 : self._position + 4]
        return argument.kind == "symbol" and [end.text for end in ends] == [")", "="]

    def _subscripted(self, node: Node, written: str) -> Node:
        if not self._takes("_"):
            return node
        braces = self._takes("{")
        names = [self._take().text]
        while braces and not self._takes("}"):
            if self._next.kind == "end":
                raise NotAFormulaError
            names.append(self._take().text)
        return Symbol(f"{written}_{''.join(names)}")

    def _function(self, name: str) -> Node:
        if name == "sqrt":
            return self._root()
        base: Node | None = None
        power: Node | None = None
        for _ in range(2):
            if self._takes("_"):
                base = self._argument()
            elif self._takes("^"):
                power = self._script()
        if power == Apply("-", (Number(Fraction(1)),)) and name in _INVERSE:
            name, power = _INVERSE[name], None
        argument = self._function_argument()
        node = (
            Apply("log", (base or Symbol("log base"), argument)) if name in ("log", "lg") else Apply(name, (argument,))
        )
        return node if power is None else Apply("^", (node, power))

    def _function_argument(self) -> Node:
        r"""Brackets, or the factors up to the next sign or function: `\sin 2x`."""
        if self._next.text in ("(", "{", "["):
            return self._power(self._postfix(self._primary())) if self._next.text == "{" else self._primary()
        node = self._factor()
        while self._starts_primary() and self._next.kind != "function" and self._next.text not in ("(", "["):
            node = self._mixed(node, self._factor())
        return node

    def _root(self) -> Node:
        degree: Node = Number(Fraction(2))
        if self._takes("[") and not self._takes("]"):
            degree = self._list("]")
            self._expect("]")
        return Apply("root", (degree, self._argument()))

    def _argument(self) -> Node:
        """One argument of a command: a group in braces, a number or a variable."""
        return self._deeper(self._primary)

    def _bracketed(self, opening: str) -> Node:
        if opening in (r"\frac", r"\binom"):
            top = self._argument()
            return Apply("frac" if opening == r"\frac" else "binom", (top, self._argument()))
        if opening == r"\sqrt":
            return self._root()
        if opening == "{":
            node = self._list("}")
            self._expect("}")
            return Apply(SET, node.arguments) if is_list(node) else node
        if opening == "|":
            self._closing_bars += 1
            node = self._sum()
            self._closing_bars -= 1
            self._expect("|")
            return Apply("abs", (node,))
        if opening in _ROUNDING:
            closing, name = _ROUNDING[opening]
            node = self._sum()
            self._expect(closing)
            return Apply(name, (node,))
        if opening == r"\{":
            return self._set()
        if opening not in _OPENING:
            raise NotAFormulaError
        return self._tuple(opening)

    def _tuple(self, opening: str) -> Node:
        bars, self._closing_bars = self._closing_bars, 0
        in_set, self._in_set = self._in_set, False
        node = self._list(_OPENING[opening])
        self._closing_bars, self._in_set = bars, in_set
        closing = self._take()
        if closing.kind != "sign" or closing.text not in (")", "]", r"\rangle"):
            raise NotAFormulaError
        if not (is_list(node)):
            if closing.text != _OPENING[opening]:
                raise NotAFormulaError
            return node if opening != r"\langle" else Apply("()", (node,))
        name = "()" if opening == r"\langle" else opening + closing.text
        return Apply(name, node.arguments)

    def _set(self) -> Node:
        r"""A set with its items, or with a condition: `\{x \mid x > 3\}`."""
        if self._takes(r"\}"):
            return Symbol("empty")
        in_set, self._in_set = self._in_set, True
        node = self._list(r"\}")
        self._in_set = in_set
        if self._takes("|") or self._takes(":"):
            node = Apply(WHERE, (node, self._list(r"\}")))
        self._expect(r"\}")
        if isinstance(node, Apply) and node.name == WHERE:
            return node
        return Apply(SET, node.arguments if is_list(node) else (node,))

    def _matrix(self, begin: str) -> Node:
        name = begin.removeprefix(r"\begin{").rstrip("}")
        if name not in _MATRICES:
            raise NotAFormulaError
        rows, row = list[Node](), [self._item()]
        while not self._takes(rf"\end{{{name}}}"):
            if self._takes("&"):
                row.append(self._item())
            elif self._takes("\\\\"):
                rows.append(Apply(ROW, tuple(row)))
                if self._takes(rf"\end{{{name}}}"):
                    return Apply(MATRIX, tuple(rows))
                row = [self._item()]
            else:
                raise NotAFormulaError
        return Apply(MATRIX, (*rows, Apply(ROW, tuple(row))))


_NOT_COUNTED_LIST = (
    "not or and million billion trillion thousand hundred dozen thousands millions billions squared cubed except"
    " but nor neither either maybe minus plus times over"
)
_NOT_COUNTED = frozenset(_NOT_COUNTED_LIST.split())
"""Words after a value that would change it, and so are not names of counted things."""


def _chain(relations: list[str], sides: list[Node]) -> Node:
    r"""Make one chain of relations; or two, for `x < 1 \cup x > 2`, whose sides are read as `x`, `1 \cup x` and `2`."""
    for index, side in enumerate(sides[1:-1], 1):
        if isinstance(side, Apply) and side.name == UNION:
            first, second = side.arguments
            return Apply(
                ANY,
                (
                    _chain(relations[:index], [*sides[:index], first]),
                    _chain(relations[index:], [second, *sides[index + 1 :]]),
                ),
            )
    return Apply(CHAIN, (Symbol(" ".join(relations)), *sides))


def _number(text: str) -> Number:
    value = Fraction(text)
    return Number(value, 0 if "e" in text.lower() else len(text.partition(".")[2]))
