"""Predicted memory of pipeline ranks against what two of them hold, with several micro-batches."""

import numpy as np
import pytest

from benchmarks.step_memory import step_peak_bytes
from paceline.comm.rendezvous import Ranks
from paceline.config.job import Job
from paceline.config.model import Model
from paceline.config.stack import Stack
from paceline.plan.memory import memory_bytes
from paceline.plan.memory.holdings import holdings_of
from paceline.plan.memory.split_backward import bytes_left_to_weights
from paceline.plan.points import Points, Setting
from paceline.plan.price.pipelined import schedule_for
from tests.parallel.training import job_of
from tests.ranks import run_ranks

SHAPE = (
    "model.vocab_size=256", "model.hidden_size=256", "model.ffn_size=768", "model.num_layers=4",
    "model.num_heads=4", "model.num_kv_heads=4", "model.head_dim=64", "model.max_seq_len=64",
    "train.seq_len=64",
    "layout.pp=2", "layout.precision=fp32", "layout.micro_batch=2", "layout.split=[2,2]",
)  # fmt: skip
GPIPE = (*SHAPE, "layout.schedule=gpipe", "train.global_batch=8")
SPLIT = (*SHAPE, "layout.schedule=zb_h1", "train.global_batch=4")


def _peaks(rank: int, world_size: int, cases: list[tuple[str, ...]]) -> list[float]:
    """Bytes that this rank holds at most in a step of each case."""
    ranks = Ranks(rank, world_size, rank, world_size)
    return [step_peak_bytes(job_of(world_size, case), ranks, times=1) for case in cases]


def _setting(job: Job) -> tuple[Setting, Points]:
    assert isinstance(job.model, Model)
    setting = Setting(job.model, job.cluster, job.train.seq_len, job.train.global_batch, Stack())
    return setting, Points.of([job.layout], setting)


def _predicted(job: Job) -> np.ndarray:
    setting, points = _setting(job)
    holdings = holdings_of(setting, job.layout, schedule_for(setting, job.layout))
    return sum(memory_bytes(setting, points, holdings).values())[:, 0]


def _peaks_of_shards(rank: int, world_size: int, cases: list[tuple[str, ...]]) -> list[float]:
    """As `_peaks`, of the least of several steps: gloo's threads free some buffers unseen."""
    ranks = Ranks(rank, world_size, rank, world_size)
    return [step_peak_bytes(job_of(world_size, case), ranks) for case in cases]


def test_stages_of_shards_hold_what_is_predicted() -> None:
    """Each degree holds less than the one before, by what is predicted. Stages of four blocks: of
    fewer ZeRO-3 has all at once, the one in use and the one ahead."""
    deep = (*SHAPE, "model.num_layers=8", "layout.split=[4,4]", "train.global_batch=16")
    cases = [
        (*deep, "layout.fsdp=2", f"layout.zero={zero}", f"layout.schedule={schedule}")
        for zero, schedule in ((1, "1f1b"), (2, "1f1b"), (3, "1f1b"), (2, "zb_h1"))
    ]
    measured = run_ranks(_peaks_of_shards, 4, cases)
    for index, case in enumerate(cases):
        # Ranks 0 and 2 are the first of each stage.
        of_stages = [measured[rank][index] for rank in (0, 2)]
        # At ZeRO-3 3.1 % more is predicted than was seen.
        close = 0.035 if case[-2] == "layout.zero=3" else 0.03
        predicted = _predicted(job_of(4, case)).tolist()
        assert predicted == pytest.approx(of_stages, rel=close), case[-2:]
    first, second, third = measured[0][:3]
    assert third < 0.9 * second < 0.9 * 0.97 * first


def test_ranks_hold_what_is_predicted() -> None:
    """GPipe, whose peak has no gradients yet, and a schedule that splits backward passes."""
    cases = [GPIPE, SPLIT]
    measured = run_ranks(_peaks, 2, cases)
    for index, case in enumerate(cases):
        of_ranks = [measured[rank][index] for rank in range(2)]
        assert _predicted(job_of(2, case)).tolist() == pytest.approx(of_ranks, rel=0.03)


def test_halves_leave_gradients_of_results() -> None:
    """By hand, of a block: results of seven products and of two norms."""
    setting, points = _setting(job_of(2, SPLIT))
    numbers = 4 * 256 + 2 * 768 + 256 + 2 * 256
    assert bytes_left_to_weights(setting, points)[0, 0] == 2 * 64 * 4 * numbers
    assert not bytes_left_to_weights(*_setting(job_of(2, (*SPLIT, "layout.recompute=full")))).any()
