"""The dense feed-forward of Llama, Mistral, Qwen and Gemma. No jax until it is applied."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from podium.models.blocks.activation import Activation
from podium.models.blocks.kind import Applied, Context, Work
from podium.models.blocks.rope import Rope
from podium.models.blocks.spec import ParamSpec, ParamSpecs
from podium.models.blocks.weights import LayerWeights

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mlp:
    """A gated linear unit (arXiv:2002.05202): SwiGLU, or GeGLU."""

    width: int
    activation: Activation = "silu"

    scope = "mlp"

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """No rotary embeddings."""
        return ()

    def specs(self, width: int, *, std: float, out_std: float) -> ParamSpecs:
        """The weights of one layer."""
        D, F = width, self.width
        return {
            "gate": ParamSpec((D, F), ("width", "mlp"), std, group="mlp"),
            "up": ParamSpec((D, F), ("width", "mlp"), std, group="mlp"),
            "down": ParamSpec((F, D), ("mlp", "width"), out_std),
        }

    def work(self, width: int) -> Work:
        """The cost of one layer: three matrices."""
        elements = 3 * width * self.width
        return Work(active=elements, total=elements, outputs=2 * self.width, inner=self.width)

    def apply(self, w: LayerWeights, x: jax.Array, context: Context) -> Applied:
        """(act(x gate) * (x up)) down."""
        from podium.models.blocks.mathematics import gated

        gate, up = context.several("btd,df->btf", x, w, ("gate", "up"))
        return Applied(context.linear("btf,fd->btd", gated(gate, up, self.activation), w["down"]), context.carried)
