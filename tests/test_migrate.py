"""YAML files of the seed system become ours, and say what changed."""

import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import podium
from podium.compat.migrate import migrate
from podium.compat.seed_keys import seed_keys, spellings, trl_keys
from podium.config.errors import ConfigError
from podium.config.explain import setting_paths
from podium.config.load import load
from podium.config.schema import Config
from podium.settings import Checks


@pytest.fixture
def translate(tmp_path, monkeypatch):
    """Migrates a text, loads the result, and returns (config, changed, lost)."""
    monkeypatch.chdir(tmp_path)

    def translate(text: str, **environ: str):
        Path("old.yaml").write_text(text)
        migration = migrate(Path("old.yaml"), environ)
        Path("new.yaml").write_text(migration.text)
        return (
            load(["new.yaml"], [], {}, rules=[Checks(reads_disk=False)]).config,
            "\n".join(migration.changed),
            "\n".join(migration.lost),
        )

    return translate


def refused(translate, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        translate(text)
    return str(error.value)


def test_what_a_file_leaves_out_has_the_seed_systems_defaults(translate):
    config, changed, lost = translate("steps: 100\n")
    assert (config.model, config.steps, config.prompts_per_step, config.group_size) == (
        "Qwen/Qwen2.5-3B-Instruct", 100, 16, 8,
    )  # fmt: skip
    assert (config.rollout.max_prompt_tokens, config.rollout.max_new_tokens, config.rollout.top_k) == (512, 1024, 0)
    optimizer = config.train.optimizer
    assert (optimizer.name, optimizer.learning_rate, optimizer.schedule, optimizer.warmup_steps) == (
        "lion", 1e-6, "cosine", 5,
    )  # fmt: skip
    assert (optimizer.clip_norm, optimizer.weight_decay, optimizer.beta2) == (1.0, 1e-8, 0.99)
    algorithm = config.algorithm
    assert (algorithm.recipe, algorithm.mean, algorithm.clip_low, algorithm.clip_high) == ("grpo", "token", 0.2, 0.3)
    assert (algorithm.std, algorithm.std_ddof, algorithm.std_eps) == ("group", 0, 1e-4)
    assert config.tasks[0].rewards == {"correct": 1.0, "format": 0.5, "tags": 0.5}
    assert (config.eval.every_steps, config.eval.questions, config.eval.samples) == (10, 16, 8)
    assert (config.metrics.wandb.mode, config.metrics.wandb.project) == ("online", "mllm-jax-grpo-gsm8k")
    assert "50 likeliest tokens" in changed and lost == ""


FULL = """
model_path: $MODEL
steps: "200"
rollout:
  backend: naive
  batch_size: 32
  n: 4
  max_prompts_per_pass_per_process: 16
  fast_generate: on
  sharding_style: maxtext
  global_length: 1024
  max_length_sample: 2048
train:
  micro_batch_size_per_device: 2
  per_device_micro_batch_size: 2
  max_length_total: 3072
  ppo_epochs: 2
  beta: 0.04
  optimizer:
    name: adamw
    clip_norm: -1
    weight_decay: 0.1
    lr_schedule: {type: warmup_linear, peak_value: 2e-6, end_value: 1e-6, warmup_ratio: 0.1}
  remat_policy: everything_saveable
  policy_loss_impl: pallas
  grpo_kernel: {enabled: true, kernel: {block_size: 2048}}
algo:
  name: grpo
  estimator: {eps: 0.001, clip_range: 5.0}
mesh_shape: "!tp:1,fsdp:-1,dp:2"
wandb_project: mine
wandb_mode: offline
wandb_name: first
reward_weights: [1, 0.25, 0]
eval_every_steps: 0
eval_batches: 2
eval_split: train
eval_full_every_epochs: 1
"""


def test_every_setting_of_a_full_file_arrives(translate):
    config, changed, lost = translate(FULL, MODEL="Qwen/Qwen2.5-7B-Instruct")
    assert (config.model, config.name, config.steps) == ("Qwen/Qwen2.5-7B-Instruct", "first", 200)
    assert (config.prompts_per_step, config.group_size, config.mesh) == (32, 4, "tp:1,fsdp:-1,dp:2")
    assert (config.rollout.max_prompt_tokens, config.rollout.max_new_tokens) == (1024, 2048)
    assert config.rollout.layout == "maxtext"
    assert (config.train.rows_per_device, config.train.remat, config.algorithm.updates_per_batch) == (2, "none", 2)
    optimizer = config.train.optimizer
    assert (optimizer.name, optimizer.clip_norm, optimizer.weight_decay, optimizer.beta2) == ("adamw", 0.0, 0.1, 0.999)
    assert (optimizer.schedule, optimizer.learning_rate, optimizer.final_fraction, optimizer.warmup_steps) == (
        "linear", 2e-6, 0.5, 20,
    )  # fmt: skip
    assert (config.algorithm.kl, config.algorithm.std_eps) == (None, 0.001)
    assert config.tasks[0].rewards == {"correct": 1.0, "format": 0.25, "tags": 0.0}
    assert (config.tasks[0].eval_split, config.eval.every_steps, config.eval.questions) == ("train", 0, 64)
    assert (config.metrics.wandb.mode, config.metrics.wandb.project) == ("offline", "mine")
    assert "rollout.n: 4 -> group_size: 4" in changed.splitlines()
    assert "the order of axes is always dp, fsdp, tp" in changed and "ordered by their topology" in changed
    assert "train.beta: 0.04 (old.yaml:18): the seed system never added its KL to the loss" in lost
    for key in ("rollout.backend", "rollout.fast_generate", "train.max_length_total"):
        assert f"{key}: " in lost
    for key in ("train.grpo_kernel.kernel.block_size", "algo.estimator.clip_range", "eval_full_every_epochs"):
        assert f"{key}: " in lost


@pytest.mark.parametrize(
    ("style", "layout"), [("legacy", "legacy"), ("maxtext", "maxtext"), ("DP_only", "maxtext"), (None, "auto")]
)
def test_a_layout_is_kept_where_the_file_chose_one(translate, style, layout):
    config, _, lost = translate(f"rollout: {{sharding_style: {style}}}" if style else "steps: 1")
    assert (config.rollout.layout, lost) == (layout, "")


@pytest.mark.parametrize(
    ("policy", "remat"),
    [("dots_with_no_batch_dims", "products"), ("nothing_saveable", "layer"), ("everything_saveable", "none")],
)
def test_what_is_kept_for_the_backward_pass_stays_the_same(translate, policy, remat):
    config, _, lost = translate(f"train: {{remat_policy: {policy}}}")
    assert (config.train.remat, lost) == (remat, "")


def test_a_layout_that_nobody_knows_is_an_error(translate):
    with pytest.raises(ConfigError, match="'sideways': expected one of legacy, maxtext"):
        translate("rollout: {sharding_style: sideways}")


@pytest.mark.parametrize("key", spellings())
def test_every_spelling_is_known(translate, key):
    full = spellings()[key]
    about = seed_keys()[full]
    value = about.default
    lines = yaml.safe_dump({key: 1 if value is None else value}) if "." not in key else ""
    if not lines:
        *sections, last = key.split(".")
        tree = {last: 1 if value is None else value}
        for section in reversed(sections):
            tree = {section: tree}
        lines = yaml.safe_dump(tree)
    if full in ("algo.name", "algo.estimator.name", "wandb_name"):
        lines = lines.replace(": 1", ": rloo")
    _, _, lost = translate(lines)
    assert "did not know it" not in lost
    used_instead = full == "rollout.prompt_batch_size" or full.startswith("rollout.global_prompt")
    assert (f"{key}: " in lost) == (bool(about.gone) and not used_instead)


@pytest.mark.parametrize(
    ("text", "recipe", "said"),
    [
        ("algo: rloo", "reinforce_pp_baseline", "rloo_whiten"),
        ("algo: {name: rloo, estimator: {rloo_whiten: no}}", "rloo", "without whitening"),
        ("algo: {name: rloo}", "reinforce_pp_baseline", "algo as a section ran grpo's estimator"),
        ("algo: {name: grpo, estimator: {name: reinforce}}", "reinforce_pp", "algo.estimator.name: reinforce ->"),
        ("algo: pg", "reinforce_pp", "whitened"),
        ("algo: reinforce_plus_plus", "reinforce_pp_baseline", "group baseline"),
        ("algo: dapo", "grpo", "set recipe dapo for the paper's"),
        ("algo: ppo", "ppo", "shares no weights"),
        ("algo: {name: gae}", "ppo", "algo as a section ran grpo's estimator"),
        ("{algo: ppo, n: 1}", "ppo", "with a value model of its own"),
        ("n: 1", "reinforce_pp", "every advantage 0"),
    ],
)
def test_algorithms_become_what_they_computed(translate, text, recipe, said):
    config, changed, _ = translate(f"{text}\n")
    assert config.algorithm.recipe == recipe and (said in changed or "n: 1" in text)


def test_ppo_takes_its_discounts_along_and_reports_the_rest_of_the_value_model_as_lost(translate):
    text = "algo: {name: ppo, estimator: {name: gae, gae_gamma: 0.99, gae_lambda: '0.9'}, update: {value_coef: 0.5}}\n"
    config, _, lost = translate(text)
    assert config.algorithm.advantage_options == {"gamma": 0.99, "lam": 0.9}
    assert "value_coef: 0.5" in lost and "gae_" not in lost


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("auto", "auto"),
        ('""', "auto"),
        ("AUTO", "auto"),
        ("host-local", "host_local"),
        ("auto_host_local", "host_local"),
        ("1,-1,1", "1,-1,1"),
        ("[4, 4, 1]", "4,4,1"),
        ("'!1,-1,1'", "1,-1,1"),
        ("'dp:2, fsdp:-1, tp:1'", "dp:2,fsdp:-1,tp:1"),
    ],
)
def test_mesh_strings_are_read_as_there(translate, text, mesh):
    assert translate(f"mesh_shape: {text}\n")[0].mesh == mesh


@pytest.mark.parametrize(
    ("text", "prompts", "lost_key"),
    [
        ("num_pre_q: 4\nrollout: {global_sequence_batch_size: 64}", 16, ""),
        ("rollout: {global_sequence_batch_size: 63}", 16, "rollout.global_sequence_batch_size"),
        ("rollout_prompt_batch_size: 24", 24, ""),
        ("rollout: {batch_size: 8, prompt_batch_size: 24}", 8, "rollout.prompt_batch_size"),
        ("rollout: {batch_size_per_device: 2}", 16, "rollout.batch_size_per_device"),
    ],
)
def test_other_batch_sizes_count_where_they_are_global(translate, text, prompts, lost_key):
    config, _, lost = translate(f"{text}\n")
    assert config.prompts_per_step == prompts and lost.startswith(lost_key) and bool(lost) == bool(lost_key)


def test_zero_means_what_it_meant(translate):
    config, _, _ = translate("steps: 0\nrollout: {n: 0, batch_size: 0, max_length_sample: 0, global_length: 0}\n")
    assert (config.steps, config.group_size, config.prompts_per_step) == (100, 8, 32)
    assert (config.rollout.max_new_tokens, config.rollout.max_prompt_tokens) == (64, 512)


def test_short_prompts_get_room(translate):
    config, changed, _ = translate("global_length: 128\n")
    assert config.rollout.max_prompt_tokens == 512 and "raised to 512" in changed


def test_an_unknown_key_is_listed(translate):
    _, _, lost = translate("rollout: {batchsize: 3}\n")
    assert lost == (
        "rollout.batchsize: 3 (old.yaml:1): the seed system did not know it; it may have meant rollout.batch_size"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout: {n: 8}\nnum_pre_q: 4\n",
         "num_pre_q: 4 and rollout.n: 8 mean the same setting; keep one\n    old.yaml:1\n    old.yaml:2"),
        ("steps: many\n", "steps: 'many': expected a whole number\n    old.yaml:1"),
        ("reward_weights: [1, 2]\n",
         "reward_weights: [1, 2]: expected three numbers (correct, format, tags)\n    old.yaml:1"),
        ("algo: a2c\n",
         "algo: 'a2c': expected one of grpo, dapo, rloo, reinforce, reinforce++, gae, ppo\n    old.yaml:1"),
        ("mesh_shape: 1,2\n",
         "mesh_shape: '1,2': write auto, host_local, 'fsdp:4,tp:2' or '1,-1,1' (dp, fsdp, tp)\n    old.yaml:1"),
        ("train: {optimizer: adam}\n",
         "train.optimizer.name: expected one of adamw, lion, sgd, muon, adafactor, got 'adam'; did you mean adamw?\n"
         "    old.yaml\n"
         "    Update rule; bytes of state per parameter: adamw 8, lion, muon and sgd 4, adafactor about 0. Or your own"
         " function\n    as `package.module:name`, which takes these settings and returns an optax transformation whose"
         " output is an ascent\n    direction."),
    ],
)  # fmt: skip
def test_what_made_no_sense_there_is_an_error(translate, text, message):
    assert refused(translate, text) == message


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it has no keys"),
        ("a: 1\n", "1 of its 1 keys are not the seed system's: a"),
        ("services: {web: {image: nginx, ports: [80]}}\n", "2 of its 2 keys are not"),
        ("model: demo\nsteps: 3\ntasks: [{name: arithmetic}]\nrollout: {slots: 8}\n", "3 of its 4 keys are not"),
        (
            "model_name_or_path: x\nlearning_rate: 1e-6\nnum_generations: 8\nbeta: 0.04\nbf16: true\n",
            "docs/from-trl.md",
        ),
    ],
    ids=["empty", "one", "another program's", "Podium's", "TRL's"],
)
def test_a_file_of_something_else_is_refused(translate, text, why):
    said = refused(translate, text)
    assert said.startswith("old.yaml: not a config of the seed system: ") and why in said


NUMBERS = st.integers(1, 64)
OLD_FILES = st.fixed_dictionaries(
    {"steps": NUMBERS},
    optional={
        "n": NUMBERS,
        "batch_size": NUMBERS,
        "global_length": NUMBERS,
        "max_length_sample": NUMBERS,
        "algo": st.sampled_from(["grpo", "dapo", "rloo", "reinforce", "reinforce++", "ppo", "pg"]),
        "mesh_shape": st.sampled_from(["auto", "host_local", "1,-1,1", "dp:2,fsdp:-1,tp:1", "!4,2,1"]),
        "train": st.fixed_dictionaries(
            {},
            optional={
                "ppo_epochs": NUMBERS,
                "beta": st.sampled_from([0, 0.04, "1e-3"]),
                "optimizer": st.sampled_from(["lion", "adamw", "sgd", {"lr_schedule": {"warmup_steps": 500}}]),
            },
        ),
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OLD_FILES)
def test_whatever_is_translated_loads(translate, old):
    translate(yaml.safe_dump(old))


def test_every_key_of_the_seed_system_becomes_a_setting_or_says_why_not():
    paths = {".".join(map(str, path)) for path in setting_paths(Config.model_json_schema())}
    assert {about.becomes for about in seed_keys().values() if about.becomes} <= paths
    assert set(trl_keys().values()) <= paths
    for key, about in seed_keys().items():
        assert about.kind in ("text", "int", "float", "bool", "list"), key
        assert not (about.gone and (about.becomes or about.why or about.default is not None)), key


def test_a_wheel_holds_the_tables():
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    patterns = pyproject["tool"]["setuptools"]["package-data"]["podium"]
    package = Path(podium.__file__).parent
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert {package / "compat" / "seed_keys.yaml", package / "compat" / "trl_keys.yaml"} <= packed
