"""Records what TRL's GRPOTrainer computes on random inputs: losses, gradients, clip fractions -> losses.json.

TRL's own `_compute_loss` runs on a stand-in for the trainer that hands it given log-probabilities. In an environment of
its own (Podium does not depend on TRL):

    pip install torch==2.13.0 trl==1.16.0 && python tests/golden/record_losses.py
"""

import dataclasses
import functools
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "losses.json"
LENGTHS = (7, 3, 1, 5)  # of B = 4 sequences in T = 7 columns
MAX_NEW_TOKENS = 16
FIRST_SEED = 60  # chosen so that the clips act on both sides
CAP = 2.0  # of the truncated importance correction


@dataclasses.dataclass(frozen=True)
class Case:
    """One setting of both: options of Podium's AlgorithmConfig, and attributes of TRL's trainer."""

    podium: dict[str, Any]
    trl: dict[str, Any]
    spread: float  # standard deviation of logprobs - old_logprobs; 0: the same weights, TRL gets no old ones


GRPO = {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2}
DAPO = {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28}
CISPO = {"loss_type": "cispo", "epsilon_high": 5.0}
GSPO = {"loss_type": "grpo", "epsilon_low": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"}
SAPO = {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
VESPO = {
    "loss_type": "vespo",
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
GMPO = {"loss_type": "gmpo", "epsilon_low": 0.4, "epsilon_high": 0.4}
"""The loss of `trl.experimental.gmpo`, which has no `loss_type` of its own."""
TRUNCATE = {"correction": "truncate", "correction_high": CAP, "old_logprobs": "trainer"}
MASK = {**TRUNCATE, "correction": "mask"}


def _corrected(mode: str) -> dict[str, Any]:
    options = {"use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": mode}
    return {**GRPO, **options}


CASES = {
    "grpo_on_policy": Case({"recipe": "grpo", "old_logprobs": "trainer"}, GRPO, 0.0),
    "grpo": Case({"recipe": "grpo"}, GRPO, 0.3),
    "grpo_k3": Case({"recipe": "grpo", "kl": "k3", "kl_coef": 0.04}, {**GRPO, "beta": 0.04}, 0.3),
    "grpo_truncate_k3": Case(
        {"recipe": "grpo", "kl": "k3", "kl_coef": 0.04, **TRUNCATE},
        {**GRPO, "beta": 0.04, "use_vllm": True, "vllm_importance_sampling_correction": True},
        0.3,
    ),
    "dr_grpo": Case({"recipe": "dr_grpo"}, {**GRPO, "loss_type": "dr_grpo"}, 0.3),
    "dapo_on_policy": Case({"recipe": "dapo", "old_logprobs": "trainer"}, DAPO, 0.0),
    "dapo": Case({"recipe": "dapo"}, DAPO, 0.3),
    "dapo_entropy": Case(
        {"recipe": "dapo", "entropy_bonus": 0.01}, {**DAPO, "_entropy_bonus_enabled": True, "entropy_coef": 0.01}, 0.3
    ),
    "bnpo": Case({"recipe": "grpo", "mean": "token"}, {**GRPO, "loss_type": "bnpo"}, 0.3),
    "cispo_on_policy": Case({"recipe": "cispo", "old_logprobs": "trainer"}, CISPO, 0.0),
    "cispo": Case({"recipe": "cispo"}, CISPO, 1.5),
    "gspo_on_policy": Case({"recipe": "gspo", "old_logprobs": "trainer"}, GSPO, 0.0),
    "gspo": Case({"recipe": "gspo"}, GSPO, 1e-3),
    "gspo_wide": Case(
        {"recipe": "gspo", "clip_low": 0.2, "clip_high": 0.2}, {**GSPO, "epsilon_low": 0.2, "epsilon_high": 0.2}, 0.5
    ),
    "grpo_dual_clip": Case({"recipe": "grpo", "dual_clip": 1.3}, {**GRPO, "delta": 1.3}, 1.0),
    "sapo": Case({"recipe": "sapo"}, SAPO, 0.5),
    "sapo_on_policy": Case({"recipe": "sapo", "old_logprobs": "trainer"}, SAPO, 0.0),
    "vespo": Case({"recipe": "vespo"}, VESPO, 0.3),
    "vespo_options": Case(
        {"recipe": "vespo", "loss_options": {"k_positive": 1.0, "lambda_negative": 0.5}},
        {**VESPO, "vespo_k_pos": 1.0, "vespo_lambda_neg": 0.5},
        0.3,
    ),
    "gmpo": Case({"recipe": "gmpo"}, GMPO, 0.5),
    "grpo_off_policy": Case(
        {"recipe": "grpo", "off_policy_threshold": 0.05}, {**GRPO, "off_policy_mask_threshold": 0.05}, 0.5
    ),
    "grpo_kl_by_ratio": Case(
        {"recipe": "grpo", "kl": "k3", "kl_coef": 0.04, "kl_by_ratio": True},
        {**GRPO, "beta": 0.04, "use_bias_correction_kl": True},
        0.3,
    ),
    "grpo_token_mask": Case({"recipe": "grpo", **MASK}, _corrected("token_mask"), 0.3),
    "grpo_sequence_mask": Case(
        {"recipe": "grpo", **MASK, "correction_level": "sequence"}, _corrected("sequence_mask"), 0.3
    ),
    "grpo_sequence_truncate": Case(
        {"recipe": "grpo", **TRUNCATE, "correction_level": "sequence"}, _corrected("sequence_truncate"), 0.3
    ),
    "grpo_top_entropy": Case(
        {"recipe": "grpo", "top_entropy": 0.3, "kl": "k3", "kl_coef": 0.04},
        {**GRPO, "beta": 0.04, "top_entropy_quantile": 0.3},
        0.3,
    ),
    "gspo_kl_by_ratio": Case(
        {"recipe": "gspo", "clip_low": 0.2, "clip_high": 0.2, "kl": "k3", "kl_coef": 0.04, "kl_by_ratio": True},
        {**GSPO, "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.04, "use_bias_correction_kl": True},
        0.5,
    ),
    "trl_defaults": Case({"recipe": "grpo", "mean": "token"}, {**DAPO, "epsilon_high": 0.2}, 0.3),
    "trl_defaults_with_vllm": Case(
        {
            "recipe": "grpo",
            "mean": "token",
            "old_logprobs": "trainer",
            "correction": "mask",
            "correction_level": "sequence",
            "correction_high": 3.0,
        },
        {**_corrected("sequence_mask"), **DAPO, "epsilon_high": 0.2, "vllm_importance_sampling_clip_max": 3.0},
        0.3,
    ),
}


def random_inputs(spread: float, seed: int) -> dict[str, np.ndarray]:
    """Log-probabilities, entropies [B, T], the mask [B, T] and one advantage per sequence [B]."""
    random = np.random.default_rng(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    logprobs = -random.exponential(1.5, shape)
    old_logprobs = logprobs + spread * random.normal(size=shape)
    arrays = {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "sampled_logprobs": old_logprobs + 0.5 * random.normal(size=shape),
        "reference_logprobs": logprobs + 0.5 * random.normal(size=shape),
        "entropy": random.exponential(1.0, shape),
        "mask": np.arange(shape[1]) < np.array(LENGTHS)[:, None],
        "advantages": np.array([1.3, -0.4, -1.1, 0.6]) * (1 + random.uniform(size=shape[0])),
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def trl_output(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """Loss [], its gradient by logprobs [B, T], and the clip fractions that TRL reports."""
    import torch
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]
    from trl.experimental.gmpo import GMPOTrainer  # pyright: ignore[reportMissingImports]

    tensors = {name: torch.tensor(array) for name, array in inputs.items()}
    logprobs = tensors["logprobs"].requires_grad_()
    batch = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.zeros(logprobs.shape, dtype=torch.long),
        "completion_mask": tensors["mask"],
        "advantages": tensors["advantages"],
        "num_items_in_batch": tensors["mask"].sum(),
        "ref_per_token_logps": tensors["reference_logprobs"],
    }
    if case.trl.get("use_vllm"):
        batch["importance_sampling_ratio"] = _trl_correction(case.trl, tensors)
    if case.spread:
        batch["old_per_token_logps"] = tensors["old_logprobs"]
    trainer = _stand_in(case.trl, logprobs, tensors["entropy"])
    kind = GMPOTrainer if case.trl is GMPO else GRPOTrainer
    loss = kind._compute_loss(trainer, trainer.model, batch)
    loss.backward()
    assert logprobs.grad is not None
    clips = {name.rsplit("/")[-1]: values[0] for name, values in trainer._metrics["train"].items() if "_mean" in name}
    return {"loss": loss.item(), "gradient": logprobs.grad.tolist(), "clip": clips}


def _trl_correction(options: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """The ratio that TRL's `_generate_and_score_completions` computes, [B, T] or [B, 1], written as there."""
    level, how = options.get("vllm_importance_sampling_mode", "token_truncate").split("_")
    difference = (tensors["old_logprobs"] - tensors["sampled_logprobs"]) * tensors["mask"]
    ratio = (difference.sum(dim=-1, keepdim=True) if level == "sequence" else difference).exp()
    cap = options.get("vllm_importance_sampling_clip_max", CAP)
    return ratio.clamp(max=cap) if how == "truncate" else ratio.masked_fill(ratio > cap, 0.0)


def _stand_in(options: dict[str, Any], logprobs: Any, entropy: Any) -> SimpleNamespace:
    """What `_compute_loss` reads of a trainer on one process with one micro-batch per step."""
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]

    settings = {
        "importance_sampling_level": "token",
        "beta": 0.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "_entropy_bonus_enabled": False,
        "delta": None,
        "use_bias_correction_kl": False,
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        **options,
    }
    trainer = SimpleNamespace(
        **settings,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(steps_per_generation=1, **settings),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda tensor: tensor,
            pad_across_processes=lambda tensor, **_: tensor,
            reduce=lambda tensor, reduction: tensor,
        ),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_NEW_TOKENS,
        use_adaptive_entropy=False,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, entropy, None),
    )
    trainer.get_high_entropy_mask = functools.partial(GRPOTrainer.get_high_entropy_mask, trainer)
    return trainer


def main() -> None:
    """Write every case's inputs and outputs, with the versions that made them."""
    import torch
    import trl  # pyright: ignore[reportMissingImports]

    cases = {}
    for seed, (name, case) in enumerate(CASES.items(), start=FIRST_SEED):
        inputs = random_inputs(case.spread, seed)
        cases[name] = {
            "inputs": {key: array.tolist() for key, array in inputs.items()},
            "outputs": trl_output(case, inputs),
        }
    versions = {"trl": trl.__version__, "torch": torch.__version__}
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items()]
    GOLDEN.write_text(f'{{"versions": {json.dumps(versions)},\n"cases": {{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
