import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from recorded_programs import GOLDEN, HIDDEN, LAYERS, TOKENS, WIDTH

from podium.accelerators import GIB
from podium.hlo.hlo_text import parse
from podium.hlo.liveness import live_at_peak
from podium.hlo.memory import NamedBuffer, NamedPeak, largest, measure, parse_out_of_memory
from podium.plan.compiled.array_names import ARGUMENTS, names_of

STACK = dataclasses.replace(names_of("jit_step"), arguments={"params": "parameters", "x": "batch"})
DECODE = names_of("jit_decode")


def recorded(name):
    return parse((GOLDEN / f"{name}.hlo").read_text())


def stats(name=None, **changes):
    given = json.loads((GOLDEN / f"{name}.json").read_text()) if name else {}
    return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**given | changes))


# The compiler's figure


def compilers_peak(name: str) -> int:
    return json.loads((GOLDEN / f"{name}.json").read_text())["peak_memory_in_bytes"]


@pytest.mark.parametrize("name", ["stack", "stack_overlapping"])
def test_what_lives_at_the_peak_adds_up_to_the_compilers_figure(name):
    assert live_at_peak(recorded(name)).size == pytest.approx(compilers_peak(name), rel=1e-4)


@pytest.mark.parametrize("name", ["attention", "decode", "kernel"])
def test_where_the_compiler_counts_the_chips_cache_the_peak_is_what_is_allocated(name):
    memory = measure(stats(name))
    assert memory.peak < compilers_peak(name)
    assert live_at_peak(recorded(name)).size == pytest.approx(memory.peak, rel=0.01)


def test_donated_arguments_count_once():
    sizes = {"argument_size_in_bytes": 100, "output_size_in_bytes": 90, "temp_size_in_bytes": 50}
    memory = measure(stats(**sizes, alias_size_in_bytes=80, generated_code_size_in_bytes=7))
    assert (memory.peak, memory.code) == (160, 7)


def test_memory_of_a_program_compiled_for_cpu():
    x = jnp.zeros((1024, 1024))
    donated = jax.jit(lambda x: x.at[0].add(1.0), donate_argnums=0).lower(x).compile()
    kept = jax.jit(lambda x: x.at[0].add(1.0)).lower(x).compile()
    assert measure(donated).peak == pytest.approx(x.nbytes, rel=0.01)
    assert measure(kept).peak == pytest.approx(2 * x.nbytes, rel=0.01)


# Arrays by their names


def sizes_of(peak: NamedPeak, name):
    return sorted((buffer.size for buffer in peak.buffers if buffer.name == name), reverse=True)


def test_the_stacks_arrays_have_the_names_that_users_know():
    peak = largest(recorded("stack"), STACK)
    weight, rows = WIDTH * HIDDEN, TOKENS * WIDTH
    assert sizes_of(peak, "parameters") == [LAYERS * weight // 8 * 4] * 2  # float32, an eighth
    assert sizes_of(peak, "cast_weights") == [LAYERS * weight // 8 * 2] * 2
    gradients = sizes_of(peak, "gradients")
    assert gradients[:2] == [weight * 2, LAYERS * weight // 8 * 4]  # one before it is scattered; the stack's
    saved = [buffer for buffer in peak.buffers if buffer.shape == f"bf16[{LAYERS},{TOKENS},{WIDTH}]"]
    assert [(buffer.name, buffer.size) for buffer in saved] == [("layer_activations", LAYERS * rows * 2)]
    assert sizes_of(peak, "batch") == [rows * 2]
    assert sizes_of(peak, "gathered_weights")[0] == weight * 2
    assert sum(sizes_of(peak, "other")) < 0.05 * peak.size
    assert sum(peak.by_name.values()) == peak.size
    assert list(peak.by_name.values()) == sorted(peak.by_name.values(), reverse=True)


def test_a_cache_that_is_written_in_place_is_there_once():
    peak = largest(recorded("decode"), DECODE)
    assert sizes_of(peak, "kv_cache") == [8 * 1024 * WIDTH * 2]
    assert sum(sizes_of(peak, "rollout_weights")) == (2 * WIDTH * HIDDEN + HIDDEN * HIDDEN) * 2


TEXT = """HloModule jit_decode, is_scheduled=true

ENTRY %main (p: f32[1024], q: f32[512]) -> f32[1024] {{
  %p = f32[1024]{{0}} parameter(0), metadata={{op_name="params['embed']"}}
  %q = f32[512]{{0}} parameter(1), metadata={{op_name="cache.keys"}}
  %a = f32[2048]{{0}} broadcast(%q), metadata={{op_name="jit(decode)/logits/a"}}
  {b}
  ROOT %c = f32[1024]{{0}} reduce(%b), metadata={{op_name="jit(decode)/mlp/c"}}
}}
"""


def test_what_is_used_no_more_is_not_there_any_more():
    # a (8 KiB) and b (16 KiB) at once, beside the arguments; c comes when a is gone
    peak = largest(
        parse(TEXT.format(b='%b = f32[4096]{0} negate(%a), metadata={op_name="jit(decode)/scores/b"}')), DECODE
    )
    assert peak.by_name == {"attention_scores": 16384, "logits": 8192, "rollout_weights": 4096, "kv_cache": 2048}
    assert [(buffer.name, buffer.shape, buffer.source) for buffer in peak.buffers[2:]] == [
        ("rollout_weights", "f32[1024]", "params['embed']"),
        ("kv_cache", "f32[512]", "cache.keys"),
    ]


def test_what_lies_in_the_chips_cache_or_in_the_same_place_takes_nothing():
    assert largest(parse(TEXT.format(b="%b = f32[2048]{0:S(1)} negate(%a)")), DECODE).size == 4096 + 2048 + 8192
    assert largest(parse(TEXT.format(b="%b = f32[2048]{0} bitcast(%a)")), DECODE).size == 4096 + 2048 + 8192 + 4096


STEP = """HloModule m, is_scheduled=true, input_output_alias={{ {{0}}: (0, {{}}, may-alias) }}

%write (a: f32[1024], b: f32[8], i: s32[]) -> f32[1024] {{
  %a = f32[1024]{{0}} parameter(0)
  %b = f32[8]{{0}} parameter(1)
  %i = s32[]{{:S(6)}} parameter(2)
  {made}
  ROOT %u = f32[1024]{{0}} dynamic-update-slice({into}, %b, %i)
}}

ENTRY %main (w: f32[1024], g: f32[1024]) -> (f32[1024], f32[8]) {{
  %w = f32[1024]{{0}} parameter(0)
  %g = f32[1024]{{0}} parameter(1)
  %row = f32[8]{{0}} slice(%g)
  %i.1 = s32[]{{:S(6)}} constant(3)
  %zeros = f32[1024]{{0}} broadcast(%i.1)
  %written = f32[1024]{{0}} fusion(%zeros, %row, %i.1), kind=kLoop, calls=%write
  %new = f32[1024]{{0}} subtract(%w, %written)
  ROOT %out = (f32[1024], f32[8]) tuple(%new, %row)
}}
"""


def test_donated_arguments_and_updates_in_place_take_no_second_buffer():
    in_place = parse(STEP.format(made="", into="%a"))
    assert live_at_peak(in_place).size == 3 * 4096 + 32  # both arguments, what is written, the row
    anew = parse(STEP.format(made="%c = f32[1024]{0} negate(%a)", into="%c"))
    assert live_at_peak(anew).size == 4 * 4096 + 32


def test_a_loop_keeps_its_carry_in_one_place_and_adds_what_its_body_makes():
    module = parse(
        """HloModule m, is_scheduled=true

%body (p: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %p = (s32[]{:S(6)}, f32[1024]{0}) parameter(0)
  %i = s32[]{:S(6)} get-tuple-element(%p), index=0
  %x = f32[1024]{0} get-tuple-element(%p), index=1
  %y = f32[512]{0} slice(%x)
  %z = f32[1024]{0} pad(%y)
  ROOT %r = (s32[]{:S(6)}, f32[1024]{0}) tuple(%i, %z)
}

%condition (q: (s32[], f32[1024])) -> pred[] {
  %q = (s32[]{:S(6)}, f32[1024]{0}) parameter(0)
  ROOT %yes = pred[]{:S(6)} constant(true)
}

ENTRY %main (n: s32[]) -> f32[1024] {
  %n = s32[]{:S(6)} parameter(0)
  %start = f32[1024]{0} broadcast(%n)
  %init = (s32[]{:S(6)}, f32[1024]{0}) tuple(%n, %start)
  %loop = (s32[]{:S(6)}, f32[1024]{0}) while(%init), condition=%condition, body=%body
  ROOT %end = f32[1024]{0} get-tuple-element(%loop), index=1
}
"""
    )
    assert (live_at_peak(module).size, live_at_peak(module).instruction) == (4096 + 2048, "y")


def test_programs_arguments_are_named_by_their_longest_beginning():
    assert ARGUMENTS["state.params"] == "parameters"
    text = TEXT.replace("params['embed']", "state.params['embed']").replace("cache.keys", "state.opt_state[1].mu['x']")
    names = {
        buffer.source: buffer.name
        for buffer in largest(parse(text.format(b="%b = f32[1]{0} negate(%a)")), DECODE).buffers
    }
    assert names["state.params['embed']"] == "parameters"
    assert names["state.opt_state[1].mu['x']"] == "optimizer"
    stat = dataclasses.replace(DECODE, arguments={"stat": "batch"})
    assert largest(parse(text.format(b="%b = f32[1]{0} negate(%a)")), stat).by_name.keys() == {
        "logits",
        "other",
    }


# Out of memory


def test_temporaries_beyond_memory():
    found = parse_out_of_memory(
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (36.44G)"
        " exceeds available HBM (31.24G)"
    )
    assert found is not None
    assert found.needed == pytest.approx(36.44 * GIB, abs=1)
    assert found.largest == ()


def test_a_program_beyond_memory_lists_its_largest_allocations():
    found = parse_out_of_memory(
        "Used 35.08G of 31.50G hbm. Exceeded hbm capacity by 3.58G.\n\nTotal hbm usage >= 35.58G:\n"
        "Largest program allocations in hbm:\n\n  1. Size: 512.00M\n     Shape: bf16[8]{0}\n"
        '     ==========================\n\n  2. Size: 5.00G\n     Operator: op_name="jit(step)/while/dot"\n'
        "     Shape: f32[2,4]{1,0}\n     Unpadded size: 4.00G\n"
    )
    assert found is not None
    assert found.needed == pytest.approx(35.08 * GIB, abs=1)
    assert found.largest == (
        NamedBuffer("program", "f32[2,4]{1,0}", 5 * GIB, "jit(step)/while/dot"),
        NamedBuffer("program", "bf16[8]{0}", 512 * 2**20, ""),
    )


def test_an_allocation_beyond_memory():
    found = parse_out_of_memory("Allocation (size=38654705664) would exceed memory (size=33550237696)")
    assert found is not None
    assert found.needed == 38654705664


def test_other_messages_are_not_about_memory():
    assert parse_out_of_memory("INVALID_ARGUMENT: Mosaic failed to compile a kernel of Size: 5.00G") is None
