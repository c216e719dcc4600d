"""Memory and operations of traced programs, against arithmetic by hand and compiled figures."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_decoder import DECODER

from podium.accelerators import GIB, Accelerator, find_accelerator
from podium.hlo.cost import Work
from podium.hlo.memory import Memory
from podium.plan.compiled import compile_worker
from podium.plan.compiled.compile_worker import CompiledPhase, Job, LoopedWork
from podium.plan.compiled.phases import phase_programs
from podium.plan.planner import repeated_operations
from podium.plan.traced.absent_devices import absent_devices, absent_programs, measure_lowered, trace_memory
from podium.plan.traced.lifetimes import TracedMemory
from podium.plan.traced.operation_table import UnknownOperation
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.run.roles import find_decoder
from podium.settings import load_settings
from podium.sharding import make_mesh
from podium.train.setup import run_spec
from tests.plan.estimated import tiny_config

GOLDEN_PLANS = Path(__file__).parents[1] / "golden" / "behaviour" / "plans.json"
MESH = make_mesh("fsdp:4", absent_devices(find_accelerator("v6e-4")))
N = 256
SQUARE = N * N * 4  # bytes of float32 [N, N]


def array(*shape: int, split: tuple[str | None, ...] = (), mesh: Mesh = MESH, dtype: str = "float32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*split)))


def traced(
    function: Callable[..., object],
    *arguments: object,
    machine: str = "h100-1",
    out: NamedSharding | None = None,
    donated: tuple[int, ...] = (),
) -> TracedMemory:
    """The function on one device of a machine."""
    accelerator = find_accelerator(machine)
    platform = {"gpu": "cuda"}.get(accelerator.platform, accelerator.platform)
    jitted = jax.jit(function, out_shardings=out, donate_argnums=donated)
    lowered = jitted.trace(*arguments).lower(lowering_platforms=(platform,))
    return measure_lowered(lowered, accelerator)


def whole(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_a_product_does_two_operations_for_each_pair_of_elements():
    found = traced(lambda a, b: a @ b, whole(8, 16), whole(16, 32))
    assert found.cost.flops == 2 * 8 * 16 * 32
    assert (found.arguments, found.temporary) == ((8 * 16 + 16 * 32) * 4, 8 * 32 * 4)


def test_a_loop_does_the_operations_of_all_its_rounds():
    def layers(x, weights):  # [8, 16], [5, 16, 16]
        return jax.lax.scan(lambda x, weight: (x @ weight, None), x, weights)[0]

    assert traced(layers, whole(8, 16), whole(5, 16, 16)).cost.flops == 5 * 2 * 8 * 16 * 16


def test_a_convolution_multiplies_each_output_with_one_window():
    found = traced(lambda x, k: jax.lax.conv(x, k, (1, 1), "VALID"), whole(2, 3, 10, 10), whole(7, 3, 3, 3))
    assert found.cost.flops == 2 * (2 * 7 * 8 * 8) * (3 * 3 * 3)


def test_a_device_does_its_share_of_a_product():
    found = traced(lambda a, b: a @ b, array(8, 16, split=("fsdp",)), array(16, 32), machine="v6e-4")
    assert found.cost.flops == 2 * (8 // 4) * 16 * 32
    assert found.arguments == (8 // 4 * 16 + 16 * 32) * 4
    assert found.cost.sent == 0


def test_parts_of_a_sum_are_added_up_over_the_devices():
    split = array(8, 16, split=(None, "fsdp")), array(16, 32, split=("fsdp",))
    found = traced(lambda a, b: a @ b, *split, machine="v6e-4", out=NamedSharding(MESH, PartitionSpec()))
    assert found.cost.flops == 2 * 8 * (16 // 4) * 32
    assert found.cost.sent == 2 * 3 / 4 * (8 * 32 * 4)  # around a ring: once to add up, once to tell


def test_a_sum_of_which_each_device_keeps_a_part_is_sent_once():
    split = array(8, 16, split=(None, "fsdp")), array(16, 32, split=("fsdp",))
    kept = NamedSharding(MESH, PartitionSpec("fsdp"))
    found = traced(lambda a, b: a @ b, *split, machine="v6e-4", out=kept)
    assert found.cost.sent == 3 / 4 * (8 * 32 * 4)


def test_gathered_weights_are_sent_and_held():
    def apply(x, weight):
        return x @ jax.lax.with_sharding_constraint(weight, NamedSharding(MESH, PartitionSpec()))

    given = array(4 * N, N, split=("fsdp",)), array(N, N, split=("fsdp",))
    found = traced(apply, *given, machine="v6e-4")
    assert found.cost.sent == 3 / 4 * SQUARE
    assert found.temporary == SQUARE + N * N * 4  # the whole weight and this device's rows of the result


def test_only_what_devices_of_several_slices_exchange_is_sent_over_the_network():
    """Gradients summed over copies of the weights leave the slice, and weights that are gathered within it do not."""
    mesh = make_mesh("dp:2,fsdp:4", absent_devices(find_accelerator("2xv6e-4")))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def work(summed, gathered):
        return summed.sum(0), jax.lax.with_sharding_constraint(gathered, everywhere)

    given = array(8, 64, split=("dp",), mesh=mesh), array(32, 64, split=("fsdp",), mesh=mesh)
    found = traced(work, *given, machine="2xv6e-4", out=everywhere)
    transfers = [each for work in found.works for each in work.work.transfers]
    assert {(each.kind, each.group, each.machines) for each in transfers} == {
        ("all-reduce", 2, 2),
        ("all-gather", 4, 1),
    }


def test_copies_of_the_same_weights_add_up_their_parts_after_the_sum_within_each():
    """A device keeps a quarter of 256 bytes: it sends three quarters in its slice, then its own to the other slice."""
    mesh = make_mesh("dp:2,fsdp:4", absent_devices(find_accelerator("2xv6e-4")))
    given = array(8, 64, split=(("dp", "fsdp"),), mesh=mesh)
    found = traced(lambda x: x.sum(0), given, machine="2xv6e-4", out=NamedSharding(mesh, PartitionSpec("fsdp")))
    transfers = [each for work in found.works for each in work.work.transfers]
    assert {(each.kind, each.group, each.machines, each.sent) for each in transfers} == {
        ("reduce-scatter", 4, 1, 3 * 64),
        ("all-reduce", 2, 2, 64),
    }


def test_arrays_live_until_they_are_read_last():
    def three(x, w):  # [N, N], [N, N]
        return ((x @ w) @ w) @ w

    assert traced(three, whole(N, N), whole(N, N)).temporary == 2 * SQUARE

    def both(x, w):
        first = x @ w
        return first @ (first @ w)

    assert traced(both, whole(N, N), whole(N, N)).temporary == 3 * SQUARE


def test_what_is_only_added_up_is_never_an_array():
    assert traced(lambda x: jnp.sum(jnp.exp(x) * 2 + 1), whole(N, N)).temporary == 4


def test_a_function_of_each_number_is_computed_once_for_two_products():
    found = traced(lambda x, a, b: (jnp.exp(x) @ a, jnp.exp(x) @ b), *[whole(N, N)] * 3, machine="v6e-1")
    assert found.temporary == 3 * SQUARE
    one = traced(lambda x, a: jnp.exp(x) @ a, *[whole(N, N)] * 2, machine="v6e-1")
    assert one.temporary == SQUARE  # a TPU computes it inside the product
    assert traced(lambda x, a: jnp.exp(x) @ a, *[whole(N, N)] * 2).temporary == 2 * SQUARE  # a GPU's library does not


def test_a_gpu_s_product_widens_codes_itself_and_a_layer_s_are_copied_out_of_a_stack():
    def product(x: jax.Array, codes: jax.Array) -> jax.Array:
        return x @ codes.astype(jnp.bfloat16)

    def layers(x: jax.Array, stack: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, codes: (product(x, codes), None), x, stack)[0]

    x, small = jax.ShapeDtypeStruct((16, N), jnp.bfloat16), 16 * N * 2
    one = traced(product, x, jax.ShapeDtypeStruct((N, N), jnp.int8)).cost.hbm_bytes
    assert one == N * N + 2 * small
    three = traced(layers, x, jax.ShapeDtypeStruct((3, N, N), jnp.int8)).cost.hbm_bytes
    assert 3 * (3 * N * N) <= three <= 3 * (3 * N * N + 8 * small)  # read, written, and read by the product


def test_a_result_is_written_over_a_donated_argument():
    assert traced(lambda x, w: x + w, whole(N, N), whole(N, N), donated=(0,)).temporary == 0
    assert traced(lambda x, w: x + w, whole(N, N), whole(N, N)).temporary == SQUARE


def test_a_loop_writes_its_results_into_one_stack():
    def layers(x, weights):
        def layer(x, weight):
            x = x @ weight
            return x, x

        return jax.lax.scan(layer, x, weights)

    found = traced(layers, whole(N, N), whole(5, N, N), machine="v6e-1")
    # The stack, what the loop carries, and its next value.
    assert found.temporary == 5 * SQUARE + 2 * SQUARE + 4  # with the loop's counter


def test_the_next_rounds_part_of_a_host_array_is_on_its_way():
    """One part is computed with, another is copied meanwhile; the stack itself takes no memory of the device."""
    mesh = make_mesh("fsdp:1", absent_devices(find_accelerator("v6e-1")))
    on_device = NamedSharding(mesh, PartitionSpec())
    on_host = on_device.with_memory_kind("pinned_host")

    def layers(x, weights):
        def layer(x, weight):
            return x @ jax.device_put(weight, on_device), None

        return jax.lax.scan(layer, x, weights)[0]

    stack = jax.ShapeDtypeStruct((5, N, N), jnp.float32, sharding=on_host)
    found = traced(layers, array(N, N, mesh=mesh), stack, machine="v6e-1")
    assert found.arguments == SQUARE
    # What the loop carries, its next value, this round's part, the next one, and the loop's counter.
    assert found.temporary == 4 * SQUARE + 4


def test_a_sum_over_devices_goes_on_beside_the_next_product():
    """While a sum of 48 MiB is sent, in 0.2 ms, its parts stay beside what a product of 0.1 ms makes."""
    n = 2048

    def step(a, b, x, w):  # the parts of a gradient, then a product that does not need it
        summed = jax.lax.with_sharding_constraint(a.T @ b, NamedSharding(MESH, PartitionSpec("fsdp")))
        return summed, x @ w

    rows = array(4 * n, n, split=("fsdp",))
    found = traced(step, rows, rows, rows, array(n, n), machine="v6e-4")
    square = n * n * 4
    assert found.temporary == square + square // 4 + square


def test_an_operation_that_is_not_known_is_named():
    with pytest.raises(UnknownOperation, match=r"custom_call @\w*(qr|geqrf|Qr)\w*.*operation_table"):
        traced(lambda x: jnp.linalg.qr(x)[0], whole(8, 8))


@pytest.fixture(scope="module")
def demo():
    """The programs of the demo on v6e-1."""
    machine = find_accelerator("v6e-1")
    config = load_settings(["configs/demo.yaml"], [], {}).config
    spec = resolve(config, find_decoder(config), Machine.planned(machine))
    return machine, absent_programs(spec, machine)


def test_programs_of_a_run_are_traced_without_a_compiler_near_to_what_it_says(demo):
    machine, programs = demo
    plan = json.loads(GOLDEN_PLANS.read_text())["configs/demo.yaml v6e-1"]
    compiled = {phase["name"]: phase for phase in plan["phases"]}
    for phase, name, share in (("init", "init", 0.03), ("sync", "sync", 0.02), ("update", "update", 0.04)):
        program = programs[name]
        own = trace_memory(program, machine).peak + sum(program.residents.values())
        code = compiled[phase]["parts_gib"]["code"]
        assert own / GIB == pytest.approx(compiled[phase]["gib"] - code, rel=share), phase
    for phase, name, calls in (("prefill", "prefill:64", 1), ("update", "update", plan["micro_batches"])):
        flops = calls * trace_memory(programs[name], machine).cost.flops
        assert flops == pytest.approx(compiled[phase]["flops"], rel=1e-3)


def test_a_plan_names_a_program_of_which_the_compiler_computes_a_part_twice():
    def compiled(flops: float) -> CompiledPhase:
        work = LoopedWork(Work(name="", source="", times=0.0, flops=flops), once=1.0, each=2.0)
        memory = Memory(peak=1, code=0)
        return CompiledPhase(
            residents={}, memory=memory, parts={}, largest=(), work=(work,), compile_s=1.0, traced_flops=3e12
        )

    (said,) = repeated_operations({"update": compiled(1.13e12), "score": compiled(1.01e12)})
    assert said == "update: the compiler computes 13.0% of its operations a second time"


def test_a_compiled_update_does_the_operations_that_were_traced(tmp_path, monkeypatch):
    config, mesh = tiny_config(), make_mesh("auto")
    machine = Accelerator(name="cpu-8", generation="cpu", devices=8, hosts=1, hbm_bytes=2**30)
    spec = run_spec(config, DECODER, mesh)
    job = Job(phase="update", config=config, decoder=DECODER, accelerator=machine, programs=tmp_path)
    found = compile_worker._finished(job, spec, phase_programs(spec, mesh)["update"].lower(), {})
    assert isinstance(found, CompiledPhase) and found.doubts == ()
    assert found.traced_flops > 0
    assert found.cost(1.0).flops == pytest.approx(found.traced_flops, rel=0.02)
