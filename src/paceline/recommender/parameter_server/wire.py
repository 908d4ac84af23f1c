"""Messages between workers and servers: a fixed header, row ids, values. Nothing is pickled.

    header   kind u8, worker u32, step i64, clock i64, lr f64, number of ids u32
    ids      int64 each
    values   fp32, whatever follows

`multiprocessing.connection` frames them; both ends answer a challenge with the run's key first.
Every wait on a socket is limited: a peer that hangs counts as lost.
"""

import os
import socket
import struct
from enum import IntEnum
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

import numpy as np

from paceline.recommender.parameter_server.consistent_hash import Ids
from paceline.recommender.parameter_server.rows import Rows

_HEADER = struct.Struct("<BxxxIqqdI4x")
_NO_IDS = np.empty(0, np.int64)
_NO_VALUES = np.empty(0, np.float32)


class MessageKind(IntEnum):
    """What a message asks for, or answers."""

    HELLO = 1
    """A worker is there (again); `step`: steps that it knows to have pushed."""
    PULL = 2
    PUSH = 3
    SAVE = 4
    """Write a checkpoint of the run once `step` steps are in."""
    LOAD = 5
    """Go back to the checkpoint of `step` steps; 0: to the first values."""
    DONE = 6
    ROWS = 7
    FAILED = 8
    """The answer to what can't be done; `values` are the bytes of a sentence."""


class Message(NamedTuple):
    """A request or an answer."""

    kind: MessageKind
    worker: int = 0
    step: int = 0
    """PULL: the step that is about to be computed. PUSH: the step that was, from 0."""
    clock: int = 0
    """Of an answer: steps whose updates are all in."""
    lr: float = 0.0
    ids: Ids = _NO_IDS
    values: Rows = _NO_VALUES
    """Rows, flattened."""


def encode(message: Message) -> memoryview:
    """A message as bytes."""
    kind, worker, step, clock, lr, ids, values = message
    buffer = np.empty(_HEADER.size + ids.nbytes + values.nbytes, np.uint8)
    _HEADER.pack_into(buffer.data, 0, kind, worker, step, clock, lr, len(ids))
    middle = _HEADER.size + ids.nbytes
    buffer[_HEADER.size : middle].view(np.int64)[:] = ids
    buffer[middle:].view(np.float32)[:] = values.ravel()
    return buffer.data


def decode(data: bytes) -> Message:
    """The message that `encode` made these bytes of.

    Raises:
        ValueError: they are no message.
    """
    if len(data) < _HEADER.size:
        raise ValueError(f"a message of {len(data)} bytes is too short")
    kind, worker, step, clock, lr, num_ids = _HEADER.unpack_from(data)
    middle = _HEADER.size + 8 * num_ids
    if middle > len(data) or (len(data) - middle) % 4:
        raise ValueError(f"a message of {len(data)} bytes can't have {num_ids} ids")
    ids = np.frombuffer(data, np.int64, num_ids, _HEADER.size)
    return Message(
        MessageKind(kind), worker, step, clock, lr, ids, np.frombuffer(data, np.float32, -1, middle)
    )


def failed(sentence: str) -> Message:
    """The answer to what can't be done."""
    text = sentence.encode()
    padded = np.frombuffer(text + b" " * (-len(text) % 4), np.float32)
    return Message(MessageKind.FAILED, values=padded)


def sentence_of(message: Message) -> str:
    """Why something can't be done."""
    return message.values.tobytes().decode(errors="replace").strip()


def set_socket_timeout(connection: Connection, timeout_s: float) -> None:
    """Make reads and writes that get nowhere fail (as an OSError), and small messages leave."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def authenticate_worker(connection: Connection, key: bytes) -> None:
    """The server's side of the proof that both ends know the key.

    Raises:
        OSError, EOFError, multiprocessing.AuthenticationError: the other end doesn't.
    """
    deliver_challenge(connection, key)
    answer_challenge(connection, key)


def authenticate_to_server(connection: Connection, key: bytes) -> None:
    """The worker's side, as `authenticate_worker`."""
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
