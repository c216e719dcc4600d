"""What a run is once it is resolved: typed parts, each of which one component takes. Data alone: no jax.

Nothing below `podium.run.resolve` derives a number of these again from the settings.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from podium.algorithms.recipes import Recipe
from podium.config.attention import Backend
from podium.config.head import HeadKind
from podium.config.mesh import MeshSizes
from podium.config.optimizer import OptimizerConfig
from podium.config.schema import (
    CheckpointConfig,
    EvalConfig,
    GradingConfig,
    MetricsConfig,
    Remat,
    RolloutConfig,
    TaskConfig,
)
from podium.models.architecture import DecoderConfig
from podium.models.layouts import Layout
from podium.rollout.request import SamplingParams
from podium.run.machine import Machine

Format = Literal["float32", "bfloat16"]
"""A number format."""
Packing = Literal["none", "sequences", "shared_prompts"]
"""Which completions share a row, as `podium.train.packing` packs them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The shapes of a run's batches, which no step changes, and how rows are filled."""

    row_tokens: int
    """T; no prompt with its completion may be longer."""
    rows: int
    """B of a micro-batch, over all devices."""
    max_rows: int
    """Rows that any optimizer step may need; K follows from it."""
    packing: Packing
    max_new_tokens: int
    """The longest that a completion may be: the denominator of `mean: constant`."""
    ages: bool = False
    """Whether batches say how old tokens are."""
    devices: int = 1
    """Devices that share the rows of a micro-batch; rows are balanced only between several."""
    pair_cost: float = 0.0
    """Work of a token that sees another, in units of a token's share of the matrices; rows are of equal work."""

    @property
    def max_micro_batches(self) -> int:
        """K."""
        return -(-self.max_rows // self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSpec:
    """How the trainer's programs score a batch and update on it."""

    dtype: Format
    """Of activations and of the weights' copies while a layer computes."""
    reduce_dtype: Format
    """Of gradients between devices."""
    head_dtype: Format | None
    """Number format of the head's operands; None: `dtype`."""
    temperature: float
    """Of the softmax, the sampler's."""
    remat: Remat
    head: HeadKind
    head_chunk_tokens: int
    attention: Backend
    row_groups: int
    """Groups of a device's rows that a layer computes one after the other."""
    tokens_per_gather: int
    """Tokens of a device in a product with gathered weights; 0 where heads split them, or groups of rows share them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The optimizer and its schedule."""

    settings: OptimizerConfig
    steps: int
    """Optimizer steps of the whole run, over which the schedule spans."""
    offload: bool
    """Whether its state is in the host's memory between updates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSpec:
    """Where a run's prompts are from, and which of them fit."""

    tasks: tuple[TaskConfig, ...]
    seed: int
    max_tokens: int
    long_prompts: Literal["drop", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """How prompts are completed and graded, in training and in evaluation."""

    settings: RolloutConfig
    """The engine's sizes over all hosts; `podium.run.resolve.host_share` has one host's."""
    layout: Layout
    dtype: Format
    """Of the engine's weights, activations and cache."""
    prompts: PromptSpec
    grading: GradingConfig
    evaluation: EvalConfig
    sampling: SamplingParams
    completions: int
    """G, for each prompt of training."""
    max_refills: int
    """How often prompts whose group has equal rewards are replaced by the next ones of the run."""
    in_flight: int
    """Prompts that are answered at once, at least those of a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run on a machine, with every choice made."""

    machine: Machine
    decoder: DecoderConfig
    recipe: Recipe
    mesh: MeshSizes
    """Of training; the rollout's follows from its layout."""
    batch: BatchSizes
    update: UpdateSpec
    optimizer: OptimizerSpec
    rollout: RolloutSpec
    steps: int
    prompts_per_step: int
    """N."""
    evaluation: EvalConfig
    checkpoint: CheckpointConfig
    metrics: MetricsConfig

    @property
    def rollout_mesh(self) -> Mapping[str, int]:
        """The sizes of the mesh axes that the rollout's layout is for."""
        return self.rollout.layout.mesh(self.mesh, self.decoder.kv_heads)
