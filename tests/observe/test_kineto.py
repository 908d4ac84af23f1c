"""Reading Kineto's traces: each rule on a small made-up trace (pure)."""

import json

import pytest

from paceline.config.errors import InputError
from paceline.observe.accounting import accounting_ns
from paceline.observe.kineto.read import read_kineto
from paceline.observe.recorded import read_account
from paceline.observe.terms import TERM_ID

MAIN, GLOO = 1, 2
NODE = "autograd::engine::evaluate_function: "


def event(name, start, end, cat="cpu_op", tid=MAIN, **args):
    words = {key.replace("_", " "): value for key, value in args.items()}
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, **times, "args": words}


def span(name, start, end, **more):
    return event(name, start, end, "user_annotation", **more)


def step(end=100, start=0):
    return span("paceline.step", start, end)


def kernel(name, start, end, correlation=0, stream=7, cat="kernel", **args):
    return event(name, start, end, cat, stream, correlation=correlation, stream=stream, **args)


def launch(at, correlation, tid=MAIN):
    return event("cudaLaunchKernel", at, at + 1, "cuda_runtime", tid, correlation=correlation)


@pytest.fixture
def read(tmp_path):
    def read_events(*events, axis=None, **header):
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": list(events), **header}))
        return read_kineto(path, axis=axis)

    return read_events


@pytest.fixture
def account(read):
    """Account for the only step of a trace, in microseconds."""

    def of(*events, **more):
        steps = accounting_ns(read(*events, **more))[0]
        (terms,) = steps.values()
        return {term: ns / 1000 for term, ns in terms.items()}

    return of


# --- CPU: own time of the innermost operator ----------------------------------------------------


def test_own_time_goes_to_the_innermost_operator(account):
    found = account(
        step(),
        event("aten::linear", 10, 60),
        event("aten::copy_", 20, 30),
        event("aten::addmm", 30, 60),
    )
    assert found == {"matmul": 40, "other_kernels": 10, "host_gap": 50}


def test_the_machinery_around_operators_is_the_hosts(account):
    found = account(
        step(),
        event(NODE + "MulBackward0", 10, 50),
        event("MulBackward0", 12, 48),
        event("aten::mul", 20, 40),
    )
    assert found == {"other_kernels": 20, "host_gap": 80}


def test_the_optimizer_owns_what_it_calls_and_its_pauses(account):
    found = account(step(), span("paceline.optimizer", 10, 60), event("aten::mm", 20, 30))
    assert found == {"optimizer": 50, "host_gap": 50}
    found = account(step(), span("Optimizer.step#AdamW.step", 10, 60))
    assert found == {"optimizer": 50, "host_gap": 50}


def test_waiting_for_data_owns_everything_within(account):
    found = account(
        step(),
        span("paceline.data_wait", 10, 60),
        event("aten::stack", 20, 30),
        event("c10d::broadcast_", 30, 40),
        span("paceline.checkpoint_stall", 80, 90),
    )
    assert found == {"data_wait": 50, "checkpoint_stall": 10, "host_gap": 40}


def test_plain_attention_owns_its_products_forward_and_backward(account):
    sdpa = "aten::scaled_dot_product_attention"
    found = account(
        step(200),
        event("aten::mm", 0, 10, Sequence_number=1),
        event(sdpa, 10, 50, Sequence_number=2),
        event("aten::bmm", 20, 40, Sequence_number=2),
        event("aten::mm", 50, 60, Sequence_number=3),
        event(NODE + "MmBackward0", 100, 110, Sequence_number=3, Fwd_thread_id=1),
        event("aten::mm", 100, 110),
        event(NODE + "BmmBackward0", 110, 150, Sequence_number=2, Fwd_thread_id=1),
        event("aten::bmm", 110, 150),
        event(NODE + "BmmBackward0", 150, 160, Sequence_number=2, Fwd_thread_id=2),
        event("aten::bmm", 150, 160),  # of another thread's graph
    )
    assert found == {"matmul": 40, "attention": 80, "host_gap": 80}


def test_operators_that_record_for_autograd_in_the_backward_pass_are_recomputed(account):
    found = account(
        step(),
        event("aten::mm", 0, 10, Sequence_number=1),
        event(NODE + "MmBackward0", 20, 80, Sequence_number=1, Fwd_thread_id=1),
        event("aten::mm", 30, 50, Sequence_number=7),
        event("aten::mm", 60, 80),
    )
    assert found == {"matmul": 30, "recompute": 20, "host_gap": 50}


def test_what_runs_between_steps_is_left_out(read):
    work = [event("aten::mm", start, start + 5) for start in (5, 12, 25)]
    steps = accounting_ns(read(step(10), *work, step(40, start=20), paceline={"first_step": 8}))[0]
    assert steps == {
        8: {"matmul": 5000, "host_gap": 5000},
        9: {"matmul": 5000, "host_gap": 15000},
    }


def test_children_may_outlive_their_parents_by_rounding(account):
    found = account(step(), event("aten::linear", 10, 20), event("aten::addmm", 12, 20.002))
    assert found == {"matmul": 10, "host_gap": 90}


def test_foreign_steps_and_none_at_all(read):
    with_steps = read(
        span("ProfilerStep#5", 0, 10),
        span("ProfilerStep#6", 10, 30),
        event("aten::mm", 4, 10),
        event("aten::mm", 10, 15),
    )
    assert accounting_ns(with_steps)[0] == {
        5: {"matmul": 6000, "host_gap": 4000},
        6: {"matmul": 5000, "host_gap": 15000},
    }
    without = read(event("aten::mm", 10, 20), event("aten::mul", 30, 40))
    assert accounting_ns(without)[0] == {
        0: {"matmul": 10000, "other_kernels": 10000, "host_gap": 10000}
    }


# --- CPU: collectives ---------------------------------------------------------------------------


def test_a_pause_that_ends_with_a_collective_was_a_wait(account):
    found = account(
        step(),
        span("paceline.comm.dp", 0, 100),
        event("c10d::allreduce_", 10, 15),
        span("gloo:all_reduce", 12, 60, tid=GLOO),
        event("aten::mm", 20, 50),
        event("aten::mm", 70, 80),  # the thread went on 10 us after the collective
    )
    # 15-20: the collective was in flight, but nothing waited for it.
    assert found == {"matmul": 40, "exposed_comm.dp": 5 + 20, "host_gap": 35}


def test_a_wait_begins_no_sooner_than_its_collective(account):
    found = account(
        step(),
        event("aten::mm", 0, 10),
        span("gloo:all_reduce", 30, 60, tid=GLOO),
        event("aten::mm", 60, 100),
        axis="fsdp",
    )
    assert found == {"matmul": 50, "exposed_comm.fsdp": 30, "host_gap": 20}


def test_a_long_pause_beside_a_collective_was_a_wait_even_if_its_end_came_late(account):
    found = account(
        step(2000),
        event("aten::mm", 0, 1000),
        span("gloo:all_reduce", 500, 1900, tid=GLOO),
        event("aten::mm", 1800, 2000),
    )
    assert found == {"matmul": 1200, "exposed_comm": 800}


def test_waiting_for_data_stays_that_when_a_collective_ends_meanwhile(account):
    found = account(
        step(),
        span("paceline.data_wait", 0, 60),
        span("gloo:all_reduce", 10, 50, tid=GLOO),
        event("aten::mm", 60, 100),
    )
    assert found == {"matmul": 40, "data_wait": 60}


def test_work_within_a_collective_operator_is_communication(account):
    found = account(
        step(),
        span("FSDP::post_backward_reduce", 0, 50),
        event("c10d::_reduce_scatter_base_", 10, 40),
        event("aten::copy_", 15, 35),
        span("paceline.optimizer", 60, 100),
        event("_c10d_functional::wait_tensor", 70, 80),
        axis="fsdp",
    )
    assert found == {"exposed_comm.fsdp": 40, "optimizer": 30, "host_gap": 30}


@pytest.mark.parametrize(
    ("around", "operator", "args", "term"),
    [
        (span("FSDP::all_gather (b.0)", 0, 100), "c10d::_allgather_base_", {}, "exposed_comm.fsdp"),
        (span("FSDP::post_backward", 0, 100), "c10d::allreduce_", {}, "exposed_comm.dp"),
        (
            event(NODE + "torch::autograd::AccumulateGrad", 0, 100),
            "c10d::allreduce_",
            {},
            "exposed_comm.dp",
        ),
        (
            event(NODE + "torch::autograd::AccumulateGrad", 0, 100),
            "c10d::alltoall_base_",
            {},
            "exposed_comm",
        ),
        (span("paceline.comm.ep", 0, 100), "c10d::alltoall_base_", {}, "exposed_comm.ep"),
        (span("module", 0, 100), "c10d::allreduce_", {}, "exposed_comm"),
        (
            span("FSDP::all_gather", 0, 100),
            "record_param_comms",
            {"Process_Group_Description": "mesh_tp"},
            "exposed_comm.tp",
        ),
    ],
)
def test_the_axis_of_a_collective(account, around, operator, args, term):
    found = account(step(), around, event(operator, 0, 100, **args))
    assert found == {term: 100}


# --- CUDA ---------------------------------------------------------------------------------------


def test_the_device_decides_and_the_host_explains_its_idle_time(account):
    found = account(
        step(),
        span("paceline.data_wait", 0, 20),
        event("aten::mm", 20, 25),
        launch(22, 1),
        kernel("ampere_sgemm_128x64_nn", 30, 50, 1),
        kernel("ncclDevKernel_AllReduce", 40, 70, 2, stream=20),
        kernel("Memcpy HtoD", 60, 80, 3, stream=9, cat="gpu_memcpy"),
        kernel("elementwise_kernel", 85, 90, 4),
        axis="dp",
    )
    assert found == {
        "data_wait": 20,
        "matmul": 20,
        "exposed_comm.dp": 20,
        "other_kernels.copy": 10,
        "other_kernels.elementwise": 5,
        "host_gap": 10 + 5 + 10,
    }


def test_a_kernel_belongs_to_what_launched_it(account):
    found = account(
        step(),
        event(NODE + "CheckpointBackward", 0, 10, tid=3, Sequence_number=1, Fwd_thread_id=1),
        event("aten::mm", 1, 5, tid=3, Sequence_number=7),
        launch(2, 1, tid=3),
        event("aten::mm", 5, 9, tid=3),
        launch(6, 2, tid=3),
        span("paceline.optimizer", 10, 20),
        launch(12, 3),
        event("aten::scaled_dot_product_attention", 20, 30),
        launch(22, 4),
        *(kernel("ampere_sgemm_128x64_nn", 20 * n, 20 * n + 20, n) for n in range(1, 5)),
    )
    assert found == {
        "recompute": 20,
        "matmul": 20,
        "optimizer": 20,
        "attention": 20,
        "host_gap": 20,
    }


def test_without_the_calls_of_the_driver_the_external_id_tells_who_launched(account):
    found = account(
        step(),
        span("paceline.optimizer", 0, 20),
        event("aten::add", 5, 10, External_id=3),
        kernel("elementwise_kernel", 20, 50, 0, External_id=3),
        kernel("Cijk_Ailk_Bljk_HSS_BH_MT128x128x16", 50, 100, 0, External_id=4),
    )
    assert found == {"optimizer": 30, "matmul": 50, "host_gap": 20}


def test_a_step_lasts_until_its_kernels_have_finished(read):
    # The host needs 10 us a step, the device 40.
    events = []
    for n in range(3):
        events += [step(10 * n + 10, start=10 * n), launch(10 * n + 2, n)]
        events.append(kernel("ampere_sgemm_128x64_nn", 40 * n + 5, 40 * n + 45, n))
    timeline = read(*events)
    assert (timeline.steps["end_ns"] - timeline.steps["start_ns"]).tolist() == [45000, 40000, 40000]
    assert accounting_ns(timeline)[0] == {
        0: {"matmul": 40000, "host_gap": 5000},
        1: {"matmul": 40000},
        2: {"matmul": 40000},
    }


def test_idle_time_of_a_trace_without_a_host_stays_unattributed(account):
    found = account(kernel("ampere_sgemm_128x64_nn", 0, 10), kernel("elementwise", 30, 40))
    assert found == {"matmul": 10, "other_kernels.elementwise": 10, "unattributed": 20}


def test_the_process_group_names_the_axis_of_a_kernel(account):
    found = account(
        step(),
        kernel("ncclDevKernel_AllGather", 0, 60, 1, Process_Group_Description="mesh_cp"),
        kernel("ncclDevKernel_AllGather", 60, 100, 2, Process_Group_Description="default_pg"),
        axis="fsdp",
    )
    assert found == {"exposed_comm.cp": 60, "exposed_comm.fsdp": 40}


def test_categories_of_old_traces(account):
    found = account(
        event("aten::mm", 0, 10, "Operator"),
        event("cudaLaunchKernel", 2, 3, "Runtime", correlation=1),
        event("ampere_sgemm_128x64_nn", 10, 30, "Kernel", 7, correlation=1),
    )
    assert found == {"matmul": 20, "host_gap": 10}


# --- files --------------------------------------------------------------------------------------


def test_times_keep_their_nanoseconds_and_their_base(read):
    base = 1_790_857_026_000_000_000
    timeline = read(
        event("aten::mm", 4311774718446.563, 4311774718446.666), baseTimeNanoseconds=base
    )
    assert timeline.spans["start_ns"].tolist() == [base + 4311774718446563]
    assert timeline.spans["duration_ns"].tolist() == [103]


CUT = {
    # The host's events come first: of the second step's two kernels, one was written.
    "device": [
        *(step(100, start=0), step(200, start=100)),
        *(launch(11, 1), launch(110, 2), launch(120, 3)),
        *(kernel("elementwise", 20, 100, 1), kernel("elementwise", 130, 200, 3)),
    ],
    "host": [
        *(step(100, start=0), event("aten::mm", 10, 90)),
        *(step(200, start=100), event("aten::mm", 110, 115)),
    ],
    # Streams stand one after another: of a further one, nothing may have been written.
    "stream after stream": [
        *(step(100, start=0), step(200, start=100), launch(11, 1), launch(12, 2), launch(120, 3)),
        *(kernel("a", 20, 90, 1), kernel("a", 130, 190, 3), kernel("b", 95, 99, 2, stream=9)),
    ],
    "a thread without calls": [
        *(step(100, start=0), step(200, start=100)),
        *(event("aten::mm", at, at + 2, tid=tid) for tid in (MAIN, 3) for at in (10, 20, 119)),
        *(launch(at + 1, at) for at in (10, 20, 119)),
        *(kernel("a", at + 5, at + 9, at) for at in (10, 20, 119)),
        *(launch(210, 210), kernel("a", 230, 290, 210)),
    ],
    "collectives without kernels": [
        *(step(100, start=0), span("nccl:all_reduce", 10, 20), step(200, start=100)),
        *(launch(15, 1), kernel("a", 20, 90, 1), launch(110, 2), kernel("a", 120, 130, 2)),
    ],
    "nothing whole": [step(100), launch(11, 1), launch(12, 2)],
}


@pytest.mark.parametrize("name", CUT)
def test_of_a_cut_trace_only_whole_steps_count(tmp_path, name):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*CUT[name], *CUT[name][-1:]]})[:-30])
    if name not in ("device", "host"):
        with pytest.raises(InputError, match="of none of its steps it is certain"):
            read_kineto(path)
    else:
        assert list(accounting_ns(read_kineto(path))[0]) == [0]


# --- other dialects -----------------------------------------------------------------------------

LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


@pytest.mark.parametrize("cat", ["user_annotation", "cpu_op", "Operator"])
def test_waiting_for_a_loader_is_data_wait(account, cat):
    loads = [event(LOADER, 10, 60, cat), event("aten::cat", 20, 30)]
    assert account(step(), *loads, event("aten::mm", 60, 100)) == {
        "data_wait": 50,
        "matmul": 40,
        "host_gap": 10,
    }
    device = [launch(62, 1), kernel("ampere_sgemm", 64, 100, 1)]
    assert account(step(), *loads, *device) == {"data_wait": 50, "matmul": 36, "host_gap": 14}


def test_gaps_within_a_loader_say_so(tmp_path):
    events = [step(), event(LOADER, 10, 60, "cpu_op"), event("aten::cat", 20, 30)]
    events += [launch(70, 1), kernel("ampere_sgemm", 80, 100, 1)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    account = read_account(tmp_path / "t.json")
    waits = account.gaps[account.gaps["term"] == TERM_ID["data_wait"]]
    assert waits["duration_ns"].sum() == 50_000
    assert {account.names[name] for name in waits["name"]} == {LOADER, "aten::cat"}
    assert account.gaps["duration_ns"].sum() == 80_000


@pytest.mark.parametrize("name", [f"[pl][profile][_EvaluationLoop].{n}" for n in ("x", "y_next")])
def test_other_ranges_are_no_loader(account, name):
    assert "data_wait" not in account(step(), span(name, 10, 60))


def test_a_rank_that_is_late_because_of_its_loader_waits_for_data(tmp_path):
    for rank, loaded in enumerate((10, 70)):
        events = [step(), span(LOADER, 0, loaded), event("c10d::allreduce_", loaded, loaded + 2)]
        events += [span("gloo:all_reduce", loaded + 1, 90, tid=GLOO)]
        where = {"rank": rank, "pg_config": [{"pg_desc": "default_pg", "ranks": [0, 1]}]}
        text = json.dumps({"traceEvents": events, "distributedInfo": where, "host_name": "a"})
        (tmp_path / f"{rank}.json").write_text(text)
    account = read_account(tmp_path, axis="dp")
    assert account.term_s("data_wait", rank=1) == pytest.approx(70e-6)
    assert account.term_s("data_wait", rank=0) == pytest.approx(10e-6)
    assert account.term_s("straggler_wait", rank=0) > 50e-6
    assert account.term_s("straggler_wait", rank=1) == 0


def test_steps_of_2021_are_operators(read):
    steps = [event(f"ProfilerStep#{n}", 100 * n, 100 * n + 100, "Operator") for n in (5, 6)]
    work = [event("aten::mm", 520, 560, "Operator"), event("Optimizer.step#SGD.step", 620, 650)]
    found = accounting_ns(read(*steps, *work))[0]
    assert found[5] == {"matmul": 40_000, "host_gap": 60_000}
    assert found[6] == {"optimizer": 30_000, "host_gap": 70_000}


def test_the_trace_says_which_rank_it_is(read):
    assert read(event("aten::mm", 0, 1), distributedInfo={"rank": 3}).ranks == (3,)


def test_impossible_events_are_refused_in_a_sentence(read):
    broken = event("aten::mm", 0, 1)
    del broken["dur"]
    for bad in (broken, event("aten::mm", 5, 1), event("aten::mm", 0, 1) | {"ts": "now"}, 3):
        with pytest.raises(InputError, match="record it again"):
            read(bad)
    with pytest.raises(InputError, match="no operators or kernels"):
        read({"ph": "M", "name": "process_name", "pid": 1})
