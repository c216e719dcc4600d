"""`podium watch`: a live report of runs in the browser. Reads the runs' files and writes nothing.

    /               the runs, newest first
    /runs/A         the report of run A, redrawn when its files change
    /runs/A/B       the report of several runs, compared
    /data/A/B       the report's JSON object
    /events/A/B     server-sent events: a line at each change

The server listens on loopback, or on another address if a token is set. If a run's files do not respond, for example on
a lost network drive, the page says so and other runs are unaffected. Imports no jax; starlette and uvicorn are
optional.
"""

import asyncio
import os
import threading
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from podium.config.errors import UsageError
from podium.observe.access import LOOPBACK, Address, check_installed, is_token, knows_host
from podium.observe.listening import run, take_port
from podium.observe.report.report_page import make_page, page_policy, plotly_script, report_object
from podium.observe.run_dir import METRICS, SAMPLES
from podium.observe.run_list import POLICY, RunLine, is_run, list_page, state

if TYPE_CHECKING:  # an extra
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

POLL_S = 1.0
"""Seconds between checks of a run's files."""
PING_S = 15.0
"""Maximum seconds between two messages, so that a closed connection is noticed."""
REST = 20.0
"""After making a report, wait this many times its duration before the next one, to leave the machine to training."""
PATIENCE_S = 3.0
"""Seconds within which a run's files must respond."""
REPORT_S = 60.0
"""Seconds within which a report must be made."""
READS = 32
"""Maximum number of concurrent file reads."""
REPORTS = 16
"""Maximum number of reports kept."""
COOKIE = "podium_token"

Handler = Callable[["Request"], Awaitable["Response"]]
Result = TypeVar("Result")
Names = tuple[str, ...]
"""Names of a report's runs; each is a folder in the runs folder."""


class Reader:
    """Calls functions that read files, each in its own thread, so that a file that hangs blocks nothing else.

    While a call is running, the same call is not started again: later callers wait for its result.
    """

    def __init__(self) -> None:
        self._calls: dict[object, asyncio.Future[object]] = {}
        self._slots = asyncio.Semaphore(READS)

    async def call(self, key: object, function: Callable[[], Result], patience_s: float) -> Result:
        """Return the function's result. `key` identifies the call. Raises TimeoutError after `patience_s` seconds."""
        async with self._slots:
            future = self._calls.get(key)
            if future is None:
                loop = asyncio.get_running_loop()
                future = self._calls[key] = loop.create_future()
                threading.Thread(target=self._run, args=(key, function, future, loop), daemon=True).start()
            return await asyncio.wait_for(asyncio.shield(future), patience_s)  # pyright: ignore[reportReturnType]

    def _run(
        self,
        key: object,
        function: Callable[[], object],
        future: "asyncio.Future[object]",
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        try:
            result, error = function(), None
        except BaseException as raised:  # whatever ends the call ends its callers' wait; a future takes Exceptions
            result, error = None, raised if isinstance(raised, Exception) else RuntimeError(repr(raised))

        def give() -> None:
            del self._calls[key]
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
                future.exception()  # otherwise asyncio logs it if all callers are gone

        try:
            loop.call_soon_threadsafe(give)
        except RuntimeError:  # the server has stopped
            return


class LiveRuns:
    """The runs in a folder, and the newest report of each run or comparison, shared by all clients."""

    def __init__(self, folder: Path):
        """Does not read anything yet."""
        self.folder = folder
        self._reader = Reader()
        self._lines: dict[str, RunLine] = {}
        self._made: dict[Names, tuple[str, float, float, dict[str, object]]] = {}  # version, when, seconds, object
        self._locks: dict[Names, asyncio.Lock] = {}

    async def list_page(self) -> str:
        """The list of runs, as a page."""
        names = await self._reader.call("names", self._names, PATIENCE_S)
        lines = {name: self._lines.setdefault(name, RunLine(self.folder / name)) for name in names}
        answers = await asyncio.gather(
            *(self._reader.call(("line", name), line.refresh, PATIENCE_S) for name, line in lines.items()),
            return_exceptions=True,
        )
        found = dict(zip(names, answers, strict=True))
        return list_page(
            [lines[name] for name, answer in found.items() if answer is True],
            [name for name, answer in found.items() if isinstance(answer, BaseException)],
        )

    async def known(self, path: str) -> Names | None:
        """The runs that a path such as `a/b` names; None unless they are distinct runs of the folder."""
        names = tuple(path.split("/"))
        if len(set(names)) < len(names):
            return None
        there = await self._reader.call("names", self._names, PATIENCE_S)
        if not all(name in there for name in names):  # never a path that a client made up
            return None
        checks = (
            self._reader.call(("is run", name), lambda name=name: is_run(self.folder / name), PATIENCE_S)
            for name in names
        )
        return names if all(await asyncio.gather(*checks)) else None

    async def version(self, names: Names) -> str:
        """A string that changes whenever one of the runs' records does."""
        return await self._reader.call(("version", names), lambda: self._version(names), PATIENCE_S)

    async def report(self, names: Names) -> dict[str, object]:
        """The report object of the runs; making reports uses at most 1 / (1 + REST) of a core."""
        async with self._locks.setdefault(names, asyncio.Lock()):
            made, version = self._made.get(names), await self.version(names)
            if made and (made[0] == version or time.monotonic() < made[1] + REST * made[2]):
                return made[3]
            start, folders = time.monotonic(), [self.folder / name for name in names]
            content = await self._reader.call(("report", names), lambda: report_object(folders), REPORT_S)
            self._made.pop(names, None)  # keeps the order that of creation
            self._made[names] = (version, time.monotonic(), time.monotonic() - start, content)
            if len(self._made) > REPORTS:
                del self._made[next(iter(self._made))]
            return content

    async def events(self, names: Names) -> AsyncIterator[str]:
        """Yield a server-sent event at each change of the runs, and their state in between, until the client
        disconnects.
        """
        seen, said = await self.version(names), time.monotonic()
        yield f"event: state\ndata: {await self._state(names)}\n\n"
        while True:
            await asyncio.sleep(POLL_S)
            try:
                version, doing = await self.version(names), await self._state(names)
            except TimeoutError:
                version, doing = seen, "the run's files do not respond"
            if version != seen or time.monotonic() - said >= PING_S:
                kind = "event: state\n" if version == seen else ""
                seen, said = version, time.monotonic()
                yield f"{kind}data: {doing}\n\n"

    def _names(self) -> list[str]:
        """Names of folders that may be runs; links are not followed, because their targets may hang."""
        with os.scandir(self.folder) as entries:
            return [entry.name for entry in entries if entry.is_symlink() or entry.is_dir(follow_symlinks=False)]

    def _version(self, names: Names) -> str:
        marks: list[str] = []
        for path in (self.folder / name / file for name in names for file in (METRICS, SAMPLES)):
            try:
                found = path.stat()
                marks.append(f"{found.st_size}-{found.st_mtime_ns}")
            except OSError:
                marks.append("none")
        return " ".join(marks)

    async def _state(self, names: Names) -> str:
        def words() -> str:
            states = {name: state(self.folder / name) for name in names}
            return "; ".join(states.values() if len(names) == 1 else map(": ".join, states.items()))

        return await self._reader.call(("state", names), words, PATIENCE_S)


def make_app(folder: Path, *, token: str | None = None, hosts: tuple[str, ...] = LOOPBACK) -> "Starlette":
    """The ASGI application that serves the runs in `folder`; with a token, only to clients that present the token.

    `hosts` are the accepted Host headers (empty: any). Other hosts are refused, so that pages of other sites cannot
    reach a loopback server through DNS rebinding.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, StreamingResponse
    from starlette.routing import Route

    runs, plotly = LiveRuns(folder), plotly_script()

    async def known(request: "Request") -> Names:
        names = await runs.known(request.path_params["names"])
        if names is None:
            raise HTTPException(404, "no such run")
        return names

    async def index(request: "Request") -> "Response":
        return HTMLResponse(await runs.list_page(), headers={"Content-Security-Policy": POLICY})

    async def chosen(request: "Request") -> "Response":
        names = request.query_params.getlist("run")
        return RedirectResponse(f"/runs/{_path(names)}" if names else "/", status_code=303)

    async def report(request: "Request") -> "Response":
        names = await known(request)
        page = make_page(await runs.report(names), plotly, live=_path(names))
        policy = f"{page_policy(live=True)}; frame-ancestors 'none'"
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def data(request: "Request") -> "Response":
        return JSONResponse(await runs.report(await known(request)))

    async def events(request: "Request") -> "Response":
        stream = runs.events(await known(request))
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    pages: dict[str, Handler] = {
        "/": index,
        "/runs": chosen,
        "/runs/{names:path}": report,
        "/data/{names:path}": data,
        "/events/{names:path}": events,
    }
    return Starlette(
        routes=[Route(path, _guarded(handler, token, hosts), methods=["GET"]) for path, handler in pages.items()]
    )


def _path(names: Names | list[str]) -> str:
    return "/".join(urllib.parse.quote(name, safe="") for name in names)


def _guarded(handler: Handler, token: str | None, hosts: tuple[str, ...]) -> Handler:
    """Wrap a handler: require a known Host and the token, given once as `?token=` and then as a cookie."""
    from starlette.responses import PlainTextResponse, RedirectResponse

    async def handled(request: "Request") -> "Response":
        try:
            return await handler(request)
        except TimeoutError:
            return PlainTextResponse("the run's files do not respond; is their drive still mounted?", status_code=503)

    async def answer(request: "Request") -> "Response":
        if not knows_host(request.headers.get("host", ""), hosts):
            return PlainTextResponse("this server only answers to localhost", status_code=421)
        if token is None or is_token(request.cookies.get(COOKIE, ""), token):
            return await handled(request)
        if is_token(request.query_params.get("token", ""), token):
            response = RedirectResponse(request.url.path, status_code=303)
            response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            return response
        return PlainTextResponse("add the token to the address: /?token=...", status_code=401)

    return answer


def serve(folder: Path, address: Address) -> None:
    """Serve until Ctrl-C.

    Raises:
        ValueError: `folder` is not a folder, the token file is unusable, the extra is missing, or the address is
            public and no token is set.
    """
    check_installed("podium watch")
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give the runs_dir of your configs, such as runs")
    token = address.secret()
    hosts = address.hosts(token, "browser")
    sockets = take_port(address.host, address.port)
    app = make_app(folder, token=token, hosts=hosts)
    where = f"http://{address.host}:{address.port}/{f'?token={token}' if token else ''}"
    run(app, sockets, ready=lambda: print(f"watching {folder} at {where}   (Ctrl-C ends)", flush=True))
