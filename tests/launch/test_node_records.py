"""Attempts by what the nodes wrote, where no engine keeps accounts."""

from paceline.launch.node_records import NodeRecord, recorded_attempts


def record(attempt: int, node: str, started: float, ended: float | None, code: int | None):
    return NodeRecord(attempt, node, started, ended, code)


def test_attempts_follow_each_other_and_hold_their_nodes_devices():
    records = (
        record(1, "a", 10, 20, 75),
        record(1, "b", 11, 21, 75),
        record(2, "a", 30, 40, 0),
        record(2, "c", 31, 41, 0),
    )
    first, second = recorded_attempts(records, 8, 5.0)
    assert (first.submitted, first.started, first.ended) == (5, 10, 21)
    assert (second.submitted, second.started, second.ended) == (21, 30, 41)
    assert (first.nodes, first.num_devices, first.state) == (("a", "b"), 16, "saved")
    assert (second.nodes, second.exit_code, second.state) == (("a", "c"), 0, "finished")


def test_a_node_that_starts_again_under_the_same_number_begins_another_attempt():
    """As where Kueue puts a job back into its queue: the time between is nobody's."""
    records = (
        record(1, "a", 10, 20, 75),
        record(1, "a", 50, 60, 0),
        record(1, "b", 10, 20, 75),
        record(1, "b", 51, 61, 0),
    )
    found = list(recorded_attempts(records, 1, 0.0))
    assert [(one.number, one.started, one.ended) for one in found] == [(1, 10, 20), (1, 50, 61)]
    assert sum(one.num_devices * (one.ended - one.started) for one in found) == 2 * (10 + 11)


def test_a_lost_node_ended_before_the_next_attempt_began():
    lost = (record(1, "a", 10, None, None), record(2, "a", 30, None, None))
    first, second = recorded_attempts(lost, 1, 0.0)
    assert (first.ended, first.exit_code, first.state) == (30, None, "lost")
    assert second.ended is None
    beside = (record(1, "a", 10, None, None), record(1, "b", 10, 22, 143))
    (one,) = recorded_attempts(beside, 1, 0.0)
    assert (one.ended, one.exit_code, one.state) == (None, 143, "failed")
