"""`podium certify`: runs every check of a config's model and prints a table, or one JSON object."""

import json
import math
import time
from collections.abc import Callable

import jax
from rich.console import Console

from podium.certify.check_result import Certificate, Check
from podium.certify.checks import STAGES, skipped
from podium.certify.report import as_object, print_certificate
from podium.certify.small_run import make_subject
from podium.certify.subject import Subject
from podium.certify.updates import Updates
from podium.compiler import add_xla_flags, quick_flags
from podium.config.schema import Config
from podium.hosts.platform import prepare_platform
from podium.malloc import only_cpu
from podium.models.params import param_specs

CPU_DEVICES = 8
"""Number of devices that jax simulates on the CPU, to check programs that are split over devices."""


def certify(config: Config, *, full: bool, as_json: bool) -> int:
    """Check a config's model, print the result, and return the exit status: 0 if every check passes, else 1.

    Args:
        config: the run's settings.
        full: check the model itself with its real weights, instead of a tiny clone.
        as_json: print one JSON object instead of a table.

    Raises:
        ValueError: the model, recipe, loss or optimizer that the config names cannot be used.
    """
    if only_cpu() and not full:
        add_xla_flags(*quick_flags())
    prepare_platform()
    split_the_cpu()
    console = Console(stderr=as_json)
    subject = make_subject(config, full=full)
    with console.status("checking") as status:
        certificate = make_certificate(subject, full=full, progress=lambda name: status.update(f"checked: {name}"))
    if as_json:
        print(json.dumps(as_object(certificate), indent=2))
    else:
        print_certificate(certificate, console)
    return 0 if certificate.green else 1


def split_the_cpu() -> None:
    """Make jax simulate `CPU_DEVICES` devices on the CPU. Call it before jax's first computation."""
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)


def make_certificate(
    subject: Subject, *, full: bool = False, progress: Callable[[str], None] = lambda name: None
) -> Certificate:
    """Run all checks of a subject; `progress` is called with the name of each check as it finishes.

    An error after a red check ends the checks, since the same bug may have made arrays that cannot be compared. An
    error without a red check before it is raised.
    """
    start = time.perf_counter()
    updates = Updates(subject)
    found: list[Check] = []
    missing = list(skipped(subject))
    try:
        for check in (check for stage in STAGES for check in stage(updates)):
            found.append(check)
            progress(check.name)
    except Exception as error:
        if all(check.ok for check in found):
            raise
        missing.append(f"all checks after {found[-1].name}: {type(error).__name__} ({error}); fix the red ones first")
    return Certificate(
        config=subject.user.name or subject.user.model,
        subject=_in_words(subject, full),
        device=jax.devices()[0].device_kind,
        checks=tuple(found),
        skipped=tuple(missing),
        seconds=time.perf_counter() - start,
    )


def _in_words(subject: Subject, full: bool) -> str:
    size = sum(math.prod(spec.shape) for spec in param_specs(subject.decoder).values())
    what = "the weights" if full else "a tiny clone"
    return f"{what} of {subject.user.model} ({subject.decoder.model_type}, {size:,} parameters)"
