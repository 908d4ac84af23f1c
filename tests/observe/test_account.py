"""Accounts of made-up traces: one rank's tables, two ranks brought together (files, pure)."""

import json

import numpy as np
import pytest

from paceline.config.errors import InputError
from paceline.observe.recorded import read_account
from paceline.observe.terms import AXES, TERM_ID, TERMS
from tests.observe.test_kineto import GLOO, NODE, event, kernel, launch, span, step

US = 1000  # ns


def write(path, *events, **header):
    path.write_text(json.dumps({"traceEvents": list(events), **header}))
    return path


@pytest.fixture
def read(tmp_path):
    def of(*events, **header):
        return read_account(write(tmp_path / "trace.json", *events, **header))

    return of


def rows(account, table, *fields):
    """Rows of a table with names spelled out and times in microseconds."""

    def cell(field, value):
        if field in ("name", "op", "line", "group", "members"):
            return account.names[value] if value >= 0 else None
        if field == "term":
            return TERMS[value]
        return value / US if field.endswith("_ns") else int(value)

    return [tuple(cell(field, row[field]) for field in fields) for row in table]


def python(name, start, end, tid=1):
    return event(name, start, end, "python_function", tid)


# --- one device ---------------------------------------------------------------------------------


def test_gaps_are_named_by_the_thread_that_launched_what_came_next(read):
    account = read(
        step(),
        python("train.py(7): main", 0, 100),
        python("train.py(12): load", 6, 35),
        python("torch/utils/data/dataloader.py(700): __next__", 7, 29),
        span("paceline.gc", 10, 20),
        launch(40, 1),
        kernel("ampere_sgemm_128x64_nn", 50, 60, 1),
        event("aten::item", 60, 90),
        event("cudaStreamSynchronize", 62, 88, "cuda_runtime"),
        event(NODE + "MmBackward0", 61, 80, tid=3),
        launch(70, 2, tid=3),
        kernel("elementwise_kernel", 75, 100, 2),
    )
    assert rows(account, account.gaps, "name", "line", "start_ns", "duration_ns") == [
        ("paceline.step", "train.py(7): main", 0.0, 10.0),
        ("paceline.gc", "train.py(12): load", 10.0, 10.0),
        ("paceline.step", "train.py(12): load", 20.0, 20.0),
        ("cudaLaunchKernel", "train.py(7): main", 40.0, 1.0),
        ("(between kernels)", "train.py(7): main", 41.0, 9.0),
        ("(no operator)", "train.py(7): main", 60.0, 1.0),
        (NODE + "MmBackward0", "train.py(7): main", 61.0, 9.0),
        ("cudaLaunchKernel", "train.py(7): main", 70.0, 1.0),
        ("(between kernels)", "train.py(7): main", 71.0, 4.0),
    ]
    assert account.term_s("host_gap") == pytest.approx(65e-6)
    assert rows(account, account.syncs, "name", "line", "duration_ns", "term") == [
        ("aten::item", "train.py(7): main", 30.0, "other_kernels")
    ]
    assert account.launch_delays_ns.tolist() == [(9 + 4) * US // 2]
    assert account.is_device
    assert account.clocks == {}


def test_reading_a_value_of_the_host_is_no_synchronisation_of_a_device(read):
    account = read(
        step(),
        event("aten::item", 10, 20),
        event("aten::_local_scalar_dense", 11, 19),
        span("paceline.optimizer", 30, 60),
        event("aten::item", 40, 50),
        event("cudaMemcpy", 41, 49, "cuda_runtime"),
        kernel("elementwise_kernel", 60, 100),
    )
    assert rows(account, account.syncs, "name", "term") == [("aten::item", "optimizer")]
    on_cpu = read(step(), event("aten::item", 10, 20), event("aten::_local_scalar_dense", 11, 19))
    assert rows(on_cpu, on_cpu.syncs, "name", "duration_ns") == [("aten::item", 10.0)]


def test_kernels_are_summed_by_step_name_and_operator(read):
    gemm, add = "ampere_sgemm_128x64_nn", "elementwise_kernel"
    events = [
        event("aten::linear", 0, 9),
        event("aten::addmm", 1, 8),
        launch(2, 1),
        launch(4, 2),
        event("aten::add", 10, 20),
        launch(12, 3),
        kernel(gemm, 10, 20, 1),
        kernel(gemm, 15, 30, 2, stream=8),  # beside the other: both count in full
        kernel(add, 30, 35, 3),
        kernel(add, 40, 45, 99),  # nobody knows who launched it
        kernel(add, 120, 130, 98),  # after the last step
    ]
    account = read(step(), *events)
    found = set(rows(account, account.kernels, "name", "op", "term", "count", "total_ns"))
    assert found == {
        (gemm, "aten::addmm", "matmul", 2, 25.0),
        (add, None, "other_kernels.elementwise", 1, 5.0),
        (add, "aten::add", "other_kernels.elementwise", 1, 5.0),
    }


def test_operators_of_a_cpu_are_summed_by_their_own_time(read):
    account = read(
        step(),
        event("aten::linear", 10, 60),
        event("aten::addmm", 20, 60),
        event("aten::linear", 60, 70),
        event("aten::mm", 10, 60, tid=5),  # of another thread
    )
    assert set(rows(account, account.kernels, "name", "op", "term", "count", "total_ns")) == {
        ("aten::linear", "aten::linear", "matmul", 2, 20.0),
        ("aten::addmm", "aten::addmm", "matmul", 1, 40.0),
    }
    assert rows(account, account.gaps, "name", "start_ns", "duration_ns") == [
        ("paceline.step", 0.0, 10.0),
        ("paceline.step", 70.0, 30.0),
    ]
    assert not account.is_device
    assert account.launch_delays_ns.tolist() == [-1]


NCCL = {
    "Collective_name": "_allgather_base",
    "In_msg_nelems": 512,
    "Out_msg_nelems": 1024,
    "dtype": "BFloat16",
    "Group_size": 2,
    "Process_Group_Description": "mesh_fsdp",
    "Process_Group_Ranks": "[0, 1]",
}


def test_what_is_known_of_collectives(read):
    account = read(
        step(200),
        event("aten::mm", 0, 5, Sequence_number=1),
        event("record_param_comms", 10, 20, **NCCL),
        launch(12, 1),
        kernel("ncclDevKernel_Generic", 20, 60, 1, stream=9),
        kernel("ampere_sgemm_128x64_nn", 30, 50),
        event(NODE + "MmBackward0", 60, 70, Sequence_number=1, Fwd_thread_id=1),
        event("aten::mm", 80, 85, Sequence_number=2),
        span(
            "nccl:all_reduce", 90, 99, Input_Dims=[[10, 3], [2]], Input_type=["float", "long int"]
        ),
        launch(91, 2),
        kernel("ncclKernel_SendRecv_RING", 100, 110, 2, stream=9),
        kernel("void dpsk::ep::internode::combine<8>(int4*)", 120, 150, stream=9),
    )
    fields = ("name", "group", "members", "group_size", "bytes", "exposed_ns", "micro_batch")
    assert rows(account, account.collectives, *fields) == [
        ("all_gather", "mesh_fsdp", "[0, 1]", 2, 2048, 20.0, 1),
        ("all_reduce", None, None, 0, 136, 10.0, 2),
        ("combine", None, None, 0, -1, 30.0, 2),
    ]
    assert account.collectives["axis"].tolist() == [AXES.index("fsdp"), -1, AXES.index("ep")]


def test_collectives_that_are_on_their_way_together_share_what_is_exposed(read):
    account = read(
        step(200),
        kernel("ampere_sgemm_128x64_nn", 0, 40),
        kernel("ncclDevKernel_AllReduce", 20, 80, stream=9),  # 20 hidden, 20 alone, 20 of two
        kernel("ncclDevKernel_AllGather", 60, 100, stream=10),  # 20 of two, 20 alone
    )
    assert account.collectives["exposed_ns"].tolist() == [30_000, 30_000]
    assert account.collectives["duration_ns"].tolist() == [60_000, 40_000]


# --- ranks --------------------------------------------------------------------------------------


def gloo_rank(folder, rank, computes_us, shift_us=0, host="a"):
    """A step of 200 us: compute, then an all-reduce that ends at 180 on both ranks."""
    events = [
        step(200),
        event("aten::mm", 0, computes_us),
        event("c10d::allreduce_", computes_us, computes_us + 1),
        span("gloo:all_reduce", computes_us + 2, 180, tid=GLOO),
        event("aten::mul", 180, 200),
    ]
    for one in events:
        one["ts"] += shift_us
    where = {
        "rank": rank,
        "world_size": 2,
        "pg_config": [{"pg_desc": "default_pg", "ranks": [0, 1]}],
    }
    path = folder / f"rank{rank}-step4.json"
    note = {"first_step": 4, "axis": "dp"}
    return write(path, *events, distributedInfo=where, host_name=host, paceline=note)


@pytest.mark.parametrize(("shift_us", "host"), [(0, "a"), (5_000_000, "b"), (-777, "b")])
def test_waiting_for_a_rank_is_told_from_communication(tmp_path, shift_us, host):
    gloo_rank(tmp_path, 0, 100)
    gloo_rank(tmp_path, 1, 150, shift_us, host)
    (tmp_path / "predicted.json.gz").write_text("no trace")
    account = read_account(tmp_path)
    assert account.ranks == (0, 1)
    assert account.clocks[1].offset_ns == -shift_us * US
    terms = [
        {TERMS[term]: ns / US for term, ns in enumerate(row) if ns} for row in account.terms_ns
    ]
    assert terms == [
        {
            "matmul": 100,
            "other_kernels": 20,
            "exposed_comm.dp": 1 + 28,
            "straggler_wait": 50,
            "host_gap": 1,
        },
        {"matmul": 150, "other_kernels": 20, "exposed_comm.dp": 1 + 28, "host_gap": 1},
    ]
    fields = ("rank", "wait_ns", "group", "members", "micro_batch")
    assert rows(account, account.collectives, *fields) == [
        (0, 50.0, "default_pg", "[0, 1]", -1),
        (1, 0.0, "default_pg", "[0, 1]", -1),
    ]
    assert account.steps["start_ns"].tolist() == [0, 0]
    assert account.gaps["start_ns"].tolist() == [101 * US, 151 * US]
    # The end is rank 0's; before the slower rank came, it was that one's time that counted.
    path = rows(account, account.path, "rank", "term", "duration_ns")
    assert set(path) == {
        (0, "exposed_comm.dp", 28.0),
        (0, "other_kernels", 20.0),
        (1, "matmul", 150.0),
        (1, "exposed_comm.dp", 1.0),
        (1, "host_gap", 1.0),
    }


def test_the_last_window_of_a_folder_counts(tmp_path):
    gloo_rank(tmp_path, 0, 100)
    write(tmp_path / "rank0-step30.json", step(50), event("aten::mm", 0, 50))
    account = read_account(tmp_path)
    assert account.step_s() == pytest.approx(50e-6)
    assert account.term_s("matmul", rank=0) == pytest.approx(50e-6)


def test_ranks_that_collide_and_folders_without_traces_are_refused(tmp_path):
    one = write(tmp_path / "a.json", event("aten::mm", 0, 1))
    two = write(tmp_path / "b.json", event("aten::mm", 0, 1))
    with pytest.raises(InputError, match="are both of rank 0; give one trace of each rank"):
        read_account([one, two])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no trace"):
        read_account(tmp_path / "empty")


def test_the_only_trace_needs_no_steps_and_no_ranks(read):
    account = read(event("aten::mm", 5, 25))
    assert account.term_s("matmul") == account.step_s() == pytest.approx(20e-6)
    assert account.terms_ns[0, TERM_ID["unattributed"]] == 0
    assert np.array_equal(account.ranks, [0])


# --- passes of a step ---------------------------------------------------------------------------


def one_pass(at, number, device_at, *more):
    """Forward, backward with an all-reduce of 4 MiB in it, on the host from `at` on, on the device
    from `device_at` on."""
    sizes = {"In msg nelems": 1 << 20, "Group size": 2, "dtype": "Float"}
    name = {"Collective name": "allreduce", "Process Group Ranks": "[0, 1]"}
    accumulate = NODE + "torch::autograd::AccumulateGrad"
    return [
        event("aten::mm", at, at + 10, Sequence_number=number),
        launch(at + 2, 10 * number),
        kernel("ampere_sgemm_128x64_nn", device_at, device_at + 4, 10 * number),
        event(accumulate, at + 20, at + 40, Sequence_number=number, Fwd_thread_id=1),
        event("record_param_comms", at + 24, at + 30, **name, **sizes),
        launch(at + 26, 10 * number + 1),
        kernel("ncclDevKernel_AllReduce", device_at + 5, device_at + 9, 10 * number + 1, stream=9),
        *more,
    ]


def passes(account):
    found = account.collectives
    return list(zip(found["step"].tolist(), found["micro_batch"].tolist(), strict=True))


def test_a_host_that_is_ahead_of_its_device_begins_no_second_pass(read):
    steps = [span(f"ProfilerStep#{n}", 100 * n, 100 * n + 100) for n in range(2)]
    account = read(*steps, *one_pass(5, 1, 150), *one_pass(105, 2, 180))
    assert account.steps["end_ns"].tolist()[0] > 105 * US  # the second pass began before
    assert passes(account) == [(0, 1), (1, 1)]
    assert account.collectives["in_backward"].all()


def test_passes_of_one_step_are_counted_on(read):
    account = read(step(300), *one_pass(5, 1, 150), *one_pass(105, 2, 180))
    assert passes(account) == [(0, 1), (0, 2)]


def test_an_optimizer_ends_the_passes_that_are_counted_together(read):
    optimizer = span("Optimizer.step#AdamW.step", 60, 90)
    account = read(step(300), *one_pass(5, 1, 150, optimizer), *one_pass(105, 2, 180))
    assert passes(account) == [(0, 1), (0, 1)]
    fused = [launch(70, 99), kernel("multi_tensor_apply_kernel", 170, 171, 99)]
    account = read(step(300), *one_pass(5, 1, 150, *fused), *one_pass(105, 2, 180))
    assert passes(account) == [(0, 1), (0, 1)]


def test_a_collective_of_the_forward_pass_is_not_in_the_backward_one(read):
    forward = event("aten::mm", 0, 12, Sequence_number=1)
    gather = span("nccl:all_reduce", 4, 9, Input_Dims=[[1 << 20]], Input_type=["float"])
    node = event(NODE + "MmBackward0", 20, 30, Sequence_number=1, Fwd_thread_id=1)
    run = [launch(5, 1), kernel("ncclDevKernel_AllReduce", 30, 40, 1, stream=9)]
    account = read(step(), forward, gather, *run, node)
    assert passes(account) == [(0, 1)]
    assert not account.collectives["in_backward"].any()
