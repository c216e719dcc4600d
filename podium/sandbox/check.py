"""Checks that the sandbox holds on this machine, by attacks that must fail."""

import os

from podium.sandbox.kernel import MACHINES, OURS, landlock_version, numbers
from podium.sandbox.runs import Sandbox, SandboxError

UNSHARE = numbers(OURS)["unshare"] if os.uname().machine in MACHINES else 0
PROBES = {
    "reads a file of the machine": "open('/etc/passwd').read()",
    "sees processes of others": "import os; assert len([name for name in os.listdir('/proc') if name.isdigit()]) > 2",
    "opens a socket": "import socket; socket.socket()",
    "writes outside of /box": "open('/usr/lib/x', 'w')",
    "makes namespaces": f"import ctypes; assert ctypes.CDLL(None).syscall({UNSHARE}, 1 << 28) == 0",
    "has capabilities": "assert any(int(line[8:], 16) for line in open('/proc/self/status') if line[:3] == 'Cap')",
    "fills the disk": "open('/box/x', 'wb').write(bytes(1 << 30))",
}
"""What sandboxed code must not be able to do -> code that tries it, and raises if it fails."""


def check(sandbox: Sandbox) -> str:
    """What holds on this machine, in one line.

    Raises SandboxError if the sandbox cannot be made, or an attack gets through.
    """
    first = sandbox.run("print('alive')")
    if first.output != "alive\n":
        raise SandboxError(f"code does not run in the sandbox: {first}")
    through = [name for name, code in PROBES.items() if not (result := sandbox.run(code)).error and not result.why]
    if through:
        raise SandboxError(f"the sandbox does not hold: code in it {' and '.join(through)}")
    version = landlock_version()
    landlock = f"Landlock {version}" if version else "no Landlock (this kernel has none)"
    proc = "" if sandbox.has_proc else " without /proc (this machine's is masked)"
    return f"sandbox: namespaces{proc}, {landlock}, seccomp, limits; {len(PROBES)} of {len(PROBES)} attacks failed"


def check_machine() -> str:
    """Print which layers of the sandbox work on this machine. Raises ValueError if no sandbox can be made."""
    with Sandbox() as sandbox:
        return check(sandbox)
