"""A tiny random model on disk, configs of runs over it, and what a run left behind: what the trainer's tests share."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from tiny_decoder import DECODER

from benches.recipes import RISE, SIZES, first_and_last, learn, write_tiny_model
from podium.algorithms.recipes import TAUGHT_HIDDEN, TAUGHT_LOGPROBS, Recipe
from podium.config.optimizer import OptimizerConfig
from podium.config.schema import Config
from podium.models.architecture import DecoderConfig
from podium.models.params import TRAIN_AXES, param_specs
from podium.observe.metrics import step_metrics
from podium.observe.run_dir import Fork, read_config
from podium.observe.stats import StepSeconds, StepStats
from podium.rollout.request import Completion, RolloutStats
from podium.rollout.transcript import Transcript, transcript_of
from podium.run.machine import Machine
from podium.run.resolve import resolve, resolve_recipe, resolve_rollout
from podium.run.run_spec import Role, RolloutSpec, RunSpec, UpdateSpec
from podium.run.token_sizes import optimizer_steps
from podium.sampling.groups import Group
from podium.sharding import Params, ShardingRules, make_mesh, param_shardings
from podium.tasks.mixture import TaskPrompt
from podium.tasks.task import Prompt, Reward
from podium.train.batches.batch import BatchSizes, make_batch, take
from podium.train.batches.prepare import group_samples
from podium.train.batches.run_shapes import RunShapes
from podium.train.batches.samples import Sample, single_answer
from podium.train.optimizer.transforms import make_optimizer
from podium.train.recorder import completion_stats
from podium.train.scorers import LoadedRole
from podium.train.setup import Model, load_weights, make_model
from podium.train.state import TrainState, init_state
from podium.train.step import TrainSettings, shard_batch
from podium.train.trainer import Trainer

__all__ = ["RISE", "SIZES", "first_and_last", "learn", "write_tiny_model"]

TINY: dict[str, Any] = {
    "name": "run",
    "steps": 3,
    "prompts_per_step": 4,
    "group_size": 4,
    "tasks": [{"name": "arithmetic"}],
    "grading": {"workers": 0},
    "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 3, "slots": 16, "prefill_rows": 8},
    "train": {"rows_per_device": 2, "optimizer": {"learning_rate": 1e-2}},
    "eval": {"questions": 8},
    "metrics": {"samples_every": 2},
}
"""Its answers are all wrong, so gradients are 0, unless a test pays for something else, such as SHORT does."""
SHORT: dict[str, Any] = {
    "tasks": [{"name": "arithmetic", "rewards": {"correct": 1.0, "length": 1.0}}],
    "grading": {"overlong_buffer_tokens": 2},
}
"""Pays for short answers."""
STEPS = 4
STEPWISE: dict[str, Any] = {
    **SHORT,
    "steps": STEPS,
    "train": {"optimizer": {"learning_rate": 3e-3}},
    "eval": {"at_start": True, "every_steps": 2, "samples": 2},
    "checkpoint": {"every_steps": 2},
}
"""A run that is evaluated and saved every two steps."""
BY_THE_CLOCK = (
    "async/waited_s",
    "async/rebuild_s",
    "time/",
    "throughput/",
    "memory/",
    "rollout/prefill_s",
    "rollout/decode_s",
    "rollout/tokens_per_s",
    "rollout/compilations",
    "env/reply_s",
    "env/begin_s",
    "env/idle_s",
)
"""Metrics that two equal runs do not share."""
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [0.5, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]]
"""Of four groups of four."""


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, section by section."""
    inner = {
        key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in changes.items()
    }
    return {**base, **inner}


def make_config(model: Path | str = "none", runs: Path | str = "runs", **changes: Any) -> Config:
    """TINY with changes, section by section: `make_config(model, tmp_path, eval={"samples": 2})`."""
    return Config.model_validate(merged({"model": str(model), "runs_dir": str(runs), **TINY}, changes))


def rules_of(mesh: str = "auto", devices: int = 1) -> ShardingRules:
    """Where the trainer keeps things, on so many of the test's devices."""
    return ShardingRules(make_mesh(mesh, jax.devices()[:devices]), TRAIN_AXES)


def make_params(rules: ShardingRules, *, seed: int = 0) -> Params:
    """Random weights of DECODER, large enough that the model has opinions; the same on any mesh."""
    shardings = param_shardings(param_specs(DECODER), rules)
    return {name: jax.device_put(value, shardings[name], may_alias=False) for name, value in _weights(seed).items()}


@functools.cache
def _weights(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        name: (spec.mean + 10 * spec.std * random.standard_normal(spec.shape)).astype(np.float32)
        for name, spec in param_specs(DECODER).items()
    }


UPDATE = UpdateSpec(
    dtype="float32",
    reduce_dtype="float32",
    head_dtype=None,
    temperature=1.0,
    remat="none",
    head="chunked",
    head_chunk_tokens=1024,
    attention="blocks",
    row_groups=1,
    replay_routing=True,
    tokens_per_gather=0,
)


def make_train_settings(rules: ShardingRules, **changes: Any) -> TrainSettings:
    """Settings in float32 over the tiny decoder, or another one; further changes are of the update."""
    decoder = changes.pop("decoder", DECODER)
    return TrainSettings(decoder, rules.mesh, dataclasses.replace(UPDATE, **changes))


def sizes(**changes: Any) -> BatchSizes:
    """Sizes of a batch in which no completion is longer than a row."""
    return BatchSizes(**changes, max_new_tokens=changes["row_tokens"])


def make_samples(
    *,
    groups: int = 3,
    completions: int = 4,
    longest_prompt: int = 12,
    longest: int = 10,
    vocab: int = 300,
    seed: int = 0,
) -> list[Sample]:
    """Random samples, some with prompts or completions of one token; advantages and weights are random too."""
    random = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        length = 1 if group == 1 else int(random.integers(1, longest_prompt + 1))
        prompt = tuple(random.integers(0, vocab, length).tolist())
        for index in range(completions):
            n = 1 if index == 1 else int(random.integers(1, longest + 1))
            samples.append(
                single_answer(
                    group=group,
                    prompt=prompt,
                    tokens=random.integers(0, vocab, n).astype(np.int32),
                    sampled_logprobs=random.normal(-5.0, 1.0, n).astype(np.float32),
                    advantage=float(random.normal()),
                    weight=float(random.uniform(0.01, 0.1)),
                )
            )
    return samples


def make_group(
    rewards: list[float],
    *,
    seed: int = 0,
    lengths: list[int] | None = None,
    finish: str | list[str] = "stop",
    full_logprobs: list[np.ndarray] | None = None,
) -> Group:
    """A group of random completions with these rewards."""
    random = np.random.default_rng(seed)
    tokens = tuple(random.integers(0, DECODER.vocab, 6).tolist())
    lengths = lengths or [int(random.integers(1, 9)) for _ in rewards]
    finishes = [finish] * len(rewards) if isinstance(finish, str) else finish
    completions = [
        Completion(
            tokens=random.integers(0, DECODER.vocab, n).astype(np.int32),
            sampled_logprobs=np.full(n, -4.0, np.float32),
            full_logprobs=np.full(n, -5.0, np.float32) if full_logprobs is None else full_logprobs[index],
            versions=np.zeros(n, np.int32),
            text="text",
            finish_reason=finishes[index],  # pyright: ignore[reportArgumentType]
        )
        for index, n in enumerate(lengths)
    ]
    return Group(
        prompt=TaskPrompt(task=0, prompt=Prompt(id=f"{seed}", question="?", answer="!"), system_prompt=None),
        transcripts=[transcript_of(tokens, completion) for completion in completions],
        rewards=[Reward(total=reward, parts={"correct": reward}) for reward in rewards],
    )


def make_trainer(
    *, devices: int = 1, reference: bool = False, temperature: float = 1.0, **changes: Any
) -> tuple[Trainer, TrainState]:
    """A trainer over the tiny decoder with the config's changes, and a first state; equal ones compile once.

    Its learning rate is 0.1 of plain descent without clipping, unless told otherwise.
    """
    text = json.dumps(changes)
    rules = rules_of(devices=devices)
    return _trainer(devices, reference, temperature, text), init_state(make_params(rules), _optimizer(_config(text)))


def _config(changes: str) -> Config:
    plain = {"optimizer": {"name": "sgd", "learning_rate": 0.1, "beta1": 0.0, "clip_norm": 0.0}}
    defaults = {"steps": 10, "rollout": {"max_prompt_tokens": 8, "max_new_tokens": 8}, "train": plain}
    return make_config(**merged(defaults, json.loads(changes)))


@functools.cache
def _trainer(devices: int, reference: bool, temperature: float, changes: str) -> Trainer:
    config, rules = _config(changes), rules_of(devices=devices)
    settings = make_train_settings(rules, temperature=temperature, attention="reference")  # compiles in half the time
    first = make_params(rules) if reference else None
    spec = spec_of(config, devices=devices)
    return Trainer(
        spec.recipe,
        settings,
        _optimizer(config),
        shapes=RunShapes(spec.batch),
        schedule=spec.optimizer,
        folder=Path(),
        roles=[] if first is None else [LoadedRole(role=spec.roles["reference"], params=first)],
    )


def train_on(
    trainer: Trainer,
    state: TrainState,
    groups: Sequence[Group],
    *,
    beside: Sequence[Group] = (),
    step: int = 0,
) -> tuple[TrainState, dict[str, float]]:
    """The part of a step after its rollout, as the loop does it: the new state, and the step's metrics.

    `beside` are demonstrations that are mixed in.
    """
    batches, batched = trainer.prepare(state, groups, beside)
    state, updated = trainer.update(state, batches, step)
    return state, step_metrics(
        StepStats(
            completions=completion_stats(groups),
            rolled=RolloutStats(),
            batched=batched,
            updated=updated,
            seconds=StepSeconds(step_s=1.0, cpu_s=1.0, sync_s=0.0, checkpoint_s=None),
        )
    )


def _optimizer(config: Config) -> optax.GradientTransformation:
    return make_optimizer(config.train.optimizer, optimizer_steps(config), param_specs(DECODER))


def recipe_of(config: Config) -> Recipe:
    """What a config's algorithm means."""
    return resolve_recipe(config)


def spec_of(config: Config, *, devices: int = 1) -> RunSpec:
    """What a config means for DECODER on a number of CPU devices of one host."""
    return resolve(config, DECODER, Machine(platform="cpu", devices=devices))


def rollout_spec(config: Config, model: Model) -> RolloutSpec:
    """How a config's prompts are completed and graded by this model."""
    return resolve_rollout(config, resolve_recipe(config), model.decoder, model.machine)


@functools.cache
def sgd(learning_rate: float = 1.0):
    """Plain gradient descent: the step of the parameters is the gradient."""
    config = OptimizerConfig(name="sgd", learning_rate=learning_rate, beta1=0.0, clip_norm=0.0)
    return make_optimizer(config, 10, param_specs(DECODER))


def host(params: Params) -> dict[str, np.ndarray]:
    """The parameters as numpy arrays."""
    return {name: np.array(value) for name, value in params.items()}


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """All that metrics.jsonl holds but what a clock says, or who compiled first."""
    return [
        {name: value for name, value in record.items() if not name.startswith(BY_THE_CLOCK)}
        for record in read_records(run / "metrics.jsonl")
    ]


def trained(run: Path) -> list[dict[str, Any]]:
    """The records of steps, without those of evaluations."""
    return [record for record in read_records(run / "metrics.jsonl") if "train-other/total_valid_token_count" in record]


def weights_of(run: Path, step: int | None = None) -> dict[str, bytes]:
    """The weights that a run saved at a step, or last, byte for byte."""
    model = make_model(read_config(run))
    return {name: np.asarray(value).tobytes() for name, value in load_weights(model, Fork(str(run), step)).items()}


def assert_same_run(found: Path, expected: Path) -> None:
    """The same metrics, weights and samples, bit for bit."""
    for one, other in zip(metrics_of(found), metrics_of(expected), strict=True):
        different = {name: (one.get(name), other.get(name)) for name in one | other if one.get(name) != other.get(name)}
        assert not different, f"step {other['step']}: {different}"
    assert weights_of(found) == weights_of(expected)
    for name in ("samples.jsonl", "lengths.jsonl"):
        assert (found / name).read_bytes() == (expected / name).read_bytes()


def config_of(run: Path, **changes: Any) -> Config:
    """The config of a run with other values at its top."""
    return Config.model_validate({**read_config(run).model_dump(mode="json"), **changes})


def groups_of(rewards: list[list[float]] = REWARDS, **settings: Any) -> list[Group]:
    """A random group for each row of rewards."""
    return [make_group(each, seed=seed, **settings) for seed, each in enumerate(rewards)]


def with_logprobs(trainer: Trainer, state: TrainState, groups: list[Group], shift: float = 0.0) -> list[Group]:
    """The groups as a sampler with the state's weights would have made them; log-probabilities plus `shift`."""
    samples = [each for n, group in enumerate(groups) for each in group_samples(group, n, trainer.recipe)]
    batch, places = make_batch(samples, trainer.sizes)
    scored = trainer.score(state.params, shard_batch(batch, trainer.settings.computing))
    found = iter(take(np.asarray(scored), places))
    return [
        dataclasses.replace(
            group,
            transcripts=[with_full_logprobs(each, next(found) + shift) for each in group.transcripts],
        )
        for group in groups
    ]


def with_full_logprobs(transcript: Transcript, logprobs: np.ndarray) -> Transcript:
    """A single answer with other log-probabilities."""
    prompt, drawn = transcript.spans
    return dataclasses.replace(transcript, spans=(prompt, dataclasses.replace(drawn, full_logprobs=logprobs)))


def shifted(trainer: Trainer, state: TrainState, groups: list[Group], shifts: np.ndarray) -> list[Group]:
    """The groups as if the sampler had found its tokens likelier than the trainer, by so many nat [N, G] each."""
    return [
        dataclasses.replace(
            group,
            transcripts=[
                with_full_logprobs(each, each.full_logprobs + np.float32(shift))
                for each, shift in zip(group.transcripts, row, strict=True)
            ],
        )
        for group, row in zip(with_logprobs(trainer, state, groups), shifts, strict=True)
    ]


def changed(trainer: Trainer, state: TrainState, groups: list[Group]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """What an update adds to the parameters, and its metrics."""
    before = host(state.params)
    state, metrics = train_on(trainer, state, groups)
    return {name: np.array(value) - before[name] for name, value in state.params.items()}, metrics


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float = 1e-4) -> None:
    """Equal arrays, within `rtol` of the largest of all."""
    scale = max(float(np.abs(x).max()) for x in expected.values())
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=rtol * scale, err_msg=name)


def lengths_of(groups: list[Group]) -> list[list[int]]:
    """Tokens of each completion [N][G]."""
    return [[each.num_drawn for each in group.transcripts] for group in groups]


def teacher_role(decoder: DecoderConfig, loss: Literal["sampled", "full"] = "sampled") -> Role:
    """The role of a teacher with this architecture, which has its own weights."""
    scores = TAUGHT_HIDDEN if loss == "full" else TAUGHT_LOGPROBS
    return Role(name="teacher", model="none", decoder=decoder, weights="frozen", scores=scores, phase="teacher")
