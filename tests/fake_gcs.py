"""Google Cloud Storage on loopback: the requests that tensorstore, gcsfs and google-cloud-storage make, in memory."""

import base64
import email
import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import google_crc32c

OBJECT = r"(?:/download)?/storage/v1/b/([^/]+)(?:/o(?:/([^/]+))?)?(?:/(rewriteTo|copyTo|moveTo)(?:/b/([^/]+))?/o/(.+))?"


class FakeGcs:
    """Buckets that exist as soon as they are named; `objects` is (bucket, name) -> bytes."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], bytes] = {}
        self.generations: dict[tuple[str, str], int] = {}
        self.uploads: dict[str, tuple[str, str, bytearray]] = {}
        self.requests: list[str] = []
        self.lock = threading.RLock()
        self.count = 0
        self.refuses: int | None = None
        """The status that all requests get, as 503 in an outage and 401 with an expired token."""

    def put(self, bucket: str, name: str, data: bytes) -> dict[str, Any]:
        with self.lock:
            self.count += 1
            self.objects[bucket, name], self.generations[bucket, name] = data, self.count
            return self.about(bucket, name)

    def about(self, bucket: str, name: str) -> dict[str, Any]:
        data, generation = self.objects[bucket, name], self.generations[bucket, name]
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "id": f"{bucket}/{name}/{generation}",
            "generation": str(generation),
            "metageneration": "1",
            "size": str(len(data)),
            "storageClass": "STANDARD",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
            "crc32c": base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode(),
            "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
            "etag": f"e{generation}",
        }

    def listing(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, prefixes = [], set()
        with self.lock:
            for found, name in sorted(self.objects):
                if found != bucket or not name.startswith(prefix) or name < query.get("startOffset", ""):
                    continue
                if query.get("endOffset") and name >= query["endOffset"]:
                    continue
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
                else:
                    items.append(self.about(bucket, name))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}


@contextmanager
def running() -> Iterator[tuple[FakeGcs, dict[str, str]]]:
    """The server, and the environment in which a process finds it instead of Google's."""
    store = FakeGcs()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": store}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield (
            store,
            {
                "STORAGE_EMULATOR_HOST": url,
                "TENSORSTORE_GCS_HTTP_URL": url,
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "nobody",
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
                "GOOGLE_CLOUD_PROJECT": "fake",
            },
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients are killed in the middle of a request."""


class _Handler(BaseHTTPRequestHandler):
    store: FakeGcs
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, status: int, body: bytes | dict[str, Any] = b"", **headers: str) -> None:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        self.send_response(status)
        kind = "application/json" if isinstance(body, dict) else "application/octet-stream"
        for name, value in ({"Content-Type": kind, "Content-Length": str(len(data))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def handle_request(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        with self.store.lock:
            self.store.requests.append(f"{self.command} {self.path}")
        path, _, text = self.path.partition("?")
        self.answer_to(self.command, path, dict(urllib.parse.parse_qsl(text)), body)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_request

    def answer_to(self, verb: str, path: str, query: dict[str, str], body: bytes) -> None:
        store = self.store
        if store.refuses is not None:
            told = {503: "Service Unavailable", 401: "Invalid Credentials"}[store.refuses]
            return self.answer(store.refuses, {"error": {"code": store.refuses, "message": told}})
        if path.startswith("/batch"):
            return self.batch(body)
        if match := re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o", path):
            return self.upload(match[1], query, body)
        match = re.fullmatch(OBJECT, path)
        if not match:
            return self.answer(404, {"error": {"code": 404, "message": f"no {path}"}})
        bucket, name = match[1], urllib.parse.unquote(match[2] or "")
        if not name:
            if path.endswith("/o"):
                return self.answer(200, store.listing(bucket, query))
            return self.answer(200, {"kind": "storage#bucket", "name": bucket, "id": bucket, "location": "US"})
        with store.lock:
            data, generation = store.objects.get((bucket, name)), store.generations.get((bucket, name), 0)
        wanted = query.get("ifGenerationMatch")
        if wanted is not None and int(wanted) != generation and verb != "GET":
            return self.answer(412, {"error": {"code": 412, "message": "precondition"}})
        if data is None:
            return self.answer(404, {"error": {"code": 404, "message": f"no object {name}"}})
        if match[3]:
            about = store.put(match[4] or bucket, urllib.parse.unquote(match[5]), data)
            if match[3] == "moveTo":
                with store.lock:
                    del store.objects[bucket, name], store.generations[bucket, name]
                return self.answer(200, about)
            return self.answer(200, {"kind": "storage#rewriteResponse", "done": True, "resource": about})
        if verb == "DELETE":
            with store.lock:
                del store.objects[bucket, name], store.generations[bucket, name]
            return self.answer(204)
        if query.get("alt") != "media":
            return self.answer(200, store.about(bucket, name))
        self.media(data, generation, query)

    def media(self, data: bytes, generation: int, query: dict[str, str]) -> None:
        about = {"x_goog_generation": str(generation), "x_goog_stored_content_length": str(len(data))}
        if query.get("ifGenerationNotMatch") == str(generation):
            return self.answer(304, **about)
        if "ifGenerationMatch" in query and query["ifGenerationMatch"] != str(generation):
            return self.answer(412, **about)
        if found := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or ""):
            first = int(found[1]) if found[1] else max(0, len(data) - int(found[2]))
            last = min(int(found[2]), len(data) - 1) if found[1] and found[2] else len(data) - 1
            if first >= len(data):
                return self.answer(416, **about)
            return self.answer(206, data[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(data)}", **about)
        self.answer(200, data, **about)

    def upload(self, bucket: str, query: dict[str, str], body: bytes) -> None:
        store, kind = self.store, query["uploadType"]
        if kind == "resumable" and "upload_id" in query:
            name, text = query["upload_id"], self.headers.get("Content-Range", "")
            target_bucket, target, data = store.uploads[name]
            data += body
            if text.endswith("/*"):
                return self.answer(308, Range=f"bytes=0-{len(data) - 1}")
            return self.answer(200, store.put(target_bucket, target, bytes(data)))
        if kind == "resumable":
            name = query.get("name") or json.loads(body)["name"]
            key = f"u{len(store.uploads)}"
            store.uploads[key] = (bucket, name, bytearray())
            host = self.headers["Host"]
            return self.answer(
                200, {}, Location=f"http://{host}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={key}"
            )
        name, data = query.get("name"), body
        if kind == "multipart":
            about, data = _parts(self.headers["Content-Type"], body)
            name = json.loads(about)["name"]
        wanted = query.get("ifGenerationMatch")
        with store.lock:
            if wanted is not None and int(wanted) != store.generations.get((bucket, name), 0):
                return self.answer(412, {"error": {"code": 412, "message": "precondition"}})
            self.answer(200, store.put(bucket, name, data))

    def batch(self, body: bytes) -> None:
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        message = email.message_from_bytes(head + body)
        answers = []
        for number, part in enumerate(message.get_payload(), start=1):
            _, path, *_ = part.get_payload().split()
            match = re.search(r"/b/([^/]+)/o/([^/? ]+)", path)
            key = match[1], urllib.parse.unquote(match[2])
            with self.store.lock:
                there = self.store.objects.pop(key, None)
                self.store.generations.pop(key, None)
            status = "204 No Content" if there is not None else "404 Not Found"
            answers.append(
                f"--b\r\nContent-Type: application/http\r\nContent-ID: <response-{number}>\r\n\r\nHTTP/1.1 {status}\r\n"
                "Content-Length: 0\r\n\r\n\r\n"
            )
        self.answer(200, ("".join(answers) + "--b--").encode(), Content_Type="multipart/mixed; boundary=b")


def _parts(content_type: str, body: bytes) -> tuple[bytes, bytes]:
    """The two parts of a multipart upload: what is said of the object, and its bytes."""
    boundary = re.search(r"boundary=['\"]?([^'\";]+)", content_type)[1].encode()
    pieces = body.split(b"--" + boundary)[1:3]
    first, second = (re.split(rb"\r?\n\r?\n", piece, maxsplit=1)[1] for piece in pieces)
    return first, re.sub(rb"\r?\n\Z", b"", second)
