"""Turns graded groups into a new state: prepares batches, runs optimizer steps, and reports divergence."""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import optax

from podium.algorithms.controllers import KL_COEF, Coefs, after_step, after_update, loss_coefs
from podium.algorithms.recipes import TAUGHT_HIDDEN, Recipe
from podium.compile_ahead import Call, CompileAhead
from podium.hosts.distributed import is_leader, on_host
from podium.observe.stats import BatchStats, LearnerStats, RewardPenalty, UpdateStats
from podium.run.run_spec import SCORE, BatchSizes, OptimizerSpec, RowShape
from podium.sampling.groups import Group
from podium.sharding import Params, to_devices
from podium.train.batches.batch import Batch, make_batch
from podium.train.batches.prepare import group_lengths, group_samples, log_ratios, prepare_step
from podium.train.batches.run_shapes import RunShapes
from podium.train.learner import DivergedError, Learner, make_learner, update_learner
from podium.train.optimizer.transforms import learning_rate
from podium.train.scorers import LoadedRole, Scorer, compared_head, make_role_scorer, make_scorers
from podium.train.state import TrainState, at_schedule_step, mixed, with_coefs
from podium.train.step import (
    CompiledScore,
    ScoreProgram,
    TrainSettings,
    TrainStep,
    abstract_batch,
    abstract_scored,
    make_train_programs,
)

UPDATE, SCORE_BASE = "update", "score_base"
"""Names of programs that are compiled ahead, in addition to SCORE and the roles' programs."""


class Trainer:
    """Runs optimizer steps on batches; holds the compiled programs and the weights that never change."""

    def __init__(
        self,
        recipe: Recipe,
        settings: TrainSettings,
        optimizer: optax.GradientTransformation,
        *,
        shapes: RunShapes,
        schedule: OptimizerSpec,
        folder: Path,
        frozen: Params | None = None,
        roles: Sequence[LoadedRole] = (),
    ) -> None:
        """Make the programs; each is compiled on first use, or earlier (`compile_ahead`).

        `shapes` are those of all batches; the learning rate follows `schedule`. A batch that diverges is saved in
        `folder`. `frozen` holds the base weights of LoRA's adapters. `roles` are the other models that score batches;
        they must include all that the recipe needs.
        """
        self.frozen = frozen or {}
        self.recipe = recipe
        self.settings = settings
        self.folder = folder
        self.shapes = shapes
        self.programs = make_train_programs(settings, recipe, optimizer)
        self.train_step: TrainStep = self.programs.train_step
        self.learners: dict[str, Learner] = {}
        """The trained models other than the policy, by role name."""
        self.followers = {each.role.name: each.role.follows for each in roles if each.role.follows is not None}
        """How each model that follows the policy does so, by role name."""
        models: list[Scorer] = []
        for each in roles:
            program = self.score if each.role.phase == SCORE else None
            if each.optimizer is not None:
                own = self.learners[each.role.name] = make_learner(each.role, settings, each.optimizer)
                program = own.score
            models.append(make_role_scorer(each.role, settings, each.params, each.own_prompts, program))
        self.scorers = make_scorers(recipe, settings, self.score, models)
        self.learning_rate = learning_rate(schedule.settings, schedule.steps)
        self._ahead = CompileAhead(threads=0)

    @property
    def score(self) -> CompiledScore:
        """The program that scores a batch with the policy, and with other models of the same architecture."""
        return self.programs.score

    @property
    def sizes(self) -> BatchSizes:
        """The sizes of the next step's batches."""
        return self.shapes.sizes

    @property
    def fixed(self) -> Params:
        """The weights that updates read in addition to the state: the frozen ones, and the head of a model whose whole
        distributions are compared with the policy's.
        """
        compared = next((each.params for each in self.scorers if each.name == TAUGHT_HIDDEN), None)
        if compared is None or compared is self.frozen:  # which have the head
            return self.frozen
        return self.frozen | compared_head(compared)

    def compile_ahead(self, state: TrainState, ahead: CompileAhead) -> None:
        """Start compiling the updates, and the scoring programs of models that change, for the arrays of `state`.

        They are compiled for every shape of batches, the likeliest first. Each call waits for its own program. All
        other programs are compiled on their first call: for entropies, for frozen models of other architectures, and
        for a user's scorers.
        """
        self._ahead = ahead
        for shape in self.shapes.likely:
            self._compile_shape(state, shape)

    def _compile_shape(self, state: TrainState, shape: RowShape) -> None:
        """Start compiling the programs for batches of one shape."""
        sizes = self.shapes.own.of_shape(shape)
        width = next((each.decoder.width for each in self.scorers if each.name == TAUGHT_HIDDEN), 0)
        scored = abstract_scored(sizes, self.recipe, self.settings, width=width)
        plain = abstract_batch(make_batch([], sizes)[0], self.settings.computing)
        alone = at_schedule_step(dataclasses.replace(state, models={}, coefs={}), 0)
        calls = {UPDATE: Call(self.programs.train_step, (alone, scored, self.fixed))}
        policy = state.params | self.frozen
        own = [each.params or policy for each in self._scorers(state) if each.program is self.score]
        for params in {frozenset(params): params for params in own}.values():  # one program for weights of equal names
            calls[SCORE if params.keys() == policy.keys() else SCORE_BASE] = Call(self.score, (params, plain))
        for name, learner in self.learners.items():
            learned = at_schedule_step(state.learned(name), 0)
            calls[name] = Call(learner.step, (learned, dataclasses.replace(scored, choices=None)))
            calls[learner.role.phase] = Call(learner.score, (learned.params, dataclasses.replace(plain, choices=None)))
        self._ahead.begin((self._named(name, scored), call) for name, call in calls.items())

    def _named(self, program: str, batch: Batch[jax.Array]) -> str:
        """The name of the program for batches of this shape."""
        shape = RowShape(*batch.tokens.shape[1:])
        return program if shape == self.shapes.own.shape else f"{program} of {shape.rows} x {shape.row_tokens}"

    def prepare(
        self, state: TrainState, groups: Sequence[Group], demonstrations: Sequence[Group] = ()
    ) -> tuple[list[Batch[jax.Array]], BatchStats]:
        """Make the scored batches of a step's optimizer steps on the devices; `state` is the state before the first.

        `demonstrations` are mixed into the batches.
        """
        recipe = self.recipe
        if self.shapes.chooses:
            lengths = group_lengths(groups, recipe, demonstrations)
            self.shapes.choose(lengths, per_step=-(-len(lengths) // recipe.minibatches))
        if KL_COEF in state.coefs:
            recipe = dataclasses.replace(recipe, kl_coef=float(state.coefs[KL_COEF]))
        return prepare_step(
            groups,
            recipe,
            self.sizes,
            rules=self.settings.computing,
            scorers=self._ready_scorers(state),
            policy=state.params | self.frozen,
            demonstrations=demonstrations,
        )

    def log_ratios(self, state: TrainState, groups: Sequence[Group]) -> np.ndarray:
        """For each completion of a few groups, in order, the log of how much likelier the policy makes it than the
        frozen first model does; used for preferences.
        """
        samples = [sample for n, group in enumerate(groups) for sample in group_samples(group, n, self.recipe)]
        policy = state.params | self.frozen
        return log_ratios(samples, self.sizes, self.settings.computing, self._ready_scorers(state), policy)

    def _ready_scorers(self, state: TrainState) -> tuple[Scorer, ...]:
        """The scorers of a step, each of which waits until the programs for its batch's shape are compiled."""
        names = (SCORE, SCORE_BASE, *(each.role.phase for each in self.learners.values()))

        def waiting(program: ScoreProgram) -> ScoreProgram:
            def score(params: Params, batch: Batch[jax.Array], /) -> jax.Array:
                self._ahead.wait(*(self._named(name, batch) for name in names))
                return program(params, batch)

            return score

        return tuple(dataclasses.replace(each, program=waiting(each.program)) for each in self._scorers(state))

    def _scorers(self, state: TrainState) -> tuple[Scorer, ...]:
        """The scorers of a step; for models that change, with the state's weights."""
        return tuple(
            each if each.role is None else dataclasses.replace(each, params=state.weights(each.role))
            for each in self.scorers
        )

    def update(
        self,
        state: TrainState,
        batches: Sequence[Batch[jax.Array]],
        step: int,
        *,
        penalty: RewardPenalty | None = None,
    ) -> tuple[TrainState, UpdateStats]:
        """Run the updates of a step on the batches of `prepare`, as often as the recipe says; other models are updated
        before the policy.

        Then models that follow the policy are mixed with it, if they are due at this step.

        The learning rate follows the run's schedule: each step covers an equal share of it, and the step's updates use
        the last rates of that share, however many updates there are. The state is donated; without batches it is
        returned unchanged. Steps are counted from 0. `penalty` is the KL penalty that was subtracted from the step's
        rewards, if any.

        Raises:
            DivergedError: the loss or the gradient of a model is not finite.
        """
        self._ahead.wait(*(self._named(name, batch) for name in self.learners for batch in batches))
        models, learned = dict(state.models), dict[str, LearnerStats]()
        for name, learner in self.learners.items():
            models[name], stats = update_learner(
                learner, state.learned(name), batches, step, minibatches=self.recipe.minibatches
            )
            learned |= {} if stats is None else {name: stats}
        coefs = {name: float(value) for name, value in state.coefs.items()}
        alone = dataclasses.replace(state, models={}, coefs={})
        state, updated, coefs = self._update_policy(alone, batches, step, coefs)
        if batches and coefs:
            coefs = after_step(self.recipe, coefs, kl=updated.kl(penalty))
        state = dataclasses.replace(state, models=models)
        models |= {
            name: mixed(state.weights(name), state.params, follows.mixup)
            for name, follows in self.followers.items()
            if (step + 1) % follows.sync_every == 0
        }
        state = with_coefs(dataclasses.replace(state, models=models), coefs)
        new = self.shapes.begin(step + 1)
        for shape in new if self._ahead.threads else ():
            self._compile_shape(state, shape)
        return state, dataclasses.replace(updated, learners=learned)

    def _update_policy(
        self, state: TrainState, batches: Sequence[Batch[jax.Array]], step: int, coefs: dict[str, float]
    ) -> tuple[TrainState, UpdateStats, dict[str, float]]:
        """Run the policy's updates of a step, or none while another model warms up; adapts `coefs` after each
        update.
        """
        start = time.perf_counter()
        if any(step < learner.spec.warmup_steps for learner in self.learners.values()):
            batches = ()
        end = (
            (step + 1) * self.recipe.updates_per_batch * self.recipe.minibatches
        )  # end of the step's share of the schedule
        todo = [batch for _ in range(self.recipe.updates_per_batch) for batch in batches]
        rate = float(np.asarray(self.learning_rate(end - 1)))
        made: list[UpdateStats] = []
        fixed = self.fixed
        for position, batch in enumerate(todo, start=end - len(todo)):
            self._ahead.wait(self._named(UPDATE, batch))
            applied = loss_coefs(self.recipe, coefs) if coefs else {}
            given = self._with_coefs(batch, applied) if coefs else batch
            state, metrics = self.train_step(at_schedule_step(state, position), given, fixed)
            metrics = jax.device_get(metrics)
            broken = int(metrics.pop("broken_row"))
            if coefs and float(batch.num_tokens):  # otherwise it holds only demonstrations
                coefs = after_update(self.recipe, coefs, entropy=float(metrics["entropy"]))
            shown = applied | {name: coefs[name] for name in (KL_COEF,) if name in coefs}
            made.append(_update_stats(metrics | shown, float(batch.num_tokens), rate))
            if not np.isfinite([made[-1].loss, made[-1].gradient_norm]).all():
                raise DivergedError(self._diverged(int(state.step), batch, made[-1], broken))
        state = at_schedule_step(state, end)
        stats = functools.reduce(UpdateStats.then, made) if made else UpdateStats(learning_rate=rate)
        return state, dataclasses.replace(stats, update_s=time.perf_counter() - start), coefs

    def _with_coefs(self, batch: Batch[jax.Array], coefs: Coefs) -> Batch[jax.Array]:
        """Add the loss's adapted coefficients to the batch, on every device."""
        sharding = self.settings.computing.sharding()
        placed = {name: to_devices(np.asarray(value, np.float32), sharding) for name, value in coefs.items()}
        return dataclasses.replace(batch, coefs=placed)

    def _diverged(self, step: int, batch: Batch[jax.Array], stats: UpdateStats, broken: int) -> str:
        """Save the batch that diverged and return the message; `broken` is the first bad row, counted from the last."""
        path = self.folder / f"diverged-update-{step}.npz"
        arrays = {name: on_host(x) for name, x in batch.arrays().items()}
        if is_leader():
            np.savez_compressed(path, allow_pickle=False, **arrays)
        return (
            f"update {step} diverged: loss {stats.loss}, gradient norm {stats.gradient_norm};"
            f" {_first_cause(arrays, broken)}; its batch is in {path}. Continue from the last checkpoint with a lower"
            " train.optimizer.learning_rate (another name and"
            f" --from {self.folder}), or train.dtype float32"
        )


def _first_cause(arrays: dict[str, np.ndarray], broken: int) -> str:
    """Say which row of a batch broke first, and whether its inputs were finite."""
    if not broken:
        return "the loss of every row is finite, so the gradient overflowed"
    micro_batches, rows, _ = arrays["tokens"].shape
    micro_batch, row = divmod(micro_batches * rows - broken, rows)
    given = [name for name, x in arrays.items() if x.ndim == 3 and not np.isfinite(x[micro_batch, row]).all()]
    why = f"whose {' and '.join(given)} are not finite" if given else "although all its inputs are finite"
    return f"the first bad row is row {row} of micro-batch {micro_batch}, {why}"


def _update_stats(metrics: Mapping[str, jax.Array | float], tokens: float, learning_rate: float) -> UpdateStats:
    """Convert the metrics of one `train_step` to host values."""
    values = {name: float(value) for name, value in metrics.items()}
    return UpdateStats(
        updates=1,
        tokens=tokens,
        learning_rate=learning_rate,
        loss=values.pop("loss"),
        gradient_norm=values.pop("gradient_norm"),
        update_norm=values.pop("update_norm"),
        logprob_gap=values.pop("logprob_gap"),
        logprob_gap_max=values.pop("logprob_gap_max"),
        token_means=values,
    )
