"""Bugs that others have had, planted one at a time by replacing one function: the certificate names each."""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.algorithms import losses
from podium.certify.checks import STAGES
from podium.certify.command import make_certificate
from podium.certify.subject import Subject, make_subject
from podium.certify.updates import Updates
from podium.config.schema import Config
from podium.models.visibility import Visibility
from podium.train import batch, optimizer, prepare, step

QWEN3 = "Qwen/Qwen3-0.6B"


def make_config(model: str = QWEN3, **changes) -> Config:
    return Config.model_validate({"model": model, "tasks": [{"name": "arithmetic"}], "steps": 10, **changes})


def make_checked_subject() -> Subject:
    """A subject whose completions were sampled by the engine as it is, before any bug."""
    subject = make_subject(make_config())
    assert subject.groups
    assert len(subject.sequences.valid)
    return subject


@pytest.fixture(scope="module")
def subject() -> Subject:
    return make_checked_subject()


def mean_of_means():
    """Each micro-batch is averaged over its own tokens, and then the averages over the micro-batches."""
    original = step._micro_batch

    def planted(whole, index):
        own = original(whole, index)
        share = whole.num_tokens / (whole.num_micro_batches * jnp.maximum(jnp.sum(own.mask), 1.0))
        return dataclasses.replace(own, weights=own.weights * share)

    return step, "_micro_batch", planted


def mean_of_completion_means():
    """The mean by token where one by sequence is asked for."""
    original = prepare.token_weights
    return prepare, "token_weights", lambda mean, lengths, **sizes: original("token", lengths, **sizes)


def leaked_segment():
    """A token of a packed row sees all that stands before it."""

    original = step.row_attention

    def planted(backend, visibility, rules):
        one = (visibility.segments > 0).astype("int32")
        return original(backend, Visibility(one, one), rules)

    return step, "row_attention", planted


def off_by_one_mask():
    """The mask and the weights stand one token too late."""
    original = prepare.make_batch

    def planted(samples, sizes):
        made, spans = original(samples, sizes)
        late = {name: np.roll(getattr(made, name), 1, axis=2) for name in ("mask", "weights")}
        return dataclasses.replace(made, **late), spans

    return prepare, "make_batch", planted


def off_by_one_attention():
    """A token sees the one behind it, which it is to predict."""
    original = Visibility.mask

    def planted(visibility):
        T = visibility.segments.shape[1]
        return original(visibility) | jnp.eye(T, k=1, dtype=bool)[None]

    return Visibility, "mask", planted


def kl_k1_as_loss():
    return losses, "kl_loss", lambda kl, logprobs, reference: logprobs - jax.lax.stop_gradient(reference)


def temperature_after_softmax():
    original = step.token_logprobs

    def planted(hidden, head, targets, *, temperature, **options):
        found = original(hidden, head, targets, temperature=1.0, **options)
        return found._replace(logprobs=found.logprobs / temperature)

    return step, "token_logprobs", planted


def dropped_tail():
    """The last micro-batch, which may not be full, is left out."""
    original = prepare.make_batch

    def planted(samples, sizes):
        made, spans = original(samples, sizes)
        return dataclasses.replace(made, num_micro_batches=np.maximum(made.num_micro_batches - 1, 1)), spans

    return prepare, "make_batch", planted


def schedule_off_by_one():
    original = optimizer.learning_rate

    def planted(config, total_steps):
        rate = original(config, total_steps)
        return lambda count: rate(count + 1)

    return optimizer, "learning_rate", planted


def bfloat16_sum():
    """The gradient of the head is summed in bfloat16."""
    original = step.head_weights

    @jax.custom_vjp
    def rounded(x):
        return x

    def backward(_, dx):
        return (dx.astype(jnp.bfloat16).astype(dx.dtype),)

    rounded.defvjp(lambda x: (x, None), backward)
    return step, "head_weights", lambda *given, **options: rounded(original(*given, **options))


def swapped_clip_sides():
    original = losses._clipped

    def planted(ratio, advantages, *, clip_low, clip_high):
        return original(ratio, advantages, clip_low=clip_high, clip_high=clip_low)

    return losses, "_clipped", planted


def prompt_trained():
    original = batch._write

    def planted(chunk, samples, row, start, segment) -> Iterator:
        sample = samples[chunk[0]]
        spans = list(original(chunk, samples, row, start, segment))
        shown = slice(start, start + len(sample.prompt) - 1)
        row["targets"][shown] = sample.prompt[1:]
        row["mask"][shown] = 1.0
        row["weights"][shown] = sample.weights[0]
        row["advantages"][shown] = sample.advantages[0]
        yield from spans

    return batch, "_write", planted


BUGS: dict[Callable, str] = {
    mean_of_means: "micro-batches",
    mean_of_completion_means: "denominators",
    leaked_segment: "packing",
    off_by_one_mask: "mask",
    off_by_one_attention: "log-probabilities",
    kl_k1_as_loss: "kl",
    temperature_after_softmax: "temperature",
    dropped_tail: "every token once",
    schedule_off_by_one: "learning rate",
    bfloat16_sum: "gradient",
    swapped_clip_sides: "clip",
    prompt_trained: "prompts untrained",
}
"""What is planted, and the check that is to name it."""


@pytest.mark.parametrize(("bug", "name"), BUGS.items(), ids=lambda each: getattr(each, "__name__", each))
def test_a_planted_bug_is_named_by_the_first_stage_that_can_see_it(subject, bug, name, monkeypatch):
    monkeypatch.setattr(*bug())
    updates = Updates(subject)
    for stage in STAGES:
        checks = []
        for check in stage(updates):
            checks.append(check)
            if check.name == name:
                break
        red = [check.name for check in checks if not check.ok]
        assert red == [name] * (checks[-1].name == name), [(each.name, each.difference) for each in checks]
        if red:
            return
    raise AssertionError(f"no check is called {name}")


@pytest.mark.long
@pytest.mark.parametrize(("bug", "name"), BUGS.items(), ids=lambda each: getattr(each, "__name__", each))
def test_everything_else_that_a_planted_bug_makes_red_follows_from_the_check_that_names_it(bug, name, monkeypatch):
    subject = make_checked_subject()
    monkeypatch.setattr(*bug())
    assert [check.name for check in make_certificate(subject).causes] == [name]


pytestmark = pytest.mark.long  # minutes; `make test-long` runs it
