"""The floor of each program: the bytes that a device has to move in it, whatever the compiler does. No jax.

These are weights, the live cache, logits and optimizer state, each moved once. The operations of a floor are the closed
form's (`podium.plan.closed_form.estimate`), which adds those of activations and passes over logits;
`podium.plan.closed_form.over_floor` compares compiled programs with both.
"""

from podium.plan.closed_form.resident_memory import frozen_bytes
from podium.plan.request.phase_sizes import F32, RunSizes, cast_bytes, optimizer_bytes


def logits_bytes(run: RunSizes, tokens: int) -> int:
    """Bytes of the rollout's float32 logits for `tokens` tokens of a device."""
    return F32 * tokens * run.decoder.vocab // run.rollout_heads


def sync_bytes(run: RunSizes) -> int:
    """Bytes of making the rollout's weights: read what the trainer stores, and write the rollout's own copy.

    Where devices exchange weights, each first writes its own in the rollout's format.
    """
    own, cast = F32 * run.own_count, cast_bytes(run)
    if run.decoder.lora is not None and not run.decoder.lora.merged:  # the adapters alone
        return own + cast
    return own + frozen_bytes(run) + run.rollout_weight_bytes + (cast if run.accelerator.devices > 1 else 0)


def prefill_bytes(run: RunSizes, tokens: int, scored: int) -> int:
    """Bytes of prefilling a device's `tokens` tokens: layers' weights, new keys and values, logits of `scored` ones."""
    head = run.head_bytes if scored else 0
    return run.layer_bytes + head + run.kv_bytes(tokens) + logits_bytes(run, scored)


def copy_bytes(run: RunSizes, pages: float) -> int:
    """Bytes of copying pages of the cache within a device, each with a sequence's recurrent states, if any."""
    return int(2 * pages * (run.page_bytes + run.state_bytes))


def decode_bytes(run: RunSizes, slots: int, tokens: int) -> int:
    """Bytes of a decode step of a device's `slots`: weights, `tokens` cached tokens per slot, the new one, logits."""
    cache = run.read_bytes(slots, tokens) + run.kv_bytes(slots)
    return run.layer_bytes + run.head_bytes + cache + logits_bytes(run, slots)


def first_bytes(run: RunSizes, slots: int) -> int:
    """Bytes of drawing the first tokens of a device's `slots`, once per decode call: the head and its logits."""
    return run.head_bytes + logits_bytes(run, slots)


def forward_bytes(run: RunSizes) -> int:
    """Bytes of a forward pass of a micro-batch: the gathered weights."""
    return run.activation * sum(run.gathered_counts)


def micro_batch_bytes(run: RunSizes) -> int:
    """Bytes of a micro-batch's forward and backward pass: gathered weights twice; gradients added, or written and
    read.
    """
    return 2 * forward_bytes(run) + 2 * F32 * run.own_count


def optimizer_step_bytes(run: RunSizes) -> int:
    """Bytes of an optimizer step, once per update: weights and optimizer state are read and written."""
    return 2 * F32 * run.own_count + 2 * optimizer_bytes(run)
