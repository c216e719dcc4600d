"""The text of a completion: all of it, or in harmony the last message to the user."""

import pytest

from podium.rollout.answer import answer_text
from podium.rollout.request import Key, SamplingParams
from podium.rollout.sequence import Sequence

NAMES = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|constrain|>")
SPECIAL = {name: 200 + number for number, name in enumerate(NAMES)}


class Bytes:
    """A token is a byte of ASCII, or a special one."""

    eos_tokens = (SPECIAL["<|return|>"],)

    def __init__(self, special=SPECIAL):
        self.special_tokens = special

    def decode(self, tokens):
        return "".join(chr(token) for token in tokens if token < 200)


def tokens_of(text: str) -> list[int]:
    for name, token in SPECIAL.items():
        text = text.replace(name, chr(token))
    return [ord(letter) for letter in text]


THOUGHT = "<|channel|>analysis<|message|>Is it 11? No.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>It is 12.<|return|>", "It is 12."),
        (f"{THOUGHT}<|channel|>final<|message|>It is 1", "It is 1"),  # ended by its length
        (f"{THOUGHT}<|channel|>final <|constrain|>json<|message|>[12]<|return|>", "[12]"),
        (f"{THOUGHT}<|channel|>final<|message|>11<|end|><|start|>assistant<|channel|>final<|message|>12", "12"),
        (f"{THOUGHT}<|channel|>final<|message|>12<|end|><|start|>assistant<|channel|>analysis<|message|>9", "12"),
        (THOUGHT, ""),
        ("<|channel|>analysis<|message|>The answer is 12", ""),
        ("<|channel|>commentary to=functions.add<|constrain|>json<|message|>{}", ""),
        (f"{THOUGHT}<|channel|>fin", ""),
        (f"{THOUGHT}<|channel|>final", ""),
        ("<|channel|>", ""),
        ("<|message|>It is 12.<|return|>", "It is 12."),  # no channel is named
        ("It is 12.", "It is 12."),
        ("", ""),
    ],
)
def test_what_is_said_to_the_user_is_the_last_message_of_the_channel_final(written, text):
    assert answer_text(tokens_of(written), Bytes()) == text


def test_a_tokenizer_without_channels_gives_the_whole_text():
    assert answer_text(tokens_of("<|channel|>analysis<|message|>12"), Bytes({"<|end|>": 201})) == "analysis12"


def test_a_completion_has_the_text_of_its_answer():
    sequence = Sequence(key=Key(0, 0), context=(1,), sampling=SamplingParams(max_new_tokens=99), seed=0)
    drawn = tokens_of(f"{THOUGHT}<|channel|>final<|message|>12<|return|>")
    nothing = [0.0] * len(drawn)
    sequence.append(drawn, nothing, nothing, Bytes())
    assert (sequence.finish_reason, sequence.completion(Bytes()).text) == ("stop", "12")
