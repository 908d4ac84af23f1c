"""What Python and gloo cost where the host's cores are the device: the planner's terms for CPUs.

Arithmetic only: no rank is started.
"""

from dataclasses import replace

import pytest

from paceline.bench.device import DeviceRates, Launching
from paceline.bench.measure import BenchResult, _launching
from paceline.bench.reference import DecoderShape, reference_jobs, shape_of, small_job
from paceline.config.curves import (
    AttentionCurve,
    CollectiveCurve,
    DeviceCurves,
    MatmulCurve,
    MemoryCurve,
)
from paceline.config.hardware import Cluster, Device, Figure, Tier, device
from paceline.config.job import Job
from paceline.config.stack import CONSTANTS, Stack
from paceline.plan.points import Setting
from paceline.plan.price.step import predict

KNOWN = Figure(value=1e11, origin="assumed", source="a test")
CURVES = {
    op: (CollectiveCurve(num_ranks=2, bytes=(1e3, 1e6), seconds=(1e-4, 1e-3), source="a test"),)
    for op in ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
}
CPU = Device(name="here", kind="cpu", precisions=("fp64", "fp32"))
MEASURED = DeviceCurves(
    matmul={"fp32": MatmulCurve(m=(64,), n=(64,), k=(64,), share=(0.5,), source="a test")},
    attention={
        "flash": AttentionCurve(
            seq_len=(64,), head_dim=(16,), forward=(0.3,), backward=(0.3,), source="a test"
        )
    },
    memory=MemoryCurve(bytes=(1e3, 1e6), seconds=(1e-6, 1e-4), source="a test"),
)


def _cpus() -> Cluster:
    cpu = CPU.replace(curves=MEASURED, peak_flops={"fp32": KNOWN}, memory_bytes_per_s=KNOWN)
    tier = Tier(
        name="loopback", num_devices=2, latency_s=KNOWN, bytes_per_s=KNOWN, collectives=CURVES
    )
    return Cluster(device=cpu, devices_per_node=2, num_nodes=1, tiers=(tier,))


def _gpus() -> Cluster:
    return Cluster(device=device("A100-80"), devices_per_node=2, num_nodes=1)


def _job(cluster: Cluster, **layout: object) -> Job:
    shape = DecoderShape(64, 64, 256)
    return small_job(cluster, "job", shape_of(shape, 2), 64, 8, {"micro_batch": 1, **layout})


def _step_s(cluster: Cluster, job: Job, **constants: float) -> float:
    setting = replace(Setting.of(job.replace(cluster=cluster)), stack=Stack(constants=constants))
    return predict(setting, job.layout).step_s


LAYOUTS = {
    "exchange_us": [{"tp": 2}],
    "unit_us": [{"fsdp": 2}, {"cp": 2}],
    "hop_us": [{"cp": 2}, {"pp": 2}],
    "again_us": [{"dp": 2, "recompute": "full"}, {"dp": 2, "recompute": "selective"}],
    "select_us": [{"dp": 2, "recompute": "selective"}],
}
HOOKS = ("again_us", "select_us")
"""What repeats a block: a host ahead of a GPU pays for that as well."""
ALL_LAYOUTS = [layout for layouts in LAYOUTS.values() for layout in layouts]


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_cost_of_python_is_felt_where_it_belongs_and_most_on_cpus_only(name: str):
    cpus, gpus = _cpus(), _gpus()
    cheap, dear = {name: CONSTANTS[name].low}, {name: CONSTANTS[name].high}
    for layout in ALL_LAYOUTS:
        job = _job(cpus, **layout)
        more = _step_s(cpus, job, **dear) - _step_s(cpus, job, **cheap)
        assert (more > 0) == (layout in LAYOUTS[name])
        job = _job(gpus, **layout)
        more = _step_s(gpus, job, **dear) - _step_s(gpus, job, **cheap)
        assert (more > 0) == (name in HOOKS and layout in LAYOUTS[name])


@pytest.mark.parametrize("layout", [{"dp": 2}, {"fsdp": 2}, {"cp": 2}])
def test_nothing_is_hidden_behind_the_cores_that_compute(layout: dict[str, int]):
    cpus = _cpus()
    job = _job(cpus, **layout)
    assert _step_s(cpus, job, overlap_share=1.0) == _step_s(cpus, job, overlap_share=0.05)


def test_a_ring_that_recomputes_selectively_sends_again():
    cpus = _cpus()
    sent = [
        predict(Setting.of(job.replace(cluster=cpus)), job.layout).time_s["exposed_comm.cp"]
        for job in (_job(cpus, cp=2), _job(cpus, cp=2, recompute="selective"))
    ]
    assert sent[1] > 1.1 * sent[0]


def test_a_slow_host_is_slow_in_everything():
    found = [
        _launching(BenchResult(_cpus()), DeviceRates(CPU, Launching(s, s), 1e-9, 1.5)).constants
        for s in (3e-6, 6e-6)
    ]
    for name in ("launch_us", *LAYOUTS):
        assert found[1][name] == pytest.approx(2 * found[0][name])


def test_every_axis_has_reference_jobs_over_all_ranks_and_over_pairs():
    cluster = _cpus().replace(devices_per_node=4)
    layouts = [job.layout for job in reference_jobs(cluster)]
    for axis in ("fsdp", "tp", "pp", "cp"):
        assert {getattr(layout, axis) for layout in layouts} >= {2, 4}
    assert all(layout.num_ranks == 4 for layout in layouts)
