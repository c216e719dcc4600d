"""Each recipe teaches a tiny random model one-digit sums: its reward rises. CPU, no download, under a minute each.

    python -m benches.recipes        (needs nothing but Podium)

The model has 2 layers of width 32 and 32 tokens, words and whole numbers; a random one answers right about once in
thirty. Prints a table and writes benches/results/recipes-cpu.json. The bar is a mean reward of the last 10 steps of at
least 0.15 above that of the first 5. tests/train/test_recipes_learn.py runs the same.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benches.record import arguments, record
from podium.algorithms.recipes import RECIPES
from podium.config.critic_section import CriticConfig
from podium.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    EvalConfig,
    GradingConfig,
    OptimizerConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)
from podium.train.loop import train

RISE = 0.15
STEPS = 60
ENTROPY_BONUS = 0.01
WORDS = ["<unk>", "<pad>", "<end>", "What", "is", "+", "?", "Answer", "with", "only", "the", "number", "."]
VOCAB = [*WORDS, *map(str, range(1, 20))]
TEMPLATE = "{{ messages[-1].content }}"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write_tiny_model(
    folder: Path,
    words: Sequence[str] = VOCAB,
    template: str = TEMPLATE,
    longest: int = 64,
    *,
    spread: float = 0.4,
    sizes: Mapping[str, int] = SIZES,
) -> None:
    """A random Llama of these sizes, with a tokenizer of `words` and a chat template, as a Hugging Face folder.

    Its first three words are <unk>, <pad> and <end>; its sequences have at most `longest` tokens. `spread` is the
    standard deviation of its weights.
    """
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    rust = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.add_special_tokens(["<unk>", "<pad>", "<end>"])
    backend = transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust,
        chat_template=template,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<end>",
    )
    backend.save_pretrained(folder)
    extra = {"hidden_act": "silu", "max_position_embeddings": longest, "rms_norm_eps": 1e-5, "rope_theta": 100.0}
    config = {"model_type": "llama", "tie_word_embeddings": False, "vocab_size": len(words), **sizes, **extra}
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    tensors = {
        name: (spread * random.standard_normal(shape) + float("norm" in name)).astype(np.float32)
        for name, shape in _shapes(len(words), sizes).items()
    }
    save_file(tensors, folder / "model.safetensors")


def _shapes(vocab: int, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The tensors of the model by Hugging Face's names."""
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    keys = width * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    names = {"model.embed_tokens": (vocab, width), "model.norm": (width,), "lm_head": (vocab, width)}
    for layer in range(sizes["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        names |= {f"{attention}{each}_proj": (width, width) for each in "qo"}
        names |= {f"{attention}{each}_proj": (keys, width) for each in "kv"}
        names |= {f"{mlp}{each}_proj": (inner, width) for each in ("gate", "up")}
        names |= {f"{mlp}down_proj": (width, inner)}
        names |= {f"model.layers.{layer}.{each}_layernorm": (width,) for each in ("input", "post_attention")}
    return {f"{name}.weight": shape for name, shape in names.items()}


def make_config(
    model: Path, runs: Path, recipe: str, *, steps: int = STEPS, entropy_bonus: float = ENTROPY_BONUS
) -> Config:
    """A run of `steps` steps of 32 prompts with 16 completions of at most 2 tokens."""
    return Config(
        name=recipe,
        runs_dir=str(runs),
        model=str(model),
        steps=steps,
        prompts_per_step=32,
        group_size=16,
        tasks=[TaskConfig(name="arithmetic")],
        grading=GradingConfig(workers=0),
        rollout=RolloutConfig(
            dtype="float32", max_prompt_tokens=16, max_new_tokens=2, slots=512, prefill_rows=32, refill_steps=2
        ),
        algorithm=AlgorithmConfig(recipe=recipe, mask_truncated=False, entropy_bonus=entropy_bonus),
        train=TrainConfig(
            dtype="float32", rows_per_device=64, remat="none", optimizer=OptimizerConfig(learning_rate=3e-3)
        ),
        critic=CriticConfig(learning_rate=3e-3) if RECIPES[recipe]().learns_values else None,
        eval=EvalConfig(at_start=False, at_end=False),
        checkpoint=CheckpointConfig(every_steps=0),
    )


def learn(recipe: str, folder: Path, *, steps: int = STEPS, entropy_bonus: float = ENTROPY_BONUS) -> list[float]:
    """Trains a new tiny model below `folder`; the mean reward of each step."""
    model = folder / "model"
    if not model.exists():
        write_tiny_model(model)
    config = make_config(model, folder / "runs", recipe, steps=steps, entropy_bonus=entropy_bonus)
    train(config, plain=True)
    lines = (folder / "runs" / recipe / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train-reward/total/mean"] for line in lines]


def first_and_last(rewards: list[float]) -> tuple[float, float]:
    """Mean reward of the first 5 and of the last 10 steps."""
    return float(np.mean(rewards[:5])), float(np.mean(rewards[-10:]))


def measure(recipe: str, folder: Path) -> dict[str, Any]:
    """A row of the table."""
    start = time.perf_counter()
    first, last = first_and_last(learn(recipe, folder))
    return {"recipe": recipe, "first": first, "last": last, "wall_s": time.perf_counter() - start}


def main() -> None:
    """Prints the table and writes it; exit status 1 where a recipe's reward does not rise by the bar."""
    args = arguments(__doc__).parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in (name for name, each in RECIPES.items() if not each().demonstrations):
            rows.append(measure(recipe, Path(folder)))
    print(f"{'recipe':22} {'first 5':>8} {'last 10':>8} {'s':>6}")
    for row in rows:
        print(f"{row['recipe']:22} {row['first']:8.3f} {row['last']:8.3f} {row['wall_s']:6.1f}")
    record("recipes-cpu", {"steps": STEPS, "bar_rise": RISE, "rows": rows}, args.results)
    sys.exit(any(row["last"] - row["first"] < RISE for row in rows))


if __name__ == "__main__":
    main()
