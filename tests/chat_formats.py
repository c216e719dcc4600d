"""The chat formats of 22 families of models, and random conversations in them.

Templates are read from the wheel of TRL, which `make test` installs without its dependencies; Mistral's and SmolLM2's
are not in it. All formats share the demo model's tokenizer, with the tokens that their texts name whole added to it:
what is tested is where conversations are cut and joined, not a vocabulary.
"""

import dataclasses
import functools
import importlib.util
import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from podium.models.files.source import resolve
from podium.models.text.chat_format import ChatFormat, Message, ToolSchema
from podium.models.text.tokenizer import LLAMA3_SPLIT, QWEN2_SPLIT, Tokenizer, load_tokenizer

CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
QWEN = (*CHATML, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
DEEPSEEK_CALLS = ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
DEEPSEEK_OUTPUTS = ("outputs▁begin", "output▁begin", "output▁end", "outputs▁end")
BAR = "\uff5c"  # DeepSeek's upright bar
DEEPSEEK_END = f"<{BAR}end▁of▁sentence{BAR}>"
DEEPSEEK_BEGIN = f"<{BAR}begin▁of▁sentence{BAR}>"
DEEPSEEK = (
    *(DEEPSEEK_BEGIN, DEEPSEEK_END, f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>", "<think>", "</think>"),
    *(f"<{BAR}tool▁{name}{BAR}>" for name in (*DEEPSEEK_CALLS, *DEEPSEEK_OUTPUTS)),
)
GEMMA3 = ("<bos>", "<start_of_turn>", "<end_of_turn>")
GEMMA4 = (
    *("<bos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    *("<|channel>", "<channel|>", "<|tool>", "<tool|>", '<|"|>', "<|think|>"),
)
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>")
GLM = (
    *("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|endoftext|>"),
    *QWEN[3:],
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
LFM2 = (
    *("<|startoftext|>", *CHATML, "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>"),
    *("<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>", "<think>", "</think>"),
)
MUSE = ("<|begin_of_text|>", "<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
PHI3 = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]")
MISTRAL_V1 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
"""The published format of Mistral-7B-Instruct-v0.1, without its check of the order of roles."""

MISTRAL_TOOLS = (
    *MISTRAL,
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
MISTRAL_V3 = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools|tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{% if not message.tool_call_id or message.tool_call_id|length != 9 %}"
    "{{ raise_exception('ids of calls have nine letters or digits') }}{% endif %}"
    "{{ '[TOOL_RESULTS] {\"content\": ' + message['content'] + ', \"call_id\": \"' + message.tool_call_id"
    " + '\"}[/TOOL_RESULTS]' }}"
    "{% elif message['role'] != 'assistant' %}{{ '[INST] ' + message['content'] + '[/INST]' }}"
    "{% elif message['tool_calls'] %}{{ '[TOOL_CALLS] [' }}{% for call in message['tool_calls'] %}"
    "{% if not call.id or call.id|length != 9 %}"
    "{{ raise_exception('ids of calls have nine letters or digits') }}{% endif %}"
    "{% set text = call['function']|tojson %}{{ text[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
    "{{ ']' if loop.last else ', ' }}{% endfor %}{{ eos_token }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
"""The published format of Mistral-7B-Instruct-v0.3 with its rule for ids, but for its check of the order of roles, and
with the tools first. No package has that template."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A family's chat format."""

    template: str | None
    """Name of its file in TRL's wheel; None: the text is given, or the demo model's own is meant."""
    tokens: tuple[str, ...]
    """Tokens that its text names whole."""
    stops: tuple[str, ...]
    """Tokens that end an answer, by the model's generation_config.json."""
    text: str | None = None
    options: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    thinking: str | None = None
    """Key of an answer's thinking; `inline`: it stands in the content."""
    tools: bool = True
    parallel: bool = True
    content_beside_calls: bool = True
    text_arguments: bool = False
    rule: str = "tails"
    bos: str = "<|endoftext|>"


NO_THINKING = {"enable_thinking": False}
FORMATS = {
    "smollm2": Format(template=None, tokens=CHATML, stops=("<|im_end|>",), parallel=False, bos="<|im_start|>"),
    "qwen2.5": Format(template="qwen2_5", tokens=QWEN, stops=("<|im_end|>",)),
    "qwen3": Format(template="qwen3", tokens=QWEN, stops=("<|im_end|>",), thinking="reasoning_content"),
    "qwen3-nothink": Format(template="qwen3", tokens=QWEN, stops=("<|im_end|>",), options=NO_THINKING),
    "qwen3-2507": Format(template="qwen3_instruct_2507", tokens=QWEN, stops=("<|im_end|>",)),
    "qwen3.5": Format(template="qwen3_5_think", tokens=QWEN, stops=("<|im_end|>",), thinking="reasoning_content"),
    "qwen3.5-nothink": Format(template="qwen3_5_nothink", tokens=QWEN, stops=("<|im_end|>",)),
    "qwen3.8": Format(template="qwen3_8", tokens=QWEN, stops=("<|im_end|>",), thinking="reasoning_content"),
    "llama3.2": Format(
        template="llama3_2", tokens=LLAMA, stops=("<|eot_id|>", "<|eom_id|>"), parallel=False, bos="<|begin_of_text|>"
    ),
    "gemma3": Format(template="gemma3", tokens=GEMMA3, stops=("<end_of_turn>",), tools=False, bos="<bos>"),
    "gemma4": Format(
        template="gemma4_v5",
        tokens=GEMMA4,
        stops=("<turn|>", "<|tool_response>"),
        content_beside_calls=False,
        bos="<bos>",
    ),
    "mistral-v1": Format(template=None, text=MISTRAL_V1, tokens=MISTRAL, stops=("</s>",), tools=False, bos="<s>"),
    "mistral-v3": Format(
        template=None,
        text=MISTRAL_V3,
        tokens=MISTRAL_TOOLS,
        stops=("</s>",),
        content_beside_calls=False,
        bos="<s>",
    ),
    "gpt-oss": Format(
        template="gptoss",
        tokens=HARMONY,
        stops=("<|return|>", "<|call|>"),
        thinking="thinking",
        parallel=False,
        content_beside_calls=False,
    ),
    "deepseek-v3": Format(
        template="deepseekv3",
        tokens=DEEPSEEK,
        stops=(DEEPSEEK_END,),
        text_arguments=True,
        rule="history",
        bos=DEEPSEEK_BEGIN,
    ),
    "deepseek-r1-distill": Format(
        template="deepseek_r1_distill",
        tokens=DEEPSEEK,
        stops=(DEEPSEEK_END,),
        thinking="inline",
        tools=False,
        bos=DEEPSEEK_BEGIN,
    ),
    "glm4.5": Format(
        template="glm4moe",
        tokens=GLM,
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
        thinking="reasoning_content",
    ),
    "glm4.5-nothink": Format(
        template="glm4moe", tokens=GLM, stops=("<|endoftext|>", "<|user|>", "<|observation|>"), options=NO_THINKING
    ),
    "lfm2": Format(template="lfm2_v2", tokens=LFM2, stops=("<|im_end|>",), bos="<|startoftext|>"),
    "lfm2.5": Format(template="lfm2_2_5_v2", tokens=LFM2, stops=("<|im_end|>",), bos="<|startoftext|>"),
    "muse": Format(
        template="muse_glimmer",
        tokens=MUSE,
        stops=("<|eot|>",),
        thinking="reasoning_content",
        content_beside_calls=False,
        bos="<|begin_of_text|>",
    ),
    "phi3": Format(template="phi3", tokens=PHI3, stops=("<|end|>",), tools=False),
}
TOOLS: tuple[ToolSchema, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Runs it.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
    for name in ("calculator", "python")
)
WORDS = (
    *(
        "the",
        "sum",
        "of",
        "12",
        "and",
        "3.5",
        "is",
        "é",
        "ö",
        "漢字",
        "🙂",
        "naïve\u200d",
        "tab\t",
        "false",
        "None",
        "",
    ),
    *(
        '{"a":',
        "1}",
        "<b>",
        "&&",
        "1e-9",
        "...",
        "'",
        '"',
        "\\n",
        "\n",
        "\n\n",
        "    x = 1",
        "0007",
        "¡ñ!",
        "qzANCHORzq",
    ),
)


def trl_templates() -> Path:
    """The folder of TRL's templates; the test is skipped where TRL is not installed."""
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("TRL is not installed: pip install --no-deps trl==1.16.0")
    return Path(found.submodule_search_locations[0]) / "chat_templates"


@functools.cache
def demo_backend() -> PreTrainedTokenizerFast:
    """The demo model's tokenizer."""
    backend = load_tokenizer(resolve("demo"))._backend
    assert isinstance(backend, PreTrainedTokenizerFast)
    return backend


@functools.cache
def backend_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer that encodes a format."""
    shape, demo = FORMATS[name], demo_backend()
    if shape.template is not None:
        text = (trl_templates() / f"{shape.template}.jinja").read_text(encoding="utf-8")
    else:
        text = shape.text or str(demo.chat_template)
    rust = RustTokenizer.from_str(demo.backend_tokenizer.to_str())
    if shape.tokens is not CHATML:
        regex = Regex(QWEN2_SPLIT if shape.tokens is QWEN else LLAMA3_SPLIT)
        split = pre_tokenizers.Split(regex, behavior="isolated")
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        rust.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in shape.tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=rust,
        chat_template=text,
        bos_token=shape.bos,
        eos_token=shape.stops[0],
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def format_of(name: str) -> ChatFormat:
    """A chat format."""
    return Tokenizer(backend_of(name), eos_tokens=(), template_options=FORMATS[name].options).chat_format


def stop_tokens_of(name: str) -> list[int]:
    """The tokens that end an answer."""
    numbers = {text: number for number, text in format_of(name).texts.items()}
    return [numbers[text] for text in FORMATS[name].stops]


def conversation(rng: random.Random, shape: Format, *, tools: bool, literal: float) -> list[Message]:
    """A random conversation that ends with an answer.

    `literal`: the share of questions and of tools' replies that contain the text of a special token.
    """
    messages: list[Message] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": _words(rng)})
    for _ in range(rng.randint(1, 6)):
        messages.append({"role": "user", "content": _given(rng, shape, literal)})
        for _ in range(rng.choice((0, 0, 1, 2, 3)) if tools else 0):
            messages += _round_of_calls(rng, shape, literal)
        messages.append(_answer(rng, shape))
    return messages


def _words(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 14))).strip() or "ok"


def _given(rng: random.Random, shape: Format, literal: float) -> str:
    words = _words(rng)
    if rng.random() >= literal:
        return words
    return f"{words} {rng.choice(shape.tokens)}{rng.choice(('', ' x', '.'))}"


def _answer(rng: random.Random, shape: Format) -> Message:
    content = _words(rng)
    if shape.thinking == "inline":
        return {"role": "assistant", "content": f"thought\n</think>\n\n{content}"}
    thinking = {shape.thinking: _words(rng).replace("\n", " ")} if shape.thinking and rng.random() < 0.7 else {}
    return {"role": "assistant", "content": content, **thinking}


def _round_of_calls(rng: random.Random, shape: Format, literal: float) -> list[Message]:
    count = rng.randint(1, 3) if shape.parallel else 1
    calls: list[dict[str, object]] = []
    replies: list[Message] = []
    for number in range(count):
        tool = rng.choice(("calculator", "python"))
        arguments = {"x": _words(rng), "n": rng.choice((1, 2.5, True, None))}
        given = json.dumps(arguments) if shape.text_arguments else arguments
        call = f"c{number:08d}"
        calls.append({"id": call, "type": "function", "function": {"name": tool, "arguments": given}})
        replies.append({"role": "tool", "name": tool, "tool_call_id": call, "content": _given(rng, shape, literal)})
    content = _words(rng) if shape.content_beside_calls and rng.random() < 0.5 else ""
    message: dict[str, object] = {"role": "assistant", "content": content, "tool_calls": calls}
    if shape.thinking not in (None, "inline") and rng.random() < 0.7:
        message[str(shape.thinking)] = _words(rng).replace("\n", " ")
        if shape.thinking == "thinking":  # harmony has one text before a call
            message["content"] = ""
    return [message, *replies]
