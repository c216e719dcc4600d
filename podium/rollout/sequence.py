"""A completion with all its turns: its tokens, its state, its slot and its pages. No jax.

States: waiting for a slot; running in one; parked (on request, or kept after its turn ended); finished (its turn has
ended and the result waits for `poll`); removed. A preempted sequence waits again.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from podium.config.section import LARGEST, SMALLEST
from podium.models.blocks.choices import ChoiceFormat
from podium.rollout.answer import TextDecoder, answer_text
from podium.rollout.recorded_routes import Routes, unknown
from podium.rollout.request import (
    Completion,
    FinishReason,
    Key,
    PromptScores,
    Request,
    SamplingParams,
    ScheduleCounts,
    unscored,
)

MAX_STOP_TOKENS = 8
LONGEST = "rollout.max_episode_tokens (unset: max_prompt_tokens + max_new_tokens)"
"""The setting that limits a sequence's length, as error messages name it."""
State = Literal["waiting", "running", "parked", "finished", "gone"]


@dataclasses.dataclass(kw_only=True, eq=False)
class SharedPrompt:
    """A request's prompt on one shard: its pages, shared by the sequences there."""

    request: int
    tokens: tuple[int, ...]
    shard: int
    pages: list[int]
    end: int
    """Number of tokens to prefill: the whole prompt, or only its full pages once the partial page is freed."""
    full_pages: int
    """Leading pages that sequences share; each sequence gets its own copy of the partial page after them, if any."""
    cell: int | None = None
    """Cell with the fixed-size data after the whole prompt; None if layers store no such data, or the cell is freed."""
    lost: int = 0
    """Tokens that had been prefilled before, by this engine or an earlier one."""
    filled: int = 0
    """Tokens prefilled after all planned calls."""
    users: int = 0
    """Number of sequences that share these pages."""

    @property
    def missing(self) -> int:
        """Number of tokens still to prefill."""
        return max(0, self.end - self.filled)


@dataclasses.dataclass(kw_only=True, eq=False)
class Sequence:
    """A completion, or a conversation of several turns, in the engine."""

    key: Key
    context: tuple[int, ...]
    """Tokens before the current turn: the prompt, earlier turns, replies."""
    sampling: SamplingParams
    seed: int
    keep: bool = False
    """Whether to park the sequence when its turn ends."""
    state: State = "waiting"

    # Drawn in the current turn.
    drawn: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    full_logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    """Weight version of each sampled token."""
    carried: int = 0
    """Tokens of the current turn that were drawn before it was submitted."""
    cut: bool = False
    """Whether the device may have drawn tokens past the end, because a stop string ended the turn."""
    finish_reason: FinishReason | None = None
    stops: tuple[int, ...] | None = None
    """Tokens that end the turn; None until the turn has a token."""
    routes: Routes | None = None
    """Experts of all tokens; None without experts."""
    prompt_scores: PromptScores | None = None
    """Scores of the prompt's tokens, filled in during prefill; None if not requested."""

    # Position in the cache.
    shard: int = -1
    """Shard that holds the sequence's pages; -1: none."""
    slot: int = -1
    """Slot within the shard; -1: none."""
    pages: list[int] = dataclasses.field(default_factory=list)
    cell: int | None = None
    """Index of the cell with the sequence's fixed-size data, such as recurrent states; None if nothing is cached, or no
    cell is needed."""
    shared: SharedPrompt | None = None
    """Prompt whose full pages come before `pages`."""
    filled: int = 0
    """Leading tokens whose keys and values are cached after all planned calls."""
    ahead: int = 0
    """Number of tokens that issued decode calls may sample and that the host has not read."""
    fresh: bool = True
    """Whether the next decode call takes its state from the host, because it was not in the previous call."""
    releases: int = 0
    """How often the sequence's slot was freed. Unread tokens of an earlier occupancy are dropped, and later sampled
    again identically."""
    attached: bool = False
    """Whether the sequence has its copy of the prompt's partial page and cell."""
    lost: int = 0
    """Number of leading tokens whose keys and values were computed before and then dropped."""

    @property
    def tokens(self) -> list[int]:
        """All tokens: context and those drawn in the current turn."""
        return [*self.context, *self.drawn]

    @property
    def length(self) -> int:
        """Number of `tokens`."""
        return len(self.context) + len(self.drawn)

    @property
    def limit(self) -> int:
        """Length in tokens at which the turn must end."""
        return len(self.context) + self.sampling.max_new_tokens

    @property
    def missing(self) -> int:
        """Number of tokens to prefill; 0 if only the last token is missing, which the next decode step adds to the
        cache.
        """
        lacking = self.length - self.filled
        return lacking if lacking > 1 else 0

    @property
    def ready(self) -> bool:
        """Whether the sequence is ready to decode."""
        return not self.missing and (self.shared is None or not (self.shared.missing or self.copies_cell))

    @property
    def copies(self) -> bool:
        """Whether the sequence still needs a copy of the prompt's partial page or cell."""
        shared = self.shared
        if shared is None:
            return False
        part = self.length == shared.end > self.filled and len(shared.pages) > shared.full_pages
        return part or self.copies_cell

    @property
    def copies_cell(self) -> bool:
        """Whether the sequence continues from the prompt's cell and still needs its copy."""
        return self.shared is not None and self.shared.cell is not None and not self.attached

    def begin_turn(self, tokens: list[int], sampling: SamplingParams, *, seed: int, keep: bool) -> None:
        """Append new tokens and start the next turn."""
        self.context = (*self.context, *self.drawn, *tokens)
        self.sampling = sampling.of(self.key.completion)
        self.seed = seed
        self.keep = keep
        self.drawn = []
        self.logprobs = []
        self.full_logprobs = []
        self.versions = []
        self.carried = 0
        self.finish_reason = None
        self.stops = None
        self.cut = False

    def append(
        self,
        tokens: list[int],
        logprobs: list[float],
        full_logprobs: list[float],
        tokenizer: TextDecoder | None,
        *,
        version: int = 0,
        choices: np.ndarray | None = None,
    ) -> None:
        """Append drawn tokens up to the one that ends the turn, and set `finish_reason` then.

        `choices` [n, C] are the experts of the tokens before each of them; None without experts.
        """
        before = len(self.drawn)
        if self.routes is not None and choices is not None:
            self.routes.record(self.length, choices)
        self.drawn += tokens
        self.logprobs += logprobs
        self.full_logprobs += full_logprobs
        self.versions += [version] * len(tokens)
        if self.stops is None:
            self.stops = stop_tokens(self.sampling, tokenizer)
        if self.drawn[-1] in self.stops:
            self.finish_reason = "stop"
        elif len(self.drawn) >= self.sampling.max_new_tokens:
            self.finish_reason = "length"
        if tokenizer is not None:
            self._stop_at_string(before, tokenizer)

    def record_scores(self, first: int, found: PromptScores) -> None:
        """Fill in the scores of the prompt's tokens from index `first` on; scores of later, sampled tokens are
        ignored.
        """
        if self.prompt_scores is None:
            return
        for own, new in zip(self.prompt_scores.arrays, found.arrays, strict=True):
            own[first : first + len(new)] = new[: len(own) - first]

    def completion(self, tokenizer: TextDecoder | None) -> Completion:
        """The current turn so far, as a completion."""
        ended = self.finish_reason is not None
        begin, routes = len(self.context), self.routes
        return Completion(
            tokens=np.array(self.drawn, np.int32),
            sampled_logprobs=np.array(self.logprobs, np.float32),
            full_logprobs=np.array(self.full_logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            text=answer_text(self.drawn, tokenizer) if ended and tokenizer is not None else "",
            finish_reason=self.finish_reason,
            choices=None if routes is None else routes.rows(begin, self.length),
            context_choices=None if routes is None else routes.rows(0, begin),
            prompt_scores=self.prompt_scores,
        )

    def _stop_at_string(self, before: int, tokenizer: TextDecoder) -> None:
        """End the turn at the token that completes a stop string, if one ends after the first `before` tokens."""
        stops = [stop for stop in self.sampling.stop if stop not in tokenizer.special_tokens]
        if not stops:
            return
        longest = max(len(stop.encode()) for stop in stops)  # each token has at least one byte of the text
        begin = max(0, before - longest)
        for length in range(before + 1, len(self.drawn) + 1):
            text = tokenizer.decode(self.drawn[begin:length])
            if any(stop in text for stop in stops):
                for values in (self.drawn, self.logprobs, self.full_logprobs, self.versions):
                    del values[length:]
                if self.routes is not None:
                    self.routes.cut(self.length)
                self.finish_reason, self.cut = "stop", True
                return


def sequences_of(
    request: Request, number: int, *, choices: int = 0, choice_format: ChoiceFormat = "uint8"
) -> list[Sequence]:
    """Make sequences for the unfinished completions of a request, continuing after the tokens drawn so far.

    `choices` is the number of experts that a token is sent to, summed over layers, and `choice_format` their integer
    format. Raises ValueError like `Request.unfinished`.
    """
    made = []
    shared = unknown(len(request.prompt), choices, choice_format) if choices else None
    for index, begun in request.unfinished.items():
        sequence = Sequence(
            key=Key(number, index),
            context=request.ledgers.get(index, request.prompt),
            sampling=request.sampling.of(index),
            seed=request.seed,
            keep=request.keep,
            routes=None if shared is None else Routes(shared),
            prompt_scores=unscored(len(request.prompt)) if request.score_prompt else None,
        )
        if begun is not None:
            sequence.drawn = begun.tokens.tolist()
            sequence.logprobs = begun.sampled_logprobs.tolist()
            sequence.full_logprobs = begun.full_logprobs.tolist()
            sequence.versions = begun.versions.tolist()
            for first, found in ((0, begun.context_choices), (len(sequence.context), begun.choices)):
                if sequence.routes is not None and found is not None:
                    sequence.routes.record(first, found)
            sequence.carried = len(sequence.drawn)
        made.append(sequence)
    return made


@dataclasses.dataclass(kw_only=True)
class Group:
    """A request's remaining sequences, and the pages of their prompt."""

    prompt: tuple[int, ...]
    sequences: dict[int, Sequence]
    """Sequences by completion index."""
    shares: bool
    """Whether the sequences share the prompt's pages, because there are several sequences."""
    prompts: dict[int, SharedPrompt] = dataclasses.field(default_factory=dict)
    """The prompt's pages by shard."""
    lost: int = 0
    """Number of leading prompt tokens that were prefilled before and may have to be prefilled again."""

    @property
    def copied(self) -> bool:
        """Whether all sequences have their copies of the prompt's partial page and cell."""
        return all(sequence.attached for sequence in self.sequences.values())


class Queues:
    """All sequences of an engine, by state."""

    def __init__(self) -> None:
        """Start with empty queues."""
        self.groups: dict[int, Group] = {}
        """Groups by request number."""
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: dict[Sequence, None] = {}
        """Running sequences in order of admission."""
        self.filling: dict[Sequence, None] = {}
        """Running sequences whose first decode call has not been planned; all others are ready until they stop
        running."""
        self.parked: dict[Sequence, None] = {}
        """Parked sequences, longest parked first."""
        self.counts = ScheduleCounts()

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue."""
        if sequence.state == "running":
            del self.running[sequence]
            self.filling.pop(sequence, None)
        elif sequence.state == "waiting":
            self.waiting.remove(sequence)
        elif sequence.state == "parked":
            del self.parked[sequence]


def special_tokens(tokenizer: TextDecoder | None) -> Mapping[str, int]:
    """A tokenizer's special tokens by text; empty without a tokenizer."""
    return {} if tokenizer is None else tokenizer.special_tokens


def stop_tokens(sampling: SamplingParams, tokenizer: TextDecoder | None) -> tuple[int, ...]:
    """Tokens that end a completion: the model's, the request's, and special tokens that a stop string names."""
    special = special_tokens(tokenizer)
    named = (special[stop] for stop in sampling.stop if stop in special)
    eos_tokens = () if tokenizer is None else tokenizer.eos_tokens
    return tuple(dict.fromkeys((*eos_tokens, *sampling.stop_tokens, *named)))


def check_tokens(tokens: tuple[int, ...], vocab: int, room: int, rule: str) -> None:
    """Raise ValueError if a context is empty, too long, or outside the vocabulary; `rule` names the limit `room`."""
    if not tokens:
        raise ValueError("prompt is empty; it needs at least one token")
    if len(tokens) > room:
        raise ValueError(f"prompt has {len(tokens)} tokens, and {rule} is {room}; raise it, or drop the prompt")
    if min(tokens) < 0 or max(tokens) >= vocab:
        worst = min(tokens) if min(tokens) < 0 else max(tokens)
        raise ValueError(
            f"prompt has token {worst}, outside the model's vocabulary of {vocab}; does the tokenizer belong to the"
            " model?"
        )


def check_sampling(sampling: SamplingParams, tokenizer: TextDecoder | None, *, longest: int, vocab: int) -> None:
    """Raise ValueError for settings that contradict each other or exceed the engine's limits.

    `longest` is the length in tokens of the longest sequence.
    """
    problem = (
        _length_problem(sampling, longest)
        or _distribution_problem(sampling)
        or _stop_problem(sampling, tokenizer, vocab)
    )
    if problem:
        raise ValueError(problem)


def _length_problem(sampling: SamplingParams, longest: int) -> str | None:
    if 1 <= sampling.max_new_tokens < longest:
        return None
    return (
        f"max_new_tokens is {sampling.max_new_tokens}; it must be 1 to {longest - 1}, since a sequence has at most "
        f"{longest} tokens: {LONGEST}"
    )


def _distribution_problem(sampling: SamplingParams) -> str | None:
    cuts = (("top_k", sampling.top_k, 0), ("top_p", sampling.top_p, 1.0), ("min_p", sampling.min_p, 0.0))
    used = ", ".join(f"{name} {value}" for name, value, unused in cuts if value != unused)
    if sampling.temperature and not SMALLEST <= sampling.temperature <= LARGEST:
        return f"temperature is {sampling.temperature}; it must be 0 (greedy), or {SMALLEST:g} to {LARGEST:g}"
    if not SMALLEST <= sampling.repetition_penalty <= LARGEST:
        rule = f"it must be {SMALLEST:g} to {LARGEST:g} (1: no penalty)"
        return f"repetition_penalty is {sampling.repetition_penalty}; {rule}"
    if not 0 <= sampling.top_k < 2**31 or not SMALLEST <= sampling.top_p <= 1 or not 0 <= sampling.min_p < 1:
        return f"{used}: top_k must be 0 (all) to 2^31 - 1, top_p {SMALLEST:g} to 1, min_p 0 to below 1"
    if not sampling.temperature and used:
        return (
            f"temperature is 0, which takes the likeliest token and ignores {used}; leave that out, or set a "
            "temperature"
        )
    return None


def _stop_problem(sampling: SamplingParams, tokenizer: TextDecoder | None, vocab: int) -> str | None:
    for token in sampling.stop_tokens:
        if not 0 <= token < vocab:
            return f"stop token {token} is outside the model's vocabulary of {vocab}, and ends nothing; leave it out"
    if "" in sampling.stop:
        return "a stop string is empty and would end every completion at once; leave it out"
    special = special_tokens(tokenizer)
    for stop in sampling.stop:
        if tokenizer is None:
            return f"stop string {stop!r} needs a tokenizer, and this engine has none; set stop_tokens instead"
        for text in special if stop not in special else ():
            if text in stop:
                return (
                    f"stop string {stop!r} contains the special token {text!r}, which is never part of a completion's "
                    f"text; write {text!r} alone, which ends the completion at that token, or the text without it"
                )
    count = len(stop_tokens(sampling, tokenizer))
    if count > MAX_STOP_TOKENS:
        return (
            f"there are {count} stop tokens, including the model's own, and at most {MAX_STOP_TOKENS} are possible; "
            "set fewer"
        )
    return None
