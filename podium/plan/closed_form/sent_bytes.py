"""What a device sends to others in the programs that compute a batch, as the closed form counts it. No jax."""

from podium.models.blocks.delta import DeltaNet
from podium.plan.request.phase_sizes import RunSizes


def tp_ici(run: RunSizes, tokens: int) -> int:
    """Bytes that a device sends for one all-reduce over tp in each layer."""
    return 2 * run.decoder.layers * tokens * run.decoder.width * run.activation * (run.tp - 1) // run.tp


def sp_ici(run: RunSizes) -> int:
    """Bytes that a device sends in one pass through the layers, exchanging tokens for heads over sp."""
    numbers, sp = 0, run.sp
    for count, attention in run.decoder.attention_layers():
        queries, keys = 2 * attention.heads // run.tp, 2 * attention.kv_heads // run.tp  # with outputs; and with values
        # If sp does not divide the key heads, every device gets all of them.
        heads = queries + keys * (1 if attention.kv_heads // run.tp % sp == 0 else sp)
        numbers += count * heads * attention.head_dim
    for place in run.decoder.places:
        if isinstance(net := place.block.mixer, DeltaNet):  # queries, keys and values, and the outputs
            moved = 2 * net.key_heads * net.key_dim + 2 * net.value_heads * net.value_dim
            numbers += len(place.layers) * moved // run.tp
    return run.tokens * numbers * run.activation * (sp - 1) // sp
