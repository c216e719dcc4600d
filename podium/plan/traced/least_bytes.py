"""The floor of each program: the bytes that a device has to move in it, whatever the compiler does. No jax.

These are weights, the live cache, logits and optimizer state, each moved once. The operations of a floor are the closed
form's (`podium.plan.traced.estimate`), which adds to these bytes what compilers were seen to move beyond them;
`podium.plan.traced.over_floor` holds compiled programs against both.
"""

from podium.plan.request.phase_sizes import F32, RunSizes, cast_bytes, optimizer_bytes
from podium.plan.traced.resident_memory import frozen_bytes


def logits_bytes(run: RunSizes, tokens: int) -> int:
    """Float32 logits of the rollout for `tokens` tokens of a device."""
    return F32 * tokens * run.decoder.vocab // run.rollout_heads


def sync_bytes(run: RunSizes) -> int:
    """Making the rollout's weights: read what the trainer stores, write what the rollout keeps of its own.

    Where devices exchange weights, each first writes its own in the rollout's format.
    """
    own, cast = F32 * run.own_count, cast_bytes(run)
    if run.decoder.lora is not None and not run.decoder.lora.merged:  # the adapters alone
        return own + cast
    return own + frozen_bytes(run) + run.rollout_weight_bytes + (cast if run.accelerator.devices > 1 else 0)


def prefill_bytes(run: RunSizes, tokens: int, scored: int) -> int:
    """Prefilling `tokens` tokens of a device: the layers' weights, new keys and values, logits of `scored` tokens."""
    head = run.head_bytes if scored else 0
    return run.layer_bytes + head + run.kv_bytes(tokens) + logits_bytes(run, scored)


def copy_bytes(run: RunSizes, pages: float) -> int:
    """Copying pages of the cache within a device, each with the states of a sequence if there are any."""
    return int(2 * pages * (run.page_bytes + run.state_bytes))


def decode_bytes(run: RunSizes, slots: int, tokens: int) -> int:
    """One decode step of a device's `slots`: all weights, `tokens` cached tokens of each slot, the new one, logits."""
    cache = run.read_bytes(slots, tokens) + run.kv_bytes(slots)
    return run.layer_bytes + run.head_bytes + cache + logits_bytes(run, slots)


def first_bytes(run: RunSizes, slots: int) -> int:
    """Drawing the first tokens of a device's `slots`, once in a decode call: the head and its logits."""
    return run.head_bytes + logits_bytes(run, slots)


def forward_bytes(run: RunSizes) -> int:
    """A forward pass of a micro-batch: gathered weights."""
    return run.activation * sum(run.gathered_counts)


def micro_batch_bytes(run: RunSizes) -> int:
    """Forward and backward pass of a micro-batch: gathered weights twice; gradients are added, or written and read."""
    return 2 * forward_bytes(run) + 2 * F32 * run.own_count


def optimizer_step_bytes(run: RunSizes) -> int:
    """An optimizer step, once in an update: weights and optimizer state are read and written."""
    return 2 * F32 * run.own_count + 2 * optimizer_bytes(run)
