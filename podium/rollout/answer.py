"""The text of a completion that graders, records and conversations read. No jax.

In most formats it is all that the model wrote. In harmony, gpt-oss's format, the model writes messages into channels,

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

and what it says to the user is the last message in the channel `final`. Special tokens are not part of a text, so it is
cut out by tokens. A completion that ended before it said anything has an empty text, and an answer that occurs only in
its thinking is not graded. A completion without channels is read whole.
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
        """Special tokens by text; `decode` omits them."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens to text without special tokens."""
        ...


def answer_text(tokens: Sequence[int], tokenizer: TextDecoder) -> str:
    """The text of a completion's tokens, without special tokens; in harmony, of the last message to the user."""
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
            while begin < len(tokens) and tokens[begin] != message:  # what else the header says
                begin += 1
            answer = _until(tokens, begin + 1, ends)
        at = begin
    return tokenizer.decode(answer)


def _until(tokens: Sequence[int], begin: int, ends: set[int]) -> list[int]:
    """The tokens from `begin` to before the first special one."""
    end = next((place for place in range(begin, len(tokens)) if tokens[place] in ends), len(tokens))
    return list(tokens[begin:end])
