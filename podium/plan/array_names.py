"""The names that users know for the arrays of Podium's own programs: how `podium.hlo.memory` reads them. No jax."""

from collections.abc import Mapping

from podium.hlo.memory import ArrayNames

# By the beginning of an argument's path.
ARGUMENTS: Mapping[str, str] = {
    "state.params": "parameters", "state.opt_state": "optimizer", "state": "optimizer", "params": "parameters",
    "frozen": "frozen_weights", "batch": "batch", "cache": "kv_cache",
}  # fmt: skip
ROLLOUT_PROGRAMS = ("jit_extend", "jit_copy", "jit_decode")  # whose `params` are the rollout's copy
WITHOUT_GRADIENTS = ("jit_init_optimizer", "jit_sync", "jit_score", *ROLLOUT_PROGRAMS)

RESULTS: Mapping[str, str] = {
    "jit_init_optimizer": "optimizer",
    "jit_sync": "rollout_weights",
}

# By the scope (`jax.named_scope`) under which it is made.
SCOPES: Mapping[str, str] = {
    "embed": "embedding", "weights": "gathered_weights", "layers": "layer_activations", "mlp": "layer_activations",
    "attention": "layer_activations", "scores": "attention_scores", "cache": "kv_cache", "logits": "logits",
    "sample": "logits", "gradients": "gradients", "optimizer": "optimizer",
}  # fmt: skip


def names_of(program: str) -> ArrayNames:
    """How to name the arrays of a compiled program, by the module name that jax gave it (`jit_decode`)."""
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
