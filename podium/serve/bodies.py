"""Request bodies: checks them field by field, and converts them to sampling settings and messages.

The fields are OpenAI's, and those of `/inference/v1/generate`. A field that the server does not support is refused by
name, unless it has its neutral value. No jax.
"""

import codecs
import dataclasses
import json
import re
import secrets
from collections.abc import Container, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    JsonValue,
    PlainValidator,
    ValidationError,
    model_validator,
)

from podium.config.section import SMALLEST
from podium.models.text.chat_format import Message, ToolSchema
from podium.plain import clean_texts, once, plain
from podium.rollout.request import SamplingParams

MAX_FIELDS = 64
"""Most fields of an object in a request."""
MAX_COMPLETIONS = 128
SHORT_ID = re.compile("[A-Za-z0-9]{9}")
VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]{0,63}")
TEMPLATES_OWN = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of chat templates that a request sets by other fields."""
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""A surrogate, as escaped in JSON."""
SHOWN = 60
"""How many characters of a wrong value an error message shows."""


class RequestError(Exception):
    """A refused request, with the HTTP status and the error fields that OpenAI's clients read."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """`param` is the invalid field; `retry_after_s` is the time in seconds after which a retry may succeed."""
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def document(self) -> dict[str, object]:
        """The JSON object of the error response."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def too_large(most: int) -> RequestError:
    """The error for a body of more than `most` bytes."""
    return RequestError(f"the body is larger than {most} bytes", status=413)


def _only(*values: object) -> AfterValidator:
    """Accept only these values, which have no effect."""

    def check(value: object) -> object:
        if value not in values:
            raise ValueError(f"only {json.dumps(values[0])} is supported; leave the field out")
        return value

    return AfterValidator(check)


def _tuple(value: object) -> object:
    """Convert a list to a tuple, and a text to a tuple of one."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Convert a text, a list of token ids, or a list of either to a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(each, str) for each in value):
            return tuple(value)
        if _are_tokens(value):
            return (tuple(value),)
        if all(isinstance(each, list) and _are_tokens(each) for each in value):
            return tuple(map(tuple, value))
    raise ValueError("give a text, a list of token ids, or a non-empty list of either")


def _are_tokens(values: Sequence[object]) -> bool:
    return all(isinstance(each, int) and not isinstance(each, bool) for each in values)


def _or_none(arguments: str) -> str:
    """A call's arguments; some clients send an empty text for no arguments."""
    return arguments if arguments.strip() else "{}"


def _zero_or_more(value: float) -> float:
    if 0 < value < SMALLEST:
        raise ValueError(f"a value above 0 must be at least {SMALLEST:g}")
    return value


def _content(value: object) -> object:
    """The text of a message's content, which may be split into parts."""
    if not isinstance(value, list):
        return value
    texts = [part.get("text") for part in value if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(value) or not all(isinstance(text, str) for text in texts):
        raise ValueError("only parts of type text are supported, each with its text")
    return "".join(map(str, texts))


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    """Check the parts of a tool's JSON schema that are needed to parse its calls."""
    properties = value.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(each, dict) for each in properties.values()):
        raise ValueError("properties must be an object that contains schemas")
    for name, schema in properties.items():
        options = schema.get("anyOf", [])
        if not isinstance(options, list) or not all(isinstance(each, dict) for each in options):
            raise ValueError(f"anyOf of {name!r} must be a list of schemas")
    return value


class _Object(BaseModel):
    """A JSON object with known fields; null means the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, raw: object) -> object:
        if not isinstance(raw, dict):
            return raw
        if len(raw) > MAX_FIELDS:
            raise ValueError(f"an object has {len(raw)} fields, and at most {MAX_FIELDS} are allowed")
        return {name: value for name, value in raw.items() if value is not None}


Tokens = Annotated[list[int], FailFast(), Field(min_length=1)]


class Sampling(_Object):
    """The sampling fields that all requests have."""

    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=1e6), AfterValidator(_zero_or_more)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0), AfterValidator(_zero_or_more)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], BeforeValidator(_tuple), Field(max_length=8)] | None = None  # fmt: skip  # noqa: E501
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], BeforeValidator(_tuple), Field(max_length=8)] = ()  # fmt: skip  # noqa: E501
    frequency_penalty: Annotated[object, _only(0)] = 0
    presence_penalty: Annotated[object, _only(0)] = 0
    repetition_penalty: Annotated[float, Field(ge=SMALLEST, le=1e6)] | None = None
    logit_bias: Annotated[object, _only({})] = Field(default_factory=dict)
    min_tokens: Annotated[object, _only(0)] = 0
    ignore_eos: Annotated[object, _only(False)] = False

    def params(self, usual: SamplingParams) -> SamplingParams:
        """The engine's sampling settings: the request's, or else the `usual` ones."""
        given: dict[str, object] = {
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "stop": self.stop,
            "stop_tokens": self.stop_token_ids,
        }
        given = {name: value for name, value in given.items() if value is not None}
        asked = dataclasses.replace(usual, **given)
        return asked.at(usual.temperature if self.temperature is None else self.temperature)

    @property
    def drawn_seed(self) -> int:
        """The client's seed, or a new random one."""
        return secrets.randbits(63) if self.seed is None else self.seed


def drawing_fields(body: Sampling) -> list[str]:
    """The sampling fields that a body sets, except lengths and stop conditions."""
    return [name for name in DRAWING if getattr(body, name) is not None]


class StreamOptions(_Object):
    """What a stream contains in addition to the answer."""

    include_usage: bool = False
    include_obfuscation: object = None
    """Ignored."""


NOTES = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("verbosity", "prediction"),
)
"""Fields that are accepted and ignored: notes of the client, and hints."""
DRAWING = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")
"""Sampling fields; ignored while a run trains, because training sets its own."""


class _Asked(Sampling):
    """The fields that completion and chat requests have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: object = None
    """Ignored, like all fields in NOTES."""
    metadata: object = None
    store: object = None
    service_tier: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None
    prompt_cache_retention: object = None

    @property
    def notes(self) -> list[str]:
        """The fields that the request sets and that have no effect."""
        return [name for name in NOTES if getattr(self, name, None)]


class CompletionBody(_Asked):
    """The body of `/v1/completions`."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Longest answer in tokens; 0, with `echo`, returns only the prompt."""
    echo: bool = False
    best_of: Annotated[object, _only(1)] = 1
    suffix: Annotated[object, _only("")] = ""


class FunctionCall(_Object):
    """A tool call of an earlier answer."""

    name: str
    arguments: Annotated[str, AfterValidator(_or_none)]
    """JSON text; empty for no arguments."""


class CallBody(_Object):
    """A `FunctionCall` with its id, to which a tool's message refers."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Ignored, like the next field; clients copy both from answers."""
    provider_specific_fields: object = None


class _MessageNotes(_Object):
    """Ignored fields of a message; clients copy most of them from answers."""

    type: object = None
    refusal: object = None
    annotations: object = None
    audio: object = None
    reasoning_details: object = None
    thinking_blocks: object = None
    provider_specific_fields: object = None
    cache_control: object = None


class MessageBody(_MessageNotes):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    name: str | None = None
    tool_calls: Annotated[list[CallBody], FailFast()] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """The model's thinking, under the name that chat templates use."""
    reasoning: str | None = None
    """The model's thinking, under the name that other servers use."""

    @property
    def ignored(self) -> list[str]:
        """The fields of this message that are set but have no effect. `name` is among them unless the message is a
        tool's reply.
        """
        names = _MessageNotes.model_fields if self.role == "tool" else ("name", *_MessageNotes.model_fields)
        return [name for name in names if getattr(self, name)]

    def message(self, known: "_Calls", *, arguments_as_text: bool) -> Message:
        """Convert the message to the form that chat templates read; its calls are added to `known`, the earlier
        calls.
        """
        role = "system" if self.role == "developer" else self.role
        message: dict[str, object] = {"role": role, "content": self.content or ""}
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thought
        if role == "tool":
            answered = known.answered(self.tool_call_id)
            message |= {"tool_call_id": answered.id, "name": self.name or answered.name}
        if self.tool_calls:
            ids = known.add(self.tool_calls)
            message["tool_calls"] = [
                {
                    "id": given,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.arguments if arguments_as_text else _arguments(call.function),
                    },
                }
                for given, call in zip(ids, self.tool_calls, strict=True)
            ]
        return message


class _Call(NamedTuple):
    """A tool call of an earlier answer."""

    id: str
    name: str


class _Calls:
    """The tool calls of a conversation so far, with ids of nine characters, as some chat templates require."""

    def __init__(self) -> None:
        self._turns = 0
        self._last: list[tuple[str, _Call]] = []
        """Calls of the last answer that have no reply yet, with the client's ids."""

    def add(self, calls: Sequence[CallBody]) -> list[str]:
        """Add an answer's calls, and return their new ids, which replace the client's."""
        ids = [
            call.id if SHORT_ID.fullmatch(call.id) else f"call{self._turns % 1000:03d}{place % 100:02d}"
            for place, call in enumerate(calls)
        ]
        self._turns += 1
        self._last = [(call.id, _Call(given, call.function.name)) for given, call in zip(ids, calls, strict=True)]
        return ids

    def answered(self, call: str | None) -> _Call:
        """The call that a tool's message answers: the one with its id, or without an id, the next open call of the last
        answer.

        Raises RequestError if no call matches.
        """
        places = [place for place, (given, _) in enumerate(self._last) if call is None or given == call]
        if not places:
            awaited = ", ".join(repr(given) for given, _ in self._last) or "none"
            raise RequestError(
                f"messages: tool_call_id {json.dumps(call)} of a message of role tool matches no call; calls of the "
                f"last answer without a reply: {awaited}",
                "messages",
            )
        return self._last.pop(places[0])[1]


class FunctionBody(_Object):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str = ""
    parameters: Annotated[dict[str, Any], AfterValidator(_schema)] = {"type": "object", "properties": {}}
    strict: bool = False
    """Not supported: arguments may deviate from the schema. Reported as ignored if true."""


class ToolBody(_Object):
    """A function wrapped as a tool."""

    type: Literal["function"] = "function"
    function: FunctionBody

    @property
    def schema_of_tool(self) -> ToolSchema:
        """The tool in the form that chat templates read."""
        given = self.function
        function = {"name": given.name, "description": given.description, "parameters": given.parameters}
        return {"type": "function", "function": function}


class NamedTool(NamedTuple):
    """The tool that the model must call."""

    name: str


def _choice(value: object) -> str | NamedTool:
    """Parse `tool_choice`."""
    if isinstance(value, str) and value in ("auto", "none", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError(
            "must be 'auto', 'none', 'required', or the name of a tool as"
            ' {"type": "function", "function": {"name": NAME}}'
        )
    return NamedTool(name)


class ChatBody(_Asked):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[MessageBody], FailFast(), Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[object, _only(0)] = 0
    tools: Annotated[list[ToolBody], FailFast()] = Field(default_factory=list)
    tool_choice: Annotated[str | NamedTool, PlainValidator(_choice)] = "auto"
    parallel_tool_calls: bool = True
    """False: only the first call of an answer is returned to the client."""
    response_format: Annotated[object, _only({"type": "text"})] = Field(default_factory=lambda: {"type": "text"})
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    reasoning_effort: str | None = None
    modalities: Annotated[object, _only(["text"])] = Field(default_factory=lambda: ["text"])
    verbosity: object = None
    prediction: object = None

    @model_validator(mode="after")
    def _says_one_thing(self) -> "ChatBody":
        for place, message in enumerate(self.messages):
            if message.content is None and message.role in ("system", "developer", "user"):
                where = f"messages.{place}.content"
                raise RequestError(f"{where}: is required in a message of role {message.role}", where)
            if message.reasoning and message.reasoning_content and message.reasoning != message.reasoning_content:
                where = f"messages.{place}.reasoning"
                raise RequestError(
                    f"{where}: differs from reasoning_content, its other name; set only one of them", where
                )
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                f"max_tokens: is {self.max_tokens}, and max_completion_tokens, its newer name, is "
                f"{self.max_completion_tokens}; set only one of them",
                "max_tokens",
            )
        return self

    @model_validator(mode="after")
    def _names_its_tools(self) -> "ChatBody":
        names = [tool.function.name for tool in self.tools]
        twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if twice is not None:
            raise RequestError(f"tools: two of them have the name {twice!r}; names must be unique", "tools")
        if self.tool_choice == "required" and not names:
            raise RequestError("tool_choice: required needs tools, and the request has none", "tool_choice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.name not in names:
            known = ", ".join(names) or "none"
            message = f"tool_choice: {self.tool_choice.name!r} is not one of the tools, which are {known}"
            raise RequestError(message, "tool_choice")
        for name in self.chat_template_kwargs:
            if name in TEMPLATES_OWN:
                where = f"chat_template_kwargs.{name}"
                raise RequestError(f"{where}: is set by other fields of the request; leave it out", where)
            if not VARIABLE.fullmatch(name):
                message = f"chat_template_kwargs: {name!r:.{SHOWN}} is not a valid variable name"
                raise RequestError(message, "chat_template_kwargs")
        return self

    @property
    def most_tokens(self) -> int | None:
        """The longest answer in tokens, from either of the two fields; None if the client sets neither."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def schemas(self) -> list[ToolSchema]:
        """The tools to show to the model."""
        return [] if self.tool_choice == "none" else [tool.schema_of_tool for tool in self.tools]

    @property
    def must_call(self) -> str | None:
        """The tool that the model must call; empty if it must call any tool; None if it need not call one."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.name
        if self.tool_choice != "required":
            return None
        return self.tools[0].function.name if len(self.tools) == 1 else ""

    @property
    def wanted(self) -> dict[str, JsonValue]:
        """Variables for the chat template, from this body's fields."""
        effort: dict[str, JsonValue] = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        return effort | self.chat_template_kwargs

    def options(self, variables: Container[str]) -> dict[str, JsonValue]:
        """The variables for a chat template that reads `variables`."""
        return {name: value for name, value in self.wanted.items() if name in variables}

    def ignored(self, variables: Container[str]) -> list[str]:
        """The fields that have no effect with a chat template that reads `variables`."""
        return [*self.hints, *(name for name in self.wanted if name not in variables)]

    @property
    def hints(self) -> list[str]:
        """The fields that have no effect with any chat template."""
        strict = [f"tools.{place}.function.strict" for place, tool in enumerate(self.tools) if tool.function.strict]
        messages = dict.fromkeys(f"messages.{name}" for message in self.messages for name in message.ignored)
        return [*self.notes, *strict, *messages]

    def conversation(self, *, arguments_as_text: bool) -> list[Message]:
        """The messages in the form that chat templates read."""
        known = _Calls()
        return [message.message(known, arguments_as_text=arguments_as_text) for message in self.messages]


class TokenSampling(Sampling):
    """The sampling fields of `/inference/v1/generate`."""

    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    skip_special_tokens: bool = True
    """Ignored, because the answer has no text."""
    routed_experts_prompt_start: int | None = None
    """Ignored, because the answer does not list experts."""


class GenerateBody(_Object):
    """The body of `/inference/v1/generate`."""

    token_ids: Tokens
    sampling_params: TokenSampling = TokenSampling()
    model: str | None = None
    stream: Annotated[object, _only(False)] = False


Body = TypeVar("Body", bound=BaseModel)


def read_body(kind: type[Body], raw: bytes) -> Body:
    """Parse and check a body. Raises RequestError, which names the first invalid field."""
    try:
        raw.decode()
        body = kind.model_validate_json(_with_whole_characters(raw.removeprefix(codecs.BOM_UTF8)))
        json.loads(raw, object_pairs_hook=once, parse_int=str, parse_float=str)
        return body
    except UnicodeDecodeError as error:
        raise RequestError(f"the body must be JSON in UTF-8, and byte {error.start} is not UTF-8") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    except ValueError as error:
        raise RequestError(f"each key of an object in the body must be unique: {error}") from None
    param = ".".join(str(each) for each in first["loc"]) or None
    if first["type"] in ("json_invalid", "model_type"):
        raise RequestError(f"the body must be a JSON object: {first['msg']}", param)
    if first["type"] == "extra_forbidden":
        raise RequestError(f"{param}: unknown field; leave it out", param)
    if first["type"] == "missing":
        raise RequestError(f"{param}: is required", param)
    reason = first["msg"].removeprefix("Value error, ")
    found = json.dumps(first["input"], default=repr)[:SHOWN]
    raise RequestError(f"{param or 'body'}: {reason[:1].lower()}{reason[1:]}; found {found}", param)


def _with_whole_characters(raw: bytes) -> bytes:
    """Replace lone surrogates in a body by U+FFFD: clients send them back from a model's text, and pydantic rejects
    them.
    """
    if SURROGATE.search(raw) is None:
        return raw
    try:
        return json.dumps(clean_texts(json.loads(raw))).encode()
    except (ValueError, RecursionError):  # pydantic reports what is wrong with the body
        return raw


def _arguments(call: FunctionCall) -> dict[str, object]:
    """Parse a call's arguments, which are JSON text. Raises RequestError if they are not an object."""
    try:
        found = plain(json.loads(call.arguments))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestError(f"messages: the arguments of a call to {call.name} must be a JSON object", "messages")
    return found
