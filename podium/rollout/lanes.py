"""The sequences that an engine knows, what they have, and what the device is to do for them: plain data, no jax."""

import collections
import dataclasses
from typing import Literal


@dataclasses.dataclass(kw_only=True, eq=False)
class Shared:
    """A prompt's pages on one shard."""

    group: int
    shard: int
    pages: list[int]
    end: int
    """Tokens that are prefilled: the prompt's, and once its part page is gone those of its whole pages."""
    whole: int
    """Leading pages that are full; the one behind them, if any, is copied."""
    filled: int = 0
    users: int = 0
    """Sequences whose first pages these are."""

    @property
    def missing(self) -> int:
        """Tokens that are yet to be prefilled."""
        return max(0, self.end - self.filled)


@dataclasses.dataclass(kw_only=True, eq=False)
class Lane:
    """A sequence: a completion from its prompt on, over all its turns."""

    group: int
    index: int
    """Of the completion in its group."""
    length: int
    """Tokens that the host knows."""
    limit: int
    """Tokens at which its turn ends."""
    state: Literal["waiting", "running", "parked", "gone"] = "waiting"
    shard: int = -1
    """Whose pages it has; -1: none."""
    slot: int = -1
    """Of its shard."""
    pages: list[int] = dataclasses.field(default_factory=list)
    origin: Shared | None = None
    """Whose pages come first."""
    filled: int = 0
    """Leading tokens whose keys and values are in its pages once all that is planned has run."""
    ahead: int = 0
    """Tokens that calls may have made which the host has not read."""
    fresh: bool = True
    """Whether a decode call must be told where the sequence stands: it was not in the call before."""
    stay: int = 0
    """Stays in slots that have ended; what a call drew in one of them, unread, is drawn again, and the same."""
    attached: bool = False
    """Whether it had its copy of the prompt's part page."""
    lost: int = 0
    """Tokens that were prefilled or decoded once, and went with its pages."""

    @property
    def missing(self) -> int:
        """Tokens that are yet to be prefilled; a last one alone is not: it enters the cache as those that are drawn."""
        lacking = self.length - self.filled
        return lacking if lacking > 1 else 0

    @property
    def ready(self) -> bool:
        """Whether it can decode."""
        return not self.missing and (self.origin is None or not self.origin.missing)

    @property
    def copies_part(self) -> bool:
        """Whether what its shared whole pages lack of the prompt comes from the prompt's part page."""
        shared = self.origin
        return shared is not None and self.length == shared.end and len(shared.pages) > shared.whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fill:
    """Tokens of a prompt or a sequence to be prefilled in one row of a call, behind those that are."""

    row: int
    owner: Shared | Lane
    pages: tuple[int, ...]
    start: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extend:
    """One prefill call."""

    chunk: int
    fills: tuple[Fill, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy:
    """A page to be copied."""

    shard: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A sequence in a decode call."""

    row: int
    lane: Lane
    fresh: bool
    first: bool
    """Whether prefill has left the state behind its last token, from which the call draws one before its steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """The device's work until the host looks again, in this order."""

    extends: tuple[Extend, ...]
    copies: tuple[Copy, ...]
    rows: tuple[Row, ...]
    """Of the decode call; none: there is no such call."""


@dataclasses.dataclass(kw_only=True)
class Group:
    """The sequences of a request."""

    prompt: int
    """Tokens."""
    lanes: dict[int, Lane]
    shared: dict[int, Shared] = dataclasses.field(default_factory=dict)
    """By shard."""

    @property
    def copied(self) -> bool:
        """Whether all of its sequences had what they copy of the prompt."""
        return all(lane.attached or lane.state == "gone" for lane in self.lanes.values())


@dataclasses.dataclass(kw_only=True)
class Counts:
    """Events since the scheduler was made."""

    pages_peak: int = 0
    prefill_tokens: int = 0
    rebuilt_tokens: int = 0
    """Of the prefilled ones, those whose keys and values had been there before."""
    preempted: int = 0
    """Running sequences that had to give up slot and pages."""
    evicted: int = 0
    """Parked or waiting sequences that had to give up pages."""


class Lanes:
    """All sequences by what they do."""

    def __init__(self) -> None:
        """There are none."""
        self.groups: dict[int, Group] = {}
        self.waiting: collections.deque[Lane] = collections.deque()
        self.running: dict[Lane, None] = {}
        """In the order of their admission."""
        self.parked: dict[Lane, None] = {}
        """Longest parked first."""
        self.counts = Counts()
