"""Whether this machine permits the sandbox, for tests that need one."""

import functools

import pytest

from podium.sandbox.runs import Sandbox, SandboxError


@functools.cache
def _refused() -> str:
    with Sandbox() as sandbox:
        try:
            sandbox.run("1")
        except SandboxError as error:
            return str(error)
    return ""


def need_sandbox() -> None:
    """Skip the test, with the reason, where namespaces are not permitted."""
    if reason := _refused():
        pytest.skip(reason)
