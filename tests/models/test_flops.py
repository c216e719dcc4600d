import dataclasses
import math

import numpy as np
import pytest
from tiny_decoder import DECODER, tiny

from podium.models.architecture import Lora
from podium.models.attention.mask import Visibility
from podium.models.flops import Work, forward_flops, group_work, step_work, update_flops
from podium.models.params import param_specs
from podium.models.presets import PRESETS, preset_decoder
from podium.train.batches.batch import BatchSizes, make_batch
from podium.train.batches.samples import single_answer


def test_a_group_s_prompt_counts_once_and_its_completions_see_it():
    # 4 tokens of the prompt by themselves: 10 pairs; 3 and 2 that each see them and their own: 12 + 6, 8 + 3
    assert group_work(5, [3, 2]) == Work(tokens=9, pairs={None: 39})
    assert group_work(1, [1]) == Work(tokens=1, pairs={None: 1})
    assert step_work([5, 1], [[3, 2], [1]]) == Work(tokens=10, pairs={None: 40})


def test_an_update_is_six_operations_an_element_and_token_and_attention_by_half():
    layer = 2 * 32 * (4 + 2) * 8 + 3 * 32 * 48
    assert DECODER.active == 2 * layer + 300 * 32
    causal = Work(tokens=100, pairs={None: 100 * 101 // 2})
    whole_square = 12 * 100 * 100 * 4 * 8 * 2
    found = update_flops(DECODER, causal) - 6 * 100 * DECODER.active
    assert found == pytest.approx(whole_square / 2, rel=0.011)
    assert update_flops(DECODER, causal) == 3 * forward_flops(DECODER, causal)


def test_with_adapters_the_frozen_matrices_have_no_gradient():
    decoder = tiny(lora=Lora(rank=2, alpha=2.0, targets=("q", "down")))
    adapters = 2 * (2 * (32 + 32) + 2 * (48 + 32))
    found = update_flops(decoder, Work(tokens=10, pairs={None: 0}))
    assert found == 10 * (4 * DECODER.active + 6 * adapters)


def test_the_elements_are_those_of_the_specs_that_are_matrices():
    specs = param_specs(DECODER)
    matrices = (spec for spec in specs.values() if sum(axis is not None for axis in spec.axes) > 1)
    assert DECODER.active == sum(int(np.prod(spec.shape)) for spec in matrices)  # tied: the head once


@pytest.mark.parametrize("model", PRESETS)
def test_a_layer_s_cost_has_each_matrix_between_its_input_and_its_output_once(model):
    """Of experts' matrices a token meets those of its own."""
    decoder = preset_decoder(model)
    for kind in {each for block in decoder.blocks for each in (block.mixer, block.feed_forward)}:
        active = total = 0
        for spec in kind.specs(decoder.width, std=0.0, out_std=0.0).values():
            if len(spec.shape) - spec.stacked > 1 and {"width", "expert_width"} & set(spec.axes):
                total += math.prod(spec.shape)
                active += math.prod(spec.shape) * kind.top // kind.count if spec.stacked else math.prod(spec.shape)
        work = kind.work(decoder.width)
        assert (work.active, work.total) == (active, total)


def test_the_work_is_what_a_row_of_shared_prompts_holds():
    random = np.random.default_rng(0)
    lengths = [random.integers(1, 9, 3).tolist() for _ in range(4)]
    prompts = random.integers(1, 7, 4).tolist()
    samples = [
        single_answer(
            group=n, prompt=(1,) * prompt, tokens=np.zeros(own, np.int32), sampled_logprobs=np.zeros(own, np.float32)
        )
        for n, (prompt, group) in enumerate(zip(prompts, lengths, strict=True))
        for own in group
    ]
    sizes = BatchSizes(row_tokens=32, rows=4, max_rows=12, packing="shared_prompts", max_new_tokens=8)
    batch, _ = make_batch(samples, sizes)
    segments, shared = np.concatenate(batch.segments), np.concatenate(batch.prompts)
    used = segments > 0
    visibility = Visibility(segments, shared, np.concatenate(batch.positions))
    pairs = {
        window: int((np.asarray(dataclasses.replace(visibility, window=window).mask()) & used[:, :, None]).sum())
        for window in (1, 3, 5, None)
    }
    assert len(set(pairs.values())) == 4
    assert step_work(prompts, lengths, (1, 3, 5, None)) == Work(tokens=int(used.sum()), pairs=pairs)


def test_attention_within_a_window_counts_the_pairs_of_the_window():
    decoder = preset_decoder("google/gemma-3-1b-it")  # 22 layers of windows of 512, and 4 without; 4 heads of 256
    assert decoder.windows == (512, None)
    a_pair = 2 * 2 * 4 * 256  # a score and a weighted value
    assert forward_flops(decoder, Work(tokens=0, pairs={512: 10, None: 1000})) == a_pair * (22 * 10 + 4 * 1000)
