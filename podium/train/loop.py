"""The main loop of a run: prompts, completions, rewards, update; with evaluation, records, checkpoints and resuming."""

import dataclasses

from podium.algorithms.recipes import Recipe
from podium.config.schema import Config
from podium.hosts.distributed import Interrupted, from_leader
from podium.job.job_context import JobContext, alone
from podium.observe.curve_svg import save_curve
from podium.observe.history import read_history
from podium.observe.metrics import ACCURACY
from podium.observe.run_dir import Fork
from podium.observe.summary import print_summary, save_summary
from podium.run.run_spec import RunSpec
from podium.train.evaluate import evaluate
from podium.train.held_out import held_out_preferences
from podium.train.open import RunParts, open_run
from podium.train.profile import Window
from podium.train.recorder import OnStep, PlanCheck, unheard
from podium.train.state import TrainState


def train(
    config: Config,
    *,
    recipe: Recipe | None = None,
    fork: Fork | None = None,
    plain: bool = False,
    job: JobContext | None = None,
    check: PlanCheck | None = None,
    on_step: OnStep = unheard,
    profile: Window | None = None,
) -> int:
    """Train a new run, or continue a stopped one; returns the exit status of `podium train`.

    Args:
        config: the run's settings, including its name.
        recipe: the config's recipe if it was resolved already; None: resolve it here.
        fork: the run and step whose checkpoint a new run starts from.
        plain: print lines instead of the live view.
        job: the job that this process belongs to; unset: none.
        check: plans the run at its start and compares steps with the plan; unset: no plan.
        on_step: called after each step with its metrics.
        profile: the steps to trace.

    Raises:
        ValueError: something named in the config is unusable; the message says what, and the way out.
        RuntimeError: a user's code called `sys.exit`.
    """
    job = job or alone()
    opened = open_run(
        config, recipe=recipe, fork=fork, plain=plain, job=job, check=check, on_step=on_step, profile=profile
    )
    try:
        with opened as (run, state, done):
            done = run_steps(run, state, done)
            summarise(run)
            status = run.around.stop.exit_code  # agreed on by all processes, which are still connected here
    except SystemExit as error:  # otherwise the run would seem complete
        raise RuntimeError(
            "code that the config names, such as a task or an advantage, or on_step, called "
            f"sys.exit({error.code!r}), which would end the run; raise an exception instead"
        ) from error
    why = (job.notice and job.notice.text) or f"stopped by signal {status - 128}"
    stopped = f"{why} after step {done}, which is saved"
    job.report.end(*(("stopped", stopped) if status else ("done", f"{done} steps")), status)
    return status


def run_steps(run: RunParts, state: TrainState, done: int) -> int:
    """Train from step `done` to the last one, or until a stop is requested; returns the number of steps done and saved.

    `state` is the state after `done` steps; it is donated. However the loop ends, the newest complete step is saved.

    Raises:
        DivergedError: an update produced NaN or infinity.
        SamplerGapError: a step's log-probability gap is above `rollout.max_logprob_gap`.
        CheckpointError: a checkpoint cannot be written.
    """
    spec, around, saving = run.spec, run.around, run.saving
    rollouts, source, trainer = run.rollouts, run.source, run.trainer
    saving.begin(done, state, rollouts.position)
    around.job.report.update(step=done)
    checkpoint_s = None
    try:
        evaluate_at_start(run, state, done)
        for step in range(done, spec.steps):
            run.profiler.begin(step + 1)
            run.recorder.begin_step(checkpoint_s)
            around.phase("rollout")
            made = source.next(spec.prompts_per_step)  # completions and rewards, with refills
            around.phase("update")
            rollouts.engine.unload()  # free the rollout weights; the update needs the memory
            batches, batched = trainer.prepare(state, made.groups, made.demonstrations)  # samples, scores, advantages
            state, updated = trainer.update(state, batches, step, penalty=batched.penalty)
            done = step + 1
            saving.reached(done, state, rollouts.position)
            evaluates = evaluation_due(spec, done)
            sync_s = rollouts.load(state.params, version=done) if evaluates or not spec.recipe.demonstrations else 0.0
            run.recorder.write(done, made, batched, updated, sync_s)
            run.profiler.end(done)
            score = evaluate_now(run, state, done) if evaluates else None
            stopping = around.stop.requested is not None
            checkpoint_s = saving.after_step(score=score, last=stopping or done == spec.steps)
            if stopping:
                break
    except Interrupted:  # during a rollout: the last step is complete; an interrupted evaluation is repeated
        saving.save_newest()
    except BaseException as error:
        if (line := saving.rescue(error)) is not None:
            around.say(line)
        raise
    return saving.done


def evaluate_at_start(run: RunParts, state: TrainState, done: int) -> None:
    """Evaluate a new run's initial model; in a resumed run, catch up on an evaluation that was due but not recorded."""
    if not done:
        if run.spec.rollout.evaluation.at_start:
            evaluate_now(run, state, done)
        return
    run.around.say(f"continuing after step {done}")
    if evaluation_due(run.spec, done):
        recorded = from_leader(lambda: done in dict(read_history(run.around.run_dir.path).points(ACCURACY)))
        if not recorded:
            evaluate_now(run, state, done)


def evaluation_due(spec: RunSpec, step: int) -> bool:
    """Whether an evaluation is due after this step."""
    every = spec.rollout.evaluation.every_steps
    return bool((every and step % every == 0) or (step == spec.steps and spec.rollout.evaluation.at_end))


def evaluate_now(run: RunParts, state: TrainState, step: int) -> float:
    """Evaluate the loaded weights, which must be those of `state`; record the result and return the accuracy."""
    run.around.phase("evaluation")
    evaluation = evaluate(run.rollouts)
    if run.spec.recipe.preferences:
        held_out = held_out_preferences(run.rollouts.feed, run.spec, run.trainer, state)
        evaluation = dataclasses.replace(evaluation, stats=dataclasses.replace(evaluation.stats, preferences=held_out))
    run.recorder.write_evaluation(step, evaluation)
    return evaluation.stats.accuracy


def summarise(run: RunParts) -> None:
    """Write the run's summary and curve, wait for its last checkpoint, and print the summary."""
    run_dir, progress = run.around.run_dir, run.around.progress
    path = run_dir.path
    if run_dir.writes:
        save_summary(path)
        save_curve(path)
    run.resources.close()  # waits for the last checkpoint; the live view shows this until the summary replaces it
    progress.close()
    if run_dir.writes and progress.notebook is None:  # a notebook shows the chart instead
        print_summary(path, progress.console)
