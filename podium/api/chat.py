"""`podium chat`: a conversation with a run's weights, or any model, in the terminal."""

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from podium.api.answers import open_model, run_of
from podium.files import as_path
from podium.models.source import read_architecture, resolve
from podium.observe.run_dir import read_config
from podium.observe.text import printable
from podium.rollout.request import Completion, Request, SamplingParams
from podium.train.feed import request_seed
from podium.train.generate import Rollouts

CHUNK_TOKENS = 16
"""Tokens that are decoded before they are shown; each chunk reads the conversation again."""
CONTEXT_TOKENS = 2048
"""The longest conversation, where the model allows as many."""
HELP = "Enter alone: log-probabilities of the last answer;  /new: forget the conversation;  /exit or Ctrl-D: leave"


class Conversation:
    """Messages so far, and an engine that answers them."""

    def __init__(
        self, rollouts: Rollouts, *, system_prompt: str | None, temperature: float, max_new_tokens: int, seed: int
    ) -> None:
        """Nothing is said yet but the system prompt, if there is one."""
        self.rollouts, self.temperature, self.max_new_tokens, self.seed = rollouts, temperature, max_new_tokens, seed
        self._first = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.restart()

    def restart(self) -> None:
        """Forget what was said."""
        self.messages = list(self._first)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        """Of the last answer."""

    def answer(self, text: str) -> Iterator[str]:
        """The pieces of the answer to a message, as they come. Raises ValueError where it does not fit any more."""
        tokenizer = self.rollouts.feed.tokenizer
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = tokenizer.encode_messages(asked)
        room = self.rollouts.config.rollout.max_prompt_tokens
        if len(prompt) > room:
            raise ValueError(f"the conversation has {len(prompt)} tokens, and {room} fit; /new begins another")
        self.tokens, self.logprobs, said = [], [], ""
        while True:
            chunk = self._chunk((*prompt, *self.tokens), min(CHUNK_TOKENS, self.max_new_tokens - len(self.tokens)))
            self.tokens += chunk.tokens.tolist()
            self.logprobs += chunk.sampled_logprobs.tolist()
            ended = chunk.finish_reason == "stop" or len(self.tokens) >= self.max_new_tokens
            ended = ended or len(prompt) + len(self.tokens) > room
            whole = tokenizer.decode(self.tokens)
            if ended or not whole.endswith("\ufffd"):  # else the rest of a character is to come
                yield whole[len(said) :]
                said = whole
            if ended:
                break
        self.messages = [*asked, {"role": "assistant", "content": said}]

    def _chunk(self, prompt: tuple[int, ...], most: int) -> Completion:
        sampling = SamplingParams(max_new_tokens=most, temperature=self.temperature)
        seed = request_seed(self.seed, "chat", len(prompt))
        ((completion,),), _ = self.rollouts.engine.generate([Request(prompt=prompt, sampling=sampling, seed=seed)])
        return completion


def chat(
    model: str,
    *,
    system_prompt: str | None,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    console: Console,
    lines: Iterable[str],
) -> int:
    """Answer lines until they end, and print the answers as they come; the exit status of `podium chat`.

    Raises ValueError where the model cannot be used.
    """
    run = run_of(model)
    positions = read_architecture(resolve(read_config(as_path(run.run)).model if run else model)).max_positions
    context = min(positions, CONTEXT_TOKENS) - CHUNK_TOKENS
    settings = {"rollout__max_prompt_tokens": context, "rollout__refill_steps": CHUNK_TOKENS}
    with open_model(model, max_new_tokens=CHUNK_TOKENS, slots=1, **settings) as rollouts:
        options = {"system_prompt": system_prompt, "temperature": temperature, "max_new_tokens": max_new_tokens}
        conversation = Conversation(rollouts, seed=seed, **options)
        console.print(Text(HELP, style="dim"))
        for line in lines:
            command = line.strip()
            if command == "/exit":
                break
            if command == "/new":
                conversation.restart()
            elif not command:
                pieces = rollouts.feed.tokenizer.pieces(conversation.tokens)
                console.print(shaded(pieces, conversation.logprobs), soft_wrap=True)
            else:
                _say(conversation, line.rstrip("\n"), console)
    return 0


def typed(console: Console) -> Iterator[str]:
    """The lines that are typed, or piped in, until they end or Ctrl-C."""
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            yield console.input(prompt, markup=False)


def _say(conversation: Conversation, text: str, console: Console) -> None:
    try:
        for piece in conversation.answer(text):
            console.print(Text(harmless(piece), style="cyan"), end="", soft_wrap=True)
        console.print()
    except ValueError as error:
        console.print(Text(str(error), style="red"))


def harmless(text: str) -> str:
    """The text in which nothing but line ends moves or colours a terminal."""
    return "\n".join(printable(line) for line in text.split("\n"))


def shaded(pieces: Sequence[str], logprobs: Sequence[float]) -> Text:
    """Tokens with their probability in percent, the unlikely ones marked, and the mean log-probability."""
    if not pieces:
        return Text("nothing was answered yet", style="dim")
    text = Text()
    for piece, logprob in zip(pieces, logprobs, strict=True):
        share = math.exp(logprob)
        style = "bold red" if share < 0.1 else "yellow" if share < 0.5 else ""
        text.append(printable(piece), style=style).append(f"{share:.0%} ", style="dim")
    return text.append(f"\nmean log-probability {float(np.mean(logprobs)):.3f} of {len(pieces)} tokens", style="dim")
