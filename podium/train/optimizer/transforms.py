"""Builds the optax optimizer of a config, and places its state on devices.

All update rules are optax's. This module adds: which parameters are matrices (from their logical axes), the order of
the chain, and moments in bfloat16. All other state is float32, like the parameters.
"""

import zlib
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import NamedSharding, PartitionSpec

from podium.compiler import Lowerable
from podium.config.imports import imported, is_path
from podium.config.optimizer import OPTIMIZER_COPIES, OptimizerConfig
from podium.models.blocks.spec import ParamSpec, ParamSpecs, is_matrix, matrix_dims
from podium.sharding import AnyParams, Params
from podium.train.optimizer.offload import Offloaded, in_host_memory, offloaded

ADAM_UPDATE_RMS = 0.2  # arXiv:2502.16982: Muon's updates, scaled to this RMS, work with AdamW's learning rates
ADAFACTOR_CLIP_RMS = 1.0  # arXiv:1804.04235, section 6


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate schedule; optimizer steps are counted from 0.

    The last warm-up step has the peak rate, and no step has rate 0. The decay starts at the peak and reaches
    `final_fraction` of it at the last of the run's `total_steps`.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    decay_steps = max(1, total_steps - 1 - warmup)
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(peak, decay_steps, alpha=config.final_fraction)
    elif config.schedule == "linear":
        main = optax.linear_schedule(peak, peak * config.final_fraction, decay_steps)
    else:
        main = optax.constant_schedule(peak)
    if not warmup:
        return main
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup - 1), main], [warmup])


def make_optimizer(
    config: OptimizerConfig, total_steps: int, specs: ParamSpecs, *, offload: bool = False
) -> optax.GradientTransformation:
    """Build the optimizer of a config: `clip -> rule -> weight decay of matrices -> learning rate`.

    Weight decay is decoupled and multiplied by the learning rate, for every rule. Clipping uses the global norm of all
    gradients. `specs` tell which parameters are matrices, and along which dimensions. With `offload` the moments stay
    in host memory between updates.
    """
    matrices = lambda params: {name: is_matrix(specs[name]) for name in params}  # noqa: E731
    made = optax.chain(
        clip_by_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        _rule(config, specs) if config.moments == "float32" else small_moments(_rule(config, specs)),
        optax.add_decayed_weights(config.weight_decay, matrices) if config.weight_decay else optax.identity(),
        optax.scale_by_learning_rate(learning_rate(config, total_steps)),
    )
    return offloaded(made, whole=is_path(config.name)) if offload else made


def clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Like `optax.clip_by_global_norm`, but accepts a precomputed norm, so it need not see all gradients at once."""

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        norm: jax.Array | None = None,
        **_: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        found = optax.tree.norm(updates) if norm is None else norm
        return jax.tree.map(lambda x: jnp.where(found < limit, x, (x / found) * limit), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


class SmallMoments(NamedTuple):
    """State of `small_moments`: the rule's state, narrowed."""

    made: jax.Array  # [] int32, number of updates so far; seeds the next rounding
    inner: optax.OptState  # state of the rule, with float32 arrays in bfloat16


def small_moments(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Store the rule's moments in bfloat16, and widen them to float32 for each update.

    With rounding to nearest, a second moment with decay 0.999 would never decrease, since a thousandth is less than
    half a bfloat16 step. Stochastic rounding is unbiased (arXiv:2010.06192).
    """

    def init(params: optax.Params) -> SmallMoments:
        narrow = lambda x: x.astype(jnp.bfloat16) if _is_moment(x, jnp.float32) else x  # noqa: E731
        return SmallMoments(jnp.zeros((), jnp.int32), jax.tree.map(narrow, rule.init(params)))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, SmallMoments]:
        assert isinstance(state, SmallMoments)
        widen = lambda x: x.astype(jnp.float32) if _is_moment(x, jnp.bfloat16) else x  # noqa: E731
        changes, inner = rule.update(updates, jax.tree.map(widen, state.inner), params)
        key = jax.random.key(state.made)

        def narrow(path: tuple[object, ...], x: jax.Array) -> jax.Array:
            own = zlib.crc32(jax.tree_util.keystr(path).encode())  # a separate key for each array
            return round_at_random(x, jax.random.fold_in(key, own)) if _is_moment(x, jnp.float32) else x

        return changes, SmallMoments(state.made + 1, jax.tree_util.tree_map_with_path(narrow, inner))

    return optax.GradientTransformation(init, update)


def _is_moment(x: jax.Array, dtype: jax.typing.DTypeLike) -> bool:
    return x.dtype == dtype and x.ndim > 0


def round_at_random(x: jax.Array, key: jax.Array) -> jax.Array:
    """Round float32 to bfloat16 stochastically: up or down with probabilities that keep the mean unchanged."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + jax.random.bits(key, x.shape, jnp.uint16)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32).astype(jnp.bfloat16)


class OptInit(Lowerable, Protocol):
    """The jitted `params -> initial optimizer state`."""

    def __call__(self, params: Params, /) -> optax.OptState:
        """Make the state, with the shardings of `abstract_opt_state`."""
        ...


def make_opt_init(optimizer: optax.GradientTransformation, params: AnyParams) -> OptInit:
    """The jitted `params -> initial optimizer state`, with the shardings of `abstract_opt_state`."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_opt_state(optimizer, params))

    def init_optimizer(params: Params) -> optax.OptState:
        return optimizer.init(params)

    return jax.jit(init_optimizer, out_shardings=shardings)


def abstract_opt_state(optimizer: optax.GradientTransformation, params: AnyParams) -> optax.OptState:
    """Shapes, dtypes and shardings of the optimizer's state, without allocating it.

    An array with the name and shape of a parameter (a moment) has the parameter's sharding, possibly in host memory;
    counts and Adafactor's rows and columns are replicated. All parameters must be on one mesh.
    """
    copied = replicated(params)

    def described(path: tuple[object, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        key = path[-1]
        # DictKey has no types in jax.
        param = params.get(key.key) if isinstance(key, jax.tree_util.DictKey) else None  # pyright: ignore[reportAttributeAccessIssue]
        sharding = copied
        if param is not None and param.shape == leaf.shape:
            sharding = in_host_memory(param.sharding) if isinstance(optimizer, Offloaded) else param.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(described, jax.eval_shape(optimizer.init, params))


def replicated(params: AnyParams) -> NamedSharding:
    """The replicated sharding on the parameters' mesh, used for scalars."""
    sharding = next(iter(params.values())).sharding
    assert isinstance(sharding, NamedSharding)
    return NamedSharding(sharding.mesh, PartitionSpec())


def _rule(config: OptimizerConfig, specs: ParamSpecs) -> optax.GradientTransformation:
    """The rule from gradients to an ascent direction; sign and step size are applied later in the chain."""
    if config.name == "adamw":
        return optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    if config.name == "lion":
        return optax.scale_by_lion(config.beta1, config.beta2)
    if config.name == "sgd":
        return optax.trace(config.beta1)  # momentum sums: steps are up to 1 / (1 - beta1) times the gradient's
    if config.name == "adafactor":
        # unlike in the paper, steps are not scaled by the parameter's norm, so that the learning rate means the same as
        # for adamw
        return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(ADAFACTOR_CLIP_RMS))
    if is_path(config.name):
        rule = imported(config.name, what="an optimizer", known=OPTIMIZER_COPIES)(config)
        if not isinstance(rule, optax.GradientTransformation):
            raise ValueError(
                f"train.optimizer.name {config.name} returns {type(rule).__name__}; it must return an optax "
                "transformation, such as optax.scale_by_adam(): clipping, decay and learning rate are added to it"
            )
        return rule

    def dimensions(params: Params) -> Any:  # optax's type does not allow None
        return {name: muon_dimensions(specs[name]) for name in params}

    muon = optax.contrib.muon(
        learning_rate=1.0,
        beta=config.beta1,
        eps=config.eps,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        consistent_rms=ADAM_UPDATE_RMS,
        muon_weight_dimension_numbers=dimensions,  # pyright: ignore[reportArgumentType]  # a function of the tree
    )
    return optax.chain(muon, optax.scale(-1.0))  # optax's muon ends with the sign; ours comes later


def muon_dimensions(spec: ParamSpec) -> optax.contrib.MuonDimensionNumbers | None:
    """The dimensions of a parameter that Muon orthogonalises; None if Adam updates it.

    Adam updates norms, biases, embedding and head (whose rows are tokens). Of the others, [L, D, H, Q] is L matrices
    from D to H * Q, and [L, H, Q, D] is L matrices from H * Q to D: dimensions before the first named axis are a batch,
    those from it up to the second named axis are inputs, the rest are outputs.
    """
    if not is_matrix(spec) or "vocab" in spec.axes:
        return None
    first, second = matrix_dims(spec)
    return optax.contrib.MuonDimensionNumbers(
        reduction_axis=tuple(range(first, second)), output_axis=tuple(range(second, len(spec.axes)))
    )
