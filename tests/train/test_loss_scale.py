"""The loss scale by itself, on one process."""

import torch

from paceline.train.loss_scale import LossScale

CPU = torch.device("cpu")
OVERFLOWED, GOOD = torch.tensor(True), torch.tensor(False)


def test_a_scale_halves_where_it_overflows_and_a_saved_one_goes_on():
    scale = LossScale(CPU, enabled=True)
    for _ in range(16):
        scale.update(OVERFLOWED)
    assert scale.value.item() == 1.0  # small as it is, it was found by 16 overflows
    scale.update(GOOD)
    resumed = LossScale(CPU, enabled=True)
    resumed.load_state_dict(scale.state_dict())
    assert resumed.state_dict() == scale.state_dict()


def test_a_scale_saved_by_a_precision_without_one_is_left_alone():
    scale = LossScale(CPU, enabled=True)
    first = scale.value.item()
    scale.load_state_dict(LossScale(CPU, enabled=False).state_dict())
    assert scale.value.item() == first
