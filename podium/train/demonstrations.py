"""Completions taken from the data instead of sampled: the training data of `algorithm.recipe: sft`.

Each becomes a group of one completion with reward 1, so batches and updates are the same as for other recipes.
"""

from collections.abc import Sequence

import numpy as np

from podium.models.tokenizer import Tokenizer
from podium.rollout.request import Completion, RolloutStats
from podium.rollout.transcript import transcript_of
from podium.run.spec import RolloutSpec
from podium.tasks.task import Prompt, Reward
from podium.train.feed import EncodedPrompt
from podium.train.generate import Group


def demonstrate(
    prompts: Sequence[EncodedPrompt], spec: RolloutSpec, tokenizer: Tokenizer
) -> tuple[list[Group], RolloutStats]:
    """The groups of a step, and statistics (nothing is decoded). A text that is too long is cut, with reason `length`.

    Raises ValueError if a row has no completion.
    """
    groups = []
    for each in prompts:
        prompt = each.prompt.prompt
        text = completion_text(prompt, spec.prompts.tasks[each.prompt.task].completion)
        tokens = np.array([*tokenizer.chat_format.encode_answer(text), tokenizer.eos_tokens[0]], np.int32)
        cut = tokens[: spec.sampling.max_new_tokens]
        nothing = np.zeros(len(cut), np.float32)
        completion = Completion(
            tokens=cut,
            sampled_logprobs=nothing,
            full_logprobs=nothing,
            versions=np.zeros(len(cut), np.int32),
            text=text,
            finish_reason="stop" if len(cut) == len(tokens) else "length",
        )
        reward = Reward(total=1.0, parts={"correct": 1.0})
        groups.append(Group(prompt=each.prompt, transcripts=[transcript_of(each.tokens, completion)], rewards=[reward]))
    return groups, RolloutStats(
        prompt_tokens=sum(len(group.tokens) for group in groups),
        completion_tokens=sum(group.transcripts[0].num_drawn for group in groups),
        dropped_prompts=sum(each.skipped for each in prompts),
    )


def completion_text(prompt: Prompt, column: str | None) -> str:
    """A row's completion: the named column, or else `completion`, or else the reference answer.

    Raises ValueError if the column does not exist, or is not text.
    """
    row = {"answer": prompt.answer, **prompt.metadata}
    if column is not None and column not in row:
        raise ValueError(f"tasks.completion: prompt {prompt.id} has no column {column!r}; its row has {', '.join(row)}")
    text = row[column] if column is not None else row.get("completion", prompt.answer)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"prompt {prompt.id}: its completion is {text!r}, and must be text; set tasks.completion to its column"
        )
    return text
