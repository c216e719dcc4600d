"""Podium's own step, as podium.train.loop makes it, with a clock around its parts: what benches compare others with."""

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jax

from podium.config.schema import Config
from podium.observe.stats import BatchStats, UpdateStats
from podium.sampling.groups import Group
from podium.sampling.sampler import Sampler
from podium.train.batches.run_shapes import RunShapes
from podium.train.setup import load_parts, make_model, make_run_optimizer, run_spec
from podium.train.state import init_state
from podium.train.step import TrainSettings
from podium.train.trainer import Trainer


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


class OwnStep:
    """The model, the engine and the trainer of a config, and the state that its steps have made."""

    def __init__(self, config: Config, folder: Path) -> None:
        """`folder` is where a batch that diverges is saved."""
        self.config, self.clock, self.steps = config, Clock(), 0
        self.model = make_model(config)
        spec = run_spec(config, self.model.decoder, self.model.mesh)
        self.recipe = spec.recipe
        self.optimizer = make_run_optimizer(spec.optimizer, self.model.decoder)
        self.settings = TrainSettings(self.model.decoder, self.model.mesh, spec.update)
        self.rollouts = Sampler(spec.rollout, self.model.decoder, self.model.tokenizer, self.model.mesh)
        params, frozen = load_parts(self.model, None)
        self.trainer = Trainer(
            self.recipe,
            self.settings,
            self.optimizer,
            shapes=RunShapes(spec.batch, keep=lambda kept: None),
            schedule=spec.optimizer,
            folder=folder,
            frozen=frozen,
        )
        self.state = init_state(params, self.optimizer)
        self.rollouts.load(self.state.params, frozen)

    def step(self) -> tuple[list[Group], BatchStats, UpdateStats]:
        """Complete and grade, update, hand over: the groups, the batch of them, and what the update did."""
        with self.clock("rollout"):
            groups, _ = self.rollouts.answer(self.rollouts.feed.next(self.config.prompts_per_step))
        with self.clock("update"):
            batches, batched = self.trainer.prepare(self.state, groups)
            self.state, updated = self.trainer.update(self.state, batches, self.steps)
            jax.block_until_ready(self.state)
            self.steps += 1
        with self.clock("sync"):
            self.rollouts.load(self.state.params, version=self.steps)
            jax.block_until_ready(self.rollouts.device.params)
        return groups, batched, updated
