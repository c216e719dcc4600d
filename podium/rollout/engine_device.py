"""The interface between a rollout engine and its device. No jax: the planner's device is simulated."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from podium.config.schema import RolloutConfig
from podium.models.blocks.choices import ChoiceFormat
from podium.rollout.answer import TextDecoder
from podium.rollout.request import PromptScores, Request
from podium.rollout.scheduler import Copy, DecodeRow, PrefillCall
from podium.rollout.sequence import Sequence as EngineSequence

if TYPE_CHECKING:
    from podium.compile_ahead import Call
    from podium.sharding import Params


class EngineModel(NamedTuple):
    """The properties of the model that the host needs."""

    vocab: int
    num_cells: int = 0
    """Cells of the cache over all shards; 0 if sequences are stored only in pages."""
    choices: int = 0
    """Number of experts that a token is sent to, summed over layers; 0 without experts."""
    choice_format: ChoiceFormat = "uint8"


class DrawnRows(NamedTuple):
    """The results of a decode call, on the host."""

    counts: list[int]
    """Number of tokens sampled in each slot, [S]."""
    tokens: Sequence[list[int]]
    """Sampled tokens, [S, 1 + k]: column 0 is the first token of rows that asked for one, and columns from 1 on have
    one token per step. Columns after the last token of all slots may be cut off."""
    logprobs: Sequence[list[float]]
    """Log-probabilities of the tokens under the distribution that was sampled, [S, 1 + k]; empty rows on a simulated
    device."""
    full_logprobs: Sequence[list[float]]
    """Log-probabilities under the softmax before penalty, top-k, top-p and min-p, [S, 1 + k]."""
    finite: list[bool]
    """Whether all logits of each slot were finite, [S]; a slot stops at the first that is not."""
    choices: np.ndarray | None
    """Experts of the tokens preceding the sampled ones, [S, 1 + k, C]; None without experts."""
    steps: int
    """Number of decode steps that ran."""


class PrefilledRows(NamedTuple):
    """The results of a prefill call, on the host."""

    choices: np.ndarray | None
    """Experts of the tokens, [R, T, C]; None without experts."""
    scores: PromptScores | None
    """For each token, scores of the token after it, [R, T] each; None if no row asks for scores."""


class EngineDevice(Protocol):
    """Weights, cache and slots, and calls that update them; only `wait`, and reading a call's results, block."""

    overlap: bool
    """Whether to issue a decode call before the previous one is read; a slot then stays empty for one more call when
    its sequence ends."""

    @property
    def config(self) -> RolloutConfig:
        """Lengths, slots, pages and rows of the calls."""
        ...

    @property
    def model(self) -> EngineModel:
        """What the engine knows of the model."""
        ...

    @property
    def shards(self) -> int:
        """Number of devices, or groups of devices, over which slots and pages are split."""
        ...

    @property
    def loaded(self) -> bool:
        """Whether weights are loaded."""
        ...

    def load(self, params: "Params") -> None:
        """Copy these weights and use them from now on, instead of the old ones."""
        ...

    def unload(self) -> None:
        """Free the memory of weights and cache."""
        ...

    def forget(self) -> None:
        """Free the memory of the cache."""
        ...

    def resize(self, slots: int) -> None:
        """Use the decode program with `slots` slots from now on; all slots become empty."""
        ...

    def warm_up(self, chunks: Iterable[int], sizes: Iterable[int], tokenizer: TextDecoder | None) -> None:
        """Compile every program; leaves the slots empty, at the last of `sizes`."""
        ...

    def extra_calls(self, request: Request) -> "dict[str, Call]":
        """The calls that this request needs but `warm_up` does not compile, by name, with abstract arguments.

        Compile them (`Call.lower`), on any thread, before the request is submitted, or `RolloutEngine.step` waits.
        """
        ...

    def wait(self) -> None:
        """Block until all issued calls have finished."""
        ...

    def num_compiled(self) -> int:
        """Number of programs that have been compiled so far."""
        ...

    def prefill(self, call: PrefillCall) -> Callable[[], PrefilledRows] | None:
        """Issue a prefill call. Returns a function that waits for its results, or None if it has no results to read."""
        ...

    def copy(self, copies: tuple[Copy, ...]) -> None:
        """Issue copies of pages within each shard."""
        ...

    def copy_cells(self, copies: tuple[Copy, ...]) -> None:
        """Issue copies of cells within each shard."""
        ...

    def decode(self, rows: tuple[DecodeRow, ...], tokenizer: TextDecoder | None) -> Callable[[], DrawnRows]:
        """Issue a decode call. Returns a function that waits for its tokens."""
        ...

    def nonfinite(self, sequence: EngineSequence) -> str:
        """Describe in a sentence where a sequence's logits became NaN or infinite."""
        ...
