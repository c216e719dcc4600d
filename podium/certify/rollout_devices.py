"""Checks an engine on several devices: groups of two that share one copy of the weights, and split the sequences."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from podium.certify.check_result import Check, largest
from podium.certify.drawn import DRAW_BAR, OF_MODEL, OF_SAMPLER, Drawing, Sampling, compared
from podium.certify.naive_draws import Cut
from podium.certify.numbers_task import LetterBackend
from podium.certify.subject import Subject, one_device
from podium.certify.updates import Updates
from podium.config.schema import RolloutConfig
from podium.config.sizes import table_pages
from podium.hosts.platform import machine_of
from podium.models.layouts import Layout
from podium.models.params import TRAIN_AXES, indivisible, param_specs
from podium.models.text.tokenizer import Tokenizer
from podium.rollout.request import Completion
from podium.rollout.transcript import transcript_of
from podium.run.resolve import resolve_rollout
from podium.sampling.sampler import Sampler
from podium.sharding import ShardingRules, make_mesh

DEVICES, GROUP = 4, 2
OF_ONE_DEVICE = ("hand-over", "greedy completions", "repetition penalty", "cuts", "draws")
"""Checks of a run's answers on one device; if one of them is red, the cause need not be that there are several."""


def rollout_device_checks(updates: Updates) -> Iterator[Check]:
    """Compare log-probabilities and draws of an engine on DEVICES devices with the naive ones, if there are as many."""
    subject, mesh = updates.subject, device_mesh(updates.subject)
    if mesh is None:
        return
    spec = resolve_rollout(subject.config, subject.recipe, subject.decoder, machine_of(list(one_device().devices.flat)))
    spec = dataclasses.replace(spec, layout=Layout(name="hybrid", group=GROUP), settings=with_room(spec.settings))
    rollouts = Sampler(spec, subject.decoder, Tokenizer(LetterBackend(), eos_tokens=()), mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    trained, frozen = (jax.device_put(each(one_device()), whole) for each in (subject.trained, subject.frozen))
    rollouts.load(trained, frozen)
    made, _ = rollouts.engine.generate(subject.requests)
    rollouts.close()
    yield Check(
        name="rollout devices",
        claim=f"log-probabilities and draws are the same on {DEVICES} devices in groups of {GROUP}",
        difference=_error(subject, made),
        after=(*OF_MODEL, *OF_SAMPLER, *OF_ONE_DEVICE),
    )


def with_room(settings: RolloutConfig) -> RolloutConfig:
    """The engine's settings with a cache in which each device has room for the longest sequence and one more page."""
    pages = table_pages(settings) + 1  # the page is the partial one of a shared prompt
    least = DEVICES * pages * settings.page_tokens
    return settings.model_copy(update={"cache_tokens": max(least, settings.cache_tokens or 0)})


def device_mesh(subject: Subject) -> jax.sharding.Mesh | None:
    """A mesh of DEVICES devices, simulated on the CPU if there is only one; None if too few, or if they do not divide
    the model.
    """
    devices = jax.devices() if len(jax.devices()) > 1 else jax.devices("cpu")
    if len(devices) < DEVICES:
        return None
    mesh = make_mesh(f"fsdp:{DEVICES}", devices[:DEVICES])
    unfit = any(indivisible(param_specs(subject.decoder), ShardingRules(mesh, TRAIN_AXES).num_shards))
    return None if unfit else mesh


def _error(subject: Subject, made: list[list[Completion]]) -> float:
    """The largest error of a log-probability, relative to the largest; infinite if another token had to be drawn."""
    settings = subject.config.rollout
    sampling = Sampling(
        temperature=settings.temperature,
        penalty=settings.repetition_penalty,
        cut=Cut(settings.top_k, settings.top_p, settings.min_p),
    )
    drawings = [
        Drawing(transcript=transcript_of(prompt, each), seed=seed, completion=index)
        for seed, (prompt, group) in enumerate(zip(subject.prompts, made, strict=True))
        for index, each in enumerate(group)
    ]
    drawn = list(compared(subject, lambda version: subject.weights, drawings, sampling))
    errors = [float(np.abs(each.recorded - each.naive).max()) for each in drawn]
    errors += [float(each.errors.logprobs.max()) for each in drawn]
    errors += [np.inf for each in drawn if (each.errors.tokens > DRAW_BAR).any()]
    return largest(errors) / max(float(np.abs(each.naive).max()) for each in drawn)
