"""Compiles a TPU program up to its memory assignment, or completely.

The compiler optimises and schedules a program, assigns memory to every array, and rejects what does not fit: this
takes seconds. Generating machine code then takes minutes, and a plan needs only its size. The compiler dumps the
memory assignment, also of programs that it rejects, so no option that changes the program is needed.
"""

import dataclasses
import re
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from podium.hlo.doubts import Counted
from podium.hlo.memory import Memory, OutOfMemory, parse_out_of_memory

if TYPE_CHECKING:
    import jax

POLL_S = 0.05
CODE_PER_TEXT = 30
"""Upper bound of code bytes per byte of program text: libtpu 0.0.42.1 made 28 for an update, 6 for a decode."""
# Endings of the files that the compiler writes to the folder of `xla_dump_to`.
TEXT, REPORT = "after_optimizations.txt", "after_optimizations-memory-usage-report.txt"
ACCEPTED = "after_optimizations_after_buffer_assignment.txt"  # since libtpu 0.0.42, not of rejected programs
_TOTAL = re.compile(r"^(?:Memory Space: default \(color=0\)\nTotal bytes|Total bytes used): (\d+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuProgram:
    """A program, compiled up to its memory assignment or completely."""

    memory: Memory  # arguments and everything that the program allocates, including gaps between arrays
    refusal: OutOfMemory | None  # the error if it does not fit
    text: str = ""  # optimised HLO; empty only if the program was rejected before it was written
    whole: bool  # whether machine code was generated
    counted: Counted | None = None  # the compiler's own count of operations and bytes
    compile_s: float = 0.0  # seconds that this took, once they are known


def compile_tpu(lowered: "jax.stages.Lowered", *, whole: bool) -> TpuProgram:
    """Compile a lowered program for its TPU.

    Args:
        lowered: the program.
        whole: wait for machine code. Otherwise return once memory is assigned; the compiler then keeps running, so the
            process should exit soon.

    Raises:
        JaxRuntimeError: the compiler failed for a reason other than memory.
        RuntimeError: this version of the compiler does not dump its memory assignment.
    """
    import jax

    with tempfile.TemporaryDirectory(prefix="podium-hlo-", ignore_cleanup_errors=True) as folder:
        made: list[jax.stages.Compiled] = []
        failed: list[Exception] = []

        def run() -> None:
            try:
                made.append(lowered.compile(compiler_options={"xla_dump_to": folder}))
            except jax.errors.JaxRuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive() and (whole or not _find(folder, ACCEPTED)):
            thread.join(POLL_S)
        refusal = parse_out_of_memory(str(failed[0])) if failed else None
        if failed and refusal is None:
            raise failed[0]
        text, report = _find(folder, TEXT), _find(folder, REPORT)
        total = _TOTAL.search(report.read_text()) if report else None
        if text is None or total is None:
            if refusal is None:
                raise RuntimeError("the compiler wrote no report of the memory that it assigned; plan with --fast")
            return TpuProgram(memory=Memory(peak=refusal.needed, code=0), refusal=refusal, whole=False)
        program, compiled = text.read_text(), made[0] if made else None  # the compiler may end at any moment
        analysis = compiled.memory_analysis() if compiled else None
        code = analysis.generated_code_size_in_bytes if analysis else CODE_PER_TEXT * len(program)
        memory = Memory(peak=int(total[1]), code=code)
        counted = counted_by_compiler(compiled) if compiled else None
        return TpuProgram(memory=memory, refusal=refusal, text=program, whole=bool(compiled), counted=counted)


def counted_by_compiler(compiled: "jax.stages.Compiled") -> Counted | None:
    """The compiler's count of a program's operations and bytes, each loop counted once; None if it makes no count."""
    found = compiled.cost_analysis()
    if not isinstance(found, Mapping) or "flops" not in found or "bytes accessed" not in found:
        return None
    return Counted(flops=float(found["flops"]), accessed=float(found["bytes accessed"]))


def _find(folder: str, ending: str) -> Path | None:
    """The file with this ending; the last one if the compiler started over."""
    return max(Path(folder).glob(f"*.{ending}"), default=None)
