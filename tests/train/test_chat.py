"""`podium chat`: pieces of an answer as they come, log-probabilities on Enter, and nothing that moves the terminal."""

import io

import pytest
from rich.console import Console

import podium
from podium.api import chat as chat_module
from podium.api.answers import open_model
from podium.api.chat import STEPS_SHOWN, Conversation, chat, shaded
from podium.rollout.request import Request, SamplingParams
from podium.rollout.turn_format import TurnFormat
from podium.run.answering import Answering, Asked
from podium.terminal import harmless

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def rollouts(tiny_model, one_device):
    with open_model(
        tiny_model, asked=Asked(), slots=1, context=41, settings={"rollout.refill_steps": STEPS_SHOWN}
    ) as opened:
        yield opened.rollouts


def conversation(rollouts, most: int = 20, **options) -> Conversation:
    answering = Answering(system_prompt=None, sampling=SamplingParams(max_new_tokens=most, temperature=0.0))
    return Conversation(rollouts, answering, seed=0, **options)


def test_pieces_are_the_answer_that_one_call_gives(rollouts, tiny_model):
    talk = conversation(rollouts)
    pieces = list(talk.answer("What is 3 + 4 ?"))
    (whole,) = podium.generate(
        tiny_model, ["What is 3 + 4 ?"], max_new_tokens=20, temperature=0, rollout__max_prompt_tokens=40
    )
    assert "".join(pieces) == whole.text and talk.tokens == whole.tokens.tolist()
    assert talk.logprobs == pytest.approx(whole.sampled_logprobs.tolist(), abs=1e-4)
    assert [each["role"] for each in talk.messages] == ["user", "assistant"]
    talk.restart()
    assert rollouts.engine.keys == []


APPENDING = (
    "{% for message in messages %}{{ message.content + (' <eos>' if message.role == 'assistant' else '') + ' ' }}"
    "{% endfor %}"
)


def use_template(tokenizer, template: str, monkeypatch) -> None:
    monkeypatch.setattr(tokenizer._backend, "chat_template", template)
    monkeypatch.setattr(tokenizer, "chat_format", tokenizer.with_options({}).chat_format)


def test_a_turn_reads_only_what_is_new(rollouts, monkeypatch):
    notices, engine, tokenizer = [], rollouts.engine, rollouts.feed.tokenizer
    use_template(tokenizer, APPENDING, monkeypatch)
    talk = conversation(rollouts, most=8, notice=notices.append)
    assert "".join(talk.answer("1+2"))
    first = [*tokenizer.encode_messages([{"role": "user", "content": "1+2"}]), *talk.tokens]
    turns = TurnFormat(tokenizer.chat_format, stop_tokens=tokenizer.eos_tokens)
    ended = talk.tokens[-1] if talk.tokens[-1] in tokenizer.eos_tokens else None
    new = turns.reply([{"role": "user", "content": "3+4"}], history=[], drawn_end=ended)
    engine.stats()
    assert "".join(talk.answer("3+4"))
    assert (engine.stats().scheduled.prefill_tokens, notices) == (1 + len(new), [])
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0)
    ((alone,),), _ = engine.generate([Request(prompt=(*first, *new), sampling=sampling, seed=0)])
    assert talk.tokens == alone.tokens.tolist()
    talk.restart()
    assert engine.keys == []


def test_a_template_that_cannot_be_continued_is_said_and_read_anew(rollouts, monkeypatch):
    tokenizer, notices = rollouts.feed.tokenizer, []
    use_template(tokenizer, "{{ messages[-1].content }}", monkeypatch)
    talk = conversation(rollouts, most=2, notice=notices.append)
    assert notices[0].startswith(
        "the whole conversation is processed again at each turn: the model's chat template cannot"
    )
    for question in ("1+2", "3+4"):
        rollouts.engine.stats()
        list(talk.answer(question))
        assert rollouts.engine.stats().prompt_tokens == len(tokenizer.encode(question))
    talk.restart()


def test_an_answer_is_shown_while_it_is_drawn_and_can_be_interrupted(rollouts):
    talk = conversation(rollouts)
    pieces = talk.answer("What is 3 + 4 ?")
    next(pieces)
    assert talk.tokens == []  # the answer has not ended
    pieces.close()
    assert (rollouts.engine.keys, talk.messages) == ([], [])
    whole = "".join(talk.answer("What is 3 + 4 ?"))
    talk.restart()
    assert "".join(talk.answer("What is 3 + 4 ?")) == whole
    talk.restart()


def test_what_does_not_fit_is_said_and_can_be_forgotten(rollouts):
    talk = conversation(rollouts, most=1)
    with pytest.raises(ValueError, match="and only 40 fit; /new starts another"):
        list(talk.answer("What " * 41))
    assert talk.messages == []


def test_an_answer_may_use_the_context_up_to_its_end(rollouts, monkeypatch):
    tokenizer = rollouts.feed.tokenizer
    monkeypatch.setattr(tokenizer, "eos_tokens", ())
    talk, question = conversation(rollouts, most=100), "What " * 30
    asked = len(tokenizer.encode_messages([{"role": "user", "content": question}]))
    list(talk.answer(question))
    assert len(talk.tokens) == rollouts.engine.config.longest - asked > 1
    talk.restart()


def test_the_command_answers_lines(tiny_model, monkeypatch):
    monkeypatch.setattr(chat_module, "CONTEXT_TOKENS", 56)
    output = io.StringIO()
    lines = ["", "What is 1 + 1 ?", "", "/new", "/exit", "never read"]
    console = Console(file=output, width=200)
    asked = Asked(system_prompt="only", temperature=1.0, max_new_tokens=3)
    assert chat(str(tiny_model), asked=asked, seed=1, console=console, lines=lines) == 0
    text = output.getvalue()
    assert "no answer yet" in text and "mean log-probability -" in text and " tokens\n" in text


def test_text_of_a_model_cannot_move_the_terminal():
    assert harmless("a\x1b[2Jb\nc\u202e") == "a\\x1b[2Jb\nc\\u202e"
    text = shaded(["a\x1b", " b"], [-3.0, -0.01])
    assert "\x1b" not in text.plain and "5%" in text.plain and "99%" in text.plain
