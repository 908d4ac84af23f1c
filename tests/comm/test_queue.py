"""The queue of collectives: its order follows from submission alone, and failures get out."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.queue import Queue

CPU = torch.device("cpu")


class Awaited:
    """Stands for a collective that takes a while."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def wait(self) -> None:
        time.sleep(self.seconds)


def _job(name: str, delays: list[float], issued: list[str]) -> Iterator[Awaited]:
    for part, seconds in enumerate(delays):
        issued.append(f"{name}{part}")
        yield Awaited(seconds)


def _issued(delays: list[list[float]], pauses: list[float]) -> list[str]:
    """What a series of jobs issues, in order, when collectives and submissions take so long."""
    issued: list[str] = []
    queue = Queue(CPU)
    for name, (of_job, pause) in enumerate(zip(delays, pauses, strict=True)):
        queue.submit(_job("abcdef"[name], of_job, issued))
        time.sleep(pause)
    queue.flush()
    queue.wait()
    queue.close()
    return issued


def test_the_next_bucket_starts_before_the_last_one_goes_on():
    assert _issued([[0, 0]] * 3, [0] * 3) == ["a0", "b0", "a1", "c0", "b1", "c1"]


def test_the_youngest_goes_on_first():
    assert _issued([[0] * 3] * 3, [0] * 3) == [
        *("a0", "b0", "a1", "c0", "b1", "a2"),
        *("c1", "b2", "c2"),
    ]


_DELAYS = st.lists(st.sampled_from([0.0, 0.001, 0.003]), min_size=0, max_size=3)


@given(st.lists(_DELAYS, min_size=1, max_size=5), st.data())
@settings(max_examples=25, deadline=None)
def test_timing_does_not_change_the_order(delays, data):
    """Two ranks whose collectives and backward passes take differently long."""
    instant = [[0.0] * len(of_job) for of_job in delays]
    wait = st.sampled_from([0.0, 0.002])
    pauses = data.draw(st.lists(wait, min_size=len(delays), max_size=len(delays)))
    assert _issued(delays, pauses) == _issued(instant, [0.0] * len(delays))


def test_jobs_run_beside_the_thread_that_submits_them():
    threads: list[str] = []

    def job() -> Iterator[Awaited]:
        threads.append(threading.current_thread().name)
        assert not torch.is_grad_enabled()
        yield Awaited()

    queue = Queue(CPU)
    queue.submit(job())
    queue.flush()
    queue.wait()
    assert threads == ["paceline-collectives"]


def test_an_error_reaches_whoever_waits_with_its_traceback_and_nothing_is_issued_after_it():
    def broken() -> Iterator[Awaited]:
        yield Awaited()
        raise ValueError("the payload is torn")

    issued: list[str] = []
    ended: list[bool] = []
    queue = Queue(CPU)
    queue.submit(broken())
    queue.submit(_job("b", [0, 0], issued))
    queue.flush(lambda: ended.append(True))
    with pytest.raises(ValueError, match="the payload is torn") as raised:
        queue.wait()
    assert ended == [True], "whoever waits for the series must be let go"
    assert issued == ["b0"]
    assert "in job 0 of this rank's queue" in raised.value.__notes__[0]
    assert any("broken" in str(entry) for entry in raised.traceback)
    queue.submit(_job("c", [0], issued))
    queue.flush()
    with pytest.raises(ValueError, match="the payload is torn"):
        queue.wait()
    assert issued == ["b0"]


def test_a_series_goes_on_after_another():
    issued: list[str] = []
    queue = Queue(CPU)
    for name in "ab":
        queue.submit(_job(name, [0.002, 0], issued))
        queue.flush()
    queue.wait()
    assert issued == ["a0", "a1", "b0", "b1"]
