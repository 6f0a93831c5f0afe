"""One connection to the dashboard: uvicorn's, with limits for who does not know the token.

The number of connections is fixed; in a crowd who comes displaces the oldest that has not shown the token, and a
request has to be whole within some seconds. Thread: the server's, which runs uvicorn's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from horoclone import connection_limits

MOST = 64  # connections at a time
CROWD = MOST // 2  # from here on the oldest make room
PATIENCE_S = 0.5  # nobody has to before, as long as there is room: a request may be on its way
REQUEST_S = 10.0  # for a request to arrive, from the connection or the last answer on


class Connection(H11Protocol):
    """is_known: its last request had the token; the application says so through `state` of the request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_known = False
        self.app_state = {**self.app_state, "connection": self}
        self._limit: asyncio.TimerHandle | None = None
        self._began = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._ours().append(self)
        self._expect_request()
        peer = transport.get_extra_info("socket")
        is_short = peer is not None and connection_limits.are_descriptors_short(peer.fileno())
        if len(self._ours()) <= CROWD and not is_short:
            return
        oldest = min((one for one in self._ours() if not one.is_known), key=Connection._is_being_answered)
        is_full = is_short or len(self._ours()) > MOST
        if oldest is self:  # all others have shown the token: uvicorn answers 503
            self.limit_concurrency = 0 if is_full else None
        elif is_full or self.loop.time() - oldest._began >= PATIENCE_S:
            self.loop.call_exception_handler({"message": connection_limits.too_many(MOST)})
            oldest.transport.abort()
            self._ours().remove(oldest)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._ours():
            self._ours().remove(self)
        if self._limit is not None:
            self._limit.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def _ours(self) -> list[Connection]:
        """All that are open, the oldest first."""
        return self.server_state.__dict__.setdefault("in_order", [])  # type: ignore[no-any-return]

    def _expect_request(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = self.loop.call_later(REQUEST_S, self._give_up)

    def _is_being_answered(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _give_up(self) -> None:
        if not self._is_being_answered():
            self.transport.abort()


def quiet(tell: Callable[[str], None]) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """For the loop: what it meets, such as no descriptor for the next connection, is one line and no traceback."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        tell(f"the dashboard: {context.get('exception') or context.get('message')}")

    return handle
