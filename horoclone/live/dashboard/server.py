"""Serves the dashboard from a thread of the launcher: files, and a stream of events for each browser.

Nobody can act on the job through it. Thread: the constructor, start() and close() from the launcher's; everything else
from the server's own, which alone asks the content. Whatever goes wrong there is said once and leaves the job alone.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse

from horoclone.connection_limits import BACKLOG
from horoclone.live.dashboard.connection import Connection, quiet
from horoclone.live.dashboard.content import Content

EVERY_S, UNSEEN_EVERY_S = 1.0, 5.0  # between two looks, with a browser and without: then for the charts only
MAX_POINTS = 900  # of the charts: 15 minutes
MAX_EVENTS = 200
ACCEPTED = 16  # connections in one turn of the loop: each is read before the next ones could displace it
_CLOSE_S = 2.0  # for the thread to end; it is a daemon and holds nobody up for longer
_FILES = {
    "": ("index.html", "text/html"),
    "dashboard.css": ("dashboard.css", "text/css"),
    "dashboard.js": ("dashboard.js", "text/javascript"),
    "format.js": ("format.js", "text/javascript"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
    "uplot/uPlot.iife.min.js": ("uplot/uPlot.iife.min.js", "text/javascript"),
    "uplot/uPlot.min.css": ("uplot/uPlot.min.css", "text/css"),
    "uplot/LICENSE": ("uplot/LICENSE", "text/plain"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "Cache-Control": "no-store",
}


class Dashboard:
    """listening: a socket that listens, ours from now on. tell: takes the text of what went wrong, at most once."""

    def __init__(self, listening: socket.socket, content: Content, tell: Callable[[str], None]) -> None:
        self.token = secrets.token_urlsafe(18)
        self._socket, self._content, self._tell = listening, content, tell
        self._files = {
            path: ((resources.files(__package__) / "web" / name).read_bytes(), kind)
            for path, (name, kind) in _FILES.items()
        }
        self._points: deque[Any] = deque(maxlen=MAX_POINTS)
        self._events: deque[Any] = deque(maxlen=MAX_EVENTS)
        self._number = 0  # of looks
        self._browsers = 0
        self._tick = self._hello = b""
        self._next = asyncio.Event()
        self._is_over = False  # the last look has been sent
        self._wake = asyncio.Event()  # a browser has come, or the end
        self._is_closing = False
        self._has_told = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runs = threading.Event()
        config = uvicorn.Config(
            self._application,
            interface="asgi3",
            loop="asyncio",
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # an address in a log would carry the token
            access_log=False,
            server_header=False,
            backlog=ACCEPTED,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="hc-dashboard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Sends every browser what the content says now, and ends. Takes a moment, at most about 2 s."""
        if self._runs.wait(_CLOSE_S) and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._begin_end)
            except RuntimeError:  # its loop has ended by itself
                pass
            self._thread.join(_CLOSE_S)
        self._socket.close()

    # --- the server's thread

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # uvicorn also ends by SystemExit
            self._say(f"the dashboard has ended: {error!r}")
        finally:
            self._runs.set()

    def _say(self, text: str) -> None:
        if not self._has_told:
            self._has_told = True
            self._tell(text)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(quiet(self._say))
        self._runs.set()
        looking = asyncio.create_task(self._keep_looking())
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        self._socket.listen(BACKLOG)  # asyncio has one number for both
        await serving
        looking.cancel()

    async def _keep_looking(self) -> None:
        while not self._is_over:
            self._wake.clear()
            every_s = EVERY_S if self._browsers else UNSEEN_EVERY_S
            try:
                await asyncio.wait_for(self._wake.wait(), every_s if self._number else 0.01)
            except asyncio.TimeoutError:
                pass
            is_last = self._is_closing
            try:
                self._look()
            except Exception as error:
                self._say(f"the dashboard does not go on: {error!r}")
            self._is_over = is_last
            self._next.set()
            self._next = asyncio.Event()
        await asyncio.sleep(0.05)  # for the streams to send it
        self._server.should_exit = True

    def _look(self) -> None:
        snapshot = self._content.look()
        if snapshot["point"] is not None:
            self._points.append(snapshot["point"])
        self._events.extend(snapshot["events"])
        self._number += 1
        self._tick = _message("tick", snapshot)
        self._hello = b""

    def _greeting(self) -> bytes:
        if not self._hello:  # made for the first browser that needs it
            snapshot = json.loads(self._tick.partition(b"data: ")[2])
            whole = {**snapshot, "point": None, "history": list(self._points), "events": list(self._events)}
            self._hello = _message("hello", whole)
        return self._hello

    def _begin_end(self) -> None:
        self._is_closing = True
        self._wake.set()

    async def _stream(self) -> AsyncIterator[bytes]:
        self._browsers += 1
        is_first = self._browsers == 1  # then what there is may be old
        try:
            while not self._is_over and (is_first or not self._number):
                self._wake.set()
                await self._next.wait()
                is_first = False
            if not self._number:
                return
            seen = self._number
            yield self._greeting()
            while not self._is_over:
                await self._next.wait()
                if self._number != seen:
                    # a browser that was too slow for one look gets the whole again
                    yield self._tick if self._number == seen + 1 else self._greeting()
                seen = self._number
        finally:
            self._browsers -= 1

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI. Whatever lacks the token gets one and the same answer, whatever it asks for and in whatever way."""
        request = Request(scope, receive)
        token, slash, path = scope["path"].removeprefix("/").partition("/")
        is_known = secrets.compare_digest(token.encode("utf-8", "surrogatepass"), self.token.encode())
        if is_known:
            scope["state"]["connection"].authenticated()
        response = self._answer(request.method, slash, path) if is_known else _not_found()
        await response(scope, receive, send)

    def _answer(self, method: str, slash: str, path: str) -> Response:
        if method not in ("GET", "HEAD"):
            return PlainTextResponse("Nobody can act on the job here.\n", 405, headers=_HEADERS)
        if not slash:
            return RedirectResponse(f"/{self.token}/", headers=_HEADERS)
        if path == "events":
            if method == "HEAD":
                return Response(media_type="text/event-stream", headers=_HEADERS)
            return StreamingResponse(self._stream(), media_type="text/event-stream", headers=_HEADERS)
        if path.startswith("ranks/"):
            return self._answer_rank(path.removeprefix("ranks/"))
        found = self._files.get(path)
        if found is None:
            return _not_found()
        return Response(found[0], media_type=found[1], headers=_HEADERS)

    def _answer_rank(self, rank: str) -> Response:
        is_number = rank.isascii() and rank.isdigit() and len(rank) < 10
        one = self._content.look_at(int(rank)) if is_number else None
        if one is None:
            return _not_found()
        return Response(json.dumps(one), media_type="application/json", headers=_HEADERS)


def _message(name: str, content: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


def _not_found() -> Response:
    text = "Nothing is here. The launcher has printed the whole address, with its token.\n"
    return PlainTextResponse(text, 404, headers=_HEADERS)
