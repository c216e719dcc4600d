"""Balances the work of rows: moves completions between rows until their work is nearly equal. No jax.

A row's work counts its tokens and its query-key pairs, as in `podium.models.flops`, in units of one token's matrix
work. Attention makes long sequences more expensive than short ones, so rows with equal tokens do not have equal work.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

SPREAD = 0.04
"""Rows count as balanced when the least work is within this share of the most."""
FEW = 8  # rows of up to this many completions also try moving two at a time
ROUNDS = 4  # maximum moves per completion of a step; sufficient in every case observed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """The tokens of a sample in a row, and of the prompt it shares."""

    group: int
    shown: int  # tokens of the prompt that the group's completions share
    own: int  # tokens of the sample itself


class Row:
    """The completions of a row by group, with their total tokens and work."""

    def __init__(self, pair_cost: float) -> None:
        """`pair_cost`: work of a query-key pair, in units of one token's matrix work."""
        self.pair_cost = pair_cost
        self.groups: dict[int, dict[int, Lengths]] = {}
        self.tokens, self.work = 0, 0.0

    def cost(self, each: Lengths, *, present: bool) -> tuple[int, float]:
        """Tokens and work that a completion adds, depending on whether its prompt is already `present` in the row."""
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
        """Tokens and work that a completion would add, after removing `without`."""
        left = len(self.groups.get(each.group, ())) - (without is not None and without.group == each.group)
        return self.cost(each, present=left > 0)

    def loss(self, each: Lengths) -> tuple[int, float]:
        """Tokens and work that removing a completion would save."""
        return self.cost(each, present=len(self.groups[each.group]) > 1)

    def completions(self) -> Iterator[tuple[int, Lengths]]:
        """All completions, in a deterministic order."""
        for own in self.groups.values():
            yield from own.items()


def balance(
    packed: list[list[int]], lengths: Mapping[int, Lengths], *, rows: int, row_tokens: int, pair_cost: float
) -> list[list[int]]:
    """Distribute completions over `rows` rows of nearly equal work, within the token limit of a row.

    A completion that leaves its group needs another copy of the prompt, which counts as work. If sequences are too long
    and too few to balance, the result is as balanced as single moves and exchanges can make it.

    Args:
        packed: completions of each row, in rows that fit; a group's completions in one row are adjacent.
        lengths: lengths of each completion.
        rows: number of rows to make; at least `len(packed)`.
        row_tokens: maximum tokens per row.
        pair_cost: work of a query-key pair, in units of one token's matrix work.
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
    """Move and exchange completions up to `most` times while the balance improves; returns whether the rows are
    balanced.
    """
    for _ in range(most):
        order = sorted(rows, key=lambda row: row.work)
        if order[-1].work - order[0].work <= SPREAD * order[-1].work:
            return True
        if not _improve(order, row_tokens):
            return False
    return False


def _spread(packed: list[list[int]], lengths: Mapping[int, Lengths], rows: list[Row], row_tokens: int) -> bool:
    """Move each group's part of a row, largest first, to the least loaded row with room; returns whether all
    parts fit.
    """
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
    """Make one move or exchange between the heaviest or lightest row and another; returns whether one was made."""
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
    """Move `given` from the heavy row to the light one, and `taken` back."""
    for item in given:
        heavy.remove(*item)
    for item in taken:
        light.remove(*item)
        heavy.add(*item)
    for item in given:
        light.add(*item)


def _best_double_change(heavy: Row, light: Row, row_tokens: int) -> tuple[Items, Items] | None:
    """Like `_best_change`, with up to two completions each way; only for rows of few completions, for which moving one
    is too coarse.
    """
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
    """The completions to give to the lighter row, and to take from it, for the best balance; None if nothing helps."""
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
