"""Shapes that follow from a config's numbers alone; the trainer, the engine and the planner take them from here."""

from podium.config.schema import Config, RolloutConfig

DEFAULT_ROWS_PER_DEVICE = 4
SMALLEST_BUCKET = 32
STEPS_BETWEEN_LOOKS = 8


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


def check_split(rollout: RolloutConfig, shards: int, over: str = "devices") -> None:
    """Raises ValueError where slots or prefill rows do not divide over the devices, or hosts, that split them."""
    for name, value in (("slots", rollout.slots), ("prefill_rows", rollout.prefill_rows)):
        if value % shards:
            raise ValueError(
                f"rollout.{name} is {value} and is split over {shards} {over}; set it to a multiple of {shards}"
            )


def table_pages(rollout: RolloutConfig) -> int:
    """W, pages of the longest sequence."""
    return -(-(rollout.max_prompt_tokens + rollout.max_new_tokens) // rollout.page_tokens)


def cache_pages(rollout: RolloutConfig, shards: int) -> int:
    """Pages of the KV cache, over all shards.

    Raises ValueError where a shard's share does not hold the longest sequence and its prompt's part page.
    """
    if rollout.cache_tokens is None:
        prompt = -(-rollout.max_prompt_tokens // rollout.page_tokens)
        return rollout.slots * table_pages(rollout) + rollout.prefill_rows * prompt
    each, least = rollout.cache_tokens // rollout.page_tokens // shards, table_pages(rollout) + 1
    if each < least:
        raise ValueError(
            f"rollout.cache_tokens is {rollout.cache_tokens}, {each} pages on each of {shards} shards, and one sequence"
            f" of rollout.max_prompt_tokens + max_new_tokens needs {least}; set it to at least"
            f" {least * shards * rollout.page_tokens}"
        )
    return each * shards


def steps_at_once(steps: int, shards: int) -> int:
    """Decode steps after which the devices ask each other whether any slot is live; one device need not ask."""
    return max(n for n in range(1, STEPS_BETWEEN_LOOKS + 1) if steps % n == 0) if shards > 1 else 1


def slot_sizes(rollout: RolloutConfig, shards: int) -> tuple[int, ...]:
    """Slots of each variant of the decode program, largest first: all, half, a quarter."""
    each = rollout.slots // shards
    return tuple(dict.fromkeys(shards * -(-each // part) for part in (1, 2, 4)))


def prompt_buckets(max_prompt_tokens: int) -> list[int]:
    """The lengths that prompts are padded to: 32, 64, ... up to the longest prompt."""
    buckets = [SMALLEST_BUCKET]
    while buckets[-1] < max_prompt_tokens:
        buckets.append(2 * buckets[-1])
    return [*buckets[:-1], min(buckets[-1], max_prompt_tokens)]
