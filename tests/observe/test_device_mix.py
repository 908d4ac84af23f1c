"""What a device's streams do at each moment, on a made-up trace (pure): shares by hand.

The same figures of real traces, against HolisticTraceAnalysis's: test_given_traces.py.
"""

import pytest

from benchmarks.device_mix import DeviceMix
from paceline.config.errors import InputError
from tests.observe.test_kineto import event, kernel, read, step

__all__ = ["read"]  # a fixture
GEMM = "ampere_sgemm_128x64_nn"
# 100 us: computing for 60, of them 10 beside communication, which a copy overlaps for another 10.
BUSY = (
    kernel(GEMM, 0, 40, 1),
    kernel("ncclDevKernel_AllReduce", 30, 60, 2, stream=20),
    kernel("Memcpy HtoD", 50, 70, 3, stream=9, cat="gpu_memcpy"),
    kernel(GEMM, 80, 100, 4),
)


def test_what_runs_at_once_is_counted_as_such(read):
    mix = DeviceMix.of(read(step(), *BUSY), 0)
    assert mix.shares() == pytest.approx({"compute": 0.6, "non_compute": 0.3, "idle": 0.1})
    assert mix.overlap() == pytest.approx(1 / 3)
    assert {" ".join(sorted(kinds)): share for kinds, share in mix.busy_shares().items()} == {
        "compute": pytest.approx(5 / 9),
        "communication compute": pytest.approx(1 / 9),
        "communication": pytest.approx(1 / 9),
        "communication copy": pytest.approx(1 / 9),
        "copy": pytest.approx(1 / 9),
    }


def test_the_last_of_several_steps_is_left_out(read):
    cut_off = kernel(GEMM, 150, 190, 5)
    mix = DeviceMix.of(read(step(), step(200, start=100), *BUSY, cut_off), 0)
    assert mix.shares()["compute"] == pytest.approx(0.6)


def test_exchanges_of_experts_are_communication_whatever_their_kernels_are_called(read):
    names = (
        "deep_ep::internode::dispatch<true, 8>(void*)",
        "dpsk::ep::internode::combine<8>(int*)",
    )
    for name in names:
        mix = DeviceMix.of(read(step(), kernel(GEMM, 0, 50, 1), kernel(name, 50, 100, 2)), 0)
        assert mix.shares() == pytest.approx({"compute": 0.5, "non_compute": 0.5, "idle": 0})


def test_a_trace_of_a_host_alone_is_refused_and_nothing_sent_has_no_overlap(read):
    with pytest.raises(InputError, match="rank 0 has no device spans"):
        DeviceMix.of(read(step(), event("aten::mm", 0, 100)), 0)
    assert DeviceMix.of(read(step(), kernel(GEMM, 0, 100, 1)), 0).overlap() is None
