"""`podium` and `gcloud` of a machine whose project lives in the test's process: commands are sent there to be run.

python far_podium.py gcloud|podium ARGUMENTS...       FAR_GCLOUD: where the test listens
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Listener
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from podium.pods.gcloud import Finished, Runner

ADDRESS = "FAR_GCLOUD"


@contextmanager
def listening(run: Runner) -> Iterator[str]:
    """Runs what others send, and gives the address to which they send it."""
    listener = Listener(family="AF_UNIX")

    def serve() -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:  # it was closed
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: "Client") -> None:
        with connection, contextlib.suppress(OSError, EOFError):  # who asked was killed
            connection.send(run(*connection.recv()))

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield str(listener.address)
    finally:
        listener.close()


def far(argv: Sequence[str], timeout_s: float) -> Finished:
    """A `Runner`."""
    with Client(os.environ[ADDRESS], family="AF_UNIX") as connection:
        connection.send((tuple(argv), timeout_s))
        return connection.recv()


def main() -> None:
    """Be gcloud, or be podium with a clock that need not be waited for."""
    which, *arguments = sys.argv[1:]
    if which == "gcloud":
        done = far(["gcloud", *arguments], 60.0)
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        sys.exit(done.returncode)
    from podium import cli
    from podium.pods import world
    from tests.pods.clock import Clock

    world.WORLD = world.World(runner=far, clock=Clock(longest_s=0.1))
    sys.argv = ["podium", *arguments]
    cli.main()


if __name__ == "__main__":
    main()
