"""How many tokens go to other experts in the update than in the rollout? In mixtures, with and without replay.

    python -m benches.routing        (three minutes on two cores)

Tiny random mixtures shaped like Qwen3-30B-A3B (4 layers of 128 experts, 8 a token) and gpt-oss-20b (4 layers of 32, 4 a
token; every second with a window) answer prompts in the engine, in float32 and in bfloat16, with new weights in each
step. The update's forward pass then computes the same tokens in the same format, once with the sampler's experts again
(`train.replay_routing`), and once with its own. Counted over tokens, prompts too, and layers: those sent to another set
of experts than the sampler's, and those that the router would have sent there (`policy/routing_disagreement`). Of drawn
tokens: how far the update's log-probabilities are from the sampler's. Bars: in float32 they are equal to the last
bit with and without replay; in bfloat16 with the sampler's experts no token goes elsewhere. Writes
benches/results/routing-cpu.json; exit status 1 where a bar is missed.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benches.record import arguments, record
from podium.algorithms.routers import router_stats
from podium.certify.tiny import Arrays, random_weights, tiny_clone
from podium.config.schema import RolloutConfig
from podium.models.architecture import DecoderConfig
from podium.models.attention.mask import Visibility
from podium.models.attention.packed_attention import row_attention
from podium.models.blocks.experts import Experts
from podium.models.blocks.kind import At, Block, Stack
from podium.models.decoder import PassSettings, forward, head_weights
from podium.models.layouts import Layout
from podium.models.logprobs import logits_at
from podium.models.params import TRAIN_AXES, param_specs
from podium.models.presets import preset_decoder
from podium.models.recorded_experts import balances, joined_choices, recorded_choices
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.rollout.request import Request, SamplingParams
from podium.rollout.transcript import transcript_of
from podium.sampling.sampler import rollout_rules
from podium.sharding import Params, ShardingRules, make_mesh, param_shardings
from podium.train.batches.batch import Batch, BatchSizes, make_batch
from podium.train.batches.samples import transcript_sample, with_advantage, with_weight

MODELS = {"Qwen3-MoE": "Qwen/Qwen3-30B-A3B", "gpt-oss": "openai/gpt-oss-20b"}
LAYERS, WIDTH = 4, 32
STEPS, PROMPTS, COMPLETIONS, LONGEST, NEW = 3, 8, 4, 24, 24
FORMATS = ("float32", "bfloat16")
ROLLOUT = RolloutConfig(
    max_prompt_tokens=LONGEST, max_new_tokens=NEW, slots=PROMPTS * COMPLETIONS, prefill_rows=8, page_tokens=2
)


class Letters:
    """A tokenizer without an end."""

    eos_tokens = ()
    special_tokens: Mapping[str, int] = {}

    def decode(self, tokens: Sequence[int]) -> str:
        """One letter for each token."""
        return "".join(chr(97 + token % 26) for token in tokens)


class Pass(NamedTuple):
    """What an update's forward pass computes of rows of tokens."""

    logprobs: jax.Array  # [B, T] of the targets
    choices: jax.Array  # [B, T, C]
    disagreement: jax.Array  # []


def decoder_of(model: str) -> DecoderConfig:
    """A tiny clone with as many experts as the model has, and as many for a token."""
    original = preset_decoder(model)
    tiny = tiny_clone(original)
    experts = {place.block.feed_forward for place in original.places}
    (real,) = (each for each in experts if isinstance(each, Experts))

    def widened(block: Block) -> Block:
        kind = block.feed_forward
        assert isinstance(kind, Experts)
        own = dataclasses.replace(kind, count=real.count, top=real.top, width=WIDTH)
        return dataclasses.replace(block, feed_forward=own)

    pattern = tuple(widened(block) for block in dict.fromkeys(tiny.blocks))
    return dataclasses.replace(tiny, stacks=(Stack(pattern=pattern, repeats=LAYERS // len(pattern)),))


def make_engine(decoder: DecoderConfig, dtype: str) -> RolloutEngine:
    """An engine without weights."""
    rules = rollout_rules(Layout(name="replicated"), decoder, make_mesh("auto", jax.devices()[:1]))
    return RolloutEngine(Device(ROLLOUT, decoder, rules, dtype=jnp.dtype(dtype)), Letters())


def sampled(engine: RolloutEngine, decoder: DecoderConfig, seed: int) -> Batch[np.ndarray]:
    """The batch of answers that the engine draws to random prompts."""
    random = np.random.default_rng(seed)
    prompts = [tuple(random.integers(0, decoder.vocab, random.integers(1, LONGEST)).tolist()) for _ in range(PROMPTS)]
    sampling = SamplingParams(max_new_tokens=NEW)
    requests = [Request(prompt=each, sampling=sampling, seed=seed, completions=COMPLETIONS) for each in prompts]
    groups, _ = engine.generate(requests)
    samples = [
        with_weight(with_advantage(transcript_sample(transcript_of(prompt, each), group=number, version=0), 1.0), 1.0)
        for number, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
        for each in group
    ]
    rows = len(samples)
    sizes = BatchSizes(
        row_tokens=LONGEST + NEW, rows=rows, max_rows=rows, packing="none", max_new_tokens=NEW, choices=decoder.choices
    )
    return make_batch(samples, sizes)[0]


def make_pass(decoder: DecoderConfig, dtype: str, *, replay: bool):
    """The jitted `(params, one micro-batch) -> Pass`."""
    rules = ShardingRules(make_mesh("auto", jax.devices()[:1]), TRAIN_AXES)

    @jax.jit
    def compute(params: Params, rows: Batch[jax.Array]) -> Pass:
        visibility = Visibility(rows.segments, rows.prompts, rows.positions)
        assert rows.choices is not None

        def attend(kv: object, at: At, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[object, jax.Array]:
            own = dataclasses.replace(visibility, window=at.window)
            return kv, row_attention("reference", own, rules)(q, k, v, at.sinks)

        hidden, _, told = forward(
            params,
            rows.tokens,
            rows.positions,
            attend,
            recorded=recorded_choices(rows.choices, rows.segments > 0, decoder),
            settings=PassSettings(replay=replay, config=decoder, rules=rules, dtype=jnp.dtype(dtype)),
        )
        logits = logits_at(hidden, head_weights(params, rules, jnp.dtype(dtype)), 1.0).astype(jnp.float32)
        every = jax.nn.log_softmax(logits, axis=-1)
        choices = joined_choices(told, decoder)
        assert choices is not None
        return Pass(
            logprobs=jnp.take_along_axis(every, rows.targets[..., None], axis=-1)[..., 0],
            choices=choices,
            disagreement=router_stats(balances(told))["routing_disagreement"],
        )

    return compute


def elsewhere(found: Pass, batch: Batch[np.ndarray], top: int) -> float:
    """The share of tokens, over layers, that went to another set of experts than the sampler's."""
    assert batch.choices is not None
    live = batch.segments > 0
    ours, theirs = (np.sort(np.asarray(x)[live].reshape(-1, top), axis=-1) for x in (found.choices, batch.choices))
    return float(np.mean(np.any(ours != theirs, axis=-1)))


def measure(name: str, dtype: str) -> dict[str, object]:
    """A row of the results."""
    decoder = decoder_of(MODELS[name])
    top = next(kind.top for _, kind in decoder.routed)
    passes = {replay: make_pass(decoder, dtype, replay=replay) for replay in (True, False)}
    shares: dict[bool, list[float]] = {True: [], False: []}
    asked: dict[bool, list[float]] = {True: [], False: []}
    gaps: dict[bool, list[np.ndarray]] = {True: [], False: []}
    engine = make_engine(decoder, dtype)
    equal, tokens = True, 0
    for step in range(STEPS):
        params = placed(decoder, random_weights(decoder, seed=step))
        engine.load(params)
        whole = sampled(engine, decoder, step)
        batch = jax.tree.map(lambda x: x[0] if x.ndim > 1 else x, whole)  # of one micro-batch
        drawn = batch.mask > 0
        tokens += int(np.sum(batch.segments > 0))
        found = {replay: each(params, batch) for replay, each in passes.items()}
        for replay, each in found.items():
            shares[replay].append(elsewhere(each, batch, top))
            asked[replay].append(float(each.disagreement))
            gaps[replay].append(np.abs(np.asarray(each.logprobs) - batch.sampled_logprobs)[drawn])
        one, other = (np.asarray(each.logprobs)[drawn] for each in found.values())
        equal &= np.array_equal(one, other)
    return {
        "model": name,
        "format": dtype,
        "tokens": tokens,
        "layers": decoder.layers,
        "logprobs_equal": equal,
        **{
            "replay" if replay else "free": {
                "elsewhere": round(float(np.mean(shares[replay])), 5),
                "disagreement": round(float(np.mean(asked[replay])), 5),
                "logprob_gap_mean": float(f"{np.mean(np.concatenate(gaps[replay])):.3g}"),
                "logprob_gap_max": float(f"{np.max(np.concatenate(gaps[replay])):.3g}"),
            }
            for replay in (True, False)
        },
    }


def placed(decoder: DecoderConfig, weights: Arrays) -> Params:
    """The weights on a device, as the trainer stores them."""
    rules = ShardingRules(make_mesh("auto", jax.devices()[:1]), TRAIN_AXES)
    shardings = param_shardings(param_specs(decoder), rules)
    return {name: jax.device_put(value, shardings[name]) for name, value in weights.items()}


def met(row: Mapping[str, object]) -> bool:
    """Whether a row meets its bar."""
    replay = row["replay"]
    assert isinstance(replay, dict)
    return replay["elsewhere"] == 0 and (row["format"] != "float32" or row["logprobs_equal"] is True)


def main() -> None:
    """Measure, print, and write the figures."""
    args = arguments(__doc__).parse_args()
    rows = []
    for name in MODELS:
        for dtype in FORMATS:
            row = measure(name, dtype)
            rows.append({**row, "met": met(row)})
            print(rows[-1], flush=True)
    record("routing-cpu", {"rows": rows}, args.results)
    sys.exit(not all(row["met"] for row in rows))


if __name__ == "__main__":
    main()
