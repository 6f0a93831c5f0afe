"""One connection to the dashboard: uvicorn's, with limits for who does not know the token.

The number of connections is fixed; in a crowd who comes displaces the oldest that has not shown the token, and a
request has to be whole within some seconds. Thread: the server's, which runs uvicorn's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from horoclone.connection_limits import UnauthenticatedConnections, has_unread

MOST = 64  # connections at a time, with the token and without
REQUEST_S = 10.0  # for a request to arrive, from the connection or the last answer on


class Connection(H11Protocol):
    """The application finds it in `state` of a request, and calls authenticated() where that has the token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, "connection": self}
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()
        others = self._unauthenticated()
        others.most = MOST - (len(self.connections) - 1 - len(others))
        if not others.admit(self, transport.get_extra_info("socket").fileno()):
            self.limit_concurrency = 0  # all others have shown the token: uvicorn answers 503

    def authenticated(self) -> None:
        """From now on nobody displaces it."""
        self._unauthenticated().gone(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unauthenticated().gone(self)
        if self._limit is not None:
            self._limit.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def _unauthenticated(self) -> UnauthenticatedConnections[Connection]:
        """Of the server, among its connections."""
        state = self.server_state.__dict__
        if "unauthenticated" not in state:
            state["unauthenticated"] = UnauthenticatedConnections(
                MOST, float("inf"), Connection._send_away, Connection._has_news, self._say
            )
        return state["unauthenticated"]  # type: ignore[no-any-return]

    def _say(self, text: str) -> None:
        self.loop.call_exception_handler({"message": text})

    def _send_away(self) -> None:
        self._unauthenticated().gone(self)
        self.transport.abort()
        self.connections.discard(self)

    def _has_news(self) -> bool:
        return self._is_being_answered() or has_unread(self.transport.get_extra_info("socket"))

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
