"""What it takes to add something: each test adds one by the smallest change, and uses it.

An algorithm is added in tests/algorithms/test_add_algorithm.py.
"""

import json

import jax
import jax.numpy as jnp
import pytest
from rollout.tiny_engine import ALL_DEVICES_CONFIG, EOS, ONE_BUCKET, Letters, make_engine, random_requests, tiny_params
from tiny_decoder import DECODER

import podium
from benches.recipes import write_tiny_model
from podium import accelerators
from podium.accelerators import find_accelerator
from podium.config.errors import ConfigError
from podium.config.show import file_schema
from podium.models.architecture import with_layers
from podium.models.files.hf_config import to_hf_config
from podium.models.params import ROLLOUT_LAYOUTS, TRAIN_AXES, param_specs
from podium.models.presets import PRESETS, find_architecture, preset_decoder
from podium.observe.metric_table import METRICS, Metric
from podium.observe.metrics import evaluation_metrics, find_metric
from podium.observe.stats import EvaluationStats, TaskScores
from podium.plan.planner import make_plan
from podium.plan.request.phase_sizes import Planned
from podium.rollout.device import Device
from podium.rollout.engine import RolloutEngine
from podium.settings import NAMES, load_settings
from podium.sharding import ShardingRules, make_mesh, param_shardings
from podium.tasks.games.arithmetic import Arithmetic
from podium.tasks.mixture import TaskMixture
from podium.tasks.registry import TASKS
from podium.tasks.task import TaskSource
from tools.metrics_page import metrics_page

RUN = ("model=Qwen/Qwen3-0.6B", "tasks=[{name: arithmetic}]")


def large_sums(source: TaskSource) -> Arithmetic:
    """Sums of two numbers of three digits."""
    return Arithmetic(source, digits=3)


@pytest.fixture
def new_accelerators():
    """The table is made anew before and after."""
    accelerators.accelerators.cache_clear()
    yield
    accelerators.accelerators.cache_clear()


@pytest.mark.parametrize("name", ["test_extending:large_sums", "large_sums"])
def test_a_task_is_a_function_and_a_name_in_the_config_or_an_entry(monkeypatch, name):
    monkeypatch.setitem(TASKS, "large_sums", "test_extending:large_sums")
    config = load_settings([], [RUN[0], f"tasks=[{{name: {name}}}]"], {}).config
    (drawn,) = TaskMixture(config.tasks, seed=0).next(1)
    assert 100 <= int(drawn.prompt.answer) < 2000


def test_a_model_is_an_entry(monkeypatch):
    preset = with_layers(preset_decoder("Qwen/Qwen3-0.6B"), 2)
    monkeypatch.setitem(PRESETS, "mine/small", to_hf_config(preset))
    config = load_settings([], ["model=mine/small", RUN[1]], {}).config
    assert find_architecture("mine/small") == preset
    small, whole = (
        make_plan(Planned.of(each, find_accelerator("v6e-8")), by="closed_form")
        for each in (config, load_settings([], RUN, {}).config)
    )
    assert small.spare_bytes > whole.spare_bytes


def test_an_accelerator_is_an_entry(monkeypatch, new_accelerators):
    new = accelerators.Gpu(memory=280 * 2**30, capability="13.0", names=("NVIDIA R100",))
    monkeypatch.setitem(accelerators.GPUS, "r100", new)  # pyright: ignore[reportArgumentType]
    assert 0.86 * 280 * 2**30 < find_accelerator("r100-8").hbm_bytes < 0.9 * 280 * 2**30
    config = load_settings([], [*RUN, "rollout.prefill_rows=16"], {}).config
    plan = make_plan(Planned.of(config, find_accelerator("h200-16")), by="closed_form")
    assert (plan.devices, plan.verdict) == (16, "fits")


@pytest.mark.usefixtures("whole_slots")
def test_a_rollout_layout_is_an_entry(monkeypatch):
    """Weights split as in training, sequences over dp and tp: nothing else knows of it, and it decodes the same."""
    setting = [*RUN, "rollout.layout=mixed"]
    known = "auto, replicated, tensor, hybrid, legacy, maxtext"
    with pytest.raises(ConfigError, match=rf"rollout\.layout: expected one of {known}, got 'mixed'"):
        load_settings([], setting, {})
    monkeypatch.setitem(ROLLOUT_LAYOUTS, "mixed", {**TRAIN_AXES, "batch": ("dp", "tp")})
    layout = load_settings([], setting, {}).config.rollout.layout
    assert "mixed" in json.dumps(file_schema(NAMES))
    mesh = make_mesh("dp:2,fsdp:2,tp:2")
    config = ALL_DEVICES_CONFIG.model_copy(update={"max_prompt_tokens": ONE_BUCKET.max_prompt_tokens})
    engine = RolloutEngine(
        Device(config, DECODER, ShardingRules(mesh, ROLLOUT_LAYOUTS[layout]), dtype=jnp.float32), Letters(EOS)
    )
    shardings = param_shardings(param_specs(DECODER), ShardingRules(mesh, TRAIN_AXES))
    engine.load({name: jax.device_put(value, shardings[name]) for name, value in tiny_params().items()})
    requests = random_requests(3, config=ONE_BUCKET)
    found, expected = (
        [[each.tokens.tolist() for each in group] for group in made.generate(requests)[0]]
        for made in (engine, make_engine(ONE_BUCKET))
    )
    assert found == expected


def test_the_planner_reads_the_axes_of_a_layout_and_not_its_name(monkeypatch):
    """Weights lie over fsdp and tp, sequences over dp and tp: tp's parts are gathered, sums go over fsdp."""
    monkeypatch.setitem(ROLLOUT_LAYOUTS, "mixed", {**TRAIN_AXES, "batch": ("dp", "tp")})
    monkeypatch.setitem(ROLLOUT_LAYOUTS, "renamed", ROLLOUT_LAYOUTS["maxtext"])
    v6e, decoder = find_accelerator("v6e-8"), find_architecture("Qwen/Qwen3-0.6B")
    runs, plans = {}, {}
    for layout in ROLLOUT_LAYOUTS:
        config = load_settings([], [*RUN, "mesh=fsdp:4,tp:2", f"rollout.layout={layout}"], {}).config
        runs[layout] = Planned.of(config, v6e, decoder).sizes
        plans[layout] = make_plan(Planned.of(config, v6e), by="closed_form")
    assert plans["renamed"].phases == plans["maxtext"].phases != plans["replicated"].phases
    held = {layout: run.rollout_weight_bytes / runs["replicated"].rollout_weight_bytes for layout, run in runs.items()}
    assert held["mixed"] == pytest.approx(1 / 8, rel=1e-2)  # norms are whole
    weights, sums = runs["legacy"].rollout_ici(0), runs["maxtext"].rollout_ici(64)
    assert runs["replicated"].rollout_ici(64) == 0 < sums
    assert runs["mixed"].rollout_ici(64) == pytest.approx(weights * 8 / 7 / 4 / 2 + sums)


def overconfident(tokens: podium.Tokens) -> jax.Array:
    """A cost of likely tokens of bad answers: p^2 where the advantage is negative."""
    return jnp.where(tokens.advantages < 0, jnp.exp(2 * tokens.logprobs), 0.0)


def test_a_part_of_the_loss_is_a_function_and_its_weight(tmp_path, monkeypatch):
    """By docs/algorithms.md alone: the function, the settings, a run, and its metric."""
    write_tiny_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    lines = [
        podium.grpo(
            str(tmp_path / "model"),
            [{"question": f"{n} + 1", "answer": n + 1} for n in range(8)],
            rewards=[podium.math_equal, "length"],
            algorithm={"recipe": "grpo", "loss_parts": parts},
            grading={"overlong_buffer_tokens": 3, "workers": 0},
            **{"steps": 1, "prompts_per_step": 4, "group_size": 4, "eval": {"at_end": False}},
            rollout={"max_prompt_tokens": 16, "max_new_tokens": 4},
        ).metrics[0]
        for parts in ([], [{"loss": overconfident, "weight": 2.0}])
    ]
    plain, grown = (line["train-other/loss"] for line in lines)
    assert 0 < lines[1]["policy/loss_part/overconfident"] < 1 and plain < grown
    assert "policy/loss_part/overconfident" not in lines[0]


def test_a_metric_is_an_entry(monkeypatch):
    """One line in the table computes, names and documents it."""
    added = Metric("eval/<task>/wrong", "fraction", "A new one.", task=lambda scores: 1 - scores.accuracy)
    monkeypatch.setitem(METRICS, "Evaluation", (*METRICS["Evaluation"], added))
    absent = {"accuracy_interval": (0.0, 1.0), "avg_at_k": None, "pass_at_k": None, "pass_at_k_interval": None}
    counts = {"completed_accuracy": 0.5, "questions": 4, "too_long": 0, "completion_tokens": 9.0}
    scores = TaskScores(accuracy=0.75, truncated_fraction=0.0, **absent, **counts)
    found = evaluation_metrics(EvaluationStats(tasks={"sums": scores}, rollout_s=0.0, reward_s=0.0, step_s=0.0))
    assert found["eval/sums/wrong"] == 0.25
    assert find_metric("eval/sums/wrong") == added
    assert "| `eval/<task>/wrong` | fraction | A new one. |" in metrics_page()
