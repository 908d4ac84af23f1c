"""The predicted Timeline. Pure functions: its accounting gives back the prediction's terms, for
every schedule, with and without overlap; what is written can be read.
"""

from itertools import pairwise

import pytest

from paceline.config.schedule import DEMANDS
from paceline.config.stack import Stack
from paceline.observe.accounting import accounting
from paceline.observe.timeline import Timeline
from paceline.plan.price.simulate import predicted_timeline
from paceline.plan.price.step import predict
from paceline.plan.schedules import split_layers
from tests.plan.planned import layout, setting

FLAT = [
    layout(dp=16),
    layout(fsdp=16, recompute="full", micro_batch=2),
    layout(tp=4, fsdp=4, sequence_parallel=True, zero=1),
    layout(cp=4, fsdp=4, recompute="selective"),
]


def pipeline(name: str, **more):
    per_rank = DEMANDS[name].stages_per_rank or 2
    stages = 4 * (1 if name == "dualpipe" else per_rank)
    split = split_layers([1.0] * 16, stages, 0.0, 1.5)
    return layout(
        pp=4, fsdp=4, zero=1, schedule=name, stages_per_rank=per_rank, split=split, **more
    )


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize(
    "laid",
    [*FLAT, *map(pipeline, sorted(DEMANDS)), pipeline("zb_h1", recompute="full")],
    ids=lambda laid: f"{laid.schedule}-{laid.recompute}-tp{laid.tp}-cp{laid.cp}",
)
def test_accounting_gives_back_the_prediction(laid, overlaps):
    one = setting(stack=Stack(overlaps_pp=overlaps))
    found = predict(one, laid)
    accounts = accounting(predicted_timeline(one, laid))
    assert sorted(accounts) == list(range(laid.pp))
    for steps in accounts.values():
        assert sum(steps[0].values()) == pytest.approx(found.step_s, abs=2e-9)
        assert steps[0].get("unattributed", 0.0) < 1e-6

    def distance(rank: int) -> float:
        terms = set(found.time_s) | set(accounts[rank][0])
        return max(
            abs(accounts[rank][0].get(term, 0.0) - found.time_s.get(term, 0.0)) for term in terms
        )

    # A span is rounded to a nanosecond at each end, and there are thousands.
    assert min(map(distance, accounts)) < 2e-6


@pytest.mark.parametrize("name", sorted(DEMANDS))
def test_spans_of_a_stream_follow_each_other(name):
    drawn = predicted_timeline(setting(), pipeline(name))
    for rank in drawn.ranks:
        own = sorted(
            (span.start_us, span.duration_us)
            for span in drawn
            if span.rank == rank and span.stream == "device"
        )
        for (start, duration), (after, _) in pairwise(own):
            assert after >= start + duration - 2e-3  # each end is rounded to a nanosecond


def test_hidden_communication_lies_beside_computing():
    drawn = predicted_timeline(setting(), layout(fsdp=16))
    beside = [span for span in drawn if span.stream == "device comm" and span.duration_us]
    assert beside
    assert {span.term for span in beside} == {"exposed_comm.fsdp"}


def test_it_is_written_and_read(tmp_path):
    drawn = predicted_timeline(setting(), pipeline("1f1b"))
    path = tmp_path / "predicted.json.gz"
    drawn.write(path)
    assert accounting(Timeline.read(path)) == accounting(drawn)
