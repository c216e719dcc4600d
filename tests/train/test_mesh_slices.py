import json
import os
import subprocess
import sys

import pytest

from podium.accelerators import find_accelerator
from podium.plan.request.topology import compiler_environment

PROGRAM = """
import json, re
import jax, jax.numpy as jnp
from jax.experimental import topologies
from podium.accelerators import find_accelerator
from podium.models.params import GATHERED_AXES, TRAIN_AXES
from podium.sharding import ShardingRules, make_mesh

each = find_accelerator("v6e-8")
options = {**each.topology_options, "num_slices": 2}
devices = topologies.get_topology_desc(each.topology, platform="tpu", **options).devices
mesh = make_mesh("dcn:2,fsdp:-1", list(devices))
stored, computing = ShardingRules(mesh, TRAIN_AXES), ShardingRules(mesh, GATHERED_AXES)

def loss(w, x):
    return jnp.sum(jnp.tanh(x @ computing.constrain(w, None, "width")))

def abstract(shape, sharding):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

w = abstract((1024, 1024), stored.sharding(None, "width"))
x = abstract((4096, 1024), computing.sharding("batch", None))
text = jax.jit(jax.grad(loss), out_shardings=w.sharding).lower(w, x).compile().as_text()
groups = [group for found in re.findall(r"replica_groups=\\{\\{(.*?)\\}\\}", text) for group in found.split("},{")]
print(json.dumps({"groups": groups, "between": [name for name in ("send", "recv") if f" {name}(" in text]}))
"""


def test_gradients_of_two_slices_are_gathered_within_each_and_exchanged_between_them():
    """Compiled for two v6e-8: what the data center's network carries is the sum of gradients alone."""
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed; pip install 'podium-rl[tpu]'")
    environ = {**os.environ, **compiler_environment(find_accelerator("v6e-8"))}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["groups"]
    for group in found["groups"]:
        assert len({int(device) // 8 for device in group.split(",")}) == 1
    assert found["between"] == ["send", "recv"]
