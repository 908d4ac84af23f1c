"""Real trial rounds: two gloo ranks take turns, run out of memory, die and hang; and teams over a
store.

The slowest tests of tune: each start of ranks takes a second or two.
"""

import json
import os
import threading
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from paceline.bench.measure import BenchRequest as Measurements
from paceline.bench.rank_pool import RankProgress
from paceline.comm.rendezvous import Ranks
from paceline.config.errors import RunError
from paceline.observe.run import Run
from paceline.tune import trial_round
from paceline.tune.candidates import predicted
from paceline.tune.measurer import RealMeasurer, groups
from paceline.tune.team import GivenTeam, LocalTeam
from paceline.tune.trial_round import RoundRequest, RoundResult
from tests.tune.jobs import CLUSTER, figure, job


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Something to learn, in bytes: no tokenizer is trained."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    return folder


def real(one, folder: Path):
    """The Job on that text."""
    data = one.data.replace(
        source=str(folder / "text.txt"), tokenizer="bytes", cache_dir=str(folder / "cache")
    )
    return one.replace(data=data)


def test_jobs_take_turns_and_the_fastest_is_kept_as_a_run(text, tmp_path):
    """Sixteen micro-batches with everything computed twice are slower than one."""
    slow, quick = (
        real(job(samples=32), text),
        real(job(samples=32, micro_batch=16, recompute="none", bucket_mib=1.0), text),
    )
    candidates = [predicted(slow, "slow"), predicted(quick, "quick")]
    measurer = RealMeasurer(LocalTeam(2, "cpu"), 1e9)
    said: list[tuple[int, str]] = []
    results = measurer.measure(candidates, tmp_path, lambda at, what: said.append((at, what)))
    assert results[1].versus[0] < 0 == results[0].versus[0]
    assert len(results[0].steps_s) >= 3
    assert said[:2] == [(0, "set up"), (1, "set up")]
    assert said[-1] == (1, "profile")
    run = Run(tmp_path)
    assert run.job() == quick
    assert len(list(run.trace_folder.glob("rank*-step*.json.gz"))) == 2
    profiled = [line for line in run.metrics() if line["profiled"]]
    assert len(profiled) == 3
    assert sum(profiled[0]["terms"].values()) == pytest.approx(profiled[0]["step_time_s"])


def _round_of_different_clocks(request: RoundRequest, ranks: Ranks, tell) -> RoundResult:
    """Each rank's own clock names another Job as the fastest; both say which one they profile."""

    def profiled(ready, folder: Path, ranks: Ranks):
        (folder / f"rank{ranks.rank}").write_text(str(ready.job.layout.micro_batch))
        return {}

    with (
        patch.object(trial_round, "leader", lambda _rounds: ranks.rank),
        patch.object(trial_round, "_profiled", profiled),
    ):
        return trial_round.run_trial_round(request, ranks, tell)


def test_all_ranks_profile_the_job_that_the_first_one_found_fastest(text, tmp_path):
    """Otherwise each would wait for the other one's steps."""
    jobs = tuple(real(job(samples=32, micro_batch=size), text) for size in (8, 16))
    work = partial(_round_of_different_clocks, RoundRequest(jobs, tmp_path))
    assert LocalTeam(2, "cpu").run(work, lambda _news: None, 30).fastest == 0
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["8", "8"]


def test_memory_that_is_not_there_is_a_result(text):
    """A rank may take its share of the host's memory, and no more; the other Job is measured."""
    small = CLUSTER.replace(device=CLUSTER.device.replace(memory_bytes=figure(1.5e8)))
    fits = real(job(small, samples=8, micro_batch=1), text)
    lacks = real(job(small, samples=2048, micro_batch=1024, recompute="none"), text)
    measurer = RealMeasurer(LocalTeam(2, "cpu"), 1e12)
    said: list[tuple[int, str]] = []
    began = time.monotonic()
    results = measurer.measure(
        [predicted(lacks, "large"), predicted(fits, "small")],
        None,
        lambda at, what: said.append((at, what)),
    )
    assert results[0].outcome == "out of memory"
    assert "allocate memory" in results[0].note
    assert results[1].outcome == "measured"
    assert results[1].versus is None  # they had no turns together
    assert time.monotonic() - began < 120


class FakeTeam:
    """Ranks that take a second for each step, whose trial round ends at the last Job where it has
    `most` or more for company."""

    def __init__(self, most: int) -> None:
        self.most, self.rounds = most, []

    def run(self, work, hear, silence_s, *, alone=False):
        request = work.args[0]
        self.rounds.append(len(request.jobs))
        last = len(request.jobs) - 1
        hear(RankProgress("heat", last, len(request.jobs), "turn"))
        if request.jobs[-1].layout.tp == 2 and last >= self.most:
            raise RunError("rank 1 failed while it measured:\nOutOfMemoryError: no room")
        return RoundResult(tuple(((1.0,),) * 3 for _ in request.jobs), 0, {}, {})


@pytest.mark.parametrize(("most", "outcome"), [(2, "measured"), (1, "out of memory")])
def test_who_fails_in_company_is_tried_beside_the_first_alone(most, outcome, tmp_path):
    log = tmp_path / "failures.log"
    team = FakeTeam(most)
    jobs = [job(), job(recompute="none"), job(dp=1, tp=2)]
    measurer = RealMeasurer(team, 1e12, log)
    results = measurer.measure([predicted(one, "") for one in jobs], None, lambda _at, _what: None)
    assert team.rounds[:3] == [3, 2, 2]
    assert [one.outcome for one in results.values()].count("measured") == 2 + (most == 2)
    assert results[2].outcome == outcome
    assert (results[2].versus is not None) == (outcome == "measured")
    assert "no room" in log.read_text()


def test_one_device_has_its_share_of_the_cores_and_nobody_to_wait_for(text):
    from paceline.tune.goal import one_device

    measurer = RealMeasurer(LocalTeam(2, "cpu"), 1e9)
    assert 0 < measurer.alone(real(one_device(job()), text)) < 10


def test_what_doesnt_fit_together_runs_by_itself():
    assert list(groups([1, 1, 1], 10)) == [[0, 1, 2]]
    assert list(groups([4, 4, 4, 4], 10)) == [[0, 1], [0, 2], [0, 3]]
    assert list(groups([4, 8, 2], 10)) == [[1], [0, 2]]


def _hangs(ranks: Ranks, tell) -> None:
    tell(RankProgress("heat", 0, 1, "turn"))
    if ranks.rank == 1:
        time.sleep(600)
    dist.barrier()


def _dies(ranks: Ranks, tell) -> None:
    if ranks.rank == 1:
        os._exit(3)
    dist.barrier()


def _adds(ranks: Ranks, tell) -> int:
    return ranks.world_size


def test_ranks_that_hang_are_ended_and_their_team_goes_on():
    team = LocalTeam(2, "cpu")
    began = time.monotonic()
    with pytest.raises(RunError, match="no rank said anything for 2 s"):
        team.run(_hangs, lambda _news: None, 2.0)
    assert time.monotonic() - began < 60
    assert team.run(_adds, lambda _news: None, 60.0) == 2


def test_places_that_a_launcher_gave_go_on_after_a_rank_died():
    """Two processes would each have a place; here two threads have, and start a rank each."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    works = {"_dies": lambda _: _dies, "_adds": lambda _: _adds}
    address = ("127.0.0.1", store.port)
    teams = [GivenTeam(Ranks(at, 2, at, 2), store, address, works) for at in (0, 1)]
    lead, thread = teams[0], threading.Thread(target=teams[1].follow)
    thread.start()
    try:
        with pytest.raises(RunError, match="another host failed"):
            lead.run(_dies, lambda _news: None, 60.0)
        assert lead.run(_adds, lambda _news: None, 60.0) == 2
        assert lead.run(_adds, lambda _news: None, 60.0, alone=True) == 1
    finally:
        lead.close()
        thread.join(60)
    assert not thread.is_alive()


def test_what_places_ask_of_each_other_is_text_that_reads_back_equal(tmp_path):
    for request in (RoundRequest((job(), job(samples=32)), tmp_path), RoundRequest((job(),))):
        assert RoundRequest.of_plain(json.loads(json.dumps(request.plain()))) == request
    asked = Measurements(CLUSTER, ("device", "step"), "by hand", quick=True)
    assert Measurements.of_plain(json.loads(json.dumps(asked.plain()))) == asked
