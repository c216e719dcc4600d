"""The workload of a step: lengths of prompts and completions, and the calls and steps that their rollout takes.

Lengths are drawn from a distribution or from an earlier run. The engine itself then answers requests of these lengths
on a simulated device. For conversations, the number of turns and the tokens and seconds of replies are given too: a
`Clock` says how long calls take, so that replies arrive while other completions are decoded.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from podium.config.schema import RolloutConfig
from podium.config.sizes import check_split
from podium.files import read_lines
from podium.observe.run_dir import LENGTHS
from podium.plan.request.simulated_device import END, TOKEN, Clock, SimulatedDevice, Work
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Completion, Key, Request, SamplingParams
from podium.sampling.conversations.carry import chosen

# GSM8K's 7,473 training questions under SmolLM2's tokenizer and chat template with the task's system prompt: 38 tokens
# of template, then a lognormal with median 57 and log-deviation 0.35 (percentiles 5, 50, 95, 99: 71, 94, 139, 175).
TEMPLATE_TOKENS = 38
QUESTION_MEDIAN = 57
QUESTION_SIGMA = 0.35
PLACEMENT = {"layout": "auto", "group_chips": None, "dtype": "auto"}
"""Settings of the rollout that its scheduler does not read, at their defaults: machines with as many shards share
simulations."""
STEPS_BEFORE, STEPS_COUNTED = 2, 3  # simulated and counted steps if completions are carried over between steps
# Completions have mean 200 under their cap and log-deviation 0.6; half of the variance is between questions.
COMPLETION_MEAN, COMPLETION_SIGMA = 200, 0.6
MOST_CALLS = 256
"""Decode calls that the longest completion is simulated with. Longer ones are simulated with longer calls, of which
each completion wastes half of one at its end: at most 0.2 % of the longest one's steps."""


class Replies(NamedTuple):
    """The environment's part in conversations."""

    turns: int
    """Answers in each conversation."""
    tokens: int
    """Tokens of each reply, with what the chat template adds."""
    seconds: float
    """Time that each reply takes; replies to different conversations overlap."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SequenceLengths:
    """Lengths in tokens of the prompts and completions of one step; equal if all lengths are."""

    prompts: np.ndarray  # [N] int
    completions: np.ndarray  # [N, G] int, of conversations: answers and replies together
    replies: Replies | None = None
    """None: each prompt gets a single answer, without replies."""
    demonstrations: np.ndarray | None = None  # [M, 2] int, prompts and texts of demonstrations; None if absent
    greedy: np.ndarray | None = None  # [N] int, of greedy completions, which no update trains on; None if absent

    @property
    def decoded(self) -> "SequenceLengths":
        """The lengths of all decoded completions; a greedy completion is the last one of its prompt."""
        if self.greedy is None:
            return self
        whole = np.concatenate([self.completions, self.greedy[:, None]], axis=1)
        return dataclasses.replace(self, completions=whole, greedy=None)

    @functools.cached_property
    def drawn(self) -> np.ndarray:
        """Tokens that the model draws, [N, G]."""
        replies = self.replies
        return self.completions if replies is None else self.completions - (replies.turns - 1) * replies.tokens

    @functools.cached_property
    def _content(self) -> tuple[object, ...]:
        arrays = (self.prompts, self.completions, self.demonstrations, self.greedy)
        return self.replies, *(None if x is None else (x.shape, x.tobytes()) for x in arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SequenceLengths) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of one rollout, as the engine counts it."""

    prefill_calls: dict[int, int] = dataclasses.field(default_factory=dict[int, int])  # by chunk length
    prefill_tokens: int = 0  # tokens prefilled: the prompts', and more if sequences are prefilled again
    copy_calls: int = 0
    copied_pages: int = 0
    decodes: dict[int, tuple[int, int, float]] = dataclasses.field(default_factory=dict[int, tuple[int, int, float]])
    """By slots of the decode program: calls, steps, and the longest context of any slot, averaged over steps."""
    occupied_slot_steps: int = 0  # slots whose step drew a token that is kept, summed over steps
    mean_context: float = 0.0  # tokens that an occupied slot attends to, its own included, on average
    prompt_tokens: int
    completion_tokens: int
    completions: int
    preempted: int = 0
    staleness: float = 0.0
    """Updates since the first token of a step's prompts, on average."""
    rebuilt_tokens: int = 0
    """Tokens that are prefilled again because parked conversations lost their pages."""
    pages_peak: int = 0
    """Most pages in use at once, those of parked conversations included."""
    seconds: float = 0.0
    """Seconds of the rollout, by the clock that it was simulated with."""
    idle_s: float = 0.0
    """The seconds in which all conversations wait for their environments."""

    @property
    def decode_steps(self) -> int:
        """Decode steps of all program sizes."""
        return sum(steps for _, steps, _ in self.decodes.values())

    @property
    def slot_utilisation(self) -> float:
        """Share of the decode programs' rows that drew a token that is kept."""
        rows = sum(slots * steps for slots, (_, steps, _) in self.decodes.items())
        return self.occupied_slot_steps / rows if rows else 0.0

    def slots_busy(self, slots: int) -> float:
        """Share of all slots that drew a token that is kept, averaged over steps."""
        return self.occupied_slot_steps / (self.decode_steps * slots) if self.decode_steps else 0.0


def draw_lengths(
    source: str, rollout: RolloutConfig, *, prompts: int, completions: int, seed: int = 0
) -> SequenceLengths:
    """Draw the lengths of one step's prompts and completions; deterministic in `seed`.

    Args:
        source: `gsm8k`; `fixed:N` for completions of N tokens with GSM8K's prompts; or the path of a run or of its
            lengths.jsonl, whose groups are drawn, with replacement only if there are too few. Followed by
            `,turns:T,reply:R,seconds:S` for conversations of T answers of such lengths, with replies of R tokens
            after S seconds; a run's completions are those of whole conversations already.
        rollout: gives the longest prompt and the longest completion.
        prompts: N.
        completions: G, per prompt.
        seed: seed of the draw.

    Raises:
        ValueError: the source is none of these, or has completions that are too long.
    """
    source, _, talk = source.partition(",turns:")
    if talk:
        alone = draw_lengths(source, rollout, prompts=prompts, completions=completions, seed=seed)
        return _conversing(alone, _replies(talk), rollout, whole=source != "gsm8k" and not source.startswith("fixed:"))
    rng = np.random.default_rng(seed)
    if source == "gsm8k":
        return SequenceLengths(
            prompts=_gsm8k_prompts(rng, prompts, rollout.prompt_tokens),
            completions=_gsm8k_completions(rng, prompts, completions, rollout.max_new_tokens),
        )
    if (fixed := re.fullmatch(r"fixed:(\d+)", source)) is not None:
        tokens, longest = int(fixed[1]), rollout.max_new_tokens
        if not 1 <= tokens <= longest:
            raise ValueError(f"lengths {source!r}: must be 1 to rollout.max_new_tokens, {longest}; raise that")
        return SequenceLengths(
            prompts=_gsm8k_prompts(rng, prompts, rollout.prompt_tokens),
            completions=np.full((prompts, completions), tokens),
        )
    path = Path(source)
    if not path.exists():
        raise ValueError(f"lengths {source!r}: no such file; write gsm8k, fixed:N, or the path of a run")
    found = _from_run(rng, path / LENGTHS if path.is_dir() else path, prompts, completions)
    longest = rollout.max_new_tokens if rollout.max_episode_tokens is None else rollout.longest - 1
    return SequenceLengths(
        prompts=np.clip(found.prompts, 1, rollout.prompt_tokens),
        completions=np.clip(found.completions, 1, longest),
    )


def _replies(text: str) -> Replies:
    """Read `T,reply:R,seconds:S`. Raises ValueError if it is not of that form."""
    found = re.fullmatch(r"([1-9]\d*),reply:([1-9]\d*),seconds:(\d+(?:\.\d+)?)", text)
    if found is None:
        raise ValueError(
            f"lengths ',turns:{text}': write LENGTHS,turns:T,reply:R,seconds:S, as gsm8k,turns:4,reply:40,seconds:2"
        )
    return Replies(turns=int(found[1]), tokens=int(found[2]), seconds=float(found[3]))


def _conversing(alone: SequenceLengths, replies: Replies, rollout: RolloutConfig, *, whole: bool) -> SequenceLengths:
    """Conversations with answers of these lengths; with `whole`, the lengths are those of whole conversations.

    Raises ValueError if they do not fit in `rollout.max_episode_tokens`.
    """
    given = (replies.turns - 1) * replies.tokens
    drawn = alone.completions - given if whole else replies.turns * alone.completions
    room = rollout.longest - alone.prompts[:, None] - given
    if room.min() < replies.turns:
        rule = f"rollout.max_episode_tokens {rollout.longest} has no room for {replies.turns} answers"
        raise ValueError(f"{rule} and {replies.turns - 1} replies of {replies.tokens} tokens; raise it")
    return dataclasses.replace(alone, completions=np.clip(drawn, replies.turns, room) + given, replies=replies)


def longer_prompts(lengths: SequenceLengths, tokens: int) -> SequenceLengths:
    """The lengths of a step with all prompts longer by `tokens`, for a role that reads other prompts than the
    policy.
    """
    return dataclasses.replace(lengths, prompts=lengths.prompts + tokens, demonstrations=None)


def no_rollout(lengths: SequenceLengths) -> Workload:
    """The workload of a step that learns from completions in the data: nothing is generated."""
    return Workload(
        prompt_tokens=int(lengths.prompts.sum()),
        completion_tokens=int(lengths.drawn.sum()),
        completions=lengths.completions.size,
    )


def simulate_rollout(
    lengths: SequenceLengths,
    rollout: RolloutConfig,
    *,
    shards: int = 1,
    overlap: bool = False,
    clock: Clock | None = None,
    most_calls: int = MOST_CALLS,
) -> Workload:
    """Simulate the engine's work for these lengths, with slots split over `shards`: on a simulated device.

    With `overlap`, a decode call is issued before the previous one is read, as the engine does on TPU and GPU. `clock`
    times calls, so that replies come in time; None: replies come at once. Completions that take more than `most_calls`
    decode calls are simulated with fewer, longer ones.

    Raises:
        ValueError: slots or prefill rows do not divide over the shards, or the cache is too small.
    """
    check_split(rollout, shards)
    lengths = lengths.decoded
    at_once = -(-int(lengths.completions.max()) // (most_calls * rollout.refill_steps))
    if clock is not None:
        device = SimulatedDevice(rollout, shards, overlap=overlap, calls=at_once, clock=clock)
        return _Rollouts(lengths, device, reply_s=lengths.replies.seconds if lengths.replies else 0.0).run()
    return _simulated(lengths, rollout.model_copy(update=PLACEMENT), shards, overlap=overlap, at_once=at_once)


@functools.lru_cache(maxsize=64)
def _simulated(
    lengths: SequenceLengths, rollout: RolloutConfig, shards: int, *, overlap: bool, at_once: int
) -> Workload:
    """Simulate without a clock, with `at_once` decode calls as one."""
    device = SimulatedDevice(rollout, shards, overlap=overlap, calls=at_once, clock=Clock({}, {}))
    return _Rollouts(lengths, device, reply_s=0.0).run()


def _gsm8k_prompts(rng: np.random.Generator, prompts: int, longest: int) -> np.ndarray:
    """Draw N prompt lengths; returns [N]."""
    questions = rng.lognormal(np.log(QUESTION_MEDIAN), QUESTION_SIGMA, prompts)
    return np.clip(np.rint(TEMPLATE_TOKENS + questions), 1, longest).astype(int)


def _gsm8k_completions(rng: np.random.Generator, N: int, G: int, cap: int) -> np.ndarray:
    """Draw the lengths of G completions for each of N prompts; returns [N, G]."""
    shared, own = rng.standard_normal((N, 1)), rng.standard_normal((N, G))
    logs = _log_median(cap) + COMPLETION_SIGMA * (shared + own) / np.sqrt(2)
    return np.clip(np.rint(np.exp(logs)), 1, cap).astype(int)


@functools.cache
def _log_median(cap: int) -> float:
    """Log of the median for which the mean after cutting at `cap` is COMPLETION_MEAN; uncut if `cap` is smaller."""
    uncut = float(np.log(COMPLETION_MEAN) - COMPLETION_SIGMA**2 / 2)
    if cap <= COMPLETION_MEAN:
        return uncut
    draws = COMPLETION_SIGMA * np.random.default_rng(0).standard_normal(20_000)
    low, high = uncut, uncut + 10
    for _ in range(40):
        middle = (low + high) / 2
        below = np.minimum(np.exp(middle + draws), cap).mean() < COMPLETION_MEAN
        low, high = (middle, high) if below else (low, middle)
    return low


def _from_run(rng: np.random.Generator, path: Path, N: int, G: int) -> SequenceLengths:
    """Draw N groups of an earlier run's lengths."""
    groups = [group for number, record in enumerate(read_lines(path), 1) for group in _groups(record, path, number)]
    if not groups:
        raise ValueError(f"lengths {path}: the file contains no lengths; name a run that has done a step")
    drawn = [groups[i] for i in rng.choice(len(groups), N, replace=len(groups) < N)]
    prompts = np.array([prompt for prompt, _ in drawn])
    completions = np.array([rng.choice(own, G, replace=len(own) < G) for _, own in drawn])
    return SequenceLengths(prompts=prompts, completions=completions)


def _groups(record: dict[str, object], path: Path, number: int) -> list[tuple[int, Sequence[int]]]:
    """The prompts of one line of lengths.jsonl: each prompt's length with its completions' lengths."""
    prompts, completions = record.get("prompt_lengths"), record.get("completion_lengths")
    if isinstance(prompts, list) and isinstance(completions, list) and prompts and completions:
        size, rest = divmod(len(completions), len(prompts))
        if not rest:
            return [(prompt, completions[i * size : (i + 1) * size]) for i, prompt in enumerate(prompts)]
    raise ValueError(
        f"{path}:{number}: expected as many completion_lengths for each of prompt_lengths, as podium train writes them"
    )


@dataclasses.dataclass(kw_only=True, eq=False)
class _Live:
    """A completion, or a conversation, that has not ended."""

    number: int
    """Number of its prompt in the run."""
    index: int
    """Index among its prompt's completions."""
    context: int
    """Tokens before the current turn."""
    turn: int = 0
    key: Key | None = None
    """Key of the completion in the engine; None if the engine does not have it."""
    drawn: Completion | None = None
    """The tokens that an earlier step has drawn of the current turn."""
    replying: bool = False


class _Rollouts:
    """The rollouts of several steps: the engine on a simulated device, with all lengths known in advance."""

    def __init__(self, lengths: SequenceLengths, device: SimulatedDevice, *, reply_s: float) -> None:
        """Prepare without starting a step. Environments reply after `reply_s` seconds of the device's clock."""
        self._lengths, self._device = lengths, device
        self._engine = RolloutEngine(device, None)
        self._reply_s = reply_s
        self._live: dict[int, dict[int, _Live]] = {}
        """Completions that have not ended, by the prompt's number in the run and by index; empty for a complete
        prompt."""
        self._drawing: dict[Key, _Live] = {}
        """The completions that the engine is drawing."""
        self._replies: collections.deque[tuple[float, _Live]] = collections.deque()
        """Conversations that wait for a reply, with the time of its arrival, soonest first, since all replies take
        equally long."""
        self._first: dict[int, int] = {}
        """Step in which a prompt's first token was drawn."""
        self._begun = self._step = 0
        self._staleness: list[int] = []
        self._idle_s = 0.0

    def run(self) -> Workload:
        """One step's work; with carry-over, the average of several steps once the number in flight has settled."""
        lengths, device = self._lengths, self._device
        carries = self._room > len(lengths.prompts)
        for _ in range(STEPS_BEFORE if carries else 0):
            self._answer()
        self._engine.stats()
        device.work = work = Work()
        self._staleness, self._idle_s, began = [], 0.0, device.now
        steps = STEPS_COUNTED if carries else 1
        for _ in range(steps):
            self._answer()
        stats = self._engine.stats()
        return Workload(
            prefill_calls={chunk: -(-calls // steps) for chunk, calls in work.prefills.items()},
            prefill_tokens=stats.scheduled.prefill_tokens // steps,
            copy_calls=-(-work.copies // steps),
            copied_pages=work.copied // steps,
            decodes={
                size: (-(-calls // steps), -(-ran // steps), total / max(ran, 1))
                for size, (calls, ran, total) in work.decodes.items()
            },
            occupied_slot_steps=work.occupied // steps,
            mean_context=work.attended / work.occupied if work.occupied else 0.0,
            prompt_tokens=int(lengths.prompts.sum()),
            completion_tokens=int(lengths.drawn.sum()),
            completions=lengths.completions.size,
            preempted=stats.scheduled.preempted // steps,
            staleness=float(np.mean(self._staleness)),
            rebuilt_tokens=stats.scheduled.rebuilt_tokens // steps,
            pages_peak=stats.scheduled.pages_peak,
            seconds=(device.now - began) / steps,
            idle_s=self._idle_s / steps,
        )

    @property
    def _room(self) -> int:
        """Prompts that are answered at the same time."""
        return int(self._device.config.in_flight * len(self._lengths.prompts) + 1e-6)

    def _answer(self) -> None:
        """One step's rollout: submit new and unfinished completions, then run the engine until enough prompts are
        complete.
        """
        while len(self._live) < self._room:
            prompt = int(self._lengths.prompts[self._begun % len(self._lengths.prompts)])
            self._live[self._begun] = {
                index: _Live(number=self._begun, index=index, context=prompt)
                for index in range(self._lengths.completions.shape[1])
            }
            self._begun += 1
        alike: dict[tuple[int, int, int], list[_Live]] = {}
        for live in (each for group in self._live.values() for each in group.values() if not each.replying):
            alike.setdefault((live.number, live.turn, self._most(live)), []).append(live)
        for lives in alike.values():
            self._submit(lives, int(self._lengths.prompts[lives[0].number % len(self._lengths.prompts)]))
        first = [self._first.get(number) for number in self._live]
        stuck = False
        while (taken := self._chosen(first)) is None:
            self._take_replies(waits=stuck or not self._engine.busy)
            began = self._device.now
            self._engine.step()
            finished = self._engine.poll()
            for key, completion in finished:
                self._end_turn(self._drawing.pop(key), completion)
            stuck = self._device.now == began and not finished
        self._put_aside()
        numbers = list(self._live)
        for index in taken:
            del self._live[numbers[index]]
            self._staleness.append(self._step - self._first.pop(numbers[index]))
        self._step += 1

    def _chosen(self, first: Sequence[int | None]) -> list[int] | None:
        """The prompts that form the step; None if too few are complete yet."""
        per_step = len(self._lengths.prompts)
        return chosen(
            first,
            [not group for group in self._live.values()],
            per_step,
            per_step=per_step,
            version=self._step,
            max_staleness=self._device.config.max_staleness,
        )

    def _put_aside(self) -> None:
        """Withdraw unfinished completions from the engine."""
        for key, completion in self._engine.withdraw(list(self._drawing)).items():
            live = self._drawing.pop(key)
            if completion.finish_reason is not None:
                self._end_turn(live, completion)
                continue
            live.key, live.drawn = None, completion
            if len(completion.tokens):
                self._first.setdefault(live.number, self._step)
        for _, live in self._replies:
            if live.key is not None:
                self._engine.cancel(live.key)
                live.key = None

    # Turns.

    def _whole(self, live: _Live) -> int:
        """The length of a completion, or of a conversation's current answer, in tokens."""
        drawn = int(self._lengths.drawn[live.number % len(self._lengths.prompts), live.index])
        replies = self._lengths.replies
        if replies is None:
            return drawn
        size, longer = divmod(drawn, replies.turns)
        return size + (live.turn < longer)

    def _most(self, live: _Live) -> int:
        """The largest number of tokens that the current turn may have."""
        return min(
            max(self._device.config.max_new_tokens, self._whole(live)), self._device.config.longest - live.context
        )

    def _submit(self, lives: Sequence[_Live], prompt: int) -> None:
        """Submit completions of a prompt that continue in the same way, and share the first tokens of their
        contexts.
        """
        request = Request(
            prompt=(TOKEN,) * prompt,
            sampling=self._sampling(lives[0]),
            seed=0,
            completions=self._lengths.completions.shape[1],
            keep=self._lengths.replies is not None,
            begun={live.index: live.drawn for live in lives if live.drawn is not None},
            ledgers={live.index: (TOKEN,) * live.context for live in lives if live.context > prompt},
        )
        number = self._engine.submit(request)
        for live in lives:
            self._draw(live, Key(number, live.index))

    def _sampling(self, live: _Live) -> SamplingParams:
        return SamplingParams(max_new_tokens=self._most(live), stop_tokens=(END,))

    def _draw(self, live: _Live, key: Key) -> None:
        """Record that the engine is drawing a turn."""
        live.key, live.drawn, live.replying = key, None, False
        self._drawing[key] = live
        self._device.lengths[key] = min(self._whole(live), self._most(live))

    def _take_replies(self, *, waits: bool) -> None:
        """Begin the next turns of conversations whose replies have arrived.

        With `waits`, wait for a reply first, because the engine has nothing to do, or lacks pages until these
        conversations end.
        """
        replies, device = self._lengths.replies, self._device
        if replies is None or not self._replies:
            return
        if waits:
            soonest = self._replies[0][0]
            self._idle_s += max(0.0, soonest - device.now)
            device.now = max(device.now, soonest)
        while self._replies and self._replies[0][0] <= device.now:
            _, live = self._replies.popleft()
            live.context += replies.tokens
            if live.key is None:  # the last step ended before the reply arrived
                self._submit([live], 1)
                continue
            self._engine.extend(live.key, (TOKEN,) * replies.tokens, self._sampling(live), seed=0, keep=True)
            self._draw(live, live.key)

    def _end_turn(self, live: _Live, completion: Completion) -> None:
        """Let a conversation wait for its reply; remove it, or a completion, at its end."""
        replies = self._lengths.replies
        live.turn += 1
        live.context += len(completion.tokens)
        self._first.setdefault(live.number, self._step)
        if replies is None or live.turn == replies.turns:
            del self._live[live.number][live.index]
            if live.key is not None:
                self._engine.cancel(live.key)
            return
        live.replying = True
        self._replies.append((self._device.now + self._reply_s, live))
