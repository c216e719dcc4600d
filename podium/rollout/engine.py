"""Completions of prompts by the current version of the policy: continuous batching over slots and pages.

The host decides who sits where (`scheduler`) and where a completion ends (`draft`); the device sees fixed shapes
(`programs`). A decode call is given out before the tokens of the one before are read, so the device does not wait for
the host. A request's tokens depend on its prompt, settings and seed alone: every row is computed for itself, and its
random numbers follow from seed, completion and position, whatever the slot, the pages and the neighbours.
"""

import time
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from podium.config.schema import RolloutConfig
from podium.models.architecture import DecoderConfig
from podium.rollout.device import Device
from podium.rollout.draft import TextDecoder, check_ledger, check_sampling
from podium.rollout.request import Completion, Finished, Key, Request, RolloutStats, SamplingParams
from podium.rollout.work import Work, known, parked
from podium.sharding import Params, ShardingRules

OnGroup = Callable[[int, list[Completion]], None]
OnPoll = Callable[[], None]
Enough = Callable[[list[bool]], bool]


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
        overlap: bool | None = None,
    ) -> None:
        """Makes the programs; they are compiled when they are first used.

        `config` gives lengths, slots, pages and rows of the programs; how tokens are drawn is each request's. `rules`
        put one of ROLLOUT_LAYOUTS on the mesh. `dtype` is the weights'; activations and cache follow
        (`podium.models.linear`). With `overlap` a decode call is given out before the one before is read, and a slot
        stays empty for one call more when its sequence ends; unset: not on CPU, where host and device are one.

        Raises ValueError where slots or prefill rows do not divide over devices, or the cache is too small for one.
        """
        self.config, self.decoder, self.rules, self.tokenizer, self.dtype = config, decoder, rules, tokenizer, dtype
        self.overlap = not rules.on_cpu if overlap is None else overlap
        self.device = Device(config, decoder, rules, dtype)
        self._work = Work(config, self.device, tokenizer, rules.num_shards("batch"))

    def load(self, params: Params, version: int = 0) -> None:
        """Answer with these from now on; they are copied, and may be donated afterwards.

        What is in flight goes on with them: tokens stay, keys and values are made anew. New ones say the `version`.
        """
        self._work.restart()
        self._work.version = version
        self.device.load(params)

    def unload(self) -> None:
        """Give the memory of weights and cache back; `load` makes the engine usable again."""
        self._work.restart()
        self.device.unload()

    def submit(self, request: Request) -> int:
        """Queue a request; its number, which with a completion's index is that completion's key.

        Raises ValueError for a request that the engine's shapes do not hold, RuntimeError where nothing was loaded.
        """
        _check(self, request.prompt, request.sampling, self.config.max_prompt_tokens, "rollout.max_prompt_tokens")
        if request.completions < 1:
            raise ValueError(f"completions is {request.completions}; ask for at least one")
        return self._work.submit(request)

    def extend(
        self, key: Key, tokens: Sequence[int], sampling: SamplingParams, *, seed: int, keep: bool = False
    ) -> None:
        """Go on with a parked completion, behind new tokens (none: just go on); its next turn comes from `poll`.

        Raises ValueError where it is not parked, or would grow beyond what the engine's shapes hold.
        """
        ledger = [*parked(self._work.drafts, key).ledger, *tokens]
        room = self.config.max_prompt_tokens + self.config.max_new_tokens - sampling.max_new_tokens
        _check(self, ledger, sampling, room, "what rollout.max_prompt_tokens and max_new_tokens leave of its next turn")
        self._work.extend(key, ledger, sampling, seed=seed, keep=keep)

    def park(self, key: Key) -> None:
        """Take a completion out of its slot, or the queue; `resume` goes on with it, or `extend`, behind new tokens.

        Nothing happens where it has ended meanwhile, or is parked.
        """
        self._work.park(key)

    def resume(self, key: Key) -> None:
        """Go on with a completion where `park` took it out. Raises ValueError where its turn has ended, or it runs."""
        self._work.resume(key)

    def cancel(self, key: Key) -> None:
        """Forget a completion, wherever it is: nothing more comes of it. One that is not known is none."""
        self._work.cancel(key)

    def poll(self) -> list[Finished]:
        """The completions, or their turns, that have ended since the last call, in the order of their end."""
        return _finished(self._work)

    def step(self) -> None:
        """Let the device go on for one look: admissions, prefill and a decode call of `refill_steps` steps.

        Raises NonFiniteError where the model's logits are not numbers: the completion is forgotten.
        """
        work, device, begun = self._work, self.device, time.perf_counter()
        compiled = device.num_compiled()
        rows = work.prefill()
        if not self.overlap:
            device.wait()
        prefilled = time.perf_counter()
        if rows:
            given = device.given(rows, work.of(rows), self.tokenizer)
            work.given_out(rows, *device.keep(device.programs.decode(*given)))
        if not (rows and self.overlap):
            work.read()
        ended = time.perf_counter()
        seconds = {"prefill_s": prefilled - begun, "decode_s": ended - prefilled, "generate_s": ended - begun}
        work.count(compilations=device.num_compiled() - compiled, **seconds)

    def warm_up(self) -> None:
        """Compile all programs now, instead of each when it is first used."""
        assert not self._work.drafts, "programs are warmed up before there is work"
        self.device.warm_up(self._work.scheduler.chunks, self._work.scheduler.sizes, self.tokenizer)
        self.device.resize(self._work.scheduler.size)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return self._work.scheduler.busy or self._work.call is not None

    def ledger(self, key: Key) -> tuple[int, ...]:
        """All tokens of a completion that is known: prompt, turns, and what was drawn."""
        return tuple(known(self._work.drafts, key).ledger)

    def stats(self) -> RolloutStats:
        """What all of it took since the last time that this was asked."""
        return self._work.take_stats()

    def generate(
        self,
        requests: Sequence[Request],
        on_group: OnGroup | None = None,
        on_poll: OnPoll = lambda: None,
        enough: Enough | None = None,
    ) -> tuple[list[list[Completion]], RolloutStats]:
        """The completions of each request, in the requests' order, and what they took.

        Args:
            requests: any number, and nothing else in flight; they share the slots.
            on_group: called with a request's index and its completions as soon as all of them have ended.
            on_poll: called before every look; what it raises ends the generation, and its requests are forgotten.
            enough: whether to return before all are complete, asked before every look with whether each is.

        Raises ValueError for a request that the engine's shapes do not hold, RuntimeError where nothing was loaded.
        """
        assert not self._work.drafts, "generate answers its own requests alone"
        self.stats()
        try:
            answers = _Answers(self, requests, on_group)
            while not (enough or all)([not missing for missing in answers.missing]):
                on_poll()
                self.step()
                answers.take(self.poll())
            return answers.leave(), self.stats()
        except BaseException:
            self._work.clear()
            raise


def _finished(work: Work) -> list[Finished]:
    found, work.finished = work.finished, []
    return found


def _check(engine: RolloutEngine, ledger: Sequence[int], sampling: SamplingParams, room: int, rule: str) -> None:
    """Raises ValueError for what the engine does not hold, RuntimeError where it has no weights."""
    if engine.device.params is None:
        raise RuntimeError("the rollout engine has no parameters; call load(params) first")
    check_sampling(sampling, engine.tokenizer, engine.config.max_new_tokens)
    check_ledger(ledger, engine.decoder.vocab, room, rule)


class _Answers:
    """The completions of some requests, as they come."""

    def __init__(self, engine: RolloutEngine, requests: Sequence[Request], on_group: OnGroup | None) -> None:
        self.engine, self.on_group = engine, on_group
        self.requests: dict[int, int] = {}  # by number
        self.missing: list[set[int]] = [set(request.unfinished) for request in requests]
        self.made: list[dict[int, Completion]] = [dict(enumerate(request.begun)) for request in requests]
        for index, request in enumerate(requests):
            if request.begun and not self.missing[index]:
                continue
            try:
                self.requests[engine.submit(request)] = index
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from None

    def leave(self) -> list[list[Completion]]:
        """All completions of each request; what has not ended is taken out of the engine."""
        work = self.engine._work
        if any(self.missing):
            work.read()  # what the last call has drawn is of these weights
            self.take(self.engine.poll())
        for number, index in self.requests.items():
            for completion in self.missing[index]:
                self.made[index][completion] = work.withdraw(Key(number, completion))
        return [self._in_order(index) for index in range(len(self.made))]

    def take(self, finished: Sequence[Finished]) -> None:
        """Keep what has ended."""
        for key, completion in finished:
            index = self.requests[key.request]
            self.made[index][key.completion] = completion
            self.missing[index].remove(key.completion)
            if not self.missing[index] and self.on_group is not None:
                self.on_group(index, self._in_order(index))

    def _in_order(self, index: int) -> list[Completion]:
        return [completion for _, completion in sorted(self.made[index].items())]
