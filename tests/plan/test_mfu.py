import pytest

from podium.accelerators import find_accelerator
from podium.config.schema import Config
from podium.models.flops import step_work, update_flops
from podium.models.presets import preset_decoder
from podium.plan.calibration import load_chip
from podium.plan.planner import make_plan
from podium.plan.request.phase_sizes import Planned
from podium.plan.request.workload import draw_lengths

MODEL = "Qwen/Qwen2.5-3B-Instruct"


def make_config(**train) -> Config:
    return Config.model_validate({"model": MODEL, "tasks": [{"name": "gsm8k"}], "train": train})


@pytest.mark.parametrize(("dtype", "peak"), [("bfloat16", "flops_bf16"), ("float32", "flops_f32")])
def test_a_plan_s_mfu_is_the_real_work_over_the_peak_in_the_update_s_time(dtype, peak):
    config, accelerator = make_config(dtype=dtype), find_accelerator("v6e-8")
    plan = make_plan(Planned.of(config, accelerator), by="closed_form")
    lengths = draw_lengths("gsm8k", config.rollout, prompts=config.prompts_per_step, completions=config.group_size)
    work = step_work(lengths.prompts.tolist(), lengths.completions.tolist())
    ideal = update_flops(preset_decoder(MODEL), work) / 8 / getattr(load_chip("v6e").peaks, peak)
    seconds = plan.phase("update").seconds
    assert plan.mfu is not None
    assert seconds is not None
    assert plan.mfu.value == pytest.approx(ideal / seconds.value)
    assert plan.mfu.low <= plan.mfu.value <= plan.mfu.high < 1


def test_padding_and_what_is_made_again_do_not_raise_it():
    accelerator = find_accelerator("v6e-8")
    plain = make_plan(Planned.of(make_config(remat="none"), accelerator), by="closed_form").mfu
    again = make_plan(Planned.of(make_config(remat="layer"), accelerator), by="closed_form").mfu
    padded = make_plan(Planned.of(make_config(remat="none", packing="none"), accelerator), by="closed_form").mfu
    assert plain is not None
    assert again is not None
    assert padded is not None
    assert padded.value < plain.value
    assert again.value < plain.value
