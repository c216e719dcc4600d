"""What `podium pod` prints instead of doing it: the commands of a dry run, and tasks for SkyPilot."""

import re
import shlex

import pytest

from tests.pods.pod_world import ZONES


def normal(command: str) -> str:
    """A command without what is made up when it is not run, or differs from time to time."""
    command = re.sub(r"127\.\d+\.\d+\.\d+|ADDRESS\d", "ADDRESS", command)
    command = re.sub(r"\b[0-9a-f]{16}\b(?= \$worker)|MARK", "MARK", command)
    command = re.sub(r"demo-(WORD|[0-9a-f]{8})\b", "demo-WORD", command)
    command = re.sub(r"stop-(WORD|[0-9a-f]{16})\b", "stop-WORD", command)
    command = re.sub(r"(PODRUN_NONCE)=(NONCE|[0-9a-f]{16})", r"\1=N", command)
    command = re.sub(r"podium-owner=[\w-]+", "podium-owner=ME", command)
    return re.sub(r"/\S*?/(?=podium-|[^/ ]+\.(yaml|sh|bundle)|secrets-)|podium-\w+/", "", command)


def test_a_dry_run_prints_what_would_be_run_and_runs_nothing(make_world, pod):
    world = make_world(workers=1)
    commands = {
        "up": ["up", "demo", "--type", "v6e-8", "--zone", ZONES[0]],
        "run": world.run_arguments("--slice", "demo"),
        "stop": ["stop", "demo"],
        "down": ["down", "demo"],
    }
    printed = {}
    for name, command in commands.items():
        status, printed[name], _ = pod(*command, "--dry-run")
        assert status == 0
    assert world.gcloud.commands == []
    assert world.fake.everything() == []
    for name, command in commands.items():
        world.gcloud.commands.clear()
        assert pod(*command)[0] == 0
        promised = {normal(line) for line in re.sub(r"\bZONE\b", ZONES[0], printed[name]).splitlines()}
        if name == "stop":
            job = next((world.hosts.homes[0] / "podrun" / "jobs").glob("*")).name
            promised = {re.sub(r"\bJOB\b", job, line) for line in promised}
        done = [
            shlex.join(argv) for argv in world.gcloud.commands if CHANGES & set(argv) and "agent logs" not in argv[-2]
        ]
        assert len(done) >= 1
        for line in done:
            assert normal(line) in promised, line


def test_a_dry_run_says_what_a_command_depends_on(make_world, pod):
    make_world()
    out = pod("up", "x", "--type", "v6e-16", "--zone", ZONES[1], "--zone", ZONES[2], "--dry-run")[1]
    comments = [line for line in out.splitlines() if line.startswith("# ")]
    assert "# until it is ready:" in comments
    creates = [line for line in out.splitlines() if " create x-WORD " in line]
    assert [f"--zone={zone}" in line for zone, line in zip(ZONES[1:], creates, strict=True)] == [True, True]
    assert "--zone=ZONE" in pod("down", "x", "--dry-run")[1]
    assert "CANARY" not in pod("stop", "--dry-run")[1]


CHANGES = {"create", "delete", "update", "scp", "ssh"}


@pytest.mark.parametrize("command", ["status", "logs", "stop", "ls", "reap", "ssh"])
def test_every_command_has_a_dry_run(make_world, pod, command):
    world = make_world()
    status, out, _ = pod(command, "--dry-run")
    assert status == 0
    assert out.startswith("gcloud config list ")
    assert "\ngcloud compute tpus " in out
    assert world.gcloud.commands == []


def test_sky_writes_a_task_with_the_config_in_it(make_world, pod):
    import yaml

    world = make_world()
    status, out, _ = pod("sky", str(world.config), "--type", "v6e-16", "--zone", ZONES[1])
    task = yaml.safe_load(out)
    assert status == 0
    assert task["resources"]["accelerators"] == "tpu-v6e-16"
    assert task["resources"]["infra"] == f"gcp/us-east5/{ZONES[1]}"
    assert task["envs"] == {"JAX_COORDINATOR_PORT": "8476", "REQUIRE_JAX_PROCESS_COUNT": "4"}
    written = task["run"].partition("<<'END_OF_CONFIG'\n")[2].partition("\nEND_OF_CONFIG")[0]
    assert yaml.safe_load(written)["runs_dir"] == str(world.shared)
    assert "CANARY" not in out


def test_skypilots_own_parser_takes_the_task(make_world, pod, tmp_path):
    sky = pytest.importorskip("sky", reason="skypilot is not installed")
    world = make_world()
    path = tmp_path / "task.yaml"
    path.write_text(pod("sky", str(world.config), "--type", "v6e-16")[1])
    task = sky.Task.from_yaml(str(path))
    (resources,) = task.resources
    assert (list(resources.accelerators), resources.use_spot) == (["tpu-v6e-16"], True)
