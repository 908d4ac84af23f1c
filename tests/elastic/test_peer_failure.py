"""The roll call after a failed collective: its verdicts (pure), then gloo ranks that are late, gone
or broken."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.comm.busy_clock import BusyClock
from paceline.comm.rendezvous import Ranks, collective_timeout, reason_of, set_collective_timeout
from paceline.elastic.peer_failure import (
    PeerAnswer,
    PeerAnswers,
    PeerFailureDetector,
    _where_failed,
    describe_loss,
    reserve_s,
)
from tests.ranks import run_ranks

WAITING = PeerAnswer("all_reduce of train/trainer.py:9")
HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def _verdict(answers: dict[int, PeerAnswer], size: int = 4, hosts: dict[int, str] = HOSTS) -> str:
    return describe_loss(0, size, WAITING, "Timed out", PeerAnswers({0: WAITING, **answers}, hosts))


def test_who_does_not_answer_is_lost():
    assert _verdict({1: WAITING, 3: WAITING}).startswith(
        "rank 0 on a, in all_reduce of train/trainer.py:9, lost rank 2 on b, which does not answer "
        "(Timed out): look whether it runs"
    )
    assert "lost ranks 2, 3 on b, which do not answer" in _verdict({1: WAITING})


def test_of_many_lost_ranks_a_few_are_named():
    assert "lost ranks 1, 2, 3, 4, 5, 6, 7, 8 and 91 more, which do" in _verdict({}, 100, {})


def test_a_rank_that_failed_is_the_cause_whoever_else_is_missing():
    broken = PeerAnswer("forward of mine.py:3", "ValueError: the tokeniser ate it")
    assert _verdict({1: WAITING, 3: broken}) == (
        "rank 3 on b failed (ValueError: the tokeniser ate it) and took the run down."
    )


def test_where_all_answer_it_says_who_is_where():
    text = _verdict(
        {1: PeerAnswer("x.py:1"), 2: PeerAnswer("sleep of y.py:2"), 3: PeerAnswer("x.py:1")}
    )
    assert "rank 0 on a, in all_reduce of train/trainer.py:9, waited in vain" in text
    assert "every rank answers: ranks 1, 3 on a, b in x.py:1; rank 2 on b in sleep of y.py" in text
    assert "raise comm.timeout_s" in text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "[/__w/a/b.cc:78] Timed out waiting 4000ms for recv\nmore",
            "Timed out waiting 4000ms for",
        ),
        ("[/__w/a/b.cc:78] Closed by [10.77.0.1]:1. Check the logs.", "Closed by [10.77.0.1]:1"),
        ("", ""),
    ],
)
def test_the_reason_is_the_backends_first_sentence(text, reason):
    assert reason_of(RuntimeError(text)).startswith(reason)
    assert "\n" not in reason_of(RuntimeError(text))


@pytest.mark.parametrize(("timeout_s", "reserve"), [(5, 1), (60, 12), (1800, 30)])
def test_part_of_the_timeout_is_for_the_roll_call(timeout_s, reserve):
    assert reserve_s(timeout_s) == reserve


def _wait_in_vain(rank: int, size: int, late: int, how: str, folder: Path) -> None:
    """All ranks but one wait in an all-reduce; that one does something else."""
    set_collective_timeout(2.4)
    assert collective_timeout().total_seconds() == pytest.approx(2.4)
    with PeerFailureDetector.of_this_run(Ranks(rank, size, rank, size), 3.0) as detector:
        dist.all_reduce(torch.ones(1))
        if rank == late:
            _be_late(how, detector)
            return
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            text = detector.explain(error)
            (folder / str(rank)).write_text(json.dumps([time.monotonic() - began, text]))


def _be_late(how: str, detector: PeerFailureDetector) -> None:
    if how == "sleep":
        time.sleep(4)
        return
    if how == "raise":
        try:
            raise ValueError("the tokeniser ate it")
        except ValueError as error:
            detector.tell(error)
    os._exit(3)


def _told(late: int, how: str, folder: Path) -> dict[int, str]:
    """Rank -> what it says, of the ranks whose collective failed."""
    with pytest.raises(AssertionError):  # the group is of no use any more
        run_ranks(_wait_in_vain, 3, late, how, folder)
    told = {int(file.name): json.loads(file.read_text()) for file in folder.iterdir()}
    assert told.keys() == {0, 1, 2} - {late}
    assert all(lasted_s < 8 for lasted_s, _ in told.values())
    return {rank: text for rank, (_, text) in told.items()}


def test_a_rank_that_is_late_is_found_where_it_is(tmp_path):
    for text in _told(0, "sleep", tmp_path).values():
        assert "every rank answers" in text
        assert "rank 0 on " in text.partition("every rank answers")[2]


def test_a_rank_that_is_gone_is_lost(tmp_path):
    for text in _told(2, "gone", tmp_path).values():
        assert "lost rank 2 on " in text


def test_the_others_hear_of_a_failure(tmp_path):
    for text in _told(2, "raise", tmp_path).values():
        assert "rank 2 on " in text
        assert "failed (ValueError: the tokeniser ate it)" in text


def _fail() -> None:
    raise RuntimeError("waited in vain")


def test_who_counts_waits_is_not_where_a_rank_waits():
    with BusyClock() as clock, pytest.raises(RuntimeError) as failed:
        clock._counted(_fail)()
    assert "busy" not in _where_failed(failed.value)
