"""A real server on loopback in a thread of the tests' process, asked as clients ask."""

import http.client
import socket
import threading
import time

import pytest

uvicorn = pytest.importorskip("uvicorn")


class Server:
    """The application, served in a thread."""

    def __init__(self, app):
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.socket]})
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def ask(self, path, method="GET", body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, body, answer

    def listen(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path)
        return connection, connection.getresponse()

    @property
    def clients(self):
        return len(self._server.server_state.connections)

    def close(self):
        self._server.should_exit = True
        self._thread.join()
        self.socket.close()
