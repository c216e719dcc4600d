"""The settings of the optimizer."""

from typing import Literal

from podium.config.section import Fraction, NotNegative, NotNegativeFloat, PositiveFloat, Section

OPTIMIZER_COPIES = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 2, "adafactor": 0}
"""Elements of state per parameter of each optimizer; 2 is assumed for a user's own."""


class OptimizerConfig(Section):
    """The optimizer (optax) and its learning rate schedule."""

    name: str = "adamw"
    """Update rule; bytes of state per parameter: adamw 8, lion, muon and sgd 4, adafactor about 0. Or your own function
    as `package.module:name`, which takes these settings and returns an optax transformation whose output is an ascent
    direction."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate; unset: 1e-6, or 1e-5 with `lora`, because adapters need about ten times as much."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the schedule after warm-up; cosine and linear end at `final_fraction` of the peak at the last step."""
    final_fraction: Fraction = 0.0
    """Final learning rate of cosine and linear, as a fraction of the peak."""
    warmup_steps: NotNegative = 0
    """Optimizer steps over which the learning rate rises linearly to its peak: peak/warmup_steps at the first."""
    weight_decay: NotNegativeFloat = 0.0
    """Decoupled weight decay of matrices; norms and biases are not decayed."""
    beta1: Fraction = 0.9  # TRL: adam_beta1
    """Decay of the first moment (momentum of lion, muon and sgd)."""
    beta2: Fraction = 0.95
    """Decay of the second moment of adamw and lion."""
    eps: PositiveFloat = 1e-8  # TRL: adam_epsilon
    """Added to the root of the second moment."""
    moments: Literal["float32", "bfloat16"] = "float32"  # MaxText: mu_dtype
    """Number format of the moments. bfloat16 halves their memory; rounding is stochastic, so that updates smaller than
    one bfloat16 step are not lost."""
    clip_norm: NotNegativeFloat = 1.0
    """Maximum global norm of the gradient; 0: no clipping."""
