"""The sandbox by itself: programs, calls, limits, cleaning up, and the error on a machine that forbids it."""

import gc
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from processes import below, runs, wait_for
from sandboxes import need_sandbox
from typer.testing import CliRunner

from podium.cli import app
from podium.sandbox import check, kernel
from podium.sandbox.runs import MOUNT_POINTS, Ended, Limits, Sandbox, SandboxError
from podium.sandbox.values import read, written
from podium.sandbox.ways_out import way_to_python, ways_out

ROOT = Path(__file__).parents[2]
HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


@pytest.fixture
def sandbox():
    need_sandbox()
    with Sandbox(Limits(wall_s=60.0)) as sandbox:
        yield sandbox


def test_a_program_prints_reads_and_fails(sandbox: Sandbox):
    done = sandbox.run("name = input()\nprint('hello', name)\n1 / 0", "world\n")
    assert done.output.startswith("hello world\nTraceback")
    assert "1 / 0" in done.output
    assert (done.why, done.error) == (None, "ZeroDivisionError: division by zero")
    for code, status in (("3", 3), ("", 0), ("None", 0), ("True", 1), ("259", 3), ("'no'", 1)):
        ended = sandbox.run(f"import sys; sys.exit({code})")
        assert (ended.why, ended.error, ended.exit_status) == (None, "", status), code
    assert sandbox.run("raise SystemExit('no answer')").output == "no answer\n"
    assert sandbox.run("import os; os._exit(0)").why == "ended"


def test_a_program_may_open_its_streams_by_name(sandbox: Sandbox):
    copied = "import sys\nopen('/dev/stdout', 'w').write(open('/dev/stdin').read())"
    assert sandbox.run(copied, "1\n2\n").output == "1\n2\n"
    assert sandbox.run("print(open('/dev/fd/0').read(), file=open('/dev/stderr', 'w'))", "3").output == "3\n"
    assert sandbox.run("import subprocess\nsubprocess.run('cat /dev/stdin', shell=True)", "4").output == "4"


def test_a_run_without_output_ends_too(sandbox: Sandbox):
    with Sandbox(Limits(wall_s=0.5)) as quick:
        assert quick.run("import os, time; os.close(1); os.close(2); time.sleep(600)").why == "time"


def test_output_behind_an_answer_is_dropped(sandbox: Sandbox):
    forged = (
        "import sys, os\nnonce = sys._getframe(1).f_locals['self']._nonce\nos.write(1, (nonce + '{}\\nmore').encode())"
    )
    assert sandbox.run(forged + "\nimport time; time.sleep(600)").output == ""


def test_a_pipe_that_is_closed_is_an_exception_as_elsewhere(sandbox: Sandbox):
    assert "BrokenPipeError" in sandbox.run("import os\nr, w = os.pipe(); os.close(r); os.write(w, b'x')").error


def test_names_are_kept_within_a_run_and_gone_after_it(sandbox: Sandbox):
    with sandbox.open() as run:
        assert run.execute("x = 41", shown=True)[0] == ""
        assert run.execute("x + 1", shown=True)[0] == "42\n"
        assert run.execute("x + 1")[0] == ""
    with sandbox.open() as run:
        assert run.execute("x")[1] == {"error": "NameError: name 'x' is not defined"}


def test_functions_and_methods_are_called_with_plain_values(sandbox: Sandbox):
    with sandbox.open() as run:
        run.execute(
            "def f(a, b): print('x'); return (a, {b: {1, 2}})\nclass Solution:\n  def g(self, x): return [x, None]"
        )
        assert read(run.call("f", [written((1, 2)), "b"])["value"]) == ((1, 2), {"b": {1, 2}})
        assert run.call("g", [1.5])["value"] == [1.5, None]
        assert run.call("h", [])["error"].startswith("AttributeError")


def test_code_is_a_module_of_its_name(sandbox: Sandbox):
    code = (
        "from __future__ import annotations\nimport pickle, typing\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass A:\n  b: A | None = None\n"
        "print(__name__, pickle.loads(pickle.dumps(A())), typing.get_type_hints(A)['b'] == A | None)"
    )
    assert sandbox.run(code).output == "__main__ A(b=None) True\n"


def test_a_run_that_is_too_slow_ends_and_says_so(sandbox: Sandbox):
    with Sandbox(Limits(wall_s=0.2)) as quick, quick.open() as run:
        with pytest.raises(Ended) as ended:
            run.execute("print('begun')\nwhile True: pass")
        assert (ended.value.why, ended.value.output) == ("time", "begun\n")
    with Sandbox(Limits(wall_s=60.0, cpu_s=1)) as busy:
        assert busy.run("while True: pass").why == "time"


def test_runs_of_several_threads_go_on_beside_each_other(sandbox: Sandbox):
    found: dict[int, str] = {}

    def run(number: int) -> None:
        found[number] = sandbox.run(f"import time; time.sleep(0.05); print({number})").output

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"{number}\n" for number in range(8)}


def test_sets_have_the_same_order_in_every_sandbox(sandbox: Sandbox):
    code = "import random; print(set('sandbox'), random.random())"
    with Sandbox() as other:
        assert sandbox.run(code).output == other.run(code).output


def test_many_runs_leave_nothing(sandbox: Sandbox):
    """Files, mounts and processes are looked for by names that no other process of this machine uses."""

    def mounts() -> list[str]:
        found = (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines())
        return [path for path in found if path in MOUNT_POINTS]

    name = f"left-by-{os.getpid()}"
    gc.collect()  # what earlier tests have left may hold files
    descriptors, before = len(os.listdir("/proc/self/fd")), mounts()
    sandbox.run("1")
    assert sandbox._process is not None
    pid, held = sandbox._process.pid, len(os.listdir("/proc/self/fd"))
    wait_for(lambda: len(below(pid)) == 1)  # the zygote in its own namespace of processes
    first = below(pid)
    write = (
        f"for folder in ('.', '/tmp', '/dev/shm'):\n  try: open(f'{{folder}}/{name}', 'w')\n  except OSError: pass\n"
    )
    for number in range(100):
        assert sandbox.run(f"{write}print({number})").output == f"{number}\n"
    wait_for(lambda: below(pid) == first)
    assert len(os.listdir("/proc/self/fd")) <= held
    assert mounts() == before
    assert not any(Path(folder, name).exists() for folder in ("/tmp", "/dev/shm"))
    sandbox.close()
    assert not any(map(runs, first))
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_all_ends_with_the_process_that_asked():
    need_sandbox()
    code = (
        "import os, signal; from podium.sandbox.runs import *; s = Sandbox(Limits(wall_s=60)); r = s.begin();"
        "r.execute('import os\\nif os.fork() == 0:\\n  import time; time.sleep(600)');"
        "print(s._process.pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    pid = int(done.stdout)
    wait_for(lambda: not runs(pid))


def test_the_check_says_what_holds_and_what_is_missing(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch):
    number = len(check.PROBES)
    assert check.check(sandbox).endswith(f"seccomp, limits; {number} of {number} attacks failed")
    monkeypatch.setattr(check, "landlock_version", lambda: 0)
    assert "no Landlock (this kernel has none)" in check.check(sandbox)
    with Sandbox(without=["seccomp"]) as weak, pytest.raises(SandboxError, match="code in it opens a socket and makes"):
        check.check(weak)


def test_a_machine_without_namespaces_is_told_the_way_out():
    need_sandbox()
    code = "from podium.sandbox.runs import Sandbox; Sandbox().run('1')"
    none = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", none, sys.executable, code]
    done = subprocess.run(inside, cwd=ROOT, capture_output=True, text=True)
    if "unshare" in done.stderr.split(":")[0]:
        pytest.skip(done.stderr)
    assert "SandboxError: this machine permits no sandbox: " in done.stderr
    assert "user.max_user_namespaces is 0: permit them with `sysctl user.max_user_namespaces=" in done.stderr


def test_a_run_that_cannot_be_set_up_is_no_result_of_the_code(sandbox: Sandbox):
    with Sandbox(Limits(disk_mib=-1)) as broken, pytest.raises(SandboxError, match="could not be set up"):
        broken.run("print(1)")


def test_the_sandbox_needs_the_standard_library_alone():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import podium.sandbox.check, podium.sandbox.zygote;"
        "foreign = {name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names - {'podium', '__main__'};"
        "sys.exit(str(foreign) if foreign else 0)"
    )
    done = subprocess.run([sys.executable, "-S", "-s", "-P", "-c", code, str(ROOT)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_of_system_calls_are_the_kernels(machine: str):
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    known["newfstatat"] = known.get("newfstatat") or known["fstatat"]
    place = 1 + list(kernel.MACHINES).index(machine)
    rows = [row.split(":") for table in (kernel.ALLOWED, kernel.PARTLY, kernel.OURS) for row in table.split()]
    ours = {row[0]: row[place] for row in rows}
    missing = {name for name, number in ours.items() if number == "-"}
    assert {name: number for name, number in ours.items() if name not in missing} == {
        name: known[name] for name in ours if name not in missing
    }
    assert missing.isdisjoint(known)


@pytest.mark.parametrize(
    "value", [1, 1.5, True, None, "x", [1], (1, [2]), {"a": (1,)}, {1, 2}, frozenset("a"), {(1, 2): 3}]
)
def test_values_come_back_as_they_were(value: object):
    again = read(written(value))
    assert (again, type(again)) == (value, type(value))


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        ([], None, "cannot be read: [Errno 2]"),
        ([], b"\xff", "cannot be read: 'utf-8' codec"),
        (["--wall-s", "inf"], b"1", "Invalid value for '--wall-s'"),
    ],
    ids=["no file", "no text", "no limit"],
)
def test_a_command_that_cannot_run_a_file_says_why(words, content, said, tmp_path):
    file = tmp_path / "code.py"
    if content is not None:
        file.write_bytes(content)
    done = CliRunner().invoke(app, ["sandbox", "run", *words, str(file)])
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("1", 0), ("import sys; sys.exit(3)", 3), ("exit(4)", 4), ("quit()", 0), ("1 / 0", 1),
        ("import os; os._exit(3)", 3), ("import os; os.abort()", 134), ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os\nif os.fork() == 0: os._exit(5)\nos.wait()", 0), ("import os\nif os.fork(): os._exit(6)", 6),
        ("import atexit; atexit.register(print, 'bye'); exit(7)", 7), ("import os; print('x'); os._exit(0)", 0),
    ],
)  # fmt: skip
def test_the_command_exits_as_the_file_does(code, status, tmp_path):
    need_sandbox()
    file = tmp_path / "code.py"
    file.write_text(code)
    assert CliRunner().invoke(app, ["sandbox", "run", str(file)], input="").exit_code == status


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--wall-s", "0.5"], "while True: pass", "it took more than 0.5 s (--wall-s)"),
        ([], "print('x' * 2_000_000)", "it took more than 1,048,576 bytes of output"),
    ],
)
def test_the_command_names_the_limit_that_ended_a_file(words, code, said, tmp_path):
    need_sandbox()
    (tmp_path / "code.py").write_text(code)
    done = CliRunner().invoke(app, ["sandbox", "run", *words, str(tmp_path / "code.py")], input="")
    assert done.exit_code == 1
    assert said in done.output


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path):
    need_sandbox()
    file = tmp_path / "code.py"
    file.write_bytes(b"\xef\xbb\xbfprint(1)")
    done = CliRunner().invoke(app, ["sandbox", "run", str(file)], input="")
    assert (done.exit_code, done.output) == (0, "1\n")


def test_what_code_writes_to_a_terminal_is_shown_and_not_obeyed(tmp_path):
    need_sandbox()
    (tmp_path / "code.py").write_text("print('\\x1b[2Jred\\x1b]0;title\\x07 \\u202e\\tand so on')")
    command = [sys.executable, "-m", "podium.cli", "sandbox", "run", str(tmp_path / "code.py")]
    ours, theirs = os.openpty()
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=theirs, cwd=ROOT, check=True)
    os.close(theirs)
    with open(ours, "rb") as terminal:
        said = terminal.read1(4096).decode()
    assert said.rstrip() == "\\x1b[2Jred\\x1b]0;title\\x07 \\u202e\tand so on"
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, cwd=ROOT, check=True)
    assert done.stdout.startswith(b"\x1b[2Jred")  # into a file or a pipe it goes as it is


def test_a_program_ends_as_in_the_interpreter(sandbox: Sandbox):
    hooks = "import atexit\natexit.register(print, 'hook')\nprint('main')"
    threads = (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
        "print('main')"
    )
    replaced = (
        "import io, sys, atexit\nkept = sys.stdout = io.StringIO()\n"
        "atexit.register(lambda: sys.__stdout__.write(kept.getvalue()))\nprint('kept')"
    )
    forked = "import os\nif os.fork() == 0: print('child')\nelse:\n  os.wait(); print('parent')"
    left_open = "file = open(1, 'w')\nfile.write('left open')"
    for code, output in (
        (hooks, "main\nhook\n"), (threads, "main\nthread\n"), (replaced, "kept\n"), (forked, "child\nparent\n"),
        (left_open, "left open"),
    ):  # fmt: skip
        assert sandbox.run(code, program=True).output == output
    assert sandbox.run(f"{hooks}\nimport atexit; atexit.register(exit)", program=True).why is None


def test_what_is_printed_is_written_in_large_parts_as_into_any_pipe(sandbox: Sandbox):
    assert sandbox.run("import os\nprint('printed')\nos.write(1, b'written ')").output == "written printed\n"


def test_what_was_printed_before_a_limit_is_output(sandbox: Sandbox):
    for code in ("while True: pass", "import time; time.sleep(600)"):
        with Sandbox(Limits(wall_s=0.5, cpu_s=0.2)) as quick:
            result = quick.run(f"print('begun')\n{code}")
            assert (result.why, result.output) == ("time", "begun\n")


def test_cpu_time_is_counted_for_each_request_and_over_all_processes(sandbox: Sandbox):
    busy = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    with Sandbox(Limits(wall_s=60.0, cpu_s=0.4)) as limited, limited.open() as run:
        for _ in range(4):
            assert run.execute(busy)[1] == {}
        assert run.spent_s >= 0.7
        run.execute("import time; time.sleep(0.8)")
        with pytest.raises(Ended, match="time"):
            run.execute("import subprocess; subprocess.run('while :; do :; done', shell=True)")
    with Sandbox(Limits(wall_s=60.0, cpu_s=30, life_cpu_s=1)) as limited:
        assert limited.run("while True: pass").why == "time"


def test_names_of_the_interpreter_are_there(sandbox: Sandbox):
    assert (
        sandbox.run("print(*[callable(each) for each in (exit, quit, help, copyright, credits, license)])").output
        == ("True " * 6).strip() + "\n"
    )
    assert sandbox.run("import sys; print(sys.argv[1:], __name__, bool(__file__))").output == "[] __main__ True\n"


STANDARD_LIBRARY = [
    "import shutil; shutil.copy2('a', 'b'); shutil.copystat('a', 'b'); shutil.move('b', 'c')",
    "import shutil; shutil.copytree('.', 'd')",
    "import tempfile; tempfile.TemporaryDirectory(); tempfile.NamedTemporaryFile(); tempfile.mkdtemp()",
    "import os; os.utime('a'); os.chmod('a', 0o600); os.link('a', 'l'); os.symlink('a', 's'); os.truncate('a', 1)",
    "import sqlite3; c = sqlite3.connect('x.db'); c.execute('create table t(a)'); c.commit()",
    "import zipfile, tarfile; zipfile.ZipFile('z.zip', 'w').write('a'); tarfile.open('t.tgz', 'w:gz').add('a')",
    "from concurrent.futures import ThreadPoolExecutor; list(ThreadPoolExecutor(4).map(abs, [1]))",
    "import subprocess; subprocess.run('echo hi | cat', shell=True, check=True)",
    "import signal; signal.signal(signal.SIGALRM, print); signal.alarm(1); signal.setitimer(signal.ITIMER_REAL, 0)",
    "import resource; resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))",
    "import threading; threading.stack_size(1 << 28); t = threading.Thread(target=print); t.start(); t.join()",
    "import sys; sys.setrecursionlimit(10**6); f = lambda n: n and f(n - 1); f(20_000)",
    "import uuid, getpass, platform, locale; uuid.uuid1(); getpass.getuser(); platform.platform(); locale.getlocale()",
    "import fcntl; fcntl.flock(open('a'), fcntl.LOCK_EX); import mmap; mmap.mmap(-1, 4096)",
]


@pytest.mark.parametrize("code", STANDARD_LIBRARY)
def test_the_standard_library_works(code: str, sandbox: Sandbox):
    result = sandbox.run(f"open('a', 'w').write('x')\n{code}")
    assert (result.error, result.why) == ("", None), result.output


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"sys/kernel/apparmor_restrict_unprivileged_userns": "1\n"},
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ({"sys/user/max_user_namespaces": "0"}, "sysctl user.max_user_namespaces=15000"),
        ({"sys/kernel/unprivileged_userns_clone": "0"}, "sysctl kernel.unprivileged_userns_clone=1"),
        ({"self/status": "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n"}, "seccomp=unconfined"),
        ({"self/attr/current": "docker-default (enforce)\n"}, "is active, docker-default (enforce): in a container"),
        ({"self/attr/current": "unconfined\n", "self/status": "Seccomp:\t0\n"}, "no setting that forbids it was found"),
        ({}, "no setting that forbids it was found"),
    ],
)
def test_advice_is_about_what_this_machine_forbids(files: dict[str, str], says: str, tmp_path: Path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    way = ways_out(str(tmp_path))
    assert says in way
    assert ("sysctl" in way) == ("sysctl" in says)


def test_advice_for_a_python_that_the_sandbox_may_not_read_is_about_python():
    assert "may not read" not in ways_out()
    for word in ("/opt", "install Python"):
        assert word in way_to_python()
    assert "sysctl" not in way_to_python()
