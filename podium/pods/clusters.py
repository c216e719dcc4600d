"""Exports a config for a cluster: as a Slurm script, or as a JobSet for Kubernetes on GKE.

Both start one process per node, with the same launch guard, watchdog and records as a pod. TPU7x (Ironwood) can be
rented only on GKE, not as Cloud TPU VMs; its node pools will work once `podium.accelerators` lists it.
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
"""Seconds before the time limit at which a run is asked to save."""
GRACE_S = 600
"""Seconds that a deleted pod may use to save."""
TPU_POOLS: Mapping[str, str] = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
}
GPU_POOLS: Mapping[str, str] = {"h100": "nvidia-h100-80gb", "h200": "nvidia-h200-141gb"}
"""GKE's node selectors for the accelerators."""


def slurm_script(config: Config, *, nodes: int, gpus: int, time: str, python: str) -> str:
    """A script for `sbatch`: one process on each of `nodes` nodes, with `gpus` GPUs each (0: request none).

    Raises BadRequestError if the time is not in a Slurm format.
    """
    if not re.fullmatch(r"(\d+-)?\d{1,2}:\d\d:\d\d|\d+", time):
        raise BadRequestError(f"--time {time!r}: write HH:MM:SS, D-HH:MM:SS or minutes, as 24:00:00")
    return _template("slurm.sh").format(
        name=_name(str(config.name)),
        nodes=nodes,
        time=time,
        notice_s=NOTICE_S,
        gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        config=to_yaml(config.document()).rstrip(),
        port=COORDINATOR_PORT,
        python=shlex.quote(python),
    )


def k8s_manifest(config: Config, type_name: str, *, nodes: int, image: str, claim: str | None, spot: bool) -> str:
    """A ConfigMap and a JobSet, as YAML: one process per host of a TPU slice, or per machine of `nodes` GPU machines.

    Args:
        config: settings whose `runs_dir` is a bucket, or a path at which the volume of `claim` is mounted.
        type_name: accelerator type, such as v6e-16 or h100-8.
        nodes: number of GPU machines; a TPU type determines its own.
        image: container image with Podium and its dependencies.
        claim: name of a PersistentVolumeClaim that all pods can write to.
        spot: whether the node pool has spot machines.

    Raises:
        BadRequestError: GKE has no such machines, or the run's files would be lost with the pods.
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
        name=_name(str(config.name)),
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
    """Raise BadRequestError for text that YAML or a shell would interpret."""
    wrong = {
        "--image": (image, r"[\w.:/@-]+", "a name, as REGISTRY/IMAGE:TAG"),
        "--claim": (claim or "claim", r"[a-z0-9][a-z0-9.-]*", "lower-case letters, digits, '.' and '-'"),
        "runs_dir": (folder, r"[\w.:/@-]+", "letters, digits, '.', '_', '-' and '/'"),
    }
    for what, (text, pattern, rule) in wrong.items():
        if not re.fullmatch(pattern, text):
            raise BadRequestError(f"{what} {text!r}: write {rule}")


def _pool(accelerator: Accelerator, nodes: int) -> tuple[dict[str, str], int, str]:
    """The node selector, the number of nodes, and the accelerator's resource name."""
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


def _name(given: str) -> str:
    """A run's name in a form that Kubernetes and Slurm accept, starting with a letter."""
    name = re.sub(r"[^a-z0-9-]+", "-", given.lower()).strip("-")[:40].strip("-")
    if not name:
        raise BadRequestError(f"name: {given!r} has no letter or digit; set name=my-run")
    return name if name[0].isalpha() else f"run-{name}"


def _template(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
