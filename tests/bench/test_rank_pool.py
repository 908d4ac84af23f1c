"""Starting ranks that measure, and what they exchange (gloo ranks in one start each)."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.bench import collectives
from paceline.bench.clock import RankTimer
from paceline.bench.collectives import OPS, all_groups, checked_exchange, measure_tiers
from paceline.bench.rank_pool import RankProgress, TellProgress, run_on_ranks
from paceline.bench.reference import reference_jobs
from paceline.bench.step import measure_jobs, num_measurements
from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError, RunError
from paceline.config.hardware import Cluster, Device, Tier

CPU = Device(name="here", kind="cpu", precisions=("fp64", "fp32"))


def silence(_news: RankProgress) -> None:
    pass


def _fails(kind: type[Exception], ranks: Ranks, _tell: TellProgress) -> None:
    if ranks.rank == 1:
        raise kind("the second rank says no")
    dist.barrier()


def _dies(ranks: Ranks, _tell: TellProgress) -> None:
    if ranks.rank == 1:
        import os

        os._exit(1)
    dist.barrier()


def _tells(ranks: Ranks, tell: TellProgress) -> tuple[int, int, float]:
    print("nobody sees this")
    tell(RankProgress("part", 1, 2, f"from {ranks.rank}"))
    total = torch.tensor(float(ranks.rank))
    dist.all_reduce(total)
    return ranks.rank, ranks.world_size, total.item()


def test_the_first_rank_is_heard_and_its_result_returned(capfd):
    heard: list[RankProgress] = []
    assert run_on_ranks(3, "cpu", _tells, heard.append) == (0, 3, 3.0)
    assert heard == [RankProgress("part", 1, 2, "from 0")]
    assert "nobody" not in capfd.readouterr().out


def test_a_failing_rank_ends_all_with_its_own_words():
    with pytest.raises(InputError, match="the second rank says no"):
        run_on_ranks(2, "cpu", partial(_fails, InputError), silence)
    with pytest.raises(RunError, match=r"rank 1 failed.*\n.*[\s\S]*ValueError: the second"):
        run_on_ranks(2, "cpu", partial(_fails, ValueError), silence)
    with pytest.raises(RunError, match="rank 1 failed"):
        run_on_ranks(2, "cpu", _dies, silence)


def test_ranks_that_a_launcher_started_must_be_as_many(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match=r"--ranks 2 was asked for but 3 ranks were started"):
        run_on_ranks(2, "cpu", _tells, silence)


def _tiers(ranks: Ranks, _tell: TellProgress) -> tuple[tuple[Tier, ...], list[str], int]:
    said: list[str] = []
    groups = all_groups(ranks)
    clock = RankTimer(ranks, block_s=1e-4, num_blocks=1)
    tiers = measure_tiers(clock, groups, (64, 4096), "a test", said.append)
    return tiers, said, collectives.num_measurements(groups)


def test_every_collective_is_right_and_has_a_curve_for_each_group():
    tiers, said, wanted = run_on_ranks(4, "cpu", _tiers, silence)
    (tier,) = tiers
    assert (tier.name, tier.num_devices) == ("loopback", 4)
    assert set(tier.collectives) == set(OPS)
    assert len(said) == wanted == 12
    for curves in tier.collectives.values():
        assert [curve.num_ranks for curve in curves] == [2, 4]
        for curve in curves:
            assert curve.bytes == (64.0, 4096.0)
            assert all(0 < seconds < 10 for seconds in curve.seconds)


def _two_nodes(ranks: Ranks, _tell: TellProgress) -> tuple[Tier, ...]:
    """Four ranks that take themselves for two on each of two nodes."""
    pretended = Ranks(ranks.rank, 4, ranks.rank % 2, 2)
    clock = RankTimer(pretended, block_s=1e-4, num_blocks=1)
    return measure_tiers(clock, all_groups(pretended), (64,), "a test", lambda _what: None)


def test_across_nodes_a_group_has_one_rank_of_each():
    inside, across = run_on_ranks(4, "cpu", _two_nodes, silence)
    assert (inside.num_devices, across.num_devices) == (2, 4)
    assert [curve.num_ranks for curve in across.collectives["all_reduce"]] == [2]


def _wrong(ranks: Ranks, _tell: TellProgress) -> None:
    right = dist.all_reduce

    def forgetful(tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> object:
        return right(torch.zeros(1), group=group, async_op=async_op)

    dist.all_reduce = forgetful
    checked_exchange("all_reduce", all_groups(ranks)[0], 4, ranks.device)


def test_a_collective_that_lies_is_found():
    with pytest.raises(RunError, match="all_reduce among 2 ranks of 32 bytes gave a wrong result"):
        run_on_ranks(2, "cpu", _wrong, silence)


def _reference_steps(ranks: Ranks, _tell: TellProgress) -> tuple[list[tuple[str, float]], int, int]:
    cluster = Cluster(device=CPU, devices_per_node=2, num_nodes=1)
    jobs = [
        job
        for job in reference_jobs(cluster)
        if job.name in ("narrow", "fsdp-2-plain", "pp-2-plain")
    ]
    said: list[str] = []
    found = measure_jobs(ranks, jobs, num_rounds=2, steps_per_round=2, say=said.append)
    assert all(len(each.steps_s) == 4 for each in found)
    figures = [(each.job.name, each.step_s) for each in found]
    return figures, len(said), num_measurements(len(jobs), 2)


def test_jobs_are_stepped_in_turns():
    found, said, wanted = run_on_ranks(2, "cpu", _reference_steps, silence)
    assert said == wanted
    assert [name for name, _ in found] == ["narrow", "fsdp-2-plain", "pp-2-plain"]
    assert all(0 < seconds < 30 for _, seconds in found)


def test_reference_jobs_use_every_axis_that_there_are_ranks_for():
    def names(inside: int, nodes: int = 1) -> list[str]:
        cluster = Cluster(device=CPU, devices_per_node=inside, num_nodes=nodes)
        return [job.name for job in reference_jobs(cluster)]

    def whole_and_pairs(fsdp: int, others: int) -> list[str]:
        sizes = (("fsdp", fsdp, "deep"), *((axis, others, "deep") for axis in ("tp", "pp")))
        named = [(f"{axis}-{size}-plain", f"{axis}-2-{shape}") for axis, size, shape in sizes]
        return [name for pair in (*named, (f"cp-{others}-plain", "cp-2-long")) for name in pair]

    assert len(names(1)) == 8
    assert names(6)[8:] == whole_and_pairs(6, 6)
    assert names(4, 2)[8:] == whole_and_pairs(8, 4)


def test_nothing_is_left_behind(tmp_path: Path):
    run_on_ranks(2, "cpu", partial(_leaves_its_id, str(tmp_path)), silence)
    for file in tmp_path.iterdir():
        assert not Path(f"/proc/{file.name}").exists()


def _leaves_its_id(folder: str, _ranks: Ranks, _tell: TellProgress) -> None:
    import os

    (Path(folder) / str(os.getpid())).touch()
