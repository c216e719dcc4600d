"""The workload of a step: lengths of prompts and completions, and the calls and steps that their rollout takes.

Lengths are drawn from a distribution or from an earlier run. The engine's own scheduler is then driven with them,
without a model. Of conversations also the number of turns, the tokens of replies and their seconds are given: a `Clock`
says how long calls take, so that replies come while others are decoded.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from podium.config.schema import RolloutConfig
from podium.config.sizes import check_split, steps_at_once
from podium.files import read_lines
from podium.observe.run_dir import LENGTHS
from podium.rollout.kept import make_scheduler
from podium.rollout.request import Key, SamplingParams
from podium.rollout.scheduler import DecodeRow
from podium.rollout.sequence import Sequence as EngineSequence
from podium.train.carry import chosen

# GSM8K's 7,473 training questions under SmolLM2's tokenizer and chat template with the task's system prompt: 38 tokens
# of template, then a lognormal of median 57 and log-deviation 0.35 (percentiles 5, 50, 95, 99: 71, 94, 139, 175).
TEMPLATE_TOKENS = 38
QUESTION_MEDIAN = 57
QUESTION_SIGMA = 0.35
PLACEMENT = {"layout", "group_chips", "dtype"}
"""Settings of the rollout that its scheduler does not read."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceLengths:
    """Lengths in tokens of the prompts and completions of one step."""

    prompts: np.ndarray  # [N] int
    completions: np.ndarray  # [N, G] int, of conversations: answers and replies together
    replies: Replies | None = None
    """None: prompts are answered once."""
    greedy: np.ndarray | None = None  # [N] int, of greedy completions, which no update trains on; None: there are none

    @property
    def decoded(self) -> "SequenceLengths":
        """The lengths of all that is decoded: a greedy completion is the last of its prompt's."""
        if self.greedy is None:
            return self
        whole = np.concatenate([self.completions, self.greedy[:, None]], axis=1)
        return dataclasses.replace(self, completions=whole, greedy=None)

    @property
    def drawn(self) -> np.ndarray:
        """Tokens that the model draws, [N, G]."""
        replies = self.replies
        return self.completions if replies is None else self.completions - (replies.turns - 1) * replies.tokens


class Clock(NamedTuple):
    """How long the engine's calls take, in seconds."""

    prefill_s: Mapping[int, float]
    """A prefill call, by chunk length."""
    decode_s: Mapping[int, float]
    """A decode step, by slots."""

    def seconds(self, chunks: Iterable[int], slots: int, steps: int) -> float:
        """Prefill calls of these chunk lengths, and decode steps; for unknown sizes those of the nearest one."""
        return sum(_nearest(self.prefill_s, chunk) for chunk in chunks) + steps * _nearest(self.decode_s, slots)


def _nearest(seconds: Mapping[int, float], size: int) -> float:
    return seconds[min(seconds, key=lambda known: abs(known - size))] if seconds else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of one rollout, as the engine counts it."""

    prefill_calls: dict[int, int]  # by chunk length
    prefill_tokens: int  # tokens prefilled: the prompts', and more if sequences are prefilled again
    copy_calls: int
    copied_pages: int
    decodes: dict[int, tuple[int, int, float]]
    """By slots of the decode program: calls, steps, and the longest context of any slot, averaged over steps."""
    occupied_slot_steps: int  # slots whose step drew a token that is kept, summed over steps
    mean_context: float  # tokens that an occupied slot attends to, including its own, averaged over slots and steps
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
    """Of the rollout, by the clock that it was simulated with."""
    idle_s: float = 0.0
    """Those in which all conversations wait for their environments."""

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
    """Conversations with answers of these lengths, or of these lengths as a `whole`.

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
    """The lengths of a step whose prompts are all this much longer, as a teacher with prompts of its own reads them."""
    return dataclasses.replace(lengths, prompts=lengths.prompts + tokens)


def no_rollout(lengths: SequenceLengths) -> Workload:
    """The workload of a step that learns from completions in the data: nothing is generated."""
    return Workload(
        prefill_calls={},
        prefill_tokens=0,
        copy_calls=0,
        copied_pages=0,
        decodes={},
        occupied_slot_steps=0,
        mean_context=0.0,
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
    """Simulate the engine's work for these lengths, with slots split over `shards`: its scheduler, without a model.

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
        return _Rollout(lengths, rollout, shards, overlap, at_once, clock).run()
    given = (content(lengths), rollout.model_dump_json(exclude=PLACEMENT))
    simulation = _Simulation(
        content=given, lengths=lengths, rollout=rollout, shards=shards, overlap=overlap, at_once=at_once
    )
    return _simulated(simulation)


def content(lengths: SequenceLengths) -> Hashable:
    """A value that is equal for equal lengths."""
    return tuple((x.shape, x.tobytes()) for x in (lengths.prompts, lengths.completions)), lengths.replies


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Simulation:
    """A simulation without a clock. Several machines whose meshes have as many shards share it."""

    content: Hashable
    """Equal if lengths and settings of the rollout are."""
    lengths: SequenceLengths = dataclasses.field(compare=False)
    rollout: RolloutConfig = dataclasses.field(compare=False)
    shards: int
    overlap: bool
    at_once: int
    """Decode calls that are simulated as one."""


@functools.lru_cache(maxsize=64)
def _simulated(given: _Simulation) -> Workload:
    return _Rollout(given.lengths, given.rollout, given.shards, given.overlap, given.at_once, None).run()


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
        raise ValueError(f"lengths {path}: no lengths in it; name a run that has done a step")
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


class _Rollout:
    """Simulates the engine over one or several steps, with all lengths known in advance."""

    def __init__(
        self,
        lengths: SequenceLengths,
        rollout: RolloutConfig,
        shards: int,
        overlap: bool,
        calls: int,
        clock: Clock | None,
    ) -> None:
        self.lengths = lengths
        self.drawn: list[list[int]] = lengths.drawn.tolist()
        self.clock, self.now = clock, 0.0
        self.turns: collections.Counter[Key] = collections.Counter()
        """Answers that each conversation has completed."""
        self.due: collections.deque[tuple[float, EngineSequence]] = collections.deque()
        """When the replies to parked conversations come, soonest first: all take as long."""
        self.given: collections.Counter[Key] = collections.Counter()
        """Tokens between the prompt and the current answer of conversations that an earlier step left."""
        self.waiting: dict[Key, float] = {}
        """When the replies come that they wait for."""
        self.calls = calls
        """Decode calls of the engine that are simulated as one."""
        self.steps = calls * rollout.refill_steps
        self.overlap = overlap
        self.at_once = steps_at_once(rollout.refill_steps, shards)
        self.scheduler = make_scheduler(rollout, shards)
        self.rollout, self.room = rollout, int(rollout.in_flight * len(lengths.prompts) + 1e-6)
        self.made: dict[int, dict[int, int]] = {}
        """Generated tokens of unfinished completions, by prompt number in the run and completion index."""
        self.first: dict[int, int] = {}
        """Step in which a prompt's first token was drawn."""
        self.left: dict[EngineSequence, int] = {}
        self.unread: list[_Made] = []
        self.begun = self.step = 0
        self.count_anew()

    def count_anew(self) -> None:
        """Reset the counts."""
        self.scheduler.take_counts()
        self.prefills: collections.Counter[int] = collections.Counter()
        self.decodes: dict[int, tuple[int, int, float]] = {}
        self.copies = self.copied = self.occupied = self.attended = 0
        self.idle_s, self.began = 0.0, self.now
        self.staleness: list[int] = []

    def run(self) -> Workload:
        """One step's work; with carry-over, the average of several steps once the number in flight has settled."""
        carries = self.room > len(self.lengths.prompts)
        for _ in range(STEPS_BEFORE if carries else 0):
            self.complete()
        self.count_anew()
        steps = STEPS_COUNTED if carries else 1
        for _ in range(steps):
            self.complete()
        counts = self.scheduler.take_counts()
        return Workload(
            prefill_calls={chunk: -(-calls // steps) for chunk, calls in self.prefills.items()},
            prefill_tokens=counts.prefill_tokens // steps,
            copy_calls=-(-self.copies // steps),
            copied_pages=self.copied // steps,
            decodes={
                size: (-(-calls // steps), -(-ran // steps), total / max(ran, 1))
                for size, (calls, ran, total) in self.decodes.items()
            },
            occupied_slot_steps=self.occupied // steps,
            mean_context=self.attended / self.occupied if self.occupied else 0.0,
            prompt_tokens=int(self.lengths.prompts.sum()),
            completion_tokens=int(self.lengths.drawn.sum()),
            completions=self.lengths.completions.size,
            preempted=counts.preempted // steps,
            staleness=float(np.mean(self.staleness)),
            rebuilt_tokens=counts.rebuilt_tokens // steps,
            pages_peak=counts.pages_peak,
            seconds=(self.now - self.began) / steps,
            idle_s=self.idle_s / steps,
        )

    def complete(self) -> None:
        """Simulate one step's rollout: submit prompts, then run the engine until enough prompts are complete."""
        sampling = SamplingParams(max_new_tokens=self.rollout.max_new_tokens)
        per_step = len(self.lengths.prompts)
        while len(self.made) < self.room:
            self.made[self.begun] = dict.fromkeys(range(self.lengths.completions.shape[1]), 0)
            self.begun += 1
        for number, begun in self.made.items():
            prompt = (0,) * int(self.lengths.prompts[number % len(self.lengths.prompts)])
            sequences = [
                EngineSequence(
                    key=Key(number, index),
                    context=prompt + (0,) * self.given[Key(number, index)],
                    sampling=sampling,
                    seed=0,
                    drawn=[0] * made,
                    keep=self.lengths.replies is not None,
                )
                for index, made in begun.items()
            ]
            self.scheduler.submit(prompt, sequences)
            for sequence in sequences:
                if (reply := self.waiting.get(sequence.key)) is not None:
                    self.scheduler.park(sequence)
                    self.due.append((reply, sequence))
                else:
                    self.left[sequence] = self.whole(sequence) - len(sequence.drawn)
        self.due = collections.deque(sorted(self.due, key=lambda each: each[0]))
        first = [self.first.get(number) for number in self.made]
        while True:
            complete = [not each for each in self.made.values()]
            taken = chosen(
                first,
                complete,
                per_step,
                per_step=per_step,
                version=self.step,
                max_staleness=self.rollout.max_staleness,
            )
            if taken is not None:
                break
            self.take_replies()
            self.engine_step()
        self.read()
        self.waiting = {sequence.key: reply for reply, sequence in self.due}
        for sequence in (*self.left, *(sequence for _, sequence in self.due)):
            number, index = sequence.key
            self.made[number][index] = len(sequence.drawn)
            self.given[sequence.key] = len(sequence.context) - int(self.lengths.prompts[number % per_step])
            self.scheduler.retire(sequence)
        self.left.clear()
        self.due.clear()
        numbers = list(self.made)
        for index in taken:
            del self.made[numbers[index]]
            self.staleness.append(self.step - self.first.pop(numbers[index]))
        self.step += 1

    def whole(self, sequence: EngineSequence) -> int:
        """The final length of a completion, or of a conversation's current answer, in tokens."""
        request, completion = sequence.key
        drawn = self.drawn[request % len(self.drawn)][completion]
        if (replies := self.lengths.replies) is None:
            return drawn
        size, longer = divmod(drawn, replies.turns)
        return size + (self.turns[sequence.key] < longer)

    def take_replies(self) -> None:
        """Begin the next answers of conversations whose replies have come; wait for one if there is nothing to do."""
        replies = self.lengths.replies
        if replies is None or not self.due:
            return
        if not self.scheduler.busy and not self.unread:
            soonest = self.due[0][0]
            self.idle_s += max(0.0, soonest - self.now)
            self.now = max(self.now, soonest)
        sampling = SamplingParams(max_new_tokens=self.rollout.max_new_tokens)
        while self.due and self.due[0][0] <= self.now:
            _, sequence = self.due.popleft()
            sequence.begin_turn([0] * replies.tokens, sampling, seed=0, keep=True)
            self.left[sequence] = self.whole(sequence)
            self.scheduler.resume(sequence)

    def engine_step(self) -> None:
        """One step of the engine."""
        if self.scheduler.wants_size():
            self.read()
            self.scheduler.resize()
        plan = self.scheduler.plan(self.steps)
        self.prefills.update(call.chunk for call in plan.prefills)
        self.copies += bool(plan.copies)
        self.copied += len(plan.copies)
        made = self.decode(plan.rows)
        if self.clock is not None:
            steps = -(-max((each.steps for each in made), default=0) // self.at_once) * self.at_once
            self.now += self.clock.seconds((call.chunk for call in plan.prefills), self.scheduler.size, steps)
        if self.overlap:
            self.read()
        self.unread = made
        if not self.overlap:
            self.read()

    def decode(self, rows: Sequence[DecodeRow]) -> "list[_Made]":
        """One decode call: runs until `refill_steps` are done or every slot has finished."""
        made = [self.drawn_by(row) for row in rows]
        ran = -(-max((each.steps for each in made), default=0) // self.at_once) * self.at_once
        longest = 0
        for row, tokens, steps in made:
            sequence = row.sequence
            visible = self.visible(sequence)
            if steps:
                longest = max(longest, visible + row.first)
            first = row.first and tokens > 0
            self.left[sequence] -= first + steps
            self.occupied += steps
            self.attended += steps * (visible + first) + steps * (steps - 1) // 2
        if any(each.tokens for each in made):
            calls, steps, total = self.decodes.get(self.scheduler.size, (0, 0, 0.0))
            total += ran * (longest + (ran - 1) / 2)
            own = 1 if self.calls == 1 else -(-ran // self.rollout.refill_steps)
            self.decodes[self.scheduler.size] = calls + own, steps + ran, total
        return made

    def drawn_by(self, row: DecodeRow) -> "_Made":
        """What a decode call draws in a row."""
        tokens = min(self.steps + row.first, self.left[row.sequence])
        return _Made(row, tokens, max(0, tokens - row.first))

    def visible(self, sequence: EngineSequence) -> int:
        """Tokens visible to a sequence's next query, its own included."""
        return len(sequence.context) + self.whole(sequence) - self.left[sequence]

    def read(self) -> None:
        """Report a call's tokens to the scheduler; sequences preempted meanwhile will generate theirs again."""
        for row, tokens, _ in self.unread:
            sequence = row.sequence
            if sequence.releases != row.releases:
                if sequence in self.left:
                    self.left[sequence] += tokens
                continue
            sequence.drawn += [0] * tokens
            self.scheduler.advance(sequence, most=self.steps + row.first)
            if tokens:
                self.first.setdefault(sequence.key.request, self.step)
            if len(sequence.drawn) == self.whole(sequence):
                self.end_turn(sequence)
        self.unread = []

    def end_turn(self, sequence: EngineSequence) -> None:
        """Park a conversation until its reply comes; retire it, or a completion, at its end."""
        replies = self.lengths.replies
        del self.left[sequence]
        self.turns[sequence.key] += 1
        if replies is not None and self.turns[sequence.key] < replies.turns:
            self.scheduler.park(sequence)
            self.due.append((self.now + replies.seconds * (self.clock is not None), sequence))
            return
        self.scheduler.retire(sequence)
        del self.made[sequence.key.request][sequence.key.completion]


class _Made(NamedTuple):
    """Tokens drawn in one row of a decode call that the host has not read yet."""

    row: DecodeRow
    tokens: int
    steps: int
    """Tokens drawn by decode steps, excluding the first token of a prompt."""
