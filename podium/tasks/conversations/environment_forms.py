"""Makes conversations from users' functions, classes in TRL's form, gym-like classes, and tasks with `open`.

tools calls in answers are run; an answer without calls ends the conversation, and the task grades it TRL's form
`reset(**row)`, public methods as tools, `get_reward()`, any of them async gym-like `reset(seed=...)`, `step(text)`
conversation `Class(prompt, seed)` with `reply(turn)` (`podium.tasks.conversation`) task a task with `open(prompt,
seed)`
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, cast

from podium.config.imports import imported
from podium.config.schema import TaskConfig
from podium.models.text.chat_format import ToolSchema
from podium.tasks.conversation import Asking, Opener, Reply, Turn, as_reply, finite
from podium.tasks.conversations.tools import Resolve, Tool, answer_calls, by_name, find_tool, tool_schema
from podium.tasks.registry import find_task, make_task
from podium.tasks.task import Prompt

Form = Literal["trl", "gym", "conversation"]
OF_THE_TRAINER = ("reset", "get_reward")
"""Methods of TRL's form that are not tools."""
OF_GYM = {"reset", "step", "close", "render", "seed"}


class Running(Protocol):
    """The interface by which a process drives a conversation; the methods wait for async code."""

    @property
    def environment(self) -> object:
        """The object that a user wrote, for reward functions that ask for it; None if absent."""
        ...

    def begin(self) -> str | Asking | None:
        """A text to append to the prompt, if any, or a program's first request."""
        ...

    def reply(self, turn: Turn) -> Reply:
        """Answer the model's turn."""
        ...

    def grade(self) -> float | None:
        """The final reward, in addition to the rewards of turns; None: the task grades the last answer."""
        ...

    def close(self) -> None:
        """Free the conversation's resources."""
        ...


class Conversing(NamedTuple):
    """How the conversations of a task are created and rewarded."""

    open: Callable[[Prompt, int, Resolve], Running]
    tools: tuple[ToolSchema, ...]
    rewards: bool
    """Whether conversations give a reward, which is then the `correct` part."""
    begins: bool = True
    """Whether the environment may append text to the prompt."""


def conversing(config: TaskConfig) -> Conversing | None:
    """How a task's conversations are created; None if its prompts are answered once.

    Raises ValueError if a tool or an environment is unusable.
    """
    kind = find_task(config.name)
    if not (config.tools or config.environment or hasattr(kind, "open") or hasattr(kind, "tools")):
        return None
    functions = [find_tool(name) for name in config.tools]
    if config.environment is not None:
        environment = imported(config.environment, what="an environment")
        return _of_class(config.environment, environment, functions)
    task = make_task(config)
    opener: Opener | None = getattr(task, "open", None)
    own = tuple(getattr(task, "tools", ()))
    if opener is not None:
        if led_by_program(config) and (functions or config.system_prompt):
            raise ValueError(f"{config.name}: its programs write all messages; remove tools and system_prompt")
        if functions:
            raise ValueError(
                f"tools: {config.name} has its own conversations and chooses its tools itself; remove tools"
            )
        by_name(own)
        return Conversing(functools.partial(_opened, opener), tuple(map(tool_schema, own)), rewards=True)
    if not functions and not own:
        return None
    tools = by_name([*own, *functions])
    schemas = tuple(map(tool_schema, tools.values()))
    return Conversing(lambda prompt, seed, resolve: _Tools(tools, resolve), schemas, rewards=False, begins=False)


def led_by_program(config: TaskConfig) -> bool:
    """Whether a task's conversations are led by programs, which send whole prompts and cannot be replayed."""
    return getattr(find_task(config.name), "led_by_program", False)


def scores_itself(config: TaskConfig) -> bool:
    """Whether a task's environment has TRL's `get_reward`; if that returns None, the answer is not graded instead."""
    if config.environment is None:
        return False
    kind = _kind(imported(config.environment, what="an environment"))
    return form_of(kind) == "trl" and hasattr(kind, "get_reward")


def machine_checks(config: TaskConfig) -> list[Callable[[], str]]:
    """The functions `check_machine` of a task, its environment and its tools; `podium.tasks.task` describes them."""
    kind = find_task(config.name)
    environment = None if config.environment is None else imported(config.environment, what="an environment")
    tools = (*getattr(kind, "tools", ()), *getattr(environment, "tools", ()), *map(find_tool, config.tools))
    checks = (getattr(each, "check_machine", None) for each in (kind, environment, *tools))
    return [check for check in checks if check is not None]


def _of_class(name: str, environment: object, functions: Sequence[Tool]) -> Conversing:
    """Conversations with instances of a class. Raises ValueError if the class has none of the supported forms."""
    if not callable(environment):
        raise ValueError(
            f"{name!r} is {environment!r:.80}; an environment must be a class, or a function that creates one"
        )
    kind = _kind(environment)
    match form_of(kind):
        case "conversation":
            made = cast(Callable[[Prompt, int], object], environment)
            schemas = tuple(map(tool_schema, (*getattr(kind, "tools", ()), *functions)))
            return Conversing(functools.partial(_opened, made), schemas, rewards=True)
        case "gym":
            if functions:
                raise ValueError(
                    f"tools: {name} uses each answer as a step, so its model cannot call tools; remove them"
                )
            make = cast(Callable[[], object], environment)
            return Conversing(lambda prompt, seed, resolve: _Gym(make(), seed, resolve), (), rewards=True)
        case "trl":
            make = cast(Callable[[], object], environment)
            methods = [_unbound(kind, name) for name in _tool_names(kind)]
            tools = by_name([*methods, *functions])
            schemas = tuple(map(tool_schema, tools.values()))

            def opened(prompt: Prompt, seed: int, resolve: Resolve) -> Running:
                return _Methods(make(), functions, prompt, seed, resolve)

            return Conversing(opened, schemas, rewards=hasattr(kind, "get_reward"))
        case None:
            raise ValueError(
                f"{name!r} is not an environment: it needs `reset` and public methods (TRL's form), `reset` and `step`"
                " (gym's), or `reply` (podium.tasks.conversation)"
            )


def _kind(environment: Callable[[], object]) -> type:
    """The class of an environment that is a class, or a function that makes one."""
    return environment if inspect.isclass(environment) else type(environment())


def form_of(kind: type) -> Form | None:
    """The form of a class; None if it has no supported form."""
    if callable(getattr(kind, "reply", None)):
        return "conversation"
    if not callable(getattr(kind, "reset", None)):
        return None
    methods = {name for name, _ in inspect.getmembers(kind, predicate=inspect.isroutine) if not name.startswith("_")}
    if "step" in methods and methods <= OF_GYM:
        return "gym"
    return "trl" if _tool_names(kind) else None


def _tool_names(kind: type) -> list[str]:
    """The names of a class's methods that are tools in TRL's form; static methods are excluded."""
    kinds = {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}
    methods = [name for name, found in kinds.items() if inspect.isfunction(found) or isinstance(found, classmethod)]
    return [name for name in methods if name not in OF_THE_TRAINER]


def _unbound(kind: type, name: str) -> Tool:
    """A class's method, without creating an instance; for reading its signature."""
    method = getattr(kind, name)
    return method if inspect.ismethod(method) else types.MethodType(method, object())


def _opened(opener: Callable[[Prompt, int], object], prompt: Prompt, seed: int, resolve: Resolve) -> Running:
    return _Opened(resolve(opener(prompt, seed)), resolve)


class _Opened:
    """A conversation that a task opened."""

    def __init__(self, conversation: object, resolve: Resolve) -> None:
        self.environment, self._resolve = conversation, resolve

    def begin(self) -> str | Asking | None:
        return cast("str | Asking | None", self._called("begin"))

    def reply(self, turn: Turn) -> Reply:
        return as_reply(self._called("reply", turn))

    def grade(self) -> float | None:
        return cast("float | None", self._called("grade"))

    def close(self) -> None:
        self._called("close")

    def _called(self, name: str, *arguments: object) -> object:
        method = getattr(self.environment, name, None)
        return None if method is None else self._resolve(method(*arguments))


class _Tools:
    """A conversation that answers tool calls, and ends with an answer that has no calls."""

    environment = None

    def __init__(self, tools: Mapping[str, Tool], resolve: Resolve) -> None:
        self._tools, self._resolve = tools, resolve

    def begin(self) -> None:
        return None

    def reply(self, turn: Turn) -> Reply:
        return answer_calls(self._tools, turn, self._resolve) or Reply(done=True)

    def grade(self) -> None:
        return None

    def close(self) -> None:
        return None


class _Methods:
    """An instance of a class in TRL's form; its public methods are tools, in addition to functions."""

    def __init__(
        self, environment: object, functions: Sequence[Tool], prompt: Prompt, seed: int, resolve: Resolve
    ) -> None:
        methods: list[Tool] = [getattr(environment, name) for name in _tool_names(type(environment))]
        self._tools, self._resolve = by_name([*methods, *functions]), resolve
        self.environment = environment
        self._row = dict(prompt.metadata)
        self._seed = seed

    def begin(self) -> str | None:
        reset: Callable[..., object] = self.environment.reset  # pyright: ignore[reportAttributeAccessIssue]
        first = self._resolve(reset(**_accepted(reset, self._seed, self._row)))
        if first is not None and not isinstance(first, str):
            raise TypeError(f"reset() returned {first!r:.80}; it must return a text or None")
        return first

    def reply(self, turn: Turn) -> Reply:
        return answer_calls(self._tools, turn, self._resolve) or Reply(done=True)

    def grade(self) -> float | None:
        graded = getattr(self.environment, "get_reward", None)
        return None if graded is None else cast("float | None", self._resolve(graded()))

    def close(self) -> None:
        return None


class _Gym:
    """An instance of a gym-like class: an answer is a step."""

    def __init__(self, environment: object, seed: int, resolve: Resolve) -> None:
        self.environment = environment
        self._seed = seed
        self._resolve = resolve

    def begin(self) -> str:
        reset: Callable[..., object] = self.environment.reset  # pyright: ignore[reportAttributeAccessIssue]
        first = self._resolve(reset(**_accepted(reset, self._seed, {})))
        return str(first[0] if isinstance(first, tuple) else first)

    def reply(self, turn: Turn) -> Reply:
        step: Callable[[str], object] = self.environment.step  # pyright: ignore[reportAttributeAccessIssue]
        made = self._resolve(step(turn.text))
        if not isinstance(made, tuple) or len(made) not in (4, 5):
            raise TypeError(f"step() returned {made!r:.80}; it must return (text, reward, terminated, truncated, info)")
        message = {"role": "user", "content": str(made[0])}
        return Reply(
            messages=(message,), reward=finite(made[1], "the reward of step()"), done=any(map(bool, made[2:-1]))
        )

    def grade(self) -> float:
        return 0.0

    def close(self) -> None:
        closing = getattr(self.environment, "close", None)
        if closing is not None:
            self._resolve(closing())


def _accepted(function: Callable[..., object], seed: int, row: Mapping[str, object]) -> dict[str, object]:
    """All of the row's columns, as TRL passes them; the seed only if a parameter is called `seed`."""
    if "seed" in inspect.signature(function).parameters:
        return {"seed": seed, **row}
    return dict(row)
