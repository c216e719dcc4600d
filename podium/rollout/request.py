"""What goes into the rollout engine and what comes out: plain data, no jax."""

import dataclasses
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end the completion; they stay in its text and tokens (to the end of the last token)."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end it, besides the model's end-of-sequence tokens. At most 8 with those."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to be completed `completions` times; it is prefilled once."""

    prompt: tuple[int, ...]
    """Token ids, chat template applied; at least one."""
    sampling: SamplingParams
    seed: int
    """With the index of the completion and the position it decides every draw: whatever else runs beside it."""
    completions: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer of the model."""

    tokens: np.ndarray
    """[n] int32, the end-of-sequence token included; n >= 1."""
    sampled_logprobs: np.ndarray
    """[n] float32, of each token under the distribution it was drawn from."""
    full_logprobs: np.ndarray
    """[n] float32, of each token under the softmax at the request's temperature (1 where it is greedy), before top-k,
    top-p and min-p: what a trainer's log-probabilities are compared with. Equal to `sampled_logprobs` without those."""
    text: str
    """Without special tokens."""
    finish_reason: FinishReason
