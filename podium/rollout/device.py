"""The engine's device side: weights, cache and slots, and the calls of the compiled programs. Nothing here waits."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.config.schema import RolloutConfig
from podium.config.sizes import table_pages
from podium.models.architecture import DecoderConfig
from podium.rollout.cache import NO_PAGE, Cache, empty
from podium.rollout.draft import Draft, TextDecoder, stop_tokens
from podium.rollout.lanes import Copy, Extend, Row
from podium.rollout.programs import (
    Drawn,
    Where,
    abstract_engine_cache,
    idle_chunk,
    idle_slots,
    make_engine_programs,
    nonfinite_layer,
    nowhere,
    row_shardings,
)
from podium.rollout.sampling import fill_row
from podium.rollout.weights import keeps
from podium.sharding import Params, ShardingRules


class Device:
    """What the devices hold, and what they are given to do."""

    def __init__(self, config: RolloutConfig, decoder: DecoderConfig, rules: ShardingRules, dtype: jnp.dtype) -> None:
        """Makes the programs; memory is taken by `load`, and at the first call of one."""
        self.config, self.decoder, self.rules, self._dtype = config, decoder, rules, dtype
        self.programs = make_engine_programs(config, decoder, rules, dtype)
        self.params: Params | None = None
        self._frozen: Params = {}
        self._abstract_cache = abstract_engine_cache(config, decoder, rules, dtype)
        self._over_hosts = not rules.sharding().is_fully_addressable
        self._everywhere = jax.jit(lambda x: x, out_shardings=rules.sharding()) if self._over_hosts else _as_it_is
        self._cache: Cache | None = None
        self._table = table_pages(config)
        self.resize(config.slots)

    def freeze(self, params: Params) -> None:
        """Keep these weights, which no update changes; they are copied only if they lie otherwise."""
        self._frozen = {}
        as_it_is = keeps(params, self.decoder, self.rules, self._dtype)
        self._frozen = params if as_it_is else self.programs.place(params)

    def load(self, params: Params) -> None:
        """Use these weights from now on; they are copied."""
        self.params = None  # the old version goes before the new one comes
        if self.decoder.lora is not None and self.decoder.lora.merged:
            self.params = self.programs.sync(params | self._frozen)
        else:
            self.params = self.programs.sync(params) | self._frozen

    def unload(self) -> None:
        """Give the memory of weights and cache back."""
        self.params = None
        self.forget()

    def forget(self) -> None:
        """Give the memory of the cache back."""
        self._cache = None

    def resize(self, slots: int) -> None:
        """Decode so many slots from now on; nothing is in them."""
        self._slots = idle_slots(slots, self._table)
        self._where: Any = self._put(nowhere(slots))
        self._pages = np.zeros(slots, np.int32)  # that stand in each slot's table

    def warm_up(self, chunks: Sequence[int], sizes: Sequence[int], tokenizer: TextDecoder) -> None:
        """Call every program once, with nothing to do; slots are as after `resize`, of the last size."""
        for chunk in chunks:
            self.extend(Extend(chunk=chunk, fills=()), ())
        self.copy(())
        for size in sizes:
            self.resize(size)
            self.keep(self.programs.decode(*self.given({}, {}, tokenizer)))
        self.wait()

    def wait(self) -> None:
        """Return when all that was given out is done."""
        jax.block_until_ready(self._cache)

    def nonfinite(self, draft: Draft) -> str:
        """What is wrong with a completion whose logits are not numbers, in a sentence."""
        assert self.params is not None
        where = nonfinite_layer(self.params, draft.ledger, self.decoder, self.rules, self._dtype)
        begun = f"request {draft.key.request}, completion {draft.key.completion}, behind {len(draft.ledger)} tokens"
        return f"{begun}: the model's logits are not numbers; {where}. Look for what made the weights so"

    def num_compiled(self) -> int:
        """Compiled variants of the programs so far."""
        return sum(program._cache_size() for program in self.programs)

    def extend(self, extend: Extend, tokens: Sequence[Sequence[int]]) -> None:
        """Prefill a call's rows, `tokens` each."""
        chunk = idle_chunk(self.config.prefill_rows, extend.chunk, self._table)
        for fill, new in zip(extend.fills, tokens, strict=True):
            row, pages = fill.row, fill.pages
            chunk.tokens[row, : fill.count] = new
            chunk.starts[row], chunk.counts[row] = fill.start, fill.count
            chunk.tables[row, : len(pages)] = pages
        self._cache = self.programs.extend(self.params, self._made_cache(), self._put(chunk))

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy pages, each shard its own; as many in one call as there are slots."""
        shards = self.rules.num_shards("batch")
        each = self.config.slots // shards
        sources = np.zeros((shards, each), np.int32)
        targets = np.full((shards, each), NO_PAGE, np.int32)
        counts = [0] * shards
        for copy in copies:
            at = copy.shard, counts[copy.shard]
            sources[at], targets[at] = copy.source, copy.target
            counts[copy.shard] += 1
        given = self._put((sources.reshape(-1), targets.reshape(-1)))
        self._cache = self.programs.copy(self._made_cache(), *given)

    def given(self, rows: Mapping[int, Row], drafts: Mapping[int, Draft], tokenizer: TextDecoder) -> tuple[Any, ...]:
        """The arguments of a decode call of these rows and what is in them, by number; `keep` what comes of it."""
        slots = self._slots
        slots.taken[:] = slots.fresh[:] = slots.first[:] = False
        slots.where.any_live[...] = any(row.fresh for row in rows.values())
        slots.any_first[...] = any(row.first for row in rows.values())
        for number, row in rows.items():
            draft = drafts[number]
            slots.taken[number], slots.fresh[number], slots.first[number] = True, row.fresh, row.first
            if row.fresh:
                self._fill(number, draft, tokenizer)
                slots.where.lengths[number] = len(draft.ledger) - (not row.first)
            known, pages = self._pages[number], row.lane.pages
            if len(pages) > known:
                slots.tables[number, known : len(pages)] = pages[known:]
                self._pages[number] = len(pages)
        return self.params, self._made_cache(), self._where, self._put(slots)

    def keep(self, made: tuple[Cache, Where, Drawn, jax.Array]) -> tuple[Drawn, jax.Array]:
        """Go on with the cache and the slots of a decode call; what it drew, and in how many steps, for every host."""
        self._cache, self._where, drawn, steps = made
        return self._everywhere(drawn), steps

    def _fill(self, row: int, draft: Draft, tokenizer: TextDecoder) -> None:
        """Describe a sequence that comes into a slot."""
        slots, stops = self._slots, stop_tokens(draft.sampling, tokenizer)
        fill_row(slots.sampling, row, draft.sampling, seed=draft.seed, completion=draft.key.completion)
        slots.stop_tokens[row] = -1
        slots.stop_tokens[row, : len(stops)] = stops
        slots.last[row] = draft.last
        slots.tables[row] = NO_PAGE
        self._pages[row] = 0
        slots.where.tokens[row], slots.where.live[row] = draft.ledger[-1], True

    def _made_cache(self) -> Cache:
        return empty(self._abstract_cache) if self._cache is None else self._cache

    def _put(self, tree: Any) -> Any:
        """Host arrays of rows, split over the devices; copied, because the host goes on writing into its own.

        `device_put(..., may_alias=False)` is no copy: on CPU it still takes numpy's memory where that happens to be
        aligned, and a call that is under way then reads what the host writes for the next.
        """
        copied, shardings = jax.tree.map(np.copy, tree), row_shardings(tree, self.rules)
        if not self._over_hosts:
            return jax.device_put(copied, shardings)
        # every host has the same; `device_put` would have them compare it
        make = jax.make_array_from_callback
        return jax.tree.map(lambda x, sharding: make(x.shape, sharding, x.__getitem__), copied, shardings)


def _as_it_is(x: Any) -> Any:
    return x
