"""Attacks that must fail: programs that print LEAK where they get through, and what must hold after them.

Standard library alone: run as a script, by a Python and a user that need not be the tests' own, it prints as JSON which
attacks got through (`test_attacks.py` does so as another user, and with layers left out).
"""

import json
import os
import socket
import sys
import tempfile
import textwrap
from typing import NamedTuple

from podium.sandbox.runs import Limits, Result, Sandbox

SECRET = "hunter2"
CALL = "import ctypes; call = ctypes.CDLL(None, use_errno=True).syscall; call.restype = ctypes.c_long\n"


class World(NamedTuple):
    """What of the machine the attacks aim at."""

    file: str
    port: int
    pid: int


def tried(body: str) -> str:
    """A program in which an exception is a failed attack."""
    return f"try:\n{textwrap.indent(body, '  ')}\nexcept BaseException as error: print('no', type(error).__name__)\n"


def refused(calls: str) -> str:
    """A program in which none of these system calls may succeed: (number, arguments), one expression."""
    return CALL + f"for number, *given in {calls}:\n  if call(number, *given) >= 0: print('LEAK', number)\n"


def attacks(world: World) -> dict[str, str]:
    """The attacks by name: 1 to 44 as the specification counts them (39 and 40 are of other tools), and ten more."""
    x86 = os.uname().machine == "x86_64"
    numbers = X86 if x86 else ARM
    connect = (
        "import socket\nfor {v} in {all}:\n  s = socket.socket({kind}); s.settimeout(1); s.connect({v}); print('LEAK')"
    )
    read = "for path in {}:\n  try: print('LEAK', open(path, 'rb').read(9))\n  except OSError: pass"
    return {
        "1 TCP to a public address": tried(connect.format(v="a", all="[('8.8.8.8', 53)]", kind="")),
        "2 TCP to loopback": tried(connect.format(v="a", all=f"[('127.0.0.1', {world.port})]", kind="")),
        "2 UDP": tried("import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9)); print('LEAK')"),
        "2 unix and abstract sockets": "import socket\n"
        + "".join(
            tried(f"s = socket.socket(socket.AF_UNIX); s.connect({name!r}); print('LEAK')")
            for name in (f"\0{SECRET}-{world.pid}", f"{world.file}.socket")
        ),
        "3 metadata server": tried(connect.format(v="a", all="[('169.254.169.254', 80), ('127.0.0.1', 8466)]", kind="")),
        "4 keys and tokens": read.format(
            [f"{home}/{name}" for home in ("/root", "/home/user", "/box")
             for name in (".config/gcloud/credentials.db", ".cache/huggingface/token", ".netrc", ".ssh/id_rsa")]
        ),
        "5 the trainer's environment": "import os\n"
        + read.format(f"('/proc/{world.pid}/environ', f'/proc/{{os.getppid()}}/environ', '/proc/1/environ')")
        + f"\nprint('LEAK' if {SECRET[:4]!r} + {SECRET[4:]!r} in str(os.environ) else 'no')",
        "6 files of the machine": read.format([world.file, "/etc/passwd", "/etc/shadow", "/box/../etc/hostname"]),
        "7 write outside of /box": "for path in ('/x', '/usr/x', '/usr/lib/x', '/proc/x', '/dev/x', '/etc/x'):\n"
        "  try: open(path, 'w'); print('LEAK', path)\n  except OSError: pass",
        "7 fill the disk": "import os\nn = 0\ntry:\n  for part in range(40):\n    with open(f'/box/{part}', 'wb') as f:\n"
        "      f.write(bytes(1 << 20)); n += 1\nexcept OSError: pass\nprint('LEAK' if n > 32 else n)",
        "8 many files": "n = 0\ntry:\n  while n < 9000: open(f'/box/{n}', 'w').close(); n += 1\nexcept OSError: pass\n"
        "print('LEAK' if n > 5000 else n)",
        "9 fork bomb": "import os, time\nn = 0\ntry:\n  while n < 400:\n    if os.fork() == 0: time.sleep(9); os._exit(0)\n"
        "    n += 1\nexcept OSError: pass\nprint('LEAK' if n > 50 else n, flush=True); os._exit(0)",
        "9 threads": "import os, threading, time\nn = 0\ntry:\n  while n < 400:\n"
        "    threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); n += 1\nexcept RuntimeError: pass\n"
        "print('LEAK' if n > 50 else n, flush=True); os._exit(0)",
        "10 allocate 64 GiB": tried("x = bytearray(64 << 30); print('LEAK')"),
        "10 grow": tried("x = []\nwhile len(x) < 2000: x.append(bytearray(1 << 20))\nprint('LEAK')"),
        "10 a sparse file": tried("f = open('/box/x', 'wb'); f.truncate(1 << 40); print('LEAK')"),
        "10 memory of many processes": "import os, time\nfor _ in range(8):\n  if os.fork() == 0:\n"
        "    x = bytearray(100 << 20); x[::4096] = bytes(len(x[::4096])); time.sleep(9); os._exit(0)\n"
        "time.sleep(9); print('LEAK')",
        "11 a busy loop that ignores signals": "import signal\nfor n in (15, 24): signal.signal(n, signal.SIG_IGN)\n"
        "while True: pass",
        "11 sleep": "import time; time.sleep(60); print('LEAK')",
        "11 a regular expression": "import re; re.match('(a+)+$', 'a' * 64 + 'b'); print('LEAK')",
        "12 endless output": "while True: print('A' * 100000, end='')",
        "12 what is no text": "import os; os.write(1, b'\\xff\\xfe\\x1b[2J'); print('fine')",
        "13 deep recursion": "import sys; sys.setrecursionlimit(10**9)\nf = lambda n: f(n + 1)\nf(0); print('LEAK')",
        "14 system calls by number": refused(numbers["forbidden"]),
        "14 system calls of another table": (
            CALL + "if call(0x40000000 | 39) > 0: print('LEAK')" if x86 else "print('no other table')"
        ),
        "15 os by subclasses": tried(
            "for c in ().__class__.__base__.__subclasses__():\n"
            "  g = getattr(c.__init__, '__globals__', {})\n  if 'listdir' in g: print('LEAK' if g['listdir']('/etc') else '')"
        ),
        "16 import again": tried("import sys; sys.modules.clear(); import posix; posix.open('/etc/passwd', 0); print('LEAK')"),
        "17 shared memory and queues": refused(numbers["ipc"])
        + tried("open('/dev/shm/x', 'w'); print('LEAK')"),
        "18 io_uring, userfaultfd, bpf, perf": refused(numbers["kernel"]),
        "19 keyring": refused(numbers["keys"]),
        "20 a pickle as a value": "class P:\n  def __reduce__(self): return (print, ('LEAK',))\nprint(type(P()).__name__)",
        "21 programs that make root": "import subprocess\nfor a in (['/bin/su', '-c', 'id'], ['/usr/bin/sudo', 'id'],"
        " ['/bin/mount', '-t', 'tmpfs', 'x', '/box']):\n"
        "  try:\n    if subprocess.run(a, capture_output=True, stdin=0, timeout=2).returncode == 0: print('LEAK', a)\n"
        "  except Exception: pass\n" + tried("import os; os.setuid(0); print('LEAK')"),
        "22 core dumps": tried("import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); print('LEAK')")
        + tried("open('/proc/sys/kernel/core_pattern', 'w').write('|/box/x'); print('LEAK')"),
        "23 a link for a collector": "import os; os.symlink('/etc/passwd', '/box/answer.txt'); os.chmod('/box', 0o777)",
        "24 other roots": read.format(
            "[f'/proc/{process}/{place}/etc/passwd' for process in ('1', 'self') for place in ('root', 'cwd')]"
        )
        + "\n" + refused(numbers["handles"]),
        "25 the kernel's settings": "for path in ('/proc/sys/kernel/hostname', '/sys/x', '/dev/mem', '/dev/kmsg',"
        " '/proc/sysrq-trigger', '/proc/1/oom_score_adj'):\n"
        "  try: open(path, 'r+').write('1'); print('LEAK', path)\n  except OSError: pass",
        "26 mounts and namespaces": refused(numbers["mounts"]),
        "27 trace and write another process": refused(numbers["trace"].replace("PID", str(world.pid)))
        + tried("open('/proc/1/mem', 'r+b'); print('LEAK')"),
        "28 inherited descriptors": "import os\nfor fd in range(4, 1024):\n"
        "  try: os.fstat(fd); print('LEAK', fd)\n  except OSError: pass",
        "29 signals": f"import os\nfor pid in ({world.pid}, {os.getppid()}):\n"
        "  try: os.kill(pid, 9); print('LEAK', pid)\n  except OSError: pass\n"
        "for pid in (1, -1):\n  try: os.kill(pid, 9)\n  except OSError: pass\nprint('alive')",
        "30 a daemon": "import os, time\nif os.fork() == 0:\n  os.setsid()\n"
        "  if os.fork() == 0: time.sleep(60)\n  os._exit(0)\nprint('done')",
        "31 an early exit": "import os; os._exit(0); print('LEAK')",
        "32 hooks at the end": "import atexit, gc, sys\natexit.register(print, 'LEAK'); sys.settrace(lambda *a: None)\n"
        "gc.callbacks.append(lambda *a: None)",
        "33 closed output": "import os, sys; sys.stdout.close(); os.close(1)",
        "34 values that are equal to all": "class E(int):\n  def __eq__(self, o): return True\nprint(E(1) == 2)",
        "35 files that python would import": tried("open('/usr/lib/sitecustomize.py', 'w'); print('LEAK')"),
        "36 objects of the trainer": "import gc, sys\nfound = ('hun' + 'ter2').encode()\n"
        "for each in gc.get_objects():\n  if type(each) is dict and found.decode() in str(list(each.values()))[:99999]"
        " and each is not globals(): print('LEAK')\n"
        "print('LEAK' if {'podium.tasks', 'podium.sandbox.runs', 'jax'} & set(sys.modules) else 'no')",
        "37 code that cannot be read": "def f(:\n",
        "38 tests in caches and repositories": "import glob\nfound = [p for p in glob.glob('/**/*podium*', recursive=True)"
        " + glob.glob('/**/.git', recursive=True) + glob.glob('/usr/lib/python*/*-packages/*') + glob.glob('/*/*/*/*/lib/"
        "python*/site-packages/*')]\nprint('LEAK' if found else 'no', found[:3])",
        "41 work before the clock, threads after": "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(1), print('LEAK')), daemon=True).start()",
        "42 the accelerator's devices": tried(
            "import os; streams = {'fd', 'stdin', 'stdout', 'stderr'}\n"
            "print('LEAK' if set(os.listdir('/dev')) - {'null', 'zero', 'urandom', *streams} else 'no')"
        )
        + read.format("('/dev/accel0', '/dev/nvidia0', '/dev/vfio/vfio')"),
        "43 another run's files": "import os; print('LEAK' if os.listdir('/box') else 'no'); open('/box/x', 'w')",
        "44 a bomb as an answer": "exchange(10**5000) if 'exchange' in globals() else None",
        "own 1 the trainer's environment on the stack": CALL
        + "get = ctypes.CDLL(None).getauxval; get.restype = ctypes.c_ulong\n"
        "at = get(31); text = ctypes.string_at(at - 4000, 4000)\nprint('LEAK' if ('hun' + 'ter2').encode() in text else 'no')",
        "own 2 secrets in memory": tried(
            "import re\nfor line in open('/proc/self/maps'):\n"
            "  a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
            "  if 'r' in line.split()[1] and b - a < 64 << 20 and 'vvar' not in line:\n"
            "    with open('/proc/self/mem', 'rb', 0) as f:\n      f.seek(a)\n"
            "      try: text = f.read(b - a)\n      except (OSError, ValueError): continue\n"
            "      if re.search(b'[h]unter2env', text): print('LEAK', line)"
        ),
        "own 3 32-bit system calls": "import ctypes, mmap\n"
        + (
            "m = mmap.mmap(-1, 4096, prot=7); m.write(bytes.fromhex('b814000000cd80c3'))\n"
            "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\n"
            "print('LEAK' if f() > 0 else 'no')"
            if x86
            else "print('none')"
        ),
        "own 4 clone3 with namespaces": CALL
        + "import struct; a = struct.pack('8Q', 1 << 28, 0, 0, 0, 17, 0, 0, 0)\n"
        "r = call(435, a, len(a))\nif r == 0: import os; os._exit(0)\nprint('LEAK' if r > 0 else 'no')",
        "own 5 capabilities": tried(
            "print('LEAK' if any(int(line[8:], 16) for line in open('/proc/self/status') if line[:3] == 'Cap') else 'no')"
        ),
        "own 6 slow the watcher down": refused(numbers["scheduling"]),
        "own 7 the watcher's limits": tried("import resource; resource.prlimit(1, resource.RLIMIT_AS, (1, 1)); print('LEAK')"),
        "own 8 device nodes": tried("import os; os.mknod('/box/m', 0o20666, os.makedev(1, 3)); print('LEAK')"),
        "own 9 more output than the machine can hold": "import os\nos.write(1, b'x' * 999)\n"
        "while True: os.write(1, b'\\n' * 65536)",
        "own 10 memory of files": "import os, time\nn = 0\ntry:\n  for part in range(64):\n"
        "    f = os.open(f'/box/f{part}', os.O_CREAT | os.O_RDWR); os.posix_fallocate(f, 0, 1 << 20); n += 1\n"
        "except OSError: pass\nprint('LEAK' if n > 32 else n)",
    }  # fmt: skip


X86 = {
    "forbidden": "((41, 2, 1, 0), (53, 1, 1, 0, 0), (288, 0, 0, 0, 0), (319, b'x', 0), (322, 0, b'', 0, 0, 4096), (135, 0),"
    " (161, b'/box'), (434, 1, 0), (300, 0, 0), (103, 3, 0, 0), (157, 8, 0, 0, 0, 0))",
    "ipc": "((29, 1, 4096, 0o1666), (68, 1, 0o1666), (64, 1, 1, 0o1666), (240, b'q', 66, 0o666, 0))",
    "kernel": "((425, 1, ctypes.create_string_buffer(256)), (323, 0), (321, 0, 0, 0), (298, 0, 0, 0, 0, 0), (447, 0))",
    "keys": "((250, 0, -3, 1), (248, b'user', b'a', b'b', 1, -3), (249, b'user', b'a', 0, 0))",
    "handles": "((304, 0, 0, 0), (303, -100, b'/box', 0, 0, 0))",
    "mounts": "((165, b'x', b'/box', b'tmpfs', 0, 0), (155, b'.', b'.'), (272, 1 << 28), (272, 1 << 17), (308, 0, 0),"
    " (166, b'/proc', 2), (430, b'tmpfs', 0), (428, -100, b'/', 1))",
    "trace": "((101, 16, PID, 0, 0), (101, 16, 1, 0, 0), (311, PID, 0, 0, 0, 0, 0), (310, 1, 0, 0, 0, 0, 0), (312, 1, 2, 0, 0, 0))",
    "scheduling": "((141, 0, 1, 19), (203, 1, 8, b'\\1' + bytes(7)), (144, 1, 5, bytes(4)), (251, 1, 1, 0))",
}
ARM = {
    "forbidden": "((198, 2, 1, 0), (199, 1, 1, 0, 0), (242, 0, 0, 0, 0), (279, b'x', 0), (281, 0, b'', 0, 0, 4096), (92, 0),"
    " (51, b'/box'), (434, 1, 0), (262, 0, 0), (116, 3, 0, 0), (167, 8, 0, 0, 0, 0))",
    "ipc": "((194, 1, 4096, 0o1666), (186, 1, 0o1666), (190, 1, 1, 0o1666), (180, b'q', 66, 0o666, 0))",
    "kernel": "((425, 1, ctypes.create_string_buffer(256)), (282, 0), (280, 0, 0, 0), (241, 0, 0, 0, 0, 0), (447, 0))",
    "keys": "((219, 0, -3, 1), (217, b'user', b'a', b'b', 1, -3), (218, b'user', b'a', 0, 0))",
    "handles": "((265, 0, 0, 0), (264, -100, b'/box', 0, 0, 0))",
    "mounts": "((40, b'x', b'/box', b'tmpfs', 0, 0), (41, b'.', b'.'), (97, 1 << 28), (97, 1 << 17), (268, 0, 0),"
    " (39, b'/proc', 2), (430, b'tmpfs', 0), (428, -100, b'/', 1))",
    "trace": "((117, 16, PID, 0, 0), (117, 16, 1, 0, 0), (271, PID, 0, 0, 0, 0, 0), (270, 1, 0, 0, 0, 0, 0), (272, 1, 2, 0, 0, 0))",
    "scheduling": "((140, 0, 1, 19), (122, 1, 8, b'\\1' + bytes(7)), (119, 1, 5, bytes(4)), (30, 1, 1, 0))",
}
"""Numbers of system calls that no code may make, with arguments, by kind."""
ENDED_BY = {
    "10 memory of many processes": "memory",
    "11 a busy loop that ignores signals": "time",
    "11 sleep": "time",
    "11 a regular expression": "time",
    "12 endless output": "output",
    "own 9 more output than the machine can hold": "output",
}
"""Attacks that only a limit of the sandbox ends."""
SLOW = {*ENDED_BY, "10 grow", "13 deep recursion"} - {"12 endless output"}
LIMITS = Limits(wall_s=10.0, cpu_s=1, memory_mib=400, disk_mib=16, processes=16)


def through(name: str, result: Result) -> bool:
    """Whether an attack got through."""
    expected = ENDED_BY.get(name)
    return "LEAK" in result.output or SECRET in result.output or (expected is not None and result.why != expected)


class Planted:
    """Secrets of this process: a file, an environment variable, a descriptor, sockets."""

    def __init__(self, folder: str) -> None:
        self.file = f"{folder}/secret"
        with open(self.file, "w") as file:
            file.write(SECRET)
        os.chmod(folder, 0o755)
        os.environ["API_TOKEN"] = f"{SECRET}env"
        self._descriptor = os.dup2(os.open(self.file, os.O_RDONLY), 77, inheritable=True)
        self._sockets = [socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        self._sockets[0].bind(("127.0.0.1", 0))
        self._sockets[1].bind(f"\0{SECRET}-{os.getpid()}")
        self._sockets[2].bind(f"{self.file}.socket")
        for each in self._sockets:
            each.listen(5)
        self.world = World(self.file, self._sockets[0].getsockname()[1], os.getpid())

    def close(self) -> None:
        """Take them away."""
        del os.environ["API_TOKEN"]
        os.close(self._descriptor)
        for each in self._sockets:
            each.close()


def all_through(without: list[str], *, slow: bool) -> list[str]:
    """The attacks that get through; `slow`: also those that only end after seconds of CPU time."""
    with tempfile.TemporaryDirectory() as folder, Sandbox(LIMITS, without=without) as sandbox:
        planted = Planted(folder)
        sleep = Sandbox(Limits(wall_s=0.5, cpu_s=1, memory_mib=400, processes=16), without=without)
        try:
            programs = {name: code for name, code in attacks(planted.world).items() if slow or name not in SLOW}
            runs = {name: (sleep if name == "11 sleep" else sandbox).run(code) for name, code in programs.items()}
            return [f"{name}: {result}" for name, result in runs.items() if through(name, result)]
        finally:
            sleep.close()
            planted.close()


if __name__ == "__main__":
    print(json.dumps({"user": os.getuid(), "through": all_through(sys.argv[2:], slow=sys.argv[1] == "slow")}))
