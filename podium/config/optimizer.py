"""The settings of the optimizer."""

from typing import Literal

from podium.config.section import Fraction, NotNegative, NotNegativeFloat, PositiveFloat, Section

OPTIMIZER_COPIES = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 2, "adafactor": 0}
"""The optimizers by name, and how many numbers each keeps for a parameter; a user's own is taken to keep two."""


class OptimizerConfig(Section):
    """The optimizer (optax) and its schedule."""

    name: str = "adamw"
    """Which update rule; state per parameter: adamw 8 bytes, lion, muon and sgd 4, adafactor about 0. Or a function of
    yours as `package.module:name`, from these settings to an optax transformation that makes the direction uphill."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate; unset: 1e-6, and with `lora` 1e-5, as adapters want ten times what all weights want."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape after warm-up; cosine and linear end at `final_fraction` of the peak at the last step."""
    final_fraction: Fraction = 0.0
    """Where cosine and linear end, as a fraction of the peak."""
    warmup_steps: NotNegative = 0
    """Optimizer steps over which the learning rate rises linearly to its peak: peak/warmup_steps at the first."""
    weight_decay: NotNegativeFloat = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: Fraction = 0.9
    """Decay of the first moment (momentum of lion, muon and sgd)."""
    beta2: Fraction = 0.95
    """Decay of the second moment of adamw and lion."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Number format of the moments. bfloat16 halves them: they are rounded up or down at random, in proportion, so that
    changes smaller than a step of it are not lost."""
    clip_norm: NotNegativeFloat = 1.0
    """Largest global norm of the gradient; 0: not clipped."""
