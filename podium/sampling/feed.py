"""The sequence of prompts that a run answers, as token ids, each with the seed of its completions."""

import dataclasses
import hashlib
from collections.abc import Sequence

from podium.config.message_template import template_names
from podium.models.text.chat_format import Message
from podium.models.text.tokenizer import Tokenizer
from podium.plain import clean_texts
from podium.run.run_spec import PromptSpec
from podium.sampling.conversations.dialogue import Dialogue, with_calls
from podium.sampling.privileged import privileged_messages
from podium.tasks.conversations.environment_forms import Conversing, conversing
from podium.tasks.mixture import TaskMixture, TaskPrompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt that fits in `max_tokens`, and the seed of its completions."""

    prompt: TaskPrompt
    tokens: tuple[int, ...]
    """The prompt's token ids; empty if the environment gives the first message."""
    seed: int
    number: int = 0
    """Index in the run's sequence of prompts; 0 for evaluation questions."""
    skipped: int = 0
    """Number of prompts skipped before this one because they were too long."""


class Feed:
    """The prompts of a run, in order; its cursor is saved with the run."""

    def __init__(self, spec: PromptSpec, tokenizer: Tokenizer) -> None:
        """Create the tasks; data is read on first use.

        Raises:
            ValueError: a task is invalid, or the model's chat template does not allow its conversations.
        """
        self.spec, self.tokenizer = spec, tokenizer
        self.tasks = TaskMixture(spec.tasks, seed=spec.seed, data=spec.data)
        self.conversing: list[Conversing | None] = [conversing(task) for task in self.tasks.levels]
        """How each task's conversations are created; None if its prompts are answered once."""
        self.dialogues = [
            None if held is None else Dialogue(label, tokenizer, held.tools)
            for label, held in zip(self.tasks.labels, self.conversing, strict=True)
        ]
        """The chat format of each task's conversations; None if its prompts are answered once."""

    def next(self, count: int) -> list[EncodedPrompt]:
        """The next `count` prompts that fit and are not retired. Raises ValueError if no prompt fits."""
        prompts: list[EncodedPrompt] = []
        passed: set[tuple[int, str]] = set()  # task and id of prompts that are too long or retired
        skipped = 0
        while len(prompts) < count:
            number = self.tasks.cursor
            (prompt,) = self.tasks.next(1)
            retired = self.tasks.is_retired(prompt)
            encoded = None if retired else self._encode(prompt, number)
            if encoded is not None:
                prompts.append(dataclasses.replace(encoded, skipped=skipped))
                skipped = 0
                continue
            skipped += not retired
            passed.add((prompt.task, prompt.prompt.id))
            if len(passed) == sum(self.tasks.num_prompts().values()):
                limit, own = self.spec.max_tokens, self.spec.privileged
                also = "" if own is None else f" and, as the {own.role} reads it, in {own.key} {own.max_tokens}"
                raise ValueError(f"no prompt fits in rollout.max_prompt_tokens {limit}{also}; raise what is too low")
        return prompts

    def at(self, number: int, level: int | None = None) -> EncodedPrompt:
        """The prompt at this index in the run's sequence; it must be short enough for `rollout.max_prompt_tokens`.

        `level` is the curriculum level that the prompt was drawn from.
        """
        encoded = self._encode(self.tasks.prompt_at(number, level), number)
        assert encoded is not None, "a prompt that was drawn fits"
        return encoded

    def _encode(self, prompt: TaskPrompt, number: int) -> EncodedPrompt | None:
        encoded = self.encode(prompt, request_seed(self.spec.seed, "train", number))
        own = self.spec.privileged
        if encoded is None or (own and not self._fits(prompt, self.privileged(prompt), own.key, own.max_tokens)):
            return None
        return dataclasses.replace(encoded, number=number)

    def encode(self, prompt: TaskPrompt, seed: int) -> EncodedPrompt | None:
        """Tokenise a prompt; None if it is too long and long prompts are dropped."""
        tokens = self._tokens(prompt, prompt_messages(prompt))
        if not self._fits(prompt, tokens, "rollout.max_prompt_tokens", self.spec.max_tokens):
            return None
        return EncodedPrompt(prompt=prompt, tokens=tokens, seed=seed)

    def num_tokens(self, prompt: TaskPrompt) -> int:
        """Number of tokens of a prompt, including chat template and tools, even if it is too long."""
        return len(self._tokens(prompt, prompt_messages(prompt)))

    def privileged(self, prompt: TaskPrompt) -> tuple[int, ...]:
        """The tokens of a model's own prompt for a prompt.

        Raises ValueError if it cannot be made from the prompt's row.
        """
        assert self.spec.privileged is not None, "a model has its own prompts"
        messages = privileged_messages(self.spec.privileged, prompt.prompt, prompt_messages(prompt))
        return self._tokens(prompt, messages)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of tasks' data that a model's own prompts are made from."""
        return () if self.spec.privileged is None else template_names(self.spec.privileged.template)

    def check(self) -> None:
        """Raise ValueError if a model has its own prompts and they cannot be made from the first row of a task."""
        for prompt in self.tasks.first_prompts() if self.spec.privileged is not None else ():
            self.privileged(prompt)

    def _tokens(self, prompt: TaskPrompt, messages: Sequence[Message]) -> tuple[int, ...]:
        dialogue = self.dialogues[prompt.task]
        try:
            read = with_calls(self.tokenizer.chat_format, messages)
            if dialogue is None:
                return tuple(self.tokenizer.encode_messages(read))
            # The first message may still come from the environment.
            return dialogue.prompt(read) if any(each["role"] == "user" for each in read) else ()
        except ValueError as error:
            raise ValueError(f"prompt {prompt.prompt.id}: {error}") from error

    def _fits(self, prompt: TaskPrompt, tokens: tuple[int, ...], key: str, limit: int) -> bool:
        """Whether a prompt has at most `limit` tokens. If not, raises ValueError unless long prompts are dropped."""
        if len(tokens) > limit and self.spec.long_prompts == "error":
            raise ValueError(
                f"prompt {prompt.prompt.id} has {len(tokens)} tokens and {key} is {limit}; raise it, or set"
                " rollout.long_prompts to drop"
            )
        return len(tokens) <= limit


def prompt_messages(prompt: TaskPrompt, first: str | None = None) -> list[Message]:
    """The conversation for the model to continue; starts with the task's system prompt unless the row has its own.

    If the row has no question, there is no user message: the environment begins. `first` is the text that the
    environment adds.
    """
    question = prompt.prompt.question
    messages: list[Message] = list(
        prompt.prompt.messages or ([{"role": "user", "content": question}] if question else [])
    )
    if prompt.system_prompt and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": prompt.system_prompt})
    if first is not None and messages and messages[-1].get("role") == "user":
        messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{first}"}
    elif first is not None:
        messages.append({"role": "user", "content": first})
    return clean_texts([dict(message) for message in messages])


def request_seed(seed: int, purpose: str, index: int) -> int:
    """The seed of a request, 31 bits: a hash of the run's seed, the request's purpose, and its index."""
    digest = hashlib.sha256(f"{seed} {purpose} {index}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
