"""The metrics of an evaluation, named and defined as those of a step; `<task>` stands for a task."""

from podium.observe.metric import LOW_HIGH, Metric

EVALUATION_METRICS: dict[str, tuple[Metric, ...]] = {
    "Evaluation": (
        Metric(
            "eval/accuracy",
            "fraction",
            "Mean of `eval/<task>/accuracy` over the tasks; `keep_best` ranks by it.",
            evaluation=lambda e: e.accuracy,
        ),
        Metric(
            "eval/<task>/accuracy",
            "fraction",
            "Questions answered correctly with the likeliest tokens; without `eval.greedy`: `avg_at_k`. Too long ones "
            "count as wrong.",
            task=lambda t: t.accuracy,
        ),
        Metric(
            "eval/<task>/accuracy_interval",
            "fraction",
            "95 % Wilson interval of the accuracy over the questions.",
            task=lambda t: t.accuracy_interval,
            parts=LOW_HIGH,
        ),
        Metric(
            "eval/<task>/completed_accuracy",
            "fraction",
            "As `accuracy`, but an answer that was cut by `rollout.max_new_tokens` is wrong.",
            task=lambda t: t.completed_accuracy,
        ),
        Metric(
            "eval/<task>/avg_at_k",
            "fraction",
            "Mean correctness of k = `eval.samples` sampled answers; those to too long questions are wrong.",
            task=lambda t: t.avg_at_k,
        ),
        Metric(
            "eval/<task>/pass_at_k",
            "fraction",
            "Questions with a correct one among k sampled answers.",
            task=lambda t: t.pass_at_k,
        ),
        Metric(
            "eval/<task>/pass_at_k_interval",
            "fraction",
            "95 % Wilson interval of `pass_at_k`.",
            task=lambda t: t.pass_at_k_interval,
            parts=LOW_HIGH,
        ),
        Metric(
            "eval/<task>/questions",
            "questions",
            "Evaluation questions, those that are too long included.",
            task=lambda t: t.questions,
        ),
        Metric(
            "eval/<task>/too_long",
            "questions",
            "Questions above `rollout.max_prompt_tokens`: not asked, and wrong.",
            task=lambda t: t.too_long,
        ),
        Metric(
            "eval/<task>/completion_tokens", "tokens", "Mean length of the answers.", task=lambda t: t.completion_tokens
        ),
        Metric(
            "eval/<task>/truncated_fraction",
            "fraction",
            "Answers cut by `rollout.max_new_tokens`.",
            task=lambda t: t.truncated_fraction,
        ),
    ),
}
"""By the sections of docs/metrics.md."""
