"""Reaching a Ray cluster, from a machine of it.

Ray's own processes pickle what they send each other, and trust everybody who reaches their ports:
a cluster is as safe as the network that it stands in.
"""

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.config.errors import InputError

_ADDRESS = re.compile(r"auto|[\w.\-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")
_NAMESPACE = "paceline"
_CURRENT = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` notes the cluster of a machine."""
_ANSWER_S = 10.0


def check_address(address: str) -> None:
    """Refuse what is no address of a cluster.

    Raises:
        InputError: it is none.
    """
    if not _ADDRESS.fullmatch(address):
        raise InputError(
            f"ray_address = {address!r} is no address of a Ray cluster: give host:port of its head "
            '(6379 is usual), or "auto" on a machine of the cluster.'
        )


def ray() -> Any:
    """The library.

    Raises:
        InputError: it isn't installed.
    """
    try:
        import ray as library
    except ImportError:
        raise InputError(
            "engine \"ray\" needs Ray: pip install 'paceline[ray]', in the version that the "
            "cluster runs."
        ) from None
    return library


def connect(address: str) -> Any:
    """Reach a cluster, for as long as this process lives or `shutdown` is called; return Ray.

    Raises:
        InputError: nobody answers there, or it is another version's.
    """
    library = ray()
    _must_listen(address)
    try:
        library.init(
            address=address,
            namespace=_NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise _unreachable(address, str(error).strip().partition("\n")[0].rstrip(".")) from None
    return library


def _must_listen(address: str) -> None:
    """Refuse an address where nobody listens: Ray itself would look for minutes.

    Raises:
        InputError: nobody does.
    """
    if address == "auto":  # as Ray finds it
        with suppress(OSError):
            address = _CURRENT.read_text().strip()
        address = os.environ.get("RAY_ADDRESS", address)
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, getattr(error, "strerror", None) or str(error)) from None


def _unreachable(address: str, said: str) -> InputError:
    return InputError(
        f"no Ray cluster can be reached at {address} ({said}): start it (`ray start --head`), "
        "launch from one of its machines, and correct ray_address."
    )


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster in this block; a connection that is there already is used.

    Raises:
        InputError: as `connect`.
    """
    library = ray()
    if library.is_initialized():
        yield library
        return
    try:
        yield connect(address)
    finally:
        library.shutdown()
