"""How fast the rollout engine decodes on this machine: `podium bench rollout`, and parts of a decode step alone.

A random model of SmolLM2-135M's shape answers random prompts. Prints the figures of `podium bench rollout`, with the
CPU milliseconds per decode step of the head and of sampling, as one JSON line, and writes
benches/results/decode-PLATFORM.json. `over_products` compares CPU time of a whole step, all slots busy, with that of a
step's matrix products out of arrays of their own, in turns of one decode call each; the bar is 1.35.

    python -m benches.decode --batch 160 --slots 64 --lengths fixed:20
"""

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benches.record import arguments, record
from podium.config.lora import MATRICES
from podium.doctor.benchmarks.rollout import device_of, full_requests, make_engine, measure, rollout_config, run_lengths
from podium.doctor.machine_subject import smollm2
from podium.hosts.platform import prepare_platform
from podium.models.architecture import LAYERS, DecoderConfig, with_layers
from podium.models.decoder import head_weights
from podium.models.logprobs import logits_at
from podium.models.params import param_specs
from podium.rollout.engine import RolloutEngine
from podium.rollout.programs import DecodeProgram
from podium.rollout.request import Request, SamplingParams
from podium.rollout.sampling import fill_row, idle_rows, sample
from podium.sharding import Params, make_mesh
from podium.train.setup import run_spec

SMOLLM2_135M = smollm2()
REPEATS = 3


def cpu_ms(function: Callable[[], Any]) -> float:
    """The fewest CPU milliseconds of a call, after one that compiles."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.process_time()
        jax.block_until_ready(function())
        times.append(time.process_time() - start)
    return 1e3 * min(times[1:])


def parts(engine: RolloutEngine) -> dict[str, float]:
    """CPU milliseconds per decode step of the head and of sampling, each alone."""
    device = device_of(engine)
    S, params, rules = engine.config.slots, device.params, device.form.rules
    assert params is not None
    rows = idle_rows(S)
    for row in range(S):
        fill_row(rows, row, SamplingParams(max_new_tokens=1), seed=0, completion=row)
    head = jax.jit(lambda params, x: logits_at(x, head_weights(params, rules, device.form.dtype), 1.0))
    hidden = jnp.ones((S, device.form.decoder.width), device.form.dtype)
    logits, draw, live = head(params, hidden), jax.jit(sample), jnp.ones(S, bool)
    return {
        "head_cpu_ms": cpu_ms(lambda: head(params, hidden)),
        "sampling_cpu_ms": cpu_ms(lambda: draw(logits, rows, jnp.arange(S), live)),
    }


def products_of(decoder: DecoderConfig, rows: int) -> Callable[[], jax.Array]:
    """A compiled call of all matrix products of a decode step in float32, with no other work."""
    specs = {name: spec for name, spec in param_specs(decoder).items() if name.removeprefix(LAYERS) in MATRICES}
    layers = [
        {name.removeprefix(LAYERS): jnp.full(spec.shape[1:], 1e-3) for name, spec in specs.items()}
        for _ in range(decoder.layers)
    ]
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

    def step(x: jax.Array, layers: list[Params], head: jax.Array) -> jax.Array:
        for w in layers:
            q, k, v = (product("sd,dhq->shq", x, w[name]) for name in ("q", "k", "v"))
            x = product("shq,hqd->sd", q + jnp.mean(k + v), w["o"])
            gate, up = product("sd,df->sf", x, w["gate"]), product("sd,df->sf", x, w["up"])
            x = product("sf,fd->sd", gate + up, w["down"])
        return product("sd,vd->sv", x, head)

    compiled, x, head = jax.jit(step), jnp.ones((rows, decoder.width)), jnp.full((decoder.vocab, decoder.width), 1e-3)
    return lambda: compiled(x, layers, head)


@dataclasses.dataclass
class ByTurns:
    """A decode program that runs the products alone after each of its calls, as often, and times both."""

    program: DecodeProgram
    products: Callable[[], jax.Array]
    turns: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """CPU milliseconds of a step and of its products, for each call of full length."""

    def __call__(self, *given: Any) -> Any:
        """Run the program, then the products."""
        jax.block_until_ready(given)
        begun = time.process_time()
        made = jax.block_until_ready(self.program(*given))
        decoded, steps = time.process_time(), int(made[3])
        for _ in range(steps):
            jax.block_until_ready(self.products())
        alone = time.process_time() - decoded
        if steps:
            self.turns.append((1e3 * (decoded - begun) / steps, 1e3 * alone / steps))
        return made

    def _cache_size(self) -> int:
        return self.program._cache_size()


def over_products(engine: RolloutEngine, requests: list[Request]) -> dict[str, Any]:
    """CPU milliseconds of decode steps and of their products, and their ratio: median over turns."""
    device = device_of(engine)
    programs = device.programs
    timed = ByTurns(programs.decode, products_of(device.form.decoder, engine.config.slots))
    jax.block_until_ready(timed.products())
    device.programs = programs._replace(decode=timed)
    engine.generate(requests)
    device.programs = programs
    steps, alone = zip(*timed.turns, strict=True)
    return {
        "step_cpu_ms": statistics.median(steps),
        "products_cpu_ms": statistics.median(alone),
        "over_products": statistics.median(step / products for step, products in timed.turns),
        "turns": timed.turns,
    }


def main() -> None:
    """Measure, print and record."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M.layers, help="fewer: a quick trial")
    parser.add_argument("--vocab", type=int, default=SMOLLM2_135M.vocab)
    parser.add_argument("--batch", type=int, default=160, help="sequences")
    parser.add_argument("--slots", type=int, default=64, help="sequences decoded at once")
    parser.add_argument("--lengths", default="fixed:20", help="of completions, as of `podium bench rollout`")
    parser.add_argument("--max-new-tokens", type=int, default=20)
    args = parser.parse_args()
    prepare_platform()
    mesh = make_mesh("auto")
    config = rollout_config("demo", args.batch, "auto", args.max_new_tokens, args.slots, shards=mesh.size)
    decoder = dataclasses.replace(with_layers(SMOLLM2_135M, args.layers), vocab=args.vocab)
    spec = run_spec(config, decoder, mesh)
    engine = make_engine(spec, mesh)
    lengths = run_lengths(args.lengths, spec)
    found = dataclasses.asdict(measure(spec, engine, lengths)) | parts(engine)
    if jax.default_backend() == "cpu" and device_of(engine).form.dtype == jnp.float32:
        found |= over_products(engine, full_requests(config.rollout, lengths, decoder.vocab))
    result = {"layers": args.layers, "vocab": args.vocab, "lengths": args.lengths, **found}
    print(json.dumps(result))
    record(f"decode-{jax.default_backend()}", result, args.results)


if __name__ == "__main__":
    main()
