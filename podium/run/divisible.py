"""Checks that a model and a rollout split evenly over a machine, before anything is compiled or rented."""

import math
from collections.abc import Callable, Iterator

from podium.config.mesh import MeshSizes, mesh_text
from podium.config.sizes import cache_pages, check_split
from podium.models.architecture import DecoderConfig
from podium.models.blocks.spec import ParamSpecs
from podium.models.params import (
    ROLLOUT_LAYOUTS,
    SCALE,
    TRAIN_AXES,
    MeshAxes,
    axis_parts,
    indivisible,
    mesh_axis_names,
    param_specs,
    rollout_specs,
)
from podium.run.run_spec import RolloutSpec, RunSpec

_IN_WORDS = {
    "vocab": "a vocabulary of {}",
    "heads": "{} query heads",
    "kv_heads": "{} key/value heads",
    "mlp": "an MLP width of {}",
    "delta_heads": "{} heads of the delta nets",
    "state_heads": "{} heads of the delta nets",
    "width": "a width of {}",
    "experts": "{} experts",
    "expert_width": "a width of {}",
    "expert_mlp": "an expert width of {}",
}


def check_divisible(spec: RunSpec) -> None:
    """Check that weights and sequences split evenly over a machine's mesh, before anything is compiled or rented.

    Raises ValueError if the mesh does not divide a model or the rollout's slots; the message lists values that work.
    """
    for model, decoder in _models(spec):
        _check_weights(model, decoder, spec.mesh)
    check_tokens(spec)
    layout, mesh = spec.rollout.layout, spec.rollout_mesh
    parts = axis_parts(ROLLOUT_LAYOUTS[layout.name], mesh)
    scales = {name: each for name, each in rollout_specs(spec.decoder, 1).items() if name.endswith(SCALE)}
    for name, axis, dim in indivisible(scales, lambda axis: parts.get(axis, 1)):
        raise ValueError(
            f"rollout.layout {layout.name}: {name} has {dim} scales along its {axis}, which {parts[axis]} devices"
            " cannot split; set rollout.layout to replicated, rollout.group_chips to fewer, or lora.base to int8"
        )
    check_split(spec.rollout.settings, parts["batch"])
    cache_pages(spec.rollout.settings, parts["batch"])


def check_tokens(spec: RunSpec) -> None:
    """Raise ValueError if rows, or the heads that attention splits instead of tokens, are not divisible by sp."""
    for model, decoder in _models(spec):
        _check_heads(model, decoder, spec.mesh)
    sp, where = spec.mesh["sp"], f"mesh {_shown(spec.mesh)!r}"
    if (length := spec.batch.row_tokens) % sp:
        raise ValueError(
            f"{where}: rows of {length} tokens cannot be split evenly by sp:{sp}; set train.row_tokens to"
            f" {-(-length // sp) * sp}"
        )
    check_conversations(spec.rollout, spec.mesh)


def check_conversations(rollout: RolloutSpec, mesh: MeshSizes) -> None:
    """Raise ValueError if a grading model's rows or heads are not divisible by sp."""
    sp = mesh["sp"]
    for role in rollout.grading_models:
        _check_heads(role.model, role.decoder, mesh)
        if role.conversations is not None and (length := role.conversations.row_tokens) % sp:
            raise ValueError(
                f"mesh {_shown(mesh)!r}: rows of {length} tokens of {role.title} cannot be split evenly by"
                f" sp:{sp}; set its max_tokens to {length // sp * sp}"
            )


def _models(spec: RunSpec) -> Iterator[tuple[str, DecoderConfig]]:
    """The name and decoder of each model of a run, the policy first."""
    yield spec.model, spec.decoder
    for role in spec.roles.values():
        yield role.model, role.decoder


def _shown(mesh: MeshSizes) -> str:
    """The mesh in the form of the setting `mesh`, without axes of size 1."""
    return mesh_text({axis: size for axis, size in mesh.items() if size > 1})


def _check_weights(model: str, decoder: DecoderConfig, mesh: MeshSizes) -> None:
    """Raise ValueError if the weights of a model do not split evenly over the mesh."""
    specs, devices = param_specs(decoder), math.prod(mesh.values())
    parts = axis_parts(TRAIN_AXES, mesh)
    for _, axis, dim in indivisible(specs, lambda axis: parts.get(axis, 1)):
        names = [name for name in mesh_axis_names(TRAIN_AXES[axis]) if mesh[name] > 1]
        works = ", ".join(str(size) for size in _working_sizes(specs, TRAIN_AXES[axis], devices))
        raise ValueError(
            f"mesh {_shown(mesh)!r}: {_IN_WORDS[axis].format(dim)} ({model}) cannot be split evenly by"
            f" {' x '.join(f'{name}:{mesh[name]}' for name in names)}; on {devices} devices"
            f" {' x '.join(names)} can be {works}"
        )


def _check_heads(model: str, decoder: DecoderConfig, mesh: MeshSizes) -> None:
    """Raise ValueError if a model's heads are not divisible by the axes sp and tp that attention splits them over."""
    sp, tp = mesh["sp"], mesh["tp"]
    if decoder.heads % (sp * tp):
        works = [size for size in range(1, decoder.heads + 1) if decoder.heads % (size * tp) == 0]
        raise ValueError(
            f"mesh {_shown(mesh)!r}: attention splits {decoder.heads} query heads ({model}) over sp:{sp} x tp:{tp}, "
            f"and they are not divisible by that; with tp:{tp}, sp can be {', '.join(map(str, works))}"
        )
    for heads in decoder.sizes("delta_heads"):
        if heads % (sp * tp):
            raise ValueError(
                f"mesh {_shown(mesh)!r}: delta nets split {heads} heads ({model}) over sp:{sp} x tp:{tp}, and they "
                "are not divisible by that; make sp or tp smaller"
            )


def _working_sizes(specs: ParamSpecs, mesh_axes: MeshAxes, devices: int) -> list[int]:
    """Total sizes of these mesh axes that divide the devices and every dimension that the axes split."""

    def parts(size: int) -> Callable[[str], int]:
        return lambda axis: size if TRAIN_AXES.get(axis) == mesh_axes else 1

    sizes = (size for size in range(1, devices + 1) if devices % size == 0)
    return [size for size in sizes if not any(indivisible(specs, parts(size)))]
