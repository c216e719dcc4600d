"""Texts that no grader should trip over, made from a seed."""

import random
from collections.abc import Callable


def hostile_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [_framed(rng.choice(KINDS)(rng), rng) for _ in range(count)]


def _framed(text: str, rng: random.Random) -> str:
    frame = rng.choice(
        ["{}", "{}", "\\boxed{{{}}}", "\\boxed{{{}", "<answer>{}</answer>", "#### {}", "The answer is {}."]
    )
    return frame.format(text)


def _nested(rng: random.Random) -> str:
    opening, closing = rng.choice(
        ["{}", "()", "[]", "<>", ("\\frac{", "}{2}"), ("\\sqrt{", "}"), ("\\left(", "\\right)")]
    )
    depth = rng.choice([3, 6, 20, 300, 5_000])
    return opening * depth + "1" + closing * rng.choice([depth, depth, depth - 1, 0])


def _huge(rng: random.Random) -> str:
    return rng.choice(
        [
            "9**9**9**9",
            "9^{9^{9^{9}}}",
            "9^9^9^9",
            "2^{99999}",
            "(2^{9999})^{9999}",
            "10^{9999}!",
            "99999999!",
            "((9!)!)!",
            "(99!)!",
            "\\binom{1000000000}{500000000}",
            "\\frac{1}{10^{-999999999}}",
            "e^{e^{e^{e^{10}}}}",
            "1e999999999",
            "\\sqrt[999999]{2}^{999999}",
            "9999^{9999}-9999^{9998}",
            "(x+y+z)^{999}",
            "(x+1)^{400}-(1+x)^{400}",
            "\\pi^{9999}",
            "1" * rng.choice([50, 400, 5_000, 100_000]),
            "0." + "3" * rng.choice([50, 400, 5_000, 100_000]),
            ",".join(["111"] * rng.choice([5, 500, 20_000])),
        ]
    )


def _unsolved(rng: random.Random) -> str:
    return rng.choice(
        [
            "\\int_0^\\infty \\frac{\\sin(x^7)}{x^{11}+\\ln x} dx",
            "\\sum_{n=1}^{\\infty} \\frac{1}{n^{17}+n}",
            "\\prod_{p=1}^{10^9} p",
            "\\lim_{x \\to 0} \\frac{\\sin^{50} x}{x^{50}}",
            "\\{x \\in \\mathbb{R} : x^5 - x = 1\\}",
            "\\operatorname{zeros}(99999,99999)",
            "\\det \\begin{pmatrix} a & b \\\\ c & d \\end{pmatrix}^{99}",
            "\\gcd(2^{521}-1, 2^{607}-1)",
            "x<y<z<w<x",
            "\\sin(\\cos(\\tan(\\sin(\\cos(\\tan(x))))))",
            "\\sqrt{2+\\sqrt{3+\\sqrt{5+\\sqrt{7}}}}-\\sqrt[3]{11}",
        ]
    )


def _code(rng: random.Random) -> str:
    return rng.choice(
        [
            "__import__('os').system('touch pwned')",
            "().__class__.__bases__[0].__subclasses__()",
            "eval(compile('open(chr(112),chr(119))','','exec'))",
            "\\operatorname{__import__}(os)",
            "\\text{__import__('os').system('touch pwned')}",
            "x_{__import__('os').system('touch pwned')}",
            "exit()",
            "lambda: 1",
            "f(__import__('os').system('touch pwned'))",
            "exec\\left(1\\right)",
            "\\input{/etc/passwd}",
        ]
    )


def _characters(rng: random.Random) -> str:
    alphabets = [
        "\x00\x01\x02\x1b\x7f0123",
        "\u0661\u0662\u0663\u0967\u0968\uff11\uff12",  # digits of other scripts
        "\u202e\u202d\u200f\u200b\ufeff123",  # direction marks, zero width
        "\U0001f600\U0001f4a9\u2460\u00bd\u00b2\u221a\u222b5",
        "\ud800\udfff12",  # lone surrogates
        "\\{}$^_&#%~()[]<>|+-*/=.,0123456789abcxyz ",
        "\\frac\\sqrt\\boxed{}",
        "0123456789.,-+/%$ ",
        "\t\n\r ",
    ]
    alphabet = rng.choice(alphabets)
    return "".join(rng.choice(alphabet) for _ in range(rng.choice([1, 5, 30, 120, 3_000])))


def _repeated(rng: random.Random) -> str:
    pieces = [
        "a", "a!", "((", "\\boxed{", "<answer>", "</think>", "#### ", "answer is ", "$", "\\[", "1,", "1 ", "1.", "-",
        "1/", "\\frac", "\\text{", "\\text{a", "=", "\\left", "1+", "x^", "\\ ", "**", "<think></think><answer>",
        "\\frac{1}{2} ", "{,}", "$1$ ", "\\begin{pmatrix}", "!", "%", "_1",
    ]  # fmt: skip
    return rng.choice(pieces) * rng.choice([10, 60, 1_000, 20_000])


def _slow(rng: random.Random) -> str:
    return rng.choice(
        ["x^{11}-x^7+3x-1=\\sin(x)\\cos(x^2)", "x^9+x=\\cos(\\sin(x))-x^2", "\\sin(\\cos(\\tan(\\sin(\\cos(x)))))"]
    )


KINDS: list[Callable[[random.Random], str]] = [
    *[_nested, _huge, _unsolved, _code, _characters, _characters, _repeated] * 20,
    _slow,
]
