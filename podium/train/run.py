"""What a run consists of, from its first step to its last: opened in order, closed in reverse."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from podium.algorithms.recipes import Recipe, make_recipe
from podium.config.schema import Config
from podium.job.context import JobContext
from podium.models.params import param_specs
from podium.observe.progress import Progress
from podium.observe.run_dir import Fork, RunDir
from podium.observe.summary import versions
from podium.observe.writers import MetricWriter
from podium.sharding import abstract_params
from podium.train.checkpoint import Checkpointer, restore_state
from podium.train.distributed import AgreedStop, failing_fast, from_leader, joined
from podium.train.feed import Feed
from podium.train.generate import Rollouts
from podium.train.recorder import PlanCheck, Recorder
from podium.train.setup import Model, load_weights, make_model, make_run_optimizer, make_train_settings
from podium.train.signals import StopSignal
from podium.train.state import TrainState, abstract_state, init_state, restarted
from podium.train.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunParts:
    """What lives from a run's first step to its last."""

    config: Config
    recipe: Recipe
    job: JobContext
    console: Console
    run_dir: RunDir
    progress: Progress
    stop: AgreedStop
    rollouts: Rollouts
    trainer: Trainer
    recorder: Recorder
    checkpointer: Checkpointer
    resources: contextlib.ExitStack
    """Closes what is the run's alone: services, the last checkpoint, graders, the engine."""

    def phase(self, name: str) -> None:
        """Say what is being done from now on: to the user, and to the watchdog."""
        _enter_phase(self.progress, self.job, name)


@contextlib.contextmanager
def open_run(
    config: Config, *, fork: Fork | None, plain: bool, job: JobContext, check: PlanCheck | None
) -> Iterator[tuple[RunParts, TrainState, int]]:
    """The parts of a run, its state, and how many steps are done.

    Args:
        config: of the run, with its name.
        fork: the run and step whose checkpoint a new run begins from.
        plain: lines instead of the live view.
        job: what this process is a part of.
        check: plans the run at its start, and compares; None: nothing does.

    Raises:
        ValueError: something that the config names cannot be used; the message says what, and the way out.
    """
    console = Console(stderr=True, force_interactive=False if plain or job.watched else None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(joined(job))
        run_dir = stack.enter_context(_open_run_dir(config, fork))
        progress = stack.enter_context(Progress(run_dir.path.name, config.steps, console))
        stop = AgreedStop(stack.enter_context(StopSignal(progress.notice)))
        stack.enter_context(job.watchdog.watching() if job.watched else contextlib.nullcontext())
        resources = stack.enter_context(contextlib.ExitStack())
        stack.enter_context(failing_fast(job))
        job.report.update(steps=config.steps, run_dir=str(run_dir.path.absolute()))
        outside = _Outside(config, job, console, run_dir, progress, stop, resources)
        yield _make_parts(outside, check)


def _enter_phase(progress: Progress, job: JobContext, name: str) -> None:
    progress.phase(name)
    job.watchdog.phase(name)


class _Outside(NamedTuple):
    """The parts of a run that need no model; as in `RunParts`."""

    config: Config
    job: JobContext
    console: Console
    run_dir: RunDir
    progress: Progress
    stop: AgreedStop
    resources: contextlib.ExitStack


def _open_run_dir(config: Config, fork: Fork | None) -> RunDir:
    """The run's folder: process 0 has it open for writing, the others only read it."""
    opened: list[RunDir] = []

    def open_it() -> tuple[bool, Fork | None]:
        opened.append(RunDir.open(config, fork=fork))
        return opened[0].continued, opened[0].fork

    continued, kept = from_leader(open_it)
    return opened[0] if opened else RunDir.follow(config, continued=continued, fork=kept)


def _make_parts(outside: _Outside, check: PlanCheck | None) -> tuple[RunParts, TrainState, int]:
    """All parts, with the weights of where the run stands loaded, and the steps done there."""
    config, job, _, run_dir, progress, stop, resources = outside
    _enter_phase(progress, job, "model")
    recipe = make_recipe(config.algorithm, group_size=config.group_size, prompts_per_step=config.prompts_per_step)
    model = make_model(config)
    if check is not None:
        line = check.begin(config, model.decoder, run_dir.path if jax.process_index() == 0 else None)
        if line is not None:
            progress.message(line)
    optimizer = make_run_optimizer(config, model.decoder)
    rollouts = Rollouts(config, model.decoder, model.tokenizer, model.mesh, stop=stop, watchdog=job.watchdog)
    resources.callback(rollouts.close)
    tasks = rollouts.feed.tasks
    tasks.num_prompts()  # read now: bad data is an error before the first compile
    on_save = functools.partial(_enter_phase, progress, job, "checkpoint")
    checkpointer = Checkpointer(run_dir.checkpoints, config.checkpoint, on_save=on_save)
    resources.callback(checkpointer.close)
    state, done = _load_state(outside, model, optimizer, checkpointer, rollouts.feed)
    job.report.update(step=done)
    run_dir.truncate(done if done else -1)
    writer = resources.enter_context(MetricWriter(run_dir, config, announce=progress.message))
    reference = load_weights(model, None) if recipe.needs_reference else None
    settings = make_train_settings(config, model.decoder, model.mesh)
    trainer = Trainer(config, recipe, settings, optimizer, reference=reference, folder=run_dir.path)
    rollouts.load(state.params)
    progress.message(f"number formats: update {settings.dtype}, rollout {rollouts.engine.dtype}")
    recorder = Recorder(
        config,
        run_dir,
        writer,
        progress,
        recipe=recipe,
        report=job.report,
        task_labels=list(tasks.labels),
        check=check,
    )
    parts = RunParts(
        **outside._asdict(),
        recipe=recipe,
        rollouts=rollouts,
        trainer=trainer,
        recorder=recorder,
        checkpointer=checkpointer,
    )
    return parts, state, done


def _load_state(
    outside: _Outside,
    model: Model,
    optimizer: optax.GradientTransformation,
    checkpointer: Checkpointer,
    feed: Feed,
) -> tuple[TrainState, int]:
    """Where the run stands: its newest checkpoint, else that of the run it was forked from, else the model.

    The feed is set to the prompts that come next.
    """
    fork, latest = outside.run_dir.fork, from_leader(checkpointer.latest)
    if latest is None and fork is None:
        return init_state(load_weights(model, None), optimizer), 0
    specs = param_specs(model.decoder)
    abstract = abstract_state(abstract_params(specs, jnp.float32, model.rules), optimizer)
    if latest is not None:
        state, host_state = checkpointer.restore(latest, abstract)
    else:
        assert fork is not None
        state, host_state = restore_state(fork.checkpoints, fork.step, abstract)
        state = restarted(state)
    feed.cursor = host_state["cursor"]
    changed = [name for name, version in versions().items() if host_state["versions"].get(name, version) != version]
    if changed:
        outside.progress.message(f"other versions than the checkpoint's: {', '.join(changed)}; not bit for bit then")
    return state, latest or 0
