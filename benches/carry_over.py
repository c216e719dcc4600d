"""What carrying completions over updates is worth on this machine, and that it leaves no length out.

    python -m benches.carry_over            (CPU; half an hour; --layers 4 for a quick trial)

    speed    a model of SmolLM2-135M's shape, random weights, steps of 16 prompts x 4 completions of 16 to 512 tokens
             (GSM8K-like), as many slots as are in flight: tokens per CPU-second of the rollouts with
             `rollout.in_flight` 1.5 over those with 1, when as many are in flight as will be; bar 1.3
    lengths  a tiny random model, 200 steps at a learning rate of 0 in effect: the lengths that steps train on with 1.5
             in flight against those that other seeds draw with 1, chi-square; bar p > 0.01. The same seeds must give
             the same completions, whatever was in flight

Kills are `python -m benches.kill_resume --carry-over`. Prints one JSON line and writes
benches/results/carry-over-PLATFORM.json; exit status 1 where a bar is missed.
"""

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import chi2_contingency

from benches.decode import SMOLLM2_135M
from benches.recipes import write_tiny_model
from benches.record import arguments, record
from podium.config.schema import Config, RolloutConfig
from podium.models.architecture import DecoderConfig, with_layers
from podium.models.params import ROLLOUT_AXES, param_specs
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Completion, Request, SamplingParams
from podium.run.resolve import resolve_recipe, resolve_rollout
from podium.sampling.conversations.carry import chosen
from podium.sampling.sampler import Sampler
from podium.sharding import Params, ShardingRules, init_params, make_mesh
from podium.train.setup import load_weights, make_model

BARS = {"speed": 1.3, "lengths": 0.01}
N, G, IN_FLIGHT, MAX_STALENESS = 16, 4, 1.5, 2
STEPS_BEFORE = 2
"""Steps that fill the flight before the clock starts."""
PROMPT, LONGEST = 64, 512
BINS = 8


def draw_lengths(count: int) -> np.ndarray:
    """Draw the lengths of the completions of `count` prompts, [count, G]."""
    logs = np.random.default_rng(0).normal(np.log(120), 0.8, (count, G))
    return np.clip(np.rint(np.exp(logs)), 16, LONGEST).astype(int)


class Flight:
    """Steps of an engine over prompts whose completions have known lengths, as `Sampler` makes them."""

    def __init__(self, decoder: DecoderConfig, params: Params, lengths: np.ndarray, in_flight: float) -> None:
        """Programs are compiled; nothing is in flight."""
        self.room, self.lengths = int(in_flight * N), lengths
        slots = self.room * G
        config = RolloutConfig(max_prompt_tokens=PROMPT, max_new_tokens=LONGEST, slots=slots, refill_steps=8)
        rules = ShardingRules(make_mesh("auto"), ROLLOUT_AXES)
        self.engine = RolloutEngine(Device(config, decoder, rules, dtype=jnp.dtype("bfloat16")), None)
        self.engine.load(params)
        self.engine.warm_up()
        self.vocab, self.pending, self.begun = decoder.vocab, dict[int, list[list[Completion]]](), 0
        self.first: dict[int, int] = {}

    def step(self, version: int) -> int:
        """Run one step; returns the number of tokens drawn."""
        while len(self.pending) < self.room:
            self.pending[self.begun] = []
            self.begun += 1
        numbers = list(self.pending)
        first = [self.first.get(number) for number in numbers]
        sizes = {"per_step": N, "version": version, "max_staleness": MAX_STALENESS}
        # completions of a prompt end at lengths of their own: each is a request, and a prompt G of them
        requests = [request for number in numbers for request in self.requests(number)]

        def taken(ended: list[bool]) -> list[int] | None:
            return chosen(first, [all(ended[i : i + G]) for i in range(0, len(ended), G)], N, **sizes)

        made, stats = self.engine.generate(requests, enough=lambda ended: taken(ended) is not None)
        found = taken([each.finish_reason is not None for (each,) in made])
        assert found is not None
        for index, number in enumerate(numbers):
            self.first.setdefault(number, version)
            self.pending[number] = made[index * G : (index + 1) * G]
        for index in found:
            del self.pending[numbers[index]]
        return stats.completion_tokens

    def requests(self, number: int) -> list[Request]:
        """The requests of one prompt."""
        prompt = np.random.default_rng(number).integers(0, self.vocab, PROMPT).tolist()
        begun = self.pending[number] or [()] * G
        return [
            Request(
                prompt=tuple(prompt),
                sampling=SamplingParams(max_new_tokens=int(length)),
                seed=G * number + index,
                begun=dict(enumerate(begun[index])),
            )
            for index, length in enumerate(self.lengths[number])
        ]


def speed(decoder: DecoderConfig, steps: int) -> dict[str, Any]:
    """Tokens per CPU-second with and without, step by step in turns."""
    params = init_params(0, param_specs(decoder), ShardingRules(make_mesh("auto"), ROLLOUT_AXES))
    lengths = draw_lengths(int((steps + STEPS_BEFORE + 1) * N * IN_FLIGHT))
    flights = {over: Flight(decoder, params, lengths, over) for over in (1.0, IN_FLIGHT)}
    tokens, cpu_s = dict.fromkeys(flights, 0), dict.fromkeys(flights, 0.0)
    for version in range(STEPS_BEFORE + steps):
        for over, flight in flights.items():
            if over == 1.0 and version < STEPS_BEFORE:
                continue
            start = time.process_time()
            drawn = flight.step(version)
            if version >= STEPS_BEFORE:
                tokens[over] += drawn
                cpu_s[over] += time.process_time() - start
    rates = {str(over): tokens[over] / cpu_s[over] for over in flights}
    return {"tokens_per_cpu_s": rates, "tokens": tokens, "cpu_s": cpu_s, "ratio": rates[str(IN_FLIGHT)] / rates["1.0"]}


def trained(model: Path, steps: int, **settings: Any) -> dict[tuple[int, tuple[int, ...]], list[list[int]]]:
    """Completions that steps train on, by the number of the task's prompt, and its tokens; weights do not change."""
    rollout = {"max_prompt_tokens": 16, "max_new_tokens": 24, "slots": 16, "refill_steps": 2}
    seed = settings.pop("seed", 0)
    config = Config.model_validate(
        {
            "model": str(model),
            "seed": seed,
            "prompts_per_step": 4,
            "group_size": 4,
            "tasks": [{"name": "arithmetic"}],
            "grading": {"workers": 0},
            # tokens that end a completion, as often as they come: lengths are spread
            "rollout": {**rollout, "stop": ["0", "1"], **settings},
        }
    )
    made, found = make_model(config), {}
    spec = resolve_rollout(config, resolve_recipe(config), made.decoder, made.machine)
    with contextlib.closing(Sampler(spec, made.decoder, made.tokenizer, made.mesh)) as rollouts:
        weights = load_weights(made, None)
        for step in range(steps):
            rollouts.load(weights, version=step)
            groups, _ = rollouts.answer(rollouts.feed.next(config.prompts_per_step))
            for group in groups:
                again = sum(tokens == group.tokens for _, tokens in found)
                found[again, group.tokens] = [each.drawn_tokens.tolist() for each in group.transcripts]
    return found


def lengths_of(found: dict[Any, list[list[int]]]) -> np.ndarray:
    """[completions]."""
    return np.array([len(tokens) for group in found.values() for tokens in group])


def lengths(steps: int) -> dict[str, Any]:
    """Whether all lengths are trained on as often as they are drawn."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        carried = trained(Path(folder), steps, in_flight=IN_FLIGHT, max_staleness=MAX_STALENESS)
        waited = trained(Path(folder), steps + 1)
        others = lengths_of(trained(Path(folder), steps, seed=1))
    own = lengths_of(carried)
    edges = np.unique(np.quantile(others, np.linspace(0, 1, BINS + 1)))
    edges[-1] += 1
    counts = [np.histogram(each, edges)[0] for each in (own, others)]
    texts = {json.dumps(group) for group in waited.values()}
    return {
        "steps": steps,
        "completions": len(own),
        "mean": {"trained": float(own.mean()), "drawn": float(others.mean())},
        "histograms": {"edges": edges.tolist(), "trained": counts[0].tolist(), "drawn": counts[1].tolist()},
        "p": float(np.asarray(chi2_contingency(counts)[1])),
        "prompts": len(carried),
        "prompts_with_the_same_completions": sum(json.dumps(group) in texts for group in carried.values()),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M.layers, help="fewer: a quick trial")
    parser.add_argument("--steps", type=int, default=6, help="that are timed")
    parser.add_argument("--length-steps", type=int, default=200)
    args = parser.parse_args()
    decoder = with_layers(SMOLLM2_135M, args.layers)
    result = {
        "layers": args.layers,
        "lengths": lengths(args.length_steps),
        "speed": speed(decoder, args.steps),
        "bars": BARS,
    }
    print(json.dumps(result))
    record(f"carry-over-{jax.default_backend()}", result, args.results)
    same = result["lengths"]["prompts"] == result["lengths"]["prompts_with_the_same_completions"]
    sys.exit(not (same and result["lengths"]["p"] > BARS["lengths"] and result["speed"]["ratio"] >= BARS["speed"]))


if __name__ == "__main__":
    main()
