"""A third kind of worker process, beside graders and environments: it searches with a model's regular expressions.

Written with nothing but the documentation of `podium.tasks.workers`. An expression may hang, and holds the
interpreter's lock meanwhile, so that no thread could be given up.
"""

import re
from typing import NamedTuple

from podium.tasks.workers import Lost, Parent, WorkerPool


class Search(NamedTuple):
    pattern: str
    text: str


def main(connection: int, lifeline: int) -> None:
    parent = Parent(connection, lifeline)
    flags, limit_s = parent.setup()
    parent.serve(lambda search: search_of(search, flags), limit_s=lambda search: limit_s)


def search_of(search: Search, flags: int) -> str | None:
    found = re.search(search.pattern, search.text, flags)
    return found and found[0]


def matches(pool: WorkerPool, *searches: Search) -> list[str | None]:
    """What each expression finds; None for one that finds nothing, is none, or takes too long."""
    return [None if isinstance(each, Lost) or each.problem else each.value for each in pool.answers(searches)]


def make_pool(*, workers: int = 2, limit_s: float = 1.0) -> WorkerPool:
    return WorkerPool("searches", "expression_worker", setup=(re.IGNORECASE, limit_s), workers=workers)
