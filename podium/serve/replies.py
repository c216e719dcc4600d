"""Builds the server's replies: text, log-probabilities and tool calls. No jax.

It has two forms, whole or streamed: the text of `/v1/completions` and the messages of `/v1/chat/completions`. Streamed
pieces hold back text that later tokens may change: an incomplete character, or the beginning of a stop string.
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
"""The character that an incomplete character is decoded to."""
Choice = Document


class TextStream:
    """The text of one answer, decoded as its tokens arrive."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        """The text ends before the first of the strings `stop`."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._whole = CHANNEL in tokenizer.special_tokens
        """Whether text can only be returned at the end, because only one of an answer's channels is its text."""
        self._tokens: list[int] = []
        self._begin = self._read = 0
        self._text = ""
        self._sent = 0

    def add(self, piece: Piece) -> str:
        """The text that has become certain with this piece; after the last piece, all text has been returned."""
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
        """Decode new tokens together with those of the last piece, because a token's text may depend on the one before
        it.
        """
        self._tokens += tokens
        before = self._tokenizer.decode(self._tokens[self._begin : self._read])
        after = self._tokenizer.decode(self._tokens[self._begin :])
        if not after.endswith(HALF):
            self._text += after[len(before) :]
            self._begin, self._read = self._read, len(self._tokens)

    def _held(self) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        ends = (n for stop in self._stop for n in range(len(stop) - 1, 0, -1) if self._text.endswith(stop[:n]))
        return max(ends, default=0)


def end_at(text: str, stop: Sequence[str]) -> str:
    """Cut the text at the first stop string."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


class Form(Protocol):
    """The form in which a route writes answers."""

    kind: Kind
    answers: bool
    """Whether anything is generated after the prompt."""

    @property
    def only_whole(self) -> bool:
        """Whether each answer must arrive in one piece."""
        ...

    def choice(self, piece: Piece, text: str) -> Choice:
        """Write a whole answer, from a piece with all its tokens."""
        ...

    def delta(self, piece: Piece, text: str) -> Choice | None:
        """Write a piece of an answer; None if there is nothing to write yet."""
        ...


@dataclasses.dataclass(kw_only=True)
class CompletionForm:
    """Answers of `/v1/completions`."""

    tokenizer: Tokenizer
    logprobs: int | None
    """Number of alternatives per token; None: no log-probabilities; 1: the likeliest token, which in a greedy answer is
    the token itself."""
    kind = TEXT
    only_whole = False
    answers: bool = True
    offsets: dict[int, int] = dataclasses.field(default_factory=dict)
    """Length of the text so far, by answer."""

    def choice(self, piece: Piece, text: str) -> Choice:
        """Write the text, and its tokens with their log-probabilities."""
        logprobs = None if self.logprobs is None else self._logprobs(piece)
        reason = None if piece.completion is None else piece.completion.finish_reason
        return {"index": piece.number, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def delta(self, piece: Piece, text: str) -> Choice | None:
        """Write a piece of the text, and its tokens with their log-probabilities."""
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
        """Write prompt and answer, or only the prompt if no answer is asked for."""
        before, tokens = self.prompts[piece.number]
        if not self.answers:
            piece, text = piece._replace(tokens=[], logprobs=[]), ""
        return super().choice(piece, before + text) | {"logprobs": self._echoed(piece, tokens)}

    def _echoed(self, piece: Piece, prompt: Sequence[int]) -> dict[str, object] | None:
        """Log-probabilities of the prompt's tokens and then the answer's; the first token has none."""
        if self.logprobs is None:
            return None
        assert piece.completion is not None, "the piece is a whole answer"
        scores = piece.completion.prompt_scores
        assert scores is not None, "the client asked for log-probabilities"
        own = [None, *scores.logprobs[1:].tolist()]
        best = [None, *map(self._named, scores.best_tokens[1:].tolist(), scores.best_logprobs[1:].tolist())]
        drawn = [*map(self._named, piece.tokens, piece.logprobs)]  # greedy, so these are the likeliest tokens
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
    """Parses calls; None without tools."""
    begun: str = ""
    """The given beginning of the answer: the start of a call that the model must make."""
    thinking: bool = False
    """Whether the prompt already opened the model's thinking."""
    parallel: bool = True
    """Whether an answer may have several calls; otherwise the first is taken."""
    kind = CHAT
    answers = True

    @property
    def only_whole(self) -> bool:
        """True with tools, because calls can only be parsed in whole answers."""
        return self.format is not None

    def choice(self, piece: Piece, text: str) -> Choice:
        """Write the message, with its calls."""
        content, calls, reason = self._read(piece, text)
        return message_choice(piece.number, content, calls, reason, self._logprobs(piece))

    def delta(self, piece: Piece, text: str) -> Choice | None:
        """Write a piece of the message."""
        content, calls, reason = self._read(piece, text)
        if not (content or piece.first or piece.completion is not None or self.logprobs):
            return None
        return delta_choice(piece.number, content, calls, reason, self._logprobs(piece), first=piece.first)

    def _read(self, piece: Piece, text: str) -> tuple[str | None, list[Document], str | None]:
        """An answer's text, its calls, and its finish reason."""
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
    """Write a whole answer of `/inference/v1/generate`."""
    assert piece.completion is not None, "the piece is a whole answer"
    return tokens_choice(piece.number, piece.tokens, piece.logprobs, piece.completion.finish_reason)
