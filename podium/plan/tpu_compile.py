"""A TPU program, compiled as far as its memory is assigned, or to its end.

The compiler optimises a program, schedules it, gives every array its place in memory, and refuses what does not fit:
seconds. Then it generates machine code: minutes, of which a plan needs nothing but the size. It writes down what it
has assigned, for programs that it refuses too, so neither takes an option that changes what is compiled.
"""

import dataclasses
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

from podium.hlo.memory import Memory, OutOfMemory, parse_out_of_memory

POLL_S = 0.05
CODE_PER_TEXT = 30
"""Bytes of code for each byte of a program's text, at most: libtpu 0.0.42.1 made 28 for an update, 6 for a decode."""
# What the compiler writes into the folder of `xla_dump_to`, behind the program's name.
TEXT, REPORT = "after_optimizations.txt", "after_optimizations-memory-usage-report.txt"
ACCEPTED = "after_optimizations_after_buffer_assignment.txt"  # from libtpu 0.0.42 on only where it was not refused
_TOTAL = re.compile(r"^(?:Memory Space: default \(color=0\)\nTotal bytes|Total bytes used): (\d+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuProgram:
    """What the compiler made of a program."""

    memory: Memory  # arguments and all that the program allocates, with what is lost between arrays
    refusal: OutOfMemory | None  # where it does not fit
    text: str  # optimised; empty only where a refusal came before there was one
    whole: bool  # whether code was generated


def compile_tpu(lowered: Any, *, whole: bool) -> TpuProgram:
    """Compile a lowered program for its TPU.

    Args:
        lowered: `jax.stages.Lowered`.
        whole: wait for the code; otherwise the compiler is left to itself when memory is assigned, and the process
            should end soon.

    Raises:
        JaxRuntimeError: the compiler failed for another reason than memory.
        RuntimeError: this version of the compiler does not write down what it assigns.
    """
    import jax

    with tempfile.TemporaryDirectory(prefix="podium-hlo-", ignore_cleanup_errors=True) as folder:
        made: list[Any] = []
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
            return TpuProgram(memory=Memory(peak=refusal.needed, code=0), refusal=refusal, text="", whole=False)
        program = text.read_text()
        code = made[0].memory_analysis().generated_code_size_in_bytes if made else CODE_PER_TEXT * len(program)
        memory = Memory(peak=int(total[1]), code=code)
        return TpuProgram(memory=memory, refusal=refusal, text=program, whole=bool(made))


def _find(folder: str, ending: str) -> Path | None:
    """The file with that ending; the last one, where the compiler began again."""
    return max(Path(folder).glob(f"*.{ending}"), default=None)
