"""Tern, a family that does not exist: gains of the embeddings, q, k and v in one tensor, keys and names of its own."""

from podium.models.architecture import DecoderConfig
from podium.models.blocks.attention import Attention
from podium.models.blocks.kind import Block
from podium.models.blocks.mlp import Mlp
from podium.models.blocks.rope import Rope
from podium.models.family import ConfigKeys, Family
from podium.models.files.config_parts import stacks_of
from podium.models.files.tensor_layout import Layout

DEFAULTS = {"tokens": 1000, "width": 64, "depth": 4, "heads": 4, "mlp": 256, "context": 512, "gain": 1.0}
MATRICES = {"o": ("HQD", "HQ D"), "gate": ("DF", "D F"), "up": ("DF", "D F"), "down": ("FD", "F D")}
NAMES = {name: Layout(f"tern.{name}", "", ours="VD", file="V D") for name in ("embed", "head")}
NAMES |= {f"layers.{name}": Layout("nest.{}.qkv", "", "DHQ", "HQ D", joined=("q", "k", "v")) for name in "qkv"}
NAMES |= {f"layers.{name}": Layout(f"nest.{{}}.{name}", "", *dims) for name, dims in MATRICES.items()}
NAMES |= {f"layers.{name}_norm": Layout(f"nest.{{}}.{name}.norm", "", "D", "D") for name in ("attention", "mlp")}
NAMES["final_norm"] = Layout("tern.norm", "", "D", "D")


def read(settings):
    width, heads, layers = (settings.number(key) for key in ("width", "heads", "depth"))
    attention = Attention(heads=heads, kv_heads=heads, head_dim=width // heads, rope=Rope(theta=100.0, dims=4))
    block = Block(mixer=attention, feed_forward=Mlp(width=settings.number("mlp")))
    sizes = {"vocab": settings.number("tokens"), "width": width, "max_positions": settings.number("context")}
    stacks, gain = stacks_of([block] * layers), settings.real("gain")
    return DecoderConfig(model_type="tern", **sizes, stacks=stacks, norm_eps=1e-6, tied=False, embed_scale=gain)


def write(decoder):
    sizes = {"tokens": decoder.vocab, "width": decoder.width, "depth": decoder.layers, "heads": decoder.heads}
    mlp = decoder.dense_layers()[0][1].width
    return {**sizes, "mlp": mlp, "context": decoder.max_positions, "gain": decoder.embed_scale}


FAMILIES = (
    Family(model_type="tern", models="Tern", transformers_class="TernForCausalLM", keys=ConfigKeys(reads=DEFAULTS),
           read=read, write=write, names=lambda kind, block: NAMES, presets={"aviary/tern-1m": {"depth": 6}}),
)  # fmt: skip
