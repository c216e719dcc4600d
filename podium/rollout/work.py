"""What an engine has in flight: completions, where they stand, and the decode call whose tokens nobody has read."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import jax

from podium.config.schema import RolloutConfig
from podium.config.sizes import cache_pages, prompt_buckets, slot_sizes
from podium.rollout.device import Device
from podium.rollout.draft import Draft, TextDecoder
from podium.rollout.lanes import Fill, Lane, Row
from podium.rollout.programs import Drawn
from podium.rollout.request import Completion, Finished, Key, Request, RolloutStats, SamplingParams
from podium.rollout.scheduler import Scheduler


class NonFiniteError(ValueError):
    """The model's logits are not numbers; the message says for which request, and from which layer on."""


class Made(NamedTuple):
    """What a decode call made in a row."""

    draft: Draft
    stay: int
    """Which of the completion's stays in slots it was."""
    first: bool
    """Whether a token came before the steps."""
    finite: bool
    tokens: list[int]
    logprobs: list[float]
    full_logprobs: list[float]


class Call(NamedTuple):
    """A decode call whose tokens the host has not read."""

    drawn: Drawn
    steps: jax.Array
    rows: dict[int, tuple[Draft, int, bool]]
    """Draft, stay and first of `Made`, by row."""

    def read(self) -> tuple[int, list[Made]]:
        """The steps that it ran, and what it made; waits for it."""
        drawn, steps = jax.device_get((self.drawn, self.steps))
        made = []
        for row, (draft, stay, first) in self.rows.items():
            begin = 0 if first else 1
            columns = slice(begin, begin + int(drawn.counts[row]))
            arrays = (x[row, columns].tolist() for x in (drawn.tokens, drawn.logprobs, drawn.full_logprobs))
            made.append(Made(draft, stay, first, bool(drawn.finite[row]), *arrays))
        return int(steps), made


def known(drafts: Mapping[Key, Draft], key: Key) -> Draft:
    """A completion that is not let go. Raises ValueError where there is no such."""
    if key not in drafts:
        raise ValueError(f"completion {key.completion} of request {key.request} is not known: cancelled, or ended")
    return drafts[key]


def parked(drafts: Mapping[Key, Draft], key: Key) -> Draft:
    """A completion that is parked. Raises ValueError where it is not."""
    draft = known(drafts, key)
    if draft.lane.state != "parked":
        raise ValueError(f"completion {key.completion} of request {key.request} is {draft.lane.state}, not parked")
    return draft


class Work:
    """What is in flight: completions, their places, and the call that is not read yet."""

    def __init__(self, config: RolloutConfig, device: Device, tokenizer: TextDecoder, shards: int) -> None:
        self.config, self.device, self.tokenizer = config, device, tokenizer
        self.scheduler = Scheduler(
            slots=slot_sizes(config, shards),
            num_pages=cache_pages(config, shards),
            page_tokens=config.page_tokens,
            rows=config.prefill_rows,
            chunks=prompt_buckets(config.max_prompt_tokens),
            shards=shards,
        )
        self.drafts: dict[Key, Draft] = {}
        self.finished: list[Finished] = []
        self.submitted = 0
        self.version = 0
        """Of the weights."""
        self.stats = RolloutStats(slots=config.slots)
        self.call: Call | None = None

    def submit(self, request: Request) -> int:
        """Queue a request's completions that have not ended; its number."""
        prompt, number, unfinished = request.prompt, self.submitted, request.unfinished
        sizes = {"completions": request.completions, "limit": len(prompt) + request.sampling.max_new_tokens}
        begun = {index: 0 if made is None else len(made.tokens) for index, made in unfinished.items()}
        lanes = self.scheduler.submit(number, prompt=len(prompt), begun=begun, **sizes)
        self.submitted += 1
        for lane in lanes:
            self.open(lane, prompt, request.sampling, seed=request.seed, keep=request.keep)
            if (made := unfinished[lane.index]) is not None:
                self.drafts[Key(number, lane.index)].go_on(made)
        self.count(prompt_tokens=0 if request.begun else len(prompt))
        return number

    def withdraw(self, key: Key) -> Completion:
        """Forget a completion that has not ended; what there is of it."""
        completion = self._completion(known(self.drafts, key))
        self.cancel(key)
        return completion

    def extend(self, key: Key, ledger: Sequence[int], sampling: SamplingParams, *, seed: int, keep: bool) -> None:
        """Queue the next turn of a parked completion, whose tokens are `ledger` by now."""
        draft, limit = self.drafts[key], len(ledger) + sampling.max_new_tokens
        self.scheduler.resume(draft.lane, tokens=len(ledger) - len(draft.ledger), limit=limit)
        self.open(draft.lane, ledger, sampling, seed=seed, keep=keep)

    def open(self, lane: Lane, ledger: Sequence[int], sampling: SamplingParams, *, seed: int, keep: bool) -> None:
        """Begin a turn of a completion behind these tokens."""
        key = Key(lane.group, lane.index)
        self.drafts[key] = Draft(
            key=key, lane=lane, sampling=sampling, seed=seed, keep=keep, ledger=list(ledger), begin=len(ledger)
        )

    def restart(self) -> None:
        """Nothing in the cache counts from now on."""
        self.read()
        self.scheduler.restart()

    def clear(self) -> None:
        """Forget everything."""
        for key in list(self.drafts):
            self.cancel(key)
        self.call, self.finished = None, []

    def take_stats(self) -> RolloutStats:
        """What was counted since the last time that this was asked."""
        stats, counts = self.stats, self.scheduler.take_counts()
        self.stats = RolloutStats(slots=self.config.slots)
        return dataclasses.replace(stats, **dataclasses.asdict(counts))

    def count(self, **counts: float) -> None:
        """Add to the statistics."""
        self.stats = self.stats.then(RolloutStats(**counts))  # pyright: ignore[reportArgumentType]

    def park(self, key: Key) -> None:
        """Take a completion out of its slot or the queue, unless it has ended or is parked."""
        draft = known(self.drafts, key)
        self.read()
        if draft.finish_reason is None and draft.lane.state != "parked":
            self.scheduler.park(draft.lane)

    def resume(self, key: Key) -> None:
        """Queue a completion again. Raises ValueError where its turn has ended, or it runs."""
        draft = parked(self.drafts, key)
        if draft.finish_reason is not None:
            raise ValueError(f"completion {key.completion} of request {key.request} has ended; extend it")
        self.scheduler.resume(draft.lane, tokens=0, limit=draft.lane.limit)

    def cancel(self, key: Key) -> None:
        """Forget a completion, if it is known."""
        if (draft := self.drafts.pop(key, None)) is not None:
            self.scheduler.retire(draft.lane)

    def prefill(self) -> dict[int, Row]:
        """Plan a look and give the device what comes before its decode call; the rows of that, by number."""
        if self.scheduler.wants_size():
            self.read()
            self.scheduler.resize()
            self.device.resize(self.scheduler.size)
        look = self.scheduler.plan(self.config.refill_steps)
        for extend in look.extends:
            self.device.extend(extend, [_tokens(self, fill) for fill in extend.fills])
        if look.copies:
            self.device.copy(look.copies)
        return {row.row: row for row in look.rows}

    def of(self, rows: Mapping[int, Row]) -> dict[int, Draft]:
        """The completions in the rows of a decode call."""
        return {number: self.drafts[Key(row.lane.group, row.lane.index)] for number, row in rows.items()}

    def given_out(self, rows: Mapping[int, Row], drawn: Drawn, steps: jax.Array) -> None:
        """A decode call was given out; take what the one before it drew."""
        given = {number: (draft, draft.lane.stay, rows[number].first) for number, draft in self.of(rows).items()}
        before, self.call = self.call, Call(drawn, steps, given)
        self._take(before)

    def read(self) -> None:
        """Wait for the call that is not read, and take what it drew."""
        call, self.call = self.call, None
        self._take(call)

    def _take(self, call: Call | None) -> None:
        """Add what a call drew to the drafts, and let those go that have ended."""
        if call is None:
            return
        ran, made = call.read()
        decoded = sum(len(each.tokens) - each.first for each in made)
        self.count(decode_steps=ran, slot_steps=ran * len(call.drawn.counts), decoded_tokens=decoded)
        for draft, stay, first, finite, tokens, logprobs, full in made:
            if draft.lane.stay != stay or draft.lane.state != "running":
                continue  # it was parked, cancelled or preempted since
            if not finite:
                _fail(self, draft)
            taken = draft.take(tokens, logprobs, full, self.tokenizer, version=self.version) if tokens else 0
            self.scheduler.advance(draft.lane, tokens=taken, most=self.config.refill_steps + first)
            if draft.finish_reason is not None:
                self._finish(draft)

    def _finish(self, draft: Draft) -> None:
        self.finished.append(Finished(draft.key, self._completion(draft)))
        if draft.keep:
            self.scheduler.park(draft.lane)
        else:
            self.cancel(draft.key)

    def _completion(self, draft: Draft) -> Completion:
        completion = draft.completion(self.tokenizer)
        self.count(completion_tokens=len(completion.tokens) - draft.before)
        return completion


def _tokens(work: Work, fill: Fill) -> list[int]:
    """The tokens of a prefill row; those of a prompt are any of its completions'."""
    index = fill.owner.index if isinstance(fill.owner, Lane) else work.scheduler.member(fill.owner)
    return work.drafts[Key(fill.owner.group, index)].ledger[fill.start : fill.start + fill.count]


def _fail(work: Work, draft: Draft) -> NoReturn:
    """Raise what is wrong with the model; keys and values that are no numbers go with the rest of the cache."""
    work.cancel(draft.key)
    work.call = None
    work.scheduler.restart()
    work.device.forget()
    raise NonFiniteError(work.device.nonfinite(draft))
