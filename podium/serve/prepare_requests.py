"""Converts clients' bodies to requests of the engine: encodes prompts, and checks that they fit. No jax."""

import dataclasses
import json
from collections.abc import Sequence

from podium.models.text.tokenizer import Tokenizer
from podium.rollout.request import Request, SamplingParams
from podium.rollout.sequence import check_sampling, check_tokens
from podium.run.answering import Answering
from podium.sampling.conversations.dialogue import ToolFormat
from podium.serve.bodies import ChatBody, CompletionBody, GenerateBody, RequestError, Sampling
from podium.serve.documents import Document, usage_of
from podium.serve.replies import ChatForm, CompletionForm, EchoForm, Form, TextStream
from podium.tasks.conversations.tool_calls import opens_thought

MAX_VARIANTS = 32
"""How many sets of chat template variables are cached."""
DEFAULT_TOKENS = 16
"""Length of an answer of `/v1/completions` if the client does not set one; OpenAI's default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A client's request, ready for the engine."""

    requests: list[Request]
    form: Form
    texts: list[TextStream]
    """The text stream of each answer."""
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...] = ()
    """Fields of the request that had no effect."""

    def usage(self, drawn: int) -> Document:
        """Token counts in the form that OpenAI's clients read."""
        read = sum(len(request.prompt) for request in self.requests)
        return usage_of(read, drawn if self.form.answers else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The server's model, as requests need it."""

    name: str
    """The name that clients use."""
    tokenizer: Tokenizer
    answering: Answering
    """How answers are sampled by default, and the system prompt."""
    tools: ToolFormat | None
    """How the chat template writes tools and calls; None if its format of calls is not supported."""
    vocab: int
    longest: int
    """Longest prompt plus answer in tokens."""
    most: int
    """Largest number of answers to one request."""
    aliases: tuple[str, ...] = ()
    """Other names that clients may use."""
    _variants: dict[str, tuple[Tokenizer, ToolFormat | None]] = dataclasses.field(
        default_factory=dict[str, tuple[Tokenizer, ToolFormat | None]]
    )
    """Tokenizers and tool formats, by the chat template variables of requests."""

    def check_name(self, name: str | None) -> None:
        """Raise RequestError if a client asks for another model."""
        if name not in (None, self.name, *self.aliases):
            message = f"model: unknown model {name!r}; this server has {self.name!r}"
            raise RequestError(message, "model", status=404, code="model_not_found")

    def completions(self, body: CompletionBody) -> Prepared:
        """Make requests for prompts. Raises RequestError if they do not fit."""
        self.check_name(body.model)
        if body.logprobs and self._sampling(body).temperature:
            raise RequestError(
                "logprobs: the likeliest token is known only for greedy answers; set logprobs to 0, or temperature "
                "to 0",
                "logprobs",
            )
        self._check_answers(body.n * len(body.prompt))
        _check_echo(body)
        prompts = [self.tokenizer.encode_prompt(each) if isinstance(each, str) else each for each in body.prompt]
        most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        requests = self._requests(prompts, body, max(1, most), "prompt")
        if not body.echo:
            return self._prepared(requests, CompletionForm(tokenizer=self.tokenizer, logprobs=body.logprobs), body)
        requests = [dataclasses.replace(each, score_prompt=body.logprobs is not None) for each in requests]
        texts = [each if isinstance(each, str) else self.tokenizer.spelled(list(each)) for each in body.prompt]
        form = EchoForm(
            tokenizer=self.tokenizer,
            logprobs=body.logprobs,
            prompts=list(zip(texts, prompts, strict=True)),
            answers=most > 0,
        )
        return self._prepared(requests, form, body)

    def chat(self, body: ChatBody) -> Prepared:
        """Make a request for a message. Raises RequestError if it does not fit, or the chat template rejects it."""
        self.check_name(body.model)
        self._check_answers(body.n)
        shown, variables = body.schemas, self.tokenizer.chat_format.variables
        try:
            tokenizer, tools = self._written(json.dumps(body.options(variables), sort_keys=True))
        except ValueError as error:
            raise RequestError(f"chat_template_kwargs: {error}", "chat_template_kwargs") from None
        if shown and tools is None:
            raise RequestError(
                "tools: the format in which the model's chat template writes calls is not supported", "tools"
            )
        messages = body.conversation(arguments_as_text=tools is not None and tools.arguments_as_text)
        messages = self.answering.messages(messages)
        messages = messages if tools is None else tools.with_tools(messages, shown)
        chat, begun = tokenizer.chat_format, ""
        try:
            text = chat.render(messages, tools=shown, answer=True)
            if tools is not None and body.must_call is not None:
                begun = tools.begun(body.must_call or None)
            prompt = (*chat.encode(text), *chat.encode(begun))
        except ValueError as error:
            raise RequestError(f"messages: {error}", "messages") from None
        form = ChatForm(
            tokenizer=self.tokenizer,
            logprobs=body.logprobs,
            tools=shown,
            format=tools if shown else None,
            begun=begun,
            thinking=opens_thought(text),
            parallel=body.parallel_tool_calls,
        )
        requests = self._requests([prompt], body, body.most_tokens, "messages")
        return dataclasses.replace(self._prepared(requests, form, body), ignored=tuple(body.ignored(variables)))

    def generate(self, body: GenerateBody) -> list[Request]:
        """Make requests for tokens. Raises RequestError if they do not fit."""
        self.check_name(body.model)
        sampling = body.sampling_params
        self._check_answers(sampling.n)
        prompt = tuple(body.token_ids)
        return self._requests([prompt], sampling, sampling.max_tokens, "token_ids", "sampling_params.")

    def _written(self, options: str) -> tuple[Tokenizer, ToolFormat | None]:
        """The tokenizer and tool format with these variables for the chat template, given as JSON.

        Raises ValueError if the template cannot be rendered with them.
        """
        if options == "{}":
            return self.tokenizer, self.tools
        made = self._variants.get(options)
        if made is None:
            tokenizer = self.tokenizer.with_options(json.loads(options))
            made = tokenizer, None if self.tools is None else ToolFormat("tools", tokenizer)
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
            self._variants[options] = made
        return made

    def _sampling(self, asked: Sampling) -> SamplingParams:
        return asked.params(self.answering.sampling)

    def _check_answers(self, count: int) -> None:
        if count > self.most:
            raise RequestError(f"n: {count} answers are requested, and at most {self.most} are possible", "n")

    def _prepared(self, requests: list[Request], form: Form, body: CompletionBody | ChatBody) -> Prepared:
        return Prepared(
            requests=requests,
            form=form,
            texts=[
                TextStream(self.tokenizer, request.sampling.stop)
                for request in requests
                for _ in range(request.completions)
            ],
            stream=body.stream,
            include_usage=body.stream_options.include_usage,
            ignored=tuple(body.notes),
        )

    def _requests(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling: Sampling,
        max_tokens: int | None,
        field: str,
        prefix: str = "",
    ) -> list[Request]:
        """Make requests for the prompts in `field`; without `max_tokens`, the model's default length applies.

        `prefix` precedes field names of `sampling` in error messages.
        """
        longest = max(map(len, prompts))
        if longest >= self.longest:
            raise RequestError(
                f"{field}: has {longest} tokens, and a prompt with its answer may have at most {self.longest}; "
                "shorten it",
                field,
                code="context_length_exceeded",
            )
        try:
            for prompt in prompts:
                check_tokens(prompt, self.vocab, self.longest, "the longest")
        except ValueError as error:
            raise RequestError(f"{field}: {error}", field) from None
        try:
            params = self._sampling(sampling)
            one = dataclasses.replace(params, max_new_tokens=1)
            check_sampling(one, self.tokenizer, longest=self.longest, vocab=self.vocab)
        except ValueError as error:
            beyond = any(token >= self.vocab for token in sampling.stop_token_ids)
            named = f"{prefix}{'stop_token_ids' if beyond or not sampling.stop else 'stop'}"
            raise RequestError(f"{named}: {error}", named) from None
        room, usual = self.longest - longest, params.max_new_tokens
        if max_tokens is not None and max_tokens > room:
            raise RequestError(
                f"{prefix}max_tokens: is {max_tokens}, which with the {field} is more than {self.longest} tokens; ask "
                f"for at most {room}",
                f"{prefix}max_tokens",
                code="context_length_exceeded",
            )
        seed = sampling.drawn_seed
        return [
            Request(
                prompt=prompt,
                sampling=dataclasses.replace(
                    params, max_new_tokens=max_tokens or min(usual, self.longest - len(prompt))
                ),
                seed=seed,
                completions=sampling.n,
            )
            for prompt in prompts
        ]


def _check_echo(body: CompletionBody) -> None:
    """Raise RequestError if `echo` is used in an unsupported way, or if neither echo nor tokens are asked for."""
    if body.max_tokens == 0 and not body.echo:
        raise RequestError(
            "max_tokens: 0 returns only the prompt, which needs echo; ask for at least 1 token, or set echo",
            "max_tokens",
        )
    if body.echo and (body.stream or body.n > 1):
        raise RequestError("echo: only possible for one whole answer; leave out stream and n", "echo")
