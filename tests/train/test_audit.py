"""Audits: equal bits where all is well, and the rank by name where one bit of one is flipped."""

import dataclasses
import json

import pytest
import torch

from paceline.config.errors import InputError
from paceline.observe.run import Run
from paceline.train.audit import Auditor, Verdict, checksum, verdict
from paceline.train.start import must_be_auditable
from tests.command_line import losses, paceline, write_tiny_job
from tests.command_line import ranks as on_ranks
from tests.ranks import run_ranks
from tests.train.reshard_cases import job_of, trainer_of

BAD = 1


class _Flip(torch.autograd.Function):
    """The lowest bit of what comes back is another one."""

    @staticmethod
    def forward(context, loss):
        return loss.view_as(loss)

    @staticmethod
    def backward(context, gradient):
        return (gradient.view(torch.int32) ^ 1).view(torch.float32)


def _audit(rank, num_ranks, folder, settings, flipped):
    """What a rank's auditor says before step 2; `flipped`: which passes of rank BAD are wrong."""
    trainer = trainer_of(folder, rank, num_ranks, settings)
    passes, loss, calls = trainer.passes, trainer.task.loss, []

    def faulty(module, micro_batch):
        calls.append(None)
        is_wrong = rank == BAD and (flipped == "all" or len(calls) in flipped)
        given = loss(module, micro_batch)
        return _Flip.apply(given) if is_wrong else given

    passes.task = dataclasses.replace(trainer.task, loss=faulty)
    said = []
    auditor = Auditor(trainer, Run(folder), said.append)
    found = auditor.audit_if_due(2, next(trainer.task.steps_from(0)))
    assert all(parameter.grad is None for parameter in trainer.module.parameters())
    return found, said


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 300)
    job_of(tmp_path / "run", 1, ())
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


BOTH = Verdict((0, 1))
CASES = {
    "well": (3, ("layout.dp=3",), (), None),
    "always wrong": (3, ("layout.dp=3",), "all", Verdict((BAD,))),
    "wrong once": (2, ("layout.dp=2",), (1,), Verdict((BAD,))),
    "wrong once as the neighbour": (3, ("layout.dp=3",), (2,), Verdict((BAD,))),
    "always wrong, of two": (2, ("layout.dp=2",), "all", BOTH),
    "shards, well": (2, ("layout.fsdp=2",), (), None),
    "shards, always wrong": (3, ("layout.fsdp=3",), "all", Verdict((BAD,))),
    "shards of weights too": (2, ("layout.fsdp=2", "layout.zero=3"), (2,), Verdict((BAD,))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_flipped_bit_names_the_rank(case, folder):
    num_ranks, settings, flipped, expected = CASES[case]
    settings = (*settings, "elastic.audit_every=2", "train.steps=8")
    found = run_ranks(_audit, num_ranks, folder, settings, flipped)
    assert [verdict for verdict, _ in found] == [expected] * num_ranks
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    named = [None] if expected is None else list(expected.ranks)
    assert [(line["step"], line["rank"], line["ok"]) for line in lines] == [
        (2, rank, expected is None) for rank in named
    ]
    who = "" if expected is None else f"rank {' or '.join(map(str, expected.ranks))} computes other"
    assert who in "".join(found[0][1])


def test_an_audited_run_has_the_same_losses(tmp_path):
    found = {}
    for every in (0, 3):
        folder = tmp_path / str(every)
        folder.mkdir()
        write_tiny_job(folder)
        audited = ("--set", f"elastic.audit_every={every}")
        done = paceline("train", "job.toml", *audited, *on_ranks(3), folder=folder)
        assert done.returncode == 0, done.stderr
        found[every] = losses(folder)
    assert found[0] == found[3]
    text = (folder / "runs/tiny/events.jsonl").read_text()
    audits = [event for event in map(json.loads, text.splitlines()) if event["event"] == "audit"]
    assert [(audit["step"], audit["ok"]) for audit in audits] == [(3, True), (6, True), (9, True)]


def test_who_is_wrong_is_a_pure_function_of_checksums():
    # Three ranks, samples 0 to 2: rank -> own, neighbour's; then own again, of the one after.
    well, again = [[10, 11], [11, 12], [12, 10]], [[10, 12], [11, 10], [12, 11]]
    assert verdict([[10, 11], [98, 99], [12, 10]], [[10, 12], [98, 97], [12, 11]]).ranks == (1,)
    assert verdict([[10, 98], *well[1:]], again).ranks == (0,)
    assert verdict([well[0], [99, 12], well[2]], again).ranks == (1,)
    assert verdict(well, [[1, 0], [2, 0], [3, 0]]) == Verdict((), is_random=True)
    assert verdict([[10, 11], [11, 99]], [[10, 11], [11, 10]]).ranks == (1,)
    assert verdict([[10, 11], [99, 98]], [[10, 11], [99, 98]]).ranks == (0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checksum_sees_each_bit(dtype):
    values = torch.linspace(-1, 1, 37).to(dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    known = checksum(values)
    for place in (0, 1, 18, 36):
        for bit in range(8 * values.element_size() - 1):
            other = values.clone()
            other.view(bits)[place] ^= 1 << bit
            assert checksum(other) != known
    assert checksum(values.flip(0)) != known


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("layout.tp=2",), "which layout.tp = 2 cuts"),
        (("layout.pp=2",), "which layout.pp = 2 cuts"),
        (("layout.dp=2", "layout.compile=true"), "with layout.compile = true it can't"),
        (("cluster.devices_per_node=1",), "compares ranks, and there is one"),
    ],
)
def test_what_can_not_be_audited_is_refused(settings, why, folder):
    num_ranks = 1 if "cluster.devices_per_node=1" in settings else 2
    job = job_of(folder, num_ranks, (*settings, "elastic.audit_every=2"))
    with pytest.raises(InputError, match=why):
        must_be_auditable(job)
