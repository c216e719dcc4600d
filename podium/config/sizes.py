"""Shapes that follow from a config's numbers alone; the trainer, the engine and the planner take them from here."""

from podium.config.schema import Config, RolloutConfig

DEFAULT_ROWS_PER_DEVICE = 4
SMALLEST_BUCKET = 32


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


def optimizer_steps(config: Config) -> int:
    """Optimizer steps of the whole run, which its schedule spans."""
    return config.steps * config.algorithm.updates_per_batch * config.algorithm.minibatches


def batch_sequences(config: Config) -> int:
    """The most completions that one optimizer step may get."""
    return -(-config.prompts_per_step // config.algorithm.minibatches) * config.group_size


def check_split(rollout: RolloutConfig, shards: int, over: str = "devices") -> None:
    """Raises ValueError where slots or prefill rows do not divide over the devices, or hosts, that split them."""
    for name, value in (("slots", rollout.slots), ("prefill_rows", rollout.prefill_rows)):
        if value % shards:
            raise ValueError(
                f"rollout.{name} is {value} and is split over {shards} {over}; set it to a multiple of {shards}"
            )


def prompt_buckets(max_prompt_tokens: int) -> list[int]:
    """The lengths that prompts are padded to: 32, 64, ... up to the longest prompt."""
    buckets = [SMALLEST_BUCKET]
    while buckets[-1] < max_prompt_tokens:
        buckets.append(2 * buckets[-1])
    return [*buckets[:-1], min(buckets[-1], max_prompt_tokens)]
