"""Writes a config for a cluster: as a script for Slurm, or as a JobSet for Kubernetes on GKE.

Both start one process per node, with the launch guard, the watchdog and the records that a pod has. TPU7x (Ironwood) is
rented on GKE only, not as Cloud TPU VMs; its node pools work once `podium.accelerators` knows it.
"""

import re
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path

from podium.accelerators import Accelerator, find_accelerator
from podium.config.schema import Config
from podium.config.show import to_yaml
from podium.job.cluster import COORDINATOR_PORT
from podium.pods.slices import BadRequestError

NOTICE_S = 120
"""Seconds before the end of its time at which a run is asked to save."""
GRACE_S = 600
"""Seconds for which a deleted pod may save."""
TPU_POOLS: Mapping[str, str] = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
}
GPU_POOLS: Mapping[str, str] = {"h100": "nvidia-h100-80gb", "h200": "nvidia-h200-141gb"}
"""GKE's names for the accelerators of its node pools."""


def slurm_script(config: Config, *, nodes: int, gpus: int, time: str, python: str) -> str:
    """A script for `sbatch`: one process on each of `nodes`, each with `gpus` GPUs (0: none are requested).

    Raises BadRequestError for a time that is not in a format of Slurm.
    """
    if not re.fullmatch(r"(\d+-)?\d{1,2}:\d\d:\d\d|\d+", time):
        raise BadRequestError(f"--time {time!r}: write HH:MM:SS, D-HH:MM:SS or minutes, as 24:00:00")
    return _template("slurm.sh").format(
        name=_name(config),
        nodes=nodes,
        time=time,
        notice_s=NOTICE_S,
        gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        config=to_yaml(config.document()).rstrip(),
        port=COORDINATOR_PORT,
        python=shlex.quote(python),
    )


def k8s_manifest(config: Config, type_name: str, *, nodes: int, image: str, claim: str | None, spot: bool) -> str:
    """A ConfigMap and a JobSet, as YAML: a process on each host of a TPU slice, or on each of `nodes` of GPUs.

    Args:
        config: settings whose `runs_dir` is a bucket, or a path at which the volume of `claim` is mounted.
        type_name: of the accelerator, as v6e-16 or h100-8.
        nodes: machines with GPUs; a TPU slice has as many as its type says.
        image: of a container with Podium and its dependencies.
        claim: name of a PersistentVolumeClaim that all pods can write.
        spot: whether the node pool is one of spot machines.

    Raises:
        BadRequestError: GKE has no such machines, or the runs would be lost with the pods.
    """
    try:
        accelerator = find_accelerator(type_name)
    except ValueError as error:
        raise BadRequestError(f"--type {type_name}: {error}") from None
    folder = str(config.runs_dir)
    if "://" not in folder and (claim is None or not Path(folder).is_absolute()):
        raise BadRequestError(
            f"runs_dir: {folder!r} would be lost with the pods; set a bucket (gs://...), or an absolute path and with "
            "--claim the PersistentVolumeClaim that is mounted there"
        )
    _check_words(image, claim, folder)
    pool, hosts, resource = _pool(accelerator, nodes)
    selector = pool | ({"cloud.google.com/gke-spot": "true"} if spot else {})
    exclusive = "alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool"
    return _template("k8s.yaml").format(
        name=_name(config),
        accelerator=accelerator.name,
        annotations=f"  annotations:\n    {exclusive}\n" if accelerator.torus else "",
        config=textwrap.indent(to_yaml(config.document()).rstrip(), "    "),
        hosts=hosts,
        grace_s=GRACE_S,
        selector="\n".join(f"              {key}: '{value}'" for key, value in selector.items()),
        image=image,
        jobs=f"{folder}/jobs" if claim else "/tmp",
        port=COORDINATOR_PORT,
        resource=resource,
        devices=accelerator.devices_per_host,
        mount=f"              - {{name: runs, mountPath: {folder}}}\n" if claim else "",
        volume=f"            - name: runs\n              persistentVolumeClaim: {{claimName: {claim}}}"
        if claim
        else "",
    )


def _check_words(image: str, claim: str | None, folder: str) -> None:
    """Raise BadRequestError for text that has another meaning in YAML or in a shell."""
    wrong = {
        "--image": (image, r"[\w.:/@-]+", "a name, as REGISTRY/IMAGE:TAG"),
        "--claim": (claim or "claim", r"[a-z0-9][a-z0-9.-]*", "lower-case letters, digits, '.' and '-'"),
        "runs_dir": (folder, r"[\w.:/@-]+", "letters, digits, '.', '_', '-' and '/'"),
    }
    for what, (text, pattern, rule) in wrong.items():
        if not re.fullmatch(pattern, text):
            raise BadRequestError(f"{what} {text!r}: write {rule}")


def _pool(accelerator: Accelerator, nodes: int) -> tuple[dict[str, str], int, str]:
    """The node selector, the number of nodes, and the name of their accelerator resource."""
    if pool := GPU_POOLS.get(accelerator.generation):
        return {"cloud.google.com/gke-accelerator": pool}, nodes, "nvidia.com/gpu"
    if accelerator.generation not in TPU_POOLS:
        raise BadRequestError(
            f"--type {accelerator.name}: GKE's name of it is unknown here; there are {', '.join(TPU_POOLS)} and "
            f"{', '.join(GPU_POOLS)}"
        )
    if nodes != 1:
        raise BadRequestError(f"--nodes {nodes}: {accelerator.name} has {accelerator.hosts} machines; leave it out")
    topology = "x".join(map(str, accelerator.torus))
    pool = TPU_POOLS[accelerator.generation]
    selector = {"cloud.google.com/gke-tpu-accelerator": pool, "cloud.google.com/gke-tpu-topology": topology}
    return selector, accelerator.hosts, "google.com/tpu"


def _name(config: Config) -> str:
    """The run's name in a form that Kubernetes and Slurm accept: it begins with a letter."""
    name = re.sub(r"[^a-z0-9-]+", "-", str(config.name).lower()).strip("-")[:40].strip("-")
    if not name:
        raise BadRequestError(f"name: {config.name!r} has no letter or digit; set name=my-run")
    return name if name[0].isalpha() else f"run-{name}"


def _template(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
