"""How good is a model before training? A minute on two CPU cores."""

import podium

SUMS = [(3, 4), (3, 8), (5, 4), (5, 8)]
ROWS = [{"problem": f"What is {a} + {b}? Answer with only the number.", "solution": a + b} for a, b in SUMS]

if __name__ == "__main__":
    result = podium.evaluate(
        "demo",
        ROWS,
        question="problem",
        answer="solution",
        eval={"samples": 4, "greedy": False},
        rollout={"max_prompt_tokens": 48, "max_new_tokens": 16},
    )
    (scores,) = result.tasks.values()
    low, high = scores.accuracy_interval
    print(f"accuracy {result.accuracy:.2f} ({low:.2f} to {high:.2f}), one of 4 right: {scores.pass_at_k:.2f}")
    for line in result.answers:
        print(line["question"], "->", line["completions"][0]["text"])
