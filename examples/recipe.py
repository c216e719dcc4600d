"""An algorithm of your own: its advantages in numpy, its loss in JAX. About five minutes on two CPU cores."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import podium


def ranks(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Advantages from the order of the rewards in their group alone, [N, G]: -1 for the least, 1 for the most."""
    below = (rewards[:, None, :] < rewards[:, :, None]).sum(axis=2)
    above = (rewards[:, None, :] > rewards[:, :, None]).sum(axis=2)
    return ((below - above) / (rewards.shape[1] - 1)).astype(np.float32)


def one_sided(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    segments: jax.Array,
    mask: jax.Array,
    *,
    clip_high: float,
) -> jax.Array:
    """The loss of each token, [B, T]: the likelihood ratio is bounded from above alone."""
    ratio = jnp.exp(logprobs - old_logprobs)
    return -jnp.minimum(ratio, 1 + clip_high) * advantages


SUMS = [(a, b) for a in range(1, 10) for b in range(1, 10)]

ranked = podium.Recipe(advantage=partial(ranks), mean="token", clip_high=0.3)

if __name__ == "__main__":
    run = podium.grpo(
        "demo",
        [{"question": f"What is {a} + {b}? Answer with only the number.", "answer": a + b} for a, b in SUMS],
        algorithm={"recipe": ranked, "loss": one_sided},
        steps=20,
        prompts_per_step=8,
        group_size=8,
        rollout={"max_prompt_tokens": 48, "max_new_tokens": 16},
        train={"remat": "none", "optimizer": {"learning_rate": 4e-5}},
    )
    print([round(line["train-reward/total/mean"], 2) for line in run.metrics])
