import dataclasses
from typing import Any

import pytest
from estimated import SMALL, config, decoder

from podium.accelerators import find_accelerator
from podium.models.architecture import make_lora
from podium.models.blocks.attention import Attention
from podium.models.presets import preset_decoder
from podium.plan.calibration import load_chip
from podium.plan.planned_device import closed_form_roofline
from podium.plan.request.phase_sizes import Planned, RunSizes
from podium.plan.traced.estimate import Piece, decode_phase, prefill_phase, score_phase
from podium.plan.traced.gpu_forward import (
    DRAW_KERNELS,
    STEP_KERNELS,
    decode_kernels,
    operand_bytes,
    prefill_attention,
    prefill_passes,
    scoring_passes,
)

WIDTH, INNER, HEADS, KEYS, LAYERS = 16, 24, 16, 8, 2  # of SMALL, and of all heads' queries and keys
ROWS, TOKENS, PAGE = 8, 8, 16


def run_of(model=SMALL, machine: str = "h100-1", *, lora: dict[str, Any] | None = None, **rollout: Any) -> RunSizes:
    settings = {"max_prompt_tokens": 8, "max_new_tokens": 8, "slots": 16, "prefill_rows": ROWS, "page_tokens": PAGE}
    run = config(lora=lora, rollout={**settings, **rollout})
    return Planned.of(run, find_accelerator(machine), dataclasses.replace(model, lora=make_lora(run.lora))).sizes


def windowed(window: int):
    stack = SMALL.stacks[0]
    (block,) = stack.pattern
    assert isinstance(block.mixer, Attention)
    seen = dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, window=window))
    return dataclasses.replace(SMALL, stacks=(dataclasses.replace(stack, pattern=(seen,)),))


def test_a_decode_step_launches_a_few_small_kernels_a_layer_and_those_of_weights_and_cache():
    plain = DRAW_KERNELS + LAYERS * STEP_KERNELS
    assert decode_kernels(run_of()) == (plain, 5 * LAYERS)
    assert decode_kernels(run_of(decoder(qk_norm=True))) == (plain + LAYERS, 5 * LAYERS)


def test_adapters_add_three_kernels_to_each_product_and_three_more_where_devices_add_up():
    plain = DRAW_KERNELS + LAYERS * STEP_KERNELS
    lora = {"rank": 4, "rollout": "apart"}
    adapted, products = decode_kernels(run_of(lora=lora))
    assert (adapted - plain, products) == (LAYERS * 4 * 3, 5 * LAYERS)
    split, _ = decode_kernels(run_of(machine="h100-2", lora=lora, layout="tensor"))
    assert split - adapted == LAYERS * (1 + 2 * 3)  # the matrices o and down are split by rows
    merged, _ = decode_kernels(run_of(lora={"rank": 4, "rollout": "merged"}))
    assert merged == plain


@pytest.mark.parametrize(("base", "size"), [("bfloat16", 2), ("int8", 1)])
def test_the_trainers_stacks_are_copied_layer_by_layer(base, size):
    plain = DRAW_KERNELS + LAYERS * STEP_KERNELS
    stacked = run_of(lora={"rank": 4, "base": base, "rollout": "shared"})
    apart = run_of(lora={"rank": 4, "rollout": "apart"})
    small, large = decode_kernels(stacked)
    assert (small - plain, large) == (LAYERS * (5 + 7 * 5), 15 * LAYERS)  # seven adapters, seven copies
    matrices = LAYERS * (WIDTH * (2 * HEADS + 2 * KEYS) + 3 * WIDTH * INNER)
    assert (operand_bytes(stacked), operand_bytes(apart)) == (2 * size * matrices, 0)
    phases = [decode_phase(run).hbm_bytes - run.layer_bytes for run in (stacked, apart)]
    assert phases[0] - phases[1] == operand_bytes(stacked)


@pytest.mark.parametrize(("rollout", "kernels"), [("shared", 27), ("apart", 9)])
def test_codes_of_nf4_are_expanded_wherever_they_are_stored(rollout, kernels):
    run = run_of(preset_decoder("Qwen/Qwen2.5-0.5B-Instruct"), lora={"rank": 4, "base": "nf4", "rollout": rollout})
    matrices = 24 * 896 * (2 * 896 + 2 * 128 + 3 * 4864)
    copied = matrices if rollout == "shared" else 0  # two codes in a byte, written and read
    assert operand_bytes(run) == 2 * 2 * matrices + copied
    _, large = decode_kernels(run)
    assert large == kernels * 24  # products, what copies and expands their operands, and the cache
    merged = run_of(preset_decoder("Qwen/Qwen2.5-0.5B-Instruct"), lora={"rank": 4, "base": "nf4", "rollout": "merged"})
    assert (operand_bytes(merged), decode_kernels(merged)[1]) == (0, 5 * 24)


@pytest.mark.parametrize(
    ("machine", "expanded"),
    [("v6e-1", 3 * 12288 * 4096), ("v6e-8", 0), ("v5p-8", (3 * 12288 + 2 * 4096) * 4096)],  # keys and values are small
)
def test_a_tpu_expands_nf4_in_main_memory_if_a_matrix_is_too_large_for_fast_memory(machine, expanded):
    beside: list[int] = []
    for base in ("bfloat16", "nf4"):
        run = run_of(preset_decoder("Qwen/Qwen3-8B"), machine, lora={"rank": 4, "base": base}, layout="tensor")
        found = decode_phase(run)
        relaid = 2 * found.parts["relaid_weights"] // run.rollout.refill_steps
        beside.append(found.hbm_bytes - found.least_bytes - relaid)
    bits, codes = beside
    assert codes - bits == 2 * 2.5 * 36 * expanded / find_accelerator(machine).devices


def test_codes_that_are_multiplied_as_integers_are_copied_before_the_steps():
    codes, integers = (
        decode_phase(run_of(dataclasses.replace(SMALL, rollout_weights=weights), weights=weights))
        for weights in ("int8", "w8a8")
    )
    matrices = LAYERS * (WIDTH * (2 * HEADS + 2 * KEYS) + 3 * WIDTH * INNER)
    assert (codes.parts["relaid_weights"], integers.parts["relaid_weights"]) == (0, matrices)


def test_attention_of_a_prefill_moves_scores_five_times_and_sums_of_each_page():
    run = run_of()
    queries = ROWS * TOKENS * 4  # of four heads, as whole heads
    scores, values = 4 * queries * 256, 4 * queries * 4  # a block has 16 pages of 16 tokens
    found = prefill_attention(run, ROWS, TOKENS, cached=512)
    assert found.products == LAYERS * 2 * (16 * (values // 2 + values) + scores + scores // 2)
    assert found.passes == LAYERS * (2 * (3 * scores + scores // 2 + 18 * values) + values + values // 2)
    assert (found.kernels, found.small) == (LAYERS * (2 * 36 + 1), LAYERS * (2 * 7 + 3))


def test_a_window_ends_the_blocks_that_a_prefill_attends_to():
    full, seen = (
        prefill_attention(run_of(model, max_prompt_tokens=1024), ROWS, 1024, cached=1024)
        for model in (SMALL, windowed(64))
    )
    assert seen.passes < 0.5 * full.passes and seen.products < 0.5 * full.products
    short = [prefill_attention(run_of(model), ROWS, TOKENS, cached=256) for model in (SMALL, windowed(64))]
    assert short[0] == short[1]  # a window that is longer than a sequence changes nothing


def test_passes_of_a_layer_are_counted_in_its_arrays():
    tokens = ROWS * TOKENS
    heads = 3 * HEADS + 4 * KEYS
    assert prefill_passes(run_of(), tokens) == tokens * 2 * LAYERS * (13 * WIDTH + 3 * INNER + heads + 10 * KEYS)
    lora = run_of(lora={"rank": 4, "rollout": "apart"})
    inputs, outputs = WIDTH + HEADS + WIDTH + INNER, HEADS + 2 * KEYS + WIDTH + 2 * INNER + WIDTH
    added = tokens * 2 * LAYERS * (inputs + 2 * outputs)  # matrices with one input read it once
    assert prefill_passes(lora, tokens) - prefill_passes(run_of(), tokens) == added
    assert scoring_passes(run_of()) == run_of().tokens * 2 * LAYERS * (13 * WIDTH + 3 * INNER + heads)


def test_passes_add_to_products_and_launches_bound_small_kernels():
    run = run_of()
    peaks = load_chip("h100").peaks
    prefill = prefill_phase(run, TOKENS)
    line = closed_form_roofline(prefill, run, peaks, 1)
    attended = prefill_attention(run, ROWS, TOKENS, 256)
    took = [max(piece.flops / peaks.flops_bf16, piece.hbm_bytes / peaks.hbm_bandwidth) for piece in prefill.pieces]
    assert line.compute + line.hbm == pytest.approx(sum(took))
    assert line.latency == pytest.approx((attended.small + attended.kernels) * peaks.kernel_s - took[1])
    assert len(score_phase(run).pieces) == 4 and len(prefill_phase(run_of(machine="v6e-1"), TOKENS).pieces) == 1


def test_a_piece_without_kernels_has_no_launches():
    run = run_of()
    alone = dataclasses.replace(prefill_phase(run, TOKENS), pieces=(Piece(10**12, 0),), kernels=(0, 0))
    assert closed_form_roofline(alone, run, load_chip("h100").peaks, 1).latency == 0
