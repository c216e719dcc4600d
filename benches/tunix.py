"""Podium's step against that of Tunix's own GRPO learner: CPU seconds of rollout and update, by turns in one run.

    python3.12 -m venv tunix && tunix/bin/pip install google-tunix==0.1.7 jax==0.12.0.1 flax==0.12.12 math-verify
    tunix/bin/python -m benches.tunix

Both sides run in that environment (Tunix wants Python 3.12, and holds safetensors below what Podium's package asks
for), so with the same jax: Podium in this process, Tunix in a child (benches/children/tunix_step.py). Both train a
random Qwen2 of the same sizes in float32 with GRPO and AdamW, without KL and without recomputation, a step's rows in
one micro-batch: 4 prompts of 64 tokens with 8 completions of 128 each, none of which ends earlier. Neither sees a limit
on its threads. The steps of the two alternate, and each waits while the other works; the first ones compile and do not
count. Ours are charged for more: `rollout` includes grading, and `update` includes advantages, packing and handing the
new weights to the engine, all of which Tunix does outside the two methods that are timed, or not at all. Prints a table
of medians and writes benches/results/tunix-cpu.json; exit status 1 where Podium is less than 1.5 times as fast by CPU
seconds in either part.
"""

import dataclasses
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from benches.own_step import OwnStep
from benches.record import ROOT, arguments, record
from podium.config.schema import Config
from podium.models.files.hf import save_model
from podium.models.files.hf_config import from_hf_config
from podium.models.params import TRAIN_AXES, param_specs
from podium.settings import load_settings
from podium.sharding import ShardingRules, init_params, make_mesh
from podium.tasks.task import Prompt, TaskSource

BAR = 1.5
PARTS = ("rollout", "update", "step")
QUESTIONS = 512
END = 0
"""Ends a completion; questions are without it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the model, and of a step."""

    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    mlp_width: int = 1024
    vocab: int = 4096
    prompts: int = 4
    group: int = 8
    prompt: int = 64
    completion: int = 128
    learning_rate: float = 1e-5

    @property
    def completion_tokens(self) -> int:
        """Of a step."""
        return self.prompts * self.group * self.completion


class EvenNumbers:
    """Random numbers to go on from; more even ones are better."""

    system_prompt = None

    def __init__(self, source: TaskSource, *, vocab: int, length: int) -> None:
        self._vocab, self._length = vocab, length

    def prompts(self, split: str) -> list[Prompt]:
        """Prompts of `length` numbers each."""
        numbers = np.random.default_rng(0).integers(1, self._vocab, (QUESTIONS, self._length))
        return [
            Prompt(id=f"even/{split}/{index}", question=text_of(row), answer="") for index, row in enumerate(numbers)
        ]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """The share of even numbers."""
        return share_of_even(completion)


def text_of(numbers: Iterable[int]) -> str:
    """Numbers as a text, `<7><1024>`; the token of a number is itself."""
    return "".join(f"<{number}>" for number in numbers)


def numbers_of(text: str) -> list[int]:
    """The numbers of a text."""
    return [int(found) for found in re.findall(r"\d+", text)]


def share_of_even(text: str) -> float:
    """Of the numbers of a text, how many are even: a reward that differs inside a group and costs nothing."""
    numbers = numbers_of(text)
    return sum(number % 2 == 0 for number in numbers) / max(1, len(numbers))


def write_model(folder: Path, sizes: Sizes) -> None:
    """The random Qwen2 as a Hugging Face folder.

    Its end token, which is in the vocabulary as the model check wants it, is never drawn: the first entry of all
    embeddings is 1, and of this one -1, so that its logit is some 30 below the others.
    """
    import transformers
    from tokenizers import Tokenizer, models

    words = [text_of([number]) for number in range(sizes.vocab)]
    rust = Tokenizer(models.BPE(vocab={word: token for token, word in enumerate(words)}, merges=[]))
    rust.add_tokens(words)  # found whole, whatever the class that transformers takes for a Qwen2's tokenizer
    backend = transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust, chat_template="{{ messages[-1].content }}", eos_token=words[END]
    )
    described = {
        "model_type": "qwen2",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "intermediate_size": sizes.mlp_width,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    decoder = from_hf_config(described, "benches/tunix.py")
    params = dict(init_params(0, param_specs(decoder), ShardingRules(make_mesh("auto"), TRAIN_AXES)))
    params["embed"] = params["embed"].at[:, 0].set(1.0).at[END, 0].set(-1.0)
    save_model(params, decoder, None, folder, dtype="float32")
    backend.save_pretrained(folder)


def make_config(folder: Path, sizes: Sizes, changes: list[str]) -> Config:
    """The run, as its YAML would say it; a row holds a group behind one copy of its prompt."""
    run = {
        "model": str(folder),
        "prompts_per_step": sizes.prompts,
        "group_size": sizes.group,
        "tasks": [{"name": "benches.tunix:EvenNumbers", "options": {"vocab": sizes.vocab, "length": sizes.prompt}}],
        "grading": {"workers": 0},  # in this process, whose CPU seconds are counted
        "rollout": {
            "max_prompt_tokens": sizes.prompt,
            "max_new_tokens": sizes.completion,
            "slots": sizes.prompts * sizes.group,
            "dtype": "float32",
        },
        "train": {
            "dtype": "float32",
            "remat": "none",
            "row_tokens": sizes.prompt + sizes.group * sizes.completion,
            "rows_per_device": sizes.prompts,
            "optimizer": {"learning_rate": sizes.learning_rate},
        },
    }
    path = folder.with_suffix(".yaml")
    path.write_text(json.dumps(run))  # which is YAML
    return load_settings([path], changes, {}).config


class Peer:
    """The learner in its own process, which works only when it is asked for a step."""

    def __init__(self, sizes: Sizes, log: IO[str]) -> None:
        """Starts it; `log` is for what it says of errors."""
        command = [sys.executable, "-m", "benches.children.tunix_step", json.dumps(dataclasses.asdict(sizes))]
        self._log = log
        self._process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        self.parameters = self._answer()["parameters"]

    def step(self) -> dict[str, Any]:
        """What the child says of a step."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Let the child end."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self._log.seek(0)
        sys.exit(f"tunix_step ended with status {self._process.wait()}:\n{self._log.read()[-3000:]}")


def own_step(podium: OwnStep) -> dict[str, Any]:
    """A step of Podium, as the child tells its own."""
    with podium.clock("step"):
        groups, batched, _ = podium.step()
    return {
        "seconds": podium.clock.read(),
        "completion_tokens": sum(each.num_drawn for group in groups for each in group.transcripts),
        "trained_tokens": batched.tokens.trained,
    }


def seconds_of(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Wall and CPU seconds of each part; new weights for the engine are part of the update."""
    spent = row["seconds"]
    handed = spent.get("sync", {"wall_s": 0.0, "cpu_s": 0.0})
    return {part: {kind: spent[part][kind] + handed[kind] * (part == "update") for kind in handed} for part in PARTS}


def medians(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median seconds of each part of a side's steps."""
    found = [seconds_of(row) for row in rows]
    return {
        part: {kind: round(statistics.median(each[part][kind] for each in found), 4) for kind in ("wall_s", "cpu_s")}
        for part in PARTS
    }


def same_work(podium: list[dict[str, Any]], peer: list[dict[str, Any]], sizes: Sizes) -> None:
    """Exits where a step of a side drew or trained on fewer tokens than it should.

    Tunix takes a token 0 that was drawn for padding: one in `vocab` is not trained on.
    """
    for row in (*podium, *peer):
        drawn, trained = row["completion_tokens"], row["trained_tokens"]
        if drawn != sizes.completion_tokens or not 0.99 * drawn <= trained <= drawn:
            sys.exit(f"a step drew {drawn} tokens and trained on {trained}; expected {sizes.completion_tokens}")


def main() -> None:
    """Prints and writes the comparison; exit status 1 where a part misses its bar."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=9, help="steps of each side that count")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="as in podium")
    args = parser.parse_args()
    sizes = Sizes()
    sides: dict[str, list[dict[str, Any]]] = {"podium": [], "tunix": []}
    with tempfile.TemporaryDirectory() as temporary, (Path(temporary) / "log").open("w+") as log:
        folder = Path(temporary) / "model"
        write_model(folder, sizes)
        config = make_config(folder, sizes, args.settings)
        podium, peer = OwnStep(config, Path(temporary)), Peer(sizes, log)
        parameters = {"podium": sum(each.size for each in podium.state.params.values()), "tunix": peer.parameters}
        if len(set(parameters.values())) > 1:
            sys.exit(f"the models differ: {parameters} parameters")
        for step in range(args.warm_up + args.steps):
            rows = {"podium": own_step(podium), "tunix": peer.step()}
            for side, row in rows.items():
                sides[side] += [row] if step >= args.warm_up else []
            print(
                step,
                {side: {part: each["cpu_s"] for part, each in seconds_of(row).items()} for side, row in rows.items()},
            )
        peer.close()
        podium.rollouts.close()
    same_work(sides["podium"], sides["tunix"], sizes)
    spent = {side: medians(rows) for side, rows in sides.items()}
    times = {
        kind: {part: round(spent["tunix"][part][kind] / spent["podium"][part][kind], 2) for part in PARTS}
        for kind in ("cpu_s", "wall_s")
    }
    for side, parts in spent.items():
        print(
            f"{side:7}", "  ".join(f"{part} {each['cpu_s']:.2f} ({each['wall_s']:.2f})" for part, each in parts.items())
        )
    print("CPU seconds of a step (wall clock); times as fast by CPU seconds:", times["cpu_s"])
    result = {
        "bar": BAR,
        "times_as_fast": times,
        "median_seconds": spent,
        "sizes": dataclasses.asdict(sizes) | {"parameters": peer.parameters},
        "config": config.model_dump(mode="json") | {"model": folder.name},
        "steps": sides,
    }
    record("tunix-cpu", result, args.results, packages=("google-tunix", "flax"))
    sys.exit(min(times["cpu_s"][part] for part in ("rollout", "update")) < BAR)


if __name__ == "__main__":
    main()
