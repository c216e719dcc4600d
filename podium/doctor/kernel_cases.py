"""Podium's kernels with arguments, each with the same computation by XLA; for `podium doctor` and for tests.

`podium doctor` runs them on its device; tests emulate them on a CPU, in the smallest shapes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from podium.accelerators import Kernels
from podium.config.head import fast_memory
from podium.kernels import gpu_decode
from podium.kernels.gpu_attention import gpu_attention, options_for
from podium.kernels.grouped import Form, grouped_product
from podium.kernels.logits import LogitsOptions, Way, logprobs_of_logits
from podium.kernels.tpu_attention import tpu_attention
from podium.kernels.tpu_delta import delta_step
from podium.kernels.tpu_head import HeadOptions, tpu_head
from podium.models.attention.blockwise import blockwise_attention
from podium.models.attention.mask import Visibility
from podium.models.attention.mask import packed_rows as sequences_of
from podium.models.attention.packed_attention import causal_attention
from podium.models.blocks.delta import CHUNK
from podium.models.blocks.delta_rule import Tokens, one_step, packed, unit
from podium.models.blocks.kind import DeltaToken, Packed
from podium.models.packed_delta_rule import by_kernel

BARS: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 1e-2}
"""Largest error that a kernel may have, as a share of the largest value. On an H100, 3e-6 and 4e-3 were measured."""
COMPLETIONS = 4  # of each prompt in a packed row
SCALE = 0.7  # of the logits: one over the temperature
STATE = 128  # rows and columns of a delta net's state
Arrays = Sequence[jax.Array]
Program = Callable[..., Arrays]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Shape of attention over packed rows."""

    rows: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
    """Shape of a decode step's attention: rows with one new token each, over pages of a cache."""

    rows: int
    heads: int
    kv_heads: int
    page_tokens: int
    head_dim: int
    pages: int  # of each row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped:
    """Shape of the products of a mixture of experts: rows sorted by expert, each with its expert's matrix."""

    rows: int  # of all experts
    experts: int
    width: int  # of a row
    expert_width: int  # of its product


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelShapes:
    """The shapes of the kernels' cases."""

    rows: tuple[Rows, ...]
    pages: tuple[Pages, ...]
    grouped: Grouped
    logits: tuple[int, int]  # tokens, vocabulary
    head: tuple[int, int]  # vocabulary, width
    states: int  # of a decode step of delta nets
    interpret: bool = False  # emulate the kernels of accelerators on a CPU


EMULATED = KernelShapes(
    rows=(Rows(rows=1, tokens=64, heads=2, kv_heads=1, head_dim=16),),
    pages=(Pages(rows=2, heads=2, kv_heads=1, page_tokens=16, head_dim=16, pages=2),),
    grouped=Grouped(rows=40, experts=3, width=24, expert_width=40),
    logits=(8, 300),
    head=(512, 128),
    states=2,
    interpret=True,
)
"""Shapes for tests."""
QUICK = KernelShapes(
    rows=(Rows(rows=4, tokens=1024, heads=16, kv_heads=2, head_dim=128),),
    pages=(Pages(rows=64, heads=16, kv_heads=2, page_tokens=64, head_dim=128, pages=16),),
    grouped=Grouped(rows=16_384, experts=16, width=2048, expert_width=768),
    logits=(2048, 151_936),
    head=(49_152, 576),
    states=64,
)
THOROUGH = dataclasses.replace(
    QUICK,
    rows=(
        Rows(rows=4, tokens=1024, heads=9, kv_heads=3, head_dim=64),
        Rows(rows=4, tokens=1536, heads=16, kv_heads=2, head_dim=128),
        Rows(rows=4, tokens=1536, heads=8, kv_heads=1, head_dim=256),
        Rows(rows=16, tokens=1024, heads=9, kv_heads=3, head_dim=64),
    ),
    pages=(
        Pages(rows=64, heads=16, kv_heads=2, page_tokens=16, head_dim=128, pages=64),
        Pages(rows=64, heads=16, kv_heads=2, page_tokens=32, head_dim=128, pages=32),
        Pages(rows=64, heads=16, kv_heads=2, page_tokens=64, head_dim=128, pages=16),
        Pages(rows=512, heads=9, kv_heads=3, page_tokens=64, head_dim=64, pages=8),
        Pages(rows=64, heads=32, kv_heads=8, page_tokens=64, head_dim=128, pages=16),
    ),
    states=512,
)
"""The shapes that an H100 was measured with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel with arguments; `kernel`, `xla` and `exact` compute the same results."""

    name: str
    dtype: str
    kernel: Program
    xla: Program
    """The same computation by XLA, used on devices without the kernel; the kernel's time is compared with its time."""
    exact: Program
    """What the kernel should compute; gets the arguments in float32."""
    given: Arrays
    in_place: tuple[int, ...] = ()
    """Positions of the arguments that are replaced in place; their new values are the last of the results."""
    moved: int = 0
    """Bytes that the kernel must read; 0 if it is bound by computation."""

    def arguments(self) -> list[jax.Array]:
        """The arguments, with copies of those that are replaced in place."""
        return [x.copy() if i in self.in_place else x for i, x in enumerate(self.given)]


def error_of(case: Case) -> float:
    """Run a kernel; returns its largest difference from `exact`, as a share of the largest value."""
    wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in case.given]
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(case.exact)(*wide)
    found = jax.jit(case.kernel, donate_argnums=case.in_place)(*case.arguments())
    return max(_error(*pair) for pair in zip(found, expected, strict=True))


def _error(found: jax.Array, expected: jax.Array) -> float:
    return float(jnp.max(jnp.abs(found.astype(jnp.float32) - expected)) / jnp.max(jnp.abs(expected)))


def packed_rows(B: int, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Segments, prompts and positions [B, T] of rows of prompts with their completions, all of random lengths."""
    random = np.random.default_rng(0)
    segments, prompts, positions = (np.zeros((B, T), np.int32) for _ in range(3))
    for b in range(B):
        at = number = 0
        while at < T - 8:
            prompt, behind = number + 1, 0
            for each in range(1 + COMPLETIONS):
                number, length = number + 1, int(random.integers(T // 16, T // (8 if each == 0 else 4)))
                length = min(length, T - at)
                segments[b, at : at + length], prompts[b, at : at + length] = number, prompt
                positions[b, at : at + length] = behind + np.arange(length)
                at, behind = at + length, length if each == 0 else behind
    return segments, prompts, positions


def with_gradients(function: Callable[..., jax.Array]) -> Program:
    """The program of a function's value and its gradients; its last argument is the gradient of the value."""

    def program(*given: jax.Array) -> Arrays:
        *arguments, gradient = given
        value, pull = jax.vjp(function, *arguments)
        return [value, *pull(gradient)]

    return program


def row_attention(shapes: KernelShapes, device: str) -> Iterator[Case]:
    """Cases of attention over packed rows, forward and backward."""
    for shape in shapes.rows:
        yield from (_rows_case(shape, dtype, shapes.interpret) for dtype in ("float32", "bfloat16"))


def _rows_case(shape: Rows, dtype: str, interpret: bool) -> Case:
    B, T = shape.rows, shape.tokens
    segments, prompts, positions = map(jnp.asarray, packed_rows(B, T))
    visibility = Visibility(segments, prompts, positions)
    live = (segments > 0)[:, :, None, None]
    random = np.random.default_rng(0)
    sizes = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    given = [jnp.asarray(random.standard_normal((B, T, heads, shape.head_dim)), dtype) for heads in sizes]
    given[3] = given[3] * live.astype(dtype)

    def kernel(*qkv: jax.Array) -> jax.Array:
        if jax.default_backend() == "tpu":
            return tpu_attention(*qkv, visibility, None, interpret)
        options = options_for(qkv[0], jax.devices()[0])._replace(interpret=interpret)
        return gpu_attention(*qkv, visibility, None, options)

    def run(attend: Callable[..., jax.Array]) -> Program:
        return with_gradients(lambda *qkv: attend(*qkv) * live.astype(qkv[0].dtype))

    return Case(
        name=f"attention over rows {B}x{T}, heads {shape.heads}/{shape.kv_heads}x{shape.head_dim},",
        dtype=dtype,
        kernel=run(kernel),
        xla=run(lambda q, k, v: blockwise_attention(q, k, v, visibility)),
        exact=run(lambda q, k, v: causal_attention(q, k, v, visibility.mask())),
        given=given,
    )


def page_attention(shapes: KernelShapes, device: str) -> Iterator[Case]:
    """Cases of attention of one new token per row over the pages of its sequence."""
    for shape in shapes.pages:
        yield from (_pages_case(shape, dtype, shapes.interpret) for dtype in ("float32", "bfloat16"))


def _pages_case(shape: Pages, dtype: str, interpret: bool) -> Case:
    R, P = shape.rows, shape.page_tokens
    C = shape.pages
    parts = jax.random.split(jax.random.key(0), 5)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    new = [jax.random.normal(parts[i], (R, n, shape.head_dim)).astype(dtype) for i, n in enumerate(heads)]
    cache = (2, R * C, shape.kv_heads, P, shape.head_dim)  # two layers
    pages = [jax.random.normal(part, cache).astype(dtype) for part in parts[3:]]
    random = np.random.default_rng(0)
    tables = jnp.asarray(random.permutation(R * C).reshape(R, C), jnp.int32)
    lengths = jnp.asarray(random.integers(C * P // 2, C * P + 1, R), jnp.int32).at[0].set(0)

    def kernel(*given: jax.Array) -> Arrays:
        token, cached = gpu_decode.Token(*given[:3]), gpu_decode.Pages(*given[3:])
        return gpu_decode.paged_attention(token, cached, window=None, sinks=None, interpret=interpret)

    return Case(
        name=f"attention over pages {R}x{C}x{P}, heads {shape.heads}/{shape.kv_heads}x{shape.head_dim},",
        dtype=dtype,
        kernel=kernel,
        xla=_gathered,
        exact=_gathered,
        given=(*new, *pages, jnp.int32(1), tables, lengths),
        in_place=(3, 4),
        moved=2 * int(lengths.sum()) * pages[0].nbytes // (2 * R * C * P),
    )


def _gathered(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    tables: jax.Array,
    lengths: jax.Array,
) -> Arrays:
    """`page_attention` without a kernel: new tokens are written to their pages, and these are gathered."""
    R, H, Q = q.shape
    N, K, P = keys.shape[1:4]
    last = jnp.maximum(lengths - 1, 0)
    page = jnp.where(lengths > 0, tables[jnp.arange(R), last // P], N)  # N: none
    own = [x.at[layer, page, :, last % P].set(new, mode="drop") for x, new in ((keys, k), (values, v))]
    rows = [x[layer][tables].swapaxes(1, 2).reshape(R, K, -1, Q).astype(jnp.float32) for x in own]
    scores = jnp.einsum("rkgq,rktq->rkgt", q.reshape(R, K, H // K, Q).astype(jnp.float32), rows[0]) * Q**-0.5
    seen = jnp.arange(rows[0].shape[2])[None, None, None] < lengths[:, None, None, None]
    shares = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1) * (lengths > 0)[:, None, None, None]
    return [jnp.einsum("rkgt,rktq->rkgq", shares, rows[1]).reshape(R, H, Q), *own]


def grouped_products(shapes: KernelShapes, device: str) -> Iterator[Case]:
    """Cases of rows sorted by expert, multiplied with their expert's matrix, and the gradients of both."""
    shape, random = shapes.grouped, np.random.default_rng(0)
    counts = random.multinomial(shape.rows, random.dirichlet(np.ones(shape.experts)))  # experts differ in popularity
    here = "tpu" if jax.default_backend() == "tpu" else "gpu"
    rows = random.standard_normal((shape.rows, shape.width))
    experts = random.standard_normal((shape.experts, shape.width, shape.expert_width))
    gradient = random.standard_normal((shape.rows, shape.expert_width))

    def run(kernels: Kernels, *, interpret: bool = False) -> Program:
        def forward_and_backward(x: jax.Array, w: jax.Array, dy: jax.Array, counts: jax.Array) -> Arrays:
            form = Form(kernels, x.dtype, "own", interpret)
            y, pull = jax.vjp(lambda x, w: grouped_product(form, x, w, (), counts), x, w)
            return [y, *pull(dy)]

        return forward_and_backward

    for dtype in ("float32", "bfloat16"):
        yield Case(
            name=f"products of {shape.rows} rows with {shape.experts} experts {shape.width}x{shape.expert_width},",
            dtype=dtype,
            kernel=run(here, interpret=shapes.interpret),
            xla=run("none"),
            exact=run("none"),
            given=(*(jnp.asarray(each, dtype) for each in (rows, experts, gradient)), jnp.asarray(counts, jnp.int32)),
        )


def logits_statistics(shapes: KernelShapes, device: str) -> Iterator[Case]:
    """Cases of log-probabilities of given tokens from one pass over the logits, and their gradient."""
    T, V = shapes.logits
    way: Way = "tpu" if jax.default_backend() == "tpu" else "gpu"
    targets = jax.random.randint(jax.random.key(1), (1, T), 0, V)
    for dtype in ("float32", "bfloat16"):
        logits = (3 * jax.random.normal(jax.random.key(0), (1, T, V))).astype(dtype)
        options = LogitsOptions(temperature=1 / SCALE, way=way, interpret=shapes.interpret)
        yield Case(
            name=f"log-probabilities of {T}x{V} logits,",
            dtype=dtype,
            kernel=functools.partial(_logprobs, options),
            xla=functools.partial(_logprobs, options._replace(way="xla", interpret=False)),
            exact=_plain_logprobs,
            given=(logits, targets),
            moved=3 * logits.nbytes,
        )


def _logprobs(options: LogitsOptions, logits: jax.Array, targets: jax.Array) -> Arrays:
    found, pull = jax.vjp(lambda x: logprobs_of_logits(x, targets, options)[0], logits)
    return [found, *pull(jnp.ones_like(found))]


def _plain_logprobs(logits: jax.Array, targets: jax.Array) -> Arrays:
    def logprobs(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jax.nn.log_softmax(SCALE * x), targets[..., None], axis=-1)[..., 0]

    found, pull = jax.vjp(logprobs, logits)
    return [found, *pull(jnp.ones_like(found))]


def fused_head(shapes: KernelShapes, device: str) -> Iterator[Case]:
    """Cases of log-probabilities and entropies from hidden states and head."""
    T, (V, D) = shapes.logits[0], shapes.head
    parts = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(parts[0], (1, T, D)).astype(jnp.bfloat16)
    head = (3 * D**-0.5 * jax.random.normal(parts[1], (V, D))).astype(jnp.bfloat16)
    targets = jax.random.randint(parts[2], (1, T), 0, V)
    options = HeadOptions(scale=SCALE, chunk=T, memory=fast_memory(device), precision=None, interpret=shapes.interpret)
    yield Case(
        name=f"head of {T} tokens, {V}x{D},",
        dtype="bfloat16",
        kernel=lambda hidden, head, targets: tpu_head(hidden, head, None, targets, options),
        xla=_plain_head,
        exact=_plain_head,
        given=(hidden, head, targets),
    )


def _plain_head(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> Arrays:
    logits = SCALE * jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32)
    table = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(table, targets[..., None], axis=-1)[..., 0]
    return [chosen, -jnp.sum(jnp.exp(table) * table, axis=-1)]


def delta_nets(shapes: KernelShapes, device: str) -> Iterator[Case]:
    """Cases of a decode step of delta nets, whose states are updated in place in the cache."""
    R, N = shapes.states, STATE
    K, V = 2, 4
    random = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (array(R, K, N), array(R, K, N)))
    cells, live = jnp.asarray(random.permutation(R), jnp.int32), jnp.ones(R, bool)
    decay, beta = jax.nn.sigmoid(array(R, V)), jax.nn.sigmoid(array(R, V))
    states = array(1, R, V, N, N)

    def kernel(states: jax.Array, layer: jax.Array, cells: jax.Array, live: jax.Array, *token: jax.Array) -> Arrays:
        states, y = delta_step(states, layer, cells, live, DeltaToken(*token), interpret=shapes.interpret)
        return [y, states]

    def plain(states: jax.Array, layer: jax.Array, cells: jax.Array, live: jax.Array, *token: jax.Array) -> Arrays:
        return _plain_delta(states, layer, cells, live, DeltaToken(*token))

    yield Case(
        name=f"delta step of {R} states {V}x{N}x{N},",
        dtype="float32",
        kernel=kernel,
        xla=plain,
        exact=plain,
        given=(states, jnp.int32(0), cells, live, q, k, array(R, V, N), decay, beta),
        in_place=(0,),
        moved=2 * states.nbytes,
    )


def _plain_delta(states: jax.Array, layer: jax.Array, cells: jax.Array, live: jax.Array, token: DeltaToken) -> Arrays:
    q, k, v, decay, beta = token
    (R, V, P), K = v.shape, k.shape[1]
    own = states[layer, cells].reshape(R, K, V // K, *states.shape[3:])
    values, decays, strengths = (x.reshape(R, 1, K, V // K, *x.shape[2:]) for x in (v, jnp.log(decay), beta))
    y, own = one_step(Tokens(q[:, None], k[:, None], values, decays, strengths), own)
    return [y.reshape(R, V, P), states.at[layer, cells].set(own.reshape(R, V, *states.shape[3:]))]


def delta_rows(shapes: KernelShapes, device: str) -> Iterator[Case]:
    """Cases of the delta rule over packed rows, forward and backward."""
    B, T = shapes.rows[0].rows, shapes.rows[0].tokens
    K, V, N = 1, 2, STATE
    segments, prompts, _ = map(jnp.asarray, packed_rows(B, T))
    rows = sequences_of(segments, prompts)
    live = (segments > 0)[:, :, None, None]
    parts = jax.random.split(jax.random.key(0), 6)
    q, k, v, d = (jax.random.normal(parts[i], (B, T, heads, N)) for i, heads in enumerate((K, K, V, V)))
    g, beta = -jax.random.exponential(parts[4], (B, T, V)), jax.random.uniform(parts[5], (B, T, V))

    def run(rule: Callable[..., jax.Array]) -> Program:
        return with_gradients(lambda *given: rule(*given, rows) * live)

    yield Case(
        name=f"delta rows {B}x{T}, heads {V}/{K}x{N},",
        dtype="float32",
        kernel=run(functools.partial(by_kernel, interpret=shapes.interpret)),
        xla=run(_plain_rows),
        exact=run(_plain_rows),
        given=(q, k, v, g, beta, d * live),
    )


def _plain_rows(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, rows: Packed, /) -> jax.Array:
    K, V = q.shape[2], v.shape[2]
    values, decays, strengths = (x.reshape(*x.shape[:2], K, V // K, *x.shape[3:]) for x in (v, g, beta))
    tokens = Tokens(unit(q) * q.shape[-1] ** -0.5, unit(k), values, decays, strengths)
    return packed(tokens, rows, CHUNK).reshape(v.shape)


CASES: Mapping[str, Sequence[Callable[[KernelShapes, str], Iterator[Case]]]] = {
    "gpu": (row_attention, page_attention, grouped_products, logits_statistics),
    "tpu": (row_attention, grouped_products, logits_statistics, fused_head, delta_nets, delta_rows),
}
"""The kernels of each kind."""
