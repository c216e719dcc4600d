import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from recorded_programs import FSDP, GOLDEN, HIDDEN, LAYERS, MESH, TOKENS, WIDTH, by_kind

from podium.hlo.cost import unknown_loops, walk
from podium.hlo.hlo_text import parse
from podium.hlo.liveness import live_at_peak

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


def test_a_transfer_on_the_sparse_core_is_waited_for_only_beyond_what_is_done_meanwhile():
    text = """HloModule m, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%scatter (g: f32[64,4]) -> f32[8,4] {
  %g = f32[64,4]{1,0} parameter(0)
  ROOT %rs = f32[8,4]{1,0} reduce-scatter(%g), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%sum
}, execution_thread="sparsecore"

ENTRY %main (p: f32[64,4], q: bf16[8,16], r: bf16[16,4]) -> f32[8,4] {
  %p = f32[64,4]{1,0} parameter(0)
  %q = bf16[8,16]{1,0} parameter(1)
  %r = bf16[16,4]{1,0} parameter(2)
  %before = bf16[8,4]{1,0} dot(%q, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %start = ((f32[64,4]{1,0}), f32[8,4]{1,0}) async-start(%p), async_execution_thread="sparsecore", calls=%scatter
  %beside = bf16[8,4]{1,0} dot(%q, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %done = f32[8,4]{1,0} async-done(%start)
}
"""
    cost = walk(parse(text), {"fsdp": 8})
    ((sent,),) = (work.transfers for work in cost.works if work.transfers)
    assert sent.beside == (0, 2 * 8 * 16 * 4, 2 * (8 * 16 + 16 * 4 + 8 * 4))
    assert [(each.kind, each.overlaps) for each in cost.collectives] == [("reduce-scatter", True)]


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


SLICES = """HloModule m, num_partitions=16
ENTRY %main (p: f32[64,1024]) -> f32[64,1024] {
  %p = f32[64,1024]{1,0} parameter(0)
  %after-all = token[] after-all()
  %send = (f32[64,1024]{1,0}, u32[], token[]) send(%p, %after-all), channel_id=2, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",\
_xla_megascale_target="{1,2,3,4}x{0:15}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[64,1024]{1,0}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv-done = (f32[64,1024]{1,0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %got = f32[64,1024]{1,0} get-tuple-element(%recv-done), index=0
}
"""


def test_what_slices_sum_over_the_network_is_a_transfer_between_as_many_machines():
    """A chip's part of the sum, 64 x 1024 float32, goes around a ring of four slices twice, but for its own quarter."""
    cost = walk(parse(SLICES), {"dp": 1, "fsdp": 16, "sp": 1, "tp": 1}, per_machine=16)
    (sent,) = (each for work in cost.works for each in work.transfers)
    assert (sent.kind, sent.axes, sent.group, sent.machines) == ("all-reduce", ("dp",), 4, 4)
    assert sent.sent == 64 * 1024 * 4 * 2 * 3 // 4
