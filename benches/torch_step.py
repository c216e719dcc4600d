"""The demo's step in Podium against the same step in torch: CPU seconds of each part, in one process, by turns.

    python -m benches.torch_step --steps 5        (needs torch, `pip install torch transformers`, and the demo's wheel)

Both train configs/demo.yaml's model. In each step both complete the same prompts, G times each, from weights that have
seen the same updates; both then update on Podium's completions and advantages, without the groups whose rewards are all
equal. The first step, which compiles, is left out. Torch has what suits it (benches/torch_peer.py), and its threads
sleep while they wait, so that CPU seconds are work on a busy machine too. Prints a table and writes
benches/results/step-vs-torch-cpu.json; exit status 1 where Podium's step takes more CPU seconds than torch's.
"""

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

import jax
import numpy as np

from benches.record import arguments, record
from podium.algorithms.advantages import equal_reward_groups, token_weights
from podium.algorithms.recipes import make_recipe
from podium.config.schema import Config
from podium.config.sizes import optimizer_steps
from podium.models.hf import save_model
from podium.models.params import param_specs
from podium.observe.stats import UpdateStats
from podium.settings import load_settings
from podium.tasks.registry import make_task
from podium.train.batch import Batch
from podium.train.generate import Group, Rollouts
from podium.train.optimizer import make_optimizer
from podium.train.setup import load_weights, make_model, make_train_settings
from podium.train.state import TrainState, init_state
from podium.train.step import make_score
from podium.train.trainer import Trainer, make_batches

if TYPE_CHECKING:
    from benches.torch_peer import Row

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "demo.yaml"
SAME_WORK = ("algorithm.zero_variance=drop", "grading.workers=0")  # in this process, where CPU seconds are counted
BAR = 1.0


@dataclasses.dataclass
class Seconds:
    """Seconds of one part of a step, summed."""

    wall: float = 0.0
    cpu: float = 0.0


class Clock:
    """Seconds by name, of this process and all its threads."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, Seconds] = defaultdict(Seconds)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add what happens inside to a name."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        spent = self.spent[name]
        spent.wall += time.perf_counter() - wall
        spent.cpu += time.process_time() - cpu

    def read(self) -> dict[str, dict[str, float]]:
        """What was spent since the last reading."""
        spent, self.spent = self.spent, defaultdict(Seconds)
        return {name: {"wall_s": round(each.wall, 4), "cpu_s": round(each.cpu, 4)} for name, each in spent.items()}


class Podium:
    """Podium's own step, as podium.train.loop makes it, with a clock around its parts."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.clock, self.steps = config, Clock(), 0
        self.model = make_model(config)
        self.recipe = make_recipe(
            config.algorithm, group_size=config.group_size, prompts_per_step=config.prompts_per_step
        )
        specs = param_specs(self.model.decoder)
        self.optimizer = make_optimizer(config.train.optimizer, optimizer_steps(config), specs)
        self.settings = make_train_settings(config, self.model.decoder, self.model.mesh)
        self.rollouts = Rollouts(config, self.model.decoder, self.model.tokenizer, self.model.mesh)
        self.trainer = Trainer(config, self.recipe, self.settings, self.optimizer, reference=None, folder=folder)
        self.state = init_state(load_weights(self.model, None), self.optimizer)
        self.rollouts.load(self.state.params)
        engine = self.rollouts.engine
        for name in ("prefill", "insert", "decode"):
            setattr(engine, name, self._timed(f"rollout/{name}", getattr(engine, name)))
        self.batch: Batch | None = None
        self.trainer.train_step = self._keeping_batch(self._timed("update/train_step", self.trainer.train_step))

    def step(self) -> tuple[list[Group], UpdateStats]:
        """Complete, grade, update, hand over: the groups, and what the update did."""
        with self.clock("rollout"):
            groups, _ = self.rollouts.answer(self.rollouts.feed.next(self.config.prompts_per_step))
        with self.clock("update"):
            batches, _ = make_batches(groups, self.recipe, self.trainer.sizes)
            self.state, updated = self.trainer.update(self.state, batches, self.steps)
            self.steps += 1
        with self.clock("sync"):
            self.rollouts.load(self.state.params)
            jax.block_until_ready(self.rollouts.engine.device.params)
        return groups, updated

    def parts(self, repeats: int) -> dict[str, dict[str, float]]:
        """The update's programs alone, on the last batch: forward with log-probabilities, and the optimizer."""
        score, batch = make_score(self.settings), self.batch

        @jax.jit
        def optimize(state: TrainState) -> Any:
            return self.optimizer.update(state.params, state.opt_state, state.params)  # any gradient will do

        for name, program in (
            ("forward", lambda: score(self.state.params, batch)),  # pyright: ignore[reportArgumentType]
            ("optimizer", lambda: optimize(self.state)),
        ):
            jax.block_until_ready(program())
            with self.clock(name):
                for _ in range(repeats):
                    jax.block_until_ready(program())
        return {name: {key: x / repeats for key, x in each.items()} for name, each in self.clock.read().items()}

    def _timed(self, name: str, program: Any) -> Any:
        def call(*args: Any) -> Any:
            with self.clock(name):
                return jax.block_until_ready(program(*args))

        call.__dict__["_cache_size"] = program._cache_size  # the engine counts its compiled programs
        return call

    def _keeping_batch(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def call(state: TrainState, batch: Batch) -> Any:
            self.batch = batch
            return train_step(state, batch)

        return call


class Torch:
    """The step in PyTorch."""

    def __init__(self, podium: Podium, folder: Path, threads: int) -> None:
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
        self.sampler = Sampler(self.trainer.model, rollout.max_prompt_tokens + rollout.max_new_tokens)
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


def kept_rows(podium: Podium, groups: list[Group]) -> list["Row"]:
    """The completions of groups whose rewards differ, with the recipe's advantages and token weights."""
    from benches.torch_peer import Row

    rewards = np.stack([group.totals for group in groups])
    kept = np.flatnonzero(~equal_reward_groups(rewards))
    lengths = np.array([[len(each.tokens) for each in group.completions] for group in groups])
    advantages = podium.recipe.advantage(rewards, lengths)
    weights = token_weights(
        podium.recipe.mean,
        lengths[kept].reshape(-1),
        num_sequences=lengths[kept].size,
        max_new_tokens=podium.config.rollout.max_new_tokens,
    ).reshape(-1, podium.config.group_size)
    return [
        Row(groups[n].tokens, completion.tokens.tolist(), float(advantage), float(weight))
        for n, row in zip(kept, weights, strict=True)
        for completion, advantage, weight in zip(groups[n].completions, advantages[n], row, strict=True)
    ]


def one_step(podium: Podium, torch_: Torch) -> dict[str, Any]:
    """A step of both: their seconds by part, and what shows that they did the same."""
    groups, updated = podium.step()
    drawn, norm = torch_.step(groups)
    ours = sum(len(completion.tokens) for group in groups for completion in group.completions)
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
        podium = Podium(config, folder)
        torch_ = Torch(podium, folder / "model", args.threads)
        rows = []
        for step in range(args.steps + 1):
            row = one_step(podium, torch_)
            rows += [row] if step else []
            print(
                step, "warm-up" if not step else "", {side: totals([row], side)["step"] for side in ("podium", "torch")}
            )
        parts = podium.parts(repeats=3)
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
