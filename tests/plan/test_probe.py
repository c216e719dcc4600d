"""What a search compiles of a config: only what the searched setting moves."""

from typing import Any

import pytest

from podium.accelerators import find_accelerator
from podium.hlo.memory import Memory
from podium.plan.compiled import compile_worker
from podium.plan.compiled.compile_worker import CompiledPhase, Job
from podium.plan.compiled.tpu_compile import TpuProgram
from podium.plan.request import phase_sizes
from podium.plan.request.candidate import Case, Change
from podium.plan.request.phase_sizes import Planned
from podium.plan.request.plan_subject import Subject
from podium.plan.search import study
from podium.plan.search.study import Study
from podium.run.machine import Machine
from podium.run.resolve import resolve
from tests.plan.made_plans import GIB, HBM
from tests.plan.test_search import config

V6E = find_accelerator("v6e-8")
NOW = Case(V6E)


class Settings(Study):
    """Cases of `config`, with changes that are not checked."""

    def run(self, case: Case) -> Planned:
        return planned().changed(case.changes)


def case(**changed: Any) -> Case:
    return NOW.but(*(Change(key=key.replace("__", "."), value=value) for key, value in changed.items()))


@pytest.fixture(autouse=True)
def architecture(monkeypatch):
    """Every config here is of the 3B model."""
    from tests.plan.estimated import QWEN_3B

    monkeypatch.setattr(phase_sizes, "find_decoder", lambda config: QWEN_3B)


def planned() -> Planned:
    return Planned.of(config(), V6E)


@pytest.mark.parametrize(
    ("changed", "phases"),
    [
        ({"train__rows_per_device": 8}, ("update",)),
        ({"rollout__slots": 64}, ("decode", "copy")),
        ({"train__optimizer__name": "lion"}, ("update", "decode", "prefill", "sync", "copy")),
        ({}, ("update", "decode", "prefill", "sync", "copy")),  # nothing differs: all are asked for
    ],
)
def test_the_phases_that_a_setting_moves_are_those_whose_memory_differs(changed, phases):
    found = Settings(Subject()).moved([NOW, case(**changed)])
    assert set(phases) <= set(found)
    if len(phases) < 5:
        assert "sync" not in found


def test_of_each_phase_the_largest_program_is_asked_for():
    assert list(Settings(Subject()).programs(NOW, ["update", "prefill", "decode"])) == [
        "update",
        "prefill:512",
        "decode:128",
    ]


def test_a_probe_has_the_largest_of_its_programs_and_any_refusal(monkeypatch):
    def compiled(job: Job) -> CompiledPhase:
        size = {"update": 20, "decode": 30}[job.phase.partition(":")[0]] * GIB
        empty: dict[str, Any] = {"parts": {}, "largest": (), "work": (), "compile_s": 1.0}
        refused = job.phase == "update"
        return CompiledPhase(residents={"a": GIB}, memory=Memory(peak=size, code=7), refused=refused, **empty)

    monkeypatch.setattr(study, "compile_jobs", lambda jobs, progress=None: [compiled(job) for job in jobs])
    (found,) = Settings(Subject()).peaks([(NOW, ["update", "decode"])])
    assert (found.phase, found.bytes, found.refused) == ("decode", 31 * GIB + 14, True)
    assert not found.fits(HBM)


def test_a_probe_by_the_closed_form_compiles_nothing(monkeypatch):
    monkeypatch.setattr(study, "compile_jobs", None)
    asked = [(each, ["update"]) for each in (NOW, case(train__rows_per_device=16))]
    few, many = Settings(Subject(), by="trace").peaks(asked)
    assert few.bytes < many.bytes and not few.compiled and not many.refused


def test_a_program_without_its_code_is_compiled_again_when_that_is_asked_for(monkeypatch, tmp_path):
    asked: list[bool] = []

    def compile_tpu(lowered, *, whole: bool) -> TpuProgram:
        asked.append(whole)
        return TpuProgram(memory=Memory(peak=5, code=1), refusal=None, text="HloModule f", whole=whole)

    class Lowered:
        def as_text(self) -> str:
            return "a program"

    def build(whole: bool) -> bool:
        job = Job(
            phase="update",
            config=config(),
            decoder=planned().sizes.decoder,
            accelerator=V6E,
            programs=tmp_path,
            whole=whole,
        )
        spec = resolve(job.config, job.decoder, Machine.planned(V6E))
        return compile_worker._build(Lowered(), job, spec).whole

    monkeypatch.setattr(compile_worker, "compile_tpu", compile_tpu)
    assert [build(whole) for whole in (False, False, True, True, False)] == [False, False, True, True, True]
    assert asked == [False, True]
