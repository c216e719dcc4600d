import dataclasses
from typing import Any

import pytest
from estimated import CPU, QWEN_3B, SMALL, decoder, tiny_config

from podium.accelerators import find_accelerator
from podium.models.architecture import make_lora
from podium.plan.calibration import load_chip
from podium.plan.planned_device import OF_LOOPS, closed_form_roofline
from podium.plan.planner import make_plan
from podium.plan.request.phase_sizes import (
    F32,
    Planned,
    RunSizes,
    fused_chunks,
    head_number,
    optimizer_bytes,
)
from podium.plan.traced.estimate import Piece, update_phase
from podium.plan.traced.update_traffic import SUMMED, update_kernels, update_passes

WIDTH, INNER, HEADS, KEYS, LAYERS, VOCAB = 16, 24, 16, 8, 2, 32  # of SMALL


def run_of(machine: str = "v6e-1", *, lora: dict[str, Any] | None = None, **train: Any) -> RunSizes:
    config = tiny_config(mesh="auto", lora=lora, train={"dtype": "bfloat16", **train})
    model = dataclasses.replace(SMALL, lora=make_lora(config.lora))
    return Planned.of(config, find_accelerator(machine), model).sizes


@pytest.mark.parametrize(("remat", "into", "out"), [("layer", 6, 7), ("none", 5, 5)])
def test_an_adapters_products_pass_over_inputs_and_outputs(remat, into, out):
    run = run_of(lora={"rank": 4}, remat=remat)
    inputs = 3 * WIDTH + HEADS + 2 * WIDTH + INNER
    outputs = HEADS + 2 * KEYS + WIDTH + 2 * INNER + WIDTH
    assert update_passes(run, 1)["adapters"] == 2 * run.tokens * LAYERS * (into * inputs + out * outputs)
    assert update_passes(run_of(remat=remat), 1)["adapters"] == 0


def test_the_optimizers_step_is_shared_out_over_micro_batches():
    run = run_of()
    one, four = (update_passes(run, count)["optimizer"] for count in (1, 4))
    assert one == 4 * F32 * run.own_count + 2 * optimizer_bytes(run) == 4 * four


def test_gradients_are_summed_only_over_several_micro_batches():
    several, single = run_of(), run_of(rows_per_device=16)
    assert (several.spec.batch.max_micro_batches > 1, single.spec.batch.max_micro_batches) == (True, 1)
    assert update_passes(several, 4)["gradients"] == SUMMED * F32 * several.own_count
    assert update_passes(single, 1)["gradients"] == 0


def test_what_a_layer_saves_is_moved_again_on_a_gpu_and_once_more_in_groups():
    layer_inputs = LAYERS * WIDTH * 2
    for machine, passes in (("v6e-1", 1), ("h100-1", 4)):
        run = run_of(machine)
        assert update_passes(run, 1)["saved"] == passes * run.tokens * layer_inputs
    grouped = run_of("h100-1", rows_per_device=2, layer_chunk_tokens=40)
    assert grouped.update.row_groups == 2
    assert update_passes(grouped, 1)["saved"] == 6 * grouped.tokens * layer_inputs


def test_frozen_codes_are_written_out_and_a_gpu_joins_frozen_weights_with_adapters():
    matrices = LAYERS * (WIDTH * (2 * HEADS + 2 * KEYS) + 3 * WIDTH * INNER)
    int8 = {"rank": 4, "base": "int8"}
    assert update_passes(run_of(lora=int8), 1)["codes"] == 2 * matrices * (1 + 2 * 2)
    assert update_passes(run_of(lora={"rank": 4}), 1)["codes"] == 0
    assert update_passes(run_of(lora={"rank": 4}), 1)["joined"] == 0
    assert update_passes(run_of("h100-1", lora={"rank": 4}), 1)["joined"] >= 2 * 2 * 2 * matrices


def test_gathered_weights_are_copied_and_their_gradients_added_where_devices_share_them():
    assert update_passes(run_of(), 1)["exchanged"] == 0
    whole = run_of("v6e-4")
    weights = LAYERS * (WIDTH * (2 * HEADS + 2 * KEYS) + 3 * WIDTH * INNER + 2 * WIDTH) + VOCAB * WIDTH + WIDTH
    assert update_passes(whole, 1)["exchanged"] == weights * (2 * 2 + 5 * F32)
    frozen = update_passes(run_of("v6e-4", lora={"rank": 4}), 1)["exchanged"]
    assert 0 < frozen < weights * (2 * 2 + F32)


def test_bytes_of_one_piece_do_not_hide_behind_operations_of_another():
    run, chip = run_of(), load_chip("v6e")
    form = dataclasses.replace(
        update_phase(run), pieces=(Piece(int(chip.peaks.flops_bf16), 0), Piece(0, 2 * int(chip.peaks.hbm_bandwidth)))
    )
    apart = closed_form_roofline(form, run, chip.peaks, 1)
    assert (round(apart.compute, 6), round(apart.hbm, 6)) == (1.0, 2.0)
    joined = dataclasses.replace(form, pieces=(Piece(*map(sum, zip(*form.pieces, strict=True))),))
    hidden = closed_form_roofline(joined, run, chip.peaks, 1)
    assert (round(hidden.compute, 6), round(hidden.hbm, 6)) == (0.0, 2.0)


def test_what_a_tpu_sends_hides_behind_the_products_of_its_layers():
    run, peaks = run_of("v6e-4"), load_chip("v6e").peaks
    second = int(peaks.link_bandwidth)
    long, short = Piece(3 * int(peaks.flops_bf16), 0), Piece(int(peaks.flops_bf16), 0)
    for pieces, hidden, waited in (
        ((long, short), 2 * second, 1.0),
        ((short, long), 2 * second, 2.0),
        ((long, short), 0, 3.0),
    ):
        form = dataclasses.replace(update_phase(run), pieces=pieces, ici_bytes=3 * second, hidden_bytes=hidden)
        assert round(closed_form_roofline(form, run, peaks, 1).ici, 6) == waited
    assert update_phase(run).hidden_bytes == update_phase(run).ici_bytes > 0
    assert update_phase(run_of("h100-8")).hidden_bytes == 0 < update_phase(run_of("h100-8")).ici_bytes


def test_a_phases_totals_are_those_of_its_pieces():
    form = update_phase(run_of(), 4)
    assert form.flops == sum(piece.flops for piece in form.pieces)
    assert form.hbm_bytes == sum(piece.hbm_bytes for piece in form.pieces)
    assert form.hbm_bytes > sum(update_passes(run_of(), 4).values())


def test_an_updates_launches_take_time_on_gpus_alone():
    small = run_of("h100-1")
    found = {
        name: closed_form_roofline(update_phase(run_of(name)), run_of(name), load_chip(kind).peaks, 1).latency
        for name, kind in (("h100-1", "h100"), ("v6e-1", "v6e"))
    }
    assert found == {"h100-1": update_kernels(small, 9) * load_chip("h100").peaks.kernel_s, "v6e-1": 0.0}


def test_attention_in_blocks_moves_more_the_more_blocks_see_each_other():
    def bytes_of(tokens: int) -> int:
        config = tiny_config({"rollout": {"max_new_tokens": tokens - 32}}, mesh="auto", train={"attention": "blocks"})
        return update_phase(Planned.of(config, find_accelerator("v6e-1"), SMALL).sizes).pieces[2].hbm_bytes

    assert bytes_of(128) * 10 // 3 == bytes_of(256)  # 3 and 10 pairs of blocks of 64 tokens


@pytest.mark.parametrize(("remat", "arrays"), [("none", 37), ("products", 57), ("layer", 57)])
def test_attention_in_blocks_is_computed_again_unless_everything_is_saved(remat, arrays):
    run = run_of(attention="blocks", remat=remat)
    queries = 2 * run.rows * run.row_tokens * HEADS  # of the only block of a row
    assert update_phase(run).pieces[2].hbm_bytes == LAYERS * arrays * queries


@pytest.mark.parametrize(("remat", "arrays"), [("none", 6), ("products", 6), ("layer", 8)])
def test_rows_and_heads_are_padded_around_a_tpus_attention_kernel(remat, arrays):
    run = run_of(remat=remat)
    padding = 128 / run.row_tokens * 128 / 4  # to a block of 128 tokens, and to 128 elements of a head
    numbers = LAYERS * (HEADS + KEYS) * 2 * (1 + padding)
    assert update_passes(run, 1)["heads"] == int(arrays * run.tokens * numbers * 2)
    assert update_passes(run_of("h100-1", remat=remat), 1)["heads"] == 0
    assert update_passes(run_of(attention="blocks", remat=remat), 1)["heads"] == 0


def test_whole_blocks_of_whole_heads_are_not_padded():
    wide = decoder(head_dim=128)
    whole = tiny_config({"rollout": {"max_new_tokens": 128 - 32}}, mesh="auto")
    assert update_passes(Planned.of(whole, find_accelerator("v6e-1"), wide).sizes, 1)["heads"] == 0


def test_norms_behind_mixer_and_mlp_add_passes():
    stack = SMALL.stacks[0]
    behind = tuple(dataclasses.replace(block, norms_behind=True) for block in stack.pattern)
    gemma = dataclasses.replace(SMALL, stacks=(dataclasses.replace(stack, pattern=behind),))
    plain, more = (
        Planned.of(tiny_config(mesh="auto", train={"dtype": "bfloat16"}), find_accelerator("v6e-1"), model).sizes
        for model in (SMALL, gemma)
    )
    added = update_passes(more, 1)["activations"] - update_passes(plain, 1)["activations"]
    assert added == plain.tokens * 2 * LAYERS * 7 * WIDTH


def test_a_fused_heads_chunks_read_the_head_twice_and_its_first_kernel_moves_none():
    run = Planned.of(tiny_config(mesh="auto", train={"dtype": "bfloat16"}), find_accelerator("v6e-1"), QWEN_3B).sizes
    assert run.update.head == "fused"
    first, rest = update_phase(run).pieces[3:5]
    chunks, tokens = fused_chunks(run)
    number = head_number(run)
    of_chunk = 3 * tokens * number + 2 * (F32 + number) * QWEN_3B.width
    assert (first.hbm_bytes, rest.hbm_bytes) == (0, chunks * QWEN_3B.vocab * of_chunk)
    assert first.flops == 2 * chunks * tokens * QWEN_3B.vocab * QWEN_3B.width


@pytest.mark.parametrize(("remat", "products"), [("none", 7), ("layer", 9)])
def test_attention_in_blocks_launches_kernels_for_each_row_and_pair_of_blocks(remat, products):
    def launches(attention: str) -> int:
        config = tiny_config({"rollout": {"max_new_tokens": 96}}, mesh="auto")
        train = config.train.model_copy(update={"attention": attention, "remat": remat, "rows_per_device": 2})
        run = Planned.of(config.model_copy(update={"train": train}), find_accelerator("h100-1"), SMALL).sizes
        assert (run.rows, run.row_tokens) == (2, 128)
        return update_phase(run).kernels[0]

    assert launches("blocks") - launches("auto") == 7 * products * LAYERS * 2 * 3


def test_a_cpus_cache_holds_blocks():
    config = tiny_config(mesh="auto", train={"attention": "blocks"})
    of_cpu, of_tpu = (Planned.of(config, machine, SMALL).sizes for machine in (CPU, find_accelerator("v6e-1")))
    assert update_phase(of_cpu).pieces[2].hbm_bytes == 0 < update_phase(of_tpu).pieces[2].hbm_bytes


@pytest.mark.parametrize(
    ("machine", "model", "attention", "wide"),
    [
        ("v6e-8", "Qwen/Qwen3-0.6B", "auto", False),
        ("v6e-8", "Qwen/Qwen3-0.6B", "blocks", True),
        ("h100-8", "Qwen/Qwen3-0.6B", "blocks", False),
        ("v6e-8", "Qwen/Qwen3.5-9B", "auto", False),
        ("h200-8", "Qwen/Qwen3.5-9B", "auto", True),
    ],
)
def test_an_update_that_a_compiler_makes_loops_of_has_a_wider_range(machine, model, attention, wide, monkeypatch):
    config = tiny_config(model=model, mesh="auto", rollout={"slots": 64}, train={"attention": attention})

    def spread() -> float:
        found = make_plan(Planned.of(config, find_accelerator(machine)), by="closed_form")
        (seconds,) = (each.seconds for each in found.phases if each.name == "update")
        assert seconds is not None
        return seconds.high / seconds.low

    given = spread()
    monkeypatch.setattr("podium.plan.planned_device.OF_LOOPS", (1.0, 1.0))
    assert given / spread() == pytest.approx(OF_LOOPS[1] / OF_LOOPS[0] if wide else 1.0)
