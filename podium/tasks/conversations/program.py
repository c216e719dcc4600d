"""Programs as environments: any program that uses an OpenAI-compatible server can play an episode with the model in
training.

A program leads its conversation: it requests answers (`podium.tasks.conversations.loopback`) until it ends. Each
request becomes a turn like those of other environments, with the same limits, seeds and failures. A request that
repeats the conversation so far extends it; any other begins a new segment. The sampled tokens are trained on.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, BinaryIO, Protocol

from pydantic import Field

from podium.serve.bodies import RequestError
from podium.tasks.conversation import Asking, Reply, Turn
from podium.tasks.conversations.loopback import Call, Line, Prompts, server
from podium.tasks.games.generated import PaidByEnvironment
from podium.tasks.question_files import read_rows
from podium.tasks.task import Count, Prompt, TaskSource

LONGEST_ROW = (128 << 10) - len("PODIUM_ROW=") - 1
"""Most bytes of the value of PODIUM_ROW: Linux counts its name and the zero at its end too."""
END_BYTES = 1 << 16
"""Bytes read from the end of a program's output, whose last line is the reward."""
SHOWN = 2000
"""Characters of a program's stderr shown in a message."""


class Playing(Protocol):
    """A program that plays an episode."""

    def reward(self) -> float:
        """Wait until the program ends; returns its reward. Raises RuntimeError if it failed."""
        ...

    def stop(self) -> None:
        """Kill the program."""
        ...


Start = Callable[[Line], Playing]
"""Starts a program that sends its requests through a line, and ends the line when the program ends."""


class Led:
    """A conversation led by a program."""

    def __init__(self, start: Start) -> None:
        """Does not start the program yet."""
        self._start = start
        self._line = Line()
        self._prompts = Prompts()
        self._playing: Playing | None = None
        self._call: Call | None = None
        self._ended = False

    def begin(self) -> Asking:
        """Start the program; returns its first request. Raises RuntimeError if it ends without a request."""
        self._playing = self._start(self._line)
        asking = self._next()
        if asking is None:
            self._playing.reward()
            raise RuntimeError("the program ended without sending a request to the model")
        return asking

    def reply(self, turn: Turn) -> Reply:
        """Answer the program; returns its next request."""
        assert self._call is not None, "an answer follows a request"
        self._prompts.answered(turn)
        self._call.answer.set_result(turn)
        self._call = None
        asking = self._next()
        return Reply(done=True) if asking is None else Reply(asking=asking)

    def grade(self) -> float:
        """Wait for the program's end, and return its reward; 0 if it failed because a limit ended the conversation."""
        assert self._playing is not None, "the conversation has begun"
        if self._ended:
            return self._playing.reward()
        error = "context_length_exceeded: a limit of the run has ended this conversation; it gets no more answers"
        self._line.refuse(RequestError(error, code="context_length_exceeded"))
        try:
            return self._playing.reward()
        except RuntimeError:
            return 0.0

    def close(self) -> None:
        """End the program."""
        server().drop(self._line)
        self._line.end()
        if self._playing is not None:
            self._playing.stop()

    def _next(self) -> Asking | None:
        while (call := self._line.next()) is not None:
            try:
                asking = self._prompts.read(call.body)
            except RequestError as error:
                call.answer.set_exception(error)
                continue
            self._call = call
            return asking
        self._ended = True
        return None


class Program(PaidByEnvironment):
    """A program that uses an OpenAI server: `tasks: [{name: program, options: {command: [python, agent.py]}}]`.

    The program is started for each episode with the environment variables OPENAI_BASE_URL and OPENAI_API_KEY,
    PODIUM_SEED (the same for all episodes of a prompt), and PODIUM_ROW, a JSON object: the row of `path`, or `split`
    and `number`. The last line that it prints is the reward.
    """

    led_by_program = True
    system_prompt: str | None = None

    def __init__(
        self,
        source: TaskSource,
        *,
        command: Annotated[list[str], Field(min_length=1)],
        episodes: Count = 1000,
        eval_episodes: Count = 100,
    ) -> None:
        if shutil.which(command[0]) is None:
            raise ValueError(f"program: options.command: program {command[0]!r} not found; give its path")
        self.source = source
        self.command = command
        self.episodes = episodes
        self.eval_episodes = eval_episodes

    def prompts(self, split: str) -> Sequence[Prompt]:
        """One prompt per row, or per number."""
        if self.source.path is None:
            count = self.eval_episodes if split == "eval" else self.episodes
            rows: list[dict[str, object]] = [{"split": split, "number": number} for number in range(count)]
        else:
            rows = []
            for location, row in read_rows("program", self.source, split):
                if (size := len(json.dumps(row))) > LONGEST_ROW:
                    rule = f"the row has {size:,} bytes as JSON, and the environment variable PODIUM_ROW holds"
                    way_out = "shorten it, or name a file in it that the program reads"
                    raise ValueError(f"program: {location}: {rule} {LONGEST_ROW:,}; {way_out}")
                rows.append(row)
        return [
            Prompt(id=f"program/{split}/{index}", question="", answer="", metadata=row)
            for index, row in enumerate(rows)
        ]

    def open(self, prompt: Prompt, seed: int) -> Led:
        """Make an episode; its program is not started yet."""
        told = {"PODIUM_SEED": str(seed), "PODIUM_ROW": json.dumps(dict(prompt.metadata))}
        return Led(lambda line: Process(self.command, told, line))


class Process:
    """A program in a child process, in this process's group."""

    def __init__(self, command: Sequence[str], told: Mapping[str, str], line: Line) -> None:
        """Start the program, with environment variables in addition to those of this process."""
        local = {
            "OPENAI_BASE_URL": server().open(line),
            "OPENAI_API_KEY": "none",
            "NO_PROXY": ",".join(filter(None, ("127.0.0.1", os.environ.get("NO_PROXY")))),
        }
        self._name = " ".join(command)
        # Files, not pipes: a process that outlives the program would keep a pipe open, so that reading would never end.
        with contextlib.ExitStack() as files:
            self._said, self._errors = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            self._process = subprocess.Popen(
                list(command),
                env={**os.environ, **local, **told},
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._errors,
            )
            self._files = files.pop_all()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, args=(line,), name="program", daemon=True).start()

    def reward(self) -> float:
        """The number on the last line that the program printed. Raises RuntimeError if it failed, or printed no
        number.
        """
        self._ended.wait()
        if self._process.returncode:
            errors = _end_of(self._errors).strip()[-SHOWN:]
            raise RuntimeError(f"{self._name} ended with code {self._process.returncode}: {errors}")
        last = _end_of(self._said).strip().rpartition("\n")[2]
        try:
            return float(last)
        except ValueError:
            raise RuntimeError(f"{self._name}: the last line it prints must be the reward, not {last!r:.80}") from None

    def stop(self) -> None:
        """Kill the program if it is still running, and discard its output."""
        self._process.kill()
        self._files.close()

    def _watch(self, line: Line) -> None:
        self._process.wait()
        self._ended.set()
        line.end()


def _end_of(file: BinaryIO) -> str:
    """The end of a program's output file."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), END_BYTES, max(0, size - END_BYTES)).decode("utf-8", "replace")
