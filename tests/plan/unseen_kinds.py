"""A layer kind and a way to recompute that the planner has never seen, by trace and compiler: `python unseen_kinds.py`.

A process of its own, since a compiler for TPUs wants its environment before jax is imported.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from podium.accelerators import find_accelerator
from podium.models import decoder as program
from podium.models.blocks.kind import Applied, Stack, Work
from podium.models.blocks.spec import ParamSpec
from podium.models.presets import find_architecture
from podium.plan.compiled.compile_worker import Job, _finished
from podium.plan.compiled.phases import phase_programs
from podium.plan.request.topology import topology_devices
from podium.plan.traced.absent_devices import trace_memory
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.settings import load_settings
from podium.sharding import make_mesh


@dataclasses.dataclass(frozen=True)
class Squares:
    """(sin(x A))^2 B, in place of a gated MLP."""

    inner: int
    scope, ropes = "mlp", ()

    def specs(self, width, *, std, out_std):
        return {
            "a": ParamSpec((width, self.inner), ("width", "mlp"), std),
            "b": ParamSpec((self.inner, width), ("mlp", "width"), std),
        }

    def work(self, width):
        return Work(active=2 * width * self.inner, total=2 * width * self.inner, outputs=self.inner, inner=self.inner)

    def apply(self, w, x, context):
        inside = jnp.square(jnp.sin(context.linear("btd,df->btf", x, w["a"])))
        return Applied(context.linear("btf,fd->btd", inside, w["b"]), context.carried)


def saves_sines(body, remat, *, in_order=False):
    """Instead of `remat: layer`: what goes into the second product of a layer is saved."""
    kept = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(body, prevent_cse=in_order, policy=kept if remat == "layer" else None)


if __name__ == "__main__":
    machine = find_accelerator("v6e-1")
    known = find_architecture("Qwen/Qwen2.5-0.5B-Instruct")
    block = dataclasses.replace(known.stacks[0].pattern[0], feed_forward=Squares(6144))
    model = dataclasses.replace(known, stacks=(Stack(pattern=(block,), repeats=16),))
    texts = ["train.rows_per_device=16", f"train.remat={sys.argv[1]}", "algorithm.kl=k3", "algorithm.kl_coef=0.01"]
    config = load_settings(["configs/gsm8k.yaml"], texts, {}).config
    spec = resolve(config, model, Machine.planned(machine))
    if sys.argv[1] == "layer":
        program._remat = saves_sines
    for name, each in phase_programs(spec, make_mesh("auto", topology_devices(machine))).items():
        if name in ("score", "update"):
            traced = trace_memory(each, machine).peak
            job = Job(phase=name, config=config, decoder=model, accelerator=machine, programs=Path(sys.argv[2]))
            compiled = _finished(job, spec, each.lower(), {})
            assert not isinstance(compiled, str), compiled
            print(json.dumps({"traced": traced, "compiled": compiled.memory.peak}))
