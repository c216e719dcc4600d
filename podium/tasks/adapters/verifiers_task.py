"""Environments written for `verifiers` (its v1 API), as tasks `verifiers:NAME`; needs the extra `verifiers`.

The process that holds them runs verifiers' own code: tasks, harness, scoring. Its client talks to the server of this
process (`podium.tasks.conversations.loopback`), which finds a request's conversation by the id of its trace.
"""

import contextlib
import importlib
import importlib.util
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from pydantic import TypeAdapter, ValidationError

from podium.tasks.conversations.loopback import MODEL, Line, server
from podium.tasks.conversations.program import Led
from podium.tasks.event_loop import LoopThread
from podium.tasks.games.generated import PaidByEnvironment, held_out
from podium.tasks.task import Count, Prompt, TaskSource

Settings = dict[str, object]


class _Agent(Protocol):
    """A role in an environment."""

    name: str


class _Trace(Protocol):
    """One agent's part of an episode."""

    id: str
    reward: float
    agent: _Agent


class _Episode(Protocol):
    """The result of running one task."""

    ok: bool
    traces: Sequence[_Trace]


class _Environment(Protocol):
    """An environment of verifiers."""

    taskset: Iterable[object]

    def serving(self) -> contextlib.AbstractAsyncContextManager[None]: ...

    def run_episode(
        self, task: object, context: object, *, on_trace: Callable[[_Trace], None]
    ) -> Coroutine[object, object, _Episode]: ...


class Verifiers(PaidByEnvironment):
    """An unmodified environment written for verifiers: `tasks: [{name: verifiers:NAME}]`; NAME is its taskset's
    package.

    `taskset` and `env` hold its settings, under verifiers' names; programs run as processes on this machine, and the
    harness is `null` unless the environment or `env` names another one. `client` may hold settings of verifiers'
    client: with `{type: train, renderer_model_name: MODEL}`, prompts are made by the package `renderers` and come as
    token ids; otherwise by the model's chat template. The first `eval_size` tasks are for evaluation. The reward is
    verifiers'.
    """

    taskset_id: ClassVar[str]
    led_by_program = True
    system_prompt: str | None = None

    def __init__(
        self,
        source: TaskSource,
        *,
        size: Count = 1000,
        eval_size: Count = 100,
        taskset: Settings | None = None,
        env: Settings | None = None,
        client: Settings | None = None,
    ) -> None:
        source.refuse(f"verifiers:{self.taskset_id}")
        self.size, self.eval_size = size, eval_size
        self._taskset = taskset or {}
        self._env = env or {}
        self._client = client or {}
        # Conversations of a process begin on separate threads. (In Python 3.11, functools.cached_property has one lock
        # for all instances, so one environment would wait for another one to load.)
        self._lock = threading.Lock()
        self._loaded: _Loaded | None = None
        self._serving: _Serving | None = None

    def prompts(self, split: str) -> Sequence[Prompt]:
        """One prompt per task; the harness writes the messages."""
        numbers = held_out(f"verifiers:{self.taskset_id}", range(len(self._load().tasks)), split, self.eval_size)
        return [Prompt(id=f"verifiers/{self.taskset_id}/{number}", question="", answer="") for number in numbers]

    def open(self, prompt: Prompt, seed: int) -> Led:
        """Start an episode on the prompt's task."""
        loaded = self._load()
        with self._lock:
            if self._serving is None:
                self._serving = _Serving(loaded.environment, loaded.role, self._client)
            serving = self._serving
        task = loaded.tasks[int(prompt.id.rpartition("/")[2])]
        return Led(lambda line: _Playing(serving, task, line))

    def _load(self) -> "_Loaded":
        """The environment and its tasks, loaded once. Raises ValueError if they cannot be loaded."""
        with self._lock:
            if self._loaded is None:
                _check_uv()
                v1 = importlib.import_module("verifiers.v1")
                try:
                    settings, role = self._settings()
                    environment: _Environment = v1.load_environment(v1.resolve_env_config(settings))
                except (ImportError, LookupError, TypeError, ValueError, AttributeError) as error:
                    raise self._unusable(error) from error
                try:
                    tasks = list(itertools.islice(environment.taskset, self.size + self.eval_size))
                except Exception as error:  # an environment's own code
                    raise self._unusable(error) from error
                self._loaded = _Loaded(environment, role, tasks)
            return self._loaded

    def _settings(self) -> tuple[Settings, str]:
        """The environment's settings, completed so that it runs on this machine, and the role that is trained. Raises
        ValueError if several roles would be trained: an episode has one reward, which applies to all sampled tokens.
        """
        v1 = importlib.import_module("verifiers.v1")
        kind = v1.env_config_type(self.taskset_id, str(self._env.get("id", "")))
        own_harness = v1.default_harness_id(self.taskset_id) != "bash"
        settings: Settings = {**self._env, "taskset": {"id": self.taskset_id, **self._taskset}}
        trained: list[str] = []
        for role, field in kind.model_fields.items():
            if not isinstance(field.default, v1.AgentConfig):
                continue
            given = self._env.get(role)
            given = given if isinstance(given, dict) else {}
            harness = {} if own_harness or field.default.harness is not None else {"harness": {"id": "null"}}
            settings[role] = {"runtime": {"type": "subprocess"}, **harness, **given}
            trained += [] if "client" in given else [role]
        if len(trained) != 1:
            raise ValueError(
                f"its roles {', '.join(trained)} would share one reward; give all but one a `client` of their own in"
                " options.env"
            )
        return settings, trained[0]

    def _unusable(self, error: Exception) -> ValueError:
        why = next((line.strip() for line in str(error).splitlines() if line.strip(" *")), type(error).__name__)
        return ValueError(
            f"verifiers:{self.taskset_id} cannot be loaded: {why}; install its package and everything that it reads: "
            "textarena's games need nltk's words, cloud runtimes an account"
        )


def verifiers_task(taskset_id: str) -> type[Verifiers]:
    """Environments written for verifiers (extra `verifiers`): `tasks: [{name: verifiers:NAME}]`.

    Raises ValueError if verifiers is not installed.
    """
    if importlib.util.find_spec("verifiers") is None:
        raise ValueError("verifiers: the package is not installed: pip install 'podium-rl[verifiers]'")
    return type(Verifiers.__name__, (Verifiers,), {"taskset_id": taskset_id, "__doc__": Verifiers.__doc__})


class _Loaded(NamedTuple):
    environment: _Environment
    role: str
    """The role that is trained."""
    tasks: list[object]


def _check_uv() -> None:
    """Put `uv` on the PATH; verifiers starts programs with it. Raises ValueError if it is not installed."""
    beside = str(Path(sys.executable).parent)
    if shutil.which("uv") is None:
        if shutil.which("uv", path=beside) is None:
            raise ValueError("verifiers starts its programs with uv, which is not installed: pip install uv")
        os.environ["PATH"] = os.pathsep.join((beside, os.environ.get("PATH", "")))


class _Serving:
    """An environment and the server for its programs, on a separate event loop."""

    def __init__(self, environment: _Environment, role: str, client: Mapping[str, object]) -> None:
        """Start serving, until this process ends. `role` is the role that is trained.

        Raises ValueError if the client's settings are invalid.
        """
        v1 = importlib.import_module("verifiers.v1")
        ours = {"base_url": server().sessions_address, "api_key_var": "PODIUM_NO_KEY"}
        try:
            config = TypeAdapter(v1.ClientConfig).validate_python({"type": "eval", **client, **ours})
        except ValidationError as error:
            raise ValueError(f"verifiers: options.client: {error}") from None
        self.environment = environment
        self.role = role
        self.context = v1.ModelContext(model=MODEL, client=config)
        self.loop = LoopThread("verifiers")
        self._stack = contextlib.AsyncExitStack()
        self.loop.submit(self._stack.enter_async_context(environment.serving())).result()


class _Playing:
    """An episode in progress."""

    def __init__(self, serving: _Serving, task: object, line: Line) -> None:
        self._role = serving.role

        def known(trace: _Trace) -> None:
            server().open_session(line, trace.id)

        self._episode = serving.loop.submit(serving.environment.run_episode(task, serving.context, on_trace=known))
        self._episode.add_done_callback(lambda _: line.end())

    def reward(self) -> float:
        """The sum of the rewards of the trained role's traces. Raises RuntimeError if the episode failed."""
        try:
            episode = self._episode.result()
        except BaseException as error:  # an environment's code may raise anything
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        if not episode.ok:
            raise RuntimeError(_errors(episode))
        return float(sum(trace.reward for trace in episode.traces if trace.agent.name == self._role))

    def stop(self) -> None:
        """Cancel the episode if it is still running."""
        self._episode.cancel()


def _errors(episode: _Episode) -> str:
    """The errors of an episode, as text."""
    found = [error for part in (episode, *episode.traces) for error in getattr(part, "errors", ())]
    told = [f"{error.type}: {error.message}\n{error.traceback or ''}".strip() for error in found]
    return "\n".join(told) or "the episode failed without an error message"
