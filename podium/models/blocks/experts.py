"""A mixture of experts in place of the feed-forward: Qwen3-MoE, gpt-oss, Qwen3.5. No jax until it is applied."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from podium.models.blocks.activation import Activation
from podium.models.blocks.choices import Routed
from podium.models.blocks.kind import Applied, Context, Work
from podium.models.blocks.mlp import Mlp
from podium.models.blocks.rope import Rope
from podium.models.blocks.spec import ParamSpec, ParamSpecs
from podium.models.blocks.weights import LayerWeights

if TYPE_CHECKING:
    import jax

MATRICES = ("expert_gate", "expert_up", "expert_down")
DENSE_ROWS = 512
"""Largest number of tokens in a decode step for which all experts are computed. Even so few tokens choose most experts,
and this way each weight is read once, in place. For more tokens, the products that are not needed take longer."""
SPARE = 2
"""If experts are split over devices: the number of rows that a device multiplies at once, relative to its number of
rows if tokens chose all experts equally often."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Gated linear units of which a router chooses a few for each token (arXiv:1701.06538). No token is dropped."""

    count: int
    """Number of experts."""
    top: int
    """How many of them each token goes to."""
    width: int
    """Width of one expert."""
    normalized: bool
    """Whether the gates of a token's experts sum to 1; else they are its shares of all experts (norm_topk_prob)."""
    activation: Activation = "silu"
    bias: bool = False
    """Whether the router and the experts' matrices have biases (gpt-oss)."""
    shared: int = 0
    """Width of an expert that every token goes to, with its own gate (Qwen3.5's shared expert); 0 if absent."""

    scope = "mlp"

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """No rotary embeddings."""
        return ()

    def specs(self, width: int, *, std: float, out_std: float) -> ParamSpecs:
        """The weights of one layer."""
        E, D, F = self.count, width, self.width
        into = ParamSpec((E, D, F), ("experts", "expert_width", "expert_mlp"), std, stacked=1)
        specs = {
            "router": ParamSpec((D, E), ("width", "router"), std),
            "expert_gate": into,
            "expert_up": into,
            "expert_down": ParamSpec((E, F, D), ("experts", "expert_mlp", "expert_width"), out_std, stacked=1),
        }
        if self.bias:
            specs["router_bias"] = ParamSpec((E,), (None,), 0.0)
            specs["expert_gate_bias"] = ParamSpec((E, F), ("experts", "expert_mlp"), 0.0, stacked=1)
            specs["expert_up_bias"] = ParamSpec((E, F), ("experts", "expert_mlp"), 0.0, stacked=1)
            specs["expert_down_bias"] = ParamSpec((E, D), ("experts", None), 0.0, stacked=1)
        if self.shared:
            specs |= self._every_token.specs(width, std=std, out_std=out_std)
            specs["shared_router"] = ParamSpec((D, 1), ("width", "router"), std)
        return specs

    @property
    def _every_token(self) -> Mlp:
        """The shared expert, which every token goes to."""
        return Mlp(width=self.shared, activation=self.activation)

    def work(self, width: int) -> Work:
        """The cost of one layer: the router, three matrices of each of a token's experts, and the shared expert."""
        expert, router = 3 * width * self.width, width * self.count
        own = self.top * expert + router
        outputs, inner = 2 * self.top * self.width + self.count, self.top * self.width
        if not self.shared:
            return Work(active=own, total=self.count * expert + router, outputs=outputs, inner=inner)
        shared = self._every_token.work(width)
        return Work(
            active=own + shared.active + width,
            total=self.count * expert + router + shared.total + width,
            outputs=outputs + shared.outputs + 1,
            inner=inner + shared.inner,
        )

    def apply(self, w: LayerWeights, x: jax.Array, context: Context) -> Applied:
        """The sum over a token's experts of gate (act(x gate) * (x up)) down, and the gated shared expert."""
        from podium.models.blocks.mathematics import opened
        from podium.models.blocks.routing import route

        logits = context.exact("btd,de->bte", x, w["router"])
        if self.bias:
            logits = context.biased(logits, w["router_bias"])
        gates, chosen, told = route(
            logits, self.top, normalized=self.normalized, recorded=context.recorded, replay=context.replay
        )
        matrices = [w[name] for name in MATRICES]
        biases = [w[f"{name}_bias"] for name in MATRICES] if self.bias else []
        routed = Routed(x, gates, chosen)
        y = context.experts(routed, matrices, biases, count=self.count, activation=self.activation)
        if self.shared:
            gate = context.exact("btd,de->bte", x, w["shared_router"]).astype(y.dtype)
            y = y + opened(self._every_token.apply(w, x, context).y, gate)
        return Applied(y, context.carried, told)
