"""A model hub on loopback, for what huggingface_hub asks of the real one; no network.

`podium/tiny` is served from a folder. What other names get stands in ANSWERS. What is uploaded is kept in UPLOADED.
"""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

MODEL = "podium/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ANSWERS: dict[str, tuple[int, dict[str, str], bytes]] = {  # by model, or path below /api/: status, headers, body
    "podium/absent": (404, {"X-Error-Code": "RepoNotFound"}, b""),
    "podium/token": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""),
    "podium/gated": (403, {"X-Error-Code": "GatedRepo"}, b""),
    "podium/forbidden": (403, {}, b""),
    "podium/broken": (500, {}, b""),
    "podium/portal": (200, {"Content-Type": "text/html"}, b"<html>Welcome to the hotel</html>"),
}
UPLOADED: dict[str, dict[str, bytes]] = {}
"""By repository: its files, by path."""
WRITER = "hf_writer"
"""The token of whoever may write."""
SILENT, CUT = "podium/silent", "podium/cut"


@contextlib.contextmanager
def fake_hub(folder: Path) -> Iterator[str]:
    """Serves a model's folder as MODEL; gives the address for HF_ENDPOINT."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path.removeprefix("/api/models").strip("/")
            model, rest = "/".join(path.split("/")[:2]), path.split("/")[2:]
            if model == SILENT:
                ended.wait()
            elif model in ANSWERS:
                self.answer(*ANSWERS[model])
            elif model == MODEL:
                self.serve(rest)
            elif model != CUT:
                self.answer(*ANSWERS["podium/absent"])

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = urlsplit(self.path).path
            repository = "/".join(path.split("/")[3:5])
            if self.headers.get("Authorization") != f"Bearer {WRITER}":
                self.answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"")
            elif path.removeprefix("/api/") in ANSWERS:
                self.answer(*ANSWERS[path.removeprefix("/api/")])
            elif path == "/api/validate-yaml":
                self.reply({"errors": [], "warnings": []})
            elif path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                UPLOADED[name] = {}
                self.reply({"url": f"http://{self.headers['Host']}/{name}", "id": name})
            elif path.endswith("/preupload/main"):
                files = [{"path": each["path"], "uploadMode": "regular"} for each in json.loads(body)["files"]]
                self.reply({"files": [each | {"shouldIgnore": False, "oid": None} for each in files]})
            elif path.endswith("/commit/main"):
                lines = [json.loads(line) for line in body.splitlines()]
                sent = {x["value"]["path"]: x["value"]["content"] for x in lines if x["key"] == "file"}
                UPLOADED[repository] |= {name: base64.b64decode(text) for name, text in sent.items()}
                self.reply(
                    {"commitUrl": f"http://{self.headers['Host']}/{repository}/commit/{COMMIT}", "commitOid": COMMIT}
                )
            else:
                self.answer(404, {}, b"")

        def reply(self, found: object) -> None:
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(found).encode())

        def serve(self, rest: list[str]) -> None:
            files = {path.name: path.read_bytes() for path in folder.iterdir()}
            if rest[:1] == ["resolve"]:
                body = files.get(rest[-1])
                if body is None:
                    self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b"")
                else:
                    etag = hashlib.sha1(body).hexdigest()
                    self.answer(200, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, body)
            elif rest[:1] == ["tree"]:
                tree = [
                    {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                    for name, body in files.items()
                ]
                self.answer(200, {"Content-Type": "application/json"}, json.dumps(tree).encode())
            else:
                siblings = [{"rfilename": name} for name in files]
                found = {"id": MODEL, "modelId": MODEL, "sha": COMMIT, "siblings": siblings}
                self.answer(200, {"Content-Type": "application/json"}, json.dumps(found).encode())

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A test's output is not for this."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
