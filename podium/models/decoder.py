"""The decoder: a scan over each stack of blocks, of whatever kinds (`podium.models.blocks`).

`forward` maps tokens to hidden states. The caller decides which tokens attend to which, and whether keys and values are
kept: training passes a mask over packed rows, the engine its cache.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from podium.config.schema import Remat
from podium.models.architecture import DecoderConfig
from podium.models.blocks.choices import Recorded
from podium.models.blocks.kind import Attend, Block, Kind, Place, Recur, Tree
from podium.models.blocks.mathematics import rms_norm, rope_tables
from podium.models.blocks.weights import AnyWeight, Codes, LayerWeights, Weight
from podium.models.layer_context import LayerContext, Tables
from podium.models.linear import (
    activation_dtype,
    coded,
    input_parts,
    layer_weight,
    of_bits,
    of_experts,
    with_adapters,
)
from podium.models.params import SCALE, is_adapter, joined_groups, param_specs
from podium.models.placement import merge_rows, split_rows, to_rows
from podium.models.quantised import dequantised
from podium.sharding import Params, ShardingRules

P = ParamSpec("P")
R = TypeVar("R")
LAYER_INPUT = "layer_input"
"""Name of a layer's input; remat policies decide by it where the input is kept for the backward pass."""


def forward(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    carried: Sequence[Tree] | None = None,
    *,
    recorded: Sequence[Recorded | None] | None = None,
    replay: bool = True,
    recur: Recur | None = None,
    config: DecoderConfig,
    rules: ShardingRules,
    dtype: jnp.dtype,
    remat: Remat = "none",
    groups: int = 1,
    wide: bool = False,
    from_stacks: bool = False,
) -> tuple[jax.Array, tuple[Tree, ...], tuple[Tree, ...]]:
    """Compute the hidden states from which the next tokens are predicted.

    Args:
        params: weights as declared by `param_specs`, in any stored format; computed with in `dtype`. If the
            declared adapters are missing, the base model is computed.
        tokens: [B, T] int32.
        positions: [B, T] int32, position of each token in its own sequence, for the rotation.
        attend: called in every layer with attention.
        carried: data that layers keep between calls, such as a cache: one pytree for each of `config.places`,
            passed from layer to layer of that place. None: nothing.
        recorded: the experts chosen for the tokens in an earlier pass, for each of `config.places` stacked over its
        layers, [L, B, T, ...]; None: not recorded.
        replay: whether tokens go to their recorded experts instead of the routers' choices.
        recur: called in every layer with a recurrent state; None if the decoder has no such layers.
        config: the decoder's architecture.
        rules: where weights and activations are during computation (not where they are stored).
        dtype: of the products' operands (`podium.models.linear`); norms and softmax are computed in float32.
        remat: what the backward pass recomputes: "none"; each layer from its input ("layer"; "offload" keeps the
            input in host memory); or all of a layer except the results of its products with weights ("products").
        groups: number of groups into which each device's rows are cut; a layer computes the groups one after
            another with weights that are gathered once. `carried` must then be arrays [B, ...] that layers only read.
        wide: whether gradients of weights are float32 from the product on, before devices reduce them; otherwise
            they have the format of the activations.
        from_stacks: whether kernels read a layer's experts in place, from the stack of all layers, instead of getting a
        copy of the layer's experts; and whether a GPU expands nf4 layer by layer. The pass then has no gradient.

    Returns:
        Hidden states after the final norm, [B, T, D] in `activation_dtype(rules, dtype)`; `carried` of each place; and
        the layers' auxiliary results of each place, stacked as [L, ...].
    """
    specs, wide = param_specs(config), wide and dtype != jnp.float32
    operands = jnp.dtype(jnp.int8) if config.int8_products else dtype

    def weight(name: str, stored: jax.Array) -> AnyWeight:
        frozen = config.lora is not None and not is_adapter(name)
        return layer_weight(name, stored, specs[name], frozen=frozen, rules=rules, dtype=dtype, wide=wide)

    def parts(place: Place, name: str) -> tuple[int, ...]:
        return input_parts(specs[place.prefix + name], rules)

    def layer(
        carry: tuple[jax.Array, Tree], xs: LayerInputs, *, place: Place, stacks: Params, several: bool
    ) -> tuple[tuple[jax.Array, Tree], Tree]:
        x, own = carry
        index, stored, known = xs
        x = checkpoint_name(x, LAYER_INPUT)
        weights = {name: weight(place.prefix + name, value) for name, value in stored.items()}
        weights |= {name: Weight(stack, None, layer=index) for name, stack in stacks.items()}
        compute = functools.partial(
            _layer,
            index=index,
            block=place.block,
            attend=attend,
            recur=recur,
            replay=replay,
            config=config,
            rules=rules,
        )
        if several and config.lora is None:
            x, weights = _one_backward(x, weights)
        if from_stacks and rules.platform == "gpu":
            x, weights = _expanded_late(x, weights)
        rows = (x, positions, tables, own, known)
        codes = coded(weights, operands, functools.partial(parts, place))
        others = {name: value for name, value in weights.items() if name.removesuffix(SCALE) not in codes}
        multiplied = {**dequantised(others, dtype), **codes}
        if groups > 1:
            x, auxiliary = _in_groups(compute, multiplied, rows, groups, rules, remat)
        else:
            x, own, auxiliary = compute(multiplied, rows)
        return (x, own), auxiliary

    tables = [rope_tables(positions, rope.frequencies(), rope.length) for rope in config.ropes]
    # Rows are looked up in the table as it is stored: exchanging them takes less than exchanging the table or its
    # gradient.
    with jax.named_scope("embed"):
        found = of_bits(params["embed"][tokens]).astype(dtype)
        if config.embed_scale != 1:
            found = found * jnp.asarray(config.embed_scale, dtype)
        x = to_rows(rules.storage, found).astype(activation_dtype(rules, dtype))
    kept = list(carried) if carried is not None else [()] * len(config.places)
    auxiliary: list[Tree] = []
    with jax.named_scope("layers"):
        for stack in config.stacks:
            here = slice(len(auxiliary), len(auxiliary) + len(stack.pattern))
            stored = [_of_place(params, place) for place in config.places[here]]
            steps: list[Step] = []
            kinds: list[Block | None] = []
            for place, own in zip(config.places[here], stored, strict=True):
                experts = [name for name in own if of_experts(specs[place.prefix + name]) and own[name].dtype == dtype]
                stacks = {name: own.pop(name) for name in experts if from_stacks}
                several = remat != "none" and len(stack.pattern) > 1
                step = functools.partial(layer, place=place, stacks=stacks, several=several)
                steps.append(_remat(step, remat, in_order=several))
                kinds.append(place.block if from_stacks and stack.repeats == 1 and not stacks else None)
            known: list[Recorded | None] = [None] * len(steps) if recorded is None else list(recorded[here])
            x, kept[here], made = _scan(_traced_once(steps, kinds), x, kept[here], stored, known, stack.repeats)
            auxiliary += made
    norm = weight("final_norm", params["final_norm"])
    assert isinstance(norm, jax.Array)
    normed = rms_norm(x, norm, config.norm_eps, config.norm_offset, config.wide_norms)
    return normed, tuple(kept), tuple(auxiliary)


def _expanded_late(x: jax.Array, weights: Mapping[str, AnyWeight]) -> tuple[jax.Array, dict[str, AnyWeight]]:
    """Return the layer's input and weights unchanged, but make nf4's codes wait for the input.

    Otherwise a compiler that sees all layers may expand the codes of every layer first and hold them all in bfloat16.
    """
    codes = {name: w for name, w in weights.items() if isinstance(w, jax.Array) and w.dtype == jnp.uint8}
    if not codes:
        return x, dict(weights)
    x, codes = jax.lax.optimization_barrier((x, codes))
    return x, {**weights, **codes}


LayerInputs = tuple[jax.Array, Params, Recorded | None]
"""A layer's index among the layers of its place, its weights, and recorded expert choices of its tokens."""
Step = Callable[[tuple[jax.Array, Tree], LayerInputs], tuple[tuple[jax.Array, Tree], Tree]]
"""A layer: `((x, carried), inputs) -> ((x, carried), auxiliary)`."""


def _one_backward(x: jax.Array, weights: Mapping[str, AnyWeight]) -> tuple[jax.Array, dict[str, AnyWeight]]:
    """Return the layer's input and weights unchanged; in the backward pass, wait for all their gradients before using
    any.

    Otherwise a compiler that sees several layers at once, those of a pattern, postpones the weights' gradients of all
    of them, and holds the activations of all at once.
    """
    x, sums = _all_gradients(x, _sums_of(weights))
    return x, _with_sums(weights, sums)


def _sums_of(weights: Mapping[str, AnyWeight]) -> Params:
    """The arrays that get the gradients of a layer's trained weights; frozen weights have none."""
    sums = {name: w.sums if isinstance(w, Weight) else w for name, w in weights.items()}
    return {name: w for name, w in sums.items() if w is not None}


def _with_sums(weights: Mapping[str, AnyWeight], sums: Params) -> dict[str, AnyWeight]:
    """A layer's weights whose gradients go to `sums`, as `_sums_of` gives them."""

    def whole(name: str, w: AnyWeight) -> AnyWeight:
        if name not in sums:
            return w
        return w._replace(sums=sums[name]) if isinstance(w, Weight) else sums[name]

    return {name: whole(name, w) for name, w in weights.items()}


@jax.custom_vjp
def _all_gradients(x: jax.Array, weights: Params) -> tuple[jax.Array, Params]:
    return x, weights


_all_gradients.defvjp(
    lambda x, weights: ((x, weights), None), lambda _, gradients: jax.lax.optimization_barrier(gradients)
)


def _of_place(params: Params, place: Place) -> Params:
    """The stacked weights of the layers at a place, under the names of their kinds."""
    names = {name: name.removeprefix(place.prefix) for name in params if name.startswith(place.prefix)}
    return {own: params[name] for name, own in names.items()}


def _traced_once(steps: Sequence[Step], kinds: Sequence[Block | None]) -> list[Step]:
    """The layers' steps, with a single function for layers of the same kind, which is traced and lowered only once.

    A kind of None leaves the step as it is: if a loop repeats it, if it has a gradient, or if it uses weights besides
    its inputs. The compiler gets the same program, four to eight times sooner.
    """
    found: dict[Block, Step] = {}
    pairs = zip(steps, kinds, strict=True)
    return [step if kind is None else found.setdefault(kind, jax.jit(step)) for step, kind in pairs]


def _scan(
    steps: Sequence[Step],
    x: jax.Array,
    carried: list[Tree],
    stored: list[Params],
    known: list[Recorded | None],
    repeats: int,
) -> tuple[jax.Array, list[Tree], list[Tree]]:
    """Run a stack; returns its output, each place's `carried`, and each place's auxiliary results."""

    def period(
        carry: tuple[jax.Array, list[Tree]], xs: tuple[jax.Array, list[Params], list[Recorded | None]]
    ) -> tuple[tuple[jax.Array, list[Tree]], list[Tree]]:
        x, carried = carry
        index, stored, known = xs
        kept: list[Tree] = []
        made: list[Tree] = []
        for step, own, weights, choices in zip(steps, carried, stored, known, strict=True):
            (x, own), auxiliary = step((x, own), (index, weights, choices))
            kept.append(own)
            made.append(auxiliary)
        return (x, kept), made

    (x, carried), auxiliary = jax.lax.scan(period, (x, carried), (jnp.arange(repeats), stored, known))
    return x, carried, auxiliary


Rows = tuple[jax.Array, jax.Array, list[Tables], Tree, Recorded | None]
"""Activations [B, T, D] of some rows, positions, rotary tables for each of the decoder's ropes, `carried`, and recorded
expert choices."""


def _layer(
    w: Mapping[str, AnyWeight | Codes],
    rows: Rows,
    *,
    index: jax.Array,
    block: Block,
    attend: Attend,
    recur: Recur | None,
    replay: bool,
    config: DecoderConfig,
    rules: ShardingRules,
) -> tuple[jax.Array, Tree, Tree]:
    """Run one layer; returns its output, its `carried`, and the auxiliary results of both kinds."""
    adapted = with_adapters(w, config.lora.scale) if config.lora else w
    x, positions, tables, carried, known = rows
    context = LayerContext(
        layer=index,
        carried=carried,
        positions=positions,
        tables=dict(zip(config.ropes, tables, strict=True)),
        attention=attend,
        recurrence=recur,
        eps=config.norm_eps,
        norm_offset=config.norm_offset,
        wide_norms=config.wide_norms,
        rules=rules,
        joined=joined_groups(block.specs(config.width, std=0.0, out_std=0.0), config),
        recorded=known,
        replay=replay,
    )
    x, carried, of_mixer = _residual(block, block.mixer, "attention", adapted, x, context)
    context = dataclasses.replace(context, carried=carried)
    x, carried, of_feed_forward = _residual(block, block.feed_forward, "mlp", adapted, x, context)
    return rules.constrain(x, "rows", "tokens", None), carried, (of_mixer, of_feed_forward)


def _residual(
    block: Block, kind: Kind, name: str, w: LayerWeights, x: jax.Array, context: LayerContext
) -> tuple[jax.Array, Tree, Tree]:
    """X + kind(norm(x)), laid out by rows; `name` begins the names of its norms."""
    with jax.named_scope(kind.scope):
        y, carried, auxiliary = kind.apply(w, context.norm(x, w[f"{name}_norm"]), context)
        y = to_rows(context.rules, y)
        if block.norms_behind:
            y = context.norm(y, w[f"{name}_out_norm"])
        return x + y, carried, auxiliary


def _in_groups(
    compute: Callable[[Mapping[str, AnyWeight | Codes], Rows], tuple[jax.Array, Tree, Tree]],
    w: dict[str, AnyWeight | Codes],
    rows: Rows,
    groups: int,
    rules: ShardingRules,
    remat: Remat,
) -> tuple[jax.Array, Tree]:
    """Run a layer on its rows group by group; the weights' gradients are summed in float32."""
    adapters = any(map(is_adapter, w))  # if there are adapters, all other weights are frozen and have no gradient
    own = {name: x for name, x in w.items() if not isinstance(x, Codes)}
    trained = {name: x for name, x in own.items() if is_adapter(name) or not adapters}
    formats = {name: x.dtype for name, x in _sums_of(trained).items()}
    sums = {name: x.astype(jnp.float32) for name, x in _sums_of(trained).items()}

    def group(rows: Rows) -> tuple[jax.Array, Tree]:
        used = _with_sums(trained, {name: x.astype(formats[name]) for name, x in sums.items()})
        x, _, auxiliary = compute(w | used, rows)
        return x, auxiliary

    x, auxiliary = jax.lax.map(_remat(group, remat), jax.tree.map(lambda x: split_rows(rules, x, groups), rows))
    return merge_rows(rules, x, "tokens"), jax.tree.map(lambda x: merge_rows(rules, x), auxiliary)


def _remat(body: Callable[P, R], remat: Remat, *, in_order: bool = False) -> Callable[P, R]:
    """Wrap a loop body so that its backward pass saves what `remat` says and recomputes the rest.

    With `in_order`, recomputation waits for the gradient of the body's result. Otherwise a compiler that sees several
    bodies in one iteration of a loop would recompute all of them at once, and hold the activations of all; with
    `offload` it still does so for some.
    """
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    policy = {
        "layer": None,
        "products": policies.dots_with_no_batch_dims_saveable,
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[remat]
    return jax.checkpoint(body, prevent_cse=in_order, policy=policy)


def token_scores(params: Params, hidden: jax.Array, config: DecoderConfig, rules: ShardingRules) -> jax.Array:
    """The score of each token, [B, T] float32, from hidden states [B, T, D]; for a decoder whose head gives scores."""
    specs = param_specs(config)
    with jax.named_scope("score"):
        (weight,) = rules.constrain_weight(of_bits(params["score"]).astype(jnp.float32), *specs["score"].axes)
        found = jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
        if config.scores == "biased":
            found += of_bits(params["score_bias"]).astype(jnp.float32)[None]
        return rules.constrain(found, "batch", "tokens")


def head_weights(params: Params, rules: ShardingRules, dtype: jnp.dtype, *, wide: bool = False) -> AnyWeight:
    """The matrix [V, D] from hidden states to logits, as stored: the head, or the embedding if they are tied.

    With `wide`, its gradient is float32, and is summed over chunks of tokens and reduced in that format.
    """
    stored, storage = of_bits(params.get("head", params["embed"])), rules.storage
    with jax.named_scope("weights"):
        if not wide or dtype == jnp.float32:
            return storage.constrain(stored.astype(dtype), "vocab", "width")
        value = storage.constrain(jax.lax.stop_gradient(stored).astype(dtype), "vocab", "width")
        return Weight(value, stored)
