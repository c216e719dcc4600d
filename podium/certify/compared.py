"""Compares a watched training run with the naive implementation: each episode, each gradient and each new weight.

The naive implementation starts each optimizer step from the trainer's own weights and gives its optimizer the trainer's
own gradient. So every difference belongs to one step and one part, and rounding does not accumulate.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from podium.certify.batches import OF_BATCH
from podium.certify.check_result import BAR, RUN_BAR, Check, largest
from podium.certify.drawn import OF_MODEL, experts_check, fits, sampling_checks, versions_of
from podium.certify.evaluated import OF_RUN, evaluation_check
from podium.certify.followed import Followed, follow, rules_of_run
from podium.certify.formulas import BFLOAT16_BAR, BFLOAT16_MUON_BAR, CLAIMS, MUON_BAR
from podium.certify.ledgers import Ledger
from podium.certify.naive import in_float64
from podium.certify.naive_draws import request_seed
from podium.certify.naive_optimizer import NaiveOptimizer
from podium.certify.numbers_task import LetterBackend, Numbers, asked_tokens
from podium.certify.prompt_order import superfluous, taken_prompts
from podium.certify.reported import reports_check
from podium.certify.small_run import make_subject, with_other_options
from podium.certify.subject import Subject, episodes_of, shortest_prompt
from podium.certify.talk import Asked, asked, demonstrated, is_right
from podium.certify.tiny import Arrays
from podium.certify.training import OptimizerStep, Step, Training, watch_training
from podium.certify.updates import Updates, weight_difference
from podium.config.optimizer import OptimizerConfig
from podium.models.params import trained_specs
from podium.sampling.groups import Group
from podium.tasks.task import TaskSource

OF_UPDATE = (
    *OF_BATCH,
    *OF_MODEL,
    *CLAIMS,
    "entropy",
    "scoring models",
    "loss",
    "gradient",
    "packing",
    "shared prompts",
    "micro-batches",
    "long sequences",
    "optimizer steps",
)
"""Names of the checks whose failure explains a failed check of a run's updates."""


def training_checks(updates: Updates) -> Iterator[Check]:
    """Train for a few steps; check the sampled episodes and every loss, gradient and new weight.

    Always trains a tiny clone, even if the subject is the real model, because the weights before and after every update
    are kept in memory.
    """
    subject = make_subject(updates.subject.user) if updates.subject.full else updates.subject
    training = watch_training(subject)
    yield from _answer_checks(subject, training)
    if not _answers_fit(subject, training) or any(superfluous(subject, training, each) for each in training.steps):
        return  # the naive form has no room for them; the episodes or the order of prompts are red
    yield from _update_checks(subject, training)
    yield Check(
        name="resume",
        claim="a run goes on from its newest checkpoint, and from one before repeats a step bit for bit",
        difference=float(_other_step(training.resumed, training.steps[-1]) + (training.newest != len(training.steps))),
        bar=0,
        after=("hand-over",),
    )
    yield evaluation_check(subject, training)
    if not subject.recipe.demonstrations:
        yield _with_other_options(subject, _causes(training))


def _answer_checks(subject: Subject, training: Training) -> Iterator[Check]:
    """Check which prompts the run answered, and its episodes."""
    taken = taken_prompts(subject, training)
    talk = ("conversations",) if subject.converses else ()
    yield Check(
        name="order of prompts",
        claim="prompts come in the seed's order, each once an epoch; steps take the oldest first, none too old",
        difference=float(sum(each.errors for each in taken)),
        bar=0,
        after=("mixture of tasks", "choice of prompts"),
    )
    if talk:
        yield Check(
            name="conversations",
            claim="every conversation is, token for token, what the engine was given and drew, and nothing else",
            difference=float(_unlike_the_engine(training)),
            bar=0,
        )
    if not subject.recipe.demonstrations and _answers_fit(subject, training):
        yield from sampling_checks(subject, training, [each.numbers for each in taken], talk)
        if subject.decoder.choices:
            yield experts_check(subject, training)
    yield Check(
        name="episodes",
        claim="every episode answers its own prompt, ends where it must, and has the reward of its text",
        difference=float(
            sum(
                min(_wrong_in_step(subject, training, step, numbers) for numbers in own.numbers)
                for step, own in zip(training.steps, taken, strict=True)
            )
        ),
        bar=0,
        after=("ends of answers", *talk, *(("order of prompts",) if talk else ())),
    )
    if not subject.recipe.demonstrations:
        yield Check(
            name="shares of right answers",
            claim="the share of right answers to each prompt of a step is reported once to curricula and retirement",
            difference=float(sum(_wrongly_learned(step) for step in training.steps)),
            bar=0,
            after=("episodes",),
        )


def _answers_fit(subject: Subject, training: Training) -> bool:
    """Whether no answer is longer than the run allows, so that the naive form has room for all of them."""
    return fits(subject, [group for step in (*training.steps, training.resumed) for group in step.groups])


def _update_checks(subject: Subject, training: Training) -> Iterator[Check]:
    """Check the run's optimizer steps, and what they change."""
    followed, causes, learning = follow(subject, training), _causes(training), tuple(training.settings.learning)
    yield Check(
        name="optimizer steps",
        claim="a step makes one optimizer step per minibatch and update, as many as the config says",
        difference=float(sum(each.missing for each in followed)),
        bar=0,
        after=("every token once",),
    )
    yield from _carried_checks(subject, training, followed)
    yield Check(
        name="training",
        claim="loss and gradient of every optimizer step of a run equal the formulas, computed in float64",
        difference=largest(each.gradient_error for each in followed),
        bar=RUN_BAR,
        after=(*causes, *learning),
    )
    name = training.config.train.optimizer.name
    yield Check(
        name="new weights",
        claim="every optimizer step produces the weights that the optimizer's formula gives for its gradient",
        difference=_weight_error(subject, training),
        bar=_weight_bar(training.config.train.optimizer),
        after=("schedule", f"optimizer {name}", "optimizer steps"),
    )
    yield reports_check(subject, training, followed, (*causes, *OF_RUN, "training", "new weights"))
    for each in learning:
        yield from _learning_checks(training, each, followed, (*causes, "value update"))
    yield Check(
        name="frozen weights",
        claim="only trained weights change, and only in updates",
        difference=float(_moved_elsewhere(subject, training)),
        bar=0,
        after=learning,
    )


def _causes(training: Training) -> tuple[str, ...]:
    """Names of the checks that explain red ones of a run's losses and gradients."""
    return (*OF_UPDATE, *_moves(training), "coefficients")


def _moves(training: Training) -> tuple[str, ...]:
    """Names of the checks of models that follow the policy."""
    return tuple(f"moving {name}" for name in training.settings.moving)


def _learning_checks(
    training: Training, name: str, followed: Sequence[Followed], causes: tuple[str, ...]
) -> Iterator[Check]:
    """Check every update of the model in the role `name`, which is trained beside the policy."""
    learned = [each.learned[name] for each in followed]
    yield Check(
        name=name,
        claim=f"the {name} learns from every minibatch as often as the config says, with the formulas' gradient",
        difference=largest((*(float(each.missing) for each in learned), *(each.error for each in learned))),
        bar=RUN_BAR,
        after=causes,
    )
    optimizer = training.config.train.optimizer
    yield Check(
        name=f"new weights of the {name}",
        claim=f"every update of the {name} produces the weights that its optimizer's formula gives for its gradient",
        difference=_learned_weight_error(training, name),
        bar=_weight_bar(optimizer),
        after=("schedule", f"optimizer {optimizer.name}", name),
    )


def _weight_bar(optimizer: OptimizerConfig) -> float:
    """Tolerance of new weights."""
    if optimizer.moments == "bfloat16":
        return BFLOAT16_MUON_BAR if optimizer.name == "muon" else BFLOAT16_BAR
    return MUON_BAR if optimizer.name == "muon" else BAR


def _with_other_options(subject: Subject, causes: tuple[str, ...]) -> Check:
    """Check a run with dropped groups, every term of the loss, and ratios to the trainer's own log-probabilities.

    `causes` are the checks that explain red ones of the subject's own run.
    """
    other = with_other_options(subject)
    training = watch_training(other, evaluated=False)
    followed = follow(other, training)
    wrong = sum(each.missing for each in followed) + _moved_elsewhere(other, training)
    wrong += _other_step(training.resumed, training.steps[-1])
    weights = _weight_error(other, training) / _weight_bar(training.config.train.optimizer) * RUN_BAR
    return Check(
        name="other options",
        claim="steps are right with a KL, an entropy bonus, a correction, demonstrations, and groups left out",
        difference=wrong or largest((weights, *(each.gradient_error for each in followed))),
        bar=RUN_BAR,
        after=(*causes, *OF_RUN, "hand-over", "draws", "training", "new weights", "frozen weights", "resume"),
    )


def _carried_checks(subject: Subject, training: Training, followed: Sequence[Followed]) -> Iterator[Check]:
    """Check what each step changes for the next: adapted coefficients, and models that follow the policy."""
    for name in training.settings.moving:
        yield Check(
            name=f"moving {name}",
            claim=f"every few steps the {name} becomes the mixture of itself and the policy that the config says",
            difference=largest(
                weight_difference(each.step.models[name], each.moved[name].before, each.moved[name].now)
                for each in followed
            ),
        )
    rules = subject.rules
    if rules.kl_target is not None or rules.entropy_target is not None:
        yield Check(
            name="coefficients",
            claim="weights of KL and entropy bonus follow the run's measurements by their formulas, step after step",
            difference=largest(each.coefs_error(rules) for each in followed),
            after=(*OF_UPDATE, *_moves(training)),
        )


def _wrongly_learned(step: Step) -> int:
    """Number of a step's groups whose share of right answers was not reported, or reported wrongly."""
    graded = [[reward for reward in group.rewards if not reward.failed] for group in step.groups]
    shares = [
        (group.prompt.prompt.id, [reward.parts["correct"] for reward in own])
        for group, own in zip(step.groups, graded, strict=True)
        if own
    ]
    expected = sorted((question, min(1.0, sum(own) / len(own))) for question, own in shares)
    found = sorted(step.shares)
    pairs = zip(found, expected, strict=False)
    wrong = sum(seen != question or abs(own - share) > 1e-9 for (seen, own), (question, share) in pairs)
    return wrong + abs(len(found) - len(expected))


def _wrong_in_step(subject: Subject, training: Training, step: Step, numbers: Sequence[int]) -> int:
    """Number of wrong episodes of a step whose groups have these places in the run's sequence of prompts."""
    pairs = zip(step.groups, numbers, strict=True)
    return sum(_wrong_episodes(subject, training, group, number) for group, number in pairs)


def _wrong_episodes(subject: Subject, training: Training, group: Group, number: int) -> int:
    """Number of wrong episodes of the group at this place of the run: with a wrong prompt, reply, end or reward.

    A demonstration is wrong if its prompt or its answer is not the data's.
    """
    question, seed = group.prompt.prompt.id, request_seed(training.config.seed, "train", number)
    numbers = Numbers(TaskSource(), vocab=subject.decoder.vocab, shortest=shortest_prompt(subject.recipe))
    known = {each.id: each for each in numbers.prompts("train")}
    prompt, encode = asked_tokens(known[question].question, tools=subject.converses), LetterBackend().encode
    wrong = 0
    given = demonstrated(subject.recipe, known[question])
    for place, (episode, transcript, reward) in enumerate(
        zip(episodes_of(group), group.transcripts, group.rewards, strict=True)
    ):
        right = episode.prompt == prompt
        if subject.recipe.demonstrations:
            text, paid = given[place]
            right &= episode.tokens == (*encode(text), 0) and episode.reward == paid
        else:
            right &= is_right(subject, training, asked(training, question, seed, place), transcript, reward)
        wrong += not right
    if "baselines" in subject.recipe.reads:
        wrong += not _has_greedy(subject, training, group, asked(training, question, seed, len(group.transcripts)))
    return wrong


def _has_greedy(subject: Subject, training: Training, group: Group, own: Asked) -> bool:
    """Whether a group has a greedy completion of its prompt that ends where it must and has the reward of its text."""
    greedy = group.greedy
    if greedy is None or not np.array_equal(greedy.transcript.prompt, group.transcripts[0].prompt):
        return False
    return is_right(subject, training, own, greedy.transcript, greedy.reward)


def _unlike_the_engine(training: Training) -> int:
    """Number of trained conversations that differ in a token from those that the engine held.

    The resumed step is counted separately: conversations that had ended before its checkpoint were drawn once, and are
    trained twice.
    """
    held = Counter(training.ledgers)
    wrong = 0
    for steps in (training.steps, [training.resumed]):
        trained = [each for step in steps for group in step.groups for each in group.transcripts]
        found = Counter(Ledger(tuple(each.tokens.tolist()), tuple(each.mask.tolist())) for each in trained)
        wrong += sum((found - held).values())
    return wrong


def _weight_error(subject: Subject, training: Training) -> float:
    """The largest error of the weights after an optimizer step, relative to the size of the step's change."""
    rules, steps = rules_of_run(subject, training), training.steps
    whole = rules.minibatches * rules.updates_per_batch  # optimizer steps of a step without dropped groups
    trained = {name: steps[0].weights[name] for name in trained_specs(subject.decoder)}
    with in_float64():
        naive = NaiveOptimizer(training.config.train.optimizer, len(steps) * whole, trained)
        return _followed_weights(naive, [step.updates for step in steps], whole)


def _learned_weight_error(training: Training, name: str) -> float:
    """The largest error of the weights of a model that is trained beside the policy, relative to an update's change."""
    settings = training.settings.learning[name]
    whole = training.config.algorithm.minibatches * settings.updates
    optimizer = training.config.train.optimizer.model_copy(update={"learning_rate": settings.learning_rate})
    with in_float64():
        naive = NaiveOptimizer(optimizer, len(training.steps) * whole, training.steps[0].models[name])
        return _followed_weights(naive, [step.learned[name] for step in training.steps], whole)


def _followed_weights(naive: NaiveOptimizer, steps: Sequence[Sequence[OptimizerStep]], whole: int) -> float:
    """The largest error of the weights after an optimizer step; each step of the run has up to `whole` of them."""
    worst = 0.0
    for number, updates in enumerate(steps):
        first = (number + 1) * whole - len(updates)  # a step with fewer updates uses its last learning rates
        for place, seen in enumerate(updates, start=first):
            expected = naive.update(seen.before, seen.gradient, place)
            worst = largest((worst, weight_difference(seen.after, seen.before, expected)))
    return worst


def _moved_elsewhere(subject: Subject, training: Training) -> int:
    """Number of bytes of weights that changed outside an optimizer step, or changed although they are frozen."""
    now: Arrays = dict(subject.weights)
    learning: dict[str, Arrays] = {name: dict(subject.models[name].weights) for name in training.steps[0].learned}
    moved = 0
    for step in training.steps:
        moved += _unequal(step.weights, now) + sum(_unequal(step.models[name], own) for name, own in learning.items())
        for own, updates in ((now, step.updates), *((learning[name], made) for name, made in step.learned.items())):
            for seen in updates:
                moved += _unequal(seen.before, {name: own[name] for name in seen.before})
                own |= seen.after
    return moved


def _other_step(found: Step, expected: Step) -> int:
    """Count differences between two steps: unequal episodes, and unequal elements of their states, before and after.

    Adds 1 if the steps differ in their number of updates or episodes, and 1 if the prompts that they leave differ.
    """
    ours, theirs = (
        [
            (episode, versions_of(transcript).tolist())
            for group in step.groups
            for episode, transcript in zip(episodes_of(group), group.transcripts, strict=True)
        ]
        for step in (found, expected)
    )
    made = [(step.updates, *step.learned.values()) for step in (found, expected)]
    sizes = [(*map(len, own), len(step.state)) for own, step in zip(made, (found, expected), strict=True)]
    other = int(sizes[0] != sizes[1] or len(ours) != len(theirs))
    other += sum(a != b for a, b in zip(ours, theirs, strict=False))
    other += found.position.record() != expected.position.record()
    pairs = zip(*(itertools.chain(*own) for own in made), strict=False)
    other += sum(_unequal(a.after, b.after) + _unequal(a.gradient, b.gradient) for a, b in pairs)
    return other + _unequal(found.state, expected.state)


def _unequal(found: Arrays, expected: Arrays) -> int:
    """Number of bytes that differ; an array that is missing, or has another shape or format, counts as 1."""
    return sum(
        int(
            np.count_nonzero(np.frombuffer(found[name].tobytes(), np.uint8) != np.frombuffer(value.tobytes(), np.uint8))
        )
        if name in found and (found[name].shape, found[name].dtype) == (value.shape, value.dtype)
        else 1
        for name, value in expected.items()
    )
