"""How far our logits are from transformers', in float32: tiny random models of every family, and the real SmolLM2.

    python -m benches.logits_parity        (needs torch, and for SmolLM2 the demo's wheel)

Prints a table and writes benches/results/logits-parity-cpu.json. The bar is 1e-4 of the largest logit. Each row also
has both sides' distance from transformers in float64: how much of the difference is rounding of theirs, and of ours.
SmolLM2 (GGUF) reaches transformers through our float32 export; the others are the models of `tests/models`.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers

from benches.record import arguments, record
from podium.models.files.hf import load_params, save_model
from podium.models.files.source import ModelSource, read_architecture, resolve
from podium.models.params import TRAIN_AXES
from podium.models.text.tokenizer import load_tokenizer
from podium.sharding import ShardingRules, make_mesh
from tests.models.tiny_models import CASES, VOCAB, make_logits, write_model

BAR = 1e-4  # of the largest logit


def their_logits(folder: Path, tokens: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Transformers' logits [B, T, V], computed in `dtype`."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the only form in float64
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain).eval()
    with torch.no_grad():
        return model(torch.tensor(tokens.astype(np.int64))).logits.numpy()


def compare(source: ModelSource, folder: Path, tokens: np.ndarray, name: str) -> dict[str, Any]:
    """One row: our logits of `source` against theirs of `folder` (exported there first where it is not the source)."""
    rules = ShardingRules(make_mesh("auto", jax.devices()[:1]), TRAIN_AXES)
    config = read_architecture(source)
    params = load_params(source, config, rules)
    if folder != source.path:
        save_model(params, config, None, folder, dtype="float32")
    ours = np.asarray(make_logits(config, rules)(params, tokens))
    theirs, exact = (their_logits(folder, tokens, dtype) for dtype in (torch.float32, torch.float64))
    scale = float(np.abs(theirs).max())
    return {
        "model": name,
        "tokens": tokens.size,
        "scale": scale,
        "relative": float(np.abs(ours - theirs).max()) / scale,
        "ours_to_float64": float(np.abs(ours - exact).max()) / scale,
        "theirs_to_float64": float(np.abs(theirs - exact).max()) / scale,
        "same_argmax": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
    }


def rows(folder: Path) -> list[dict[str, Any]]:
    """A row for each case of the tests, and one for the demo's model."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, 128)).astype(np.int32)
    found = [compare(source := write_model(folder / case, case), source.path, tokens, case) for case in CASES]
    demo = resolve("demo")
    chat = np.array([load_tokenizer(demo).encode_chat("What is 2 + 3? Answer with only the number.", None)], np.int32)
    return [*found, compare(demo, folder / "demo", chat, "SmolLM2-135M-Instruct (GGUF)")]


def main() -> None:
    """Prints the table and writes it; exit status 1 where a row misses the bar."""
    args = arguments(__doc__).parse_args()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        table = rows(Path(temporary))
    for row in table:
        both = f"to float64: ours {row['ours_to_float64']:.1e}, theirs {row['theirs_to_float64']:.1e}"
        print(f"{row['model']:30}  {row['relative']:.1e} of {row['scale']:6.2f}  {both}")
    result = {"bar_relative": BAR, "rows": table}
    record(f"logits-parity-{jax.default_backend()}", result, args.results, packages=("torch", "gguf"))
    sys.exit(any(row["relative"] > BAR for row in table))


if __name__ == "__main__":
    main()
