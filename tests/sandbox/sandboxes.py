"""Whether this machine permits the sandbox, for tests that need one."""

import functools

import pytest

from podium.sandbox.runs import Sandbox, SandboxError

FORBIDDEN = ("this machine permits no sandbox", "[Errno 1]", "[Errno 13]", "[Errno 28]")
"""What errors say where a kernel or a container forbids namespaces; any other error is a fault of ours."""


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
        assert any(text in reason for text in FORBIDDEN), reason
        pytest.skip(reason)
