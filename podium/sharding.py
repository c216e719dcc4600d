"""How arrays are split over devices: a mesh, and one table from logical axes to mesh axes.

Parameters are declared once as `ParamSpec`s; initialisation, sharding, checkpoints and the planner's abstract arrays
derive from that declaration. The mesh axes are dp (replicas), fsdp (splits parameters and batch), sp (splits parameters
and the tokens of a row), and tp (splits heads).
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podium.accelerators import SPARSE_CORES, Kernels, capability_of, kernels_on
from podium.config.mesh import mesh_shape
from podium.models.blocks.spec import ParamSpecs
from podium.models.params import MeshAxes, indivisible, mesh_axis_names

Params = dict[str, jax.Array]
AbstractParams = dict[str, jax.ShapeDtypeStruct]
"""Shapes, dtypes and shardings of parameters."""
AnyParams = Params | AbstractParams
MOST_AT_ONCE = 8
"""Most devices in one exchange of parts of an array (`exchanges`)."""
MOST_IN_PIECES = 32
"""Most chips of a v4, v5e or v5p over which the compiler scatters gradients piece by piece during the products."""
MOST_GATHERED = 32
"""Most devices from which an array is gathered at once. From 64 devices of a v4 or v5p on, the compiler would gather by
summing zero-padded arrays, which sends twice as much."""
CUBES = ("TPU v4", "TPU v5")
"""Kinds of TPU whose slices of 8 chips are a cube of 2 x 2 x 2, instead of a ring or two rows."""
A = TypeVar("A", jax.Array, np.ndarray)
"""Arrays on the devices, or numpy arrays that the host fills in place and copies there."""


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """A mesh and the mesh axes that split each logical axis; an axis that is not listed is not split."""

    mesh: Mesh
    axes: Mapping[str, MeshAxes]
    stored: Mapping[str, MeshAxes] | None = None
    """Mesh axes that split stored weights and their gradients; None if they are the same as `axes`."""

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array with these logical axes."""
        return PartitionSpec(*(None if axis is None else self._mesh_axes(axis) for axis in axes))

    def sharding(self, *axes: str | None) -> NamedSharding:
        """The sharding of an array with these logical axes; replicated without axes."""
        return NamedSharding(self.mesh, self.spec(axes))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Lay out `x` by these logical axes at this point of a traced function."""
        return jax.lax.with_sharding_constraint(x, self.sharding(*axes))

    @property
    def storage(self) -> "ShardingRules":
        """The rules of stored weights."""
        return self if self.stored is None else ShardingRules(self.mesh, self.stored)

    def constrain_weight(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Lay out a weight by these axes. In the backward pass, its gradient is summed and split like the stored weight
        in one exchange.
        """
        return _constrain_weight(self.sharding(*axes), self.storage.sharding(*axes), x)

    def gathered_weight(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Gather a stored weight, by `exchanges` if it is split over many devices; not differentiable."""
        stored, here = self.storage.spec(axes), self.spec(axes)
        gather = functools.partial(_whole, parts=_gathered(self.mesh, stored, here), mesh=self.mesh)
        return jax.shard_map(gather, mesh=self.mesh, in_specs=stored, out_specs=here, check_vma=False)(x)

    def weight_sums(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Zeros in place of a weight, whose gradient is the weight's gradient, summed and split in its own number
        format.
        """
        return _weight_sums(self.sharding(*axes), self.storage.sharding(*axes), x)

    def sums_of_copies(self, x: jax.Array, *axes: str | None, pieces: Sequence[str] = ("pieces",)) -> jax.Array:
        """`weight_sums` for n copies of a stored weight, one for each piece of the batch: [n, ...].

        `pieces` are the logical axes that split the batch; the copies have one leading dimension for each.
        """
        return _sums_of_copies(self.mesh, self.storage.spec(axes), self.spec((*pieces, *axes)), x)

    def weight_copies(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Make n copies [n, ...] of a stored weight, one on the devices of each piece of the batch.

        For loops over parts of the batch: each copy's gradient stays on its devices until the loop ends.
        """
        return _weight_copies(self.mesh, self.storage.spec(axes), self.spec(("pieces", *axes)), x)

    def in_many_parts(self, *axes: str | None) -> bool:
        """Whether a layer's weight with these axes is split over more devices than `most_parts`."""
        pairs = zip(self.storage.spec(axes), self.spec(axes), strict=True)
        return any(_size(self.mesh, own) > self.most_parts for own, here in pairs if own != here)

    @property
    def most_parts(self) -> int:
        """The largest number of devices over which XLA may split the gradient of a layer's product while summing it.

        Over more, the TPU's compiler sums whole gradients on all chips, so they are summed in `exchanges` instead
        (benches/results/wide-updates-planned.json). A v6e multiplies by whole weights (`podium.compiler`); other TPUs
        multiply by pieces and also scatter piece by piece. GPUs and CPUs have no such limit.
        """
        if self.platform != "tpu":
            return self.mesh.size
        return MOST_AT_ONCE if self.device_kind in SPARSE_CORES else MOST_IN_PIECES

    @property
    def platform(self) -> str:
        """The jax platform of the mesh's devices: cpu, gpu or tpu."""
        return self.mesh.devices.flat[0].platform

    @property
    def device_kind(self) -> str:
        """Jax's name of the kind of the mesh's devices."""
        return self.mesh.devices.flat[0].device_kind

    @property
    def kernels(self) -> Kernels:
        """The kind of kernels that the mesh's devices run."""
        return kernels_on(self.platform, capability_of(self.mesh.devices.flat[0]))

    @property
    def on_cpu(self) -> bool:
        """Whether the mesh consists of CPUs."""
        return self.platform == "cpu"

    def num_shards(self, axis: str) -> int:
        """The number of parts into which a logical axis is split."""
        return _size(self.mesh, self._mesh_axes(axis))

    def _mesh_axes(self, axis: str) -> MeshAxes:
        """The mesh axes that split a logical axis; `rows` is split like `batch`, unless the table lists it."""
        return self.axes.get("batch" if axis == "rows" and "rows" not in self.axes else axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _constrain_weight(here: NamedSharding, gradient: NamedSharding, x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, here)


_constrain_weight.defvjp(
    lambda here, gradient, x: (_constrain_weight(here, gradient, x), None),
    lambda here, gradient, _, dx: (jax.lax.with_sharding_constraint(dx, gradient),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _weight_sums(here: NamedSharding, gradient: NamedSharding, x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.zeros(x.shape, x.dtype), here)


_weight_sums.defvjp(
    lambda here, gradient, x: (_weight_sums(here, gradient, x), None),
    lambda here, gradient, _, dx: (jax.lax.with_sharding_constraint(dx, gradient),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sums_of_copies(mesh: Mesh, stored: PartitionSpec, copies: PartitionSpec, x: jax.Array) -> jax.Array:
    pieces = [_size(mesh, axes) for axes in copies[: len(copies) - len(stored)]]
    nothing = jnp.zeros((*pieces, *x.shape), x.dtype)
    return jax.lax.with_sharding_constraint(nothing, NamedSharding(mesh, copies))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _weight_copies(mesh: Mesh, stored: PartitionSpec, copies: PartitionSpec, x: jax.Array) -> jax.Array:
    def gather(x: jax.Array) -> jax.Array:
        return _whole(x, _gathered(mesh, stored, copies), mesh)[None]

    return jax.shard_map(gather, mesh=mesh, in_specs=stored, out_specs=copies, check_vma=False)(x)


def _sum_copies(mesh: Mesh, stored: PartitionSpec, copies: PartitionSpec, _: None, dx: jax.Array) -> tuple[jax.Array]:
    """Backward pass of `_weight_copies`: sum the gradients [n, ...] of a weight's n copies, in its stored layout."""
    gathered = _gathered(mesh, stored, copies)
    scattered = {name for axes in gathered.values() for name in mesh_axis_names(axes)}
    pieces = copies[: len(copies) - len(stored)]
    names = [name for axes in pieces for name in mesh_axis_names(axes)]
    others = tuple(name for name in names if name not in scattered and mesh.shape[name] > 1)

    def rows_of_sum(dx: jax.Array, axes: MeshAxes) -> jax.Array:
        # As a matrix: otherwise the compiler might put another dimension first, and send all sums.
        found = scattered_sum(dx.reshape(dx.shape[0], -1), mesh_axis_names(axes), mesh)
        return found.reshape(-1, *dx.shape[1:])

    def add(dx: jax.Array) -> jax.Array:
        dx = dx.reshape(dx.shape[len(pieces) :])
        for dim, axes in gathered.items():
            # The TPU scatters sums only along the first dimension; along another it would sum everything and keep a
            # part.
            if dim and dx.shape[0] % _size(mesh, axes) == 0:
                dx = rows_of_sum(dx, axes)
                dx = jax.lax.all_to_all(dx, axes, split_axis=dim, concat_axis=0, tiled=True)
            else:
                dx = jnp.moveaxis(rows_of_sum(jnp.moveaxis(dx, dim, 0), axes), 0, dim)
        return jax.lax.psum(dx, others)

    return (jax.shard_map(add, mesh=mesh, in_specs=copies, out_specs=stored, check_vma=False)(dx),)


def _whole(x: jax.Array, parts: Mapping[int, MeshAxes], mesh: Mesh) -> jax.Array:
    """Gather a device's part of an array along the dimensions that mesh axes split; call it inside `shard_map`."""
    for dim, axes in parts.items():
        if _size(mesh, axes) > MOST_GATHERED:
            x = jnp.moveaxis(gathered_parts(jnp.moveaxis(x, dim, 0), mesh_axis_names(axes), mesh), 0, dim)
        else:
            x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def _gathered(mesh: Mesh, stored: PartitionSpec, copies: PartitionSpec) -> dict[int, MeshAxes]:
    """Dimensions that are split in the stored weight but whole in its copies, each with the mesh axes that split it."""
    pairs = enumerate(zip(stored, copies[len(copies) - len(stored) :], strict=True))
    return {dim: axes for dim, (axes, here) in pairs if axes != here and _size(mesh, axes) > 1}


_sums_of_copies.defvjp(lambda mesh, stored, copies, x: (_sums_of_copies(mesh, stored, copies, x), None), _sum_copies)
_weight_copies.defvjp(lambda mesh, stored, copies, x: (_weight_copies(mesh, stored, copies, x), None), _sum_copies)


def exchanges(names: tuple[str, ...], mesh: Mesh) -> list[list[list[int]] | None]:
    """The device groups of each exchange, in order: first among neighbours, then across groups.

    None if all devices exchange at once. The TPU's compiler would turn a reduce-scatter over many devices into an
    all-reduce, which sends twice as much and keeps whole sums on every device. Most bytes are sent among neighbours: on
    a v6e-64 groups of 8 are rings of links, while a ring over 8 groups takes 2.5 links from one chip to the next.
    """
    sizes = exchange_sizes(_size(mesh, names))
    if len(sizes) == 1:
        return [None]
    devices = np.arange(math.prod(sizes)).reshape(sizes[::-1])
    return [np.moveaxis(devices, -1 - at, -1).reshape(-1, size).tolist() for at, size in enumerate(sizes)]


def exchange_sizes(devices: int) -> list[int]:
    """The group size of each exchange, neighbours first.

    Each size is the largest divisor, from 2 to MOST_AT_ONCE, of the number of groups that remain; without one, that
    number itself.
    """
    sizes: list[int] = []
    while devices > MOST_AT_ONCE:
        divisors = (size for size in range(MOST_AT_ONCE, 1, -1) if devices % size == 0)
        sizes.append(next(divisors, devices))
        devices //= sizes[-1]
    return sizes if sizes and devices == 1 else [*sizes, devices]


def gathered_parts(x: jax.Array, names: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """Gather the parts [m, ...] of n devices side by side, [n * m, ...]; call it inside `shard_map`.

    The gather runs along a new dimension: along the first dimension itself, the TPU's compiler would copy the stack of
    all layers into a layout in which that dimension comes first.
    """
    x = _moved(x, names, mesh, back=True)
    for groups in reversed(exchanges(names, mesh)):
        x = jax.lax.all_gather(x, names, axis=0, tiled=False, axis_index_groups=groups).reshape(-1, *x.shape[1:])
    return x


def scattered_sum(x: jax.Array, names: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """Sum the arrays [n * m, ...] of n devices, each of which gets its part [m, ...] of the sum.

    Call it inside `shard_map`. Parts are scattered along a new dimension: along the first dimension, if a part is not a
    whole number of tiles (as for a vocabulary), the TPU's compiler would send all sums to all devices. Over the 8 chips
    of a v4 or v5p it would do so in any case, so these chips exchange parts, and each sums the parts that it receives.
    """
    for groups in exchanges(names, mesh):
        parts = len(groups[0]) if groups else _size(mesh, names)
        split = x.reshape(parts, -1, *x.shape[1:])
        if groups is None and parts == 8 and mesh.devices.flat[0].device_kind in CUBES:
            x = jax.lax.all_to_all(split, names, split_axis=0, concat_axis=0, tiled=True).sum(0)
        else:
            x = jax.lax.psum_scatter(split, names, scatter_dimension=0, tiled=False, axis_index_groups=groups)
    return _moved(x, names, mesh, back=False)


def _moved(x: jax.Array, names: tuple[str, ...], mesh: Mesh, *, back: bool) -> jax.Array:
    """Move the result of `scattered_sum`'s exchanges to the device that stores it; `back`: the reverse.

    Of n = a b devices in b groups of a neighbours, neighbour i of group g receives part i b + g of the sum, because its
    group first cuts the whole array into a parts, and stores part g a + i.
    """
    sizes = exchange_sizes(_size(mesh, names))
    if len(sizes) == 1:
        return x
    # `jax.lax.ppermute` numbers devices in the order of the mesh, unlike the other collectives.
    ordered = [name for name in mesh.axis_names if name in names]
    numbers = np.arange(math.prod(sizes)).reshape([mesh.shape[name] for name in ordered])
    stored = numbers.transpose([ordered.index(name) for name in names]).ravel()
    got = stored.reshape(sizes[::-1]).T.ravel()
    pairs = zip(stored, got, strict=True) if back else zip(got, stored, strict=True)
    return jax.lax.ppermute(x, names, [(int(source), int(target)) for source, target in pairs])


def _size(mesh: Mesh, axes: MeshAxes) -> int:
    return math.prod(mesh.shape[name] for name in mesh_axis_names(axes))


class Device(Protocol):
    """The part of jax's device interface that this module reads."""

    id: int
    process_index: int
    platform: str
    device_kind: str

    def memory_stats(self) -> Mapping[str, int] | None:
        """Memory figures in bytes by name, such as `bytes_limit`; None on a CPU."""
        ...


def find_devices() -> Sequence[Device]:
    """The devices of all processes; starts jax.

    Raises:
        ValueError: jax cannot start on the platform that JAX_PLATFORMS names, or on any platform.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax asserts if CUDA's plugin is missing
        named = os.environ.get("JAX_PLATFORMS", "")
        reason = (str(error).strip() or "its plugin is not installed").splitlines()[0]
        extra = {"tpu": "tpu", "cuda": "cuda", "gpu": "cuda"}.get(named)
        install = f"pip install 'podium-rl[{extra}]', or " if extra else ""
        raise ValueError(
            f"JAX_PLATFORMS={named or 'unset'}: jax does not start ({reason}); {install}unset JAX_PLATFORMS to use the"
            " devices that jax finds; podium doctor examines this machine"
        ) from error


def make_mesh(text: str, devices: Sequence[Device] | None = None) -> Mesh:
    """Build the mesh that the setting `mesh` describes on `devices` (None: all). The devices of a slice, and of a host,
    are contiguous.
    """
    devices = sorted(devices or find_devices(), key=lambda each: (slice_of(each), each.process_index, each.id))
    hosts = len({device.process_index for device in devices})
    slices = len({slice_of(device) for device in devices})
    shape = mesh_shape(text, devices=len(devices), hosts=hosts, slices=slices)
    return Mesh(np.array(devices, dtype=object).reshape(tuple(shape.values())), tuple(shape))


def to_devices(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Shard an array that every host holds. Each host copies its own shards; whether the hosts' arrays are equal is not
    checked.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def slice_of(device: Device) -> int:
    """The index of a device's slice; 0 if there is only one slice.

    jax knows the slices of TPUs and GPUs. CPUs are divided into equal shares of the processes, as many as the
    environment variable of TPU launchers says, so that several slices can be rehearsed.
    """
    if device.platform == "cpu" and (slices := int(os.environ.get("MEGASCALE_NUM_SLICES", 1))) > 1:
        return device.process_index * slices // jax.process_count()
    return getattr(device, "slice_index", None) or 0


def param_shardings(specs: ParamSpecs, rules: ShardingRules) -> dict[str, NamedSharding]:
    """The sharding of each parameter. Raises ValueError if a dimension is not divisible by the size of its mesh
    axes.
    """
    for name, axis, dim in indivisible(specs, rules.num_shards):
        raise ValueError(
            f"parameter {name}: dimension {axis} of {dim} is not divisible by {rules.num_shards(axis)} devices "
            f"({rules.axes[axis]}); set mesh so that it is, for example 'dp:{rules.mesh.size}'"
        )
    return {name: rules.sharding(*spec.axes) for name, spec in specs.items()}


def abstract_params(specs: ParamSpecs, dtype: jnp.dtype, rules: ShardingRules) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of the parameters, without allocating them; for checkpoints and the planner."""
    shardings = param_shardings(specs, rules)
    return {name: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=shardings[name]) for name, spec in specs.items()}


def init_params(seed: int, specs: ParamSpecs, rules: ShardingRules) -> Params:
    """Draw random float32 parameters, already sharded; the numbers are the same on any mesh."""

    def init() -> Params:
        keys = jax.random.split(jax.random.key(seed), len(specs))
        return {
            name: spec.mean + spec.std * jax.random.normal(key, spec.shape, jnp.float32)
            for key, (name, spec) in zip(keys, specs.items(), strict=True)
        }

    return jax.jit(init, out_shardings=param_shardings(specs, rules))()
