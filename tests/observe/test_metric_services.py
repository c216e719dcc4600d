import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from podium.config.schema import Config
from podium.files import read_lines
from podium.observe.run_dir import METRICS, RunDir, run_home
from podium.observe.services import ServiceError, service_names
from podium.observe.writers import MetricWriter


def make_config(tmp_path, **metrics):
    return Config.model_validate(
        {
            "name": "demo",
            "runs_dir": str(tmp_path / "runs"),
            "model": "demo",
            "tasks": [{"name": "arithmetic"}],
            "metrics": metrics,
        }
    )


SAMPLES = [
    {
        "step": 2,
        "split": "train",
        "question": "1 + 1?",
        "answer": "2",
        "completions": [
            {"text": "a|b\n<script>", "reward": 0.5, "parts": {"correct": 0.0}, "tokens": 3, "finish_reason": "stop"},
            {"text": "2", "reward": 1.0, "parts": {"correct": 1.0}, "tokens": 1, "finish_reason": "length"},
        ],
    }
]


def write_run(config, lines, *, resume_at=None, announce=print, samples=()):
    with RunDir.open(run_home(config.runs_dir, config.name), config.document()) as run:
        if resume_at is not None:
            run.truncate(resume_at)
        with MetricWriter(run, config.metrics, announce=announce) as writer:
            for step, metrics in lines:
                writer.write(step, metrics)
            writer.write_samples(2, samples)
        return run


class BrokenService:
    """A service that fails when it is written to."""

    name = "broken"

    def __init__(self):
        self.calls = 0

    def write(self, step, metrics):
        self.calls += 1
        raise ConnectionError("no route to host\nand more")

    def close(self, *, failed):
        raise AssertionError("a service that failed is left alone")


def test_a_line_has_the_step_the_metrics_and_the_time_so_far(tmp_path):
    run = write_run(make_config(tmp_path), [(1, {"train-other/loss": 0.5, "group/dropped": 2})])
    (line,) = read_lines(run.path / METRICS)
    assert list(line) == ["step", "train-other/loss", "group/dropped", "time/wall_s", "time/cpu_s"]
    assert (line["step"], line["train-other/loss"], line["group/dropped"]) == (1, 0.5, 2)
    assert 0 < line["time/wall_s"] < 60
    assert line["time/cpu_s"] > 0


def test_wall_time_goes_on_from_the_step_that_a_run_is_continued_from(tmp_path):
    config = make_config(tmp_path)
    run = write_run(config, [(1, {}), (2, {}), (3, {})])
    lines = read_lines(run.path / METRICS)
    lines[1]["time/wall_s"], lines[2]["time/wall_s"] = 1000.0, 5000.0
    (run.path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = write_run(config, [(3, {})], resume_at=2)
    assert [line["step"] for line in read_lines(run.path / METRICS)] == [1, 2, 3]
    assert 1000 < read_lines(run.path / METRICS)[-1]["time/wall_s"] < 1060


def test_a_failing_service_is_announced_once_and_stops_nothing(tmp_path, monkeypatch):
    broken, messages = BrokenService(), []
    monkeypatch.setattr("podium.observe.writers.service_names", lambda config: ["broken"])
    monkeypatch.setattr("podium.observe.writers.make_service", lambda *args, **options: broken)
    run = write_run(make_config(tmp_path), [(1, {"a": 1.0}), (2, {"a": 2.0})], announce=messages.append)
    assert [line["a"] for line in read_lines(run.path / METRICS)] == [1.0, 2.0]
    assert broken.calls == 1
    assert messages == [
        "broken failed (ConnectionError: no route to host); nothing more is sent to it; metrics.jsonl continues"
    ]


def test_a_service_that_cannot_be_reached_at_the_start_stops_nothing(tmp_path, monkeypatch):
    def unreachable(*args, **options):
        raise TimeoutError("no answer")

    messages = []
    monkeypatch.setattr("podium.observe.writers.service_names", lambda config: ["far"])
    monkeypatch.setattr("podium.observe.writers.make_service", unreachable)
    run = write_run(make_config(tmp_path), [(1, {})], announce=messages.append)
    assert len(read_lines(run.path / METRICS)) == 1
    assert messages == [
        "waiting for far, for 30 minutes: TimeoutError: no answer",
        "far failed (TimeoutError: no answer); nothing more is sent to it; metrics.jsonl continues",
    ]


class SlowClock:
    """A clock that only the test advances."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.parametrize("outage_s", [600.0, 1700.0, 3600.0])
def test_a_service_that_is_back_within_half_an_hour_gets_every_line(tmp_path, monkeypatch, name, outage_s):
    clock, got, messages, attempts = SlowClock(), [], [], []

    class Service:
        def write(self, step, metrics):
            got.append(step)

        def close(self, *, failed):
            got.append("closed")

    def connect(*args, **options):
        attempts.append(clock.now)
        if clock.now < outage_s:
            clock.now += 5.0
            raise ConnectionError("no route to host")
        return Service()

    monkeypatch.setattr("podium.observe.writers.service_names", lambda config: [name])
    monkeypatch.setattr("podium.observe.writers.make_service", connect)
    config = make_config(tmp_path)
    with (
        RunDir.open(run_home(config.runs_dir, config.name), config.document()) as run,
        MetricWriter(run, config.metrics, announce=messages.append, clock=clock) as writer,
    ):
        for step in range(1, 241):
            clock.now += 10.0
            writer.write(step, {"a": 1.0})
    assert len(read_lines(run.path / METRICS)) == 240
    if outage_s < 1800:
        assert got == [*range(1, 241), "closed"]
        assert messages == [f"waiting for {name}, for 30 minutes: ConnectionError: no route to host"]
    else:
        assert got == []
        assert messages[1:] == [
            f"{name} failed (ConnectionError: no route to host); nothing more is sent to it; metrics.jsonl continues"
        ]
    assert 5.0 * len(attempts) < clock.now / 5, "most of the time is training's"


@pytest.mark.parametrize(
    ("metrics", "key", "extra"),
    [
        ({"wandb": {"mode": "offline"}}, "metrics.wandb.mode", "wandb"),
        ({"tensorboard": True}, "metrics.tensorboard", "tensorboard"),
        ({"trackio": "podium"}, "metrics.trackio", "trackio"),
    ],
)
def test_a_missing_package_is_an_error_that_names_the_extra(tmp_path, monkeypatch, metrics, key, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServiceError, match=rf"{key} needs {extra}, .* pip install 'podium-rl\[{extra}\]'"):
        service_names(make_config(tmp_path, **metrics).metrics)


def test_without_services_nothing_is_asked_for(tmp_path):
    assert service_names(make_config(tmp_path).metrics) == []


def wandb_records(run_path: Path) -> list[list[dict]]:
    """The records of each offline run in the folder, by wandb's own reader."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json"]
    files = sorted(run_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    outputs = [subprocess.run([*command, str(file)], capture_output=True, text=True, check=True) for file in files]
    return [[json.loads(line) for line in output.stdout.splitlines()] for output in outputs]


def history(records):
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def test_wandb_offline_holds_the_metrics_and_the_config_and_is_continued(tmp_path):
    pytest.importorskip("wandb")
    settings = {"mode": "offline", "project": "tests", "group": "g", "tags": ["a", "b"]}
    config = make_config(tmp_path, wandb=settings)
    write_run(config, [(0, {"eval/accuracy": 0.25}), (1, {"train-other/loss": 0.5}), (1, {"eval/accuracy": 0.75})])
    run = write_run(config, [(2, {"train-other/loss": 0.25})], resume_at=1)

    first, second = wandb_records(run.path)
    steps = [(item["_step"], item.get("train-other/loss"), item.get("eval/accuracy")) for item in history(first)]
    assert steps == [(0, None, 0.25), (1, 0.5, 0.75)]
    assert [(item["_step"], item["train-other/loss"]) for item in history(second)] == [(2, 0.25)]
    begun = [next(record["run"] for record in records if record["type"] == "run") for records in (first, second)]
    assert begun[0]["run_id"] == begun[1]["run_id"] == (run.path / "wandb_id").read_text().strip()
    assert begun[0]["project"] == "tests"
    assert begun[0]["run_group"] == "g"
    assert begun[0]["tags"] == ["a", "b"]
    assert begun[0]["config"]["update"]["model"] == "demo"
    assert begun[0]["config"]["update"]["metrics"]["wandb"]["mode"] == "offline"


def test_wandb_is_told_that_a_run_failed(tmp_path):
    pytest.importorskip("wandb")
    config = make_config(tmp_path, wandb={"mode": "offline"})
    with pytest.raises(FloatingPointError):
        write_run(config, failing_lines())
    (records,) = wandb_records(tmp_path / "runs/demo")
    assert records[-1]["exit"]["exit_code"] == 1


def failing_lines():
    yield 1, {"train-other/loss": 0.5}
    raise FloatingPointError("the loss is nan")


def run_program(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**{name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}, **environment},
        stdin=subprocess.DEVNULL,
    )


ONLINE = """
    import podium.observe.services
    from podium.config.schema import Config
    from podium.observe.run_dir import RunDir, run_home
    from podium.observe.writers import MetricWriter
    podium.observe.services.INIT_TIMEOUT_S = 2.0
    config = Config.model_validate({tree!r})
    home = run_home(config.runs_dir, config.name)
    with RunDir.open(home, config.document()) as run, MetricWriter(run, config.metrics, announce=print) as writer:
        writer.write(1, {{"train-other/loss": 0.5}})
"""


def test_wandb_online_without_network_is_announced_and_stops_nothing(tmp_path):
    pytest.importorskip("wandb")
    config = make_config(tmp_path, wandb={"mode": "online"})
    nowhere = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": str(tmp_path)}
    done = run_program(ONLINE.format(tree=config.model_dump(mode="json")), **nowhere)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("waiting for wandb, for 30 minutes: CommError: ")
    assert "\nwandb failed (CommError: " in done.stdout
    assert len(done.stdout.splitlines()) == 2
    assert '"train-other/loss": 0.5' in (tmp_path / "runs/demo" / METRICS).read_text()


def test_wandb_online_without_a_key_is_an_error_before_anything_else(tmp_path):
    pytest.importorskip("wandb")
    config = make_config(tmp_path, wandb={"mode": "online"})
    done = run_program(
        ONLINE.format(tree=config.model_dump(mode="json")), WANDB_API_KEY="", HOME=str(tmp_path), NETRC="/dev/null"
    )
    assert done.returncode == 1
    assert "ServiceError: metrics.wandb.mode online: no API key is configured; set WANDB_API_KEY" in done.stderr


def test_tensorboard_reads_the_scalars_back_and_forgets_what_a_continued_run_repeats(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = make_config(tmp_path, tensorboard=True)
    write_run(config, [(step, {"train-other/loss": float(step), "own/name": 1.0}) for step in (1, 2, 3)])
    run = write_run(config, [(step, {"train-other/loss": 10.0 * step}) for step in (2, 3)], resume_at=1)
    read = accumulators.EventAccumulator(str(run.path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("train-other/loss")] == [(1, 1.0), (2, 20.0), (3, 30.0)]
    assert read.SummaryMetadata("train-other/loss").summary_description.startswith("Loss of the whole batch")
    assert "own/name" in read.Tags()["scalars"]


def test_tensorboard_shows_completions_as_text(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = write_run(make_config(tmp_path, tensorboard=True), [], samples=SAMPLES)
    read = accumulators.EventAccumulator(str(run.path / "tensorboard"))
    read.Reload()
    (event,) = read.Tensors("samples/train")
    lines = event.tensor_proto.string_val[0].decode().splitlines()
    assert (event.step, read.SummaryMetadata("samples/train").plugin_data.plugin_name) == (2, "text")
    assert lines[2] == "| 2 | 1 + 1? | a&#124;b<br>&lt;script> | 2 | 0.5 | correct=0 | 3 | stop |"
    assert len(lines) == 4


def test_wandb_has_a_table_of_completions(tmp_path):
    pytest.importorskip("wandb")
    run = write_run(make_config(tmp_path, wandb={"mode": "offline"}), [], samples=SAMPLES)
    (path,) = run.path.glob("wandb/offline-run-*/files/media/table/**/*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"][:3] == ["step", "prompt", "completion"]
    assert table["data"][0] == [2, "1 + 1?", "a|b\n<script>", "2", 0.5, "correct=0", 3, "stop"]


def test_trackio_reads_the_metrics_back_and_prints_nothing_on_stdout(tmp_path):
    pytest.importorskip("trackio")
    config = make_config(tmp_path, trackio="tests")
    program = """
        import json
        from podium.config.schema import Config
        from podium.observe.run_dir import RunDir, run_home
        from podium.observe.writers import MetricWriter
        config = Config.model_validate({tree!r})
        for step in (1, 2):
            home = run_home(config.runs_dir, config.name)
            with RunDir.open(home, config.document()) as run, MetricWriter(run, config.metrics, announce=print) as out:
                out.write(step, {{"train-other/loss": 0.5 * step}})
                out.write_samples(step, {samples!r} if step == 2 else [])
        from trackio.sqlite_storage import SQLiteStorage
        print(json.dumps(SQLiteStorage.get_logs("tests", "demo")))
    """
    done = run_program(
        program.format(tree=config.model_dump(mode="json"), samples=SAMPLES), TRACKIO_DIR=str(tmp_path / "trackio")
    )
    assert done.returncode == 0, done.stderr
    logs = json.loads(done.stdout)
    numbers = [(line["step"], line["train-other/loss"]) for line in logs if "train-other/loss" in line]
    assert numbers == [(1, 0.5), (2, 1.0)]
    (table,) = [line["samples/train"] for line in logs if "samples/train" in line]
    assert [row["reward"] for row in table["_value"]] == [0.5, 1.0]
    assert table["_value"][0]["completion"] == "`` a|b\n<script> ``"
