"""What single instructions cost: traps, each as a text of a few lines."""

import math

import pytest
from recorded_programs import FSDP, MESH, by_kind

from podium.config.attention_blocks import window_scope
from podium.hlo.collectives import group_of
from podium.hlo.cost import Peaks, roofline, walk
from podium.hlo.hlo_text import parse
from podium.plan.compiled.compile_worker import looped_work


def module_of(instructions, *, computations="", mesh=FSDP):
    header = f"HloModule m, num_partitions={math.prod(mesh.values())}"
    return parse(f"{header}\n{computations}\nENTRY %main () -> f32[] {{\n{instructions}\n}}\n")


def cost_of(instructions, *, computations="", mesh=FSDP):
    return walk(module_of(instructions, computations=computations, mesh=mesh), mesh)


def test_a_fusion_that_slices_a_stack_reads_the_slice_through_nested_fusions():
    cost = cost_of(
        """  %stack = bf16[36,256,1024]{2,1,0} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  ROOT %f = bf16[256,1024]{1,0:S(1)} fusion(%stack, %i), kind=kLoop, calls=%outer""",
        computations="""%inner (a: bf16[36,256,1024], b: s32[]) -> bf16[1,256,1024] {
  %a = bf16[36,256,1024]{2,1,0} parameter(0)
  %b = s32[] parameter(1)
  ROOT %slice = bf16[1,256,1024]{2,1,0} dynamic-slice(%a, %b), dynamic_slice_sizes={1,256,1024}
}

%outer (c: bf16[36,256,1024], d: s32[]) -> bf16[256,1024] {
  %c = bf16[36,256,1024]{2,1,0} parameter(0)
  %d = s32[] parameter(1)
  %g = bf16[1,256,1024]{2,1,0} fusion(%c, %d), kind=kLoop, calls=%inner
  ROOT %h = bf16[256,1024]{1,0} bitcast(%g)
}
""",
    )
    assert cost.hbm_bytes == 256 * 1024 * 2  # the result is in the chip's cache


SLICED = "  ROOT %s = bf16[1,256,1024]{2,1,0} slice(%cast), slice={[9:10], [0:256], [0:1024]}"
REPLACED = """  %row = bf16[1,256,1024]{2,1,0} slice(%cast), slice={[9:10], [0:256], [0:1024]}
  %i = s32[] constant(0)
  ROOT %s = bf16[36,256,1024]{2,1,0} dynamic-update-slice(%cast, %row, %i, %i, %i)"""


@pytest.mark.parametrize(("use", "layers", "moved"), [(SLICED, 1, 4 + 2), (REPLACED, 36, 36 * (4 + 2))])
def test_a_slice_of_a_cast_reads_a_slice_of_what_is_cast(use, layers, moved):
    """XLA for GPUs joins a layer's matrices so when it makes the rollout's weights."""
    cost = cost_of(
        f"""  %stack = f32[36,256,1024]{{2,1,0}} parameter(0)
  ROOT %f = bf16[{layers},256,1024]{{2,1,0}} fusion(%stack), kind=kLoop, calls=%join""",
        computations=f"""%join (a: f32[36,256,1024]) -> bf16[{layers},256,1024] {{
  %a = f32[36,256,1024]{{2,1,0}} parameter(0)
  %cast = bf16[36,256,1024]{{2,1,0}} convert(%a)
{use}
}}
""",
    )
    assert cost.hbm_bytes == 256 * 1024 * moved


def test_a_slice_of_a_transposed_array_reads_a_slice_of_it():
    """XLA for several GPUs joins a layer's matrices so, once their parts have been exchanged."""
    cost = cost_of(
        """  %stack = f32[36,128,8,1024]{3,1,0,2} parameter(0)
  ROOT %f = bf16[1024,1,1024]{2,1,0} fusion(%stack), kind=kInput, calls=%join""",
        computations="""%join (a: f32[36,128,8,1024]) -> bf16[1024,1,1024] {
  %a = f32[36,128,8,1024]{3,1,0,2} parameter(0)
  %parts = f32[8,36,128,1024]{3,2,1,0} bitcast(%a)
  %cast = bf16[8,36,128,1024]{3,2,1,0} convert(%parts)
  %layers = bf16[36,8,128,1024]{3,2,1,0} transpose(%cast), dimensions={1,0,2,3}
  %rows = bf16[36,1024,1024]{2,1,0} bitcast(%layers)
  %layer = bf16[1,1024,1024]{2,1,0} slice(%rows), slice={[9:10], [0:1024], [0:1024]}
  ROOT %same = bf16[1024,1,1024]{2,1,0} bitcast(%layer)
}
""",
    )
    assert cost.hbm_bytes == 1024 * 1024 * (4 + 2)


def test_a_slice_of_an_array_whose_tiles_a_nested_fusion_renames_is_read_alone():
    """The TPU compiler reads int8 weights so: the nested copy changes tiles in the array's own memory."""
    cost = cost_of(
        """  %stack = s8[36,256,1024]{2,1,0} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  ROOT %f = bf16[1,256,1024]{2,1,0:S(1)} fusion(%stack, %i), kind=kLoop, calls=%outer""",
        computations="""%retiled (a: s8[36,256,1024]) -> s8[36,256,1024] {
  %a = s8[36,256,1024]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy = s8[36,256,1024]{2,1,0:T(8,128)(4,1)} copy(%a)
}

%outer (c: s8[36,256,1024], d: s32[]) -> bf16[1,256,1024] {
  %c = s8[36,256,1024]{2,1,0:T(32,128)(4,1)} parameter(0)
  %d = s32[] parameter(1)
  %g = s8[36,256,1024]{2,1,0:T(8,128)(4,1)} fusion(%c), kind=kLoop, \
output_to_operand_aliasing={{}: (0, {})}, calls=%retiled
  %slice = s8[1,256,1024]{2,1,0:T(8,128)(4,1)} dynamic-slice(%g, %d), dynamic_slice_sizes={1,256,1024}
  ROOT %h = bf16[1,256,1024]{2,1,0} convert(%slice)
}
""",
    )
    assert cost.hbm_bytes == 256 * 1024


def test_a_slice_written_into_an_array_whose_tiles_are_renamed_is_written_alone():
    cost = cost_of(
        """  %stack = s8[36,256,1024]{2,1,0} parameter(0)
  %part = s8[1,256,1024]{2,1,0:S(1)} parameter(1)
  %i = s32[]{:S(6)} parameter(2)
  ROOT %f = s8[36,256,1024]{2,1,0} fusion(%stack, %part, %i), kind=kLoop, calls=%outer""",
        computations="""%retiled (a: s8[36,256,1024]) -> s8[36,256,1024] {
  %a = s8[36,256,1024]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy = s8[36,256,1024]{2,1,0:T(8,128)(4,1)} copy(%a)
}

%outer (c: s8[36,256,1024], d: s8[1,256,1024], e: s32[]) -> s8[36,256,1024] {
  %c = s8[36,256,1024]{2,1,0:T(32,128)(4,1)} parameter(0)
  %g = s8[36,256,1024]{2,1,0:T(8,128)(4,1)} fusion(%c), kind=kLoop, \
output_to_operand_aliasing={{}: (0, {})}, calls=%retiled
  %d = s8[1,256,1024]{2,1,0} parameter(1)
  %e = s32[] parameter(2)
  ROOT %h = s8[36,256,1024]{2,1,0} dynamic-update-slice(%g, %d, %e)
}
""",
    )
    assert cost.hbm_bytes == 256 * 1024  # the part comes from the chip's cache


def test_a_fusion_that_only_names_an_array_does_not_hide_that_it_is_read():
    cost = cost_of(
        """  %table = bf16[1000,256]{1,0} parameter(0)
  %x = bf16[8,256]{1,0:S(1)} parameter(1)
  ROOT %f = f32[8,1000]{1,0:S(1)} fusion(%x, %table), kind=kOutput, calls=%product""",
        computations="""%named (a: bf16[1000,256]) -> bf16[1000,256] {
  %a = bf16[1000,256]{1,0} parameter(0)
  ROOT %same = bf16[1000,256]{1,0} bitcast(%a)
}

%product (x: bf16[8,256], t: bf16[1000,256]) -> f32[8,1000] {
  %x.1 = bf16[8,256]{1,0} parameter(0)
  %t = bf16[1000,256]{1,0} parameter(1)
  %u = bf16[1000,256]{1,0} fusion(%t), kind=kLoop, calls=%named
  ROOT %c = f32[8,1000]{1,0} convolution(%x.1, %u), dim_labels=bf_oi->bf
}
""",
    )
    assert cost.hbm_bytes == 1000 * 256 * 2
    assert cost.flops == 2 * 8 * 1000 * 256


def test_an_update_in_place_writes_only_its_part():
    update = """  %stack = f32[36,1024]{1,0} parameter(0)
  %row = f32[1,1024]{1,0} parameter(1)
  %i = s32[]{:S(6)} parameter(2)
"""
    fused = """%g (a: f32[36,1024], b: f32[1,1024], c: s32[]) -> f32[36,1024] {
  %a = f32[36,1024]{1,0} parameter(0)
  %b = f32[1,1024]{1,0} parameter(1)
  %c = s32[] parameter(2)
  ROOT %u = f32[36,1024]{1,0} dynamic-update-slice(%a, %b, %c, %c)
}
"""
    result = "f32[36,1024]{1,0}"
    start = f"(({result}, f32[1,1024]{{1,0}}, s32[]), {result}, u32[])"
    for body, computations in (
        (f"  ROOT %u = {result} dynamic-update-slice(%stack, %row, %i, %i)", ""),
        (f"  ROOT %f = {result} fusion(%stack, %row, %i), kind=kLoop, calls=%g", fused),
        (
            f"  %f = {start} fusion-start(%stack, %row, %i), kind=kLoop, calls=%g\n"
            f"  ROOT %d = {result} fusion-done(%f)",
            fused,
        ),
    ):
        assert cost_of(update + body, computations=computations).hbm_bytes == 2 * 1024 * 4, body


def test_a_slice_that_is_taken_beside_other_work_reads_only_its_part():
    slice_ = """%g (a: f32[36,1024], b: s32[]) -> f32[1,1024] {
  %a = f32[36,1024]{1,0} parameter(0)
  %b = s32[] parameter(1)
  ROOT %s = f32[1,1024]{1,0} dynamic-slice(%a, %b, %b), dynamic_slice_sizes={1,1024}
}
"""
    cost = cost_of(
        """  %stack = f32[36,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %f = ((f32[36,1024]{1,0}, s32[]), f32[1,1024]{1,0}, u32[]) fusion-start(%stack, %i), kind=kLoop, calls=%g
  ROOT %d = f32[1,1024]{1,0} fusion-done(%f)""",
        computations=slice_,
    )
    assert cost.hbm_bytes == 2 * 1024 * 4 + 4  # and where it begins


def test_copies_count_their_ends_that_lie_in_main_memory():
    cost = cost_of("""  %x = f32[1024]{0} parameter(0)
  %s = (f32[1024]{0:S(1)}, f32[1024]{0}, u32[]{:S(2)}) copy-start(%x)
  ROOT %d = f32[1024]{0:S(1)} copy-done(%s)""")
    assert cost.hbm_bytes == 4096


INTO = """%to (a: f32[36,1024], b: f32[1,1024], c: s32[]) -> f32[36,1024] {
  %a = f32[36,1024]{1,0:S(5)} parameter(0)
  %b = f32[1,1024]{1,0} parameter(1)
  %c = s32[] parameter(2)
  ROOT %u = f32[36,1024]{1,0:S(5)} dynamic-update-slice(%a, %b, %c, %c)
}
"""


@pytest.mark.parametrize("opcode", ["async-start", "fusion-start"])  # as TPUs and GPUs have it
def test_a_slice_into_the_hosts_memory_counts_and_what_is_done_until_it_is_there(opcode):
    done = opcode.replace("start", "done")
    cost = cost_of(
        f"""  %x = f32[36,1024]{{1,0:S(5)}} parameter(0)
  %y = f32[1,1024]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %s = ((f32[36,1024]{{1,0:S(5)}}, f32[1,1024]{{1,0}}), f32[36,1024]{{1,0:S(5)}}, u32[]) {opcode}(%x, %y, %i), calls=%to
  %z = f32[1,1024]{{1,0}} negate(%y)
  ROOT %d = f32[36,1024]{{1,0:S(5)}} {done}(%s)""",
        computations=INTO,
    )
    assert [(work.host_bytes, work.beside) for work in cost.works if work.host_bytes] == [(4096, (0, 0, 8192))]


def test_a_loop_goes_on_beside_a_copy_as_often_as_it_runs():
    loop = """%body (c: (s32[], f32[512])) -> (s32[], f32[512]) {
  %c = (s32[], f32[512]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %v = f32[512]{0} get-tuple-element(%c), index=1
  %n = f32[512]{0} negate(%v)
  ROOT %t = (s32[], f32[512]{0}) tuple(%i, %n)
}

%ends (c: (s32[], f32[512])) -> pred[] {
  %c = (s32[], f32[512]{0}) parameter(0)
  ROOT %p = pred[] constant(false)
}
"""
    cost = cost_of(
        """  %x = f32[1024]{0:S(5)} parameter(0)
  %y = (s32[], f32[512]{0}) parameter(1)
  %s = (f32[1024]{0}, f32[1024]{0:S(5)}, u32[]) copy-start(%x)
  %w = (s32[], f32[512]{0}) while(%y), condition=%ends, body=%body, backend_config={"known_trip_count":{"n":"8"}}
  ROOT %d = f32[1024]{0} copy-done(%s)""",
        computations=loop,
    )
    assert [work.beside for work in cost.works if work.host_bytes] == [(0, 0, 8 * 4096)]


def test_a_copy_from_the_hosts_memory_counts_and_what_is_waited_for_at_once_has_no_work_beside_it():
    cost = cost_of("""  %x = f32[1024]{0:S(5)} parameter(0)
  %y = f32[512]{0} parameter(1)
  %s = (f32[1024]{0}, f32[1024]{0:S(5)}, u32[]) copy-start(%x)
  %z = f32[512]{0} negate(%y)
  %d = f32[1024]{0} copy-done(%s)
  ROOT %c = f32[1024]{0:S(5)} copy(%d)""")
    copies = [(work.host_bytes, work.beside) for work in cost.works if work.host_bytes]
    assert copies == [(4096, (0, 0, 4096)), (4096, (0, 0, 0))]
    assert roofline(cost, PEAKS, links=1).copies == ((1, 4096 / 1e9, 4096 / 1e10), (1, 4096 / 1e9, 0))


PEAKS = Peaks(flops_bf16=1e12, flops_f32=1e12, hbm_bandwidth=1e10, link_bandwidth=1e9, host_bandwidth=1e9)


def test_an_all_reduce_of_which_slices_are_kept_is_a_reduce_scatter():
    text = """  %x = f32[1024]{{0}} parameter(0)
  %i = s32[] parameter(1)
  %r = bf16[1024]{{0}} all-reduce(%x), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%add
  ROOT %s = bf16[128]{{0}} {use}"""
    sliced = cost_of(text.format(use="dynamic-slice(%r, %i), dynamic_slice_sizes={128}"), computations=ADD)
    used = cost_of(text.format(use="slice-like(%r)"), computations=ADD)
    # bfloat16 goes over the wire, whatever the operand is
    assert by_kind(sliced) == {("reduce-scatter", False): (1, 2048 * 7 // 8)}
    assert by_kind(used) == {("all-reduce", False): (1, 2 * 2048 * 7 // 8)}


ADD = """%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %c = bf16[] add(%a, %b)
}
"""


def test_a_permute_sends_its_operand_and_overlaps_what_follows_its_start():
    cost = cost_of(
        """  %x = f32[256]{0} parameter(0)
  %s = (f32[256]{0}, f32[256]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,2},{2,0},{1,3}}
  ROOT %d = f32[256]{0} collective-permute-done(%s)""",
        mesh=MESH,
    )
    (found,) = cost.collectives
    assert (found.kind, found.axes, found.overlaps, found.sent) == ("collective-permute", ("fsdp",), True, 1024)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,2},{1,3}}", [0, 2]),
        ("{}", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("[2,4]<=[8]", [0, 1, 2, 3]),
        ("[4,2]<=[2,4]T(1,0)", [0, 4]),
        ("mesh['a'=2,'b'=4] {'b'}", [0, 1, 2, 3]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [0, 1, 4, 5]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", [0, 1]),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", [3, 1]),
        ("mesh['a'=8] {'a':(1)2}", [0, 4]),
        ("mesh['a'=8] {'a':(2)4}", [0, 1, 2, 3]),
    ],
)
def test_groups_of_devices_are_read_in_each_spelling(groups, expected):
    text = (
        f"HloModule m\nENTRY %main () -> f32[] {{\n  ROOT %r = f32[] all-reduce(), replica_groups={groups}, x=y\n}}\n"
    )
    assert group_of(parse(text).entry.root, 8) == expected


def test_a_fusion_with_a_reduction_of_several_arrays_is_counted_whole():
    cost = cost_of(
        """  %x = f32[16,128]{1,0} parameter(0)
  %n = s32[16,128]{1,0} parameter(1)
  ROOT %f = (f32[16,128]{1,0}, (f32[16]{0}, s32[16]{0})) fusion(%x, %n), kind=kInput, calls=%both""",
        computations="""%pair (a: f32[], b: s32[], c: f32[], d: s32[]) -> (f32[], s32[]) {
  %a = f32[] parameter(0)
  %b = s32[] parameter(1)
  %c = f32[] parameter(2)
  %d = s32[] parameter(3)
  ROOT %t = (f32[], s32[]) tuple(%a, %b)
}

%both (x: f32[16,128], n: s32[16,128]) -> (f32[16,128], (f32[16], s32[16])) {
  %x.1 = f32[16,128]{1,0} parameter(0)
  %n.1 = s32[16,128]{1,0} parameter(1)
  %zero = f32[] constant(0)
  %none = s32[] constant(0)
  %twice = f32[16,128]{1,0} add(%x.1, %x.1)
  %r = (f32[16]{0}, s32[16]{0}) reduce(%twice, %n.1, %zero, %none), dimensions={1}, to_apply=%pair
  ROOT %all = (f32[16,128]{1,0}, (f32[16]{0}, s32[16]{0})) tuple(%twice, %r)
}
""",
    )
    assert cost.hbm_bytes == 4 * (3 * 16 * 128 + 2 * 16)


@pytest.mark.parametrize(
    ("kind", "mask", "products"),
    [
        ("", "NO_MASK", 2 * 1024),
        ("", "CAUSAL", 1025),
        ("Backward", "CAUSAL", 5 * 1025 // 2),
        ("", "PADDING_CAUSAL", 1025),
    ],
)
def test_attention_of_cudnn_counts_the_pairs_that_causality_leaves(kind, mask, products):
    dimensions = '"dimensions": ["1", "4", "1024", "1024"]'
    cost = cost_of(
        f"""  %q = bf16[1,1024,4,128]{{3,2,1,0}} parameter(0)
  ROOT %c = bf16[1,4,1024,128]{{3,1,2,0}} custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax{kind}", """
        f"""backend_config={{"cudnn_fmha_backend_config": {{"intermediate_tensor_shape": {{"element_type": "BF16", """
        f"""{dimensions}}}, "mask_type": "{mask}"}}}}"""
    )
    assert cost.flops == pytest.approx(2 * products * 4 * 1024 * 128, rel=1e-3)
    assert cost.hbm_bytes == 2 * 2 * 1024 * 4 * 128


def test_a_triton_kernel_counts_with_what_it_declares():
    cost = cost_of(
        r"""  %q = bf16[16,4,512,128]{3,2,1,0} parameter(0)
  ROOT %c = bf16[16,4,512,128]{3,2,1,0} custom-call(%q), custom_call_target="__gpu$xla.gpu.triton", """
        r"""backend_config={grid_x = 24 : i32, name = "k", serialized_metadata = "{\22flops\22: \222415919104\22}"}"""
    )
    assert cost.flops == 2415919104
    assert cost.hbm_bytes == 2 * 2 * 16 * 4 * 512 * 128


def test_a_tpu_kernel_that_changes_an_array_in_place_moves_what_it_declares():
    """Other kernels move their operands and results, whatever they declare."""
    config = '{"custom_call_config":{"body":"","cost_estimate":{"flops":"70","bytes_accessed":"549453824"}}}'
    call = f"""  %s = f32[8,520,8,128,128]{{4,3,2,1,0}} parameter(0)
  ROOT %c = f32[8,520,8,128,128]{{4,3,2,1,0}} custom-call(%s), custom_call_target="tpu_custom_call", \
ALIASEDbackend_config={config}"""
    assert cost_of(call.replace("ALIASED", "output_to_operand_aliasing={{}: (0, {})}, ")).hbm_bytes == 549453824
    assert cost_of(call.replace("ALIASED", "")).hbm_bytes == 2 * 4 * 8 * 520 * 8 * 128 * 128


def test_a_tpu_kernel_reads_one_part_of_its_largest_operand_if_it_says_so():
    call = """  %x = bf16[512,2048]{1,0} parameter(0)
  %w = bf16[768,2048,768]{2,1,0} parameter(1)
  ROOT %c = bf16[512,768]{1,0} custom-call(%x, %w), custom_call_target="tpu_custom_call"READS"""
    rows = 2 * 512 * (2048 + 768)
    said = cost_of(call.replace("READS", ', frontend_attributes={kernel_metadata={},reads_one_of="48"}'))
    assert said.hbm_bytes == rows + 2 * 16 * 2048 * 768
    assert cost_of(call.replace("READS", "")).hbm_bytes == rows + 2 * 768 * 2048 * 768


def test_the_workspace_of_a_product_by_cublas_is_not_traffic():
    cost = cost_of("""  %x = bf16[64,2048]{1,0} parameter(0)
  %w = bf16[2048,512]{1,0} parameter(1)
  ROOT %c = (bf16[64,512]{1,0}, s8[33554432]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul"
""")
    assert cost.hbm_bytes == 2 * (64 * 2048 + 2048 * 512 + 64 * 512)


@pytest.mark.parametrize(("dtype", "float32"), [("f32", True), ("bf16", False)])
def test_products_by_cublas_are_counted_by_their_number_format(dtype, float32):
    """3 products of [192, 128] and [64, 128], transposed."""
    (work,) = walk(
        module_of(f"""  %x = {dtype}[3,192,128]{{2,1,0}} parameter(0)
  %w = {dtype}[3,64,128]{{2,1,0}} parameter(1)
  ROOT %c = ({dtype}[3,192,64]{{2,1,0}}, s8[4194304]{{0}}) custom-call(%x, %w), \
custom_call_target="__cublas$lt$matmul", backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":\
{{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"],\
"rhs_batch_dimensions":["0"]}}}}}}
"""),
        FSDP,
    ).works
    made = 2 * 3 * 192 * 64 * 128
    assert (work.flops_f32, work.flops) == ((made, 0) if float32 else (0, made))


def test_a_kernel_that_reads_the_cache_declares_the_work_on_a_block_of_it():
    module = module_of(
        r"""  %q = bf16[16,4,512,128]{3,2,1,0} parameter(0)
  ROOT %c = bf16[16,4,512,128]{3,2,1,0} custom-call(%q), custom_call_target="__gpu$xla.gpu.triton", """
        r"""backend_config={serialized_metadata = "{\22flops\22: \22300\22, \22bytes\22: \2270\22}"}"""
    )
    (work,) = walk(module, FSDP).works
    assert (work.flops, work.hbm_bytes, work.of_block) == (300, 70, True)
    (looped,) = looped_work(module, FSDP, blocks=4)
    assert (looped.work.flops, looped.work.hbm_bytes, looped.once) == (4 * 300, 4 * 70, 1)  # all blocks in one launch


@pytest.mark.parametrize(("blocks", "read"), [(1, 1), (4, 17 / 16)])
def test_a_kernel_reads_no_more_of_the_cache_than_its_window_reaches(blocks, read):
    module = module_of(
        r"""  %q = bf16[16,4,512,128]{3,2,1,0} parameter(0)
  ROOT %c = bf16[16,4,512,128]{3,2,1,0} custom-call(%q), custom_call_target="__gpu$xla.gpu.triton", """
        rf"""metadata={{op_name="jit(decode)/{window_scope(17)}/scores/pallas_call"}}, """
        r"""backend_config={serialized_metadata = "{\22flops\22: \22300\22, \22bytes\22: \2270\22}"}"""
    )
    (looped,) = looped_work(module, FSDP, blocks=blocks, block_pages=16)
    assert (looped.work.hbm_bytes, looped.once) == (pytest.approx(70 * read), 1)


def test_products_of_a_dilated_convolution_leave_out_its_holes():
    # heads as a spatial dimension: 2 heads, each output meets its own head alone
    cost = cost_of("""  %a = bf16[2,320,8,128]{3,2,1,0} parameter(0)
  %b = bf16[320,128,2,1]{1,0,3,2} parameter(1)
  ROOT %c = f32[2,320,8,320]{3,2,1,0} convolution(%a, %b), dim_labels=0b1f_oi01->0b1f, window={size=2x1 lhs_dilate=2x1}
""")
    assert cost.flops == 2 * 2 * 320 * 8 * 320 * 128
