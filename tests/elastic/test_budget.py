"""How much a run may lose, whoever leads: each leader reads from the generation before."""

import json
from dataclasses import asdict

import pytest

from paceline.config.job import to_raw
from paceline.elastic.budget import Budget
from paceline.elastic.generation import Generation, Node, generation_of
from tests.elastic.cluster import job_of


def _next_leaders(budget: Budget, number: int) -> Budget:
    """What another leader knows, when the one that claimed a generation is gone."""
    nodes = (Node("a", "1", "127.0.0.1", 1, 1),)
    made = Generation(
        number, "a", nodes, 1, to_raw(job_of(1, 9, 1)), ("x", 1), "", 0.0, asdict(budget)
    )
    return Budget.of(generation_of(json.loads(json.dumps(asdict(made)))))


def test_a_loop_of_deaths_ends_though_each_kills_the_leader():
    budget = Budget.of(None)
    for number in range(1, 4):
        budget.lost(())
        assert budget.why_over(3, 2) == ("", False)
        budget = _next_leaders(budget, number)
    budget.lost(())
    why, is_failure = budget.why_over(3, 2)
    assert "4 losses without a finished step" in why
    assert not is_failure


def test_a_finished_step_fills_the_budget_but_known_bad_nodes_stay_out():
    budget = Budget()
    budget.lost({"b"})
    budget.lost({"b", "c"})
    assert budget.repeated(3) == {"b": "its ranks died 2 times with no step between them"}
    budget.left_out["b"] = "its ranks died"
    budget = _next_leaders(budget, 1)
    budget.stepped(5)
    assert (budget.num_losses, budget.causes) == (0, {})
    assert budget.left_out == {"b": "its ranks died"}


def test_a_node_that_comes_and_is_lost_again_and_again_stays_out():
    budget = Budget()
    for number in range(1, 4):
        budget.lost((), {"c"})
        assert budget.repeated(2) == ({} if number < 3 else {"c": budget.repeated(2)["c"]})
        budget.stepped(number, {"a", "b"})  # of the others, without it
        budget = _next_leaders(budget, number)
    assert "lost 3 times with no step finished with it" in budget.repeated(2)["c"]
    budget.stepped(9, {"a", "c"})
    assert budget.repeated(2) == {}


@pytest.mark.parametrize(
    ("nodes", "num_members", "is_over"), [("aab", 3, True), ("aaa", 3, False), ("aaa", 1, True)]
)
def test_the_third_death_at_a_step_on_other_machines_is_the_programs_fault(
    nodes, num_members, is_over
):
    budget = Budget()
    for number, node in enumerate(nodes, 1):
        budget.died(node, 7)
        budget = _next_leaders(budget, number)
    why, is_failure = budget.why_over(9, num_members)
    assert (bool(why), is_failure) == (is_over, is_over)
