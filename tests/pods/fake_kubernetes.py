"""The part of a Kubernetes server that says which kinds it has: all that kubectl asks for in a client's dry run."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VERBS = ["create", "get", "list"]


def _kinds(group: str, name: str, kind: str) -> dict[str, Any]:
    resource = {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": VERBS}
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": [resource]}


JOBSET = {"groupVersion": "jobset.x-k8s.io/v1alpha2", "version": "v1alpha2"}
GROUP = {"name": "jobset.x-k8s.io", "versions": [JOBSET], "preferredVersion": JOBSET}
ANSWERS: dict[str, Any] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [GROUP]},
    "/api/v1": _kinds("v1", "configmaps", "ConfigMap"),
    "/apis/jobset.x-k8s.io/v1alpha2": _kinds("jobset.x-k8s.io/v1alpha2", "jobsets", "JobSet"),
    "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.0"},
}


@contextlib.contextmanager
def discovery() -> Iterator[str]:
    """Its address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            found = ANSWERS.get(self.path.partition("?")[0])
            data = json.dumps(
                found or {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
            ).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
