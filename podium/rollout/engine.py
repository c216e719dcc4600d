"""Completions of prompts by the current version of the policy: continuous batching over slots.

The host decides who sits where (`scheduler`) and where stop strings end a completion; the device sees fixed shapes
(`programs`). A request's tokens depend on its prompt, settings and seed alone: its prefill bucket follows from its own
length, every row is computed for itself, and its random numbers follow from seed, completion and position.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from podium.config.attention import Backend
from podium.config.schema import RolloutConfig
from podium.config.sizes import prompt_buckets
from podium.models.architecture import DecoderConfig
from podium.rollout.cache import Prompts, empty
from podium.rollout.programs import (
    MAX_STOP_TOKENS,
    Drawn,
    abstract_engine_cache,
    idle_slots,
    make_engine_programs,
)
from podium.rollout.request import Completion, FinishReason, Request, RolloutStats
from podium.rollout.sampling import fill_row
from podium.rollout.scheduler import Admission, Scheduler, rounds
from podium.sharding import Params, ShardingRules

OnGroup = Callable[[int, list[Completion]], None]
OnPoll = Callable[[], None]


class TextDecoder(Protocol):
    """What the engine needs of a tokenizer."""

    eos_tokens: tuple[int, ...]

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; special tokens are left out."""
        ...


class RolloutEngine:
    """Answers requests with the version of the policy that was loaded last."""

    def __init__(
        self,
        config: RolloutConfig,
        decoder: DecoderConfig,
        rules: ShardingRules,
        tokenizer: TextDecoder,
        *,
        dtype: jnp.dtype,
        attention: Backend = "blocks",
    ) -> None:
        """Makes the programs; they are compiled when they are first used.

        `config` gives lengths, slots and rows of the programs; how tokens are drawn is each request's. `rules` put one
        of ROLLOUT_LAYOUTS on the mesh. `dtype` is the weights'; activations and cache follow (`podium.models.linear`).
        `attention` is that of prefill.
        Raises ValueError where slots or prefill rows do not divide over the devices that split them.
        """
        self.config, self.decoder, self.rules, self.tokenizer, self.dtype = config, decoder, rules, tokenizer, dtype
        self.programs = make_engine_programs(config, decoder, rules, dtype, attention)
        self.params: Params | None = None

    def load(self, params: Params) -> None:
        """Answer with these from now on; they are copied, and may be donated afterwards."""
        self.params = None  # the old version goes before the new one comes
        self.params = self.programs.sync(params)

    def generate(
        self, requests: Sequence[Request], on_group: OnGroup | None = None, on_poll: OnPoll | None = None
    ) -> tuple[list[list[Completion]], RolloutStats]:
        """The completions of each request, in the requests' order, and what they took.

        Args:
            requests: any number; they share the slots.
            on_group: called with a request's index and its completions as soon as all of them have ended.
            on_poll: called before every `refill_steps` decode steps; what it raises ends the generation.

        Raises ValueError for a request that the engine's shapes do not hold, RuntimeError where nothing was loaded.
        """
        if self.params is None:
            raise RuntimeError("the rollout engine has no parameters; call load(params) first")
        for index, request in enumerate(requests):
            self._check(index, request)
        compiled, start = self.num_compiled(), time.perf_counter()
        generation = _Generation(self, self.params, requests, on_group)
        prefill_s = decode_s = 0.0
        decode_steps = decoded_tokens = 0
        for admission in rounds(generation.scheduler, on_poll):
            begun = time.perf_counter()
            if admission is not None:
                generation.admit(admission)
                prefill_s += time.perf_counter() - begun
                continue
            slots = generation.on_device(generation.slots)
            generation.cache, drawn, steps = self.programs.decode(self.params, generation.cache, slots)
            drawn, steps = jax.device_get((drawn, steps))
            generation.slots.lengths[:] += drawn.counts
            generation.take(drawn)
            decode_steps += int(steps)
            decoded_tokens += int(np.sum(drawn.counts))
            decode_s += time.perf_counter() - begun
        return generation.completed, RolloutStats(
            prompt_tokens=sum(len(request.prompt) for request in requests),
            completion_tokens=sum(len(each.tokens) for group in generation.completed for each in group),
            decoded_tokens=decoded_tokens,
            decode_steps=decode_steps,
            slots=self.config.slots,
            slot_steps=decode_steps * self.config.slots,
            compilations=self.num_compiled() - compiled,
            prefill_s=prefill_s,
            decode_s=decode_s,
            generate_s=time.perf_counter() - start,
        )

    def num_compiled(self) -> int:
        """Compiled variants of the engine's programs so far."""
        return sum(program._cache_size() for program in self.programs)

    def unload(self) -> None:
        """Give the weights' memory back; `load` makes the engine usable again."""
        self.params = None

    def stop_tokens(self, request: Request) -> tuple[int, ...]:
        """The tokens that end a completion of this request."""
        return tuple(dict.fromkeys((*self.tokenizer.eos_tokens, *request.sampling.stop_tokens)))

    def _check(self, index: int, request: Request) -> None:
        config, prompt, sampling = self.config, request.prompt, request.sampling
        num_stops = len(self.stop_tokens(request))
        if not prompt:
            problem = "prompt is empty; it needs at least one token"
        elif len(prompt) > config.max_prompt_tokens:
            problem = f"prompt has {len(prompt)} tokens and rollout.max_prompt_tokens is {config.max_prompt_tokens}"
            problem += "; raise it, or drop the prompt"
        elif not all(0 <= token < self.decoder.vocab for token in prompt):
            problem = f"prompt has a token outside the model's vocabulary of {self.decoder.vocab}"
            problem += "; does the tokenizer belong to the model?"
        elif not 1 <= sampling.max_new_tokens <= config.max_new_tokens:
            problem = f"max_new_tokens is {sampling.max_new_tokens} and must be 1 to rollout.max_new_tokens,"
            problem += f" {config.max_new_tokens}; raise that, or ask for less"
        elif request.completions < 1:
            problem = f"completions is {request.completions}; ask for at least one"
        elif not sampling.temperature >= 0:
            problem = f"temperature is {sampling.temperature}; it must be 0 (greedy) or more"
        elif num_stops > MAX_STOP_TOKENS:
            problem = f"there are {num_stops} stop tokens, the model's own included, and at most"
            problem += f" {MAX_STOP_TOKENS} are possible; name fewer"
        else:
            return
        raise ValueError(f"request {index}: {problem}")


@dataclasses.dataclass(kw_only=True)
class _Draft:
    """A completion that is being made."""

    request: Request
    stop_tokens: tuple[int, ...]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    full_logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None  # None: not finished


class _Generation:
    """One call of `generate`: its queue, its slots and its cache."""

    def __init__(
        self, engine: RolloutEngine, params: Params, requests: Sequence[Request], on_group: OnGroup | None
    ) -> None:
        config = engine.config
        self.engine, self.params, self.requests, self.on_group = engine, params, requests, on_group
        self.slots = idle_slots(config.slots)
        shards = engine.rules.num_shards("batch")
        self.scheduler = Scheduler(num_slots=config.slots, prefill_rows=config.prefill_rows, shards=shards)
        self.drafts = [
            [_Draft(request=request, stop_tokens=engine.stop_tokens(request)) for _ in range(request.completions)]
            for request in requests
        ]
        self.completed: list[list[Completion]] = [[] for _ in requests]  # all of a group at once
        self.prompts: dict[int, Prompts] = {}  # by bucket, of its last prefill
        buckets = prompt_buckets(config.max_prompt_tokens)
        for group, request in enumerate(requests):
            bucket = next(bucket for bucket in buckets if len(request.prompt) <= bucket)
            self.scheduler.submit(group, bucket=bucket, completions=request.completions)
        self.cache = empty(abstract_engine_cache(config, engine.decoder, engine.rules, engine.dtype))

    def admit(self, admission: Admission) -> None:
        """Prefill what needs it, copy prompts into slots and draw the first token of each completion."""
        if admission.prefill:
            self.prompts[admission.bucket] = self._prefill(admission)
        rows = np.full(self.engine.config.slots, -1, np.int32)
        for placement in admission.placements:
            rows[placement.slot] = placement.row
            self._fill(placement.slot, self.requests[placement.group], placement.completion)
        rows_on_device, slots = self.on_device((rows, self.slots))
        programs = self.engine.programs
        insert = programs.insert_across if admission.crosses else programs.insert
        self.cache, drawn = insert(self.cache, self.prompts[admission.bucket], rows_on_device, slots)
        self.take(jax.device_get(drawn))

    def _prefill(self, admission: Admission) -> Prompts:
        tokens = np.zeros((self.engine.config.prefill_rows, admission.bucket), np.int32)
        lengths = np.ones(self.engine.config.prefill_rows, np.int32)  # a row without a prompt: one token, never used
        for row, group in enumerate(admission.prefill):
            prompt = self.requests[group].prompt
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        return self.engine.programs.prefill(self.params, *self.on_device((tokens, lengths)))

    def take(self, drawn: Drawn) -> None:
        """Add what was drawn to the drafts, and retire those that have ended."""
        for slot, (group, completion) in list(self.scheduler.running.items()):
            count = int(drawn.counts[slot])
            if not count:
                continue  # this admission put nothing into the slot
            draft = self.drafts[group][completion]
            draft.tokens += drawn.tokens[slot, :count].tolist()
            draft.logprobs += drawn.logprobs[slot, :count].tolist()
            draft.full_logprobs += drawn.full_logprobs[slot, :count].tolist()
            if not drawn.live[slot]:
                draft.finish_reason = "stop" if draft.tokens[-1] in draft.stop_tokens else "length"
            self._stop_at_string(draft, count)
            self.slots.tokens[slot] = draft.tokens[-1]
            self.slots.live[slot] = draft.finish_reason is None
            if draft.finish_reason is not None:
                self.scheduler.retire(slot)
                self._complete(group)

    def _complete(self, group: int) -> None:
        """Hand over a group whose completions have all ended."""
        drafts = self.drafts[group]
        if all(draft.finish_reason is not None for draft in drafts):
            self.completed[group] = [self._completion(draft) for draft in drafts]
            if self.on_group is not None:
                self.on_group(group, self.completed[group])

    def _stop_at_string(self, draft: _Draft, new: int) -> None:
        """End the draft with the token that completes a stop string, if one of its `new` last tokens does."""
        stops = draft.request.sampling.stop
        if not stops:
            return
        longest = max(len(stop.encode()) for stop in stops)  # a token holds at least one byte of it
        begin, end = max(0, len(draft.tokens) - new - longest), len(draft.tokens)
        for length in range(end - new + 1, end + 1):
            text = self.engine.tokenizer.decode(draft.tokens[begin:length])
            if any(stop in text for stop in stops):
                del draft.tokens[length:], draft.logprobs[length:], draft.full_logprobs[length:]
                draft.finish_reason = "stop"
                return

    def _fill(self, slot: int, request: Request, completion: int) -> None:
        """Describe a completion that enters a slot to the device."""
        slots, settings = self.slots, request.sampling
        fill_row(slots.sampling, slot, settings, seed=request.seed, completion=completion)
        stop_tokens = self.engine.stop_tokens(request)
        slots.stop_tokens[slot] = -1
        slots.stop_tokens[slot, : len(stop_tokens)] = stop_tokens
        slots.lengths[slot] = len(request.prompt)
        slots.last[slot] = len(request.prompt) + settings.max_new_tokens - 1
        slots.live[slot] = True

    def on_device(self, tree: Any) -> Any:
        """Host arrays of rows, split over the devices; copied, because the host goes on writing into its own."""
        return jax.device_put(tree, self.engine.rules.sharding("rows"), may_alias=False)

    def _completion(self, draft: _Draft) -> Completion:
        assert draft.finish_reason is not None, "a completion was left unfinished"
        return Completion(
            tokens=np.array(draft.tokens, np.int32),
            sampled_logprobs=np.array(draft.logprobs, np.float32),
            full_logprobs=np.array(draft.full_logprobs, np.float32),
            text=self.engine.tokenizer.decode(draft.tokens),
            finish_reason=draft.finish_reason,
        )
