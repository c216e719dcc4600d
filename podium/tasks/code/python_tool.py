"""The tool `python`: runs code in the sandbox, each call separately or with names kept during a conversation."""

import functools

from podium.plain import without_middle
from podium.sandbox.check import check_machine
from podium.sandbox.runs import Ended, Limits, Run, Sandbox
from podium.tasks.conversation import Reply, Turn
from podium.tasks.conversations.tools import answer_calls
from podium.tasks.task import Prompt

LIMITS = Limits(wall_s=30.0, cpu_s=10.0)
MAX_CHARACTERS = 4_000
WHY = {
    "time": f"the code took longer than {LIMITS.cpu_s:g} s",
    "memory": f"the code took more than {LIMITS.memory_mib} MiB of memory",
    "processes": f"the code had more than {LIMITS.processes} processes",
    "output": "the code printed too much",
    "ended": "the process of the code ended",
}


@functools.cache
def _sandbox() -> Sandbox:
    """The sandbox that this process shares."""
    return Sandbox(LIMITS)


def python(code: str) -> str:
    """Run Python code and return what it prints, and the value of its last line.

    Args:
        code: the code; it can use only the standard library, and no network.
    """
    with _sandbox().open() as run:
        return _output(run, code)


python.check_machine = check_machine  # pyright: ignore[reportFunctionMemberAccess]  # asked for before a run begins


class PythonSession:
    """A conversation with the tool `python` that keeps names between calls; the task grades the answer."""

    tools = (python,)

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self._run: Run | None = None

    def reply(self, turn: Turn) -> Reply:
        """Run the code in an answer; an answer without code ends the conversation."""
        return answer_calls({"python": self.python}, turn, lambda value: value) or Reply(done=True)

    def python(self, code: str) -> str:
        """Run code with the names that earlier code defined; they are lost if a limit ended the process."""
        if self._run is None:
            self._run = _sandbox().begin()
        try:
            return _output(self._run, code)
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        """End the process that runs the code."""
        if self._run is not None:
            self._run.close()
            self._run = None


def _output(run: Run, code: str) -> str:
    """What the code printed, without its middle if it is long. Raises ValueError, with a message for the model, if a
    limit ended it.
    """
    try:
        output = run.execute(code, shown=True)[0]
    except Ended as ended:
        raise ValueError(f"{WHY[ended.why]}\n{without_middle(ended.output, MAX_CHARACTERS)}".strip()) from None
    return without_middle(output, MAX_CHARACTERS)
