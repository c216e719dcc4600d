"""What the sandbox costs, and whether it leaves anything: latency over a fork, thousands of runs, graded solutions.

    python -m benches.sandbox     (minutes; a quiet machine, or latencies are upper bounds)

`print(1)` is run by turns in the sandbox and in plain forks of a small Python process. Then come runs that each leave a
file, a process and a thread behind, after which processes, mounts, descriptors and shared memory of the machine are
compared with before; and solutions of generated functions, half of them wrong in four ways, with two grading workers.
Bars: 15 ms over a fork at the median and 40 at the 95th percentile, nothing left, all verdicts right in 60 s. Writes
benches/results/sandbox-cpu.json.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benches.record import arguments, record
from podium.config.schema import GradingConfig, TaskConfig
from podium.sandbox.check import check
from podium.sandbox.runs import Limits, Sandbox
from podium.tasks.code.code_task import Code
from podium.tasks.grading import Grader
from podium.tasks.mixture import TaskPrompt
from podium.tasks.task import Graded, TaskSource

FORKING = """
import os, sys
for line in sys.stdin:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 1)
        exec(compile("print(1)", "code", "exec"), {})
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    os.read(read, 9)
    os.read(read, 9)
    os.close(read)
    os.waitpid(pid, 0)
    os.write(1, b"done\\n")
"""
LITTER = (
    "import os, threading, time\nopen('/box/left', 'w').write('x')\n"
    "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    "if os.fork() == 0: time.sleep(60)\nprint(os.getpid())"
)
WRONG: tuple[Callable[[str], str], ...] = (
    lambda code: code.partition("return ")[0] + "return ...",
    lambda code: code.replace("return ", "return [") + "]",
    lambda code: code.replace("return ", "raise ValueError\n    return "),
    lambda code: code + ")",
)
"""Each makes a right solution wrong: another value, another type, an exception, code that cannot be read."""


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Median and 95th percentile in milliseconds."""
    cut = statistics.quantiles(seconds, n=20)
    return {"p50_ms": round(1000 * cut[9], 2), "p95_ms": round(1000 * cut[18], 2)}


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def latencies(count: int) -> dict[str, dict[str, float]]:
    """`print(1)` in the sandbox and in plain forks, by turns."""
    forking = subprocess.Popen(
        [sys.executable, "-S", "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert forking.stdin is not None
    assert forking.stdout is not None
    asked, answers = forking.stdin, forking.stdout

    def fork() -> None:
        asked.write("\n")
        assert answers.readline() == "done\n"

    with Sandbox() as sandbox, forking:

        def run() -> None:
            assert sandbox.run("print(1)").output == "1\n"

        for _ in range(20):
            run()
            fork()
        pairs = [(timed(run), timed(fork)) for _ in range(count)]
        asked.close()
    found = {"sandbox": percentiles([pair[0] for pair in pairs]), "fork": percentiles([pair[1] for pair in pairs])}
    found["over"] = {name: round(found["sandbox"][name] - found["fork"][name], 2) for name in found["fork"]}
    return found


def traces(pid: int) -> dict[str, object]:
    """What runs could leave on the machine: processes below one, mounts, descriptors, shared memory."""
    below: list[int] = [pid]
    for parent in below:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            below += map(int, children.read_text().split())
    return {
        "processes": below,
        "mounts": Path("/proc/mounts").read_text(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared_memory": sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else [],
        "queues": Path("/proc/sysvipc/shm").read_text() if os.path.exists("/proc/sysvipc/shm") else "",
    }


def litter(count: int) -> dict[str, object]:
    """Runs that leave what they can, and which traces of them are left."""
    with Sandbox() as sandbox:
        sandbox.run("1")
        assert sandbox._process is not None
        before = traces(sandbox._process.pid)
        seconds = timed(lambda: [sandbox.run(LITTER) for _ in range(count)])
        after = traces(sandbox._process.pid)
    return {
        "runs": count,
        "runs_per_s": round(count / seconds, 1),
        "left": [name for name in before if before[name] != after[name]],
    }


def graded(count: int) -> dict[str, object]:
    """Solutions of the generated functions, every second one wrong, graded by two workers."""
    task = Code(TaskSource())
    prompts = [*task.prompts("train"), *task.prompts("eval")]
    chosen = [prompts[number % len(prompts)] for number in range(count)]
    codes = [str(prompt.metadata["solution"]) for prompt in chosen]
    codes = [code if place % 2 else WRONG[place // 2 % len(WRONG)](code) for place, code in enumerate(codes)]
    asked = [TaskPrompt(task=0, prompt=prompt, system_prompt=None) for prompt in chosen]
    answers = [Graded(text=f"```python\n{code}\n```", tokens=(1,)) for code in codes]
    grader = Grader(
        [TaskConfig(name="code", options={"reward": "all"})], GradingConfig(workers=2, timeout_s=60.0), max_new_tokens=8
    )
    try:
        grader.grade(list(zip(asked, answers, strict=True))[:4])  # the workers have started
        start = time.perf_counter()
        rewards = grader.grade(list(zip(asked, answers, strict=True)))
        seconds = time.perf_counter() - start
    finally:
        grader.close()
    wrong = sum(reward.total != place % 2 for place, reward in enumerate(rewards))
    return {"solutions": count, "wrong_verdicts": wrong, "seconds": round(seconds, 1)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--latencies", type=int, default=500, help="pairs of runs that are timed")
    parser.add_argument("--runs", type=int, default=10_000, help="runs that leave what they can")
    parser.add_argument("--solutions", type=int, default=1_000, help="solutions that are graded")
    chosen = parser.parse_args()
    with Sandbox(Limits()) as sandbox:
        result: dict[str, object] = {"user": os.getuid(), "holds": check(sandbox)}
    for name, measured in (
        ("latency", lambda: latencies(chosen.latencies)),
        ("litter", lambda: litter(chosen.runs)),
        ("graded", lambda: graded(chosen.solutions)),
    ):
        result[name] = {**measured(), "load": os.getloadavg()[0]}
        print(name, result[name], flush=True)
    record("sandbox-cpu", result, chosen.results)


if __name__ == "__main__":
    main()
