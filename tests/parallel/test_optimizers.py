"""Every optimizer steps on shards as on one rank, and goes on under another layout (gloo ranks).

Two optimizer steps in fp64 to 1e-10, of dense networks and of experts; then two steps and a
checkpoint under one layout and two more under another, against four of one process; and a run that
goes on under the same layout to the bit. All cases of one number of ranks share a launch.
"""

import functools
import unittest.mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from paceline.config.layout import Layout
from paceline.config.optim import Optim
from paceline.train import update_rules
from paceline.train.checkpoint.leaves import leaves
from paceline.train.data import prepare
from paceline.train.optimizers import build_optimizer
from paceline.train.update_rules import orthogonal
from tests.command_line import write_tiny_job
from tests.parallel.training import FP64, MODELS, assert_equal, run_cases, train
from tests.ranks import run_ranks
from tests.train.checkpoint_cases import assert_same
from tests.train.reshard_cases import FIRST, Leg, go_on, job_of, run_legs, whole_state

NAMES = ("sgd", "lion", "adafactor", "lars", "lamb", "muon", "schedulefree")
LAYOUTS = {
    "shards": (2, "dense", "fsdp=2 zero=3"),
    "columns": (2, "dense, tied", "tp=2"),
    "experts": (2, "experts", "fsdp=2 ep=2"),
    "experts that move": (2, "experts", "dp=2 ep=2 rebalance_every=1"),
    "stages": (2, "dense", "pp=2"),
    "uneven shards": (3, "dense", "fsdp=3"),
    "shards of columns": (4, "dense", "fsdp=2 tp=2"),
}
FOR_ALL = ("shards", "columns", "experts")
ALSO = {
    "adafactor": ("experts that move", "uneven shards", "shards of columns"),
    "lamb": ("shards of columns",),
    "muon": ("experts that move", "stages", "uneven shards", "shards of columns"),
}
CASES = {
    (name, layout): LAYOUTS[layout] for name in NAMES for layout in (*FOR_ALL, *ALSO.get(name, ()))
}


def _optim(name):
    takes_eps = name in ("lamb", "muon", "schedulefree")
    schedule = ("optim.schedule=constant",) if name == "schedulefree" else ()
    return f"optim.name={name}", f"optim.eps={'1e-3' if takes_eps else '1e-8'}", *schedule


@pytest.fixture(scope="module")
def serial():
    @functools.cache
    def of(name, kind):
        return train(0, 1, (*FP64, *MODELS[kind], *_optim(name), "layout.micro_batch=4"))

    return of


@pytest.fixture(scope="module")
def ran():
    """What every case gave, made when the first of its number of ranks is asked for."""

    @functools.cache
    def of(num_ranks):
        same = [case for case, (ranks, _, _) in CASES.items() if ranks == num_ranks]
        settings = [
            (
                *(*FP64, *MODELS[CASES[case][1]], *_optim(case[0]), "layout.micro_batch=4"),
                *(f"layout.{each}" for each in CASES[case][2].split()),
            )
            for case in same
        ]
        return dict(zip(same, run_cases(num_ranks, settings), strict=True))

    return of


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_shards_step_as_one_rank(case, serial, ran):
    num_ranks, kind, _ = CASES[case]
    assert_equal(ran(num_ranks)[case], serial(case[0], kind), 1e-10, case)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of each optimizer's run that changed its layout, of one that stopped and went on in
    one process, and of one that never stopped."""
    root = tmp_path_factory.mktemp("optimizers")
    write_tiny_job(root)
    prepare(job_of(root / "any", 1, ()).data)
    first = []
    for name in NAMES:
        settings = (*FP64, *_optim(name), "layout.micro_batch=2")
        first.append(Leg(root / f"{name}-moved", 2, (*settings, "layout.fsdp=2"), FIRST))
        go_on(0, 1, Leg(root / f"{name}-whole", 1, settings))
        again = Leg(root / f"{name}-again", 1, settings, FIRST)
        go_on(0, 1, again)
        go_on(0, 1, again._replace(stop_after=None))
    run_legs(first)
    run_legs(
        [
            leg._replace(settings=(*leg.settings[:-1], "layout.tp=2"), stop_after=None)
            for leg in first
        ]
    )
    return root


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_under_another_layout(name, folders):
    settings = (*FP64, *_optim(name))
    moved = whole_state(folders / f"{name}-moved", settings)
    assert_same(moved, whole_state(folders / f"{name}-whole", settings), 1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_stopped_goes_on_to_the_bit(name, folders):
    settings = (*FP64, *_optim(name))
    again, whole = (
        leaves(whole_state(folders / f"{name}-{how}", settings)) for how in ("again", "whole")
    )
    assert again.keys() == whole.keys()
    assert len([key for key in again if key.startswith("optimizer.")]) > 10
    for key, leaf in again.items():
        if isinstance(leaf.value, torch.Tensor):
            assert torch.equal(leaf.value, whole[key].value), key


def _orthogonal_elements(rank: int, num_ranks: int) -> tuple[int, list[torch.Tensor]]:
    """How much of five matrices and three of another shape a rank makes orthogonal, and what the
    ranks make of them."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    stream = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=stream) for shape in [(8, 6)] * 5 + [(4, 4)] * 3]
    params = [torch.nn.Parameter(distribute_tensor(each, mesh, [Shard(0)])) for each in wholes]
    optimizer = build_optimizer(
        [(f"{number}.weight", p) for number, p in enumerate(params)],
        Optim(name="muon"),
        Layout(),
    )
    seen = 0

    def counted(matrices, dtype):
        nonlocal seen
        seen += matrices.numel()
        return orthogonal(matrices, dtype)

    with unittest.mock.patch.object(update_rules, "orthogonal", counted):
        for p in params:
            p.grad = p.detach().clone()
        optimizer.step()
    return seen, [p.full_tensor().detach() for p in params]


def test_ranks_share_out_the_products_of_muon():
    (alone, expected), *_ = run_ranks(_orthogonal_elements, 1)
    for seen, found in run_ranks(_orthogonal_elements, 2):
        assert alone == 5 * 48 + 3 * 16
        assert seen == 3 * 48 + 2 * 16
        torch.testing.assert_close(found, expected)
