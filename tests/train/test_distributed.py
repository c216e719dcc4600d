"""Real processes of jax.distributed on loopback: they train as one process does, stop together, and say who failed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import scripted
from held_steps import CARRIED
from host_process import COUNT, ROWS
from processes import below, runs
from tiny_runs import SHORT, assert_same_run, make_config, merged, read_records, trained

from podium.job.job_records import first_failure, outcome, read_json
from podium.observe.run_dir import saved_steps
from podium.train.loop import train

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0
SETTINGS: dict[str, Any] = {
    **SHORT,
    "prompts_per_step": 6,
    "rollout": {"slots": 16, "prefill_rows": 8},
    "train": {"rows_per_device": 2, "optimizer": {"name": "sgd", "learning_rate": 1e-2}},
    "eval": {"questions": 6, "every_steps": 3, "at_start": False, "at_end": False},
    "checkpoint": {"every_steps": 2},
}
NAMED = "dp:2,fsdp:2,tp:2"
GROUPS = "groups"
"""The run in which the devices of a host hold one copy of the rollout's weights between them."""
OVER_HOSTS = "over-hosts"
"""The run in which the devices of all hosts do, so that they decode together."""
GRIDS = [
    # Two runs of two processes: slow, whichever test asks for them first.
    pytest.param((2, 1, {"full": "host_local", OVER_HOSTS: "auto"}), id="2x1", marks=pytest.mark.slow),
    *(
        pytest.param(grid, id=name, marks=pytest.mark.long)
        for name, grid in {
            "2x4": (2, 4, {"full": "host_local", GROUPS: "auto", OVER_HOSTS: "auto"}),
            "2x4-auto": (2, 4, {"full": "auto", "named": NAMED}),
            "4x2": (4, 2, {"full": "auto", "local": "host_local", "named": NAMED}),
        }.items()
    ),
]
"""Number of hosts, devices of each, and the mesh of each run by its name."""
EXACT = ("train-other/loss", "train-reward/total/mean", "eval/accuracy", "rollout/completion_tokens")
LOCAL = (
    "time/",
    "throughput/",
    "memory/",
    "tokens/padding",
    "tokens/prompt",  # rows of several devices are balanced, and a moved completion takes a copy of its prompt along
    "rollout/slot_utilisation",  # hosts with little work left have smaller programs than one host with all of it
    "rollout/slots_busy",  # devices that share a program take several decode steps before they look who is left
    "rollout/prefill_tokens",  # and copy prompts between fewer devices, where others prefill them again
    "rollout/pages_peak",
    "rollout/prefill_s",
    "rollout/decode_s",
    "rollout/tokens_per_s",
    "async/waited_s",
    "async/rebuild_s",
)


class Together(NamedTuple):
    """What several processes made together."""

    folder: Path
    """The runs are below it."""
    meshes: dict[str, str]
    """By the name of the run."""
    found: list[dict[str, Any]]
    """By process: what it saw."""


class Hosts:
    """Processes that are one job, each with its own folder."""

    def __init__(self, folder: Path, order: dict[str, Any], *, hosts: int, devices: int) -> None:
        self.folders = [folder / f"worker-{worker}" for worker in range(hosts)]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "order.json").write_text(json.dumps(order))
        port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        for worker, job in enumerate(self.folders):
            job.mkdir()
            told = {
                "PODRUN_JOB_DIR": str(job),
                "PODRUN_WORKER": str(worker),
                "PODRUN_WORKERS": str(hosts),
                "PODRUN_COORDINATOR": f"127.0.0.1:{port}",
                "PODRUN_ARRIVAL_S": "60",
                "JAX_NUM_CPU_DEVICES": str(devices),
                "PYTHONPATH": str(ROOT),
            }
            command = [sys.executable, str(ROOT / "tests/train/host_process.py"), str(folder / "order.json")]
            with (job / "log").open("wb") as log:
                environment = {**os.environ, **told}
                self.processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def statuses(self) -> list[int]:
        """The exit status of each, when all have ended."""
        return [process.wait(LIMIT_S) for process in self.processes]

    def logs(self) -> str:
        """What they printed."""
        return "\n".join((job / "log").read_text()[-3000:] for job in self.folders)

    def ends(self) -> list[dict[str, Any]]:
        """What their supervisors would say of them."""
        return [
            {
                "host": f"host-{worker}",
                "state": "finished",
                "exit": process.returncode,
                "record": read_json(job / "record.json")
                or {
                    "kind": "signal",
                    "exit": 128 - (process.returncode or 0),
                    "message": "SIGABRT",
                    "time": time.time(),
                }
                | dict.fromkeys(("step", "phase", "position")),
                "progress": read_json(job / "progress.json"),
            }
            for worker, (process, job) in enumerate(zip(self.processes, self.folders, strict=True))
        ]

    def close(self) -> None:
        """End those that still run."""
        for process in self.processes:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def shared_by_all(metrics: dict[str, Any]) -> dict[str, float]:
    """What depends neither on a process's clock nor on how many rows of a batch are left over."""
    names = [name for name in metrics if not name.startswith(LOCAL) and name != "rollout/compilations"]
    return {name: metrics[name] for name in names}


@pytest.fixture(scope="module")
def alone(run_of) -> Path:
    """The run of one process with one device, a step longer than the others."""
    run = run_of(**{**SETTINGS, "steps": 4})
    assert all(line["optimizer/gradient_norm"] > 0 for line in trained(run))
    return run


def _laid_out(name: str, devices: int) -> dict[str, Any]:
    """The settings of a run on a number of devices."""
    layouts = {GROUPS: {"layout": "tensor"}, OVER_HOSTS: {"layout": "hybrid", "group_chips": devices}}
    return {**SETTINGS, "rollout": {**SETTINGS["rollout"], **layouts.get(name, {})}}


@pytest.fixture(scope="module", params=GRIDS)
def together(request, tiny_model, tmp_path_factory) -> Together:
    """One run on several meshes, by several processes."""
    hosts, devices, meshes = request.param
    folder = tmp_path_factory.mktemp("hosts")
    configs = [
        make_config(tiny_model, folder / "runs", name=name, mesh=mesh, **_laid_out(name, hosts * devices))
        for name, mesh in meshes.items()
    ]
    order = {"configs": [config.model_dump(mode="json") for config in configs]}
    job = Hosts(folder / "job", order, hosts=hosts, devices=devices)
    try:
        assert job.statuses() == [0] * hosts, job.logs()
    finally:
        job.close()
    return Together(folder / "runs", meshes, [read_json(each / "found.json") or {} for each in job.folders])


def test_hosts_train_as_one_process_does(together, alone):
    """On every mesh: the same metrics on all hosts, and to 1e-6 those of one process."""
    folder, meshes, found = together
    expected = [shared_by_all(record) for record in read_records(alone / "metrics.jsonl")]
    for name in meshes:
        written = [shared_by_all(record) for record in read_records(folder / name / "metrics.jsonl")]
        for each in found:
            assert [shared_by_all(record) for record in each["metrics"][name]] == written
        assert_equal_runs(written, expected[:-1])


def texts(run: Path) -> dict[str, list[str]]:
    """What was trained on, by prompt."""
    records = (each for each in read_records(run / "samples.jsonl") if each["split"] == "train")
    return {each["prompt"]: [completion["text"] for completion in each["completions"]] for each in records}


def test_hosts_draw_the_completions_of_one_process(together, alone):
    """Each host schedules its own requests, in its own layouts; no token knows of it."""
    folder, meshes, _ = together
    expected = texts(alone)
    for name in meshes:
        found = texts(folder / name)
        assert len(found) == 3 * SETTINGS["prompts_per_step"] // 2  # every second group is kept
        assert found == {prompt: expected[prompt] for prompt in found}


def said(run: Path) -> dict[str, list[Any]]:
    """The messages, rewards and ends of the conversations that were trained on, by prompt."""
    names = ("messages", "turn_rewards", "reward", "finish_reason")
    records = (each for each in read_records(run / "samples.jsonl") if each["split"] == "train")
    return {each["prompt"]: [[one[name] for name in names] for one in each["completions"]] for each in records}


@pytest.mark.long
@pytest.mark.parametrize("mesh", [NAMED, "host_local", "auto"])
def test_one_process_trains_the_same_on_every_mesh(mesh, alone, tiny_model, tmp_path):
    config = make_config(tiny_model, tmp_path, mesh=mesh, **SETTINGS)
    assert train(config, plain=True) == 0
    written, expected = (read_records(run / "metrics.jsonl") for run in (tmp_path / "run", alone))
    assert_equal_runs(*([shared_by_all(record) for record in records] for records in (written, expected[:-1])))


def assert_equal_runs(written: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Losses and rewards to 1e-6, all else to 1e-5."""
    assert [record["step"] for record in written] == [1, 2, 3, 3]
    for record, reference in zip(written, expected, strict=True):
        assert record == pytest.approx(reference, rel=1e-5, abs=1e-5)
        exact = {name: reference[name] for name in EXACT if name in reference}
        assert {name: record[name] for name in exact} == pytest.approx(exact, rel=1e-6, abs=1e-6)


def test_one_process_writes_what_is_shared(together):
    folder, meshes, _ = together
    for name in meshes:
        assert [record["step"] for record in read_records(folder / name / "lengths.jsonl")] == [1, 2, 3]
        assert saved_steps(folder / name / "checkpoints") == [2, 3]
        assert json.loads((folder / name / "summary.json").read_text())["steps"] == 3


def test_rows_of_a_host_are_contiguous(together):
    _, meshes, found = together
    for mesh in meshes.values():
        for each in found:
            rows = each["rows"][mesh]
            assert rows == list(range(rows[0], rows[-1] + 1))
        assert sorted({row for each in found for row in each["rows"][mesh]}) == list(range(ROWS))


def test_counts_of_terabytes_and_messages_of_any_length_are_exact(together):
    found = together.found
    for each in found:
        assert sum(each["counts"]) == sum(COUNT + worker for worker in range(len(found)))
        assert each["sizes"] == [10 ** (worker + 2) for worker in range(len(found))]
        assert each["whole"] == list(range(ROWS))
        assert each["failure"] == "the folder is in use"
    assert [index for each in found for index in each["share"]] == list(range(10))


def test_a_run_of_several_hosts_goes_on_in_one_process(together, alone, one_device, tiny_model, tmp_path):
    """The checkpoint of all hosts is read by one."""
    shutil.copytree(together.folder / "full", tmp_path / "full")
    config = make_config(tiny_model, tmp_path, name="full", **{**SETTINGS, "steps": 4})
    assert train(config, plain=True) == 0
    found, expected = (shared_by_all(read_records(run / "metrics.jsonl")[-1]) for run in (tmp_path / "full", alone))
    assert found["step"] == 4
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert found["train-other/loss"] == pytest.approx(expected["train-other/loss"], rel=1e-6, abs=1e-6)


@pytest.mark.long
def test_hosts_that_carry_completions_over_draw_what_one_process_waits_for(tiny_model, tmp_path):
    """Two processes of two devices, at a learning rate too small to change a weight, and one process of eight."""
    rollout = {"max_new_tokens": 10, "slots": 8, "prefill_rows": 8, "refill_steps": 2}
    optimizer = {"optimizer": {"name": "sgd", "learning_rate": 1e-30}}
    changes = merged(SETTINGS, {"rollout": rollout, "train": optimizer, "metrics": {"samples_every": 1}})
    carried = merged(changes, {"rollout": {"in_flight": 1.5, "max_staleness": 1}})
    config = make_config(tiny_model, tmp_path, name="carried", steps=4, **carried)
    job = Hosts(tmp_path / "job", {"configs": [config.model_dump(mode="json")]}, hosts=2, devices=2)
    try:
        assert job.statuses() == [0, 0], job.logs()
    finally:
        job.close()
    assert train(make_config(tiny_model, tmp_path, name="waits", steps=5, **changes), plain=True) == 0
    found, expected = texts(tmp_path / "carried"), texts(tmp_path / "waits")
    assert len(found) == 4 * 6
    assert found == {prompt: expected[prompt] for prompt in found}
    records = read_records(tmp_path / "carried" / "metrics.jsonl")
    steps = [record for record in records if "async/in_flight" in record]
    assert [record["async/in_flight"] for record in steps] == [3] * 4
    assert max(record["async/staleness/max"] for record in steps) == 1
    for each in job.folders:
        metrics = (read_json(each / "found.json") or {})["metrics"]["carried"]
        assert [shared_by_all(record) for record in metrics] == [shared_by_all(record) for record in records]


@pytest.mark.long
def test_hosts_hold_the_conversations_of_one_process(tiny_model, template, tmp_path):
    """Each host decodes those of its own prompts, or all hosts decode all of them together."""
    talk = {
        "chat_template": template,
        "tasks": [{"name": "arithmetic", "environment": "scripted:Slow"}],
        "environments": {"workers": 1},
        "rollout": {"max_prompt_tokens": 24, "max_new_tokens": 8, "max_episode_tokens": 60, "page_tokens": 4},
        "metrics": {"samples_every": 1},
    }
    layouts = {"apart": {}, OVER_HOSTS: {"rollout": {"layout": "hybrid", "group_chips": 2}}, "alone": {}}
    changes = merged(SETTINGS, talk)
    configs = {
        name: make_config(tiny_model, tmp_path, name=name, steps=2, **merged(changes, layout))
        for name, layout in layouts.items()
    }
    order = {"configs": [configs[name].model_dump(mode="json") for name in ("apart", OVER_HOSTS)]}
    job = Hosts(tmp_path / "job", order, hosts=2, devices=1)
    try:
        assert job.statuses() == [0, 0], job.logs()
    finally:
        job.close()
    assert train(configs["alone"], plain=True) == 0
    expected = texts(tmp_path / "alone")
    assert len(expected) == 2 * 6
    for name in ("apart", OVER_HOSTS):
        assert texts(tmp_path / name) == expected
        written = [record for record in read_records(tmp_path / name / "metrics.jsonl") if "env/turns/max" in record]
        assert [record["env/turns/max"] for record in written] == [3, 3]
        assert [record["env/failed"] for record in written] == [0, 0]
        whole = [record for record in read_records(tmp_path / "alone" / "metrics.jsonl") if "env/turns/max" in record]
        for key in ("env/reply_tokens", "train-reward/total/mean", "train-other/total_valid_token_count"):
            assert [record[key] for record in written] == pytest.approx([record[key] for record in whole])


@pytest.mark.long
def test_hosts_that_carry_conversations_over_hold_those_that_one_process_waits_for(
    tiny_model, template, tmp_path, monkeypatch
):
    """At a learning rate too small to change a weight: each host decodes its own, or all decode together."""
    monkeypatch.setenv(scripted.LATEST, "0.5")  # replies are so late that some conversations cross an update
    talk = {
        "chat_template": template,
        "tasks": [{"name": "arithmetic", "environment": "scripted:Late"}],
        "environments": {"workers": 1},
        "rollout": {"max_prompt_tokens": 24, "max_new_tokens": 8, "max_episode_tokens": 60, "page_tokens": 4},
        "train": {"optimizer": {"name": "sgd", "learning_rate": 1e-30}},
        "metrics": {"samples_every": 1},
    }
    carried = {"in_flight": 1.5, "max_staleness": 1, "refill_steps": 2}
    rollouts = {
        "apart": carried,
        "paced": {**carried, "reproducible": True},
        OVER_HOSTS: {**carried, "layout": "hybrid", "group_chips": 2},
    }
    changes = merged(SETTINGS, talk)
    configs = [
        make_config(tiny_model, tmp_path, name=name, steps=8, **merged(changes, {"rollout": rollout}))
        for name, rollout in rollouts.items()
    ]
    job = Hosts(
        tmp_path / "job", {"configs": [config.model_dump(mode="json") for config in configs]}, hosts=2, devices=1
    )
    try:
        assert job.statuses() == [0, 0], job.logs()
    finally:
        job.close()
    assert train(make_config(tiny_model, tmp_path, name="waits", steps=9, **changes), plain=True) == 0
    expected = said(tmp_path / "waits")
    for name in rollouts:
        found = said(tmp_path / name)
        assert len(found) == 8 * 6
        assert found == {prompt: expected[prompt] for prompt in found}
        records = read_records(tmp_path / name / "metrics.jsonl")
        steps = [record for record in records if "async/in_flight" in record]
        assert [record["async/in_flight"] for record in steps] == [3] * 8
        assert max(record["async/staleness/max"] for record in steps) == 1
        assert sum(record["async/crossed_share"] for record in steps) > 0
        assert [(record["env/failed"], record["env/changed"]) for record in steps] == [(0, 0)] * 8
        for each in job.folders:
            metrics = (read_json(each / "found.json") or {})["metrics"][name]
            assert [shared_by_all(record) for record in metrics] == [shared_by_all(record) for record in records]


def wait_for(job: Hosts, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert all(process.poll() is None for process in job.processes), job.logs()
        assert time.monotonic() < deadline, job.logs()
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    """Starts two processes of one device; they are ended with the test."""
    started: list[Hosts] = []

    def start(order: dict[str, Any]) -> Hosts:
        started.append(Hosts(tmp_path / f"job-{len(started)}", order, hosts=2, devices=1))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.long
@pytest.mark.parametrize("layout", [{}, {"layout": "hybrid", "group_chips": 2}], ids=["apart", "together"])
def test_sigterm_to_one_host_in_a_long_rollout_saves_on_all_and_ends_all(layout, start, tiny_model, tmp_path):
    """A step takes many seconds here; they stop in the middle of one, with the step before it saved."""
    rollout = {"refill_steps": 1, **layout}
    config = make_config(tiny_model, tmp_path, steps=50, eval={"at_start": False}, rollout=rollout)
    job = start({"slow": config.model_dump(mode="json"), "poll_s": 3.0})
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(job, lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) == 1)
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.statuses() == [143, 143], job.logs()
    ends = job.ends()
    assert [each["record"]["kind"] for each in ends] == ["stopped", "stopped"]
    assert [each["record"]["message"] for each in ends] == ["stopped by signal 15 after step 1, which is saved"] * 2
    assert (outcome(ends), first_failure(ends)) == ("stopped", None)
    assert saved_steps(tmp_path / "run" / "checkpoints") == [1]
    assert len(read_records(metrics)) == 1


@pytest.mark.long
def test_an_error_of_one_host_loses_no_whole_step_of_any(start, tiny_model, tmp_path):
    """A reward function that fails on worker 1 in the third step: both save the second, and worker 1 is named."""
    task = {"name": "arithmetic", "rewards": {"correct": 1.0, "host_process:fails_on_the_second": 1.0}}
    quiet = {"eval": {"at_start": False, "at_end": False}, "checkpoint": {"every_steps": 0, "every_minutes": 0.0}}
    config = make_config(tiny_model, tmp_path, **{**quiet, "tasks": [task], "steps": 9})
    job = start({"slow": config.model_dump(mode="json"), "poll_s": 0.0})
    assert 0 not in job.statuses(), job.logs()
    failure = str(first_failure(job.ends()))
    assert failure.startswith("worker 1 (host-1) failed first in rollout after step 2: FunctionError: "), job.logs()
    assert saved_steps(tmp_path / "run" / "checkpoints") == [2]
    assert "step 2 is saved; to continue" in job.logs()


@pytest.mark.long
def test_a_host_killed_while_its_tools_run_ends_all_and_they_go_on_bit_for_bit(start, tiny_model, template, tmp_path):
    """Conversations of the step before are in flight; the tools of both hosts have started processes."""
    talk = {
        "chat_template": template,
        "tasks": [{"name": "arithmetic", "environment": "benches.children.talking:Talking"}],
        "environments": {"workers": 1},
        "rollout": {
            **CARRIED, "reproducible": True, "max_prompt_tokens": 24, "max_new_tokens": 8, "max_episode_tokens": 60,
            "page_tokens": 4,
        },
        "metrics": {"samples_every": 1},
        "checkpoint": {"every_steps": 1},
    }  # fmt: skip
    changes = merged(SETTINGS, talk)
    orders = {
        name: {"slow": make_config(tiny_model, tmp_path, name=name, steps=4, **changes).model_dump(mode="json")}
        | {"poll_s": 0.0}
        for name in ("whole", "killed")
    }
    whole = start(orders["whole"])
    assert whole.statuses() == [0, 0], whole.logs()
    job, metrics = start(orders["killed"]), tmp_path / "killed" / "metrics.jsonl"
    wait_for(job, lambda: metrics.exists() and bool(metrics.read_bytes()) and any(job.folders[1].glob("tools/*")))
    children = [child for process in job.processes for child in below(process.pid)]
    job.processes[1].send_signal(signal.SIGKILL)
    assert 0 not in job.statuses(), job.logs()
    assert len(children) >= 4  # of the environments and of their tools, on both
    assert 0 < len(read_records(metrics)) < 4
    again = start(orders["killed"])
    assert again.statuses() == [0, 0], again.logs()
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert sum(record["async/crossed_share"] for record in trained(tmp_path / "whole")) > 0
    assert not any(map(runs, children))


def test_the_host_that_failed_first_is_named(start):
    """Although all end: jax aborts the others, or they lose its connection."""
    job = start({"fails": 1})
    assert 0 not in job.statuses(), job.logs()
    assert first_failure(job.ends()) == (
        "worker 1 (host-1) failed first in sums: RuntimeError: a bug of one host; worker 0 ended after it"
    )
