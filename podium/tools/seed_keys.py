"""The settings of the former system: keys, spellings, defaults, how it read files, and what has no counterpart here.

What becomes of the values is `podium.tools.migrate`.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from podium.config.document import Node, parse_text, read_document
from podium.config.errors import ConfigError, Problem

DEFAULTS = {
    "model_path": "Qwen/Qwen2.5-3B-Instruct",
    "steps": 100,
    "rollout.batch_size": 16,
    "rollout.n": 8,
    "rollout.global_length": 512,
    "rollout.max_length_sample": 1024,
    "rollout.sharding_style": "legacy",
    "train.micro_batch_size_per_device": 4,
    "train.ppo_epochs": 1,
    "train.beta": 0.0,
    "train.optimizer.name": "lion",
    "train.optimizer.clip_norm": 1.0,
    "train.optimizer.weight_decay": 1e-8,
    "train.optimizer.lr_schedule.type": "warmup_cosine",
    "train.optimizer.lr_schedule.init_value": 0.0,
    "train.optimizer.lr_schedule.peak_value": 1e-6,
    "train.optimizer.lr_schedule.end_value": 0.0,
    "train.optimizer.lr_schedule.warmup_ratio": 0.05,
    "train.optimizer.lr_schedule.warmup_steps": None,
    "train.remat_policy": "dots_with_no_batch_dims",
    "algo.name": "grpo",
    "algo.estimator.name": None,
    "algo.estimator.eps": 1e-4,
    "algo.estimator.rloo_whiten": True,
    "mesh_shape": "auto",
    "wandb_project": "mllm-jax-grpo-gsm8k",
    "wandb_mode": "online",
    "wandb_name": None,
    "reward_weights": [1.0, 0.5, 0.5],
    "eval_every_steps": 10,
    "eval_batches_per_process": 1,
    "eval_split": "test",
}
"""Settings that have a counterpart, and what the former system used where a file said nothing."""

ZERO_MEANT = {
    "steps": 100,
    "rollout.batch_size": 32,
    "rollout.n": 8,
    "rollout.global_length": 512,
    "rollout.max_length_sample": 64,
}
"""Its parser read `x or fallback`: a 0 was this."""

_SWEEP = "there is one kind of evaluation; for the whole split run `podium eval RUN --task gsm8k`"
_KERNEL = "log-probabilities are computed in chunks without whole logits (train.head_chunk_tokens)"
_CRITIC = "there is no value model"
_ALWAYS = "always on"

LOST = {
    "rollout.backend": "there is one engine",
    "rollout.max_prompts_per_pass_per_process": "the engine refills its slots; lower rollout.slots if memory binds",
    "rollout.fast_generate": _ALWAYS,
    "rollout.fast_qwen2_decode_attention": _ALWAYS,
    "rollout.mesh_shape": "the rollout uses the mesh of `mesh:`",
    "train.micro_batch_size": "it was per process; set train.rows_per_device to it divided by a host's devices",
    "train.max_length_total": "it was not used in the loss; a row holds max_prompt_tokens + max_new_tokens",
    "train.grad_accum_steps": "it follows from prompts_per_step, group_size and train.rows_per_device",
    "train.mlp_checkpoint_gate_up": "train.remat: layer recomputes it with the rest of the layer",
    "train.policy_loss_impl": _KERNEL,
    "train.pallas_block_size": _KERNEL,
    "train.pallas_time_block": _KERNEL,
    "train.pallas_compute_dtype": "losses are float32",
    "train.pallas_bwd_output_alias_logits": _KERNEL,
    "train.log_tpu_memory": "device memory is always measured",
    "train.grpo_kernel.enabled": _KERNEL,
    "train.grpo_kernel.impl": _KERNEL,
    "train.grpo_kernel.kernel.block_size": _KERNEL,
    "train.grpo_kernel.kernel.time_block": _KERNEL,
    "train.grpo_kernel.kernel.bwd_impl": _KERNEL,
    "train.grpo_kernel.sharding.batch_axes": _KERNEL,
    "train.grpo_kernel.sharding.vocab_axis": _KERNEL,
    "algo.estimator.clip_range": "advantages are not clipped",
    "algo.estimator.dapo_alpha": "its dapo was GRPO plus a batch term; algorithm.recipe: dapo is the paper's",
    "algo.estimator.gae_gamma": _CRITIC,
    "algo.estimator.gae_lambda": _CRITIC,
    "algo.estimator.gae_normalize": _CRITIC,
    "algo.update.name": "the recipe decides it",
    "algo.update.value_coef": _CRITIC,
    "algo.update.value_clip_range": _CRITIC,
    "algo.update.entropy_coef": "only its ppo read it; set algorithm.entropy_bonus to have one",
    "train_steps_per_epoch": "a run is counted in steps",
    "eval_full_every_epochs": _SWEEP,
    "eval_full_num_pre_q": f"{_SWEEP} --samples K",
    "eval_full_greedy": f"{_SWEEP} --greedy",
}
"""Settings without a counterpart, and what to know or do."""

_PER_PROCESS = "it counted per process or device; set prompts_per_step, which is global"
_AMBIGUOUS = "it was rejected there too; set prompts_per_step, the prompts of a step over all hosts"
_MICRO = "it was rejected there too; set train.rows_per_device, per device"

REJECTED = {
    "rollout.batch_size_per_process": _PER_PROCESS,
    "rollout.batch_size_per_device": _PER_PROCESS,
    "rollout.prompts_per_pass_per_process": "the engine refills its slots; lower rollout.slots if memory binds",
    "rollout.prompts_per_pass_per_device": "the engine refills its slots; lower rollout.slots if memory binds",
    "rollout.global_prompt_batch_size": _AMBIGUOUS,
    "rollout.global_sequence_batch_size": "it counted sequences; set prompts_per_step to it divided by group_size",
    "rollout.global_batch_size": _AMBIGUOUS,
    "rollout.prompt_batch_size": _AMBIGUOUS,
    "rollout.prompt_batch_size_per_process": _PER_PROCESS,
    "rollout.prompt_batch_size_per_device": _PER_PROCESS,
    "rollout.per_device_batch_size": _PER_PROCESS,
    "train.global_micro_batch_size": _MICRO,
    "train.micro_batch_size_per_process": _MICRO,
}
"""Settings that later branches refused, and what to do."""

_ALIASES = {
    "rollout.n": ("rollout.num_pre_q", "num_pre_q"),
    "train.micro_batch_size_per_device": ("train.per_device_micro_batch_size", "per_device_micro_batch_size"),
    "eval_batches_per_process": ("eval_batches",),
}


def _spellings(key: str) -> Iterator[str]:
    section, dot, rest = key.partition(".")
    yield key
    yield from _ALIASES.get(key, ())
    if section in ("rollout", "train") and "." not in rest and dot:
        yield f"{section}_{rest}"
        if key != "rollout.mesh_shape":  # the flat form is the mesh of all
            yield rest


SPELLINGS = {spelling: key for key in (*DEFAULTS, *LOST, *REJECTED) for spelling in _spellings(key)}
"""Every way to write a setting, flat forms included, and its full name."""

_BARE = {
    "algo": "algo.name",
    "algo.estimator": "algo.estimator.name",
    "algo.update": "algo.update.name",
    "train.optimizer": "train.optimizer.name",
    "train.optimizer.lr_schedule": "train.optimizer.lr_schedule.type",
}
"""Sections that could also be one word."""


def read_former(path: Path, environ: Mapping[str, str]) -> dict[str, tuple[str, Node]]:
    """Full name -> how the file spells it, and the value. Raises ConfigError where two spellings disagree."""
    found: dict[str, tuple[str, Node]] = {}
    for spelling, node in _leaves(read_document(path), ""):
        key = _BARE.get(spelling) or SPELLINGS.get(spelling, spelling)
        node = _expanded(node, environ)
        if key in found and found[key][1].plain() != node.plain():
            other, before = found[key]
            message = f"{node.plain()!r} and {other}: {before.plain()!r} mean the same setting; keep one"
            raise ConfigError([Problem(key=spelling, message=message, places=(before.origin, node.origin))])
        found[key] = (spelling, node)
    return found


def _leaves(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    for key, child in node.children():
        inner = f"{path}.{key}" if path else str(key)
        if isinstance(child.value, dict):
            yield from _leaves(child, inner)
        else:
            yield inner, child


def _expanded(node: Node, environ: Mapping[str, str]) -> Node:
    """The node with `$NAME` and `${NAME}` replaced; a name that is not set is empty, as there."""
    if not isinstance(node.value, str) or "$" not in node.value:
        return node
    text = re.sub(r"\$(\w+|\{\w+\})", lambda name: environ.get(name[1].strip("{}"), ""), node.value)
    return parse_text(text, node.origin)
