"""What recomputing adds to a step, and what the head takes, which never is: pure functions."""

import numpy as np
import pytest

from paceline.config.layout import Layout
from paceline.config.stack import Stack
from paceline.plan.points import Points
from paceline.plan.price.step import predict
from paceline.plan.work import head_work
from tests.plan.planned import MODEL, layout, setting


def recompute_s(vocab_size: int, **axes: object) -> float:
    one = setting(MODEL.replace(vocab_size=vocab_size))
    plan: Layout = layout(**{"recompute": "full", **axes})
    return predict(one, plan).time_s["recompute"]


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_blocks_are_computed_again_and_neither_embedding_nor_head(recompute: str) -> None:
    few, many = (recompute_s(vocab, recompute=recompute) for vocab in (1024, 131072))
    assert few == pytest.approx(many, rel=1e-12)
    assert few > 0


def test_blocks_that_recompute_are_counted() -> None:
    half = recompute_s(1024, recompute_layers=MODEL.num_layers // 2)
    assert half == pytest.approx(recompute_s(1024) / 2)


def test_a_loss_in_steps_goes_over_the_logits_more_often() -> None:
    """Eight passes in fp32 where log-softmax has two; backward two where it has three."""
    ours, steps = (
        head_work(one, Points.of([layout()], one))
        for one in (setting(), setting(stack=Stack(steps_loss=True)))
    )
    logits = 2048 * MODEL.vocab_size
    moved = [sum(float(np.sum(s.num_bytes)) for s in work.sweeps) for work in (ours, steps)]
    assert moved[1] - moved[0] == logits * 4 * ((8 - 2) + (2 - 3))
