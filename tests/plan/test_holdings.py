"""What pipeline ranks hold: counted along lists of actions, and by closed forms.

Pure functions, no tensors.
"""

import itertools

import numpy as np
import pytest

from paceline.config.hardware import Cluster, Device
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.schedule import DEMANDS, Schedule, refusal
from paceline.config.stack import Stack
from paceline.plan.memory.holdings import (
    between_halves,
    bounding_holdings,
    holdings_of,
    share_with_grads,
    stages_in_flight,
)
from paceline.plan.points import Points, Setting
from paceline.plan.schedules import build_schedule

MODEL = Model(
    vocab_size=512, hidden_size=64, ffn_size=128, num_layers=64, num_heads=4, max_seq_len=64
)
CPU = Cluster(device=Device(name="CPU", kind="cpu"), devices_per_node=8, num_nodes=8)
CASES = [
    (name, p, v, m)
    for name, p, v, m in itertools.product(
        DEMANDS, range(2, 9), (1, 2, 3), (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 30, 32)
    )
    if refusal(name, p, v, m) is None
]


def setting_of(num_micro_batches: int) -> Setting:
    return Setting(MODEL, CPU, 64, num_micro_batches, Stack())


def layout_of(schedule: str, p: int, v: int, *, recompute: str = "none") -> Layout:
    stages = p * v // DEMANDS[schedule].num_directions
    share, rest = divmod(MODEL.num_layers, stages)
    split = tuple(share + (stage < rest) for stage in range(stages))
    return Layout.model_validate(
        {
            "pp": p,
            "schedule": schedule,
            "stages_per_rank": v,
            "split": split,
            "recompute": recompute,
        }
    )


def peak_of(schedule: Schedule, rank: int, released: tuple[str, str]) -> int:
    """Stages x micro-batches held at most, straight from the list."""
    held = peak = 0
    for action in schedule.actions[rank]:
        held += (action.kind == "F") - (action.kind in released)
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_closed_forms_equal_the_lists(recompute: str) -> None:
    """Every schedule, pipeline and number of micro-batches, on every rank."""
    released = ("B", "I") if recompute == "full" else ("B", "W")
    for name, p, v, m in CASES:
        points = Points.of([layout_of(name, p, v, recompute=recompute)], setting_of(m))
        closed = stages_in_flight(points, np.arange(p)[:, None])[:, 0]
        schedule = build_schedule(name, p, m, v)
        listed = [peak_of(schedule, rank, released) for rank in range(p)]
        assert closed.tolist() == listed, (name, p, v, m)


def test_the_three_classes_bound_every_rank() -> None:
    """What the search's three classes hold is at least what the heaviest rank's list holds."""
    for name, p, v, m in CASES[::7]:
        layout, setting = layout_of(name, p, v), setting_of(m)
        listed = holdings_of(setting, layout, build_schedule(name, p, m, v))
        bound = bounding_holdings(setting, Points.of([layout], setting))
        assert bound.in_flight.max() >= listed.in_flight.max(), (name, p, v, m)
        assert bound.layers.max() >= listed.layers.max(), (name, p, v, m)
        assert bound.embeddings.sum() >= 1
        assert bound.heads.sum() >= 1


def test_closed_forms_bound_gradients_and_halves() -> None:
    """On every rank as much as the list says, or more; without stages that interleave just that."""
    for name, p, v, m in CASES[::2]:
        layout, setting = layout_of(name, p, v), setting_of(m)
        listed = holdings_of(setting, layout, build_schedule(name, p, m, v))
        points, ranks = Points.of([layout], setting), np.arange(p)[:, None]
        blocks = MODEL.num_layers * DEMANDS[name].num_directions / (p * v)
        in_flight = stages_in_flight(points, ranks)
        halves = between_halves(points, ranks, in_flight) * np.ceil(blocks)
        graded = share_with_grads(points, in_flight)
        assert (graded >= listed.with_grads).all(), (name, p, v, m)
        assert (halves >= listed.halves.sum(0)).all(), (name, p, v, m)
        if name in ("gpipe", "1f1b"):
            assert (graded == listed.with_grads).all()


def test_gradients_come_with_the_first_backward_pass() -> None:
    """GPipe's ranks have none when they hold most, nor has 1F1B before its steady state; where two
    stages of a rank take turns, only the last one's are there."""
    gpipe = holdings_of(setting_of(8), layout_of("gpipe", 4, 1), build_schedule("gpipe", 4, 8, 1))
    assert gpipe.with_grads[:, 0].tolist() == [0, 0, 0, 0]
    few = holdings_of(setting_of(3), layout_of("1f1b", 4, 1), build_schedule("1f1b", 4, 3, 1))
    assert few.with_grads[:, 0].tolist() == [0, 0, 1, 1]
    two = holdings_of(
        setting_of(2), layout_of("interleaved", 2, 2), build_schedule("interleaved", 2, 2, 2)
    )
    assert two.with_grads[:, 0].tolist() == [0, 0.5]


def test_what_waits_between_the_halves_of_a_backward_pass() -> None:
    """ZB-H1 by hand: rank r puts r weights' passes off, and has just done one more I; nothing waits
    on the first stage, whose input needs no gradient, nor where blocks recompute."""
    schedule = build_schedule("zb_h1", 4, 8, 1)
    eager = holdings_of(setting_of(8), layout_of("zb_h1", 4, 1), schedule)
    assert eager.halves[0, :, 0].tolist() == [0, 2 * 16, 3 * 16, 4 * 16]
    again = holdings_of(setting_of(8), layout_of("zb_h1", 4, 1, recompute="full"), schedule)
    assert not again.halves.any()


def test_without_a_pipeline_one_rank_holds_everything_once() -> None:
    """However many micro-batches follow each other."""
    layout = layout_of("1f1b", 2, 1).replace(pp=1, schedule="none", split=())
    for holdings in (
        holdings_of(setting_of(8), layout, None),
        bounding_holdings(setting_of(8), Points.of([layout], setting_of(8))),
    ):
        assert holdings.layers[0, 0, 0] == holdings.in_flight[0, 0, 0] == 64
        assert holdings.embeddings[0, 0] == holdings.heads[0, 0] == 1
        assert holdings.heads_in_flight[0, 0] == 1


def test_dualpipe_holds_stages_of_both_directions() -> None:
    """Twice the parameters, and both ends of the pipeline have embedding and head."""
    layout = layout_of("dualpipe", 4, 2)
    holdings = holdings_of(setting_of(8), layout, build_schedule("dualpipe", 4, 8, 2))
    assert holdings.layers.sum() == 2 * MODEL.num_layers
    assert holdings.embeddings[:, 0].tolist() == holdings.heads[:, 0].tolist() == [1, 0, 0, 1]


def test_1f1b_by_hand() -> None:
    """Four ranks of 16 layers: 4, 3, 2, 1 micro-batches; the logits of one."""
    layout = layout_of("1f1b", 4, 1)
    holdings = holdings_of(setting_of(8), layout, build_schedule("1f1b", 4, 8, 1))
    assert holdings.in_flight[0, :, 0].tolist() == [64, 48, 32, 16]
    assert holdings.heads_in_flight[:, 0].tolist() == [0, 0, 0, 1]
    gpipe = holdings_of(setting_of(8), layout_of("gpipe", 4, 1), build_schedule("gpipe", 4, 8, 1))
    assert gpipe.heads_in_flight[3, 0] == 8


def test_kinds_are_counted_where_they_live() -> None:
    """A network whose first layer is dense: only the first rank has it."""
    experts = {"num_experts": 4, "experts_per_token": 1, "ffn_size": 64, "dense_layers": [0]}
    model = Model.model_validate(MODEL.model_dump() | {"experts": experts})
    setting = Setting(model, CPU, 64, 8, Stack())
    layout = layout_of("1f1b", 4, 1)
    holdings = holdings_of(setting, layout, build_schedule("1f1b", 4, 8, 1))
    assert holdings.layers[:, :, 0].tolist() == [[1, 0, 0, 0], [15, 16, 16, 16]]
