import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from others_code import others_code
from tiny_models import hf_config, needs_demo, rules_on, write_model

from podium.models.architecture import ModelError
from podium.models.files.gguf import GgufHeader
from podium.models.files.hf import load_params, save_model
from podium.models.files.source import ModelSource, read_architecture, resolve
from podium.models.text.tokenizer import LLAMA3_SPLIT, QWEN2_SPLIT, SPLITS, _gguf_backend, load_tokenizer

WORDS = ["<unk>", "<|im_start|>", "<|im_end|>", "<pad>", "user", "system", "assistant", "two", "plus", "Be", "brief"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)


def write_tokenizer(
    folder: Path, *, template: str | None = TEMPLATE, eos: Any = None, pad: str | None = "<pad>"
) -> ModelSource:
    """A folder whose tokenizer knows WORDS, with generation_config.json where `eos` is given."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    rust = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rust.add_special_tokens(["<|im_start|>", "<|im_end|>", "<pad>"])
    named = {"unk_token": "<unk>", "eos_token": "<|im_end|>"} | ({"pad_token": pad} if pad else {})
    backend = transformers.PreTrainedTokenizerFast(tokenizer_object=rust, chat_template=template, **named)
    backend.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(hf_config("llama")))
    if eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return ModelSource("folder", folder, "tiny")


def test_question_becomes_a_conversation_that_the_assistant_continues(tmp_path: Path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path), None)
    assert tokenizer.encode_chat("two plus two", None) == [1, 4, 7, 8, 7, 2, 1, 6]
    assert tokenizer.encode_chat("two", "Be brief") == [1, 5, 9, 10, 2, 1, 4, 7, 2, 1, 6]
    assert tokenizer.encode_chat("two", "") == tokenizer.encode_chat("two", None)


def test_text_is_encoded_alone_and_decoded_without_special_tokens(tmp_path: Path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    assert tokenizer.encode("two plus") == [7, 8]
    assert tokenizer.decode([1, 7, 8, 7, 2, 3]) == "two plus two"


@pytest.mark.parametrize(
    ("eos", "expected"), [(None, (2,)), (2, (2,)), (5, (2, 5)), ([2, 5], (2, 5)), ([0, 2], (2, 0))]
)
def test_completions_end_with_the_tokenizer_s_token_and_those_of_generation_config(
    eos: Any, expected: tuple[int, ...], tmp_path: Path
):
    assert load_tokenizer(write_tokenizer(tmp_path, eos=eos)).eos_tokens == expected


def test_padding_is_the_tokenizer_s_or_else_the_end(tmp_path: Path):
    assert load_tokenizer(write_tokenizer(tmp_path / "a")).pad_token == 3
    assert load_tokenizer(write_tokenizer(tmp_path / "b", pad=None)).pad_token == 2


def test_tokenizer_without_chat_template_says_how_to_give_one(tmp_path: Path):
    source = write_tokenizer(tmp_path, template=None)
    with pytest.raises(ModelError, match=r"'tiny': .* no chat template; write one and set chat_template: path\.jinja"):
        load_tokenizer(source)
    (tmp_path / "mine.jinja").write_text("{{ messages[-1].content }} plus")
    assert load_tokenizer(source, str(tmp_path / "mine.jinja")).encode_chat("two", None) == [7, 8]


def test_given_template_replaces_the_model_s(tmp_path: Path):
    source = write_tokenizer(tmp_path)
    (tmp_path / "mine.jinja").write_text("{{ messages[-1].content }}")
    assert load_tokenizer(source, str(tmp_path / "mine.jinja")).encode_chat("two", None) == [7]


def test_template_that_cannot_be_read_or_rendered_is_named(tmp_path: Path):
    source = write_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=r"chat_template '.*absent\.jinja': cannot be read"):
        load_tokenizer(source, str(tmp_path / "absent.jinja"))
    (tmp_path / "bad.jinja").write_text("{% for message in messages %}")
    with pytest.raises(ModelError, match=r"bad\.jinja: cannot be rendered \(TemplateSyntaxError"):
        load_tokenizer(source, str(tmp_path / "bad.jinja"))


PARTS = "{% for m in messages %}{{ m.role }} {% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", ["two", PARTS], ids=["constant", "lists of parts"])
def test_a_template_that_leaves_out_the_question_is_an_error(template: str, tmp_path: Path):
    with pytest.raises(ModelError, match=r"of model .tiny.: leaves out what the user says, .*chat_template"):
        load_tokenizer(write_tokenizer(tmp_path, template=template))


def test_a_template_that_leaves_out_system_messages_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "user", template=template))
    assert not caplog.messages
    assert tokenizer.encode_chat("two", "Be brief") == [7]
    assert tokenizer.encode_chat("two", "Be") == [7]
    assert [each.split(": ")[-1] for each in caplog.messages] == [
        "leaves out system messages, so the model does not read them"
    ]
    caplog.clear()
    load_tokenizer(write_tokenizer(tmp_path / "whole")).encode_chat("two", "Be brief")
    assert not caplog.messages


def test_folder_without_tokenizer_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config("llama")))
    with pytest.raises(ModelError, match="has no tokenizer that transformers can load"):
        load_tokenizer(ModelSource("folder", tmp_path, "m"))


def test_saved_tokenizer_is_the_same_and_of_a_class_that_transformers_4_knows(tmp_path: Path):
    (tmp_path / "mine.jinja").write_text("{{ messages[-1].content }} plus")
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "a"), str(tmp_path / "mine.jinja"))
    tokenizer.save(tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text(json.dumps(hf_config("llama")))
    saved = load_tokenizer(ModelSource("folder", tmp_path / "b", "b"))
    assert saved.encode_chat("two", None) == tokenizer.encode_chat("two", None) == [7, 8]
    assert (saved.eos_tokens, saved.pad_token) == (tokenizer.eos_tokens, tokenizer.pad_token)
    said = json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())
    assert said["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_export_says_what_ends_a_completion(tmp_path: Path):
    source = write_model(tmp_path / "model", "llama")
    write_tokenizer(tmp_path / "model", eos=[2, 5])
    tokenizer, config = load_tokenizer(source), read_architecture(source)
    save_model(load_params(source, config, rules_on("auto", 1)), config, tokenizer, tmp_path / "export")
    exported = ModelSource("folder", tmp_path / "export", "export")
    assert load_tokenizer(exported).eos_tokens == (2, 5)
    assert load_tokenizer(exported).encode_chat("two", None) == tokenizer.encode_chat("two", None)
    said = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (said["eos_token_id"], said["pad_token_id"]) == ([2, 5], 3)


def gguf_backend(**said: Any) -> Any:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in said.items()}
    return _gguf_backend(GgufHeader(Path("model.gguf"), metadata, {}))


DIGITS = {
    "model": "gpt2",
    "tokens": [*"0123456789", "12", "34", "123", "\u0120", "<end>"],
    "merges": ["1 2", "3 4", "12 3"],
}


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["12", "34"]),  # the whole number is one word: merges in their order
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen35", ["1", "2", "3", "4"]),
        ("tekken", ["1", "2", "3", "4"]),
        ("gpt-4o", ["123", "4"]),
    ],
)
def test_numbers_are_split_as_the_file_says(pre: str, expected: list[str]):
    assert gguf_backend(**DIGITS, pre=pre, eos_token_id=14).tokenize("1234") == expected


def test_control_tokens_are_whole_and_left_out_of_text():
    backend = gguf_backend(**DIGITS, pre="qwen2", eos_token_id=14, token_type=[1] * 14 + [3])
    assert backend.encode("1<end>") == [1, 14]
    assert backend.decode([1, 14], skip_special_tokens=True) == "1"
    backend = gguf_backend(**DIGITS, pre="qwen2", eos_token_id=0, token_type=[1] * 14 + [4])
    assert backend.decode(backend.encode("1<end>"), skip_special_tokens=True) == "1<end>"


def test_qwen_s_split_is_that_of_transformers():
    from transformers.models.qwen2 import tokenization_qwen2

    assert tokenization_qwen2.PRETOKENIZE_REGEX == QWEN2_SPLIT
    assert LLAMA3_SPLIT != QWEN2_SPLIT


@pytest.mark.parametrize("pre", [*SPLITS])
def test_splits_of_gguf_files_are_those_of_transformers(pre: str):
    theirs = pytest.importorskip(
        "transformers.integrations.gguf.gguf_tokenizer_mapping", reason="a newer transformers has it"
    )
    assert SPLITS[pre] == theirs.GGUF_PRE_TOKENIZER_SPLITS[pre]


def test_sentencepiece_merges_the_best_token_first():
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "<0xE2>",
        "<0x82>",
        "<0xAC>",
        "\u2581",
        "a",
        "b",
        "c",
        "ab",
        "bc",
        "\u2581a",
        "cab",
    ]
    scores = [0.0, 0, 0, 0, 0, 0, -9, -9, -9, -9, -2, -1, -3, -4]
    kinds = [2, 3, 3, 6, 6, 6, 1, 1, 1, 1, 1, 1, 1, 1]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    backend = gguf_backend(model="llama", tokens=tokens, scores=scores, token_type=kinds, **ids)
    assert backend.encode("abc") == [1, 12, 11]  # with its beginning, where nothing says otherwise
    assert backend.tokenize("abc") == ["\u2581a", "bc"]  # bc (-1) before ab (-2), then \u2581a
    assert backend.tokenize("cab") == ["\u2581", "cab"]  # of c and ab: ca is no token
    assert backend.encode("a \u20ac", add_special_tokens=False) == [12, 6, 3, 4, 5]
    assert backend.decode([12, 6, 3, 4, 5, 2], skip_special_tokens=True) == "a \u20ac"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"model": "t5", "tokens": []}, "tokenizer model 't5' is not supported; gpt2 and llama are"),
        ({**DIGITS, "pre": "bloom"}, "'bloom' is not supported; these are: llama-bpe"),
    ],
)
def test_unsupported_tokenizer_is_named(said: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        gguf_backend(**said)


@needs_demo
def test_demo_s_tokens_are_smollm2_s(tmp_path: Path):
    """The first tokens of the vocabulary, the template's own system prompt, and no pair of digits in one token."""
    tokenizer = load_tokenizer(resolve("demo"))
    assert (tokenizer.eos_tokens, tokenizer.pad_token, tokenizer.bos_token) == ((2,), 2, 1)
    tokens = tokenizer.encode_chat("12 + 3", None)
    assert (tokens[:3], tokens[-4:]) == ([1, 9690, 198], [1, 520, 9531, 198])
    assert tokenizer.encode("1234") == [33, 34, 35, 36]
    text = "Hello world: h\u00e9llo\n\n  \u65e5\u672c 1,200"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config("llama")))
    assert load_tokenizer(ModelSource("folder", tmp_path, "copy")).encode_chat("12 + 3", None) == tokens


@needs_demo
@pytest.mark.parity
def test_demo_s_tokens_are_those_of_transformers_own_reader():
    others_code("torch")  # which transformers needs to read GGUF
    import transformers

    source = resolve("demo")
    theirs = transformers.AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    ours = load_tokenizer(source)
    for text in ("Natalia sold 48/2 = 24 clips in May.", "<think>x</think> <|im_end|>\n", "It's 3.5% of $1,200."):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.encode_chat("What?", "Be brief.") == theirs.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}],
        add_generation_prompt=True,
        return_dict=False,
    )


def test_code_that_a_model_brings_along_is_not_run_even_if_somebody_says_yes(tmp_path):
    """transformers asks on a terminal whether it may, unless it is told that it may not."""
    auto_map = {"AutoTokenizer": ["theirs.Theirs", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": {}}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Theirs", "auto_map": auto_map}))
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('it ran')\nclass Theirs: pass\n")
    code = f"import pathlib, podium.models.text.tokenizer as t; t._folder_backend(pathlib.Path({str(tmp_path)!r}))"
    home = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", code], input="y\ny\n", capture_output=True, text=True, env=home)
    assert not (tmp_path / "ran").exists()
    assert "ModelError" in done.stderr
    assert "Do you wish to run" not in done.stdout


def test_a_chat_template_is_given_the_options_of_the_config(tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }} {% if enable_thinking %}two{% else %}brief{% endif %}")
    folder = write_tokenizer(tmp_path)
    texts = {
        thinking: load_tokenizer(folder, str(template), {"enable_thinking": thinking}).encode_chat("user", None)
        for thinking in (True, False)
    }
    words = {thinking: [WORDS[token] for token in tokens] for thinking, tokens in texts.items()}
    assert words == {True: ["user", "two"], False: ["user", "brief"]}
