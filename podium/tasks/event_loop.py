"""An event loop on its own thread, which runs coroutines that users have written."""

import asyncio
import contextlib
import threading


class UsersLoop(asyncio.SelectorEventLoop):
    """A loop that coroutines share: `stop`, which one of them may call, does nothing."""

    def stop(self) -> None:
        """Go on: others' coroutines run here too."""

    def end(self) -> None:
        """Stop; called on the loop's thread."""
        super().stop()


def start_loop(name: str) -> UsersLoop:
    """Start an event loop on a daemon thread of this name; its `end`, called on that thread, ends it.

    SystemExit and KeyboardInterrupt in a task leave asyncio's loop after the task has them as its exception. They are
    an error of that task alone: here the loop continues.
    """
    loop = UsersLoop()
    threading.Thread(target=_run, args=(loop,), name=name, daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    stopped = False
    while not stopped:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
            stopped = True
    loop.close()
