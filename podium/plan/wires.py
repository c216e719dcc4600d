"""The closed form of what crosses the wires between devices in one pass, and what of it lies in memory meanwhile."""

from podium.models.architecture import DecoderConfig
from podium.plan.sizes import RunSizes


def gathered_in_rollout(run: RunSizes) -> int:
    """Bytes of the largest weights that a rollout from the training layout gathers: a layer's, or the head."""
    if run.layout != "legacy":
        return 0
    decoder = run.decoder
    return run.rollout_activation * max(_gathered_matmul(decoder), decoder.vocab * decoder.width)


def _gathered_matmul(decoder: DecoderConfig) -> int:
    """Elements of a layer that the seed's layout gathers: all that reads the width. Its outputs are exchanged."""
    attention = decoder.width * (decoder.heads + 2 * decoder.kv_heads) * decoder.head_dim
    return attention + 2 * decoder.width * decoder.mlp_width


def rollout_ici(run: RunSizes, tokens: int) -> int:
    """Bytes that a device sends in one pass of the rollout."""
    decoder, a = run.decoder, run.rollout_activation
    if run.layout == "legacy":
        gathered = decoder.layers * _gathered_matmul(decoder) + decoder.vocab * decoder.width
        return gathered * a * (run.devices - 1) // run.devices
    if run.layout == "maxtext":  # sums over the split width, each an all-reduce
        heads = (decoder.heads + 2 * decoder.kv_heads) * decoder.head_dim
        sums = decoder.layers * (heads + 2 * decoder.mlp_width) + decoder.vocab
        return 2 * tokens * sums * a * (run.fsdp - 1) // run.fsdp
    return 0


def tp_ici(run: RunSizes, tokens: int) -> int:
    """Bytes of one all-reduce of activations over tp in every layer."""
    return 2 * run.decoder.layers * tokens * run.decoder.width * run.activation * (run.tp - 1) // run.tp
