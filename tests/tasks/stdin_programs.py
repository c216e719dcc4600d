"""A hundred programs: each way to read the input and to end, by each of several problems.

A way is a program that calls `solve(text)`, which returns the output; a problem is the text of that function, and tests
with inputs and outputs that were worked out by hand.
"""

from typing import NamedTuple


class Problem(NamedTuple):
    solve: str
    tests: list[tuple[str, str]]


WAYS = {
    "input": "lines = []\ntry:\n    while True: lines.append(input())\nexcept EOFError: pass\nprint(solve('\\n'.join(lines)))",
    "read": "import sys\nprint(solve(sys.stdin.read()))",
    "readline": "import sys\ninput = sys.stdin.readline\ntext = ''\nwhile line := input(): text += line\nprint(solve(text))",
    "loop": "import sys\nprint(solve(''.join(line for line in sys.stdin)))",
    "buffer": "import sys\nsys.stdout.buffer.write(solve(sys.stdin.buffer.read().decode()).encode())",
    "os.read": "import os\nos.write(1, solve(os.read(0, os.fstat(0).st_size).decode()).encode())",
    "fast": (
        "import sys, io, os\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\n"
        "out = []\nout.append(solve(b''.join(iter(input, b'')).decode()))\nsys.stdout.write('\\n'.join(out))"
    ),
    "open": "print(solve(open(0).read()))\nexit()",
    "fileinput": "import fileinput\nprint(solve(''.join(fileinput.input())), flush=True)\nquit()",
    "thread": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
        "def main(): print(solve(sys.stdin.read()))\nthread = threading.Thread(target=main)\nthread.start()\nthread.join()"
    ),
    "main": "import sys\ndef main():\n    print(solve(sys.stdin.read()))\n    return 0\nif __name__ == '__main__': sys.exit(main())",
    "kept": (
        "import atexit, io, sys\nkept = io.StringIO()\nsys.stdout = kept\n"
        "@atexit.register\ndef write(): sys.__stdout__.write(kept.getvalue())\nprint(solve(sys.stdin.read()))"
    ),
    "redirected": "import sys\nwith open('in', 'w') as file: file.write(sys.stdin.read())\nsys.stdin = open('in')\nprint(solve(sys.stdin.read()))",
}  # fmt: skip
PROBLEMS = {
    "sum": Problem("def solve(text): return str(sum(map(int, text.split())))", [("1 2\n3\n", "6\n"), ("-5", "-5"), ("", "0")]),
    "words": Problem("def solve(text): return ' '.join(text.split()[::-1])", [("a b c\n", "c b a"), ("x\ny", "y x\n")]),
    "gcd": Problem(
        "import math\ndef solve(text): return str(math.gcd(*map(int, text.split())))", [("12 18\n", "6\n"), ("7 13", "1")]
    ),
    "primes": Problem(
        "def solve(text):\n    n = int(text)\n    found = [k for k in range(2, n) if all(k % d for d in range(2, k))]\n"
        "    return '\\n'.join(map(str, found))",
        [("12\n", "2\n3\n5\n7\n11\n"), ("3", "2")],
    ),
    "grid": Problem(
        "def solve(text):\n    rows = [list(map(int, line.split())) for line in text.strip().split('\\n')]\n"
        "    return '\\n'.join(' '.join(map(str, column)) for column in zip(*rows))",
        [("1 2\n3 4\n", "1 3\n2 4\n"), ("5", "5")],
    ),
    "mean": Problem(
        "def solve(text):\n    values = list(map(float, text.split()))\n    return f'{sum(values) / len(values):.6f}'",
        [("1 2\n", "1.5\n"), ("0.1 0.2", "0.150000")],
    ),
    "count": Problem(
        "from collections import Counter\ndef solve(text):\n    found = sorted(Counter(text.split()).items())\n"
        "    return '\\n'.join(f'{word}: {count}' for word, count in found)",
        [("b a b\n", "a: 1\nb: 2\n"), ("z", "z: 1")],
    ),
    "lines": Problem(
        "def solve(text): return '\\n'.join(str(k * k) for k in range(int(text)))",
        [("20000\n", "\n".join(str(k * k) for k in range(20_000)))],
    ),
}  # fmt: skip


def programs() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """By name: a program and its tests."""
    return {
        f"{way}, {name}": (f"{problem.solve}\n{WAYS[way]}", problem.tests)
        for way in WAYS
        for name, problem in PROBLEMS.items()
    }
