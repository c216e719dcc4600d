"""Steps of rollouts whose weights stay as they are, so that what each draws is what any other draws."""

import contextlib
import json
from collections.abc import Iterator

import numpy as np
from tiny_runs import rollout_spec

from podium.config.schema import Config
from podium.observe.stats import EnvironmentStats
from podium.rollout.request import RolloutStats
from podium.rollout.transcript import Transcript
from podium.sampling.conversations.carry import Position
from podium.sampling.groups import Group
from podium.sampling.sampler import Sampler
from podium.train.setup import load_weights, make_model

CARRIED = {"in_flight": 1.5, "max_staleness": 1, "refill_steps": 2}
"""Half as many prompts again are in flight as a step takes."""


class Steps:
    """Steps of a rollout whose weights stay as they are: as with a learning rate of 0."""

    def __init__(self, config: Config, steps: int, *, anew: bool = False) -> None:
        """`anew`: each step is that of a run that was stopped and continued; environments are gone."""
        self.config, self.model = config, make_model(config)
        self.weights = load_weights(self.model, None)
        self.groups, self.stats, self.held = list[list[Group]](), list[RolloutStats](), list[EnvironmentStats]()
        self.position: Position | None = None
        if anew:
            for step in range(steps):
                with self.opened() as rollouts:
                    self.run(rollouts, step)
        else:
            with self.opened() as rollouts:
                for step in range(steps):
                    self.run(rollouts, step)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Sampler]:
        model = self.model
        spec = rollout_spec(self.config, model)
        with contextlib.closing(Sampler(spec, model.decoder, model.tokenizer, model.mesh)) as rollouts:
            if self.position is not None:
                rollouts.position = Position.read(json.loads(json.dumps(self.position.record())), rollouts.feed)
            yield rollouts

    def run(self, rollouts: Sampler, step: int) -> None:
        rollouts.load(self.weights, version=step)
        groups, stats = rollouts.answer(rollouts.feed.next(self.config.prompts_per_step))
        assert rollouts.engine.keys == [] and rollouts.engine.pages_used == 0
        self.groups.append(groups)
        self.stats.append(stats)
        self.held.append(rollouts.held)
        self.position = rollouts.position

    @property
    def failures(self) -> list[str]:
        return [failure for held in self.held for failure in held.failures]

    @property
    def transcripts(self) -> list[Transcript]:
        return [each for step in self.groups for group in step for each in group.transcripts]

    def by_prompt(self) -> dict[tuple[int, str], Group]:
        return {(group.prompt.task, group.prompt.prompt.id): group for step in self.groups for group in step}


def assert_same_draws(found: Group, expected: Group) -> None:
    """Tokens and rewards are equal, and log-probabilities nearly."""
    assert found.rewards == expected.rewards
    for one, other in zip(found.transcripts, expected.transcripts, strict=True):
        assert (one.finish_reason, one.messages) == (other.finish_reason, other.messages)
        assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.mask, other.mask)
        assert np.allclose(one.sampled_logprobs, other.sampled_logprobs, atol=1e-5)
