import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import sizes

from podium.train.batches.batch import Batch, TokenSpan, make_batch, take
from podium.train.batches.samples import Sample, single_answer

PACKINGS = ("none", "sequences", "shared_prompts")
ROW_TOKENS = 24
FIELDS = ("tokens", "targets", "positions", "segments", "prompts", "mask", "weights", "advantages", "sampled_logprobs")


def sample(prompt, tokens, *, group=0, advantage=0.0, weight=0.0) -> Sample:
    return single_answer(
        group=group,
        prompt=tuple(prompt),
        tokens=np.array(tokens, np.int32),
        sampled_logprobs=-np.arange(1.0, len(tokens) + 1, dtype=np.float32),
        advantage=advantage,
        weight=weight,
    )


def rows_of(batch: Batch) -> dict[str, np.ndarray]:
    """The fields of a batch as [K B, T]."""
    return {name: np.concatenate(np.asarray(getattr(batch, name))) for name in FIELDS}


@st.composite
def samples_in_groups(draw) -> list[Sample]:
    """Up to 6 groups of up to 5 completions; every token, log-probability, advantage and weight is its own."""
    counter = iter(range(1, 100_000))
    samples = []
    for group in range(draw(st.integers(1, 6))):
        prompt = tuple(next(counter) for _ in range(draw(st.integers(1, 12))))
        for _ in range(draw(st.integers(1, 5))):
            number = draw(st.integers(1, ROW_TOKENS - len(prompt) + 1))
            tokens = np.array([next(counter) for _ in range(number)], np.int32)
            one = sample(prompt, tokens, group=group, advantage=float(next(counter)), weight=float(next(counter)))
            samples.append(dataclasses.replace(one, sampled_logprobs=-tokens.astype(np.float32)))
    return samples


def batch_of(samples, packing, rows=3, row_tokens=ROW_TOKENS) -> tuple[Batch, list[TokenSpan]]:
    return make_batch(samples, sizes(row_tokens=row_tokens, rows=rows, max_rows=max(1, len(samples)), packing=packing))


@given(samples=samples_in_groups(), packing=st.sampled_from(PACKINGS), rows=st.integers(1, 4))
def test_every_prediction_of_every_sample_is_in_the_batch_exactly_once(samples, packing, rows):
    batch, _ = batch_of(samples, packing, rows)
    expected = Counter(
        (
            *pair,
            len(each.prompt) - 1 + offset,
            each.weights[offset],
            each.advantages[offset],
            each.sampled_logprobs[offset],
        )
        for each in samples
        for offset, pair in enumerate(zip((each.prompt[-1], *each.tokens[:-1]), each.tokens, strict=True))
    )
    fields = rows_of(batch)
    chosen = fields["mask"] == 1.0
    names = ("tokens", "targets", "positions", "weights", "advantages", "sampled_logprobs")
    assert Counter(zip(*(fields[name][chosen].tolist() for name in names), strict=True)) == expected
    assert float(batch.num_tokens) == sum(len(each.tokens) for each in samples) == chosen.sum()
    for name in ("targets", "mask", "weights", "advantages", "sampled_logprobs"):
        assert not fields[name][~chosen].any(), name


@given(samples=samples_in_groups(), packing=st.sampled_from(PACKINGS), rows=st.integers(1, 4))
def test_a_prediction_sees_its_prompt_and_the_completion_before_it_and_nothing_else(samples, packing, rows):
    batch, spans = batch_of(samples, packing, rows)
    fields = rows_of(batch)
    for each, place in zip(samples, spans, strict=True):
        tokens, segments, prompts, positions = (
            fields[name][place.row] for name in ("tokens", "segments", "prompts", "positions")
        )
        for offset in range(place.length):
            query = place.start + offset
            seen = [
                key
                for key in range(query + 1)
                if segments[key] in (segments[query], prompts[query])  # what Visibility says
            ]
            assert tokens[seen].tolist() == [*each.prompt, *each.tokens[:offset]]
            assert positions[seen].tolist() == list(range(len(each.prompt) + offset))


@given(samples=samples_in_groups(), packing=st.sampled_from(PACKINGS), rows=st.integers(1, 4))
def test_segments_are_numbered_from_1_to_at_most_T_and_name_one_sequence_each(samples, packing, rows):
    batch, spans = batch_of(samples, packing, rows)
    fields = rows_of(batch)
    assert fields["segments"].min() >= 0
    assert fields["segments"].max() <= ROW_TOKENS
    trained = [(place.row, int(fields["segments"][place.row, place.start])) for place in spans]
    assert len(set(trained)) == len(samples)
    assert all(segment > 0 for _, segment in trained)
    for place, (row, segment) in zip(spans, trained, strict=True):
        own = np.flatnonzero((fields["segments"][row] == segment) & (fields["mask"][row] == 1.0))
        assert own.tolist() == list(range(place.start, place.start + place.length))
    padding = fields["segments"] == 0
    assert not fields["prompts"][padding].any()
    assert not fields["tokens"][padding].any()


@given(samples=samples_in_groups(), packing=st.sampled_from(PACKINGS), rows=st.integers(1, 4))
def test_places_point_at_the_samples_predictions(samples, packing, rows):
    batch, spans = batch_of(samples, packing, rows)
    for each, found in zip(samples, take(np.asarray(batch.targets), spans), strict=True):
        assert found.tolist() == each.tokens.tolist()


@given(samples=samples_in_groups(), packing=st.sampled_from(PACKINGS), rows=st.integers(1, 4))
def test_used_micro_batches_come_first_and_shapes_do_not_depend_on_how_much_is_used(samples, packing, rows):
    batch, _ = batch_of(samples, packing, rows)
    micro_batches = -(-len(samples) // rows)
    assert batch.tokens.shape == (micro_batches, rows, ROW_TOKENS)
    used = [bool(np.any(segments)) for segments in np.asarray(batch.segments)]
    assert used == [True] * int(batch.num_micro_batches) + [False] * (micro_batches - int(batch.num_micro_batches))


def test_a_group_shares_one_copy_of_its_prompt():
    group = [sample([10, 11, 12], [20, 21]), sample([10, 11, 12], [30]), sample([10, 11, 12], [40, 41, 42])]
    batch, spans = make_batch(group, sizes(row_tokens=9, rows=1, max_rows=3, packing="shared_prompts"))
    row = {name: values[0].tolist() for name, values in rows_of(batch).items()}
    assert row["tokens"] == [10, 11, 12, 20, 12, 12, 40, 41, 0]
    assert row["targets"] == [0, 0, 20, 21, 30, 40, 41, 42, 0]
    assert row["positions"] == [0, 1, 2, 3, 2, 2, 3, 4, 0]
    assert row["segments"] == [1, 1, 2, 2, 3, 4, 4, 4, 0]
    assert row["prompts"] == [1, 1, 1, 1, 1, 1, 1, 1, 0]
    assert row["mask"] == [0, 0, 1, 1, 1, 1, 1, 1, 0]
    assert row["sampled_logprobs"] == [0, 0, -1, -2, -1, -1, -2, -3, 0]
    assert spans == [TokenSpan(0, 2, 2), TokenSpan(0, 4, 1), TokenSpan(0, 5, 3)]
    assert (int(batch.num_micro_batches), float(batch.num_tokens)) == (1, 6.0)


def test_sequences_are_packed_whole_in_rows_of_equal_work():
    samples = [sample([1], [2, 3]), sample([4, 5], [6, 7, 8]), sample([9], [10])]
    shared = dataclasses.replace(sizes(row_tokens=6, rows=1, max_rows=3, packing="sequences"), devices=2)
    batch, spans = make_batch(samples, shared)
    rows = rows_of(batch)
    assert rows["tokens"].tolist() == [[4, 5, 6, 7, 0, 0], [1, 2, 9, 0, 0, 0], [0] * 6]
    assert rows["segments"].tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 2, 0, 0, 0], [0] * 6]
    assert rows["prompts"].tolist() == rows["segments"].tolist()
    assert spans == [TokenSpan(1, 0, 2), TokenSpan(0, 1, 3), TokenSpan(1, 2, 1)]


def test_without_packing_every_sample_has_a_row():
    samples = [sample([1], [2]), sample([1], [3]), sample([4, 5], [6])]
    batch, spans = make_batch(samples, sizes(row_tokens=6, rows=2, max_rows=3, packing="none"))
    assert [place.row for place in spans] == [0, 1, 2]
    assert batch.tokens.shape == (2, 2, 6)
    assert int(batch.num_micro_batches) == 2


def test_a_prompt_of_one_token_leaves_nothing_to_share():
    batch, spans = make_batch(
        [sample([7], [20, 21]), sample([7], [30])], sizes(row_tokens=4, rows=1, max_rows=2, packing="shared_prompts")
    )
    row = {name: values[0].tolist() for name, values in rows_of(batch).items()}
    assert row["tokens"] == [7, 20, 7, 0]
    assert row["segments"] == [1, 1, 2, 0]
    assert row["prompts"] == [1, 1, 2, 0]
    assert spans == [TokenSpan(0, 0, 2), TokenSpan(0, 2, 1)]


def test_a_group_that_fills_more_than_a_row_repeats_its_prompt():
    group = [sample([1, 2, 3], [10 * n, 10 * n + 1]) for n in range(1, 5)]
    batch, spans = make_batch(group, sizes(row_tokens=6, rows=1, max_rows=4, packing="shared_prompts"))
    assert int(batch.num_micro_batches) == 2
    assert [place.row for place in spans] == [0, 0, 1, 1]
    assert rows_of(batch)["tokens"][:2, :2].tolist() == [[1, 2], [1, 2]]


def test_groups_with_equal_prompts_are_not_mixed_up():
    samples = [sample([1, 2], [3], group=0), sample([1, 2], [4], group=1)]
    batch, _ = make_batch(samples, sizes(row_tokens=8, rows=1, max_rows=2, packing="shared_prompts"))
    assert rows_of(batch)["segments"][0].tolist() == [1, 1, 2, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_sample_that_fits_no_row_is_an_error_with_the_way_out(packing):
    fits = sample([1, 2, 3], [4, 5, 6])
    make_batch([fits], sizes(row_tokens=5, rows=1, max_rows=1, packing=packing))
    message = (
        r"a prompt of 3 tokens with a completion of 3 does not fit in a row of 4 tokens; "
        r"set train\.row_tokens to rollout\.max_prompt_tokens \+ rollout\.max_new_tokens"
    )
    with pytest.raises(ValueError, match=message):
        make_batch([fits], sizes(row_tokens=4, rows=1, max_rows=1, packing=packing))


def test_sharing_prompts_takes_fewer_rows_than_packing_and_that_fewer_than_none():
    samples = [sample(range(13), [1, 2, 3, 4], group=group) for group in range(4) for _ in range(4)]
    batches = [
        make_batch(samples, sizes(row_tokens=32, rows=1, max_rows=16, packing=packing))[0] for packing in PACKINGS
    ]
    assert [int(batch.num_micro_batches) for batch in batches] == [16, 8, 4]


def test_no_samples_are_no_micro_batches():
    batch, spans = make_batch([], sizes(row_tokens=4, rows=2, max_rows=4, packing="shared_prompts"))
    assert (spans, int(batch.num_micro_batches), float(batch.num_tokens)) == ([], 0, 0.0)
    assert batch.tokens.shape == (2, 2, 4)
