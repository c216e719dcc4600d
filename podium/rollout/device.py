"""The engine's device side: weights, cache, slots, and calls of compiled programs.

Only `wait`, and reading a call's results, block until the devices are done.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from podium.compile_ahead import Call, CompileAhead
from podium.config.schema import RolloutConfig
from podium.config.sizes import table_pages
from podium.models.architecture import DecoderConfig
from podium.rollout.cache import NO_PAGE, Cache, make_empty
from podium.rollout.cache_layout import num_cells
from podium.rollout.engine_device import DrawnRows, EngineModel, PrefilledRows
from podium.rollout.engine_weights import keeps
from podium.rollout.programs import (
    Chunk,
    CopyProgram,
    Drawn,
    EngineForm,
    Scores,
    Slots,
    Where,
    engine_calls,
    idle_chunk,
    idle_slots,
    make_engine_programs,
    nonfinite_layer,
    nowhere,
    penalised_calls,
    row_shardings,
    scored_calls,
)
from podium.rollout.request import PromptScores, Request
from podium.rollout.sampling import fill_row, words_of
from podium.rollout.scheduler import Copy, DecodeRow, PrefillCall
from podium.rollout.sequence import Sequence, TextDecoder, stop_tokens
from podium.sharding import Params, ShardingRules

Tree = TypeVar("Tree")


class Device:
    """An engine's arrays on the devices, and the compiled programs that update them."""

    def __init__(
        self,
        config: RolloutConfig,
        decoder: DecoderConfig,
        rules: ShardingRules,
        *,
        dtype: jnp.dtype,
        overlap: bool | None = None,
    ) -> None:
        """Make the programs; each is compiled at its first use, or earlier (`compile_ahead`).

        `load` and the first call of a program allocate memory.

        Args:
            config: lengths, slots, pages and rows of the programs; sampling settings come with each request.
            decoder: the model.
            rules: a layout of ROLLOUT_LAYOUTS on a mesh.
            dtype: number format of the weights; activations and cache follow it (`podium.models.linear`).
            overlap: `EngineDevice.overlap`. Unset: True except on CPU, where host and device are the same.

        Raises:
            ValueError: slots or prefill rows are not divisible by the number of devices.
        """
        self.form = EngineForm(config, decoder, rules, dtype)
        self.overlap = not rules.on_cpu if overlap is None else overlap
        self.programs = make_engine_programs(*self.form)
        self.params: Params | None = None
        self._frozen: Params = {}
        self._make_cache = make_empty(self.form.cache())
        one_host = rules.sharding().is_fully_addressable
        self._replicate = None if one_host else jax.jit(lambda drawn: drawn, out_shardings=rules.sharding())
        """Copies results to all hosts; None if this host has all devices."""
        self._cache: Cache | None = None
        self._ahead = CompileAhead(threads=0)
        self.resize(config.slots)

    @property
    def config(self) -> RolloutConfig:
        """Lengths, slots, pages and rows of the programs."""
        return self.form.config

    @property
    def shards(self) -> int:
        """Number of devices, or groups of devices, over which slots and pages are split."""
        return self.form.rules.num_shards("batch")

    @property
    def model(self) -> EngineModel:
        """What the engine knows of the model."""
        decoder = self.form.decoder
        return EngineModel(decoder.vocab, num_cells(decoder, self.config), decoder.choices, decoder.choice_format)

    def compile_ahead(self, ahead: CompileAhead) -> None:
        """Start compiling prefills, page copies and decode steps, decode steps first; each call waits for its own
        program.

        Copies of cells, and the programs that `extra_calls` names, are compiled on their first call.
        """
        calls = engine_calls(self.programs, self.form)
        ahead.begin(sorted(calls.items(), key=lambda item: not item[0].startswith("decode")))
        self._ahead = ahead

    def extra_calls(self, request: Request) -> dict[str, Call]:
        """The calls that this request needs but `warm_up` does not compile, by name, with abstract arguments."""
        given = self.programs, self.form
        penalised = request.sampling.repetition_penalty != 1
        return (penalised_calls(*given) if penalised else {}) | (scored_calls(*given) if request.score_prompt else {})

    def freeze(self, params: Params) -> None:
        """Set the frozen weights; they are copied only if the rollout's layout or format differs from the trainer's."""
        self._frozen = {}
        as_it_is = keeps(params, self.form.decoder, self.form.rules, self.form.dtype)
        self._frozen = params if as_it_is else self.programs.place(params)

    @property
    def loaded(self) -> bool:
        """Whether weights are loaded."""
        return self.params is not None

    def load(self, params: Params) -> None:
        """Copy these weights and use them from now on, instead of the old ones."""
        self.params = None  # free the old version before the new one is made
        lora = self.form.decoder.lora
        if lora is not None and lora.merged:
            self.params = self.programs.sync(params | self._frozen)
        else:
            self.params = self.programs.sync(params) | self._frozen

    def unload(self) -> None:
        """Free the memory of weights and cache."""
        self.params = None
        self.forget()

    def forget(self) -> None:
        """Free the memory of the cache."""
        self._cache = None

    def resize(self, slots: int) -> None:
        """Use the decode program with `slots` slots from now on; all slots become empty."""
        words = 0 if self.config.repetition_penalty == 1 else self.form.words
        self._slots = idle_slots(slots, table_pages(self.config), words)
        self._where = cast(Where[jax.Array], self._put(nowhere(slots, words)))
        self._table_pages = np.zeros(slots, np.int32)  # number of pages written so far into each slot's table

    def warm_up(self, chunks: Iterable[int], sizes: Iterable[int], tokenizer: TextDecoder | None) -> None:
        """Compile every program by calling it without work; leaves the slots empty, at the last of `sizes`."""
        for chunk in chunks:
            self.prefill(PrefillCall(chunk=chunk, fills=()))
        self.copy(())
        if self.model.num_cells:
            self.copy_cells(())
        for size in sizes:
            self.resize(size)
            self.decode((), tokenizer)
        self.wait()

    def wait(self) -> None:
        """Block until all issued calls have finished."""
        jax.block_until_ready(self._cache)

    def nonfinite(self, sequence: Sequence) -> str:
        """Describe in a sentence where a sequence's logits became NaN or infinite."""
        where = nonfinite_layer(self._loaded(), sequence.tokens, *self.form[1:])
        key = sequence.key
        begun = f"request {key.request}, completion {key.completion}, after {sequence.length} tokens"
        return f"{begun}: the model's logits are NaN or infinite; {where}. Find out why the weights diverged"

    def num_compiled(self) -> int:
        """Number of variants of the programs that have been called so far, each of which was compiled once."""
        return sum(program._cache_size() for program in self.programs)

    def prefill(self, call: PrefillCall) -> Callable[[], PrefilledRows] | None:
        """Issue a prefill call. Returns a function that waits for its results, which every host can read.

        Returns None if the model has no experts and no row asks for scores.
        """
        chunk = idle_chunk(self.config.prefill_rows, call.chunk, table_pages(self.config))
        targets, scored = np.zeros_like(chunk.tokens), False
        for fill in call.fills:
            row = fill.row
            chunk.tokens[row, : fill.count] = fill.owner.tokens[fill.start : fill.start + fill.count]
            chunk.starts[row], chunk.counts[row] = fill.start, fill.count
            chunk.tables[row, : len(fill.pages)] = fill.pages
            chunk.cells[row] = fill.cell or 0
            after = fill.owner.tokens[fill.start + 1 : fill.start + fill.count + 1]
            targets[row, : len(after)] = after
            scored |= fill.scored
        given = cast(Chunk[jax.Array], self._put(chunk))
        if scored:
            wanted = cast(jax.Array, self._put(targets))
            made = self.programs.scored_extend(self._loaded(), self._made_cache(), given, wanted)
            self._cache, choices, scores = made
        else:
            self._ahead.wait(f"prefill:{call.chunk}")
            self._cache, choices = self.programs.extend(self._loaded(), self._made_cache(), given)
            scores = None
        if choices is None and scores is None:
            return None
        return functools.partial(_read_prefilled, *self._on_every_host((choices, scores)))

    def copy(self, copies: Iterable[Copy]) -> None:
        """Copy pages within each shard; a call copies up to as many pages as there are slots."""
        self._ahead.wait("copy")
        self._copy(self.programs.copy, copies)

    def copy_cells(self, copies: Iterable[Copy]) -> None:
        """Copy cells within each shard; a call copies up to as many cells as there are slots."""
        self._copy(self.programs.copy_cells, copies)

    def _copy(self, program: CopyProgram, copies: Iterable[Copy]) -> None:
        shards, per_shard = self.shards, self.config.slots // self.shards
        sources = np.zeros((shards, per_shard), np.int32)
        targets = np.full((shards, per_shard), NO_PAGE, np.int32)
        counts = [0] * shards
        for copy in copies:
            at = copy.shard, counts[copy.shard]
            sources[at], targets[at] = copy.source, copy.target
            counts[copy.shard] += 1
        given = cast(tuple[jax.Array, jax.Array], self._put((sources.reshape(-1), targets.reshape(-1))))
        self._cache = program(self._made_cache(), *given)

    def decode(self, rows: tuple[DecodeRow, ...], tokenizer: TextDecoder | None) -> Callable[[], DrawnRows]:
        """Issue a decode call for rows. Returns a function that waits for its tokens, which every host can read."""
        self._remember(any(each.sequence.sampling.repetition_penalty != 1 for each in rows))
        slots = self._slots
        slots.taken[:] = slots.fresh[:] = slots.first[:] = False
        slots.where.any_live[...] = any(each.fresh for each in rows)
        slots.any_first[...] = any(each.first for each in rows)
        for row, sequence, _, fresh, first in rows:
            slots.taken[row] = True
            slots.fresh[row] = fresh
            slots.first[row] = first
            if fresh:
                self._fill(row, sequence, tokenizer)
                slots.where.lengths[row] = sequence.length - (not first)
            known, pages = self._table_pages[row], sequence.pages
            if len(pages) > known:
                slots.tables[row, known : len(pages)] = pages[known:]
                self._table_pages[row] = len(pages)
        given = cast(Slots[jax.Array], self._put(slots))
        self._ahead.wait(f"decode:{len(slots.taken)}")
        made = self.programs.decode(self._loaded(), self._made_cache(), self._where, given)
        self._cache, self._where, drawn, steps = made
        return functools.partial(_read_drawn, self._on_every_host(drawn), steps)

    def _on_every_host(self, tree: Tree) -> Tree:
        return tree if self._replicate is None else self._replicate(tree)

    def _remember(self, penalised: bool) -> None:
        """Keep track of the tokens in slots' sequences while any row has a repetition penalty, and stop once no row has
        one.

        A row with a penalty that continues from the previous call is tracked already; the other rows' tokens are not
        read.
        """
        wanted = penalised or self.config.repetition_penalty != 1
        if wanted == (self._slots.where.seen is not None):
            return
        empty_slots = nowhere(len(self._table_pages), self.form.words if wanted else 0)
        placed = cast(Where[jax.Array], self._put(empty_slots))
        self._slots = dataclasses.replace(
            self._slots, where=dataclasses.replace(self._slots.where, seen=empty_slots.seen)
        )
        self._where = dataclasses.replace(self._where, seen=placed.seen)

    def _fill(self, row: int, sequence: Sequence, tokenizer: TextDecoder | None) -> None:
        """Write the settings of a sequence that just got its slot into the slot's arrays."""
        slots, stops = self._slots, stop_tokens(sequence.sampling, tokenizer)
        fill_row(slots.sampling, row, sequence.sampling, seed=sequence.seed, completion=sequence.key.completion)
        slots.stop_tokens[row] = -1
        slots.stop_tokens[row, : len(stops)] = stops
        slots.last[row] = sequence.limit - 1
        slots.tables[row] = NO_PAGE
        slots.cells[row] = sequence.cell or 0
        self._table_pages[row] = 0
        slots.where.tokens[row], slots.where.live[row] = sequence.tokens[-1], True
        if (seen := slots.where.seen) is not None:
            seen[row] = words_of(sequence.tokens, seen.shape[1])

    def _loaded(self) -> Params:
        assert self.params is not None, "weights must be loaded before anything is decoded"
        return self.params

    def _made_cache(self) -> Cache:
        return self._make_cache() if self._cache is None else self._cache

    def _put(self, tree: Tree) -> Tree:
        """Put host arrays of rows on the devices that split them. Copies the arrays first, because the host reuses
        them.

        `device_put(..., may_alias=False)` does not always copy: on CPU it uses an aligned numpy array in place, and a
        call that is still running would then read what the host writes for the next one.
        """
        copied, shardings = jax.tree.map(np.copy, tree), row_shardings(tree, self.form.rules)
        if self._replicate is None:
            return jax.device_put(copied, shardings)
        # the values are equal on every host; `device_put` would compare them over the network
        make = jax.make_array_from_callback
        return jax.tree.map(lambda x, sharding: make(x.shape, sharding, x.__getitem__), copied, shardings)


def _read_prefilled(choices: jax.Array | None, scores: Scores | None) -> PrefilledRows:
    """Wait for the results of a prefill call."""
    choices, scores = jax.device_get((choices, scores))
    found = scores and PromptScores(
        logprobs=np.asarray(scores.logprobs),
        best_tokens=np.asarray(scores.best_tokens),
        best_logprobs=np.asarray(scores.best_logprobs),
    )
    return PrefilledRows(None if choices is None else np.asarray(choices), found)


def _read_drawn(drawn: Drawn, steps: jax.Array) -> DrawnRows:
    """Wait for the tokens of a decode call."""
    drawn, steps = jax.device_get((drawn, steps))
    counts = np.asarray(drawn.counts)
    columns = slice(0, 1 + int(counts.max()))
    return DrawnRows(
        counts=counts.tolist(),
        tokens=drawn.tokens[:, columns].tolist(),
        logprobs=drawn.logprobs[:, columns].tolist(),
        full_logprobs=drawn.full_logprobs[:, columns].tolist(),
        finite=drawn.finite.tolist(),
        choices=None if drawn.choices is None else np.asarray(drawn.choices),
        steps=int(steps),
    )
