"""Rows of equal work: completions move from the fullest row to the emptiest until rows differ by little. No jax.

The work of a row is that of its tokens and of what they see, `podium.models.flops`' counts, in units of a token's share
of the matrices: attention makes long sequences dearer than short ones, so rows of equal tokens are not of equal work.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

SPREAD = 0.04
"""Rows are equal enough when the least has this much less work than the most."""
FEW = 8  # completions of a row, up to which two at a time are tried
ROUNDS = 4  # moves for each completion of a step, at most: enough in every case that was seen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens that a sample takes in a row, and tokens of the prompt that it shares."""

    group: int
    shown: int  # tokens of the prompt that completions share
    own: int  # tokens


class Row:
    """Completions by group, with the tokens and the work of them all."""

    def __init__(self, pair_cost: float) -> None:
        """`pair_cost`: work of a token that sees another, in those units."""
        self.pair_cost = pair_cost
        self.groups: dict[int, dict[int, Lengths]] = {}
        self.tokens, self.work = 0, 0.0

    def cost(self, each: Lengths, *, present: bool) -> tuple[int, float]:
        """Tokens and work that a completion adds where its prompt is already present, or where it is not."""
        tokens, pairs = each.own, each.own * each.shown + each.own * (each.own + 1) // 2
        if not present:
            tokens, pairs = tokens + each.shown, pairs + each.shown * (each.shown + 1) // 2
        return tokens, tokens + self.pair_cost * pairs

    def add(self, index: int, each: Lengths) -> None:
        """Add a completion."""
        tokens, work = self.cost(each, present=each.group in self.groups)
        self.groups.setdefault(each.group, {})[index] = each
        self.tokens, self.work = self.tokens + tokens, self.work + work

    def remove(self, index: int, each: Lengths) -> None:
        """Remove a completion."""
        own = self.groups[each.group]
        del own[index]
        if not own:
            del self.groups[each.group]
        tokens, work = self.cost(each, present=bool(own))
        self.tokens, self.work = self.tokens - tokens, self.work - work

    def gain(self, each: Lengths, without: Lengths | None = None) -> tuple[int, float]:
        """Tokens and work that a completion would add once another is gone."""
        left = len(self.groups.get(each.group, ())) - (without is not None and without.group == each.group)
        return self.cost(each, present=left > 0)

    def loss(self, each: Lengths) -> tuple[int, float]:
        """Tokens and work that would go with a completion."""
        return self.cost(each, present=len(self.groups[each.group]) > 1)

    def completions(self) -> Iterator[tuple[int, Lengths]]:
        """All of them, in a fixed order."""
        for own in self.groups.values():
            yield from own.items()


def balance(
    packed: list[list[int]], lengths: Mapping[int, Lengths], *, rows: int, row_tokens: int, pair_cost: float
) -> list[list[int]]:
    """The same completions in `rows` rows of nearly equal work, none with more tokens than a row holds.

    A completion that leaves its group takes a copy of the prompt along, which counts. Where sequences are too long and
    too few to be made equal, rows are as equal as single moves and exchanges make them.

    Args:
        packed: completions of each row, in rows where they fit; those of a group in one row lie together.
        lengths: of each completion.
        rows: how many rows to make; at least `len(packed)`.
        row_tokens: the most that a row holds.
        pair_cost: work of a token that sees another, in units of a token's share of the matrices.
    """
    starts = [[Row(pair_cost) for _ in range(rows)] for _ in range(2)]
    for row, indices in zip(starts[1], packed, strict=False):
        for index in indices:
            row.add(index, lengths[index])
    if not _spread(packed, lengths, starts[0], row_tokens):
        del starts[0]
    even = (start for start in starts if _even_out(start, ROUNDS * len(lengths), row_tokens))
    found = next(even, None) or min(starts, key=lambda rows: max((row.work for row in rows), default=0.0))
    return [[index for index, _ in row.completions()] for row in found]


def _even_out(rows: list[Row], most: int, row_tokens: int) -> bool:
    """Move and exchange completions up to `most` times while it helps; return whether rows are equal enough then."""
    for _ in range(most):
        order = sorted(rows, key=lambda row: row.work)
        if order[-1].work - order[0].work <= SPREAD * order[-1].work:
            return True
        if not _improve(order, row_tokens):
            return False
    return False


def _spread(packed: list[list[int]], lengths: Mapping[int, Lengths], rows: list[Row], row_tokens: int) -> bool:
    """Put what is together of a group into the row of least work that has room, the most first; whether all fit."""
    parts: dict[tuple[int, int], list[int]] = {}
    for row, indices in enumerate(packed):
        for index in indices:
            parts.setdefault((row, lengths[index].group), []).append(index)
    for part in sorted(parts.values(), key=lambda part: -sum(lengths[index].own for index in part)):
        size = lengths[part[0]].shown + sum(lengths[index].own for index in part)
        row = min((row for row in rows if row.tokens + size <= row_tokens), key=lambda row: row.work, default=None)
        if row is None:
            return False
        for index in part:
            row.add(index, lengths[index])
    return True


def _improve(order: list[Row], row_tokens: int) -> bool:
    """One move or exchange between the row of most work, or the one of least, and another; whether there was one."""
    most, least = order[-1], order[0]
    pairs = [(most, other) for other in order[:-1]] + [(other, least) for other in reversed(order[1:-1])]
    for find in (_best_change, _best_double_change):
        for heavy, light in pairs:
            if (change := find(heavy, light, row_tokens)) is not None:
                _exchange(heavy, light, *change)
                return True
    return False


Items = tuple[tuple[int, Lengths], ...]


def _exchange(heavy: Row, light: Row, given: Items, taken: Items) -> None:
    """Give some completions of one row to another, and take some of its."""
    for item in given:
        heavy.remove(*item)
    for item in taken:
        light.remove(*item)
        heavy.add(*item)
    for item in given:
        light.add(*item)


def _best_double_change(heavy: Row, light: Row, row_tokens: int) -> tuple[Items, Items] | None:
    """As `_best_change`, with up to two completions each way; only of rows of few, where a single one is much."""
    own, others = list(heavy.completions()), list(light.completions())
    if max(len(own), len(others)) > FEW:
        return None
    best, change = (1 - SPREAD / 8) * (heavy.work - light.work), None
    highest = heavy.work
    for many, few in itertools.product((1, 2), (0, 1, 2)):
        for given, taken in itertools.product(itertools.combinations(own, many), itertools.combinations(others, few)):
            _exchange(heavy, light, given, taken)
            difference = abs(heavy.work - light.work)
            fits = max(heavy.tokens, light.tokens) <= row_tokens and max(heavy.work, light.work) < highest
            _exchange(light, heavy, given, taken)
            if fits and difference < best:
                best, change = difference, (given, taken)
    return change


def _best_change(heavy: Row, light: Row, row_tokens: int) -> tuple[Items, Items] | None:
    """What to give to the lighter row, and perhaps take from it, so that they are most alike; None: nothing helps."""
    best, change = (1 - SPREAD / 8) * (heavy.work - light.work), None
    for given in heavy.completions():
        lost_tokens, lost = heavy.loss(given[1])
        for taken in (None, *light.completions()):
            back = (0, 0.0) if taken is None else light.loss(taken[1])
            won = light.gain(given[1], None if taken is None else taken[1])
            returned = (0, 0.0) if taken is None else heavy.gain(taken[1], given[1])
            if light.tokens + won[0] - back[0] > row_tokens:
                continue
            if heavy.tokens + returned[0] - lost_tokens > row_tokens:
                continue
            works = (heavy.work - lost + returned[1], light.work + won[1] - back[1])
            difference = abs(works[0] - works[1])
            if difference < best and max(works) < heavy.work:
                best, change = difference, ((given,), () if taken is None else (taken,))
    return change
