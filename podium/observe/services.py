"""Weights & Biases, TensorBoard and trackio as metric services; each imports its package only when constructed.

The packages are optional and may be missing during type checking, so they are imported by name.
"""

import contextlib
import importlib
import importlib.util
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from podium.config.schema import MetricsConfig, WandbConfig
from podium.files import write_atomically
from podium.observe.metrics import find_metric
from podium.observe.records import SampleRecord
from podium.observe.run_dir import RunDir
from podium.patience import RENEW
from podium.rollout.request import StopReason

INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 60.0

Metrics = Mapping[str, int | float]
TABLE = ("step", "prompt", "completion", "expected", "reward", "parts", "tokens", "finish")
"""Columns of a table of completions."""
Row = tuple[int, str, str, str, float, str, int, StopReason | None]
SHOWN_CHARS = 4_000
"""Maximum characters of a text in a table."""


class ServiceError(ValueError):
    """A metric service in the config is unusable; the message says why and what to do."""


class Service(Protocol):
    """A destination of metrics in addition to metrics.jsonl."""

    name: str

    def write(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of a step; a step may be written several times with different names."""
        ...

    def write_samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Record a table of completions, with TABLE's columns."""
        ...

    def close(self, *, failed: bool) -> None:
        """Flush and close; `failed`: whether an exception ended the run."""
        ...


def service_names(config: MetricsConfig) -> list[str]:
    """Names of the enabled services; a name is also that of the package and of the extra.

    Raises:
        ServiceError: a package is not installed.
    """
    wanted = {
        "wandb": ("metrics.wandb.mode", config.wandb.mode != "disabled"),
        "tensorboard": ("metrics.tensorboard", config.tensorboard),
        "trackio": ("metrics.trackio", config.trackio is not None),
    }
    names = [name for name, (_, asked) in wanted.items() if asked]
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ServiceError(
                f"{wanted[name][0]} needs {name}, which is not installed; pip install 'podium-rl[{name}]', or leave "
                "the key unset"
            )
    return names


def make_service(name: str, run: RunDir, metrics: MetricsConfig, *, first_step: int) -> Service:
    """Make the service with this name, connected.

    Raises:
        ServiceError: the service is unusable as configured (no API key).
        Exception: any exception of the service's package if the service is unreachable.
    """
    if name == "wandb":
        return WandbService(run, metrics.wandb)
    if name == "tensorboard":
        return TensorBoardService(run.path / "tensorboard", first_step=first_step)
    return TrackioService(run, metrics.trackio or "")


def table_rows(records: Sequence[SampleRecord]) -> list[Row]:
    """Convert the completions in lines of samples.jsonl to rows of a table."""
    return [
        (
            record["step"],
            record["question"][:SHOWN_CHARS],
            each["text"][:SHOWN_CHARS],
            record["answer"][:SHOWN_CHARS],
            each["reward"],
            " ".join(f"{name}={value:g}" for name, value in each["parts"].items()),
            each["tokens"],
            each["finish_reason"],
        )
        for record in records
        for each in record["completions"]
    ]


def _cell(value: object) -> str:
    """Format a value as a cell of a Markdown table: on one line, with column separators and tags escaped."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    for found, instead in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\r", ""), ("\n", "<br>")):
        text = text.replace(found, instead)
    return text


class WandbService:
    """A W&B run whose id is stored in the run's folder, so that a resumed run continues it."""

    name = "wandb"

    def __init__(self, run: RunDir, settings: WandbConfig):
        """Connect to W&B. Raises ServiceError if credentials are missing or malformed."""
        wandb = importlib.import_module("wandb")
        errors = importlib.import_module("wandb.errors")
        wandb.setup(wandb.Settings(silent=True))
        try:
            if settings.mode == "online" and not wandb.login(prompt=False, verify=False):
                raise errors.UsageError("no API key is configured")
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                group=settings.group,
                tags=settings.tags,
                name=run.path.name,
                id=_kept_id(run.path / "wandb_id"),
                resume="allow",
                mode="offline" if settings.mode == "offline" else "online",
                dir=run.path,
                config=dict(run.settings),
                settings=wandb.Settings(
                    silent=True, console="off", init_timeout=INIT_TIMEOUT_S, finish_timeout=FINISH_TIMEOUT_S
                ),
            )
        except (errors.UsageError, errors.AuthenticationError) as error:
            raise ServiceError(
                f"metrics.wandb.mode {settings.mode}: {error}; {RENEW['wandb']}, or metrics.wandb.mode=offline"
            ) from error
        except Exception:
            wandb.teardown()  # or else the next attempt finds the run's id in use
            raise

    @property
    def url(self) -> str | None:
        """The run's web page; None offline."""
        return self._run.url

    def write(self, step: int, metrics: Metrics) -> None:
        """Queue the metrics; W&B's own process sends them."""
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Queue a table."""
        table = importlib.import_module("wandb").Table(columns=list(TABLE), data=[list(row) for row in rows])
        self._run.log({name: table}, step=step)

    def close(self, *, failed: bool) -> None:
        """Send the remaining data, for at most FINISH_TIMEOUT_S seconds."""
        self._run.finish(exit_code=int(failed))


def _kept_id(path: Path) -> str:
    """Read the id from the file; if the file does not exist, create it with a new id."""
    if not path.exists():
        write_atomically(path, secrets.token_hex(4) + "\n")
    return path.read_text().strip()


class TensorBoardService:
    """Event files with scalars, described by their definitions. Needs neither TensorFlow nor PyTorch."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, first_step: int):
        """Open a new event file, which supersedes older files from `first_step` on."""
        event_file_writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._described: set[str] = set()
        self._writer = event_file_writer.EventFileWriter(str(folder))
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, step: int, metrics: Metrics) -> None:
        """Write the scalars and flush the file."""
        summary = self._summaries.Summary()
        for name, value in metrics.items():
            scalar = summary.value.add(tag=name, simple_value=value)
            metric = find_metric(name) if name not in self._described else None
            if metric is not None:
                scalar.metadata.summary_description = f"{metric.definition} [{metric.unit}]"
            self._described.add(name)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def write_samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Write a table as Markdown, which TensorBoard shows under Text."""
        lines = [TABLE, ("---",) * len(TABLE), *rows]
        text = "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)
        summary = self._summaries.Summary()
        value = summary.value.add(tag=name)
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = importlib.import_module("tensorboard.compat.proto.types_pb2").DT_STRING
        value.tensor.tensor_shape.SetInParent()  # a single text
        value.tensor.string_val.append(text.encode("utf-8", "backslashreplace"))
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        """Close the file; TensorBoard has no notion of a failed run."""
        self._writer.close()


class TrackioService:
    """A run in trackio's local storage (`TRACKIO_DIR`), or in the Space or server of its environment variables."""

    name = "trackio"

    def __init__(self, run: RunDir, project: str):
        """Open the project; an existing run of this name is resumed."""
        with contextlib.redirect_stdout(sys.stderr):  # trackio prints, and stdout is for scripts
            self._trackio = importlib.import_module("trackio")
            self._run = self._trackio.init(
                project=project,
                name=run.path.name,
                config=dict(run.settings),
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def write(self, step: int, metrics: Metrics) -> None:
        """Queue the metrics; trackio's own thread writes them."""
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Queue a table; its texts are shown verbatim, not as Markdown."""
        quoted = [[f"`` {x} ``" if isinstance(x, str) and "`" not in x else x for x in row] for row in rows]
        self._run.log({name: self._trackio.Table(columns=list(TABLE), data=quoted)}, step=step)

    def close(self, *, failed: bool) -> None:
        """Write the remaining data; trackio has no notion of a failed run."""
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()
