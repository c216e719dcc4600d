"""What the scripts for clusters say, without a cluster: by schemas, by refusals, and the one for Slurm in a shell."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from podium.accelerators import accelerators
from podium.config.schema import Config, TaskConfig
from podium.hosts.distributed import HostFailedError
from podium.job.guard import GuardError, MissingError
from podium.job.job_records import ProgressReport
from podium.job.save_notice import save_notice
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
    ironwood = manifest("tpu7x-16", spot=False)[1]["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = ironwood["template"]["spec"]
    assert ironwood["completions"] == 2
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu7x",
        "cloud.google.com/gke-tpu-topology": "2x2x2",
    }
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}}
    sixteen = manifest("h100-16")[1]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert sixteen["completions"] == 2


@pytest.mark.parametrize(("name", "expected"), [("on", "on"), ("Job_1", "job-1"), ("2026-11-22", "run-2026-11-22")])
def test_a_jobset_has_a_name_that_kubernetes_and_yaml_take(name, expected):
    assert manifest("v6e-8", a_config(name=name))[1]["metadata"]["name"] == expected


def test_every_machine_that_plans_know_has_a_label_and_a_number_of_pods():
    """Also those of kinds that Google does not rent; each pod asks for the chips of one of its machines."""
    for name, machine in accelerators().items():
        if machine.generation in ("tpu8t", "tpu8i"):  # Google has not published their labels
            continue
        job = manifest(name)[1]["spec"]["replicatedJobs"][0]["template"]["spec"]
        pod = job["template"]["spec"]
        (limit,) = pod["containers"][0]["resources"]["limits"].values()
        assert (job["completions"], limit * job["completions"]) == (machine.hosts, machine.chips), name
        assert pod["nodeSelector"], name
    rented_elsewhere = manifest("l40s-8")[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert rented_elsewhere["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L40S"}


def test_several_slices_are_jobs_of_one_set_that_count_their_processes_together():
    jobset = manifest("3xv6e-16", spot=False)[1]
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    assert (workers["replicas"], job["completions"]) == (3, 4)
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert variables["PODRUN_WORKERS"] == "12"
    assert variables["MEGASCALE_NUM_SLICES"] == "3"
    assert variables["MEGASCALE_COORDINATOR_ADDRESS"] == "job-workers-0-0.job"
    assert "MEGASCALE_NUM_SLICES" not in {
        each["name"]
        for each in manifest("v6e-16")[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
            "containers"
        ][0]["env"]
    }


STATUSES = {
    "an error of the run": (1, True),
    "wrong settings": (2, True),
    "workers that differ": (GuardError.exit_status, True),
    "an image without python": (127, True),
    "a worker that is missing": (MissingError.exit_status, False),
    "stuck": (124, False),
    "another worker was lost": (ProgressReport(None).failed(HostFailedError("worker 1 failed")), False),
    "killed": (137, False),
    "stopped": (143, False),
}


@pytest.mark.parametrize("what", STATUSES)
def test_only_what_another_attempt_would_meet_too_ends_the_set(what):
    status, ends = STATUSES[what]
    spec = manifest("v6e-16")[1]["spec"]
    (rule,) = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "In")
    assert (status in rule["onExitCodes"]["values"]) == ends
    assert [each["action"] for each in spec["failurePolicy"]["rules"]] == ["FailJobSet"]


@pytest.mark.parametrize(
    ("type_name", "nodes"), [("v6e-16", 1), ("2xv6e-16", 1), ("v5litepod-8", 1), ("h100-8", 2), ("rtx4090-2", 1)]
)
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
    "a label that is not known": ("tpu8t-8", {}, {}, "label for nodes with tpu8t is not known yet"),
    "nodes of a slice": ("v6e-16", {"nodes": 3}, {}, "v6e-16 has 4 machines; .*--type 3xv6e-16"),
    "slices of one machine": ("2xv6e-8", {}, {}, "joins only slices of several machines, and v6e-8 has one"),
    "slices of GPUs": ("2xh100-8", {}, {}, "the number of GPUs says how many machines there are, as h100-16"),
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
SLEEP = """#!/bin/sh
echo sleep "$1" >> "$ASKED"
exec /usr/bin/sleep 0.5
"""
SCONTROL = """#!/bin/sh
case "$2" in
    hostnames) echo n1; echo n2;;
    node) echo "   NodeAddr=10.0.0.1 NodeHostName=n1";;
    job) echo "   StartTime=2026-01-01T00:00:00 EndTime=$(date -d "@$ENDS" +%Y-%m-%dT%H:%M:%S) Deadline=N/A";;
    *) echo "$@" >> "$ASKED";;
esac
"""
DATE = """#!/bin/sh
if [ "$1" = +%s ]; then echo "$NOW"; else exec /usr/bin/date "$@"; fi
"""
PYTHON = """#!/bin/sh
case "$2" in
    podium.cli)
        env | grep ^PODRUN_ > "$PODRUN_JOB_DIR/seen"
        cp "$4" "$PODRUN_JOB_DIR/config"
        while [ "$TRAINS_UNTIL" ] && ! grep -qs "$TRAINS_UNTIL" "$ASKED"; do /usr/bin/sleep 0.05; done;;
    podium.job.save_notice) echo "$NOTICE_S";;
esac
"""


def run_script(folder: Path, python: Path, *, config: Config, left_s: int, **more: str) -> list[str]:
    """Run the script for Slurm on two nodes whose commands are the ones above; the commands that it gave to Slurm.

    The job's time is over in `left_s`, and its clock stands still; `more` are further variables.
    """
    scancel = '#!/bin/sh\necho scancel "$@" >> "$ASKED"\n'
    commands = {
        "srun": SRUN,
        "scontrol": SCONTROL,
        "scancel": scancel,
        "sleep": SLEEP,
        "date": DATE,
        python.name: PYTHON,
    }
    for path, text in commands.items():
        (folder / path).write_text(text)
        (folder / path).chmod(0o755)
    script = slurm_script(config, nodes=2, gpus=8, time="1-00:00:00", python=str(python))
    for line in ("--gpus-per-node=8", "--exclusive", "--mem=0", "--signal=B:USR1@120", "--requeue"):
        assert f"#SBATCH {line}\n" in script
    given = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_SUBMIT_DIR": str(folder),
        "NOW": "1767225600",
        "ENDS": str(1_767_225_600 + left_s),
        "ASKED": str(folder / "asked"),
        "NOTICE_S": "120",
        "TRAINS_UNTIL": "",
        **more,
    }
    done = subprocess.run(["bash"], input=script, env=given, capture_output=True, text=True, cwd=folder, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    asked = folder / "asked"
    return asked.read_text().splitlines() if asked.exists() else []


def test_the_script_for_slurm_tells_each_process_its_place_whatever_its_python_is_called(tmp_path):
    prompt = "One line.\nEND_OF_CONFIG\n$(id) `id` $HOME"
    config = a_config(tasks=[TaskConfig(name="arithmetic", system_prompt=prompt)])
    run_script(tmp_path, tmp_path / "my python's $(id)", config=config, left_s=86_400)
    for process in range(2):
        folder = tmp_path / "podium-jobs" / "7-0" / str(process)
        seen = dict(line.split("=", 1) for line in (folder / "seen").read_text().splitlines())
        assert seen["PODRUN_WORKER"] == str(process)
        assert (seen["PODRUN_WORKERS"], seen["PODRUN_COORDINATOR"]) == ("2", "10.0.0.1:8476")
        assert yaml.safe_load((folder / "config").read_text())["tasks"][0]["system_prompt"] == prompt


@pytest.mark.parametrize(("last_save", "notice_s"), [("120", 120), ("1800", 1800), ("90000", 43_200)])
def test_a_job_is_asked_to_save_when_twice_its_last_save_is_left_and_requeued_before_the_end(
    tmp_path, last_save, notice_s
):
    """Of a day, at most half is notice. `sleep` hardly sleeps, and the step ends after the end of the time."""
    saves = {"NOTICE_S": last_save, "TRAINS_UNTIL": "requeue"}
    asked = run_script(tmp_path, tmp_path / "python", config=a_config(), left_s=86_400, **saves)
    first, second = (int(line.removeprefix("sleep ")) for line in asked if line.startswith("sleep "))
    assert (first, second) == (86_400 - notice_s, 86_380)
    assert [line for line in asked if line.startswith("scancel")] == ["scancel --signal=TERM 7.0"]
    assert asked[-1] == "requeue 7"


@pytest.mark.parametrize(("took_s", "notice_s"), [(None, 120), (0.5, 120), (60.5, 121), (900, 1800)])
def test_the_notice_is_twice_the_last_save(tmp_path, took_s, notice_s):
    """As orbax records it beside each step; the older step's is not read."""
    for step, seconds in ((9, 5000.0), (10, took_s)):
        folder = tmp_path / "checkpoints" / str(step)
        folder.mkdir(parents=True)
        if took_s is not None:
            times = {"init_timestamp_nsecs": 10**18, "commit_timestamp_nsecs": int(10**18 + seconds * 1e9)}
            (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(times))
    assert save_notice(tmp_path) == notice_s
    assert save_notice(tmp_path / "none") == 120
