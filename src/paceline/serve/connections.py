"""Connections: uvicorn's, which give up a client that doesn't end the head of its request.

uvicorn has a limit for connections that wait for a next request, and none for the first, or once a
byte of the next is here.
"""

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S = 30.0
"""In which a request's line and headers have to be here."""
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as _Protocol
else:  # by httptools where that is installed
    _Protocol = AutoHTTPProtocol


class Connection(_Protocol):
    """One client's."""

    _giving_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio has it."""
        super().connection_made(transport)
        self._limit()

    def data_received(self, data: bytes) -> None:
        """As asyncio has it."""
        super().data_received(data)
        self._limit()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio has it."""
        super().connection_lost(exc)
        self._end_limit()

    def _limit(self) -> None:
        """Begin to wait for the end of a head, or end it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_limit()
        elif self._giving_up is None:
            self._giving_up = self.loop.call_later(HEAD_S, self._give_up)

    def _end_limit(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        self.transport.write(_TOO_LATE)
        self.transport.close()
