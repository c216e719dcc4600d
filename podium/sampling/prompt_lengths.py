"""Measures prompts before anything is compiled: chooses the length limit, or compares the prompts with it."""

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from podium.algorithms.recipes import Recipe
from podium.config.schema import ASSUMED_PROMPT_TOKENS, Config
from podium.models.files.source import read_architecture
from podium.models.files.source import resolve as find_source
from podium.models.text.tokenizer import Tokenizer, load_tokenizer
from podium.run.resolve import resolve_demonstrations, resolve_prompts
from podium.run.run_spec import DemonstrationSpec
from podium.sampling.feed import Feed
from podium.tasks.mixture import TaskPrompt

ROUNDED_TO = 32
"""Lengths are rounded up to a multiple of this many tokens, so that programs need not be compiled again for slightly
longer data."""
KEY = "rollout.max_prompt_tokens"
Prompts = Mapping[str, Sequence[TaskPrompt]]
"""Prompts by label of their task."""


def with_prompt_tokens(config: Config, recipe: Recipe, *, trains: bool, evaluates: bool) -> tuple[Config, str | None]:
    """Set `rollout.max_prompt_tokens`, if it is unset, to the length of the longest prompt.

    The value is limited by the model's positions and the other length settings. If an environment adds to prompts, by
    an amount that is not known yet, it is at least 512. The limit of a teacher's privileged prompts is set in the same
    way.

    Args:
        config: the run's settings.
        recipe: the recipe of these settings.
        trains: whether training prompts are used.
        evaluates: whether evaluation questions are used.

    Returns:
        The config, and a line about the choice; None if the length was set already.

    Raises:
        ValueError: the model, its tokenizer, a task or its data is unusable.
    """
    if config.rollout.max_prompt_tokens is not None:
        return config, None
    source = find_source(config.model, waits=True)
    rollout, train, new = config.rollout, config.train, config.rollout.max_new_tokens
    behind = 2 * new if recipe.data_form == "pair" else new  # that follow the prompt in a row of the update
    limits = (
        (read_architecture(source).max_positions, new, f"the {{}} positions of {config.model}"),
        (rollout.max_episode_tokens, new, "rollout.max_episode_tokens {}"),
        (train.row_tokens, behind, "train.row_tokens {}"),
        (train.tokens_per_device, behind, "train.tokens_per_device {}"),
    )
    room, limit = min((most - rest, name.format(most)) for most, rest, name in limits if most is not None)
    room = max(1, room)
    tokenizer = load_tokenizer(
        source, config.chat_template, config.chat_template_options, template_date=config.chat_template_date
    )
    with _quiet("podium.tasks"):  # the run reads the data again and logs warnings then
        feed = Feed(resolve_prompts(config), tokenizer)
        asked = asked_prompts(feed, config.eval.questions, trains=trains, evaluates=evaluates)
        everything = [(feed, prompts) for prompts in asked.values()]
        everything += _imitated(resolve_demonstrations(config) if trains else None, tokenizer)
    longest = max((length for each, prompts in everything for length in longest_first(each, prompts, 0)), default=0)
    fits = longest <= room or any(each.num_tokens(one) <= room for each, prompts in everything for one in prompts)
    if not fits or (longest > room and rollout.long_prompts == "error"):
        raise ValueError(
            f"the longest prompt has {longest} tokens with the chat template; {limit} and answers of "
            f"rollout.max_new_tokens {new} leave room for {room}: raise the first or lower the second"
        )
    added_to = any(held is not None and held.begins for held in feed.conversing)
    chosen = min(rounded_up(max(longest, ASSUMED_PROMPT_TOKENS if added_to else 1)), room)
    count = sum(len(prompts) for _, prompts in everything)
    why = "because" if longest <= room else f"as {limit} and rollout.max_new_tokens {new} allow;"
    line = f"{KEY} is unset: {chosen}, {why} the longest of {count:,} prompts has {longest} tokens"
    updated = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_prompt_tokens": chosen})})
    teacher = config.teacher
    if teacher is not None and teacher.template is not None and teacher.max_prompt_tokens is None:
        own = max(len(feed.privileged(each)) for prompts in feed.tasks.train_prompts().values() for each in prompts)
        told = teacher.model_copy(update={"max_prompt_tokens": min(rounded_up(own), room)})
        updated = updated.model_copy(update={"teacher": told})
    return updated, line


def _imitated(spec: DemonstrationSpec | None, tokenizer: Tokenizer) -> Iterator[tuple[Feed, Sequence[TaskPrompt]]]:
    """Yield the prompts of each demonstration task, with their feed."""
    if spec is not None:
        feed = Feed(spec.prompts, tokenizer)
        yield from ((feed, prompts) for prompts in feed.tasks.train_prompts().values())


def check_prompt_lengths(feed: Feed, prompts: Prompts, what: str, consequence: str) -> list[str]:
    """Lines about prompts of tasks that are longer than `rollout.max_prompt_tokens`.

    `what` names the prompts, such as `training prompts`, and `consequence` says what happens to too long ones.

    Raises ValueError if no prompt of a task fits, or if one does not and long prompts are errors.
    """
    limit, lines = feed.spec.max_tokens, []
    for label, each in prompts.items():
        above = tuple(length for length in longest_first(feed, each, limit) if length > limit)
        if not above:
            continue
        number = "none" if len(above) == len(each) else f"{len(above):,}"
        lengths = f"{min(above)} to {max(above)}" if min(above) < max(above) else f"{max(above)}"
        way_out = f"set it to {rounded_up(max(above))} for all, or leave it unset"
        if number == "none":
            raise ValueError(
                f"{KEY} is {limit}, and none of the {len(each):,} {what} of {label} fits: with the chat template they"
                f" have {lengths} tokens; {way_out}"
            )
        found = f"{number} of the {len(each):,} {what} of {label} have {lengths} tokens and {KEY} is {limit}"
        if feed.spec.long_prompts == "error":
            raise ValueError(f"{found}; {way_out}, or set rollout.long_prompts to drop")
        lines.append(f"{found}, so they {consequence}; {way_out}")
    return lines


def asked_prompts(feed: Feed, questions: int | None, *, trains: bool, evaluates: bool) -> Prompts:
    """Training prompts and evaluation questions together, by label and split; reads the data."""
    train = feed.tasks.train_prompts() if trains else {}
    held_out = feed.tasks.eval_prompts(questions) if evaluates else {}
    return {**train, **{f"{label} (evaluation)": each for label, each in held_out.items()}}


def longest_first(feed: Feed, prompts: Sequence[TaskPrompt], limit: int) -> Iterator[int]:
    """Yield the token counts of prompts, longest text first, until no further prompt can exceed `limit`.

    `limit` 0 stands for the largest count so far. Each token covers at least one byte, so a prompt has at most as many
    tokens as its text has bytes, plus those of the template; most prompts need not be encoded.
    """
    most, around = limit, dict[str | None, int]()
    for prompt in sorted(prompts, key=_bytes, reverse=True):
        if prompt.system_prompt not in around:
            alone = dataclasses.replace(prompt.prompt, question=ONE_WORD, messages=None)
            around[prompt.system_prompt] = feed.num_tokens(dataclasses.replace(prompt, prompt=alone))
        if _bytes(prompt) + max(around.values()) <= most:
            return
        length = feed.num_tokens(prompt)
        if not limit:
            most = max(most, length)
        yield length


ONE_WORD = "a"


def _bytes(prompt: TaskPrompt) -> int:
    """Bytes of a prompt's messages, without the template's."""
    messages = prompt.prompt.messages
    text = prompt.prompt.question if messages is None else json.dumps(messages, ensure_ascii=False, default=str)
    return len(text.encode("utf-8", "surrogatepass"))


def rounded_up(tokens: int) -> int:
    """Round up a prompt length, so that few different lengths occur and programs are reused."""
    return -(-tokens // ROUNDED_TO) * ROUNDED_TO


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Disable logging of a logger and its children inside the block."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
