"""Compares a watched training run with the naive implementation: each episode, each gradient and each new weight.

The naive implementation starts each optimizer step from the trainer's own weights and gives its optimizer the trainer's
own gradient. So every difference belongs to one step and one part, and rounding does not accumulate.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from podium.algorithms.recipes import Recipe
from podium.certify.batches import OF_BATCH
from podium.certify.followed import Followed, follow, rules_of_run
from podium.certify.formulas import BFLOAT16_BAR, MUON_BAR
from podium.certify.ledgers import Ledger
from podium.certify.naive import Scores, in_float64
from podium.certify.naive_optimizer import NaiveOptimizer
from podium.certify.naive_step import Episode, padded_tokens
from podium.certify.result import BAR, RUN_BAR, Check, largest
from podium.certify.subject import (
    MAX_NEW_TOKENS,
    OVERLONG_TOKENS,
    Subject,
    episode_of,
    episodes_of,
    make_subject,
    shortest_prompt,
)
from podium.certify.talk import is_right, weighted
from podium.certify.task import LetterBackend, Numbers, grade, has_ended, is_open, letters
from podium.certify.tiny import Arrays
from podium.certify.training import Step, Training, watch_training, with_other_options
from podium.certify.updates import Updates, weight_difference
from podium.models.params import trained_specs
from podium.rollout.transcript import Transcript
from podium.tasks.task import Prompt, TaskSource
from podium.train.generate import Group

DEVIATIONS = 5.0
"""How many standard deviations a sum over all draws may be from its mean; correct code exceeds it once in a million."""
OF_MODEL = ("log-probabilities", "temperature")
OF_RUN = ("moving reference", "coefficients")


def training_checks(updates: Updates) -> Iterator[Check]:
    """Train for a few steps; check the sampled episodes and every loss, gradient and new weight.

    Always trains a tiny clone, even if the subject is the real model, because the weights before and after every update
    are kept in memory.
    """
    subject = make_subject(updates.subject.user) if updates.subject.full else updates.subject
    training = watch_training(subject)
    talk = ("conversations",) if subject.converses else ()
    if talk:
        yield Check(
            name="conversations",
            claim="every conversation is, token for token, what the engine was given and drew, and nothing else",
            difference=float(_unlike_the_engine(training)),
            bar=0,
        )
    if not subject.recipe.demonstrations:
        yield from _sampling_checks(subject, training, talk)
    yield Check(
        name="episodes",
        claim="every episode answers its own prompt, ends where it must, and has the reward of its text",
        difference=float(
            sum(_wrong_episodes(subject, training, *each) for each in _groups(training)) + _repeated(subject, training)
        ),
        bar=0,
        after=talk,
    )
    followed = follow(subject, training)
    yield Check(
        name="optimizer steps",
        claim="a step makes one optimizer step per minibatch and update, as many as the config says",
        difference=float(sum(each.missing for each in followed)),
        bar=0,
        after=("every token once",),
    )
    causes = (*OF_BATCH, *OF_MODEL, "clip", "correction", "kl", "entropy", "loss", "gradient", "optimizer steps")
    yield from _carried_checks(subject, followed, causes)
    causes = (*causes, *OF_RUN)
    yield Check(
        name="training",
        claim="loss and gradient of every optimizer step of a run equal the formulas, computed in float64",
        difference=largest(each.gradient_error for each in followed),
        bar=RUN_BAR,
        after=causes,
    )
    name = training.config.train.optimizer.name
    yield Check(
        name="new weights",
        claim="every optimizer step produces the weights that the optimizer's formula gives for its gradient",
        difference=_weight_error(subject, training),
        bar=BFLOAT16_BAR
        if training.config.train.optimizer.moments == "bfloat16"
        else MUON_BAR
        if name == "muon"
        else BAR,
        after=("schedule", f"optimizer {name}", "optimizer steps"),
    )
    yield Check(
        name="frozen weights",
        claim="only trained weights change, and only in updates",
        difference=float(_moved_elsewhere(subject, training)),
        bar=0,
    )
    yield Check(
        name="resume",
        claim="a resumed run repeats the step after the checkpoint bit for bit: prompts, answers, weights",
        difference=float(_other_step(training.resumed, training.steps[-1])),
        bar=0,
        after=("hand-over",),
    )
    if not subject.recipe.demonstrations:
        yield _with_other_options(subject, causes)


def _with_other_options(subject: Subject, causes: tuple[str, ...]) -> Check:
    """Check a run with dropped groups, every term of the loss, and ratios to the trainer's own log-probabilities."""
    other = with_other_options(subject)
    training = watch_training(other)
    followed = follow(other, training)
    wrong = sum(each.missing for each in followed) + _moved_elsewhere(other, training)
    return Check(
        name="other options",
        claim="the same holds with a KL, an entropy bonus, a correction, and groups, episodes and sure tokens left out",
        difference=wrong or largest(each.gradient_error for each in followed),
        bar=RUN_BAR,
        after=(*causes, "training"),
    )


def _carried_checks(subject: Subject, followed: Sequence[Followed], causes: tuple[str, ...]) -> Iterator[Check]:
    """Check what each step changes for the next: adapted coefficients, and a reference that moves."""
    if subject.config.reference is not None:
        yield Check(
            name="moving reference",
            claim="every few steps the reference becomes the mixture of itself and the policy that the config says",
            difference=largest(
                weight_difference(each.step.reference, each.reference_before, each.reference) for each in followed
            ),
        )
    rules = subject.rules
    if rules.kl_target is not None or rules.entropy_target is not None:
        yield Check(
            name="coefficients",
            claim="weights of KL and entropy bonus follow what the run measures as their formulas say, step after step",
            difference=largest(each.coefs_error(rules) for each in followed),
            after=(*causes, "moving reference"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Drawn:
    """Log-probabilities of the episodes of a step, by the sampler and under one version of the weights, [S, n] each."""

    sampled: np.ndarray
    drawn: np.ndarray
    """Under the distribution drawn from, with the repetition penalty."""
    naive: Scores[np.ndarray]
    penalised: Scores[np.ndarray]
    """The naive scores of that distribution."""
    used: np.ndarray
    """True for tokens that this version of the weights drew, [S, n]."""


def _sampling_checks(subject: Subject, training: Training, talk: tuple[str, ...]) -> Iterator[Check]:
    drawn = [each for number in range(len(training.steps)) for each in _drawn(subject, training, number)]
    largest = max(float(np.abs(each.naive.logprobs[each.used]).max()) for each in drawn)
    errors = [float(np.abs(each.sampled - each.naive.logprobs)[each.used].max()) for each in drawn]
    yield Check(
        name="hand-over",
        claim="after every update, a sampled token's log-probability is that of the weights that drew it",
        difference=max(errors) / largest,
        after=(*OF_MODEL, "sampler", *talk),
    )
    if subject.recipe.needs_baseline:
        yield Check(
            name="greedy completions",
            claim="each token of a greedy completion is the likeliest under the weights that drew it",
            difference=max(_behind_likeliest(subject, training, number) for number in range(len(training.steps)))
            / largest,
            after=("hand-over",),
        )
    rollout = training.config.rollout
    if rollout.top_k or rollout.top_p < 1 or rollout.min_p:
        return  # tokens are drawn from a truncated distribution, not from that of their full log-probabilities
    if rollout.repetition_penalty != 1:
        errors = [float(np.abs(each.drawn - each.penalised.logprobs)[each.used].max()) for each in drawn]
        yield Check(
            name="repetition penalty",
            claim="tokens are drawn from the softmax after the penalty on all tokens of the sequence before them",
            difference=max(errors) / largest,
            after=("hand-over",),
        )
    surprise = sum(float(np.sum((-each.drawn - each.penalised.entropy)[each.used])) for each in drawn)
    variance = sum(float(np.sum(each.penalised.variance[each.used])) for each in drawn)
    yield Check(
        name="draws",
        claim="sampled tokens are as likely as draws from the model, in standard deviations of their mean",
        difference=abs(surprise) / np.sqrt(variance),
        bar=DEVIATIONS,
        after=("hand-over", "repetition penalty"),
    )


def _drawn(subject: Subject, training: Training, number: int) -> Iterator[_Drawn]:
    """Yield the episodes of a step, once for each version of the weights that drew some of their tokens."""
    groups, room = training.steps[number].groups, subject.room
    for first in range(0, len(groups), subject.config.prompts_per_step):
        own = groups[first : first + subject.config.prompts_per_step]
        episodes = [episode for group in own for episode in episodes_of(group)]
        tokens, starts = padded_tokens(episodes, room)
        shape, penalty = (room.episodes, room.continuation), subject.config.rollout.repetition_penalty
        sampled, drawn = np.zeros(shape), np.zeros(shape)
        versions = np.full(shape, -1.0)
        transcripts = [each for group in own for each in group.transcripts]
        for row, (episode, transcript) in enumerate(zip(episodes, transcripts, strict=True)):
            sampled[row, : len(episode.logprobs)] = episode.logprobs
            drawn[row, : len(episode.logprobs)] = episode.drawn_logprobs
            drew = _versions(transcript)[: len(episode.drawn)]
            versions[row, : len(drew)] = np.where(episode.drawn, drew, -1)
        for version in np.unique(versions[versions >= 0]).astype(int).tolist():
            weights = training.version(version)
            naive = subject.naive_scores(tokens, starts, weights)
            after = naive if penalty == 1 else subject.naive_scores(tokens, starts, weights, penalty=penalty)
            yield _Drawn(sampled=sampled, drawn=drawn, naive=naive, penalised=after, used=versions == version)


def _behind_likeliest(subject: Subject, training: Training, number: int) -> float:
    """How much less likely, in nats, a token of a step's greedy completions is at most than the likeliest one."""
    greedy = [group.greedy for group in training.steps[number].groups if group.greedy is not None]
    episodes = [episode_of(*each) for each in greedy]
    tokens, starts = padded_tokens(episodes, subject.room)
    penalty, worst = training.config.rollout.repetition_penalty, 0.0
    for row, (episode, each) in enumerate(zip(episodes, greedy, strict=True)):
        versions = _versions(each.transcript)[: len(episode.drawn)]
        for version in np.unique(versions[np.array(episode.drawn)]).tolist():
            found = subject.naive_scores(tokens, starts, training.version(version), penalty=penalty)
            used = np.flatnonzero(np.array(episode.drawn) & (versions == version))
            worst = max(worst, float((found.highest - found.logprobs)[row, used].max()))
    return worst


def _groups(training: Training) -> Iterator[tuple[int, Group]]:
    """Every group of the run, after the number of its step."""
    return ((number, group) for number, step in enumerate(training.steps) for group in step.groups)


def _wrong_episodes(subject: Subject, training: Training, number: int, group: Group) -> int:
    """Number of a group's episodes with a wrong prompt, end, weight version or reward.

    With demonstrations: with a wrong prompt, or an answer that is not the data's.
    """
    asked = group.prompt.prompt.id
    numbers = Numbers(TaskSource(), vocab=subject.decoder.vocab, shortest=shortest_prompt(subject.recipe))
    known = {each.id: each for each in numbers.prompts("train")}
    encode = LetterBackend().encode
    wrong = 0
    given = demonstrated(subject.recipe, known[asked])
    for place, (episode, transcript, reward) in enumerate(
        zip(episodes_of(group), group.transcripts, group.rewards, strict=True)
    ):
        versions = _versions(transcript)[: len(episode.drawn)][np.array(episode.drawn, bool)]
        oldest = number - training.config.rollout.max_staleness
        right = episode.prompt == tuple(encode(known[asked].question))
        if subject.converses:
            right &= is_right(subject, training, asked, transcript, reward)
        elif subject.recipe.demonstrations:
            text, paid = given[place]
            right &= episode.tokens == (*encode(text), 0) and episode.reward == paid
        else:
            right &= _ends_rightly(episode)
            right &= abs(episode.reward - _reward(training, asked, episode)) < 1e-6
        if not subject.recipe.demonstrations:
            right &= all(oldest <= version <= number for version in versions)
        wrong += not right
    if subject.recipe.needs_baseline:
        wrong += not _has_greedy(subject, training, group)
    return wrong


def _has_greedy(subject: Subject, training: Training, group: Group) -> bool:
    """Whether a group has a greedy completion of its prompt, which ends where it must and has its text's reward."""
    asked, greedy = group.prompt.prompt.id, group.greedy
    if greedy is None or not np.array_equal(greedy.transcript.prompt, group.transcripts[0].prompt):
        return False
    if subject.converses:
        return is_right(subject, training, asked, greedy.transcript, greedy.reward)
    episode = episode_of(*greedy)
    return _ends_rightly(episode) and abs(episode.reward - _reward(training, asked, episode)) < 1e-6


def demonstrated(recipe: Recipe, prompt: Prompt) -> list[tuple[str, float]]:
    """The completions that the data has for a prompt, with their rewards."""
    if recipe.data_form == "pair":
        return [(prompt.metadata["chosen"], 1.0), (prompt.metadata["rejected"], -1.0)]
    if recipe.data_form == "label":
        return [(prompt.metadata["completion"], 1.0 if prompt.metadata["label"] else -1.0)]
    return [(prompt.answer, 1.0)]


def _versions(transcript: Transcript) -> np.ndarray:
    """The weight version of each token after the prompt, [n]."""
    return np.concatenate([span.versions for span in transcript.spans[1:]])


def _unlike_the_engine(training: Training) -> int:
    """Number of trained conversations that the engine did not hold, token for token.

    The resumed step is counted by itself: what had ended before its checkpoint was drawn once, and is trained twice.
    """
    held = Counter(training.ledgers)
    wrong = 0
    for steps in (training.steps, [training.resumed]):
        trained = [each for step in steps for group in step.groups for each in group.transcripts]
        found = Counter(Ledger(tuple(each.tokens.tolist()), tuple(each.mask.tolist())) for each in trained)
        wrong += sum((found - held).values())
    return wrong


def _repeated(subject: Subject, training: Training) -> int:
    """Number of long answers that repeat another answer to the same question: drawn with the same random numbers."""
    if subject.recipe.demonstrations:
        return 0
    answers = [
        (group.prompt.prompt.id, episode.tokens)
        for _, group in _groups(training)
        for episode in episodes_of(group)
        if len(episode.tokens) > MAX_NEW_TOKENS // 2
    ]
    return len(answers) - len(set(answers))


def _ends_rightly(episode: Episode) -> bool:
    """Whether an answer ends at its first stop token, or has none and the maximum length."""
    ended = has_ended(episode.tokens)
    whole = len(episode.tokens) == MAX_NEW_TOKENS and is_open(episode.tokens)
    return (ended or whole) and episode.truncated == (not ended) and all(episode.drawn)


def _reward(training: Training, asked: str, episode: Episode) -> float:
    """The reward of an answer: the weighted sum of its grade and DAPO's overlong penalty (arXiv:2503.14476)."""
    over = len(episode.tokens) - (MAX_NEW_TOKENS - OVERLONG_TOKENS)
    return weighted(training, grade(asked, letters(episode.tokens)), over)


def _weight_error(subject: Subject, training: Training) -> float:
    """The largest error of the weights after an optimizer step, relative to the size of the step's change."""
    rules, steps = rules_of_run(subject, training), training.steps
    whole = rules.minibatches * rules.updates_per_batch  # optimizer steps of a step without dropped groups
    trained = {name: steps[0].weights[name] for name in trained_specs(subject.decoder)}
    worst = 0.0
    with in_float64():
        naive = NaiveOptimizer(training.config.train.optimizer, len(steps) * whole, trained)
        for number, step in enumerate(steps):
            first = (number + 1) * whole - len(step.updates)  # a step with fewer updates uses its last learning rates
            for place, seen in enumerate(step.updates, start=first):
                expected = naive.update(seen.before, seen.gradient, place)
                worst = largest((worst, weight_difference(seen.after, seen.before, expected)))
    return worst


def _moved_elsewhere(subject: Subject, training: Training) -> int:
    """Number of weight elements that changed outside an optimizer step, or that are frozen and changed."""
    now: Arrays = dict(subject.weights)
    moved = 0
    for step in training.steps:
        moved += _unequal(step.weights, now)
        for seen in step.updates:
            moved += _unequal(seen.before, {name: now[name] for name in seen.before})
            now |= seen.after
    return moved


def _other_step(found: Step, expected: Step) -> int:
    """Count differences between two steps: unequal episodes, and unequal elements of new weights and gradients.

    Adds 1 if the steps differ in their number of updates or episodes.
    """
    ours, theirs = ([each for group in step.groups for each in episodes_of(group)] for step in (found, expected))
    shapes = (len(found.updates), len(ours)) != (len(expected.updates), len(theirs))
    other = sum(a != b for a, b in zip(ours, theirs, strict=False))
    pairs = zip(found.updates, expected.updates, strict=False)
    other += _unequal(found.critic, expected.critic) + _unequal(found.reference, expected.reference)
    other += found.coefs != expected.coefs
    return int(shapes) + other + sum(_unequal(a.after, b.after) + _unequal(a.gradient, b.gradient) for a, b in pairs)


def _unequal(found: Arrays, expected: Arrays) -> int:
    return sum(int(np.count_nonzero(found[name] != value)) for name, value in expected.items())
