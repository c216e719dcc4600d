"""Compares an evaluation of a watched run's last weights with the naive form: questions, answers and scores."""

from collections.abc import Sequence

import numpy as np

from podium.certify.check_result import Check
from podium.certify.drawn import DRAW_BAR, OF_MODEL, OF_SAMPLER, Drawing, Sampling, compared, fits
from podium.certify.naive_draws import NO_CUT, Cut, request_seed
from podium.certify.numbers_task import QUESTIONS
from podium.certify.small_run import EVAL_SAMPLES
from podium.certify.subject import Subject
from podium.certify.talk import asked, is_right
from podium.certify.training import Evaluated, Training
from podium.sampling.groups import Group

AFTER = ("hand-over", "repetition penalty", "cuts", "order of prompts", "draws", "conversations", "episodes")
LIKELIEST = 1e-4  # nats by which a greedy token may be less likely than the likeliest one, since rounding may swap them


def evaluation_check(subject: Subject, training: Training) -> Check:
    """Count the errors of the evaluation: in answers, draws and scores, and whether it moved the run's position."""
    found = training.evaluation
    assert found is not None, "this run was evaluated"
    wrong = [
        int(not found.undisturbed),
        _wrong_answers(subject, training, found, found.greedy),
        _wrong_answers(subject, training, found, found.sampled),
        _wrong_draws(subject, training, found) if fits(subject, (*found.greedy, *found.sampled)) else 1,
        _wrong_scores(found),
    ]
    return Check(
        name="evaluation",
        claim="every evaluation question is answered greedily and by sampling, as eval says, and the scores are right",
        difference=float(sum(wrong)),
        bar=0,
        after=(*OF_MODEL, *OF_SAMPLER, *AFTER),
    )


def _wrong_answers(subject: Subject, training: Training, found: Evaluated, groups: Sequence[Group]) -> int:
    """Number of answers that are missing, answer another question, or have a wrong end or reward."""
    questions, count = list(map(str, reversed(range(QUESTIONS)))), 1 if groups is found.greedy else EVAL_SAMPLES
    wrong = abs(len(groups) - QUESTIONS)
    for index, (question, group) in enumerate(zip(questions, groups, strict=False)):
        wrong += (group.prompt.prompt.id, len(group.transcripts)) != (question, count)
        for place, pair in enumerate(zip(group.transcripts, group.rewards, strict=True)):
            own = asked(training, question, _seed(training, found, index), place)
            wrong += not is_right(subject, training, own, *pair)
    return wrong


def _seed(training: Training, found: Evaluated, index: int) -> int:
    """The seed of the answers to the question at this index."""
    return request_seed(training.config.seed, f"eval {found.label}", index)


def _wrong_draws(subject: Subject, training: Training, found: Evaluated) -> int:
    """Number of tokens that the last weights do not draw with the seeds of evaluation questions."""
    settings, rollout, version = training.config.eval, training.config.rollout, len(training.steps)
    wrong = 0
    for groups, temperature in ((found.greedy, 0.0), (found.sampled, settings.temperature)):
        drawings = [
            Drawing(
                transcript=transcript,
                seed=_seed(training, found, index),
                completion=completion,
            )
            for index, group in enumerate(groups)
            for completion, transcript in enumerate(group.transcripts)
        ]
        wrong += sum(int(np.any(span.versions != version)) for each in drawings for span in each.transcript.drawn)
        cut = Cut(rollout.top_k, rollout.top_p, rollout.min_p) if temperature else NO_CUT
        sampling = Sampling(temperature=temperature or 1.0, penalty=settings.repetition_penalty, cut=cut)
        for each in compared(subject, training.version, drawings, sampling):
            wrong += int(np.sum(each.errors.logprobs > DRAW_BAR))
            wrong += int(np.sum(each.errors.tokens > DRAW_BAR if temperature else each.behind > LIKELIEST))
    return wrong


def _wrong_scores(found: Evaluated) -> int:
    """Number of scores that are not the means of the answers' rewards."""
    right = [
        np.array([[min(1.0, max(0.0, reward.parts["correct"])) for reward in group.rewards] for group in groups])
        for groups in (found.greedy, found.sampled)
    ]
    greedy, sampled = right
    cut = [transcript.finish_reason != "stop" for group in found.greedy for transcript in group.transcripts]
    whole = greedy[:, 0] * ~np.array(cut)
    scores = found.scores
    pairs = (
        (scores.accuracy, greedy.mean()),
        (scores.completed_accuracy, whole.mean()),
        (scores.avg_at_k, sampled.mean()),
        (scores.pass_at_k, np.mean([any(x >= 1 for x in row) for row in sampled.tolist()])),
        (scores.truncated_fraction, np.mean(cut)),
        (scores.questions, QUESTIONS),
    )
    return sum(1 for own, expected in pairs if own is None or abs(own - expected) > 1e-9)
