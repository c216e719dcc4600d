import dataclasses
from typing import Any

import pytest
from tiny_decoder import tiny

from podium.accelerators import find_accelerator
from podium.config.errors import ConfigError
from podium.config.schema import Config, RolloutConfig
from podium.models.blocks.kind import Block, Stack
from podium.models.flops import pair_flops
from podium.models.layouts import DecodeFloor, Layout, choose_layout, machine_of
from podium.models.presets import preset_decoder
from podium.settings import load_settings

QWEN_3B, QWEN_7B, QWEN3_8B = (
    preset_decoder(f"Qwen/{name}") for name in ("Qwen2.5-3B-Instruct", "Qwen2.5-7B-Instruct", "Qwen3-8B")
)
V6E = find_accelerator("v6e-8")


def config(**rollout: Any) -> Config:
    lengths = {"max_prompt_tokens": 512, "max_new_tokens": 512, "prefill_rows": 64}
    return Config.model_validate(
        {"model": "none", "tasks": [{"name": "arithmetic"}], "rollout": {**lengths, "layout": "auto", **rollout}}
    )


def chosen(decoder=QWEN_3B, accelerator=V6E, **rollout: Any) -> Layout:
    return choose_layout(
        config(**rollout).rollout, decoder, accelerator, devices=accelerator.devices, hosts=accelerator.hosts
    )


def floor_ms(group: int, rows: int) -> float:
    machine = machine_of(V6E, 8)
    assert machine is not None
    return 1e3 * DecodeFloor(decoder=QWEN_3B, machine=machine, group=group).step_s(rows, 512)


# Worked by hand for 128 sequences in groups of 8: 3.09e9 parameters that multiply, in bfloat16 771 MB a chip; keys and
# values of 65,536 tokens at 36 KiB, 302 MB a chip; 1.638e12 bytes/s. Sums: 73 of 128 x 2048 numbers, 7/8 of them sent
# twice over 2 links of 9e10 bytes/s; swaps: 72 of 3/4 of 128 x 2 x 18 x 128 numbers by 8 chips; 146
# collectives of 3 us.


def test_a_floor_worked_by_hand():
    read = (2 * (36 * (2 * 2048 * 18 * 128 + 3 * 2048 * 11008) + 151936 * 2048) / 8 + 65536 * 36 * 1024 / 8) / 1.638e12
    sums = 73 * 2 * 7 / 8 * 128 * 2048 * 2
    swaps = 36 * 3 / 4 * 128 * 2 * 18 * 128 * 2 / 8
    assert floor_ms(8, 128) == pytest.approx(1e3 * (read + (sums + swaps) / 1.8e11 + 146 * 3e-6))
    assert floor_ms(8, 128) == pytest.approx(1.49, abs=0.01)
    assert floor_ms(1, 128) == pytest.approx(3.95, abs=0.01)  # no collectives
    assert floor_ms(4, 512) == pytest.approx(2.81, abs=0.01)


@pytest.mark.parametrize(
    ("slots", "layout", "group"), [(128, "tensor", 8), (512, "hybrid", 4), (1024, "hybrid", 4), (4096, "replicated", 1)]
)
def test_auto_takes_large_groups_for_few_sequences_and_says_why(slots, layout, group):
    found = chosen(slots=slots)
    assert (found.name, found.group) == (layout, group)
    name = f"{layout}-{group}" if layout == "hybrid" else layout
    assert found.why.startswith(f"{name}: least ms per decode step of {slots} sequences at 512 tokens: replicated ")
    times = {part.split()[0]: float(part.split()[1]) for part in found.why.rpartition(": ")[2].split(", ")}
    assert set(times) == {"replicated", "hybrid-2", "hybrid-4", "tensor"}
    assert min(times, key=lambda each: times[each]) == name
    assert times[name] == pytest.approx(floor_ms(group, slots), abs=0.01)


def test_auto_leaves_out_what_has_no_memory_or_does_not_divide():
    found = chosen(QWEN3_8B, slots=256)
    assert found.group > 1 and found.why.endswith("; no memory for replicated")
    assert "replicated" not in chosen(slots=128, prefill_rows=2).why  # prompts for 2 of 8 chips alone
    found = chosen(QWEN_7B, slots=256)  # 28 heads do not divide over 8 chips: their 4 key/value heads do, and 2 halves
    assert (found.name, found.group) == ("tensor", 8)


def test_every_host_decodes_by_itself():
    four = chosen(accelerator=find_accelerator("v6e-16"), slots=512)  # of four hosts
    assert (four.name, four.group) == ("tensor", 4)
    one = chosen(accelerator=find_accelerator("v6e-4"), slots=64)
    assert "of 128 sequences" in four.why and "of 64 sequences" in one.why


LARGE = tiny(
    vocab=151936, width=8192, layers=80, heads=64, kv_heads=8, head_dim=128, mlp_width=28672, qk_norm=True, tied=False
)


def test_what_no_host_has_the_memory_for_is_decoded_by_all_together():
    found = chosen(LARGE, find_accelerator("v6e-64"), slots=256)  # 141 GB of weights, hosts of 4 x 31 GiB
    assert (found.name, found.group, found.over_hosts) == ("hybrid", 32, True)
    assert found.why.startswith(
        "hybrid: groups of 32 devices are larger than a host, so that all hosts decode together;"
    )
    assert "of 256 sequences at 512 tokens: hybrid-16 " in found.why and found.why.endswith("; no memory for hybrid-8")
    node = chosen(LARGE, find_accelerator("h100-16"), slots=256)  # one of two hosts has it
    assert (node.name, node.group, node.over_hosts) == ("tensor", 8, False)


def test_groups_over_hosts_are_taken_where_they_are_asked_for():
    pod = find_accelerator("v6e-16")  # four hosts of four
    found = chosen(accelerator=pod, layout="hybrid", group_chips=8, slots=512)
    assert (found.name, found.group, found.over_hosts) == ("hybrid", 8, True)
    assert not chosen(accelerator=pod, layout="hybrid", group_chips=2, slots=512).over_hosts
    refusal = "groups of 6: they do not divide the 16 devices that decode together; groups can be 1, 2, 4, 8, 16 "
    with pytest.raises(ValueError, match=refusal):
        chosen(accelerator=pod, layout="hybrid", group_chips=6, slots=512)


def test_groups_over_machines_of_gpus_are_as_slow_as_their_network():
    near, far = (machine_of(find_accelerator("h100-16"), 16, networked=networked) for networked in (False, True))
    assert near and far
    near_s, far_s = (DecodeFloor(decoder=LARGE, machine=each, group=16).ici_s(16) for each in (near, far))
    assert far_s > 2 * near_s


def test_a_group_splits_heads_as_far_as_they_go_and_sequences_over_the_rest():
    training = {"dp": 1, "fsdp": 8, "sp": 1, "tp": 1}
    assert Layout(name="tensor", group=8).mesh(training, kv_heads=2) == {"dp": 1, "fsdp": 4, "sp": 1, "tp": 2}
    assert Layout(name="hybrid", group=4).mesh(training, kv_heads=8) == {"dp": 2, "fsdp": 1, "sp": 1, "tp": 4}
    assert Layout(name="hybrid", group=2).mesh(training, kv_heads=3) == {"dp": 4, "fsdp": 2, "sp": 1, "tp": 1}
    assert Layout(name="legacy").mesh(training, kv_heads=2) == training
    assert Layout(name="legacy").mesh({"dp": 1, "fsdp": 2, "sp": 4, "tp": 1}, kv_heads=2) == training


def test_machines_that_are_not_in_the_table_are_replicated_unless_told_otherwise():
    def on_cpu(**rollout):
        return choose_layout(config(**rollout).rollout, QWEN_3B, None, devices=8, hosts=2)

    found = on_cpu()
    assert (found.name, found.group) == ("replicated", 1)
    assert found.why == "replicated: the speed of these devices is unknown"
    assert on_cpu(layout="tensor") == Layout(name="tensor", group=4)
    assert on_cpu(layout="hybrid", group_chips=2) == Layout(name="hybrid", group=2)
    with pytest.raises(ValueError, match=r"no group size can be chosen .* \(4 devices per host\); set rollout"):
        on_cpu(layout="hybrid")


def test_groups_that_do_not_divide_are_refused_by_name():
    refusal = r"groups of 3: they do not divide the 8 devices that decode together; groups can be 1, 2, 4, 8 \("
    with pytest.raises(ValueError, match=refusal):
        chosen(layout="hybrid", group_chips=3)
    attention, mlp = QWEN_3B.dense_layers()[0]
    block = Block(mixer=attention, feed_forward=dataclasses.replace(mlp, width=11004))
    narrow = dataclasses.replace(QWEN_3B, stacks=(Stack(pattern=(block,), repeats=36),))
    with pytest.raises(
        ValueError, match=r"tensor in groups of 8: an MLP width of 11004 does not .* groups can be 1, 2, 4"
    ):
        chosen(narrow, layout="tensor")


def test_a_group_size_without_hybrid_is_a_contradiction():
    settings = ["model=demo", "tasks=[{name: arithmetic}]", "rollout.layout=tensor", "rollout.group_chips=4"]
    with pytest.raises(
        ConfigError, match=r"4 has no effect with rollout\.layout tensor; set rollout\.layout to hybrid"
    ):
        load_settings([], settings, {})


def test_the_floor_of_long_sequences_has_the_windows_of_layers_that_have_one():
    """And the choice of a layout counts a ring of pages for each of them."""
    gemma, machine = preset_decoder("google/gemma-3-4b-it"), machine_of(find_accelerator("v6e-8"), 8)
    assert machine is not None
    floor = DecodeFloor(decoder=gemma, machine=machine, group=8)
    token = 2 * 2 * 4 * 256  # bytes of a layer: bfloat16 keys and values of 4 heads
    assert floor.sequence_bytes(8192) == token * (5 * 8192 + 29 * 1024)
    assert floor.sequence_bytes(600) == token * 34 * 600
    assert pair_flops(gemma, 8192) == 4 * 8 * 256 * (5 * 8192 + 29 * 1024)
    rollout = RolloutConfig(max_prompt_tokens=1024, max_new_tokens=7168, page_tokens=64)
    grown = floor.bytes_held(16, rollout) - floor.bytes_held(8, rollout)
    assert grown == token * (5 * 8192 + 29 * 21 * 64)
