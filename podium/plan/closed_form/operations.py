"""Operations of the programs that compute a batch, on a device, as the closed form counts them. No jax."""

from collections.abc import Mapping

from podium.config.attention_blocks import attended_pairs
from podium.plan.request.phase_sizes import F32, RunSizes, fused_padding

# Products of queries with keys (or their gradients): forward, recomputed, and backward; kernels compute scores twice.
PRODUCTS: Mapping[str, int] = {"forward": 2, "again": 2, "reference": 4, "blocks": 5, "tpu_kernel": 7, "gpu_kernel": 7}
EXACT_PASSES = 6
"""Number of bfloat16 products that make up a float32 product at full precision, on a TPU."""
VMEM = 128 * 2**20
"""On-chip memory of a TPU core; scores over it are computed twice."""


def holds_scores(run: RunSizes) -> bool:
    """Whether an update's attention holds the scores of whole rows."""
    return run.update.attention == "reference"


def _attention_flops(run: RunSizes, products: int) -> int:
    """Operations of `products` query-key products in all layers; a TPU recomputes reference scores that exceed VMEM."""
    decoder, split = run.decoder, run.tp * run.sp
    pairs = int(run.rows * attended_pairs(run.update.attention, run.row_tokens) * run.attended)
    if holds_scores(run) and run.platform == "tpu" and products == PRODUCTS["forward"]:
        products += F32 * pairs * decoder.heads // split >= VMEM
    return products * pairs * decoder.total(lambda work: work.pair) // split


def forward_flops(run: RunSizes) -> int:
    """One forward pass of a micro-batch, logits included."""
    matmul, attention = _matmul_flops(run), _attention_flops(run, PRODUCTS["forward"])
    return (matmul + rule_flops(run, run.tokens)) // run.tp + attention + fused_padding(run)


def rule_flops(run: RunSizes, tokens: int) -> int:
    """Operations of recurrences for `tokens` tokens, in products of the activations' format."""
    passes = 1 if run.platform == "cpu" else EXACT_PASSES
    return 2 * passes * tokens * run.decoder.total(lambda work: work.per_token)


def _matmul_flops(run: RunSizes) -> int:
    """Operations of the products with weights in a forward pass."""
    return 2 * run.tokens * run.decoder.active


def logits_flops(run: RunSizes) -> int:
    """Operations of a micro-batch's logits."""
    return _head_product(run) // run.tp


def update_flops(run: RunSizes) -> int:
    """Operations of forward, backward and recomputation; a recomputed layer skips its last product."""
    decoder = run.decoder
    tokens = run.tokens
    remat = run.update.remat
    last = sum(len(place.layers) * place.block.feed_forward.work(decoder.width).inner for place in decoder.places)
    whole = _matmul_flops(run) - 2 * tokens * decoder.width * last
    again = {"none": 0, "products": 0}.get(remat, whole - _head_product(run))
    products = (1 + _backward(run)) * (_matmul_flops(run) - _head_product(run)) + again
    rule = (3 + (remat != "none")) * rule_flops(run, tokens)
    return (products + rule) // run.tp + _update_attention_flops(run) + _update_head_flops(run)


def _backward(run: RunSizes) -> int:
    """Products per weight matrix in the backward pass; frozen ones have no gradient."""
    return 2 if run.decoder.lora is None else 1


def _head_product(run: RunSizes) -> int:
    """Operations of the head's product, over all devices that split it."""
    return 2 * run.tokens * run.decoder.outputs * run.decoder.width


def _update_attention_flops(run: RunSizes) -> int:
    """Operations of an update's products of queries with keys and values."""
    again = PRODUCTS["again"] if run.update.remat != "none" else 0
    return _attention_flops(run, PRODUCTS["forward"]) + _attention_flops(run, PRODUCTS[run.update.attention] + again)


def _update_head_flops(run: RunSizes) -> int:
    """Operations of an update's logits and their gradients; with `remat: none`, a chunked head saves its logits."""
    again = run.update.remat != "none" or run.update.head == "fused"
    own = (1 + _backward(run) + again) * logits_flops(run) + (2 + _backward(run)) * fused_padding(run)
    if (compared := run.spec.compared) is None:
        return own
    return own + logits_flops(run.of(compared)) * (1 if run.update.remat == "none" else 2)
