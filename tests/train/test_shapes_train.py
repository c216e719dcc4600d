"""A step's result does not depend on the shape of its micro-batches, and a run that resumes takes the same shapes."""

import dataclasses
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_shapes import sizes_of
from tiny_runs import SHORT, STEPS, STEPWISE, assert_same_run, config_of, make_config, merged, trained

from podium.certify.tiny import random_weights
from podium.models.files.hf import save_model
from podium.models.files.hf_config import from_hf_config
from podium.observe.run_dir import Fork, read_config
from podium.run.run_spec import RowShape
from podium.train.batches.balance import Lengths
from podium.train.batches.run_shapes import KeptShapes, RunShapes, read_shapes, write_shapes
from podium.train.loop import train
from podium.train.setup import load_weights, make_model

pytestmark = pytest.mark.usefixtures("one_device")
TOLERANCE = 5e-6  # of the gradient's norm: float32, whose sums another packing orders otherwise
SHAPES = ((2, 40), (1, 40), (3, 24), (4, 20))
"""Rows of a device, and tokens of each; groups of 4 completions are divided where rows are short."""
ONE_STEP: dict[str, Any] = {
    **SHORT,
    "steps": 1,
    "train": {
        "row_tokens": 40,
        "dtype": "float32",
        "optimizer": {"name": "sgd", "learning_rate": 1e3, "beta1": 0.0, "clip_norm": 0.0},
    },
    "eval": {"at_start": False, "at_end": False},
}
"""The step is so long that rounding the new weights hides nothing of the gradient."""
MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
DATA: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "pairs": (
        "preferences",
        [{"prompt": f"{n} + 1", "chosen": str(n + 1), "rejected": str(n) * 2} for n in range(1, 9)],
    ),
    "labels": ("labelled", [{"prompt": f"{n} + 1", "completion": str(n), "label": n % 2 == 1} for n in range(1, 9)]),
}
RUNS: dict[str, dict[str, Any]] = {
    "grpo with a reference": {"algorithm": {"kl": "k3", "kl_coef": 0.1}},
    "gspo, minibatches": {"algorithm": {"recipe": "gspo", "minibatches": 2}},
    "critic": {"algorithm": {"recipe": "ppo", "kl": "k3", "kl_coef": 0.1}},
    "pairs": {"algorithm": {"recipe": "dpo"}, "group_size": 2},
    "labels": {"algorithm": {"recipe": "dpo", "loss": "kto"}, "group_size": 1},
    "sft": {"algorithm": {"recipe": "sft"}, "group_size": 1, "prompts_per_step": 8},
    "adapters": {"lora": {"rank": 2, "seed": 1}},
    "several devices": {"mesh": "fsdp:4,sp:2"},
    "experts": {},
}
QUICK = ("grpo with a reference", "pairs")


def gradient_of(run: Path) -> dict[str, np.ndarray]:
    """What the only step of a run has changed, by weight."""
    model = make_model(read_config(run))
    before, after = (load_weights(model, fork) for fork in (None, Fork(str(run), None)))
    return {name: np.asarray(before[name], np.float64) - np.asarray(after[name]) for name in before}


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Norm of the difference of all weights together, of the norm."""
    whole = sum(float(np.sum(np.square(x))) for x in expected.values())
    return (sum(float(np.sum(np.square(found[name] - x))) for name, x in expected.items()) / whole) ** 0.5


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[RowShape], None]:
    """Lets runs take micro-batches of one shape alone."""

    def take(shape: RowShape) -> None:
        sizes = property(lambda self: dataclasses.replace(self.own.of_shape(shape), max_rows=64))
        monkeypatch.setattr(RunShapes, "sizes", sizes)
        monkeypatch.setattr(RunShapes, "chooses", False)

    return take


@pytest.fixture(scope="module")
def experts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random mixture of experts, with the tokenizer of `tiny_model`."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    decoder = from_hf_config(json.loads((tiny_model / "config.json").read_text()) | MOE, "experts")
    weights = {name: jnp.asarray(value) for name, value in random_weights(decoder, seed=0).items()}
    save_model(weights, decoder, None, folder, dtype="float32")
    for file in tiny_model.iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.long) for x in RUNS])
def test_a_steps_gradient_is_the_same_in_every_shape(name, tiny_model, experts, tmp_path, only):
    changes = merged(ONE_STEP, RUNS[name])
    if (data := DATA.get(name)) is not None:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in data[1]))
        changes["tasks"] = [{"name": data[0], "path": str(path)}]
    model, shards = experts if name == "experts" else tiny_model, 4 if "mesh" in changes else 1
    found: dict[str, tuple[dict[str, np.ndarray], dict[str, Any]]] = {}
    for rows, row_tokens in SHAPES:
        only(RowShape(shards * rows, row_tokens))
        run = tmp_path / f"{rows}x{row_tokens}"
        assert train(make_config(model, tmp_path, name=run.name, **changes), plain=True) == 0
        found[run.name] = gradient_of(run), trained(run)[0]
    (expected, metrics), *others = found.values()
    assert len({record["tokens/padding"] for _, record in found.values()}) > 1
    for gradient, record in others:
        assert distance(gradient, expected) <= TOLERANCE
        if name == "critic":
            assert record["critic/gradient_norm"] == pytest.approx(metrics["critic/gradient_norm"], rel=TOLERANCE)


LATE: dict[str, Any] = {**STEPWISE, "train": {**STEPWISE["train"], "row_tokens": 64, "rows_per_device": 4}}


@pytest.mark.parametrize("later", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_keeps_its_shapes_and_resumes_bit_for_bit_over_a_change_of_shape(run_of, monkeypatch, later):
    """Where programs are compiled beside rollouts, the shapes of step 1 are first used in step 3, here."""
    if later:
        monkeypatch.setattr("podium.train.batches.run_shapes.LATER", later)
        monkeypatch.setattr("podium.sampling.sampler.threads_for", lambda platform: 2)
    whole = run_of(**LATE)
    kept = json.loads((whole / "shapes.json").read_text())
    assert (kept["own"], kept["from_step"]) == ([4, 64], later)
    assert kept["shapes"]
    assert all(rows * tokens <= 4 * 64 and tokens <= 64 for rows, tokens in kept["shapes"])
    filled = [
        sum(record[f"tokens/{kind}"] for kind in ("prompt", "completion", "padding")) for record in trained(whole)
    ]
    assert [places % (4 * 64) == 0 for places in filled[:later]] == [True] * later
    assert all(any(places % (rows * tokens) == 0 for rows, tokens in kept["shapes"]) for places in filled[later:])
    stopped = run_of(**{**LATE, "steps": 2})
    assert train(config_of(stopped, steps=STEPS), plain=True) == 0
    assert_same_run(stopped, whole)
    assert json.loads((stopped / "shapes.json").read_text()) == kept


def test_shapes_of_other_rows_or_devices_are_chosen_again(tmp_path):
    own = sizes_of(4, 64, tile=16)
    kept = KeptShapes(own.shape, (RowShape(3, 48),), from_step=2)
    write_shapes(tmp_path, kept)
    assert read_shapes(tmp_path) == kept
    assert read_shapes(tmp_path / "elsewhere") is None
    shapes = RunShapes(own, kept, keep=lambda kept: None)
    assert (shapes.chooses, shapes.sizes, shapes.likely) == (False, own, (own.shape, (3, 48)))
    shapes.begin(2)
    assert (shapes.sizes.rules.shapes, shapes.likely) == (((3, 48),), ((3, 48), own.shape))
    for other in (sizes_of(4, 80, tile=16), sizes_of(4, 64, tile=32), sizes_of(4, 64, tile=16, devices=2)):
        assert RunShapes(other, kept, keep=lambda kept: None).chooses
    (tmp_path / "shapes.json").write_text('{"own": [4, 64]')
    with pytest.raises(ValueError, match=r"shapes\.json is damaged .*: delete it, and the run chooses the shapes"):
        read_shapes(tmp_path)


def test_nothing_is_chosen_from_a_step_that_trains_on_nothing():
    own, kept = sizes_of(4, 64, tile=16), list[KeptShapes]()
    shapes = RunShapes(own, keep=kept.append, later=8)
    shapes.choose([[], []], per_step=2)
    assert shapes.chooses
    assert shapes.begin(5) == ()
    lengths = [[Lengths(group=n, shown=9, own=own_tokens) for own_tokens in (5, 7, 12)] for n in range(2)]
    shapes.choose(lengths, per_step=2)
    assert [each.from_step for each in kept] == [13]
    assert not shapes.chooses
    assert shapes.sizes is own
    assert shapes.begin(6) == kept[0].shapes
    assert shapes.begin(7) == ()


def compilations(run_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Counter[int]:
    """Programs that the thread of a run's steps compiles, by step."""
    found, now = Counter[int](), [1]
    begin = RunShapes.begin

    def begun(self: RunShapes, done: int) -> tuple[RowShape, ...]:
        now[0] = done + 1
        return begin(self, done)

    def hear(event: str, duration_secs: float, **about: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and threading.current_thread() is own:
            found[now[0]] += 1

    own = threading.current_thread()
    jax.clear_caches()
    with monkeypatch.context() as patched:
        patched.setattr(RunShapes, "begin", begun)
        jax.monitoring.register_event_duration_secs_listener(hear)
        try:
            run_of(**merged(LATE, {"steps": 12, **changes}))
        finally:
            jax.monitoring.unregister_event_duration_listener(hear)
    return found


@pytest.mark.long
def test_a_run_compiles_three_programs_more_at_most_and_waits_for_none_after_its_tenth_step(run_of, monkeypatch):
    """On a CPU each program is compiled when a step first needs it; beside rollouts, before its first use."""
    with monkeypatch.context() as patched:
        patched.setattr(RunShapes, "chooses", False)
        own = compilations(run_of, patched)
    chosen = compilations(run_of, monkeypatch)
    assert 0 < chosen.total() <= own.total() + 3
    monkeypatch.setattr("podium.sampling.sampler.threads_for", lambda platform: 2)
    beside = compilations(run_of, monkeypatch)
    assert not {step for step in beside if step > 10}
    assert beside.total() <= own.total()
