"""Compares an evaluation of a watched run's last weights with the naive form: questions, answers and scores."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from podium.certify.check_result import Check
from podium.certify.drawn import DRAW_BAR, OF_MODEL, OF_SAMPLER, Drawing, Sampling, compared, fits
from podium.certify.naive_draws import NO_CUT, Cut, request_seed
from podium.certify.naive_rules import KL_TO
from podium.certify.numbers_task import EVALUATED, MOST_EVALUATED, TOO_LONG, Numbers, asked_tokens
from podium.certify.small_run import EVAL_SAMPLES
from podium.certify.subject import Subject, shortest_prompt
from podium.certify.talk import asked, demonstrated, is_right
from podium.certify.training import Evaluated, Training
from podium.observe.stats import PreferenceStats, TaskScores
from podium.sampling.groups import Group
from podium.tasks.task import Prompt, Reward, TaskSource
from podium.train import evaluate

OF_RUN = ("ends of answers", "order of prompts", "conversations", "episodes")
OF_DRAWS = ("hand-over", "repetition penalty", "cuts", "draws")
LIKELIEST = 1e-4  # nats by which a greedy token may be less likely than the likeliest one, since rounding may swap them
REWARD_BAR = 1e-4  # of rewards of preferences, in nats: sums of log-ratios in float32
Z_95 = 1.959963984540054  # standard deviations that hold 95 % of a normal distribution
EVERY = EVALUATED[:MOST_EVALUATED]
"""The questions of an evaluation."""
ASKED = [(index, question) for index, question in enumerate(EVERY) if question != TOO_LONG]
"""Those that fit into a prompt, each with its index."""


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
        _wrong_preferences(subject, training, found.preferences),
    ]
    return Check(
        name="evaluation",
        claim="every evaluation question is answered greedily and by sampling, as eval says, and the scores are right",
        difference=float(sum(wrong)),
        bar=0,
        after=(*OF_MODEL, *OF_SAMPLER, *OF_DRAWS, *OF_RUN),
    )


def _wrong_answers(subject: Subject, training: Training, found: Evaluated, groups: Sequence[Group]) -> int:
    """Number of answers that are missing, answer another question, or have a wrong end or reward."""
    count = 1 if groups is found.greedy else EVAL_SAMPLES
    wrong = abs(len(groups) - len(ASKED))
    for (index, question), group in zip(ASKED, groups, strict=False):
        wrong += (group.prompt.prompt.id, len(group.transcripts)) != (question, count)
        for place, pair in enumerate(zip(group.transcripts, group.rewards, strict=True)):
            own = asked(training, question, _seed(training, found, index), place, fails=False)
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
            for (index, _), group in zip(ASKED, groups, strict=False)
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
    """Number of scores that differ from those of the answers' rewards, also where questions are not answered greedily;
    a question too long to be asked is wrong.
    """
    alone = evaluate.task_scores((), found.sampled, questions=len(EVERY))
    both = ((found.scores, found.greedy), (alone, found.sampled))
    return sum(_wrong_in(scores, answered, found.sampled) for scores, answered in both)


def _wrong_in(scores: TaskScores, answered: Sequence[Group], drawn: Sequence[Group]) -> int:
    """Number of wrong scores, of which the accuracies are of `answered` and the others of `drawn`."""
    first, sampled = (
        np.array([[min(1.0, max(0.0, reward.parts["correct"])) for reward in group.rewards] for group in groups])
        for groups in (answered, drawn)
    )
    answers = [transcript for group in answered for transcript in group.transcripts]
    cut = np.array([transcript.finish_reason != "stop" for transcript in answers]).reshape(first.shape)
    rewards = [reward for group in answered for reward in group.rewards]
    n, k = len(EVERY), first.shape[1]
    passed = [_share_of_sets(sampled, size) / n for size in range(1, EVAL_SAMPLES + 1)]
    pairs = (
        (scores.accuracy, first.sum() / k / n),
        (scores.completed_accuracy, (first * ~cut).sum() / k / n),
        (scores.avg_at_k, sampled.sum() / EVAL_SAMPLES / n),
        (scores.pass_at_k, passed[-1]),
        *zip(scores.passes.values(), passed, strict=False),
        *((scores.scores.get(name), np.mean([each.parts[name] for each in rewards])) for name in _others(rewards)),
        (scores.truncated_fraction, cut.mean()),
        (scores.completion_tokens, np.mean([each.num_drawn for each in answers])),
        (scores.questions, n),
        (scores.too_long, n - len(ASKED)),
        (len(scores.passes), EVAL_SAMPLES),
        *((error, 0.0) for error in _interval_errors(scores, n)),
    )
    return sum(1 for own, expected in pairs if own is None or abs(own - expected) > 1e-9)


def _wrong_preferences(subject: Subject, training: Training, told: PreferenceStats | None) -> int:
    """Number of wrong means, and of a wrong share, of the rewards of held-out preferences."""
    rules = subject.rules
    if told is None or training.settings.moving:  # with a model that moves on, too
        return int(rules.preferences and told is None)
    numbers = Numbers(TaskSource(), vocab=subject.decoder.vocab, shortest=shortest_prompt(subject.recipe))
    asked = [each for each in numbers.prompts("eval")[:MOST_EVALUATED] if each.id != TOO_LONG]
    given = [(each, *answer) for each in asked for answer in demonstrated(subject.recipe, each)]
    size = subject.room.episodes
    parts = [given[first : first + size] for first in range(0, len(given), size)]
    sums = np.concatenate([_log_ratios(subject, training, [(each, text) for each, text, _ in part]) for part in parts])
    rewards = rules.loss_options.get("beta", 0.1) * sums
    chosen = np.array([paid > 0 for _, _, paid in given])
    pairs = [(told.chosen, rewards[chosen].mean()), (told.rejected, rewards[~chosen].mean())]
    if subject.recipe.data_form == "pair":
        pairs.append((told.accuracy, np.mean(rewards[chosen] > rewards[~chosen])))
    return sum(1 for own, expected in pairs if own is None or abs(own - expected) > REWARD_BAR)


def _log_ratios(subject: Subject, training: Training, answers: Sequence[tuple[Prompt, str]]) -> np.ndarray:
    """The log-ratio of the last policy to the model that it is compared with for each answer, in nats, [n]."""
    episodes = [(asked_tokens(prompt.question, tools=False), (*map(int, text.split()), 0)) for prompt, text in answers]
    tokens = np.zeros((subject.room.episodes, subject.room.prompt + subject.room.continuation), np.int32)
    starts = np.ones(len(tokens), np.int32)
    for row, (prompt, answer) in enumerate(episodes):
        tokens[row, : len(prompt) + len(answer)] = (*prompt, *answer)
        starts[row] = len(prompt)
    (other,) = (each for each in subject.models.values() if each.role.scores == KL_TO)
    now = subject.naive_scores(tokens, starts, training.weights).logprobs
    before = subject.naive_scores(tokens, starts, other.weights, decoder=other.decoder).logprobs
    return np.array([(now - before)[row, : len(answer)].sum() for row, (_, answer) in enumerate(episodes)])


def _share_of_sets(right: np.ndarray, size: int) -> float:
    """For each question with its answers [n, k], the share of sets of this size that hold a right one; their sum."""
    sets = list(itertools.combinations(range(right.shape[1]), size))
    return float(sum(np.mean([row[list(each)].max() >= 1 for each in sets]) for row in right))


def _others(rewards: Sequence[Reward]) -> list[str]:
    """The parts of rewards besides that of right answers."""
    return sorted({name for reward in rewards for name in reward.parts} - {"correct"})


def _interval_errors(scores: TaskScores, n: int) -> Iterator[float]:
    """Yield for each end x of an interval how far (p - x)^2 = z^2 x (1 - x) / n, Wilson's condition, is from true."""
    for share, interval in (
        (scores.accuracy, scores.accuracy_interval),
        (scores.pass_at_k or 0.0, scores.pass_at_k_interval or (0.0, 1.0)),
    ):
        low, high = interval
        yield float(not low <= share <= high)
        for end in interval:
            yield (share - end) ** 2 - Z_95**2 * end * (1 - end) / n
