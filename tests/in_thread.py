"""A real server on loopback in a thread of the tests' process, asked as clients ask."""

import http.client
import threading

import pytest

from podium.observe.listening import make_server, take_port

pytest.importorskip("uvicorn")


class Server:
    """The application, served in a thread."""

    def __init__(self, app, ending=None):
        sockets = take_port("127.0.0.1", 0)
        self.port = sockets[0].getsockname()[1]
        started = threading.Event()
        self._server = make_server(app, ready=started.set, ending=ending)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": sockets}, daemon=True)
        self._thread.start()
        assert started.wait(60)

    def ask(self, path, method="GET", body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, body, answer

    def listen(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        return connection, connection.getresponse()

    @property
    def clients(self):
        return len(self._server.server_state.connections)

    def close(self):
        self._server.should_exit = True
        self._thread.join()
