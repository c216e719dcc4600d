"""Bugs of the engine's cache and of its sampler, for `test_planted_bugs.py` to plant."""

import dataclasses

import jax
import jax.numpy as jnp
from planted_runs import Plant

from podium.models import decoder
from podium.rollout import cache, device, engine, programs, sampling, sequence
from podium.rollout.sequence import Sequence
from podium.sampling.conversations import turns

# The engine's cache and positions.


def keys_behind_the_first_page_in_page_0() -> Plant:
    """What decoding appends behind a sequence's first page is written to page 0."""
    original = cache._append

    def planted(kept, layer, spans, *others):
        tables = jnp.concatenate([spans.tables[:, :1], 0 * spans.tables[:, 1:]], axis=1)
        return original(kept, layer, spans._replace(tables=tables), *others)

    return cache, "_append", planted


def rotations_repeat_after_64_positions() -> Plant:
    original = decoder.forward

    def planted(params, tokens, positions, *others, **options):
        return original(params, tokens, positions % 64, *others, **options)

    return programs, "forward", planted


# The sampler.


def neighbours_share_their_random_numbers() -> Plant:
    original = sampling._uniforms
    return sampling, "_uniforms", lambda seed, completion, position: original(seed, completion, position // 2)


def completions_share_random_numbers_at_even_positions() -> Plant:
    original = sampling._uniforms

    def planted(seed, completion, position):
        return original(seed, jnp.where(position % 2, completion, 0), position)

    return sampling, "_uniforms", planted


def one_more_than_top_k() -> Plant:
    original = device.fill_row

    def planted(rows, row, settings, **key):
        original(rows, row, dataclasses.replace(settings, top_k=settings.top_k and settings.top_k + 1), **key)

    return device, "fill_row", planted


# The engine.


def partial_pages_not_copied() -> Plant:
    """A prompt's last page, which is not full, is not copied to its completions."""
    return device.Device, "copy", lambda own, copies: None


def stops_between_tokens_missed() -> Plant:
    """A stop string is looked for within the tokens of one decode call."""
    original = Sequence._stop_at_string

    def planted(own, before, tokenizer):
        whole, own.drawn = own.drawn, own.drawn[before:]
        names = ("logprobs", "full_logprobs", "versions")
        kept = {name: getattr(own, name) for name in names}
        for name in names:
            setattr(own, name, kept[name][before:])
        original(own, 0, tokenizer)
        own.drawn = whole[:before] + own.drawn
        for name in names:
            setattr(own, name, kept[name][:before] + getattr(own, name))

    return Sequence, "_stop_at_string", planted


def one_token_too_few() -> Plant:
    """An answer that no stop token ends has a token less than it may."""
    original = engine.sequences_of

    def planted(request, number, **options):
        shorter = dataclasses.replace(request.sampling, max_new_tokens=max(1, request.sampling.max_new_tokens - 1))
        return original(dataclasses.replace(request, sampling=shorter), number, **options)

    return engine, "sequences_of", planted


def drawn_tokens_not_penalised() -> Plant:
    """A token that is drawn while its sequence keeps its slot is not penalised."""
    return programs, "with_tokens", lambda seen, tokens, where: seen


def window_one_longer() -> Plant:
    original = cache.seen_in_sequence
    return cache, "seen_in_sequence", lambda last, at, window: original(last, at, window and window + 1)


def recorded_at_temperature_1() -> Plant:
    """Tokens are drawn at the temperature, and recorded as if it were 1."""
    original = sampling.sample

    def planted(logits, rows, **others):
        made = original(logits, rows, **others)
        plain = jax.nn.log_softmax(logits, axis=1)
        own = jnp.take_along_axis(plain, made.tokens[:, None], axis=1)[:, 0]
        return made._replace(logprobs=own, full_logprobs=own)

    return sampling, "sample", planted


def every_device_is_the_first() -> Plant:
    """Devices that share the vocabulary all take their part for the first one."""
    return sampling._Shards, "index", lambda own: 0


def seeds_of_16_bits() -> Plant:
    original = device.fill_row
    return (
        device,
        "fill_row",
        lambda rows, row, settings, *, seed, completion: original(
            rows, row, settings, seed=seed % 2**16, completion=completion
        ),
    )


def one_stream_for_a_group() -> Plant:
    original = device.fill_row
    return (
        device,
        "fill_row",
        lambda rows, row, settings, *, seed, completion: original(rows, row, settings, seed=seed, completion=0),
    )


def turns_share_a_seed() -> Plant:
    return turns.Turns, "seed", lambda own, live: own.prompts[live.index].seed


def cells_not_copied() -> Plant:
    """The recurrent states behind a prompt are not copied to its completions."""
    return device.Device, "copy_cells", lambda own, copies: None


def two_missing_tokens_called_one() -> Plant:
    """Of two tokens whose keys are missing, the next decode step writes the last alone."""
    original = Sequence.missing.fget
    return Sequence, "missing", property(lambda own: found if (found := original(own)) > 2 else 0)


def first_tokens_share_their_experts() -> Plant:
    """A completion's first token has the experts that older weights chose for another completion of its prompt."""
    original = sequence.unknown
    return sequence, "unknown", lambda rows, *others: original(rows + 1, *others)
