"""Exports a config for a cluster: as a Slurm script, or as a JobSet for Kubernetes.

Both start one process per node, with the same launch guard, watchdog and records as a pod.
"""

import dataclasses
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import yaml

from podium.accelerators import Accelerator, find_accelerator, of_amd
from podium.config.schema import Config
from podium.config.show import to_yaml
from podium.job.cluster import COORDINATOR_PORT
from podium.job.job_records import GUARD
from podium.job.save_notice import LEAST_S
from podium.pods.slices import BadRequestError

Fields = dict[str, object]
"""A part of a manifest."""
GRACE_S = 600
"""Seconds that a deleted pod may use to save."""
ARRIVAL_S = 3600
"""Seconds that a pod waits for the next one to arrive; that one's node may have to be rented first."""
LASTING = (1, 2, GUARD, 126, 127)
"""Exit statuses that a retry would have again: an error of the run, wrong settings, workers that differ, and an image
without Podium. After others a retry may succeed: 75 (a worker came too late), 124 (stuck), 134 (another worker was
lost), 137, 143."""
GKE_TPU, GKE_GPU, NVIDIA = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-accelerator", "nvidia.com/gpu"
AMD = "amd.com/gpu"
NODES: Mapping[str, tuple[str, str]] = {
    "v4": (GKE_TPU, "tpu-v4-podslice"),
    "v5e": (GKE_TPU, "tpu-v5-lite-podslice"),
    "v5p": (GKE_TPU, "tpu-v5p-slice"),
    "v6e": (GKE_TPU, "tpu-v6e-slice"),
    "tpu7x": (GKE_TPU, "tpu7x"),
    "a100-40": (GKE_GPU, "nvidia-tesla-a100"),
    "a100-80": (GKE_GPU, "nvidia-a100-80gb"),
    "l4": (GKE_GPU, "nvidia-l4"),
    "h100": (GKE_GPU, "nvidia-h100-80gb"),
    "h200": (GKE_GPU, "nvidia-h200-141gb"),
    "b200": (GKE_GPU, "nvidia-b200"),
    "t4": (GKE_GPU, "nvidia-tesla-t4"),
    "v100-16": (GKE_GPU, "nvidia-tesla-v100"),
    "rtxpro6000": (GKE_GPU, "nvidia-rtx-pro-6000"),
    "gb200": (GKE_GPU, "nvidia-gb200"),
    "v100-32": (f"{NVIDIA}.product", "Tesla-V100-SXM2-32GB"),
    "a10g": (f"{NVIDIA}.product", "NVIDIA-A10G"),
    "a6000": (f"{NVIDIA}.product", "NVIDIA-RTX-A6000"),
    "l40": (f"{NVIDIA}.product", "NVIDIA-L40"),
    "l40s": (f"{NVIDIA}.product", "NVIDIA-L40S"),
    "rtx6000ada": (f"{NVIDIA}.product", "NVIDIA-RTX-6000-Ada-Generation"),
    "gh200": (f"{NVIDIA}.product", "NVIDIA-GH200-480GB"),
    "b300": (f"{NVIDIA}.product", "NVIDIA-B300-SXM6-AC"),
    "rtx3090": (f"{NVIDIA}.product", "NVIDIA-GeForce-RTX-3090"),
    "rtx4090": (f"{NVIDIA}.product", "NVIDIA-GeForce-RTX-4090"),
    "rtx5090": (f"{NVIDIA}.product", "NVIDIA-GeForce-RTX-5090"),
    "mi300x": (f"{AMD}.device-id", "74a1"),
    "mi355x": (f"{AMD}.device-id", "75a3"),
}
"""The label of the nodes that have each kind of chip. Sources: cloud.google.com/kubernetes-engine/docs/concepts, tpus
and gpus; GPUs that Google does not rent have the label of NVIDIA's GPU feature discovery, or of AMD's node labeller."""
HEADER = """\
# kubectl apply -f THIS_FILE          on a cluster with JobSet (jobset.sigs.k8s.io) and nodes with {accelerator}
# kubectl logs -f job/{name}-workers-0
# kubectl delete -f THIS_FILE         ends it: it saves first; applied again, it continues from its last checkpoint
# kubectl create secret generic podium-secrets --from-env-file=FILE      HF_TOKEN, WANDB_API_KEY: only if needed
"""
START = """\
ulimit -c 0
export PODRUN_WORKER=$((${{MEGASCALE_SLICE_ID:-0}} * {hosts} + JOB_COMPLETION_INDEX))
export PODRUN_JOB_DIR="$PODRUN_JOBS/{name}-$PODRUN_NONCE/$PODRUN_WORKER"
mkdir -p "$PODRUN_JOB_DIR"
exec python -m podium.cli train /etc/podium/config.yaml --plain
"""
"""The script that a container runs; `hosts` is the number of pods of a slice."""


def slurm_script(config: Config, *, nodes: int, gpus: int, time: str, python: str) -> str:
    """A script for `sbatch`: one process on each of `nodes` nodes, with `gpus` GPUs each (0: request none).

    Raises BadRequestError if the time is not in a Slurm format.
    """
    if not re.fullmatch(r"(\d+-)?\d{1,2}:\d\d:\d\d|\d+", time):
        raise BadRequestError(f"--time {time!r}: write HH:MM:SS, D-HH:MM:SS or minutes, as 24:00:00")
    return (
        (Path(__file__).parent / "slurm.sh")
        .read_text(encoding="utf-8")
        .format(
            name=_name(str(config.name)),
            nodes=nodes,
            time=time,
            notice_s=LEAST_S,
            run=shlex.quote(f"{config.runs_dir}/{config.name}"),
            gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
            config=to_yaml(config.document()).rstrip(),
            port=COORDINATOR_PORT,
            python=shlex.quote(python),
        )
    )


def k8s_manifest(config: Config, type_name: str, *, nodes: int, image: str, claim: str | None, spot: bool) -> str:
    """A ConfigMap and a JobSet, as YAML: one process per host of TPU slices, or per machine of `nodes` times the GPU
    type.

    Args:
        config: settings; `runs_dir` must be a bucket, or a path at which the volume of `claim` is mounted.
        type_name: accelerator type, such as v6e-16, 2xv6e-16 or h100-8.
        nodes: multiple of the GPU type; for TPU slices, the type determines the number of machines.
        image: container image with Podium and its dependencies.
        claim: name of a PersistentVolumeClaim that all pods can write to.
        spot: whether the node pool has spot machines.

    Raises:
        BadRequestError: GKE does not offer these machines, or the run's files would be lost with the pods.
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
    _check_machines(accelerator, nodes)
    pods = _Pods(accelerator=accelerator, name=_name(str(config.name)), times=nodes, spot=spot)
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{pods.name}-config"},
        "data": {"config.yaml": to_yaml(config.document())},
    }
    written = yaml.dump_all([settings, pods.job_set(image, folder, claim)], Dumper=_Dumper, sort_keys=False, width=120)
    return HEADER.format(accelerator=accelerator.name, name=pods.name) + written


def _check_machines(accelerator: Accelerator, nodes: int) -> None:
    """Raise BadRequestError for machines that GKE does not offer, or does not connect."""
    if accelerator.generation not in NODES:
        raise BadRequestError(
            f"--type {accelerator.name}: GKE's label for nodes with {accelerator.generation} is not known yet"
        )
    if accelerator.platform != "tpu":
        return
    if nodes != 1:
        raise BadRequestError(
            f"--nodes {nodes}: {accelerator.name} has {accelerator.hosts} machines; leave it out, or write several"
            f" slices as --type {nodes}x{accelerator.slice_name}"
        )
    if accelerator.slices == accelerator.hosts > 1:
        raise BadRequestError(
            f"--type {accelerator.name}: GKE joins only slices of several machines, and {accelerator.slice_name} "
            "has one; use larger slices"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pods:
    """The pods of a JobSet, and the resources that they request: one Job per TPU slice, or one for all GPUs."""

    accelerator: Accelerator
    name: str
    times: int
    """Multiple of the GPU type."""
    spot: bool

    @property
    def on_tpu(self) -> bool:
        return self.accelerator.platform == "tpu"

    @property
    def jobs(self) -> int:
        return self.accelerator.slices if self.on_tpu else 1

    @property
    def of_job(self) -> int:
        """Number of pods per job."""
        return self.accelerator.hosts * self.times // self.jobs

    @property
    def resource(self) -> str:
        if self.on_tpu:
            return "google.com/tpu"
        return AMD if of_amd(self.accelerator.capability) else NVIDIA

    def job_set(self, image: str, folder: str, claim: str | None) -> Fields:
        """The JobSet. It fails for exit statuses that a retry would have again, and otherwise restarts all pods
        together.
        """
        exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        lasting = {"containerName": "podium", "operator": "In", "values": list(LASTING)}
        volumes: list[Fields] = [{"name": "config", "configMap": {"name": f"{self.name}-config"}}]
        if claim:
            volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": claim}})
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_S,
            "nodeSelector": self.nodes(),
            "tolerations": [{"key": self.resource, "operator": "Exists", "effect": "NoSchedule"}],
            "containers": [self.container(image, folder, mounts_runs=bool(claim))],
            "volumes": volumes,
        }
        job = {
            "parallelism": self.of_job,
            "completions": self.of_job,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": lasting}]},
            "template": {"spec": pod},
        }
        ends = {"name": "lasting", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": self.name} | ({"annotations": exclusive} if self.on_tpu else {}),
            "spec": {
                "failurePolicy": {"maxRestarts": 100, "rules": [ends]},
                "replicatedJobs": [{"name": "workers", "replicas": self.jobs, "template": {"spec": job}}],
            },
        }

    def nodes(self) -> dict[str, str]:
        """The node labels to select by."""
        label, value = NODES[self.accelerator.generation]
        found = {label: value}
        if self.on_tpu:
            found["cloud.google.com/gke-tpu-topology"] = "x".join(map(str, self.accelerator.torus))
        return found | ({"cloud.google.com/gke-spot": "true"} if self.spot and label in (GKE_TPU, GKE_GPU) else {})

    def container(self, image: str, folder: str, *, mounts_runs: bool) -> Fields:
        """The container of each pod; `folder` contains the runs: a bucket, or the path of a mounted volume."""
        first = f"{self.name}-workers-0-0.{self.name}"
        variables: dict[str, object] = {
            "PODRUN_WORKERS": self.jobs * self.of_job,
            "PODRUN_COORDINATOR": f"{first}:{COORDINATOR_PORT}",
            "PODRUN_ACCELERATOR": self.accelerator.name,
            "PODRUN_ARRIVAL_S": ARRIVAL_S,
            "PODRUN_JOBS": f"{folder}/jobs" if mounts_runs else "/tmp",
        }
        labels = {"PODRUN_NONCE": "restart-attempt"}
        if self.jobs > 1:  # as GKE itself sets them for several slices
            variables |= {"MEGASCALE_NUM_SLICES": self.jobs, "MEGASCALE_COORDINATOR_ADDRESS": first}
            labels["MEGASCALE_SLICE_ID"] = "job-index"
        of_labels = {key: f"metadata.labels['jobset.sigs.k8s.io/{label}']" for key, label in labels.items()}
        return {
            "name": "podium",
            "image": image,
            "workingDir": "/tmp",
            "command": ["sh", "-c"],
            "args": [START.format(hosts=self.of_job, name=self.name)],
            "env": [
                *({"name": key, "value": str(value)} for key, value in variables.items()),
                *({"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in of_labels.items()),
            ],
            "envFrom": [{"secretRef": {"name": "podium-secrets", "optional": True}}],
            "resources": {"limits": {self.resource: self.accelerator.chips_per_host}},
            "volumeMounts": [
                {"name": "config", "mountPath": "/etc/podium"},
                *([{"name": "runs", "mountPath": folder}] if mounts_runs else []),
            ],
        }


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text as YAML block text."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _name(given: str) -> str:
    """Convert a run's name to a form that Kubernetes and Slurm accept, starting with a letter."""
    name = re.sub(r"[^a-z0-9-]+", "-", given.lower()).strip("-")[:40].strip("-")
    if not name:
        raise BadRequestError(f"name: {given!r} has no letter or digit; set name=my-run")
    return name if name[0].isalpha() else f"run-{name}"
