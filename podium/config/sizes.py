"""Sizes of the rollout engine that follow from its settings alone; shared by engine and planner."""

from podium.config.errors import Contradiction
from podium.config.schema import RolloutConfig

SMALLEST_BUCKET = 32
REPRODUCIBLE_CHUNK = 128
"""Longest row of a prefill call in tokens with `rollout.reproducible`, for which all calls have the same length."""
STEPS_BETWEEN_LOOKS = 8
PIECES_PER_WINDOW = 4


def check_split(rollout: RolloutConfig, shards: int, over: str = "devices") -> None:
    """Raise ValueError if slots or prefill rows are not divisible by `shards`, the number of devices or hosts."""
    for name, value in (("slots", rollout.slots), ("prefill_rows", rollout.prefill_rows)):
        if value % shards:
            raise ValueError(
                f"rollout.{name} is {value} and is split over {shards} {over}; set it to a multiple of {shards}"
            )


def too_long(rollout: RolloutConfig, positions: int, model: str) -> Contradiction | None:
    """The conflict of the rollout's lengths with a model's number of positions; None if the longest sequence fits."""
    new = rollout.max_new_tokens
    prompt = rollout.prompt_tokens
    whole = rollout.max_episode_tokens
    if whole is not None and whole > positions:
        rule = f"{whole} is more than the {positions} positions of {model}; set {positions} or less"
        return Contradiction(("rollout.max_episode_tokens",), rule)
    if new + prompt <= positions:
        return None
    room = positions - prompt
    way_out = f"set rollout.max_new_tokens to {room} or less" if room > 0 else "lower both"
    return Contradiction(
        ("rollout.max_new_tokens", "rollout.max_prompt_tokens"),
        f"{new}, with rollout.max_prompt_tokens {prompt}, makes sequences of {new + prompt} tokens, and {model} has"
        f" {positions} positions; {way_out}",
    )


def conversation_tokens(rollout: RolloutConfig, given: int | None, positions: int) -> int:
    """Tokens T of the rows in which a model scores conversations: the length of the longest conversation.

    `given` is the setting `max_tokens`. If unset, T is a quarter more than the policy's longest sequence, because
    tokenizer and chat template differ; rounded up to a multiple of 8, and at most `positions`.
    """
    return given or min(positions, -(-5 * rollout.longest // 32) * 8)


def too_long_to_score(
    rollout: RolloutConfig, given: int | None, positions: int, *, key: str, model: str
) -> Contradiction | None:
    """The conflict of conversations' lengths with the number of positions of a model that scores them; None if they
    fit.

    `given` is the value of the model's `max_tokens`, and `key` the name of that setting.
    """
    if given is not None and given > positions:
        return Contradiction(
            (key,), f"{given} is more than the {positions} positions of {model}; set at most {positions}"
        )
    if given is None and rollout.longest > positions:
        rule = f"{_longest_name(rollout)} is {rollout.longest}, and {model} has {positions} positions"
        return Contradiction(
            (key,), f"{rule}; lower that, or set at most {positions} here: longer conversations then get no score"
        )
    return None


def table_pages(rollout: RolloutConfig) -> int:
    """Pages W of the longest possible sequence."""
    return -(-rollout.longest // rollout.page_tokens)


def _longest_name(rollout: RolloutConfig) -> str:
    return "rollout.max_episode_tokens" if rollout.max_episode_tokens else "rollout.max_prompt_tokens + max_new_tokens"


def cache_pages(rollout: RolloutConfig, shards: int) -> int:
    """Pages of the KV cache, over all shards.

    Raises ValueError if a shard cannot hold the longest sequence plus its prompt's partial page.
    """
    if rollout.cache_tokens is None:
        prompt = -(-rollout.prompt_tokens // rollout.page_tokens)
        return rollout.slots * table_pages(rollout) + rollout.prefill_rows * prompt
    each, least = rollout.cache_tokens // rollout.page_tokens // shards, table_pages(rollout) + 1
    if each < least:
        raise ValueError(
            f"rollout.cache_tokens is {rollout.cache_tokens}, {each} pages on each of {shards} shards, and one sequence"
            f" of {_longest_name(rollout)} needs {least}; set it to at least"
            f" {least * shards * rollout.page_tokens}"
        )
    return each * shards


def ring_piece(window: int, page_tokens: int) -> int:
    """Tokens that enter a ring of pages at once: whole pages, about a quarter of a window.

    Each sequence's ring holds these tokens in addition to the window. If it took a whole window at once, the rings of
    Gemma 3 would be 1.6 times as large, and a query would meet 2 windows of keys instead of 1.25.
    """
    return -(-window // (PIECES_PER_WINDOW * page_tokens)) * page_tokens


def ring_pages(window: int | None, rollout: RolloutConfig) -> int | None:
    """Pages per ring of a windowed layer; None if the layer stores whole sequences in ordinary pages: without a window,
    or if a whole sequence needs no more pages than a ring.

    A ring holds `ring_piece` new tokens and everything that the oldest of these attends to, wherever that starts within
    a page.
    """
    if window is None:
        return None
    pages = touched_pages(window - 1 + ring_piece(window, rollout.page_tokens), rollout.page_tokens)
    return pages if pages < table_pages(rollout) else None


def touched_pages(tokens: int, page_tokens: int) -> int:
    """Most pages that this many consecutive tokens of a sequence can touch, wherever they begin within a page."""
    return (tokens + page_tokens - 2) // page_tokens + 1


def steps_at_once(steps: int, shards: int) -> int:
    """Decode steps between checks whether any slot on any device is still live; 1 if there is only one device."""
    return max(n for n in range(1, STEPS_BETWEEN_LOOKS + 1) if steps % n == 0) if shards > 1 else 1


def slot_sizes(rollout: RolloutConfig, shards: int) -> tuple[int, ...]:
    """Slots of each variant of the decode program, largest first: all, half, a quarter; only the first if
    `reproducible`.
    """
    each = rollout.slots // shards
    return tuple(dict.fromkeys(shards * -(-each // part) for part in ((1,) if rollout.reproducible else (1, 2, 4))))


def prompt_buckets(rollout: RolloutConfig) -> list[int]:
    """Lengths that prompts are padded to: 32, 64, ... up to the longest prompt; only one length if `reproducible`."""
    longest, buckets = rollout.prompt_tokens, [SMALLEST_BUCKET]
    while buckets[-1] < longest:
        buckets.append(2 * buckets[-1])
    buckets = [*buckets[:-1], min(buckets[-1], longest)]
    if not rollout.reproducible:
        return buckets
    return [next((each for each in reversed(buckets) if each <= REPRODUCIBLE_CHUNK), buckets[0])]
