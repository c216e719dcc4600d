"""A chat server of the tests' own on loopback, in the form of OpenAI's, whose answers a test decides."""

import contextlib
import dataclasses
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass
class Server:
    """Answers each request by what `answer` makes of its body: a status with data, or a text that a judge says."""

    url: str
    answer: Callable[[dict[str, Any]], "str | tuple[int, bytes]"] = lambda body: "SCORE: 5"
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    """Further headers of answers."""
    bodies: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    keys: list[str | None] = dataclasses.field(default_factory=list)
    paths: list[str] = dataclasses.field(default_factory=list)
    piece: int = 2**20
    """Bytes of an answer that are sent at once; of a single byte there are 20 in a second."""
    at_once: int = 0
    most_at_once: int = 0


def said(text: object, tokens: object = 7) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}], "usage": {"total_tokens": tokens}}).encode()


@contextlib.contextmanager
def chat_server() -> Iterator[Server]:
    """A server on loopback, in threads."""
    found = Server(url="")
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                found.bodies.append(body)
                found.keys.append(self.headers["Authorization"])
                found.paths.append(self.path)
                found.at_once += 1
                found.most_at_once = max(found.most_at_once, found.at_once)
            answer = found.answer(body)
            status, data = (200, said(answer)) if isinstance(answer, str) else answer
            with lock:
                found.at_once -= 1
            self.send_response(status)
            for name, value in found.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            for begin in range(0, len(data), found.piece):
                self.wfile.write(data[begin : begin + found.piece])
                time.sleep(0.05 if found.piece == 1 else 0)

        def log_message(self, *arguments: object) -> None:
            pass

    class Quiet(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # of 16 connections at once, the usual 5 resets one now and then on a busy machine

        def handle_error(self, *arguments: object) -> None:
            pass  # a judge that does not wait has closed the connection

    with Quiet(("127.0.0.1", 0), Handler) as running:
        found.url = f"http://127.0.0.1:{running.server_address[1]}/v1"
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield found
        running.shutdown()
        thread.join()
