"""How parameters are stored as tensors in a model's files, and a tensor's shape and format there. No jax."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np

from podium.models.blocks.spec import ParamSpec

LANE = "G"
ONE = "1"
FileKind = Literal["folder", "apart", "gguf", "mxfp4"]
"""Kinds of model files: safetensors, safetensors in which each expert of a Qwen3.5 has its own tensors, GGUF, and
safetensors whose experts are in MXFP4."""


class Layout(NamedTuple):
    """How a parameter is stored in a file.

    Dimensions are letters: V vocabulary, D width, F MLP width, H and K heads, Q head size, E experts; G in a file's
    counts `lanes`. Of delta nets: K and V heads, N and P their sizes, T taps. 1 is a file's dimension of one element.
    """

    hf: str  # name in safetensors; {} is the layer, a second {} the expert
    gguf: str  # name in GGUF
    ours: str  # our dimensions, without those of layers and experts
    file: str  # the file's dimensions; letters in one word are merged into one dimension
    joined: tuple[str, ...] = ()
    """The parameters whose rows the tensor holds one after another, including this one; (): only this one."""
    lanes: tuple[str, ...] = ()
    """The parameters whose numbers the tensor holds in turn along G, including this one; (): only this one."""
    whole: bool = False
    """Whether one tensor holds all of a layer's experts, along a first dimension; else each expert has its own."""

    @property
    def letters(self) -> str:
        """The file's dimensions except G and 1, unmerged, in the file's order."""
        return self.file.replace(" ", "").replace(LANE, "").replace(ONE, "")

    @property
    def lane_dim(self) -> int:
        """Index of G among the unmerged dimensions of the file."""
        return self.file.replace(" ", "").index(LANE)

    def split_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Our shape (without layers) in the order of `letters`."""
        sizes = dict(zip(self.ours, shape, strict=True))
        return tuple(sizes[letter] for letter in self.letters)

    def laned_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Our shape (without layers) in the file's order, with G if there is one."""
        split = list(self.split_shape(shape))
        if self.lanes:
            split.insert(self.lane_dim, len(self.lanes))
        return tuple(split)

    def file_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in the file of a parameter with our `shape` (without layers)."""
        sizes = {LANE: len(self.lanes), ONE: 1, **dict(zip(self.ours, shape, strict=True))}
        return tuple(math.prod(sizes[letter] for letter in word) for word in self.file.split())

    def file_rows(self, spec: ParamSpec) -> int:
        """File rows of one matrix or vector of a parameter."""
        return self.file_shape(spec.shape[spec.stacked :])[0]

    def to_file_order(self) -> tuple[int, ...]:
        """The permutation from our dimensions to `letters`."""
        return tuple(self.ours.index(letter) for letter in self.letters)

    def from_file_order(self) -> tuple[int, ...]:
        """The permutation from `letters` to our dimensions."""
        return tuple(self.letters.index(letter) for letter in self.ours)


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

# In gpt-oss and Qwen3.5, llama.cpp names the norm before the feed-forward as Hugging Face does.
POST_ATTENTION = NAMES["layers.mlp_norm"]._replace(gguf="blk.{}.post_attention_norm.weight")

# For each mixture in GGUF: one tensor for all of a layer's gates, one for ups and one for downs; so their biases.
GGUF_EXPERTS: dict[str, Layout] = {
    f"layers.expert_{name}{'_bias' if bias else ''}": Layout(
        "", f"blk.{{}}.ffn_{name}_exps.{'bias' if bias else 'weight'}", ours, file, whole=True
    )
    for name, (into, out) in {"gate": ("D", "F"), "up": ("D", "F"), "down": ("F", "D")}.items()
    for bias, ours, file in ((False, into + out, f"{out} {into}"), (True, out, out))
}


class StoredTensor(NamedTuple):
    """A file's description of a tensor."""

    shape: tuple[int, ...]
    dtype: str  # as the file's format calls it
    file: Path


class Tensors(Protocol):
    """The tensors of a model on disk, read on demand."""

    entries: dict[str, StoredTensor]

    def read(self, name: str, start: int, stop: int, at: tuple[int, ...] = ()) -> np.ndarray:
        """Read rows [start, stop) of a tensor, or of its part at an index, as float32, float16 or bfloat16."""
        ...
