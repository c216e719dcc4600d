"""The demo's step in Podium against the same step in torch: CPU seconds of each part, in one process, by turns.

    python -m benches.torch_step --steps 5        (needs torch, `pip install torch transformers`, and the demo's wheel)

Both train configs/demo.yaml's model. In each step both complete the same prompts, G times each, from weights that have
seen the same updates; both then update on Podium's completions and advantages, without the groups whose rewards are all
equal. The first step, which compiles, is left out. Torch has what suits it (benches/torch_peer.py), and its threads
sleep while they wait, so that CPU seconds are work on a busy machine too. Prints a table and writes
benches/results/step-vs-torch-cpu.json; exit status 1 where Podium's step takes more CPU seconds than torch's.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

import jax
import numpy as np

from benches.own_step import Clock, OwnStep
from benches.record import ROOT, arguments, record
from podium.algorithms.advantages import equal_reward_groups, token_weights
from podium.models.files.hf import save_model
from podium.sampling.groups import Group
from podium.settings import load_settings
from podium.sharding import Params
from podium.tasks.registry import make_task
from podium.train.batches.batch import Batch
from podium.train.state import TrainState
from podium.train.step import make_score

if TYPE_CHECKING:
    from benches.torch_peer import Row

CONFIG = ROOT / "configs" / "demo.yaml"
SAME_WORK = ("algorithm.zero_variance=drop", "grading.workers=0")  # in this process, where CPU seconds are counted
ROLLOUT_PROGRAMS = ("extend", "copy", "decode")
BAR = 1.0


class Programs:
    """Clocks around the compiled programs of a step, and the last batch that was updated on."""

    def __init__(self, podium: OwnStep) -> None:
        """From now on every call of a program is waited for."""
        self.podium = podium
        self.batch: Batch | None = None
        device, trainer = podium.rollouts.device, podium.trainer
        timed = {name: self._timed(f"rollout/{name}", getattr(device.programs, name)) for name in ROLLOUT_PROGRAMS}
        device.programs = device.programs._replace(**timed)
        trainer.train_step = self._keeping_batch(self._timed("update/train_step", trainer.train_step))

    def alone(self, repeats: int) -> dict[str, dict[str, float]]:
        """The update's programs alone, on the last batch: forward with log-probabilities, and the optimizer."""
        podium, batch = self.podium, self.batch
        score = make_score(podium.settings)

        @jax.jit
        def optimize(state: TrainState) -> Any:
            return podium.optimizer.update(state.params, state.opt_state, state.params)  # any gradient will do

        for name, program in (
            ("forward", lambda: score(podium.state.params, batch)),  # pyright: ignore[reportArgumentType]
            ("optimizer", lambda: optimize(podium.state)),
        ):
            jax.block_until_ready(program())
            with podium.clock(name):
                for _ in range(repeats):
                    jax.block_until_ready(program())
        return {name: {key: x / repeats for key, x in each.items()} for name, each in podium.clock.read().items()}

    def _timed(self, name: str, program: Any) -> Any:
        def call(*args: Any) -> Any:
            with self.podium.clock(name):
                return jax.block_until_ready(program(*args))

        call.__dict__["_cache_size"] = program._cache_size  # the engine counts its compiled programs
        return call

    def _keeping_batch(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def call(state: TrainState, batch: Batch, frozen: Params) -> Any:
            self.batch = batch
            return train_step(state, batch, frozen)

        return call


class Torch:
    """The step in PyTorch."""

    def __init__(self, podium: OwnStep, folder: Path, threads: int) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        from benches.torch_peer import Sampler
        from benches.torch_peer import Trainer as TorchTrainer

        torch.set_num_threads(threads)
        save_model(podium.state.params, podium.model.decoder, podium.model.tokenizer, folder, dtype="float32")
        config, self.clock, self.podium = podium.config, Clock(), podium
        optimizer = config.train.optimizer
        self.trainer = TorchTrainer(
            folder,
            learning_rate=optimizer.learning_rate,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            clip_norm=optimizer.clip_norm,
        )
        self.task = make_task(config.tasks[0])
        rollout = config.rollout
        self.sampler = Sampler(self.trainer.model, rollout.prompt_tokens + rollout.max_new_tokens)
        self.generator = torch.Generator().manual_seed(config.seed)

    def step(self, groups: list[Group]) -> tuple[int, float]:
        """Complete the groups' prompts, update on the groups; completion tokens, and the gradient's norm."""
        config, tokenizer = self.podium.config, self.podium.model.tokenizer
        with self.clock("rollout"):
            drawn = self.sampler.generate(
                [group.tokens for group in groups],
                completions=config.group_size,
                max_new_tokens=config.rollout.max_new_tokens,
                eos_tokens=tokenizer.eos_tokens,
                generator=self.generator,
                clock=self.clock,
            )
            for index, tokens in enumerate(drawn):
                prompt = groups[index // config.group_size].prompt.prompt
                self.task.grade(prompt, tokenizer.decode(tokens))
        with self.clock("update"):
            rows = kept_rows(self.podium, groups)
            norm = self.trainer.update(rows, micro_batch=16, clock=self.clock)
        with self.clock("sync"):
            self.sampler.load(self.trainer.model)
        return sum(map(len, drawn)), norm


def kept_rows(podium: OwnStep, groups: list[Group]) -> list["Row"]:
    """The completions of groups whose rewards differ, with the recipe's advantages and token weights."""
    from benches.torch_peer import Row

    rewards = np.stack([group.totals for group in groups])
    kept = np.flatnonzero(~equal_reward_groups(rewards))
    lengths = np.array([[each.num_drawn for each in group.transcripts] for group in groups])
    advantages = podium.recipe.advantage(rewards, lengths)
    weights = token_weights(
        podium.recipe.mean,
        lengths[kept].reshape(-1),
        num_sequences=lengths[kept].size,
        max_new_tokens=podium.config.rollout.max_new_tokens,
    ).reshape(-1, podium.config.group_size)
    return [
        Row(groups[n].tokens, transcript.drawn_tokens.tolist(), float(advantage), float(weight))
        for n, row in zip(kept, weights, strict=True)
        for transcript, advantage, weight in zip(groups[n].transcripts, advantages[n], row, strict=True)
    ]


def one_step(podium: OwnStep, torch_: Torch) -> dict[str, Any]:
    """A step of both: their seconds by part, and what shows that they did the same."""
    groups, _, updated = podium.step()
    drawn, norm = torch_.step(groups)
    ours = sum(each.num_drawn for group in groups for each in group.transcripts)
    return {
        "podium": podium.clock.read(),
        "torch": torch_.clock.read(),
        "completion_tokens": {"podium": ours, "torch": drawn},
        "gradient_norm": {"podium": updated.gradient_norm, "torch": norm},
        "load_1_min": round(os.getloadavg()[0], 2),
    }


def totals(rows: list[dict[str, Any]], side: str) -> dict[str, float]:
    """Mean CPU seconds per step of each part of one side; `step` is their sum."""
    names = {name for row in rows for name in row[side]}
    means = {name: sum(row[side].get(name, {"cpu_s": 0.0})["cpu_s"] for row in rows) / len(rows) for name in names}
    means["step"] = means["rollout"] + means["update"] + means["sync"]
    return {name: round(means[name], 3) for name in sorted(means)}


def main() -> None:
    """Prints and writes the comparison; exit status 1 where Podium's step takes longer."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=5, help="steps that count, after one that does not")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch's threads")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="as in podium")
    args = parser.parse_args()
    config = load_settings([CONFIG], [*SAME_WORK, *args.settings], {}).config
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        podium = OwnStep(config, folder)
        programs = Programs(podium)
        torch_ = Torch(podium, folder / "model", args.threads)
        rows = []
        for step in range(args.steps + 1):
            row = one_step(podium, torch_)
            rows += [row] if step else []
            print(
                step, "warm-up" if not step else "", {side: totals([row], side)["step"] for side in ("podium", "torch")}
            )
        parts = programs.alone(repeats=3)
        podium.rollouts.close()
    sides = {side: totals(rows, side) for side in ("podium", "torch")}
    ratios = {name: round(sides["podium"][name] / sides["torch"][name], 3) for name in ("rollout", "update", "step")}
    for side, means in sides.items():
        print(f"{side:7}", "  ".join(f"{name} {cpu_s:.2f}" for name, cpu_s in means.items()), "CPU s per step")
    print("podium's update alone:", {name: round(each["cpu_s"], 2) for name, each in parts.items()})
    print("podium / torch:", ratios)
    result = {
        "bar": BAR,
        "ratios_cpu_s": ratios,
        "mean_cpu_s": sides,
        "podium_programs_alone": parts,
        "torch_threads": args.threads,
        "settings": [*SAME_WORK, *args.settings],
        "config": config.model_dump(mode="json"),
        "steps": rows,
    }
    record("step-vs-torch-cpu", result, args.results, packages=("torch",))
    sys.exit(ratios["step"] > BAR)


if __name__ == "__main__":
    main()
