"""The planner's rule among agents: which nodes go on after a loss or a return, and why (pure)."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.config.job import Job, to_raw
from paceline.elastic.decision import Loss, Situation
from paceline.elastic.generation import Generation, Node
from paceline.elastic.planned import PlannedRule
from tests.plan.test_elastic import _nodes, _run


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _node(name: str, devices: int = 1) -> Node:
    return Node(name, "1", "127.0.0.1", 1, devices)


def _generation(names: str, job: Job, spares: str = "") -> Generation:
    nodes = tuple(_node(name) for name in names + spares)
    return Generation(1, names[0], nodes, len(names), to_raw(job), ("127.0.0.1", 1), "start", 0.0)


def _situation(before: Generation | None, there: str, lost: str = "", **more: Any) -> Situation:
    """Of nodes named by one letter each."""
    losses = tuple(Loss(name, None, "dead", f"{name} died.") for name in lost)
    given = {"min_nodes": 1, "max_nodes": 4, "waited_s": 0.0, "wait_s": 60.0, "steps_left": 1000,
             "step_s": 1.0}  # fmt: skip
    return Situation(before, tuple(map(_node, there)), losses, **{**given, **more})


def _rule(clock: _Clock | None = None, **elastic: Any) -> tuple[PlannedRule, Job]:
    asked, job = _run(_nodes(4), elastic=elastic)
    return PlannedRule(asked, job, clock or _Clock()), job


def test_it_begins_with_who_is_there():
    rule, job = _rule()
    decision = rule(_situation(None, "abcd"))
    assert (decision.action, decision.nodes, decision.job) == ("start", tuple("abcd"), job)


def test_lost_ranks_are_started_again_where_they_were():
    rule, job = _rule()
    decision = rule(_situation(_generation("abcd", job), "abcd", lost="b"))
    assert (decision.action, decision.nodes, decision.job) == ("replace", tuple("abcd"), job)


def test_a_spare_takes_the_place_of_a_lost_node():
    rule, job = _rule()
    decision = rule(_situation(_generation("abcd", job, "e"), "acde", lost="b"))
    assert (decision.action, decision.nodes) == ("spare", tuple("aecd"))


def test_without_a_spare_the_others_go_on_and_say_why():
    rule, job = _rule()
    decision = rule(_situation(_generation("abcd", job), "acd", lost="b"))
    assert (decision.action, decision.nodes) == ("shrink", tuple("acd"))
    assert decision.job is not None
    assert decision.job.layout.dp == 3
    assert "1 of 4 nodes has lost processes" in decision.sentence
    assert {option.action for option in decision.options} == {"shrink", "wait", "stop"}
    expected = [option.expected_s for option in decision.options]
    assert expected == sorted(expected)


@pytest.mark.parametrize(("there", "nodes"), [("acd", "cd"), ("abd", "ab"), ("acde", "aecd")])
def test_a_lost_node_of_a_worker_takes_no_node_of_another_worker(there, nodes):
    layout = {"dp": 2, "fsdp": 2, "zero": 3}
    asked, job = _run(_nodes(4), layout=layout, comm={"local": {"method": "diloco"}})
    before, (lost, *_) = _generation("abcd", job), set("abcd") - set(there)
    decision = PlannedRule(asked, job, _Clock())(_situation(before, there, lost=lost))
    assert decision.nodes == tuple(nodes)
    assert decision.job is not None
    assert (decision.job.layout.dp, decision.job.layout.fsdp) == (len(nodes) // 2, 2)


@pytest.mark.parametrize(("steps_left", "nodes"), [(1000, "abcd"), (5, "abc")])
def test_a_node_that_comes_is_taken_in_where_that_pays(steps_left, nodes):
    rule, job = _rule()
    before = _generation("abc", rule.job_on(3) or job)
    decision = rule(_situation(before, "abcd", steps_left=steps_left))
    assert decision.nodes == tuple(nodes)
    assert decision.job is not None  # else nobody would train
    assert decision.job.cluster.num_nodes == len(nodes)


def test_too_few_wait_and_then_stop_and_what_is_left_can_save():
    rule, job = _rule(min_nodes=3)
    before = _generation("abcd", job)
    waits = rule(_situation(before, "ab", lost="cd", min_nodes=3))
    assert (waits.action, waits.job, waits.nodes) == ("wait", None, ())
    assert waits.sentence == "2 nodes are here and 3 are needed: waiting for 60 s at most."
    assert {option.action for option in waits.options} == {"wait", "stop"}
    stops = rule(_situation(before, "ab", lost="cd", min_nodes=3, waited_s=60.0))
    assert stops.action == "stop"
    assert rule.job_on(2) is not None


def test_it_waits_where_nodes_were_seen_to_return_at_once():
    clock = _Clock()
    rule, job = _rule(clock)
    full = _generation("abcd", job)
    actions = []
    for _ in range(2000):
        actions.append(rule(_situation(full, "abc", lost="d", steps_left=20_000)).action)
        clock.now += 0.5
        rule(_situation(full, "abcd"))
        clock.now += 100
    assert actions[0] == "shrink"
    assert actions[-1] == "wait"


def test_what_going_on_took_is_remembered_by_what_was_done():
    rule, job = _rule()
    before = _generation("abcd", job, "e")
    both: dict[str, Any] = {"there": "abcde", "lost": "b", "seconds": {"first_step": 50.0}}
    # Asked twice in a generation, whose first step is another decision's.
    assert [rule(_situation(before, **both)).action for _ in range(2)] == ["replace", "replace"]
    assert rule(_situation(replace(before, number=2), **both)).action == "spare"


def test_nodes_with_fewer_devices_are_planned_for():
    asked, job = _run(_nodes(2, 4))
    before = Generation(1, "a", (_node("a", 4), _node("b", 4)), 2, to_raw(job), ("x", 1), "", 0.0)
    there = (_node("a", 4), _node("c", 2))
    situation = Situation(before, there, (), 1, 2, 0.0, 0.0, steps_left=100, step_s=1.0)
    decision = PlannedRule(asked, job, _Clock())(situation)
    assert decision.job is not None
    assert decision.nodes == ("a", "c")
    assert decision.job.layout.dp == 4  # two of each
