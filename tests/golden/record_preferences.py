"""Records what TRL's DPOTrainer and KTOTrainer compute on random inputs: losses, gradients -> preferences.json.

TRL's own `_compute_loss` runs on a stand-in for the trainer whose model returns given log-probabilities, in float64. In
its own environment (Podium does not depend on TRL):

    pip install torch==2.13.0 trl==1.16.0 && python tests/golden/record_preferences.py
"""

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "preferences.json"
LENGTHS = (7, 3, 1, 5, 2, 6, 4, 1)
"""Tokens of 8 completions in 7 columns: the chosen ones of 4 pairs, then their rejected ones."""
LABELS = (True, False, False, True, True, False, True, True)
"""Of the same completions, for KTO: 5 are desirable."""
FIRST_SEED = 90


@dataclasses.dataclass(frozen=True)
class Case:
    """One setting of both: options of Podium's loss, and attributes of TRL's trainer."""

    loss: str
    options: dict[str, float]
    trl: dict[str, Any]
    shift: float = 0.0
    """What the policy's log-probabilities of mismatched completions are raised by: the sign of KTO's KL."""


CASES = {
    "dpo": Case("dpo", {}, {"loss_types": ["sigmoid"], "beta": 0.1}),
    "dpo_beta": Case("dpo", {"beta": 0.7}, {"loss_types": ["sigmoid"], "beta": 0.7}),
    "ipo": Case("ipo", {}, {"loss_types": ["ipo"], "beta": 0.1}),
    "ipo_beta": Case("ipo", {"beta": 0.6}, {"loss_types": ["ipo"], "beta": 0.6}),
    "hinge": Case("dpo_hinge", {}, {"loss_types": ["hinge"], "beta": 0.1}),
    "hinge_beta": Case("dpo_hinge", {"beta": 0.8}, {"loss_types": ["hinge"], "beta": 0.8}),
    "kto": Case("kto", {}, {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}, shift=0.3),
    "kto_weights": Case(
        "kto",
        {"beta": 0.5, "desirable_weight": 1.2, "undesirable_weight": 0.7},
        {"beta": 0.5, "desirable_weight": 1.2, "undesirable_weight": 0.7},
        shift=0.5,
    ),
    "kto_negative_kl": Case("kto", {}, {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}, shift=-0.5),
}


def random_inputs(case: Case, seed: int) -> dict[str, np.ndarray]:
    """Log-probabilities [8, 7] of policy and reference, of completions and of mismatched ones; and their mask."""
    random = np.random.default_rng(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    reference, of_mismatched = (-random.exponential(1.5, shape) for _ in range(2))
    arrays = {
        "logprobs": reference + 0.6 * random.normal(size=shape),
        "reference_logprobs": reference,
        "mismatched_logprobs": of_mismatched + case.shift + 0.3 * random.normal(size=shape),
        "mismatched_reference_logprobs": of_mismatched,
        "mask": np.arange(shape[1]) < np.array(LENGTHS)[:, None],
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def trl_output(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """Loss [], its gradient by logprobs [8, 7], the rewards that TRL reports, and KTO's KL."""
    import torch
    from trl import DPOTrainer, KTOTrainer  # pyright: ignore[reportMissingImports]

    tensors = {name: torch.tensor(array, dtype=torch.float64) for name, array in inputs.items()}
    logprobs, mask = tensors["logprobs"].requires_grad_(), tensors["mask"]
    whole_mask = torch.cat([torch.zeros(len(LENGTHS), 1), mask], dim=1).long()  # after a prompt of one token
    batch = {
        "input_ids": torch.zeros(whole_mask.shape, dtype=torch.long),
        "attention_mask": torch.ones(whole_mask.shape, dtype=torch.long),
        "completion_mask": whole_mask,
    }
    reference = (tensors["reference_logprobs"] * mask).sum(1)
    if case.loss == "kto":
        kind = KTOTrainer
        batch |= {
            "KL_input_ids": torch.ones(whole_mask.shape, dtype=torch.long),
            "KL_attention_mask": batch["attention_mask"],
            "KL_completion_mask": whole_mask,
            "label": torch.tensor(LABELS),
            "ref_logps": reference,
            "ref_KL_logps": (tensors["mismatched_reference_logprobs"] * mask).sum(1),
        }
    else:
        kind = DPOTrainer
        chosen, rejected = reference.chunk(2)
        batch |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    trainer = _stand_in(case.trl)
    if kind is KTOTrainer:
        trainer._compute_kl_logps = lambda model, given: KTOTrainer._compute_kl_logps(trainer, model, given)
    model = _model(logprobs * mask, tensors["mismatched_logprobs"] * mask)
    loss = kind._compute_loss(trainer, model, batch, return_outputs=False)
    loss.backward()
    assert logprobs.grad is not None
    found = {name: values[0] for name, values in trainer._metrics["train"].items() if "rewards/" in name}
    kl = trainer._metrics["train"].get("kl", [None])[0]
    return {"loss": loss.item(), "gradient": logprobs.grad.tolist(), "rewards": found, "kl": kl}


def _model(of_batch: Any, of_mismatched: Any) -> Any:
    """A model that returns given log-probabilities: of mismatched completions for inputs that are 1."""
    import torch

    def outputs(input_ids: Any, **others: Any) -> SimpleNamespace:
        log_probs = of_mismatched if bool(input_ids.any()) else of_batch
        nothing = torch.zeros(log_probs.shape)
        return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())

    return outputs


def _stand_in(options: dict[str, Any]) -> SimpleNamespace:
    """What `_compute_loss` of both trainers reads of a trainer on one process."""
    same = lambda tensor: tensor  # noqa: E731
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_weights=[1.0],
        label_smoothing=0.0,
        use_weighting=False,
        loss_type="kto",
        calculate_KL=True,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics={"train": defaultdict(list)},
        **options,
    )


def main() -> None:
    """Write every case's inputs and outputs, with the versions that made them."""
    import torch
    import trl  # pyright: ignore[reportMissingImports]

    cases = {}
    for seed, (name, case) in enumerate(CASES.items(), start=FIRST_SEED):
        inputs = random_inputs(case, seed)
        cases[name] = {
            "inputs": {key: array.tolist() for key, array in inputs.items()},
            "outputs": trl_output(case, inputs),
        }
    versions = {"trl": trl.__version__, "torch": torch.__version__}
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items()]
    GOLDEN.write_text(f'{{"versions": {json.dumps(versions)},\n"cases": {{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
