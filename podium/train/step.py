"""The trainer's two compiled programs: score a batch, and update on it. Each is defined once, for all callers.

The trainer calls what these factories return, the planner lowers it for devices that do not exist, the benchmarks time
it. The device loops over a batch's non-empty micro-batches and sums their gradients. Weights already contain the whole
batch's denominators, so the result does not depend on how a batch is cut into micro-batches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from podium.algorithms.advantages import RETURNS, VALUES
from podium.algorithms.controllers import ENTROPY_BONUS, KL_COEF, first_coefs, loss_coefs
from podium.algorithms.losses import Tokens, entropy_loss, policy_loss, value_loss
from podium.algorithms.recipes import LIKELIHOOD, TAUGHT_HIDDEN, Recipe
from podium.algorithms.routers import router_loss, router_stats
from podium.compiler import Lowerable, compiler_options
from podium.models.architecture import DecoderConfig
from podium.models.attention.mask import Visibility, packed_rows
from podium.models.attention.packed_attention import row_attention
from podium.models.blocks.choices import Balance
from podium.models.blocks.kind import Advance, At, Packed, States
from podium.models.decoder import PassSettings, forward, head_weights, token_scores
from podium.models.linear import activation_dtype
from podium.models.logprobs import HeadSettings, Taught, TokenLogprobs, token_logprobs
from podium.models.packed_delta_rule import row_recurrence
from podium.models.params import GATHERED_AXES, TRAIN_AXES, trained_specs
from podium.models.recorded_experts import balances, recorded_choices
from podium.run.run_spec import BatchSizes, UpdateSpec
from podium.sharding import Params, ShardingRules, abstract_params, to_devices
from podium.train.batches.batch import Batch, make_batch
from podium.train.optimizer.offload import Offloaded, apply_gradients
from podium.train.state import TrainState, abstract_state

Metrics = dict[str, jax.Array]


TAUGHT_HEAD = "taught_head"
"""Name of the head [V, D] of a `Role.compared` model in the `frozen` weights of an update."""


class ScoreProgram(Protocol):
    """`(params, batch) -> [K, B, T]` float32: scores each target of a batch, without gradient.

    For a `Role.compared` model it returns hidden states instead, [K, B, T, D].
    """

    def __call__(self, params: Params, batch: Batch[jax.Array], /) -> jax.Array:
        """Score a batch."""
        ...


class TrainStep(Protocol):
    """`(state, batch, frozen) -> (state, metrics)`; without `frozen`, all weights are in the state."""

    def __call__(
        self, state: TrainState, batch: Batch[jax.Array], frozen: Params | None = None, /
    ) -> tuple[TrainState, Metrics]:
        """Update on a batch; the state is donated."""
        ...


class CompiledScore(ScoreProgram, Lowerable, Protocol):
    """A `ScoreProgram` that jax compiles."""


class CompiledTrainStep(TrainStep, Lowerable, Protocol):
    """A `TrainStep` that jax compiles."""


class TrainSettings(NamedTuple):
    """Settings that a run's compiled programs share, fixed before they are traced."""

    decoder: DecoderConfig
    mesh: jax.sharding.Mesh
    update: UpdateSpec

    @property
    def dtype(self) -> jnp.dtype:
        """Number format of activations and of the weights' copies during a layer's computation."""
        return jnp.dtype(self.update.dtype)

    def options(self, *, offloaded: bool = False, tokens: int = 0) -> dict[str, str]:
        """Compiler options for a program with these settings; arguments as for `compiler_options`."""
        device = self.mesh.devices.flat[0]
        return compiler_options(
            device.platform,
            kind=device.device_kind,
            offloaded=offloaded,
            tokens=tokens,
            experts=bool(self.decoder.routed),
        )

    @property
    def stored(self) -> ShardingRules:
        """How parameters, gradients and optimizer state are sharded in storage."""
        return ShardingRules(self.mesh, TRAIN_AXES)

    @property
    def computing(self) -> ShardingRules:
        """How weights and activations are sharded while a layer computes."""
        return ShardingRules(self.mesh, GATHERED_AXES, stored=TRAIN_AXES)


class TrainPrograms(NamedTuple):
    """The compiled programs of a trainer."""

    score: CompiledScore
    train_step: CompiledTrainStep


def make_train_programs(
    settings: TrainSettings, recipe: Recipe, optimizer: optax.GradientTransformation
) -> TrainPrograms:
    """Make the programs of a run; shared by trainer and planner."""
    return TrainPrograms(make_score(settings), make_train_step(settings, recipe, optimizer))


def make_score(settings: TrainSettings, *, entropy: bool = False) -> CompiledScore:
    """The jitted `(params, batch) -> logprobs [K, B, T]` of the batch's targets, float32, without gradient.

    With `entropy`, it returns the entropies of the distributions over each target instead, in nat.
    """

    def score(params: Params, batch: Batch[jax.Array]) -> jax.Array:
        scored, _ = _logprobs(settings, params, batch)
        return scored.entropy if entropy else scored.logprobs

    return _each_micro_batch(settings, score)


def make_hidden(settings: TrainSettings) -> CompiledScore:
    """The jitted `(params, batch) -> hidden states [K, B, T, D]` from which the targets are predicted, without
    gradient.
    """
    dtype = activation_dtype(settings.computing, settings.dtype)

    def states(params: Params, batch: Batch[jax.Array]) -> jax.Array:
        hidden, _ = _hidden(settings, params, batch)
        return hidden.astype(dtype)

    return _each_micro_batch(settings, states, width=settings.decoder.width)


def make_values(settings: TrainSettings) -> CompiledScore:
    """The jitted `(params, batch) -> values [K, B, T]`: the estimate before each target; without gradient."""
    return _each_micro_batch(settings, functools.partial(_values, settings))


def _each_micro_batch(
    settings: TrainSettings, function: Callable[[Params, Batch[jax.Array]], jax.Array], *, width: int | None = None
) -> CompiledScore:
    """Apply a function of one micro-batch, which returns [B, T] float32, to all: the jitted `(params, batch) -> [K, B,
    T]`.

    With `width` D, the function returns [B, T, D] in the activations' number format instead.
    """
    dtype = jnp.float32 if width is None else activation_dtype(settings.computing, settings.dtype)
    own_axes = () if width is None else (width,)

    def score(params: Params, batch: Batch[jax.Array]) -> jax.Array:
        def one(index: jax.Array, found: jax.Array) -> jax.Array:
            own = function(params, _micro_batch(batch, index))
            return jax.lax.dynamic_update_index_in_dim(found, own, index, 0)

        nothing = jnp.zeros((*batch.tokens.shape, *own_axes), dtype)
        if len(batch.tokens) == 1:  # same result; XLA would run the layers twice in a loop over one
            return one(jnp.int32(0), nothing)
        return jax.lax.fori_loop(0, batch.num_micro_batches, one, nothing)

    shardings = settings.computing.sharding(None, "batch", "tokens", *(None for _ in own_axes))
    return jax.jit(score, out_shardings=shardings, compiler_options=settings.options())


class _Loss(Protocol):
    """`(params, frozen, micro_batch) -> (loss, (sums, maxima))`: a micro-batch's share of the loss, and statistics."""

    def __call__(
        self, params: Params, frozen: Params, batch: Batch[jax.Array], /
    ) -> tuple[jax.Array, tuple[Metrics, Metrics]]: ...


_Gradients: TypeAlias = tuple[tuple[Params, jax.Array, Metrics], Metrics]
"""Sums over micro-batches of gradients, losses and statistics; and maxima of statistics."""


def make_train_step(
    settings: TrainSettings, recipe: Recipe, optimizer: optax.GradientTransformation
) -> CompiledTrainStep:
    """The jitted update of the policy with the recipe's loss; see `_make_update`.

    `frozen` are weights that never change and are not in the state: with LoRA, all but the adapters; and TAUGHT_HEAD,
    if another model's whole distributions are learned and its head is not the policy's frozen one.
    """
    return _make_update(settings, functools.partial(_loss, settings, recipe), optimizer)


def make_value_step(
    settings: TrainSettings, optimizer: optax.GradientTransformation, *, clip: float | None
) -> CompiledTrainStep:
    """The jitted update of a model that estimates values; its batches contain VALUES and RETURNS in their scores."""
    return _make_update(settings, functools.partial(_value_loss, settings, clip), optimizer)


def _make_update(settings: TrainSettings, loss_of: _Loss, optimizer: optax.GradientTransformation) -> CompiledTrainStep:
    """The jitted update `(state, batch, frozen) -> (state, metrics)`; `state` is donated.

    Metrics are means over the batch's trained tokens, except `loss`, norms and maxima. `broken_row` is the first row,
    over all micro-batches, with a non-finite loss; rows are counted backwards from 1 for the last row, and 0 means
    none.
    """
    abstract = abstract_params(trained_specs(settings.decoder), jnp.float32, settings.stored)
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(abstract, optimizer))
    shardings = state_shardings.params
    gradient = jax.value_and_grad(loss_of, has_aux=True)

    def train_step(
        state: TrainState, batch: Batch[jax.Array], frozen: Params | None = None
    ) -> tuple[TrainState, Metrics]:
        frozen = frozen or {}

        @functools.partial(jax.jit, inline=True)  # traced once, for the shapes of the sums and for the loop
        def one(index: jax.Array) -> _Gradients:
            (loss, (sums, maxima)), grads = gradient(state.params, frozen, _micro_batch(batch, index))
            grads = {name: jax.lax.with_sharding_constraint(x, shardings[name]) for name, x in grads.items()}
            later = (len(batch.tokens) - 1 - index) * batch.tokens.shape[1]  # rows after this micro-batch
            maxima["broken_row"] += later * (maxima["broken_row"] > 0)
            return (grads, loss, sums), maxima

        def add(index: jax.Array, total: _Gradients) -> _Gradients:
            (summed, largest), (more, maxima) = total, one(index)
            with jax.named_scope("gradients"):
                return jax.tree.map(jnp.add, summed, more), jax.tree.map(jnp.maximum, largest, maxima)

        if len(batch.tokens) == 1:  # its gradient is the sum; a second tree would take as much memory as the weights
            (grads, loss, sums), maxima = one(jnp.int32(0))
        else:
            first = jnp.int32(0)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, first))
            (grads, loss, sums), maxima = jax.lax.fori_loop(first, batch.num_micro_batches, add, zeros)
        with jax.named_scope("optimizer"):
            streamed = settings.computing.platform != "cpu"
            params, opt_state, update_norm = apply_gradients(
                optimizer, grads, state.opt_state, state.params, streamed=streamed
            )
        metrics = {name: value / jnp.maximum(batch.num_tokens, 1.0) for name, value in sums.items()} | maxima
        metrics |= {"loss": loss, "gradient_norm": optax.tree.norm(grads), "update_norm": update_norm}
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    return jax.jit(
        train_step,
        donate_argnames="state",
        out_shardings=(state_shardings, None),
        compiler_options=settings.options(
            offloaded=isinstance(optimizer, Offloaded), tokens=settings.update.tokens_per_gather
        ),
    )


def _loss(
    settings: TrainSettings, recipe: Recipe, params: Params, frozen: Params, batch: Batch[jax.Array]
) -> tuple[jax.Array, tuple[Metrics, Metrics]]:
    """A micro-batch's contribution to the loss, with its statistics as sums over tokens and as maxima."""
    reverse = 1.0 if recipe.teaching is None else recipe.teaching.reverse
    scored, routers = _logprobs(settings, params | frozen, batch, reverse=reverse)
    tokens = Tokens(
        scored.logprobs,
        old_logprobs=batch.sampled_logprobs,
        advantages=batch.advantages,
        segments=batch.segments,
        mask=batch.mask,
        scores=batch.scores,
        prompts=batch.prompts,
        divergence=scored.divergence,
    )
    losses, stats = policy_loss(recipe, tokens, kl_coef=batch.coefs.get(KL_COEF))
    loss = jnp.sum(losses * batch.weights)
    bonus = batch.coefs.get(ENTROPY_BONUS, recipe.entropy_bonus or None)
    if bonus is not None:
        loss += entropy_loss(scored.entropy, batch.mask, num_tokens=batch.num_tokens, entropy_bonus=bonus)
    gap = jnp.abs(jax.lax.stop_gradient(scored.logprobs) - batch.sampled_logprobs) * batch.mask
    stats = stats | {"entropy": jax.lax.stop_gradient(scored.entropy), "logprob_gap": gap}
    if batch.ages is not None:
        ratio = jnp.exp((jax.lax.stop_gradient(scored.logprobs) - batch.sampled_logprobs) * batch.mask)
        stats |= {"ratio": ratio, "squared_ratio": ratio**2}
        stats |= by_age({"age_gap": gap, "age_clipped": stats["clip_low"] + stats["clip_high"]}, batch.ages)
    sums = {name: jnp.sum(values * batch.mask) for name, values in stats.items()}
    broken = losses * batch.weights
    if batch.likelihoods is not None:
        imitation = -scored.logprobs * batch.likelihoods
        loss, broken = loss + jnp.sum(imitation), broken + imitation
        share = jnp.maximum(batch.num_tokens, 1.0) / recipe.loss_parts[LIKELIHOOD]  # not a mean over the drawn tokens
        sums[LIKELIHOOD] = jax.lax.stop_gradient(jnp.sum(imitation)) * share
    balance = recipe.router_loss_coef
    if routers:
        tokens = jnp.sum(batch.mask)  # a micro-batch's share of means over the batch's tokens
        sums |= {name: value * tokens for name, value in router_stats(routers).items()}
        if balance:
            loss += balance * router_loss(routers) * tokens / jnp.maximum(batch.num_tokens, 1.0)
    return loss, (sums, {"logprob_gap_max": jnp.max(gap), "broken_row": _broken_row(broken)})


def _value_loss(
    settings: TrainSettings, clip: float | None, params: Params, frozen: Params, batch: Batch[jax.Array]
) -> tuple[jax.Array, tuple[Metrics, Metrics]]:
    """Like `_loss`, for estimated values: a micro-batch's contribution to the loss, which is a mean over the batch's
    trained tokens.
    """
    values = _values(settings, params | frozen, batch)
    found = value_loss(values, batch.scores[VALUES], batch.scores[RETURNS], clip=clip)
    losses = found.values * batch.mask / jnp.maximum(batch.num_tokens, 1.0)
    sums = {"clipped": jnp.sum(found.clipped * batch.mask)}
    return jnp.sum(losses), (sums, {"broken_row": _broken_row(losses)})


def _values(settings: TrainSettings, params: Params, batch: Batch[jax.Array]) -> jax.Array:
    """Estimated values at a micro-batch's targets, [B, T] float32; the model routes tokens to experts itself."""
    hidden, _ = _hidden(settings, params, dataclasses.replace(batch, choices=None))
    return token_scores(params, hidden, settings.decoder, settings.computing)


def _broken_row(losses: jax.Array) -> jax.Array:
    """The first row of losses [B, T] that is not finite, counted backwards from 1 for the last row; 0 if all are
    finite.
    """
    places = jnp.arange(len(losses), 0, -1, dtype=jnp.float32)
    return jnp.max(places * ~jnp.all(jnp.isfinite(losses), axis=1))


def by_age(values: Metrics, ages: jax.Array) -> Metrics:
    """Split statistics by age in steps [B, T]: each age's share of tokens, and the values at its tokens."""
    of_age = {"0": ages == 0, "1": ages == 1, "2+": ages >= 2}
    shares = {f"age_share/{age}": found.astype(jnp.float32) for age, found in of_age.items()}
    masked = {f"{name}/{age}": jnp.where(found, x, 0.0) for name, x in values.items() for age, found in of_age.items()}
    return shares | masked


def shard_batch(batch: Batch[np.ndarray], rules: ShardingRules) -> Batch[jax.Array]:
    """Put a batch of numpy arrays on the devices: rows and tokens split as for computing, counts replicated."""
    return jax.tree.map(lambda x: to_devices(x, batch_sharding(x, rules)), batch)


def abstract_batch(batch: Batch[np.ndarray], rules: ShardingRules) -> Batch[jax.Array]:
    """The abstract result of `shard_batch`, for the planner."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(x, rules)), batch)


def abstract_scored(sizes: BatchSizes, recipe: Recipe, settings: TrainSettings, *, width: int = 0) -> Batch[jax.Array]:
    """The abstract batch of an update, with the scores that the loss reads and the coefficients that the recipe adapts.

    `width` is the D of a model whose hidden states are among the scores.
    """
    rules = settings.computing
    batch = abstract_batch(make_batch([], sizes)[0], rules)
    logprobs = jax.ShapeDtypeStruct(batch.tokens.shape, jnp.float32, sharding=batch.tokens.sharding)
    scores = dict.fromkeys(recipe.loss_scores, logprobs)
    if TAUGHT_HIDDEN in scores:
        scores[TAUGHT_HIDDEN] = jax.ShapeDtypeStruct(
            (*batch.tokens.shape, width),
            activation_dtype(rules, settings.dtype),
            sharding=rules.sharding(None, "batch", "tokens", None),
        )
    adapted = jax.ShapeDtypeStruct((), jnp.float32, sharding=rules.sharding())
    coefs = dict.fromkeys(loss_coefs(recipe, first_coefs(recipe)), adapted)
    return cast(Batch[jax.Array], dataclasses.replace(batch, scores=scores, coefs=coefs))


def batch_sharding(x: jax.Array | np.ndarray, rules: ShardingRules) -> NamedSharding:
    """The sharding of an array of a batch."""
    return rules.sharding(None, "batch", "tokens") if x.ndim >= 3 else rules.sharding()


def _micro_batch(batch: Batch[jax.Array], index: jax.Array) -> Batch[jax.Array]:
    """Select micro-batch `index`; its fields are [B, T, ...]."""
    pick = lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False) if x.ndim >= 3 else x  # noqa: E731
    return jax.tree.map(pick, batch)


def _logprobs(
    settings: TrainSettings, params: Params, batch: Batch[jax.Array], *, reverse: float = 1.0
) -> tuple[TokenLogprobs, list[Balance]]:
    """Log-probabilities and entropies of a micro-batch's targets, and the balance of each router, if there are routers.

    If the scores include the hidden states of a `Role.compared` model, also the divergence to it (`token_logprobs`).
    """
    rules, update = settings.computing, settings.update
    hidden, routers = _hidden(settings, params, batch)
    dtype, taught = jnp.dtype(update.head_dtype or update.dtype), None
    if TAUGHT_HIDDEN in batch.scores:
        own = params.get(TAUGHT_HEAD, params.get("head", params["embed"]))
        head = head_weights({"embed": own}, rules, dtype)
        assert isinstance(head, jax.Array), "the head of a compared model has no gradient"
        taught = Taught(batch.scores[TAUGHT_HIDDEN], head)
    scored = token_logprobs(
        hidden,
        head_weights(params, rules, dtype, wide=update.reduce_dtype == "float32" and settings.decoder.lora is None),
        batch.targets,
        HeadSettings(
            temperature=update.temperature,
            chunk=update.head_chunk_tokens,
            rules=rules,
            remat=update.remat != "none",
            kind=update.head,
            reverse=reverse,
        ),
        taught,
    )
    return scored, routers


def _hidden(settings: TrainSettings, params: Params, batch: Batch[jax.Array]) -> tuple[jax.Array, list[Balance]]:
    """Hidden states [B, T, D] from which a micro-batch's targets are predicted, and the balance of each router."""
    rules = settings.computing
    windows = any(attention.window for _, attention in settings.decoder.attention_layers())
    visibility = Visibility(batch.segments, batch.prompts, batch.positions if windows else None)
    packed = packed_rows(batch.segments, batch.prompts)
    places = [place.block.work(settings.decoder.width) for place in settings.decoder.places]

    def attend(
        visibility: Visibility, at: At, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[Visibility, jax.Array]:
        own = dataclasses.replace(visibility, window=at.window)
        return visibility, row_attention(settings.update.attention, own, rules)(q, k, v, at.sinks)

    def recur(rows: Packed, at: At, initial: States, advance: Advance) -> tuple[Packed, jax.Array]:
        return rows, advance.packed(rows, row_recurrence(rules, initial[-1].shape[1:]))

    recorded = None
    if batch.choices is not None:
        recorded = recorded_choices(batch.choices, batch.segments > 0, settings.decoder)
    hidden, _, told = forward(
        params,
        batch.tokens,
        batch.positions,
        attend,
        [packed if work.states else visibility for work in places],
        recorded=recorded,
        recur=recur,
        settings=PassSettings(
            config=settings.decoder,
            rules=rules,
            dtype=settings.dtype,
            remat=settings.update.remat,
            groups=settings.update.row_groups,
            wide=settings.update.reduce_dtype == "float32",
            replay=settings.update.replay_routing,
        ),
    )
    return hidden, balances(told)
