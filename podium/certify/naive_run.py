"""Naive form of what a step changes for the next: weights of the KL and of the entropy bonus, and moving models.

Plain numbers and numpy in float64.
"""

import dataclasses
import math

import numpy as np

from podium.certify.naive_rules import Rules

Arrays = dict[str, np.ndarray]
MOST_ERROR = 0.2  # arXiv:1909.08593 clips the relative distance from the target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Weights of terms of the loss that a run adapts to its measured KL and entropy."""

    kl_coef: float
    entropy_bonus: float
    last_entropy: float = math.inf
    """Mean entropy of the last update, in nats; infinite before the first."""

    def applied(self, rules: Rules) -> "Coefficients":
        """The weights in the next update's loss: the bonus is 0 unless the last entropy was at most the target."""
        if rules.entropy_target is None or self.last_entropy <= rules.entropy_target:
            return self
        return dataclasses.replace(self, entropy_bonus=0.0)

    def after_update(self, rules: Rules, entropy: float) -> "Coefficients":
        """The weights after an update of this mean entropy, in nats: a step up or down (arXiv:2505.22312)."""
        if rules.entropy_target is None:
            return self
        sign = -1 if entropy > rules.entropy_target else 1
        bonus = sorted((0.0, self.entropy_bonus + sign * rules.entropy_step, rules.entropy_bonus_max))[1]
        return dataclasses.replace(self, entropy_bonus=bonus, last_entropy=entropy)

    def after_step(self, rules: Rules, kl: float) -> "Coefficients":
        """The weights after a step with this mean KL, in nats per token (Ziegler et al., arXiv:1909.08593)."""
        if rules.kl_target is None:
            return self
        error = sorted((-MOST_ERROR, (kl - rules.kl_target) / rules.kl_target, MOST_ERROR))[1]
        return dataclasses.replace(self, kl_coef=self.kl_coef + self.kl_coef * rules.kl_gain * error)


def moved_weights(weights: Arrays, policy: Arrays, mixup: float) -> Arrays:
    """The weights of a model that follows the policy, after it has moved towards it (TR-DPO, arXiv:2404.09656)."""
    return {name: x + mixup * (np.asarray(policy[name], np.float64) - x) for name, x in weights.items()}
