"""What compressed and rare exchanges keep in memory: the planner's bytes against the tensors that
gloo ranks have more than those which exchange everything exactly."""

import gc

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.comm.rendezvous import Ranks
from paceline.plan.memory.comm_state import comm_state_bytes
from paceline.plan.memory.holdings import holdings_of
from paceline.plan.memory.parameter_counts import counts_of
from paceline.plan.points import Points, Setting
from paceline.train.passes import schedule_of
from tests.parallel.training import FP32, job_of, micro_batches, trainer_of
from tests.ranks import run_ranks

# Large enough that what fills payloads up is little.
SIZES = (
    "model.hidden_size=64", "model.ffn_size=256", "model.head_dim=8", "model.num_layers=2",
    "comm.compress_from=1",
)  # fmt: skip
LAYOUTS = {
    "one rank": (1, ()),
    "replicas": (2, ("layout.dp=2",)),
    "shards": (2, ("layout.fsdp=2", "layout.zero=3")),
    "replicas of shards": (4, ("layout.dp=2", "layout.fsdp=2", "layout.zero=2")),
    "replicas of stages": (4, ("layout.dp=2", "layout.pp=2", "layout.micro_batch=6")),
    "shards of nodes": (
        4,
        ("layout.fsdp=4", "layout.zero=3", "cluster.num_nodes=2", "cluster.devices_per_node=2"),
    ),
}
INT8 = "comm.fsdp.compress=int8"
MEETINGS = ("comm.local.method=diloco", "comm.local.every=1", "comm.local.compress=int8")
KEPT = {
    "int8 between replicas": ("replicas", ("comm.dp.compress=int8",)),
    "int4 between replicas": ("replicas", ("comm.dp.compress=int4",)),
    "gradients of shards": ("shards", (INT8,)),
    "both ways of shards": ("shards", (INT8, "comm.fsdp.compress_weights=int8")),
    "gradients of nodes": ("shards of nodes", (INT8, "comm.fsdp.algorithm=hierarchical")),
    "int8 between replicas of shards": ("replicas of shards", ("comm.dp.compress=int8",)),
    "int8 between replicas of stages": ("replicas of stages", ("comm.dp.compress=int8",)),
    "workers": ("one rank", ("layout.dp=2", *MEETINGS)),
    "workers of shards": ("shards", ("layout.dp=2", *MEETINGS)),
}


def _job(layout, more=()):
    num_ranks, settings = LAYOUTS[layout]
    num_workers = 2 if "layout.dp=2" in more else 1
    return job_of(num_workers * num_ranks, [*FP32, *SIZES, *settings, *more])


def _held_bytes(rank, world_size, jobs):
    """Bytes of the tensors that a step of each Job leaves: by its name."""
    return {name: _after_a_step(job, rank) for name, job in jobs}


def _after_a_step(job, rank):
    num_ranks, of_node = job.layout.num_ranks, job.cluster.devices_per_node
    place = Ranks(rank % num_ranks, num_ranks, rank % of_node, of_node)
    before = _alive_bytes()
    trainer = trainer_of(job, place)
    trainer.step(0, micro_batches(0, job, place.rank))
    return _alive_bytes() - before


def _alive_bytes():
    gc.collect()
    alive = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    storages = [each.untyped_storage() for each in alive if not isinstance(each, DTensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.fixture(scope="module")
def held():
    jobs = {name: _job(name) for name in LAYOUTS}
    jobs |= {name: _job(*kept) for name, kept in KEPT.items()}
    found = {}
    for num_ranks in (2, 4):
        mine = [each for each in jobs.items() if max(2, each[1].layout.num_ranks) == num_ranks]
        found |= run_ranks(_held_bytes, num_ranks, mine)[0]
    return found


def _predicted(job):
    setting = Setting.of(job)
    points = Points.of([job.layout], setting)
    counts = counts_of(setting, points, holdings_of(setting, job.layout, schedule_of(job)))
    return float(comm_state_bytes(setting, points, counts).ravel()[0])


@pytest.mark.parametrize("name", KEPT)
def test_the_planner_knows_what_exchanges_keep(held, name):
    layout, more = KEPT[name]
    predicted = _predicted(_job(layout, more))
    assert predicted == pytest.approx(held[name] - held[layout], rel=0.05)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_sums_keep_nothing(layout):
    assert _predicted(_job(layout)) == 0
