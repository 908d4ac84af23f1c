"""Lines from a TCP or Unix socket.

A client that just sends lines may lose those that were on their way when this process was killed:
a socket has no memory. One that wants each line exactly once says first who it is,
"PACELINE <name>", and is answered by a line with the number of its lines that are in the log; it
sends those after. Whenever more of them are, it is told the new number.
"""

import contextlib
import os
import re
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.stream import UNIX
from paceline.train.data.stream.log import Positions
from paceline.train.data.stream.sources import MOST_TEXT_BYTES, Parser, Text

_PREFIX, _ANONYMOUS = "socket/", "socket"
_HELLO = re.compile(rb"PACELINE ([A-Za-z0-9._-]{1,64})\r?")
_READ_BYTES = 2**16
_MOST_CLIENTS, _MOST_NAMES = 256, 10_000
_ANSWER_S = 0.1


@dataclass(eq=False)
class _Client:
    socket: socket.socket
    source: str = _ANONYMOUS
    has_begun: bool = False
    told: int = -1
    """The number that it was told last."""
    rest: bytes = b""


class SocketSource:
    """Listens at an address, as `Stream.listen` says.

    Args:
        address: "HOST:PORT" or "unix:PATH".
        parser: of lines.
        positions: what the log has.

    Raises:
        InputError: the address can't be listened at.
    """

    def __init__(self, address: str, parser: Parser, positions: Positions) -> None:
        self._parser = parser
        self._positions = {
            name: position for name, position in positions.items() if name.startswith(_ANONYMOUS)
        }
        self._path: Path | None = None
        try:
            self._listener = self._listen(address)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise InputError(
                f"data.stream.listen = {address!r} can't be listened at ({why}): choose a free "
                "address of this machine."
            ) from None
        self._listener.setblocking(False)
        self._clients: list[_Client] = []

    def _listen(self, address: str) -> socket.socket:
        if not address.startswith(UNIX):
            host, _, port = address.rpartition(":")
            return socket.create_server((host.strip("[]"), int(port)), family=_family(host))
        self._path = Path(address.removeprefix(UNIX))
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(self._path.stat().st_mode):
                self._path.unlink()  # of a process that was killed
        listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o077)
        try:
            listener.bind(str(self._path))
        finally:
            os.umask(before)
        listener.listen()
        return listener

    @property
    def address(self) -> object:
        """Where it listens."""
        return self._listener.getsockname()

    def take(self, most_bytes: int) -> list[Text]:
        """As `Source`."""
        self._accept()
        found: list[Text] = []
        for client in list(self._clients):
            while most_bytes > 0 and (data := self._received(client)):
                found += self._lines(client, data)
                most_bytes -= len(data)
        return found

    def committed(self) -> None:
        """As `Source`: tell each client how far it has been taken."""
        for client in list(self._clients):
            number = self._positions.get(client.source, 0)
            if client.source == _ANONYMOUS or client.told == number:
                continue
            client.told = number
            try:
                client.socket.settimeout(_ANSWER_S)
                client.socket.sendall(b"%d\n" % number)
                client.socket.setblocking(False)
            except OSError:  # it is gone, or does not read what it is told
                self._drop(client)

    def close(self) -> None:
        """As `Source`."""
        for client in list(self._clients):
            self._drop(client)
        self._listener.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while len(self._clients) < _MOST_CLIENTS:
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # nobody is waiting
                return
            accepted.setblocking(False)
            self._clients.append(_Client(accepted))

    def _received(self, client: _Client) -> bytes:
        """What a client has sent; none: it has not, or it is gone."""
        try:
            data = client.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:
            self._drop(client)
        return data

    def _lines(self, client: _Client, data: bytes) -> list[Text]:
        lines = (client.rest + data).split(b"\n")
        client.rest = lines.pop()
        if len(client.rest) > MOST_TEXT_BYTES:
            self._parser.reject("a line", f"it has more than {MOST_TEXT_BYTES >> 20} MiB")
            self._drop(client)
        if lines and not client.has_begun:
            client.has_begun = True
            if (hello := _HELLO.fullmatch(lines[0])) is not None:
                del lines[0]
                self._name(client, hello[1].decode())
        return [self._text(client, line.removesuffix(b"\r")) for line in lines]

    def _name(self, client: _Client, name: str) -> None:
        """Know a client again; of two connections the newer one is it."""
        for other in list(self._clients):
            if other is not client and other.source == _PREFIX + name:
                self._drop(other)
        if _PREFIX + name not in self._positions and len(self._positions) >= _MOST_NAMES:
            self._parser.reject(f"a client {name}", f"{_MOST_NAMES} names are known")
            self._drop(client)
            return
        client.source = _PREFIX + name

    def _text(self, client: _Client, line: bytes) -> Text:
        position = self._positions[client.source] = self._positions.get(client.source, 0) + 1
        text = self._parser.text_of(line, "a line at data.stream.listen") if line else None
        return Text(text, time.time(), client.source, position)

    def _drop(self, client: _Client) -> None:
        client.socket.close()
        with contextlib.suppress(ValueError):
            self._clients.remove(client)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
