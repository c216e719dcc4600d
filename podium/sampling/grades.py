"""Grades a host's prompts, group by group, while the engine continues."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from podium.observe.stats import EnvironmentStats
from podium.rollout.request import Completion, GradingCounts, RolloutStats
from podium.sampling.conversations.carry import Answer, Pending
from podium.sampling.conversations.episode import Episode
from podium.sampling.exchange import HostPart
from podium.tasks.grading import Grader, Grading
from podium.tasks.task import FAILED, Graded, with_turns


class Grades:
    """Grades a host's prompts, group by group, while the engine continues."""

    def __init__(
        self,
        grader: Grader,
        pending: Sequence[Pending],
        own: slice,
        on_progress: Callable[[int, int], None],
        on_poll: Callable[[], None],
    ) -> None:
        """`own` is the slice of the pending prompts that this host grades; `on_poll` may raise to end a wait."""
        self._grader = grader
        self._on_poll = on_poll
        self._pending = pending
        self._on_progress = on_progress
        self._own = range(len(pending))[own]
        self._gradings: dict[int, Grading] = {}
        self._done = self._tokens = 0

    def submit(self, index: int, completions: list[Completion]) -> None:
        """Start grading the completions of a prompt."""
        graded = [Graded(text=each.text, tokens=tuple(each.tokens.tolist())) for each in completions]
        self._begin(index, graded, [len(each.tokens) for each in completions])

    def submit_episodes(self, index: int, episodes: list[Episode]) -> None:
        """Start grading the episodes of a prompt; those that failed through no fault of the model get no reward."""
        graded = [_graded(each) for each in episodes if not each.failed]
        self._begin(index, graded, [each.transcript.num_drawn for each in episodes])

    def _begin(self, index: int, graded: Sequence[Graded], lengths: Sequence[int]) -> None:
        """Start grading answers to a prompt if this host grades it; `lengths` are of all that have ended, in tokens."""
        prompt = self._pending[index].prompt.prompt
        if index in self._own:
            self._gradings[index] = self._grader.submit([(prompt, each) for each in graded])
        self._done += len(lengths)
        self._tokens += sum(lengths)
        self._on_progress(self._done, self._tokens)

    def wait_for_episodes(self, made: list[list[Episode]], stats: RolloutStats, held: EnvironmentStats) -> HostPart:
        """Wait for the grades of all prompts whose episodes have ended; returns them with all episodes."""
        start = time.perf_counter()
        answers: list[Answer] = []
        for index in self._own:
            episodes, given = made[index], list(self._pending[index].rewards)
            if (grading := self._gradings.get(index)) is not None:
                rewards = iter(grading.result(self._on_poll))
                weight = self._grader.correct_weight(self._pending[index].prompt.prompt.task)
                given = [
                    FAILED if each.failed else with_turns(next(rewards), each.turn_rewards, weight) for each in episodes
                ]
            answers.append(Answer([], given, episodes))
        return HostPart(answers, self._with_grading(stats, start), held)

    def wait_for(self, completed: list[list[Completion]], stats: RolloutStats) -> HostPart:
        """Wait for the grades; returns completions, rewards of complete groups, and stats with the time waited."""
        start = time.perf_counter()
        known = [list(each.rewards) for each in self._pending]
        rewards = {index: grading.result(self._on_poll) for index, grading in self._gradings.items()}
        answers = [Answer(completed[index], rewards.get(index, known[index]), []) for index in self._own]
        return HostPart(answers, self._with_grading(stats, start))

    def _with_grading(self, stats: RolloutStats, start: float) -> RolloutStats:
        """Add to the statistics the time waited since `start`, and the requests to judges."""
        return dataclasses.replace(
            stats,
            grading=GradingCounts(reward_s=time.perf_counter() - start, judged=self._grader.take_judged()),
        )


def _graded(episode: Episode) -> Graded:
    """The part of an episode that graders read: its last answer, and its environment's reward."""
    transcript = episode.transcript
    paid = None if episode.final_reward is None else episode.final_reward + sum(episode.turn_rewards)
    return Graded(
        text=transcript.drawn[-1].text if transcript.drawn else "",
        tokens=tuple(transcript.drawn_tokens.tolist()),
        transcript=transcript.messages,
        paid=paid,
        environment=episode.environment,
    )
