"""Run a function on several ranks of this machine, inside a test: gloo, or NCCL as well.

The ranks come from one warm forkserver that has torch imported (0.15 s for four ranks; spawn takes
13-20 s on two cores), and meet through a file, so no ports can collide.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "paceline.train.session",
    ]
)


def keep_one_thread() -> None:
    """Let this process, and what is forked from it, compute with one thread, whoever asks for more.

    Tests are many small tensors on few cores: threads would wait for each other, up to ten times
    as long as the work takes.
    """
    import torch

    torch.set_num_threads(1)
    torch.set_num_threads = lambda _number: None  # type: ignore[assignment]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 500,
    device_type: str = "cpu",
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on every rank and return what each returned.

    Args:
        fn: a module-level function; torch.distributed is initialised when it is called.
        world_size: number of ranks, one thread each.
        args: picklable arguments.
        timeout_s: hard limit; ranks still running then are killed.
        device_type: "cuda" gives each rank a device of its own, and NCCL beside gloo.

    Raises:
        AssertionError: with the traceback of every rank that failed, or the ranks that hung.
    """
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world_size):
            ours, theirs = WARM.Pipe(duplex=False)
            process = WARM.Process(
                target=_rank_main,
                args=(theirs, fn, rank, world_size, folder, args, device_type),
                daemon=True,
            )
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return _collect(ends, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(ends: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[str] = []
    pending = dict(enumerate(ends))
    while pending and time.monotonic() < deadline:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        for rank, end in list(pending.items()):
            if end not in ready:
                continue
            del pending[rank]
            try:
                ok, value = pickle.loads(end.recv_bytes())
            except EOFError:
                ok, value = False, "the process ended without a result"
            if ok:
                results[rank] = value
            else:
                failures.append(f"--- rank {rank} ---\n{value}")
        if failures:
            # The others wait in a collective for the one that died: a moment, then they are killed.
            deadline = min(deadline, time.monotonic() + 3)
    if failures:
        raise AssertionError("\n".join(failures))
    if pending:
        raise AssertionError(f"ranks {sorted(pending)} did not finish in time")
    return [results[rank] for rank in range(len(ends))]


def _rank_main(
    end: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    args: tuple[Any, ...],
    device_type: str,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        store = dist.FileStore(str(Path(folder) / "store"), world_size)
        backend = "gloo"
        if device_type == "cuda":
            torch.cuda.set_device(rank)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        # As bytes: tensors sent as such would live in memory that ends with this process.
        result = pickle.dumps((True, fn(rank, world_size, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        result = pickle.dumps((False, traceback.format_exc()))
    end.send_bytes(result)
    end.close()
