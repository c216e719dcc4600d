"""Hugging Face `generate` of a SmolLM2-135M with random weights: one line of JSON. benches/rollout_hf.py calls it.

python benches/hf_generate.py DTYPE BATCH REQUESTS PROMPT NEW      needs torch and transformers, which Podium does not
"""

import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers


def main(dtype: str, batch: int, requests: int, prompt: int, new: int) -> None:
    """Generate once to warm up, and then for all requests."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()

    def generate(rows: int, tokens: int) -> None:
        ids = torch.randint(10, 49000, (rows, prompt))
        mask, lengths = torch.ones_like(ids), {"max_new_tokens": tokens, "min_new_tokens": tokens}
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **lengths)

    generate(batch, 2)
    wall, cpu = time.perf_counter(), time.process_time()
    for first in range(0, requests, batch):
        generate(min(batch, requests - first), new)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = requests * new
    row = {"tokens_per_cpu_s": tokens / cpu, "tokens_per_s": tokens / wall, "cpu_s": cpu, "wall_s": wall}
    print(json.dumps(row | {"torch": torch.__version__, "transformers": transformers.__version__}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
