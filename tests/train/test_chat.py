"""`podium chat`: pieces of an answer as they come, log-probabilities on Enter, and nothing that moves the terminal."""

import io

import pytest
from rich.console import Console

import podium
from podium.api import chat as chat_module
from podium.api.answers import open_model
from podium.api.chat import CHUNK_TOKENS, Conversation, chat, harmless, shaded

pytestmark = pytest.mark.usefixtures("one_device", "compiled_once")


@pytest.fixture(scope="module")
def rollouts(tiny_model, one_device, compiled_once):
    with open_model(tiny_model, max_new_tokens=CHUNK_TOKENS, slots=1, rollout__max_prompt_tokens=40) as opened:
        yield opened


def conversation(rollouts, most: int = 20) -> Conversation:
    return Conversation(rollouts, system_prompt=None, temperature=0.0, max_new_tokens=most, seed=0)


def test_pieces_are_the_answer_that_one_call_gives(rollouts, tiny_model):
    talk = conversation(rollouts)
    pieces = list(talk.answer("What is 3 + 4 ?"))
    (whole,) = podium.generate(
        tiny_model, ["What is 3 + 4 ?"], max_new_tokens=20, temperature=0, rollout__max_prompt_tokens=40
    )
    assert "".join(pieces) == whole.text and talk.tokens == whole.tokens.tolist()
    assert talk.logprobs == pytest.approx(whole.sampled_logprobs.tolist(), abs=1e-4)
    assert [each["role"] for each in talk.messages] == ["user", "assistant"]


def test_what_does_not_fit_is_said_and_can_be_forgotten(rollouts):
    talk = conversation(rollouts, most=1)
    with pytest.raises(ValueError, match="and 40 fit; /new begins another"):
        list(talk.answer("What " * 41))
    assert talk.messages == []


def test_the_command_answers_lines(tiny_model, monkeypatch):
    monkeypatch.setattr(chat_module, "CONTEXT_TOKENS", 56)
    output = io.StringIO()
    lines = ["", "What is 1 + 1 ?", "", "/new", "/exit", "never read"]
    console = Console(file=output, width=200)
    options = {"system_prompt": "only", "temperature": 1.0, "max_new_tokens": 3, "seed": 1}
    assert chat(str(tiny_model), console=console, lines=lines, **options) == 0
    text = output.getvalue()
    assert "nothing was answered yet" in text and "mean log-probability -" in text and " tokens\n" in text


def test_text_of_a_model_cannot_move_the_terminal():
    assert harmless("a\x1b[2Jb\nc\u202e") == "a\\x1b[2Jb\nc\\u202e"
    text = shaded(["a\x1b", " b"], [-3.0, -0.01])
    assert "\x1b" not in text.plain and "5%" in text.plain and "99%" in text.plain
