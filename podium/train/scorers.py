"""Models that score a batch's tokens before its first update; each has a name, weights and a program.

Scores are stored in `Batch.scores` by that name. Advantages may read all scores; a loss reads those that its recipe
`needs`. The policy before the update is one scorer (`old_logprobs`, and `entropy`); the others are models in a role of
the run (`podium.run.roles`), or a user's own.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from podium.algorithms.recipes import (
    ENTROPY,
    OLD_LOGPROBS,
    Recipe,
    score_name,
)
from podium.config.imports import imported, is_path
from podium.hosts.distributed import on_host
from podium.models.architecture import DecoderConfig
from podium.models.blocks.choices import unknown_choice
from podium.run.run_spec import SCORE, BatchSizes, Role
from podium.sharding import Params, ShardingRules
from podium.tasks.mixture import TaskPrompt
from podium.train.batches.batch import Batch, make_batch, take
from podium.train.batches.samples import Sample
from podium.train.step import (
    TAUGHT_HEAD,
    CompiledScore,
    ScoreProgram,
    TrainSettings,
    make_hidden,
    make_score,
    make_values,
    shard_batch,
)

A = TypeVar("A", jax.Array, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnPrompts:
    """For a scorer with other prompts than the policy: its prompts, and the shapes of its batches."""

    of: Callable[[TaskPrompt], tuple[int, ...]]
    """Maps the policy's prompt to the tokens of the scorer's prompt."""
    sizes: BatchSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scorer:
    """A model that assigns a number to each target of a batch."""

    name: str
    """Key of the scores in `Batch.scores`."""
    decoder: DecoderConfig
    params: Params | None
    """The scorer's weights; None: the policy's weights before the batch's first update."""
    program: ScoreProgram
    role: str | None = None
    """Role whose weights in each step's state replace `params`; None if the weights never change."""
    own_prompts: OwnPrompts | None = None
    """None if the scorer reads the policy's prompts and scores the policy's batches."""
    follows_choices: bool = True
    """Whether to send tokens to the experts that the batch records; False for architectures with other experts
    or none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedRole:
    """A model other than the policy, with what the trainer needs to use it."""

    role: Role
    params: Params
    """The model's weights; empty if they change in training, because they are then part of the state."""
    own_prompts: OwnPrompts | None = None
    optimizer: optax.GradientTransformation | None = None
    """The model's optimizer; None if the model is not trained."""


def make_scorers(
    recipe: Recipe,
    settings: TrainSettings,
    score: ScoreProgram,
    models: Sequence[Scorer] = (),
    entropy: ScoreProgram | None = None,
) -> tuple[Scorer, ...]:
    """Make the scorers of a step: those that the recipe names, and then the run's other models.

    Args:
        recipe: names scorers.
        settings: the trainer's settings; passed to functions that the recipe names by import path, to make their
            scorers.
        score: the program that computes log-probabilities with the trainer's decoder.
        models: scorers of the run's other models.
        entropy: the program that computes entropies; None: made from the settings, if the recipe needs it.

    Raises:
        ValueError: an import path is not a function that returns a `Scorer`, or two scorers' scores have one name.
    """
    own = [each.name for each in models]
    names = [*own, *(score_name(need) for need in recipe.scorers if need not in own)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"two models or scorers of the run give scores with the name {twice[0]!r}, and only one would be read; give"
            " one of them another name"
        )
    others = {each.name: each for each in models}
    found = [others.pop(need, None) or _make(need, settings, score, entropy) for need in recipe.scorers]
    return (*found, *others.values())


def make_role_scorer(
    role: Role,
    settings: TrainSettings,
    params: Params,
    own_prompts: OwnPrompts | None = None,
    program: ScoreProgram | None = None,
) -> Scorer:
    """Make the scorer of a model other than the policy, with its weights and, optionally, its own prompts.

    `settings` are the trainer's settings. `program` computes the scores; unset: made from the settings.
    """
    assert role.scores is not None, "the model scores batches"
    return Scorer(
        name=role.scores,
        decoder=role.decoder,
        params=params,
        program=program or make_role_program(role, settings),
        role=role.name if role.changes else None,
        own_prompts=own_prompts,
        follows_choices=role.phase == SCORE,
    )


def make_role_program(role: Role, settings: TrainSettings) -> CompiledScore:
    """Make the program that scores a batch: it returns values or log-probabilities, depending on the model's head, or
    hidden states.
    """
    own = role_settings(role, settings)
    if role.decoder.scores != "none":
        return make_values(own)
    return make_hidden(own) if role.compared else make_score(own)


def role_settings(role: Role, settings: TrainSettings) -> TrainSettings:
    """The trainer's settings with a role's decoder; a head with one output per token is not fused."""
    own = settings._replace(decoder=role.decoder)
    return (
        own if role.decoder.scores == "none" else own._replace(update=dataclasses.replace(own.update, head="chunked"))
    )


def compared_head(params: Mapping[str, A]) -> dict[str, A]:
    """Select, by parameter name, the matrix from hidden states to logits, [V, D], of a model whose distributions are
    compared in updates.
    """
    return {TAUGHT_HEAD: params.get("head", params["embed"])}


def _make(need: str, settings: TrainSettings, score: ScoreProgram, entropy: ScoreProgram | None) -> Scorer:
    match need:
        case "entropy":
            program = entropy or make_score(settings, entropy=True)
            return Scorer(name=ENTROPY, decoder=settings.decoder, params=None, program=program)
        case "old_logprobs":
            return Scorer(name=OLD_LOGPROBS, decoder=settings.decoder, params=None, program=score)
        case _:
            assert is_path(need), f"no model of the run provides the scores {need}"
            return _imported_scorer(need, settings)


def _imported_scorer(path: str, settings: TrainSettings) -> Scorer:
    """A user's scorer; its scores are stored under the function's name."""
    made = imported(path, what="a scorer")(settings)
    if not isinstance(made, Scorer):
        raise ValueError(f"{path!r} returned {made!r}; it must be a function of TrainSettings that returns a Scorer")
    return dataclasses.replace(made, name=score_name(path))


def behind_own_prompts(
    scorer: Scorer, samples: Sequence[Sample], prompts: Sequence[TaskPrompt], rules: ShardingRules
) -> list[np.ndarray]:
    """For a scorer with its own prompts, the scores [n] of each sample's tokens, computed in separate batches.

    `prompts` has one entry per sample. All processes must call this.
    """
    assert scorer.own_prompts is not None, "the scorer reads the policy's prompts"
    assert scorer.params is not None, "the policy reads its own prompts"
    given = [
        dataclasses.replace(sample, prompt=scorer.own_prompts.of(prompt), choices=None, prompt_choices=None)
        for sample, prompt in zip(samples, prompts, strict=True)
    ]
    batch, spans = make_batch(given, scorer.own_prompts.sizes)
    return take(on_host(scorer.program(scorer.params, shard_batch(batch, rules))), spans)


def with_scores(batch: Batch[jax.Array], scorers: Sequence[Scorer], policy: Params) -> Batch[jax.Array]:
    """Add each scorer's scores to the batch; `policy` holds all weights of the policy before the first update.

    Only the policy reuses the sampler's choices of experts; other models route tokens themselves.
    """
    plain = batch
    if batch.choices is not None and any(scorer.params is not None for scorer in scorers):
        nothing = jnp.full_like(batch.choices, unknown_choice(batch.choices.dtype))
        plain = dataclasses.replace(batch, choices=nothing)
    scores: dict[str, jax.Array] = {}
    for scorer in scorers:
        if scorer.params is None:
            scores[scorer.name] = scorer.program(policy, batch)
        elif not scorer.follows_choices:
            scores[scorer.name] = scorer.program(scorer.params, dataclasses.replace(batch, choices=None))
        else:
            scores[scorer.name] = scorer.program(scorer.params, plain)
    return dataclasses.replace(batch, scores=scores)
