"""What a teacher adds to a plan: its parameters, its forward passes."""

from dataclasses import replace

import numpy as np
import pytest

from paceline.config.finetune import Distill, Finetune
from paceline.plan.memory import memory_bytes
from paceline.plan.memory.holdings import holdings_of
from paceline.plan.points import Points
from paceline.plan.price.step import predict
from tests.plan.planned import EXPERTS, MODEL, layout, setting

SMALL = MODEL.replace(hidden_size=512, ffn_size=1408, num_layers=4, num_heads=8, num_kv_heads=4)


def taught(teacher=MODEL, student=SMALL, **more):
    finetune = Finetune(objective="distill", distill=Distill(teacher="runs/large", model=teacher))
    return replace(setting(student, **more), finetune=finetune)


def memory(one, of):
    points = Points.of([one], of)
    terms = memory_bytes(of, points, holdings_of(of, one, None))
    return {name: float(np.max(term)) for name, term in terms.items()}


@pytest.mark.parametrize(("fsdp", "dp"), [(16, 1), (1, 16), (8, 2)])
def test_its_parameters_are_sharded_as_the_network_is(fsdp, dp):
    one = layout(fsdp=fsdp, dp=dp, micro_batch=1)
    with_it, without = memory(one, taught()), memory(one, setting(SMALL))
    added = with_it["params"] - without["params"]
    assert added == pytest.approx(2 * MODEL.num_params / fsdp)
    assert with_it["optimizer"] == without["optimizer"]


def test_a_step_takes_a_forward_pass_of_it_longer():
    """Where a network teaches one like itself, about as much as its own forward pass: a third of
    its products."""
    one = layout(fsdp=16, micro_batch=4)
    with_it, without = (predict(each, one) for each in (taught(student=MODEL), setting(MODEL)))
    assert with_it.time_s["matmul"] == pytest.approx(4 / 3 * without.time_s["matmul"], rel=0.02)
    assert with_it.time_s["optimizer"] == without.time_s["optimizer"]
    assert 1.2 < with_it.step_s / without.step_s < 1.5


def test_a_larger_teacher_takes_longer_and_experts_are_not_shared_out():
    one = layout(fsdp=16, micro_batch=4)
    of_experts = MODEL.replace(experts=EXPERTS)
    small, large, mixed = (predict(taught(each), one) for each in (SMALL, MODEL, of_experts))
    assert small.step_s < large.step_s < mixed.step_s
    assert mixed.time_s.get("exposed_comm.ep", 0) == 0
