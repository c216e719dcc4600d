"""Checks that a model and a rollout split evenly over a machine, before anything is compiled or rented."""

from collections.abc import Callable

from podium.accelerators import Accelerator
from podium.config.mesh import MeshSizes
from podium.config.schema import Config
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
from podium.run.machine import Machine
from podium.run.resolve import resolve_critic, resolve_layout, resolve_mesh, resolve_reward_models, resolve_teacher
from podium.run.sizes import row_tokens
from podium.run.spec import RewardModelSpec

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


def check_divisible(config: Config, decoder: DecoderConfig, accelerator: Accelerator) -> None:
    """Check, before anything is compiled or rented, that weights and sequences split evenly over a machine's mesh.

    Raises ValueError if the mesh does not fit the machine, or does not divide the model or the rollout's slots; the
    message lists values that work.
    """
    machine = Machine.planned(accelerator)
    mesh = resolve_mesh(config, machine)
    _check_weights(config, config.model, decoder, mesh, accelerator)
    teacher = resolve_teacher(config)
    if config.teacher is not None and teacher is not None:
        _check_weights(config, config.teacher.model, teacher, mesh, accelerator)
        check_tokens(config, teacher, mesh)
    if (critic := resolve_critic(config, decoder)) is not None:
        model = (config.critic and config.critic.model) or config.model
        _check_weights(config, model, critic.decoder, mesh, accelerator)
        check_tokens(config, critic.decoder, mesh)
    for each in resolve_reward_models(config):
        _check_weights(config, each.model, each.decoder, mesh, accelerator)
        check_conversations(config, each, mesh)
    check_tokens(config, decoder, mesh)
    layout = resolve_layout(config, decoder, machine)
    rollout_mesh = layout.mesh(mesh, decoder.kv_heads)
    parts = axis_parts(ROLLOUT_LAYOUTS[layout.name], rollout_mesh)
    scales = {name: spec for name, spec in rollout_specs(decoder, 1).items() if name.endswith(SCALE)}
    for name, axis, dim in indivisible(scales, lambda axis: parts.get(axis, 1)):
        raise ValueError(
            f"rollout.layout {layout.name}: {name} has {dim} scales along its {axis}, which {parts[axis]} devices"
            " cannot split; set rollout.layout to replicated, rollout.group_chips to fewer, or lora.base to int8"
        )
    shards = parts["batch"]
    check_split(config.rollout, shards)
    cache_pages(config.rollout, shards)


def _check_weights(
    config: Config, model: str, decoder: DecoderConfig, mesh: MeshSizes, accelerator: Accelerator
) -> None:
    """Raises ValueError if the mesh does not divide the weights of a model of the run."""
    specs = param_specs(decoder)
    parts = axis_parts(TRAIN_AXES, mesh)
    for _, axis, dim in indivisible(specs, lambda axis: parts.get(axis, 1)):
        names = [name for name in mesh_axis_names(TRAIN_AXES[axis]) if mesh[name] > 1]
        works = ", ".join(str(size) for size in _working_sizes(specs, TRAIN_AXES[axis], accelerator.devices))
        raise ValueError(
            f"mesh {config.mesh!r}: {_IN_WORDS[axis].format(dim)} ({model}) cannot be split evenly by"
            f" {' x '.join(f'{name}:{mesh[name]}' for name in names)}; on {accelerator.devices} devices"
            f" {' x '.join(names)} can be {works}"
        )


def check_tokens(config: Config, decoder: DecoderConfig, mesh: MeshSizes) -> None:
    """Raises ValueError if sp does not divide the row length, or the heads that attention splits instead of tokens."""
    sp = mesh["sp"]
    tp = mesh["tp"]
    length = row_tokens(config)
    if decoder.heads % (sp * tp):
        works = [size for size in range(1, decoder.heads + 1) if decoder.heads % (size * tp) == 0]
        raise ValueError(
            f"mesh {config.mesh!r}: attention splits {decoder.heads} query heads ({config.model}) over sp:{sp} x"
            f" tp:{tp}, which they do not divide by; with tp:{tp}, sp can be {', '.join(map(str, works))}"
        )
    for heads in decoder.sizes("delta_heads"):
        if heads % (sp * tp):
            raise ValueError(
                f"mesh {config.mesh!r}: delta nets split {heads} heads ({config.model}) over sp:{sp} x tp:{tp}, which"
                " they do not divide by; make sp or tp smaller"
            )
    if length % sp:
        raise ValueError(
            f"mesh {config.mesh!r}: rows of {length} tokens cannot be split evenly by sp:{sp}; set train.row_tokens to"
            f" {-(-length // sp) * sp}"
        )


def check_conversations(config: Config, model: RewardModelSpec, mesh: MeshSizes) -> None:
    """Raises ValueError if sp does not divide a reward model's rows, or its heads; as `check_tokens`."""
    check_tokens(config, model.decoder, mesh)
    sp, length = mesh["sp"], model.row_tokens
    if length % sp:
        raise ValueError(
            f"mesh {config.mesh!r}: rows of {length} tokens of reward model {model.name} cannot be split evenly by"
            f" sp:{sp}; set its max_tokens to {length // sp * sp}"
        )


def _working_sizes(specs: ParamSpecs, mesh_axes: MeshAxes, devices: int) -> list[int]:
    """Total sizes of these mesh axes that divide the devices and every dimension that the axes split."""

    def parts(size: int) -> Callable[[str], int]:
        return lambda axis: size if TRAIN_AXES.get(axis) == mesh_axes else 1

    sizes = (size for size in range(1, devices + 1) if devices % size == 0)
    return [size for size in sizes if not any(indivisible(specs, parts(size)))]
