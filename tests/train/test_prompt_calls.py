"""Calls in the messages of a prompt: published chat templates write them, or the prompt is refused."""

import json

import pytest
from published import published_tokenizer

from podium.models.text.chat_format import Message
from podium.sampling.conversations.dialogue import with_calls
from podium.tasks.messages import read_messages
from tests.chat_formats import FORMATS, format_of

WRITTEN = [
    {"role": "user", "content": "What is 6 times 7?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "times", "arguments": '{"a": 61, "b": 71}'}}
        ],
    },
    {"role": "tool", "name": "times", "tool_call_id": "call00000", "content": "4331"},
]
"""A conversation as OpenAI's clients write it, with arguments as JSON text."""


WITHOUT = ("smollm2", *(name for name, each in FORMATS.items() if not each.tools))
"""Formats whose templates write no calls."""


def read() -> list[Message]:
    return list(read_messages("a row", json.loads(json.dumps(WRITTEN))))


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in WITHOUT])
def test_a_published_template_writes_the_calls_of_a_prompt_once(name):
    text = format_of(name).render(with_calls(format_of(name), read()), answer=True)
    assert text.count("61") == text.count("71") == text.count("4331") == 1
    assert '\\"a\\"' not in text, "arguments are written as an object, not as text within text"


@pytest.mark.parametrize("name", WITHOUT)
def test_a_template_that_leaves_calls_out_is_an_error(name):
    with pytest.raises(ValueError, match="tool_calls, and the model's chat template does not write them"):
        with_calls(format_of(name), read())
    assert with_calls(format_of(name), read()[:1]) == read()[:1]


def test_a_prompt_with_calls_is_what_transformers_makes_of_it():
    tokenizer = published_tokenizer("Qwen/Qwen2.5-0.5B-Instruct")
    messages = [dict(each) for each in read()]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert '<tool_call>\n{"name": "times", "arguments": {"a": 61, "b": 71}}\n</tool_call>' in expected
    rendered = format_of("qwen2.5").render(with_calls(format_of("qwen2.5"), messages), answer=True)
    assert rendered == expected
