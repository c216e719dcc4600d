"""Records what transformers (torch, float32, CPU) computes of the tests' tiny models and of SmolLM2 -> logits.npz.

    pip install torch==2.13.0 transformers==5.23.0 && python tests/golden/record_logits.py

Of SmolLM2 (the demo's wheel, exported in float32) every 499th logit is kept. Tokens are those of one chat question.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "logits.npz"
COLUMNS = slice(None, None, 499)  # of SmolLM2's vocabulary of 49,152
QUESTION = "What is 2 + 3? Answer with only the number."


def transformers_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of a folder by transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor(tokens.astype(np.int64))).logits.numpy()


def main() -> None:
    """Computes and writes all of them."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
    import jax.numpy as jnp
    from tiny_models import CASES, rules_on, tokens_of, write_model

    from podium.models.files.hf import load_params, save_model
    from podium.models.files.source import read_architecture, resolve
    from podium.models.text.tokenizer import load_tokenizer

    golden = {}
    with tempfile.TemporaryDirectory() as temporary:
        for case in CASES:
            source = write_model(Path(temporary) / case, case)
            golden[case] = transformers_logits(source.path, tokens_of(case))
        demo = resolve("demo")
        config, tokenizer = read_architecture(demo), load_tokenizer(demo)
        params = load_params(demo, config, rules_on("auto", 1), jnp.float32)
        save_model(params, config, tokenizer, Path(temporary) / "demo", dtype="float32")
        tokens = np.array([tokenizer.encode_chat(QUESTION, None)], np.int32)
        golden |= {
            "demo_tokens": tokens,
            "demo": transformers_logits(Path(temporary) / "demo", tokens)[..., COLUMNS],
        }
    np.savez_compressed(GOLDEN, **golden)


if __name__ == "__main__":
    main()
