"""The story of a run: prompts, completions, rewards, update, again; evaluated, recorded, saved, and continued."""

import collections
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from podium.algorithms.advantages import equal_reward_groups
from podium.algorithms.recipes import make_recipe
from podium.config.schema import Config
from podium.job.context import Member, alone
from podium.models.architecture import DecoderConfig
from podium.models.params import param_specs
from podium.observe.curve_svg import save_curve
from podium.observe.progress import Progress, Sample
from podium.observe.records import lengths_record, sample_record, sampled_groups
from podium.observe.run_dir import LENGTHS, METRICS, SAMPLES, Fork, RunDir
from podium.observe.summary import make_summary, print_summary, versions
from podium.observe.writers import MetricWriter
from podium.sharding import abstract_params
from podium.train.checkpoint import Checkpointer, restore_state
from podium.train.distributed import Interrupted, Stop, failing_fast, from_leader, gather, joined
from podium.train.evaluate import Evaluation, evaluate
from podium.train.generate import Group, Rollouts
from podium.train.setup import load_weights, make_model, make_program, make_run_optimizer
from podium.train.signals import StopSignal
from podium.train.state import TrainState, abstract_state, init_state, restarted
from podium.train.trainer import Updater, completion_metrics

STEPS_AVERAGED = 10
REPORTED = ("train-reward/total/mean", "train-other/loss", "eval/accuracy", "time/train/step_s")
"""What a status on a worker shows of the last step."""
GIB = 2**30


class PlanCheck(Protocol):
    """What plans a run and measures the plan: `podium.plan.check`, handed down, as the planner reads the trainer."""

    def begin(self, config: Config, decoder: DecoderConfig, folder: Path | None) -> str | None:
        """Before the first step: a line to print. Raises ValueError where the run is far too large."""
        ...

    def after_step(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], str | None]:
        """After each step: metrics to add, and a line to print."""
        ...


def train(
    config: Config,
    *,
    fork: Fork | None = None,
    plain: bool = False,
    member: Member | None = None,
    check: PlanCheck | None = None,
) -> int:
    """Train, or go on with a run that was stopped; the exit status of `podium train`.

    Args:
        config: of the run, with its name.
        fork: the run and step whose checkpoint a new run begins from.
        plain: lines instead of the live view.
        member: what this process knows of the job that it is a part of; unset: of none.
        check: plans the run at its start, and compares; unset: nothing does.

    Raises:
        ValueError: something that the config names cannot be used; the message says what, and the way out.
    """
    member = member or alone()
    console = Console(stderr=True, force_interactive=False if plain or member.watched else None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(joined(member))
        run_dir = stack.enter_context(_open_run(config, fork))
        progress = stack.enter_context(Progress(run_dir.path.name, config.steps, console))
        stop = Stop(stack.enter_context(StopSignal(progress.notice)))
        stack.enter_context(member.watchdog.watching() if member.watched else contextlib.nullcontext())
        run = stack.enter_context(
            contextlib.closing(Run(config, run_dir, progress, stop=stop, member=member, check=check))
        )
        stack.enter_context(failing_fast(member))
        try:
            for step in range(run.begin(), config.steps):
                groups = run.rollout()
                metrics = run.update(groups)
                run.record(step + 1, groups, metrics)
                evaluation = run.evaluate(step + 1)
                run.save(step + 1, evaluation, now=stop.requested is not None)
                if stop.requested is not None and step + 1 < config.steps:
                    break
        except Interrupted:
            run.save_what_is_done()
        if run.done < config.steps:
            progress.message(f"stopped and saved; to go on: podium train {run_dir.path}/config.yaml")
        if run_dir.writes:
            run_dir.write_summary(make_summary(run_dir.path))
            save_curve(run_dir.path)
        run.close()  # waits for the last checkpoint, which the view shows until the summary takes its place
        progress.close()
        if run_dir.writes:
            print_summary(run_dir.path, console)
        status = stop.exit_code  # of all processes, which know each other until here
    stopped = f"stopped by signal {status - 128} after step {run.done}, which is saved"
    member.report.end(*(("stopped", stopped) if status else ("done", f"{run.done} steps")), status)
    return status


def _open_run(config: Config, fork: Fork | None) -> RunDir:
    """The run's folder: process 0 has it open, the others look on."""
    opened: list[RunDir] = []

    def open_it() -> tuple[bool, Fork | None]:
        opened.append(RunDir.open(config, fork=fork))
        return opened[0].continued, opened[0].fork

    continued, kept = from_leader(open_it)
    return opened[0] if opened else RunDir.follow(config, continued=continued, fork=kept)


class Run:
    """The parts of a run that live from its first step to its last, and the verbs of a step."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        progress: Progress,
        *,
        stop: Stop,
        member: Member,
        check: PlanCheck | None = None,
    ) -> None:
        """Makes everything but the weights; `begin` loads them."""
        self.config, self.run_dir, self.progress, self.member = config, run_dir, progress, member
        member.report.update(steps=config.steps, run_dir=str(run_dir.path.absolute()))
        self.phase("model")
        self.recipe = make_recipe(
            config.algorithm, group_size=config.group_size, prompts_per_step=config.prompts_per_step
        )
        self.model = make_model(config)
        self._check = check
        if check is not None:
            folder = run_dir.path if jax.process_index() == 0 else None
            self._message(check.begin(config, self.model.decoder, folder))
        self.optimizer = make_run_optimizer(config, self.model.decoder)
        self.step_seconds: collections.deque[float] = collections.deque(maxlen=STEPS_AVERAGED)
        self._checkpoint_s: float | None = None  # of a save that no line of metrics tells yet
        with contextlib.ExitStack() as stack:
            self.rollouts = Rollouts(
                config,
                self.model.decoder,
                self.model.tokenizer,
                self.model.mesh,
                stop=stop,
                watchdog=member.watchdog,
            )
            stack.callback(self.rollouts.close)
            self.rollouts.tasks.num_prompts()  # read now: bad data is an error before the first compile
            self.checkpointer = Checkpointer(run_dir.checkpoints, config.checkpoint)
            stack.callback(self.checkpointer.close)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Wait for what is being saved, and stop graders and services."""
        self._stack.close()

    def _message(self, line: str | None) -> None:
        if line is not None:
            self.progress.message(line)

    def phase(self, name: str) -> None:
        """Say what is being done from now on, to who looks on and to the watchdog."""
        self.progress.phase(name)
        self.member.watchdog.phase(name)

    def begin(self) -> int:
        """Load the weights from where the run stands, evaluate a new run's, and return the steps already done."""
        state, done = self._state()
        self.done = self._saved = done
        self._cursor = self.rollouts.tasks.cursor
        self.member.report.update(step=done)
        self.run_dir.truncate(done if done else -1)
        self.writer = self._stack.enter_context(MetricWriter(self.run_dir, self.config, announce=self.progress.message))
        reference = load_weights(self.model, None) if self.recipe.needs_reference else None
        program = make_program(self.config, self.model.decoder, self.model.mesh)
        self.updater = Updater(
            self.config, self.recipe, program, self.optimizer, reference=reference, folder=self.run_dir.path
        )
        self.state = state
        self.rollouts.load(state.params)
        if done:
            self.progress.message(f"continuing after step {done}")
            if self._evaluation_due(done) and not from_leader(lambda: self._evaluation_recorded(done)):
                self._evaluated(done)
        elif self.config.eval.at_start:
            self._evaluated(0)
        return done

    def rollout(self) -> list[Group]:
        """The next groups of the run; where the recipe refills, groups of equal rewards are replaced by others."""
        self.phase("rollout")
        self._started, self._cpu_started = time.perf_counter(), time.process_time()
        self._before = (self.rollouts.rollout_s, self.rollouts.reward_s, self.rollouts.dropped_prompts)
        self.rollouts.metrics()  # of an evaluation since
        groups = self.rollouts.collect(self.config.prompts_per_step)
        self._refills = 0
        if self.recipe.zero_variance == "refill":
            useful = [group for group in groups if not _equal(group)]
            while len(useful) < self.config.prompts_per_step and self._refills < self.recipe.max_refills:
                self._refills += 1
                more = self.rollouts.collect(self.config.prompts_per_step - len(useful))
                useful += [group for group in more if not _equal(group)]
                groups += more
            spare = [group for group in groups if _equal(group)]  # dropped later, but part of the step's figures
            groups = useful + spare
        return groups

    def update(self, groups: list[Group]) -> dict[str, float]:
        """Train on the groups, and hand the new weights to the engine; the metrics of the step."""
        self.phase("update")
        self.rollouts.unload()  # these weights are done with: the update has their memory
        self.state, metrics = self.updater(self.state, groups)
        self.done, self._cursor = self.done + 1, self.rollouts.tasks.cursor
        synced = time.perf_counter()
        self.rollouts.load(self.state.params)
        rollout_s, reward_s, dropped_prompts = self._before
        step_s = time.perf_counter() - self._started
        self.step_seconds.append(step_s)
        if len(self.step_seconds) == STEPS_AVERAGED:
            metrics["time/train/step_avg_last10_s"] = float(np.mean(self.step_seconds))
        if self._checkpoint_s is not None:
            metrics["time/train/checkpoint_s"], self._checkpoint_s = self._checkpoint_s, None
        tokens = metrics["train-other/total_valid_token_count"]
        return metrics | {
            "time/train/step_s": step_s,
            "time/train/step_cpu_s": time.process_time() - self._cpu_started,
            "time/train/rollout_s": self.rollouts.rollout_s - rollout_s,
            "time/train/reward_s": self.rollouts.reward_s - reward_s,
            "time/train/sync_s": time.perf_counter() - synced,
            "throughput/train/valid_tokens_per_s": tokens / step_s,
            "throughput/train/valid_tokens_per_s_update": tokens / metrics["time/train/update_s"],
            "rollout/dropped_prompts": self.rollouts.dropped_prompts - dropped_prompts,
            "rollout/refill_rounds": self._refills,
            **self.rollouts.metrics(),
            **_memory(),
        }

    def record(self, step: int, groups: list[Group], metrics: dict[str, float]) -> None:
        """Write a step's metrics, samples and lengths, and show them."""
        metrics = completion_metrics(groups) | metrics
        if self._check is not None:
            more, line = self._check.after_step(metrics)
            metrics |= more
            self._message(line)
        self.writer.write(step, metrics)
        self.member.report.update(step=step, metrics={name: metrics[name] for name in REPORTED if name in metrics})
        labels = self.rollouts.tasks.labels
        every = self.config.metrics.samples_every
        for index in sampled_groups(step, prompts_per_step=self.config.prompts_per_step, samples_every=every):
            group = groups[index]
            task = labels[group.prompt.task]
            record = sample_record(step, "train", task, group.prompt.prompt, group.completions, group.rewards)
            self.run_dir.append(SAMPLES, record)
        prompts = [len(group.tokens) for group in groups]
        completions = [len(completion.tokens) for group in groups for completion in group.completions]
        self.run_dir.append(LENGTHS, lengths_record(step, prompts, completions))
        first = groups[0]
        question, answer = first.prompt.prompt.question, first.completions[0].text
        self.progress.step(step, metrics, Sample(question, answer, first.rewards[0].total))

    def evaluate(self, step: int) -> Evaluation | None:
        """Evaluate after a step where the config says so."""
        return self._evaluated(step) if self._evaluation_due(step) else None

    def _evaluation_due(self, step: int) -> bool:
        every, last = self.config.eval.every_steps, step == self.config.steps
        return bool((every and step % every == 0) or (last and self.config.eval.at_end))

    def _evaluation_recorded(self, step: int) -> bool:
        return any(line["step"] == step and "eval/accuracy" in line for line in self.run_dir.read(METRICS))

    def save(self, step: int, evaluation: Evaluation | None, *, now: bool) -> None:
        """Save after a step where the config says so, at the end, and before stopping."""
        config, last = self.config.checkpoint, step == self.config.steps
        best = bool(config.keep_best and evaluation)
        if not (last or now or best or (config.every_steps and step % config.every_steps == 0)):
            return
        self._save(step, score=evaluation.accuracy if evaluation else None, wait=last or now)

    def save_what_is_done(self) -> None:
        """Save the step after which a rollout was given up. If it was its evaluation's, the run goes on with that."""
        if self.done != self._saved:
            self._save(self.done, score=None, wait=True)

    def _save(self, step: int, *, score: float | None, wait: bool) -> None:
        self.phase("checkpoint")
        host_state = {"cursor": self._cursor, "versions": versions()}
        start = time.perf_counter()
        self.checkpointer.save(step, self.state, host_state, score=score, wait=wait)
        self._saved, self._checkpoint_s = step, time.perf_counter() - start

    def _state(self) -> tuple[TrainState, int]:
        """Where the run stands: its newest checkpoint, else that of the run it was forked from, else the model."""
        latest = from_leader(self.checkpointer.latest)
        if latest is None and self.run_dir.fork is None:
            return init_state(load_weights(self.model, None), self.optimizer), 0
        specs = param_specs(self.model.decoder)
        abstract = abstract_state(abstract_params(specs, jnp.float32, self.model.rules), self.optimizer)
        if latest is not None:
            state, host_state = self.checkpointer.restore(latest, abstract)
            done = latest
        else:
            fork = self.run_dir.fork
            assert fork is not None
            state, host_state = restore_state(fork.checkpoints, fork.step, abstract)
            state, done = restarted(state), 0
        self.rollouts.tasks.cursor = host_state["cursor"]
        changed = [name for name, version in versions().items() if host_state["versions"].get(name, version) != version]
        if changed:
            self.progress.message(f"other versions than the checkpoint's: {', '.join(changed)}; not bit for bit then")
        return state, done

    def _evaluated(self, step: int) -> Evaluation:
        self.phase("evaluation")
        evaluation = evaluate(self.rollouts)
        self.writer.write(step, evaluation.metrics)
        for record in evaluation.records(step):
            self.run_dir.append(SAMPLES, record)
        self.progress.evaluated(step, evaluation.metrics)
        return evaluation


def _equal(group: Group) -> bool:
    return bool(equal_reward_groups(group.totals[None])[0])


def _memory() -> dict[str, float]:
    """Memory of the device that has most in use, of all hosts, where devices tell (not on CPU)."""
    stats = [found for device in jax.local_devices() if (found := device.memory_stats())]
    if not stats:
        return {}
    used, peak = (max(each[name] for each in stats) for name in ("bytes_in_use", "peak_bytes_in_use"))
    all_used, all_peak = zip(*gather((used, peak)), strict=True)
    return {
        "memory/train/bytes_in_use_max_gib": max(all_used) / GIB,
        "memory/train/peak_bytes_in_use_max_gib": max(all_peak) / GIB,
    }
