"""Saves the steps of a run: when the config asks for it, and on every way out of the loop.

An error in a reward function, in an environment or in an evaluation, a full disk, Ctrl-C, SIGTERM and the watchdog end
a run between two of its checkpoints. In these cases the newest complete step is saved, so that at most the interrupted
step has to be trained again.
"""

import time
from collections.abc import Callable

import jax

from podium.files import cause_of
from podium.hosts.distributed import AgreedStop, from_leader
from podium.sampling.conversations.carry import Position
from podium.train.checkpoints.checkpoint import Checkpointer
from podium.train.state import TrainState


class Saving:
    """Holds the newest complete step of a run, and saves it."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        stop: AgreedStop,
        *,
        every_s: float = 0.0,
        to_continue: Callable[[], str],
        on_failure: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        """Save with `checkpointer`, also after a step that ends `every_s` seconds after the last save; 0: not by time.

        `to_continue` returns the command that continues the run, for messages. `on_failure` is called with the error
        that ends the run, before the newest step is saved, so that the error is recorded where it happened.
        """
        self.checkpointer = checkpointer
        self._every_s, self._saved_at = every_s, time.monotonic()
        self._stop = stop
        self._to_continue = to_continue
        self._on_failure = on_failure
        self._first = self.done = 0
        """Number of steps done when the run was opened, and now."""
        self._whole: tuple[int, TrainState, Position] | None = None

    def begin(self, done: int, state: TrainState, position: Position) -> None:
        """Start from `state` after `done` steps, which is saved already or needs no saving."""
        self._first = done
        self.reached(done, state, position)

    def reached(self, done: int, state: TrainState, position: Position) -> None:
        """Hold the state after `done` steps instead of the previous one; call this as soon as the update is
        complete.
        """
        self._whole = (done, state, position)
        self.done = done

    def after_step(self, *, score: float | None, last: bool) -> float | None:
        """Save the newest step if it is due or `last`; returns the seconds that saving took, or None if it was not
        saved.

        `score` is for `checkpoint.keep_best`; None if the step was not evaluated.
        """
        assert self._whole is not None, "a step was done"
        before = self.checkpointer.postponed
        due = bool(self._every_s) and from_leader(lambda: time.monotonic() - self._saved_at >= self._every_s)
        seconds = self.checkpointer.maybe_save(*self._whole, score=score, last=last, due=due)
        if seconds is not None or (self.checkpointer.postponed and not before):
            self._saved_at = time.monotonic()
        return seconds

    def save_newest(self) -> bool:
        """Save the newest step completely; returns False if its state is lost.

        An update frees the previous state, so if an update failed, the step before it can no longer be saved.
        """
        if self._whole is None:
            return False
        done, state, position = self._whole
        if any(x.is_deleted() for x in jax.tree.leaves(state)):
            return False
        if done > self._first:
            self.checkpointer.maybe_save(done, state, position, score=None, last=True)
        return True

    def rescue(self, error: BaseException | None = None) -> str | None:
        """Save the newest step of a failing run; returns a line that says what was saved and how to continue, or None
        if no step was done.

        `error` is the error that ends the run, if any. Never raises, because the caller has that error to report. On
        several hosts, it saves only if all of them leave the loop.
        """
        if error is not None:
            self._on_failure(error)
        if self.done == self._first:
            return None
        lost = f"step {self.done} could not be saved"
        if not self._stop.leaving_together:
            return f"{lost}: the other hosts are still in the next step; {self._way_on()}"
        try:
            if not self.save_newest():
                self.checkpointer.wait()  # the save of an earlier step
                return f"{lost}: the update that failed had already replaced its weights; {self._way_on()}"
        except Exception as unsaved:  # no failure here may hide the error that ends the run
            return f"{lost}: {cause_of(unsaved)}"
        return f"step {self.done} is saved; to continue: {self._to_continue()}"

    def _way_on(self) -> str:
        saved = self.checkpointer.steps()
        newest = f"the newest saved step is {saved[-1]}" if saved else "no step is saved"
        return f"{newest}; to continue: {self._to_continue()}"
