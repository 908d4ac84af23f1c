"""Evening out the load of experts: biases follow the loads of all ranks, and experts that change
ranks change nothing that is computed (gloo ranks against one process)."""

import torch

from paceline.comm.rendezvous import Ranks
from paceline.parallel.ep import expert_layers
from tests.parallel.training import (
    FP64,
    MODELS,
    job_of,
    micro_batches,
    trainer_of,
)
from tests.ranks import run_ranks

EXPERTS = (*FP64, *MODELS["experts"], "layout.micro_batch=2")
STEPS = 3
LAYOUTS = (("layout.dp=2", "layout.ep=2"), ("layout.tp=2",), ("layout.pp=2",), ("layout.cp=2",))


def _after_steps(rank, world_size, overrides):
    job = job_of(world_size, overrides)
    trainer = trainer_of(job, Ranks(rank, world_size, rank, world_size))
    for step in range(STEPS):
        trainer.step(step, micro_batches(step, job, rank))()
    return {
        name.removeprefix("0."): (layer.choice_bias, layer.slot_of_expert)
        for name, layer in trainer.module.named_modules()
        if layer in expert_layers(trainer.module)
    }


def _after_steps_each(rank, world_size, cases):
    return [_after_steps(rank, world_size, case) for case in cases]


def _plain(name):
    return name.replace("module.", "").replace("_checkpoint_wrapped_", "")


def test_biases_are_those_of_one_process_on_every_layout():
    serial = _after_steps(0, 1, EXPERTS)
    assert all(bias.abs().max() > 0.009 for bias, _ in serial.values()), "loads must be uneven"
    per_rank = run_ranks(_after_steps_each, 2, [(*EXPERTS, *layout) for layout in LAYOUTS])
    for results in per_rank:
        for layout, layers in zip(LAYOUTS, results, strict=True):
            assert layers, layout
            for name, (bias, _) in layers.items():
                expected, _ = serial[_plain(name)]
                assert torch.equal(bias, expected), (layout, name)


def test_experts_do_change_ranks():
    """That they compute the same: "experts that move" in tests/parallel/test_combinations.py."""
    rebalanced = [
        (*EXPERTS, "layout.rebalance_every=1", *layout)
        for layout in (("layout.dp=2", "layout.ep=2"), ("layout.fsdp=2", "layout.ep=2"))
    ]
    for layers in run_ranks(_after_steps_each, 2, rebalanced)[0]:
        slots = [slot_of_expert for _, slot_of_expert in layers.values()]
        assert any(not torch.equal(each, torch.arange(len(each))) for each in slots)


def _copied(rank, world_size, overrides):
    """The copied experts of each layer, and the share of tokens that stayed, by step."""
    job = job_of(world_size, overrides)
    trainer = trainer_of(job, Ranks(rank, world_size, rank, world_size))
    found = []
    for step in range(5):
        sent = trainer.step(step, micro_batches(step, job, rank))().comm
        copied = [layer.copied for layer in expert_layers(trainer.module)]
        chosen = [[] if each is None else each.tolist() for each in copied]
        found.append((chosen, sent["ep.stayed"]))
    return found


def test_hot_experts_are_chosen_anew_and_alike_on_all_ranks():
    """First after the first step, then after each third; their tokens stay."""
    hot = "comm.ep.hot_experts=2", "comm.ep.hot_every=3"
    overrides = (*EXPERTS, "layout.dp=2", "layout.ep=2", *hot)
    one, other = run_ranks(_copied, 2, overrides)
    chosen = [experts for experts, _ in one]
    assert chosen == [experts for experts, _ in other]
    assert any(experts for experts in chosen[0])
    assert chosen[0] == chosen[1]
    assert chosen[1] != chosen[2]
    assert chosen[2] == chosen[3] == chosen[4]
    # Half of them stay anyway. The second step is the first with copies.
    before, after, *_ = [(a + b) / 2 for (_, a), (_, b) in zip(one, other, strict=True)]
    assert after > before
