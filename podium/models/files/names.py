"""Names and layouts of parameters in model files: one table for loading and export. No jax.

A file tensor may hold several of our parameters (`Layout.joined`); one of our parameters may be several file tensors,
one for each stacked layer and expert.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from podium.models.architecture import LAYERS, DecoderConfig
from podium.models.blocks.attention import Attention
from podium.models.blocks.delta import DeltaNet
from podium.models.blocks.experts import Experts
from podium.models.files.config_keys import FAMILIES
from podium.models.files.tensor_layout import ONE, FileKind, Layout
from podium.models.params import own_name, param_specs

NAMES: dict[str, Layout] = {
    "embed": Layout("model.embed_tokens.weight", "token_embd.weight", "VD", "V D"),
    "layers.attention_norm": Layout("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight", "D", "D"),
    "layers.q": Layout("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight", "DHQ", "HQ D"),
    "layers.k": Layout("model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight", "DKQ", "KQ D"),
    "layers.v": Layout("model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight", "DKQ", "KQ D"),
    "layers.o": Layout("model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight", "HQD", "D HQ"),
    "layers.q_bias": Layout("model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias", "HQ", "HQ"),
    "layers.k_bias": Layout("model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias", "KQ", "KQ"),
    "layers.v_bias": Layout("model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias", "KQ", "KQ"),
    "layers.q_norm": Layout("model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight", "Q", "Q"),
    "layers.k_norm": Layout("model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight", "Q", "Q"),
    "layers.mlp_norm": Layout("model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight", "D", "D"),
    "layers.gate": Layout("model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight", "DF", "F D"),
    "layers.up": Layout("model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight", "DF", "F D"),
    "layers.down": Layout("model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight", "FD", "D F"),
    "layers.router": Layout("model.layers.{}.mlp.gate.weight", "blk.{}.ffn_gate_inp.weight", "DE", "E D"),
    "layers.expert_gate": Layout("model.layers.{}.mlp.experts.{}.gate_proj.weight", "", "DF", "F D"),
    "layers.expert_up": Layout("model.layers.{}.mlp.experts.{}.up_proj.weight", "", "DF", "F D"),
    "layers.expert_down": Layout("model.layers.{}.mlp.experts.{}.down_proj.weight", "", "FD", "D F"),
    "final_norm": Layout("model.norm.weight", "output_norm.weight", "D", "D"),
    "head": Layout("lm_head.weight", "output.weight", "VD", "V D"),
    "score": Layout("score.weight", "", "VD", "V D"),
    "score_bias": Layout("score.bias", "", "V", "V"),
}

# For decoders that also norm after mixer and feed-forward; Hugging Face's `post_attention_layernorm` differs there.
NORMS_BEHIND: dict[str, Layout] = {
    "layers.attention_out_norm": Layout(
        "model.layers.{}.post_attention_layernorm.weight", "blk.{}.post_attention_norm.weight", "D", "D"
    ),
    "layers.mlp_norm": Layout("model.layers.{}.pre_feedforward_layernorm.weight", "blk.{}.ffn_norm.weight", "D", "D"),
    "layers.mlp_out_norm": Layout(
        "model.layers.{}.post_feedforward_layernorm.weight", "blk.{}.post_ffw_norm.weight", "D", "D"
    ),
}

# In gpt-oss and Qwen3.5, llama.cpp names the norm before the feed-forward as Hugging Face does.
POST_ATTENTION = NAMES["layers.mlp_norm"]._replace(gguf="blk.{}.post_attention_norm.weight")

# For gpt-oss: one tensor for the experts of a layer, in which gate and up alternate. In MXFP4, the numbers that share a
# scale come last, so its matrices are transposed.
OPENING = ("expert_gate", "expert_up")
OPENING_BIAS = ("expert_gate_bias", "expert_up_bias")
_EXPERTS = "model.layers.{}.mlp.experts."
GPT_OSS: dict[str, Layout] = {
    "layers.mlp_norm": POST_ATTENTION,
    "layers.o_bias": Layout("model.layers.{}.self_attn.o_proj.bias", "blk.{}.attn_output.bias", "D", "D"),
    "layers.sinks": Layout("model.layers.{}.self_attn.sinks", "blk.{}.attn_sinks.weight", "H", "H"),
    "layers.router": Layout("model.layers.{}.mlp.router.weight", "blk.{}.ffn_gate_inp.weight", "DE", "E D"),
    "layers.router_bias": Layout("model.layers.{}.mlp.router.bias", "blk.{}.ffn_gate_inp.bias", "E", "E"),
    **{f"layers.{name}": Layout(f"{_EXPERTS}gate_up_proj", "", "DF", "D FG", (), OPENING, True) for name in OPENING},
    **{
        f"layers.{name}": Layout(f"{_EXPERTS}gate_up_proj_bias", "", "F", "FG", (), OPENING_BIAS, True)
        for name in OPENING_BIAS
    },
    "layers.expert_down": Layout(f"{_EXPERTS}down_proj", "", "FD", "F D", whole=True),
    "layers.expert_down_bias": Layout(f"{_EXPERTS}down_proj_bias", "", "D", "D", whole=True),
}
GPT_OSS_MXFP4: dict[str, Layout] = {
    **{f"layers.{name}": GPT_OSS[f"layers.{name}"]._replace(file="FG D") for name in OPENING},
    "layers.expert_down": GPT_OSS["layers.expert_down"]._replace(file="D F"),
}

# For Qwen3.5: attention with gates, stored with the queries head by head; and delta nets, whose queries, keys and
# values are one tensor, as are the taps of their convolutions.
QUERIES = ("q", "q_gate")
GATED: dict[str, Layout] = {
    f"layers.{name}": NAMES["layers.q"]._replace(file="HGQ D", lanes=QUERIES) for name in QUERIES
}
_NET = "model.layers.{}.linear_attn."
_QKV, _TAPS = ("q", "k", "v"), ("q_taps", "k_taps", "v_taps")
_IN = (f"{_NET}in_proj_qkv.weight", "blk.{}.attn_qkv.weight")
DELTA: dict[str, Layout] = {
    **{f"layers.{name}": Layout(*_IN, "DKN", "KN D", _QKV) for name in "qk"},
    "layers.v": Layout(*_IN, "DVP", "VP D", _QKV),
    **{f"layers.{name}_taps": Layout(f"{_NET}conv1d.weight", "", "TKN", "KN 1 T", _TAPS) for name in "qk"},
    "layers.v_taps": Layout(f"{_NET}conv1d.weight", "", "TVP", "VP 1 T", _TAPS),
    "layers.z": Layout(f"{_NET}in_proj_z.weight", "blk.{}.attn_gate.weight", "DVP", "VP D"),
    "layers.a": Layout(f"{_NET}in_proj_a.weight", "blk.{}.ssm_alpha.weight", "DV", "V D"),
    "layers.b": Layout(f"{_NET}in_proj_b.weight", "blk.{}.ssm_beta.weight", "DV", "V D"),
    "layers.log_decay": Layout(f"{_NET}A_log", "blk.{}.ssm_a", "V", "V"),
    "layers.decay_bias": Layout(f"{_NET}dt_bias", "blk.{}.ssm_dt.bias", "V", "V"),
    "layers.out_scale": Layout(f"{_NET}norm.weight", "blk.{}.ssm_norm.weight", "P", "P"),
    "layers.o": Layout(f"{_NET}out_proj.weight", "blk.{}.ssm_out.weight", "VPD", "D VP"),
}
DELTA_GGUF: dict[str, Layout] = {
    **DELTA,
    **{
        f"layers.{name}": DELTA[f"layers.{name}"]._replace(
            gguf="blk.{}.ssm_conv1d.weight", file=DELTA[f"layers.{name}"].file.replace(f" {ONE}", "")
        )
        for name in _TAPS
    },
}

# For Qwen3.5's mixture: all experts of a layer in one tensor, gate's rows before up's; and an expert for every token.
QWEN35_EXPERTS: dict[str, Layout] = {
    **{f"layers.{name}": Layout(f"{_EXPERTS}gate_up_proj", "", "DF", "F D", OPENING, (), True) for name in OPENING},
    "layers.expert_down": Layout(f"{_EXPERTS}down_proj", "", "FD", "D F", whole=True),
}
_SHARED = "model.layers.{}.mlp.shared_expert"
SHARED: dict[str, Layout] = {
    "layers.gate": Layout(f"{_SHARED}.gate_proj.weight", "blk.{}.ffn_gate_shexp.weight", "DF", "F D"),
    "layers.up": Layout(f"{_SHARED}.up_proj.weight", "blk.{}.ffn_up_shexp.weight", "DF", "F D"),
    "layers.down": Layout(f"{_SHARED}.down_proj.weight", "blk.{}.ffn_down_shexp.weight", "FD", "D F"),
    "layers.shared_router": Layout(f"{_SHARED}_gate.weight", "blk.{}.ffn_gate_inp_shexp.weight", "DE", "E D"),
}

# For each mixture in GGUF: one tensor for all of a layer's gates, one for ups and one for downs; so their biases.
GGUF_EXPERTS: dict[str, Layout] = {
    f"layers.expert_{name}{'_bias' if bias else ''}": Layout(
        "", f"blk.{{}}.ffn_{name}_exps.{'bias' if bias else 'weight'}", ours, file, whole=True
    )
    for name, (into, out) in {"gate": ("D", "F"), "up": ("D", "F"), "down": ("F", "D")}.items()
    for bias, ours, file in ((False, into + out, f"{out} {into}"), (True, out, out))
}
FIRST_APART = re.compile(r"model\.layers\.\d+\.mlp\.experts\.0\.gate_proj\.weight")
"""Names of tensors in files that store each expert separately."""

INVERSE_FREQUENCIES = "rotary_emb.inv_freq"
"""End of the names of rotary frequencies, which old files hold and which follow from the config."""


def layout_of(param: str, config: DecoderConfig, kind: FileKind = "folder") -> Layout:
    """Name and layout, in a model's files, of one of our parameters."""
    name, family = LAYERS + own_name(param) if param.startswith(LAYERS) else param, FAMILIES[config.model_type]
    own = NORMS_BEHIND if family.like_gemma else GPT_OSS if family.like_gpt_oss else {}
    if family.like_qwen35:
        own = {"layers.mlp_norm": POST_ATTENTION}
    packed = GPT_OSS_MXFP4 if kind == "mxfp4" else {}
    return {**NAMES, **own, **packed, **_of_mixer(param, config, kind), **_of_experts(param, config, kind)}[name]


def _of_mixer(param: str, config: DecoderConfig, kind: FileKind) -> Mapping[str, Layout]:
    """The layouts of weights of a token mixer other than plain attention."""
    mixer = next((place.block.mixer for place in config.places if param.startswith(place.prefix)), None)
    if isinstance(mixer, DeltaNet):
        return DELTA_GGUF if kind == "gguf" else DELTA
    return GATED if isinstance(mixer, Attention) and mixer.gated else {}


def _of_experts(param: str, config: DecoderConfig, kind: FileKind) -> Mapping[str, Layout]:
    """The layouts of a mixture's weights that differ from those of Qwen3-MoE's and gpt-oss's folders."""
    after = next((place.block.feed_forward for place in config.places if param.startswith(place.prefix)), None)
    if not isinstance(after, Experts):
        return {}
    shared = SHARED if after.shared else {}
    if kind == "gguf":
        return shared | GGUF_EXPERTS
    return shared | QWEN35_EXPERTS if after.shared and kind != "apart" else shared


def layers_of(param: str, config: DecoderConfig) -> Sequence[int]:
    """Indices of the decoder's layers that a parameter stacks, in order; empty for one outside the layers."""
    return next((place.layers for place in config.places if param.startswith(place.prefix)), ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilePart:
    """The rows of a file tensor that hold one of our parameters, or one of its layers or experts."""

    tensor: str
    param: str
    index: tuple[int, ...]
    """Index into the stacked dimensions of our parameter."""
    shape: tuple[int, ...]
    """Our shape, without the stacked dimensions."""
    at: tuple[int, ...]
    """Index into the tensor's dimensions before its rows: the expert, in a tensor that holds all."""
    first: int
    """First row in the tensor."""
    rows: int
    """Rows of the tensor, including other parameters' rows."""
    lead: tuple[int, ...]
    """The tensor's dimensions before its rows."""
    layout: Layout
    """Its layout in the file."""

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return (*self.lead, self.rows, *self.layout.file_shape(self.shape)[1:])

    @property
    def lane(self) -> int | None:
        """Its index along the file's dimension G; None if absent."""
        return self.layout.lanes.index(own_name(self.param)) if self.layout.lanes else None


def file_parts(config: DecoderConfig, kind: FileKind) -> Iterator[FilePart]:
    """All parts of a model's files, parameter by parameter."""
    specs = param_specs(config)
    for param, spec in specs.items():
        layout, layers = layout_of(param, config, kind), layers_of(param, config)
        name = layout.gguf if kind == "gguf" else layout.hf
        prefix = param.removesuffix(own_name(param))
        rows = {own: layout_of(prefix + own, config, kind).file_rows(specs[prefix + own]) for own in layout.joined}
        rows = rows or {own_name(param): layout.file_rows(spec)}
        before = list(rows)[: list(rows).index(own_name(param))]
        for index in itertools.product(*map(range, spec.shape[: spec.stacked])):
            numbers = (layers[index[0]], *index[1:]) if layers else ()
            at, lead = (index[1:], spec.shape[1 : spec.stacked]) if layout.whole else ((), ())
            yield FilePart(
                tensor=name.format(*numbers),
                param=param,
                index=index,
                shape=spec.shape[spec.stacked :],
                at=at,
                lead=lead,
                first=sum(rows[own] for own in before),
                rows=sum(rows.values()),
                layout=layout,
            )
