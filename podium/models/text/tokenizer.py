"""Tokenises text with transformers' tokenizer, from a Hugging Face folder or built from GGUF metadata."""

import contextlib
import copy
import datetime
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from podium.models.architecture import MAX_SIZE, ModelError, shown
from podium.models.files import gguf
from podium.models.files.folder import read_json
from podium.models.files.source import ModelSource
from podium.models.text.chat_format import ChatFormat, Message
from podium.models.text.template import ChatTemplate
from podium.plain import clean

# Pre-tokenisation of llama.cpp's `tokenizer.ggml.pre`: the regular expressions of the models' own tokenizer.json.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35_SPLIT = QWEN2_SPLIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN_SPLIT = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_AFTER}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_SPLIT = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SHORT}|{_BEFORE}{_UPPER}+{_LOWER}*{_SHORT}|\p{{N}}{{1,3}}{_AFTER}"
SPLITS = {
    "llama-bpe": LLAMA3_SPLIT,
    "llama3": LLAMA3_SPLIT,
    "qwen2": QWEN2_SPLIT,
    "deepseek-r1-qwen": QWEN2_SPLIT,
    "qwen35": QWEN35_SPLIT,
    "tekken": TEKKEN_SPLIT,
    "gpt-4o": GPT4O_SPLIT,
}
WHOLE_TOKENS = ("llama-bpe", "llama3", "tekken")
"""Pre-tokenisations whose tokenizers look up a whole piece in the vocabulary before applying merges."""
COMPOSED = ("qwen2", "deepseek-r1-qwen", "qwen35")
"""Pre-tokenisations whose tokenizers first apply Unicode normalisation (NFC)."""
SPLITS_AS_GPT2 = ("gpt-2", "smollm")
CONTROL, USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type`
SPACE = "\u2581"  # SentencePiece's symbol for a space


class Tokenizer:
    """A tokenizer with a chat template, and the tokens that end a completion."""

    def __init__(
        self,
        backend: Any,
        *,
        eos_tokens: tuple[int, ...],
        template_name: str = "chat_template",
        template_options: Mapping[str, object] = MappingProxyType({}),
        template_date: datetime.date | None = None,
    ):
        """Wrap a transformers tokenizer; its own end-of-sequence token is added to `eos_tokens`.

        Error messages about its chat template begin with `template_name`; `template_options` are variables for it, and
        `template_date` is the date that it shows (None: the current one).
        Raises ModelError if no token ends a sequence.
        """
        own = () if backend.eos_token_id is None else (backend.eos_token_id,)
        self._backend = backend
        self._template_name = template_name
        self._template_options = template_options
        self._template_date = template_date
        self.eos_tokens: tuple[int, ...] = tuple(dict.fromkeys((*own, *eos_tokens)))
        self.bos_token: int | None = backend.bos_token_id
        if not self.eos_tokens:
            raise ModelError("the tokenizer has no end-of-sequence token; set eos_token in tokenizer_config.json")
        names = {str(token.content): number for number, token in backend.added_tokens_decoder.items() if token.special}
        self.special_tokens: dict[str, int] = names
        self.pad_token: int = self.eos_tokens[0] if backend.pad_token_id is None else backend.pad_token_id

    def encode_chat(self, question: str, system_prompt: str | None) -> list[int]:
        """Encode a question up to the start of the answer; a None or empty system prompt adds no message."""
        messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages.append({"role": "user", "content": question})
        return self.encode_messages(messages)

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Encode a conversation of messages (`role`, `content`) up to the start of the assistant's answer.

        Raises ModelError if the chat template cannot be rendered with them or takes too long.
        """
        return self.chat_format.encode(self.chat_format.render(messages, answer=True))

    @property
    def has_template(self) -> bool:
        """Whether it has a chat template."""
        return bool(self._backend.chat_template)

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        """The model's chat format; of several named templates, with `default`. Raises ModelError if its template is
        invalid.
        """
        try:
            source = self._backend.get_chat_template()
        except ValueError as error:
            raise ModelError(f"{self._template_name}: {error}") from error
        if not isinstance(source, str):
            raise ModelError(f"{self._template_name}: expected a text, found {shown(source)}")
        special = {name: token for name, token in self._backend.special_tokens_map.items() if isinstance(token, str)}
        return ChatFormat(
            ChatTemplate(source, special, name=self._template_name, date=self._template_date),
            named=self._backend.added_tokens_decoder,
            encode=self.encode,
            options=self._template_options,
        )

    def with_options(self, options: Mapping[str, object]) -> "Tokenizer":
        """A copy with these variables for the chat template; they take precedence over the tokenizer's own."""
        other = copy.copy(self)
        other._template_options = {**self._template_options, **options}
        other.__dict__.pop("chat_format", None)  # made of the options
        return other

    def check_vocab(self, vocab: int) -> None:
        """Raise ModelError if the tokenizer uses tokens beyond the weights' vocabulary of `vocab` tokens."""
        if beyond := [token for token in (*self.eos_tokens, *self.encode_chat("question", None)) if token >= vocab]:
            raise ModelError(
                f"the tokenizer uses token {beyond[0]}, but the weights have {vocab:,} tokens, numbered from 0: they"
                " belong to different models"
            )

    def first_difference(self, other: "Tokenizer") -> str:
        """The first token in which another tokenizer differs from this one, special ones included; empty if none."""
        mine, theirs = ({token: text for text, token in each._backend.get_vocab().items()} for each in (self, other))
        for token in sorted(mine.keys() | theirs.keys()):
            if mine.get(token) != theirs.get(token):
                own, its = (repr(each[token]) if token in each else "missing" for each in (mine, theirs))
                return f"token {token} is {own} and {its}"
        for name in sorted(self.special_tokens.keys() | other.special_tokens.keys()):
            if (name in self.special_tokens) != (name in other.special_tokens):
                return f"{name!r} is a special token of one of them only"
        return ""

    def encode(self, text: str) -> list[int]:
        """Encode plain text, without beginning- or end-of-sequence tokens."""
        return self._backend.encode(clean(text), add_special_tokens=False)

    def ends(self, text: str) -> list[tuple[int, int]]:
        """The start and end character of each token of a text, which is encoded like a tool's message."""
        found: list[tuple[int, int]] = []
        begin = 0
        for piece in self.chat_format.plain_pieces(text):
            made = self._backend(piece, add_special_tokens=False, return_offsets_mapping=True)
            found += [(begin + start, begin + end) for start, end in made["offset_mapping"]]
            begin += len(piece)
        return found

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Encode a text unchanged, preceded by the tokens that the model expects, such as Llama's BOS."""
        return tuple(self._backend.encode(clean(text)))

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens to text, omitting special tokens."""
        return self._backend.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def spelled(self, tokens: list[int]) -> str:
        """Decode tokens to text, special tokens included."""
        return self._backend.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token, special tokens included; an incomplete character is shown as U+FFFD."""
        return [self._backend.decode([token], clean_up_tokenization_spaces=False) for token in tokens]

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files, chat template included, in a form that transformers 4 and 5 read."""
        self._backend.save_pretrained(folder)
        path = folder / "tokenizer_config.json"
        text = path.read_text(encoding="utf-8")
        in_4 = text.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')  # the class's name in transformers 4
        path.write_text(in_4, encoding="utf-8")


def load_tokenizer(
    source: ModelSource,
    chat_template: str | None = None,
    template_options: Mapping[str, object] = MappingProxyType({}),
    *,
    template_date: str | None = None,
    template: bool = True,
) -> Tokenizer:
    """Load a model's tokenizer, optionally with a chat template from a Jinja file instead of its own.

    `template_options` are variables for the template, such as `enable_thinking`. `template_date` (YYYY-MM-DD) is the
    date that the template shows, if it shows one; None: the current date. With `template` False, the tokenizer
    need not have a chat template, and conversations cannot be encoded if it has none.

    Raises ModelError if the tokenizer or its chat template is missing, or if the template cannot be rendered.
    """
    if source.kind == "gguf":
        backend, eos_tokens = _gguf_backend(source.header), _gguf_eos_tokens(source.header)
    else:
        backend, eos_tokens = _folder_backend(source.path), _folder_eos_tokens(source.path)
    if chat_template is not None:
        try:
            backend.chat_template = Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"chat_template {chat_template!r}: cannot be read ({error})") from error
    if template and not backend.chat_template:
        raise ModelError(
            f"model {source.name!r}: its tokenizer has no chat template; write one and set chat_template: path.jinja"
        )
    name = f"chat_template {chat_template or f'of model {source.name!r}'}"
    with _reading(source.path):
        tokenizer = Tokenizer(
            backend,
            eos_tokens=eos_tokens,
            template_name=name,
            template_options=template_options,
            template_date=None if template_date is None else datetime.date.fromisoformat(template_date),
        )
        if template:
            tokenizer.encode_chat("question", None)
            if tokenizer.chat_format.ignores_user():
                raise ModelError(
                    f"{name}: leaves out what the user says, perhaps because it reads lists of parts, not text; give"
                    " one that writes message.content: chat_template: path.jinja"
                )
    return tokenizer


def _import_transformers() -> ModuleType:
    """Import transformers without its warning about torch and without progress bars."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    transformers.logging.disable_progress_bar()
    return transformers


def _folder_backend(folder: Path) -> Any:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            read_json(folder / name)  # its errors are of one kind
    transformers = _import_transformers()
    with _reading(folder):
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@contextlib.contextmanager
def _reading(where: Path) -> Iterator[None]:
    """Raise ModelError if transformers or tokenizers cannot build a tokenizer from the files at `where`.

    They do not validate files, so a damaged one may raise any exception, or panic in Rust, which is a BaseException.
    """
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(f"{where}: has no tokenizer that transformers can load ({reason})") from error


def _folder_eos_tokens(folder: Path) -> tuple[int, ...]:
    """The end-of-sequence tokens in generation_config.json, or else in config.json."""
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if found is not None:
            tokens = found if isinstance(found, list) else [found]
            return tuple(_token(token, f"{folder / name}: eos_token_id") for token in tokens)
    return ()


def _token(value: object, where: str, most: int = MAX_SIZE) -> int:
    """Check a token id, from 0 to `most`, and return it. Raises ModelError for other values."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ModelError(f"{where}: expected a token's number from 0 to {most}, found {shown(value)}")
    return value


def _gguf_eos_tokens(header: gguf.GgufHeader) -> tuple[int, ...]:
    """End of sequence, of turn, and of message, if defined."""
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    found = {key: header.metadata[key] for key in keys if key in header.metadata}
    return tuple(_token(token, f"{header.path}: {key}") for key, token in found.items())


def _gguf_backend(header: gguf.GgufHeader) -> Any:
    """Build a transformers tokenizer from GGUF metadata; transformers' own GGUF reader needs torch."""
    from tokenizers import AddedToken, processors

    said = _checked(header)
    kind = said["model"]
    vocab = {token: index for index, token in enumerate(said["tokens"])}
    with _reading(header.path):
        rust = _byte_level(said, vocab, header.path) if kind == "gpt2" else _sentencepiece(said, vocab)
        # Tokens that are matched whole: control tokens, which are left out when decoding, and user-defined ones.
        for kind_of_token, add in ((CONTROL, rust.add_special_tokens), (USER_DEFINED, rust.add_tokens)):
            marked = zip(said["tokens"], said.get("token_type", []), strict=False)
            texts = [text for text, each in marked if each == kind_of_token]
            add([AddedToken(text, normalized=False, special=kind_of_token == CONTROL) for text in texts])
    if said.get("add_bos_token", kind == "llama") and "bos_token_id" in said:
        bos, index = said["tokens"][said["bos_token_id"]], said["bos_token_id"]
        # Prepended to text that is encoded with special tokens: Podium does not do that, but users of an export may.
        rust.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, index)])
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: said.get(f"{key}_token_id") for name, key in named.items()}
    return _import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=rust,
        chat_template=header.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: said["tokens"][token] for name, token in ids.items() if token is not None},
    )


# Types of the values under `tokenizer.ggml.`; for lists, the types of the elements.
GGUF_LISTS: Mapping[str, tuple[type, ...]] = {
    "tokens": (str,),
    "merges": (str,),
    "scores": (float, int),
    "token_type": (int,),
}
GGUF_SCALARS: Mapping[str, type] = {"pre": str, "add_bos_token": bool, "add_space_prefix": bool}


def _checked(header: gguf.GgufHeader) -> dict[str, Any]:
    """Metadata of a file's tokenizer, without the prefix `tokenizer.ggml.`. Raises ModelError for invalid values."""
    said = {key.removeprefix("tokenizer.ggml."): value for key, value in header.metadata.items()}
    where = f"{header.path}: tokenizer.ggml."
    if said.get("model") not in ("gpt2", "llama") or "tokens" not in said:
        raise ModelError(
            f"{header.path}: tokenizer model {shown(said.get('model'))} is not supported; gpt2 and llama are"
        )
    for key, kinds in GGUF_LISTS.items():
        value = said.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, kinds) for each in value):
            raise ModelError(f"{where}{key} must be a list of {kinds[0].__name__}, found {shown(value)}")
    for key, kind in GGUF_SCALARS.items():
        if key in said and not isinstance(said[key], kind):
            raise ModelError(f"{where}{key} must be a {kind.__name__}, found {shown(said[key])}")
    for kind in ("bos", "eos", "unknown", "padding"):
        key = f"{kind}_token_id"
        if key in said:
            _token(said[key], where + key, len(said["tokens"]) - 1)
    if said["model"] == "llama" and len(said.get("scores", ())) != len(said["tokens"]):
        raise ModelError(f"{where}scores must have one number for each of the {len(said['tokens'])} tokens")
    if any(merge.count(" ") != 1 for merge in said.get("merges", ())):
        raise ModelError(f"{where}merges must be pairs of tokens with a space between them")
    return said


def _byte_level(said: dict[str, Any], vocab: dict[str, int], path: Path) -> Any:
    """Byte-level BPE, as in GPT-2, Llama 3, Qwen and SmolLM2."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = said.get("pre", "gpt-2")
    if split not in SPLITS and split not in SPLITS_AS_GPT2:
        supported = ", ".join((*SPLITS, *SPLITS_AS_GPT2))
        raise ModelError(f"{path}: tokenizer.ggml.pre {split!r} is not supported; these are: {supported}")
    merges = [tuple(merge.split(" ")) for merge in said.get("merges", ())]
    rust = Tokenizer(models.BPE(vocab, merges, ignore_merges=split in WHOLE_TOKENS))
    if split in SPLITS:
        first = pre_tokenizers.Split(Regex(SPLITS[split]), behavior="isolated")
    else:
        first = pre_tokenizers.Digits(individual_digits=True) if split == "smollm" else None
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split not in SPLITS)
    rust.pre_tokenizer = pre_tokenizers.Sequence([first, bytes_]) if first is not None else bytes_
    if split in COMPOSED:
        rust.normalizer = normalizers.NFC()
    rust.decoder = decoders.ByteLevel()
    return rust


def _sentencepiece(said: dict[str, Any], vocab: dict[str, int]) -> Any:
    """SentencePiece BPE with byte fallback, as in Llama 2."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = said["tokens"][said.get("unknown_token_id", 0)]
    merges = _merges_by_score(vocab, said["scores"])
    rust = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend(SPACE)] if said.get("add_space_prefix", True) else []
    rust.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    rust.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return rust


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges implied by SentencePiece's scores: every way to split a token into two, best token first."""
    merges = []
    for token, index in vocab.items():
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = sorted((vocab[a], vocab[b], a, b) for a, b in halves if a in vocab and b in vocab)
        merges.extend((scores[index], a, b) for _, _, a, b in pairs)
    merges.sort(key=lambda merge: merge[0], reverse=True)
    return [(a, b) for _, a, b in merges]
