"""Interrupt a rank that waits in a collective, by shutting down the sockets of its groups.

gloo has no abort: a thread that waits for a lost rank waits until the group's time-out. When the
connections of its group are shut down, the collective raises at once. Listening sockets are left
alone: gloo ends the process when one of its own fails. A socket is known by its inode, since its
number may have become another file's.

A cut must break no write: where gloo's own thread answers a peer and that write fails, the thread
that waits for it is never woken (torch 2.13; 42 of 1,600 cuts of four ranks in tight all-reduces).
So connections are first shut down for reading alone, which wakes every wait, and are kept open
under a second number, so that a peer's write still succeeds after gloo has closed its own (then 0
of 1,600).
"""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress


def sockets_now() -> dict[int, int]:
    """This process's sockets: file descriptor -> inode. Empty where there is no /proc."""
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # a Path for each costs more
            with suppress(OSError, ValueError):
                target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
                if target.startswith("socket:["):
                    found[int(name)] = int(target[8:-1])
    return found


# After so many cuts, writes are broken as well: what only writes waits on.
_GENTLE_CUTS = 5


class GroupSockets:
    """The connections of a generation's process groups.

    It is made before the first group; `collect` is called when the groups are made, and `close`
    when they are gone.

    Args:
        hosts: of the generation's ranks and its store. Whatever leads there from now on is cut as
            well: a rank may have to leave while it still waits for others to meet.
    """

    def __init__(self, hosts: Iterable[str] = ()) -> None:
        self._before = frozenset(sockets_now().values())
        self._own: dict[int, int] = {}
        self._kept_open: dict[int, int] = {}
        self._cuts = 0
        self._peers: set[str] = set()
        for host in hosts:
            with suppress(OSError):
                self._peers.add(socket.gethostbyname(host))

    def collect(self) -> None:
        """Take what connections there are more than at the beginning as the groups'."""
        for number, inode in sockets_now().items():
            if inode not in self._before and (peer := _peer(number)) is not None:
                self._own[number] = inode
                self._peers.add(peer)

    def cut(self) -> int:
        """Shut them down, and those that were made since to the same hosts; return how many."""
        known = set(self._own.values())
        how = socket.SHUT_RD if self._cuts < _GENTLE_CUTS else socket.SHUT_RDWR
        self._cuts += 1
        cut = 0
        for number, inode in sockets_now().items():
            later = inode not in self._before and _peer(number) in self._peers
            if inode in known or later:
                if inode not in self._kept_open:
                    with suppress(OSError):
                        self._kept_open[inode] = os.dup(number)
                cut += _shut(number, how)
        return cut

    def close(self) -> None:
        """Let go of what a cut kept open. No cut may be under way."""
        for number in self._kept_open.values():
            os.close(number)
        self._kept_open.clear()


def _peer(number: int) -> str | None:
    """The host at the other end of a connection over IP; None: it is none."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as own:
        if own.family in (socket.AF_INET, socket.AF_INET6):
            host = str(own.getpeername()[0])  # raises for one that listens
            return host.removeprefix("::ffff:")  # torch's store speaks IPv4 over IPv6
    return None


def _shut(number: int, how: int) -> bool:
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as own:
        if not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            own.shutdown(how)
            return True
    return False
