import dataclasses
import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from podium.hlo.collectives import Transfer, group_of
from podium.hlo.cost import Peaks, ProgramCost, Work, roofline, unknown_loops, walk
from podium.hlo.liveness import live_at_peak
from podium.hlo.text import parse

GOLDEN = Path(__file__).parents[1] / "golden" / "plan"
FSDP = {"fsdp": 8}
MESH = {"dp": 2, "fsdp": 2, "tp": 2}
LAYERS, TOKENS, WIDTH, HIDDEN = 4, 4096, 2048, 8192  # of golden/plan/record.py, per device
GENERATE = GPU_GENERATE = "jit(generate)/while"


def recorded(name, mesh=FSDP, **options):
    return walk(parse((GOLDEN / f"{name}.hlo").read_text()), mesh, **options)


def cpu_flops(function, *arguments):
    module = parse(jax.jit(function).lower(*arguments).compile().as_text())
    return walk(module, {"dp": 1}).flops


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


# FLOPs against counts by hand: programs compiled for CPU


def test_a_product_in_a_scan_counts_as_often_as_it_runs():
    def steps(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=10)[0]

    assert cpu_flops(steps, ones(64, 32), ones(32, 32)) == 10 * 2 * 64 * 32 * 32


def test_a_batched_product_counts_each_of_the_batch():
    assert cpu_flops(lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k), ones(2, 16, 4, 8), ones(2, 24, 4, 8)) == (
        2 * 2 * 4 * 16 * 24 * 8
    )


def test_what_runs_on_another_core_is_read_and_counted():
    text = """HloModule m

%inner (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,4]{1,0} parameter(1)
  ROOT %dot = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}, execution_thread="sparsecore"

ENTRY %main (p: f32[8,16], q: f32[16,4]) -> f32[8,4] {
  %p = f32[8,16]{1,0} parameter(0)
  %q = f32[16,4]{1,0} parameter(1)
  %start = ((f32[8,16]{1,0}, f32[16,4]{1,0}), f32[8,4]{1,0}, u32[]) call-start(%p, %q), to_apply=%inner
  ROOT %done = f32[8,4]{1,0} call-done(%start)
}
"""
    cost = walk(parse(text), {"dp": 1})
    assert cost.flops == 2 * 8 * 16 * 4
    assert cost.hbm_bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert live_at_peak(parse(text)).size == 4 * (8 * 16 + 16 * 4 + 8 * 4) + 4  # and what it is waited for by


def two_layers(weights, x):
    return jnp.sum(jnp.tanh(x @ weights[0]) @ weights[1])


def test_a_gradient_counts_three_products_for_each_but_the_first_input():
    first, second = 2 * 64 * 32 * 48, 2 * 64 * 48 * 16
    step = jax.value_and_grad(lambda weights, x: jnp.sum(jnp.sin(jnp.tanh(x @ weights[0]) @ weights[1])))
    assert cpu_flops(step, (ones(32, 48), ones(48, 16)), ones(64, 32)) == 2 * first + 3 * second


def test_recomputed_layers_count_again():
    def loss(weights, x, wrap):
        body = wrap(lambda x, w: (jnp.sin(jnp.tanh(x @ w[0]) @ w[1]), None))
        return jnp.sum(jax.lax.scan(body, x, weights)[0])

    weights, x = (ones(3, 32, 32), ones(3, 32, 32)), ones(64, 32)
    once = 3 * 2 * 64 * 32 * 32  # one product of each layer
    plain = cpu_flops(jax.grad(lambda w, x: loss(w, x, lambda body: body)), weights, x)
    again = cpu_flops(jax.grad(lambda w, x: loss(w, x, jax.checkpoint)), weights, x)
    assert (plain, again) == (6 * once, 8 * once)


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"compiled for 8 devices, not for the 4 of mesh \{'fsdp': 4\}"):
        recorded("stack", {"fsdp": 4})


# Programs compiled for the TPU, as golden/plan/record.py keeps them


def test_a_rematerialised_stack_on_tpu_has_the_flops_of_its_products():
    product = 2 * TOKENS * WIDTH * HIDDEN
    forward, backward, again = 2, 4, 1  # nobody needs the second product of a layer again
    assert recorded("stack").flops == LAYERS * (forward + backward + again) * product


def test_attention_on_tpu_has_the_flops_of_its_batched_products():
    rows, length, heads, size = 2, 512, 4, 128  # per device: 8 rows over dp and fsdp, 8 heads over tp
    scores = 2 * rows * heads * length * length * size
    out = 2 * rows * length * heads * size * WIDTH
    # twice forward, four times backward; fusions of the softmax make the scores three times more
    assert recorded("attention", MESH).flops == 9 * scores + 3 * out


def by_kind(cost):
    return {(each.kind, each.overlaps): (each.calls, each.sent) for each in cost.collectives}


def test_weights_are_gathered_per_layer_and_pass_and_gradients_scattered_once():
    weight = 2 * WIDTH * HIDDEN  # bytes of one in bfloat16
    assert by_kind(recorded("stack")) == {
        ("all-gather", False): (LAYERS * 2 * 2, LAYERS * 2 * 2 * weight * 7 // 8),
        ("reduce-scatter", False): (LAYERS * 2, LAYERS * 2 * weight * 7 // 8),
    }


def test_a_gather_that_runs_under_several_fusions_counts_once():
    plain, overlapping = by_kind(recorded("stack")), by_kind(recorded("stack_overlapping"))
    assert overlapping[("all-gather", True)][0] > 0
    both = [overlapping[("all-gather", True)], overlapping[("all-gather", False)]]
    assert tuple(map(sum, zip(*both, strict=True))) == plain[("all-gather", False)]
    assert recorded("stack_overlapping").flops == recorded("stack").flops


def test_collectives_name_their_axes():
    found = {(each.kind, each.axes): each.group for each in recorded("attention", MESH).collectives}
    assert found == {("all-reduce", ("tp",)): 2, ("all-reduce", ("dp", "fsdp")): 4, ("all-gather", ("fsdp",)): 2}


def test_a_stack_of_weights_is_read_layer_by_layer():
    weights = 2 * LAYERS * WIDTH * HIDDEN  # of the stack; a device stores an eighth
    cast = weights // 8 * (4 + 2)  # read in float32 and written in bfloat16, once
    gradients_and_step = weights // 8 * 4 * 4  # set to 0, written; read and written with the weights by the step
    activations = LAYERS * TOKENS * (WIDTH * 12 + HIDDEN * 6) * 2  # generous: each is moved a few times per layer
    gathered = weights * 2 * 3  # each gathered weight is read by the products of the passes
    assert recorded("stack").hbm_bytes < cast + gradients_and_step + activations + gathered


def test_kernels_count_with_what_they_declare():
    assert recorded("kernel").flops == 3 * 12345


def test_a_loop_without_a_count_is_an_error_that_says_what_to_give():
    module = parse((GOLDEN / "decode.hlo").read_text())
    assert unknown_loops(module) == [GENERATE]
    with pytest.raises(ValueError, match=r"jit\(generate\)/while.* is not in the program's text"):
        walk(module, FSDP)
    with pytest.raises(ValueError, match="is not in the program's text"):
        walk(module, FSDP, trips={"while": 3})


def test_a_loop_without_a_count_takes_the_callers():
    once, often = (recorded("decode", trips={GENERATE: n}) for n in (1, 2.5))
    assert once.flops > 0
    assert often.flops == 2.5 * once.flops


def test_the_costliest_branch_counts():
    rows, layer = 8, 2 * 2 * 8 * WIDTH * HIDDEN  # the square product stands in one branch alone
    assert recorded("decode", trips={GENERATE: 1}).flops >= layer + 2 * rows * HIDDEN * HIDDEN


def test_a_cache_that_is_written_in_place_is_read_once_per_step():
    cache, weights = 8 * 1024 * WIDTH * 2, 2 * (2 * WIDTH * HIDDEN + HIDDEN * HIDDEN)
    costs = [recorded("decode", trips={GENERATE: trips}).hbm_bytes for trips in (1, 2)]
    assert cache + weights <= costs[1] - costs[0] < 1.1 * (cache + weights)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU's compiler, is not installed")
def test_what_is_recorded_is_what_the_compiler_makes_today(tmp_path):
    command = [sys.executable, str(GOLDEN / "record.py"), str(tmp_path), "stack"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cost = walk(parse((tmp_path / "stack.hlo").read_text()), FSDP)
    assert cost.flops == recorded("stack").flops
    assert by_kind(cost) == by_kind(recorded("stack"))


# Programs compiled for a GPU


def test_a_stack_on_gpu_has_the_products_and_collectives_of_the_tpus():
    cost, tpu = recorded("gpu_stack"), recorded("stack")
    assert cost.flops == tpu.flops
    sent = {each.kind: (each.calls, each.sent) for each in cost.collectives}
    assert sent["all-gather"] == by_kind(tpu)[("all-gather", False)]
    calls, scattered = by_kind(tpu)[("reduce-scatter", False)]
    assert sent["reduce-scatter"] == (calls / 2, scattered)  # both of a layer in one exchange


def test_a_gpu_waits_for_a_transfer_but_for_what_it_does_meanwhile():
    found = [each for work in recorded("gpu_stack").works for each in work.transfers]
    assert all(each.beside is not None and not each.overlaps for each in found)
    busy = [each.beside for each in found if each.beside and each.beside[1] > 0]
    assert busy and all(traffic > 0 for _, _, traffic in busy)


def test_a_branch_that_is_never_taken_is_left_out():
    both = [recorded("gpu_decode", trips={GPU_GENERATE: 1}, skipped=skipped).flops for skipped in ((), ("cond",))]
    assert both[0] - both[1] == 2 * 8 * HIDDEN * HIDDEN


def test_groups_over_several_machines_are_counted():
    found = {
        per_machine: {
            each.machines for work in recorded("gpu_stack", per_machine=per_machine).works for each in work.transfers
        }
        for per_machine in (0, 4, 8)
    }
    assert found == {0: {1}, 4: {2}, 8: {1}}


# Traps, each as a text of a few lines


def cost_of(instructions, *, computations="", mesh=FSDP):
    header = f"HloModule m, num_partitions={math.prod(mesh.values())}"
    return walk(parse(f"{header}\n{computations}\nENTRY %main () -> f32[] {{\n{instructions}\n}}\n"), mesh)


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
    alone = cost_of(update + "  ROOT %u = f32[36,1024]{1,0} dynamic-update-slice(%stack, %row, %i, %i)")
    fused = cost_of(
        update + "  ROOT %f = f32[36,1024]{1,0} fusion(%stack, %row, %i), kind=kLoop, calls=%g",
        computations="""%g (a: f32[36,1024], b: f32[1,1024], c: s32[]) -> f32[36,1024] {
  %a = f32[36,1024]{1,0} parameter(0)
  %b = f32[1,1024]{1,0} parameter(1)
  %c = s32[] parameter(2)
  ROOT %u = f32[36,1024]{1,0} dynamic-update-slice(%a, %b, %c, %c)
}
""",
    )
    assert alone.hbm_bytes == fused.hbm_bytes == 2 * 1024 * 4


def test_copies_count_their_ends_that_lie_in_main_memory():
    cost = cost_of("""  %x = f32[1024]{0} parameter(0)
  %s = (f32[1024]{0:S(1)}, f32[1024]{0}, u32[]{:S(2)}) copy-start(%x)
  ROOT %d = f32[1024]{0:S(1)} copy-done(%s)""")
    assert cost.hbm_bytes == 4096


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


def test_products_of_a_dilated_convolution_leave_out_its_holes():
    # heads as a spatial dimension: 2 heads, each output meets its own head alone
    cost = cost_of("""  %a = bf16[2,320,8,128]{3,2,1,0} parameter(0)
  %b = bf16[320,128,2,1]{1,0,3,2} parameter(1)
  ROOT %c = f32[2,320,8,320]{3,2,1,0} convolution(%a, %b), dim_labels=0b1f_oi01->0b1f, window={size=2x1 lhs_dilate=2x1}
""")
    assert cost.flops == 2 * 2 * 320 * 8 * 320 * 128


# Seconds

PEAKS = Peaks(flops_bf16=1e12, flops_f32=5e11, hbm_bandwidth=1e11, link_bandwidth=1e9)


def a_transfer_over(machines: int, group: int) -> Transfer:
    return Transfer("all-reduce", ("dp",), group, 10**9, False, machines=machines)


def test_between_machines_the_network_is_waited_for():
    peaks = dataclasses.replace(PEAKS, network_bandwidth=1e9)
    works = [Work("a", "", 1.0, transfers=(a_transfer_over(*each),)) for each in ((1, 8), (2, 2), (2, 16))]
    within, alone, shared = (roofline(ProgramCost((work,)), peaks, links=2).ici for work in works)
    assert within == 10**9 / (2 * PEAKS.link_bandwidth)
    assert alone == 1.0  # a device of each machine: all of it goes over its own share of the network
    assert shared == max(within, 1 / 8)  # a ring of 16: each of a machine's 8 devices carries a part


def test_an_exchange_takes_some_time_however_small_it_is():
    peaks = dataclasses.replace(PEAKS, collective_s=1e-5)
    small = dataclasses.replace(a_transfer_over(1, 8), sent=8)
    line = roofline(ProgramCost((Work("a", "", 3.0, transfers=(small,)),)), peaks, links=2)
    assert line.ici + line.latency == pytest.approx(3e-5)


def test_a_transfer_is_waited_for_but_for_what_is_done_meanwhile():
    link_s = 10**9 / (2 * PEAKS.link_bandwidth)

    def waited(beside):
        transfer = dataclasses.replace(a_transfer_over(1, 8), beside=beside)
        return roofline(ProgramCost((Work("a", "", 1.0, transfers=(transfer,)),)), PEAKS, links=2).ici

    half = link_s / 2 * PEAKS.hbm_bandwidth
    assert waited((0, 0, 0)) == link_s
    assert waited((0, 0, half)) == pytest.approx(link_s / 2)
    assert waited((0, 1e30, half)) == 0


def a_transfer(sent, *, overlaps=False, group=8, kind="all-gather"):
    return Transfer(kind, ("fsdp",), group, sent, overlaps)


def test_each_instruction_takes_the_longer_of_its_products_and_its_traffic():
    works = (
        Work("a", "", 3.0, flops=2e9, hbm_bytes=1e8),  # 2 ms against 1 ms
        Work("b", "", 1.0, flops=1e9, flops_f32=1e9, hbm_bytes=1e8),  # 3 ms against 1 ms
        Work("c", "", 2.0, flops=1e9, hbm_bytes=5e8),  # 1 ms against 5 ms
    )
    times = roofline(ProgramCost(works), PEAKS, links=2)
    assert (times.compute, times.hbm, times.ici, times.latency) == pytest.approx((0.009, 0.010, 0, 0))


@pytest.mark.parametrize(("overlaps", "ici"), [(False, 0.005), (True, 0.003)])
def test_a_transfer_that_overlaps_costs_only_what_outlasts_the_work(overlaps, ici):
    works = (Work("a", "", 1.0, flops=2e9), Work("b", "", 1.0, transfers=(a_transfer(10_000_000, overlaps=overlaps),)))
    times = roofline(ProgramCost(works), PEAKS, links=2)
    assert (times.compute, times.ici, times.latency) == pytest.approx((0.002, ici, 0))


@pytest.mark.parametrize(("kind", "hops"), [("all-gather", 4), ("all-reduce", 8)])
def test_a_small_transfer_takes_its_hops(kind, hops):
    times = roofline(ProgramCost((Work("a", "", 10.0, transfers=(a_transfer(2, kind=kind),)),)), PEAKS, links=2)
    assert times.latency + times.ici == pytest.approx(10 * hops * 1e-6)
