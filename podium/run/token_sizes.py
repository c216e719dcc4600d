"""Sizes of a run that follow from its settings and recipe, independent of model and machine."""

from podium.algorithms.recipes import Recipe
from podium.config.schema import Config

DEFAULT_ROWS_PER_DEVICE = 4


def row_tokens(config: Config, recipe: Recipe) -> int:
    """Tokens T per row of a batch; both completions of a pair share a row."""
    if config.train.row_tokens is not None:
        return config.train.row_tokens
    return config.rollout.longest + (config.rollout.max_new_tokens if recipe.data_form == "pair" else 0)


def rows_per_device(config: Config, recipe: Recipe) -> int:
    """Rows of a micro-batch on each device that the batch is split over."""
    if config.train.tokens_per_device is not None:
        return config.train.tokens_per_device // row_tokens(config, recipe)
    return config.train.rows_per_device or DEFAULT_ROWS_PER_DEVICE


def row_groups(config: Config, recipe: Recipe) -> int:
    """Number of equal row groups that a layer computes one after another, of up to `layer_chunk_tokens` each."""
    rows, limit = rows_per_device(config, recipe), config.train.layer_chunk_tokens
    if limit is None:
        return 1
    most = max(1, limit // row_tokens(config, recipe))
    return min(groups for groups in range(1, rows + 1) if rows % groups == 0 and rows // groups <= most)


def tokens_per_gather(config: Config, recipe: Recipe, *, sp: int, tp: int) -> int:
    """Tokens per device in a product with gathered weights; 0 if heads are split or row groups share the weights."""
    whole = tp == row_groups(config, recipe) == 1
    return rows_per_device(config, recipe) * row_tokens(config, recipe) // sp if whole else 0


def optimizer_steps(config: Config) -> int:
    """Number of optimizer steps of the whole run, which the schedule spans."""
    return config.steps * config.algorithm.updates_per_batch * config.algorithm.minibatches


def batch_sequences(config: Config) -> int:
    """Maximum number of completions, segments of conversations and demonstrations in one optimizer step."""
    segments = config.rollout.limits.max_turns if config.rollout.thinking == "segment" else 1
    drawn = -(-config.prompts_per_step // config.algorithm.minibatches) * config.group_size * segments
    return drawn + -(-config.demonstrations_per_step // config.algorithm.minibatches)
