"""What a trace can't say is told: each kind of caveat on a small made-up trace (files, pure)."""

import json

import pytest

from paceline.observe import caveats
from paceline.observe.caveats import TraceDevice
from paceline.observe.recorded import read_account
from tests.observe.test_kineto import event, kernel, launch, span, step

H100 = {
    "id": 0,
    "name": "NVIDIA H100 80GB HBM3",
    "totalGlobalMem": 85018279936,
    "computeMajor": 9,
    "computeMinor": 0,
    "warpSize": 32,
}
MI300 = {"id": 1, "name": "", "computeMajor": 9, "computeMinor": 4, "warpSize": 64}


def write(path, *events, **header):
    path.write_text(json.dumps({**header, "traceEvents": list(events)}))
    return path


@pytest.fixture
def read(tmp_path):
    def of(*events, **header):
        return read_account(write(tmp_path / "trace.json", *events, **header))

    return of


def work(correlation=1, at=10, **more):
    """A launch and its kernel."""
    made = kernel("ampere_sgemm_128x64_nn", at + 5, at + 25, correlation)
    return launch(at, correlation), {**made, **more}


def kinds(account):
    return [one.kind for one in account.caveats]


def test_a_whole_trace_has_no_caveats(read):
    assert kinds(read(step(), *work())) == []


def test_a_trace_without_steps_says_that_it_counts_as_one(read):
    account = read(*work(), span("## forward ##", 0, 50_000))
    assert kinds(account) == [caveats.NO_STEPS]
    assert len(account.steps) == 1
    (one,) = account.caveats
    assert one.ranks == (0,)
    assert one.numbers == {"seconds": 0.05}
    assert "marks no steps" in one.text
    assert "0.05 s" in one.text


def test_one_caveat_holds_for_all_ranks_that_have_it(tmp_path):
    for rank in range(3):
        marks = [step()] if rank == 1 else []
        name = tmp_path / f"rank{rank}.json"
        write(name, *work(), *marks, distributedInfo={"rank": rank})
    account = read_account(tmp_path)
    assert [(one.kind, one.ranks) for one in account.caveats] == [(caveats.NO_STEPS, (0, 2))]
    assert account.caveat(caveats.NO_STEPS).text.endswith("(1 more rank is alike.)")
    assert account.caveat(caveats.CUT) is None


def test_a_cut_trace_says_which_steps_are_left_out(tmp_path):
    steps = [span(f"ProfilerStep#{n}", 100 * n, 100 * n + 100) for n in range(4)]
    calls = [launch(100 * n + 10, n) for n in range(4)]
    kernels = [kernel("gemm", 100 * n + 20, 100 * n + 60, n) for n in range(4)]
    path = write(tmp_path / "trace.json", *steps, *calls, *kernels)
    path.write_bytes(path.read_bytes()[:-60])
    account = read_account(path)
    assert account.steps["step"].tolist() == [0, 1]
    assert kinds(account) == [caveats.CUT]
    assert account.caveats[0].numbers == {"events": 11, "steps": 2, "left_out": 2}


@pytest.mark.parametrize(
    ("listed", "process", "device"),
    [
        ([H100], 0, TraceDevice("NVIDIA H100 80GB HBM3", (9, 0), 85018279936, False)),
        ([H100, MI300], 1, TraceDevice("", (9, 4), 0, True)),
        ([H100], 3, TraceDevice("NVIDIA H100 80GB HBM3", (9, 0), 85018279936, False)),
        ([], 0, None),
        ("none", 0, None),
        ([3, {"name": 7, "computeMajor": "9"}], 0, TraceDevice("", (0, 0), 0, False)),
    ],
)
def test_the_device_is_the_one_that_the_kernels_ran_on(read, listed, process, device):
    account = read(step(), *work(pid=process), deviceProperties=listed)
    assert account.devices.get(0) == device


def test_a_cpu_has_no_device(read):
    assert read(step(), event("aten::mm", 10, 20)).devices == {}


# --- what contradicts idle time -----------------------------------------------------------------


def replay(at, correlation, num_kernels, vendor="cuda"):
    """A graph's launch and those of its kernels that were recorded, each 8 us."""
    call = event(f"{vendor}GraphLaunch", at, at + 4, "cuda_runtime", correlation=correlation)
    return [
        call,
        *(
            kernel(f"k{n}", at + 5 + 9 * n, at + 13 + 9 * n, correlation)
            for n in range(num_kernels)
        ),
    ]


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_replayed_graphs_without_kernels_are_told(read, vendor):
    made = [*replay(0, 1, 10, vendor), *replay(100, 2, 0, vendor), *replay(200, 3, 10, vendor)]
    account = read(step(300), *made)
    told = account.caveat(caveats.GRAPH_KERNELS_MISSING)
    assert told.numbers == {
        "replays": 3,
        "without_kernels": 1,
        "kernels": 20,
        "waited_for_nothing": 0,
    }
    assert "upper bounds" in told.sentence


def test_a_host_that_waits_for_an_idle_device_tells_of_lost_kernels(read):
    # Of each replay two kernels were recorded of many: the host waits for the rest.
    made = [*replay(0, 1, 2), event("cudaStreamSynchronize", 30, 95, "cuda_runtime")]
    made += [*replay(100, 2, 2), event("cudaEventSynchronize", 135, 195, "cuda_runtime")]
    told = read(step(200), *made).caveat(caveats.GRAPH_KERNELS_MISSING)
    assert told.numbers["without_kernels"] == 0
    assert told.numbers["waited_for_nothing"] == pytest.approx(0.625)


def test_whole_graphs_and_waits_without_graphs_are_no_lost_kernels(read):
    whole = read(
        step(100), *replay(0, 1, 10), event("cudaStreamSynchronize", 6, 98, "cuda_runtime")
    )
    assert whole.caveats == ()
    waits = read(step(100), *work(), event("cudaStreamSynchronize", 40, 98, "cuda_runtime"))
    assert waits.caveats == ()


ON_HOST = (step(), event("aten::mm", 10, 40), event("aten::add", 50, 60))


@pytest.mark.parametrize(
    ("events", "header", "calls"),
    [
        ([launch(15, 1), launch(52, 2)], {}, 2),
        ([event("hipExtModuleLaunchKernel", 15, 16, "hip_runtime")], {}, 1),
        ([], {"deviceProperties": [H100]}, 0),
    ],
)
def test_a_device_without_kernels_is_no_cpu(read, events, header, calls):
    loads = span("paceline.data_wait", 60, 80)
    account = read(*ON_HOST, *events, loads, **header)
    assert account.is_device
    told = account.caveat(caveats.NO_KERNELS)
    assert told.numbers == {"calls": calls}
    assert "no kernel was recorded" in told.sentence
    assert account.term_s("data_wait") == pytest.approx(20e-6)
    assert account.term_s("unattributed") == pytest.approx(80e-6)
    assert len(account.gaps) == 0
    assert len(account.kernels) == 0


@pytest.mark.parametrize(
    ("events", "header"),
    [
        ([], {}),
        ([], {"deviceProperties": []}),
        ([event("aten::mkldnn_convolution", 70, 80)], {"deviceProperties": [H100]}),
        ([span("gloo:all_reduce", 70, 80, tid=2)], {"deviceProperties": [H100]}),
        ([], {"deviceProperties": [H100], "paceline": {"first_step": 3}}),
    ],
)
def test_a_cpu_is_one_though_its_host_has_a_device(read, events, header):
    account = read(*ON_HOST, *events, **header)
    assert not account.is_device
    assert account.caveats == ()
    assert account.term_s("matmul") >= 30e-6
