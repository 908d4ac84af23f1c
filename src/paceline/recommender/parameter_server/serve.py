"""The server process: `python -m paceline.recommender.parameter_server.serve`, started by
`supervisor`.

It reads its settings from the first line of standard input, never from its arguments, which others
could read: the key is among them. Lines on standard output are for whoever started it: first the
port it listens at, then sentences. When standard input ends, so does it, however its parent died.
"""

import json
import os
import sys
import threading
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from paceline.config.recommender import RowOptim
from paceline.recommender.parameter_server.consistent_hash import RowPlacement
from paceline.recommender.parameter_server.rows import RowStore
from paceline.recommender.parameter_server.server import Server
from paceline.recommender.parameter_server.snapshot import ServerCheckpoints
from paceline.recommender.parameter_server.wire import (
    authenticate_worker,
    decode,
    encode,
    set_socket_timeout,
)

# A worker connects once; after a restart all come at the same time, with the challenge each.
_BACKLOG_PER_WORKER = 4
_MEET_S = 20.0


@dataclass(frozen=True)
class ServerSettings:
    """What a server has to know."""

    server: int
    num_servers: int
    num_workers: int
    tables: tuple[int, ...]
    dim: int
    seed: int
    optim: dict[str, Any]
    lag: int | None
    checkpoint_every: int
    folder: str
    run_checkpoints: str
    host: str
    timeout_s: float
    key: str
    """In hexadecimal."""
    port: int = 0
    """0: any free one."""
    base: int | None = None
    """Steps of the checkpoint that the run went on from, of a server that was killed."""

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))


def make_server(settings: ServerSettings, say: Any) -> Server:
    """A server, at its first values or back from its checkpoint."""
    placement = RowPlacement(tuple(settings.tables), settings.num_servers)
    optim = RowOptim.parse(settings.optim)
    ids = placement.ids_of(settings.server)
    server = Server(
        RowStore(placement.numbering, ids, settings.dim, settings.seed, optim),
        ServerCheckpoints(Path(settings.folder), settings.server, settings.num_servers),
        settings.num_workers,
        settings.lag,
        settings.checkpoint_every,
        Path(settings.run_checkpoints),
        say,
        settings.timeout_s,
    )
    if settings.base is not None:
        server.recover(settings.base)
    return server


def main() -> None:
    """Serve until standard input ends."""
    import paceline.comm.forkserver_process  # noqa: F401  # a keeper imports this file for its Settings

    settings = ServerSettings(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    server = make_server(settings, _tell)
    backlog = _BACKLOG_PER_WORKER * settings.num_workers
    with Listener((settings.host, settings.port), backlog=backlog) as listener:
        _tell(f"port {listener.address[1]}")
        while True:
            connection = listener.accept()
            arguments = (server, connection, bytes.fromhex(settings.key))
            threading.Thread(target=_attend, args=arguments, daemon=True).start()


def _attend(server: Server, connection: Connection, key: bytes) -> None:
    """Answer one worker for as long as it is there."""
    with connection:
        try:
            set_socket_timeout(connection, _MEET_S)
            authenticate_worker(connection, key)
            set_socket_timeout(connection, server.timeout_s)
            while connection.poll(None):
                connection.send_bytes(encode(server.answer(decode(connection.recv_bytes()))))
        except (OSError, EOFError, ValueError, AuthenticationError):
            return  # the worker comes again if it wants to; a stranger doesn't


def _tell(sentence: str) -> None:
    print(sentence, flush=True)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
