"""Traces of several ranks are those of one job, or refused (files, pure)."""

import json

import pytest

from paceline.config.errors import InputError
from paceline.observe.recorded import read_account
from tests.observe.test_caveats import H100, MI300
from tests.observe.test_kineto import event, kernel, launch, span

EPOCH_US = 1_767_000_000 * 10**6
WHERE = {"backend": "nccl", "world_size": 4, "nccl_version": "2.22.3"}


def write(folder, rank, *, start_us=EPOCH_US, step=3, nelems=1000, info=None, **header):
    """One step in which a gradient is reduced."""
    said = {"Collective name": "allreduce", "In msg nelems": nelems, "Out msg nelems": nelems}
    said |= {"dtype": "Float", "Group size": 4, "Process Group Ranks": "[0, 1, 2, 3]"}
    at = start_us
    events = [
        span(f"ProfilerStep#{step}", at, at + 1000),
        event("record_param_comms", at + 10, at + 20, **said),
        launch(at + 12, 1),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 50, at + 900, 1, **said),
    ]
    about = {"distributedInfo": {**WHERE, "rank": rank, **(info or {})}, **header}
    (folder / f"trace{rank}.json").write_text(json.dumps({**about, "traceEvents": events}))


def test_ranks_of_one_job_are_read_together(tmp_path):
    for rank in range(4):
        write(tmp_path, rank, start_us=EPOCH_US + 5_000_000 * rank)  # hosts' clocks differ
    assert read_account(tmp_path).ranks == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"info": {"world_size": 8}}, "world_size 4 and 8"),
        ({"info": {"backend": "gloo"}}, "backend nccl and gloo"),
        ({"info": {"nccl_version": "2.17.1"}}, "nccl_version 2.22.3 and 2.17.1"),
        ({"start_us": EPOCH_US + 10**9}, r"recorded 1,000 s apart"),
        ({"start_us": EPOCH_US + 10**10, "step": 70}, r"recorded 10,000 s apart"),
        ({"nelems": 3000}, r"all_reduce over ranks \[0, 1, 2, 3\] has 4,000 and 12,000 bytes"),
        ({"deviceProperties": [MI300]}, "devices of AMD and of NVIDIA"),
        (
            {"info": {"pg_config": [{"pg_desc": "default_pg", "ranks": [0, 1]}]}},
            "their default process groups have other ranks",
        ),
    ],
)
def test_traces_of_two_jobs_are_refused(tmp_path, other, why):
    groups = [{"pg_desc": "default_pg", "ranks": [0, 1, 2, 3]}]
    write(tmp_path, 0, deviceProperties=[H100], info={"pg_config": groups})
    write(tmp_path, 1, **other)
    with pytest.raises(InputError, match=f"are of different jobs \\({why}"):
        read_account(tmp_path)


def test_ranks_of_one_job_have_steps_of_one_length(tmp_path):
    for rank, length in enumerate((100, 250)):
        steps = [span(f"ProfilerStep#{n}", length * n, length * (n + 1)) for n in range(3)]
        text = json.dumps({"traceEvents": steps, "distributedInfo": {"rank": rank}})
        (tmp_path / f"{rank}.json").write_text(text)
    with pytest.raises(InputError, match=r"their steps take 0.0001 and 0.00025 s"):
        read_account(tmp_path)


def test_a_rank_beyond_the_job_is_of_another_one(tmp_path):
    write(tmp_path, 0, info={"world_size": 1})
    write(tmp_path, 1, info={"world_size": 1})
    with pytest.raises(InputError, match="rank 1 in a job of 1"):
        read_account(tmp_path)


def test_times_since_a_boot_and_other_steps_contradict_nothing(tmp_path):
    write(tmp_path, 0, start_us=10**6)
    write(tmp_path, 1, start_us=10**12)
    write(tmp_path, 2, start_us=2 * 10**12, step=70)
    assert len(read_account(tmp_path).steps) == 3
    later = tmp_path / "later"
    later.mkdir()
    write(later, 0)
    write(later, 1, start_us=EPOCH_US + 10**9, step=70)  # another window of the same job
    assert len(read_account(later).steps) == 2
