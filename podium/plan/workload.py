"""The workload of a step: how long prompts and completions are, and what calls and steps a rollout of them takes.

Lengths are drawn from a distribution or from an earlier run's own; what they come to is found by driving the engine's
scheduler with them, without a model.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podium.config.schema import Config
from podium.config.sizes import check_split, prompt_buckets, row_tokens
from podium.files import read_lines
from podium.observe.run_dir import LENGTHS
from podium.rollout.scheduler import Admission, Scheduler, rounds
from podium.train.packing import Sample, pack_rows

# GSM8K's 7,473 training questions under SmolLM2's tokenizer and chat template with the task's system prompt: 38 tokens
# of template, then a lognormal of median 57 and log-deviation 0.35 (percentiles 5, 50, 95, 99: 71, 94, 139, 175).
TEMPLATE_TOKENS, QUESTION_MEDIAN, QUESTION_SIGMA = 38, 57, 0.35
# Completions have mean 200 under their cap; a log-deviation of 0.6, half of its variance the question's own.
COMPLETION_MEAN, COMPLETION_SIGMA = 200, 0.6


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceLengths:
    """Tokens of the prompts and completions of one step."""

    prompts: np.ndarray  # [N] int
    completions: np.ndarray  # [N, G] int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What one rollout takes, as the engine would count it."""

    prefill_calls: dict[int, int]  # by bucket, the length that prompts are padded to
    insert_calls: dict[int, int]  # by bucket: where all prompts stay on the device that has prefilled them
    insert_across_calls: dict[int, int]  # by bucket: where some do not
    decode_calls: int  # after each, the host polls the slots
    decode_steps: int
    occupied_slot_steps: int  # slots in which a step made a token that counts, summed over steps
    mean_context: float  # tokens that an occupied slot attends to, its own included, on average over slots and steps
    prompt_tokens: int
    completion_tokens: int
    completions: int

    def slot_utilisation(self, slots: int) -> float:
        """Share of the slots that made tokens that count."""
        return self.occupied_slot_steps / (self.decode_steps * slots) if self.decode_steps else 0.0


def draw_lengths(source: str, config: Config, *, seed: int = 0) -> SequenceLengths:
    """Lengths of one step's prompts and completions; the same for the same seed.

    Args:
        source: `gsm8k`; `fixed:N` for completions of N tokens, with prompts as GSM8K's; or the path of a run or of its
            lengths.jsonl, whose groups are drawn, with replacement only where there are too few.
        config: says how many, and the longest of each.
        seed: of the draw.

    Raises:
        ValueError: the source is none of these, or cannot be used with the config.
    """
    rng = np.random.default_rng(seed)
    if source == "gsm8k":
        return SequenceLengths(prompts=_gsm8k_prompts(rng, config), completions=_gsm8k_completions(rng, config))
    if (fixed := re.fullmatch(r"fixed:(\d+)", source)) is not None:
        tokens, longest = int(fixed[1]), config.rollout.max_new_tokens
        if not 1 <= tokens <= longest:
            raise ValueError(f"lengths {source!r}: must be 1 to rollout.max_new_tokens, {longest}; raise that")
        shape = (config.prompts_per_step, config.group_size)
        return SequenceLengths(prompts=_gsm8k_prompts(rng, config), completions=np.full(shape, tokens))
    path = Path(source)
    if not path.exists():
        raise ValueError(f"lengths {source!r}: no such file; write gsm8k, fixed:N, or the path of a run")
    return _from_run(rng, path / LENGTHS if path.is_dir() else path, config)


def simulate_rollout(lengths: SequenceLengths, config: Config, *, shards: int = 1) -> Workload:
    """The engine's work for these lengths, with its slots split over `shards`: its own scheduler, without a model.

    Raises:
        ValueError: slots or prefill rows do not divide over these devices.
    """
    check_split(config.rollout, shards)
    return _Rollout(lengths, config, shards).run()


def packed_micro_batches(lengths: SequenceLengths, config: Config, *, rows: int) -> int:
    """Micro-batches that a step's completions fill, `rows` each over all devices, packed as the trainer packs."""
    count = 0
    for part in np.array_split(np.arange(len(lengths.prompts)), config.algorithm.minibatches):
        samples = [
            Sample(group=int(n), prompt=(0,) * int(lengths.prompts[n]), tokens=blank, sampled_logprobs=blank)
            for n in part
            for blank in (np.zeros(tokens, np.int32) for tokens in lengths.completions[n])
        ]
        packed = pack_rows(samples, row_tokens=row_tokens(config), packing=config.train.packing)
        count += -(-len(packed) // rows)
    return count


def _gsm8k_prompts(rng: np.random.Generator, config: Config) -> np.ndarray:
    """[N]."""
    questions = rng.lognormal(np.log(QUESTION_MEDIAN), QUESTION_SIGMA, config.prompts_per_step)
    return np.clip(np.rint(TEMPLATE_TOKENS + questions), 1, config.rollout.max_prompt_tokens).astype(int)


def _gsm8k_completions(rng: np.random.Generator, config: Config) -> np.ndarray:
    """[N, G]."""
    N, G, cap = config.prompts_per_step, config.group_size, config.rollout.max_new_tokens
    shared, own = rng.standard_normal((N, 1)), rng.standard_normal((N, G))
    logs = _log_median(cap) + COMPLETION_SIGMA * (shared + own) / np.sqrt(2)
    return np.clip(np.rint(np.exp(logs)), 1, cap).astype(int)


@functools.cache
def _log_median(cap: int) -> float:
    """Log of the median that makes COMPLETION_MEAN the mean after cutting at `cap`; as if uncut for a smaller cap."""
    uncut = float(np.log(COMPLETION_MEAN) - COMPLETION_SIGMA**2 / 2)
    if cap <= COMPLETION_MEAN:
        return uncut
    draws = COMPLETION_SIGMA * np.random.default_rng(0).standard_normal(20_000)
    low, high = uncut, uncut + 10
    for _ in range(40):
        middle = (low + high) / 2
        below = np.minimum(np.exp(middle + draws), cap).mean() < COMPLETION_MEAN
        low, high = (middle, high) if below else (low, middle)
    return low


def _from_run(rng: np.random.Generator, path: Path, config: Config) -> SequenceLengths:
    """Groups of an earlier run, cut to what the config allows."""
    groups = [group for number, record in enumerate(read_lines(path), 1) for group in _groups(record, path, number)]
    if not groups:
        raise ValueError(f"lengths {path}: no lengths in it; name a run that has done a step")
    G, rollout = config.group_size, config.rollout
    N = config.prompts_per_step
    drawn = [groups[i] for i in rng.choice(len(groups), N, replace=len(groups) < N)]
    prompts = np.array([prompt for prompt, _ in drawn])
    completions = np.array([rng.choice(own, G, replace=len(own) < G) for _, own in drawn])
    return SequenceLengths(
        prompts=np.clip(prompts, 1, rollout.max_prompt_tokens),
        completions=np.clip(completions, 1, rollout.max_new_tokens),
    )


def _groups(record: dict[str, Any], path: Path, number: int) -> list[tuple[int, Sequence[int]]]:
    """Each prompt's length and its completions' of a line."""
    prompts, completions = record.get("prompt_lengths"), record.get("completion_lengths")
    if isinstance(prompts, list) and isinstance(completions, list) and prompts and completions:
        size, rest = divmod(len(completions), len(prompts))
        if not rest:
            return [(prompt, completions[i * size : (i + 1) * size]) for i, prompt in enumerate(prompts)]
    raise ValueError(
        f"{path}:{number}: expected as many completion_lengths for each of prompt_lengths, as podium train writes them"
    )


class _Rollout:
    """One call of the engine's `generate` in which lengths are known beforehand."""

    def __init__(self, lengths: SequenceLengths, config: Config, shards: int) -> None:
        rollout = config.rollout
        self.lengths, self.refill_steps = lengths, rollout.refill_steps
        self.scheduler = Scheduler(num_slots=rollout.slots, prefill_rows=rollout.prefill_rows, shards=shards)
        buckets = np.array(prompt_buckets(rollout.max_prompt_tokens))
        for group, bucket in enumerate(buckets[np.searchsorted(buckets, lengths.prompts)]):
            self.scheduler.submit(group, bucket=int(bucket), completions=lengths.completions.shape[1])
        self.left = np.zeros(rollout.slots, int)  # tokens that each slot has yet to make
        self.context = np.zeros(rollout.slots, int)  # tokens that each slot's next query sees, its own included
        self.prefills, self.copies, self.copies_across = (collections.Counter[int]() for _ in range(3))
        self.calls = self.steps = self.occupied = self.attended = 0

    def run(self) -> Workload:
        for admission in rounds(self.scheduler):
            self._decode() if admission is None else self._admit(admission)
        return Workload(
            prefill_calls=dict(+self.prefills),
            insert_calls=dict(self.copies),
            insert_across_calls=dict(self.copies_across),
            decode_calls=self.calls,
            decode_steps=self.steps,
            occupied_slot_steps=self.occupied,
            mean_context=self.attended / self.occupied if self.occupied else 0.0,
            prompt_tokens=int(self.lengths.prompts.sum()),
            completion_tokens=int(self.lengths.completions.sum()),
            completions=self.lengths.completions.size,
        )

    def _admit(self, admission: Admission) -> None:
        """Count the calls of an admission; the first token of each completion comes with it."""
        self.prefills[admission.bucket] += bool(admission.prefill)
        (self.copies_across if admission.crosses else self.copies)[admission.bucket] += 1
        for placement in admission.placements:
            self.left[placement.slot] = self.lengths.completions[placement.group, placement.completion] - 1
            self.context[placement.slot] = self.lengths.prompts[placement.group] + 1
        self._retire()

    def _decode(self) -> None:
        """Decode until `refill_steps` are done or no slot has anything left."""
        made = np.minimum(self.left, self.refill_steps)  # [S]
        self.calls += 1
        self.steps += int(made.max())
        self.occupied += int(made.sum())
        self.attended += int(np.sum(made * self.context + made * (made - 1) // 2))
        self.left -= made
        self.context += made
        self._retire()

    def _retire(self) -> None:
        for slot in [slot for slot in self.scheduler.running if not self.left[slot]]:
            self.scheduler.retire(slot)
