# pyright: reportMissingImports=false
"""Tunix's own GRPO learner on the model and the sizes of benches.tunix, a step for each line that comes in.

    python -m benches.children.tunix_step SIZES        (JSON of benches.tunix.Sizes; benches.tunix calls it)

The learner is as it comes. Clocks are around two methods of its cluster: `generate` (prefill, decode, text) and
`update_actor` (the optimizer step), and around the whole step; a line of JSON for each. No token ends a completion,
so all have their full length.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen2 import model as qwen2
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from benches.own_step import Clock
from benches.tunix import Sizes, numbers_of, share_of_even, text_of

FOR_EVER = 10**9
STD = 0.02
"""Of matrices, as in Podium's."""


class Numbers:
    """The tokenizer that Tunix asks for: a number is its own token."""

    def __init__(self, vocab: int) -> None:
        self._beyond = vocab

    def encode(self, text: str, **_: Any) -> list[int]:
        """The numbers of a text."""
        return numbers_of(text)

    def decode(self, tokens: Any, **_: Any) -> str:
        """The text of numbers."""
        return text_of(map(int, tokens))

    def bos_id(self) -> None:
        """None: prompts begin with their first number."""

    def eos_id(self) -> int:
        """A token that the model does not have."""
        return self._beyond

    def pad_id(self) -> int:
        """Tunix takes it for padding where it is drawn, too, and does not train on it."""
        return 0


class Side:
    """The learner, its clock, and how many tokens it drew and trained on in this step."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.clock = sizes, Clock()
        self.drawn = self.trained = 0
        mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        self.actor = random_model(sizes)
        config = ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adamw(sizes.learning_rate), eval_every_n_steps=FOR_EVER, max_steps=FOR_EVER
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=sizes.completion,
                max_prompt_length=sizes.prompt,
                kv_cache_size=sizes.prompt + sizes.completion,  # the least that it takes
                temperature=1.0,
                top_p=1.0,
            ),
        )
        cluster = RLCluster(actor=self.actor, reference=None, tokenizer=Numbers(sizes.vocab), cluster_config=config)
        self._watch(cluster, "generate", "rollout", self._count_drawn)
        self._watch(cluster, "update_actor", "update", self._count_trained)
        self.learner = GRPOLearner(
            cluster,
            reward_fns=lambda prompts, completions, **_: [share_of_even(text) for text in completions],
            algo_config=GRPOConfig(num_generations=sizes.group, beta=0.0),
        )

    def run(self) -> None:
        """Train, a step for each line of the standard input, until it is closed."""
        self.learner.train(self._prompts())

    def _prompts(self) -> Iterator[dict[str, np.ndarray]]:
        """The prompts of each step; when the next are asked for, all that the step does is done."""
        random, sizes = np.random.default_rng(0), self.sizes
        for _ in sys.stdin:
            numbers = random.integers(1, sizes.vocab, (sizes.prompts, sizes.prompt))
            with self.clock("step"):
                yield {"prompts": np.array([text_of(row) for row in numbers])}
            tokens = {"completion_tokens": self.drawn, "trained_tokens": self.trained}
            print(json.dumps({"seconds": self.clock.read(), **tokens}), flush=True)
            self.drawn = self.trained = 0

    def _watch(self, cluster: RLCluster, method: str, name: str, count: Callable[[Any, Any], None]) -> None:
        inner = getattr(cluster, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.clock(name):
                made = inner(*args, **kwargs)
                jax.block_until_ready(nnx.state(self.actor))
            count(args, made)
            return made

        setattr(cluster, method, call)

    def _count_drawn(self, _: Any, made: Any) -> None:
        self.drawn += sum(len(tokens) for tokens in made.tokens)

    def _count_trained(self, given: Any, _: Any) -> None:
        self.trained += sum(int(np.sum(example.completion_mask)) for example in given[0])


def random_model(sizes: Sizes) -> Any:
    """A Qwen2 whose matrices are normal of STD: Tunix's own beginning has zeros in its MLPs."""
    model = qwen2.Qwen2(
        qwen2.ModelConfig(
            num_layers=sizes.layers,
            vocab_size=sizes.vocab,
            embed_dim=sizes.width,
            hidden_dim=sizes.mlp_width,
            num_heads=sizes.heads,
            head_dim=sizes.width // sizes.heads,
            num_kv_heads=sizes.kv_heads,
            rope_theta=1_000_000,
            norm_eps=1e-6,
            use_tied_embedding=True,
        ),
        rngs=nnx.Rngs(0),
    )
    random = np.random.default_rng(0)

    def draw(value: jax.Array) -> jax.Array:
        matrix = value.ndim > 1
        return jax.numpy.asarray(STD * random.standard_normal(value.shape), value.dtype) if matrix else value

    nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.Param)))
    return model


def main(sizes: str) -> None:
    """Say how many parameters there are, then step."""
    side = Side(Sizes(**json.loads(sizes)))
    params = jax.tree.leaves(nnx.state(side.actor, nnx.Param))
    print(json.dumps({"parameters": sum(each.size for each in params)}), flush=True)
    side.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
