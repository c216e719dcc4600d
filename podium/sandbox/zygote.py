"""The process that sandboxed runs are forked from: it holds no test, no secret, and nothing of the trainer.

`podium.sandbox.runs` starts it by exec, without an environment and without site-packages. It enters namespaces of its
own and a root that has the interpreter, the system's libraries and nothing else, read-only. For each run it forks the
first process of a new pid space, which watches the run's memory and processes, and whose end ends whatever the run has
started. That one forks the process of the code, which gives up everything before it reads what it is to do.
"""

import contextlib
import errno
import fcntl
import gc
import glob
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from podium.sandbox import child, kernel

NOBODY = 65534
SPACES = kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWNET | kernel.NEWCGROUP
STANDARD_LIBRARY = os.path.dirname(os.__file__)
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
WATCH_MS = 20
"""Time between two looks at the memory and the processes of a run."""
FAILED = "failed: "
"""Begins the report of a run that could not be set up."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/box", "OPENBLAS_NUM_THREADS": "1"}


class Job(NamedTuple):
    """What the zygote knows of a run; the code itself comes to the run's own process, by a pipe."""

    cpu_s: int
    memory_mib: int
    disk_mib: int
    processes: int
    without: Sequence[str] = ()
    """Layers to leave out, for tests that show what each layer holds."""


def main(control_fd: int, root: str) -> None:
    """Serve runs until the other end of the socket is closed. `root` is a folder to mount the new root on."""
    control = socket.socket(fileno=control_fd)
    try:
        enter(root)
        if first := os.fork():
            control.close()
            os.waitpid(first, 0)
            os._exit(0)
        kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)
        change_root(root)
        own_space = os.open("/proc/self/ns/pid", os.O_RDONLY)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # of these, the first process of a space dies by none
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # runs that have ended leave nothing
        gc.freeze()
        control.send(b"{}")
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 4096, 4)
            if not message:
                os._exit(0)
            _serve(control, Job(**json.loads(message)), descriptors, own_space)
    except Exception as error:
        with contextlib.suppress(OSError):
            _refuse(control, error)


def _refuse(control: socket.socket, error: Exception) -> None:
    control.send(json.dumps({"error": (isinstance(error, OSError) and error.strerror) or repr(error)}).encode())


def _serve(control: socket.socket, job: Job, descriptors: Sequence[int], own_space: int) -> None:
    """Fork the first process of a run, and answer with a handle of it."""
    try:
        kernel.call("unshare", kernel.NEWPID)
        first = os.fork()
        if first == 0:
            control.close()
            os.close(own_space)
            first_process(job, descriptors)
        handle = os.pidfd_open(first)
        socket.send_fds(control, [b"{}"], [handle])
        os.close(handle)
    except OSError as error:
        _refuse(control, error)
    finally:
        kernel.call("setns", own_space, kernel.NEWPID)
        for descriptor in descriptors:
            os.close(descriptor)


def enter(root: str) -> None:
    """Enter namespaces and build the root, as any user; the next fork is the first process of a pid space.

    A root process builds it before its switch to another user, because the interpreter may lie in a folder that only
    root can read.
    """
    kernel.prctl(kernel.NO_NEW_PRIVS, 1)
    built = False
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # root of a container that may not
            kernel.call("unshare", kernel.NEWNS)
            build_root(root)
            built = True
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        kernel.prctl(kernel.DUMPABLE, 1)  # else the files of this process in /proc stay root's
    user, group = os.geteuid(), os.getegid()
    kernel.call("unshare", kernel.NEWUSER | kernel.NEWPID | SPACES)
    kernel.map_user(NOBODY, user, group)
    if not built:
        if not os.access(STANDARD_LIBRARY, os.R_OK | os.X_OK):
            raise OSError(errno.EACCES, f"user {user} may not read {STANDARD_LIBRARY}, where this Python lies")
        build_root(root)


def libraries() -> list[str]:
    """The folders that code needs: the standard library, shared libraries, programs."""
    prefix = sys.base_prefix
    folders = ("/usr/lib", "/usr/lib64", "/usr/bin", "/lib", "/lib64", "/bin", f"{prefix}/lib", f"{prefix}/bin")
    return [path for path in dict.fromkeys((*folders, STANDARD_LIBRARY)) if os.path.isdir(path)]


def build_root(root: str) -> None:
    """Make a file system with the libraries and three devices at `root`, all read-only."""
    kernel.mount(None, "/", None, kernel.REC | kernel.PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs", kernel.NOSUID | kernel.NODEV, "size=1m,mode=755")
    for path in libraries():
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif not os.path.isdir(root + path):
            os.makedirs(root + path)
            kernel.mount(path, root + path, None, kernel.BIND | kernel.REC)
    real = [path for path in libraries() if not os.path.islink(path)]
    for packages in (path for folder in real for path in glob.glob(f"{root}{folder}/python*/*-packages")):
        kernel.mount("tmpfs", packages, "tmpfs", kernel.NOSUID | kernel.NODEV, "size=4k,mode=755")  # hides them
    for folder in ("dev", "proc", "box"):
        os.mkdir(f"{root}/{folder}")
    os.symlink("box", f"{root}/tmp")
    for device in DEVICES:
        os.close(os.open(root + device, os.O_CREAT | os.O_WRONLY))
    kernel.read_only_tree(root)
    for device in DEVICES:
        kernel.mount(device, root + device, None, kernel.BIND)


def change_root(root: str) -> None:
    """Leave the machine's files behind."""
    mount_processes(f"{root}/proc")
    kernel.mount(root, root, None, kernel.BIND | kernel.REC)  # a mount of another namespace cannot be the root
    os.chdir(root)
    kernel.call("pivot_root", b".", b".")
    kernel.call("umount2", b".", kernel.DETACH)
    os.chdir("/")


def mount_processes(path: str) -> None:
    """Mount a /proc that shows the processes of this pid space, and nothing of the kernel."""
    kernel.mount("proc", path, "proc", kernel.NOSUID | kernel.NODEV | kernel.NOEXEC, "hidepid=2,subset=pid")


def first_process(job: Job, descriptors: Sequence[int]) -> NoReturn:
    """Make a run's own spaces, start its code, and watch it; the run ends with this process."""
    stdin, output, requests, report = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 64) for each in descriptors)
    try:
        kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kernel.call("unshare", SPACES)
        mount_processes("/proc")
        size = f"size={job.disk_mib}m,nr_inodes=4096,mode=700"
        kernel.mount("tmpfs", "/box", "tmpfs", kernel.NOSUID | kernel.NODEV, size)
        code = os.fork()
        if code == 0:
            code_process(job, (stdin, output, output, requests), report)
        kernel.prctl(kernel.DUMPABLE, 0)
        os.closerange(0, report)
        why = watch(code, job)
    except BaseException as error:  # whatever it is, the run ends here
        why = f"{FAILED}{error}"
    os.write(report, why.encode())
    os._exit(0)


def code_process(job: Job, descriptors: Sequence[int], report: int) -> NoReturn:
    """Give up everything, and then do what is asked."""
    try:
        for place, descriptor in enumerate(descriptors):
            os.dup2(descriptor, place)
        os.chdir("/box")
        os.environ.clear()
        os.environ.update(ENVIRONMENT)
        kernel.call("unshare", kernel.NEWUSER)  # with its own count of processes, and no rights in the spaces around it
        kernel.map_user(NOBODY, NOBODY, NOBODY)
        if "landlock" not in job.without and kernel.landlock_version():
            folders = [path for path in libraries() if not os.path.islink(path)]
            kernel.landlock(readable=[*folders, "/proc"], writable=["/box"], devices=["/dev"])
        memory, file = job.memory_mib << 20, job.disk_mib << 20
        kernel.limit(cpu_s=job.cpu_s, memory_bytes=memory, file_bytes=file, processes=job.processes)
        kernel.drop_capabilities()
        os.closerange(len(descriptors), report)
        if "seccomp" not in job.without:
            kernel.seccomp()
    except BaseException as error:
        os.write(report, f"{FAILED}{error}".encode())
        os._exit(1)
    os.close(report)
    child.serve(requests=3)


def watch(code: int, job: Job) -> str:
    """Wait for the end of the code; returns which limit it exceeded, or nothing."""
    ended = select.poll()
    ended.register(os.pidfd_open(code), select.POLLIN)
    while True:
        ended.poll(WATCH_MS)
        reaped = 1
        while reaped:
            reaped, status = os.waitpid(-1, os.WNOHANG)
            if reaped == code:
                spent = resource.getrusage(resource.RUSAGE_CHILDREN)
                used_s = spent.ru_utime + spent.ru_stime  # the limit counts ticks, which may be shorter
                return "time" if os.WIFSIGNALED(status) and used_s > 0.5 * job.cpu_s else ""
        memory_bytes, processes = usage()
        if memory_bytes > job.memory_mib << 20:
            return "memory"
        if processes > job.processes:
            return "processes"


def usage() -> tuple[int, int]:
    """Resident memory of all processes of this pid space beside its first, and their number."""
    pages = count = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                with open(f"/proc/{name}/statm") as file:
                    pages += int(file.read().split()[1])
                count += 1
    return pages * resource.getpagesize(), count
