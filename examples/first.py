"""A first run: SmolLM2-135M learns to answer sums, with few words. README shows these lines."""

import podium

sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
rows = [{"question": f"What is {a} + {b}? Answer with only the number.", "answer": a + b} for a, b in sums]


def short(num_tokens: int) -> float:
    """A reward of one's own, beside 1 for the right answer: the shorter, the more, up to 0.1."""
    return 0.1 * (1 - num_tokens / 16)


sizes = {"max_prompt_tokens": 48, "max_new_tokens": 16}
learning = {"remat": "none", "optimizer": {"learning_rate": 4e-5}}
rewards = [podium.math_equal, short]
run = podium.grpo("demo", rows, rewards=rewards, steps=6, prompts_per_step=8, rollout=sizes, train=learning)
print([round(line["train-reward/total/mean"], 2) for line in run.metrics])
