"""A resolved run: typed parts, each for one component. Plain data, no jax.

Components read these values, and do not derive them from the settings again.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

from podium.algorithms.recipes import TAUGHT_HIDDEN, Recipe
from podium.config.attention_blocks import Backend
from podium.config.data import DataConfig
from podium.config.head import HeadKind
from podium.config.mesh import MeshSizes
from podium.config.optimizer import OptimizerConfig
from podium.config.reference import ReferenceConfig
from podium.config.schema import (
    CheckpointConfig,
    EnvironmentsConfig,
    EvalConfig,
    GradingConfig,
    MetricsConfig,
    Remat,
    RolloutConfig,
    TaskConfig,
)
from podium.models.architecture import DecoderConfig
from podium.models.blocks.choices import ChoiceFormat
from podium.models.flops import pair_flops
from podium.models.layouts import Layout
from podium.rollout.request import SamplingParams
from podium.run.machine import Machine

Format = Literal["float32", "bfloat16"]
"""A number format."""
Packing = Literal["none", "sequences", "shared_prompts"]
"""Which completions share a row; see `podium.train.batches.packing`."""
SCORE = "score"
"""Name in plans of the program that scores a batch with the policy, and with other models of its architecture."""


class RowShape(NamedTuple):
    """A shape of micro-batches."""

    rows: int
    """Rows B of a micro-batch, over all devices."""
    row_tokens: int
    """Tokens T per row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowRules:
    """The shapes that micro-batches may have besides the config's own, and what rows cost."""

    pair_cost: float = 0.0
    """Cost of a query-key pair relative to the matrix products of one token; used to give rows equal work."""
    micro_batch_cost: float = 0.0
    """Cost of a micro-batch by itself, in tokens of a device (`podium.run.micro_batch_cost`)."""
    tile: int = 1
    """The row length of other shapes is a multiple of this."""
    row_step: int = 1
    """The rows of other shapes, over all devices, are a multiple of this."""
    shapes: tuple[RowShape, ...] = ()
    """The other shapes, chosen from the lengths of a step (`podium.train.batches.shapes`); empty before that."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The shapes of a run's batches, and how rows are filled.

    The shape that the config sets, `rows` x `row_tokens`, takes every step; `rules` has the others.
    """

    row_tokens: int
    """Tokens T per row; also the maximum length of a prompt with its completion."""
    rows: int
    """Rows B of a micro-batch, over all devices."""
    max_rows: int
    """Maximum number of rows in an optimizer step; determines K."""
    packing: Packing
    max_new_tokens: int
    """Maximum length of a completion, or of a conversation: the denominator of `mean: constant`."""
    choices: int = 0
    """Number C of experts that a token is sent to, summed over layers; 0 without a mixture of experts."""
    choice_format: ChoiceFormat = "uint8"
    """Integer format of the recorded experts."""
    ages: bool = False
    """Whether batches record the age of tokens."""
    demonstrations: bool = False
    """Whether demonstrations are mixed into batches of sampled completions."""
    devices: int = 1
    """Number of devices that share a micro-batch's rows; with several, rows are balanced."""
    pairs: bool = False
    """Whether the two completions of a group must share a row; rows are then not balanced."""
    rules: RowRules = RowRules()

    @property
    def max_micro_batches(self) -> int:
        """Maximum number K of micro-batches of an optimizer step."""
        return -(-self.max_rows // self.rows)

    @property
    def shape(self) -> RowShape:
        """The shape of a micro-batch."""
        return RowShape(self.rows, self.row_tokens)

    def of_shape(self, shape: RowShape) -> "BatchSizes":
        """The sizes of batches of one other shape, with arrays that are no larger than those of these."""
        if shape == self.shape:
            return dataclasses.replace(self, rules=dataclasses.replace(self.rules, shapes=()))
        places = self.max_micro_batches * self.rows * self.row_tokens
        return dataclasses.replace(
            self,
            rows=shape.rows,
            row_tokens=shape.row_tokens,
            max_rows=places // (shape.rows * shape.row_tokens) * shape.rows,
            rules=dataclasses.replace(self.rules, shapes=()),
        )


def pair_cost(decoder: DecoderConfig) -> float:
    """Cost of a query-key pair relative to the matrix products of one token."""
    return pair_flops(decoder) / (2 * decoder.active)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSpec:
    """How the trainer's programs score a batch and train on it."""

    dtype: Format
    """Number format of activations and of the weights' copies during a layer's computation."""
    reduce_dtype: Format
    """Number format of gradients between devices."""
    head_dtype: Format | None
    """Number format of the head's operands; None: `dtype`."""
    temperature: float
    """Temperature of the softmax, equal to the sampler's."""
    remat: Remat
    head: HeadKind
    head_chunk_tokens: int
    attention: Backend
    row_groups: int
    """Number of groups of a device's rows that a layer computes one after another."""
    replay_routing: bool
    """Whether tokens go to the experts that the sampler chose."""
    tokens_per_gather: int
    """Tokens per device in a product with gathered weights; 0 if heads are split or row groups share the weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The optimizer and its schedule."""

    settings: OptimizerConfig
    steps: int
    """Optimizer steps of the whole run, over which the schedule spans."""
    offload: bool
    """Whether the optimizer's state is in host memory between updates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningSpec:
    """How a model other than the policy is trained."""

    optimizer: OptimizerSpec
    warmup_steps: int
    """Steps in which the policy is not updated yet."""
    updates: int
    """Updates on each minibatch."""
    clip: float | None
    """How far a value may move in a step; None: unlimited."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversationSpec:
    """How a model grades whole conversations: what it reads, and the rows in which it scores them."""

    part: str
    """Name of the model's part of the reward."""
    chat_template: str | None
    template_date: str | None
    """The date that a chat template shows; None: today's date."""
    row_tokens: int
    """Tokens T per row; longer conversations get no score."""
    rows_per_device: int
    """Rows per call on each device that the batch is split over."""
    standardise: Literal["none", "batch"]

    def batch(self, *, shards: int) -> BatchSizes:
        """The shape of a call: one micro-batch, with rows that are split over `shards` devices."""
        rows = self.rows_per_device * shards
        return BatchSizes(
            row_tokens=self.row_tokens, rows=rows, max_rows=rows, packing="sequences", max_new_tokens=self.row_tokens
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """A model of a run other than the policy, and what it does in a step."""

    name: str
    """Name of the role in `podium.run.roles`; the names of its arrays in checkpoints begin with this."""
    model: str
    """Name of the model, as in the config."""
    decoder: DecoderConfig
    weights: Literal["trained", "frozen", "moving", "policy_base"]
    """How the weights behave; policy_base: they are the frozen weights of the policy's base model, without a second
    copy."""
    scores: str | None
    """Name of the scores in `Batch.scores`; None if the model grades whole conversations."""
    phase: str
    """Name of the scoring program in plans; SCORE if the policy's own program computes its scores."""
    longer_prompts: int | None = None
    """By how many tokens the model's own prompts can be longer than the policy's; None if it reads the policy's
    prompts."""
    learning: LearningSpec | None = None
    """How the model is trained; None unless `weights` are trained."""
    follows: ReferenceConfig | None = None
    """How the model follows the policy; None unless `weights` are moving."""
    conversations: ConversationSpec | None = None
    """How the model grades conversations; None if it has `scores`."""

    @property
    def kind(self) -> str:
        """The role's name without the name of the reward part; plans add up memory by kind."""
        return self.name.partition(":")[0]

    @property
    def title(self) -> str:
        """The role's name in messages, such as `reward model helpful`."""
        return self.name if self.conversations is None else f"reward model {self.conversations.part}"

    @property
    def changes(self) -> bool:
        """Whether the weights change in training and are therefore part of the run's state."""
        return self.weights in ("trained", "moving")

    @property
    def compared(self) -> bool:
        """Whether the scores are hidden states, from which updates compute the model's whole distributions."""
        return self.scores == TAUGHT_HIDDEN


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivilegedSpec:
    """The prompts of a model that reads more than the policy."""

    role: str
    """Name of the role whose section of the config has these settings."""
    template: str
    """Template of the user's last message."""
    max_tokens: int

    @property
    def key(self) -> str:
        """The key of the setting that `max_tokens` comes from."""
        return f"{self.role}.max_prompt_tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSpec:
    """The source of a run's prompts, and their maximum length."""

    tasks: tuple[TaskConfig, ...]
    data: DataConfig
    seed: int
    max_tokens: int
    long_prompts: Literal["drop", "error"]
    privileged: PrivilegedSpec | None = None
    """The prompts of a model that reads others than the policy; None if every model reads the policy's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemonstrationSpec:
    """The demonstrations that a run imitates in the same updates in which it learns from completions."""

    prompts: PromptSpec
    per_step: int
    """Rows per step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How to answer prompts."""

    sampling: SamplingParams
    completions: int
    """Completions per prompt, including the greedy one if the recipe compares with it."""
    max_refills: int = 0
    """Maximum number of times that prompts with equal rewards are replaced by the next prompts of the run."""
    zero_variance_metric: str | None = None
    """Part of the reward that decides whether rewards are equal; None: the total."""
    in_flight: int = 0
    """Prompts to answer at the same time, at least those requested; the others continue in the next step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """How prompts are completed and graded, in training and in evaluation."""

    settings: RolloutConfig
    """The engine's sizes over all hosts; `podium.run.resolve.host_share` gives those of one host."""
    layout: Layout
    dtype: Format
    """Number format of the engine's weights, activations and cache."""
    prompts: PromptSpec
    grading: GradingConfig
    grading_models: tuple[Role, ...]
    """The models that grade conversations, which are named in tasks' rewards."""
    environments: EnvironmentsConfig
    evaluation: EvalConfig
    training: AnswerSettings
    """How the prompts of training steps are answered."""
    demonstrations: DemonstrationSpec | None = None
    """The demonstrations that are mixed in; None in evaluations, and in runs without demonstrations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run on a machine, with every choice made."""

    name: str
    """Name of the run; if the config sets none, the name of the model."""
    model: str
    """The policy's name in the config."""
    machine: Machine
    decoder: DecoderConfig
    scoring_models: tuple[Role, ...]
    """The models other than the policy that score its batches."""
    recipe: Recipe
    mesh: MeshSizes
    """Axis sizes of the training mesh; the rollout's mesh follows from its layout."""
    batch: BatchSizes
    update: UpdateSpec
    optimizer: OptimizerSpec
    rollout: RolloutSpec
    steps: int
    prompts_per_step: int
    """Prompts per step, N."""
    checkpoint: CheckpointConfig
    metrics: MetricsConfig

    @property
    def roles(self) -> dict[str, Role]:
        """All models of the run other than the policy, by name: those that score batches, and those that grade."""
        return {role.name: role for role in (*self.scoring_models, *self.rollout.grading_models)}

    @property
    def compared(self) -> Role | None:
        """The model whose whole distributions updates compare with the policy's; None if the run has no such model."""
        return next((role for role in self.scoring_models if role.compared), None)

    @property
    def updates(self) -> tuple[str, ...]:
        """Names in plans of the programs that train: the policy's `update`, and the updates of trained roles."""
        return "update", *(role.name for role in self.scoring_models if role.learning is not None)

    def batch_of(self, role: Role) -> BatchSizes:
        """The shapes of the batches that a role scores. If the role has its own prompts, rows have room for the longest
        of them.
        """
        shards, sp = self.batch.devices, self.mesh["sp"]
        if role.conversations is not None:
            return role.conversations.batch(shards=shards)
        if role.longer_prompts is None:
            return self.batch
        return dataclasses.replace(
            self.batch,
            row_tokens=-(-(self.batch.row_tokens + role.longer_prompts) // sp) * sp,
            choices=0,
            ages=False,
            demonstrations=False,
            rules=RowRules(pair_cost=pair_cost(role.decoder)),
        )

    def in_shape(self, shape: RowShape) -> "RunSpec":
        """The same run with micro-batches of this shape alone."""
        return dataclasses.replace(self, batch=self.batch.of_shape(shape))

    @property
    def group_size(self) -> int:
        """Completions per prompt that are trained on, G."""
        return self.rollout.training.completions - ("baselines" in self.recipe.reads)

    @property
    def rollout_mesh(self) -> Mapping[str, int]:
        """Axis sizes of the rollout's mesh."""
        return self.rollout.layout.mesh(self.mesh, self.decoder.kv_heads)
