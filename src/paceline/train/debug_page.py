"""The process of the debug page: `python -m paceline.train.debug_page`, started by `debugging`.

It reads a line of JSON from standard input: the port, and where each rank answers. When standard
input ends, so does it, however its parent died. torch's page listens on all interfaces and finds
the ranks through a store; here it listens on the loopback interface, and knows where they are.
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from torch.distributed.debug import _frontend
from torch.distributed.debug._debug_handlers import TCPStoreHandler, default_handlers

from paceline.comm.rendezvous import LOOPBACK


class _Addresses:
    """As much of a store as the page asks."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Where rank 0, 1, ... answers."""
        assert len(keys) == len(self._urls), "of all ranks"
        return [url.encode() for url in self._urls]


class _LocalServer(ThreadingHTTPServer):
    """On the loopback interface, whatever address is given."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__((LOOPBACK, address[1]), handler)


def main() -> None:
    """Serve until standard input ends."""
    import paceline.comm.forkserver_process  # noqa: F401

    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    ours = {"_IPv6HTTPServer": _LocalServer, "tcpstore_client": lambda: _Addresses(asked["urls"])}
    vars(_frontend).update(ours)
    handlers = [one for one in default_handlers() if not isinstance(one, TCPStoreHandler)]
    _frontend.main(asked["port"], None, 0.0, handlers, set())


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
