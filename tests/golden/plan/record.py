"""Texts of small programs as compilers optimise them for v6e-8 and h100-8, for tests of podium.plan without either.

python tests/golden/plan/record.py [FOLDER [NAME ...]]        needs libtpu (pip install 'jax[tpu]'), takes a minute;
                                                              names in gpu_ need 'podium-rl[plan-gpu]' instead

Recorded with jax 0.10.2, libtpu 0.0.42.1, jax-cuda12-plugin 0.10.2 and nvidia-cuda-nvcc-cu12 12.9.86. Tables of source
files and bodies of kernels are cut out: they name folders of the machine.
"""

import json
import os
import re
import sys
from pathlib import Path

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, TOKENS, WIDTH, HIDDEN = 4, 4096, 2048, 8192
ROWS, LENGTH, HEADS, HEAD_DIM = 8, 512, 8, 128
SLOTS, POSITIONS = 64, 1024
OVERLAPPING = (
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_overlap_compute_collective_tc",
    "xla_enable_async_all_gather",
)


def mesh_of(devices, **axes: int) -> Mesh:
    return topologies.make_mesh(devices, tuple(axes.values()), tuple(axes))


def array(mesh: Mesh, shape: tuple[int, ...], dtype, *spec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def stack(devices):
    """A step of layers that are scanned, gathered one by one and made again in the backward pass; donated, float32."""
    mesh = mesh_of(devices, fsdp=8)
    specs = {"up": P(None, "fsdp", None), "down": P(None, None, "fsdp")}
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("fsdp"))

    def layer(x, w):
        with jax.named_scope("weights"):
            w = {k: jax.lax.with_sharding_constraint(v.astype(jnp.bfloat16), whole) for k, v in w.items()}
        with jax.named_scope("mlp"):
            x = x + jax.nn.relu(x @ w["up"]) @ w["down"]
        return jax.lax.with_sharding_constraint(x, rows), None

    def loss(params, x):
        with jax.named_scope("layers"):
            return jnp.sum(jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params)[0].astype(jnp.float32))

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return {k: v - 1e-3 * grads[k] for k, v in params.items()}

    params = {
        "up": array(mesh, (LAYERS, WIDTH, HIDDEN), jnp.float32, *specs["up"]),
        "down": array(mesh, (LAYERS, HIDDEN, WIDTH), jnp.float32, *specs["down"]),
    }
    out = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}
    return jax.jit(step, donate_argnums=0, out_shardings=out), (
        params,
        array(mesh, (8 * TOKENS, WIDTH), jnp.bfloat16, "fsdp"),
    )


def attention(devices):
    """Scores and their gradient, heads split over tp, rows over dp and fsdp: batched products, three axes."""
    mesh = mesh_of(devices, dp=2, fsdp=2, tp=2)
    rows = NamedSharding(mesh, P(("dp", "fsdp"), None, "tp"))

    def loss(out, q, k, v):
        scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        seen = jax.lax.with_sharding_constraint(jnp.einsum("bhts,bshd->bthd", weights, v), rows)
        out = jax.lax.with_sharding_constraint(out, NamedSharding(mesh, P("tp")))
        return jnp.sum(jnp.einsum("bthd,hdw->btw", seen, out).astype(jnp.float32) ** 2)

    qkv = array(mesh, (ROWS, LENGTH, HEADS, HEAD_DIM), jnp.bfloat16, ("dp", "fsdp"), None, "tp")
    out = array(mesh, (HEADS, HEAD_DIM, WIDTH), jnp.bfloat16, "tp", None, "fsdp")
    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)), out_shardings=(out.sharding, *(qkv.sharding,) * 3))
    return step, (out, qkv, qkv, qkv)


def decode(devices):
    """Tokens until nobody goes on: a loop whose length nobody knows, a cache written in place, a branch."""
    mesh = mesh_of(devices, fsdp=8)

    def write(cache, rows, lengths):
        return cache.at[jnp.arange(cache.shape[0]), lengths].set(rows)

    rows = P("fsdp")
    local = jax.shard_map(write, mesh=mesh, in_specs=(rows, rows, rows), out_specs=rows)

    def generate(params, cache, x, lengths, sharp):
        def step(carry):
            cache, x, lengths, i = carry
            cache = local(cache, x, lengths)
            near = jnp.argmax(jnp.einsum("sd,scd->sc", x, cache, preferred_element_type=jnp.float32), axis=1)
            y = x @ params["up"]
            y = jax.lax.cond(sharp, lambda y: jax.nn.relu(y @ params["square"]), jax.nn.relu, y)
            return cache, y @ params["down"], lengths + (near > 0), i + 1

        cache, *_ = jax.lax.while_loop(
            lambda carry: (carry[3] < 16) & jnp.any(carry[2] < POSITIONS), step, (cache, x, lengths, 0)
        )
        return cache

    params = {
        "up": array(mesh, (WIDTH, HIDDEN), jnp.bfloat16),
        "square": array(mesh, (HIDDEN, HIDDEN), jnp.bfloat16),
        "down": array(mesh, (HIDDEN, WIDTH), jnp.bfloat16),
    }
    cache = array(mesh, (SLOTS, POSITIONS, WIDTH), jnp.bfloat16, "fsdp")
    x = array(mesh, (SLOTS, WIDTH), jnp.bfloat16, "fsdp")
    lengths = array(mesh, (SLOTS,), jnp.int32, "fsdp")
    generate = jax.jit(generate, donate_argnums=1, out_shardings=cache.sharding)
    return generate, (params, cache, x, lengths, array(mesh, (), jnp.bool_))


def kernel(devices):
    """A Pallas kernel that says what it costs, three times in a loop."""
    mesh = mesh_of(devices, fsdp=8)

    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def local(x):
        cost = pl.CostEstimate(flops=12345, transcendentals=0, bytes_accessed=999)
        block = pl.BlockSpec((512, 1024), lambda i: (i, 0))
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = pl.pallas_call(
            double, like, grid=(8,), in_specs=[block], out_specs=block, cost_estimate=cost, name="double"
        )
        return jax.lax.fori_loop(0, 3, lambda _, x: call(x), x)

    step = jax.shard_map(local, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)
    return jax.jit(step), (array(mesh, (8 * 4096, 1024), jnp.float32, "fsdp"),)


PROGRAMS = {
    "stack": (stack, {}),
    "stack_overlapping": (stack, dict.fromkeys(OVERLAPPING, "true")),
    "attention": (attention, {}),
    "decode": (decode, {}),
    "kernel": (kernel, {}),
    "gpu_stack": (stack, {}),
    "gpu_decode": (decode, {}),
}
H100 = Path(__file__).parents[3] / "podium" / "plan" / "gpus" / "h100.txtpb"


def describe(name: str):
    """The machine that a program is compiled for."""
    if name.startswith("gpu_"):
        return topologies.get_topology_desc(platform="cuda", target_config=H100.read_text(), topology="1x1x8")
    return topologies.get_topology_desc("v6e:2x4", platform="tpu", chips_per_host_bounds=(2, 4, 1))


def main(folder: Path, names: list[str]) -> None:
    for name in names or PROGRAMS:
        make, options = PROGRAMS[name]
        function, arguments = make(describe(name))
        compiled = function.lower(*arguments).compile(compiler_options=options)
        text = re.sub(r"\nFileNames\n.*?(?=\n\n%|\n\nENTRY)", "", compiled.as_text(), flags=re.DOTALL)
        text = re.sub(r'"body":"[^"]*"', '"body":""', text)
        (folder / f"{name}.hlo").write_text(text, encoding="utf-8")
        stats = compiled.memory_analysis()
        memory = {key: getattr(stats, key) for key in dir(stats) if key.endswith("_in_bytes") and "host" not in key}
        (folder / f"{name}.json").write_text(json.dumps(memory, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent, sys.argv[2:])
