"""A device that draws completions of known lengths without a model, counts its calls, and has a clock. No jax.

`podium.rollout.engine.RolloutEngine` drives it, so the counts are those of the real engine.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from podium.config.schema import RolloutConfig
from podium.config.sizes import steps_at_once
from podium.rollout.answer import TextDecoder
from podium.rollout.engine_device import DrawnRows, EngineModel
from podium.rollout.request import Key
from podium.rollout.scheduler import DecodeRow, PrefillCall

if TYPE_CHECKING:
    from podium.compile_ahead import Call

TOKEN, END = 0, 1
"""The tokens that it draws: END as the last token of each turn, TOKEN otherwise."""


class Clock(NamedTuple):
    """How long the engine's calls take, in seconds."""

    prefill_s: Mapping[int, float]
    """Seconds of a prefill call, by chunk length."""
    decode_s: Mapping[int, float]
    """Seconds of a decode step, by number of slots."""

    def call_seconds(self, chunk: int) -> float:
        """Seconds of a prefill call; for an unknown chunk length, those of the nearest known one."""
        return _nearest(self.prefill_s, chunk)

    def step_seconds(self, slots: int) -> float:
        """Seconds of a decode step; for an unknown number of slots, those of the nearest known one."""
        return _nearest(self.decode_s, slots)


def _nearest(seconds: Mapping[int, float], size: int) -> float:
    return seconds[min(seconds, key=lambda known: abs(known - size))] if seconds else 0.0


@dataclasses.dataclass(kw_only=True)
class Work:
    """Counts of a simulated device's work."""

    prefills: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter[int])
    """Prefill calls by chunk length."""
    copies: int = 0
    """Calls that copy pages."""
    copied: int = 0
    """Pages copied."""
    decodes: dict[int, tuple[int, int, float]] = dataclasses.field(default_factory=dict[int, tuple[int, int, float]])
    """By slots of the decode program: calls in which a token was drawn, their steps, and the longest context of any
    slot, summed over steps."""
    occupied: int = 0
    """Slots whose step drew a token, summed over steps."""
    attended: int = 0
    """Tokens that these slots attended to, including their own, summed over steps."""


class SimulatedDevice:
    """An engine's device without weights. Its decode calls run until all slots have finished, as the real ones do."""

    model = EngineModel(vocab=2)

    def __init__(self, config: RolloutConfig, shards: int, *, overlap: bool, calls: int, clock: Clock) -> None:
        """Start without work. Each of its decode calls counts as `calls` of an engine with this config."""
        self.config = config if calls == 1 else config.model_copy(update={"refill_steps": calls * config.refill_steps})
        self.shards = shards
        self.overlap = overlap
        self.clock = clock
        self.now = 0.0
        self.work = Work()
        self.lengths: dict[Key, int] = {}
        """Length in tokens of the current turn of each completion."""
        self._call_steps = config.refill_steps
        self._at_once = steps_at_once(config.refill_steps, shards)

    @property
    def loaded(self) -> bool:
        """Always True, because no weights are needed."""
        return True

    def resize(self, slots: int) -> None:
        """Use `slots` slots from now on; all become empty."""
        self._left = np.zeros(slots, np.int64)  # tokens that each slot will still draw
        self._seen = np.zeros(slots, np.int64)  # tokens that its next query sees, its own included

    def prefill(self, call: PrefillCall) -> None:
        """Count a prefill call."""
        self.work.prefills[call.chunk] += 1
        self.now += self.clock.call_seconds(call.chunk)

    def copy(self, copies: tuple[object, ...]) -> None:
        """Count copies of pages."""
        self.work.copies += 1
        self.work.copied += len(copies)

    def decode(self, rows: tuple[DecodeRow, ...], tokenizer: TextDecoder | None) -> Callable[[], DrawnRows]:
        """Draw up to `refill_steps` tokens in each row, after a first token in rows that ask for one."""
        for row, sequence, _, fresh, _ in rows:
            if fresh:
                self._left[row] = self.lengths[sequence.key] - len(sequence.drawn)
                self._seen[row] = sequence.length
        slots = np.array([each.row for each in rows])
        first = np.array([each.first for each in rows], np.int64)
        seen = self._seen[slots] + first
        tokens = np.minimum(self.config.refill_steps + first, self._left[slots])
        steps = np.maximum(tokens - first, 0)
        self._left[slots] -= tokens
        self._seen[slots] += tokens
        ran = -(-int(steps.max()) // self._at_once) * self._at_once
        if tokens.any():
            self._count(ran, int(seen[steps > 0].max(initial=0)))
        self.work.occupied += int(steps.sum())
        self.work.attended += int((steps * seen + steps * (steps - 1) // 2).sum())
        self.now += ran * self.clock.step_seconds(len(self._left))
        drawn = self._drawn(slots, first, tokens, ran)
        return lambda: drawn

    def _count(self, ran: int, longest: int) -> None:
        size = len(self._left)
        calls, steps, total = self.work.decodes.get(size, (0, 0, 0.0))
        own = max(1, -(-ran // self._call_steps))
        self.work.decodes[size] = calls + own, steps + ran, total + ran * (longest + (ran - 1) / 2)

    def _drawn(self, slots: np.ndarray, first: np.ndarray, tokens: np.ndarray, ran: int) -> DrawnRows:
        size, width = len(self._left), 1 + self.config.refill_steps
        counts, ended = np.zeros(size, np.int64), (tokens > 0) & (self._left[slots] == 0)
        counts[slots] = tokens
        drawn = [[TOKEN] * width] * size
        last = tokens - first  # the column of the last token: without a first token, column 0 is empty
        for slot, column in zip(slots[ended].tolist(), last[ended].tolist(), strict=True):
            drawn[slot] = [*[TOKEN] * column, END]
        none: list[list[float]] = [[]] * size
        return DrawnRows(
            counts=counts.tolist(),
            tokens=drawn,
            logprobs=none,
            full_logprobs=none,
            finite=[True] * size,
            choices=None,
            steps=ran,
        )

    # It has no weights, cache or programs.

    def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing."""

    load = unload = forget = warm_up = wait = copy_cells = _nothing

    def num_compiled(self) -> int:
        """Return 0, because nothing is compiled."""
        return 0

    def extra_calls(self, request: object) -> "dict[str, Call]":
        """Return no calls, because no request needs further programs."""
        return {}

    def nonfinite(self, sequence: object) -> str:
        """Not called: all logits are finite."""
        raise AssertionError("a simulated device has no logits")
