"""The experts of a sequence's tokens in the engine, as its prefill and decode calls report them. No jax."""

import numpy as np
from numpy.typing import DTypeLike

from podium.models.blocks.choices import unknown_choice


class Routes:
    """The experts of a sequence's tokens in all layers: row j [C] has the experts of the token before token j, or
    `unknown_choice`.

    The first report of a token counts. Later passes over the token, after an eviction or with new weights, do not
    change it, so that a completion keeps the choices with which its tokens were sampled.
    """

    def __init__(self, prompt: np.ndarray) -> None:
        """Start with the rows [p, C] of a prompt of p tokens; the sequences of a request share these rows.

        The row of the prompt's last token is each sequence's own: its first token may be drawn by newer weights than
        that of another sequence.
        """
        self._prompt = prompt
        self._later = prompt[:0]

    def record(self, first: int, found: np.ndarray) -> None:
        """Fill unknown rows, from index `first` on, with the known rows of `found` [n, C]."""
        shared = len(self._prompt)
        stop = first + len(found)
        missing = stop - shared - len(self._later)
        if missing > 0:
            self._later = np.concatenate([self._later, unknown(missing, found.shape[1], found.dtype)])
        split = max(0, min(len(found), shared - first))
        _fill(self._prompt[first : first + split], found[:split])
        begin = max(0, first - shared)
        _fill(self._later[begin : begin + len(found) - split], found[split:])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop), without a copy if all are the prompt's."""
        shared = len(self._prompt)
        if stop <= shared:
            return self._prompt[start:stop]
        own = self._later[max(0, start - shared) : stop - shared]
        lacking = unknown(stop - max(start, shared) - len(own), self._prompt.shape[1], self._prompt.dtype)
        return np.concatenate([self._prompt[start:], own, lacking])

    def cut(self, length: int) -> None:
        """Drop the rows after token `length` - 1, which becomes the last token."""
        self._later = self._later[: max(0, length - len(self._prompt))]


def unknown(rows: int, choices: int, dtype: DTypeLike) -> np.ndarray:
    """Rows without known experts, [rows, C]."""
    return np.full((rows, choices), unknown_choice(dtype), dtype)


def known(rows: np.ndarray) -> np.ndarray:
    """Which of the rows [n, C] are known, [n] bool."""
    return rows[:, 0] != unknown_choice(rows.dtype)


def _fill(rows: np.ndarray, found: np.ndarray) -> None:
    new = known(found) & ~known(rows)
    rows[new] = found[new]
