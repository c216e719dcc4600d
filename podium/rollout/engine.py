"""Generates completions with the current policy: continuous batching over slots and pages.

The host decides which sequence runs in which slot (`scheduler`) and where a completion ends (`sequence`); the device
runs programs of fixed shapes (`programs`). A decode call may be issued before the previous call's tokens are read, so
that the device does not wait for the host. A request's tokens depend only on its prompt, settings and seed: each row is
computed independently, and its random numbers derive from seed, completion index and position, whatever the slot, the
pages and the other sequences. Log-probabilities may differ by 1e-5 in float32 between program sizes.
"""

import time
from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from podium.rollout.answer import TextDecoder
from podium.rollout.cache_layout import make_scheduler
from podium.rollout.engine_device import DrawnRows, EngineDevice, PrefilledRows
from podium.rollout.request import (
    CallCounts,
    Completion,
    Drawing,
    Finished,
    Key,
    PromptScores,
    Request,
    RolloutStats,
    SamplingParams,
)
from podium.rollout.scheduler import DecodeRow, Fill
from podium.rollout.sequence import (
    LONGEST,
    Sequence,
    check_sampling,
    check_tokens,
    sequences_of,
)

if TYPE_CHECKING:
    from podium.sharding import Params

OnGroup = Callable[[int, list[Completion]], None]
OnPoll = Callable[[], None]
Enough = Callable[[list[bool]], bool]


class NonFiniteError(ValueError):
    """The model's logits are NaN or infinite; the message names the request and the first layer with such values."""


class _Prefilled(NamedTuple):
    """A prefill call whose experts and scores the host has not read yet."""

    fills: tuple[Fill, ...]
    read: Callable[[], PrefilledRows]


class _DecodeCall(NamedTuple):
    """A decode call whose tokens the host has not read yet, with the prefill calls before it."""

    prefilled: tuple[_Prefilled, ...]
    rows: tuple[DecodeRow, ...]
    read: Callable[[], DrawnRows]


class RolloutEngine:
    """Answers requests with the most recently loaded policy."""

    def __init__(self, device: EngineDevice, tokenizer: TextDecoder | None) -> None:
        """Start without work.

        Args:
            device: holds weights and cache, and runs the calls; a `podium.rollout.device.Device`, or a simulated one.
            tokenizer: finds stop strings and the model's end-of-sequence tokens; None: completions end by length or a
                request's stop tokens, and have no text.

        Raises:
            ValueError: the cache cannot hold one sequence.
        """
        self.device = device
        self.config = device.config
        self.tokenizer = tokenizer
        self._scheduler = make_scheduler(device.config, device.shards, device.model.num_cells)
        device.resize(self._scheduler.size)
        self._sequences: dict[Key, Sequence] = {}
        self._finished: list[Finished] = []
        self._submitted = 0
        self._version = 0
        self._unread: _DecodeCall | None = None
        self._counts = CallCounts(slots=self.config.slots)
        self._prompt_tokens = self._completion_tokens = 0

    # Weights.

    def load(self, params: "Params", version: int = 0) -> None:
        """Copy these weights and answer with them; the originals may be donated afterwards.

        Active completions continue with the new weights: their tokens stay, their keys and values are recomputed, and
        new tokens are tagged with `version`.
        """
        self._forget_cache()
        self._version = version
        self.device.load(params)

    def unload(self) -> None:
        """Free the memory of weights and cache; `load` makes the engine usable again."""
        self._forget_cache()
        self.device.unload()

    def warm_up(self) -> None:
        """Compile all programs now instead of at first use. Must be called while no sequence waits or runs."""
        assert not self._scheduler.busy, "programs are warmed up before there is work"
        self.device.warm_up(self._scheduler.chunks, self._scheduler.sizes, self.tokenizer)
        self.device.resize(self._scheduler.size)

    # Completions, one by one.

    def submit(self, request: Request) -> int:
        """Queue a request and return its number, which together with a completion's index forms the completion's `Key`.

        Raises:
            ValueError: the request exceeds the engine's shapes.
            RuntimeError: no weights are loaded.
        """
        prompt, sampling = request.prompt, request.sampling
        self._check(prompt, sampling, self.config.prompt_tokens, "rollout.max_prompt_tokens")
        if len(prompt) + sampling.max_new_tokens > self.config.longest:
            raise ValueError(
                f"prompt has {len(prompt)} tokens and max_new_tokens is {sampling.max_new_tokens}: together more than"
                f" {self.config.longest}, {LONGEST}; raise that, or ask for less"
            )
        if request.score_prompt and (request.completions > 1 or request.begun or request.ledgers):
            raise ValueError("score_prompt needs a single completion without begun or ledgers; ask for one")
        if request.completions < 1:
            raise ValueError(f"completions is {request.completions}; it must be at least 1")
        sequences = sequences_of(
            request, self._submitted, choices=self.device.model.choices, choice_format=self.device.model.choice_format
        )
        for index in request.ledgers:
            self._check_turn(request.ledgers[index], sampling)
        self._scheduler.submit(prompt, sequences)
        self._submitted += 1
        self._sequences |= {sequence.key: sequence for sequence in sequences}
        if not (request.begun or request.ledgers):
            self._prompt_tokens += len(prompt)
        return self._submitted - 1

    def step(self) -> None:
        """Run one step: admission, prefill, and one decode call of `refill_steps` steps.

        Raises NonFiniteError if the model's logits are NaN or infinite; the completion is dropped.
        """
        device, counts, begun = self.device, self._counts, time.perf_counter()
        compiled = device.num_compiled()
        rows, filled = self._prefill()
        if not device.overlap:
            device.wait()
        prefilled = time.perf_counter()
        if rows:
            call = _DecodeCall(filled, rows, device.decode(rows, self.tokenizer))
            before, self._unread = self._unread, call
            self._read(before)
        if not (rows and device.overlap):
            self._read_all()
        if not rows:
            self._read_prefilled(filled)
        ended = time.perf_counter()
        counts.compilations += device.num_compiled() - compiled
        counts.prefill_s += prefilled - begun
        counts.decode_s += ended - prefilled
        counts.generate_s += ended - begun

    def poll(self) -> list[Finished]:
        """The completions and turns that ended since the last call, in the order in which they ended."""
        return self._take_finished()

    def extend(
        self, key: Key, tokens: Iterable[int], sampling: SamplingParams, *, seed: int, keep: bool = False
    ) -> None:
        """Generate the next turn of a parked completion, after appending `tokens`; `poll` returns the turn.

        Raises ValueError if the completion is not parked, or would exceed the engine's shapes.
        """
        sequence, new = self._parked(key), list(tokens)
        self._check_turn((*sequence.tokens, *new), sampling)
        sequence.begin_turn(new, sampling, seed=seed, keep=keep)
        self._scheduler.resume(sequence)

    def park(self, key: Key) -> None:
        """Take a completion out of its slot or the queue until `resume` or `extend`.

        Does nothing if the completion has ended or is parked already. Raises ValueError if the completion is unknown:
        cancelled, or ended and polled.
        """
        sequence = self._known(key)
        self._read_all()
        if sequence.state in ("waiting", "running"):
            self._scheduler.park(sequence)

    def resume(self, key: Key) -> None:
        """Continue a parked completion in mid-turn. Raises ValueError if the turn has ended, or if the completion is
        not parked.
        """
        sequence = self._parked(key)
        if sequence.finish_reason is not None:
            raise ValueError(f"the turn of {_name(key)} has ended; extend it")
        self._scheduler.resume(sequence)

    def cancel(self, key: Key) -> None:
        """Drop a completion in any state; `poll` will not return the completion, even if it has ended.

        Does nothing if the completion is unknown.
        """
        self._finished = [finished for finished in self._finished if finished.key != key]
        if (sequence := self._sequences.pop(key, None)) is not None:
            self._scheduler.retire(sequence)

    def withdraw(self, keys: Iterable[Key]) -> dict[Key, Completion]:
        """Drop completions, and return the tokens drawn in their current turns so far; a turn may just have ended.

        To continue a completion that has not ended, submit it again (`Request.begun`). Raises ValueError if a
        completion is unknown.
        """
        self._read_all()
        ended = dict(self._finished)
        drawn: dict[Key, Completion] = {}
        for key in keys:
            sequence = self._known(key)
            drawn[key] = ended[key] if key in ended else self._completion(sequence)
            self.cancel(key)
        return drawn

    def ledger(self, key: Key) -> tuple[int, ...]:
        """All tokens of a completion: prompt, earlier turns, and those generated so far. Raises ValueError if
        unknown.
        """
        return tuple(self._known(key).tokens)

    def drawn(self, key: Key, begin: int = 0) -> Drawing:
        """The tokens of a completion's current turn that have been read so far, from index `begin` on. Raises
        ValueError if the completion is unknown.

        These tokens are final: text after a stop string is cut off before `step` returns.
        """
        sequence = self._known(key)
        return Drawing(sequence.drawn[begin:], sequence.logprobs[begin:])

    @property
    def busy(self) -> bool:
        """Whether `step` has any work."""
        return self._scheduler.busy or self._unread is not None

    @property
    def keys(self) -> list[Key]:
        """Keys of all known completions: active, parked, or ended but not polled."""
        return list(self._sequences)

    @property
    def pages_used(self) -> int:
        """Number of cache pages in use, including those of parked completions."""
        return self._scheduler.pages.used

    def stats(self) -> RolloutStats:
        """Counts and seconds since the last call of `stats`."""
        found = RolloutStats(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            calls=self._counts,
            scheduled=self._scheduler.take_counts(),
        )
        self._counts = CallCounts(slots=self.config.slots)
        self._prompt_tokens = self._completion_tokens = 0
        return found

    # Many requests at once.

    def generate(
        self,
        requests: Iterable[Request],
        on_group: OnGroup | None = None,
        on_poll: OnPoll = lambda: None,
        enough: Enough | None = None,
    ) -> tuple[list[list[Completion]], RolloutStats]:
        """Complete all requests; returns their completions in the requests' order, and statistics.

        Other completions of the engine are unaffected: parked ones stay parked, active ones share the slots, and
        finished ones wait for `poll`.

        Args:
            requests: any number; they share the slots.
            on_group: called with a request's index and its completions as soon as all of them have ended.
            on_poll: called before every step; if it raises, generation ends and the requests are dropped.
            enough: called before every step with a flag per request that says whether it is complete; returning True
                ends the call early.

        Raises:
            ValueError: a request exceeds the engine's shapes.
            RuntimeError: no weights are loaded.
        """
        self.stats()
        answers = _Answers(list(requests), on_group)
        try:
            for index, request in enumerate(answers.requests):
                if request.begun and not answers.missing[index]:
                    continue  # it has all its tokens
                try:
                    answers.indices[self.submit(request)] = index
                except ValueError as error:
                    raise ValueError(f"request {index}: {error}") from None
            while not (enough or all)([not missing for missing in answers.missing]):
                on_poll()
                self.step()
                answers.take(self._take_finished(answers.indices))
            if answers.unfinished():
                self._read_all()  # tokens drawn with these weights
                answers.take(self._take_finished(answers.indices))
            for key, completion in self.withdraw(answers.unfinished()).items():
                answers.made[answers.indices[key.request]][key.completion] = completion
        except BaseException:
            for key in [key for key in self._sequences if key.request in answers.indices]:
                self.cancel(key)
            if not self._scheduler.busy:
                self._unread = None
            raise
        return [answers.in_order(index) for index in range(len(answers.made))], self.stats()

    # Inside.

    def _known(self, key: Key) -> Sequence:
        """Look up a completion. Raises ValueError if unknown."""
        if key not in self._sequences:
            raise ValueError(f"{_name(key)} is unknown: it was cancelled, or has ended")
        return self._sequences[key]

    def _parked(self, key: Key) -> Sequence:
        """Look up a parked completion. Raises ValueError if the completion is unknown or not parked."""
        sequence = self._known(key)
        if sequence.state != "parked":
            raise ValueError(f"{_name(key)} is {sequence.state}, not parked")
        return sequence

    def _check(self, tokens: tuple[int, ...], sampling: SamplingParams, room: int, rule: str) -> None:
        """Check a context. Raises ValueError if it exceeds the engine's shapes, RuntimeError without weights."""
        if not self.device.loaded:
            raise RuntimeError("the rollout engine has no parameters; call load(params) first")
        vocab = self.device.model.vocab
        check_sampling(sampling, self.tokenizer, longest=self.config.longest, vocab=vocab)
        check_tokens(tokens, vocab, room, rule)

    def _check_turn(self, tokens: tuple[int, ...], sampling: SamplingParams) -> None:
        """Raise ValueError if a conversation with these tokens leaves no room for another turn."""
        room = self.config.longest - sampling.max_new_tokens
        rule = f"the room that {LONGEST} leaves for the next turn"
        self._check(tokens, sampling, room, rule)
        self._scheduler.pages.check(len(tokens) + sampling.max_new_tokens)

    def _forget_cache(self) -> None:
        self._read_all()
        self._scheduler.restart()

    def _prefill(self) -> tuple[tuple[DecodeRow, ...], tuple[_Prefilled, ...]]:
        """Plan a step and issue all calls before its decode call; returns the rows of the decode call, and the prefill
        calls.
        """
        scheduler = self._scheduler
        if scheduler.wants_size():
            self._read_all()
            scheduler.resize()
            self.device.resize(scheduler.size)
        plan = scheduler.plan(self.config.refill_steps)
        filled: list[_Prefilled] = []
        for call in plan.prefills:
            if (read := self.device.prefill(call)) is not None:
                filled.append(_Prefilled(call.fills, read))
        if plan.copies:
            self.device.copy(plan.copies)
        if plan.cell_copies:
            self.device.copy_cells(plan.cell_copies)
        return plan.rows, tuple(filled)

    def _read_all(self) -> None:
        """Wait for the pending decode call, if any, and append its tokens."""
        call, self._unread = self._unread, None
        self._read(call)

    def _read(self, call: _DecodeCall | None) -> None:
        """Append a call's tokens to its sequences, and finish those that are complete."""
        if call is None:
            return
        self._read_prefilled(call.prefilled)
        drawn, counts = call.read(), self._counts
        for row, sequence, releases, _, first in call.rows:
            count = drawn.counts[row]
            counts.decoded_tokens += count - first
            if sequence.releases != releases:
                continue  # the sequence was parked, cancelled or preempted since
            if not drawn.finite[row]:
                self._fail(sequence)
            if count:
                begin = 0 if first else 1
                columns = slice(begin, begin + count)
                sequence.append(
                    drawn.tokens[row][columns],
                    drawn.logprobs[row][columns],
                    drawn.full_logprobs[row][columns],
                    self.tokenizer,
                    version=self._version,
                    choices=None if drawn.choices is None else drawn.choices[row, columns],
                )
            self._scheduler.advance(sequence, most=self.config.refill_steps + first)
            if sequence.finish_reason is not None:
                self._finish(sequence)
        counts.decode_steps += drawn.steps
        counts.slot_steps += drawn.steps * len(drawn.counts)

    def _read_prefilled(self, calls: Iterable[_Prefilled]) -> None:
        """Record the experts and scores of prefilled tokens in the sequences that contain these tokens."""
        for fills, read in calls:
            found = read()
            if found.choices is not None:
                self._record_routes(fills, found.choices)
            if found.scores is not None:
                self._record_scores(fills, found.scores)

    def _record_scores(self, fills: Iterable[Fill], scores: PromptScores) -> None:
        for fill in fills:
            if isinstance(fill.owner, Sequence):
                found = PromptScores(
                    logprobs=scores.logprobs[fill.row, : fill.count],
                    best_tokens=scores.best_tokens[fill.row, : fill.count],
                    best_logprobs=scores.best_logprobs[fill.row, : fill.count],
                )
                fill.owner.record_scores(fill.start + 1, found)

    def _record_routes(self, fills: Iterable[Fill], choices: np.ndarray) -> None:
        groups = self._scheduler.queues.groups
        for fill in fills:
            owners: Iterable[Sequence] = ()
            if isinstance(fill.owner, Sequence):
                owners = (fill.owner,)
            elif (group := groups.get(fill.owner.request)) is not None:
                owners = group.sequences.values()  # they share the prompt's rows but the last
            for owner in owners:
                if owner.routes is not None:
                    owner.routes.record(fill.start + 1, choices[fill.row, : fill.count])

    def _finish(self, sequence: Sequence) -> None:
        """Free the slot of a sequence whose turn has ended, and queue its completion for `poll`."""
        self._finished.append(Finished(sequence.key, self._completion(sequence)))
        if sequence.keep:
            self._scheduler.park(sequence)
        else:
            self._scheduler.retire(sequence)
            sequence.state = "finished"

    def _take_finished(self, requests: Container[int] | None = None) -> list[Finished]:
        """Remove and return the finished completions of these requests (None: all); drop those not marked `keep`."""
        taken: list[Finished] = []
        left: list[Finished] = []
        for each in self._finished:
            (taken if requests is None or each.key.request in requests else left).append(each)
        self._finished = left
        for key, _ in taken:
            sequence = self._sequences.get(key)
            if sequence is not None and sequence.state == "finished":
                del self._sequences[key]
                sequence.state = "gone"
        return taken

    def _completion(self, sequence: Sequence) -> Completion:
        self._completion_tokens += len(sequence.drawn) - sequence.carried
        return sequence.completion(self.tokenizer)

    def _fail(self, sequence: Sequence) -> NoReturn:
        """Drop the sequence and the whole cache, then raise NonFiniteError."""
        self.cancel(sequence.key)
        self._unread = None
        self._scheduler.restart()
        self.device.forget()
        raise NonFiniteError(self.device.nonfinite(sequence))


class _Answers:
    """Collects the completions of some requests as they end."""

    def __init__(self, requests: list[Request], on_group: OnGroup | None) -> None:
        self.requests, self._on_group = requests, on_group
        self.indices: dict[int, int] = {}
        """Index of each submitted request, by its engine number."""
        self.missing = [set(request.unfinished) for request in requests]
        self.made = [dict(request.begun) for request in requests]

    def unfinished(self) -> list[Key]:
        """Keys of the submitted completions that have not ended."""
        return [Key(number, each) for number, index in self.indices.items() for each in self.missing[index]]

    def take(self, finished: Iterable[Finished]) -> None:
        """Add completions that have ended; calls `on_group` for each request that is now complete."""
        for key, completion in finished:
            index = self.indices[key.request]
            self.made[index][key.completion] = completion
            self.missing[index].remove(key.completion)
            if not self.missing[index] and self._on_group is not None:
                self._on_group(index, self.in_order(index))

    def in_order(self, index: int) -> list[Completion]:
        """A request's completions, by index."""
        return [completion for _, completion in sorted(self.made[index].items())]


def _name(key: Key) -> str:
    return f"completion {key.completion} of request {key.request}"
