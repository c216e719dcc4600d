"""Bugs that others have had, planted one at a time by replacing one function: the certificate names each.

`make test` plants a few, `make test-long` all. A bug is looked for by the stage that is to name it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import planted_batches
import planted_engine
import planted_formulas
import planted_preferences
import planted_prompts
import planted_reading
import planted_runs
import planted_updates
import pytest
from planted_runs import Plant

from podium.certify.answer_ends import ends_check
from podium.certify.batches import batch_checks
from podium.certify.check_result import Certificate, Check
from podium.certify.checks import Stage, form_checks, format_checks, model_checks, scoring_checks, update_checks
from podium.certify.compared import training_checks
from podium.certify.formulas import formula_checks
from podium.certify.known_answers import grades_check
from podium.certify.known_files import files_check
from podium.certify.known_rows import rows_check
from podium.certify.long_sequences import long_checks
from podium.certify.mixtures import choice_check, mixture_check
from podium.certify.rollout_devices import rollout_device_checks
from podium.certify.small_moments import moments_check
from podium.certify.small_run import make_subject
from podium.certify.subject import Subject
from podium.certify.updates import Updates
from podium.config.schema import Config, TaskConfig

QWEN3 = "Qwen/Qwen3-0.6B"
EXPERTS = "Qwen/Qwen3-30B-A3B-Instruct-2507"
IN_BFLOAT16 = "devices dp:2,fsdp:2,tp:2 in bfloat16"
SUBJECTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"lora": {"rank": 8, "alpha": 16}},
    "anchored": {"lora": {"rank": 8, "alpha": 16}, "algorithm": {"kl": "k3", "kl_coef": 0.1, "top_entropy": 0.5}},
    "experts": {"model": EXPERTS},
    "reduced": {"train": {"reduce_dtype": "bfloat16"}},
    "taught": {"algorithm": {"recipe": "distill"}, "teacher": {"model": QWEN3}},
    "whole": {"algorithm": {"recipe": "distill"}, "teacher": {"model": QWEN3, "loss": "full", "reverse": 0.7}},
    "adapted": {
        "algorithm": {"kl": "k3", "kl_coef": 0.1, "kl_target": 0.05, "entropy_bonus": 0.01, "entropy_target": 1.0}
    },
    "charged": {"algorithm": {"kl": "k1_reward", "kl_coef": 0.1, "kl_target": 0.05}},
    "moved": {"algorithm": {"kl": "k2", "kl_coef": 0.3}, "reference": {"sync_every": 10, "mixup": 0.7}},
    "valued": {"algorithm": {"recipe": "ppo"}},
    "pairs": {"algorithm": {"recipe": "dpo"}, "group_size": 2},
    "labels": {"algorithm": {"recipe": "dpo", "loss": "kto"}, "group_size": 1},
    "refilled": {"algorithm": {"recipe": "dapo"}},
    "greedy": {"algorithm": {"recipe": "remax"}},
    "penalised": {
        "algorithm": {"old_logprobs": "trainer", "correction": "truncate"},
        "rollout": {"repetition_penalty": 1.5},
    },
    "balanced": {"model": EXPERTS, "algorithm": {"router_loss_coef": 0.01}},
    "recurrent": {"model": "Qwen/Qwen3.5-9B"},
    "own tasks": {"tasks": [{"name": "math"}, {"name": "mastermind"}]},
    "code": {"tasks": [{"name": "code"}]},
    "windowed": {"model": "google/gemma-3-1b-it"},
    "cut": {"rollout": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 1.2}},
    "corrected": {"algorithm": {"old_logprobs": "trainer", "correction": "truncate", "correction_high": 1.5}},
    "talk": {"tasks": [{"name": "calculator"}], "algorithm": {"credit": "turn", "gamma": 0.5}},
}
"""What the config of a subject has besides."""


def make_config(**changes) -> Config:
    return Config.model_validate({"model": QWEN3, "tasks": [{"name": "arithmetic"}], "steps": 10, **changes})


@functools.cache
def make_checked_subject(kind: str = "plain") -> Subject:
    """A subject whose completions were sampled by the engine as it is, before any bug."""
    subject = make_subject(make_config(**SUBJECTS[kind]))
    assert subject.groups
    assert len(subject.sequences.valid)
    return subject


def with_new_engine(subject: Subject) -> Subject:
    """The subject with its completions, and an engine whose programs are compiled with a bug."""
    fresh = dataclasses.replace(subject)
    fresh.__dict__["sampled"] = subject.sampled
    return fresh


def engine_checks(updates: Updates) -> Iterator[Check]:
    """All checks of what the engine draws, on several devices and on one."""
    yield from rollout_device_checks(updates)
    yield from training_checks(updates)


class Named(NamedTuple):
    """The check that is to name a bug, and its stage."""

    stage: Stage
    check: str
    subject: str = "plain"


QUICK: dict[Callable[[], Plant], Named] = {
    planted_batches.off_by_one_mask: Named(batch_checks, "mask"),
    planted_batches.denominators_of_the_whole_batch: Named(batch_checks, "denominators"),
    planted_batches.baseline_of_the_batch: Named(batch_checks, "advantages"),
    planted_batches.misaligned_behind_dropped_groups: Named(batch_checks, "advantages"),
    planted_batches.k1_of_the_wrong_sign: Named(batch_checks, "advantages"),
    planted_batches.mask_shifted_where_a_turn_starts: Named(batch_checks, "mask"),
    planted_batches.credited_to_the_next_turn: Named(batch_checks, "advantages"),
    planted_updates.temperature_after_softmax: Named(model_checks, "temperature"),
    planted_runs.answers_cut_by_other_limits_trained: Named(batch_checks, "prompts untrained"),
}
"""Planted by `make test` too."""
SLOW: dict[Callable[[], Plant], Named] = {
    planted_batches.dropped_tail: Named(batch_checks, "every token once"),
    planted_batches.dropped_last_sequence: Named(batch_checks, "every token once"),
    planted_batches.last_token_untrained: Named(batch_checks, "every token once"),
    planted_batches.positions_behind_shared_prompts: Named(batch_checks, "positions"),
    planted_batches.prompt_trained: Named(batch_checks, "prompts untrained"),
    planted_batches.environment_trained: Named(batch_checks, "prompts untrained"),
    planted_batches.mean_of_completion_means: Named(batch_checks, "denominators"),
    planted_batches.constant_of_the_longest_completion: Named(batch_checks, "denominators"),
    planted_batches.turns_not_discounted: Named(batch_checks, "advantages"),
    planted_batches.covariance_without_means: Named(batch_checks, "chosen by covariance"),
    planted_batches.certain_tokens_instead_of_uncertain_ones: Named(batch_checks, "scores"),
    planted_batches.unreached_turns_count_as_zero: Named(batch_checks, "advantages"),
    planted_batches.failures_count_as_zero: Named(batch_checks, "advantages"),
    planted_batches.population_deviation: Named(batch_checks, "advantages"),
    planted_batches.whitened_over_episodes: Named(batch_checks, "advantages"),
    planted_batches.reference_follows_the_policy: Named(batch_checks, "scores"),
    planted_formulas.swapped_clip_sides: Named(formula_checks, "clip"),
    planted_formulas.gspo_s_sum: Named(formula_checks, "clip"),
    planted_formulas.kl_k1_as_loss: Named(formula_checks, "kl"),
    planted_formulas.inverted_correction: Named(formula_checks, "correction"),
    planted_formulas.schedule_off_by_one: Named(formula_checks, "optimizer adamw"),
    planted_formulas.swapped_betas: Named(formula_checks, "optimizer adamw"),
    planted_formulas.eps_under_the_root: Named(formula_checks, "optimizer adamw"),
    planted_formulas.decay_of_norms_and_biases: Named(formula_checks, "optimizer adamw"),
    planted_formulas.clipped_by_tensor: Named(formula_checks, "optimizer adamw"),
    planted_updates.off_by_one_attention: Named(model_checks, "log-probabilities"),
    planted_updates.adapters_unscaled: Named(model_checks, "adapters", "lora"),
    planted_updates.adapters_of_other_matrices: Named(model_checks, "adapters", "lora"),
    planted_updates.gates_of_all_experts: Named(model_checks, "log-probabilities", "experts"),
    planted_updates.experts_of_another_token: Named(form_checks, "replayed experts", "experts"),
    planted_batches.teacher_one_token_late: Named(batch_checks, "advantages"),
    planted_batches.teacher_normalised: Named(batch_checks, "advantages"),
    planted_batches.privileged_scores_one_token_late: Named(batch_checks, "advantages"),
    planted_batches.privileged_prompts_of_other_rows: Named(batch_checks, "advantages"),
    planted_batches.plain_prompts_for_a_privileged_teacher: Named(batch_checks, "advantages"),
    planted_batches.teacher_s_states_one_token_late: Named(batch_checks, "scores"),
    planted_batches.values_one_token_late: Named(batch_checks, "advantages"),
    planted_batches.replies_are_steps: Named(batch_checks, "advantages"),
    planted_batches.unclipped_values: Named(update_checks, "value update", "valued"),
    planted_batches.divergence_reversed: Named(update_checks, "loss", "whole"),
    planted_updates.bfloat16_sum: Named(update_checks, "gradient"),
    planted_updates.tied_head_without_gradient: Named(update_checks, "gradient"),
    planted_updates.mean_of_means: Named(form_checks, "micro-batches"),
    planted_updates.leaked_segment: Named(form_checks, "packing"),
    planted_updates.prompts_unseen_over_split_rows: Named(form_checks, "devices fsdp:2,sp:4"),
    planted_updates.norm_scales_without_gradient: Named(format_checks, "gradient in bfloat16"),
    planted_updates.experts_averaged_over_devices: Named(format_checks, IN_BFLOAT16, "experts"),
    planted_updates.experts_of_split_rows_averaged: Named(format_checks, "devices fsdp:2,sp:4 in bfloat16", "experts"),
    planted_updates.weights_averaged_over_devices: Named(format_checks, IN_BFLOAT16),
    planted_updates.head_of_the_first_piece: Named(format_checks, IN_BFLOAT16),
    planted_updates.bfloat16_averaged_over_devices: Named(format_checks, IN_BFLOAT16, "reduced"),
    planted_runs.second_hand_over_ignored: Named(training_checks, "hand-over"),
    planted_runs.rounded_in_the_hand_over: Named(training_checks, "hand-over"),
    planted_runs.hand_over_one_step_late: Named(training_checks, "hand-over"),
    planted_runs.carried_tokens_called_new: Named(training_checks, "hand-over"),
    planted_runs.carried_turns_called_new: Named(training_checks, "hand-over", "talk"),
    planted_runs.logprobs_of_the_turn_before: Named(training_checks, "hand-over", "talk"),
    planted_runs.reply_encoded_anew: Named(training_checks, "conversations", "talk"),
    planted_runs.last_token_before_an_update_lost: Named(training_checks, "conversations", "talk"),
    planted_runs.reply_given_twice_after_an_update: Named(training_checks, "conversations", "talk"),
    planted_runs.answers_ended_twice: Named(training_checks, "episodes", "talk"),
    planted_runs.turns_paid_in_reverse: Named(training_checks, "episodes", "talk"),
    planted_runs.reward_weights_ignored: Named(training_checks, "episodes"),
    planted_runs.seeds_reused: Named(training_checks, "draws"),
    planted_runs.schedule_counts_twice: Named(training_checks, "new weights"),
    planted_runs.last_minibatch_skipped: Named(training_checks, "optimizer steps"),
    planted_runs.half_of_the_adapters_frozen: Named(training_checks, "new weights", "lora"),
    planted_runs.old_logprobs_scored_anew: Named(training_checks, "other options"),
    planted_runs.entropy_by_micro_batch: Named(training_checks, "other options"),
    planted_runs.kl_driven_from_its_target: Named(training_checks, "coefficients", "adapted"),
    planted_runs.bonus_above_the_target: Named(training_checks, "coefficients", "adapted"),
    planted_runs.bonus_without_bound: Named(training_checks, "coefficients", "adapted"),
    planted_runs.shares_of_a_mixture_swapped: Named(training_checks, "moving reference", "moved"),
    planted_runs.first_reference_kept: Named(training_checks, "training", "moved"),
    planted_preferences.chosen_and_rejected_swapped: Named(formula_checks, "preferences", "pairs"),
    planted_preferences.ipo_s_sum: Named(formula_checks, "preferences", "pairs"),
    planted_preferences.pairs_of_a_row_mixed: Named(update_checks, "loss", "pairs"),
    planted_preferences.weights_of_labels_swapped: Named(formula_checks, "preferences", "labels"),
    planted_preferences.reference_point_of_own_prompts: Named(batch_checks, "reference point", "labels"),
    planted_preferences.baselines_of_another_prompt: Named(batch_checks, "advantages"),
    planted_preferences.greedy_completions_sampled: Named(training_checks, "greedy completions", "greedy"),
    planted_preferences.penalty_forgets_the_prompt: Named(training_checks, "repetition penalty", "penalised"),
    planted_preferences.correction_without_the_penalty: Named(formula_checks, "correction"),
    planted_preferences.groups_judged_by_their_totals: Named(batch_checks, "every token once"),
    planted_engine.keys_behind_the_first_page_in_page_0: Named(long_checks, "long completions"),
    planted_engine.rotations_repeat_after_64_positions: Named(long_checks, "long completions"),
    planted_engine.neighbours_share_their_random_numbers: Named(training_checks, "draws"),
    planted_engine.completions_share_random_numbers_at_even_positions: Named(training_checks, "draws"),
    planted_engine.one_more_than_top_k: Named(training_checks, "cuts", "cut"),
    planted_prompts.newest_prompts_first: Named(training_checks, "order of prompts"),
    planted_runs.critic_of_the_first_minibatch: Named(training_checks, "critic", "valued"),
    planted_runs.critic_never_updated: Named(training_checks, "critic", "valued"),
    planted_formulas.cap_squared: Named(formula_checks, "correction", "corrected"),
    planted_engine.partial_pages_not_copied: Named(long_checks, "long completions"),
    planted_engine.stops_between_tokens_missed: Named(training_checks, "episodes"),
    planted_runs.one_token_too_many: Named(training_checks, "episodes"),
    planted_engine.one_token_too_few: Named(training_checks, "episodes"),
    planted_engine.drawn_tokens_not_penalised: Named(engine_checks, "repetition penalty", "penalised"),
    planted_engine.window_one_longer: Named(long_checks, "long completions", "windowed"),
    planted_engine.recorded_at_temperature_1: Named(formula_checks, "sampling"),
    planted_engine.every_device_is_the_first: Named(rollout_device_checks, "rollout devices"),
    planted_engine.seeds_of_16_bits: Named(training_checks, "draws"),
    planted_engine.one_stream_for_a_group: Named(training_checks, "draws"),
    planted_engine.turns_share_a_seed: Named(training_checks, "draws", "talk"),
    planted_prompts.epochs_in_one_order: Named(formula_checks, "mixture of tasks"),
    planted_prompts.levels_evenly_drawn: Named(formula_checks, "mixture of tasks"),
    planted_prompts.last_groups_not_restored: Named(formula_checks, "mixture of tasks"),
    planted_prompts.unshuffled: Named(formula_checks, "mixture of tasks"),
    planted_prompts.staleness_ignored: Named(training_checks, "order of prompts"),
    planted_prompts.any_complete_prompts_taken: Named(formula_checks, "choice of prompts"),
    planted_runs.ages_from_the_last_token: Named(formula_checks, "choice of prompts"),
    planted_prompts.one_step_staler: Named(training_checks, "order of prompts"),
    planted_prompts.solved_prompts_not_retired: Named(formula_checks, "mixture of tasks"),
    planted_prompts.seed_ignored: Named(training_checks, "draws"),
    planted_prompts.unfinished_prompts_dropped: Named(training_checks, "order of prompts"),
    planted_prompts.nothing_in_flight: Named(training_checks, "order of prompts"),
    planted_prompts.a_prompt_skipped_each_step: Named(training_checks, "order of prompts"),
    planted_batches.every_segment_is_the_first: Named(batch_checks, "advantages"),
    planted_batches.last_segments_alone: Named(batch_checks, "every token once"),
    planted_batches.truncated_episodes_trained: Named(batch_checks, "prompts untrained"),
    planted_batches.rewards_of_the_group_before: Named(batch_checks, "advantages"),
    planted_batches.leave_one_out_by_the_whole_group: Named(batch_checks, "advantages"),
    planted_batches.lambda_of_1: Named(batch_checks, "advantages"),
    planted_batches.second_pass_in_reverse: Named(training_checks, "training"),
    planted_formulas.dual_clip_of_good_tokens_too: Named(formula_checks, "clip"),
    planted_formulas.k3_the_other_way: Named(formula_checks, "kl"),
    planted_formulas.kl_without_the_ratio: Named(formula_checks, "kl"),
    planted_formulas.mean_correction_of_sums: Named(formula_checks, "correction"),
    planted_formulas.threshold_of_good_sequences_too: Named(formula_checks, "drift"),
    planted_formulas.embeddings_not_decayed: Named(formula_checks, "optimizer adamw"),
    planted_formulas.no_bias_correction: Named(formula_checks, "optimizer adamw"),
    planted_formulas.moments_rounded_to_nearest: Named(formula_checks, "moments in bfloat16"),
    planted_formulas.moments_begin_anew_every_step: Named(training_checks, "new weights"),
    planted_formulas.warm_up_one_step_late: Named(formula_checks, "schedule"),
    planted_formulas.final_fraction_ignored: Named(formula_checks, "schedule"),
    planted_runs.first_layer_stale: Named(training_checks, "hand-over"),
    planted_runs.adapters_of_half_the_size_in_the_rollout: Named(training_checks, "hand-over", "lora"),
    planted_runs.policy_learns_during_the_critic_s_warmup: Named(training_checks, "optimizer steps", "valued"),
    planted_runs.critic_s_rate_of_the_policy: Named(training_checks, "new weights of the critic", "valued"),
    planted_runs.values_after_the_update: Named(training_checks, "critic", "valued"),
    planted_runs.reference_moves_one_step_early: Named(training_checks, "moving reference", "moved"),
    planted_runs.teacher_s_weight_squared: Named(batch_checks, "advantages"),
    planted_runs.moments_not_restored: Named(training_checks, "resume"),
    planted_runs.prompts_in_flight_not_restored: Named(training_checks, "resume"),
    planted_runs.step_of_the_state_not_restored: Named(training_checks, "resume"),
    planted_runs.evaluated_at_temperature_1: Named(training_checks, "evaluation"),
    planted_runs.cut_answers_left_out_of_the_accuracy: Named(training_checks, "evaluation"),
    planted_runs.training_questions_evaluated: Named(training_checks, "evaluation"),
    planted_runs.evaluation_seeds_alike: Named(training_checks, "evaluation"),
    planted_runs.reference_with_the_policy_s_adapters: Named(scoring_checks, "scoring models", "anchored"),
    planted_formulas.rounded_alike_in_every_update: Named(formula_checks, "moments in bfloat16"),
    planted_formulas.rounded_alike_in_all_arrays: Named(formula_checks, "moments in bfloat16"),
    planted_runs.environments_of_all_prompts_alike: Named(training_checks, "episodes", "talk"),
    planted_runs.every_conversation_in_its_own_environment: Named(training_checks, "episodes", "talk"),
    planted_runs.half_of_the_answers_not_learned: Named(training_checks, "shares of right answers"),
    planted_runs.rewards_charged_with_the_first_coefficient: Named(training_checks, "coefficients", "charged"),
    planted_runs.rings_without_room_for_new_tokens: Named(long_checks, "long completions", "windowed"),
    planted_runs.last_token_of_a_turn_called_cached: Named(long_checks, "later turns"),
    planted_runs.length_before_stop: Named(formula_checks, "ends of answers"),
    planted_runs.rates_of_missing_minibatches_not_passed_over: Named(training_checks, "new weights"),
    planted_runs.levels_of_prompts_in_flight_not_restored: Named(formula_checks, "mixture of tasks"),
    planted_runs.questions_too_long_not_counted: Named(training_checks, "evaluation"),
    planted_runs.weights_of_a_resumed_run_called_the_first: Named(training_checks, "resume"),
    planted_runs.a_token_more_than_a_conversation_may_draw: Named(training_checks, "episodes", "talk"),
    planted_runs.critic_learns_rewards_without_their_kl: Named(batch_checks, "advantages"),
    planted_runs.groups_of_equal_rewards_not_replaced: Named(training_checks, "order of prompts", "refilled"),
    planted_formulas.muon_of_other_axes: Named(formula_checks, "optimizer muon"),
    planted_formulas.momentum_of_nesterov: Named(formula_checks, "optimizer sgd"),
    planted_formulas.gradient_of_k3_for_k3_plus: Named(formula_checks, "kl"),
    planted_formulas.steps_of_an_eighth_bit: Named(formula_checks, "rounded weights"),
    planted_engine.cells_not_copied: Named(training_checks, "hand-over", "recurrent"),
    planted_engine.two_missing_tokens_called_one: Named(long_checks, "later turns"),
    planted_engine.first_tokens_share_their_experts: Named(training_checks, "recorded experts", "experts"),
    planted_updates.balance_of_mean_probabilities: Named(update_checks, "balance of routers", "balanced"),
    planted_updates.gguf_experts_not_normalised: Named(formula_checks, "architectures"),
    planted_updates.aliases_left_out: Named(formula_checks, "architectures"),
    planted_preferences.held_out_rewards_without_beta: Named(training_checks, "evaluation", "pairs"),
    planted_prompts.system_prompts_left_out: Named(training_checks, "episodes"),
    planted_runs.messages_in_reverse: Named(training_checks, "episodes", "talk"),
    planted_runs.a_call_more_than_allowed: Named(training_checks, "episodes", "talk"),
    planted_runs.long_replies_not_cut: Named(training_checks, "episodes", "talk"),
    planted_runs.programs_unpaid_where_a_limit_ended_them: Named(formula_checks, "environments"),
    planted_runs.logarithms_upside_down: Named(formula_checks, "grades", "own tasks"),
    planted_runs.digits_marked_twice: Named(formula_checks, "environments", "own tasks"),
    planted_runs.repetition_rewarded: Named(formula_checks, "rewards"),
    planted_runs.logprobs_after_the_penalty_saved: Named(training_checks, "resume", "penalised"),
    planted_runs.staleness_reported_one_too_high: Named(training_checks, "metrics"),
    planted_reading.sides_of_conversations_swapped: Named(formula_checks, "rows of data"),
    planted_reading.earlier_messages_dropped: Named(formula_checks, "rows of data"),
    planted_reading.whole_solutions_as_references: Named(formula_checks, "rows of data"),
    planted_reading.keys_and_values_swapped_in_files: Named(formula_checks, "files of weights"),
    planted_reading.pairs_of_gguf_not_turned: Named(formula_checks, "files of weights"),
    planted_reading.adapters_of_the_layer_behind: Named(formula_checks, "files of weights"),
    planted_reading.newest_checkpoint_passed_over: Named(training_checks, "resume"),
    planted_reading.all_questions_evaluated: Named(training_checks, "evaluation"),
    planted_reading.first_level_evaluated: Named(formula_checks, "mixture of tasks"),
    planted_reading.failures_called_wrong_answers: Named(training_checks, "shares of right answers", "talk"),
    planted_reading.own_system_prompts_ignored: Named(formula_checks, "mixture of tasks"),
    planted_reading.demonstrations_of_three_times_their_weight: Named(training_checks, "other options"),
    planted_reading.the_first_demonstrations_again_and_again: Named(training_checks, "other options"),
    planted_reading.gap_of_the_last_update: Named(training_checks, "metrics"),
    planted_reading.sizes_of_advantages_reported: Named(training_checks, "metrics"),
    planted_reading.first_block_of_code_graded: Named(formula_checks, "grades", "code"),
    planted_reading.temperature_of_at_least_1: Named(model_checks, "temperature"),
    planted_reading.last_rows_of_a_layer_without_gradient: Named(form_checks, "layer chunks"),
    planted_reading.critic_s_rates_counted_by_its_updates: Named(
        training_checks, "new weights of the critic", "valued"
    ),
    planted_reading.critic_at_the_policy_s_rate: Named(training_checks, "new weights of the critic", "valued"),
    planted_reading.evaluated_questions_trained: Named(formula_checks, "grades", "talk"),
}
README = Path(__file__).parents[2] / "README.md"
BUGS = {**QUICK, **SLOW}


def causes(updates: Updates, named: Named) -> list[str]:
    """The red checks of a stage, up to the one that is to name a bug and those it explains."""
    about = {"config": "run", "subject": "", "device": "", "seconds": 0.0}
    checks = []
    for check in named.stage(updates):
        checks.append(check)
        if named.stage is form_checks and check.name == named.check:
            break  # the other forms are many programs
    assert named.check in [check.name for check in checks], [check.name for check in checks]
    return [check.name for check in Certificate(checks=tuple(checks), skipped=(), **about).causes]


def assert_named(bug: Callable[[], Plant], named: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = with_new_engine(make_checked_subject(named.subject))
    monkeypatch.setattr(*bug())
    assert causes(Updates(subject), named) == [named.check]


@pytest.mark.parametrize(("bug", "named"), QUICK.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_a_planted_bug_is_named(bug, named, monkeypatch):
    assert_named(bug, named, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(("bug", "named"), SLOW.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_a_planted_bug_is_named_by_its_check_and_explains_all_others_of_its_stage(bug, named, monkeypatch):
    assert_named(bug, named, monkeypatch)


def test_batches_formulas_and_draws_are_right():
    updates = Updates(make_checked_subject())
    checks = [check for stage in (batch_checks, formula_checks) for check in stage(updates)]
    assert [(check.name, check.difference) for check in checks if not check.ok] == []


def plain_mixture_check() -> Check:
    return mixture_check(make_subject(make_config()).rollouts.spec)


def code_check() -> Check:
    return grades_check([TaskConfig(name="code")])


def calculator_check() -> Check:
    return grades_check([TaskConfig(name="calculator")])


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        (planted_formulas.rounded_alike_in_every_update, moments_check),
        (planted_formulas.rounded_alike_in_all_arrays, moments_check),
        (planted_runs.ages_from_the_last_token, choice_check),
        (planted_runs.length_before_stop, ends_check),
        (planted_runs.levels_of_prompts_in_flight_not_restored, plain_mixture_check),
        (planted_reading.own_system_prompts_ignored, plain_mixture_check),
        (planted_reading.sides_of_conversations_swapped, rows_check),
        (planted_reading.keys_and_values_swapped_in_files, files_check),
        (planted_reading.first_block_of_code_graded, code_check),
        (planted_reading.evaluated_questions_trained, calculator_check),
    ],
)
def test_a_check_without_a_model_is_red_with_its_bug_alone(bug, check, monkeypatch):
    assert check().ok
    monkeypatch.setattr(*bug())
    assert not check().ok


@pytest.mark.long
@pytest.mark.parametrize("kind", SUBJECTS)
def test_nothing_is_red_where_no_bug_is_planted(kind):
    updates = Updates(make_checked_subject(kind))
    for stage in {named.stage for named in BUGS.values()} - {
        form_checks,
        engine_checks,
    }:  # many programs; twice the same
        assert [(check.name, check.difference) for check in stage(updates) if not check.ok] == []


@pytest.mark.long
def test_a_model_of_fewer_positions_than_the_long_sequences_is_checked_too():
    subject = make_checked_subject("plain")
    few = dataclasses.replace(subject, decoder=dataclasses.replace(subject.decoder, max_positions=64))
    assert all(check.ok for check in long_checks(Updates(with_new_engine(few))))


def test_the_readme_says_how_many_bugs_are_planted():
    assert f"each of the {len(BUGS)} bugs that its tests plant" in README.read_text("utf-8")
