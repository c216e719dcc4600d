"""How far a run has come, and its latest numbers, for display by its process."""

import collections
import time
from collections.abc import Mapping
from typing import NamedTuple

from podium.observe.history import History
from podium.observe.metrics import ACCURACY, MARGIN, REWARD, UPDATES
from podium.observe.text import clock

LENGTH, TURNS = "train-seq_len/completion/mean", "env/turns/mean"
SHOWN = (REWARD, MARGIN, LENGTH, TURNS, ACCURACY)
"""Metrics that are shown as curves."""
EARNED = {REWARD: "reward", MARGIN: "margin"}
"""Labels of the metric that a run maximises."""
RECENT_STEPS = 10
"""Number of steps whose mean duration is used to estimate the remaining time."""
COMPILED_IN = ("rollout", "update", "score", "evaluation")
"""Phases whose programs are compiled, or loaded from the cache, the first time a process enters them."""


class PhaseProgress(NamedTuple):
    """Progress of a rollout or an evaluation: number of completions, how many are done, and tokens sampled."""

    total: int
    done: int
    tokens: int

    def text(self, seconds: float) -> str:
        """Text such as `40 of 64 completions, 3,120 tokens, 0:12 left`; `seconds` have passed since the phase began."""
        left = clock(seconds / self.done * (self.total - self.done)) if self.done else "?"
        return f"{self.done} of {self.total} completions, {self.tokens:,} tokens, {left} left"


class Phase:
    """The phase that a run is in."""

    def __init__(self, name: str, *, first: bool = False) -> None:
        """Start the phase now; `first`: whether it is the first of its kind in this process."""
        self.name = name
        self.began = time.monotonic()
        self.compiles = first and name in COMPILED_IN
        self.advance: PhaseProgress | None = None

    def seconds(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self.began


class ShownCompletion(NamedTuple):
    """A completion to display."""

    prompt: str
    completion: str
    reward: float


class RunState:
    """How far a run has come: its last step, and curves of the steps of this process."""

    def __init__(self, name: str, steps: int, *, done: int) -> None:
        """Describe a run of `steps` steps; earlier processes have done the first `done`."""
        self.name = name
        self.steps = steps
        self.done = done
        self.started = time.monotonic()
        self.machine = ""
        """The devices, as text."""
        self.phase = Phase("start")
        self.history = History(SHOWN)
        self.metrics: Mapping[str, float] = {}
        """All metrics of the last step."""
        self.sample: ShownCompletion | None = None
        self.notice: str | None = None
        self._step_ended: float | None = None
        self._durations: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)

    def step(self, step: int, metrics: Mapping[str, float], sample: ShownCompletion | None) -> None:
        """Record a finished step."""
        now = time.monotonic()
        if self._step_ended is not None:  # the first step compiles, so its duration is not representative
            self._durations.append(now - self._step_ended)
        self._step_ended = now
        self.done, self.metrics = step, metrics
        self.sample = sample or self.sample
        self.history.add({"step": step, **metrics})

    @property
    def earning(self) -> str:
        """The metric that the run maximises: the reward, or for preferences the margin."""
        return MARGIN if MARGIN in self.history else REWARD

    def value(self, name: str) -> float:
        """A metric of the last step; NaN if the step does not have it."""
        return float(self.metrics.get(name, float("nan")))

    def done_text(self) -> str:
        """Text such as `step 3/40  reward 0.750`."""
        earned = f"  {EARNED[self.earning]} {self.value(self.earning):.3f}" if self.metrics else ""
        return f"step {self.done}/{self.steps}{earned}"

    def took(self) -> str:
        """The time since this process began, such as `4:05`."""
        return clock(time.monotonic() - self.started)

    def left(self) -> str:
        """The estimated time until the last step, such as `4:05`; `?` if unknown."""
        if not self._durations:
            return "?"
        return clock(sum(self._durations) / len(self._durations) * (self.steps - self.done))

    def step_s(self) -> float:
        """Seconds of the last step."""
        return float(self.metrics.get("time/train/step_s", 0.0))

    def speed(self) -> str:
        """Tokens per second of the last step, as text."""
        if self.metrics.get(UPDATES) == 0:
            return "no update"
        return f"{self.metrics.get('throughput/train/valid_tokens_per_s', 0.0):,.0f} tokens/s"
