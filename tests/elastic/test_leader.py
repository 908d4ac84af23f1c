"""What a leader makes of what ranks say, without processes."""

import time
from types import SimpleNamespace

import pytest

from paceline.config.job import Job, to_raw
from paceline.elastic.generation import Generation, Node
from paceline.elastic.leader import Leader, Member
from tests.elastic.cluster import job_of


def _node(name: str) -> Node:
    return Node(name, name * 8, "127.0.0.1", 1, 2)


JOB = job_of(2, 9, 2)
# a trains alone with two ranks; of b, two processes hand over the state that they have.
SMALLER = Generation(
    number=3,
    leader="a",
    nodes=(_node("a"), _node("b")),
    num_active=1,
    job=to_raw(job_of(1, 9, 2)),
    store=("127.0.0.1", 1),
    reason="a test",
    time=0.0,
    helpers=(("b", 0), ("b", 1)),
)


@pytest.mark.parametrize(
    ("number", "place"), [(0, ("a", 0)), (1, ("a", 1)), (2, ("b", 0)), (3, ("b", 1)), (4, None)]
)
def test_a_number_is_a_rank_or_a_helper(number, place):
    assert SMALLER.place_of(number) == place
    if place is not None:
        assert SMALLER.number_of(*place) == number


def _leader(tmp_path, job, events) -> Leader:
    return Leader(_node("a"), job, tmp_path, SMALLER, 3, None, None, events, lambda _: None)


def _watching(tmp_path, name: str, number: int) -> list[dict]:
    """What a leader sends to a member whose process says that it is in a generation that is over,
    for a long time."""
    sent: list[dict] = []
    channel = SimpleNamespace(send=sent.append)
    events = SimpleNamespace(add=lambda *_, **__: None)
    leader = _leader(tmp_path, JOB, events)
    said = {
        "rank": number,
        "generation": 2,
        "step": 5,
        "section": "restore",
        "since_s": 9.0,
        "ago_s": 0.0,
        "limit_s": 2.0,
        "place": "rendezvous.py:161 (_join_group)",
        "is_waiting": True,
        "calls": {},
    }
    leader._members = {name: Member(_node(name), channel, 3, progress=[said])}
    leader.is_waiting, leader._claimed = False, time.monotonic() - 9
    leader._look()
    return sent


@pytest.mark.parametrize(("number", "local_rank"), [(2, 0), (3, 1)])
def test_a_helper_that_does_not_leave_is_ended(tmp_path, number, local_rank):
    (kill,) = _watching(tmp_path, "b", number)
    assert (kill["kind"], kill["local_rank"]) == ("kill", local_rank)
    assert "has not left a generation that is over" in kill["sentence"]


@pytest.mark.parametrize("number", [0, 4])
def test_numbers_of_an_earlier_generation_are_nobodys(tmp_path, number):
    """A leader had ended over one, and led again, and ended: for 80 s."""
    assert _watching(tmp_path, "b", number) == []


@pytest.mark.parametrize(
    ("every", "step", "is_taken_in"), [(None, 12, True), (5, 15, False), (5, 16, True)]
)
def test_who_comes_is_taken_in_after_a_round(tmp_path, every, step, is_taken_in):
    """Where workers step each for itself: in the middle of one, its steps would be done again."""
    raw = to_raw(JOB)
    if every is not None:
        raw["comm"]["local"] |= {"method": "diloco", "every": every}
    leader = _leader(tmp_path, Job.parse(raw), SimpleNamespace(add=lambda *_, **__: None))
    leader.is_waiting = False
    member = Member(_node("c"), SimpleNamespace(send=lambda _: None), 3)
    leader._on_stepped(12)
    assert not leader._may_take_in(), "nobody came"
    leader._on_came(member, {"kind": "came", "stop": None})
    leader._on_stepped(step)
    assert leader._may_take_in() == is_taken_in
