"""Extracts the text of a completion that graders, records and conversations read. No jax.

In most formats, the text is everything that the model wrote. In harmony, gpt-oss's format, the model writes messages
into channels,

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

and its answer to the user is the last message in the channel `final`. Decoded text does not contain special tokens, so
the message is cut out at the level of tokens. A completion that ended before that message has an empty text, so an
answer that occurs only in the thinking is not graded. A completion without channels is used as a whole.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
FINAL = "final"


class TextDecoder(Protocol):
    """The tokenizer methods that the engine needs."""

    eos_tokens: tuple[int, ...]

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Special tokens by text; `decode` omits these."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens to text without special tokens."""
        ...


def answer_text(tokens: Sequence[int], tokenizer: TextDecoder) -> str:
    """The text of a completion's tokens, without special tokens; in harmony format, the text of the last message to the
    user.
    """
    special = tokenizer.special_tokens
    channel, message = special.get(CHANNEL), special.get(MESSAGE)
    if channel is None or message is None or channel not in tokens:
        return tokenizer.decode(list(tokens))
    ends = set(special.values())
    answer: list[int] = []
    at = 0
    while at < len(tokens):
        name = _until(tokens, at + 1, ends)
        begin = at + 1 + len(name)
        if tokens[at] == channel and tokenizer.decode(name).split()[:1] == [FINAL]:
            while begin < len(tokens) and tokens[begin] != message:  # skip the rest of the header
                begin += 1
            answer = _until(tokens, begin + 1, ends)
        at = begin
    return tokenizer.decode(answer)


def _until(tokens: Sequence[int], begin: int, ends: set[int]) -> list[int]:
    """The tokens from `begin` up to, but not including, the first of `ends`."""
    end = next((place for place in range(begin, len(tokens)) if tokens[place] in ends), len(tokens))
    return list(tokens[begin:end])
