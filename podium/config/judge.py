"""The settings of a judge: a language model on an OpenAI-compatible server that grades answers."""

from typing import Annotated

from pydantic import Field

from podium.config.section import Finite, NotNegative, Positive, PositiveFloat, Section


class JudgeConfig(Section):
    """A judge; it grades the tasks whose `rewards` name it (docs/rewards.md)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")]
    """Name of the judge as a part in `tasks[].rewards`, which sets its weight, and in metrics and samples."""
    # verifiers: judge_client
    url: Annotated[str, Field(pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$")]
    """Base URL of an OpenAI-compatible server, such as `http://127.0.0.1:8000/v1`; `/chat/completions` is added."""
    model: str
    """Name of the model on that server."""
    rubric: str  # verifiers: judge_prompt
    """What makes an answer good, and what the numbers mean; in the prompt, the conversation and the task's answer
    follow."""
    lowest: Finite = 0.0
    """Grade of the worst answer, which earns 0."""
    highest: Finite = 10.0
    """Grade of the best answer, which earns 1; grades outside this range are rejected."""
    key_env: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None  # verifiers: judge_client
    """Environment variable with the server's API key; unset: no key."""
    max_tokens: Positive = 1024  # verifiers: judge_sampling_args
    """Longest reply in tokens, reasoning included."""
    timeout_s: PositiveFloat = 60.0
    """Time limit of one request in seconds."""
    retries: NotNegative = 5
    """Retries of a request that gets no response, or status 408, 409, 425, 429 or 5xx; after 0.5 s, 1 s, 2 s, ..., or
    the server's Retry-After. If the last one fails, the run stops and can be continued."""
    concurrency: Positive = 16
    """Requests at once, on each host."""
