import dataclasses
import json
import time
from typing import Any

import numpy as np
import pytest

from podium.config.attention_blocks import cut
from podium.config.schema import Config
from podium.models.attention.mask import Visibility
from podium.observe.records import lengths_record
from podium.plan.request.planned_rows import ShapeShare, attended_blocks, optimizer_steps, packed_step
from podium.plan.request.simulated_device import Clock
from podium.plan.request.workload import Replies, SequenceLengths, Workload, draw_lengths, simulate_rollout
from podium.run.run_spec import RowRules, RowShape
from podium.train.batches.batch import BatchSizes, make_batch
from podium.train.batches.samples import single_answer
from podium.train.batches.shapes import pack
from tests.rollout.tiny_engine import CONFIG, make_engine, random_requests


def config(*, prompts: int = 64, group: int = 8, **sections: Any) -> Config:
    settings = {"model": "none", "tasks": [{"name": "gsm8k"}], "prompts_per_step": prompts, "group_size": group}
    return Config.model_validate({**settings, **sections})


def drawn(source: str, settings: Config, *, seed: int = 0) -> SequenceLengths:
    return draw_lengths(
        source, settings.rollout, prompts=settings.prompts_per_step, completions=settings.group_size, seed=seed
    )


def test_gsm8k_lengths_have_their_mean_under_their_cap():
    lengths = drawn("gsm8k", config(prompts=1024))
    assert lengths.prompts.shape == (1024,)
    assert lengths.completions.shape == (1024, 8)
    assert lengths.completions.mean() == pytest.approx(200, rel=0.03)
    assert (lengths.completions.min() >= 1, lengths.completions.max() <= 1024) == (True, True)
    assert np.percentile(lengths.prompts, [5, 50, 95]) == pytest.approx([71, 94, 139], rel=0.03)


def test_the_mean_holds_where_the_cap_cuts_many():
    lengths = drawn("gsm8k", config(prompts=1024, rollout={"max_new_tokens": 256}))
    assert lengths.completions.mean() == pytest.approx(200, rel=0.03)
    assert np.mean(lengths.completions == 256) > 0.3


def test_completions_of_a_prompt_are_alike():
    completions = np.log(drawn("gsm8k", config(prompts=1024)).completions)
    within, between = completions.var(axis=1, ddof=1).mean(), completions.mean(axis=1).var()
    assert between / within == pytest.approx(1.0 + 1 / 8, rel=0.2)  # half the variance is shared; 1/8 is the noise


def test_a_cap_below_the_mean_cuts_almost_all():
    lengths = drawn("gsm8k", config(rollout={"max_new_tokens": 32}))
    assert np.mean(lengths.completions == 32) > 0.95


def test_prompts_are_cut_to_the_longest():
    assert drawn("gsm8k", config(rollout={"max_prompt_tokens": 64})).prompts.max() == 64


@pytest.mark.parametrize("source", ["gsm8k", "fixed:7"])
def test_the_draw_follows_from_its_seed(source):
    one, again, other = (drawn(source, config(), seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(one.prompts, again.prompts)
    assert np.array_equal(one.completions, again.completions)
    assert not np.array_equal(one.prompts, other.prompts)


def test_fixed_lengths_are_all_the_same():
    assert np.unique(drawn("fixed:17", config()).completions).tolist() == [17]


def test_lengths_of_a_run_keep_prompts_with_their_completions(tmp_path):
    lines = [lengths_record(1, [10, 20], [1, 2, 3, 4]), lengths_record(2, [30], [5, 6])]
    (tmp_path / "lengths.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = {10: {1, 2}, 20: {3, 4}, 30: {5, 6}}
    for source in (tmp_path, tmp_path / "lengths.jsonl"):
        lengths = drawn(str(source), config(group=2))
        assert set(lengths.prompts) == set(own)
        assert all(set(row) == own[prompt] for prompt, row in zip(lengths.prompts, lengths.completions, strict=True))
    more = drawn(str(tmp_path), config(group=5))
    assert more.completions.shape == (64, 5)
    assert all(set(row) <= own[prompt] for prompt, row in zip(more.prompts, more.completions, strict=True))


def test_lengths_of_a_run_are_cut_to_the_config(tmp_path):
    (tmp_path / "lengths.jsonl").write_text(json.dumps(lengths_record(1, [900], [2000, 3])) + "\n")
    lengths = drawn(str(tmp_path), config(group=2))
    assert set(lengths.prompts) == {512}
    assert set(lengths.completions.flat) == {1024, 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no lengths"),
        ('{"step": 1}\n', r"lengths\.jsonl:1: expected as many completion_lengths"),
        ('{"prompt_lengths": [1, 2], "completion_lengths": [1, 2, 3]}\n', "as many completion_lengths"),
        ('{"prompt_lengths": 4, "completion_lengths": [1]}\n', "as many completion_lengths"),
        ("not json\n{}\n", r"lengths\.jsonl:1"),
    ],
)
def test_a_file_that_is_not_of_lengths_is_an_error(tmp_path, text, message):
    path = tmp_path / "lengths.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        drawn(str(path), config())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("fixed:0", "must be 1 to rollout.max_new_tokens, 1024"),
        ("fixed:1025", "must be 1 to rollout.max_new_tokens, 1024"),
        ("gsm9k", "no such file; write gsm8k, fixed:N, or the path of a run"),
    ],
)
def test_a_wrong_source_is_an_error(source, message):
    with pytest.raises(ValueError, match=message):
        drawn(source, config())


def test_a_rollout_by_hand():
    """Two slots, decode calls of two steps; prompts of 3 and 40 tokens (chunks of 32 and 64), two completions each.

    Admitted: (4, 1). A call: the 4 makes its first and 2 more, the 1 ends with its first, and prompt 2's first (2
    tokens) takes its slot. A call ends both in one step; the last one (3 tokens) is alone, in the program of one slot:
    its first and 2 steps.
    """
    settings = config(
        prompts=2,
        group=2,
        rollout={"max_prompt_tokens": 64, "max_new_tokens": 8, "slots": 2, "prefill_rows": 1, "refill_steps": 2},
    )
    lengths = SequenceLengths(prompts=np.array([3, 40]), completions=np.array([[4, 1], [2, 3]]))
    found = simulate_rollout(lengths, settings.rollout)
    assert (found.prefill_calls, found.prefill_tokens) == ({32: 1, 64: 1}, 3 + 40)
    assert (found.copy_calls, found.copied_pages) == (3, 4)  # the part page of each prompt for each completion
    assert found.decodes == {2: (2, 3, pytest.approx((2 * 4.5 + 41) / 3)), 1: (1, 2, 41.5)}
    assert found.occupied_slot_steps == 3 + 0 + 1 + 2
    assert found.mean_context == pytest.approx((4 + 5 + 6 + 41 + 41 + 42) / 6)
    assert (found.prompt_tokens, found.completion_tokens) == (43, 10)
    assert found.slots_busy(2) == pytest.approx(6 / 10)
    assert found.slot_utilisation == pytest.approx(6 / 8)


def test_calls_that_overlap_leave_a_slot_empty_for_one_more():
    settings = config(
        prompts=3, group=1, rollout={"max_prompt_tokens": 8, "max_new_tokens": 8, "slots": 1, "prefill_rows": 1}
    )
    lengths = SequenceLengths(prompts=np.array([1, 1, 1]), completions=np.array([[8], [8], [8]]))
    apart, over = (simulate_rollout(lengths, settings.rollout, overlap=overlap) for overlap in (False, True))
    assert apart.decodes == over.decodes == {1: (3, 24, 4.5)}
    assert apart.occupied_slot_steps == over.occupied_slot_steps == 24


@pytest.mark.parametrize(("group", "times"), [(2, 1), (8, 2)])
def test_a_prompt_is_prefilled_once_unless_slots_would_idle(group, times):
    """Four devices of two slots and a row each: a group of 2 fits one, and one of 8 needs all of them."""
    shape = {"max_prompt_tokens": 32, "max_new_tokens": 8, "slots": 8, "prefill_rows": 4, "refill_steps": 2}
    prompts = 8 // group
    lengths = SequenceLengths(prompts=np.full(prompts, 3), completions=np.full((prompts, group), 4))
    found = simulate_rollout(lengths, config(prompts=prompts, group=group, rollout=shape).rollout, shards=4)
    assert found.prefill_tokens == 3 * (prompts if times == 1 else 4)


def test_pages_that_run_out_cost_steps_but_no_tokens():
    shape = {"max_prompt_tokens": 32, "max_new_tokens": 64, "slots": 8, "prefill_rows": 4, "page_tokens": 8}
    lengths = SequenceLengths(prompts=np.full(8, 20), completions=np.full((8, 2), 64))
    plenty, few = (
        simulate_rollout(lengths, config(prompts=8, group=2, rollout={**shape, "cache_tokens": tokens}).rollout)
        for tokens in (None, 240)
    )
    assert plenty.preempted == 0
    assert few.preempted > 0
    assert few.completion_tokens == plenty.completion_tokens
    assert few.decode_steps > plenty.decode_steps


def test_the_workload_is_what_the_engine_counts():
    requests = [
        random_requests(1, seed=seed, completions=2, max_new_tokens=tokens)[0]
        for seed, tokens in enumerate((12, 1, 7, 3, 9, 2, 12, 5))
    ]
    engine = make_engine(eos_tokens=())  # nothing but its limit ends a completion
    completions, counted = engine.generate(requests)
    lengths = SequenceLengths(
        prompts=np.array([len(request.prompt) for request in requests]),
        completions=np.array([[len(each.tokens) for each in group] for group in completions]),
    )
    found = simulate_rollout(lengths, config(rollout=CONFIG.model_dump()).rollout)
    assert found.decode_steps == counted.calls.decode_steps
    assert found.slot_utilisation == pytest.approx(counted.slot_utilisation)
    assert found.slots_busy(CONFIG.slots) == pytest.approx(counted.slots_busy)
    assert found.prefill_tokens == counted.scheduled.prefill_tokens
    assert found.completion_tokens == counted.completion_tokens
    assert found.prompt_tokens == counted.prompt_tokens


def test_a_thousand_sequences_take_less_than_a_second():
    settings = config(prompts=128, rollout={"slots": 256})
    lengths = drawn("gsm8k", settings)
    simulate_rollout(lengths, settings.rollout)  # imports
    start = time.process_time()
    simulate_rollout(lengths, settings.rollout)
    assert time.process_time() - start < 1


def test_micro_batches_are_those_that_packing_fills():
    """Rows of 20 tokens, two to a micro-batch: a group shares one prompt of 4 (less its last token)."""
    lengths = SequenceLengths(prompts=np.array([4, 4, 4]), completions=np.array([[8, 8], [8, 8], [2, 2]]))
    (step,) = optimizer_steps(lengths, 1)
    counts = {
        packing: pack(
            step, BatchSizes(row_tokens=20, rows=2, max_rows=6, packing=packing, max_new_tokens=10)
        ).micro_batches
        for packing in ("none", "sequences", "shared_prompts")
    }
    # none: 6 rows. sequences: four of 11, two of 5: 4 rows. shared prompts: 19, 19 and 7: 3 rows.
    assert counts == {"none": 3, "sequences": 2, "shared_prompts": 2}


def test_minibatches_are_packed_apart():
    lengths = SequenceLengths(prompts=np.array([2, 2]), completions=np.array([[2, 2], [2, 2]]))
    sizes = BatchSizes(row_tokens=20, rows=2, max_rows=4, packing="shared_prompts", max_new_tokens=10)
    together, apart = (
        packed_step(lengths, sizes, minibatches=parts, attention="blocks", chooses=False).micro_batches
        for parts in (1, 2)
    )
    assert (together, apart) == (1, 2)


def test_a_planned_step_takes_the_shapes_that_a_run_with_its_lengths_chooses():
    """Four groups of 2 + 2 x 9 = 20 tokens, in rows of 40 that come in fours: rows of 20 leave no padding."""
    lengths = SequenceLengths(prompts=np.full(4, 3), completions=np.full((4, 2), 9))
    sizes = BatchSizes(row_tokens=40, rows=4, max_rows=8, packing="shared_prompts", max_new_tokens=20)
    sizes = dataclasses.replace(sizes, rules=RowRules(tile=4, micro_batch_cost=8.0))
    whole = packed_step(lengths, sizes, minibatches=1, attention="blocks", chooses=False)
    assert (whole.shapes, whole.micro_batches) == ((ShapeShare(RowShape(4, 40)),), 1)
    assert (whole.places, whole.own_places, whole.needed) == (160, 160, 80)
    found = packed_step(lengths, sizes, minibatches=1, attention="blocks")
    own, taken = found.shapes
    assert own == ShapeShare(RowShape(4, 40), 0, 0)
    assert taken.shape.rows * taken.shape.row_tokens == 80
    assert (taken.updates, taken.micro_batches) == (1, 1)
    assert (found.places, found.own_places, found.needed) == (80, 160, 80)


def test_a_plan_averages_the_packing_of_steps_like_the_drawn_one():
    """One group of 2 + 2 x 9 tokens and one of 2 + 2 x 19, in rows of 40, one at a time: 2 of the first, of the second,
    or one of each fill 1, 2 or 2 rows, and 40, 80 or 60 places are needed.
    """
    lengths = SequenceLengths(prompts=np.full(2, 3), completions=np.array([[9, 9], [19, 19]]))
    sizes = BatchSizes(row_tokens=40, rows=1, max_rows=4, packing="shared_prompts", max_new_tokens=20)
    found = packed_step(lengths, sizes, minibatches=1, attention="blocks", chooses=False)
    assert 1 < found.micro_batches < 2
    assert found.places == 40 * found.micro_batches
    assert 40 < found.needed < 80


@pytest.mark.parametrize("packing", ["none", "sequences", "shared_prompts"])
def test_attention_is_counted_by_the_blocks_that_the_kernel_multiplies(packing: str):
    """As the trainer's own batch of the same lengths, and the kernel's own rule."""
    rng = np.random.default_rng(0)
    lengths = SequenceLengths(prompts=rng.integers(1, 200, 5), completions=rng.integers(1, 800, (5, 3)))
    samples = [
        single_answer(group=n, prompt=(7,) * int(lengths.prompts[n]), tokens=blank, sampled_logprobs=blank)
        for n in range(5)
        for blank in (np.zeros(tokens, np.int32) for tokens in lengths.completions[n])
    ]
    sizes = BatchSizes(row_tokens=1500, rows=4, max_rows=32, packing=packing, max_new_tokens=800)
    batch = make_batch(samples, sizes)[0]
    n, t = cut("tpu_kernel", 1500)
    visibility = Visibility(batch.segments.reshape(-1, 1500), batch.prompts.reshape(-1, 1500))
    multiplied = np.asarray(visibility.cut(n, t).block_pairs())
    (step,) = optimizer_steps(lengths, 1)
    found = pack(step, sizes)
    seen, blocks = attended_blocks(found, step, "tpu_kernel")
    assert found.micro_batches == batch.num_micro_batches
    assert 0 < seen < blocks
    assert seen == multiplied.sum()
    assert blocks == 4 * int(batch.num_micro_batches) * n * (n + 1) / 2


def test_carrying_completions_over_takes_fewer_steps_for_the_same_tokens():
    """A steady state: as many tokens as without, half of the prompts an update old, and what goes on is made anew."""
    shape = {"max_prompt_tokens": 32, "max_new_tokens": 64, "slots": 16, "prefill_rows": 4, "refill_steps": 2}
    lengths = SequenceLengths(
        prompts=np.full(4, 8), completions=np.array([[4, 8], [4, 64], [8, 6], [16, 4]], dtype=int)
    )
    waits, carries = (
        simulate_rollout(lengths, config(prompts=4, group=2, rollout={**shape, "in_flight": over}).rollout)
        for over in (1.0, 1.5)
    )
    assert carries.completion_tokens == waits.completion_tokens
    assert carries.decode_steps < 0.8 * waits.decode_steps
    assert (waits.staleness, carries.staleness) == (0.0, pytest.approx(0.5, abs=0.3))
    assert carries.prefill_tokens > waits.prefill_tokens


def test_conversations_that_a_step_leaves_go_on_in_the_next():
    """In the middle of an answer, or waiting for a reply; what they said is prefilled again, and drawn once."""
    lengths = [[4 + 23, 4 + 5], [4 + 6, 4 + 40], [4 + 8, 4 + 3], [4 + 30, 4 + 12]]
    shape = {"max_prompt_tokens": 8, "max_new_tokens": 24, "max_episode_tokens": 64, "slots": 8, "refill_steps": 2}
    made = SequenceLengths(
        prompts=np.full(4, 4), completions=np.array(lengths), replies=Replies(turns=2, tokens=4, seconds=1.0)
    )
    clock = Clock(prefill_s={8: 0.01}, decode_s={1: 0.1, 2: 0.1, 4: 0.1, 8: 0.1})
    waits, carries = (
        simulate_rollout(made, config(prompts=4, group=2, rollout={**shape, "in_flight": over}).rollout, clock=clock)
        for over in (1.0, 1.5)
    )
    assert carries.completion_tokens == waits.completion_tokens == sum(map(sum, lengths)) - 8 * 4
    assert carries.occupied_slot_steps == pytest.approx(waits.occupied_slot_steps, rel=0.1)  # nothing is drawn twice
    assert carries.seconds < waits.seconds and carries.decode_steps < waits.decode_steps
    assert carries.prefill_tokens > waits.prefill_tokens and carries.rebuilt_tokens > 0
    assert 0 < carries.staleness <= 2


def talk(lengths: list[list[int]], replies: Replies, **changes) -> Workload:
    """Conversations of prompts of 4 tokens, timed: a prefill call takes 0.5 s, a decode step 0.1 s."""
    shape = {"max_prompt_tokens": 8, "max_new_tokens": 8, "max_episode_tokens": 64, "refill_steps": 4, **changes}
    found = SequenceLengths(prompts=np.full(len(lengths), 4), completions=np.array(lengths), replies=replies)
    rollout = config(rollout={"page_tokens": 4, "slots": 4, "prefill_rows": 4, **shape}).rollout
    return simulate_rollout(found, rollout, clock=Clock(prefill_s={8: 0.5}, decode_s={1: 0.1, 4: 0.1}))


def test_a_conversation_waits_for_its_replies_and_prefills_only_what_is_new():
    """Two answers of 5 tokens: a prompt, 5 steps (the first token needs none), 2 s, 3 new tokens, 5 steps."""
    found = talk([[13]], Replies(turns=2, tokens=3, seconds=2.0))
    assert (found.completion_tokens, found.prefill_tokens) == (10, 4 + 1 + 3)
    assert found.prefill_calls == {8: 2}
    assert found.idle_s == pytest.approx(2.0)
    assert found.seconds == pytest.approx(2 * 0.5 + found.decode_steps * 0.1 + 2.0)
    assert found.decode_steps == 2 * 4  # the first token of each answer is drawn from what prefill kept


def test_others_are_decoded_while_one_waits():
    """One slot, two conversations: the second answers while the first one's reply is made."""
    found = talk([[13], [13]], Replies(turns=2, tokens=3, seconds=1.0), slots=1, prefill_rows=1)
    alone = talk([[13]], Replies(turns=2, tokens=3, seconds=1.0), slots=1, prefill_rows=1)
    assert found.seconds < 2 * alone.seconds - 0.9
    assert found.idle_s < alone.idle_s == pytest.approx(1.0)
    assert found.completion_tokens == found.occupied_slot_steps + 4 == 20


def test_parked_conversations_hold_pages_and_lose_them_where_there_are_few():
    lengths = [[23, 23, 23, 23]] * 4
    enough = talk(lengths, Replies(turns=2, tokens=3, seconds=9.0))
    few = talk(lengths, Replies(turns=2, tokens=3, seconds=9.0), cache_tokens=18 * 4)
    assert enough.rebuilt_tokens == 0 < few.rebuilt_tokens
    assert few.pages_peak <= 18 < enough.pages_peak


def test_lengths_of_conversations_are_said_and_must_fit():
    rollout = config(rollout={"max_episode_tokens": 2048}).rollout
    found = draw_lengths("fixed:20,turns:3,reply:40,seconds:1.5", rollout, prompts=2, completions=2)
    assert found.replies == Replies(turns=3, tokens=40, seconds=1.5)
    assert found.drawn.tolist() == [[60, 60]] * 2
    assert found.completions.tolist() == [[140, 140]] * 2
    with pytest.raises(ValueError, match=r"write LENGTHS,turns:T,reply:R,seconds:S"):
        draw_lengths("gsm8k,turns:3", rollout, prompts=2, completions=2)
    with pytest.raises(ValueError, match=r"has no room for 9 answers and 8 replies of 400 tokens; raise it"):
        draw_lengths("gsm8k,turns:9,reply:400,seconds:1", rollout, prompts=2, completions=2)


def test_conversations_whose_pages_are_reserved_let_others_begin_when_they_end():
    """Four slots, and pages for six of 32 conversations: where all six wait for replies, nothing else can begin."""
    sizes = {"max_prompt_tokens": 100, "max_new_tokens": 100, "max_episode_tokens": 460, "page_tokens": 16}
    shape = {**sizes, "slots": 4, "prefill_rows": 8, "reproducible": True}
    lengths = SequenceLengths(
        prompts=np.full(8, 40), completions=np.full((8, 4), 66), replies=Replies(turns=3, tokens=3, seconds=3.0)
    )
    clock = Clock(prefill_s={100: 0.1}, decode_s={4: 0.01})
    found = simulate_rollout(lengths, config(prompts=8, group=4, rollout=shape).rollout, clock=clock)
    assert found.completion_tokens == 32 * 60
    assert found.idle_s > 5 * 3.0  # six conversations after another six
