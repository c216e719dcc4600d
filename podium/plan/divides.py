"""What must divide over the devices of a mesh, told before anything is compiled: the rule, and the values that work."""

from podium.plan.sizes import RunSizes
from podium.plan.weights import weights
from podium.plan.words import listed

MESH_AXES = {"vocab": "tp", "heads": "tp", "kv_heads": "tp", "mlp": "tp", "width": "fsdp"}
"""Which axis of the mesh splits each axis of the weights, as in `podium.sharding.TRAIN_AXES`."""
SAYS = {
    "vocab": "a vocabulary of {}",
    "heads": "{} query heads",
    "kv_heads": "{} key/value heads",
    "mlp": "an MLP width of {}",
    "width": "a width of {}",
}


def check_divides(run: RunSizes) -> None:
    """Raises ValueError where weights or sequences cannot be split evenly over a run's mesh."""
    sizes = {"fsdp": run.fsdp, "tp": run.tp}
    for axis, dims in _split_dims(run).items():
        mesh_axis = MESH_AXES[axis]
        for dim in sorted(dims):
            if dim % sizes[mesh_axis]:
                works = listed([str(size) for size in _working_sizes(run, mesh_axis)])
                raise ValueError(
                    f"mesh {run.config.mesh!r}: {SAYS[axis].format(dim)} ({run.config.model}) cannot be split evenly by"
                    f" {mesh_axis}:{sizes[mesh_axis]}; on {run.devices} devices {mesh_axis} can be {works}"
                )
    rollout, shards = run.config.rollout, run.rollout_shards
    for name, value in (("slots", rollout.slots), ("prefill_rows", rollout.prefill_rows)):
        if value % shards:
            near = [str(each) for each in (value // shards * shards, -(-value // shards) * shards) if each]
            raise ValueError(
                f"rollout.{name}: {value} does not divide over the {shards} devices that split the sequences; set a"
                f" multiple of {shards}, as {' or '.join(near)}"
            )


def _split_dims(run: RunSizes) -> dict[str, set[int]]:
    """Sizes of the weights along each axis that a mesh splits."""
    dims: dict[str, set[int]] = {}
    for weight in weights(run.decoder).values():
        for dim, axis in zip(weight.shape, weight.axes, strict=True):
            if axis is not None:
                dims.setdefault(axis, set()).add(dim)
    return dims


def _working_sizes(run: RunSizes, mesh_axis: str) -> list[int]:
    """Sizes of an axis of the mesh that divide the devices and all that the axis splits."""
    split = [dim for axis, dims in _split_dims(run).items() if MESH_AXES[axis] == mesh_axis for dim in dims]
    sizes = [size for size in range(1, run.devices + 1) if run.devices % size == 0]
    return [size for size in sizes if all(dim % size == 0 for dim in split)]
