"""A collective that waits is interrupted by cutting its sockets, and nothing else is cut."""

import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.elastic.cut import GroupSockets
from tests.ranks import run_ranks


def _wait_in_vain(rank: int, _size: int, folder: Path) -> tuple[float, bool]:
    listener = socket.create_server(("127.0.0.1", 0))  # somebody else's, from before
    mine = socket.create_connection(listener.getsockname())
    other = listener.accept()[0]
    sockets = GroupSockets()
    store = dist.FileStore(str(folder / "store"), 2)
    group = dist.ProcessGroupGloo(store, rank, 2)
    group.allreduce([torch.ones(1)]).wait()
    sockets.collect()
    later = socket.create_server(("127.0.0.1", 0))
    if rank == 1:
        time.sleep(1.0)  # never comes
        return 0.0, True
    cut: list[float] = []

    def interrupt() -> None:
        time.sleep(0.2)
        cut.append(time.monotonic())
        assert sockets.cut() >= 1

    threading.Thread(target=interrupt).start()
    failed = False
    try:
        group.allreduce([torch.ones(1)]).wait()
    except RuntimeError:
        failed = True
    took_s = time.monotonic() - cut[0]
    mine.sendall(b"x")
    still = other.recv(1) == b"x"
    socket.create_connection(later.getsockname()).close()
    return took_s, failed and still


def test_a_collective_that_waits_is_interrupted_and_other_sockets_live(tmp_path):
    results = run_ranks(_wait_in_vain, 2, tmp_path)
    assert all(is_well for _, is_well in results)
    assert results[0][0] < 0.5


def _meet_in_vain(rank: int, _size: int, folder: Path) -> float:
    """Rank 1 keeps the store, and never comes to the group that rank 0 waits for."""
    port_file = folder / "port"
    if rank == 1:
        kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "draft").write_text(str(kept.port))
        (folder / "draft").rename(port_file)
        while not (folder / "left").exists():
            time.sleep(0.02)
        return 0.0
    while not port_file.exists():
        time.sleep(0.02)
    sockets = GroupSockets({"localhost"})
    limit = timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", int(port_file.read_text()), timeout=limit)
    cut: list[float] = []

    def interrupt() -> None:
        time.sleep(0.5)
        cut.append(time.monotonic())
        sockets.cut()

    threading.Thread(target=interrupt).start()
    try:
        dist.ProcessGroupGloo(store, rank, 2, limit)
    except RuntimeError:
        pass
    finally:
        (folder / "left").touch()
    return time.monotonic() - cut[0]


def test_a_rank_that_waits_for_others_to_meet_is_interrupted_as_well(tmp_path):
    took_s, _ = run_ranks(_meet_in_vain, 2, tmp_path)
    assert took_s < 5


def _cut_again_and_again(rank: int, _size: int, folder: Path) -> int:
    """How often this rank, in one all-reduce after the other, was not woken by a cut."""
    rounds, draw, not_woken = 40, random.Random(rank), 0
    for number in range(rounds):
        store = dist.FileStore(str(folder / f"store-{number}"), 4)
        sockets = GroupSockets({"127.0.0.1"})
        group = dist.ProcessGroupGloo(store, rank, 4, timedelta(seconds=5))
        group.allreduce([torch.ones(1)]).wait()
        sockets.collect()
        is_out = threading.Event()

        def cut(sockets=sockets, is_out=is_out) -> bool:
            time.sleep(0.01 + 0.004 * draw.random())
            sockets.cut()
            return is_out.wait(4)

        with ThreadPoolExecutor(1) as pool:
            woken = pool.submit(cut)
            with suppress(RuntimeError):
                while True:
                    group.allreduce([torch.ones(1)]).wait()
            is_out.set()
            not_woken += not woken.result()
        del group
        sockets.close()
        store.add("out", 1)
        while store.add("out", 0) < 4:
            time.sleep(0.001)
    return not_woken


def test_no_cut_leaves_a_rank_waiting_for_a_write_that_failed(tmp_path):
    """With connections shut down both ways, 3 % of these cuts left a rank in gloo's waitSend."""
    assert run_ranks(_cut_again_and_again, 4, tmp_path) == [0, 0, 0, 0]
