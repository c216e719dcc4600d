"""The decoder: a scan over each stack of blocks, of whatever kinds (`podium.models.blocks`).

`forward` maps tokens to hidden states. The caller decides which tokens attend to which, and whether keys and values are
kept: training passes a mask over packed rows, the engine its cache.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from podium.config.schema import Remat
from podium.models.architecture import DecoderConfig
from podium.models.blocks.choices import Recorded
from podium.models.blocks.kind import Attend, Block, Place, Recur, Stack, Tree
from podium.models.blocks.mathematics import rms_norm, rope_tables
from podium.models.blocks.weights import AnyWeight, Codes, Weight
from podium.models.layer_context import LayerContext, Tables, merge_rows, split_rows, to_rows
from podium.models.linear import (
    activation_dtype,
    coded,
    input_parts,
    layer_weight,
    of_bits,
    of_experts,
    with_adapters,
)
from podium.models.params import SCALE, ParamSpecs, is_adapter, joined_groups, param_specs, place_weights
from podium.models.quantised import dequantised
from podium.sharding import Params, ShardingRules

P = ParamSpec("P")
R = TypeVar("R")
LAYER_INPUT = "layer_input"
"""Name of a layer's input; remat policies decide by it where the input is kept for the backward pass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassSettings:
    """How a pass through the decoder is computed; static."""

    config: DecoderConfig
    rules: ShardingRules
    """The sharding of weights and activations during computation; weights may be stored in another one."""
    dtype: jnp.dtype
    """Number format of the products' operands (`podium.models.linear`); norms and softmax are computed in float32."""
    remat: Remat = "none"
    """What the backward pass recomputes: "none"; each layer from its input ("layer"; "offload" keeps the input in host
    memory); or all of a layer except the results of its products with weights ("products")."""
    groups: int = 1
    """Number of groups into which each device's rows are cut; a layer computes the groups one after another with
    weights that are gathered once. `carried` must then be arrays [B, ...] that layers only read."""
    wide: bool = False
    """Whether gradients of weights are float32 from the product on, before devices reduce them; otherwise they have the
    format of the activations."""
    replay: bool = True
    """Whether tokens go to their recorded experts instead of the routers' choices."""
    from_stacks: bool = False
    """Whether kernels read a layer's experts in place, from the stack of all layers, instead of getting a copy of the
    layer's experts; and whether a GPU expands nf4 layer by layer. The pass then has no gradient."""


def forward(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    carried: Sequence[Tree] | None = None,
    *,
    recorded: Sequence[Recorded | None] | None = None,
    recur: Recur | None = None,
    settings: PassSettings,
) -> tuple[jax.Array, tuple[Tree, ...], tuple[Tree, ...]]:
    """Compute the hidden states from which the next tokens are predicted.

    Args:
        params: weights as declared by `param_specs`, in any stored format; computed with in the settings' format. If
            the declared adapters are missing, the base model is computed.
        tokens: [B, T] int32.
        positions: [B, T] int32, position of each token in its own sequence, for the rotation.
        attend: called in every layer with attention.
        carried: data that layers keep between calls, such as a cache: one pytree for each of the decoder's places,
            passed from layer to layer of that place. None: nothing.
        recorded: the experts chosen for the tokens in an earlier pass, for each of the decoder's places stacked over
            its layers, [L, B, T, ...]; None: not recorded.
        recur: called in every layer with a recurrent state; None if the decoder has no such layers.
        settings: the decoder, and how it is computed.

    Returns:
        Hidden states after the final norm, [B, T, D] in `activation_dtype(rules, dtype)`; `carried` of each place; and
        the layers' auxiliary results of each place, stacked as [L, ...].
    """
    config, places = settings.config, settings.config.places
    tables = [rope_tables(positions, rope.frequencies(), rope.length) for rope in config.ropes]
    layers = _Layers(settings, param_specs(config), attend, recur, positions=positions, tables=tables)
    x = _embedded(params["embed"], tokens, settings)
    kept = list(carried) if carried is not None else [()] * len(places)
    choices: Sequence[Recorded | None] = recorded if recorded is not None else [None] * len(places)
    auxiliary: list[Tree] = []
    with jax.named_scope("layers"):
        for stack in config.stacks:
            here = slice(len(auxiliary), len(auxiliary) + len(stack.pattern))
            stored = [place_weights(params, place) for place in places[here]]
            steps = layers.steps(stack, places[here], stored)
            x, kept[here], made = _scan(steps, x, kept[here], (stored, list(choices[here])), stack.repeats)
            auxiliary += made
    norm = layers.weight("final_norm", params["final_norm"])
    assert isinstance(norm, jax.Array)
    normed = rms_norm(x, norm, config.norm_eps, config.norm_offset, config.wide_norms)
    return normed, tuple(kept), tuple(auxiliary)


def _embedded(table: jax.Array, tokens: jax.Array, settings: PassSettings) -> jax.Array:
    """The tokens' embeddings [B, T, D].

    Rows are looked up in the table as it is stored: exchanging them takes less than exchanging the table or its
    gradient.
    """
    rules, scale = settings.rules, settings.config.embed_scale
    with jax.named_scope("embed"):
        found = of_bits(table[tokens]).astype(settings.dtype)
        if scale != 1:
            found = found * jnp.asarray(scale, settings.dtype)
        return to_rows(rules.storage, found).astype(activation_dtype(rules, settings.dtype))


class LayerInputs(NamedTuple):
    """What a layer reads besides the activations."""

    layer: jax.Array  # [] int32, index among the layers of its place
    stored: Params
    choices: Recorded | None  # recorded expert choices of its tokens


class Rows(NamedTuple):
    """What a layer knows of some rows."""

    x: jax.Array  # [B, T, D], activations
    positions: jax.Array  # [B, T] int32
    tables: list[Tables]  # rotary tables for each of the decoder's ropes
    carried: Tree
    choices: Recorded | None  # recorded expert choices


Step = Callable[[tuple[jax.Array, Tree], LayerInputs], tuple[tuple[jax.Array, Tree], Tree]]
"""A layer: `((x, carried), inputs) -> ((x, carried), auxiliary)`."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Layers:
    """What all layers of a pass share, and how each is computed from it."""

    settings: PassSettings
    specs: ParamSpecs
    attend: Attend
    recur: Recur | None
    positions: jax.Array
    tables: list[Tables]

    def weight(self, name: str, stored: jax.Array) -> AnyWeight:
        """A stored weight of one layer as layers compute with it."""
        settings, dtype = self.settings, self.settings.dtype
        frozen = settings.config.lora is not None and not is_adapter(name)
        wide = settings.wide and dtype != jnp.float32
        spec, rules = self.specs[name], settings.rules
        return layer_weight(name, stored, spec, frozen=frozen, rules=rules, dtype=dtype, wide=wide)

    def steps(self, stack: Stack, places: Sequence[Place], stored: Sequence[Params]) -> list[Step]:
        """The layers of a stack's pattern; takes experts that are read in place out of their `stored` weights."""
        settings, several = self.settings, self.settings.remat != "none" and len(stack.pattern) > 1
        steps: list[Step] = []
        kinds: list[Block | None] = []
        for place, own in zip(places, stored, strict=True):
            stacks: Params = {}
            if settings.from_stacks:
                experts = [name for name in own if of_experts(self.specs[place.prefix + name])]
                stacks = {name: own.pop(name) for name in experts if own[name].dtype == settings.dtype}
            step = functools.partial(self.step, place=place, stacks=stacks, several=several)
            steps.append(_remat(step, settings.remat, in_order=several))
            kinds.append(place.block if settings.from_stacks and stack.repeats == 1 and not stacks else None)
        return _traced_once(steps, kinds)

    def step(
        self, carry: tuple[jax.Array, Tree], inputs: LayerInputs, *, place: Place, stacks: Params, several: bool
    ) -> tuple[tuple[jax.Array, Tree], Tree]:
        """A layer at a place; `stacks` are weights read in place, `several` says whether its loop has other layers."""
        settings, (x, carried) = self.settings, carry
        x = checkpoint_name(x, LAYER_INPUT)
        weights = {name: self.weight(place.prefix + name, value) for name, value in inputs.stored.items()}
        weights |= {name: Weight(stack, None, layer=inputs.layer) for name, stack in stacks.items()}
        if several and settings.config.lora is None:
            x, weights = _one_backward(x, weights)
        if settings.from_stacks and settings.rules.platform == "gpu":
            x, weights = _expanded_late(x, weights)
        compute = functools.partial(_layer, index=inputs.layer, block=place.block, layers=self)
        rows = Rows(x, self.positions, self.tables, carried, inputs.choices)
        scaled = any(name.endswith(SCALE) for name in weights)
        multiplied = self._multiplied(weights, place) if scaled else weights
        if settings.groups > 1:
            x, auxiliary = _in_groups(compute, multiplied, rows, settings)
        else:
            x, carried, auxiliary = compute(multiplied, rows)
        return (x, carried), auxiliary

    def _multiplied(self, weights: Mapping[str, AnyWeight], place: Place) -> dict[str, AnyWeight | Codes]:
        """The weights of a layer, some of them stored with scales, in the formats in which products read them."""
        settings = self.settings
        operands = jnp.dtype(jnp.int8) if settings.config.int8_products else settings.dtype

        def parts(name: str) -> tuple[int, ...]:
            return input_parts(self.specs[place.prefix + name], settings.rules)

        codes = coded(weights, operands, parts)
        others = {name: value for name, value in weights.items() if name.removesuffix(SCALE) not in codes}
        return {**dequantised(others, settings.dtype), **codes}


def _expanded_late(x: jax.Array, weights: Mapping[str, AnyWeight]) -> tuple[jax.Array, dict[str, AnyWeight]]:
    """Return the layer's input and weights unchanged, but make nf4's codes wait for the input.

    Otherwise a compiler that sees all layers may expand the codes of every layer first and hold them all in bfloat16.
    """
    codes = {name: w for name, w in weights.items() if isinstance(w, jax.Array) and w.dtype == jnp.uint8}
    if not codes:
        return x, dict(weights)
    x, codes = jax.lax.optimization_barrier((x, codes))
    return x, {**weights, **codes}


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


def _traced_once(steps: Sequence[Step], kinds: Sequence[Block | None]) -> list[Step]:
    """The layers' steps, with a single function for layers of the same kind, which is traced and lowered only once.

    If a step's kind is None, the step is unchanged; this is for steps that a loop repeats, that have a gradient, or
    that use weights other than their inputs. The compiler gets the same program, but tracing is four to eight times
    faster.
    """
    found: dict[Block, Step] = {}
    pairs = zip(steps, kinds, strict=True)
    return [step if kind is None else found.setdefault(kind, jax.jit(step)) for step, kind in pairs]


def _scan(
    steps: Sequence[Step],
    x: jax.Array,
    carried: list[Tree],
    inputs: tuple[list[Params], list[Recorded | None]],
    repeats: int,
) -> tuple[jax.Array, list[Tree], list[Tree]]:
    """Run a stack; returns its output, each place's `carried`, and each place's auxiliary results.

    `inputs` are each place's stacked weights and its recorded choices.
    """

    def period(
        carry: tuple[jax.Array, list[Tree]], xs: tuple[jax.Array, list[Params], list[Recorded | None]]
    ) -> tuple[tuple[jax.Array, list[Tree]], list[Tree]]:
        x, carried = carry
        index, stored, known = xs
        kept: list[Tree] = []
        made: list[Tree] = []
        for step, own, weights, choices in zip(steps, carried, stored, known, strict=True):
            (x, own), auxiliary = step((x, own), LayerInputs(index, weights, choices))
            kept.append(own)
            made.append(auxiliary)
        return (x, kept), made

    (x, carried), auxiliary = jax.lax.scan(period, (x, carried), (jnp.arange(repeats), *inputs))
    return x, carried, auxiliary


def _layer(
    w: Mapping[str, AnyWeight | Codes], rows: Rows, *, index: jax.Array, block: Block, layers: _Layers
) -> tuple[jax.Array, Tree, Tree]:
    """Run one layer; returns its output, its `carried`, and the auxiliary results of both kinds."""
    config, rules, x = layers.settings.config, layers.settings.rules, rows.x
    adapted = with_adapters(w, config.lora.scale) if config.lora else w
    context = LayerContext(
        config=config,
        rules=rules,
        layer=index,
        carried=rows.carried,
        positions=rows.positions,
        tables=dict(zip(config.ropes, rows.tables, strict=True)),
        attention=layers.attend,
        recurrence=layers.recur,
        joined=joined_groups(block.specs(config.width, std=0.0, out_std=0.0), config),
        recorded=rows.choices,
        replay=layers.settings.replay,
    )
    auxiliary: list[Tree] = []
    for name, kind in zip(("attention", "mlp"), block.kinds, strict=True):  # the names begin those of their norms
        with jax.named_scope(kind.scope):
            y, carried, made = kind.apply(adapted, context.norm(x, adapted[f"{name}_norm"]), context)
            y = to_rows(rules, y)
            if block.norms_behind:
                y = context.norm(y, adapted[f"{name}_out_norm"])
            x = x + y
        context = dataclasses.replace(context, carried=carried)
        auxiliary.append(made)
    return rules.constrain(x, "rows", "tokens", None), context.carried, tuple(auxiliary)


def _in_groups(
    compute: Callable[[Mapping[str, AnyWeight | Codes], Rows], tuple[jax.Array, Tree, Tree]],
    w: Mapping[str, AnyWeight | Codes],
    rows: Rows,
    settings: PassSettings,
) -> tuple[jax.Array, Tree]:
    """Run a layer on its rows group by group; the weights' gradients are summed in float32."""
    adapters = any(map(is_adapter, w))  # if there are adapters, all other weights are frozen and have no gradient
    own = {name: x for name, x in w.items() if not isinstance(x, Codes)}
    trained = {name: x for name, x in own.items() if is_adapter(name) or not adapters}
    formats = {name: x.dtype for name, x in _sums_of(trained).items()}
    sums = {name: x.astype(jnp.float32) for name, x in _sums_of(trained).items()}

    def group(rows: Rows) -> tuple[jax.Array, Tree]:
        used = _with_sums(trained, {name: x.astype(formats[name]) for name, x in sums.items()})
        x, _, auxiliary = compute({**w, **used}, rows)
        return x, auxiliary

    rules, split = settings.rules, functools.partial(split_rows, settings.rules, groups=settings.groups)
    x, auxiliary = jax.lax.map(_remat(group, settings.remat), jax.tree.map(split, rows))
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
