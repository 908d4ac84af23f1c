"""A worker's connections to the servers.

Requests of one worker to one server are answered in order. What has not been answered is kept, so
when the connection breaks (the server died, or the network did) the worker connects again, says how
far it is and repeats them: pulls change nothing, and a push is known by its step. It tries for as
long as the Job lets a rank wait, then says which server it lost.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection

import numpy as np

from paceline.config.errors import RunError
from paceline.recommender.parameter_server.consistent_hash import Ids, RowPlacement
from paceline.recommender.parameter_server.rows import Rows
from paceline.recommender.parameter_server.wire import (
    Message,
    MessageKind,
    authenticate_to_server,
    decode,
    encode,
    sentence_of,
    set_socket_timeout,
)

Address = tuple[str, int]
# Between two attempts; a server that is started anew takes about a second.
_RETRY_S = 0.2
# How often links that nobody uses are looked at.
_LOOK_S = 0.2


@dataclass
class ServerLink:
    """One worker's connection to one server, made again whenever it breaks."""

    number: int
    address: Address
    key: bytes
    worker: int
    timeout_s: float
    num_pushed: int = 0
    """Steps whose push the server has acknowledged."""
    num_reconnected: int = 0
    _connection: Connection | None = None
    _unanswered: deque[Message] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    def send(self, message: Message) -> None:
        """Ask something; `receive` gives the answers in the same order."""
        with self._lock:
            self._unanswered.append(message)
            try:
                if self._connection is not None:
                    self._connection.send_bytes(encode(message))
            except OSError:
                self._drop()

    def look(self) -> None:
        """Where nobody uses the link and the server has left it, connect and say hello again.

        A server that came back answers nobody before all workers have said hello, and a worker may
        wait for another one instead of asking it.
        """
        if self._is_closed or not self._lock.acquire(blocking=False):
            return
        try:
            was_there = self.num_reconnected > 0
            if was_there and (self._connection is None or _is_at_end(self._connection)):
                self._drop()
                self._connect()
        except (OSError, EOFError, ValueError, AuthenticationError):
            pass  # the next look is soon; whoever asks it something says that it is gone
        finally:
            self._lock.release()
        if self._is_closed:
            self.close()

    def receive(self) -> Message:
        """The answer to the oldest request that has none.

        Raises:
            RunError: the server refuses, or is gone for longer than the Job allows.
        """
        with self._lock:
            return self._receive()

    def _receive(self) -> Message:
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                connection = self._connection or self._connect()
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise self._lost("has not answered")
                answer = decode(connection.recv_bytes())
                break
            except (OSError, EOFError, ValueError, AuthenticationError):
                self._drop()
                if time.monotonic() > deadline:
                    raise self._lost("can't be reached") from None
                time.sleep(_RETRY_S)
        request = self._unanswered.popleft()
        if answer.kind == MessageKind.FAILED:
            raise RunError(f"server {self.number} of the tables: {sentence_of(answer)}")
        if request.kind == MessageKind.PUSH:
            self.num_pushed = request.step + 1
        return answer

    def close(self) -> None:
        """Use the link no more.

        Waits for nobody: a look that is on its way, perhaps at a server that doesn't answer, drops
        the connection once it is back. Nobody else may: to close what another thread reads from
        would hand it a descriptor that is nobody's, or soon somebody else's.
        """
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            self._drop()
            self._lock.release()

    def _drop(self) -> None:
        """Close the connection, if there is one; for whoever holds the lock."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> Connection:
        """Connect, say hello and repeat what has no answer yet."""
        connection = Client(self.address)
        self._connection = connection
        set_socket_timeout(connection, self.timeout_s)
        authenticate_to_server(connection, self.key)
        hello = Message(MessageKind.HELLO, self.worker, step=self.num_pushed)
        connection.send_bytes(encode(hello))
        connection.recv_bytes()
        for message in self._unanswered:
            connection.send_bytes(encode(message))
        self.num_reconnected += 1
        return connection

    def _lost(self, what: str) -> RunError:
        host, port = self.address
        return RunError(
            f"server {self.number} of the tables ({host}:{port}) {what} for {self.timeout_s:g} s: "
            "start the run again to go on from its last checkpoint."
        )


def _is_at_end(connection: Connection) -> bool:
    """Whether the other end is gone; reads nothing."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        try:
            return end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False


class Servers:
    """All servers, as one worker sees them.

    Args:
        placement: which row is where.
        dim: width of a row.
        addresses: of the servers, in their order.
        key: of the run.
        worker: this one's number.
        timeout_s: the longest wait.
    """

    def __init__(
        self,
        placement: RowPlacement,
        dim: int,
        addresses: Sequence[Address],
        key: bytes,
        worker: int,
        timeout_s: float,
    ) -> None:
        self.placement, self.dim, self.worker = placement, dim, worker
        self.links = [
            ServerLink(number, address, key, worker, timeout_s)
            for number, address in enumerate(addresses)
        ]
        self._num_unread = 0
        self._last_split: tuple[Ids, list[Ids]] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="tables-watch", daemon=True).start()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            for link in self.links:
                link.look()

    def pull(self, ids: Ids, step: int) -> tuple[Rows, int]:
        """Rows as they are before step `step`, as far as the mode promises.

        Returns:
            values, shape (len(ids), dim), and the number of steps whose updates are all in them.
        """
        places = self._split(ids)
        for link, place in zip(self.links, places, strict=True):
            if len(place):
                link.send(Message(MessageKind.PULL, self.worker, step, ids=ids[place]))
        self.settle()
        values, clock = np.empty((len(ids), self.dim), np.float32), step
        for link, place in zip(self.links, places, strict=True):
            if len(place):
                answer = link.receive()
                values[place] = answer.values.reshape(-1, self.dim)
                clock = min(clock, answer.clock)
        return values, clock

    def push(self, ids: Ids, gradients: Rows, step: int, lr: float) -> None:
        """Send a step's gradients, each row once; the acknowledgements are read later."""
        self.settle()
        for link, place in zip(self.links, self._split(ids), strict=True):
            link.send(
                Message(
                    MessageKind.PUSH,
                    self.worker,
                    step,
                    lr=lr,
                    ids=ids[place],
                    values=gradients[place],
                )
            )
        self._num_unread = 1

    def settle(self) -> None:
        """Wait until the last push has arrived everywhere."""
        if self._num_unread:
            self._num_unread = 0
            for link in self.links:
                link.receive()

    def ask_all(self, kind: MessageKind, step: int) -> None:
        """Have every server do something and wait for it."""
        self.settle()
        for link in self.links:
            link.send(Message(kind, self.worker, step))
        for link in self.links:
            link.receive()

    def greet(self, step: int) -> None:
        """Tell every server how many steps this worker has pushed."""
        for link in self.links:
            link.num_pushed = step
        self.ask_all(MessageKind.HELLO, step)

    def close(self) -> None:
        """Drop all connections."""
        self._closed.set()
        for link in self.links:
            link.close()

    def _split(self, ids: Ids) -> list[Ids]:
        """Places in `ids` of the rows of each server; a push mostly has those of its pull."""
        if self._last_split is None or self._last_split[0] is not ids:
            server = self.placement.server_of(ids)
            places = [np.flatnonzero(server == number) for number in range(len(self.links))]
            self._last_split = (ids, places)
        return self._last_split[1]
