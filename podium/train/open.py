"""Opens the resources of a run in order, and closes them in reverse."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from podium.algorithms.controllers import first_coefs
from podium.algorithms.recipes import Recipe
from podium.config.lora import FULL_RATE, LORA_RATE
from podium.config.schema import Config
from podium.files import absolute
from podium.hosts.distributed import AgreedStop, failing_fast, from_leader, joined
from podium.hosts.platform import devices_line, machine_text, prepare_platform, this_machine
from podium.hosts.same_inputs import check_same_inputs, model_files, questions
from podium.hosts.signals import StopSignal
from podium.job.job_context import JobContext
from podium.models.adapters import base_of
from podium.models.architecture import DecoderConfig, Lora
from podium.models.linear import kept
from podium.models.params import count, frozen_specs, trained_specs
from podium.observe.live_view import Progress, run_console
from podium.observe.run_dir import Fork, RunDir, Settings, recipe_of, run_home
from podium.observe.summary import how_to_continue, versions
from podium.observe.writers import MetricWriter
from podium.run.divisible import check_tokens
from podium.run.resolve import resolve_format, resolve_recipe
from podium.run.run_spec import SCORE, Role, RunSpec
from podium.sampling.conversations.carry import HostState, Position
from podium.sampling.demonstrations import Demonstrations, check_demonstrations
from podium.sampling.feed import Feed
from podium.sampling.groups import Source
from podium.sampling.prompt_lengths import check_prompt_lengths, with_prompt_tokens
from podium.sampling.sampler import Sampler
from podium.sharding import Params, abstract_params
from podium.train.checkpoints.checkpoint import Checkpointer, restore_state, saved_names
from podium.train.checkpoints.saving import SaveTimer, Saving
from podium.train.checkpoints.step_files import newest_whole_step
from podium.train.profile import Profiler, Window
from podium.train.recorder import OnStep, PlanCheck, Recorder
from podium.train.reward_models import load_reward_models
from podium.train.scorers import LoadedRole, OwnPrompts
from podium.train.setup import (
    Model,
    load_forked,
    load_frozen,
    load_role_weights,
    load_trained,
    make_model,
    make_role_model,
    make_run_optimizer,
    make_train_settings,
    run_spec,
)
from podium.train.state import TrainState, abstract_coefs, abstract_state, init_state, restarted, with_coefs
from podium.train.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunParts:
    """The parts of a run that live from its first step to its last."""

    spec: RunSpec
    run_dir: RunDir
    progress: Progress
    phase: Callable[[str], None]
    """Announces the current phase to the user and the watchdog."""
    stop: AgreedStop
    rollouts: Sampler
    source: Source
    trainer: Trainer
    recorder: Recorder
    saving: Saving
    profiler: Profiler
    resources: contextlib.ExitStack
    """Closes the run's own resources: services, the last checkpoint, graders, the engine."""


def make_source(spec: RunSpec, rollouts: Sampler) -> Source:
    """Where the groups of the run's steps come from."""
    if spec.recipe.demonstrations:
        return Demonstrations(rollouts.feed, spec.rollout, spec.recipe.data_form)
    return rollouts


@contextlib.contextmanager
def open_run(
    config: Config,
    *,
    recipe: Recipe | None,
    fork: Fork | None,
    plain: bool,
    job: JobContext,
    check: PlanCheck | None,
    on_step: OnStep,
    profile: Window | None,
) -> Iterator[tuple[RunParts, TrainState, int]]:
    """Open the parts of a run; yields them, the run's state with weights loaded, and the number of steps done.

    Arguments as for `train`.

    Raises:
        ValueError: something named in the config is unusable; the message says what, and the way out.
    """
    console = run_console(plain=plain or job.watched)
    with contextlib.ExitStack() as stack:
        stack.enter_context(joined(job))
        run_dir = stack.enter_context(_open_run_dir(run_home(config.runs_dir, config.name), config.document(), fork))
        config = run_dir.with_chosen(config)
        recipe = recipe or resolve_recipe(config)
        evaluates = bool(config.eval.at_start or config.eval.every_steps or config.eval.at_end)
        with failing_fast(job):
            config, measured = with_prompt_tokens(config, recipe, trains=True, evaluates=evaluates)
        progress = stack.enter_context(Progress(run_dir.path.name, config.steps, console))
        stop = AgreedStop(stack.enter_context(StopSignal(progress.notice)))
        stack.enter_context(job.watchdog.watching() if job.watched else contextlib.nullcontext())
        resources = stack.enter_context(contextlib.ExitStack())
        stack.enter_context(failing_fast(job))
        job.report.update(steps=config.steps, run_dir=str(absolute(run_dir.home)))

        def phase(name: str) -> None:
            progress.phase(name)
            job.watchdog.phase(name)

        prepare_platform()
        machine = this_machine()
        formats = (str(resolve_format(each, machine)) for each in (config.train.dtype, config.rollout.dtype))
        progress.machine(devices_line(*formats))
        phase("model")
        model = make_model(config)
        spec = run_spec(config, model.decoder, model.mesh, recipe)
        check_tokens(spec)
        models = {role.name: make_role_model(role, model) for role in spec.scoring_models}
        run_dir.write_machine(machine_text())
        if check is not None and (line := check.begin(spec, run_dir.path if jax.process_index() == 0 else None)):
            progress.message(line)
        optimizer = make_run_optimizer(spec.optimizer, model.decoder)
        scorers = load_reward_models(spec.rollout, spec.update, model.mesh)
        rollouts = Sampler(
            spec.rollout,
            model.decoder,
            model.tokenizer,
            model.mesh,
            scorers=scorers,
            folder=run_dir.path,
            stop=stop,
            watchdog=job.watchdog,
            on_progress=progress.advance,
        )
        resources.callback(rollouts.close)
        source = make_source(spec, rollouts)
        check_same_inputs(
            model.source,
            None if config.lora is None else config.lora.adapter,
            {name: each.source for name, each in models.items() if each.source != model.source}
            | {each.role.title: each.source for each in scorers},
            rollouts.feed.tasks,
            evaluates=evaluates,
            columns=rollouts.feed.columns,
            demonstrations=rollouts.demonstrations and rollouts.demonstrations.feed.tasks,
        )
        rollouts.feed.tasks.check_model(model_files(model.source.path))
        # Before the weights are read and anything is compiled, so that bad data is reported early.
        for line in _checked_data(spec, rollouts, evaluates=evaluates, first=measured):
            progress.message(line)
        frozen = load_frozen(model)
        if source.draws:  # else only evaluations sample, if there are any
            rollouts.compile_ahead()
        data = questions(rollouts.feed.tasks, evaluates=False, columns=rollouts.feed.columns)
        newest = from_leader(lambda: newest_whole_step(run_dir.checkpoints, progress.message, job.watchdog.beat))
        checkpointer = Checkpointer(
            run_dir.checkpoints,
            spec.checkpoint,
            base_of(frozen),
            on_save=partial(_begin_save, phase, run_dir),
            beat=job.watchdog.beat,
            records=run_dir.extents,
            settings=run_dir.settings,
            data=data,
        )
        resources.callback(checkpointer.close)
        valuing = _make_valuing(spec, models)
        coefs = first_coefs(spec.recipe)
        moves = any(role.weights == "moving" for role in spec.scoring_models)
        state, saved, done = _load_state(
            run_dir.fork,
            newest,
            model=model,
            optimizer=optimizer,
            checkpointer=checkpointer,
            frozen=frozen,
            valuing=valuing,
            coefs=coefs,
            recipe=config.algorithm.recipe,
            moves=moves,
            say=progress.message,
        )
        run_dir.check_saved(saved.get("settings"), done)
        rollouts.position = Position.read(saved, rollouts.feed)
        _say_what_changed(saved, data, progress)
        job.report.update(step=done)
        for line in run_dir.compare(saved.get("records", {}), done, checkpointer.steps()):
            progress.message(line)
        run_dir.truncate(done or -1)
        writer = resources.enter_context(MetricWriter(run_dir, spec.metrics, announce=progress.message))
        frozen = kept(frozen, model.rules)
        trainer = Trainer(
            spec.recipe,
            make_train_settings(spec.update, spec.decoder, model.mesh),
            optimizer,
            sizes=spec.batch,
            schedule=spec.optimizer,
            folder=run_dir.path,
            frozen=frozen,
            roles=[
                load_role(spec, role, models[role.name], frozen=frozen, feed=rollouts.feed, say=progress.message)
                for role in spec.scoring_models
            ],
        )
        trainer.compile_ahead(state, rollouts.ahead)
        rollouts.load(state.params, trainer.frozen, version=done)
        _say_what_was_chosen(spec, progress)
        for each in scorers:
            progress.message(f"{each.role.title}: {each.role.model}, weights {each.weights}")
        for label, dialogue in zip(rollouts.feed.tasks.labels, rollouts.feed.dialogues, strict=True):
            if dialogue is not None:
                progress.message(f"{label}: {dialogue.line}")
        recorder = Recorder(
            spec,
            run_dir,
            writer,
            progress,
            report=job.report,
            task_labels=list(rollouts.feed.tasks.labels),
            pieces=model.tokenizer.pieces,
            check=check,
            on_step=on_step,
        )
        timer = SaveTimer(60.0 * spec.checkpoint.every_minutes)
        to_continue = partial(how_to_continue, run_dir.path)
        saving = Saving(checkpointer, timer, stop, to_continue=to_continue, on_failure=job.report.failed)
        job.watchdog.rescue = saving.rescue
        profiler = Profiler(run_dir.path if run_dir.writes else None, profile, progress.message)
        resources.callback(profiler.close)
        resources.enter_context(job.watching_for_notices())
        parts = RunParts(
            spec=spec,
            run_dir=run_dir,
            progress=progress,
            phase=phase,
            stop=stop,
            rollouts=rollouts,
            source=source,
            trainer=trainer,
            recorder=recorder,
            saving=saving,
            profiler=profiler,
            resources=resources,
        )
        yield parts, state, done


class Valuing(NamedTuple):
    """A trained model beside the policy, what it starts from, and its optimizer."""

    model: Model
    optimizer: optax.GradientTransformation

    def first_state(self) -> TrainState:
        """The state before its first update."""
        return init_state(load_role_weights(self.model), self.optimizer)

    def abstract_state(self) -> TrainState:
        """The abstract result of `first_state`."""
        specs = trained_specs(self.model.decoder)
        return abstract_state(abstract_params(specs, jnp.float32, self.model.rules), self.optimizer)


def _make_valuing(spec: RunSpec, models: Mapping[str, Model]) -> Valuing | None:
    for role in spec.scoring_models:
        if role.learning is not None:
            return Valuing(models[role.name], make_run_optimizer(role.learning.optimizer, role.decoder))
    return None


def _checked_data(spec: RunSpec, rollouts: Sampler, *, evaluates: bool, first: str | None) -> list[str]:
    """Check that a run's data can be asked, and graded or learned from; returns lines about it, `first` before others.

    Raises ValueError if it cannot.
    """
    feed = rollouts.feed
    if spec.recipe.demonstrations:
        check_demonstrations(feed.tasks, spec.rollout, feed.tokenizer, form=spec.recipe.data_form)
    else:
        feed.tasks.check_answers(trains=True, evaluates=evaluates)
    feed.check()
    lines = [] if first is None else [first]
    lines += check_prompt_lengths(feed, feed.tasks.train_prompts(), "training prompts", "are left out")
    if evaluates:
        held_out = feed.tasks.eval_prompts(spec.evaluation.questions)
        lines += check_prompt_lengths(feed, held_out, "evaluation questions", "count as wrong")
    return lines + rollouts.check(feed.tasks.first_prompts())


def _say_what_was_chosen(spec: RunSpec, progress: Progress) -> None:
    """Print the choices that the config leaves to the machine, and with LoRA what is trained."""
    if (lora := spec.decoder.lora) is not None:
        progress.message(lora_line(lora, spec.decoder, spec.optimizer.settings.learning_rate))
    if spec.decoder.rollout_weights != "dtype":
        progress.message(weights_line(spec))
    progress.message(f"attention: {spec.update.attention}; head: {spec.update.head}")
    progress.message(f"rollout layout: {spec.rollout.layout.why or spec.rollout.layout.name}")


def weights_line(spec: RunSpec) -> str:
    """A line about the rollout's rounded weights, and what corrects for them."""
    recipe = spec.recipe
    text = f"rollout weights: {spec.decoder.rollout_weights}, so sampler and trainer are different policies; "
    if recipe.correction == "none":
        return text + f"algorithm.old_logprobs {recipe.old_logprobs} and no correction"
    band = f"{recipe.correction_low:g} to {recipe.correction_high:g}"
    band = band if recipe.correction != "truncate" else f"up to {recipe.correction_high:g}"
    return text + f"algorithm.correction {recipe.correction}, importance weights {band}"


def lora_line(lora: Lora, decoder: DecoderConfig, rate: float) -> str:
    """A line about what LoRA trains and its learning rate, with a warning if the rate is one for full training."""
    trained, whole = (count(specs) for specs in (trained_specs(decoder), frozen_specs(decoder)))
    text = f"lora: rank {lora.rank} on {', '.join(lora.targets)}: {trained:,} parameters are trained beside {whole:,}"
    text += f" in {lora.base}; rollout {'merged' if lora.merged else 'apart'}; learning rate {rate:g}"
    if rate <= FULL_RATE:
        text += f", the default without lora: adapters need about ten times as much, {LORA_RATE:g}"
    return text


def _say_what_changed(saved: HostState, data: Mapping[str, str], progress: Progress) -> None:
    """Print which packages have other versions, and which data is another, than when the checkpoint was saved."""
    for name, then in saved.get("data", {}).items():
        if (now := data.get(name)) != then:
            progress.message(
                f"{name} have changed since the checkpoint was saved: {then} then, {now or 'none'} now; the run"
                " continues with what is there now"
            )
    before = saved["versions"]
    if changed := [name for name, version in versions().items() if before.get(name, version) != version]:
        progress.message(
            f"versions differ from the checkpoint's: {', '.join(changed)}; the run will not be bit for bit the same"
        )


def _begin_save(phase: Callable[[str], None], run_dir: RunDir) -> None:
    phase("checkpoint")
    run_dir.push()  # records first: resuming from the checkpoint needs them


def _open_run_dir(home: Path, settings: Settings, fork: Fork | None) -> RunDir:
    """Open the run's folder: for writing on process 0, read-only on the others."""
    opened: list[RunDir] = []

    def open_it() -> tuple[bool, Fork | None, Settings]:
        opened.append(RunDir.open(home, settings, fork=fork))
        return opened[0].continued, opened[0].fork, opened[0].settings

    continued, kept, completed = from_leader(open_it)
    return opened[0] if opened else RunDir.follow(home, completed, continued=continued, fork=kept)


def load_role(
    spec: RunSpec, role: Role, model: Model, *, frozen: Params, feed: Feed, say: Callable[[str], None]
) -> LoadedRole:
    """Load the weights of a model beside the policy, unless the state has them.

    They may be the policy's own `frozen` ones, beside the adapters. `feed` makes its prompts, if it has its own. `say`
    prints which weights they are if they are not the run's, since its checkpoints do not have them.
    """
    if role.learning is not None:
        return LoadedRole(role=role, params={}, optimizer=make_run_optimizer(role.learning.optimizer, role.decoder))
    own = None
    if role.longer_prompts is not None:
        own = OwnPrompts(of=feed.privileged, sizes=spec.batch_of(role))
    params, line = frozen, "the frozen weights beside the adapters"
    if role.weights != "policy_base":
        params = {} if role.weights == "moving" else load_role_weights(model)
        line = "" if role.phase == SCORE else f"weights {base_of(params)}"
        params = kept(params, model.rules)
    if role.phase != SCORE:
        say(f"{role.name}: {model.source.name}, {line}")
    return LoadedRole(role=role, params=params, own_prompts=own)


def _load_state(
    fork: Fork | None,
    newest: int | None,
    model: Model,
    optimizer: optax.GradientTransformation,
    checkpointer: Checkpointer,
    frozen: Params,
    valuing: Valuing | None,
    coefs: Mapping[str, float],
    *,
    recipe: str,
    moves: bool,
    say: Callable[[str], None],
) -> tuple[TrainState, HostState, int]:
    """The state to start from: the run's newest checkpoint, or else that of the forked run, or else the model.

    A fork takes the optimizer's moments too if both runs have the same recipe, or both a critic. Those of another loss
    would go on moving the weights its way for about ten steps: after imitation, towards what was imitated.

    A critic starts from its model too if the forked run had none. Adapted coefficients start from `coefs`, of the
    config, and a reference that `moves` from the model, unless the run itself continues. `say` prints a line.

    Returns:
        The state, the host state (`versions`, and the input of `Position.read`), and the number of steps done.
    """
    plain = abstract_state(abstract_params(trained_specs(model.decoder), jnp.float32, model.rules), optimizer)
    abstract = dataclasses.replace(plain, critic=valuing and valuing.abstract_state())
    if newest is not None:
        moved = plain.params if moves else None
        abstract = dataclasses.replace(abstract, reference=moved, coefs=abstract_coefs(plain.params, coefs))
        return *checkpointer.restore(newest, abstract), newest
    saved: HostState = {"cursor": 0, "versions": {}}
    if fork is None:
        state = init_state(load_trained(model, None, frozen), optimizer)
    else:
        names, its_recipe = saved_names(fork.checkpoints, fork.step), from_leader(lambda: recipe_of(fork))
        had_critic = any(name.startswith("critic.") for name in names)
        if its_recipe == recipe or (had_critic and valuing is not None):
            whole = _as_saved(abstract if had_critic else plain, names)
            state, saved = restore_state(fork.checkpoints, fork.step, whole, base=checkpointer.base)
            state = restarted(state)
        else:
            say(f"{fork.run} had recipe {its_recipe}: its weights are taken, and the optimizer begins again")
            params, saved = load_forked(model, fork, frozen)
            state = init_state(params, optimizer)
        saved = _begun_again(saved)
    if valuing is not None and state.critic is None:
        state = dataclasses.replace(state, critic=valuing.first_state())
    state = dataclasses.replace(state, reference=load_trained(model, None, frozen) if moves else None)
    return with_coefs(state, coefs), saved, 0


def _as_saved(abstract: TrainState, names: Sequence[str]) -> TrainState:
    """The abstract state with the reference and the coefficients that a saved step of these names has."""
    adapted = [name.removeprefix("coefs.") for name in names if name.startswith("coefs.")]
    moved = abstract.params if any(name.startswith("reference.") for name in names) else None
    return dataclasses.replace(abstract, reference=moved, coefs=abstract_coefs(abstract.params, adapted))


def _begun_again(saved: HostState) -> HostState:
    """The host state of a forked run as the start of another, whose settings may differ."""
    begun = (each["number"] for each in saved.pop("in_flight", ()))  # they start from their prompts
    saved["cursor"] = min(begun, default=saved["cursor"])
    saved.pop("curriculum", None)
    saved.pop("retired", None)
    saved.pop("data", None)
    return saved
