"""Copies of a state in a rank's memory: damage is found before it is gone on from."""

from dataclasses import replace

import pytest
import torch

from paceline.train.checkpoint.held import HeldState
from paceline.train.checkpoint.loading import load
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.checkpoint.memory import recover


def state():
    return {"model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}, "count": 3}


def held():
    """As after a round of local updates."""
    copied = HeldState.of(5, state(), {"step": 5}, copy=True, history=((1, 0),))
    return replace(copied, kind="own")


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_copy_that_was_sealed_and_changed_since_is_not_gone_on_from(
    is_sealed, is_damaged, tmp_path
):
    copied = held()
    if is_sealed:
        copied.seal()
        assert all(piece.checksum is not None for piece in copied.pieces)
    if is_damaged:
        copied.pieces[0].tensor.view(torch.uint8).reshape(-1)[3] ^= 1
    room = {"model": {name: torch.empty_like(each) for name, each in state()["model"].items()}}
    ranks = LockstepRanks.alone()
    found = recover(
        lambda one: load(one, {**room, "count": 0}, ranks), [copied], ranks, 2, tmp_path
    )
    if is_sealed and is_damaged:
        assert found is None
        return
    assert found is not None
    assert found.step == 5
    assert torch.equal(room["model"]["w"], state()["model"]["w"]) != is_damaged
