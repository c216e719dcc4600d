"""The tool python: each call by itself, names kept within a conversation, and what a limit leaves."""

import dataclasses

import pytest

from podium.config.schema import TaskConfig
from podium.tasks.code import python_tool
from podium.tasks.code.python_tool import MAX_CHARACTERS, PythonSession, python
from podium.tasks.conversation import ToolCall, Turn
from podium.tasks.conversations.environment_forms import conversing
from podium.tasks.task import Prompt
from podium.tasks.try_task import play
from tests.sandbox.sandboxes import need_sandbox

PROMPT = Prompt(id="a", question="?", answer="4")


@pytest.fixture(autouse=True)
def _sandbox(monkeypatch: pytest.MonkeyPatch):
    need_sandbox()
    monkeypatch.setattr(python_tool, "LIMITS", dataclasses.replace(python_tool.LIMITS, wall_s=60.0))
    python_tool._sandbox.cache_clear()
    yield
    python_tool._sandbox().close()
    python_tool._sandbox.cache_clear()


def said(session: PythonSession, code: str) -> str:
    call = ToolCall(name="python", arguments={"code": code})
    return str(session.reply(Turn(text="", number=0, calls=(call,))).messages[0]["content"])


def test_a_call_returns_what_is_printed_and_the_last_value():
    assert python("print(1)\n2 + 2") == "1\n4\n"
    assert python("x = 1") == ""
    assert "NameError: name 'x' is not defined" in python("x")
    long = python(f"print('a' * {2 * MAX_CHARACTERS})")
    assert len(long) < MAX_CHARACTERS + 50
    assert "[... 4001 characters ...]" in long


def test_names_are_kept_within_a_conversation_only():
    one, other = PythonSession(PROMPT, 0), PythonSession(PROMPT, 0)
    assert said(one, "x = 40") == ""
    assert said(one, "x + 2") == "42\n"
    assert "NameError" in said(other, "x")
    assert one.reply(Turn(text="It is 42.", number=1)).done
    one.close()
    other.close()
    one.close()


def test_an_end_by_a_limit_is_told_and_the_conversation_goes_on():
    session = PythonSession(PROMPT, 0)
    assert said(session, "x = 1") == ""
    assert said(session, "print('so far', flush=True)\nimport os; os._exit(1)") == (
        "Error: the process of the code ended\nso far"
    )
    assert "NameError" in said(session, "x")
    session.close()


def test_code_without_end_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(python_tool, "LIMITS", dataclasses.replace(python_tool.LIMITS, wall_s=0.3))
    python_tool._sandbox.cache_clear()
    with pytest.raises(ValueError, match="the code took longer than"):
        python("while True: pass")


def test_a_task_may_name_the_tool_or_the_conversation():
    shown: list[str] = []
    call = '<tool_call>{"name": "python", "arguments": {"code": "2 + 2"}}</tool_call>'
    stateless = conversing(TaskConfig(name="arithmetic", tools=["python"]))
    kept = conversing(TaskConfig(name="arithmetic", environment="podium.tasks.code.python_tool:PythonSession"))
    assert stateless is not None
    assert kept is not None
    assert [tool["function"] for tool in kept.tools] == [tool["function"] for tool in stateless.tools]
    running = kept.open(PROMPT, 0, lambda value: value)
    assert running.grade() is None  # the task grades the last answer
    running.close()
    play("podium.tasks.code.python_tool:PythonSession", [call, "4"], shown.append)
    assert "[python] 4\n" in shown
