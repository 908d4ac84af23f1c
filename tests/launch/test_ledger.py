"""The ledger: every device-second is in one class, whatever an engine or a Run tells."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.contract import Attempt
from paceline.launch.ledger import CLASSES, Span, ledger

NOW = 2_000.0


def attempt(submitted, started, ended, devices=4, number=1, state="COMPLETED"):
    return Attempt(number, submitted, started, ended, ("n0",), devices, None, state)


def span(kind, begin, end, devices=4, *, in_step=False):
    return Span(kind, round(begin * 1e6), round(end * 1e6), devices, in_step)


def seconds(found):
    return {name: us / 1e6 for name, us in found.device_us.items()}


times = st.floats(0, NOW, allow_nan=False)
attempts = st.lists(
    st.builds(
        attempt,
        times,
        st.none() | times,
        st.none() | times,
        st.integers(1, 20),
        st.integers(1, 3),
        st.sampled_from(["COMPLETED", "PREEMPTED", "NODE_FAIL"]),
    ),
    max_size=6,
)
spans = st.lists(
    st.builds(
        Span,
        st.sampled_from(CLASSES[1:]),
        st.integers(-(10**8), 3 * 10**9),
        st.integers(-(10**8), 3 * 10**9),
        st.integers(0, 50),
        st.booleans(),
    ),
    max_size=12,
)


@given(attempts, spans)
def test_classes_add_up_to_devices_times_time_to_the_microsecond(attempts, spans):
    found = ledger(attempts, spans, NOW)
    assert len(found.attempts) == len(attempts)
    for each in found.attempts:
        held = each.attempt.num_devices * (each.end_us - each.start_us)
        queued = each.attempt.num_devices * (each.start_us - each.begin_us)
        assert sum(each.device_us.values()) == held + queued == each.total_us
        assert each.device_us.get("queued", 0) == queued
        assert set(each.device_us) <= set(CLASSES)
        assert all(us > 0 for us in each.device_us.values())
        assert 0 <= each.kept_us <= held
        assert sum(idle.device_us for idle in each.idle) <= each.device_us.get("idle_held", 0)
    assert sum(found.device_us.values()) == found.total_us
    assert found.goodput is None or 0 <= found.goodput <= 1


@given(attempts, spans)
def test_no_span_counts_for_more_devices_than_it_has(attempts, spans):
    found = ledger(attempts, spans, NOW)
    for kind in ("compute", "lost_work", "hang"):
        most = sum(
            each.num_devices * max(0, each.end_us - each.begin_us)
            for each in spans
            if each.kind == kind
        )
        assert found.device_us.get(kind, 0) <= most


def test_an_attempt_from_its_queue_to_its_end():
    told = [
        span("compute", 120, 130, in_step=True),
        span("data_wait", 130, 131, in_step=True),
        span("lost_work", 131, 133),
    ]
    found = ledger([attempt(0, 100, 140)], told, NOW)
    assert seconds(found) == {
        "queued": 400,
        "starting": 80,
        "data_wait": 4,
        "compute": 40,
        "lost_work": 8,
        "idle_held": 28,
    }
    assert found.held_us == 160e6
    assert found.goodput == 44 / 160
    assert found.effective_ratio == 11 / 140


def test_what_is_before_the_first_step_of_a_later_attempt_is_a_restart():
    attempts = [attempt(50, 60, 80, number=2), attempt(0, 10, 50)]
    told = [span("compute", 20, 50), span("compute", 65, 80)]
    found = ledger(attempts, told, NOW)
    assert [each.device_us for each in found.attempts] == [
        {"queued": 40e6, "starting": 40e6, "compute": 120e6},
        {"queued": 40e6, "compute": 60e6, "restart": 20e6},
    ]


def test_an_attempt_that_never_trained_is_its_start_alone():
    failed, then = attempt(0, 5, 25), attempt(25, 30, 50)
    found = ledger([failed, then], [span("compute", 40, 50)], NOW)
    assert seconds(found) == {"queued": 40, "starting": 80 + 40, "compute": 40}


def test_attempts_without_machines_or_an_end_count_until_now():
    assert seconds(ledger([attempt(1_000, None, None)], [], NOW)) == {"queued": 4_000}
    assert seconds(ledger([attempt(1_000, None, 1_500)], [], NOW)) == {"queued": 2_000}
    found = ledger([attempt(0, 0, None)], [span("compute", 0, 1_000)], NOW)
    assert seconds(found) == {"compute": 4_000, "idle_held": 4_000}


def test_machines_that_were_taken_away_are_preempted_to_the_end():
    found = ledger([attempt(0, 0, 30, state="PREEMPTED")], [span("compute", 0, 20)], NOW)
    assert seconds(found) == {"compute": 80, "preempted": 40}


def test_a_second_is_in_one_attempt_where_several_hold_machines_for_the_same_ranks():
    """As the parts of a heterogeneous job, which sacct lists under one number."""
    both = [attempt(0, 0, 100, devices=4), attempt(0, 0, 50, devices=2)]
    found = ledger(both, [span("compute", 0, 100, devices=5)], NOW)
    assert [each.device_us["compute"] for each in found.attempts] == [400e6, 50e6]
    assert found.device_us["idle_held"] == 50e6


def test_idle_devices_are_named_with_how_many_were_idle_how_long():
    """One of four is a spare for 300 s; at the end all four are held for 100 s more."""
    steps = [span("compute", at, at + 0.9, devices=3, in_step=True) for at in range(200)]
    found = ledger([attempt(0, 0, None)], steps, now=300)
    assert [(each.num_devices, each.begin_us, each.end_us) for each in found.idle] == [
        (3, 199.9e6, 300e6),
        (1, 0, 300e6),
    ]
    assert all(each.is_now for each in found.idle)
    assert ledger([attempt(0, 0, 30)], [span("compute", 0, 1)], NOW).idle == ()
