import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import rules_on

from podium import sharding
from podium.config.head import fast_memory, head_chunks, head_kind, head_tile
from podium.models.blocks.weights import Weight
from podium.models.logprobs import HeadSettings, Taught, logits_at, token_logprobs
from podium.models.params import GATHERED_AXES, TRAIN_AXES
from podium.sharding import ShardingRules

B, T, D, V = 4, 10, 16, 24
TOLERANCE = 1e-4  # logits are up to 22: the entropy is a difference of two such numbers


def inputs(seed: int = 0):
    random = np.random.default_rng(seed)
    hidden, head = random.standard_normal((B, T, D)), random.standard_normal((V, D))
    return hidden.astype(np.float32), head.astype(np.float32), random.integers(0, V, (B, T)).astype(np.int32)


def naive(hidden, head, targets, temperature=1.0):
    """Log-probabilities and entropies [B, T] by one softmax over everything, in float64."""
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T / temperature
    table = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return np.take_along_axis(table, targets[..., None], -1)[..., 0], -np.sum(np.exp(table) * table, axis=-1)


def computing(mesh: str = "dp:1", devices: int = 1) -> ShardingRules:
    return ShardingRules(rules_on(mesh, devices).mesh, GATHERED_AXES)


def scored(hidden, head, targets, *, temperature=1.0, chunk=1024, rules=None, kind="chunked"):
    rules = rules or computing()
    settings = HeadSettings(temperature=temperature, chunk=chunk, rules=rules, kind=kind)
    return jax.jit(lambda *arrays: token_logprobs(*arrays, settings))(hidden, head, targets)


@pytest.mark.parametrize("kind", ["chunked", "fused"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_and_entropy_are_those_of_the_full_softmax(temperature, kind):
    found = scored(*inputs(), temperature=temperature, kind=kind)
    logprobs, entropy = naive(*inputs(), temperature)
    np.testing.assert_allclose(found.logprobs, logprobs, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found.entropy, entropy, rtol=0, atol=TOLERANCE)


def test_a_uniform_distribution_has_the_entropy_of_its_size():
    hidden, head, targets = inputs()
    found = scored(0 * hidden, head, targets)
    np.testing.assert_allclose(found.logprobs, -np.log(V), rtol=1e-6)
    np.testing.assert_allclose(found.entropy, np.log(V), rtol=1e-6)


def test_a_certain_distribution_has_no_entropy_and_no_nan():
    hidden, head = np.ones((1, 1, 1), np.float32), np.array([[1e4], [0.0]], np.float32)
    found = scored(hidden, head, np.zeros((1, 1), np.int32))
    assert (float(found.logprobs[0, 0]), float(found.entropy[0, 0])) == (0.0, 0.0)


def many_inputs(width=16, vocab=600):
    """Tokens and a vocabulary of more than one tile of the kernels, neither a whole number of them."""
    random = np.random.default_rng(1)
    hidden, head = random.standard_normal((3, 130, width)), random.standard_normal((vocab, width)) / 2
    targets = random.integers(0, vocab, (3, 130))
    return hidden.astype(np.float32), head.astype(np.float32), targets.astype(np.int32)


def loss_and_gradients(hidden, head, targets, *, wide, **settings):
    """Of a loss that wants all of both gradients; wide: the head's in float32, as of a head in narrower numbers."""

    def loss(hidden, head):
        how = HeadSettings(temperature=0.9, rules=computing(), **settings)
        found = token_logprobs(hidden, head, targets, how)
        return jnp.sum(jnp.sin(found.logprobs)) + jnp.sum(jnp.cos(found.entropy))

    weight = Weight(head, jnp.zeros(head.shape, jnp.float32)) if wide else head
    total, (of_hidden, of_head) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, weight)
    return total, (of_hidden, of_head.sums if wide else of_head)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("chunk", [64, 1024])  # several of 128 tokens, the last one padded; one of all
def test_a_fused_head_has_the_values_and_gradients_of_chunks(chunk, wide):
    chunked, fused = (
        loss_and_gradients(*many_inputs(), wide=wide, chunk=chunk, kind=kind) for kind in ("chunked", "fused")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), chunked, fused)


def test_a_fused_heads_gradient_of_narrow_numbers_is_summed_in_float32():
    hidden, head, targets = (jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else x for x in many_inputs())
    _, exact = loss_and_gradients(*many_inputs(), wide=True, chunk=1024, kind="fused")
    _, found = loss_and_gradients(hidden, head, targets, wide=True, chunk=32, kind="fused")
    assert [x.dtype for x in found] == [jnp.bfloat16, jnp.float32]
    for a, b in zip(exact, found, strict=True):
        assert np.linalg.norm(np.asarray(b, np.float32) - a) / np.linalg.norm(a) < 0.01


def test_a_logit_that_is_no_number_is_not_hidden_by_the_fused_head():
    hidden, head, targets = inputs()
    hidden[1, 3, 0] = np.nan
    found = np.asarray(scored(hidden, head, targets, kind="fused").logprobs)
    assert np.argwhere(np.isnan(found)).tolist() == [[1, 3]]


@pytest.mark.parametrize(
    ("choice", "platform", "vocab_parts", "kind"),
    [
        ("auto", "tpu", 1, "fused"),
        ("auto", "tpu", 2, "chunked"),
        ("auto", "gpu", 1, "chunked"),
        ("auto", "cpu", 1, "chunked"),
        ("chunked", "tpu", 1, "chunked"),
        ("fused", "tpu", 1, "fused"),
    ],
)
def test_the_head_is_fused_where_a_kernel_can_make_it(choice, platform, vocab_parts, kind):
    assert head_kind(choice, platform, vocab_parts) == kind


@pytest.mark.parametrize(
    ("count", "width", "device", "tile"),
    [
        (8192, 4096, "TPU v6 lite", (1024, 256)),
        (8192, 4096, "TPU v4", (512, 256)),
        (1056, 576, "TPU v6 lite", (512, 512)),  # 1,024 would pad to 2,048
        (40, 4096, "v5e", (128, 512)),
        (8192, 32768, "v4", (128, 128)),
    ],
)
def test_tiles_fit_fast_memory_and_pad_little(count, width, device, tile):
    assert head_tile(count, 151936, width, 2, fast_memory(device)) == tile


@pytest.mark.parametrize(
    ("count", "chunk", "tile", "chunks"),
    [(8192, 2048, 1024, (4, 2048)), (1056, 2048, 512, (1, 1536)), (40, 2048, 128, (1, 128)), (500, 1, 128, (4, 128))],
)
def test_chunks_are_whole_tiles_and_hold_all_tokens(count, chunk, tile, chunks):
    found = head_chunks(count, chunk, tile)
    assert found == chunks
    assert found[0] * found[1] >= count


@pytest.mark.parametrize(("platform", "vocab_parts", "said"), [("cpu", 1, "devices are cpu"), ("tpu", 2, "splits it")])
def test_a_fused_head_that_cannot_be_is_an_error(platform, vocab_parts, said):
    with pytest.raises(ValueError, match=f"train.head: fused.*{said}.*chunked"):
        head_kind("fused", platform, vocab_parts)


@pytest.mark.parametrize("chunk", [1, 4, 12, 28, 40, 1024])  # of 4 rows: 1, 1, 3, 7, 10 and 10 columns at once
def test_chunks_change_neither_values_nor_gradients(chunk):
    hidden, head, targets = inputs()

    def loss(hidden, head, chunk):
        found = token_logprobs(hidden, head, targets, HeadSettings(temperature=0.9, chunk=chunk, rules=computing()))
        return jnp.sum(jnp.sin(found.logprobs)) + jnp.sum(jnp.cos(found.entropy))

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
    whole, chunked = gradient(hidden, head, B * T), gradient(hidden, head, chunk)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), whole, chunked)


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [("1,8,1", "chunked"), ("2,2,2", "chunked"), ("4,1,2", "chunked"), ("2,4,1", "fused"), ("fsdp:2,sp:2", "fused")],
)
@pytest.mark.parametrize("chunk", [3, 1024])
def test_logprobs_are_the_same_where_rows_and_vocabulary_are_split(mesh, kind, chunk):
    hidden, head, targets = (np.concatenate([x, x]) if x.shape[0] == B else x for x in inputs())
    rules = computing(mesh, 4 if "sp" in mesh else 8)
    placed = (
        jax.device_put(hidden, rules.sharding("batch", None, None)),
        jax.device_put(head, rules.sharding("vocab", None)),
        jax.device_put(targets, rules.sharding("batch", None)),
    )
    found = scored(*placed, chunk=chunk, rules=rules, kind=kind)
    logprobs, entropy = naive(hidden, head, targets)
    np.testing.assert_allclose(found.logprobs, logprobs, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found.entropy, entropy, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("at_once", "cubes"), [(4, ()), (8, ()), (8, ("cpu",))])
def test_the_heads_gradient_is_that_of_one_device(at_once, cubes, monkeypatch):
    """Summed over 8 devices, in two exchanges one after the other or in one, by the collective or after it."""
    monkeypatch.setattr(sharding, "MOST_AT_ONCE", at_once)
    monkeypatch.setattr(sharding, "CUBES", cubes)
    hidden, head, targets = (np.concatenate([x, x]) if x.shape[0] == B else x for x in inputs())

    def gradient(rules):
        def loss(head):
            settings = HeadSettings(temperature=0.9, chunk=1024, rules=rules)
            return jnp.sum(token_logprobs(hidden, head, targets, settings).logprobs)

        return jax.jit(jax.grad(loss))(jax.device_put(head, rules.storage.sharding("vocab", "width")))

    split = ShardingRules(rules_on("fsdp:8", 8).mesh, GATHERED_AXES, stored=TRAIN_AXES)
    np.testing.assert_allclose(gradient(split), gradient(computing()), rtol=1e-5, atol=1e-5)


def test_no_array_of_all_logits_exists_in_forward_and_backward():
    """B x T x V floats would be 4 MB here; one chunk is 64 kB."""
    rows, columns, vocab = 8, 128, 1024
    hidden, head = jnp.zeros((rows, columns, D)), jnp.zeros((vocab, D))
    targets = jnp.zeros((rows, columns), jnp.int32)

    def loss(hidden, head):
        settings = HeadSettings(temperature=1.0, chunk=16, rules=computing())
        return jnp.sum(token_logprobs(hidden, head, targets, settings).logprobs)

    memory = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head).compile().memory_analysis()
    assert memory.temp_size_in_bytes < rows * columns * vocab * 4 / 4


def test_logits_are_float32_whatever_the_model_computes_in():
    hidden, head, _ = inputs()
    low = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    logits = logits_at(*low, 2.0)
    assert logits.dtype == jnp.float32
    exact = np.asarray(low[0], np.float64) @ np.asarray(low[1], np.float64).T / 2
    np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-5)


def relative(found, expected) -> float:
    """Norm of the difference over that of the expected array."""
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))


def naive_divergence(hidden, head, others, other_head, slopes, reverse, temperature):
    """The divergence [B, T] and the gradients of its sum times `slopes` for hidden states and head, in float64.

    By the whole [B, T, V]: with l = log p - log q, d KL(p||q) / d logit = p (l - KL), d KL(q||p) / d logit = p - q.
    """
    hidden, head, others, other_head = (x.astype(np.float64) for x in (hidden, head, others, other_head))
    p, q = (np.exp(x @ w.T / temperature) for x, w in ((hidden, head), (others, other_head)))
    p, q = (x / x.sum(axis=-1, keepdims=True) for x in (p, q))
    log = np.log(p / q)
    to_teacher, from_teacher = np.sum(p * log, axis=-1), np.sum(-q * log, axis=-1)
    of_logits = reverse * p * (log - to_teacher[..., None]) + (1 - reverse) * (p - q)
    of_logits *= slopes[..., None] / temperature
    value = reverse * to_teacher + (1 - reverse) * from_teacher
    return value, of_logits @ head, np.einsum("btv,btd->vd", of_logits, hidden)


@pytest.mark.parametrize(
    ("reverse", "chunk", "mesh", "devices", "remat"),
    [
        (1.0, 1024, "dp:1", 1, True),
        (1.0, 4, "dp:1", 1, True),
        (0.0, 12, "dp:1", 1, True),
        (0.3, 12, "dp:1", 1, False),
        (0.3, 6, "dp:2,fsdp:2", 4, True),
        (1.0, 6, "fsdp:2,tp:2", 4, True),
    ],
)
def test_the_divergence_to_a_teacher_is_the_dense_formula_whatever_the_chunk(reverse, chunk, mesh, devices, remat):
    """The teacher is narrower; the last chunk is shorter where 3 positions do not divide 10."""
    random = np.random.default_rng(3)
    hidden, head, targets = (0.5 * inputs()[0], inputs()[1], inputs()[2])
    others, other_head = (random.standard_normal(s).astype(np.float32) for s in ((B, T, D // 2), (V, D // 2)))
    slopes = random.uniform(0.5, 1.5, (B, T)).astype(np.float32)
    rules = computing(mesh, devices)

    def total(hidden, head):
        settings = HeadSettings(temperature=0.7, chunk=chunk, rules=rules, remat=remat, reverse=reverse)
        taught = Taught(jnp.asarray(others), jnp.asarray(other_head))
        found = token_logprobs(hidden, head, targets, settings, taught)
        return jnp.sum(found.divergence * slopes), found.divergence

    (_, found), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(hidden, head)
    value, of_hidden, of_head = naive_divergence(hidden, head, others, other_head, slopes, reverse, 0.7)
    assert relative(found, value) < 1e-6
    assert relative(gradients[0], of_hidden) < 1e-6
    assert relative(gradients[1], of_head) < 1e-6


def test_equal_logits_have_a_divergence_and_a_gradient_of_exactly_0():
    hidden, head, targets = inputs()

    def total(hidden):
        taught = Taught(jax.lax.stop_gradient(hidden), jnp.asarray(head))
        settings = HeadSettings(temperature=0.7, chunk=12, rules=computing(), reverse=0.4)
        found = token_logprobs(hidden, head, targets, settings, taught)
        return jnp.sum(found.divergence), found.divergence

    (_, found), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(hidden)
    assert not np.asarray(found).any()
    assert not np.asarray(gradient).any()
