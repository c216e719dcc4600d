"""Bugs of the order of prompts, for `test_planted_bugs.py` to plant."""

import dataclasses

from planted_runs import Plant

from podium.certify import mixtures
from podium.sampling import feed, partial_rollouts, sampler
from podium.tasks import curriculum, mixture


def newest_prompts_first() -> Plant:
    """A step takes the newest prompts that are complete, however old others become."""

    def planted(first_versions, complete, count, **_):
        ready = [index for index in reversed(range(len(complete))) if complete[index]]
        return ready[:count] if len(ready) >= count else None

    return partial_rollouts, "chosen", planted


def epochs_in_one_order() -> Plant:
    original = mixture._hash
    return (
        mixture,
        "_hash",
        lambda seed, purpose, *others: original(seed, purpose, *((others[0], 0) if purpose == "order" else others)),
    )


def unshuffled() -> Plant:
    def planted(own, cursor, level=None):
        prompts = own.data.read(0, "train")
        return own.data.asked(0, prompts[cursor % len(prompts)])

    return mixture.TaskMixture, "prompt_at", planted


def levels_evenly_drawn() -> Plant:
    """A curriculum has no effect."""
    return curriculum.Curriculum, "chances", lambda own: [1 / len(own._last)] * len(own._last)


def last_groups_not_restored() -> Plant:
    """A curriculum begins again where a run is resumed."""
    original = mixture.TaskMixture.means
    return mixture.TaskMixture, "means", property(original.fget, lambda own, means: None)


def solved_prompts_not_retired() -> Plant:
    return mixture.TaskMixture, "is_retired", lambda own, prompt: False


def seed_ignored() -> Plant:
    """Completions of every run are drawn as with seed 0."""
    original = feed.request_seed
    return feed, "request_seed", lambda seed, purpose, index: original(0, purpose, index)


def staleness_ignored() -> Plant:
    """The oldest complete prompts are taken, and none is waited for."""
    original = partial_rollouts.chosen

    def planted(first, complete, count, *, per_step, version, max_staleness):
        return original(first, complete, count, per_step=per_step, version=version, max_staleness=10**6)

    return partial_rollouts, "chosen", planted


def one_step_staler() -> Plant:
    original = partial_rollouts.chosen

    def planted(first, complete, count, *, per_step, version, max_staleness):
        return original(first, complete, count, per_step=per_step, version=version, max_staleness=max_staleness + 1)

    return partial_rollouts, "chosen", planted


def any_complete_prompts_taken() -> Plant:
    """The oldest complete prompts are taken, and none is waited for, where choices are checked by themselves."""
    _, _, planted = staleness_ignored()
    return mixtures, "chosen", planted


def unfinished_prompts_dropped() -> Plant:
    """Completions that are unfinished at the end of a step are dropped instead of being continued in the next."""
    original = sampler.Sampler.answer

    def planted(own, prompts, settings=None):
        made = original(own, prompts, settings)
        own.partial.pending = ()
        return made

    return sampler.Sampler, "answer", planted


def nothing_in_flight() -> Plant:
    original = sampler.Sampler.answer

    def planted(own, prompts, settings=None):
        training = dataclasses.replace(own.spec.training, in_flight=0)
        kept, own.spec = own.spec, dataclasses.replace(own.spec, training=training)
        try:
            return original(own, prompts, settings)
        finally:
            own.spec = kept

    return sampler.Sampler, "answer", planted


def a_prompt_skipped_each_step() -> Plant:
    original = feed.Feed.next

    def planted(own, count):
        own.tasks.cursor += 1
        return original(own, count)

    return feed.Feed, "next", planted


def system_prompts_left_out() -> Plant:
    original = mixture.LevelPrompts.asked

    def planted(own, level, prompt):
        return dataclasses.replace(original(own, level, prompt), system_prompt=None)

    return mixture.LevelPrompts, "asked", planted
