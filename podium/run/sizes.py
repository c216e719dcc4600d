"""Sizes of a run that follow from its settings alone, whatever the model and the machine."""

from podium.config.schema import Config

DEFAULT_ROWS_PER_DEVICE = 4


def row_tokens(config: Config) -> int:
    """T of a batch."""
    return config.train.row_tokens or config.rollout.max_prompt_tokens + config.rollout.max_new_tokens


def rows_per_device(config: Config) -> int:
    """Rows of a micro-batch on each device that splits the batch."""
    if config.train.tokens_per_device is not None:
        return config.train.tokens_per_device // row_tokens(config)
    return config.train.rows_per_device or DEFAULT_ROWS_PER_DEVICE


def row_groups(config: Config) -> int:
    """Groups of a device's rows that a layer computes one after the other: equal ones, of `layer_chunk_tokens`."""
    rows, limit = rows_per_device(config), config.train.layer_chunk_tokens
    if limit is None:
        return 1
    most = max(1, limit // row_tokens(config))
    return min(groups for groups in range(1, rows + 1) if rows % groups == 0 and rows // groups <= most)


def tokens_per_gather(config: Config, *, sp: int, tp: int) -> int:
    """Tokens of a device in a product with gathered weights; 0 where heads split them, or groups of rows share them."""
    return rows_per_device(config) * row_tokens(config) // sp if tp == row_groups(config) == 1 else 0


def optimizer_steps(config: Config) -> int:
    """Optimizer steps of the whole run, which its schedule spans."""
    return config.steps * config.algorithm.updates_per_batch * config.algorithm.minibatches


def batch_sequences(config: Config) -> int:
    """The most completions that one optimizer step may get."""
    return -(-config.prompts_per_step // config.algorithm.minibatches) * config.group_size


def prompts_in_flight(config: Config) -> int:
    """Prompts whose completions are in flight, or wait for a step, at once; those of a step at least."""
    return int(config.rollout.in_flight * config.prompts_per_step + 1e-6)
