"""The process that sandboxed runs are forked from: it has no tests, no secrets, and no memory of the trainer.

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
STREAMS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
"""Names in /dev of a process's own streams, below its folder in /proc."""
WATCH_MS = 20
"""Milliseconds between two checks of a run's memory and processes."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/box",
    "USER": "nobody",
    "OPENBLAS_NUM_THREADS": "1",
}


class UnreadablePython(OSError):
    """The user that the sandbox runs as may not read this Python."""


class Home(NamedTuple):
    """What the zygote keeps open for the first processes of runs."""

    space: int
    """Descriptor of the zygote's own pid namespace, to return to it."""
    machine_proc: int | None
    """The /proc of the machine, if the kernel refuses a new one because parts of the old one are masked, as container
    engines do. Runs then have no /proc, and the code never gets this one."""


class Job(NamedTuple):
    """The zygote's description of a run. The code itself is sent to the run's process through a pipe."""

    life_cpu_s: int
    memory_mib: int
    disk_mib: int
    processes: int
    without: Sequence[str] = ()
    """Layers to leave out, for tests that show what each layer prevents."""


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
        home = change_root(root)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # none of these ends the first process of a pid namespace
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended runs leave no zombies
        gc.freeze()
        control.send(json.dumps({"proc": home.machine_proc is None}).encode())
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 4096, 4)
            if not message:
                os._exit(0)
            _serve(control, Job(**json.loads(message)), descriptors, home)
    except Exception as error:
        with contextlib.suppress(OSError):
            _refuse(control, error)


def _refuse(control: socket.socket, error: Exception) -> None:
    said = (isinstance(error, OSError) and error.strerror) or repr(error)
    control.send(json.dumps({"error": said, "unreadable": isinstance(error, UnreadablePython)}).encode())


def _serve(control: socket.socket, job: Job, descriptors: Sequence[int], home: Home) -> None:
    """Fork the first process of a run, and reply with a handle of it."""
    try:
        kernel.call("unshare", kernel.NEWPID)
        first = os.fork()
        if first == 0:
            control.close()
            os.close(home.space)
            first_process(job, descriptors, home.machine_proc)
        handle = os.pidfd_open(first)
        socket.send_fds(control, [b"{}"], [handle])
        os.close(handle)
    except OSError as error:
        _refuse(control, error)
    finally:
        kernel.call("setns", home.space, kernel.NEWPID)
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
        with contextlib.suppress(PermissionError):  # root in a container without the right to do this
            kernel.call("unshare", kernel.NEWNS)
            build_root(root)
            built = True
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        kernel.prctl(kernel.DUMPABLE, 1)  # otherwise this process's files in /proc still belong to root
    user, group = os.geteuid(), os.getegid()
    kernel.call("unshare", kernel.NEWUSER | kernel.NEWPID | SPACES)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    kernel.map_user(NOBODY, user, group, proc)
    os.close(proc)
    if not built:
        if not os.access(STANDARD_LIBRARY, os.R_OK | os.X_OK):
            raise UnreadablePython(
                errno.EACCES, f"user {user} may not read {STANDARD_LIBRARY}, where this Python is installed"
            )
        build_root(root)


def libraries() -> list[str]:
    """The folders that Python code needs: the standard library, shared libraries, programs, time zones."""
    prefix = sys.base_prefix
    folders = (
        "/usr/share/zoneinfo",
        "/usr/lib",
        "/usr/lib64",
        "/usr/bin",
        "/lib",
        "/lib64",
        "/bin",
        f"{prefix}/lib",
        f"{prefix}/bin",
    )
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
    for name, stream in STREAMS.items():
        os.symlink(f"/proc/self/{stream}", f"{root}/dev/{name}")
    for device in DEVICES:
        os.close(os.open(root + device, os.O_CREAT | os.O_WRONLY))
    kernel.read_only_tree(root)
    for device in DEVICES:
        kernel.mount(device, root + device, None, kernel.BIND)


def change_root(root: str) -> Home:
    """Switch to the new root, from which the machine's files are not reachable. Returns what is kept of them."""
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    space = os.open("self/ns/pid", os.O_RDONLY, dir_fd=proc)
    if mount_processes(f"{root}/proc"):
        os.close(proc)
        proc = None
    kernel.mount(root, root, None, kernel.BIND | kernel.REC)  # a mount of another namespace cannot become the root
    os.chdir(root)
    kernel.call("pivot_root", b".", b".")
    kernel.call("umount2", b".", kernel.DETACH)
    os.chdir("/")
    return Home(space, proc)


def mount_processes(path: str) -> bool:
    """Mount a /proc with only the processes of this pid namespace; returns False if the kernel refuses."""
    try:
        kernel.mount("proc", path, "proc", kernel.NOSUID | kernel.NODEV | kernel.NOEXEC, "hidepid=2,subset=pid")
    except PermissionError:
        return False
    return True


def first_process(job: Job, descriptors: Sequence[int], machine_proc: int | None) -> NoReturn:
    """Create the namespaces of a run, start its code, and watch it; the run ends when this process ends."""
    stdin, output, requests, report = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 64) for each in descriptors)
    try:
        kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kernel.call("unshare", SPACES)
        if machine_proc is None:
            mount_processes("/proc")
            proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        else:  # opened again: processes that inherit a descriptor share its position in the folder's list
            proc = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=machine_proc)
            os.close(machine_proc)
        size = f"size={job.disk_mib}m,nr_inodes=4096,mode=700"
        kernel.mount("tmpfs", "/box", "tmpfs", kernel.NOSUID | kernel.NODEV, size)
        code = os.fork()
        if code == 0:
            code_process(job, (stdin, output, output, requests), report, proc)
        kernel.prctl(kernel.DUMPABLE, 0)
        os.closerange(0, proc)
        os.closerange(proc + 1, report)
        said = watch(code, job, Processes(proc, shared=machine_proc is not None), socket.socket(fileno=os.dup(report)))
    except BaseException as error:  # the run ends here after any error
        said = {"failed": str(error)}
    os.write(report, json.dumps(said).encode())
    os._exit(0)


def code_process(job: Job, descriptors: Sequence[int], report: int, proc: int) -> NoReturn:
    """Give up all rights, and then serve requests."""
    try:
        # with a separate count of processes, and no rights in the outer namespaces
        kernel.call("unshare", kernel.NEWUSER)
        kernel.map_user(NOBODY, NOBODY, NOBODY, proc)
        os.close(proc)
        for place, descriptor in enumerate(descriptors):
            os.dup2(descriptor, place)
        os.chdir("/box")
        os.environ.clear()
        os.environ.update(ENVIRONMENT)
        if "landlock" not in job.without and kernel.landlock_version():
            folders = [path for path in libraries() if not os.path.islink(path)]
            kernel.landlock(readable=[*folders, "/proc"], writable=["/box"], devices=["/dev"])
        memory, file = job.memory_mib << 20, job.disk_mib << 20
        kernel.limit(cpu_s=job.life_cpu_s, memory_bytes=memory, file_bytes=file, processes=job.processes)
        kernel.drop_capabilities()
        os.closerange(len(descriptors), report)
        if "seccomp" not in job.without:
            kernel.seccomp()
    except BaseException as error:
        os.write(report, json.dumps({"failed": str(error)}).encode())
        os._exit(1)
    os.close(report)
    child.serve(requests=3)


class Processes:
    """The processes of this pid namespace, except its first one, which is this process."""

    def __init__(self, proc: int, *, shared: bool) -> None:
        """`proc` is a descriptor of /proc; with `shared` it is the machine's own, which also lists other namespaces."""
        self._proc = proc
        self._own = os.readlink("self", dir_fd=proc)
        self._space = self._space_of("self") if shared else None
        if shared and not self._names():
            raise OSError(errno.EACCES, "the /proc of this machine does not show the processes of a run")

    def usage(self) -> tuple[int, int]:
        """The processes' resident memory in bytes, and their number."""
        found = [self._read(name, "statm") for name in self._names()]
        pages = sum(int(fields.split()[1]) for fields in found if fields)
        return pages * resource.getpagesize(), sum(map(bool, found))

    def cpu_s(self) -> float:
        """CPU seconds that the processes have used, including ended ones."""
        found = [self._read(name, "stat").rpartition(")")[2].split() for name in self._names()]
        ticks = sum(int(field) for fields in found for field in fields[11:15])  # utime, stime, cutime, cstime
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ticks / TICKS_PER_S + ended.ru_utime + ended.ru_stime

    def _names(self) -> list[str]:
        names = [name for name in os.listdir(self._proc) if name.isdigit() and name != self._own]
        return names if self._space is None else [name for name in names if self._space_of(name) == self._space]

    def _space_of(self, name: str) -> int:
        """The inode number of a process's pid namespace; 0 if it cannot be read."""
        try:
            return os.stat(f"{name}/ns/pid", dir_fd=self._proc).st_ino
        except OSError:  # the process has just ended, or belongs to another user
            return 0

    def _read(self, name: str, file: str) -> str:
        try:
            descriptor = os.open(f"{name}/{file}", os.O_RDONLY, dir_fd=self._proc)
        except (FileNotFoundError, ProcessLookupError):  # the process has just ended
            return ""
        with open(descriptor) as opened, contextlib.suppress(ProcessLookupError):
            return opened.read()
        return ""


def watch(code: int, job: Job, processes: Processes, report: socket.socket) -> dict[str, object]:
    """Wait for the end of the code, and answer what `podium.sandbox.runs` asks by `report` meanwhile.

    Returns which limit it exceeded, `why`, if any, and its exit `status`.
    """
    poll = select.poll()
    poll.register(os.pidfd_open(code), select.POLLIN)
    poll.register(report, select.POLLIN)
    while True:
        poll.poll(WATCH_MS)
        reaped = 1
        while reaped:
            reaped, status = os.waitpid(-1, os.WNOHANG)
            if reaped == code:
                spent = resource.getrusage(resource.RUSAGE_CHILDREN)
                killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
                # the kernel's limit counts ticks, which may be shorter
                late = killed and spent.ru_utime + spent.ru_stime > 0.5 * job.life_cpu_s
                return {"why": "time" if late else "", "status": status_of_shell(status)}
        with contextlib.suppress(BlockingIOError):
            asked = report.recv(64, socket.MSG_DONTWAIT)
            if asked == b"cpu":
                report.send(json.dumps({"cpu_s": processes.cpu_s()}).encode())
            elif asked == b"flush":
                os.kill(code, child.FLUSH)
        memory_bytes, count = processes.usage()
        if memory_bytes > job.memory_mib << 20:
            return {"why": "memory", "status": 0}
        if count > job.processes:
            return {"why": "processes", "status": 0}


def status_of_shell(status: int) -> int:
    """The exit status as in a shell: 128 plus the signal's number for a process that a signal has ended."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
