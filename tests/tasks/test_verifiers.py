"""The adapter to verifiers, against a stand-in for its package with the same surface, and against the package."""

import asyncio
import contextlib
import importlib.machinery
import json
import sys
import types
import urllib.error
import urllib.request

import pytest

from podium.config.schema import TaskConfig
from podium.tasks.adapters.verifiers_task import verifiers_task
from podium.tasks.conversation import Turn
from podium.tasks.conversations.environment_forms import conversing
from podium.tasks.registry import make_task, task_labels
from podium.tasks.task_list import task_page


class AgentConfig(types.SimpleNamespace):
    harness = None


class Sums:
    """Asks for sums; pays for right answers. The task's number says what goes wrong."""

    def __init__(self, settings: dict) -> None:
        self.settings, self.serves = settings, 0
        self.taskset = list(range(settings["taskset"].get("tasks", 6)))

    @contextlib.asynccontextmanager
    async def serving(self):
        self.serves += 1
        yield

    async def run_episode(self, task: int, context, *, on_trace):
        trace = types.SimpleNamespace(
            id=f"trace {task}", reward=0.0, errors=[], agent=types.SimpleNamespace(name="one")
        )
        judge = types.SimpleNamespace(id="judge", reward=9.0, errors=[], agent=types.SimpleNamespace(name="judge"))
        on_trace(trace)
        messages = [{"role": "user", "content": f"{task} + 1?"}]
        answer = await asyncio.to_thread(self._ask, context.client, trace.id, messages)
        trace.reward = float(answer == str(task + 1))
        if task == 3:
            raise OSError("no such service")
        if task == 4:
            error = types.SimpleNamespace(type="TaskError", message="it broke", traceback="in line 7")
            return types.SimpleNamespace(ok=False, traces=[trace], errors=[error])
        return types.SimpleNamespace(ok=True, traces=[trace, judge], errors=[])

    def _ask(self, client: dict, session: str, messages: list[dict]) -> str:
        headers = {"Content-Type": "application/json", "X-Session-ID": session}
        body = json.dumps({"model": "policy", "messages": messages, "stream": False}).encode()
        request = urllib.request.Request(f"{client['base_url']}/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request) as reply:
                return json.loads(reply.read())["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            error.close()
            raise


@pytest.fixture
def package(monkeypatch):
    def kind(taskset: str, env: str) -> type:
        roles = {"one": AgentConfig()} | ({"two": AgentConfig()} if taskset == "duel" else {})
        fields = {name: types.SimpleNamespace(default=role) for name, role in roles.items()}
        return type("Config", (), {"model_fields": {**fields, "retries": types.SimpleNamespace(default=1)}})

    def load(settings: dict) -> Sums:
        if settings["taskset"]["id"] == "missing":
            raise ModuleNotFoundError("taskset 'missing' not found")
        return Sums(settings)

    v1 = types.ModuleType("verifiers.v1")
    v1.__dict__.update(
        AgentConfig=AgentConfig,
        ClientConfig=dict[str, str],
        ModelContext=lambda **given: types.SimpleNamespace(**given),
        default_harness_id=lambda taskset: "own" if taskset == "own" else "bash",
        env_config_type=kind,
        load_environment=load,
        resolve_env_config=lambda settings: settings,
    )
    whole = types.ModuleType("verifiers")
    whole.__spec__ = importlib.machinery.ModuleSpec("verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers", whole)
    monkeypatch.setitem(sys.modules, "verifiers.v1", v1)
    monkeypatch.setattr("podium.tasks.adapters.verifiers_task.shutil.which", lambda name, path=None: f"/bin/{name}")


SUMS = TaskConfig(name="verifiers:sums", options={"eval_size": 2, "env": {"one": {"max_turns": 3}}})


def test_its_episodes_ask_on_their_line_and_pay_the_role_that_is_trained(package):
    task = make_task(SUMS)
    prompts = task.prompts("train")
    assert [each.id for each in prompts] == [f"verifiers/sums/{number}" for number in (2, 3, 4, 5)]
    assert [each.id for each in task.prompts("eval")] == ["verifiers/sums/0", "verifiers/sums/1"]
    paid = []
    for prompt, said in ((prompts[0], "3"), (prompts[3], "7")):
        led = task.open(prompt, 0)
        asking = led.begin()
        assert asking.fresh and asking.messages[0]["content"].endswith("+ 1?")
        assert led.reply(Turn(text=said, number=0)).done
        paid.append(led.grade())
        led.close()
    assert paid == [1.0, 0.0]
    assert task._load().environment.serves == 1
    assert task._load().environment.settings == {
        "one": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}, "max_turns": 3},
        "taskset": {"id": "sums"},
    }


def test_what_goes_wrong_in_it_is_our_failure_and_a_limit_is_not(package):
    task = make_task(SUMS)
    prompts = task.prompts("train")
    for prompt, message in ((prompts[1], "OSError: no such service"), (prompts[2], "TaskError: it broke\nin line 7")):
        led = task.open(prompt, 0)
        led.begin()
        assert led.reply(Turn(text="1", number=0)).done
        with pytest.raises(RuntimeError, match=message):
            led.grade()
        led.close()
    led = task.open(prompts[0], 0)
    led.begin()
    assert led.grade() == 0.0  # the run ended it before it was answered
    led.close()
    ended = task.open(prompts[0], 0)
    ended.begin()
    ended.close()


def test_harnesses_of_an_environment_stay_its_own(package):
    task = make_task(TaskConfig(name="verifiers:own", options={"eval_size": 1, "taskset": {"tasks": 3}}))
    assert len(task.prompts("train")) == 2
    assert task._load().environment.settings["one"] == {"runtime": {"type": "subprocess"}}


def test_a_page_and_a_label_come_from_its_name(package):
    assert task_labels([SUMS, SUMS]) == ["sums", "sums-2"]
    assert "eval_size: a whole number" in task_page("verifiers:sums")
    assert conversing(SUMS).rewards


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "missing",
            {},
            "verifiers:missing cannot be loaded: taskset 'missing' not found; install its package",
        ),
        ("duel", {}, "its roles one, two would share one reward"),
        ("sums", {"eval_size": 6}, "lower eval_size"),
    ],
)
def test_environments_that_cannot_be_used_say_why(package, name, options, message):
    with pytest.raises(ValueError, match=message):
        make_task(TaskConfig(name=f"verifiers:{name}", options=options)).prompts("train")


def test_one_of_several_roles_is_trained_if_the_others_have_clients(package):
    options = {"eval_size": 1, "env": {"two": {"client": {"base_url": "http://elsewhere"}}}}
    assert make_task(TaskConfig(name="verifiers:duel", options=options)).prompts("train")


def test_uv_is_asked_for_by_name(package, monkeypatch):
    monkeypatch.setattr("podium.tasks.adapters.verifiers_task.shutil.which", lambda name, path=None: None)
    with pytest.raises(ValueError, match="pip install uv"):
        make_task(SUMS).prompts("train")


def test_the_package_is_asked_for_by_name(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'podium-rl\[verifiers\]'"):
        verifiers_task("sums")


OWN_TASKSET = '''
import httpx
import verifiers.v1 as vf

__all__ = ["LettersTaskset", "LettersHarness"]


class Letters(vf.Task[vf.TaskData]):
    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class LettersTaskset(vf.Taskset[Letters, vf.TasksetConfig]):
    def load(self) -> list[Letters]:
        return [Letters(vf.TaskData(idx=i, prompt=f"What is {i} + 1 ?"), self.config.task) for i in range(5)]


class LettersHarness(vf.Harness[vf.HarnessConfig]):
    """Asks twice, from this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60.0) as client:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                headers = {"Authorization": f"Bearer {secret}"}
                answer = (await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)).json()
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "Again?"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
'''


def test_verifiers_itself_plays_an_environment(monkeypatch, tmp_path):
    pytest.importorskip("verifiers.v1", reason="needs the extra verifiers")
    (tmp_path / "letters_taskset.py").write_text(OWN_TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    task = make_task(TaskConfig(name="verifiers:letters_taskset", options={"eval_size": 1}))
    prompt = task.prompts("train")[0]
    led = task.open(prompt, 0)
    first = led.begin()
    assert first.messages == ({"role": "user", "content": "What is 1 + 1 ?"},)
    second = led.reply(Turn(text="Two.", number=0, tokens=(1, 2), read=5)).asking
    assert not second.fresh and second.messages == ({"role": "user", "content": "Again?"},)
    assert led.reply(Turn(text="Still two.", number=1, tokens=(1, 2), read=9)).done
    assert led.grade() == 10.0
    led.close()
