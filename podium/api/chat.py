"""`podium chat`: a conversation with a run's weights, or any model, in the terminal."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from podium.api.answers import max_positions, open_model
from podium.models.text.chat_format import Message
from podium.rollout.request import Key, Request
from podium.rollout.turn_format import TurnFormat, TurnFormatError
from podium.run.answering import Answering, Asked
from podium.sampling.feed import request_seed
from podium.sampling.sampler import Sampler
from podium.terminal import harmless, printable

STEPS_SHOWN = 4
"""Decode steps between updates of the shown text."""
CONTEXT_TOKENS = 2048
"""Maximum length of a conversation in tokens, if the model allows it."""
HELP = "Enter: log-probabilities of the last answer; /new: new conversation; /exit or Ctrl-D: leave"


class Conversation:
    """A conversation's messages, and an engine that answers them and keeps their keys and values between turns."""

    def __init__(
        self,
        rollouts: Sampler,
        answering: Answering,
        *,
        seed: int,
        notice: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Start with the system prompt, if any; `notice` is called with each notice to the user."""
        self.rollouts = rollouts
        self.sampling = answering.sampling
        self.seed = seed
        self._notice = notice
        self._first = answering.messages([])
        self._key: Key | None = None
        self._turns = self._turn_format()
        self.restart()

    def restart(self) -> None:
        """Forget all messages except the system prompt."""
        self._forget()
        self.messages: list[Message] = list(self._first)
        self.tokens: list[int] = []
        """Tokens of the last answer."""
        self.logprobs: list[float] = []
        """Log-probabilities of `tokens`."""

    def answer(self, text: str) -> Iterator[str]:
        """Yield pieces of the answer as they are generated. Raises ValueError if the conversation no longer fits."""
        tokenizer = self.rollouts.feed.tokenizer
        question = {"role": "user", "content": text}
        new = self._unread(question)
        read = 0 if self._key is None else len(self.rollouts.engine.ledger(self._key))
        asked = read + len(new)
        engine = self.rollouts.engine
        room = engine.config.longest - 1
        if asked > room:
            raise ValueError(f"the conversation has {asked} tokens, and only {room} fit; /new starts another one")
        self.tokens = []
        self.logprobs = []
        said = ""
        completion = None
        try:
            key = self._draw(new, min(self.sampling.max_new_tokens, engine.config.longest - asked), asked)
            while completion is None:
                engine.step()
                completion = dict(engine.poll()).get(key)
                drawn = engine.drawn(key).tokens
                whole = tokenizer.decode(drawn)
                if completion is not None or not whole.endswith("\ufffd"):  # otherwise a character is incomplete
                    yield whole[len(said) :]
                    said = whole
            self.tokens = completion.tokens.tolist()
            self.logprobs = completion.sampled_logprobs.tolist()
        except BaseException:
            self._forget()
            raise
        self.messages = [*self.messages, question, {"role": "assistant", "content": said}]

    def _turn_format(self) -> TurnFormat | None:
        """The format for continuing answers; None, with a notice, if the chat template does not support that."""
        tokenizer = self.rollouts.feed.tokenizer
        try:
            return TurnFormat(tokenizer.chat_format, stop_tokens=tokenizer.eos_tokens)
        except TurnFormatError as error:
            self._notice(f"the whole conversation is processed again at each turn: {error}")
            return None

    def _unread(self, question: Message) -> list[int]:
        """Encode the tokens to append to the engine's sequence so that the model answers `question` next.

        Without a sequence in the engine, these are the tokens of the whole conversation.
        """
        if self._turns is None:
            self._forget()
        if self._turns is None or self._key is None:
            return self.rollouts.feed.tokenizer.encode_messages([*self.messages, question])
        ended = self.tokens[-1] in self.rollouts.feed.tokenizer.eos_tokens
        drawn_end = self.tokens[-1] if ended else None
        return self._turns.reply([question], history=self.messages[:-1], drawn_end=drawn_end)

    def _draw(self, new: list[int], most: int, length: int) -> Key:
        """Request up to `most` tokens after appending `new`, which make the conversation `length` tokens long."""
        engine = self.rollouts.engine
        sampling = dataclasses.replace(self.sampling, max_new_tokens=most)
        seed = request_seed(self.seed, "chat", length)
        if self._key is None:
            request = Request(prompt=tuple(new), sampling=sampling, seed=seed, keep=True)
            self._key = Key(engine.submit(request), 0)
        else:
            engine.extend(self._key, new, sampling, seed=seed, keep=True)
        return self._key

    def _forget(self) -> None:
        if self._key is not None:
            self.rollouts.engine.cancel(self._key)
            self._key = None


def chat(model: str, *, asked: Asked, seed: int, console: Console, lines: Iterable[str]) -> int:
    """Answer lines until they end, printing each answer as it is generated; returns the exit status of `podium chat`.

    A run answers as in its training, except for what `asked` overrides.

    Raises ValueError if the model is unusable.
    """
    context = min(max_positions(model), CONTEXT_TOKENS)
    shown = {"rollout.refill_steps": STEPS_SHOWN}
    with open_model(model, asked=asked, slots=1, context=context, settings=shown) as opened:
        rollouts = opened.rollouts
        conversation = Conversation(
            rollouts,
            opened.answering,
            seed=seed,
            notice=lambda line: console.print(Text(harmless(line), style="dim")),
        )
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
    """Yield the lines typed or piped in, until they end or Ctrl-C."""
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
        console.print(Text(harmless(str(error)), style="red"))


def shaded(pieces: Sequence[str], logprobs: Sequence[float]) -> Text:
    """Tokens with their probabilities in percent, unlikely ones highlighted, and the mean log-probability."""
    if not pieces:
        return Text("no answer yet", style="dim")
    text = Text()
    for piece, logprob in zip(pieces, logprobs, strict=True):
        share = math.exp(logprob)
        style = "bold red" if share < 0.1 else "yellow" if share < 0.5 else ""
        text.append(printable(piece), style=style).append(f"{share:.0%} ", style="dim")
    return text.append(f"\nmean log-probability {float(np.mean(logprobs)):.3f} of {len(pieces)} tokens", style="dim")
