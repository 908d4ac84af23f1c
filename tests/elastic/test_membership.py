"""Workers that are lost and come back between rounds: verdicts, and real processes killed."""

import json
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from paceline.config.errors import RunError
from paceline.elastic.membership import AttemptOutcome, GroupAction, Membership, decide_attempt
from tests.ranks import WARM

TIMEOUT_S = 3.0
LONG_S = 30.0


@pytest.mark.parametrize(
    ("reports", "asking", "is_last", "verdict"),
    [
        ({0: True, 1: True, 2: True}, [], True, AttemptOutcome(True, (0, 1, 2))),
        ({0: True, 1: True, 2: True}, [3], True, AttemptOutcome(True, (0, 1, 2), (3,))),
        ({0: True, 1: True, 2: True}, [3], False, AttemptOutcome(True, (0, 1, 2))),
        ({0: False, 1: False}, [3], True, AttemptOutcome(False, (0, 1))),
        # Lost after its part was done: what the others got is good, and the same for all.
        ({0: True, 1: True}, [], True, AttemptOutcome(True, (0, 1))),
        ({0: True, 1: False}, [], True, AttemptOutcome(False, (0, 1))),
        # Started again before anybody saw that it had died.
        ({0: True, 1: True}, [2], True, AttemptOutcome(True, (0, 1), (2,))),
    ],
)
def test_a_verdict_follows_from_the_reports(reports, asking, is_last, verdict):
    assert decide_attempt((0, 1, 2), reports, asking, is_last=is_last) == verdict


class Ended(NamedTuple):
    """What a worker has when the run is over."""

    num_rounds: int
    value: float
    members: tuple[int, ...]
    said: list[str]


def _mean(value: float, is_over: bool) -> GroupAction[tuple[float, bool]]:
    """An exchange: the mean of the workers' values, and whether the first one says it is over."""

    def act(group: dist.ProcessGroup) -> tuple[float, bool]:
        numbers = torch.tensor([value, float(is_over)], dtype=torch.float64)
        dist.all_reduce(numbers, group=group)
        return (numbers[0] / group.size()).item(), bool(numbers[1])

    return act


def _hand_over(state: torch.Tensor) -> GroupAction[torch.Tensor]:
    def act(group: dist.ProcessGroup) -> torch.Tensor:
        dist.broadcast(state, group=group, group_src=0)
        return state

    return act


def _work(folder: str, rank: int, min_workers: int) -> None:
    """A run whose step adds the worker's own number, and whose round takes the mean."""
    torch.set_num_threads(1)
    here, said = Path(folder), []
    store = dist.FileStore(str(here / "store"), -1)
    membership = Membership(store, rank, TIMEOUT_S, min_workers, said.append)
    state = torch.zeros(2, dtype=torch.float64)  # rounds done, value
    # A worker taken over a round late would differ in both from then on.
    if rank == 0:
        try:
            membership.open(3, wait_s=20 if min_workers == 1 else 0.2)
        except RunError as error:
            (here / "error-0").write_text(str(error))
            return
        membership.welcome(_hand_over(state))
    else:
        membership.join(_hand_over(state))
    is_over = False
    while not is_over:
        (here / f"in-{rank}-{len(membership.members)}").touch()
        time.sleep(0.02)
        stop = rank == 0 and (here / "stop").exists()
        try:
            mean, is_over = membership.exchange(_mean(state[1].item() + rank, stop))
        except RunError as error:
            (here / f"error-{rank}").write_text(str(error))
            return
        state[0] += 1
        state[1] = mean
        membership.welcome(_hand_over(state))
    membership.close()
    ended = Ended(int(state[0]), state[1].item(), membership.members, said)
    (here / f"ended-{rank}").write_text(json.dumps(ended))


def _start(folder: Path, rank: int, min_workers: int = 1):
    process = WARM.Process(target=_work, args=(str(folder), rank, min_workers), daemon=True)
    process.start()
    return process


def _until(file: Path) -> None:
    end = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < end, f"{file.name} does not come"
        time.sleep(0.02)


def test_a_killed_worker_is_gone_without_and_taken_back(tmp_path):
    workers = {rank: _start(tmp_path, rank) for rank in range(3)}
    try:
        _until(tmp_path / "in-0-3")
        _until(tmp_path / "in-2-3")
        os.kill(workers[2].pid, signal.SIGKILL)
        workers[2].join()
        for file in tmp_path.glob("in-*"):
            file.unlink()
        _until(tmp_path / "in-0-2")
        _until(tmp_path / "in-1-2")
        workers[2] = _start(tmp_path, 2)
        _until(tmp_path / "in-2-3")
        (tmp_path / "stop").touch()
        for rank, worker in workers.items():
            worker.join(60)
            assert worker.exitcode == 0, rank
    finally:
        for worker in workers.values():
            worker.kill()
    ended = [Ended(*json.loads((tmp_path / f"ended-{rank}").read_text())) for rank in range(3)]
    assert len({(each.num_rounds, each.value) for each in ended}) == 1
    assert all(each.members == [0, 1, 2] for each in ended)
    assert ended[0].said[-2:] == [
        "worker 2 is lost: 2 workers go on.",
        "worker 2 is taken in: 3 workers go on.",
    ]


def _fail_once(folder: str, rank: int) -> None:
    """Two workers, of whom the first one fails in the middle of an exchange, for reasons of its
    own, while the other waits for it there."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), -1)
    membership = Membership(store, rank, LONG_S, 2, print)
    failures = [RuntimeError("mine")] * (1 - rank)

    def act(group: dist.ProcessGroup) -> None:
        dist.all_reduce(torch.zeros(1), group=group)
        if failures:
            raise failures.pop()
        dist.all_reduce(torch.zeros(1), group=group)

    if rank == 0:
        membership.open(2, wait_s=LONG_S)
        membership.welcome(lambda _group: None)
    else:
        membership.join(lambda _group: None)
    began = time.monotonic()
    membership.exchange(act)
    (Path(folder) / f"took-{rank}").write_text(str(time.monotonic() - began))
    membership.close()


def test_who_waits_for_one_that_failed_does_not_wait_for_the_time_out(tmp_path):
    workers = [
        WARM.Process(target=_fail_once, args=(str(tmp_path), rank), daemon=True)
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert all(float((tmp_path / f"took-{rank}").read_text()) < LONG_S / 2 for rank in range(2))


def test_an_exchange_that_always_fails_ends_the_run():
    membership = Membership(HashStore(), 0, TIMEOUT_S, 1, print)
    attempts = []

    def act(_group: dist.ProcessGroup) -> None:
        attempts.append(1)
        raise RuntimeError("the disk is on fire")

    with pytest.raises(RunError, match=r"failed 4 times though .* \(the disk is on fire\)"):
        membership.exchange(act)
    assert len(attempts) == 4


def test_too_few_workers_end_the_run(tmp_path):
    first = _start(tmp_path, 0, min_workers=2)
    first.join(60)
    assert first.exitcode == 0
    assert (tmp_path / "error-0").read_text().startswith("1 workers are fewer than ")


def test_a_worker_that_nobody_lets_in_says_so(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), -1)
    with pytest.raises(RunError, match=r"has not let this worker in \(worker 2\)"):
        Membership(store, 2, 0.2, 1, print).join(_hand_over(torch.zeros(2)))
