"""Machines for a fake slice: folders of this machine that run commands, or network namespaces with a real sshd."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATE = """#!/bin/sh
case "$*" in +%s) echo "$FAKE_NOW";; *) exec /bin/date "$@";; esac
"""
HOSTNAME = """#!/bin/sh
case "$1" in -I) echo "{address} 172.17.0.1";; *) echo t1v-n-fake-w-{worker};; esac
"""
PYTHON = """#!/bin/sh
# The agent is the real one; training is a few lines that train nothing.
case "$2" in podium.cli) shift 2; exec {python} {job} "$@";; *) exec {python} "$@";; esac
"""


def fake_python(folder: Path) -> Path:
    """A Python for `--python`, for which `-m podium.cli train` is tests/pods/fake_job.py."""
    path = folder / "python"
    path.write_text(PYTHON.format(python=sys.executable, job=ROOT / "tests" / "pods" / "fake_job.py"))
    path.chmod(0o755)
    return path


class LocalHosts:
    """Hosts that differ by their home folder and by the address that `hostname -I` tells."""

    def __init__(self, folder: Path, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        self.homes = [folder / f"host{worker}" for worker in range(len(addresses))]
        self.now: Callable[[], float] = time.time
        """What their clocks show."""
        self.variables: dict[str, str] = {}
        """Environment variables of every host besides its own."""
        self.gone: set[int] = set()
        """Workers that cannot be reached."""
        self.after: Callable[[int, str], int | None] = lambda worker, command: None
        """Called after each command; a number it returns is what ssh ends with instead."""
        for worker, home in enumerate(self.homes):
            (home / "bin").mkdir(parents=True)
            (home / "shm").mkdir()
            for name, text in (("hostname", HOSTNAME.format(address=addresses[worker], worker=worker)), ("date", DATE)):
                tool = home / "bin" / name
                tool.write_text(text)
                tool.chmod(0o755)

    def environment(self, worker: int) -> dict[str, str]:
        """What a login on that host has."""
        home = self.homes[worker]
        own = {"HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}", "LANG": "C.UTF-8", "TMPDIR": str(home)}
        return {**own, "FAKE_NOW": f"{self.now():.0f}", **self.variables}

    def run(self, worker: int, command: str, timeout_s: float) -> tuple[int, str, str]:
        """Run a command there."""
        if worker in self.gone:
            return 255, "", "ssh: connect to host: Connection timed out\n"
        done = subprocess.run(
            ["sh", "-c", self._here(worker, command)],
            cwd=self.homes[worker],
            env=self.environment(worker),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        status = self.after(worker, command)
        return done.returncode if status is None else status, done.stdout, done.stderr

    def copy(self, worker: int, files: Sequence[str], folder: str) -> int:
        """Copy files there."""
        if worker in self.gone:
            return 255
        target = self.homes[worker] / self._here(worker, folder)
        if not target.is_dir():
            return 1
        for file in files:
            shutil.copy(file, target)
        return 0

    def close(self) -> None:
        """End what still runs there."""
        for home in self.homes:
            for process in _processes_of(home):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def lose(self, worker: int) -> None:
        """The host's machine is switched off: its processes end, and so does its memory; nobody answers."""
        self.gone.add(worker)
        for process in _processes_of(self.homes[worker]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def renew(self) -> None:
        """New machines at the same addresses."""
        for worker, home in enumerate(self.homes):
            self.lose(worker)
            for entry in home.iterdir():
                if entry.name != "bin":
                    shutil.rmtree(entry)
            (home / "shm").mkdir()
        self.gone.clear()

    def _here(self, worker: int, text: str) -> str:
        return text.replace("/dev/shm/", f"{self.homes[worker]}/shm/")


def _processes_of(home: Path) -> list[int]:
    """Processes whose HOME is this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"HOME={home}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


SSHD_FOLDER = "PODTEST_SSHD"
"""Environment variable with a folder that openssh-server (and libwrap0) was unpacked into by `dpkg -x`."""
SSHD_CONFIG = """\
ListenAddress {address}:22
HostKey {folder}/host_key
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
MaxStartups 100
PidFile none
Subsystem sftp internal-sftp
SetEnv MACHINE_API_KEY={key}
"""
MACHINES_KEY = "CANARYthatEveryMachineHas0123456789"
"""A secret that no laptop knows."""
START = """\
set -e
hostname t1v-n-fake-w-{worker}
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mkdir -p /run/sshd
mount --bind {folder}/passwd /etc/passwd
mount --bind {folder}/hosts /etc/hosts
cd /
exec {sshd} -D -e -f {folder}/sshd_config
"""
CLONE_NEWNET = 0x40000000


def why_no_network_hosts() -> str | None:
    """Why there can be no network namespaces with sshd here; None: there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if missing := [tool for tool in ("ip", "unshare", "ssh", "ssh-keygen", "git") if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    if sshd_command() is None:
        return f"no sshd: install openssh-server, or unpack it and name the folder in {SSHD_FOLDER}"
    return None


def sshd_command() -> str | None:
    """How to run sshd: installed, or unpacked somewhere with its libraries."""
    folder = os.environ.get(SSHD_FOLDER)
    if folder is None:
        return shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    libraries = ":".join(str(path) for path in Path(folder).glob("**/*-linux-gnu"))
    return f"env LD_LIBRARY_PATH={libraries} {folder}/usr/sbin/sshd"


class NetworkHosts:
    """Hosts with their own network, processes, name, home and memory file systems, reached by ssh from a laptop.

    All traffic stays in namespaces that this makes and removes. /tmp is one file system for all, which runs can share.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.addresses = [f"10.77.0.{11 + worker}" for worker in range(count)]
        self.homes = [folder / f"host{worker}" / "home" for worker in range(count)]
        self._name = f"pod{os.getpid()}"
        self.laptop = f"{self._name}c"
        """Namespace in which the laptop's commands run."""
        self._folder, self._hosts = folder, [f"{self._name}w{worker}" for worker in range(count)]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "NetworkHosts":
        _run("ip", "netns", "add", self.laptop)
        _run("ip", "-n", self.laptop, "link", "set", "lo", "up")
        _run("ip", "-n", self.laptop, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self.laptop, "addr", "add", "10.77.0.1/24", "dev", "br0")
        _run("ip", "-n", self.laptop, "link", "set", "br0", "up")
        for worker, host in enumerate(self._hosts):
            _run("ip", "netns", "add", host)
            cable = ("link", "add", f"v{worker}", "type", "veth", "peer", "name", "eth0", "netns", host)
            _run("ip", "-n", self.laptop, *cable)
            _run("ip", "-n", self.laptop, "link", "set", f"v{worker}", "master", "br0", "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")
            _run("ip", "-n", host, "addr", "add", f"{self.addresses[worker]}/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "eth0", "up")
        self.boot()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shut_down()
        for name in (*self._hosts, self.laptop):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def boot(self) -> None:
        """Switch all machines on, with empty homes."""
        names = [f"{address} t1v-n-fake-w-{worker}" for worker, address in enumerate(self.addresses)]
        for worker, host in enumerate(self._hosts):
            folder = self._folder / f"host{worker}"
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "home" / ".ssh").mkdir(parents=True, mode=0o700)
            (folder / "home").chmod(0o700)
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key"))
            config = SSHD_CONFIG.format(address=self.addresses[worker], folder=folder, key=MACHINES_KEY)
            (folder / "sshd_config").write_text(config)
            (folder / "hosts").write_text("\n".join(("127.0.0.1 localhost", *names, "")))
            users = [
                line for line in Path("/etc/passwd").read_text().splitlines() if line[:5] not in ("root:", "sshd:")
            ]
            users.append(f"root:x:0:0:root:{folder}/home:/bin/sh")
            users.append("sshd:x:105:65534::/run/sshd:/usr/sbin/nologin")
            (folder / "passwd").write_text("\n".join((*users, "")))
            start = START.format(worker=worker, folder=folder, sshd=sshd_command())
            (folder / "start.sh").write_text(start)
            apart = ("unshare", "--mount", "--uts", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc")
            with (self._folder / f"host{worker}.log").open("ab") as log:
                process = subprocess.Popen(
                    ["ip", "netns", "exec", host, *apart, "sh", str(folder / "start.sh")],
                    env={"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._processes.append(process)
        self._await_sshd()

    def shut_down(self) -> None:
        """Switch all machines off: everything on them ends at once."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()

    def renew(self) -> None:
        """New machines at the same addresses."""
        self.shut_down()
        self.boot()

    def authorize(self, keys: str) -> None:
        """What Google's guest agent does with the ssh keys in a node's metadata."""
        lines = [line.partition(":")[2] for line in keys.splitlines() if ":" in line]
        for home in self.homes:
            path = home / ".ssh" / "authorized_keys"
            path.write_text("".join(f"{line}\n" for line in lines))
            path.chmod(stat.S_IRUSR | stat.S_IWUSR)

    def cut(self, worker: int) -> None:
        """Pull a machine's cable."""
        _run("ip", "-n", self._hosts[worker], "link", "set", "eth0", "down")

    def drop_connections(self, worker: int) -> int:
        """End a machine's ssh sessions, not what they started; how many there were."""
        listed = subprocess.run(["ip", "netns", "pids", self._hosts[worker]], capture_output=True, text=True).stdout
        dropped = 0
        for process in map(int, listed.split()):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"sshd: root"):
                    os.kill(process, signal.SIGKILL)
                    dropped += 1
        return dropped

    def mend(self, worker: int) -> None:
        """Put the cable back."""
        _run("ip", "-n", self._hosts[worker], "link", "set", "eth0", "up")

    @contextlib.contextmanager
    def on_the_laptop(self) -> Iterator[None]:
        """What this thread opens in the block is on the laptop's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self.laptop}") as there:
            assert libc.setns(there.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(before.fileno(), CLONE_NEWNET) == 0

    def _await_sshd(self) -> None:
        deadline = time.monotonic() + 120
        with self.on_the_laptop():
            for address in self.addresses:
                while True:
                    with contextlib.suppress(OSError), socket.create_connection((address, 22), timeout=1):
                        break
                    assert time.monotonic() < deadline, f"no sshd at {address}; see {self._folder}"
                    time.sleep(0.05)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def gcloud_environment(folder: Path, api: str) -> dict[str, str]:
    """What has the real gcloud speak to a fake, and keep its files in a folder."""
    (folder / "laptop").mkdir(exist_ok=True)
    return {
        "CLOUDSDK_CONFIG": str(folder / "gcloud"),
        "HOME": str(folder / "laptop"),
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": api,
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{api}compute/v1/",
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_CORE_PROJECT": "p",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
    }
