"""Builds the token server's replies: text as it becomes certain, log-probabilities, calls of tools. No jax.

Two forms: the text of `/v1/completions` and the messages of `/v1/chat/completions`, whole or in pieces. A piece holds
back what may still become something else: half of a character, or the beginning of a stop string.
"""

import dataclasses
import itertools
import secrets
from collections.abc import Sequence
from typing import Protocol

from podium.models.text.chat_format import ToolSchema
from podium.models.text.tokenizer import Tokenizer
from podium.rollout.answer import CHANNEL
from podium.sampling.conversations.dialogue import ToolFormat
from podium.serve.documents import CHAT, TEXT, Document, Kind, call_of, delta_choice, message_choice, tokens_choice
from podium.serve.engine_thread import Piece

HALF = "\ufffd"
"""What an incomplete character is decoded to."""
Choice = Document


class TextStream:
    """The text of one answer, as its tokens come."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        """`stop` are the strings at which the text ends, without them."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._whole = CHANNEL in tokenizer.special_tokens
        """Whether nothing is certain before the end, since only one of an answer's channels is its text."""
        self._tokens: list[int] = []
        self._begin = self._read = 0
        self._text = ""
        self._sent = 0

    def add(self, piece: Piece) -> str:
        """The text that is certain since the last piece; after the last one, all of it has been returned."""
        if piece.completion is not None:
            self._text = end_at(piece.completion.text, self._stop)
            certain = len(self._text)
        elif self._whole:
            return ""
        else:
            self._decode(piece.tokens)
            certain = len(self._text) - self._held()
        new = self._text[self._sent : certain]
        self._sent += len(new)
        return new

    def _decode(self, tokens: Sequence[int]) -> None:
        """Decode new tokens behind those of the last piece, since a token's text may depend on the one before it."""
        self._tokens += tokens
        before = self._tokenizer.decode(self._tokens[self._begin : self._read])
        after = self._tokenizer.decode(self._tokens[self._begin :])
        if not after.endswith(HALF):
            self._text += after[len(before) :]
            self._begin, self._read = self._read, len(self._tokens)

    def _held(self) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        ends = (n for stop in self._stop for n in range(len(stop) - 1, 0, -1) if self._text.endswith(stop[:n]))
        return max(ends, default=0)


def end_at(text: str, stop: Sequence[str]) -> str:
    """The text up to the first stop string."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


class Form(Protocol):
    """How one route writes answers."""

    kind: Kind
    answers: bool
    """Whether anything is written behind the prompt."""

    @property
    def only_whole(self) -> bool:
        """Whether it must have each answer in one piece."""
        ...

    def choice(self, piece: Piece, text: str) -> Choice:
        """A whole answer, from a piece with all its tokens."""
        ...

    def delta(self, piece: Piece, text: str) -> Choice | None:
        """A piece of an answer; None: nothing to say yet."""
        ...


@dataclasses.dataclass(kw_only=True)
class CompletionForm:
    """Answers of `/v1/completions`."""

    tokenizer: Tokenizer
    logprobs: int | None
    """None: without; 1: with the likeliest token, which a greedy answer's own tokens are."""
    kind = TEXT
    only_whole = False
    answers: bool = True
    offsets: dict[int, int] = dataclasses.field(default_factory=dict)
    """Length of the text of the tokens so far, by answer."""

    def choice(self, piece: Piece, text: str) -> Choice:
        """The text, and its tokens with their log-probabilities."""
        logprobs = None if self.logprobs is None else self._logprobs(piece)
        reason = None if piece.completion is None else piece.completion.finish_reason
        return {"index": piece.number, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def delta(self, piece: Piece, text: str) -> Choice | None:
        """The same of a piece."""
        if not text and piece.completion is None and self.logprobs is None:
            return None
        return self.choice(piece, text)

    def _logprobs(self, piece: Piece) -> dict[str, object]:
        pieces = self.tokenizer.pieces(piece.tokens)
        offset = self.offsets.get(piece.number, 0)
        offsets: list[int] = []
        for each in pieces:
            offsets.append(offset)
            offset += len(each)
        self.offsets[piece.number] = offset
        pairs = zip(pieces, piece.logprobs, strict=True)
        return {
            "tokens": pieces,
            "token_logprobs": piece.logprobs,
            "top_logprobs": [{token: logprob} for token, logprob in pairs] if self.logprobs else None,
            "text_offset": offsets,
        }


@dataclasses.dataclass(kw_only=True)
class EchoForm(CompletionForm):
    """Answers of `/v1/completions` that repeat their prompt, with the log-probabilities of its tokens."""

    prompts: Sequence[tuple[str, tuple[int, ...]]]
    """Text and tokens of each request's prompt; a request has one answer."""

    def choice(self, piece: Piece, text: str) -> Choice:
        """Prompt and answer; where nothing is to be answered, the prompt alone."""
        before, tokens = self.prompts[piece.number]
        if not self.answers:
            piece, text = piece._replace(tokens=[], logprobs=[]), ""
        return super().choice(piece, before + text) | {"logprobs": self._echoed(piece, tokens)}

    def _echoed(self, piece: Piece, prompt: Sequence[int]) -> dict[str, object] | None:
        """Log-probabilities of the prompt's tokens, then of the answer's; the first token has none."""
        if self.logprobs is None:
            return None
        assert piece.completion is not None, "it comes whole"
        scores = piece.completion.prompt_scores
        assert scores is not None, "they were asked for"
        own = [None, *scores.logprobs[1:].tolist()]
        best = [None, *map(self._named, scores.best_tokens[1:].tolist(), scores.best_logprobs[1:].tolist())]
        drawn = [*map(self._named, piece.tokens, piece.logprobs)]  # greedy, and so the likeliest
        pieces = self.tokenizer.pieces([*prompt, *piece.tokens])
        return {
            "tokens": pieces,
            "token_logprobs": [*own, *piece.logprobs],
            "top_logprobs": [*best, *drawn] if self.logprobs else None,
            "text_offset": [0, *itertools.accumulate(map(len, pieces[:-1]))],
        }

    def _named(self, token: int, logprob: float) -> dict[str, float]:
        return {self.tokenizer.pieces([token])[0]: logprob}


@dataclasses.dataclass(kw_only=True)
class ChatForm:
    """Answers of `/v1/chat/completions`."""

    tokenizer: Tokenizer
    logprobs: bool
    tools: Sequence[ToolSchema]
    format: ToolFormat | None
    """Reads calls; None without tools."""
    begun: str = ""
    """The beginning of the answer that was given to the model, a call that it must make."""
    thinking: bool = False
    """Whether the prompt has opened a thought."""
    parallel: bool = True
    """Whether an answer may have several calls; otherwise the first is taken."""
    kind = CHAT
    answers = True

    @property
    def only_whole(self) -> bool:
        """With tools: only then their calls can be read."""
        return self.format is not None

    def choice(self, piece: Piece, text: str) -> Choice:
        """The message, with the calls in it."""
        content, calls, reason = self._read(piece, text)
        return message_choice(piece.number, content, calls, reason, self._logprobs(piece))

    def delta(self, piece: Piece, text: str) -> Choice | None:
        """A piece of the message."""
        content, calls, reason = self._read(piece, text)
        if not (content or piece.first or piece.completion is not None or self.logprobs):
            return None
        return delta_choice(piece.number, content, calls, reason, self._logprobs(piece), first=piece.first)

    def _read(self, piece: Piece, text: str) -> tuple[str | None, list[Document], str | None]:
        """What an answer says, its calls, and why it ended."""
        completion = piece.completion
        if completion is None or self.format is None:
            return text, [], None if completion is None else completion.finish_reason
        found = self.format.read(
            text,
            completion.tokens.tolist(),
            self.tools,
            begun=self.begun,
            thinking=self.thinking,
            cut=completion.finish_reason == "length",
        )
        if not found.calls:
            return self.begun + text, [], completion.finish_reason
        called = found.calls if self.parallel else found.calls[:1]
        calls = [call_of(secrets.token_hex(5)[:9], call.name, call.arguments) for call in called]
        return found.said or None, calls, "tool_calls"

    def _logprobs(self, piece: Piece) -> dict[str, object] | None:
        if not self.logprobs:
            return None
        pieces = self.tokenizer.pieces(piece.tokens)
        content = [
            {
                "token": text,
                "logprob": logprob,
                "bytes": None if HALF in text else list(text.encode()),
                "top_logprobs": [],
            }
            for text, logprob in zip(pieces, piece.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def token_choice(piece: Piece) -> Choice:
    """A whole answer of `/inference/v1/generate`."""
    assert piece.completion is not None, "it comes whole"
    return tokens_choice(piece.number, piece.tokens, piece.logprobs, piece.completion.finish_reason)
