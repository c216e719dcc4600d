"""Compiled programs against their floors: faults that plans once had are named, healthy programs are not."""

import dataclasses
import gzip
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from benches import floors
from podium.accelerators import find_accelerator
from podium.hlo.cost import ProgramCost
from podium.hlo.hlo_text import Module, parse
from podium.hlo.moves import moves
from podium.models.presets import find_architecture
from podium.plan.calibration import load_chip
from podium.plan.closed_form.estimate import PhaseEstimate, decode_phase, first_flops, update_phase
from podium.plan.closed_form.least_bytes import decode_bytes, optimizer_step_bytes, prefill_bytes, sync_bytes
from podium.plan.closed_form.over_floor import beyond_floor, copies, spread
from podium.plan.compiled.array_names import names_of
from podium.plan.compiled.compile_worker import looped_work
from podium.plan.report.sections import plan_sections
from podium.plan.request.phase_sizes import Planned, RunSizes
from podium.plan.request.step_calls import Call
from podium.plan.request.topology import check_compiler
from podium.plan.result import Move
from tests.hlo.recorded_programs import GOLDEN
from tests.plan.estimated import QWEN_3B, config
from tests.plan.made_plans import outcome, phase, plan

FAULTS = Path(__file__).parents[1] / "golden" / "floor"
"""Decode programs that plans once had, as compiled with jax 0.10.2 and libtpu 0.0.42.1 or jax-cuda12-plugin 0.10.2.

`qwen_3b_h100-1_sliced_weights` is a loop over the trainer's stacks, `benches.gpu_decode`'s form `stacks`;
`llama_1b_v6e-1_copied_cache` is from before TPUs stored keys and values of 64 numbers in full rows (commit f43a7bb).
Both have 64 slots and are stripped of kernels' bodies and of tables of source files.
"""
SLOTS, CONTEXT = 64, 1024
WIDTH, HIDDEN, POSITIONS = 2048, 8192, 1024  # of the recorded decode, which has 8 slots on each device


def sizes_of(model: str, machine: str) -> RunSizes:
    lengths = {"max_prompt_tokens": 512, "max_new_tokens": 1024}
    rollout = {**lengths, "slots": SLOTS, "page_tokens": 64, "layout": "auto"}
    return Planned.of(config(rollout=rollout), find_accelerator(machine), find_architecture(model)).sizes


def held(module: Module, call: Call, run: RunSizes) -> tuple[float, tuple[Move, ...]]:
    """A program with these calls in a step, against its floor."""
    works = looped_work(module, run.mesh if module.num_partitions == 1 else {"fsdp": 8}, call.blocks)
    cost = ProgramCost(
        tuple(dataclasses.replace(each.work, times=each.once + call.rounds * each.each) for each in works)
    )
    ratio, found = beyond_floor([(call, cost)], run, load_chip(run.accelerator.generation).peaks)
    assert ratio is not None
    return ratio, found


def fault(name: str, model: str, machine: str) -> tuple[float, tuple[Move, ...]]:
    """A fault's recorded program, in a call of 64 steps, against the floor of today's run."""
    run = sizes_of(model, machine)
    form, blocks = decode_phase(run, SLOTS, CONTEXT), run.in_blocks(CONTEXT) / run.block
    call = Call(
        phase="decode",
        program=f"decode:{SLOTS}",
        calls=1,
        rounds=64,
        blocks=blocks,
        closed_form=form,
        repeats=64,
        once_flops=first_flops(run, SLOTS),
    )
    text = gzip.decompress((FAULTS / f"{name}.hlo.gz").read_bytes()).decode()
    return held(parse(text), call, run)


@pytest.mark.parametrize(
    ("name", "model", "machine", "least", "named"),
    [
        (
            "qwen_3b_h100-1_sliced_weights",
            "Qwen/Qwen2.5-3B-Instruct",
            "h100-1",
            3.0,
            ["slice of rollout_weights bf16[1,2048,11008]", "slice of rollout_weights bf16[1,11008,2048]"],
        ),
        (
            "llama_1b_v6e-1_copied_cache",
            "meta-llama/Llama-3.2-1B-Instruct",
            "v6e-1",
            30.0,
            ["copy of kv_cache bf16[16,1664,8,64,64]"],
        ),
    ],
    ids=["weights on a GPU", "cache on a TPU"],
)
def test_faults_that_plans_once_had_are_named_with_the_copies(name, model, machine, least, named):
    ratio, found = fault(name, model, machine)
    assert ratio > least
    assert set(named) <= {move.what for move in found}
    assert [move.share for move in found] == sorted((move.share for move in found), reverse=True)


def test_the_report_says_so_in_its_first_lines():
    ratio, found = fault("llama_1b_v6e-1_copied_cache", "meta-llama/Llama-3.2-1B-Instruct", "v6e-1")
    made = plan(made=(phase("decode", over_floor=ratio, moves=found), phase("update", over_floor=1.4)))
    lines = [line.text for line in plan_sections(outcome(made))[0].content]
    assert re.fullmatch(
        r"decode takes 3\d\.\d times its floor; of its time 9\d% copy of kv cache bf16\[16,1664,8,64,64\]", lines[1]
    )
    assert len(lines) == 2, "and nothing of the update"


COPY = Move(what="copy of kv_cache bf16[16,64]", share=0.6, computes=False)
PASS = Move(what="pass over gradients f32[30,576]", share=0.4, computes=True)


def test_a_phase_that_takes_next_to_nothing_of_a_step_is_not_named():
    sync = phase("sync", took=0.01, over_floor=3.0, moves=(COPY,))
    made = (sync, phase("update", took=9.0, over_floor=1.0))
    assert list(copies(made)) == list(spread(made)) == []
    assert list(copies([phase("decode", took=None, over_floor=3.0, moves=(COPY,))])) == []


@pytest.mark.parametrize(("moves", "named"), [((COPY, PASS), True), ((PASS,), False), ((), False)])
def test_copies_are_in_the_first_lines_and_all_else_is_a_note(moves, named):
    made = [phase("update", over_floor=2.0, moves=moves)]
    first, noted = list(copies(made)), list(spread(made))
    assert (len(first), len(noted)) == ((1, 0) if named else (0, 1))
    if not named:
        most = "; of its time 40% pass over gradients f32[30,576]" if moves else ""
        assert noted == [f"update takes 2.0 times its floor, which no copies explain{most}"]


def test_a_few_copies_do_not_explain_a_program_that_is_far_from_its_floor():
    few = dataclasses.replace(COPY, share=0.1)
    assert list(copies([phase("update", over_floor=3.0, moves=(PASS, few))])) == []


# A healthy program, and the same with a planted fault


def recorded_call() -> Call:
    """16 rounds of the recorded decode, with its floor by hand: three matrices and the cache are read in each."""
    matrices = 2 * WIDTH * HIDDEN + HIDDEN * HIDDEN
    form = PhaseEstimate(
        name="decode",
        parts={},
        flops=2 * 8 * (matrices + POSITIONS * WIDTH),
        hbm_bytes=0,
        ici_bytes=0,
        least_bytes=2 * (matrices + 8 * POSITIONS * WIDTH),
    )
    return Call(phase="decode", program="decode:64", calls=1, rounds=16, closed_form=form, repeats=16)


def with_copies(text: str) -> str:
    """The program with a copy of every matrix in each round of its loop."""
    start = text.index("region_0")
    matrix = re.compile(
        r"^  %(get-tuple-element\.\d+) = (bf16\[(?:2048,8192|8192,8192|8192,2048)\]\{[^}]*\}) get-tuple-element.*\n",
        re.M,
    )
    planted = lambda found: f"{found[0]}  %planted.{found[1]} = {found[2]} copy(%{found[1]})\n"  # noqa: E731
    return text[:start] + matrix.sub(planted, text[start:])


def test_a_planted_copy_of_every_weight_is_named():
    text = (GOLDEN / "decode.hlo").read_text()
    run = sizes_of("Qwen/Qwen2.5-3B-Instruct", "v6e-1")
    healthy, found = held(parse(text), recorded_call(), run)
    assert 0.9 < healthy < 1.1 and found == ()
    ratio, found = held(parse(with_copies(text)), recorded_call(), run)
    assert ratio > 2
    assert {move.what for move in found} == {
        f"copy of parameters bf16[{shape}]" for shape in ("8192,8192", "8192,2048", "2048,8192")
    }
    assert sum(move.share for move in found) == pytest.approx(1 - healthy / ratio, abs=0.05)


# What instructions move


def described(body: str, signature: str = "p: f32[2048,2048]") -> Mapping[str, str]:
    text = f"""HloModule jit_decode, is_scheduled=true

%cast (a: f32[2048,2048]) -> bf16[2048,2048] {{
  %a = f32[2048,2048]{{1,0}} parameter(0)
  ROOT %convert = bf16[2048,2048]{{1,0}} convert(%a)
}}

%double (a: f32[2048,2048]) -> f32[2048,2048] {{
  %a.1 = f32[2048,2048]{{1,0}} parameter(0)
  ROOT %add = f32[2048,2048]{{1,0}} add(%a.1, %a.1)
}}

ENTRY %main ({signature}) -> f32[2048,2048] {{
  %p = f32[2048,2048]{{1,0}} parameter(0), metadata={{op_name="params['up']"}}
{body}
}}
"""
    return moves(parse(text), names_of("jit_decode"))


@pytest.mark.parametrize(
    ("instruction", "said"),
    [
        ("copy(%p)", "copy of rollout_weights f32[2048,2048]"),
        ("transpose(%p), dimensions={1,0}", "copy of rollout_weights f32[2048,2048]"),
        ("fusion(%p), kind=kLoop, calls=%double", "pass over rollout_weights f32[2048,2048]"),
        ("dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}", None),
        ("all-reduce(%p), replica_groups={}, to_apply=%double", None),
        ('custom-call(%p), custom_call_target="tpu_custom_call"', None),
    ],
)
def test_instructions_are_described_by_what_they_move(instruction, said):
    found = described(f"  ROOT %out = f32[2048,2048]{{1,0}} {instruction}")
    assert found.get("out") == said


def test_casts_joins_and_slices_are_told_apart():
    found = described(
        "  %cast.1 = bf16[2048,2048]{1,0} fusion(%p), kind=kLoop, calls=%cast\n"
        "  %join = f32[4096,2048]{1,0} concatenate(%p, %p), dimensions={0}\n"
        "  %part = f32[1024,2048]{1,0} slice(%join), slice={[0:1024], [0:2048]}\n"
        "  ROOT %small = f32[8,8]{1,0} slice(%p), slice={[0:8], [0:8]}"
    )
    assert found == {
        "cast.1": "cast of rollout_weights bf16[2048,2048]",
        "join": "join of rollout_weights f32[4096,2048]",
        "part": "slice of other f32[1024,2048]",
    }


def test_what_reads_constants_alone_is_described_by_what_it_writes():
    found = described(
        "  %c = f32[2048,2048]{1,0} constant({...})\n"
        "  %near = f32[2048,2048]{1,0:S(1)} fusion(%c), kind=kLoop, calls=%double\n"
        "  ROOT %far = f32[2048,2048]{1,0} copy(%c)"
    )
    assert set(found) == {"far"}


def test_what_is_brought_into_a_chips_cache_is_read_by_a_product():
    found = described("  ROOT %near = f32[2048,2048]{1,0:S(1)} copy(%p)")
    assert found == {}


# Floors by hand

LAYER = 2048 * (2048 + 2 * 256) + 2048 + 2 * 256 + 2048 * 2048 + 3 * 2048 * 11008 + 2 * 2048
"""Numbers of a layer of Qwen2.5-3B: q, k and v with biases, o, the MLP, two norms."""
EMBED = 151936 * 2048


@pytest.fixture(scope="module")
def run() -> RunSizes:
    return Planned.of(config(rollout={"slots": 64}), find_accelerator("v6e-1"), QWEN_3B).sizes


def test_a_decode_step_reads_weights_and_cache_once_and_writes_logits(run):
    weights = 2 * (36 * LAYER + 2048 + EMBED)
    token = 2 * 36 * 2 * 2 * 128  # bytes of its keys and values in all layers
    assert decode_bytes(run, 64, 512) == weights + 64 * 513 * token + 4 * 64 * 151936


def test_prefill_reads_no_head_and_sync_reads_what_is_trained(run):
    assert prefill_bytes(run, 1000, 0) == 2 * (36 * LAYER + 2048) + 1000 * 2 * 36 * 2 * 2 * 128
    assert sync_bytes(run) == (4 + 2) * (36 * LAYER + 2048 + EMBED)


def test_an_update_moves_weights_gradients_and_both_moments(run):
    count = 36 * LAYER + 2048 + EMBED
    form = update_phase(run)
    assert form.once_bytes == optimizer_step_bytes(run) == 4 * count * (2 + 2 * 2)
    assert form.least_bytes == 2 * 2 * count + 2 * 4 * count, "weights in both passes, and gradients"


# Today's programs

HIGHER = 1.02
"""How much a ratio may rise over the recorded one."""


@pytest.mark.long
@pytest.mark.parametrize("case", floors.recorded_rows())
def test_programs_are_no_further_from_their_floors_than_recorded(case):
    model, _, machine = case.partition("@")
    try:
        check_compiler(find_accelerator(machine))
    except ValueError as error:
        pytest.skip(str(error))
    known = {name: row["over_floor"] for name, row in floors.recorded_rows()[case].items()}
    found = {phase.name: phase.over_floor for phase in floors.phases(model, machine)}
    assert set(found) == set(known)
    higher = {name: (known[name], ratio) for name, ratio in found.items() if (ratio or 0) > HIGHER * (known[name] or 0)}
    assert not higher, f"if the change is meant: python -m benches.floors {case}"
