"""The story of a run: prompts, completions, rewards, update, again; evaluated, recorded, saved, and continued."""

from podium.config.schema import Config
from podium.job.context import JobContext, alone
from podium.observe.curve_svg import save_curve
from podium.observe.history import read_history
from podium.observe.run_dir import Fork
from podium.observe.summary import print_summary, save_summary
from podium.train.distributed import Interrupted, from_leader
from podium.train.evaluate import evaluate
from podium.train.profile import Window
from podium.train.recorder import OnStep, PlanCheck, unheard
from podium.train.run import RunParts, open_run
from podium.train.state import TrainState


def train(
    config: Config,
    *,
    fork: Fork | None = None,
    plain: bool = False,
    job: JobContext | None = None,
    check: PlanCheck | None = None,
    on_step: OnStep = unheard,
    profile: Window | None = None,
) -> int:
    """Train, or go on with a run that was stopped; the exit status of `podium train`.

    Args:
        config: of the run, with its name.
        fork: the run and step whose checkpoint a new run begins from.
        plain: lines instead of the live view.
        job: what this process is a part of; unset: of nothing.
        check: plans the run at its start, and compares; unset: nothing does.
        on_step: hears of each step that is done.
        profile: steps that are traced.

    Raises:
        ValueError: something that the config names cannot be used; the message says what, and the way out.
    """
    job = job or alone()
    options = {"check": check, "on_step": on_step, "profile": profile}
    with open_run(config, fork=fork, plain=plain, job=job, **options) as (run, state, done):
        done = run_steps(run, state, done)
        if done < config.steps:
            run.progress.message(f"stopped and saved; to continue: podium train {run.run_dir.path}/config.yaml")
        summarise(run)
        status = run.stop.exit_code  # of all processes, which know each other until here
    why = job.notice.text or f"stopped by signal {status - 128}"
    stopped = f"{why} after step {done}, which is saved"
    job.report.end(*(("stopped", stopped) if status else ("done", f"{done} steps")), status)
    return status


def run_steps(run: RunParts, state: TrainState, done: int) -> int:
    """Train from the step that is done to the last, or until the run is to stop; how many are done and saved then.

    The state is that after `done` steps, and donated.

    Raises:
        DivergedError: an update made numbers that are not finite.
        CheckpointError: a checkpoint cannot be written.
    """
    config, feed, rollouts, trainer = run.config, run.rollouts.feed, run.rollouts, run.trainer
    first, position, checkpoint_s = done, rollouts.position, None
    try:
        evaluate_at_start(run, done)
        for step in range(done, config.steps):
            run.profiler.begin(step + 1)
            run.recorder.begin_step(checkpoint_s)
            run.phase("rollout")
            prompts = feed.next(config.prompts_per_step)
            groups, rolled = run.answer(prompts)  # completions, rewards; refills inside
            run.phase("update")
            rollouts.unload()  # these weights are done with: the update has their memory
            batches, batched = trainer.prepare(state.params, groups)  # samples, scores, advantages
            state, updated = trainer.update(state, batches, step)
            done, position = step + 1, rollouts.position
            evaluates = evaluation_due(config, done)
            sync_s = rollouts.load(state.params, version=done) if evaluates or run.samples else 0.0
            run.recorder.write(done, groups, rolled, batched, updated, sync_s)
            run.profiler.end(done)
            score = evaluate_now(run, done) if evaluates else None
            stopping = run.stop.requested is not None
            last = stopping or done == config.steps
            due = run.save_timer.due()
            checkpoint_s = run.checkpointer.maybe_save(done, state, position, score=score, last=last, due=due)
            if checkpoint_s is not None:
                run.save_timer.restart()
            if stopping:
                break
    except Interrupted:  # in a rollout: the step before it is done; in an evaluation, the run goes on with that
        if done > first:
            run.checkpointer.maybe_save(done, state, position, score=None, last=True)
    return done


def evaluate_at_start(run: RunParts, done: int) -> None:
    """Evaluate the first model of a new run; in a continued one, what was due when it stopped and is not recorded."""
    if not done:
        if run.config.eval.at_start:
            evaluate_now(run, done)
        return
    run.progress.message(f"continuing after step {done}")
    if evaluation_due(run.config, done):
        recorded = from_leader(lambda: any(step == done for step, _ in read_history(run.run_dir.path).accuracies))
        if not recorded:
            evaluate_now(run, done)


def evaluation_due(config: Config, step: int) -> bool:
    """Whether the weights after this step are to be evaluated."""
    every = config.eval.every_steps
    return bool((every and step % every == 0) or (step == config.steps and config.eval.at_end))


def evaluate_now(run: RunParts, step: int) -> float:
    """Evaluate the loaded weights, record what comes of it, and return the accuracy."""
    run.phase("evaluation")
    evaluation = evaluate(run.rollouts)
    run.recorder.write_evaluation(step, evaluation)
    return evaluation.stats.accuracy


def summarise(run: RunParts) -> None:
    """Write the run's summary and curve, wait for its last checkpoint, and show the summary."""
    path = run.run_dir.path
    if run.run_dir.writes:
        save_summary(path)
        save_curve(path)
    run.resources.close()  # waits for the last checkpoint, which the view shows until the summary replaces it
    run.progress.close()
    if run.run_dir.writes:
        print_summary(path, run.progress.console)
