"""Who holds up the others, from what ranks say of themselves; and the plain rule of what to do."""

from dataclasses import replace

import pytest

from paceline.elastic.decision import Situation, plain_rule
from paceline.elastic.generation import Generation, Node
from paceline.elastic.verdict import Progress, judge
from tests.elastic.cluster import job_of


def _rank(rank, section="agree", since_s=0.1, limit_s=5.0, is_waiting=True, generation=1, **more):
    place = "trainer.py:9 (step)"
    return Progress(
        rank, f"h{rank}", generation, 7, section, since_s, limit_s, place, is_waiting, **more
    )


def test_nobody_is_late_nobody_is_judged():
    assert judge([_rank(0), _rank(1, "data", is_waiting=False)], 1, 99.0) is None
    assert judge([_rank(0, "idle", 1e6, None)], 1, 99.0) is None
    assert judge([], 1, 99.0) is None


@pytest.mark.parametrize(
    ("section", "cause"),
    [("data", "waiting_for_data"), ("forward_backward", "stuck"), ("checkpoint", "stuck")],
)
def test_the_culprit_is_who_does_not_wait(section, cause):
    late = _rank(1, section, 6.0, is_waiting=False)
    verdict = judge([_rank(0, since_s=6.0), late, _rank(2, since_s=6.0)], 1, 99.0)
    assert (verdict.rank, verdict.cause) == (1, cause)
    for part in ("rank 1 on h1", "step 8", "6.0 s (at most 5.0 s)", "trainer.py:9"):
        assert part in verdict.sentence


def test_who_waits_is_not_blamed_while_another_is_within_its_own_limit():
    working = _rank(1, "evaluation", 6.0, 60.0, is_waiting=False)
    assert judge([_rank(0, since_s=6.0), working], 1, 99.0) is None


def test_where_all_wait_the_links_are_blamed():
    verdict = judge([_rank(0, since_s=6.0), _rank(1, since_s=6.0)], 1, 99.0)
    assert verdict.rank is None
    assert "links" in verdict.sentence


def test_a_rank_that_has_not_left_an_earlier_generation_is_the_culprit():
    stuck = _rank(1, "data", 9.0, is_waiting=False, generation=1)
    verdict = judge([_rank(0, "start", 61.0, 60.0, generation=2), stuck], 2, 99.0)
    assert (verdict.rank, verdict.cause) == (1, "stuck")
    assert "has not left" in verdict.sentence
    # It waited for the lost rank, said so, and comes out now.
    assert judge([_rank(0, "start", generation=2), stuck], 2, 0.2) is None


def test_who_has_begun_fewer_collectives_is_the_culprit_whatever_its_stack_shows():
    calls = [{"0": (count, ["all_reduce"] * 2)} for count in (9, 8, 9)]
    backward = [
        _rank(at, "forward_backward", 6.0, is_waiting=False, calls=each)
        for at, each in enumerate(calls)
    ]
    verdict = judge(backward, 1, 99.0)
    assert (verdict.rank, verdict.cause) == (1, "stuck")
    assert "before all_reduce number 9" in verdict.sentence


def test_a_rank_in_another_collective_than_the_others():
    names = ("all_reduce", "all_reduce", "broadcast")
    ranks = [_rank(at, since_s=6.0, calls={"0": (9, [name])}) for at, name in enumerate(names)]
    # A broadcast's source has handed over what it sends, and goes on.
    ahead = _rank(2, since_s=6.0, calls={"0": (10, ["broadcast", "all_reduce"])})
    for odd in (ranks[2], ahead):
        verdict = judge([*ranks[:2], odd], 1, 99.0)
        assert (verdict.rank, verdict.cause) == (2, "wrong_collective")
        assert "in broadcast where others are in all_reduce" in verdict.sentence


def test_counts_of_a_rank_that_goes_on_blame_nobody():
    moving = _rank(1, since_s=3.0, is_waiting=False, calls={"0": (8, ["all_reduce"])})
    ahead = _rank(0, since_s=6.0, calls={"0": (9, ["all_reduce"] * 2)})
    assert judge([ahead, moving], 1, 99.0) is None


def _in_backward(rank, since_s, **more):
    """It may compute, or wait in C++ for others: its stack doesn't say."""
    return _rank(rank, "forward_backward", since_s, is_waiting=False, **more)


def test_who_is_late_a_moment_before_its_culprit_is_not_blamed():
    ahead = {"0": (9, ["all_reduce"] * 2)}
    # The rank that hangs in its backward pass began it a few milliseconds after the others.
    for calls in ({"0": (8, ["all_reduce"])}, {}):
        hangs = _in_backward(1, 4.99, calls=calls)
        others = [_in_backward(at, 5.01, calls=ahead) for at in (0, 2)]
        assert judge([*others, hangs], 1, 99.0) is None
        late = [replace(hangs, since_s=5.02, calls={"0": (8, ["all_reduce"])}), *others]
        assert judge(late, 1, 99.0).rank == 1


def test_who_is_behind_one_but_ahead_of_another_is_not_the_culprit():
    counts = {0: (9, 9), 1: (8, 9), 2: (8, 8)}  # of groups a and b
    ranks = [
        _in_backward(at, 6.0, calls={"a": (a, ["all_reduce"]), "b": (b, ["all_reduce"])})
        for at, (a, b) in counts.items()
    ]
    assert judge(ranks, 1, 99.0).rank == 2
    assert judge([*ranks[:2], replace(ranks[2], limit_s=60.0)], 1, 99.0) is None


def test_ranks_that_wait_for_each_other_are_judged_all_the_same():
    calls = [{"a": (9, ["x"]), "b": (8, ["x"])}, {"a": (8, ["x"]), "b": (9, ["x"])}]
    ranks = [_in_backward(at, 6.0, calls=each) for at, each in enumerate(calls)]
    assert judge(ranks, 1, 99.0).rank == 1


def test_one_that_reads_is_judged_though_others_may_be_longer_in_their_pass():
    reads = _rank(1, "data", 6.0, is_waiting=False)
    first_pass = replace(_in_backward(0, 6.0), limit_s=300.0)
    verdict = judge([first_pass, reads], 1, 99.0)
    assert (verdict.rank, verdict.cause) == (1, "waiting_for_data")


def _node(name):
    return Node(name, name * 8, "127.0.0.1", 1, 1)


def _generation(names, job):
    from paceline.config.job import to_raw

    nodes = tuple(map(_node, names))
    return Generation(1, "a", nodes, len(nodes), to_raw(job), ("127.0.0.1", 1), "start", 0.0)


@pytest.mark.parametrize(
    ("there", "action", "nodes"),
    [
        ("abc", "replace", "abc"),
        ("abcd", "replace", "abc"),
        ("acd", "spare", "adc"),
        ("ac", "shrink", "ac"),
        ("d", "wait", ""),
    ],
)
def test_the_plain_rule_keeps_places_and_waits_only_for_too_few(there, action, nodes):
    rule = plain_rule(lambda count: job_of(count, 10, 1))
    before = _generation("abc", job_of(3, 10, 1))
    situation = Situation(before, tuple(map(_node, there)), (), 2, 3, waited_s=1, wait_s=9)
    decision = rule(situation)
    assert (decision.action, "".join(decision.nodes)) == (action, nodes)


def test_the_plain_rule_grows_and_stops_when_the_wait_is_over():
    rule = plain_rule(lambda count: job_of(count, 10, 1))
    before = _generation("ab", job_of(2, 10, 1))
    grown = rule(Situation(before, tuple(map(_node, "abcd")), (), 2, 3, 0, 9))
    assert (grown.action, "".join(grown.nodes)) == ("grow", "abc")
    assert grown.job.layout.num_ranks == 3
    assert rule(Situation(before, (_node("a"),), (), 2, 3, 9.5, 9)).action == "stop"


def test_the_plain_rule_takes_as_many_as_a_job_can_be_made_for():
    rule = plain_rule(lambda count: job_of(count, 10, 1) if count != 3 else None)
    before = _generation("abcd", job_of(4, 10, 1))
    decision = rule(Situation(before, tuple(map(_node, "abd")), (), 1, 4, 0, 9))
    assert (decision.action, "".join(decision.nodes)) == ("shrink", "ab")


def test_of_many_who_claim_a_generation_one_has_it(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    generation = _generation("abcd", job_of(4, 10, 1))
    claims = [replace(generation, leader=name) for name in "abcd"]
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda one: one.claim(tmp_path / one.leader / ".."), claims))
    assert won.count(True) == 1
