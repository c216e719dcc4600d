"""What must divide over a mesh: one rule, told before a machine is there and when weights are laid out."""

from typing import Any

import pytest
from tiny_decoder import DECODER, tiny

from podium.accelerators import find_accelerator
from podium.config.lora import LoraConfig
from podium.config.schema import Config
from podium.models.architecture import DecoderConfig, with_lora
from podium.models.params import ROLLOUT_LAYOUTS, TRAIN_AXES, axis_parts, indivisible, param_specs
from podium.models.presets import find_architecture
from podium.run import divisible
from podium.run.machine import Machine
from podium.run.resolve import resolve
from podium.sharding import ShardingRules, make_mesh, param_shardings

V6E = find_accelerator("v6e-8")


def check_divisible(config: Config, decoder: DecoderConfig) -> None:
    divisible.check_divisible(resolve(config, decoder, Machine.planned(V6E)))


def config(**changed: Any) -> Config:
    rollout = {
        "max_prompt_tokens": 32,
        "max_new_tokens": 8,
        "slots": 16,
        "prefill_rows": 8,
        **changed.pop("rollout", {}),
    }
    settings = {"model": "none", "tasks": [{"name": "arithmetic"}], "prompts_per_step": 4, "group_size": 4}
    return Config.model_validate({**settings, "rollout": rollout, **changed})


def test_parts_are_products_of_the_mesh_axes_that_split():
    mesh = {"dp": 2, "fsdp": 3, "sp": 7, "tp": 5}
    assert axis_parts(TRAIN_AXES, mesh) == {
        "batch": 6, "batch_by_width": 2, "tokens": 7, "pieces": 42, "vocab": 5, "width": 21, "width_of_rows": 7,
        "heads": 5, "kv_heads": 5, "mlp": 5, "experts": 3, "expert_width": 7, "expert_mlp": 5,
        "delta_heads": 5, "state_heads": 35,
    }  # fmt: skip
    batch = {layout: axis_parts(axes, mesh)["batch"] for layout, axes in ROLLOUT_LAYOUTS.items()}
    assert batch == {"replicated": 30, "tensor": 6, "hybrid": 6, "legacy": 30, "maxtext": 2}


@pytest.mark.parametrize("mesh", ["fsdp:8", "fsdp:4,tp:2", "fsdp:2,tp:4", "tp:8"])
@pytest.mark.parametrize("changed", [{}, {"kv_heads": 1}, {"mlp_width": 60}, {"width": 36}])
def test_what_is_refused_beforehand_is_what_cannot_be_laid_out(mesh, changed):
    decoder = tiny(**changed)

    def refused(check) -> bool:
        try:
            check()
        except ValueError:
            return True
        return False

    specs = param_specs(decoder)
    rules = ShardingRules(make_mesh(mesh), TRAIN_AXES)
    assert refused(lambda: check_divisible(config(mesh=mesh), decoder)) is refused(
        lambda: param_shardings(specs, rules)
    )


def test_the_message_has_the_sizes_that_work():
    decoder = tiny(heads=6, kv_heads=2)
    with pytest.raises(ValueError, match=r"6 query heads \(none\) cannot be split evenly by tp:4; .* tp can be 1, 2$"):
        check_divisible(config(mesh="fsdp:2,tp:4"), decoder)


def test_tokens_of_a_row_and_heads_divide_over_sp():
    with pytest.raises(ValueError, match=r"splits 4 query heads \(none\) over sp:8 x tp:1, .* sp can be 1, 2, 4$"):
        check_divisible(config(mesh="sp:8"), DECODER)
    odd = config(mesh="fsdp:2,sp:4", train={"row_tokens": 42})
    with pytest.raises(ValueError, match=r"rows of 42 tokens .* evenly by sp:4; set train.row_tokens to 44$"):
        check_divisible(odd, DECODER)
    check_divisible(config(mesh="fsdp:2,sp:4"), DECODER)


def test_slots_divide_over_the_devices_that_split_sequences():
    with pytest.raises(ValueError, match=r"rollout\.slots is 12 and is split over 8 devices"):
        check_divisible(config(rollout={"slots": 12, "layout": "replicated"}), DECODER)
    check_divisible(config(rollout={"slots": 12, "layout": "maxtext"}), DECODER)  # over dp alone


def test_scales_of_a_frozen_matrix_divide_over_the_devices_of_a_rollouts_group():
    model = with_lora(find_architecture("Qwen/Qwen2.5-3B-Instruct"), LoraConfig(rank=8, base="nf4"))
    with pytest.raises(
        ValueError, match=r"rollout.layout tensor: layers.o.scale has 2 scales along its head_dim, which 4"
    ):
        check_divisible(config(rollout={"layout": "tensor"}), model)
    check_divisible(config(rollout={"layout": "replicated"}), model)


def test_every_dimension_that_does_not_divide_is_found():
    specs = param_specs(tiny(mlp_width=30))
    found = {(name, axis, dim) for name, axis, dim in indivisible(specs, lambda axis: 4 if axis == "mlp" else 1)}
    assert found == {(f"layers.{name}", "mlp", 30) for name in ("gate", "up", "down")}
