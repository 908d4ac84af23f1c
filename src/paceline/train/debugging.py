"""What torch has to look into ranks that hang or died: its debug server and its flight recorder.

The debug server (torch 2.13; `observe.debug_port`) is a page of rank 0's host that asks all ranks:
Python stacks, stacks from below Python (py-spy, where it is installed), collectives, wait counters,
a profile on demand. Ranks answer from a thread in C++, also while their main thread hangs. It has
no password and is reachable from other machines: for a trusted network only.

The flight recorder is always on: it keeps the last collectives of a rank, which `keep_flight`
writes down when one has failed. On gloo its entries tell what was begun when, and not when it
ended. NCCL's watchdog ends a process by itself; its own recorder writes to where it is told before
the groups are made.

Source: torch.distributed.debug, https://docs.pytorch.org/docs/stable/distributed.html
"""

import importlib.util
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from paceline.comm.ranks import Ranks
from paceline.config.errors import InputError
from paceline.train.stopping import end_with


def keep_nccl_flights(folder: Path) -> None:
    """Let NCCL's watchdog leave what it recorded in this folder; a person's own choice stands."""
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "nccl-flight-rank"))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def keep_flight(folder: Path, rank: int) -> Path | None:
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
        ranks: this rank's place; the others serve what rank 0 asks them for.

    Raises:
        InputError: there is no process group, or torch or a package that is needed is missing.
    """
    if port is None:
        yield
        return
    _require()
    from torch.distributed import debug
    from torch.distributed.debug._debug_handlers import default_handlers

    handlers: list[Any] = [*default_handlers(), _EndWith(os.getpid())]
    debug.start_debug_server(port, start_method="spawn", handlers=handlers)
    try:
        yield
    finally:
        if ranks.is_first:
            debug.stop_debug_server()


def _require() -> None:
    if not dist.is_initialized():
        raise InputError(
            "observe.debug_port shows the ranks of a process group, and this run has none: leave "
            "it out."
        )
    try:
        from torch.distributed.debug import start_debug_server

        is_there = "handlers" in inspect.signature(start_debug_server).parameters
    except ImportError:
        is_there = False
    if not is_there:
        raise InputError("observe.debug_port needs torch 2.13: update it, or leave it out.")
    missing = [name for name in ("aiohttp", "tabulate") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"observe.debug_port needs {' and '.join(missing)}: pip install 'paceline[debug]', or "
            "leave the setting out."
        )


class _EndWith:
    """A page without routes whose process ends when another one does.

    The server's process is rank 0's child and would outlive it where it is killed; a page is the
    only thing of ours that runs in it.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def routes(self) -> list[Any]:
        """Called when the server starts."""
        end_with(self._pid)
        return []

    def nav_links(self) -> list[Any]:
        """None."""
        return []

    def templates(self) -> dict[str, str]:
        """None."""
        return {}
