"""From graded groups to a new state: advantages, batches, scores, optimizer steps."""

import dataclasses
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
from podium.config.sizes import batch_sequences, optimizer_steps, row_tokens, rows_per_device
from podium.observe.metrics import mean_max, spread
from podium.sharding import Params
from podium.train.batch import Batch, Place, Sample, make_batch, take
from podium.train.distributed import is_leader, on_host
from podium.train.generate import Group
from podium.train.optimizer import learning_rate
from podium.train.state import TrainState
from podium.train.step import Program, make_train_programs, place_batch


class DivergedError(ValueError):
    """An update made numbers that are not finite; the message names the file with the batch that did."""


class Updater:
    """Turns the groups of a step into optimizer steps; holds the compiled programs and the frozen reference."""

    def __init__(
        self,
        config: Config,
        recipe: Recipe,
        program: Program,
        optimizer: optax.GradientTransformation,
        *,
        reference: Params | None,
        folder: Path,
    ) -> None:
        """Makes the programs; they are compiled when they are first used.

        Args:
            config: of the run.
            recipe: that its `algorithm` means.
            program: what the compiled programs have in common.
            optimizer: from `make_optimizer`.
            reference: the first model's parameters, where the recipe needs them.
            folder: where a batch that diverges is saved.
        """
        self.config, self.recipe, self.program, self.reference, self.folder = config, recipe, program, reference, folder
        self.score, self.train_step = make_train_programs(program, recipe, optimizer)
        self.learning_rate = learning_rate(config.train.optimizer, optimizer_steps(config))

    def __call__(self, state: TrainState, groups: Sequence[Group]) -> tuple[TrainState, dict[str, float]]:
        """Update on a step's groups, as often as the recipe says.

        Returns:
            The new state, and the metrics of the update. `state` is donated; without a token to train on it comes back.

        Raises:
            DivergedError: loss or gradient is not finite.
        """
        start = time.perf_counter()
        samples = [group_samples(group, index, self.recipe) for index, group in enumerate(groups)]
        rewards, score_s = self._rewards(groups, samples)
        lengths = np.array([[len(sample.tokens) for sample in group] for group in samples])
        advantages = self.recipe.advantage(rewards, lengths)  # [N, G]
        equal = equal_reward_groups(rewards)  # [N]
        kept = np.flatnonzero(~equal if self.recipe.zero_variance != "keep" else np.ones_like(equal))
        metrics = {
            "group/equal_rewards_fraction": float(equal.mean()),
            "group/dropped": len(groups) - len(kept),
            "train-other/batch_global": int(np.count_nonzero(lengths[kept])),
            "time/train/advantages_s": time.perf_counter() - start - score_s,
        }
        start = time.perf_counter()
        parts = [part for part in np.array_split(kept, self.recipe.minibatches) if len(part)]
        batches = [self._batch([samples[n] for n in part], advantages[part]) for part in parts]
        batches = [batch for batch in batches if batch.num_micro_batches]
        metrics |= _counts(batches) | spread("train-reward/advantage", advantages[kept] if len(kept) else [0.0])
        batches = [place_batch(batch, self.program.computing) for batch in batches]
        metrics["time/train/batch_s"] = time.perf_counter() - start
        start = time.perf_counter()
        batches = jax.block_until_ready(
            [with_scores(batch, self.recipe, self.score, state.params, self.reference) for batch in batches]
        )
        metrics["time/train/score_s"] = score_s + time.perf_counter() - start
        start = time.perf_counter()
        state, updates = self._updates(state, batches)
        metrics["time/train/update_s"] = time.perf_counter() - start
        return state, metrics | updates

    def _rewards(self, groups: Sequence[Group], samples: list[list[Sample]]) -> tuple[np.ndarray, float]:
        """Rewards [N, G], less the KL to the reference where it is part of them, and the seconds this took to score."""
        rewards = np.stack([group.totals for group in groups])
        if self.recipe.kl != "k1_reward":
            return rewards, 0.0
        assert self.reference is not None, "kl k1_reward needs the reference"
        start = time.perf_counter()
        flat = [sample for group in samples for sample in group]
        sums = np.zeros(len(flat))
        size = batch_sequences(self.config)  # as many samples as a batch has room for
        for first in range(0, len(flat), size):
            batch, places = pack(flat[first : first + size], self.config, self.program)
            scored = on_host(self.score(self.reference, place_batch(batch, self.program.computing)))
            for index, reference in enumerate(take(scored, places)):
                sums[first + index] = np.sum(flat[first + index].sampled_logprobs - reference)
        penalised = penalised_rewards(rewards, sums.reshape(rewards.shape), self.recipe.kl_coef)
        return penalised, time.perf_counter() - start

    def _batch(self, groups: list[list[Sample]], advantages: np.ndarray) -> Batch:
        """One optimizer step's samples, with advantages [n, G] and weights, packed. Masked ones are left out."""
        flat = [
            dataclasses.replace(sample, advantage=float(advantage))
            for group, row in zip(groups, advantages, strict=True)
            for sample, advantage in zip(group, row, strict=True)
        ]
        lengths = np.array([len(sample.tokens) for sample in flat])
        weights = token_weights(
            self.recipe.mean, lengths, num_sequences=len(flat), max_new_tokens=self.config.rollout.max_new_tokens
        )
        weighted = [dataclasses.replace(sample, weight=float(w)) for sample, w in zip(flat, weights, strict=True)]
        return pack([sample for sample in weighted if len(sample.tokens)], self.config, self.program)[0]

    def _updates(self, state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, dict[str, float]]:
        """All optimizer steps on these batches, and their metrics: means over them, gaps of the first."""
        seen: list[dict[str, float]] = []
        for _ in range(self.recipe.updates_per_batch):
            for batch in batches:
                state, metrics = self.train_step(state, batch)
                seen.append({name: float(value) for name, value in jax.device_get(metrics).items()})
                if not np.isfinite([seen[-1]["loss"], seen[-1]["gradient_norm"]]).all():
                    raise DivergedError(self._diverged(int(state.step), batch, seen[-1]))
        if not seen:
            return state, {}
        mean = {name: float(np.mean([metrics[name] for metrics in seen])) for name in seen[0]}
        step = int(state.step)
        result = {
            "train-other/loss": mean["loss"],
            "policy/entropy": mean["entropy"],
            "policy/logprob_gap/mean": seen[0]["logprob_gap"],
            "policy/logprob_gap/max": seen[0]["logprob_gap_max"],
            "policy/kl_sampled": mean["kl_sampled"],
            "policy/clip_fraction/low": mean["clip_low"],
            "policy/clip_fraction/high": mean["clip_high"],
            "optimizer/gradient_norm": mean["gradient_norm"],
            "optimizer/update_norm": mean["update_norm"],
            "optimizer/learning_rate": float(np.asarray(self.learning_rate(step - 1))),
        }
        for name, metric in (
            ("kl_reference", "policy/kl_reference"),
            ("correction_weight", "policy/correction_weight"),
        ):
            result |= {metric: mean[name]} if name in mean else {}
        return state, result

    def _diverged(self, step: int, batch: Batch, metrics: dict[str, float]) -> str:
        """Save what diverged, and say so."""
        path = self.folder / f"diverged-update-{step}.npz"
        fields: dict[str, Any] = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        arrays: dict[str, Any] = {name: on_host(x) for name, x in fields.items() if x is not None}
        if is_leader():
            np.savez_compressed(path, **arrays)
        return (
            f"update {step} diverged: loss {metrics['loss']}, gradient norm {metrics['gradient_norm']}; its batch is in"
            f" {path}. Go on from the last checkpoint with a lower train.optimizer.learning_rate (another name and"
            f" --from {self.folder}), or train.dtype float32"
        )


def pack(samples: Sequence[Sample], config: Config, program: Program) -> tuple[Batch, list[Place]]:
    """Samples of an optimizer step as a batch, of the same shape in every step of a run, and where each one went."""
    return make_batch(
        samples,
        row_tokens=row_tokens(config),
        rows=rows_per_device(config) * program.computing.num_shards("batch"),
        max_rows=batch_sequences(config),
        packing=config.train.packing,
    )


def with_scores(
    batch: Batch,
    recipe: Recipe,
    score: Callable[[Params, Batch], jax.Array],
    params: Params,
    reference: Params | None,
) -> Batch:
    """The batch with the log-probabilities that the recipe needs before the first update."""
    if recipe.scores_old_logprobs:
        batch = dataclasses.replace(batch, old_logprobs=score(params, batch))
    if reference is not None and recipe.kl != "k1_reward":
        batch = dataclasses.replace(batch, reference_logprobs=score(reference, batch))
    return batch


def group_samples(group: Group, index: int, recipe: Recipe) -> list[Sample]:
    """A group's completions as samples; one that the recipe masks has no tokens."""
    samples = []
    for completion in group.completions:
        masked = recipe.mask_truncated and completion.finish_reason == "length"
        end = 0 if masked else len(completion.tokens)
        samples.append(
            Sample(
                group=index,
                prompt=group.tokens,
                tokens=completion.tokens[:end],
                sampled_logprobs=completion.full_logprobs[:end],
            )
        )
    return samples


def completion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and lengths of a step's completions."""
    rewards = [reward for group in groups for reward in group.rewards]
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([len(completion.tokens) for completion in completions])
    prompts = np.array([len(group.tokens) for group in groups])
    totals = lengths + np.repeat(prompts, [len(group.completions) for group in groups])
    parts = {part: [reward.parts[part] for reward in rewards if part in reward.parts] for part in _parts(groups)}
    return {
        **spread("train-reward/total", [reward.total for reward in rewards]),
        **{f"train-reward/func/{part}/mean": float(np.mean(values)) for part, values in parts.items()},
        **mean_max("train-seq_len/prompt", prompts),
        **mean_max("train-seq_len/completion", lengths),
        **mean_max("train-seq_len/total", totals),
        "rollout/truncated_fraction": float(np.mean([each.finish_reason == "length" for each in completions])),
        "grading/timeouts": sum(reward.timed_out for reward in rewards),
    }


def _parts(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(part for group in groups for reward in group.rewards for part in reward.parts))


def _counts(batches: Sequence[Batch]) -> dict[str, float]:
    """Tokens of the update by kind."""
    trained = sum(int(np.sum(batch.mask)) for batch in batches)
    filled = sum(int(np.sum(np.asarray(batch.segments) > 0)) for batch in batches)
    room = sum(int(batch.num_micro_batches) * int(np.prod(batch.tokens.shape[1:])) for batch in batches)
    return {
        "train-other/total_valid_token_count": trained,
        "tokens/prompt": filled - trained,
        "tokens/completion": trained,
        "tokens/padding": room - filled,
    }
