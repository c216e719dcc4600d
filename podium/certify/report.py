"""Prints a certificate: a table of differences with a verdict, or the JSON object of `podium certify --json`."""

import math

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from podium.certify.check_result import Certificate, Check


def as_object(certificate: Certificate) -> dict[str, object]:
    """The object that `--json` prints. Its keys are stable across versions."""
    return {
        "green": certificate.green,
        "checks": [
            {
                "name": check.name,
                "difference": check.difference if math.isfinite(check.difference) else None,
                "bar": check.bar,
                "ok": check.ok,
                "claim": check.claim,
            }
            for check in certificate.checks
        ],
        "causes": [check.name for check in certificate.causes],
        "skipped": list(certificate.skipped),
        "config": certificate.config,
        "subject": certificate.subject,
        "device": certificate.device,
        "seconds": round(certificate.seconds, 1),
    }


def print_certificate(certificate: Certificate, console: Console) -> None:
    """Print the table of checks, the skipped checks, and the verdict."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=None)
    table.add_column("check", no_wrap=True)
    table.add_column("difference", justify="right", no_wrap=True)
    table.add_column("bar", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what a green check means", overflow="fold")
    causes = {check.name for check in certificate.causes}
    for check in certificate.checks:
        style = "" if check.ok else "bold red" if check.name in causes else "red"
        mark = "ok" if check.ok else "RED" if check.name in causes else "red"
        cells = (check.name, _number(check.difference), _number(check.bar), mark, check.claim)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    console.print(table)
    for line in certificate.skipped:
        console.print(f"not checked: {line}")
    console.print(_verdict(certificate))


def _verdict(certificate: Certificate) -> Text:
    where = f"{certificate.subject} on {certificate.device}, {certificate.seconds:.0f} s"
    if certificate.green:
        return Text(f"green: {len(certificate.checks)} checks, {where}", style="bold green")
    red = [check for check in certificate.checks if not check.ok]
    text = Text(f"red: {len(red)} of {len(certificate.checks)} checks, {where}", style="bold red")
    for check in certificate.causes:
        text.append(f"\n  {check.name}: it is not true that {_sentence(check)}", style="not bold")
    follows = [check.name for check in red if check not in certificate.causes]
    if follows:
        text.append(f"\n  red as a consequence: {', '.join(follows)}", style="not bold")
    return text


def _sentence(check: Check) -> str:
    return f"{check.claim} (off by {_number(check.difference)}, the bar is {_number(check.bar)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.1e}" if value < 0.01 else f"{value:.3g}"
