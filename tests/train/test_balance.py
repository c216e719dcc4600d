"""Rows of a step are of equal work, and still hold every token once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import sizes

from podium.models.flops import Work, group_work, pair_flops
from podium.models.presets import preset_decoder
from podium.train.batches.balance import Lengths
from podium.train.batches.batch import make_batch
from podium.train.batches.packing import Chunk, balanced_rows, chunk_tokens, pack_rows
from podium.train.batches.samples import Sample, single_answer

MODEL = preset_decoder("Qwen/Qwen2.5-3B-Instruct")
PAIR_COST = pair_flops(MODEL) / (2 * MODEL.active)


def make_samples(groups: int, completions: int, longest: int, seed: int) -> list[Sample]:
    """Prompts and completions as long as GSM8K's, with random tokens."""
    random = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        prompt = tuple(random.integers(1, 100, int(38 + random.lognormal(4.0, 0.35))).tolist())
        for length in np.clip(random.lognormal(5.15, 0.6, completions).astype(int), 1, longest):
            tokens = random.integers(1, 100, length).astype(np.int32)
            logprobs = np.zeros(length, np.float32)
            samples.append(
                single_answer(group=group, prompt=prompt, tokens=tokens, sampled_logprobs=logprobs, weight=1.0)
            )
    return samples


def works(rows: list[list[Chunk]], samples: list[Lengths]) -> np.ndarray:
    """Attention and products of each row, counted as a plan and a bench count them, [R]."""

    def of_chunk(chunk: Chunk) -> Work:
        return group_work(samples[chunk[0]].shown + 1, (samples[index].own for index in chunk))

    found = [[of_chunk(chunk) for chunk in row] for row in rows]
    return np.array([sum(each.tokens + PAIR_COST * each.pairs[None] for each in row) for row in found])


def spread(rows: list[list[Chunk]], samples: list[Lengths]) -> float:
    """How much less work the row with least has than the one with most, of that."""
    found = works(rows, samples)
    return float((found.max() - found.min()) / found.max())


@settings(max_examples=6, derandomize=True)
@given(
    groups=st.integers(16, 64),
    completions=st.sampled_from((8, 16)),
    rows=st.sampled_from((4, 8, 16)),
    row_tokens=st.sampled_from((2048, 4096)),
    packing=st.sampled_from(("sequences", "shared_prompts")),
    seed=st.integers(0, 2**16),
)
def test_rows_of_a_step_differ_by_less_than_five_percent(groups, completions, rows, row_tokens, packing, seed):
    samples = [sample.lengths for sample in make_samples(groups, completions, 1024, seed)]
    first = pack_rows(samples, row_tokens=row_tokens, packing=packing)
    found = balanced_rows(first, samples, row_tokens=row_tokens, packing=packing, rows=rows, pair_cost=PAIR_COST)
    assert sorted(index for row in found for chunk in row for index in chunk) == list(range(len(samples)))
    assert max(sum(chunk_tokens(chunk, samples) for chunk in row) for row in found) <= row_tokens
    assert len(found) == -(-len(first) // rows) * rows  # as many micro-batches as before, all of them full
    # Ten completions and more in a row can be made equal; of fewer, a single one may be a tenth of a row's work.
    assert spread(found, samples) < (0.05 if len(samples) >= 10 * len(found) else 0.1)
    assert works(found, samples).max() <= 1.01 * works(first, samples).max()


def test_each_token_is_in_the_batch_once_and_the_weights_are_those_of_the_whole_step():
    samples = make_samples(12, 8, 400, 0)
    shape = sizes(row_tokens=2048, rows=4, max_rows=len(samples), packing="shared_prompts")
    batch, spans = make_batch(samples, shape)
    targets = np.concatenate(batch.targets)
    for sample, span in zip(samples, spans, strict=True):
        assert targets[span.row, span.start : span.start + span.length].tolist() == sample.tokens.tolist()
    assert float(np.sum(batch.weights)) == float(batch.num_tokens) == sum(len(sample.tokens) for sample in samples)


def test_rows_of_equal_tokens_are_not_of_equal_work_where_attention_counts():
    """One sequence of 1,000 tokens has ten times the pairs of ten of 100: with dear pairs, it gets a row alone."""
    lengths = [1000] + [100] * 30
    samples = [Lengths(group=n, shown=0, own=own) for n, own in enumerate(lengths)]
    options = {"row_tokens": 2000, "packing": "sequences", "rows": 4}
    packed = pack_rows(samples, row_tokens=2000, packing="sequences")
    cheap = balanced_rows(packed, samples, **options, pair_cost=0.0)
    dear = balanced_rows(packed, samples, **options, pair_cost=0.01)
    alone = {name: min(len(row) for row in rows) for name, rows in (("cheap", cheap), ("dear", dear))}
    assert alone == {"cheap": 1, "dear": 1}
    others = [sum(samples[i].own for chunk in row for i in chunk) for row in dear if len(row) > 1]
    assert max(others) - min(others) <= 100


@pytest.mark.parametrize("packing", ["none", "sequences", "shared_prompts"])
def test_few_samples_are_not_an_error(packing):
    options = {"row_tokens": 2048, "packing": packing, "rows": 8, "pair_cost": PAIR_COST}
    assert balanced_rows([], [], **options) == []
    samples = [sample.lengths for sample in make_samples(1, 2, 50, 0)]
    packed = pack_rows(samples, row_tokens=2048, packing=packing)
    assert sorted(index for row in balanced_rows(packed, samples, **options) for chunk in row for index in chunk) == [
        0,
        1,
    ]
