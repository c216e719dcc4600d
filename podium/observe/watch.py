"""`podium watch`: the report of runs, live in a browser. It reads the runs' files and writes nothing.

    /                 the runs, newest first
    /runs/NAME        the report of one run, redrawn when its files change
    /runs/NAME/data   the report's JSON object
    /runs/NAME/events server-sent events: a line at each change

The server listens on loopback, or on another address if a token is set. Imports no jax; starlette and uvicorn come with
an extra.
"""

import asyncio
import hmac
import html
import json
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from podium.observe.metrics import ACCURACY, REWARD
from podium.observe.report.page import make_page, plotly_script, report_object
from podium.observe.run_dir import CONFIG, LOCK, METRICS, SAMPLES
from podium.observe.text import clock

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine in a request's Host header."""
POLL_S = 1.0
"""Seconds between two checks of a run's files."""
PING_S = 15.0
"""Seconds between two messages at the latest, so that a closed connection is noticed."""
REST = 20.0
"""Wait this many times the duration of a report before making the next: training needs the machine."""
TAIL_BYTES = 1 << 16
COOKIE = "podium_token"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

Handler = Callable[[Any], Awaitable[Any]]


class LiveRuns:
    """The runs below a folder, and the newest report of each, shared by all clients."""

    def __init__(self, folder: Path):
        """Reads nothing yet."""
        self.folder = folder
        self._made: dict[str, tuple[str, float, float, dict[str, Any]]] = {}  # version, when, seconds, object
        self._locks: dict[str, asyncio.Lock] = {}

    def names(self) -> list[str]:
        """Names of the run folders, most recently changed first."""
        found = [path.name for path in self.folder.iterdir() if (path / CONFIG).is_file() or (path / METRICS).is_file()]
        return sorted(found, key=lambda name: -changed(self.folder / name))

    def version(self, name: str) -> str:
        """A string that changes whenever the run's records do."""
        marks = []
        for file in (METRICS, SAMPLES):
            try:
                found = (self.folder / name / file).stat()
                marks.append(f"{found.st_size}-{found.st_mtime_ns}")
            except OSError:
                marks.append("none")
        return " ".join(marks)

    async def report(self, name: str) -> dict[str, Any]:
        """The report object of a run; making reports uses at most 1 / (1 + REST) of a core."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            made, version = self._made.get(name), self.version(name)
            if made and (made[0] == version or time.monotonic() < made[1] + REST * made[2]):
                return made[3]
            start = time.monotonic()
            content = await asyncio.to_thread(report_object, [self.folder / name])
            self._made[name] = (version, time.monotonic(), time.monotonic() - start, content)
            return content

    async def events(self, name: str) -> AsyncIterator[str]:
        """Yield a server-sent event at each change of a run, and its state in between, until the client disconnects."""
        seen, said = self.version(name), time.monotonic()
        yield f"event: state\ndata: {state(self.folder / name)}\n\n"
        while True:
            await asyncio.sleep(POLL_S)
            version = self.version(name)
            if version != seen or time.monotonic() - said >= PING_S:
                kind = "event: state\n" if version == seen else ""
                seen, said = version, time.monotonic()
                yield f"{kind}data: {state(self.folder / name)}\n\n"


def make_app(folder: Path, *, token: str | None = None, hosts: tuple[str, ...] = LOOPBACK) -> Any:
    """The ASGI application that serves the runs below `folder`; with a token, only to clients that present it.

    `hosts` are the accepted Host headers (empty: any). Others are refused, so that no page of another site can reach a
    server on loopback through DNS rebinding.
    """
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse
    from starlette.routing import Route

    runs, plotly = LiveRuns(folder), plotly_script()

    async def index(request: Any) -> Any:
        return HTMLResponse(_index(runs), headers={"Content-Security-Policy": POLICY})

    async def report(request: Any) -> Any:
        name = _known(runs, request)
        live = f"/runs/{urllib.parse.quote(name, safe='')}"
        return HTMLResponse(make_page(await runs.report(name), plotly, live=live))

    async def data(request: Any) -> Any:
        return JSONResponse(await runs.report(_known(runs, request)))

    async def events(request: Any) -> Any:
        stream = runs.events(_known(runs, request))
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    pages = {"/": index, "/runs/{name}": report, "/runs/{name}/data": data, "/runs/{name}/events": events}
    return Starlette(
        routes=[Route(path, _guarded(handler, token, hosts), methods=["GET"]) for path, handler in pages.items()]
    )


def _known(runs: LiveRuns, request: Any) -> str:
    """The run that a request names, or 404: only listed names are used, never a path that a client sends."""
    from starlette.exceptions import HTTPException

    name = request.path_params["name"]
    if name not in runs.names():
        raise HTTPException(404, "no such run")
    return name


def _guarded(handler: Handler, token: str | None, hosts: tuple[str, ...]) -> Handler:
    """Wrap a handler: require a known Host and the token, given once as `?token=` and then as a cookie."""
    from starlette.responses import PlainTextResponse, RedirectResponse

    def is_token(given: str) -> bool:
        return token is not None and hmac.compare_digest(given.encode(), token.encode())

    async def answer(request: Any) -> Any:
        host = request.headers.get("host", "").lower()
        if hosts and host not in hosts and host.rpartition(":")[0] not in hosts:
            return PlainTextResponse("this server answers to localhost only", status_code=421)
        if token is None or is_token(request.cookies.get(COOKIE, "")):
            return await handler(request)
        if is_token(request.query_params.get("token", "")):
            response = RedirectResponse(request.url.path, status_code=303)
            response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            return response
        return PlainTextResponse("give the token: /?token=...", status_code=401)

    return answer


def serve(folder: Path, *, host: str, port: int, token: str | None) -> None:
    """Serve until Ctrl-C.

    Raises:
        ValueError: `folder` is not a folder, the extra is missing, or the address is public and no token is set.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError:
        raise ValueError(
            "podium watch serves with starlette and uvicorn, which are not installed; pip install 'podium-rl[report]'"
        ) from None
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the runs_dir of your configs, such as runs")
    local = host in ("127.0.0.1", "localhost", "::1")
    if not local and not token:
        raise ValueError(
            f"--host {host} accepts connections from other machines: give a --token too, or leave --host out and use "
            f"`ssh -L {port}:localhost:{port}` from where the browser is"
        )
    app = make_app(folder, token=token, hosts=LOOPBACK if local else ())
    print(f"watching {folder} at http://{host}:{port}/{f'?token={token}' if token else ''}   (Ctrl-C ends)", flush=True)
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=1)


def state(folder: Path) -> str:
    """Whether a run is training, and how long ago it last wrote, in words."""
    doing = "training" if locked(folder / LOCK) else "not training"
    return f"{doing}; last written {clock(time.time() - changed(folder))} ago"


def locked(lock: Path) -> bool:
    """Whether a local process holds a lock on the file, found without trying to take it."""
    try:
        inode, table = lock.stat().st_ino, Path("/proc/locks").read_text()
    except OSError:
        return False
    rows = [line.split() for line in table.splitlines()]
    return any(row[1] == "FLOCK" and row[5].endswith(f":{inode}") for row in rows if len(row) > 5)


def changed(folder: Path) -> float:
    """When a run last wrote a metric or its config, in seconds since 1970."""
    times = [path.stat().st_mtime for path in (folder / METRICS, folder / CONFIG) if path.exists()]
    return max(times, default=0.0)


def _index(runs: LiveRuns) -> str:
    """The list of runs, as a page without scripts that reloads every 10 seconds."""
    rows = "".join(_row(runs.folder / name) for name in runs.names())
    head = "<tr><th>run<th>step<th>reward<th>accuracy<th>state</tr>"
    style = (Path(__file__).parent / "report" / "page.css").read_text("utf-8")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="10">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>Podium: runs</title><style>{style}</style>'
        f'<h1>Runs</h1><div class="scroll">{f"<table>{head}{rows}</table>" if rows else "<p>No runs yet.</p>"}</div>'
    )


def _row(folder: Path) -> str:
    """A run's row in the list, from the end of its metrics."""
    last: dict[str, Any] = {}
    for record in _tail(folder / METRICS):
        last |= record
    values = (f"{last[name]:.3f}" if isinstance(last.get(name), float | int) else "" for name in (REWARD, ACCURACY))
    link = f'<a href="/runs/{urllib.parse.quote(folder.name, safe="")}">{html.escape(folder.name)}</a>'
    cells = (link, html.escape(str(last.get("step", 0))), *values, html.escape(state(folder)))
    return f"<tr>{''.join(f'<td>{cell}' for cell in cells)}</tr>"


def _tail(path: Path) -> list[dict[str, Any]]:
    """The whole records in the last TAIL_BYTES of a file of JSON lines."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the first or last line may be cut
            continue
        if isinstance(record, dict):
            found.append(record)
    return found
