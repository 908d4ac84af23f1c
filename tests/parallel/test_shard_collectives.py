"""FSDP2's exchanges by algorithms of ours: equal to one process, and the fewest bytes.

On gloo ranks: two launches, each for all of its cases.
"""

import pytest
import torch

from paceline.comm.algorithms import execute
from paceline.comm.rendezvous import Ranks
from paceline.parallel.shard_collectives import ShardAlgorithm, ShardReduceScatter
from tests.parallel.training import (
    FP32,
    FP64,
    STEPS,
    TOLERANCE,
    assert_equal,
    job_of,
    micro_batches,
    run_cases,
    train,
    trainer_of,
)
from tests.ranks import run_ranks

SHALLOW = "model.num_layers=2"
NAMES = ("backend", "ring", "pairwise", "halving_doubling", "hierarchical", "one_shot")
LAYOUTS = {
    2: ("layout.fsdp=2", "layout.zero=3", "layout.micro_batch=4"),
    4: ("layout.dp=2", "layout.fsdp=2", "layout.zero=2", "layout.micro_batch=3"),
}


@pytest.mark.parametrize("num_ranks", LAYOUTS)
def test_every_algorithm_equals_one_process(num_ranks):
    precisions = {name: FP32 if name == "ring" else FP64 for name in NAMES}
    cases = [
        (*precisions[name], SHALLOW, *LAYOUTS[num_ranks], f"comm.fsdp.algorithm={name}")
        for name in NAMES
    ]
    serial = {each: train(0, 1, (*each, SHALLOW, "layout.micro_batch=4")) for each in (FP32, FP64)}
    for name, got in zip(NAMES, run_cases(num_ranks, cases), strict=True):
        assert_equal(got, serial[precisions[name]], TOLERANCE[precisions[name]], name)


def _counted(rank, world_size, ranks_per_node, settings):
    """Losses and gradient norms; values sent by ours; parameters of the network."""
    sent = []
    send = execute.dist.batch_isend_irecv
    isend = execute.dist.isend

    def counting(ops):
        sent.extend(each.tensor.numel() for each in ops if each.op is isend)
        return send(ops)

    execute.dist.batch_isend_irecv = counting
    job = job_of(world_size, settings)
    trainer = trainer_of(job, Ranks(rank, world_size, rank % ranks_per_node, ranks_per_node))
    results = [trainer.step(step, micro_batches(step, job, rank))() for step in range(STEPS)]
    number = sum(each.numel() for each in trainer.module.parameters())
    return [(each.loss, each.grad_norm) for each in results], sum(sent), number


def test_nodes_exchange_hierarchically_and_send_the_least():
    """Four shards on two nodes of two."""
    settings = (*FP64, SHALLOW, "layout.fsdp=4", "layout.zero=1", "layout.micro_batch=3")
    settings += ("comm.fsdp.algorithm=hierarchical",)
    serial = train(0, 1, (*FP64, SHALLOW, "layout.micro_batch=4"))
    for results, sent, number in run_ranks(_counted, 4, 2, settings):
        for (loss, norm), *wanted in zip(results, serial.losses, serial.grad_norms, strict=True):
            assert [loss, norm] == pytest.approx(wanted, rel=1e-10)
        # Zero 1: parameters are gathered and gradients scattered once a step. Parameters of this
        # network are divisible by four, so nothing is padded.
        assert sent == STEPS * 2 * number * 3 // 4


def test_what_fsdp_never_asks_for_is_refused():
    scatter = ShardReduceScatter(ShardAlgorithm("pairwise", 2).reduce)
    with pytest.raises(NotImplementedError, match="a reduce-scatter with"):
        scatter(torch.ones(1), torch.ones(2), None, torch.distributed.ReduceOp.MAX)
