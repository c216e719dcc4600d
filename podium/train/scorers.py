"""Models that score a batch's tokens before its first update: each is weights and a program, and has a name.

The scores go into `Batch.scores` by that name. Advantages may read them, and so may the loss. The policy itself, before
the update, is one scorer (`old_logprobs`); the frozen first model is another (`reference_logprobs`).
"""

import dataclasses
from collections.abc import Sequence

import jax

from podium.algorithms.recipes import OLD_LOGPROBS, REFERENCE_LOGPROBS, Recipe, score_name
from podium.config.imports import imported
from podium.models.architecture import DecoderConfig
from podium.sharding import Params
from podium.train.batch import Batch
from podium.train.step import ScoreProgram, TrainSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scorer:
    """A model that gives each target of a batch a number."""

    name: str
    """Of its scores in `Batch.scores`."""
    decoder: DecoderConfig
    params: Params | None
    """None: the policy's own, as they are before the batch's first update."""
    program: ScoreProgram


def make_scorers(
    recipe: Recipe, settings: TrainSettings, score: ScoreProgram, reference: Params | None
) -> tuple[Scorer, ...]:
    """The scorers that a recipe needs.

    Args:
        recipe: Names them.
        settings: Of the trainer. A scorer that the recipe names by import path is made by a call of the function there
            with these settings.
        score: The program that gives log-probabilities by the trainer's decoder.
        reference: Parameters of the first model, where the recipe needs them.

    Raises:
        ValueError: an import path does not lead to a function that makes a `Scorer`.
    """
    return tuple(_make(need, settings, score, reference) for need in recipe.scorers)


def _make(need: str, settings: TrainSettings, score: ScoreProgram, reference: Params | None) -> Scorer:
    match need:
        case "old_logprobs":
            return Scorer(name=OLD_LOGPROBS, decoder=settings.decoder, params=None, program=score)
        case "reference_logprobs":
            assert reference is not None, "a KL needs the reference"
            return Scorer(name=REFERENCE_LOGPROBS, decoder=settings.decoder, params=reference, program=score)
        case _:
            return _imported_scorer(need, settings)


def _imported_scorer(path: str, settings: TrainSettings) -> Scorer:
    """A scorer of the user's; its scores have the name of the function."""
    made = imported(path, what="a scorer")(settings)
    if not isinstance(made, Scorer):
        raise ValueError(f"{path!r} gives {made!r}; it must be a function of TrainSettings that returns a Scorer")
    return dataclasses.replace(made, name=score_name(path))


def with_scores(batch: Batch[jax.Array], scorers: Sequence[Scorer], policy: Params) -> Batch[jax.Array]:
    """The batch with the scores of each scorer; `policy` are all weights of the policy before the first update."""
    scores = {
        scorer.name: scorer.program(policy if scorer.params is None else scorer.params, batch) for scorer in scorers
    }
    return dataclasses.replace(batch, scores=scores)
