"""A task of your own: questions that are generated, and a grade of each answer. About five minutes on two CPU cores."""

import podium


class Larger:
    """Two numbers, of which the larger is asked for."""

    system_prompt = None

    def __init__(self, source: podium.TaskSource) -> None:
        """Nothing is read: the questions are made."""

    def prompts(self, split: str) -> list[podium.Prompt]:
        """Every second pair is held out."""
        pairs = [(a, b) for a in range(10) for b in range(10) if a != b and (a + b) % 2 == (split == "eval")]
        asked = "Which number is larger, {} or {}? Answer with only the number."
        return [
            podium.Prompt(id=f"{split}/{a}-{b}", question=asked.format(a, b), answer=str(max(a, b))) for a, b in pairs
        ]

    def grade(self, prompt: podium.Prompt, completion: str) -> float:
        """1 for the number alone, half of it where the answer begins with the number."""
        text = completion.strip()
        return 1.0 if text == prompt.answer else 0.5 * text.startswith(prompt.answer)


if __name__ == "__main__":
    run = podium.grpo(
        "demo",
        Larger,
        rewards=["correct"],
        steps=20,
        prompts_per_step=8,
        group_size=8,
        eval={"questions": 20},
        rollout={"max_prompt_tokens": 48, "max_new_tokens": 16},
        train={"remat": "none", "optimizer": {"learning_rate": 4e-5}},
    )
    print(run, [line["eval/accuracy"] for line in run.metrics if "eval/accuracy" in line])
