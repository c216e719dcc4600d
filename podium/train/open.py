"""Opens the resources of a run in order, and closes them in reverse."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax

from podium.algorithms.recipes import Recipe
from podium.config.attention_blocks import slower_decode
from podium.config.lora import FULL_RATE, LORA_RATE
from podium.config.schema import Config
from podium.hosts.distributed import failing_fast, from_leader, joined
from podium.hosts.platform import devices_line, machine_of, machine_text, prepare_platform
from podium.hosts.same_inputs import check_same_inputs, model_files, questions
from podium.job.job_context import JobContext
from podium.models.architecture import DecoderConfig, Lora
from podium.models.params import count, frozen_specs, trained_specs
from podium.observe.run_dir import Fork, run_home
from podium.observe.summary import how_to_continue, versions
from podium.observe.writers import MetricWriter
from podium.run.divisible import check_tokens
from podium.run.resolve import resolve_format, resolve_recipe
from podium.run.run_spec import RunSpec
from podium.sampling.conversations.carry import HostState, Position
from podium.sampling.demonstrations import Demonstrations, check_demonstrations
from podium.sampling.exchange import Exchange
from podium.sampling.feed import Feed
from podium.sampling.groups import Source
from podium.sampling.prompt_lengths import check_prompt_lengths, with_prompt_tokens
from podium.sampling.sampler import Sampler
from podium.sharding import Params, find_devices
from podium.train.batches.run_shapes import RunShapes, open_shapes
from podium.train.checkpoints.checkpoint import Checkpointer
from podium.train.checkpoints.saving import Saving
from podium.train.checkpoints.step_files import newest_whole_step
from podium.train.first_state import POLICY, Origin, make_optimizers
from podium.train.grading_models import GradingModel, load_grading_models
from podium.train.profile import Profiler, Window
from podium.train.recorder import OnStep, PlanCheck, Recorder
from podium.train.scorers import LoadedRole, OwnPrompts
from podium.train.setup import Model, StoredWeights, make_model, make_role_model, run_spec
from podium.train.state import TrainState
from podium.train.step import TrainSettings
from podium.train.surroundings import Surroundings, open_run_dir, open_surroundings
from podium.train.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunParts:
    """The parts of a run that live from its first step to its last."""

    spec: RunSpec
    around: Surroundings
    rollouts: Sampler
    source: Source
    trainer: Trainer
    recorder: Recorder
    saving: Saving
    profiler: Profiler
    resources: contextlib.ExitStack
    """Closes what the run opened: services, the last checkpoint, graders, the engine."""


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

    Arguments as for `train`. Raises ValueError if something named in the config is unusable; the message says what, and
    what to do.
    """
    with joined(job), contextlib.ExitStack() as stack:
        run_dir = stack.enter_context(open_run_dir(run_home(config.runs_dir, config.name), config.document(), fork))
        around = stack.enter_context(open_surroundings(run_dir, config.steps, job, plain=plain))
        resources = stack.enter_context(contextlib.ExitStack())
        stack.enter_context(failing_fast(job))
        policy, spec = open_policy(run_dir.with_chosen(config), recipe, around)
        beside = {role.name: make_role_model(role, policy) for role in spec.scoring_models}
        if check is not None and (line := check.begin(spec, run_dir.path if jax.process_index() == 0 else None)):
            around.say(line)
        graders = load_grading_models(spec.rollout, spec.update, policy.mesh) if spec.rollout.grading_models else ()
        rollouts = resources.enter_context(contextlib.closing(open_sampler(spec, policy, graders, around)))
        # Before weights are read and programs are compiled, so that bad data is reported early.
        check_inputs(policy, beside, graders, rollouts)
        check_data(spec, rollouts, around)
        origin = Origin(spec, StoredWeights(policy, beside, around.say), make_optimizers(spec))
        if not spec.recipe.demonstrations:  # otherwise only evaluations sample, if there are any
            rollouts.compile_ahead()
        newest = from_leader(lambda: newest_whole_step(run_dir.checkpoints, around.say, job.watchdog.beat))
        saving = resources.enter_context(open_saving(origin, rollouts.feed, around))
        state, saved, done = load_state(origin, newest, saving.checkpointer, around, config.algorithm.recipe)
        if run_dir.continued or run_dir.fork is not None:
            continue_records(saved, done, saving.checkpointer, around)
        shapes = open_shapes(spec.batch, run_dir.path, done, writes=run_dir.writes, ahead=rollouts.ahead.threads > 0)
        trainer = open_trainer(origin, rollouts.feed, run_dir.path, shapes)
        if rollouts.ahead.threads:
            trainer.compile_ahead(state, rollouts.ahead)
        go_on_sampling(rollouts, saved, state.params, trainer.frozen, done=done)
        say_what_was_chosen(spec, graders, rollouts.feed, around)
        writer = resources.enter_context(MetricWriter(run_dir, spec.metrics, announce=around.say))
        profiler = Profiler(run_dir.path if run_dir.writes else None, profile, around.say)
        parts = RunParts(
            spec=spec,
            around=around,
            rollouts=rollouts,
            source=make_source(spec, rollouts),
            trainer=trainer,
            recorder=Recorder(spec, around, writer, rollouts.feed, check=check, on_step=on_step),
            saving=saving,
            profiler=resources.enter_context(contextlib.closing(profiler)),
            resources=resources,
        )
        if job.notice is not None:
            resources.enter_context(job.notice.watching())
        yield parts, state, done


def open_policy(config: Config, recipe: Recipe | None, around: Surroundings) -> tuple[Model, RunSpec]:
    """Prepare the model that is trained, and resolve the run for this machine.

    `recipe` is the config's recipe if it was resolved already.
    """
    prepare_platform()
    machine = machine_of(find_devices())
    formats = (str(resolve_format(each, machine)) for each in (config.train.dtype, config.rollout.dtype))
    around.progress.machine(devices_line(*formats))
    recipe = recipe or resolve_recipe(config)
    config, line = with_prompt_tokens(config, recipe, trains=True, evaluates=config.eval.happens)
    if line is not None:
        around.say(line)
    around.phase("model")
    policy = make_model(config)
    spec = run_spec(config, policy.decoder, policy.mesh, recipe)
    check_tokens(spec)
    around.run_dir.write_machine(machine_text())
    return policy, spec


def open_sampler(spec: RunSpec, policy: Model, graders: Sequence[GradingModel], around: Surroundings) -> Sampler:
    """Start the sampler, which answers and grades the run's prompts."""
    return Sampler(
        spec.rollout,
        policy.decoder,
        policy.tokenizer,
        policy.mesh,
        scorers=graders,
        folder=around.run_dir.path,
        exchange=Exchange(around.stop, around.job.watchdog, together=spec.rollout.layout.over_hosts),
        on_progress=around.progress.advance,
    )


def make_source(spec: RunSpec, rollouts: Sampler) -> Source:
    """Make the source of the groups that the run trains on."""
    if spec.recipe.demonstrations:
        return Demonstrations(rollouts.feed, spec.rollout, spec.recipe.data_form)
    return rollouts


def check_inputs(
    policy: Model, beside: Mapping[str, Model], graders: Sequence[GradingModel], rollouts: Sampler
) -> None:
    """Check that all hosts read the same models and questions, and that the data was tokenized for this model.

    Raises ValueError otherwise.
    """
    tasks = rollouts.feed.tasks
    if jax.distributed.is_initialized():
        others = {name: each.source for name, each in beside.items() if each.source != policy.source}
        check_same_inputs(
            policy.source,
            None if policy.lora is None else policy.lora.adapter,
            others | {each.role.title: each.source for each in graders},
            tasks,
            evaluates=rollouts.spec.evaluation.happens,
            columns=rollouts.feed.columns,
            demonstrations=rollouts.demonstrations and rollouts.demonstrations.feed.tasks,
        )
    tasks.data.check_model(partial(model_files, policy.source.path))


def check_data(spec: RunSpec, rollouts: Sampler, around: Surroundings) -> None:
    """Check that a run's data fits, and can be graded or learned from; prints lines about the data.

    Raises ValueError otherwise.
    """
    feed, evaluation = rollouts.feed, spec.rollout.evaluation
    if spec.recipe.demonstrations:
        check_demonstrations(feed.tasks, spec.rollout, feed.tokenizer, form=spec.recipe.data_form)
    else:
        feed.tasks.data.check_answers(trains=True, evaluates=evaluation.happens)
    feed.check()
    lines = check_prompt_lengths(feed, feed.tasks.train_prompts(), "training prompts", "are left out")
    if evaluation.happens:
        held_out = feed.tasks.eval_prompts(evaluation.questions)
        lines += check_prompt_lengths(feed, held_out, "evaluation questions", "count as wrong")
    for line in (*lines, *rollouts.check(feed.tasks.first_prompts())):
        around.say(line)


@contextlib.contextmanager
def open_saving(origin: Origin, feed: Feed, around: Surroundings) -> Iterator[Saving]:
    """Open the run's checkpoints; on exit, wait for the last save."""
    run_dir, job, config = around.run_dir, around.job, origin.spec.checkpoint

    checkpointer = Checkpointer(
        run_dir.checkpoints,
        config,
        origin.weights.base,
        on_save=lambda: around.phase("checkpoint"),
        beat=job.watchdog.beat,
        records=run_dir,
        settings=run_dir.settings,
        data=questions(feed.tasks, evaluates=False, columns=feed.columns),
    )
    with contextlib.closing(checkpointer):
        saving = Saving(
            checkpointer,
            around.stop,
            every_s=60.0 * config.every_minutes,
            to_continue=partial(how_to_continue, run_dir.path),
            on_failure=job.report.failed,
        )
        job.watchdog.rescue = saving.rescue
        yield saving


def load_state(
    origin: Origin, newest: int | None, checkpointer: Checkpointer, around: Surroundings, recipe: str
) -> tuple[TrainState, HostState, int]:
    """The state to start from: the run's newest complete step, or else the forked run's, or else the initial model.

    `recipe` is `algorithm.recipe` of the config.

    Returns:
        The state, the host state (`versions`, and the argument of `Position.read`), and the number of steps done.
    """
    if newest is not None:
        return *checkpointer.restore(newest, origin.abstract()), newest
    if (fork := around.run_dir.fork) is not None:
        return *origin.forked(fork, recipe, around.say), 0
    return origin.first(), {"cursor": 0, "versions": {}}, 0


def go_on_sampling(rollouts: Sampler, saved: HostState, params: Params, frozen: Params, *, done: int) -> None:
    """Let a sampler go on after `done` steps: from the position with which they were saved, and with their weights."""
    rollouts.position = Position.read(saved, rollouts.feed)
    rollouts.load(params, frozen, version=done)


def continue_records(saved: HostState, done: int, checkpointer: Checkpointer, around: Surroundings) -> None:
    """Continue the run's records after `done` steps, and print what differs from `saved`, the host state of that step.

    Raises ValueError if settings that must stay have changed.
    """
    run_dir = around.run_dir
    run_dir.check_saved(saved.get("settings"), done)
    data = checkpointer.data or {}
    for name, then in saved.get("data", {}).items():
        if (now := data.get(name)) != then:
            around.say(
                f"{name} have changed since the checkpoint was saved: {then} then, {now or 'none'} now; the run "
                "continues with the current ones"
            )
    before = saved["versions"]
    if changed := [name for name, version in versions().items() if before.get(name, version) != version]:
        around.say(
            f"versions differ from the checkpoint's: {', '.join(changed)}; the run will not be bit-for-bit reproducible"
        )
    for line in run_dir.compare(saved.get("records", {}), done, checkpointer.steps()):
        around.say(line)
    run_dir.truncate(done or -1)


def open_trainer(origin: Origin, feed: Feed, folder: Path, shapes: RunShapes) -> Trainer:
    """Load the run's other models that do not change, and make the trainer's programs.

    `feed` makes the prompts of models that read other prompts than the policy. A batch that diverges is saved in
    `folder`.
    """
    spec, weights = origin.spec, origin.weights
    roles: list[LoadedRole] = []
    for role in spec.scoring_models:
        longer = role.longer_prompts is not None
        roles.append(
            LoadedRole(
                role=role,
                params={} if role.changes else weights.of(role),
                own_prompts=OwnPrompts(of=feed.privileged, sizes=spec.batch_of(role)) if longer else None,
                optimizer=origin.optimizers.get(role.name),
            )
        )
    return Trainer(
        spec.recipe,
        TrainSettings(spec.decoder, weights.mesh, spec.update),
        origin.optimizers[POLICY],
        shapes=shapes,
        schedule=spec.optimizer,
        folder=folder,
        frozen=weights.frozen,
        roles=roles,
    )


def say_what_was_chosen(spec: RunSpec, graders: Sequence[GradingModel], feed: Feed, around: Surroundings) -> None:
    """Print the choices that the config leaves to the machine, what LoRA trains, and how answers are graded."""
    if (lora := spec.decoder.lora) is not None:
        around.say(lora_line(lora, spec.decoder, spec.optimizer.settings.learning_rate))
    if spec.decoder.rollout_weights != "dtype":
        around.say(weights_line(spec))
    around.say(f"attention: {spec.update.attention}; head: {spec.update.head}")
    if slower := slower_decode(spec.machine.kernels, spec.rollout.settings.page_tokens, spec.decoder.head_dim):
        around.say(slower)
    around.say(f"rollout layout: {spec.rollout.layout.why or spec.rollout.layout.name}")
    for each in graders:
        around.say(f"{each.role.title}: {each.role.model}, weights {each.weights}")
    for label, dialogue in zip(feed.tasks.labels, feed.dialogues, strict=True):
        if dialogue is not None:
            around.say(f"{label}: {dialogue.line}")


def weights_line(spec: RunSpec) -> str:
    """A line about the rollout's rounded weights, and how their error is corrected."""
    recipe = spec.recipe
    text = f"rollout weights: {spec.decoder.rollout_weights}, so sampler and trainer are different policies; "
    if recipe.correction == "none":
        return text + f"algorithm.old_logprobs {recipe.old_logprobs} and no correction"
    band = f"{recipe.correction_low:g} to {recipe.correction_high:g}"
    band = band if recipe.correction != "truncate" else f"up to {recipe.correction_high:g}"
    return text + f"algorithm.correction {recipe.correction}, importance weights {band}"


def lora_line(lora: Lora, decoder: DecoderConfig, rate: float) -> str:
    """A line about what LoRA trains and its learning rate, with a warning if the rate is the default for full
    training.
    """
    trained, whole = (count(specs) for specs in (trained_specs(decoder), frozen_specs(decoder)))
    text = f"lora: rank {lora.rank} on {', '.join(lora.targets)}: {trained:,} parameters are trained beside {whole:,}"
    text += f" in {lora.base}; rollout {'merged' if lora.merged else 'apart'}; learning rate {rate:g}"
    if rate <= FULL_RATE:
        text += f", the default without lora: adapters need about ten times as much, {LORA_RATE:g}"
    return text
