"""Call a function on every rank of this machine, and hear from rank 0 while it works.

How it works: ranks come from a forkserver that has torch imported, meet through a file, and behave
like ranks that train: a session, threads and an allocator of the same kind. What rank 0 tells goes
through a pipe to the process that started them. Where torchrun or srun started this process as a
rank, nothing is started: the function is called right here.

`started` starts the ranks of one host among several, and ends them where somebody else's failed or
nobody says anything any more.

It is no launcher of runs: nothing is restarted or logged (that is `paceline.train.launch`).
"""

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from paceline.comm.core_share import core_share_of
from paceline.comm.forkserver_start import MEASURING, warm_up_ranks
from paceline.comm.rendezvous import Ranks, connect, disconnect, ranks_from_env
from paceline.config.errors import InputError, RunError
from paceline.machine.freed_memory import keep_freed_memory
from paceline.train.failure import is_lost_peer
from paceline.train.stopping import exit_with_parent

# A rank whose peer died lets the peer speak first.
_PATIENCE_FOR_CULPRIT_S = 5.0
# How often ranks that are silent are looked after.
_LOOK_S = 0.2


class RankProgress(NamedTuple):
    """How far rank 0 is."""

    part: str
    """What is being measured: device, collectives, ..."""
    done: int
    total: int
    what: str = ""
    """What was measured last."""


TellProgress = Callable[[RankProgress], None]
Work = Callable[[Ranks, TellProgress], Any]
MeetAt = Callable[[], Store]
"""Picklable: opens the store that ranks meet at, in the process of a rank."""


class SilentError(RunError):
    """No rank of this host said anything for too long: they hang, and were ended."""


def counted_progress(tell: TellProgress, part: str, total: int) -> Callable[[str], None]:
    """Tells of each thing that was done, and how many are left."""
    done = 0

    def say(what: str) -> None:
        nonlocal done
        done += 1
        tell(RankProgress(part, done, total, what))

    return say


def run_on_ranks(
    num_ranks: int,
    device_type: str,
    work: Work,
    hear: TellProgress,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Call `work(ranks, tell)` on every rank and return what rank 0 returned.

    Args:
        num_ranks: processes to start; those that a launcher started already must be as many.
        device_type: "cpu" or "cuda".
        work: picklable; torch.distributed is initialised when it is called on more than one rank.
        hear: called with rank 0's news.
        environment: variables for ranks that are started here, besides this process's own.

    Raises:
        InputError: a rank found wrong input, or a launcher started another number of ranks.
        RunError: a rank failed; its traceback is in the text.
    """
    given = ranks_from_env(device_type)
    if given is None:
        return _started(num_ranks, device_type, work, hear, environment or {})
    if given.world_size != num_ranks:
        raise InputError(
            f"--ranks {num_ranks} was asked for but {given.world_size} ranks were started: "
            "leave --ranks out or start as many."
        )
    connect(given)
    _settle_in(given)
    try:
        return work(given, hear if given.is_first else lambda _news: None)
    finally:
        disconnect()


def _settle_in(ranks: Ranks) -> None:
    """Threads and allocator as a rank has them that trains."""
    torch.set_num_threads(core_share_of(ranks).own)
    if ranks.device_type == "cpu":
        keep_freed_memory()


def _started(
    num_ranks: int, device_type: str, work: Work, hear: TellProgress, environment: Mapping[str, str]
) -> Any:
    places = [Ranks(rank, num_ranks, rank, num_ranks, device_type) for rank in range(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        meet_at = partial(store_in, folder, num_ranks)
        return started(places, meet_at, work, hear, environment=environment)


def store_in(folder: str, num_ranks: int) -> Store:
    """Where ranks of one machine meet: a file in a folder that outlives them."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return FileStore(str(Path(folder) / "store"), num_ranks)


def started(
    places: Sequence[Ranks],
    meet_at: MeetAt,
    work: Work,
    hear: TellProgress,
    *,
    environment: Mapping[str, str] | None = None,
    silence_s: float | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Any:
    """Start ranks of this host, each a process of its own, and return what the first one returned.

    Whatever way this ends, the processes have ended.

    Args:
        places: of the ranks to start; others may be started elsewhere.
        meet_at: where all of them meet.
        work: as of `run_on_ranks`.
        hear: called with rank 0's news, where rank 0 is among them.
        environment: variables for the ranks, besides this process's own.
        silence_s: the longest time without news or results; None: any.
        is_over: asked a few times a second: whether ranks elsewhere ended the work.

    Raises:
        InputError: a rank found wrong input.
        SilentError: `silence_s` have passed.
        RunError: a rank failed, or it is over; the traceback of the rank is in the text.
    """
    warm_up_ranks(MEASURING)
    context = multiprocessing.get_context("forkserver")
    job = pickle.dumps(work)
    ends: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory() as logs:
        try:
            for ranks in places:
                ours, theirs = context.Pipe(duplex=False)
                arguments = (theirs, ranks, logs, meet_at, job, os.getpid(), environment or {})
                processes.append(context.Process(target=_rank_main, args=arguments, daemon=True))
                processes[-1].start()
                theirs.close()
                ends.append(ours)
            return _collected([each.rank for each in places], ends, hear, silence_s, is_over)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collected(
    numbers: Sequence[int],
    ends: list[Connection],
    hear: TellProgress,
    silence_s: float | None,
    is_over: Callable[[], bool],
) -> Any:
    """Pass on news until every rank has ended, and return the first one's result."""
    results: dict[int, Any] = {}
    heard = time.monotonic()
    while len(results) < len(ends):
        waiting = [end for at, end in enumerate(ends) if at not in results]
        for end in wait(waiting, timeout=_LOOK_S):
            assert isinstance(end, Connection)
            at, heard = ends.index(end), time.monotonic()
            kind, value = _received(end)
            if kind == "news":
                hear(value)
            elif kind == "result":
                results[at] = value
            elif kind == "input":
                raise InputError(value)
            else:
                raise RunError(f"rank {numbers[at]} failed while it measured:\n{value}")
        if is_over():
            raise RunError("a rank on another host failed")
        if silence_s is not None and time.monotonic() - heard > silence_s:
            raise SilentError(f"no rank said anything for {silence_s:.0f} s, so they were ended")
    return results[0]


def _received(end: Connection) -> tuple[str, Any]:
    try:
        return end.recv()
    except EOFError:
        return "failure", "the process ended without a word (killed, or out of memory?)"


def _rank_main(
    end: Connection,
    ranks: Ranks,
    logs: str,
    meet_at: MeetAt,
    job: bytes,
    starter_pid: int,
    environment: Mapping[str, str],
) -> None:
    os.environ.update(environment)
    os.setsid()  # a session of its own, as a rank that trains has
    exit_with_parent(starter_pid)
    _be_quiet(Path(logs) / f"rank{ranks.rank}.log")

    def tell(news: RankProgress) -> None:
        if ranks.is_first:
            end.send(("news", news))

    try:
        _meet(ranks, meet_at)
        _settle_in(ranks)
        result = pickle.loads(job)(ranks, tell)
        end.send(("result", result if ranks.is_first else None))
        # The first rank's store must outlive the others' goodbyes.
        if ranks.world_size > 1:
            dist.barrier()
    except InputError as error:
        _say_last(end, "input", str(error))
    except BaseException as error:
        if is_lost_peer(error):
            time.sleep(_PATIENCE_FOR_CULPRIT_S)
        _say_last(end, "failure", traceback.format_exc())
    os._exit(0)  # see comm.ranks.leave


def _say_last(end: Connection, kind: str, text: str) -> None:
    with suppress(OSError):
        end.send((kind, text))


def _be_quiet(log: Path) -> None:
    """Keep what libraries write, once per rank, off the terminal."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _meet(ranks: Ranks, meet_at: MeetAt) -> None:
    if ranks.device_type == "cuda":
        torch.cuda.set_device(ranks.device)
    if ranks.world_size == 1:
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if ranks.device_type == "cuda" else "gloo",
        store=meet_at(),
        rank=ranks.rank,
        world_size=ranks.world_size,
        device_id=ranks.device if ranks.device_type == "cuda" else None,
    )
