"""Softmax attention with grouped heads and a rotary embedding, as most decoders have it. No jax until applied."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from podium.models.blocks.kind import Applied, Context, Work
from podium.models.blocks.rope import Rope
from podium.models.blocks.spec import ParamSpec, ParamSpecs
from podium.models.blocks.weights import LayerWeights

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharpening:
    """Multiplies queries by 1 + beta log(1 + floor(position / period)) after the rotation (Llama 4, Ministral 3)."""

    beta: float
    period: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention (arXiv:2305.13245)."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    bias: bool = False
    """Whether queries, keys and values have a bias (Qwen2, gpt-oss)."""
    out_bias: bool = False
    """Whether the output has a bias (gpt-oss)."""
    gated: bool = False
    """Whether each element of a head's output is multiplied by the sigmoid of another product of x (Qwen3.5)."""
    sinks: bool = False
    """Whether each head has one more score in its softmax, which takes a share and gives nothing (gpt-oss)."""
    norm: bool = False
    """RMS norm of each head's query and key before the rotation (Qwen3, Gemma 3)."""
    window: int | None = None
    """Number of positions that a query sees, including its own; None: all before it. Applied by `attend`."""
    scale_dims: int | None = None
    """Scores are divided by the square root of this; None: of the head size. Gemma 3's query_pre_attn_scalar."""
    sharpening: Sharpening | None = None
    """Position-dependent scale of the queries; None: no scaling."""

    scope = "attention"

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The layer's rotary embedding."""
        return (self.rope,)

    def specs(self, width: int, *, std: float, out_std: float) -> ParamSpecs:
        """The weights of one layer."""
        D, H, K, Q = width, self.heads, self.kv_heads, self.head_dim
        specs = {
            "q": ParamSpec((D, H, Q), ("width", "heads", "head_dim"), std, group="attention"),
            "k": ParamSpec((D, K, Q), ("width", "kv_heads", "head_dim"), std, group="attention"),
            "v": ParamSpec((D, K, Q), ("width", "kv_heads", "head_dim"), std, group="attention"),
            "o": ParamSpec((H, Q, D), ("heads", "head_dim", "width"), out_std),
        }
        if self.gated:
            specs["q_gate"] = specs["q"]._replace(group=None)
        if self.bias:
            specs["q_bias"] = ParamSpec((H, Q), ("heads", None), 0.0)
            specs["k_bias"] = ParamSpec((K, Q), ("kv_heads", None), 0.0)
            specs["v_bias"] = ParamSpec((K, Q), ("kv_heads", None), 0.0)
        if self.out_bias:
            specs["o_bias"] = ParamSpec((D,), (None,), 0.0)
        if self.sinks:
            specs["sinks"] = ParamSpec((H,), ("heads",), 0.0)
        if self.norm:
            specs["q_norm"] = ParamSpec((Q,), (None,), 0.0, 1.0)
            specs["k_norm"] = ParamSpec((Q,), (None,), 0.0, 1.0)
        return specs

    def work(self, width: int) -> Work:
        """The cost of one layer: four matrices, and two products per head for each query-key pair."""
        gates = self.heads if self.gated else 0
        elements = width * (2 * self.heads + 2 * self.kv_heads + gates) * self.head_dim
        return Work(
            active=elements,
            total=elements,
            outputs=(self.heads + 2 * self.kv_heads + gates) * self.head_dim,
            pair=2 * self.heads * self.head_dim,
            window=self.window,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            inner=self.heads * self.head_dim,
        )

    def apply(self, w: LayerWeights, x: jax.Array, context: Context) -> Applied:
        """softmax(q k' / sqrt(Q)) v, projected back to the width."""
        from podium.models.blocks.mathematics import opened, scaled_queries, sharpened

        q, k, v = context.heads(x, w, bias=self.bias)
        if self.norm:
            q, k = context.norm(q, w["q_norm"]), context.norm(k, w["k_norm"])
        q, k = context.rotate(q, self.rope), context.rotate(k, self.rope)
        if self.scale_dims not in (None, self.head_dim):  # attention divides by the square root of the head size
            q = scaled_queries(q, math.sqrt(self.head_dim / self.scale_dims))
        if self.sharpening is not None:
            q = sharpened(q, context.positions, self.sharpening.beta, self.sharpening.period)
        sinks = w["sinks"] if self.sinks else None
        carried, attended = context.attend(q, k, v, window=self.window, sinks=sinks)
        if self.gated:
            attended = opened(attended, context.linear("btd,dhq->bthq", x, w["q_gate"]))
        y = context.linear("bthq,hqd->btd", attended, w["o"])
        return Applied(context.biased(y, w["o_bias"]) if self.out_bias else y, carried)
