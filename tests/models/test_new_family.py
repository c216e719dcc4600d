"""A family that Podium does not have is one file in `models/families`, written by docs/models.md alone."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import LOGITS_TOLERANCE, error_of_scale, logits_of, make_logits, rules_on

from podium.models import families
from podium.models.architecture import ModelError
from podium.models.files.hf import load_params, save_model
from podium.models.files.names import file_parts
from podium.models.files.source import ModelSource, read_architecture

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "made_up_families" / "tern.py"
V, D, L, H, Q, F = 40, 32, 3, 4, 8, 48
CONFIG = {"tokens": V, "width": D, "depth": L, "heads": H, "mlp": F, "context": 64, "gain": 2.5}


@pytest.fixture
def tern(monkeypatch, tmp_path) -> ModelSource:
    """A random Tern on disk; its file is found as if it lay among the others."""
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(FILE.parent)])
    monkeypatch.setitem(families.FAMILIES, "tern", families.find_families()["tern"])
    folder = tmp_path / "tern"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "tern", **CONFIG}))
    save_file(tensors(), folder / "model.safetensors")
    return ModelSource("folder", folder, "tern")


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    layer = {"qkv": (3 * D, D), "o": (D, D), "gate": (D, F), "up": (D, F), "down": (F, D)}
    layer |= {"attention.norm": (D,), "mlp.norm": (D,)}
    shapes = {f"nest.{i}.{name}": shape for i in range(L) for name, shape in layer.items()}
    shapes |= {"tern.embed": (V, D), "tern.head": (V, D), "tern.norm": (D,)}
    return {name: (0.3 * random.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def naive_logits(w: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """[T, V] of one row, position by position and head by head."""

    def norm(x, scale):
        return x / np.sqrt(np.mean(x * x) + 1e-6) * scale

    def turned(x, position):  # the first 4 elements of a head, in pairs (0, 2) and (1, 3)
        y = x.copy()
        for i in range(2):
            angle = position * 100.0 ** (-i / 2)
            y[i] = x[i] * math.cos(angle) - x[i + 2] * math.sin(angle)
            y[i + 2] = x[i + 2] * math.cos(angle) + x[i] * math.sin(angle)
        return y

    rows = [2.5 * w["tern.embed"][token].astype(np.float64) for token in tokens]
    for layer in range(L):
        own = {name.removeprefix(f"nest.{layer}."): each.astype(np.float64) for name, each in w.items()}
        projected = [(own["qkv"] @ norm(x, own["attention.norm"])).reshape(3, H, Q) for x in rows]
        for t in reversed(range(len(rows))):
            heads = []
            for h in range(H):
                q = turned(projected[t][0, h], t)
                scores = [q @ turned(projected[s][1, h], s) / math.sqrt(Q) for s in range(t + 1)]
                shares = np.exp(scores) / np.sum(np.exp(scores))
                heads.append(sum(share * projected[s][2, h] for s, share in enumerate(shares)))
            x = rows[t] + np.concatenate(heads) @ own["o"]
            y = norm(x, own["mlp.norm"])
            gate = y @ own["gate"]
            rows[t] = x + (gate / (1 + np.exp(-gate)) * (y @ own["up"])) @ own["down"]
    return np.stack([w["tern.head"] @ norm(x, w["tern.norm"]) for x in rows])


def test_the_file_is_short():
    assert len(FILE.read_text().splitlines()) <= 40


def test_its_logits_are_those_of_plain_loops(tern):
    tokens = np.random.default_rng(1).integers(0, V, (2, 7)).astype(np.int32)
    expected = np.stack([naive_logits(tensors(), row) for row in tokens])
    assert error_of_scale(logits_of(tern, tokens), expected) < LOGITS_TOLERANCE


def test_it_is_saved_as_its_own_keys_and_tensors(tern, tmp_path):
    decoder, rules = read_architecture(tern), rules_on("fsdp:2,tp:2", 4)
    save_model(load_params(tern, decoder, rules), decoder, None, tmp_path / "export", dtype="float32")
    found = load_file(tmp_path / "export" / "model.safetensors")
    assert found.keys() == tensors().keys()
    for name, value in tensors().items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    described = {"model_type": "tern", "architectures": ["TernForCausalLM"], "dtype": "float32"}
    assert written == CONFIG | described


def test_each_of_its_weights_has_a_gradient(tern):
    decoder, rules = read_architecture(tern), rules_on("auto", 1)
    params, compute = load_params(tern, decoder, rules), make_logits(decoder, rules)
    tokens = np.random.default_rng(1).integers(0, V, (2, 7)).astype(np.int32)
    gradients = jax.grad(lambda params: (compute(params, tokens) ** 2).mean())(params)
    assert {part.param for part in file_parts(decoder, "folder")} == gradients.keys()
    assert all(np.abs(each).max() > 0 for each in gradients.values())


def test_a_key_that_it_does_not_list_is_refused(tern):
    path = tern.path / "config.json"
    path.write_text(json.dumps({"model_type": "tern", **CONFIG, "wings": 2}))
    with pytest.raises(ModelError, match=r"wings 2 is not supported: Podium does not know whether .* what a tern"):
        read_architecture(tern)
    path.write_text(json.dumps({"model_type": "tern", **CONFIG, "depth": "deep"}))
    with pytest.raises(ModelError, match=r"depth must be a whole number from 1 to \d+, found 'deep'"):
        read_architecture(tern)


def test_with_its_file_among_the_others_its_presets_are_planned(tmp_path):
    """In a copy of the package, in which nothing but the file is new."""
    shutil.copytree(ROOT / "podium", tmp_path / "podium")
    shutil.copy(FILE, tmp_path / "podium" / "models" / "families")
    command = [sys.executable, "-m", "podium.cli", "plan", "aviary/tern-1m", "--on", "v6e-8", "--fast"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "aviary/tern-1m" in done.stdout
