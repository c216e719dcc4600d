"""Turns samples into the numpy arrays of an update: packs them into rows, shifts targets, and computes weights.

`podium.train.batches.shapes` decides the shape of micro-batches, and `packing` there which completions share a row.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Generic

import jax
import numpy as np

from podium.models.blocks.choices import unknown_choice
from podium.run.run_spec import BatchSizes
from podium.sharding import A
from podium.train.batches.packing import Chunk, balanced_rows, chunk_tokens
from podium.train.batches.samples import Sample
from podium.train.batches.shapes import pack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch(Generic[A]):
    """The tokens of one optimizer step: K micro-batches of B rows of T tokens, of which the first few are used."""

    tokens: A  # [K, B, T] int32, inputs
    targets: A  # [K, B, T] int32, next token in the same sequence
    positions: A  # [K, B, T] int32, position in the token's own sequence
    segments: A  # [K, B, T] int32, 0 is padding
    prompts: A  # [K, B, T] int32, segment of the token's prompt
    mask: A  # [K, B, T] float32, 1 where the model drew the target
    weights: A  # [K, B, T] float32, mask divided by the global denominator
    advantages: A  # [K, B, T] float32
    sampled_logprobs: A  # [K, B, T] float32, under the policy that drew the tokens, before truncation
    scores: dict[str, A]  # [K, B, T] float32 by name, computed by `podium.train.scorers` before the update
    choices: A | None = None  # [K, B, T, C], experts of each token in the rollout; None without experts
    ages: A | None  # [K, B, T] int32, age of each token in steps; None unless completions are carried over
    likelihoods: A | None = None  # [K, B, T] float32, factor of -logprob; None without mixed-in demonstrations
    num_micro_batches: A  # [] int32, number of micro-batches that are not empty
    num_tokens: A  # [] float32, sum of mask
    coefs: dict[str, A] = dataclasses.field(default_factory=dict)  # [] float32 each, adapted during the run

    def arrays(self) -> dict[str, A]:
        """All arrays by name, including the scores."""
        tables = ("scores", "coefs")
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in tables}
        return {name: x for name, x in (own | self.scores | self.coefs).items() if x is not None}


@dataclasses.dataclass(frozen=True)
class TokenSpan:
    """Where in a batch the predictions of a sample's tokens are."""

    row: int
    start: int
    length: int


def make_batch(samples: Sequence[Sample], sizes: BatchSizes) -> tuple[Batch[np.ndarray], list[TokenSpan]]:
    """Pack the samples of one optimizer step into micro-batches, of the shape that takes least time.

    Returns:
        The batch (numpy arrays, without scores), and each sample's span.
    """
    lengths = [sample.lengths for sample in samples]
    sizes, packed = pack(lengths, sizes)
    rows, T = sizes.rows, sizes.row_tokens
    if sizes.devices > 1 and not sizes.pairs:
        packed = balanced_rows(
            packed, lengths, row_tokens=T, packing=sizes.packing, rows=rows, pair_cost=sizes.rules.pair_cost
        )
    shape = (-(-sizes.max_rows // rows) * rows, T)
    dtypes = _ARRAYS | ({"ages": np.int32} if sizes.ages else {})
    dtypes |= {"likelihoods": np.float32} if sizes.demonstrations else {}
    arrays: dict[str, np.ndarray] = {name: np.zeros(shape, dtype) for name, dtype in dtypes.items()}
    if sizes.choices:
        arrays["choices"] = np.full((*shape, sizes.choices), unknown_choice(sizes.choice_format), sizes.choice_format)
    spans: dict[int, TokenSpan] = {}
    for row, row_chunks in enumerate(packed):
        start, segment = 0, 1
        for chunk in row_chunks:
            for span, index in _write(chunk, samples, {name: x[row] for name, x in arrays.items()}, start, segment):
                spans[index] = TokenSpan(row, *span)
            start += chunk_tokens(chunk, lengths)
            segment = int(arrays["segments"][row].max()) + 1
    stacked = {name: x.reshape(-1, rows, *x.shape[1:]) for name, x in arrays.items()}  # [K, B, T, ...]
    batch = Batch[np.ndarray](
        tokens=stacked["tokens"],
        targets=stacked["targets"],
        positions=stacked["positions"],
        segments=stacked["segments"],
        prompts=stacked["prompts"],
        mask=stacked["mask"],
        weights=stacked["weights"],
        advantages=stacked["advantages"],
        sampled_logprobs=stacked["sampled_logprobs"],
        scores={},
        choices=stacked.get("choices"),
        ages=stacked.get("ages"),
        likelihoods=stacked.get("likelihoods"),
        num_micro_batches=np.asarray(-(-len(packed) // rows), np.int32),
        num_tokens=np.asarray(arrays["mask"].sum(), np.float32),
    )
    return batch, [spans[index] for index in range(len(samples))]


_ARRAYS = dict.fromkeys(("tokens", "targets", "positions", "segments", "prompts"), np.int32)
_ARRAYS |= dict.fromkeys(("mask", "weights", "advantages", "sampled_logprobs"), np.float32)


def take(x: np.ndarray, spans: Sequence[TokenSpan]) -> list[np.ndarray]:
    """The values of `x` [K, B, T] at each sample's tokens: one array [n] per sample."""
    rows = np.concatenate(x)  # [K B, T]
    return [rows[span.row, span.start : span.start + span.length] for span in spans]


def put(x: np.ndarray, spans: Sequence[TokenSpan], values: Sequence[np.ndarray]) -> None:
    """Write each sample's values [n] at its tokens in `x` [K, B, T]; the inverse of `take`."""
    rows = x.reshape(-1, x.shape[-1])  # a view of x
    for span, own in zip(spans, values, strict=True):
        rows[span.row, span.start : span.start + span.length] = own


def _write(
    chunk: Chunk, samples: Sequence[Sample], row: dict[str, np.ndarray], start: int, segment: int
) -> Iterator[tuple[tuple[int, int], int]]:
    """Write a chunk into the arrays of its row; yields ((start, length), sample) for each sample's tokens."""
    prompt = samples[chunk[0]].prompt
    shown = len(prompt) - 1  # tokens in the prompt's own segment
    span = slice(start, start + shown)
    row["tokens"][span] = prompt[:-1]
    row["positions"][span] = np.arange(shown)
    row["segments"][span] = row["prompts"][span] = segment
    if "choices" in row and (choices := samples[chunk[0]].prompt_choices) is not None:
        row["choices"][span] = choices
    start = span.stop
    first = segment + 1 if len(chunk) > 1 and shown else segment  # a single completion continues its prompt's segment
    for own, index in enumerate(chunk, start=first):
        sample = samples[index]
        length = len(sample.tokens)
        span = slice(start, start + length)
        row["tokens"][span] = (prompt[-1], *sample.tokens[:-1])
        row["targets"][span] = sample.tokens
        row["positions"][span] = np.arange(shown, shown + length)
        row["segments"][span] = own
        row["prompts"][span] = segment if shown else own
        row["mask"][span] = sample.mask
        row["weights"][span] = sample.weights
        row["advantages"][span] = sample.advantages
        row["sampled_logprobs"][span] = sample.sampled_logprobs
        if "choices" in row and sample.choices is not None:
            row["choices"][span] = sample.choices
        if "ages" in row:
            row["ages"][span] = sample.ages
        if sample.likelihoods is not None:
            row["likelihoods"][span] = sample.likelihoods
        yield (start, length), index
        start += length
