"""What the host makes of rewards before an update: advantages, KL penalties in the reward, and token weights.

N prompts with G completions each: rewards [N, G] and lengths [N, G] (tokens that are trained on, 0 for a completion
that is masked) give advantages [N, G] float32. Every function of that form can be a recipe's advantage; those that
compare the completions of a prompt raise ValueError where G is 1. Rewards count in float32, so that two sums that
differ by rounding are one reward; the arithmetic is float64. Numpy only: nothing here needs a device.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

Mean = Literal["token", "sequence", "constant"]
Std = Literal["none", "group", "batch"]


class TokenScores(NamedTuple):
    """Tokens of a step's episodes and their scores, for advantages by token; n is the most that follow a prompt."""

    mask: np.ndarray  # [N, G, n] bool, which tokens the model drew; False behind an episode's end
    sampled_logprobs: np.ndarray  # [N, G, n] float32
    scores: Mapping[str, np.ndarray]
    """[N, G, n] float32, by the name of the score."""


def equal_reward_groups(rewards: np.ndarray) -> np.ndarray:
    """Groups whose rewards are all equal, so that a group baseline gives zero advantage: [N, G] -> [N] bool."""
    rewards = np.asarray(rewards, np.float32)
    return rewards.max(axis=1) == rewards.min(axis=1)


def reward_advantages(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The rewards themselves: each completion is imitated as much as it is worth."""
    return np.asarray(rewards, np.float32)


def group_advantages(
    rewards: np.ndarray, lengths: np.ndarray, *, std: Std, std_ddof: int, std_eps: float
) -> np.ndarray:
    """Rewards less their group's mean, over a standard deviation: (r - mean_g) / (std + eps).

    GRPO (arXiv:2402.03300) with `std="group"`, Dr. GRPO (arXiv:2503.20783) with `std="none"`, and the standard
    deviation of all the batch's rewards (arXiv:2508.08221) with `std="batch"`. A group of equal rewards gives 0.
    `std_ddof` is 1 for the unbiased variance (n - 1), 0 for the population's.
    """
    rewards, _ = _checked(rewards, lengths, least_group=2)
    centred = _centred_by_group(rewards)
    if std == "group":
        centred = centred / (rewards.std(axis=1, ddof=std_ddof, keepdims=True) + std_eps)
    elif std == "batch":
        centred = centred / (rewards.std(ddof=std_ddof) + std_eps)
    return centred.astype(np.float32)


def leave_one_out_advantages(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rewards less the mean of the group's other rewards: G / (G - 1) (r - mean_g). RLOO (arXiv:2402.14740)."""
    rewards, _ = _checked(rewards, lengths, least_group=2)
    group = rewards.shape[1]
    return (group / (group - 1) * _centred_by_group(rewards)).astype(np.float32)


def maxrl_advantages(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rewards less their group's mean, over that mean: (r - mean_g) / mean_g, 0 where it is 0 (arXiv:2602.02710).

    The mean stands for the probability of success, so a negative reward is a ValueError.
    """
    rewards, _ = _checked(rewards, lengths, least_group=2)
    if rewards.min() < 0:
        raise ValueError(
            f"maxrl: a reward of {rewards.min():g}; advantages are divided by the group's mean, so rewards must"
            " not be negative; drop the penalties from tasks.rewards, or set algorithm.recipe to dr_grpo"
        )
    mean = rewards.mean(axis=1, keepdims=True)  # [N, 1]
    return (_centred_by_group(rewards) / np.where(mean > 0, mean, 1.0)).astype(np.float32)


def batch_mean_advantages(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rewards less the mean of the whole batch, of at least 2: REINFORCE with a baseline (Williams, 1992)."""
    rewards, _ = _checked(rewards, lengths, least_group=1)
    if rewards.size < 2:
        raise ValueError(
            "a batch of 1 completion is its own mean and has no advantage; raise prompts_per_step or group_size"
        )
    return (rewards - rewards.mean()).astype(np.float32)


def whitened_advantages(
    rewards: np.ndarray, lengths: np.ndarray, *, group_baseline: bool, std_eps: float
) -> np.ndarray:
    """Returns of tokens, made mean 0 and variance 1 over all tokens of the batch: REINFORCE++ (arXiv:2501.03262).

    Undiscounted, every token's return is its completion's reward, so the mean and the (population) variance over
    tokens are those over completions weighted by length. A batch of equal returns gives 0; with `group_baseline` a
    group of equal rewards is then shifted with all others, by the batch's mean.

    `group_baseline` first subtracts each group's mean (the paper's baseline form); `std_eps` is added to the standard
    deviation.
    """
    rewards, lengths = _checked(rewards, lengths, least_group=2 if group_baseline else 1)
    returns = _centred_by_group(rewards) if group_baseline else rewards
    trained = returns[lengths > 0]
    if not trained.size or trained.max() == trained.min():
        return np.zeros(returns.shape, np.float32)
    share = lengths / lengths.sum()  # [N, G], of the batch's tokens
    centred = returns - np.sum(share * returns)
    std = np.sqrt(np.sum(share * centred**2))
    return (centred / (std + std_eps)).astype(np.float32)


def penalised_rewards(rewards: np.ndarray, kl_sums: np.ndarray, coef: float) -> np.ndarray:
    """Rewards less the KL to the reference, for `kl: k1_reward`: r - coef sum_t (sampled_logprob - reference_logprob).

    The whole completion pays for its KL. REINFORCE++ and PPO charge a token only for the KL from itself on (the
    KL-to-go), which has the same expected gradient and less variance, and needs an advantage for each token.

    `kl_sums` [N, G] are k1 = sampled - reference log-probability, summed over each completion's tokens.
    """
    kl_sums = np.asarray(kl_sums, np.float64)
    rewards, _ = _checked(rewards, np.ones(kl_sums.shape), least_group=1)
    if not np.isfinite(kl_sums).all():
        raise ValueError(f"KL to the reference model is {kl_sums[~np.isfinite(kl_sums)][0]}; a log-probability is not")
    return (rewards - coef * kl_sums).astype(np.float32)


def token_weights(mean: Mean, lengths: np.ndarray, *, num_sequences: int, max_new_tokens: int) -> np.ndarray:
    """The weight of each token of each sequence, so that the loss is the sum of weighted token losses.

    token: 1 / sum L, sequence: 1 / (num_sequences L_i), constant: 1 / (num_sequences max_new_tokens). Pass all lengths
    of one optimizer step, over all hosts and micro-batches: then how it is cut up does not change the sum.

    The mean is over all tokens (DAPO), within each sequence and then over sequences (GRPO), or a constant (Dr. GRPO).
    Lengths and weights are [n]; a length of 0 is a masked sequence, whose weight is 0 and which `num_sequences` counts.
    """
    lengths = np.asarray(lengths, np.float64)
    trained = lengths > 0
    if mean == "token":
        denominators = np.full(lengths.shape, lengths.sum())
    elif mean == "sequence":
        denominators = num_sequences * lengths
    else:
        denominators = np.full(lengths.shape, float(num_sequences * max_new_tokens))
    return np.divide(1.0, denominators, out=np.zeros(lengths.shape), where=trained).astype(np.float32)


def _centred_by_group(rewards: np.ndarray) -> np.ndarray:
    """[N, G] less each row's mean; exactly 0 where they are equal, since float32 values add up exactly in float64."""
    return rewards - rewards.mean(axis=1, keepdims=True)


def _checked(rewards: np.ndarray, lengths: np.ndarray, *, least_group: int) -> tuple[np.ndarray, np.ndarray]:
    """Rewards as float32 values in float64, and lengths as float64, both [N, G]; ValueError where they cannot be."""
    rewards = np.asarray(rewards, np.float32).astype(np.float64)
    lengths = np.asarray(lengths, np.float64)
    if rewards.ndim != 2 or not rewards.size or rewards.shape != lengths.shape:
        raise ValueError(f"rewards {rewards.shape} and lengths {lengths.shape} must both be [prompts, completions]")
    if rewards.shape[1] < least_group:
        raise ValueError(f"group_size {rewards.shape[1]}: a group baseline needs at least {least_group}")
    if not np.isfinite(rewards).all():
        prompt, completion = np.argwhere(~np.isfinite(rewards))[0]
        raise ValueError(
            f"reward of prompt {prompt}, completion {completion} is {rewards[prompt, completion]}; rewards must be"
            " finite: fix the task's grade()"
        )
    if (lengths < 0).any():
        raise ValueError(f"lengths must not be negative, got {lengths.min():g}")
    return rewards, lengths
