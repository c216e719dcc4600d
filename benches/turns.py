"""Conversations with a slow environment on this machine: what waiting costs, what is planned, what exactness costs.

    python -m benches.turns                (CPU; a minute or two; --tiny for a trial)
    python -m benches.turns --model demo   (SmolLM2-135M; half an hour)

A random model of 2 layers, in float32, holds 64 conversations of 6 short answers in 16 slots; replies come from a
process beside it.

    wall          seconds with replies after 0 to 1 s, over the larger of those with replies at once and of the
                  environments alone; bar 1.15
    planned       seconds by the planner's simulation with replies after 2 s, from the seconds of calls that were
                  measured with replies at once, over the measured ones; bar 1 +- 0.2
    reproducible  CPU seconds with `rollout.reproducible` over those without, with replies at once and after 0 to 1 s;
                  and the largest difference of log-probabilities between the two, with and without

Prints one JSON line and writes benches/results/turns-PLATFORM.json, or turns-demo-PLATFORM.json; exit status 1 where a
bar is missed.
"""

import collections
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benches.children.talking import WAITING
from benches.kill_resume import TEMPLATE
from benches.recipes import write_tiny_model
from benches.record import arguments, record
from podium.config.schema import Config
from podium.doctor.benchmarks.rollout import device_of
from podium.plan.request.simulated_device import Clock
from podium.plan.request.workload import Replies, SequenceLengths, simulate_rollout
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import RolloutStats
from podium.run.resolve import resolve_recipe, resolve_rollout
from podium.run.run_spec import AnswerSettings
from podium.sampling.feed import request_seed
from podium.sampling.groups import Group
from podium.sampling.sampler import Sampler
from podium.tasks.conversation import Turn
from podium.tasks.conversations.environments import Environments
from podium.train.setup import Model, load_weights, make_model

BARS = {"wall": 1.15, "planned": 0.2}
PROMPTS, GROUP, TURNS = 16, 4, 6
ENDS = (".", ",", "!", "?", "is", "3", "5")
"""Texts of tokens that end an answer, beside the model's own, so that answers are short."""
TINY = "tiny"
ROLLOUT: dict[str, Any] = {
    "max_prompt_tokens": 64,
    "max_new_tokens": 48,
    "max_episode_tokens": 512,
    "cache_tokens": 24_576,
    "page_tokens": 16,
    "slots": 16,
    "refill_steps": 4,
    "dtype": "float32",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """The conversations of a step, and what they took."""

    groups: list[Group]
    stats: RolloutStats
    wall_s: float
    cpu_s: float

    @property
    def logprobs(self) -> np.ndarray:
        """The log-probabilities of all drawn tokens."""
        return np.concatenate([each.sampled_logprobs for group in self.groups for each in group.transcripts])

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of all conversations."""
        return [each.tokens.tolist() for group in self.groups for each in group.transcripts]


class Watch:
    """The seconds of an engine's calls, by size."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Watch from now on."""
        self.prefills: dict[int, list[float]] = collections.defaultdict(list)
        self.decodes: dict[int, list[tuple[int, float]]] = collections.defaultdict(list)
        self._device = device_of(engine)
        self._prefill, self._decode = self._device.prefill, self._device.decode
        self._device.prefill = self._timed_prefill
        self._device.decode = self._timed_decode

    def clock(self) -> Clock:
        """The means."""
        return Clock(
            prefill_s={size: float(np.mean(seconds)) for size, seconds in self.prefills.items()},
            decode_s={
                size: sum(seconds for _, seconds in calls) / max(1, sum(steps for steps, _ in calls))
                for size, calls in self.decodes.items()
            },
        )

    def _timed_prefill(self, call: Any) -> Any:
        start = time.perf_counter()
        found = self._prefill(call)
        self._device.wait()
        self.prefills[call.chunk].append(time.perf_counter() - start)
        return found

    def _timed_decode(self, rows: Any, tokenizer: Any) -> Any:
        start = time.perf_counter()
        drawn = self._decode(rows, tokenizer)()
        self.decodes[len(drawn.counts)].append((drawn.steps, time.perf_counter() - start))
        return lambda: drawn


def make_config(folder: Path, *, turns: int, model: str, prompts: int, **rollout: Any) -> Config:
    """A run of one step of conversations; the tiny model is made if it is asked for."""
    settings: dict[str, Any] = {"model": model}
    if model == TINY:
        settings = {"model": str(folder / "model"), "chat_template": str(folder / "chat.jinja")}
        if not (folder / "model").exists():
            (folder / "model").mkdir()
            write_tiny_model(folder / "model", longest=ROLLOUT["max_episode_tokens"])
            (folder / "chat.jinja").write_text(TEMPLATE)
    task = {"environment": "benches.children.talking:Waiting", "options": {"episodes": prompts, "eval_episodes": 1}}
    return Config.model_validate(
        {
            "name": "turns",
            "runs_dir": str(folder),
            **settings,
            "prompts_per_step": prompts,
            "group_size": GROUP,
            "tasks": [task],
            "rollout": {**ROLLOUT, "limits": {"max_turns": turns}, **rollout},
        }
    )


@contextlib.contextmanager
def opened(config: Config, model: Model) -> Iterator[Sampler]:
    """The run's sampling, with weights and compiled programs."""
    with contextlib.closing(
        Sampler(
            resolve_rollout(config, resolve_recipe(config), model.decoder, model.machine),
            model.decoder,
            model.tokenizer,
            model.mesh,
        )
    ) as rollouts:
        rollouts.load(load_weights(model, None))
        rollouts.engine.warm_up()
        yield rollouts


def environments_of(rollouts: Sampler) -> Environments:
    """The environments of a sampler's conversations."""
    assert rollouts.episodes is not None, "a task has conversations"
    return rollouts.episodes.client.environments


def hold(rollouts: Sampler, waits: Mapping[str, Any]) -> Held:
    """Hold the same conversations, with replies after `low` to `high` seconds."""
    os.environ[WAITING] = f"{waits['turns']},{waits['low']},{waits['high']}"
    environments_of(rollouts).close()  # the next processes read it
    rollouts.feed.tasks.cursor = 0
    spec = rollouts.spec
    settings = AnswerSettings(sampling=spec.training.sampling, completions=spec.training.completions)
    prompts = rollouts.feed.next(waits["prompts"])
    start_processes(rollouts, prompts)
    start, cpu = time.perf_counter(), time.process_time()
    groups, stats = rollouts.answer(prompts, settings)
    return Held(groups=groups, stats=stats, wall_s=time.perf_counter() - start, cpu_s=time.process_time() - cpu)


def start_processes(rollouts: Sampler, prompts: Any) -> None:
    """Begin and drop a conversation, so that no measured second is the start of a process."""
    environments = environments_of(rollouts)
    environments.open(-1, 0, prompts[0].prompt.prompt, 0)
    assert environments.next(60.0) is not None
    environments.drop(-1)


def environments_alone(rollouts: Sampler, waits: Mapping[str, Any]) -> float:
    """Seconds of the same conversations with answers that take no time."""
    environments = environments_of(rollouts)
    rollouts.feed.tasks.cursor = 0
    prompts = rollouts.feed.next(waits["prompts"])
    start, turns = time.perf_counter(), dict[int, int]()
    for number in range(len(prompts) * GROUP):
        prompt = prompts[number // GROUP]
        environments.open(number, 0, prompt.prompt.prompt, request_seed(prompt.seed, "environment", 0))
        turns[number] = 0
    while turns:
        answered = environments.next(1.0)
        if answered is None:
            continue
        number = answered.number
        if turns[number] == waits["turns"]:
            environments.drop(number)
            del turns[number]
            continue
        environments.say(number, Turn(text="", number=turns[number]))
        turns[number] += 1
    return time.perf_counter() - start


def planned_seconds(held: Held, config: Config, clock: Clock, seconds: float) -> float:
    """Seconds by the planner's simulation of conversations of these lengths, with replies after `seconds`."""
    transcripts = [group.transcripts for group in held.groups]
    turns = max(each.num_turns for group in transcripts for each in group)
    drawn = np.array([[each.num_drawn for each in group] for group in transcripts])
    given = np.array([[each.num_tokens - len(each.prompt) - each.num_drawn for each in group] for group in transcripts])
    replies = Replies(turns=turns, tokens=round(float(given.mean()) / (turns - 1)), seconds=seconds)
    lengths = SequenceLengths(
        prompts=np.array([len(group.tokens) for group in held.groups]),
        completions=np.maximum(drawn, turns) + (turns - 1) * replies.tokens,
        replies=replies,
    )
    return simulate_rollout(lengths, config.rollout, clock=clock).seconds


def measure(folder: Path, name: str, *, turns: int, prompts: int) -> dict[str, Any]:
    """All figures of the model with this name."""
    config = make_config(folder, turns=turns, model=name, prompts=prompts)
    exact = make_config(folder, turns=turns, model=name, prompts=prompts, reproducible=True)
    model = make_model(config)
    ends = tuple(model.tokenizer.encode(each)[0] for each in ENDS)
    model.tokenizer.eos_tokens = tuple(dict.fromkeys((*model.tokenizer.eos_tokens, *ends)))
    at_once = {"turns": turns, "prompts": prompts, "low": 0.0, "high": 0.0}
    late, slow = at_once | {"high": 1.0}, at_once | {"low": 2.0, "high": 2.0}
    with opened(config, model) as rollouts:
        watch = Watch(rollouts.engine)
        immediate = hold(rollouts, at_once)
        clock = watch.clock()
        delayed = hold(rollouts, late)
        alone_s = environments_alone(rollouts, late)
        waited = hold(rollouts, slow)
    planned = planned_seconds(immediate, config, clock, 2.0)
    with opened(exact, model) as rollouts:
        ours = hold(rollouts, at_once)
        later = hold(rollouts, late)
    for name, other in {"late": delayed, "slow": waited, "reproducible": ours, "reproducible, late": later}.items():
        print(
            f"{name}: {other.wall_s:.1f} s, {other.cpu_s:.1f} CPU s, tokens equal: {other.tokens == immediate.tokens}"
        )
    transcripts = [each for group in immediate.groups for each in group.transcripts]
    return {
        "conversations": len(transcripts),
        "answers": sum(each.num_turns for each in transcripts),
        "drawn_tokens": sum(each.num_drawn for each in transcripts),
        "prefilled_tokens": immediate.stats.scheduled.prefill_tokens,
        "distinct_tokens": distinct_tokens(immediate),
        "equal_tokens": all(each.tokens == immediate.tokens for each in (delayed, waited, ours, later)),
        "wall": {
            "decode_alone_s": immediate.wall_s,
            "environments_alone_s": alone_s,
            "together_s": delayed.wall_s,
            "ratio": delayed.wall_s / max(immediate.wall_s, alone_s),
        },
        "planned": {
            "reply_s": 2.0,
            "measured_s": waited.wall_s,
            "planned_s": planned,
            "ratio": planned / waited.wall_s,
        },
        "reproducible": {
            "cpu_s": ours.cpu_s,
            "plain_cpu_s": immediate.cpu_s,
            "ratio": ours.cpu_s / immediate.cpu_s,
            "late_ratio": later.cpu_s / delayed.cpu_s,
            "difference": difference(ours, later),
            "plain_difference": difference(immediate, delayed),
        },
    }


def difference(held: Held, other: Held) -> float | None:
    """The largest difference of log-probabilities; None if tokens differ."""
    return float(np.abs(held.logprobs - other.logprobs).max()) if held.tokens == other.tokens else None


def distinct_tokens(held: Held) -> int:
    """Tokens that must be prefilled: prompts once for their group, replies, and the last token before each reply."""
    prompts = sum(len(group.tokens) for group in held.groups)
    transcripts = [each for group in held.groups for each in group.transcripts]
    given = sum(each.num_tokens - len(each.prompt) - each.num_drawn for each in transcripts)
    return prompts + given + sum(each.num_turns - 1 for each in transcripts)


def main() -> None:
    """Prints and writes the figures; exit status 1 where a bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=(TINY, "demo"), default=TINY)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="with four conversations each")
    parser.add_argument("--tiny", action="store_true", help="few conversations, and no bars: a trial of this script")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = {"turns": 2, "prompts": 2} if args.tiny else {"turns": TURNS, "prompts": args.prompts}
        result = measure(Path(folder), args.model, **shape)
    print(json.dumps(result))
    if args.tiny:
        return
    name = "turns" if args.model == TINY else f"turns-{args.model}"
    record(f"{name}-{jax.default_backend()}", {"model": args.model, "bars": BARS, **result}, args.results)
    sys.exit(result["wall"]["ratio"] > BARS["wall"] or abs(result["planned"]["ratio"] - 1) > BARS["planned"])


if __name__ == "__main__":
    main()
