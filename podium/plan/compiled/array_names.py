"""User-facing names for the arrays of Podium's own programs, passed to `podium.hlo.memory`. No jax."""

from collections.abc import Mapping

from podium.hlo.memory import ArrayNames

# Keyed by the first part of an argument's path.
ARGUMENTS: Mapping[str, str] = {
    "state.params": "parameters", "state.opt_state": "optimizer", "state": "optimizer", "params": "parameters",
    "frozen": "frozen_weights", "batch": "batch", "cache": "kv_cache",
}  # fmt: skip
ROLLOUT_PROGRAMS = ("jit_extend", "jit_copy", "jit_decode")  # programs whose `params` are the rollout's copy
WITHOUT_GRADIENTS = ("jit_init_optimizer", "jit_sync", "jit_score", *ROLLOUT_PROGRAMS)

RESULTS: Mapping[str, str] = {"jit_init_optimizer": "optimizer", "jit_sync": "rollout_weights"}

# Keyed by the `jax.named_scope` in which an array is computed.
SCOPES: Mapping[str, str] = {
    "embed": "embedding", "weights": "gathered_weights", "layers": "layer_activations", "mlp": "layer_activations",
    "attention": "layer_activations", "scores": "attention_scores", "cache": "kv_cache", "logits": "logits",
    "sample": "logits", "gradients": "gradients", "optimizer": "optimizer",
}  # fmt: skip


def names_of(program: str) -> ArrayNames:
    """The array names of a compiled program, by its jax module name (`jit_decode`)."""
    rollout = {"params": "rollout_weights"} if program in ROLLOUT_PROGRAMS else {}
    return ArrayNames(
        arguments={**ARGUMENTS, **rollout},
        scopes=SCOPES,
        results=RESULTS.get(program, ""),
        known_by_shape=frozenset({"parameters", "rollout_weights", "kv_cache"}),
        weights="parameters",
        gathering="weights",
        gradients=program not in WITHOUT_GRADIENTS,
        first_by_scope=frozenset({"optimizer"}),
    )
