"""Programs as today's compilers write them raise no doubts; the same with a planted change do."""

import json
import re

import jax
import jax.numpy as jnp
import pytest
from recorded_programs import GOLDEN

from podium.hlo.cost import walk
from podium.hlo.doubts import Counted, doubts, known_opcode, unknown_text
from podium.hlo.hlo_text import parse
from podium.hlo.liveness import live_at_peak
from podium.hlo.memory import measure

RECORDED = sorted(path.stem for path in GOLDEN.glob("*.hlo"))


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_programs_are_written_as_the_reader_knows_them(name):
    text = (GOLDEN / f"{name}.hlo").read_text()
    assert list(unknown_text(text, parse(text))) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r" dot\(", " matmul(", "operations that the reader of programs does not know: matmul"),
        (r" convolution\(", " conv(", "does not know: conv"),
        (r" copy-start\(", " begin-copy(", "does not know: begin-copy"),
        (r"T\(8,128\)", "Tile(8,128)", r"shapes that the reader of programs does not know, such as \w+\[[\d,]+\]\{"),
        (r"S\((\d)\)", r"Space[\1]", "shapes that the reader"),
    ],
)
def test_an_operation_or_a_layout_that_is_written_otherwise_is_named(old, new, said):
    changed = 0
    for name in RECORDED:
        text = (GOLDEN / f"{name}.hlo").read_text()
        other, times = re.subn(old, new, text)
        changed += times
        assert not times or re.search(said, "; ".join(unknown_text(other, parse(other))))
    assert changed


@pytest.mark.parametrize("opcode", ["dot", "all-gather-start", "dynamic-slice-done", "async-update", "fusion-start"])
def test_operations_that_run_beside_others_are_known_too(opcode):
    assert known_opcode(opcode) and not known_opcode(f"new-{opcode}")


class Program:
    """A loop of products, compiled for the CPU."""

    def __init__(self) -> None:
        def step(x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, length=7)[0]

        compiled = jax.jit(step).lower(jnp.ones((2048, 2048))).compile()
        self.text, self.peak = compiled.as_text() or "", measure(compiled).peak  # pyright: ignore[reportArgumentType]
        found = compiled.cost_analysis()
        self.counted = Counted(flops=found["flops"], accessed=found["bytes accessed"])

    def doubts(self, text: str) -> list[str]:
        module = parse(text)
        once, arrays = walk(module, {"device": 1}, once=True), live_at_peak(module).size
        return doubts(text, module, once=once, counted=self.counted, arrays=arrays, peak=self.peak)


@pytest.fixture(scope="module")
def program() -> Program:
    return Program()


def test_the_compilers_own_count_agrees_with_each_loop_counted_once(program):
    assert program.doubts(program.text) == []


def test_products_that_are_not_read_are_noticed_by_the_compilers_count(program):
    """Its name is an operation that exists, so that the grammar says nothing."""
    other = re.sub(r" dot\(", " maximum(", program.text)
    assert other != program.text
    (said,) = program.doubts(other)
    assert re.match(r"the reader counts 0 operations where the compiler counts 1\.7\d?e\+10", said)


def test_arrays_that_are_read_as_smaller_are_noticed_by_the_compilers_memory(program):
    said = program.doubts(program.text.replace("[2048,2048]", "[2048,20]"))
    assert any(each.startswith("the arrays in the text take ") for each in said)


def test_what_is_small_raises_no_doubt():
    text = (GOLDEN / "decode.hlo").read_text()
    module, stats = parse(text), json.loads((GOLDEN / "decode.json").read_text())
    once = walk(module, {"dp": 2, "fsdp": 2, "tp": 2}, once=True)
    assert doubts(text, module, once=once, counted=None, arrays=1000, peak=2000) == []
    assert doubts(text, module, once=once, counted=None, arrays=1, peak=stats["peak_memory_in_bytes"]) != []
