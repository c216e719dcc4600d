"""Host-side processing of rewards before an update: advantages, KL penalties in the reward, and token weights.

N prompts with G completions each: rewards [N, G] and lengths [N, G] (number of trained tokens; 0 for a masked
completion) give advantages [N, G] float32. Every function of this form can be a recipe's advantage; those that compare
completions of one prompt raise ValueError if G is 1. A reward is NaN, and its length 0, where a conversation failed for
a reason that is not the model's: it counts in no mean, and its advantage is 0. Rewards are rounded to float32, so that
sums which differ only by rounding are equal; arithmetic is float64. Numpy only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

Mean = Literal["token", "sequence", "constant"]
Std = Literal["none", "group", "batch"]
VALUES = "values"
"""The score of a critic: its estimate of the rewards to come, before each token is drawn."""
RETURNS = "returns"
"""Name in a batch's scores of the returns that the critic is trained on; VALUES are its estimates."""


class TokenScores(NamedTuple):
    """Tokens of a step's episodes with their scores, for per-token advantages; n is the longest part after a prompt."""

    mask: np.ndarray  # [N, G, n] bool, whether the model drew the token; False beyond an episode's end
    sampled_logprobs: np.ndarray  # [N, G, n] float32
    scores: Mapping[str, np.ndarray]
    """[N, G, n] float32, by the name of the score."""


class RewardParts(NamedTuple):
    """The parts of a step's rewards before weighting, and their weights; where a part does not apply: NaN, weight 0."""

    values: np.ndarray  # [N, G, P]
    weights: np.ndarray  # [N, G, P]


def equal_reward_groups(rewards: np.ndarray) -> np.ndarray:
    """[N] bool: which groups have equal rewards [N, G], so that a group baseline gives zero advantage.

    Failed episodes do not count; a group with fewer than two others is one of equal rewards.
    """
    rewards = np.asarray(rewards, np.float32)
    failed = np.isnan(rewards)
    return np.where(failed, -np.inf, rewards).max(axis=1) <= np.where(failed, np.inf, rewards).min(axis=1)


def reward_advantages(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The rewards themselves as advantages: completions are imitated in proportion to their reward."""
    return np.nan_to_num(np.asarray(rewards, np.float32))


def no_advantages(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Zeros [N, G], for recipes that learn from a teacher and not from rewards."""
    return np.zeros(np.shape(rewards), np.float32)


def group_advantages(
    rewards: np.ndarray, lengths: np.ndarray, *, std: Std, std_ddof: int, std_eps: float
) -> np.ndarray:
    """Rewards minus the group's mean, divided by a standard deviation: (r - mean_g) / (std + eps).

    GRPO (arXiv:2402.03300) with `std="group"`, Dr. GRPO (arXiv:2503.20783) with `std="none"`; `std="batch"` uses the
    standard deviation of all rewards in the batch (arXiv:2508.08221). A group of equal rewards gives 0. `std_ddof` is 1
    for the unbiased variance (n - 1), 0 for the population variance.
    """
    rewards, _ = _checked(rewards, lengths, least_group=2)
    centred = _centred_by_group(rewards)
    if std == "group":
        centred = centred / (_std(rewards, std_ddof, axis=1) + std_eps)
    elif std == "batch":
        centred = centred / (_std(rewards, std_ddof, axis=None) + std_eps)
    return centred.astype(np.float32)


def leave_one_out_advantages(
    rewards: np.ndarray, lengths: np.ndarray, *, std: Std = "none", std_ddof: int = 1, std_eps: float = 1e-6
) -> np.ndarray:
    """Rewards minus the mean of the group's other rewards: G / (G - 1) (r - mean_g). RLOO (arXiv:2402.14740).

    `std="group"` divides by the standard deviation of the same other rewards, which is NeMo-RL's default; if they are
    equal, nothing is divided. `std="batch"` divides by the standard deviation of all rewards.
    """
    rewards, _ = _checked(rewards, lengths, least_group=2)
    group = np.count_nonzero(~np.isnan(rewards), axis=1, keepdims=True)  # [N, 1]
    found = group / np.maximum(group - 1, 1) * _centred_by_group(rewards)
    if std == "group":
        _, G = rewards.shape
        others = np.where(np.eye(G, dtype=bool)[None], np.nan, rewards[:, None])  # [N, G, G]: of each, without itself
        spread = _std(others.reshape(-1, G), std_ddof, axis=1).reshape(rewards.shape)
        found = found / np.where(spread > 0, spread + std_eps, 1.0)
    elif std == "batch":
        found = found / (_std(rewards, std_ddof, axis=None) + std_eps)
    return found.astype(np.float32)


def decoupled_advantages(
    rewards: np.ndarray, lengths: np.ndarray, *, parts: RewardParts, std_ddof: int, std_eps: float
) -> np.ndarray:
    """Each part of the reward standardised in its group, then summed by weight, then standardised over the batch.

    GDPO (arXiv:2601.05242): a part with a large variance does not dominate the others. `rewards` only say which
    completions have no reward (NaN).
    """
    rewards, _ = _checked(rewards, lengths, least_group=2)
    total = np.zeros(rewards.shape)
    for part in range(parts.values.shape[2]):
        own = np.asarray(parts.values[:, :, part], np.float32).astype(np.float64)
        total += parts.weights[:, :, part] * _centred_by_group(own) / (_std(own, std_ddof, axis=1) + std_eps)
    total = np.where(np.isnan(rewards), np.nan, total)
    spread = _std(total, std_ddof, axis=None) + std_eps
    return np.nan_to_num((total - _means(total, axis=None)) / spread).astype(np.float32)


def length_weighted_advantages(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rewards minus the group's mean weighted by length: r - sum L r / sum L. OPO (arXiv:2505.23585).

    That baseline has the least variance if the squared gradient of a completion grows with its length. A completion
    that is left out has length 0, and so does not affect the baseline.
    """
    rewards, lengths = _checked(rewards, lengths, least_group=2)
    centred = _centred_by_group(rewards)
    total = lengths.sum(axis=1, keepdims=True)  # [N, 1]
    shift = (lengths * centred).sum(axis=1, keepdims=True) / np.maximum(total, 1.0)
    return np.where(np.isnan(rewards), 0.0, centred - shift).astype(np.float32)


def rescaled_advantages(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rewards minus the group's mean, times B / (B - M): GPG (arXiv:2504.02546).

    M of the batch's B completions are in groups of equal rewards, which have no gradient; the factor makes the mean
    over the batch equal that over the other completions.
    """
    rewards, _ = _checked(rewards, lengths, least_group=2)
    known = np.count_nonzero(~np.isnan(rewards), axis=1)  # [N]
    taught = known[~equal_reward_groups(rewards)].sum()
    return (_centred_by_group(rewards) * known.sum() / max(taught, 1)).astype(np.float32)


def pass_at_k_advantages(rewards: np.ndarray, lengths: np.ndarray, *, k: float) -> np.ndarray:
    """Advantages if each set of k completions is rewarded with its best reward: pass@k training (arXiv:2508.10751).

    A completion has the mean reward of the sets that it is in, minus the mean of all sets of its group, divided by
    their (population) standard deviation + 1e-6. With rewards 0 and 1, c of n right, that mean is rho = 1 - C(n - c, k)
    / C(n, k); a right completion has (1 - rho) / sqrt(rho (1 - rho)).
    """
    rewards, _ = _checked(rewards, lengths, least_group=2)
    found = np.zeros(rewards.shape)
    for row, own in enumerate(rewards):
        known = np.flatnonzero(~np.isnan(own))
        if len(known):
            found[row, known] = _of_sets(own[known] - own[known].mean(), min(int(k), len(known)))
    return found.astype(np.float32)


def _of_sets(rewards: np.ndarray, k: int) -> np.ndarray:
    """`pass_at_k_advantages` of one group, [n]."""
    n = len(rewards)
    ranked = np.sort(rewards)
    share = np.array([math.comb(rank, k - 1) / math.comb(n, k) for rank in range(n)])  # of sets whose best it is
    mean = share @ ranked
    deviation = math.sqrt(share @ (ranked - mean) ** 2)
    own = rewards
    if k > 1:
        share = np.array([math.comb(rank, k - 2) / math.comb(n - 1, k - 1) for rank in range(n - 1)])  # of the others
        own = np.array([share @ np.maximum(np.sort(np.delete(rewards, i)), rewards[i]) for i in range(n)])
    return (own - mean) / (deviation + 1e-6)


def maxrl_advantages(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rewards minus the group's mean, divided by that mean: (r - mean_g) / mean_g, or 0 if it is 0 (arXiv:2602.02710).

    The mean stands for the probability of success, so a negative reward raises ValueError.
    """
    rewards, _ = _checked(rewards, lengths, least_group=2)
    if np.any(rewards < 0):
        raise ValueError(
            f"maxrl: a reward of {np.nanmin(rewards):g}; advantages are divided by the group's mean, so rewards must"
            " not be negative; drop the penalties from tasks.rewards, or set algorithm.recipe to dr_grpo"
        )
    mean = _means(rewards, axis=1)  # [N, 1]
    return (_centred_by_group(rewards) / np.where(mean > 0, mean, 1.0)).astype(np.float32)


def batch_mean_advantages(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rewards minus the mean of the batch, which has at least 2: REINFORCE with a baseline (Williams, 1992)."""
    rewards, _ = _checked(rewards, lengths, least_group=1)
    if rewards.size < 2:
        raise ValueError(
            "a batch of 1 completion is its own mean and has no advantage; raise prompts_per_step or group_size"
        )
    return np.nan_to_num(rewards - _means(rewards, axis=None)).astype(np.float32)


def greedy_advantages(rewards: np.ndarray, lengths: np.ndarray, *, baselines: np.ndarray) -> np.ndarray:
    """Rewards minus that of the prompt's greedy completion: r - r_greedy. ReMax (arXiv:2310.10505).

    `baselines` [N] are the rewards of greedy completions; where one is NaN, the prompt has no baseline and its
    advantages are 0.
    """
    rewards, _ = _checked(rewards, lengths, least_group=1)
    known = np.asarray(baselines, np.float32).astype(np.float64)
    return np.nan_to_num(rewards - known[:, None]).astype(np.float32)


def whitened_advantages(
    rewards: np.ndarray, lengths: np.ndarray, *, group_baseline: bool, std_eps: float
) -> np.ndarray:
    """Token returns, standardised over all tokens of the batch: REINFORCE++ (arXiv:2501.03262).

    Without discounting, every token's return is its completion's reward, so mean and (population) variance over tokens
    are those over completions weighted by length. A batch of equal returns gives 0; with `group_baseline`, a group of
    equal rewards is then shifted by the batch's mean, like all others.

    `group_baseline` first subtracts each group's mean (the paper's baseline form); `std_eps` is added to the standard
    deviation.
    """
    rewards, lengths = _checked(rewards, lengths, least_group=2 if group_baseline else 1)
    returns = _centred_by_group(rewards) if group_baseline else np.nan_to_num(rewards)
    trained = returns[lengths > 0]
    if not trained.size or trained.max() == trained.min():
        return np.zeros(returns.shape, np.float32)
    share = lengths / lengths.sum()  # share of the batch's tokens
    centred = returns - np.sum(share * returns)
    std = np.sqrt(np.sum(share * centred**2))
    return np.where(np.isnan(rewards), 0.0, centred / (std + std_eps)).astype(np.float32)


def turn_returns(turn_rewards: Sequence[Sequence[Sequence[float]]], gamma: float) -> np.ndarray:
    """The discounted return from each turn on: r_t + gamma r_(t+1) + ...; [N, G, K] for at most K turns.

    NaN where a conversation did not reach the turn, or has no reward.
    """
    longest = max((len(turns) for group in turn_rewards for turns in group), default=0)
    returns = np.full((len(turn_rewards), max(map(len, turn_rewards), default=0), longest), np.nan)
    for n, group in enumerate(turn_rewards):
        for g, turns in enumerate(group):
            later = 0.0
            for k in reversed(range(len(turns))):
                later = turns[k] + gamma * later
                returns[n, g, k] = later
    return returns


def turn_advantages(
    advantage: Callable[[np.ndarray, np.ndarray], np.ndarray], returns: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """A recipe's advantages per turn, [N, G, K]: a turn is compared with the same turn of the group's conversations.

    Turns are compared by their number, as in MT-GRPO (arXiv:2505.11821) and Kevin (arXiv:2507.11948). `lengths`
    [N, G, K] are the turns' trained tokens; a turn that only one conversation of a group reached has advantage 0.
    """
    by_turn = [advantage(returns[:, :, k], lengths[:, :, k]) for k in range(returns.shape[2])]
    alone = np.count_nonzero(~np.isnan(returns), axis=1, keepdims=True) < 2  # [N, 1, K]
    return np.where(alone | np.isnan(returns), np.float32(0), np.stack(by_turn, axis=2)).astype(np.float32)


def taught_advantages(
    advantages: np.ndarray, teacher_logprobs: np.ndarray, logprobs: np.ndarray, mask: np.ndarray, *, weight: float
) -> np.ndarray:
    """Per-token advantages with a term for a teacher: A_t + weight (teacher_logprob_t - logprob_t), [N, G, n].

    On-policy, the expected gradient of the second term is that of -weight KL(policy || teacher). It is added after the
    rewards' advantages are normalised, and is not normalised itself.

    Args:
        advantages: [N, G], or of tokens, [N, G, n].
        teacher_logprobs: [N, G, n].
        logprobs: [N, G, n], of the policy before the step's first update.
        mask: [N, G, n] bool, whether the model drew the token; others have advantage 0.
        weight: of the teacher.
    """
    own = advantages if advantages.ndim == 3 else advantages[:, :, None]
    return np.where(mask, own + np.float32(weight) * (teacher_logprobs - logprobs), np.float32(0))


def gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (arXiv:1506.02438) over the tokens that the model drew.

    With delta_t = r_t + gamma V_(t+1) - V_t, A_t = delta_t + gamma lam A_(t+1), where t + 1 is the next drawn token:
    tokens from an environment in between are skipped. After the last drawn token, V and A are 0.

    Args:
        rewards: [..., n], of each token.
        values: [..., n], the critic's estimate before each token is drawn.
        mask: [..., n] bool, whether the model drew the token.
        gamma: discount from one drawn token to the next.
        lam: weight of later estimates, 0 to 1.

    Returns:
        Advantages and returns (advantages + values) of drawn tokens, [..., n] float64 each; 0 elsewhere.
    """
    wide = np.asarray(values, np.float64)
    advantages = np.zeros(wide.shape)
    next_value = np.zeros(wide.shape[:-1])
    later = np.zeros(wide.shape[:-1])
    for t in reversed(range(wide.shape[-1])):
        drawn = mask[..., t]
        own = rewards[..., t] + gamma * next_value - wide[..., t] + gamma * lam * later
        advantages[..., t] = np.where(drawn, own, 0.0)
        later = np.where(drawn, own, later)
        next_value = np.where(drawn, wide[..., t], next_value)
    return advantages, np.where(mask, advantages + wide, 0.0)


def final_rewards(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Rewards of episodes [N, G] placed at their last drawn token, [N, G, n]; 0 for one without drawn tokens.

    A reward that is NaN is left out.
    """
    later = np.cumsum(mask[:, :, ::-1], axis=2)[:, :, ::-1]  # [N, G, n], drawn tokens from each on
    at_last = mask & (later == 1)
    return np.where(at_last, np.nan_to_num(np.asarray(rewards, np.float32))[:, :, None], 0.0)


def value_returns(rewards: np.ndarray, tokens: TokenScores, *, gamma: float, lam: float) -> np.ndarray:
    """What a critic learns: the lambda-return of each drawn token, [N, G, n] float32.

    `rewards` [N, G] are those of episodes; `tokens.scores` has the critic's VALUES.
    """
    paid = final_rewards(rewards, tokens.mask)
    _, returns = gae(paid, tokens.scores[VALUES], tokens.mask, gamma=gamma, lam=lam)
    return returns.astype(np.float32)


def gae_advantages(
    rewards: np.ndarray,
    lengths: np.ndarray,
    *,
    tokens: TokenScores,
    gamma: float,
    lam: float,
    std: Std,
    std_ddof: int,
    std_eps: float,
) -> np.ndarray:
    """Per-token advantages by `gae` from a critic's values, [N, G, n]; an episode's reward is at its last drawn token.

    With `std="batch"` they are standardised over all drawn tokens of the batch, as verl and OpenRLHF do.
    """
    found, _ = gae(final_rewards(rewards, tokens.mask), tokens.scores[VALUES], tokens.mask, gamma=gamma, lam=lam)
    drawn = found[tokens.mask]
    if std == "batch" and drawn.size:
        spread = np.sqrt(np.sum((drawn - drawn.mean()) ** 2) / max(drawn.size - std_ddof, 1))
        found = (found - drawn.mean()) / (spread + std_eps)
    return np.where(tokens.mask, found, 0.0).astype(np.float32)


def penalised_rewards(rewards: np.ndarray, kl_sums: np.ndarray, coef: float) -> np.ndarray:
    """Rewards minus the KL penalty of `kl: k1_reward`: r - coef sum_t (sampled_logprob - reference_logprob).

    The whole completion is charged its total KL. REINFORCE++ and PPO charge a token only for the KL from that token on
    (the KL-to-go), which has the same expected gradient and less variance, but needs per-token advantages.

    `kl_sums` [N, G] is sampled - reference log-probability, summed over each completion's tokens.
    """
    kl_sums = np.asarray(kl_sums, np.float64)
    rewards, _ = _checked(rewards, np.where(np.isnan(rewards), 0.0, np.ones(kl_sums.shape)), least_group=1)
    if not np.isfinite(kl_sums).all():
        raise ValueError(f"KL to the reference model is {kl_sums[~np.isfinite(kl_sums)][0]}; a log-probability is not")
    return (rewards - coef * kl_sums).astype(np.float32)


def token_weights(mean: Mean, lengths: np.ndarray, *, num_sequences: int, max_new_tokens: int) -> np.ndarray:
    """The weight of each token of a sequence, such that the loss is the sum of weighted token losses.

    token: 1 / sum L, sequence: 1 / (num_sequences L_i), constant: 1 / (num_sequences max_new_tokens). Pass all
    lengths of one optimizer step, over all hosts and micro-batches, so that the sum does not depend on how the step
    is divided.

    token averages over all tokens (DAPO); sequence within each sequence and then over sequences (GRPO); constant
    divides by a constant length (Dr. GRPO). Lengths and weights are [n]; a masked sequence has length 0 and weight 0,
    and counts in `num_sequences`.
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
    """[N, G] minus each row's mean; exactly 0 for equal rewards, since sums of float32 values are exact in float64."""
    return np.nan_to_num(rewards - _means(rewards, axis=1))


def _means(rewards: np.ndarray, axis: int | None) -> np.ndarray:
    """Means over the non-NaN entries along an axis, which is kept; 0 if all are NaN."""
    known = ~np.isnan(rewards)
    if known.all():
        return rewards.mean(axis=axis, keepdims=True)
    return np.where(known, rewards, 0.0).sum(axis=axis, keepdims=True) / np.maximum(
        known.sum(axis=axis, keepdims=True), 1
    )


def _std(rewards: np.ndarray, ddof: int, axis: int | None) -> np.ndarray:
    """Standard deviations like `_means`; 0 for a single reward."""
    known = ~np.isnan(rewards)
    if known.all():
        return rewards.std(axis=axis, ddof=ddof, keepdims=True)
    squares = np.where(known, (rewards - _means(rewards, axis)) ** 2, 0.0).sum(axis=axis, keepdims=True)
    return np.sqrt(squares / np.maximum(known.sum(axis=axis, keepdims=True) - ddof, 1))


def _checked(rewards: np.ndarray, lengths: np.ndarray, *, least_group: int) -> tuple[np.ndarray, np.ndarray]:
    """Validate; returns rewards, rounded to float32, and lengths, both as float64 [N, G]. Raises ValueError."""
    rewards = np.asarray(rewards, np.float32).astype(np.float64)
    lengths = np.asarray(lengths, np.float64)
    if rewards.ndim != 2 or not rewards.size or rewards.shape != lengths.shape:
        raise ValueError(f"rewards {rewards.shape} and lengths {lengths.shape} must both be [prompts, completions]")
    if rewards.shape[1] < least_group:
        raise ValueError(f"group_size {rewards.shape[1]}: a group baseline needs at least {least_group}")
    unknown = ~np.isfinite(rewards) & ~(np.isnan(rewards) & (lengths == 0))
    if unknown.any():
        prompt, completion = np.argwhere(unknown)[0]
        raise ValueError(
            f"reward of prompt {prompt}, completion {completion} is {rewards[prompt, completion]}; rewards must be"
            " finite in float32: make the parts of the reward or their weights smaller"
        )
    if (lengths < 0).any():
        raise ValueError(f"lengths must not be negative, got {lengths.min():g}")
    return rewards, lengths
