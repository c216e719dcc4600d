import jax
import jax.numpy as jnp
import pytest
from recorded_programs import GOLDEN

from podium.hlo.hlo_text import Shape, item_bits, parse

LOOP = """HloModule jit_loop, is_scheduled=true, input_output_alias={{ {{1}}: (0, {{}}, may-alias) }}, num_partitions=4

%body (carry: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %carry = (s32[], f32[8]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[8]{{0}} get-tuple-element(%carry), index=1
  %n = s32[] get-tuple-element(%carry), index=2
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  ROOT %out = (s32[], f32[8]{{0}}, s32[]) tuple(%next, %x, %n)
}}

%condition (carry.1: (s32[], f32[8], s32[])) -> pred[] {{
  %carry.1 = (s32[], f32[8]{{0}}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  %n.1 = s32[] get-tuple-element(%carry.1), index=2
  %limit = s32[] constant(11)
  {test}
}}

ENTRY %main (x: f32[8], m: s32[]) -> (s32[], f32[8], s32[]) {{
  %x.1 = f32[8]{{0}} parameter(0)
  %m.1 = s32[] parameter(1)
  %start = s32[] constant({start})
  %init = (s32[], f32[8]{{0}}, s32[]) tuple(%start, %x.1, %m.1)
  ROOT %loop = (s32[], f32[8]{{0}}, s32[]) while(%init), condition=%condition, body=%body{known}
}}
"""
COUNTED = "ROOT %lt = pred[] compare(%i.1, %limit), direction=LT"


def loop(*, test=COUNTED, start="2", step="3", known=""):
    (found,) = parse(LOOP.format(test=test, start=start, step=step, known=known)).loops.values()
    return found


@pytest.mark.parametrize(("start", "step", "trips"), [("0", "1", 11), ("2", "3", 3), ("2", "1", 9), ("11", "1", 0)])
def test_a_loop_from_start_by_step_to_a_constant_is_counted(start, step, trips):
    assert loop(start=start, step=step) == trips


def test_what_xla_says_of_a_loop_comes_first():
    assert loop(known=', backend_config={"known_trip_count":{"n":"7"}}') == 7


@pytest.mark.parametrize(
    "test",
    [
        "ROOT %lt = pred[] compare(%i.1, %n.1), direction=LT",  # a limit that is an argument
        "ROOT %ne = pred[] compare(%i.1, %limit), direction=NE",
        "%lt = pred[] compare(%i.1, %limit), direction=LT\n  ROOT %and = pred[] and(%lt, %lt)",  # and something else
    ],
)
def test_a_loop_that_may_end_otherwise_has_no_count(test):
    assert loop(test=test) is None


def test_a_loop_with_an_unknown_start_or_no_step_forward_has_no_count():
    text = LOOP.format(test=COUNTED, start="0", step="1", known="").replace("tuple(%start,", "tuple(%m.1,")
    assert list(parse(text).loops.values()) == [None]
    assert loop(step="0") is None


def test_module_names_its_entry_donations_and_devices():
    module = parse(LOOP.format(test=COUNTED, start="0", step="1", known=""))
    assert (module.name, module.entry.name, module.num_partitions) == ("jit_loop", "main", 4)
    assert module.aliases == (((1,), 0),)
    assert [each.name for each in module.entry.users["init"]] == ["loop"]


@pytest.mark.parametrize(
    ("shape", "size", "padded"),
    [
        (Shape("bf16", (3, 100, 200), (2, 1, 0), (8, 128)), 120_000, 3 * 104 * 256 * 2),
        (Shape("f32", (2, 100, 16), (1, 2, 0), (8, 128)), 12_800, 2 * 16 * 128 * 4),  # dimension 1 is minor-most
        (Shape("f32", (5,), (0,), (1024,)), 20, 4096),
        (Shape("s32", (), (), (128,)), 4, 512),
        (Shape("pred", (10,)), 10, 10),
        (Shape("s4", (3,)), 2, 2),
    ],
)
def test_sizes_with_and_without_padding(shape, size, padded):
    assert (shape.size, shape.padded_size) == (size, padded)


def test_bits_of_types():
    assert [item_bits(each) for each in ("pred", "bf16", "f8e4m3fn", "u64", "token")] == [8, 16, 8, 64, 0]


def test_layouts_tuples_and_text_over_several_lines_are_read():
    text = """HloModule m

ENTRY %main (p: bf16[4,16]) -> bf16[4,16] {
  %p = bf16[4,16]{0,1:T(8,128)(2,1)S(1)} parameter(0), metadata={op_name="params[\\'embed\\']" stack_frame_id=1}
  %start = ((bf16[4,16]{0,1:T(8,128)(2,1)}), /*index=1*/bf16[2,16]{1,0}, u32[]{:S(2)}) slice-start(%p), slice={[0:2]}
  ROOT %call = bf16[4,16]{1,0} custom-call(%p, /*index=1*/%start), custom_call_target="tpu_custom_call", config={
  "kernel": "%x = arith.addf"
}, metadata={op_name="jit(f)/mlp/kernel"}
}
"""
    entry = parse(text).entry
    assert entry.parameters[0].shapes == (Shape("bf16", (4, 16), (0, 1), (8, 128), 1),)
    assert entry.parameters[0].source == "params['embed']"
    assert [str(shape) for shape in entry.instructions["start"].shapes] == ["bf16[4,16]", "bf16[2,16]", "u32[]"]
    assert (entry.root.operands, entry.root.source) == (("p", "start"), "jit(f)/mlp/kernel")


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="begins with 'module @jit_f'"):
        parse("module @jit_f")
    with pytest.raises(ValueError, match="no entry computation"):
        parse("HloModule m\n")


@pytest.mark.parametrize(
    ("name", "trips"), [("stack", [4, 4]), ("stack_overlapping", [4, 4]), ("kernel", [3]), ("decode", [None])]
)
def test_loops_of_programs_compiled_for_tpu(name, trips):
    module = parse((GOLDEN / f"{name}.hlo").read_text())
    assert list(module.loops.values()) == trips
    assert module.num_partitions == 8


def test_loops_of_a_program_compiled_for_cpu():
    def steps(x, n):
        x = jax.lax.scan(lambda x, _: (jnp.sin(x) @ x, None), x, length=5)[0]
        return jax.lax.fori_loop(0, n, lambda _, x: jnp.cos(x) @ x, x)

    compiled = jax.jit(steps).lower(jnp.ones((16, 16)), 3).compile()
    assert sorted((found or -1) for found in parse(compiled.as_text()).loops.values()) == [-1, 5]
