"""The shapes of a run's micro-batches: which are chosen, and that no step's result depends on them."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.run.run_spec import BatchSizes, RowRules, RowShape
from podium.train.batches.balance import Lengths
from podium.train.batches.packing import Chunk, divide_rows
from podium.train.batches.shapes import Packed, choose_shapes, pack


def sizes_of(rows: int, row_tokens: int, *shapes: tuple[int, int], **changes) -> BatchSizes:
    """A shape, and others as (rows, tokens)."""
    rules = {"micro_batch_cost": changes.pop("cost", 0.0), "tile": changes.pop("tile", 1)}
    rules |= {"row_step": changes.get("devices", 1), "shapes": tuple(RowShape(*shape) for shape in shapes)}
    return BatchSizes(
        **{"packing": "shared_prompts", "max_rows": 64, "max_new_tokens": row_tokens} | changes,
        rows=rows,
        row_tokens=row_tokens,
        rules=RowRules(**rules),
    )


def lengths_of(*groups: tuple[int, list[int]]) -> list[Lengths]:
    """The lengths of groups, each of a prompt without its last token, and completions."""
    return [Lengths(group=n, shown=shown, own=own) for n, (shown, each) in enumerate(groups) for own in each]


def tokens_of(row: list[Chunk], samples: list[Lengths]) -> int:
    """Tokens in a row: each chunk's prompt, and its completions."""
    return sum(samples[chunk[0]].shown + sum(samples[index].own for index in chunk) for chunk in row)


def shape_of(packed: Packed) -> tuple[int, int, int]:
    """Micro-batches, and the rows and tokens of each."""
    return packed.micro_batches, packed.sizes.rows, packed.sizes.row_tokens


GROUPS = st.lists(
    st.tuples(st.integers(0, 12), st.lists(st.integers(1, 12), min_size=1, max_size=5)), min_size=1, max_size=8
)


@given(groups=GROUPS)
def test_divided_rows_hold_each_sample_once_behind_its_own_prompt(groups):
    samples = lengths_of(*groups)
    rows = divide_rows(samples, row_tokens=24)
    assert Counter(index for row in rows for chunk in row for index in chunk) == Counter(range(len(samples)))
    for row in rows:
        assert 0 < tokens_of(row, samples) <= 24
        owners = [{samples[index].group for index in chunk} for chunk in row]
        assert all(len(owner) == 1 for owner in owners)
        assert len(set.union(*owners)) == len(row)  # each prompt once


def test_a_group_is_divided_only_where_that_saves_a_micro_batch():
    """Three groups of 2 + 3 x 4 = 14 tokens: whole, each fills a row of 20; divided, 42 + one prompt more fit in 3."""
    samples = lengths_of(*[(2, [4, 4, 4])] * 3)
    assert [len(row) for row in pack(samples, sizes_of(1, 20)).rows] == [1, 1, 1]
    # In rows of 30, two whole groups and one: as few as divided.
    assert sorted(len(row) for row in pack(samples, sizes_of(1, 30)).rows) == [1, 2]
    # Four groups are 56 tokens: two rows of 30 hold them only whole, four of 14 likewise, and 20 x 3 if divided.
    four = lengths_of(*[(2, [4, 4, 4])] * 4)
    divided = pack(four, sizes_of(1, 22)).rows
    assert len(divided) == 3
    assert sum(tokens_of(row, four) for row in divided) == 56 + 2 * (sum(len(row) for row in divided) - 4)
    whole = pack(four, sizes_of(4, 22)).rows  # one micro-batch either way
    assert [len(row) for row in whole] == [1] * 4


def test_a_pair_is_never_divided():
    samples = lengths_of(*[(2, [9, 9])] * 3)
    together = sizes_of(1, 30, (2, 11), pairs=True)
    packed = pack(samples, together)
    assert shape_of(packed) == (3, 1, 30)  # a row of 11 holds one completion, and no pair
    assert all(len(chunk) == 2 for row in packed.rows for chunk in row)
    alone = pack(samples, dataclasses.replace(together, pairs=False))
    assert shape_of(alone) == (3, 2, 11)


def test_places_and_micro_batches_decide_which_shape_a_step_takes():
    """Ten samples of 10 tokens: 5 rows of 20 or 4 of 30; (micro-batches, rows, tokens) by the cost of one."""
    samples = lengths_of(*[(0, [10])] * 10)
    chosen = {cost: shape_of(pack(samples, sizes_of(4, 30, (1, 20), (5, 20), cost=cost))) for cost in (0.0, 50.0)}
    assert chosen == {0.0: (5, 1, 20), 50.0: (1, 5, 20)}
    assert shape_of(pack(samples, sizes_of(4, 30, (1, 20), cost=100.0))) == (1, 4, 30)
    # The longest sequence must fit.
    assert shape_of(pack(lengths_of((0, [21]), (0, [1])), sizes_of(4, 30, (1, 20)))) == (1, 4, 30)
    assert shape_of(pack([], sizes_of(4, 30, (1, 20)))) == (0, 4, 30)


def test_a_sequence_that_fits_no_row_is_an_error_whatever_the_shapes():
    with pytest.raises(ValueError, match=r"a prompt of 3 tokens with a completion of 29 does not fit in a row of 30"):
        pack(lengths_of((2, [29])), sizes_of(2, 30, (3, 20)))


@given(groups=GROUPS, devices=st.sampled_from((1, 2)), tile=st.sampled_from((1, 4)))
def test_shapes_are_within_the_memory_of_the_configs_own_and_divide_over_devices(groups, devices, tile):
    samples = lengths_of(*groups)
    own = sizes_of(3 * devices, 26, devices=devices, tile=tile, cost=5.0)
    by_group = [list(each) for _, each in itertools.groupby(samples, lambda sample: sample.group)]
    shapes = choose_shapes(by_group, own, per_step=len(by_group))
    assert len(shapes) <= 3
    assert len({own.shape, *shapes}) == len(shapes) + 1
    for shape in shapes:
        assert shape.rows * shape.row_tokens <= own.rows * own.row_tokens
        assert shape.row_tokens <= own.row_tokens
        assert (shape.rows % devices, shape.row_tokens % tile) == (0, 0)
        batch = own.of_shape(shape)
        assert batch.max_rows * batch.row_tokens <= own.max_micro_batches * own.rows * own.row_tokens
    with_shapes = dataclasses.replace(own, rules=dataclasses.replace(own.rules, shapes=shapes))
    before, after = pack(samples, own), pack(samples, with_shapes)
    assert after.time <= before.time
    assert after.micro_batches <= after.sizes.max_micro_batches  # so its arrays hold the step
    assert Counter(index for row in after.rows for chunk in row for index in chunk) == Counter(range(len(samples)))


def test_the_same_lengths_choose_the_same_shapes_and_none_is_chosen_from_nothing():
    random = np.random.default_rng(3)
    groups = [[Lengths(group=n, shown=20, own=int(own)) for own in random.integers(5, 60, 8)] for n in range(6)]
    own = sizes_of(4, 160, tile=16, cost=40.0)
    found = choose_shapes(groups, own, per_step=6)
    assert found
    assert found == choose_shapes([list(each) for each in groups], own, per_step=6)
    assert choose_shapes([[], []], own, per_step=2) == ()
    assert choose_shapes([], own, per_step=2) == ()
