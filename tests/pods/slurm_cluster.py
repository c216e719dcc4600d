"""A real Slurm on this machine: munged, slurmctld, and two slurmd that are nodes of one processor each."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel")
CONFIG = """\
ClusterName=podium
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str | None:
    """Why there can be none here; None: there can."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in NEEDED if shutil.which(name, path=path) is None]
    return f"not installed: {', '.join(missing)} (slurm-wlm, munge)" if missing else _why_not_root()


def _why_not_root() -> str | None:
    return None if os.geteuid() == 0 else "slurmd needs root"


class Slurm:
    """Commands of a cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """What a command prints."""
        done = subprocess.run(command, cwd=cwd, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What is known of a job."""
        words = self.run("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ended(self, number: str, limit_s: float) -> dict[str, str]:
        """A job as it has ended."""
        deadline = time.monotonic() + limit_s
        while (job := self.job(number))["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"):
            assert time.monotonic() < deadline, job
            time.sleep(0.5)
        return job


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin"


@contextlib.contextmanager
def slurm_cluster(folder: Path, ports: tuple[int, int, int]) -> Iterator[Slurm]:
    """Starts one below a folder, and ends it with all that runs in it."""
    host = os.uname().nodename.partition(".")[0]
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    text = CONFIG.format(host=host, folder=folder, port=ports[0], port1=ports[1], port2=ports[2])
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    slurm = Slurm(folder)
    processes: list[subprocess.Popen[bytes]] = []

    def begin(*command: str) -> None:
        with (folder / f"{Path(command[0]).name}-{len(processes)}.out").open("wb") as log:
            processes.append(subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=log))

    try:
        flags = ("--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket")
        files = (f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/seed")
        begin("munged", *flags, *files)
        time.sleep(1.0)
        begin("slurmctld", "-D")
        for node in ("n1", "n2"):
            begin("slurmd", "-D", "-N", node)
        deadline = time.monotonic() + 60
        while (
            "idle" not in _states(slurm) or len(_states(slurm).split()) != 2 or set(_states(slurm).split()) != {"idle"}
        ):
            assert time.monotonic() < deadline, f"{_states(slurm)}; see {folder}"
            time.sleep(0.5)
        yield slurm
    finally:
        subprocess.run(["scancel", "--user=root"], env=slurm.environment, capture_output=True)
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def _states(slurm: Slurm) -> str:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    return subprocess.run(command, env=slurm.environment, capture_output=True, text=True).stdout
