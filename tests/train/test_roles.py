"""A further model of a run is one `Role`: it scores batches and is planned, without a change in podium."""

import dataclasses
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decoder import tiny
from tiny_runs import groups_of, make_config, make_params, make_train_settings, rules_of, sgd, spec_of, teacher_role

from podium.accelerators import find_accelerator
from podium.algorithms.recipes import Recipe
from podium.certify.tiny import random_weights
from podium.models.architecture import frozen_decoder
from podium.plan.closed_form.estimate import estimate
from podium.plan.compiled.phases import phase_programs
from podium.plan.request.phase_sizes import sizes_on
from podium.plan.request.step_calls import update_calls
from podium.plan.result import part_of
from podium.train.batches.run_shapes import RunShapes
from podium.train.scorers import LoadedRole, make_role_scorer, make_scorers
from podium.train.state import init_state
from podium.train.step import make_score
from podium.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_device")
SECOND = dataclasses.replace(
    teacher_role(frozen_decoder(tiny(layers=1), "bfloat16")), name="second", phase="second", scores="second_logprobs"
)
WEIGHTS = {name: jnp.asarray(x, jnp.bfloat16) for name, x in random_weights(SECOND.decoder, seed=4).items()}


def by_second_teacher(rewards, lengths, *, tokens):
    """An advantage that is the second teacher's log-probability of each token."""
    return tokens.scores[SECOND.scores]


def test_a_second_teacher_scores_the_batches_of_a_step():
    spec, settings = spec_of(make_config()), make_train_settings(rules_of(), attention="reference")
    recipe, roles = (
        Recipe(advantage=partial(by_second_teacher), mean="token"),
        [LoadedRole(role=SECOND, params=WEIGHTS)],
    )
    trainer = Trainer(
        recipe, settings, sgd(), shapes=RunShapes(spec.batch), schedule=spec.optimizer, folder=Path(), roles=roles
    )
    (batch,), _ = trainer.prepare(init_state(make_params(rules_of()), sgd()), groups_of())
    mask = np.asarray(batch.mask) > 0
    scores = np.asarray(make_score(settings._replace(decoder=SECOND.decoder))(WEIGHTS, batch))
    np.testing.assert_array_equal(np.asarray(batch.advantages)[mask], scores[mask])
    assert np.ptp(scores[mask]) > 0.1


def scores_of(settings):
    """A scorer of a user, whose scores have its name."""
    raise AssertionError("names are compared first")


@pytest.mark.parametrize("scorers", [(), ("test_roles:second_logprobs",), ("test_roles:scores_of", "other:scores_of")])
def test_two_models_or_scorers_whose_scores_have_one_name_are_refused(scorers):
    """One of them would be read for both."""
    twice = [SECOND] if scorers else [SECOND, dataclasses.replace(SECOND, name="third", phase="third")]
    settings = make_train_settings(rules_of(), attention="reference")
    models = [make_role_scorer(role, settings, WEIGHTS) for role in twice]
    recipe = Recipe(advantage=partial(by_second_teacher), mean="token", needs=scorers)
    name = "scores_of" if len(scorers) > 1 else "second_logprobs"
    with pytest.raises(ValueError, match=f"two models or scorers of the run give scores with the name '{name}'"):
        make_scorers(recipe, settings, make_score(settings), models)


def test_a_second_teacher_is_in_the_plan_with_its_weights_and_its_phase():
    plain = spec_of(make_config())
    spec = dataclasses.replace(plain, scoring_models=(*plain.scoring_models, SECOND))
    size = sum(x.nbytes for x in WEIGHTS.values())
    run = sizes_on(spec, find_accelerator("v6e-1"))
    assert {phase.name: phase.parts.get("second_weights") for phase in estimate(run)}["second"] == size
    assert part_of("second") == "score"
    (call,) = (each for each in update_calls(run, 2) if each.phase == "second")
    assert (call.calls, call.rounds) == (1, 2)
    programs = phase_programs(spec, rules_of().mesh)
    assert programs["update"].residents["second_weights"] == size
    assert programs["second"].lower().out_info.shape == programs["update"].arguments[1].tokens.shape
    assert set(programs) - set(phase_programs(plain, rules_of().mesh)) == {"second"}
