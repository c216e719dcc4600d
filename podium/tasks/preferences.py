"""Pairs of a chosen and a rejected answer, and labelled answers, in the forms of TRL's data sets, for `podium dpo`."""

from collections.abc import Mapping, Sequence

from podium.tasks.messages import Message, read_messages, refuse_tools, said_by_assistant, text_of
from podium.tasks.question_files import is_missing, question_of, read_rows, refuse_written_messages
from podium.tasks.task import Prompt, TaskSource

Messages = list[Message]
SIDES = ("chosen", "rejected")


class Preferences:
    """Pairs of answers to train on with `podium dpo`: rows with `prompt`, `chosen` and `rejected`.

    `prompt` is text, or a list of `{role, content}`; `chosen` and `rejected` are text, or a list with the assistant's
    message. Without `prompt`, both are whole conversations that begin with the same messages. Evaluation asks the
    prompts, and counts answers that equal the chosen one.
    """

    # columns as in https://huggingface.co/docs/trl/dataset_formats
    system_prompt: str | None = None

    def __init__(self, source: TaskSource, *, dataset: str | None = None, subset: str | None = None) -> None:
        self.source = source.on_hub(dataset, subset)

    def prompts(self, split: str) -> Sequence[Prompt]:
        """One prompt per row. Raises ValueError, which names the row, if the row is not a pair."""
        rows = read_rows("preferences", self.source, split)
        return [
            _prompt(f"preferences/{split}/{index}", f"preferences: {location}", row)
            for index, (location, row) in enumerate(rows)
        ]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if it is the chosen answer word for word, ignoring spacing."""
        return float(completion.split() == prompt.answer.split())


class Labelled:
    """Answers to train on with `podium dpo` and `loss: kto`: rows with `prompt`, `completion` and `label`.

    `label` is true if the answer is desirable, or false. `prompt` is text, or a list of `{role, content}`;
    `completion` is text, or a list with the assistant's message. A row in a form of `preferences` becomes two: its
    chosen answer is desirable, its rejected one is not. Evaluation asks the prompts, and counts answers that equal the
    desirable one.
    """

    system_prompt: str | None = None

    def __init__(self, source: TaskSource, *, dataset: str | None = None, subset: str | None = None) -> None:
        self.source = source.on_hub(dataset, subset)

    def prompts(self, split: str) -> Sequence[Prompt]:
        """One prompt per answer. Raises ValueError, which names the row, if the row is neither labelled nor a pair."""
        rows = read_rows("labelled", self.source, split)
        return [
            each
            for index, (location, row) in enumerate(rows)
            for each in _labelled(f"labelled/{split}/{index}", f"labelled: {location}", row)
        ]

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if it is the row's desirable answer word for word, ignoring spacing."""
        return float(prompt.answer != "" and completion.split() == prompt.answer.split())


def _labelled(prompt_id: str, location: str, row: Mapping[str, object]) -> list[Prompt]:
    """The prompts of one row: one for a labelled answer, two for a pair."""
    refuse_tools(location, row)
    paired, labelled = (any(not is_missing(row.get(name)) for name in names) for names in (SIDES, ("label",)))
    if paired and labelled:
        raise ValueError(f"{location}: the row is a pair and has a label too, so it can be read in two ways; drop one")
    if paired:
        pair = _prompt(prompt_id, location, row)
        chosen, rejected = (str(pair.metadata[side]) for side in SIDES)
        before = pair.messages or []
        return [
            _with_label(f"{prompt_id}/chosen", before, chosen, chosen, desirable=True),
            _with_label(f"{prompt_id}/rejected", before, rejected, chosen, desirable=False),
        ]
    for column in ("prompt", "completion", "label"):
        if column not in row:
            rule = "a row has prompt, completion and label, or is a pair of chosen and rejected"
            raise ValueError(f"{location}: no column {column!r}; {rule}; this row has {', '.join(row)}")
    label = row["label"]
    if not isinstance(label, bool):
        raise ValueError(f"{location}: the label is {label!r:.80}; it must be true or false")
    before = _conversation(f"{location}: column 'prompt'", row["prompt"])
    text = _answer(f"{location}: column 'completion'", row["completion"])
    if not text.strip():
        raise ValueError(f"{location}: the completion is empty; drop the row")
    return [_with_label(prompt_id, before, text, text if label else "", desirable=label)]


def _with_label(
    prompt_id: str, before: Sequence[Mapping[str, object]], text: str, answer: str, *, desirable: bool
) -> Prompt:
    data = {"completion": text, "label": desirable}
    return Prompt(id=prompt_id, question=text_of(before[-1]), answer=answer, messages=before, metadata=data)


def _prompt(prompt_id: str, location: str, row: Mapping[str, object]) -> Prompt:
    refuse_tools(location, row)
    for side in SIDES:
        if side not in row:
            raise ValueError(
                f"{location}: no column {side!r}; a pair has chosen and rejected; this row has {', '.join(row)}"
            )
    if not is_missing(row.get("prompt")):
        before = _conversation(f"{location}: column 'prompt'", row["prompt"])
        answers = [_answer(f"{location}: column {side!r}", row[side]) for side in SIDES]
    else:
        before, answers = _split(location, row)
        if before[-1]["role"] == "assistant":
            raise ValueError(f"{location}: two messages of the assistant follow each other")
    for side, answer in zip(SIDES, answers, strict=True):
        if not answer.strip():
            raise ValueError(f"{location}: the {side} answer is empty; drop the row")
    if answers[0] == answers[1]:
        raise ValueError(f"{location}: the chosen and the rejected answer are equal, {answers[0]!r:.80}; drop the row")
    pair = {"chosen": answers[0], "rejected": answers[1]}
    return Prompt(id=prompt_id, question=text_of(before[-1]), answer=answers[0], messages=before, metadata=pair)


def _conversation(what: str, value: object) -> Messages:
    """A prompt's messages; text becomes one user message."""
    question, messages = question_of(what, value)
    return messages or [{"role": "user", "content": question}]


def _answer(what: str, value: object) -> str:
    """The text of an answer, which is text or one assistant message."""
    if isinstance(value, str):
        refuse_written_messages(what, value)
        return value
    messages = read_messages(what, value)
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise ValueError(f"{what} is {value!r:.200}; with a prompt it must be text or one assistant message")
    return said_by_assistant(what, messages[0])


def _split(location: str, row: Mapping[str, object]) -> tuple[Messages, list[str]]:
    """The common messages of two conversations, and the last message of each; only the last may differ."""
    if any(isinstance(row[side], str) for side in SIDES):
        raise ValueError(f"{location}: no column 'prompt', which is required if chosen and rejected are text")
    chosen, rejected = (read_messages(f"{location}: column {side!r}", row[side]) for side in SIDES)
    lasts = (chosen[-1], rejected[-1])
    if chosen[:-1] != rejected[:-1] or len(chosen) < 2 or any(each["role"] != "assistant" for each in lasts):
        rule = "without a column 'prompt', chosen and rejected must be conversations that differ in the last message"
        raise ValueError(f"{location}: {rule} alone, which is the assistant's")
    named = zip(SIDES, lasts, strict=True)
    return chosen[:-1], [said_by_assistant(f"{location}: column {side!r}", each) for side, each in named]
