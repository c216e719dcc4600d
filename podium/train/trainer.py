"""From graded groups to a new state: advantages, batches, log-probabilities, optimizer steps."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from podium.algorithms.advantages import equal_reward_groups, penalised_rewards, token_weights
from podium.algorithms.recipes import Recipe
from podium.config.schema import Config
from podium.config.sizes import optimizer_steps
from podium.observe.stats import BatchStats, RewardKl, UpdateStats
from podium.sharding import Params
from podium.train.batch import Batch, BatchSizes, batch_sizes, make_batch, take
from podium.train.distributed import is_leader, on_host
from podium.train.generate import Group
from podium.train.optimizer import learning_rate
from podium.train.samples import Sample, transcript_sample, with_advantage, with_weight
from podium.train.state import TrainState, at_schedule_step
from podium.train.step import Metrics, TrainSettings, make_train_programs, shard_batch


class DivergedError(ValueError):
    """An update made numbers that are not finite; the message names the file with the batch that did."""


def make_batches(
    groups: Sequence[Group], recipe: Recipe, sizes: BatchSizes, reward_kl: RewardKl | None = None
) -> tuple[list[Batch], BatchStats]:
    """The batches of a step's optimizer steps, one for each minibatch that has a token to train on.

    Groups that the recipe drops are dropped before advantages are computed: they are no part of a batch's mean or
    standard deviation. `reward_kl` is what `kl: k1_reward` takes off the rewards.
    """
    start = time.perf_counter()
    rewards = np.stack([group.totals for group in groups])  # [N, G]
    equal = equal_reward_groups(rewards)  # [N]
    paid = rewards if reward_kl is None else penalised_rewards(rewards, reward_kl.sums, recipe.kl_coef)
    kept = np.flatnonzero(~equal if recipe.zero_variance != "keep" else np.ones_like(equal))
    samples = [group_samples(groups[n], n, recipe) for n in kept.tolist()]
    shape = (len(kept), rewards.shape[1])
    lengths = np.array([[sample.num_drawn for sample in group] for group in samples]).reshape(shape)
    advantages = recipe.advantage(paid[kept], lengths) if len(kept) else np.zeros(shape, np.float32)
    advantages_s, start = time.perf_counter() - start, time.perf_counter()
    parts = np.array_split(np.arange(len(kept)), recipe.minibatches)
    batches = [_minibatch([samples[n] for n in part], advantages[part], recipe, sizes) for part in parts]
    batches = [batch for batch in batches if batch.num_micro_batches]
    trained = sum(int(np.sum(batch.mask)) for batch in batches)
    filled = sum(int(np.sum(np.asarray(batch.segments) > 0)) for batch in batches)
    return batches, BatchStats(
        groups=len(groups),
        equal_groups=int(equal.sum()),
        dropped_groups=len(groups) - len(kept),
        sequences=int(np.count_nonzero(lengths)),
        trained_tokens=trained,
        prompt_tokens=filled - trained,
        padding_tokens=sum(int(each.num_micro_batches) * int(np.prod(each.tokens.shape[1:])) for each in batches)
        - filled,
        kept=kept,
        advantages=advantages.ravel(),
        penalties=None if reward_kl is None else recipe.kl_coef * reward_kl.sums.ravel(),
        penalised_rewards=None if reward_kl is None else paid.ravel(),
        reward_kl=reward_kl,
        advantages_s=advantages_s,
        batch_s=time.perf_counter() - start,
    )


def group_samples(group: Group, index: int, recipe: Recipe) -> list[Sample]:
    """A group's episodes as samples; one that the recipe masks has no tokens."""
    return [
        transcript_sample(
            transcript,
            group=index,
            version=group.version,
            masked=recipe.mask_truncated and transcript.finish_reason == "length",
        )
        for transcript in group.transcripts
    ]


def _minibatch(groups: list[list[Sample]], advantages: np.ndarray, recipe: Recipe, sizes: BatchSizes) -> Batch:
    """One optimizer step's samples, with advantages [n, G] and weights, packed. Masked ones are left out."""
    flat = [
        with_advantage(sample, advantage)
        for group, row in zip(groups, advantages, strict=True)
        for sample, advantage in zip(group, row, strict=True)
    ]
    lengths = np.array([sample.num_drawn for sample in flat])
    weights = token_weights(recipe.mean, lengths, num_sequences=len(flat), max_new_tokens=sizes.max_new_tokens)
    weighted = [with_weight(sample, weight) for sample, weight in zip(flat, weights, strict=True)]
    return make_batch([sample for sample in weighted if sample.num_drawn], sizes)[0]


class Trainer:
    """Turns batches into optimizer steps; holds the compiled programs and the weights that no update changes."""

    def __init__(
        self,
        config: Config,
        recipe: Recipe,
        settings: TrainSettings,
        optimizer: optax.GradientTransformation,
        *,
        reference: Params | None,
        folder: Path,
        frozen: Params | None = None,
    ) -> None:
        """Makes the programs; they are compiled when they are first used.

        `reference` are the first model's parameters, where the recipe needs them; in `folder` a batch that diverges is
        saved. `frozen` are the weights under LoRA's adapters, which are the reference too.
        """
        self.frozen = frozen or {}
        self.recipe, self.settings, self.reference, self.folder = recipe, settings, reference, folder
        self.sizes = batch_sizes(config, settings.decoder, settings.computing)
        self.score, self.train_step = make_train_programs(settings, recipe, optimizer)
        self.learning_rate = learning_rate(config.train.optimizer, optimizer_steps(config))
        self.updates_per_step = recipe.updates_per_batch * recipe.minibatches

    def reward_kl(self, groups: Sequence[Group]) -> RewardKl | None:
        """The KL to the reference that is charged to each completion's reward; None where the recipe charges none."""
        if self.recipe.kl != "k1_reward":
            return None
        assert self.reference is not None, "kl k1_reward needs the reference"
        start = time.perf_counter()
        flat = [sample for n, group in enumerate(groups) for sample in group_samples(group, n, self.recipe)]
        sums = np.zeros(len(flat))
        size = self.sizes.max_rows  # as many samples as a batch has room for
        for first in range(0, len(flat), size):
            batch, spans = make_batch(flat[first : first + size], self.sizes)
            scored = on_host(self.score(self.reference, shard_batch(batch, self.settings.computing)))
            for index, reference in enumerate(take(scored, spans)):
                sample = flat[first + index]
                sums[first + index] = np.sum((sample.sampled_logprobs - reference)[sample.mask])
        return RewardKl(
            sums=sums.reshape(len(groups), -1),
            num_tokens=sum(sample.num_drawn for sample in flat),
            seconds=time.perf_counter() - start,
        )

    def update(self, state: TrainState, batches: Sequence[Batch], step: int) -> tuple[TrainState, UpdateStats]:
        """Update on a step's batches, as often as the recipe says.

        The learning rate follows the run: what updates there are have the last rates of the step's share of the
        schedule, and the next step goes on behind it, however many there were. The state is donated; without a batch it
        comes back. Steps of the run are counted from 0.

        Raises:
            DivergedError: loss or gradient is not finite.
        """
        start = time.perf_counter()
        batches = [shard_batch(batch, self.settings.computing) for batch in batches]
        placed = time.perf_counter()
        batches = jax.block_until_ready(
            [
                with_scores(batch, self.recipe, self.score, state.params | self.frozen, self.reference)
                for batch in batches
            ]
        )
        scored = time.perf_counter()
        end = (step + 1) * self.updates_per_step  # of the step's share of the schedule
        todo = [batch for _ in range(self.recipe.updates_per_batch) for batch in batches]
        rate = float(np.asarray(self.learning_rate(end - 1)))
        made: list[UpdateStats] = []
        for position, batch in enumerate(todo, start=end - len(todo)):
            state, metrics = self.train_step(at_schedule_step(state, position), batch, self.frozen)
            metrics = jax.device_get(metrics)
            broken = int(metrics.pop("broken_row"))
            made.append(_update_stats(metrics, float(batch.num_tokens), rate))
            if not np.isfinite([made[-1].loss, made[-1].gradient_norm]).all():
                raise DivergedError(self._diverged(int(state.step), batch, made[-1], broken))
        state = at_schedule_step(state, end)
        seconds = {"transfer_s": placed - start, "score_s": scored - placed, "update_s": time.perf_counter() - scored}
        stats = functools.reduce(UpdateStats.then, made) if made else UpdateStats(learning_rate=rate)
        return state, dataclasses.replace(stats, **seconds)

    def _diverged(self, step: int, batch: Batch, stats: UpdateStats, broken: int) -> str:
        """Save what diverged, and say so; `broken` is the row that did first, counted from the last."""
        path = self.folder / f"diverged-update-{step}.npz"
        fields: dict[str, Any] = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        arrays: dict[str, Any] = {name: on_host(x) for name, x in fields.items() if x is not None}
        if is_leader():
            np.savez_compressed(path, **arrays)
        return (
            f"update {step} diverged: loss {stats.loss}, gradient norm {stats.gradient_norm};"
            f" {_first_cause(arrays, broken)}; its batch is in {path}. Continue from the last checkpoint with a lower"
            " train.optimizer.learning_rate (another name and"
            f" --from {self.folder}), or train.dtype float32"
        )


def _first_cause(arrays: dict[str, np.ndarray], broken: int) -> str:
    """Which row of a batch broke first, and whether it was given numbers that are not finite."""
    if not broken:
        return "the loss of every row is finite, so the gradient overflowed"
    micro_batches, rows, _ = arrays["tokens"].shape
    micro_batch, row = divmod(micro_batches * rows - broken, rows)
    given = [name for name, x in arrays.items() if x.ndim == 3 and not np.isfinite(x[micro_batch, row]).all()]
    why = f"whose {' and '.join(given)} are not finite" if given else "and all that it was given is finite"
    return f"the first to break is row {row} of micro-batch {micro_batch}, {why}"


def _update_stats(metrics: Metrics, tokens: float, learning_rate: float) -> UpdateStats:
    """The metrics of one `train_step`, on the host."""
    values = {name: float(value) for name, value in metrics.items()}
    weights = {name: values.pop(name) for name in ("loss", "gradient_norm", "update_norm")}
    gaps = {name: values.pop(name) for name in ("logprob_gap", "logprob_gap_max")}
    return UpdateStats(updates=1, tokens=tokens, token_means=values, learning_rate=learning_rate, **weights, **gaps)


def with_scores(
    batch: Batch, recipe: Recipe, score: Callable[[Params, Batch], jax.Array], params: Params, reference: Params | None
) -> Batch:
    """The batch with the log-probabilities that the recipe needs before the first update."""
    if recipe.scores_old_logprobs:
        batch = dataclasses.replace(batch, old_logprobs=score(params, batch))
    if reference is not None and recipe.kl != "k1_reward":
        batch = dataclasses.replace(batch, reference_logprobs=score(reference, batch))
    return batch
