"""Runs a short training with the regular loop, and records what was sampled, each gradient and each new weight.

`run_steps`, `Sampler` and `Trainer` are those of every run; only displays and files of records are stubbed. The
run has several minibatches with several updates each, completions that continue across updates, groups of equal
rewards, warm-up, weight decay, and clipped gradients. If the config has tools or environments, its prompts are answered
by conversations, and the tokens that the engine is given of each are recorded.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from podium.algorithms.controllers import KL_COEF
from podium.certify.ledgers import Ledger, Ledgers
from podium.certify.small_run import RunSettings, training_settings
from podium.certify.subject import Subject, one_device
from podium.certify.tiny import Arrays
from podium.certify.updates import keeping_gradient, last_gradient
from podium.config.schema import CheckpointConfig, Config
from podium.hosts.distributed import AgreedStop
from podium.hosts.signals import StopSignal
from podium.job.job_context import alone
from podium.models.adapters import base_of
from podium.observe.stats import BatchStats, PreferenceStats, TaskScores
from podium.rollout.request import RolloutStats
from podium.run.run_spec import AnswerSettings, Role, RunSpec
from podium.sampling.conversations.carry import Position
from podium.sampling.feed import EncodedPrompt
from podium.sampling.groups import Group
from podium.sampling.partial_rollouts import PartialRollouts
from podium.sampling.sampler import Sampler
from podium.sharding import Params
from podium.tasks.mixture import TaskMixture, TaskPrompt
from podium.train.batches.batch import Batch
from podium.train.batches.run_shapes import RunShapes
from podium.train.checkpoints.checkpoint import Checkpointer
from podium.train.checkpoints.saving import Saving
from podium.train.checkpoints.step_files import newest_whole_step
from podium.train.evaluate import evaluate
from podium.train.first_state import Origin, make_optimizers
from podium.train.held_out import held_out_preferences
from podium.train.loop import run_steps
from podium.train.open import RunParts, go_on_sampling, load_state, make_source, open_trainer
from podium.train.recorder import Recorder
from podium.train.setup import run_spec
from podium.train.state import TrainState
from podium.train.step import Metrics, TrainStep
from podium.train.surroundings import Surroundings
from podium.train.trainer import Trainer

SHORT_STEP = 2
"""Index of the step whose last minibatch is taken away, as if it were masked, unless it is the only one."""


class OptimizerStep(NamedTuple):
    """Inputs and results of an optimizer step of the policy, or of another model that is trained."""

    before: Arrays  # the trained weights before the step
    gradient: Arrays
    loss: float
    after: Arrays
    coefs: Mapping[str, float]
    """The adapted weights in its loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The recorded data of one step of the run."""

    weights: Arrays
    """All weights before the step's first update."""
    groups: Sequence[Group]
    updates: list[OptimizerStep]
    learned: Mapping[str, list[OptimizerStep]]
    """The optimizer steps of the other models that are trained, by the name of their role."""
    models: Mapping[str, Arrays]
    """The weights of all other models that change, before the step, by the name of their role."""
    coefs: Mapping[str, float]
    """The coefficients that the run adapts, before the step; empty if it adapts none."""
    state: Arrays
    """Every array of the run's state before the step, moments included, by its path."""
    charged: Mapping[str, float]
    """The weight of the KL in the step's rewards, with KL_COEF as its key; empty if rewards have no KL."""
    shares: Sequence["Share"]
    """The shares of right answers that were reported for its groups."""
    position: Position
    """The position in the run's prompts after the step's groups were taken."""
    metrics: dict[str, float]
    """The numbers that the run reported of the step, by name."""


class Share(NamedTuple):
    """The share of right answers to a prompt, by which prompts are chosen and retired."""

    prompt: str
    """The prompt's id."""
    share: float


class Evaluated(NamedTuple):
    """An evaluation of the last weights."""

    greedy: Sequence[Group]
    sampled: Sequence[Group]
    label: str
    """The task's label."""
    scores: TaskScores
    undisturbed: bool
    """Whether the evaluation left the run's position unchanged."""
    preferences: PreferenceStats | None
    """What was reported of held-out preferences; None unless the run learns from preferences."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The recorded data of a run."""

    settings: RunSettings
    spec: RunSpec
    steps: list[Step]
    resumed: Step
    """The last step, run again after resuming from the checkpoint before it."""
    weights: Arrays
    """All weights after the last step."""
    newest: int | None
    """The step from which the same command would go on, after the last one."""
    ledgers: Sequence[Ledger]
    """The conversations that the engine held."""
    evaluation: "Evaluated | None"
    """None if the run was not evaluated."""

    @property
    def config(self) -> Config:
        """The config of the run."""
        return self.settings.config

    def version(self, version: int) -> Arrays:
        """All weights after `version` steps."""
        return self.steps[version].weights if version < len(self.steps) else self.weights


def watch_training(subject: Subject, *, evaluated: bool = True) -> Training:
    """Train the subject for a few steps and record them; then resume before the last step, and record that again.

    With `evaluated`, also evaluate the last weights.
    """
    settings, mesh = training_settings(subject), one_device()
    spec = run_spec(settings.config, subject.decoder, mesh)
    small = [dataclasses.replace(role, decoder=subject.models[role.name].decoder) for role in spec.scoring_models]
    spec = dataclasses.replace(spec, scoring_models=tuple(small))
    optimizers = {name: keeping_gradient(optimizer) for name, optimizer in make_optimizers(spec).items()}
    origin, rollouts = Origin(spec, _SubjectWeights(subject, mesh), optimizers), subject.rollouts
    state, frozen = origin.first(), origin.weights.frozen
    rollouts.partial = PartialRollouts(rollouts.feed, spec.rollout)
    go_on_sampling(rollouts, {"cursor": 0, "versions": {}}, state.params, frozen, done=0)
    ledgers = Ledgers()
    with tempfile.TemporaryDirectory(prefix="podium-certify-") as folder, contextlib.ExitStack() as stack:
        stack.enter_context(ledgers.recording(rollouts.engine))
        shares = stack.enter_context(_learning(rollouts.feed.tasks))
        trainer = open_trainer(origin, rollouts.feed, Path(folder), RunShapes(spec.batch, keep=lambda kept: None))
        recorded = stack.enter_context(_watched(trainer, rollouts, shares))
        saving = CheckpointConfig(every_steps=spec.steps - 1, every_minutes=0.0)
        checkpoints = Path(folder) / "checkpoints"
        checkpointer = Checkpointer(checkpoints, saving, origin.weights.base)
        stack.callback(checkpointer.close)
        run = _make_run(spec, rollouts, trainer, checkpointer, steps=recorded, resources=stack)
        run_steps(run, state, 0)
        newest = newest_whole_step(checkpoints, run.around.say, run.around.job.watchdog.beat)
        named = settings.config.algorithm.recipe
        state, saved, done = load_state(origin, spec.steps - 1, checkpointer, run.around, named)
        go_on_sampling(rollouts, saved, state.params, frozen, done=done)
        run_steps(run, state, done)
        *steps, resumed = recorded
        weights = {**steps[-1].weights, **(resumed.updates[-1].after if resumed.updates else {})}
        dropped = list(ledgers.dropped)
        evaluation = None
        if evaluated:
            if spec.recipe.demonstrations:
                rollouts.load(subject.trained(mesh, weights), frozen, version=spec.steps)
            last, _ = checkpointer.restore(spec.steps, origin.abstract())
            evaluation = _evaluated(rollouts, spec, trainer, last)
    return Training(
        settings=settings,
        spec=spec,
        steps=steps,
        resumed=resumed,
        weights=weights,
        newest=newest,
        ledgers=dropped,
        evaluation=evaluation,
    )


@contextlib.contextmanager
def _learning(tasks: TaskMixture) -> Iterator[list[Share]]:
    """Record, within the context, the shares of right answers that are reported to the tasks."""
    found: list[Share] = []
    learn = tasks.learn

    def recorded(prompt: TaskPrompt, mean: float) -> None:
        found.append(Share(prompt.prompt.id, mean))
        learn(prompt, mean)

    with _replaced(tasks, "learn", recorded):
        yield found


class _SubjectWeights:
    """The weights of a subject's models: `podium.train.first_state.Weights`."""

    def __init__(self, subject: Subject, mesh: jax.sharding.Mesh) -> None:
        self._subject = subject
        self.mesh = mesh
        self.frozen = subject.frozen(mesh)
        self.base = base_of(self.frozen)

    def trained(self) -> Params:
        """The policy's weights that updates change."""
        return self._subject.trained(self.mesh)

    def of(self, role: Role) -> Params:
        """The weights of a model beside the policy."""
        return self._subject.models[role.name].params(self.mesh)


def _make_run(
    spec: RunSpec,
    rollouts: Sampler,
    trainer: Trainer,
    checkpointer: Checkpointer,
    *,
    steps: Sequence[Step],
    resources: contextlib.ExitStack,
) -> RunParts:
    """A run without displays and files of records; the last of `steps` gets what it reports."""
    silent: Any = _Silent()
    stop = AgreedStop(StopSignal())
    around = Surroundings(run_dir=silent, progress=silent, stop=stop, job=alone())

    def report(step: int, metrics: Mapping[str, float], samples: object) -> None:
        steps[-1].metrics.update(metrics)

    return RunParts(
        spec=spec,
        around=around,
        rollouts=rollouts,
        source=make_source(spec, rollouts),
        trainer=trainer,
        recorder=Recorder(spec, around, silent, rollouts.feed, check=None, on_step=report),
        saving=Saving(checkpointer, stop, to_continue=lambda: ""),
        profiler=silent,
        resources=resources,
    )


def _evaluated(rollouts: Sampler, spec: RunSpec, trainer: Trainer, state: TrainState) -> Evaluated:
    """Evaluate the loaded weights, which are those of the state."""
    answered: list[list[Group]] = []
    answer, before = rollouts.answer, rollouts.position.record()

    def recorded(
        prompts: Sequence[EncodedPrompt], settings: AnswerSettings | None = None
    ) -> tuple[list[Group], RolloutStats]:
        found = answer(prompts, settings)
        answered.append(found[0])
        return found

    with _replaced(rollouts, "answer", recorded):
        ((label, scores),) = evaluate(rollouts).stats.tasks.items()
    greedy, sampled = answered
    told = held_out_preferences(rollouts.feed, spec, trainer, state) if spec.recipe.preferences else None
    undisturbed = rollouts.position.record() == before
    return Evaluated(greedy, sampled, label, scores=scores, undisturbed=undisturbed, preferences=told)


@contextlib.contextmanager
def _replaced(thing: object, name: str, own: object) -> Iterator[None]:
    """Replace a method of an object within the context."""
    setattr(thing, name, own)
    try:
        yield
    finally:
        delattr(thing, name)


@contextlib.contextmanager
def _watched(trainer: Trainer, rollouts: Sampler, shares: list[Share]) -> Iterator[list[Step]]:
    """Record, within the context, the inputs and results of each step and update of a trainer.

    `shares` collects what is reported to the tasks; each step takes it and empties the list.
    """
    steps: list[Step] = []
    prepare = trainer.prepare

    def recorded(
        state: TrainState, groups: Sequence[Group], demonstrations: Sequence[Group] = ()
    ) -> tuple[list[Batch[jax.Array]], BatchStats]:
        batches, stats = prepare(state, groups, demonstrations)
        batches = batches[: len(batches) - (len(steps) == SHORT_STEP and trainer.recipe.minibatches > 1)]
        step = Step(
            weights=_copied({**state.params, **trainer.frozen}),
            groups=groups,
            updates=[],
            learned={name: [] for name in trainer.learners},
            models={name: _copied(state.weights(name)) for name in state.models},
            coefs=_numbers(state.coefs),
            state={jax.tree_util.keystr(path): np.array(x) for path, x in jax.tree_util.tree_leaves_with_path(state)},
            charged=_charged(stats),
            shares=list(shares),
            position=rollouts.position,
            metrics={},
        )
        steps.append(step)
        shares.clear()
        return batches, stats

    trainer.train_step = _recording(trainer.train_step, lambda: steps[-1].updates)
    for name, learner in trainer.learners.items():
        watched: Any = _recording(learner.step, lambda name=name: steps[-1].learned[name])
        trainer.learners[name] = learner._replace(step=watched)
    with _replaced(trainer, "prepare", recorded):
        yield steps


def _recording(run: TrainStep, into: Callable[[], list[OptimizerStep]]) -> TrainStep:
    """Wrap a program so that it appends its inputs and results to a list of the current step."""

    def recorded(state: TrainState, batch: Batch, frozen: Params | None = None, /) -> tuple[TrainState, Metrics]:
        before = _copied(state.params)
        state, metrics = run(state, batch, frozen) if frozen is not None else run(state, batch)
        after, loss = _copied(state.params), float(metrics["loss"])
        into().append(OptimizerStep(before, last_gradient(state), loss, after, _numbers(batch.coefs)))
        return state, metrics

    return recorded


class _Silent:
    """Stands in for a run's view, profiler, folder and writer: each of their methods does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _copied(params: Mapping[str, jax.Array]) -> Arrays:
    """Copy arrays to the host, since the trainer donates theirs."""
    return {name: np.array(value) for name, value in params.items()}


def _charged(stats: BatchStats) -> dict[str, float]:
    """The weight of the KL in a step's rewards, by KL_COEF; empty without it, or if no completion has a KL."""
    if stats.penalty is None:
        return {}
    sums = stats.penalty.kl.ravel()
    largest = int(np.argmax(np.abs(sums)))
    return {KL_COEF: float(stats.penalty.penalties.flat[largest] / sums[largest])} if sums[largest] else {}


def _numbers(coefs: Mapping[str, jax.Array]) -> dict[str, float]:
    return {name: float(value) for name, value in coefs.items()}
