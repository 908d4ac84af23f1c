"""The space of layouts (pure): columns are judged as one layout is, and it counts right."""

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.errors import InputError
from paceline.config.feasible import Demand, refusal
from paceline.config.hardware import Cluster, Device, device
from paceline.config.layers import Experts
from paceline.config.layout import PRECISIONS, RECOMPUTE, Layout, LayoutSpec
from paceline.config.model import Model
from paceline.config.schedule import SCHEDULES
from paceline.config.stack import Stack
from paceline.plan.points import Points, Setting
from paceline.plan.resolve import divisors
from paceline.plan.search.space import FREE, SearchConstraints, Space
from paceline.plan.search.tables import allowed, distinct

CPU = Device(name="CPU", kind="cpu", precisions=("fp64", "fp32"))
DENSE = Model(
    vocab_size=512, hidden_size=96, ffn_size=192, num_layers=6, num_heads=12, num_kv_heads=4,
    head_dim=16, max_seq_len=64,
)  # fmt: skip
MIXED = DENSE.replace(
    experts=Experts(
        num_experts=8, experts_per_token=2, ffn_size=64, choice_bias=True, bias_update_speed=0.1,
        dense_layers=(0,),
    )
)  # fmt: skip
MODELS = (DENSE, MIXED)
GPU = device("H100-SXM")


def _setting(model=DENSE, what=GPU, nodes=2, per_node=4, batch=24, seq_len=48) -> Setting:
    cluster = Cluster(device=what, devices_per_node=per_node, num_nodes=nodes)
    return Setting(model, cluster, seq_len, batch, Stack())


def _every_point(space: Space) -> Points:
    return space.points(space.completed(space.pipelined(space.partial_layouts())))


def _refused(setting: Setting, layout: Layout) -> str | None:
    seq_len, batch = setting.seq_len, setting.global_batch
    return refusal(Demand(layout, setting.model, setting.cluster, seq_len, batch))


def _runs(setting: Setting, points: Points) -> np.ndarray:
    """Of each point, whether the rules let it run."""
    columns = {**vars(points), "rebalance_every": 0}
    return np.broadcast_to(allowed(setting, columns, columns), len(points))


def _draw(stream: Random, setting: Setting, num: int) -> Points:
    """Random points, most of them nearly right."""
    ranks = 8
    rows = []
    for _ in range(num):
        axes = dict.fromkeys(("dp", "fsdp", "cp", "tp", "pp"), 1)
        left = ranks if stream.random() < 0.95 else 4
        while left > 1:
            axes[stream.choice([*axes])] *= 2
            left //= 2
        row = axes | {
            "zero": stream.choice([1, 2, 3] if axes["fsdp"] > 1 else [0, 0, 0, 1]),
            "sequence_parallel": axes["tp"] > 1 and stream.random() < 0.7,
            "async_tp": stream.random() < 0.2,
            "ulysses": stream.choice([1, 1, 2, axes["cp"]]),
            "ep": stream.choice([1, 1, 2, 4, 8, 3]) if setting.model.experts else 1,
            "micro_batch": stream.choice([1, 2, 3, 4, 6]),
            "precision": stream.choice([1, 2, 2, 4]),
            "param_dtype": stream.choice([1, 1, 2]),
            "compile": stream.random() < 0.7,
            "optimizer_8bit": stream.random() < 0.3,
            "offload_activations": stream.random() < 0.2,
            "offload_optimizer": stream.random() < 0.2,
            "offload_params": stream.random() < 0.2,
            "recompute": stream.randrange(3),
            "bucket_bytes": 2.0**20,
        }
        row["schedule"] = 0 if axes["pp"] == 1 else stream.randrange(1, len(SCHEDULES))
        row["schedule"] = stream.randrange(9) if stream.random() < 0.05 else row["schedule"]
        wanted = {"zbv": 2, "dualpipev": 2, "dualpipe": 2, "interleaved": 3, "interleaved_zb": 2}
        row["stages_per_rank"] = wanted.get(SCHEDULES[row["schedule"]], 1)
        if stream.random() < 0.1:
            row["stages_per_rank"] = stream.choice([1, 2, 3])
        samples = axes["dp"] * axes["fsdp"] * row["micro_batch"]
        row["num_micro_batches"] = setting.global_batch // samples
        row["recompute_share"] = 1.0 if row["recompute"] else 0.0
        rows.append(row)
    table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return Points.of_table(table, setting)


@given(st.integers(0, 10**6), st.sampled_from(MODELS), st.sampled_from([GPU, CPU]))
def test_columns_of_layouts_are_judged_as_each_layout_is(seed, model, what):
    setting = _setting(model, what)
    space = Space.of(setting)
    points = _draw(Random(seed), setting, 20)
    for index, runs in enumerate(_runs(setting, points)):
        sentence = _refused(setting, space.layout(points, index))
        assert runs == (sentence is None), (sentence, space.layout(points, index))


def test_the_draws_above_hold_both_kinds():
    setting = _setting(MIXED)
    share = _runs(setting, _draw(Random(0), setting, 4000)).mean()
    assert 0.02 < share < 0.5


@pytest.mark.parametrize(("what", "model"), [(GPU, DENSE), (CPU, MIXED)])
def test_all_that_the_space_holds_can_run_and_is_there_once(model, what):
    setting = _setting(model, what)
    space = Space.of(setting, SearchConstraints(free=FREE))
    points = _every_point(space)
    assert len(points) == space.count()
    assert _runs(setting, points).all()
    rows = {name: np.broadcast_to(column, len(points)) for name, column in vars(points).items()}
    assert len(distinct(rows, rows)[0]) == len(points)
    for index in Random(0).sample(range(len(points)), 300):
        layout = space.layout(points, index)
        assert _refused(setting, layout) is None
        again = Points.of([layout], setting)
        for name, column in vars(again).items():
            assert column[0] == pytest.approx(rows[name][index]), (name, layout)


def test_the_space_lacks_nothing_that_can_run():
    """Against every combination of the settings of a small space, each asked by itself."""
    setting = _setting(MIXED, nodes=1, batch=4)
    space = Space.of(setting, SearchConstraints(free=("offload",)))
    points = _every_point(space)
    axes = [
        dict(zip(("dp", "fsdp", "cp", "tp", "pp"), sizes, strict=True))
        for sizes in itertools.product((1, 2, 4), repeat=5)
        if np.prod(sizes) == 4
    ]
    rows = [
        {
            **sizes, "zero": zero, "sequence_parallel": sequence, "ulysses": ulysses, "ep": ep,
            "micro_batch": micro, "schedule": schedule, "stages_per_rank": per_rank,
            "recompute": recompute, "recompute_share": float(recompute > 0), "precision": 2,
            "param_dtype": 1, "num_micro_batches": 4 // (sizes["dp"] * sizes["fsdp"] * micro),
        }
        for sizes, zero, sequence, ulysses, ep, micro, schedule, per_rank, recompute in (
            itertools.product(
                axes, range(4), (False, True), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4),
                range(len(SCHEDULES)), range(1, 7), range(3),
            )
        )
        if (sizes["pp"] > 1) == (schedule > 0)
    ]  # fmt: skip
    switches = ("optimizer_8bit", "async_tp", "compile", "bucket_bytes")
    offloads = ("offload_activations", "offload_optimizer", "offload_params")
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    off = dict.fromkeys((*switches, *offloads), np.array([False]))
    num = _runs(setting, Points.of_table({**columns, **off}, setting)).sum()
    plain = ~points.compile & ~points.offload_activations & ~points.offload_optimizer
    whole = (points.recompute == 0) | (points.recompute_share == 1)
    assert num == (plain & ~points.offload_params & whole).sum() > 1000


def test_fixed_settings_stay_and_bounds_hold():
    layout = LayoutSpec(
        tp=2, recompute="full", recompute_layers=1, micro_batch=2, offload=("optimizer",)
    )
    space = Space.of(_setting(), SearchConstraints(layout, bounds={"pp": (1, 2)}))
    points = _every_point(space)
    assert set(points.tp) == {2}
    assert set(points.micro_batch) == {2}
    assert set(points.pp) == {1, 2}
    assert set(points.recompute) == {RECOMPUTE.index("full")}
    assert points.offload_optimizer.all()
    assert not points.optimizer_8bit.any()
    found = {space.layout(points, index).recompute_layers for index in range(0, len(points), 7)}
    assert found <= {1, "all"}


def test_tensor_parallel_stays_in_the_fast_domain_unless_asked():
    assert max(Space.of(_setting(per_node=2, nodes=4)).meshes["tp"]) == 2
    wide = SearchConstraints(bounds={"tp": (1, 8)})
    assert max(Space.of(_setting(per_node=2, nodes=4), wide).meshes["tp"]) == 4


def test_numerics_are_freed_only_by_name():
    points = _every_point(
        Space.of(_setting(), SearchConstraints(free=("precision", "optimizer_state")))
    )
    assert {PRECISIONS[index] for index in points.precision} == {"fp32", "bf16", "fp16", "fp8"}
    assert set(points.optimizer_8bit) == {False, True}
    points = _every_point(Space.of(_setting()))
    assert {PRECISIONS[index] for index in points.precision} == {"bf16"}
    assert not points.offload_activations.any()


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        ({"free": ("offlod",)}, "did you mean offload"),
        ({"bounds": {"tpp": (1, 2)}}, "did you mean tp"),
        ({"bounds": {"tp": (4, 2)}}, "tp from 4 to 2"),
    ],
)
def test_wrong_wishes_are_refused(constraints, words):
    with pytest.raises(InputError, match=words):
        SearchConstraints(**constraints)


def test_a_thousand_devices_have_more_than_ten_million_layouts():
    seventy = Model(
        vocab_size=128256, hidden_size=8192, ffn_size=28672, num_layers=80, num_heads=64,
        num_kv_heads=8, max_seq_len=8192,
    )  # fmt: skip
    experts = Experts(num_experts=128, experts_per_token=8, ffn_size=1536)
    for model in (seventy, seventy.replace(experts=experts)):
        setting = _setting(model, nodes=128, per_node=8, batch=1024, seq_len=8192)
        assert Space.of(setting, SearchConstraints(free=("offload",))).count() > 10_000_000


@given(st.integers(1, 5000))
def test_divisors(value):
    assert divisors(value) == [part for part in range(1, value + 1) if value % part == 0]
