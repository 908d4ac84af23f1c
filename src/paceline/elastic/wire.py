"""Messages: JSON lines between the agents of a run, and between an agent and its ranks.

Agents talk over TCP. Both sides prove that they know the secret of the Run directory before
anything that they say is read (HMAC-SHA256 of both nonces); from then on each line carries a MAC
with a counter, so that none can be changed, repeated or left out. A stranger's connection costs 64
bytes and lasts five seconds at most. Nothing is unpickled.

An agent and its ranks talk over a Unix socket in a private folder: lines alone.

Not here: what is said (`elastic.agent`, `elastic.leader`), and a rank's end (`elastic.link`).
"""

import asyncio
import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

Message = dict[str, Any]
"""With its "kind", and what belongs to it."""
MOST_BYTES = 1 << 22
"""Of a line: a Generation of ten thousand nodes fits."""

_NONCE = 32
_MAC = 32
_SHAKE_S = 5.0
_MOST_PENDING = 64
# Of what a peer has not read; one that reads nothing is gone.
_MOST_UNREAD = 8 * MOST_BYTES
_BROKEN = (OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError)


class Channel(Protocol):
    """Messages to and from one process."""

    def send(self, message: Message) -> None:
        """Give it a message; never waits, and does nothing when it is gone."""

    async def receive(self) -> Message | None:
        """Its next message; None: it is gone."""

    def close(self, *, at_once: bool = False) -> None:
        """Let it go.

        Args:
            at_once: though not all that was sent has arrived: it has been silent for too long.
        """


def encode(message: Message) -> bytes:
    """One line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of a line.

    Raises:
        ValueError: it holds none.
    """
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("no message")
    return message


class StreamChannel:
    """Over a socket.

    Args:
        keys: of what is sent and of what is received; none: lines carry no MAC.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        keys: tuple[bytes, bytes] | None = None,
    ) -> None:
        self._reader, self._writer, self._keys = reader, writer, keys
        self._num_sent = self._num_received = 0

    def send(self, message: Message) -> None:
        """See Channel."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        line = encode(message)
        if self._keys is not None:
            line = _mac(self._keys[0], self._num_sent, line).hex().encode() + line
            self._num_sent += 1
        self._writer.write(line)
        if transport.get_write_buffer_size() > _MOST_UNREAD:
            transport.abort()

    async def receive(self) -> Message | None:
        """See Channel; one that sends anything but messages is gone as well."""
        try:
            line = await self._reader.readline()
            if not line.endswith(b"\n"):
                raise EOFError
            if self._keys is not None:
                given, line = bytes.fromhex(line[: 2 * _MAC].decode()), line[2 * _MAC :]
                if not hmac.compare_digest(given, _mac(self._keys[1], self._num_received, line)):
                    raise ValueError("forged")
                self._num_received += 1
            return decode(line)
        except _BROKEN:
            self._writer.transport.abort()
            return None

    def close(self, *, at_once: bool = False) -> None:
        """See Channel."""
        if at_once:
            self._writer.transport.abort()
        else:
            self._writer.close()


class _QueueChannel:
    def __init__(self, sent: "asyncio.Queue[Message | None]", got: "asyncio.Queue[Message | None]"):
        self._sent, self._got = sent, got
        self._is_closed = False

    def send(self, message: Message) -> None:
        if not self._is_closed:
            self._sent.put_nowait(message)

    async def receive(self) -> Message | None:
        return None if self._is_closed else await self._got.get()

    def close(self, *, at_once: bool = False) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._sent.put_nowait(None)
            self._got.put_nowait(None)


def channels_here() -> tuple[Channel, Channel]:
    """The two ends of one inside this process: a leader's agent is a member like the others."""
    one: asyncio.Queue[Message | None] = asyncio.Queue()
    other: asyncio.Queue[Message | None] = asyncio.Queue()
    return _QueueChannel(one, other), _QueueChannel(other, one)


def secret_of(folder: Path) -> bytes:
    """What the agents of a run know, and nobody else who can't read its directory.

    Args:
        folder: of agents, in the Run directory; may not exist yet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "secret"
    if not file.exists():
        draft = folder / f".secret-{os.getpid()}-{secrets.token_hex(4)}"
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as out:
            out.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(draft, file)  # whoever is first: all read the same one
        draft.unlink()
    return bytes.fromhex(file.read_text())


async def dial(address: str, port: int, secret: bytes, limit_s: float) -> StreamChannel:
    """A channel to the agent that listens there.

    Raises:
        ConnectionRefusedError: no process does: the agent has ended.
        OSError: it can't be reached, does not answer in time, or does not know the secret.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(address, port, limit=MOST_BYTES)
            theirs = await reader.readexactly(_NONCE)
            ours = secrets.token_bytes(_NONCE)
            writer.write(ours + _proof(secret, b"client", ours + theirs))
            if not hmac.compare_digest(
                await reader.readexactly(_MAC), _proof(secret, b"server", ours + theirs)
            ):
                raise ConnectionError("whoever listens there does not know the run's secret")
    except BaseException as error:
        if writer is not None:
            writer.transport.abort()
        if isinstance(error, (EOFError, TimeoutError)):
            raise ConnectionError("it does not answer as an agent does") from None
        raise
    up, down = _keys(secret, ours + theirs)
    return StreamChannel(reader, writer, (up, down))


class Listener:
    """Where an agent is reached by others.

    Args:
        on_channel: is awaited with each that proved that it knows the secret.
    """

    def __init__(self, secret: bytes, on_channel: Callable[[StreamChannel], Awaitable[None]]):
        self._secret, self._on_channel = secret, on_channel
        self._pending: dict[asyncio.StreamWriter, None] = {}
        self._server: asyncio.Server | None = None

    async def open(self, address: str) -> int:
        """Listen there, at a port that is returned.

        Raises:
            OSError: it is no address of this host.
        """
        self._server = await asyncio.start_server(
            until_cancelled(self._accept), address, 0, limit=MOST_BYTES
        )
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._pending[writer] = None
        if len(self._pending) > _MOST_PENDING:  # of strangers: the oldest goes
            next(iter(self._pending)).transport.abort()
        ours = secrets.token_bytes(_NONCE)
        try:
            async with asyncio.timeout(_SHAKE_S):
                writer.write(ours)
                theirs = await reader.readexactly(_NONCE)
                proof = await reader.readexactly(_MAC)
                if not hmac.compare_digest(proof, _proof(self._secret, b"client", theirs + ours)):
                    raise ConnectionError
                writer.write(_proof(self._secret, b"server", theirs + ours))
        except _BROKEN:
            writer.transport.abort()
            return
        finally:
            self._pending.pop(writer, None)
        up, down = _keys(self._secret, theirs + ours)
        await self._on_channel(StreamChannel(reader, writer, (down, up)))


Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def until_cancelled(accept: Accept) -> Accept:
    """What serves a connection, for a server that ends: asyncio of Python 3.11 shows a traceback
    for each one that is cancelled then."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):
            await accept(reader, writer)

    return serve


def _proof(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"paceline agent " + who + nonces, "sha256")


def _keys(secret: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    return _proof(secret, b"up", nonces), _proof(secret, b"down", nonces)


def _mac(key: bytes, number: int, line: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + line, "sha256")
