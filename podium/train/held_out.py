"""Rewards of held-out preferences: how well the policy tells chosen from rejected completions of rows that it is not
trained on.
"""

from collections.abc import Sequence

import numpy as np

from podium.algorithms.recipes import LOSSES, Recipe
from podium.observe.stats import PreferenceStats
from podium.run.run_spec import RunSpec
from podium.sampling.demonstrations import demonstrate
from podium.sampling.feed import Feed, request_seed
from podium.sampling.groups import Group
from podium.train.state import TrainState
from podium.train.trainer import Trainer


def held_out_preferences(feed: Feed, spec: RunSpec, trainer: Trainer, state: TrainState) -> PreferenceStats:
    """Score evaluation rows, up to `eval.questions` of each task; rows that are too long are skipped.

    Nothing is sampled. Batches are no larger than in updates, so no program is compiled again.

    Raises ValueError if no row fits, or if a row is not a preference.
    """
    encoded = [
        feed.encode(prompt, request_seed(spec.rollout.prompts.seed, f"eval {task}", index))
        for task, prompts in feed.tasks.eval_prompts(spec.rollout.evaluation.questions).items()
        for index, prompt in enumerate(prompts)
    ]
    fitting = [each for each in encoded if each is not None]
    if not fitting:
        raise ValueError("no evaluation row fits in rollout.max_prompt_tokens; raise it, or leave evaluations out")
    groups, _ = demonstrate(fitting, spec.rollout, feed.tokenizer, form=spec.recipe.data_form)
    size = max(1, spec.prompts_per_step // spec.recipe.minibatches)
    ratios = [
        ratio
        for first in range(0, len(groups), size)
        for ratio in trainer.log_ratios(state, groups[first : first + size]).tolist()
    ]
    return preference_stats(spec.recipe, groups, ratios)


def preference_stats(recipe: Recipe, groups: Sequence[Group], ratios: Sequence[float]) -> PreferenceStats:
    """Statistics of the rewards beta x log-ratio of preferences; `ratios` has one log-ratio per completion of
    `groups`.
    """
    beta = recipe.loss_options.get("beta", LOSSES[recipe.loss].options["beta"])
    chosen = np.array([reward.total > 0 for group in groups for reward in group.rewards])
    rewards = beta * np.array(ratios)
    accuracy = None
    if recipe.data_form == "pair":
        accuracy = float(np.mean(rewards[chosen] > rewards[~chosen]))
    sides = [float(rewards[side].mean()) if side.any() else None for side in (chosen, ~chosen)]
    return PreferenceStats(chosen=sides[0], rejected=sides[1], accuracy=accuracy)
