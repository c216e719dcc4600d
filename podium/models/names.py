"""What our parameters are called in files, and how they lie there: one table, for loading and for export. No jax."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from podium.models.params import LAYERS


class Layout(NamedTuple):
    """One of our parameters in a file.

    Dimensions are letters: V vocabulary, D width, F MLP width, H and K heads, Q head size.
    """

    hf: str  # name in safetensors; {} is the layer
    gguf: str  # name in GGUF
    ours: str  # our dimensions, without the layers'
    file: str  # the file's; the letters of one word are one dimension there

    @property
    def letters(self) -> str:
        """The file's dimensions taken apart, in the file's order."""
        return self.file.replace(" ", "")

    def split_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Our shape (without layers) in the order of `letters`."""
        sizes = dict(zip(self.ours, shape, strict=True))
        return tuple(sizes[letter] for letter in self.letters)

    def file_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that a parameter of our `shape` (without layers) has in the file."""
        sizes = dict(zip(self.ours, shape, strict=True))
        return tuple(math.prod(sizes[letter] for letter in word) for word in self.file.split())

    def to_file_order(self) -> tuple[int, ...]:
        """The transposition from our dimensions to `letters`."""
        return tuple(self.ours.index(letter) for letter in self.letters)

    def from_file_order(self) -> tuple[int, ...]:
        """The transposition from `letters` to our dimensions."""
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
    "final_norm": Layout("model.norm.weight", "output_norm.weight", "D", "D"),
    "head": Layout("lm_head.weight", "output.weight", "VD", "V D"),
}

# Tensors that old files hold and no decoder needs: the rotary frequencies follow from the config.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rope_freqs.weight")


def layers_of(param: str, shape: Sequence[int]) -> Iterator[tuple[int | None, tuple[int, ...]]]:
    """The parts that files hold apart of a parameter: each layer's index (None: it has no layers) and shape."""
    if param.startswith(LAYERS):
        yield from ((layer, tuple(shape[1:])) for layer in range(shape[0]))
    else:
        yield None, tuple(shape)


class StoredTensor(NamedTuple):
    """What a file says of a tensor."""

    shape: tuple[int, ...]
    dtype: str  # as the file's format calls it
    file: Path


class Tensors(Protocol):
    """The tensors of a model on disk, none of them read yet."""

    entries: dict[str, StoredTensor]

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor: float32, float16 or bfloat16."""
        ...
