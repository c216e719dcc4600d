"""The loss on logits gives the numbers of plain jax in float32: values and gradients, each way, however split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec
from lowering import lowered_for_gpu

from podium.algorithms.logits_loss import grpo_loss_of_logits
from podium.kernels.logits import LogitsOptions, logprobs_of_logits
from podium.kernels.tiles import Tiles
from podium.sharding import make_mesh

B, T = 2, 3
SMALL = LogitsOptions(interpret=True, tiles=Tiles(tokens=8, vocab=8))
WAYS = ("tpu", "gpu", "xla")
TERMS = {
    "off policy": {"old": True, "clip_low": 0.1, "clip_high": 0.3},
    "on policy": {},
    "kl": {"old": True, "reference": True, "kl_coef": 0.4},
    "entropy": {"entropy_bonus": 0.3, "entropy": True},
    "temperature": {"old": True, "temperature": 0.7, "entropy_bonus": 0.3, "entropy": True},
}


def arrays(V: int, T: int = T, dtype: str = "float32") -> dict[str, jax.Array]:
    """Random logits and what goes with them; ratios on both sides of the clip, advantages of both signs."""
    random = np.random.default_rng(V)
    logits = jnp.asarray(3 * random.standard_normal((B, T, V)), dtype)
    targets = jnp.asarray(random.integers(0, V, (B, T)), jnp.int32)
    own = plain_logprobs(logits, targets, 1.0)[0]
    near = lambda: own + jnp.asarray(0.4 * random.standard_normal((B, T)), jnp.float32)  # noqa: E731
    return {
        "logits": logits,
        "targets": targets,
        "advantages": jnp.asarray(random.standard_normal((B, T)), jnp.float32),
        "old_logprobs": near(),
        "reference_logprobs": near(),
    }


def plain_logprobs(logits, targets, temperature):
    table = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
    chosen = jnp.take_along_axis(table, targets[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(table) * table, axis=-1)


def plain_loss(given, *, temperature=1.0, clip_low=0.2, clip_high=0.2, kl_coef=0.0, entropy_bonus=0.0):
    """What `grpo_loss_of_logits` should give, as the papers write it."""
    logprobs, entropy = plain_logprobs(given["logits"], given["targets"], temperature)
    ratio = jnp.exp(logprobs - given.get("old_logprobs", jax.lax.stop_gradient(logprobs)))
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    losses = -jnp.minimum(ratio * given["advantages"], bounded * given["advantages"]) - entropy_bonus * entropy
    if "reference_logprobs" in given:
        d = given["reference_logprobs"] - logprobs
        losses += kl_coef * (jnp.exp(d) - d - 1)
    return losses


def both(V: int, terms: dict, options: LogitsOptions, T: int = T, dtype: str = "float32"):
    """(losses, gradient) of ours, and of plain jax in float32, at weights that differ by token."""
    terms = dict(terms)
    chosen = {"old_logprobs": terms.pop("old", False), "reference_logprobs": terms.pop("reference", False)}
    given = {name: x for name, x in arrays(V, T, dtype).items() if chosen.get(name, True)}
    temperature = terms.pop("temperature", 1.0)
    options = options._replace(temperature=temperature, entropy=terms.pop("entropy", False))
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((B, T)), jnp.float32)
    ours = lambda x: grpo_loss_of_logits(**given | {"logits": x}, **terms, options=options).losses  # noqa: E731
    plain = lambda x: plain_loss(given | {"logits": x}, temperature=temperature, **terms)  # noqa: E731

    def with_gradient(losses):
        return jax.jit(lambda x: (losses(x), jax.grad(lambda x: jnp.sum(losses(x) * weights))(x)))(given["logits"])

    return with_gradient(ours), with_gradient(plain)


def assert_close(found, expected, atol=1e-5):
    for name, each, other in zip(("losses", "gradient"), found, expected, strict=True):
        np.testing.assert_allclose(each, other, atol=atol, err_msg=name)


@pytest.mark.parametrize("V", [15, 24])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("terms", TERMS)
def test_losses_and_gradients_are_those_of_plain_jax(terms, way, V):
    assert_close(*both(V, TERMS[terms], SMALL._replace(way=way)))


def test_nothing_outside_of_arrays_is_read():
    strict = SMALL._replace(way="tpu", interpret=pltpu.InterpretParams(out_of_bounds_reads="raise"))
    assert_close(*both(15, TERMS["off policy"], strict))


@pytest.mark.parametrize("way", ["tpu", "gpu"])
def test_tokens_and_vocabulary_need_not_be_whole_tiles(way):
    options = SMALL._replace(way=way, tiles=Tiles(tokens=128, vocab=128))
    assert_close(*both(257, TERMS["off policy"], options, T=133))
    assert_close(*both(300, TERMS["entropy"], options, T=250))  # in less memory with the vocabulary first


@pytest.mark.parametrize("way", ["tpu", "gpu"])
def test_the_gradient_may_take_the_logits_memory(way):
    assert_close(*both(257, TERMS["off policy"], SMALL._replace(way=way, in_place=True, tiles=Tiles(8, 128))))


@pytest.mark.parametrize("way", WAYS)
def test_statistics_of_bfloat16_logits_are_float32(way):
    given = arrays(2048, 16, "bfloat16")
    options = SMALL._replace(way=way, entropy=True, tiles=Tiles(16, 256))
    found = jax.jit(functools.partial(logprobs_of_logits, options=options))(given["logits"], given["targets"])
    for each, other in zip(found, plain_logprobs(given["logits"], given["targets"], 1.0), strict=True):
        assert each.dtype == jnp.float32
        np.testing.assert_allclose(each, other, atol=1e-5)
    (_, gradient), (_, exact) = both(2048, TERMS["off policy"], options, T=16, dtype="bfloat16")
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient, exact, atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("way", WAYS)
def test_forbidden_tokens_have_no_probability_and_no_gradient(way):
    given = arrays(24)
    logits = np.array(given["logits"])
    logits[:, :, 8:20] = -np.inf
    targets = given["targets"] % 8
    options = SMALL._replace(way=way, entropy=True)

    def total(logits):
        logprobs, entropy = logprobs_of_logits(logits, targets, options)
        return jnp.sum(2 * logprobs + entropy)

    gradient = np.asarray(jax.jit(jax.grad(total))(logits))
    kept = np.concatenate([logits[:, :, :8], logits[:, :, 20:]], axis=-1)

    @jax.grad
    def expected(x):
        logprobs, entropy = plain_logprobs(x, targets, 1.0)
        return jnp.sum(2 * logprobs + entropy)

    assert not np.any(gradient[:, :, 8:20])
    np.testing.assert_allclose(
        np.concatenate([gradient[:, :, :8], gradient[:, :, 20:]], axis=-1), jax.jit(expected)(kept), atol=1e-5
    )


@pytest.mark.parametrize(
    ("mesh", "spec"), [("2,1,4", ("dp", None, "tp")), ("1,2,4", ("fsdp", None, ("tp",))), ("1,1,2", (None, None, "tp"))]
)
@pytest.mark.parametrize("way", ["tpu", "xla"])
def test_rows_and_vocabulary_split_over_devices_give_the_same(way, mesh, spec):
    sizes = [int(size) for size in mesh.split(",")]
    sharding = NamedSharding(make_mesh(mesh, jax.devices()[: np.prod(sizes)]), PartitionSpec(*spec))
    terms = TERMS["temperature"]
    assert_close(*both(24, terms, SMALL._replace(way=way, sharding=sharding)))


def test_statistics_that_lie_on_one_device_stay_there():
    """Of a vocabulary split over two devices each has its own top; a target is on one of them."""
    sharding = NamedSharding(make_mesh("1,1,2", jax.devices()[:2]), PartitionSpec(None, None, "tp"))
    logits = jnp.asarray([[[1000.0, 0.0, 0.0, -1000.0], [0.0, 0.0, 0.0, 1000.0]]])
    targets = jnp.asarray([[3, 3]], jnp.int32)
    options = LogitsOptions(sharding=sharding)
    logprobs, _ = jax.jit(functools.partial(logprobs_of_logits, options=options))(logits, targets)
    np.testing.assert_allclose(logprobs, [[-2000.0, 0.0]])


def test_what_cannot_be_is_said():
    given = arrays(15)
    logits, targets, advantages = (given[name] for name in ("logits", "targets", "advantages"))
    sharding = NamedSharding(make_mesh("1,1,2", jax.devices()[:2]), PartitionSpec(None, None, "tp"))
    loss = functools.partial(grpo_loss_of_logits, logits, targets, advantages)
    with pytest.raises(ValueError, match=r"vocabulary of 15 do not divide over 2 devices \(tp\); pad the logits"):
        loss(options=LogitsOptions(sharding=sharding))
    with pytest.raises(ValueError, match=r"temperature 0: expected more than 0"):
        loss(options=LogitsOptions(temperature=0))
    with pytest.raises(ValueError, match=r"kl_coef 0\.1 needs reference_logprobs"):
        loss(kl_coef=0.1)
    with pytest.raises(ValueError, match=r"entropy_bonus 0\.1 needs entropies"):
        loss(entropy_bonus=0.1)
    with pytest.raises(ValueError, match=r"logits \(2, 3, 15\) and targets \(3, 2\): expected \[B, T, V\] and"):
        logprobs_of_logits(logits, targets.T)


def test_the_gpus_kernels_lower_for_a_gpu():
    given = arrays(151, 4, "bfloat16")

    def total(logits):
        options = LogitsOptions(way="gpu", entropy=True)
        return grpo_loss_of_logits(**given | {"logits": logits}, options=options).losses.sum()

    text = lowered_for_gpu(jax.grad(total), given["logits"])
    assert text.count("__gpu$xla.gpu.triton") == 2
