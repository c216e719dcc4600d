"""What the scripts for clusters say, without a cluster: by schemas, by refusals, and the one for Slurm in a shell."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from podium.config.schema import Config, TaskConfig
from podium.pods.clusters import k8s_manifest, slurm_script
from podium.pods.slices import BadRequestError


def a_config(**changes: Any) -> Config:
    own = {"name": "job", "model": "demo", "tasks": [TaskConfig(name="arithmetic")], "runs_dir": "/mnt/runs"}
    return Config(**{**own, **changes})


def manifest(
    type_name: str, config: Config | None = None, *, nodes: int = 1, spot: bool = True, claim: str | None = "runs"
) -> list[dict[str, Any]]:
    """The ConfigMap and the JobSet."""
    text = k8s_manifest(config or a_config(), type_name, nodes=nodes, image="podium:1", claim=claim, spot=spot)
    return list(yaml.safe_load_all(text))


def test_a_jobset_asks_for_the_machines_of_a_slice():
    settings, jobset = manifest("v6e-16", a_config(steps=3))
    assert yaml.safe_load(settings["data"]["config.yaml"])["steps"] == 3
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 0)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}}
    gpus = manifest("h100-8", nodes=2, spot=False)[1]
    job = gpus["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == 2
    assert job["template"]["spec"]["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert job["template"]["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}


@pytest.mark.parametrize(("name", "expected"), [("Job_1", "job-1"), ("on", "on"), ("2026-11-22", "run-2026-11-22")])
def test_a_jobset_has_a_name_that_kubernetes_and_yaml_take(name, expected):
    assert manifest("v6e-8", a_config(name=name))[1]["metadata"]["name"] == expected


@pytest.mark.parametrize(("type_name", "nodes"), [("v6e-16", 1), ("v5litepod-8", 1), ("h100-8", 2)])
def test_the_published_schema_takes_the_manifest(type_name, nodes):
    """JobSet's own (its CRD at 08dfbdfd, Apache 2.0), and in it Kubernetes' of jobs and pods; no field is unknown."""
    schema = json.loads((Path(__file__).parent / "jobset_schema.json").read_text())
    jobset = manifest(type_name, nodes=nodes)[1]
    assert violations(jobset, schema) == []
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"] |= {"completion": 1, "completions": "4"}
    assert violations(jobset, schema) == [
        "spec.replicatedJobs[0].template.spec.completions: '4' is no integer",
        "spec.replicatedJobs[0].template.spec.completion: unknown",
    ]


TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "number": (int, float),
}


def violations(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """What is wrong with a value by a schema of the kind that Kubernetes publishes."""
    names = schema.get("type", [])
    wanted = [kind for name in ([names] if isinstance(names, str) else names) for kind in TYPES[name]]
    if wanted and not isinstance(value, tuple(wanted)):
        return [f"{where}: {value!r} is no {names}"]
    found = [] if value in schema.get("enum", [value]) else [f"{where}: {value!r} is none of {schema['enum']}"]
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += violations(item, schema.get("items", {}), f"{where}[{index}]")
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        found += [f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in value]
        for name, item in value.items():
            path = f"{where}.{name}".lstrip(".")
            if name not in known and others is False:
                found.append(f"{path}: unknown")
            else:
                found += violations(item, known.get(name) or (others if isinstance(others, dict) else {}), path)
    return found


REFUSED = {
    "no claim": ("v6e-16", {"claim": None}, {}, "would be lost with the pods"),
    "relative": ("v6e-16", {}, {"runs_dir": "runs"}, "would be lost with the pods"),
    "no such type": ("v6e-17", {}, {}, "unknown accelerator"),
    "TPU7x": ("tpu7x-8", {}, {}, "Google rents TPU7x on GKE alone, not as Cloud TPU VMs; its figures are not here yet"),
    "nodes of a slice": ("v6e-16", {"nodes": 3}, {}, "v6e-16 has 4 machines; leave it out"),
    "claim": ("v6e-16", {"claim": "a b"}, {}, "--claim 'a b': write lower-case letters, digits"),
    "image": ("v6e-16", {"image": "a\nb: c"}, {}, "--image .*: write a name, as REGISTRY/IMAGE:TAG"),
    "folder": ("v6e-16", {}, {"runs_dir": "/mnt/$(id)"}, "runs_dir '/mnt/\\$\\(id\\)': write letters"),
    "name": ("v6e-16", {}, {"name": "..."}, "name: '...' has no letter or digit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_on_kubernetes_is_refused(case):
    type_name, options, changes, message = REFUSED[case]
    given = {"nodes": 1, "image": "podium:1", "claim": "runs", "spot": True, **options}
    with pytest.raises(BadRequestError, match=message):
        k8s_manifest(a_config(**changes), type_name, **given)


def test_what_slurm_does_not_read_is_refused():
    with pytest.raises(BadRequestError, match="write HH:MM:SS"):
        slurm_script(a_config(), nodes=1, gpus=0, time="soon", python="python")


SRUN = """#!/bin/sh
# As Slurm's with two nodes: the command, once for each, with its number.
while [ "$1" != bash ]; do shift; done
SLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@" & wait
"""
SCONTROL = """#!/bin/sh
case "$2" in hostnames) echo n1; echo n2;; node) echo "   NodeAddr=10.0.0.1 NodeHostName=n1";; esac
"""
PYTHON = """#!/bin/sh
case "$2" in podium.cli) env | grep ^PODRUN_ > "$PODRUN_JOB_DIR/seen"; cp "$4" "$PODRUN_JOB_DIR/config";; esac
"""


def test_the_script_for_slurm_tells_each_process_its_place_whatever_its_python_is_called(tmp_path):
    python = tmp_path / "my python's $(id)"
    for path, text in ((tmp_path / "srun", SRUN), (tmp_path / "scontrol", SCONTROL), (python, PYTHON)):
        path.write_text(text)
        path.chmod(0o755)
    prompt = "One line.\nEND_OF_CONFIG\n$(id) `id` $HOME"
    config = a_config(tasks=[TaskConfig(name="arithmetic", system_prompt=prompt)])
    script = slurm_script(config, nodes=2, gpus=8, time="1-00:00:00", python=str(python))
    assert "#SBATCH --gpus-per-node=8\n" in script
    given = {
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **given}
    done = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for process in range(2):
        folder = tmp_path / "podium-jobs" / "7-0" / str(process)
        seen = dict(line.split("=", 1) for line in (folder / "seen").read_text().splitlines())
        assert seen["PODRUN_WORKER"] == str(process)
        assert (seen["PODRUN_WORKERS"], seen["PODRUN_COORDINATOR"]) == ("2", "10.0.0.1:8476")
        assert yaml.safe_load((folder / "config").read_text())["tasks"][0]["system_prompt"] == prompt
