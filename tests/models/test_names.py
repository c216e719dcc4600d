"""Files that hold our parameters otherwise than one tensor for each layer's."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file
from tiny_decoder import DECODER, tiny
from tiny_models import rules_on

from podium.models.blocks.kind import Block, Stack
from podium.models.blocks.mlp import Mlp
from podium.models.blocks.spec import ParamSpec
from podium.models.files import names
from podium.models.files.hf import load_params, save_model
from podium.models.files.hf_config import to_hf_config
from podium.models.files.source import ModelSource
from podium.models.files.tensor_layout import Layout
from podium.models.params import param_specs


class Experts(Mlp):
    """Four at once, of which only the weights are declared."""

    def specs(self, width, *, std, out_std):
        return {"experts": ParamSpec((4, width, self.width), ("experts", "expert_width", None), std, stacked=1)}


def random_params(decoder):
    random = np.random.default_rng(0)
    return {
        name: jnp.asarray(random.standard_normal(spec.shape), jnp.float32)
        for name, spec in param_specs(decoder).items()
    }


def test_a_file_may_join_what_is_several_of_ours_and_split_what_is_one(tmp_path, monkeypatch):
    """Queries, keys and values in one tensor, and each expert of a layer in its own; written, and read back."""
    joined = ("q", "k", "v")
    changed = {f"layers.{name}": names.NAMES[f"layers.{name}"] for name in joined}
    for name, layout in changed.items():
        hf = "model.layers.{}.qkv.weight"
        monkeypatch.setitem(names.NAMES, name, layout._replace(hf=hf, joined=joined))
    up = Layout("model.layers.{}.experts.{}.up.weight", "", "DF", "F D")
    monkeypatch.setitem(names.NAMES, "layers.experts", up)
    attention, _ = DECODER.dense_layers()[0]
    plain, sparse = (Block(mixer=attention, feed_forward=kind(width=12)) for kind in (Mlp, Experts))
    decoder = dataclasses.replace(tiny(tied=False), stacks=(Stack(pattern=(plain, sparse), repeats=2),))
    params = random_params(decoder)
    monkeypatch.setattr("podium.models.files.hf.to_hf_config", lambda _: to_hf_config(DECODER))
    save_model(params, decoder, None, tmp_path / "model", dtype="float32")
    file = load_file(tmp_path / "model" / "model.safetensors")
    assert file["model.layers.2.qkv.weight"].shape == (32 + 16 + 16, 32)
    np.testing.assert_array_equal(file["model.layers.2.qkv.weight"][32:48], params["layers.0.k"][1].reshape(32, 16).T)
    np.testing.assert_array_equal(file["model.layers.3.experts.2.up.weight"], params["layers.1.experts"][1, 2].T)
    source = ModelSource("folder", tmp_path / "model", "model")
    for mesh, devices in (("dp:1", 1), ("fsdp:2,tp:2", 4)):
        found = load_params(source, decoder, rules_on(mesh, devices))
        assert found.keys() == params.keys()
        for name, value in params.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
