"""A kind of worker whose requests say what happens to its process."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from podium.tasks.workers import Parent


def main(connection: int, lifeline: int) -> None:
    parent = Parent(connection, lifeline)
    setup = parent.setup()
    if setup == "fail":
        raise LookupError("no such dictionary")
    parent.serve(act, limit_s=lambda request: setup)


def act(request: str | bytes) -> object:
    word, _, rest = request.partition(" ") if isinstance(request, str) else ("", "", "")
    match word:
        case "exit":
            os._exit(3)
        case "leave":
            raise SystemExit(3)
        case "raise":
            raise KeyError("a bug")
        case "hold":
            sum(range(10**12))  # with the interpreter's lock
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)
        case "start":
            child = subprocess.Popen(["sleep", "600"])
            Path(rest).write_text(str(child.pid))
            time.sleep(600)
        case "lambda":
            return lambda: 1
        case "later":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        case "variable":
            return os.environ.get(rest)
        case "pid":
            return os.getpid()
    return request
