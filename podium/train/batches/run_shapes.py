"""The shapes of a run's batches: chosen from the lengths of its first step, and kept in its folder for when it resumes.

A program that a step has to wait for costs more than its shape saves. Where programs are compiled beside rollouts, the
chosen shapes are therefore used some steps later, from a step that is kept too: which shape a step takes must not
depend on how fast something was compiled. Elsewhere they are used at once, in place of the config's own.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from podium.files import to_json, write_atomically
from podium.hosts.distributed import from_leader
from podium.run.run_spec import BatchSizes, RowShape
from podium.train.batches.balance import Lengths
from podium.train.batches.shapes import LATER, choose_shapes, with_shapes

SHAPES = "shapes.json"


class KeptShapes(NamedTuple):
    """The contents of shapes.json."""

    own: RowShape
    """The config's own shape when the others were chosen."""
    shapes: tuple[RowShape, ...]
    from_step: int
    """The number of steps done after which the shapes are used."""


class RunShapes:
    """The shapes of a run's batches, which may be different in its steps."""

    def __init__(
        self,
        own: BatchSizes,
        kept: KeptShapes | None = None,
        *,
        keep: Callable[[KeptShapes], None] | None = None,
        later: int = 0,
    ) -> None:
        """Begin with the config's own shape and those that the run has kept.

        Args:
            own: the config's own shape, and rules for others.
            kept: None if the run has not chosen yet. If they are of other rules, they are chosen again.
            keep: keeps the run's choice; unset: no shapes are chosen.
            later: steps between choice and first use.
        """
        self.own = own
        self._kept = kept if kept is not None and _allowed(kept, own) else None
        self._new: tuple[RowShape, ...] = ()
        self._keep, self._later, self._done = keep, later, 0

    @property
    def sizes(self) -> BatchSizes:
        """The sizes of the next step's batches."""
        kept = self._kept
        return self.own if kept is None or self._done < kept.from_step else with_shapes(self.own, kept.shapes)

    @property
    def likely(self) -> tuple[RowShape, ...]:
        """All shapes that steps may take, the likeliest in the next step first."""
        chosen = () if self._kept is None else self._kept.shapes
        return (*chosen, self.own.shape) if self.sizes.rules.shapes else (self.own.shape, *chosen)

    @property
    def chooses(self) -> bool:
        """Whether shapes are to be chosen from the next step's lengths."""
        return self._keep is not None and self._kept is None

    def choose(self, groups: Sequence[Sequence[Lengths]], *, per_step: int) -> None:
        """Choose shapes from the lengths of a step's groups, as `choose_shapes` does, unless nothing is trained on."""
        if self._keep is not None and any(groups):
            self._new = choose_shapes(groups, self.own, per_step=per_step)
            self._kept = KeptShapes(self.own.shape, self._new, self._done + self._later)
            self._keep(self._kept)

    def begin(self, done: int) -> tuple[RowShape, ...]:
        """Note that `done` steps are done; returns the shapes that were chosen since the last call."""
        new, self._new, self._done = self._new, (), done
        return new


def open_shapes(own: BatchSizes, folder: Path, done: int, *, writes: bool, ahead: bool) -> RunShapes:
    """The shapes of a run after `done` steps, kept in its folder by the process that `writes`; all must call this.

    `own` is the config's own shape; `ahead` says whether programs are compiled beside rollouts. Raises ValueError if
    the file is damaged.
    """
    kept = from_leader(lambda: read_shapes(folder))
    shapes = RunShapes(
        own, kept, keep=lambda kept: write_shapes(folder, kept) if writes else None, later=LATER if ahead else 0
    )
    shapes.begin(done)
    return shapes


def read_shapes(folder: Path) -> KeptShapes | None:
    """The shapes that a run has kept in its folder; None if it has not chosen yet.

    Raises ValueError if the file is damaged.
    """
    path = folder / SHAPES
    if not path.is_file():
        return None
    try:
        return TypeAdapter(KeptShapes).validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(
            f"{path} is damaged ({error.errors()[0]['msg']}): delete it, and the run chooses the shapes of its"
            " micro-batches again; it will not be bit-for-bit reproducible"
        ) from None


def write_shapes(folder: Path, kept: KeptShapes) -> None:
    """Keep a run's shapes in its folder."""
    write_atomically(folder / SHAPES, to_json(json.loads(json.dumps(kept._asdict()))) + "\n")


def _allowed(kept: KeptShapes, own: BatchSizes) -> bool:
    """Whether the kept shapes are for the rows and devices of this run."""
    rules = own.rules
    divisible = all(not rows % rules.row_step and not tokens % rules.tile for rows, tokens in kept.shapes)
    return kept.own == own.shape and divisible
