"""An event loop on its own thread, which runs coroutines that users have written."""

import asyncio
import contextlib
import threading


class UsersLoop(asyncio.SelectorEventLoop):
    """An event loop shared by coroutines, any of which may call `stop`; therefore `stop` does nothing."""

    def stop(self) -> None:
        """Do nothing: other coroutines still run on this loop."""

    def end(self) -> None:
        """Stop the loop; must be called on its thread."""
        super().stop()


def start_loop(name: str) -> UsersLoop:
    """Start an event loop on a daemon thread of this name; its `end`, called on that thread, ends it.

    In asyncio, a SystemExit or KeyboardInterrupt raised in a task also stops the loop. Here it is the exception of that
    task only, and the loop continues.
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
