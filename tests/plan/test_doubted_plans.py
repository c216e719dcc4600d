"""A plan says when the reader of compiled programs and their compiler do not agree."""

import dataclasses
import re

import pytest
from tiny_decoder import DECODER

from podium.accelerators import Accelerator
from podium.plan.compiled import compile_worker
from podium.plan.compiled.compile_worker import CompiledPhase, Job
from podium.plan.compiled.phases import phase_programs
from podium.plan.compiled.tpu_compile import TpuProgram
from podium.plan.planner import few_operations
from podium.plan.report.sections import plan_sections
from podium.sharding import make_mesh
from podium.train.setup import run_spec
from tests.plan.estimated import tiny_config
from tests.plan.made_plans import outcome, phase, plan

CPU = Accelerator(name="cpu-8", generation="cpu", devices=8, hosts=1, hbm_bytes=2**20)


class Decode:
    """The decode program of a tiny run, compiled once."""

    def __init__(self) -> None:
        self.config, mesh = tiny_config(), make_mesh("auto")
        self.spec = run_spec(self.config, DECODER, mesh)
        self.name = f"decode:{self.config.rollout.slots}"
        self.lowered = phase_programs(self.spec, mesh)[self.name].lower()
        self.made = compile_worker._compile(self.lowered, self.job(None))

    def job(self, folder) -> Job:
        return Job(phase=self.name, config=self.config, decoder=DECODER, accelerator=CPU, programs=folder)

    def finished(self, made: TpuProgram, folder, monkeypatch) -> CompiledPhase | str:
        monkeypatch.setattr(compile_worker, "_compile", lambda lowered, job: made)
        return compile_worker._finished(self.job(folder), self.spec, self.lowered, {})


@pytest.fixture(scope="module")
def decode() -> Decode:
    return Decode()


def test_a_program_as_it_is_raises_no_doubts(decode, tmp_path, monkeypatch):
    found = decode.finished(decode.made, tmp_path, monkeypatch)
    assert isinstance(found, CompiledPhase) and found.doubts == ()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r" dot\(", " dot_general(", "does not know: dot_general"),
        (r"\{1,0\}", "{1,0:order}", "shapes that the reader of programs does not know"),
    ],
)
def test_a_planted_change_of_a_programs_text_is_said(decode, tmp_path, monkeypatch, old, new, said):
    text = re.sub(old, new, decode.made.text)
    assert text != decode.made.text
    found = decode.finished(dataclasses.replace(decode.made, text=text), tmp_path, monkeypatch)
    assert isinstance(found, CompiledPhase) and any(said in each for each in found.doubts)


@pytest.mark.parametrize(("old", "new"), [("%", "$"), (r"f32\[", "f32<"), (r"\{1,0\}", "{one,zero}")])
def test_a_text_that_cannot_be_read_is_an_answer_and_no_crash(decode, tmp_path, monkeypatch, old, new):
    text = re.sub(old, new, decode.made.text)
    found = decode.finished(dataclasses.replace(decode.made, text=text), tmp_path, monkeypatch)
    assert isinstance(found, str) and "cannot be read" in found and "plan with --fast" in found


def test_a_phase_with_fewer_operations_than_the_model_needs_is_doubted():
    read = phase("update", flops=1e15, closed_form_flops=0.99e15)
    missed = phase("decode", flops=0.7e15, closed_form_flops=1e15)
    (said,) = few_operations([read, missed, phase("sync", flops=0.0, closed_form_flops=0.0)])
    assert said.startswith("decode: compiled programs seem to do 70% of the operations")


def test_a_doubted_plan_says_so_first():
    found = plan_sections(outcome(plan(doubts=("decode: the reader counts 0 operations",))))
    first = found[0].content[0]
    assert first == dataclasses.replace(first, text="do not rely on this plan: decode: the reader counts 0 operations")
