"""Sends requests to the environments of conversations, and receives their answers. No jax.

With `rollout.reproducible`, the schedule of steps with carry-over does not depend on clocks: an answer is accepted
after a fixed number of engine steps, however fast it arrived. If several hosts decode together, each holds the
environments of its own prompts, and they exchange the environments' answers.
"""

import time
from collections.abc import Callable, Iterator

from podium.rollout.engine import OnPoll
from podium.sampling.conversations.live import Live
from podium.sampling.feed import EncodedPrompt, request_seed
from podium.tasks.conversation import Turn
from podium.tasks.conversations.conversing import Answered
from podium.tasks.conversations.environments import Environments

POLL_S = 0.5
"""Longest wait for environments in seconds between calls of `on_poll`."""
POLL_TOGETHER_S = 0.05
"""Longest such wait in seconds if hosts decode together, because each host also waits for the others' answers."""
STEPS_TOGETHER = 4
"""Engine steps between exchanges of hosts that decode together."""
REPLY_STEPS = 2
"""Engine steps between a request to an environment and the acceptance of its answer, with `rollout.reproducible`."""


Exchange = Callable[[list[Answered]], list[Answered]]
"""Sends the answers of this host's environments to all hosts; returns the answers of all hosts, in the same order
everywhere."""
Received = tuple[Live, Answered]
Place = tuple[int, int, int]
"""Identifies a conversation of a run: index of its prompt, its index within the prompt, and the attempt."""


class EnvironmentClient:
    """Talks to the environments of a host for the conversations in progress."""

    def __init__(self, environments: Environments, *, own_seeds: bool, exchange: Exchange | None = None) -> None:
        """Does not send requests yet.

        Args:
            environments: the environments of this host.
            own_seeds: whether each environment of a prompt has its own seed, instead of the prompt's.
            exchange: set if hosts decode together; all hosts must then make the same calls.
        """
        self.environments = environments
        self._own_seeds = own_seeds
        self._exchange = exchange
        self._numbers = 0
        self.live = dict[int, Live]()
        """Conversations in progress, by their number in `Environments`."""
        self.early = dict[int, Answered]()
        """Answers that have not been accepted yet, by conversation, including conversations that are set aside."""
        self.aside = dict[Place, int]()
        """Numbers of the conversations that continue, with their environments, in the next carrying call."""
        self.kept = dict[Place, object]()
        """Environments of ended conversations, kept for reward functions until the prompt's other conversations end."""
        self.steps = 0
        """Engine steps since `begin`."""
        self.idle_s = 0.0
        """Seconds since `begin` in which the engine was idle, waiting for environments."""

    def begin(self) -> None:
        """Reset the counts of steps and waiting time."""
        self.steps, self.idle_s = 0, 0.0

    def forget(self) -> None:
        """End the environments of conversations that were set aside; each conversation gets a new one when it
        continues.
        """
        for number in self.aside.values():
            self.environments.drop(number)
        self.aside, self.kept, self.early = {}, {}, {}

    # Asking.

    def open(self, live: Live, prompt: EncodedPrompt, *, here: bool) -> None:
        """Open a new environment for a conversation, on this host if `here`."""
        self._numbers += 1
        live.number = self._numbers
        self.live[live.number] = live
        if here:
            seed = request_seed(prompt.seed, "environment", live.sample if self._own_seeds else 0)
            self.environments.open(live.number, prompt.prompt.task, prompt.prompt.prompt, seed, apart=live.apart)
        self.asked(live)

    def say(self, live: Live, turn: Turn) -> None:
        """Pass an answer of the model to its environment."""
        if self.environments.holds(live.number):
            self.environments.say(live.number, turn)
        self.asked(live)

    def grade(self, live: Live) -> None:
        """Ask for the final reward."""
        if self.environments.holds(live.number):
            self.environments.grade(live.number)
        self.asked(live)

    def asked(self, live: Live) -> None:
        """Record that an answer is awaited from now on."""
        live.due = self.steps + REPLY_STEPS

    def drop(self, number: int) -> None:
        """End an environment, and ignore its answers."""
        self.early.pop(number, None)
        self.environments.drop(number)

    # Receiving.

    def take(self, *, busy: bool, paced: bool, on_poll: OnPoll) -> Iterator[Received]:
        """Yield the answers to accept before an engine step; waits for an answer if the engine is not `busy` or an
        answer is due.

        This includes what `receive` yields. `paced`: answers are accepted when they are due, instead of when they
        arrive.
        """
        early, start = self.early, time.perf_counter()
        if paced:
            while any(live.number not in early for live in self._due):
                on_poll()
                yield from self.receive(self.patience)
            ready = sorted(self._due, key=lambda live: live.place)
        elif self._exchange is not None and busy and self.steps % STEPS_TOGETHER:
            return
        else:
            waits = not busy and bool(self.live) and not any(number in early for number in self.live)
            yield from self.receive(self.patience if waits else 0.0)
            ready = [self.live[number] for number in early if number in self.live]
        if paced or not busy:
            self.idle_s += time.perf_counter() - start
        for live in ready:
            yield live, early.pop(live.number)

    def receive(self, wait_s: float) -> Iterator[Received]:
        """Wait for answers of the environments, and yield those that are accepted at once.

        These are losses of processes, and answers during a replay; the others are kept in `early`. All hosts that
        decode together yield the same.
        """
        found: list[Answered] = []
        while (answered := self.environments.next(wait_s)) is not None:
            wait_s = 0.0
            found.append(answered)
        if self._exchange is not None:
            found = self._exchange(found)
        for answered in found:
            live = self.live.get(answered.number)
            if live is not None and (answered.kind == "lost" or live.replay is not None):
                yield live, answered
            else:
                self.early[answered.number] = answered

    @property
    def patience(self) -> float:
        """Seconds to wait for an answer between calls of `on_poll`."""
        return POLL_S if self._exchange is None else POLL_TOGETHER_S

    @property
    def _due(self) -> list[Live]:
        """With `rollout.reproducible`, the conversations whose answers are due now."""
        return [live for live in self.live.values() if live.due is not None and live.due <= self.steps]
