"""Generators of reasoning-gym (arXiv:2505.24760): endless puzzles, each with its own scorer."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from podium.config.errors import suggestion
from podium.tasks.task import Count, Prompt, TaskSource


class ReasoningGym:
    """Puzzles of one generator: `options: {dataset: chain_sum, config: {max_terms: 4}}`.

    Evaluation questions come from another seed, and these are excluded from training. The generator's own scorer
    grades; it may give partial credit.
    """

    system_prompt: str | None = "Think first, then write your final answer between <answer> and </answer>."

    def __init__(
        self,
        source: TaskSource,
        *,
        dataset: str,
        size: Count = 10_000,
        eval_size: Count = 200,
        seed: int = 0,
        config: dict[str, object] | None = None,
    ) -> None:
        source.refuse("reasoning_gym")
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ValueError(
                "reasoning_gym: the package is not installed: pip install 'podium-rl[gym]' (it builds a C extension)"
            ) from error
        if dataset not in DATASETS:
            raise ValueError(
                f"reasoning_gym: options.dataset: unknown data set {dataset!r}; {suggestion(dataset, DATASETS)}"
            )
        config = config or {}
        known = DATASETS[dataset][1].__dataclass_fields__.keys() - {"seed", "size"}
        for name in config.keys() - known:
            raise ValueError(f"reasoning_gym: options.config: {dataset} has no {name!r}; {suggestion(name, known)}")
        self.dataset = dataset
        try:
            self._train = reasoning_gym.create_dataset(dataset, seed=2 * seed, size=size, **config)
            self._eval = reasoning_gym.create_dataset(dataset, seed=2 * seed + 1, size=eval_size, **config)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"reasoning_gym: options.config: {dataset} rejects {config}: {error}") from error

    def prompts(self, split: str) -> Sequence[Prompt]:
        """All puzzles of a split; duplicate questions are left out."""
        evaluated = _by_question(self._eval)
        if split == "eval":
            entries = evaluated
        else:
            entries = {text: entry for text, entry in _by_question(self._train).items() if text not in evaluated}
        if not entries:
            raise ValueError(
                f"reasoning_gym: {self.dataset} makes no {split} question besides the evaluation's; lower eval_size"
            )
        return [
            Prompt(
                id=f"reasoning_gym/{self.dataset}/{split}/{index}",
                question=question,
                answer=str(entry["answer"]),
                metadata=entry,
            )
            for index, (question, entry) in enumerate(entries.items())
        ]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """The generator's score, 0 to 1, for the text in the last `<answer>`, or after `</think>`."""
        _, tag, rest = completion.rpartition("<answer>")
        answer = rest.partition("</answer>")[0] if tag else completion.rpartition("</think>")[2]
        entry = dict(prompt.metadata)
        try:
            score = self._eval.score_answer(answer.strip(), entry)
        except Exception:  # scorers parse a model's output, and some of them raise on malformed text
            self._eval.score_answer(entry["answer"], entry)  # raises if the scorer itself is broken
            return 0.0
        return min(max(float(score), 0.0), 1.0)


class _Entries(Protocol):
    """A data set of reasoning-gym."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, object]: ...


def _by_question(entries: _Entries) -> dict[str, Mapping[str, object]]:
    """The generator's entries by question text; the first entry is kept for duplicate questions."""
    found: dict[str, Mapping[str, object]] = {}
    for index in range(len(entries)):
        entry = entries[index]
        found.setdefault(str(entry["question"]), entry)
    return found
