"""Rewards of your own: the right number, and a little more for a short answer. About five minutes on two CPU cores."""

import podium

SUMS = [(a, b) for a in range(1, 10) for b in range(1, 10)]


def rows(*, held_out: bool) -> list[dict[str, str | int]]:
    """The sums to train on or those held out, where a + b goes together with b + a."""
    chosen = [(a, b) for a, b in SUMS if ((a - b) % 4 == 0) == held_out]
    return [{"question": f"What is {a} + {b}? Answer with only the number.", "answer": a + b} for a, b in chosen]


def short(num_tokens: int) -> float:
    """1 for a completion of one token, 0 for one of 16."""
    return 1 - num_tokens / 16


if __name__ == "__main__":
    run = podium.grpo(
        "demo",
        data=rows(held_out=False),
        eval_data=rows(held_out=True),
        rewards=[podium.math_equal, (short, 0.1)],
        steps=20,
        prompts_per_step=8,
        group_size=8,
        rollout={"max_prompt_tokens": 48, "max_new_tokens": 16},
        train={"remat": "none", "optimizer": {"learning_rate": 4e-5}},
    )
    accuracy = [line["eval/accuracy"] for line in run.metrics if "eval/accuracy" in line]
    print(f"accuracy of held-out sums: {accuracy[0]:.2f} before, {accuracy[-1]:.2f} after")
    print(run.generate(["What is 3 + 4? Answer with only the number."], max_new_tokens=16)[0].text)
