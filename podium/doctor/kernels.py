"""Tests Podium's kernels on their device: errors against float32, and times compared with XLA's."""

import dataclasses
from collections.abc import Callable, Iterator

import jax

from podium.doctor.benchmarks.timing import fastest_s
from podium.doctor.diagnosis import Row
from podium.doctor.kernel_cases import BARS, CASES, Arrays, Case, Program, error_of
from podium.doctor.machine_subject import Subject

SLOWER = 1.2
"""Ratio to XLA's time from which a kernel is reported as slow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The error and the times of a kernel."""

    error: float  # share of the largest value
    kernel_s: float
    xla_s: float


def measure(case: Case, calls: int) -> Measured:
    """Run a kernel, and the same computation by XLA."""
    kernel, xla = (jax.jit(each, donate_argnums=case.in_place) for each in (case.kernel, case.xla))
    return Measured(
        error=error_of(case),
        kernel_s=fastest_s(_repeated(kernel, case), calls=calls),
        xla_s=fastest_s(_repeated(xla, case), calls=calls),
    )


def _repeated(program: Program, case: Case) -> Callable[[], Arrays]:
    """A function without arguments; each call passes on the arrays that it replaced in place to the next call."""
    given = case.arguments()

    def call() -> Arrays:
        found = program(*given)
        for i, x in zip(case.in_place, found[len(found) - len(case.in_place) :], strict=True):
            given[i] = x
        return found

    return call


def kernels(subject: Subject) -> Iterator[Row]:
    """Check that each kernel of this platform is correct, and faster than XLA."""
    sizes = subject.sizes
    if subject.kernels not in CASES:
        yield Row(name="kernels", text=f"skipped: no kernel runs on this {subject.platform}, only XLA's programs")
        return
    for make in CASES[subject.kernels]:
        for case in make(sizes.kernels, subject.facts.devices[0].kind):
            yield _row(case, sizes.calls)


def _row(case: Case, calls: int) -> Row:
    name = f"{case.name} {case.dtype}"
    try:
        found = measure(case, calls)
    except jax.errors.JaxRuntimeError as error:  # an error of the device or its compiler
        first = str(error).strip().splitlines()[0]
        return Row(name=name, problem=f"does not run here: {first[:200]}; report it with `podium doctor --json`")
    problem = ""
    if found.error > BARS[case.dtype]:
        problem = f"off by {found.error:.1e} of the largest value (bar {BARS[case.dtype]:.0e}): do not train with it"
    elif found.kernel_s > SLOWER * found.xla_s:
        problem = "slower than the same by XLA: report it with `podium doctor --json`"
    moved = f", {case.moved / found.kernel_s / 1e12:.2f} TB/s" if case.moved else ""
    return Row(
        name=name,
        unit="ms",
        measured=1e3 * found.kernel_s,
        assumed=1e3 * found.xla_s,
        text=f"off by {found.error:.0e}{moved}; assumed: the time of XLA",
        problem=problem,
    )
