"""One server of a tiny random model for all tests: in a thread, on loopback."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import jax
import pytest
from in_thread import Server
from made_once import made_once
from serving import CONTEXT, QUEUE

from benches.recipes import VOCAB, write_tiny_model
from podium.api.answers import open_model
from podium.observe.access import LOOPBACK
from podium.rollout.engine import RolloutEngine
from podium.run.answering import Asked
from podium.serve.app import Server as Routes
from podium.serve.app import make_app
from podium.serve.clients import Clients
from podium.serve.command import model_of
from podium.serve.prepare_requests import Model
from podium.sharding import make_mesh

WORDS = (*VOCAB, "Reads", "weather", "city")
TEMPLATE = (
    "{% for tool in tools or () %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.content }}"
    "{{ ' <end> ' if message.role == 'assistant' else ' ' }}{% endfor %}"
)


@dataclasses.dataclass
class Served:
    server: Server
    model: Model
    clients: Clients

    @property
    def engine(self) -> RolloutEngine:
        return self.clients.thread.engine


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, WORDS, TEMPLATE, CONTEXT)
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch, made_once():  # other tests of this process are left as they are
            patch.setattr("podium.train.setup.make_mesh", lambda text: make_mesh(text, jax.devices()[:1]))
            opened = open_model(
                folder,
                asked=Asked(),
                slots=8,
                context=CONTEXT,
                new_tokens=CONTEXT,
                settings={"rollout": {"refill_steps": 4, "page_tokens": 16}},
            )
            opened = stack.enter_context(opened)
        model = model_of(opened, "tiny", max_queue=QUEUE)
        clients = Clients(opened.rollouts.engine, max_queue=QUEUE)
        server = Server(make_app(Routes(model, clients), token=None, hosts=LOOPBACK))
        yield Served(server, model, clients)
        server.close()
        clients.close()


@pytest.fixture
def slow(served, monkeypatch):
    """Steps of the engine that take 100 ms."""
    step = served.engine.step

    def slowly():
        time.sleep(0.1)
        step()

    monkeypatch.setattr(served.engine, "step", slowly)
