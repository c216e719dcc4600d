"""Checks formulas without a model: losses and gradients on random log-probabilities, learning rates, update rules."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podium.algorithms.losses import Tokens, entropy_loss, policy_loss
from podium.certify.answer_ends import ends_check
from podium.certify.check_result import Check, largest
from podium.certify.known_answers import grades_check
from podium.certify.known_files import files_check
from podium.certify.known_models import architectures_check
from podium.certify.known_rows import rows_check
from podium.certify.made_up_rewards import rewards_check
from podium.certify.mixtures import choice_check, mixture_check
from podium.certify.naive import Scores, Sequences, in_float64, kl_losses, objective, policy_losses
from podium.certify.naive_optimizer import Arrays, NaiveOptimizer, gradient_norm, scheduled_rate
from podium.certify.naive_rules import (
    COVARIANT,
    DRAWN_LOGPROBS,
    KL_POINT,
    KL_TO,
    OLD_LOGPROBS,
    UNCERTAIN,
    Rules,
)
from podium.certify.plays import plays_check
from podium.certify.rounded_weights import rounding_check
from podium.certify.sampler_check import sampling_check
from podium.certify.small_moments import moments_check
from podium.certify.subject import Subject
from podium.certify.updates import Updates, relative, weight_difference
from podium.config.optimizer import OPTIMIZER_COPIES, OptimizerConfig
from podium.models.architecture import DecoderConfig, Lora
from podium.models.blocks.attention import Attention
from podium.models.blocks.kind import Block, Stack
from podium.models.blocks.mlp import Mlp
from podium.models.blocks.rope import Rope
from podium.models.params import param_specs
from podium.run.token_sizes import optimizer_steps
from podium.train.optimizer.transforms import learning_rate, make_optimizer

S, LENGTH = 24, 16
LOW, HIGH = 0.1, 0.3
"""Widths of an asymmetric clip."""
Changes = Mapping[str, Any]
"""Options of an algorithm that replace the config's, both in the recipe and in the naive rules."""
PLAIN: Changes = {
    "kl": "none",
    "kl_coef": 0.0,
    "kl_by_ratio": False,
    "correction": "none",
    "correction_level": "token",
    "correction_low": 0.0,
    "correction_high": 2.0,
    "drift_coef": 0.0,
    "off_policy_threshold": None,
    "top_entropy": 1.0,
    "dual_clip": None,
    "old_logprobs": "sampler",
}
UNEVEN: Changes = {**PLAIN, "clip_low": LOW, "clip_high": HIGH}
OPTIONED: Mapping[str, Changes] = {
    "sapo": {"tau_positive": 0.8, "tau_negative": 1.4},
    "vespo": {"k_positive": 1.5, "lambda_positive": 1.0, "k_negative": 0.5, "lambda_negative": 1.2},
    "dppo_tv": {"weight_cap": 1.3},
    "dppo_kl": {"weight_cap": 1.3},
}
"""Losses with options, and values of these options for the trainer and the formulas."""
LIKE_GRPO: Changes = {"loss": "clipped", "loss_options": {}}
"""Turns a recipe of preferences into one that samples, to check the formulas that preferences do not use."""
LABELLED: Changes = {"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.6}
PREFERENCES: Mapping[str, Changes] = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.2},
    "ipo": {"beta": 0.3},
    "dpo_hinge": {"beta": 0.4},
    "kto": LABELLED,
}
"""Losses of preferences, with options that give every term a noticeable size."""
POINT = 0.8
CORRECTED: Changes = {**UNEVEN, "loss": "clipped", "old_logprobs": "trainer"}
CLAIMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "clip": ("policy terms and their gradients are those of the papers, clipped on the right side", ()),
    "correction": (
        "tokens and sequences are weighted by exp(trainer's - sampler's log-probability), truncated or masked",
        ("clip",),
    ),
    "drift": (
        "off_policy_threshold leaves out sequences that became too unlikely, and drift_coef weighs the square",
        ("clip",),
    ),
    "uncertain tokens": (
        "with top_entropy the policy term is that of the chosen tokens alone",
        ("clip", "correction", "drift"),
    ),
    "kl": ("KL terms k2, k3 and k3+ and their gradients are those of their formulas", ("clip",)),
    "covariance": (
        "clip_cov leaves the chosen tokens out, and kl_cov holds them to the policy before the step",
        ("clip", "kl"),
    ),
}
"""The claim of each check of the loss's formulas, and the names of the checks that explain a red one."""
RULE_STEPS, RULE_TOTAL = 5, 7
"""Number of updates made with each update rule, and the length of the learning-rate schedule."""
RULE_OPTIONS: Changes = {
    "learning_rate": 0.05,
    "schedule": "cosine",
    "final_fraction": 0.1,
    "warmup_steps": 2,
    "weight_decay": 0.3,
    "beta1": 0.8,
    "beta2": 0.9,
    "eps": 1e-3,
    "clip_norm": 1.0,
    "moments": "float32",
}
"""Chosen so that each option affects several digits of an update."""
RULE_WEIGHTS = (
    "embed",
    "layers.attention_norm",
    "layers.q",
    "layers.q_bias",
    "layers.q.lora_b",
    "layers.o",
    "layers.o.lora_a",
    "layers.down",
)
"""One weight of each kind that the update rules treat differently."""
BFLOAT16_BAR = 2.0**-6
"""Bar for weights whose moments are kept in bfloat16: each moment is off by up to 2^-7, and an update uses two."""
BFLOAT16_MUON_BAR = 2.0**-3
"""Bar for Muon with moments in bfloat16: its iterations enlarge small components of a moment up to 482 times, so
rounding may change the whole direction where gradients have almost none. Errors of 0.05 and 0.08 of an update were
measured; errors below an eighth are noticed only with moments in float32."""
MUON_BAR = 1e-3
"""Bar for Muon: each of its five iterations enlarges small components of a gradient 3.44 times, so float32's rounding
of 2^-24 becomes 3e-5 of the result in each of a few sums."""


def formula_checks(updates: Updates) -> Iterator[Check]:
    """Check formulas: losses, learning rates, update rules, rewards, and draws of tokens and prompts."""
    subject = updates.subject
    if subject.rules.preferences:
        yield Check(
            name="preferences",
            claim="losses of pairs and of labelled answers, and their gradients, are those of the papers",
            difference=largest(_error_of_preferences(subject, each) for each in _losses_of_preferences(subject)),
        )
        subject = dataclasses.replace(
            subject,
            recipe=dataclasses.replace(subject.recipe, **LIKE_GRPO),
            rules=dataclasses.replace(subject.rules, **LIKE_GRPO),
        )
    for name, changes in formula_cases(subject.rules).items():
        claim, after = CLAIMS[name]
        errors = (_loss_error(subject, each, only_kl=name == "kl") for each in changes)
        yield Check(name=name, claim=claim, difference=largest(errors), after=after)
    yield Check(
        name="entropy",
        claim="the entropy bonus is a mean over all tokens of the optimizer step, and lowers the loss",
        difference=_entropy_error(subject),
    )
    optimizer, steps = subject.user.train.optimizer, optimizer_steps(subject.user)
    shaped: list[Changes] = [
        {"schedule": "linear", "warmup_steps": 3, "final_fraction": 0.2},
        {"schedule": "cosine", "warmup_steps": 0, "final_fraction": 0.1},
        {"schedule": "constant", "warmup_steps": 4},
    ]
    cases = [(optimizer, steps), *((optimizer.model_copy(update=dict(each)), 12) for each in shaped)]
    yield Check(
        name="schedule",
        claim="the learning rate of every step is the schedule's",
        difference=largest(_schedule_error(config, total) for config, total in cases),
    )
    yield from _rule_checks()
    yield moments_check()
    yield rounding_check()
    yield sampling_check()
    yield mixture_check(updates.subject.rollouts.spec)
    yield choice_check()
    yield ends_check()
    yield rewards_check()
    yield plays_check(updates.subject.user.tasks)
    yield grades_check(updates.subject.user.tasks)
    yield rows_check()
    yield architectures_check()
    yield files_check()


def formula_cases(own: Rules) -> dict[str, list[Changes]]:
    """The options with which each formula is checked, by the check's name; other formulas have no effect with them.

    One case of each formula has the values of the config, whose rules are `own`.
    """
    clip: list[Changes] = [{**PLAIN, **_values(own, "clip_low", "clip_high", "dual_clip", "old_logprobs")}]
    clip += [{**UNEVEN, "loss": loss} for loss in ("clipped", "gspo", "cispo", "gmpo", "reinforce")]
    clip += [{**UNEVEN, "loss": loss, "loss_options": options} for loss, options in OPTIONED.items()]
    clip += [{**UNEVEN, "loss": "clipped", "dual_clip": 2.0}, {**UNEVEN, "loss": "gspo", "old_logprobs": "trainer"}]
    drift: list[Changes] = [
        {**UNEVEN, "loss": "clipped", "off_policy_threshold": 0.05},
        {**UNEVEN, "loss": "dppo_tv", "drift_coef": 0.3},
        {**UNEVEN, "loss": "clipped", **_values(own, "off_policy_threshold", "drift_coef")},
    ]
    uncertain: list[Changes] = [
        {**UNEVEN, "loss": "clipped", "top_entropy": 0.4},
        {**CORRECTED, "correction": "truncate", "correction_high": 1.2, "top_entropy": 0.4, "drift_coef": 0.3},
    ]
    kl: list[Changes] = [
        {**UNEVEN, "loss": "clipped", "kl": kind, "kl_coef": 0.7, "kl_by_ratio": weighed}
        for kind in ("k2", "k3", "k3+")
        for weighed in (False, True)
    ]
    kl.append({**UNEVEN, "loss": "gspo", "kl": "k3", "kl_coef": 0.7, "kl_by_ratio": True})
    kl.append({**PLAIN, **_values(own, "kl", "kl_coef", "kl_by_ratio", "old_logprobs")})
    return {
        "clip": clip,
        "correction": list(_corrections(own)),
        "drift": drift,
        "uncertain tokens": uncertain,
        "kl": kl,
        "covariance": [
            {**UNEVEN, "loss": "clip_cov"},
            {**UNEVEN, "loss": "kl_cov", "loss_options": {"kl_weight": 0.4}},
        ],
    }


def _corrections(own: Rules) -> Iterator[Changes]:
    """Yield every kind of correction at every level, with a bound on either side, and the config's own."""
    for level, low, high in (("token", 0.8, 1.2), ("sequence", 0.3, 3.0), ("mean", 0.95, 1.05)):
        for kind in ("truncate", "mask", "reject"):
            bounds = {"correction_low": low, "correction_high": high}
            yield {**CORRECTED, "correction": kind, "correction_level": level, **bounds}
    yield {**CORRECTED, "correction": "truncate", "correction_high": 1.2, "penalised": True}
    if own.correction != "none":
        names = ("correction", "correction_level", "correction_low", "correction_high", "penalised", "old_logprobs")
        yield {**UNEVEN, "loss": "clipped", **_values(own, *names)}


def _values(rules: Rules, *names: str) -> Changes:
    """The config's own values of some options."""
    return {name: getattr(rules, name) for name in names}


def _schedule_error(config: OptimizerConfig, total: int) -> float:
    """Relative error of the learning rates, at every step, or at a thousand spread over a long run."""
    steps = np.unique(np.linspace(0, total - 1, min(total, 1000)).astype(int))
    rates = np.asarray(jax.vmap(learning_rate(config, total))(jnp.asarray(steps)) + jnp.zeros(len(steps)))
    return relative(rates, [scheduled_rate(config, total, int(step)) for step in steps])


def _loss_error(subject: Subject, changes: Changes, *, only_kl: bool = False) -> float:
    """Relative error of the token losses or of their gradient; with `only_kl`, advantages are 0 and the KL is left."""
    recipe = dataclasses.replace(subject.recipe, **changes)
    rules = dataclasses.replace(subject.rules, **changes)
    random = np.random.default_rng(0)
    logprobs = random.normal(-3.0, 1.0, (S, LENGTH)).astype(np.float32)
    sampled, old, kl_to = ((logprobs + random.normal(0.0, 0.3, (S, LENGTH))).astype(np.float32) for _ in range(3))
    valid = np.arange(LENGTH)[None] < random.integers(1, LENGTH + 1, S)[:, None]
    advantages = np.zeros(S) if only_kl else random.normal(0.0, 1.0, S).astype(np.float32)
    weights = (valid * random.uniform(0.5, 1.5, valid.shape)).astype(np.float32)
    uncertain = random.uniform(size=valid.shape) < recipe.top_entropy  # any choice of tokens
    covariant = random.uniform(size=valid.shape) < 0.3
    scores = {KL_TO: kl_to, UNCERTAIN: uncertain, COVARIANT: covariant, DRAWN_LOGPROBS: sampled[::-1]}
    if rules.old_logprobs == "trainer":
        scores[OLD_LOGPROBS] = old
    sequences = _made_up(valid, weights, advantages[:, None], sampled, scores=scores, kl_coef=rules.kl_coef)

    def ours(logprobs: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = Tokens(
            logprobs,
            old_logprobs=jnp.asarray(sampled),
            advantages=jnp.asarray(sequences.advantages, jnp.float32),
            segments=jnp.ones((S, LENGTH), jnp.int32),
            mask=jnp.asarray(valid, jnp.float32),
            scores={name: jnp.asarray(x, jnp.float32) for name, x in scores.items()},
        )
        losses, _ = policy_loss(recipe, tokens)
        return jnp.sum(losses * weights), losses * weights

    (_, losses), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(jnp.asarray(logprobs))
    expected, slope = _naive_losses(rules, logprobs, sequences)
    return max(relative(losses, expected), relative(gradient, slope))


def _made_up(
    valid: np.ndarray,
    weights: np.ndarray,
    advantages: np.ndarray,
    sampled: np.ndarray,
    *,
    scores: Mapping[str, np.ndarray],
    kl_coef: float = 0.0,
    entropy_bonus: float = 0.0,
) -> Sequences[np.ndarray]:
    """An optimizer step of S made-up episodes, whose tokens no formula reads."""
    return Sequences(
        tokens=np.zeros((S, 0), np.int32),
        starts=np.zeros(S, np.int32),
        valid=valid,
        weights=weights,
        advantages=np.broadcast_to(advantages, valid.shape),
        sampled_logprobs=sampled,
        scores=scores,
        kl_coef=np.asarray(kl_coef),
        entropy_bonus=np.asarray(entropy_bonus),
    )


def _naive_losses(
    rules: Rules, logprobs: np.ndarray, sequences: Sequences[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The naive weighted loss of each token, [S, LENGTH], and the gradient of their sum, in float64."""

    def losses(logprobs: jax.Array, own: Sequences[jax.Array]) -> tuple[jax.Array, jax.Array]:
        found = (policy_losses(rules, logprobs, own) + kl_losses(rules, logprobs, own)) * own.weights
        return jnp.sum(found), found

    with in_float64():
        own: Sequences[jax.Array] = jax.tree.map(jnp.asarray, sequences)
        given = jnp.asarray(logprobs, jnp.float64)
        (_, found), slope = jax.jit(jax.value_and_grad(losses, has_aux=True))(given, own)
        return np.asarray(found), np.asarray(slope)


def _losses_of_preferences(subject: Subject) -> Iterator[Changes]:
    """Yield the config's own loss, and every loss of preferences with options."""
    yield {"loss": subject.rules.loss, "loss_options": dict(subject.rules.loss_options)}
    yield from ({"loss": loss, "loss_options": options} for loss, options in PREFERENCES.items())


def _error_of_preferences(subject: Subject, changes: Changes) -> float:
    """Relative error of the losses of S preferred or rejected completions, or of their gradient.

    The trainer is given the two completions of a pair as two segments of one row, after a prompt of one token.
    """
    recipe, rules = dataclasses.replace(subject.recipe, **changes), dataclasses.replace(subject.rules, **changes)
    random = np.random.default_rng(0)
    logprobs = random.normal(-3.0, 1.0, (S, LENGTH)).astype(np.float32)
    kl_to = (logprobs + random.normal(0.0, 0.5, (S, LENGTH))).astype(np.float32)
    valid = np.arange(LENGTH)[None] < random.integers(1, LENGTH + 1, S)[:, None]
    advantages = np.where(np.arange(S) % 2, -1.0, 1.0)[:, None] * np.ones((S, LENGTH))
    weights = (valid * random.uniform(0.5, 1.5, valid.shape)).astype(np.float32)
    segments = np.where(valid, np.arange(S)[:, None] % 2 + 2, 0)

    def rows(x: np.ndarray) -> jax.Array:
        """[S, LENGTH] -> [S / 2, 1 + 2 LENGTH], with a prompt."""
        return jnp.asarray(np.pad(x.reshape(S // 2, 2 * LENGTH), ((0, 0), (1, 0))))

    prompts = jnp.ones((S // 2, 1 + 2 * LENGTH), jnp.int32)
    shares = rows(weights)

    def ours(logprobs: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = Tokens(
            logprobs,
            old_logprobs=jnp.zeros_like(logprobs),
            advantages=rows(advantages.astype(np.float32)),
            segments=rows(segments.astype(np.int32)),
            mask=rows(valid.astype(np.float32)),
            scores={KL_TO: rows(kl_to), KL_POINT: jnp.full(prompts.shape, POINT, jnp.float32)},
            prompts=prompts,
        )
        losses, _ = policy_loss(recipe, tokens)
        return jnp.sum(losses * shares), losses * shares

    (_, losses), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(rows(logprobs))
    found, slopes = (np.asarray(x)[:, 1:].reshape(S, LENGTH) for x in (losses, gradient))
    nothing = np.zeros((S, LENGTH))
    scores = {OLD_LOGPROBS: nothing, KL_TO: kl_to, KL_POINT: np.asarray(POINT)}
    sequences = _made_up(valid, weights, advantages, nothing, scores=scores)
    expected, slope = _naive_losses(rules, logprobs, sequences)
    return max(relative(found, expected), relative(slopes, slope))


def _entropy_error(subject: Subject) -> float:
    """Relative error of the entropy bonus of a step with two micro-batches of unequal numbers of tokens."""
    random, bonus = np.random.default_rng(1), 0.3
    entropy = random.uniform(0.5, 5.0, (S, LENGTH)).astype(np.float32)
    valid = np.arange(LENGTH)[None] < np.arange(1, S + 1)[:, None]
    mask, halves = jnp.asarray(valid, jnp.float32), (slice(S // 2), slice(S // 2, None))
    shares = [
        entropy_loss(jnp.asarray(entropy[half]), mask[half], num_tokens=jnp.sum(mask), entropy_bonus=bonus)
        for half in halves
    ]
    rules, nothing = dataclasses.replace(subject.rules, **LIKE_GRPO, **PLAIN), np.zeros((S, LENGTH))
    with in_float64():
        sequences = _made_up(valid, nothing, nothing, nothing, scores={}, entropy_bonus=bonus)
        own: Sequences[jax.Array] = jax.tree.map(jnp.asarray, sequences)
        found = Scores(logprobs=own.weights, entropy=jnp.asarray(entropy))
        expected, _ = objective(rules, found, own)
        return relative(float(sum(map(float, shares))), float(expected))


def _rule_checks() -> Iterator[Check]:
    """Check every update rule on small arrays whose gradients are clipped in some steps and not in others."""
    for name in OPTIMIZER_COPIES:
        options = OptimizerConfig(name=name).model_copy(update=dict(RULE_OPTIONS))
        plain = options.model_copy(update={"weight_decay": 0.0, "clip_norm": 0.0, "schedule": "linear"})
        cases = [options, plain] if name == "adamw" else [options]  # the rest is common to all rules
        yield Check(
            name=f"optimizer {name}",
            claim=f"{name}'s updates are optax's on whole arrays, clipped, decayed and scaled by their formulas",
            difference=largest(map(rule_error, cases)),
            bar=MUON_BAR if name == "muon" else Check.bar,
            after=("schedule",) if name == "adamw" else ("schedule", "optimizer adamw"),
        )


def rule_error(config: OptimizerConfig) -> float:
    """The largest error of the weights over `RULE_STEPS` updates, relative to the size of each update's change."""
    rope = Rope(theta=1e4, dims=4)
    attention = Attention(heads=4, kv_heads=2, head_dim=4, rope=rope, bias=True, norm=True)
    decoder = DecoderConfig(
        model_type="llama",
        vocab=10,
        width=8,
        stacks=(Stack(pattern=(Block(mixer=attention, feed_forward=Mlp(width=12)),), repeats=2),),
        max_positions=16,
        norm_eps=1e-5,
        tied=False,
        lora=Lora(rank=2, alpha=4.0, targets=("q", "o")),
    )
    specs = {name: spec for name, spec in param_specs(decoder).items() if name in RULE_WEIGHTS}
    random = np.random.default_rng(0)
    weights: Arrays = {name: random.normal(0.0, 0.1, spec.shape).astype(np.float32) for name, spec in specs.items()}
    optimizer = make_optimizer(config, RULE_TOTAL, specs)
    ours = {name: jnp.asarray(value) for name, value in weights.items()}
    state = optimizer.init(ours)
    update = jax.jit(optimizer.update)
    with in_float64():
        naive = NaiveOptimizer(config, RULE_TOTAL, weights)
    worst = 0.0
    for step in range(RULE_STEPS):
        gradients = {name: random.normal(0.0, 1.0, spec.shape) for name, spec in specs.items()}
        size = (0.3, 3.0, 0.7, 5.0, 2.0)[step] / gradient_norm(gradients)
        gradients = {name: (size * x).astype(np.float32) for name, x in gradients.items()}
        changes, state = update(gradients, state, ours)
        before = {name: np.asarray(x) for name, x in ours.items()}
        ours = jax.tree.map(jnp.add, ours, changes)
        with in_float64():
            expected = naive.update(before, gradients, step)
        worst = max(worst, weight_difference(ours, before, expected))
    return worst
