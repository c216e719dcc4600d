"""Models that score a batch's tokens before its first update; each has a name, weights and a program.

Scores are stored in `Batch.scores` by that name; advantages and loss may read them. The policy before the update is one
scorer (`old_logprobs`, and `entropy`), the frozen first model another (`reference_logprobs`), a teacher the third
(`teacher_logprobs`, or `teacher_hidden`, its hidden states).
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from podium.algorithms.advantages import VALUES
from podium.algorithms.recipes import (
    ENTROPY,
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    TEACHER_HIDDEN,
    TEACHER_LOGPROBS,
    Recipe,
    Teaching,
    score_name,
)
from podium.config.imports import imported
from podium.hosts.distributed import on_host
from podium.models.architecture import DecoderConfig
from podium.models.blocks.choices import unknown_choice
from podium.run.run_spec import BatchSizes
from podium.sharding import Params, ShardingRules
from podium.tasks.mixture import TaskPrompt
from podium.train.batches.batch import Batch, make_batch, take
from podium.train.batches.samples import Sample
from podium.train.step import CompiledScore, ScoreProgram, TrainSettings, make_hidden, make_score, shard_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnPrompts:
    """The prompts of a scorer that reads others than the policy, and the batches in which it scores behind them."""

    of: Callable[[TaskPrompt], tuple[int, ...]]
    """The tokens of its prompt, from the policy's."""
    sizes: BatchSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scorer:
    """A model that assigns a number to each target of a batch."""

    name: str
    """Key of its scores in `Batch.scores`."""
    decoder: DecoderConfig
    params: Params | None
    """None: the policy's own weights, before the batch's first update."""
    program: ScoreProgram
    own_prompts: OwnPrompts | None = None
    """None: it reads the policy's, and scores its batches."""


def make_scorers(
    recipe: Recipe,
    settings: TrainSettings,
    score: ScoreProgram,
    reference: Params | None,
    teacher: Scorer | None = None,
    entropy: ScoreProgram | None = None,
) -> tuple[Scorer, ...]:
    """Make the scorers that a recipe needs.

    Args:
        recipe: names the scorers.
        settings: the trainer's; a scorer given by import path is made by calling that function with them.
        score: the program that computes log-probabilities with the trainer's decoder.
        reference: parameters of the first model, if the recipe needs them.
        teacher: the recipe's teacher, if it has one.
        entropy: the program that computes entropies; None: made from the settings, if the recipe needs it.

    Raises:
        ValueError: an import path is not a function that returns a `Scorer`.
    """
    found = [_make(need, settings, score, reference, entropy) for need in recipe.scorers]
    if recipe.teacher is not None:
        assert teacher is not None, "the recipe has a teacher"
        found.append(teacher)
    return tuple(found)


def make_teacher_scorer(
    recipe: Recipe,
    settings: TrainSettings,
    decoder: DecoderConfig,
    params: Params,
    own_prompts: OwnPrompts | None = None,
) -> Scorer:
    """The scorer of a recipe's teacher, with the trainer's settings and its own decoder, weights and maybe prompts."""
    assert recipe.teacher is not None, "the recipe has a teacher"
    name = TEACHER_HIDDEN if recipe.teacher.loss == "full" else TEACHER_LOGPROBS
    program = make_teacher_program(recipe.teacher, settings, decoder)
    return Scorer(name=name, decoder=decoder, params=params, program=program, own_prompts=own_prompts)


def make_teacher_program(teaching: Teaching, settings: TrainSettings, decoder: DecoderConfig) -> CompiledScore:
    """The teacher's program, with the trainer's settings: its log-probabilities, or its hidden states."""
    own = settings._replace(decoder=decoder)
    return make_hidden(own) if teaching.loss == "full" else make_score(own)


def teacher_head(params: Params) -> jax.Array:
    """The teacher's matrix from hidden states to logits, [V, D], as stored."""
    return params.get("head", params["embed"])


def _make(
    need: str, settings: TrainSettings, score: ScoreProgram, reference: Params | None, entropy: ScoreProgram | None
) -> Scorer:
    match need:
        case "entropy":
            program = entropy or make_score(settings, entropy=True)
            return Scorer(name=ENTROPY, decoder=settings.decoder, params=None, program=program)
        case "old_logprobs":
            return Scorer(name=OLD_LOGPROBS, decoder=settings.decoder, params=None, program=score)
        case "reference_logprobs":
            assert reference is not None, "a KL needs the reference"
            return Scorer(name=REFERENCE_LOGPROBS, decoder=settings.decoder, params=reference, program=score)
        case _:
            return _imported_scorer(need, settings)


def _imported_scorer(path: str, settings: TrainSettings) -> Scorer:
    """A user's scorer; its scores are stored under the function's name."""
    made = imported(path, what="a scorer")(settings)
    if not isinstance(made, Scorer):
        raise ValueError(f"{path!r} gives {made!r}; it must be a function of TrainSettings that returns a Scorer")
    return dataclasses.replace(made, name=score_name(path))


def behind_own_prompts(
    scorer: Scorer, samples: Sequence[Sample], prompts: Sequence[TaskPrompt], rules: ShardingRules
) -> list[np.ndarray]:
    """The scores [n] of each sample's tokens by a scorer with its own prompts, in its own batches.

    `prompts` are those of the samples. All processes must call this.
    """
    assert scorer.own_prompts is not None, "it reads the policy's prompts"
    assert scorer.params is not None, "the policy reads its own prompts"
    given = [
        dataclasses.replace(sample, prompt=scorer.own_prompts.of(prompt), choices=None, prompt_choices=None)
        for sample, prompt in zip(samples, prompts, strict=True)
    ]
    batch, spans = make_batch(given, scorer.own_prompts.sizes)
    return take(on_host(scorer.program(scorer.params, shard_batch(batch, rules))), spans)


def with_scores(batch: Batch[jax.Array], scorers: Sequence[Scorer], policy: Params) -> Batch[jax.Array]:
    """The batch with each scorer's scores; `policy` holds all weights of the policy before the first update.

    Only the policy repeats the sampler's choices of experts; other models choose for themselves.
    """
    plain = batch
    if batch.choices is not None and any(scorer.params is not None for scorer in scorers):
        nothing = jnp.full_like(batch.choices, unknown_choice(batch.choices.dtype))
        plain = dataclasses.replace(batch, choices=nothing)
    scores: dict[str, jax.Array] = {}
    for scorer in scorers:
        if scorer.params is None:
            scores[scorer.name] = scorer.program(policy, batch)
        elif scorer.name in (TEACHER_LOGPROBS, TEACHER_HIDDEN, VALUES):  # another model has other experts, or none
            scores[scorer.name] = scorer.program(scorer.params, dataclasses.replace(batch, choices=None))
        else:
            scores[scorer.name] = scorer.program(scorer.params, plain)
    return dataclasses.replace(batch, scores=scores)
