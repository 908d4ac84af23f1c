"""What torch has to look into ranks that hang or died: its debug server and its flight recorder.

The debug page (torch 2.13; `observe.debug_port`) asks all ranks: Python stacks, stacks from below
Python (py-spy, where it is installed), collectives, wait counters, a profile on demand. Ranks
answer from a thread in C++, also while their main thread hangs. It has no password, so the page
listens on the loopback interface of rank 0's host, and ranks at the address where they reach each
other; torch's own `start_debug_server` would listen on all interfaces.

The flight recorder is always on: it keeps the last collectives of a rank, which
`dump_flight_recorder` writes down when one has failed. On gloo its entries tell what was begun
when, and not when it ended. NCCL's watchdog ends a process by itself; its own recorder writes to
where it is told before the groups are made.

Source: torch.distributed.debug, https://docs.pytorch.org/docs/stable/distributed.html
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from paceline.comm.records import all_gather
from paceline.comm.rendezvous import Ranks, own_address
from paceline.config.errors import InputError


def enable_flight_recorder(folder: Path) -> None:
    """Let NCCL's watchdog leave what it recorded in this folder; a person's own choice stands."""
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "nccl-flight-rank"))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def dump_flight_recorder(folder: Path, rank: int) -> Path | None:
    """Write this rank's last collectives as JSON; returns the file, None where it can't be."""
    file = folder / f"rank{rank}.flight.json"
    with suppress(OSError, RuntimeError):
        file.write_bytes(c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
        return file
    return None


@contextmanager
def debug_server(port: int | None, ranks: Ranks) -> Iterator[None]:
    """Serve torch's debug page on this port of rank 0's host, while the context lasts.

    Args:
        port: None: nothing is served.

    Raises:
        InputError: there is no process group, or torch or a package that is needed is missing.
    """
    if port is None:
        yield
        return
    _require()

    host = own_address(ranks)
    answering = c10d._WorkerServer(host, 0)
    urls = all_gather(f"http://{host}:{answering.port}")
    page = _page(port, urls) if ranks.is_first else None
    try:
        yield
    finally:
        answering.shutdown()
        if page is not None:
            page.kill()
            page.communicate()


def _page(port: int, urls: list[str]) -> "subprocess.Popen[bytes]":
    """The process that serves it; it ends with this one, whose pipe it reads."""
    page = subprocess.Popen(
        [sys.executable, "-m", "paceline.train.debug_page"],
        stdin=subprocess.PIPE,
        env={**os.environ, "WORLD_SIZE": str(len(urls))},
        start_new_session=True,
    )
    assert page.stdin is not None
    page.stdin.write(json.dumps({"port": port, "urls": urls}).encode() + b"\n")
    page.stdin.flush()
    return page


def _require() -> None:
    if not dist.is_initialized():
        raise InputError(
            "observe.debug_port shows the ranks of a process group, and this run has none: leave "
            "it out."
        )
    if importlib.util.find_spec("torch.distributed.debug._frontend") is None:
        raise InputError("observe.debug_port needs torch 2.13: update it, or leave it out.")
    missing = [name for name in ("aiohttp", "tabulate") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"observe.debug_port needs {' and '.join(missing)}: pip install 'paceline[debug]', or "
            "leave the setting out."
        )
