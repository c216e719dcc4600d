"""Makes the small run that represents the user's: its settings, its models, and what the watched training changes.

Every model of the user's run is known here by its section of the config; all other checks know it by its role.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from podium.algorithms.recipe_options import make_recipe
from podium.algorithms.recipes import Recipe
from podium.certify.naive_optimizer import gradient_norm
from podium.certify.naive_rules import KL_TO, Distillation, Rules, rules_of
from podium.certify.numbers_task import (
    CONVERSATIONS,
    LONGEST_MESSAGE,
    LONGEST_PROMPT,
    LONGEST_REPLY,
    MOST_CALLS,
    MOST_EVALUATED,
    NAME,
    STOPS,
    TURNS,
)
from podium.certify.subject import (
    HINT,
    MAX_NEW_TOKENS,
    PROMPTS,
    ROW_TOKENS,
    NaiveModel,
    Subject,
    one_device,
    shortest_prompt,
)
from podium.certify.tiny import Arrays, other_weights, random_weights, tiny_clone
from podium.certify.updates import PLAIN, naive_update
from podium.config.critic_section import CriticConfig
from podium.config.data import DataConfig
from podium.config.imports import is_path
from podium.config.reference import ReferenceConfig
from podium.config.schema import (
    WITHOUT_MODELS,
    AlgorithmConfig,
    Config,
    EnvironmentsConfig,
    GradingConfig,
    LimitsConfig,
    LossPartConfig,
    RolloutConfig,
    TaskConfig,
)
from podium.models.architecture import DecoderConfig, frozen_decoder, scoring_decoder
from podium.models.params import is_adapter
from podium.run.resolve import resolve_algorithm, resolve_recipe
from podium.run.roles import find_decoder, scoring_models
from podium.run.run_spec import SCORE, Role
from podium.tasks.conversations.environment_forms import conversing
from podium.train.setup import load_weights, make_model

COMPLETIONS = 4
LONGEST_CONVERSATION = LONGEST_PROMPT + 2 * MAX_NEW_TOKENS + LONGEST_REPLY
"""Tokens of the longest conversation in the run that is watched: some are cut before their last turn."""
OTHER_SEED = 10  # replaces a seed of 0; with it steps of the watched run wait, and limits cut answers
OTHER_THAN_1 = 0.9  # replaces a temperature of 1, at which a missing division would not show
IN_FLIGHT = 2.0  # rollout.in_flight: completions span several steps, and updates come between turns and their replies
MAX_STALENESS = 1  # so that a step has to wait for prompts that would become too old
PAGE_TOKENS = 4  # several pages even for short sequences
CACHE_SHARE = 0.35  # of the cache tokens that all slots need at most, so that sequences are preempted
EVAL_SAMPLES = 2  # answers to each evaluation question, besides the greedy one
EVAL_TEMPERATURE = 0.7  # replaces a temperature of 1
MOST_DRAWN = 24  # tokens that the model draws in a conversation, which cuts some of them
RETRIES = 1  # restarts of a conversation whose environment failed
OVERLONG_TOKENS = 6  # last tokens before MAX_NEW_TOKENS, over which the length reward falls
REWARDS = {"correct": 0.8, "length": 0.3}
"""Weights of parts of the reward. Without the length, which is never positive, totals may be equal in a group."""
PRIVILEGED = "{question} {answer}"
"""The template of a privileged prompt; the naive implementation joins its tokens in its own code."""
STEPS = 4
STEPS_OF_A_MOVING_REFERENCE = 5
SYNC_EVERY = 2
"""Steps between two changes of a moving reference: the last of five steps compares with one that has moved twice."""
KL_GAIN = 2.0
"""Least `kl_gain` of an adapted KL, whose coefficient would otherwise hardly change in a few steps."""
RATE = 1e-3
"""Learning rate of every rule except sgd; log-probabilities change by a few hundredths of a nat."""
SGD_RATE = 0.03
DECAY = 0.1
WARMUP = 3  # optimizer steps
FINAL_FRACTION = 0.1  # replaces 0, with which the last optimizer step would change nothing
CRITIC_WARMUP = 1  # steps
CRITIC_UPDATES = 2  # of each minibatch
CLIPPED = 0.7  # clip_norm as a fraction of the first gradient's norm, so that all gradients are clipped


class RunSettings(NamedTuple):
    """The settings of the run that is watched."""

    config: Config
    learning: Mapping[str, CriticConfig]
    """How each model that is trained beside the policy learns, by the name of its role."""
    moving: Mapping[str, ReferenceConfig]
    """How each model that moves follows the policy, by the name of its role."""


def make_subject(config: Config, *, full: bool = False) -> Subject:
    """Make a tiny clone of the config's model with random weights; with `full`, load the model itself.

    Raises:
        ValueError: the model cannot be used, or the loss is the user's own.
    """
    user, config = config, _small_step(config)
    if full:
        model = make_model(config)
        decoder, loaded = model.decoder, load_weights(dataclasses.replace(model, mesh=one_device()), None)
        weights = {name: np.asarray(value, np.float32) for name, value in loaded.items()}
        weights |= {name: value for name, value in random_weights(decoder, seed=0).items() if is_adapter(name)}
    else:
        decoder = tiny_clone(find_decoder(config))
        weights = random_weights(decoder, seed=0)
    recipe = dataclasses.replace(resolve_recipe(config), loss_parts={}, router_loss_coef=0.0)
    rules = _rules_of_own(recipe) if is_path(config.algorithm.recipe) else rules_of(config.algorithm)
    rules = dataclasses.replace(rules, penalised=config.rollout.repetition_penalty != 1)
    if (teacher := config.teacher) is not None:
        own_prompts = teacher.prompt == "privileged"
        distilled = Distillation(teacher.weight, teacher.loss, reverse=teacher.reverse, own_prompts=own_prompts)
        rules = dataclasses.replace(rules, distilled=distilled)
    by_totals = rules.zero_variance != "keep" and rules.zero_variance_metric is None
    parts = ("correct",) if by_totals or rules.advantage == "maxrl" else tuple(REWARDS)
    name = NAME if config.rollout.max_episode_tokens is None else CONVERSATIONS
    options: dict[str, object] = {"vocab": decoder.vocab, "shortest": shortest_prompt(recipe)}
    task = TaskConfig(name=name, options=options, rewards={each: REWARDS[each] for each in parts})
    config = config.model_copy(update={"tasks": [task]})
    return Subject(
        user=user,
        config=config,
        recipe=recipe,
        rules=rules,
        decoder=decoder,
        weights=weights,
        full=full,
        models=_small_models(scoring_models(config, recipe, decoder), decoder, weights),
    )


def _small_models(roles: Sequence[Role], policy: DecoderConfig, weights: Arrays) -> Mapping[str, NaiveModel]:
    """The models beside a policy with these weights, by their role's name: small ones with the policy's vocabulary."""
    found: dict[str, NaiveModel] = {}
    for role in roles:
        if role.phase == SCORE:
            found[role.name] = NaiveModel(role, other_weights(policy, weights))
            continue
        decoder = dataclasses.replace(tiny_clone(policy), vocab=policy.vocab, lora=None)
        if role.learning is not None:
            own, decoder, seed = scoring_decoder(decoder), scoring_decoder(decoder), 3
        else:  # a layer more of each kind
            stacks = tuple(dataclasses.replace(stack, repeats=stack.repeats + 1) for stack in decoder.stacks)
            decoder, seed = dataclasses.replace(decoder, stacks=stacks), 2
            own = frozen_decoder(decoder, "bfloat16")
        found[role.name] = NaiveModel(dataclasses.replace(role, decoder=own), random_weights(decoder, seed=seed))
    return found


def _small_step(config: Config) -> Config:
    """The config with a step of a few short completions; each batch is used twice if the recipe allows it.

    If a task has conversations, `rollout.max_episode_tokens` is set, and unset otherwise. All computation is in
    float32, including weights that LoRA freezes. Values that would hide a bug are replaced. Raises ValueError if the
    naive implementation lacks a part of the algorithm.
    """
    alone = resolve_algorithm(config).model_copy(update={"loss_parts": [], "router_loss_coef": None})
    recipe = make_recipe(alone, group_size=config.group_size, prompts_per_step=config.prompts_per_step)
    group = config.group_size  # of preferences, as in the data
    if not recipe.preferences:  # few, but more than the k of pass@k, whose advantages would otherwise all be 0
        group = max(COMPLETIONS, int(recipe.advantage.keywords.get("k", 0)) + 1)
    twice = make_recipe(alone, group_size=group, prompts_per_step=2 * alone.minibatches)
    _check_naive(alone, twice)
    algorithm: dict[str, object] = {"minibatches": 1, "updates_per_batch": 1 if twice.loss == "reinforce" else 2}
    if alone.zero_variance_metric is not None:
        algorithm["zero_variance_metric"] = "correct"  # a question of the subject's task is never right
    talks = not twice.demonstrations and any(conversing(task) is not None for task in config.tasks)
    row_tokens = LONGEST_PROMPT + 2 * MAX_NEW_TOKENS if twice.data_form == "pair" else ROW_TOKENS
    sizes = {"packing": "shared_prompts", "row_tokens": row_tokens, "rows_per_device": None, "tokens_per_device": None}
    asked: dict[str, object] = {"at_start": False, "at_end": False, "every_steps": 0, "questions": MOST_EVALUATED}
    asked |= {"greedy": True, "samples": EVAL_SAMPLES}
    if config.eval.temperature == 1:
        asked["temperature"] = EVAL_TEMPERATURE
    parts: dict[str, object] = {
        "lora": config.lora and config.lora.model_copy(update={"base": "bfloat16", "adapter": None}),
        "eval": config.eval.model_copy(update=asked),
        "rollout": _small_rollout(config.rollout, group, talks=talks),
        # The naive form chooses experts again in a second update.
        "train": config.train.model_copy(update={**sizes, "dtype": "float32", "replay_routing": False}),
        "algorithm": alone.model_copy(update=algorithm),
        "grading": GradingConfig(workers=0, overlong_buffer_tokens=OVERLONG_TOKENS),
        "environments": EnvironmentsConfig(
            workers=0, retries=RETRIES, max_failed=1.0, group_seed=config.environments.group_seed
        ),
        "data": DataConfig(),  # the subject's task has few prompts
        "reward_models": [],  # rewards are an input of the update; the subject's task has its own
    }
    if config.teacher is not None and config.teacher.prompt == "privileged":
        own = {"template": PRIVILEGED, "max_prompt_tokens": LONGEST_PROMPT + HINT}
        parts["teacher"] = config.teacher.model_copy(update=own)
    if config.critic is not None:
        parts["critic"] = config.critic.model_copy(update={"warmup_steps": 0})
    parts |= {"prompts_per_step": PROMPTS, "group_size": group, "seed": config.seed or OTHER_SEED}
    return config.model_copy(update=parts)


def _check_naive(algorithm: AlgorithmConfig, recipe: Recipe) -> None:
    """Raise ValueError if the naive implementation lacks the loss, the advantage or a term of the loss."""
    if is_path(recipe.loss):
        raise ValueError(
            f"algorithm.loss {recipe.loss}: certify has no naive implementation to compare it with; test it separately,"
            " and certify the run with one of Podium's losses"
        )
    if recipe.learns_values and is_path(algorithm.recipe):
        raise ValueError(
            f"algorithm.recipe {algorithm.recipe} has a critic, and certify has no naive form of its advantage;"
            " certify the run with recipe ppo"
        )


def _small_rollout(given: RolloutConfig, group: int, *, talks: bool) -> RolloutConfig:
    """The settings of a rollout of few and short completions, `group` of each prompt; with `talks`, conversations.

    A temperature of 1 would hide a bug, and so would a `rollout.in_flight` that carries no prompts over to the next
    step. Pages are small, and too few for all slots. Weights that the rollout rounds are not rounded, so that sampler
    and trainer can be compared; the correction that they have by default stays.
    """
    lengths = {"max_prompt_tokens": LONGEST_PROMPT, "max_new_tokens": MAX_NEW_TOKENS, "stop": list(STOPS)}
    lengths |= {
        "max_episode_tokens": LONGEST_CONVERSATION if talks else None,
        "limits": LimitsConfig(
            max_turns=TURNS,
            max_drawn_tokens=MOST_DRAWN,
            max_tool_calls=MOST_CALLS,
            max_reply_tokens=LONGEST_MESSAGE,
        ),
    }
    longest = LONGEST_CONVERSATION if talks else LONGEST_PROMPT + MAX_NEW_TOKENS
    slots = {"slots": PROMPTS * group, "prefill_rows": PROMPTS, "layout": "replicated", "refill_steps": 2}
    slots |= {"page_tokens": PAGE_TOKENS, "cache_tokens": round(CACHE_SHARE * PROMPTS * group * longest)}
    visible = {
        "temperature": given.temperature if given.temperature != 1.0 else OTHER_THAN_1,
        "in_flight": IN_FLIGHT,
        "max_staleness": MAX_STALENESS,
        "thinking": "keep",
        "long_prompts": "drop",
        "weights": "dtype",
        "reproducible": talks,  # a step is repeated bit for bit
    }
    return given.model_copy(update={**lengths, **slots, **visible, "dtype": "float32"})


def _rules_of_own(recipe: Recipe) -> Rules:
    """Rules for a user's own recipe, copied from its options; its advantage function is used unchecked.

    Raises ValueError if that function gives each token its own advantage.
    """
    if "tokens" in inspect.signature(recipe.advantage).parameters:
        raise ValueError(
            "algorithm.recipe: its advantage takes the scores of tokens, and certify has no naive form of that; test it"
            " separately, and certify the run with one of Podium's recipes"
        )
    names = {field.name for field in dataclasses.fields(Rules)} & {field.name for field in dataclasses.fields(recipe)}
    return Rules(**{name: getattr(recipe, name) for name in names})


def training_settings(subject: Subject) -> RunSettings:
    """The subject's config for a short run in which every option has an effect."""
    config, rules = subject.config, subject.rules
    once = rules.loss == "reinforce"
    naive = naive_update(subject, subject.sequences, subject.weights)
    algorithm = {"minibatches": 1 if once else max(2, config.algorithm.minibatches)}
    algorithm |= {"updates_per_batch": 1 if once else 2}
    algorithm |= _targets(subject, naive.entropy)
    given = config.train.optimizer
    changed = {
        "learning_rate": SGD_RATE if given.name == "sgd" else RATE,
        "schedule": "linear" if given.schedule == "constant" else given.schedule,
        "final_fraction": given.final_fraction or FINAL_FRACTION,
        "warmup_steps": WARMUP,
        "weight_decay": given.weight_decay or DECAY,
        "clip_norm": CLIPPED * gradient_norm(naive.gradient),
    }
    train = {**PLAIN, "optimizer": given.model_copy(update=changed), "offload_optimizer": False, "rows_per_device": 2}
    if subject.converses:
        train["row_tokens"] = subject.longest
    parts: dict[str, object] = {
        "algorithm": config.algorithm.model_copy(update=algorithm),
        "train": config.train.model_copy(update=train),
        "steps": STEPS if config.reference is None else STEPS_OF_A_MOVING_REFERENCE,
        "group_size": 1 if subject.recipe.data_form == "text" and subject.recipe.demonstrations else config.group_size,
    }
    moving: dict[str, ReferenceConfig] = {}
    if config.reference is not None:
        moving["reference"] = config.reference.model_copy(update={"sync_every": SYNC_EVERY})
    learning: dict[str, CriticConfig] = {}
    if subject.recipe.learns_values:
        own = config.critic or CriticConfig()
        rate = {"learning_rate": changed["learning_rate"] / 2, "warmup_steps": CRITIC_WARMUP}  # not the policy's
        learning["critic"] = own.model_copy(update={**rate, "updates": max(own.updates, CRITIC_UPDATES)})
    return RunSettings(config.model_copy(update={**parts, **moving, **learning}), learning, moving)


def _targets(subject: Subject, entropy: float) -> dict[str, float]:
    """Targets of adapted coefficients that are the clone's own numbers, so that coefficients move both ways.

    `entropy` is the mean over the subject's own step. The bonus is bounded half a step above its start, so that it
    reaches the bound.
    """
    rules, found = subject.rules, dict[str, float]()
    if rules.entropy_target is not None:
        most = rules.entropy_bonus + 0.5 * rules.entropy_step
        found |= {"entropy_target": entropy, "entropy_bonus_max": most}
    if rules.kl_target is not None:
        own = subject.sequences
        logprobs = subject.naive_scores(own.tokens, own.starts, subject.weights).logprobs
        distances = (logprobs - own.scores[KL_TO]) ** 2 / 2
        found |= {"kl_target": float(distances[own.valid].mean()), "kl_gain": max(rules.kl_gain, KL_GAIN)}
    return found


def of_rewards_alone(recipe: Recipe) -> Recipe:
    """The recipe without the terms of its loss that do not depend on rewards, so that only rewards change weights."""
    options = {**recipe.loss_options, **({"kl_weight": 0.0} if recipe.loss == "kl_cov" else {})}
    return dataclasses.replace(recipe, kl="none", kl_coef=0.0, entropy_bonus=0.0, teaching=None, loss_options=options)


def with_other_options(subject: Subject) -> Subject:
    """The same subject with options that most configs leave unset; each of them affects an update.

    The recipe is GRPO. Each prompt is a minibatch, so that a step without one of them has fewer optimizer steps; and
    each completion is a micro-batch, so that a mean over one of them differs from that over the minibatch.
    """
    algorithm = AlgorithmConfig(
        recipe="grpo",
        mean="token",
        old_logprobs="trainer",
        correction="truncate",
        correction_high=1.02,
        kl="k3",
        kl_coef=0.1,
        entropy_bonus=0.05,
        top_entropy=0.6,
        zero_variance="drop",
        zero_variance_metric="correct",
        mask_truncated=True,
        minibatches=PROMPTS,
        updates_per_batch=2,
        loss_parts=[LossPartConfig(recipe="sft", weight=0.7, prompts_per_step=PROMPTS)],
    )
    rows = {"packing": "none", "rows_per_device": 1, "tokens_per_device": None}
    return _trained_by(algorithm, subject, rows)


def with_smooth_loss(subject: Subject) -> Subject:
    """The same subject with REINFORCE, whose gradient rounding changes little: nothing is clipped or chosen."""
    return _trained_by(AlgorithmConfig(recipe="reinforce"), subject, {})


def _trained_by(algorithm: AlgorithmConfig, subject: Subject, train: Mapping[str, object]) -> Subject:
    """The subject with another algorithm, and these replacements in the config's section `train`."""
    changed = {"algorithm": algorithm, "train": subject.config.train.model_copy(update=train), **WITHOUT_MODELS}
    config = subject.config.model_copy(update=changed)
    recipe = resolve_recipe(config)
    other = dataclasses.replace(
        subject,
        config=config,
        recipe=recipe,
        rules=dataclasses.replace(rules_of(algorithm), penalised=subject.rules.penalised),
        models=_small_models(scoring_models(config, recipe, subject.decoder), subject.decoder, subject.weights),
    )
    for name in ("rollouts", "sampled"):  # these do not depend on the algorithm
        other.__dict__[name] = getattr(subject, name)
    return other
