"""Attacks on the sandbox: none gets through, whoever starts it; and what each layer holds when another is missing."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attacks
import pytest
from sandboxes import need_sandbox

from podium.sandbox.kernel import landlock_version
from podium.sandbox.runs import Limits, Sandbox
from podium.sandbox.values import read

ROOT = Path(__file__).parents[2]
SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534
HELD_BY_SECCOMP = ("14 ", "17 ", "18 ", "19 ", "22 ", "26 ", "27 ", "own 3 ", "own 4 ", "own 7 ")
"""Attacks within the run's own spaces, of which some get through where the filter of system calls is left out."""
ALL = attacks.attacks(attacks.World("/secret", 1, 1))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[attacks.World]:
    need_sandbox()
    planted = attacks.Planted(str(tmp_path_factory.mktemp("planted")))
    yield planted.world
    planted.close()


@pytest.fixture(scope="module")
def sandbox(world: attacks.World) -> Iterator[Sandbox]:
    with Sandbox(attacks.LIMITS) as sandbox:
        yield sandbox


def test_every_attack_of_the_specification_has_a_program():
    numbers = {name.split()[0] for name in ALL if not name.startswith("own")}
    assert numbers == {str(number) for number in range(1, 45)} - {"39", "40"}  # tests of sqlite and calculator
    assert sum(name.startswith("own") for name in ALL) == 10


@pytest.mark.parametrize("name", [name for name in ALL if name not in attacks.SLOW])
def test_an_attack_fails(name: str, world: attacks.World, sandbox: Sandbox):
    result = sandbox.run(attacks.attacks(world)[name])
    assert not attacks.through(name, result), result
    assert sandbox.run("print(1)").output == "1\n"


@pytest.mark.parametrize("name", ["10 memory of many processes", "11 sleep"])
def test_an_attack_is_ended_by_a_limit(name: str, world: attacks.World):
    wall_s = 0.3 if name == "11 sleep" else 60.0
    with Sandbox(Limits(wall_s=wall_s, memory_mib=400)) as sandbox:
        result = sandbox.run(attacks.attacks(world)[name])
    assert not attacks.through(name, result), result


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(attacks.SLOW - {"11 sleep"}))  # that one is above, with a shorter limit
def test_a_slow_attack_fails(name: str, world: attacks.World, sandbox: Sandbox):
    result = sandbox.run(attacks.attacks(world)[name])
    assert not attacks.through(name, result), result


def test_a_symbolic_link_is_gone_with_its_run(sandbox: Sandbox):
    assert sandbox.run("import os; os.symlink('/etc/passwd', '/box/answer.txt')").error == ""
    assert sandbox.run("import os; print(os.listdir('/box'))").output == "[]\n"


def test_a_value_that_is_not_plain_is_an_error(sandbox: Sandbox):
    with sandbox.open() as run:
        run.execute("class P:\n  def __reduce__(self): return (print, (1,))\ndef f(): return P()\ndef g(): return P")
        assert "cannot be sent" in run.call("f", [])["error"]
        assert "cannot be sent" in run.call("g", [])["error"]


def script(
    *arguments: str, python: str = sys.executable, user: int | None = None, within: tuple[str, ...] = ()
) -> dict[str, object]:
    """What the attacks as a script say; `within`: a command that starts it."""
    done = subprocess.run(
        [*within, python, "-B", str(ROOT / "tests/sandbox/attacks.py"), *arguments],
        env={"PYTHONPATH": str(ROOT)},
        cwd="/",
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        capture_output=True,
        text=True,
    )
    if "SandboxError: this machine permits no sandbox" in done.stderr:  # to this user
        pytest.skip(done.stderr.rpartition("SandboxError: ")[2])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def need_system_python() -> None:
    """Skip the test unless user 65534 can run a Python of the system on this checkout."""
    if os.getuid() != 0:
        pytest.skip("only root becomes another user")
    code = "import sys, podium.sandbox.zygote; sys.exit(sys.version_info < (3, 11))"
    asked = {"env": {"PYTHONPATH": str(ROOT)}, "user": NOBODY, "group": NOBODY, "cwd": "/"}
    if not Path(SYSTEM_PYTHON).exists() or subprocess.run([SYSTEM_PYTHON, "-c", code], **asked).returncode:
        pytest.skip(f"{SYSTEM_PYTHON} is missing, older than 3.11, or may not read this checkout as user {NOBODY}")


@pytest.mark.parametrize("speed", ["quick", pytest.param("slow", marks=pytest.mark.long)])
def test_attacks_fail_as_another_user(speed: str):
    need_sandbox()
    need_system_python()
    assert script(speed, python=SYSTEM_PYTHON, user=NOBODY) == {"user": NOBODY, "through": []}


@pytest.mark.parametrize("speed", ["quick", pytest.param("slow", marks=pytest.mark.long)])
def test_attacks_fail_as_root_that_may_not_mount(speed: str):
    """As in a container, whose root has no CAP_SYS_ADMIN: the sandbox is made by user 65534 from the start."""
    need_sandbox()
    need_system_python()
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    within = ("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-all")
    assert script(speed, python=SYSTEM_PYTHON, within=within) == {"user": 0, "through": []}


MASKS = (
    "set -e; mount --make-rprivate /; mount -t tmpfs -o ro tmpfs /proc/acpi; mount --bind /proc/sys /proc/sys;"
    ' mount -o remount,bind,ro /proc/sys; exec "$@"'
)
"""Masks parts of /proc as container engines do; the kernel then refuses a new one."""
MASKED = ("unshare", "--mount", "sh", "-c", MASKS, "sh")
MAY_NOT_MOUNT = ("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-all")
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


def need_masks() -> None:
    """Skip the test where /proc cannot be masked."""
    if os.getuid() != 0 or subprocess.run([*MASKED, "true"], capture_output=True).returncode:
        pytest.skip("only root may mask parts of /proc")


@pytest.mark.parametrize("speed", ["quick", pytest.param("slow", marks=pytest.mark.long)])
@pytest.mark.parametrize("layer", ["all", "landlock"])
def test_attacks_fail_where_proc_is_masked(speed: str, layer: str):
    need_sandbox()
    need_masks()
    assert script(speed, layer, within=MASKED)["through"] == []


@pytest.mark.parametrize("user", [MAY_NOT_MOUNT, AS_NOBODY], ids=["root without rights", "nobody"])
def test_attacks_fail_where_proc_is_masked_for_other_users(user: tuple[str, ...]):
    need_sandbox()
    need_masks()
    need_system_python()
    assert script("quick", python=SYSTEM_PYTHON, within=(*MASKED, *user))["through"] == []


def test_memory_is_watched_and_the_check_says_so_where_proc_is_masked():
    need_sandbox()
    need_masks()
    code = (
        "from podium.sandbox.check import check_machine; from podium.sandbox.runs import *; print(check_machine())\n"
        "many = 'import os, time\\nfor _ in range(4):\\n  if os.fork() == 0:\\n    x = bytearray(80 << 20);"
        " x[::4096] = bytes(len(x[::4096])); time.sleep(60)\\ntime.sleep(60)'\n"
        "with Sandbox(Limits(wall_s=60, memory_mib=200)) as sandbox: print(sandbox.run(many).why)\n"
        "with Sandbox(Limits(wall_s=60, cpu_s=0.2)) as sandbox: print(sandbox.run('while True: pass').why)\n"
        "with Sandbox() as sandbox: print(sandbox.run('import os; print(os.listdir(\"/proc\"))').output)"
    )
    done = subprocess.run([*MASKED, sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("sandbox: namespaces without /proc (this machine's is masked), ")
    assert done.stdout.split("\n")[1:4] == ["memory", "time", "[]"]


@pytest.mark.skipif(not sys.base_prefix.startswith("/root"), reason="this Python is not below /root")
def test_a_python_that_only_root_may_read_is_named_with_its_way_out():
    need_sandbox()
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root without rights runs as another user")
    command = [*MAY_NOT_MOUNT, sys.executable, "-m", "podium.cli", "sandbox", "check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"user {NOBODY} may not read {sys.base_prefix}" in done.stderr
    assert "install Python and Podium where all users may read them" in done.stderr
    assert "CAP_SYS_ADMIN" in done.stderr
    assert "sysctl" not in done.stderr


@pytest.mark.parametrize("speed", ["quick", pytest.param("slow", marks=pytest.mark.long)])
def test_attacks_fail_without_landlock(speed: str):
    need_sandbox()
    assert script(speed, "landlock")["through"] == []


@pytest.mark.parametrize("speed", ["quick", pytest.param("slow", marks=pytest.mark.long)])
def test_without_seccomp_nothing_leaves_the_spaces_of_the_run(speed: str):
    need_sandbox()
    if not landlock_version():
        pytest.skip("this kernel has no Landlock")
    through = script(speed, "seccomp")["through"]
    assert isinstance(through, list)
    assert through, "the filter holds nothing that other layers do not"
    assert [each for each in through if not each.startswith(HELD_BY_SECCOMP)] == []


@pytest.mark.parametrize("forged", [{"a": 1, "b": 2}, {"code": []}, {}, {"tuple": 3}, {"dict": [1]}])
def test_what_is_no_value_is_not_read(forged: object):
    with pytest.raises((ValueError, TypeError, LookupError)):
        read(forged)
