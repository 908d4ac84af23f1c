"""Predicted memory of pipeline ranks against what two of them hold, with several micro-batches."""

from dataclasses import replace

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


@pytest.mark.parametrize("states", ["shards", "buffers"])
def test_in_pipelines_every_degree_holds_the_same_gradients(states: str) -> None:
    """What a pass doesn't exchange stays whole, as it is priced: gradients until the last
    micro-batch, and what was gathered. Between steps ZeRO-3 in shards is another system's."""
    job = job_of(4, (*GPIPE, "layout.fsdp=2", "layout.param_dtype=bf16", "layout.precision=bf16"))
    stack = Stack.model_validate({"states": states, "grad_dtype": "fp32"})
    setting = replace(_setting(job)[0], stack=stack)
    found = []
    for zero in (1, 2, 3) if states == "shards" else (1, 2):
        layout = job.layout.replace(zero=zero)
        holdings = holdings_of(setting, layout, schedule_for(setting, layout))
        terms = memory_bytes(setting, Points.of([layout], setting), holdings)
        found.append({name: np.max(value) for name, value in terms.items()})
    assert all(terms == found[0] for terms in found[1:])


def _predicted(job: Job) -> np.ndarray:
    setting, points = _setting(job)
    holdings = holdings_of(setting, job.layout, schedule_for(setting, job.layout))
    return sum(memory_bytes(setting, points, holdings).values())[:, 0]


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
