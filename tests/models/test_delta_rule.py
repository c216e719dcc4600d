"""The gated delta rule in chunks and a token at a time, against its recurrence in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import error_of_scale

from podium.models.attention.mask import packed_rows
from podium.models.blocks import delta_rule
from podium.models.blocks.delta_rule import Tokens, next_conv, one_step, short_conv, unit_lower_inverse
from podium.models.blocks.kind import Packed

chunked = functools.partial(delta_rule.chunked, chunk=64)
packed = functools.partial(delta_rule.packed, chunk=64)
B, T, K, R, N, P = 3, 150, 2, 2, 8, 6  # three chunks, the last one not full
NOTHING = np.zeros((B, K, R, N, P), np.float32)


def tokens_of(scale: float = 1.0) -> Tokens:
    """Random inputs, the third row's as the first one's; `scale` is the mean of the logarithms of decays."""
    random = np.random.default_rng(0)
    q, k = (random.normal(size=(2, T, K, N)) for _ in "qk")
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True)) for x in (q, k))
    v, g = random.normal(size=(2, T, K, R, P)), -scale * random.exponential(size=(2, T, K, R))
    beta = 1 / (1 + np.exp(-random.normal(size=(2, T, K, R))))
    return Tokens(*(x[[0, 1, 0]].astype(np.float32) for x in (q, k, v, g, beta)))


def recurrence(tokens, state):
    """Outputs [T, K, R, P] and the last state of one sequence, token after token, by numpy or jax."""
    found = []
    for t in range(len(tokens.k)):
        q, k, v, g, beta = (x[t] for x in tokens)
        state = state * np.exp(1) ** g[..., None, None]
        u = beta[..., None] * (v - (k[:, None, :, None] * state).sum(-2))
        state = state + k[:, None, :, None] * u[:, :, None]
        found.append((q[:, None, :, None] * state).sum(-2))
    return found, state


def of_row(tokens: Tokens, row: int, places=slice(None)) -> Tokens:
    return Tokens(*(np.asarray(x[row][places], np.float64) for x in tokens))


@pytest.mark.parametrize("scale", [0.05, 1.0, 8.0])
def test_chunks_give_what_the_recurrence_gives(scale):
    """Errors relative to the largest output are 2e-7 to 2e-6."""
    tokens = tokens_of(scale)
    found, states = jax.jit(chunked)(tokens, NOTHING)
    for row in range(B):
        expected, last = recurrence(of_row(tokens, row), NOTHING[row].astype(np.float64))
        assert error_of_scale(found[row], np.stack(expected)) <= 1e-5
        assert error_of_scale(states[row], last) <= 1e-5


def test_a_sequence_in_two_parts_and_token_by_token_ends_in_the_same_state():
    tokens = tokens_of()
    whole, last = jax.jit(chunked)(tokens, NOTHING)
    _, states = jax.jit(chunked)(Tokens(*(x[:, :140] for x in tokens)), NOTHING)
    step = jax.jit(one_step)
    for t in range(140, T):
        found, states = step(Tokens(*(x[:, t : t + 1] for x in tokens)), states)
        assert error_of_scale(found[:, 0], whole[:, t]) <= 1e-5
    assert error_of_scale(states, last) <= 1e-5


def test_tokens_without_beta_and_decay_change_no_state():
    tokens = tokens_of()
    real = (np.arange(T) < 70)[None, :, None, None]
    padded = tokens._replace(g=tokens.g * real, beta=tokens.beta * real)
    _, states = jax.jit(chunked)(padded, NOTHING)
    for row in range(B):
        _, last = recurrence(of_row(tokens, row, slice(70)), NOTHING[row].astype(np.float64))
        assert error_of_scale(states[row], last) <= 1e-5


# In the first row a prompt of 70 tokens, which ends in the second chunk, with three completions, of which one begins in
# that chunk, one in the next, and one of a token at the end; in the second a sequence alone, a prompt that ends with a
# chunk, its two completions, another group within a chunk, and padding; in the third a prompt whose first completion
# fills the next chunk, so that its second one begins a chunk later than the prompt's last token.
SEGMENTS = np.array(
    [
        np.repeat([1, 2, 3, 4], [70, 50, 29, 1]),
        np.repeat([1, 2, 3, 4, 5, 6, 7, 0], [20, 44, 30, 20, 8, 10, 10, 8]),
        np.repeat([1, 2, 3], [60, 75, 15]),
    ]
).astype(np.int32)
PROMPTS = np.where((SEGMENTS == 3) | (SEGMENTS == 4), 2, np.where(SEGMENTS == 7, 6, SEGMENTS))
PROMPTS[[0, 2]] = 1
PROMPTS[1] = np.where(SEGMENTS[1] == 6, 5, np.where(SEGMENTS[1] == 7, 5, PROMPTS[1]))
SEQUENCES = [
    (row, np.flatnonzero((SEGMENTS[row] == segment) | (SEGMENTS[row] == prompt)))
    for row in range(B)
    for segment in range(1, SEGMENTS[row].max() + 1)
    for prompt in set(PROMPTS[row][SEGMENTS[row] == segment].tolist())
]


@functools.cache
def rows() -> Packed:
    return packed_rows(jnp.asarray(SEGMENTS), jnp.asarray(PROMPTS))


@pytest.mark.parametrize("scale", [0.05, 8.0])
def test_packed_rows_give_what_each_sequence_alone_gives(scale):
    tokens = tokens_of(scale)
    found = np.asarray(jax.jit(packed)(tokens, rows()))
    for row, places in SEQUENCES:
        expected, _ = recurrence(of_row(tokens, row, places), NOTHING[row].astype(np.float64))
        assert error_of_scale(found[row, places], np.stack(expected)) <= 1e-5
    assert np.isfinite(found).all()


def test_gradients_of_packed_rows_are_those_of_the_recurrence():
    tokens = tokens_of(0.5)
    weighing = np.random.default_rng(3).normal(size=(B, T, K, R, P)).astype(np.float32)
    weighing[1, -8:] = 0  # padding
    gradients = jax.jit(jax.grad(lambda tokens, rows: (packed(tokens, rows) * weighing).sum()))(tokens, rows())
    exact, before = functools.partial(jnp.einsum, precision="highest"), rows().previous

    def add(behind, xs):
        """The state behind a token is that of its predecessor, and what the token adds."""
        t, previous, weighed, q, k, v, g, beta = xs
        state = behind[previous] * jnp.exp(g)[..., None, None]
        u = beta[..., None] * (v - exact("kn,krnp->krp", k, state))
        state = state + k[:, None, :, None] * u[:, :, None]
        return behind.at[t].set(state), jnp.sum(exact("kn,krnp->krp", q, state) * weighed)

    def of_row(previous, weighed, *tokens):
        nothing = jnp.zeros((T + 1, K, R, N, P))
        return jax.lax.scan(add, nothing, (jnp.arange(T), previous, weighed, *tokens))[1].sum()

    total = jax.grad(lambda tokens: jax.vmap(of_row)(before, weighing, *tokens).sum())
    for name, found, wanted in zip(Tokens._fields, gradients, jax.jit(total)(tokens), strict=True):
        assert error_of_scale(np.asarray(found), np.asarray(wanted)) <= 3e-5, name


def test_the_inverse_is_exact_where_all_keys_are_equal():
    """The worst case for products of powers, whose terms grow to 1e18."""
    lower = np.tril(np.ones((64, 64), np.float32), -1)
    found = np.asarray(jax.jit(unit_lower_inverse)(np.stack([lower, lower / 3])[None]))[0]
    expected = np.linalg.inv(np.eye(64) + np.stack([lower, lower / 3]).astype(np.float64))
    assert error_of_scale(found, expected) <= 1e-6


def test_the_convolution_follows_each_sequence_past_other_completions():
    random = np.random.default_rng(1)
    x, taps = random.normal(size=(B, T, 3, 2)).astype(np.float32), random.normal(size=(4, 3, 2)).astype(np.float32)
    found = np.asarray(jax.jit(short_conv)(x, taps, rows().previous))
    for row, places in SEQUENCES:
        before = np.concatenate([np.zeros((3, 3, 2)), x[row, places]])
        total = sum(before[j : j + len(places)] * taps[j] for j in range(4))
        np.testing.assert_allclose(found[row, places], total / (1 + np.exp(-total)), rtol=1e-5, atol=1e-5)


def test_the_convolution_goes_on_where_it_stopped():
    """In chunks of which only some tokens are real, and token by token; a row without new tokens keeps its tail."""
    random = np.random.default_rng(1)
    x, taps = random.normal(size=(B, T, 3, 2)).astype(np.float32), random.normal(size=(4, 3, 2)).astype(np.float32)
    alone = packed_rows(jnp.ones((B, T), jnp.int32), jnp.ones((B, T), jnp.int32))
    whole = np.asarray(jax.jit(short_conv)(x, taps, alone.previous))
    advance = jax.jit(next_conv)
    done, tail = np.zeros(B, int), np.zeros((B, 3, 3, 2), np.float32)
    for counts, length in (([5, 2, 6], 6), ([1, 0, 1], 1), ([0, 6, 3], 6), ([1, 1, 0], 1), ([2, 0, 4], 6)):
        chunk = np.stack([x[row, done[row] : done[row] + length] for row in range(B)])
        found, tail = jax.device_get(advance(chunk, taps, tail, np.asarray(counts)))
        for row in range(B):
            expected = whole[row, done[row] : done[row] + counts[row]]
            np.testing.assert_allclose(found[row, : counts[row]], expected, rtol=1e-5, atol=1e-6)
        done += counts
