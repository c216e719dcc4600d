"""Completions taken from the data instead of sampled: the training data of `algorithm.recipe: sft`.

Each completion becomes a group of one with reward 1, so batches and updates are the same as for other recipes. For
preferences (`algorithm.recipe: dpo`), a group is a pair or a labelled completion, with rewards 1 and -1.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from podium.algorithms.recipes import DataForm
from podium.models.text.tokenizer import Tokenizer
from podium.rollout.request import Completion, RolloutStats
from podium.rollout.transcript import transcript_of
from podium.run.run_spec import DemonstrationSpec, RolloutSpec
from podium.sampling.feed import EncodedPrompt, Feed
from podium.sampling.groups import Group, StepGroups
from podium.sampling.prompt_lengths import check_prompt_lengths
from podium.tasks.mixture import TaskMixture, TaskPrompt
from podium.tasks.task import Prompt, Reward


class Demonstrations:
    """The groups of a run's steps, taken from its data."""

    def __init__(self, feed: Feed, spec: RolloutSpec, form: DataForm, per_step: int = 0) -> None:
        """`form` is the form of the rows. In a run that also samples completions, `per_step` rows are mixed into each
        step.
        """
        self.feed, self._spec, self.per_step = feed, spec, per_step
        self._form: DataForm = form

    def next(self, prompts: int) -> StepGroups:
        """The groups of the next step; raises the errors of `demonstrate`."""
        asked = self.feed.next(prompts)
        return StepGroups(*demonstrate(asked, self._spec, self.feed.tokenizer, form=self._form))

    def check(self) -> list[str]:
        """Check the data before anything is compiled; returns lines about prompts that are too long.

        Raises ValueError like `check_demonstrations`, or if no prompt of a task fits.
        """
        check_demonstrations(self.feed.tasks, self._spec, self.feed.tokenizer, form=self._form)
        return check_prompt_lengths(self.feed, self.feed.tasks.train_prompts(), "demonstrations", "are left out")


def mixed_in(own: DemonstrationSpec, spec: RolloutSpec, feed: Feed) -> Demonstrations:
    """The demonstrations that a run mixes into its steps; raises ValueError like `Feed`. `feed` has its prompts."""
    prompts = Feed(own.prompts, feed.tokenizer)
    return Demonstrations(prompts, dataclasses.replace(spec, prompts=own.prompts), "text", own.per_step)


def demonstrate(
    prompts: Sequence[EncodedPrompt], spec: RolloutSpec, tokenizer: Tokenizer, *, form: DataForm = "text"
) -> tuple[list[Group], RolloutStats]:
    """Make the groups of a step from the data, and statistics. A text that is too long is cut, with finish reason
    `length`.

    For pairs, a group has the chosen completion, with reward 1, and the rejected one, with reward -1. For labelled
    completions, it has the completion, with reward 1 or -1.

    Raises ValueError if a row has no completion, or a preference that does not fit.
    """
    groups = []
    for each in prompts:
        if form == "pair" and len(each.tokens) < 2:  # a row of the update tells pairs apart by the prompt's segment
            raise ValueError(
                f"prompt {each.prompt.prompt.id} has only one token; a pair needs a prompt of at least two"
            )
        found, rewards = _demonstration(each.prompt, spec, tokenizer, form)
        transcripts = [transcript_of(each.tokens, completion) for completion in found]
        groups.append(Group(prompt=each.prompt, transcripts=transcripts, rewards=rewards))
    return groups, RolloutStats(
        prompt_tokens=sum(len(group.tokens) for group in groups),
        completion_tokens=sum(each.num_drawn for group in groups for each in group.transcripts),
        dropped_prompts=sum(each.skipped for each in prompts),
    )


def check_demonstrations(tasks: TaskMixture, spec: RolloutSpec, tokenizer: Tokenizer, *, form: DataForm) -> None:
    """Check completions before anything is compiled: those of each task's first row, or of all rows for preferences.

    Held-out preferences are checked too if the run evaluates.

    Raises ValueError like `demonstrate`.
    """
    if form == "text":
        for each in tasks.first_prompts():
            completion_text(each.prompt, spec.prompts.tasks[each.task].completion)
        return
    evaluation = spec.evaluation
    held_out = tasks.eval_prompts(evaluation.questions) if evaluation.happens else {}
    for prompts in (*tasks.train_prompts().values(), *held_out.values()):
        for each in prompts:
            _demonstration(each, spec, tokenizer, form)


def _demonstration(
    prompt: TaskPrompt, spec: RolloutSpec, tokenizer: Tokenizer, form: DataForm
) -> tuple[list[Completion], list[Reward]]:
    """A row's completions and their rewards. Raises ValueError if the row has no completion, or is a preference that
    would be cut.
    """
    if form == "text":
        text = completion_text(prompt.prompt, spec.prompts.tasks[prompt.task].completion)
        return [_completion(text, spec, tokenizer)], [Reward(total=1.0, parts={"correct": 1.0})]
    if form == "pair":
        named = dict(zip(("chosen ", "rejected "), pair_texts(prompt.prompt), strict=True))
        totals = [1.0, -1.0]
    else:
        text, desirable = labelled_text(prompt.prompt)
        named, totals = {"": text}, [1.0 if desirable else -1.0]
    found = [_completion(text, spec, tokenizer) for text in named.values()]
    for name, each in zip(named, found, strict=True):
        if each.finish_reason == "length":
            raise ValueError(
                f"prompt {prompt.prompt.id}: its {name}completion has more than rollout.max_new_tokens"
                f" {spec.training.sampling.max_new_tokens} tokens, and a cut completion is not a valid"
                " preference; raise it, or drop the row"
            )
    return found, [Reward(total=total, parts={"preferred": total}) for total in totals]


def _completion(text: str, spec: RolloutSpec, tokenizer: Tokenizer) -> Completion:
    """Make a completion, with end token, from the text; cut at `rollout.max_new_tokens`."""
    tokens = np.array([*tokenizer.chat_format.encode_answer(text), tokenizer.eos_tokens[0]], np.int32)
    cut = tokens[: spec.training.sampling.max_new_tokens]
    nothing = np.zeros(len(cut), np.float32)
    return Completion(
        tokens=cut,
        sampled_logprobs=nothing,
        full_logprobs=nothing,
        versions=np.zeros(len(cut), np.int32),
        text=text,
        finish_reason="stop" if len(cut) == len(tokens) else "length",
    )


def pair_texts(prompt: Prompt) -> tuple[str, str]:
    """A row's chosen and rejected completion. Raises ValueError if its task has no pairs."""
    pair = tuple(prompt.metadata.get(name) for name in ("chosen", "rejected"))
    chosen, rejected = pair
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        raise ValueError(
            f"prompt {prompt.id} has no pair of completions; train on pairs with `tasks: [{{name: preferences}}]`"
        )
    return chosen, rejected


def labelled_text(prompt: Prompt) -> tuple[str, bool]:
    """A row's completion and whether it is desirable. Raises ValueError if its task has no labels."""
    text, label = (prompt.metadata.get(name) for name in ("completion", "label"))
    if not isinstance(text, str) or not isinstance(label, bool):
        raise ValueError(
            f"prompt {prompt.id} has no completion with a label; train on them with `tasks: [{{name: labelled}}]`"
        )
    return text, label


def completion_text(prompt: Prompt, column: str | None) -> str:
    """A row's completion: the named column, or else `completion`, or else the row's answer.

    Raises ValueError if the column does not exist, or is not text, or if the answer is only a part of a longer text.
    """
    row = {"answer": prompt.answer, **prompt.metadata}
    if column is not None and column not in row:
        raise ValueError(
            f"tasks.completion: prompt {prompt.id} has no column {column!r}; choose one of {', '.join(row)}"
        )
    text = row[column] if column is not None else row.get("completion")
    if column is None and text is None:
        if prompt.within:
            raise ValueError(
                f"prompt {prompt.id}: its answer {prompt.answer!r:.80} is only a part of column {prompt.within!r}; set"
                f" tasks.completion to {prompt.within} to learn the whole text, or to a column with the completion"
            )
        text = prompt.answer
    if not isinstance(text, str) or not text.strip():
        raise ValueError(
            f"prompt {prompt.id}: its completion is {text!r}, and must be text; set tasks.completion to a column of "
            "text"
        )
    return text
