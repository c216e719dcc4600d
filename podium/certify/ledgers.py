"""Records what a rollout engine was given of each conversation and what it drew, token by token."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Completion, Key, Request, SamplingParams


class Ledger(NamedTuple):
    """The tokens of a conversation in the engine."""

    tokens: tuple[int, ...]
    drawn: tuple[bool, ...]
    """Whether the engine drew each of them; the others were given to it."""


class Ledgers:
    """The conversations that an engine has dropped, with the tokens that it held last."""

    def __init__(self) -> None:
        """Record nothing yet."""
        self.dropped: list[Ledger] = []
        """The dropped conversations that no later request has continued."""
        self._seen: list[Ledger] = []
        """All that were ever dropped, so that a resumed run can continue them a second time."""
        self._held: dict[Key, Ledger] = {}
        """The known tokens of each conversation in the engine; any tokens after them were drawn."""

    @contextlib.contextmanager
    def recording(self, engine: RolloutEngine) -> Iterator[None]:
        """Record the conversations of `engine` within the context."""
        submit = engine.submit
        extend = engine.extend
        cancel = engine.cancel

        def submitted(request: Request) -> int:
            number = submit(request)
            for index in request.unfinished:
                self._held[Key(number, index)] = self._continued(request, index)
            return number

        def extended(
            key: Key, tokens: Iterable[int], sampling: SamplingParams, *, seed: int, keep: bool = False
        ) -> None:
            new, before = list(tokens), self._drawn(key, engine.ledger(key))
            extend(key, new, sampling, seed=seed, keep=keep)
            self._held[key] = Ledger((*before.tokens, *new), (*before.drawn, *[False] * len(new)))

        def cancelled(key: Key) -> None:
            if key in engine.keys:
                ledger = self._drawn(key, engine.ledger(key))
                self.dropped.append(ledger)
                self._seen.append(ledger)
                del self._held[key]
            cancel(key)

        with contextlib.ExitStack() as stack:
            for name, own in (("submit", submitted), ("extend", extended), ("cancel", cancelled)):
                setattr(engine, name, own)
                stack.callback(delattr, engine, name)
            yield

    def _continued(self, request: Request, index: int) -> Ledger:
        """The ledger with which a completion of a request begins.

        Tokens that it shares with a dropped conversation are drawn or given as they were there. All others count as
        given, even if the request claims that they were drawn.
        """
        begun: Completion | None = request.begun.get(index)
        drawn = () if begun is None else tuple(begun.tokens.tolist())
        tokens = (*request.ledgers.get(index, request.prompt), *drawn)
        before = max(
            (each for each in self._seen if tokens[: len(each.tokens)] == each.tokens),
            key=lambda each: len(each.tokens),
            default=Ledger((), ()),
        )
        if before in self.dropped:
            self.dropped.remove(before)
        return Ledger(tokens, (*before.drawn, *[False] * (len(tokens) - len(before.tokens))))

    def _drawn(self, key: Key, tokens: tuple[int, ...]) -> Ledger:
        """A conversation's ledger so far: its known tokens, and those after them, which were drawn."""
        known = self._held[key]
        return Ledger(
            (*known.tokens, *tokens[len(known.tokens) :]),
            (*known.drawn, *[True] * (len(tokens) - len(known.tokens))),
        )
