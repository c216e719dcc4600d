"""`podium tasks try`: a conversation with a task's tools or environment in which the user types the answers, without a
model.
"""

import contextlib
import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from podium.config.imports import imported, is_path
from podium.config.schema import TaskConfig
from podium.models.text.chat_format import Message, ToolSchema
from podium.tasks.conversation import Asking, ToolCall, Turn, plain_first, plain_reply
from podium.tasks.conversations.environment_forms import conversing, form_of
from podium.tasks.conversations.tool_calls import FORMS, LIST_CLOSE, LIST_OPEN, Calls, read_calls
from podium.tasks.event_loop import LoopThread
from podium.tasks.registry import TASKS, in_family, make_task
from podium.tasks.task import Prompt

HELP = (
    'one answer per line; a call is `TOOL {"argument": value}`, `TOOL(argument=value)` or what any model writes;'
    " an empty line ends"
)


def play(target: str, answers: Iterable[str], say: Callable[[str], None], *, seed: int = 0, number: int = 0) -> float:
    """Hold a conversation with given answers; returns its reward, or the task's grade of the last answer.

    Args:
        target: a task, or the import path of an environment.
        answers: the answers, one by one; an empty one ends the conversation.
        say: called with each line to show.
        seed: seed of the environment.
        number: index of the training prompt.

    Raises:
        ValueError: the task or prompt does not exist, or the task's prompts are answered once.
    """
    config = _config(target)
    held = conversing(config)
    if held is None:
        raise ValueError(f"{target} has neither tools nor an environment: its prompts are answered once")
    task = make_task(config)
    prompts = task.prompts("train")
    if not 0 <= number < len(prompts):
        raise ValueError(f"{target} has {len(prompts)} prompts, counted from 0; prompt {number} does not exist")
    prompt = prompts[number]
    with contextlib.ExitStack() as stack:
        loop = LoopThread("conversation")  # one for the whole conversation, as in a run
        stack.callback(loop.end)
        running = held.open(prompt, seed, loop.resolve)
        stack.callback(running.close)
        _show(say, _first(prompt, plain_first(running.begin())))
        for tool in held.tools:
            say(f"[tool] {json.dumps(tool['function'], ensure_ascii=False)}")
        say(f"({HELP})" if held.tools else "(one answer per line; an empty line ends)")
        paid, last = 0.0, ""
        for turn, text in enumerate(answers):
            if not text.strip():
                break
            last = text
            read = _read(text, held.tools)
            asked = Turn(text=text, number=turn, calls=read.calls, problem=read.problem, said=read.said)
            reply = plain_reply(running.reply(asked))
            paid += reply.reward
            _show(say, reply.messages if reply.asking is None else reply.asking.messages)
            if reply.reward:
                say(f"(reward of this turn: {reply.reward:g})")
            if reply.done:
                say("(the conversation ends)")
                break
        final = running.grade()
        if final is None and config.environment and not prompt.answer:
            say("(the environment returns no reward: a reward function grades the conversation)")
            return paid
        total = task.grade(prompt, last) if final is None else paid + final
        say(f"(graded as the last answer: {total:g})" if final is None else f"(reward: {total:g})")
        return total


def _config(target: str) -> TaskConfig:
    """The settings of a task, or of a class that is an environment."""
    if in_family(target):
        return TaskConfig(name=target)
    if is_path(target):
        found = imported(target, what="a task or an environment")
        if inspect.isclass(found) and not hasattr(found, "prompts") and form_of(found) is not None:
            return TaskConfig(name="environment", environment=target)
    elif target not in TASKS:
        raise ValueError(
            f"{target!r} is not a task; the tasks are {', '.join(TASKS)} (for your own: `package.module:name`)"
        )
    return TaskConfig(name=target)


def _first(prompt: Prompt, begun: str | Asking | None) -> Sequence[Message]:
    if isinstance(begun, Asking):
        return begun.messages
    messages = list(prompt.messages or [{"role": "user", "content": prompt.question}])
    messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{begun or ''}"}
    return messages


def _read(text: str, tools: Sequence[ToolSchema]) -> Calls:
    """The calls in a typed answer: a tool's name with arguments in JSON or Python, or in a model's format."""
    name, _, arguments = text.strip().partition(" ")
    function: Any
    for function in (tool["function"] for tool in tools):
        if name == function["name"]:
            return _named(name, arguments)
        if text.strip().startswith(f"{function['name']}("):
            return read_calls(f"{LIST_OPEN}{text.strip()}{LIST_CLOSE}", "python", tools)
    found = [read_calls(text, form, tools) for form in FORMS] if tools else []
    read = [each for each in found if each.calls] or [each for each in found if each.problem]
    return read[0] if read else Calls(said=text)


def _named(name: str, arguments: str) -> Calls:
    """A call with its arguments as JSON; no text means no arguments."""
    try:
        given = json.loads(arguments or "{}")
    except ValueError as error:
        return Calls(problem=f"the arguments are not valid JSON ({error})")
    if isinstance(given, dict):
        return Calls(calls=(ToolCall(name=name, arguments=given),))
    return Calls(problem="the arguments are not an object")


def _show(say: Callable[[str], None], messages: Iterable[Message]) -> None:
    for message in messages:
        who = message.get("name") if message.get("role") == "tool" else message.get("role")
        say(f"[{who}] {message.get('content')}")
