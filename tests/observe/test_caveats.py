"""What a trace can't say is told: each kind of caveat on a small made-up trace (files, pure)."""

import json

import pytest

from paceline.observe import caveats
from paceline.observe.account import Account
from paceline.observe.caveats import Device
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
        return Account.read(write(tmp_path / "trace.json", *events, **header))

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
    account = Account.read(tmp_path)
    assert [(one.kind, one.ranks) for one in account.caveats] == [(caveats.NO_STEPS, (0, 2))]
    assert account.caveat(caveats.NO_STEPS).text.endswith("(1 more rank is alike.)")
    assert account.caveat(caveats.CUT) is None


@pytest.mark.filterwarnings("ignore:.*ends in the middle")
def test_a_cut_trace_says_which_steps_are_left_out(tmp_path):
    steps = [span(f"ProfilerStep#{n}", 100 * n, 100 * n + 100) for n in range(4)]
    calls = [launch(100 * n + 10, n) for n in range(4)]
    kernels = [kernel("gemm", 100 * n + 20, 100 * n + 60, n) for n in range(4)]
    path = write(tmp_path / "trace.json", *steps, *calls, *kernels)
    path.write_bytes(path.read_bytes()[:-60])
    account = Account.read(path)
    assert account.steps["step"].tolist() == [0, 1]
    assert kinds(account) == [caveats.CUT]
    assert account.caveats[0].numbers == {"events": 11, "steps": 2, "left_out": 2}


@pytest.mark.parametrize(
    ("listed", "process", "device"),
    [
        ([H100], 0, Device("NVIDIA H100 80GB HBM3", (9, 0), 85018279936, False)),
        ([H100, MI300], 1, Device("", (9, 4), 0, True)),
        ([H100], 3, Device("NVIDIA H100 80GB HBM3", (9, 0), 85018279936, False)),
        ([], 0, None),
        ("none", 0, None),
        ([3, {"name": 7, "computeMajor": "9"}], 0, Device("", (0, 0), 0, False)),
    ],
)
def test_the_device_is_the_one_that_the_kernels_ran_on(read, listed, process, device):
    account = read(step(), *work(pid=process), deviceProperties=listed)
    assert account.devices.get(0) == device


def test_a_cpu_has_no_device(read):
    assert read(step(), event("aten::mm", 10, 20)).devices == {}
