"""How far our logits are from transformers', in float32: tiny random models of each family, and the real SmolLM2.

    python -m benches.logits_parity        (needs torch, and for SmolLM2 the demo's wheel)

Prints a table and writes benches/results/logits-parity-cpu.json. The bar is 1e-4 of the largest logit. SmolLM2 (GGUF)
reaches transformers through our float32 export; the others are made and written by transformers itself.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers

from benches.record import arguments, record
from podium.models.architecture import DecoderConfig
from podium.models.attention import causal_attention
from podium.models.blocks.kind import At
from podium.models.decoder import forward, head_weights
from podium.models.hf import load_params, save_model
from podium.models.logprobs import logits_at
from podium.models.params import TRAIN_AXES
from podium.models.source import ModelSource, read_architecture, resolve
from podium.models.tokenizer import load_tokenizer
from podium.sharding import Params, ShardingRules, make_mesh

BAR = 1e-4  # of the largest logit
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,  # so that logits spread
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, llama3 rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3, tied": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
}


def our_logits(params: Params, config: DecoderConfig, tokens: np.ndarray, rules: ShardingRules) -> np.ndarray:
    mask = jnp.tri(tokens.shape[1], dtype=bool)[None]

    def attend(kv: Any, _: At, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Any, jax.Array]:
        return kv, causal_attention(q, k, v, mask)

    @jax.jit
    def compute(params: Params, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        hidden, _, _ = forward(
            params, tokens, positions, attend, config=config, rules=rules, dtype=jnp.dtype("float32")
        )
        return logits_at(hidden, head_weights(params, rules, jnp.dtype("float32")), 1.0)

    return np.asarray(compute(params, jnp.asarray(tokens)))


def their_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(tokens.astype(np.int64))).logits.numpy()


def compare(source: ModelSource, folder: Path, tokens: np.ndarray, name: str) -> dict[str, Any]:
    """One row: our logits of `source` against theirs of `folder` (exported there first where it is not the source)."""
    rules = ShardingRules(make_mesh("auto", jax.devices()[:1]), TRAIN_AXES)
    config = read_architecture(source)
    params = load_params(source, config, rules)
    if folder != source.path:
        save_model(params, config, None, folder, dtype="float32")
    ours, theirs = our_logits(params, config, tokens, rules), their_logits(folder, tokens)
    error, scale = float(np.abs(ours - theirs).max()), float(np.abs(theirs).max())
    same = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
    return {
        "model": name,
        "tokens": tokens.size,
        "max_abs": error,
        "scale": scale,
        "relative": error / scale,
        "same_argmax": same,
    }


def rows(folder: Path) -> list[dict[str, Any]]:
    found = []
    for name, settings in MODELS.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**{**SIZES, **settings})
        path = folder / name.replace(", ", "-").replace(" ", "-")
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
        tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (4, 128)).astype(np.int32)
        found.append(compare(resolve(str(path)), path, tokens, name))
    demo = resolve("demo")
    tokens = np.array([load_tokenizer(demo).encode_chat("What is 2 + 3? Answer with only the number.", None)], np.int32)
    return [*found, compare(demo, folder / "demo", tokens, "SmolLM2-135M-Instruct (GGUF)")]


def main() -> None:
    """Prints the table and writes it; exit status 1 where a row misses the bar."""
    args = arguments(__doc__).parse_args()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        table = rows(Path(temporary))
    for row in table:
        error = f"max abs {row['max_abs']:.2e}  scale {row['scale']:7.2f}  relative {row['relative']:.1e}"
        print(f"{row['model']:30}  {error}")
    result = {"bar_relative": BAR, "rows": table}
    record(f"logits-parity-{jax.default_backend()}", result, args.results, packages=("torch", "gguf"))
    sys.exit(any(row["relative"] > BAR for row in table))


if __name__ == "__main__":
    main()
