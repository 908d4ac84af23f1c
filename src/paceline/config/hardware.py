"""Cluster and Device: the hardware, with the origin of every number.

Peak rates and bandwidths stand once, here. They are the vendors' dense figures (structured
sparsity, which doubles them on paper, is never used in training), per device, in FLOP/s and
bytes/s. Memory is the datasheet's "GB" taken as 1e9 bytes. A device that is not in the catalogue is
unknown: it never gets another chip's numbers, because an MFU against the wrong peak is worse than
none.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, WrapSerializer

from paceline.config.curves import CollectiveCurve, DeviceCurves
from paceline.config.errors import InputError
from paceline.config.noun import Auto, Count, Noun, nearest
from paceline.config.stack import Stack

Origin = Literal["measured", "cited", "assumed"]


class Figure(Noun):
    """One number and where it comes from."""

    value: float
    origin: Origin
    source: str
    """The document, or for a measured number where, when and by which command."""


class Device(Noun):
    """One accelerator (or one CPU rank): what it can do at best."""

    name: str
    kind: Literal["cuda", "cpu"]
    """torch's device type; ROCm devices are "cuda" there as well."""
    memory_bytes: Figure | None = None
    memory_bytes_per_s: Figure | None = None
    peak_flops: Mapping[str, Figure] = Field(default_factory=dict)
    """Dense peak in FLOP/s by arithmetic: fp64, fp32, tf32, bf16, fp16, fp8, fp4."""
    precisions: Annotated[tuple[str, ...], Field(strict=False)] = ("fp32",)
    """Arithmetic that training may ask for: what the device does natively."""
    curves: DeviceCurves | None = None
    """What was measured of it; None: the catalogue's data files, or nothing known."""
    power_watts: Figure | None = None
    """The most it draws."""

    def peak(self, precision: str) -> Figure | None:
        """Peak in FLOP/s for matrix products of this precision, None when unknown."""
        return self.peak_flops.get(precision)


def device(name: str) -> Device:
    """Return a device of the catalogue by its short name.

    Raises:
        InputError: naming the closest entry.
    """
    if name not in CATALOGUE:
        raise InputError(f"device {name!r} is not in the catalogue{nearest(name, [*CATALOGUE])}")
    return CATALOGUE[name]


def recognise(driver_name: str) -> Device | None:
    """Return the catalogue's entry for a name that a driver reports, None when unknown.

    Matches are of whole names: cut-down parts ("H100 NVL", 96 GB HBM2e parts that call themselves
    "NVIDIA H100") have other clocks and memory, and stay unknown.
    """
    for pattern, short in _DRIVER_NAMES.items():
        if re.fullmatch(pattern, driver_name.strip()):
            return CATALOGUE[short]
    return None


def _by_name(given: Any) -> Any:
    return device(given) if isinstance(given, str) and given != "auto" else given


def _as_name(given: Any, handler: SerializerFunctionWrapHandler) -> Any:
    """A device of the catalogue is written as its name: a job.toml stays readable."""
    if isinstance(given, Device) and CATALOGUE.get(given.name) == given:
        return given.name
    return handler(given)


class Tier(Noun):
    """Links of one kind: among the devices of a node, of a rack, of the whole cluster."""

    name: str
    """What people call it: nvlink, pcie, infiniband, ethernet."""
    num_devices: Count
    """Devices that reach each other over it: a node's, a rack's, the cluster's."""
    latency_s: Figure
    """From a message's start to its arrival, however small it is."""
    bytes_per_s: Figure
    """Each way, per device: a node's network cards are shared out over its devices."""
    collectives: Mapping[str, tuple[CollectiveCurve, ...]] = Field(default_factory=dict)
    """Measured: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send_recv."""
    reduces_in_network: bool = False
    """Switches add up (NVLink SHARP, InfiniBand SHARP): all-reduces send each byte once."""


class Cluster(Noun):
    """Devices of one kind, in nodes."""

    device: Annotated[Auto | Device, BeforeValidator(_by_name), WrapSerializer(_as_name)] = "auto"
    """A name of the catalogue, a full description, or "auto": this machine's."""
    devices_per_node: Auto | Count = "auto"
    """Ranks on each node: CUDA devices, or CPU ranks over gloo."""
    num_nodes: Auto | Count = "auto"
    """Machines; more than one are reached by torchrun or srun."""
    tiers: Annotated[tuple[Tier, ...], Field(strict=False)] = ()
    """Links, the fastest first; none: those that the catalogue knows for the device."""
    stack: Stack | None = None
    """Constants of our runtime that were measured here; None: the defaults."""


def _gpu(
    name: str, source: str, memory_gb: float, gb_per_s: float, /, **peak_tflops: float
) -> tuple[str, Device]:
    """One entry of the catalogue; every figure of it stands in `source`."""

    def cited(value: float) -> Figure:
        return Figure(value=value, origin="cited", source=source)

    trainable = ("fp64", "fp32", "bf16", "fp16", "fp8")
    return name, Device(
        name=name,
        kind="cuda",
        memory_bytes=cited(memory_gb * 1e9),
        memory_bytes_per_s=cited(gb_per_s * 1e9),
        peak_flops={key: cited(value * 1e12) for key, value in peak_tflops.items()},
        precisions=tuple(p for p in trainable if p in peak_tflops),
    )


_A100 = "NVIDIA A100 Tensor Core GPU datasheet (2188504)"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet (2287922) and Hopper architecture whitepaper"
_HOPPER_SXM = {"fp64": 67, "fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}
_AMPERE = {"fp64": 19.5, "fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}

CATALOGUE: dict[str, Device] = dict(
    [
        _gpu("A100-40", _A100, 40, 1555, **_AMPERE),
        _gpu("A100-80", _A100 + ", SXM", 80, 2039, **_AMPERE),
        _gpu("A100-80-PCIe", _A100 + ", PCIe", 80, 1935, **_AMPERE),
        _gpu("H100-SXM", _H100 + ", SXM5", 80, 3350, **_HOPPER_SXM),
        _gpu(
            "H100-PCIe", _H100 + ", PCIe", 80, 2000,
            fp64=51, fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513,
        ),
        _gpu("H200", "NVIDIA H200 Tensor Core GPU datasheet (3002446)", 141, 4800, **_HOPPER_SXM),
        _gpu(
            "B200", "NVIDIA HGX B200 datasheet, one of eight GPUs", 180, 7700,
            fp64=37, fp32=75, tf32=1100, bf16=2250, fp16=2250, fp8=4500, fp4=9000,
        ),
        _gpu(
            "GB200", "NVIDIA GB200 NVL72 datasheet, one of 72 GPUs", 186, 8000,
            fp64=40, fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000, fp4=10000,
        ),
        _gpu(
            "MI300X", "AMD Instinct MI300X data sheet (2023)", 192, 5300,
            fp64=163.4, fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4, fp8=2614.9,
        ),
        _gpu(
            "L40S", "NVIDIA L40S datasheet (2880802)", 48, 864,
            fp32=91.6, tf32=183, bf16=362.05, fp16=362.05, fp8=733,
        ),
        # With fp32 accumulation, as training needs; the card does fp16 accumulation twice as fast.
        _gpu(
            "RTX-4090", "NVIDIA Ada GPU architecture whitepaper, appendix A", 24, 1008,
            fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3,
        ),
        _gpu(
            "V100", "NVIDIA V100 datasheet (WP-08608), SXM2 32 GB", 32, 900,
            fp64=7.8, fp32=15.7, fp16=125,
        ),
        _gpu("T4", "NVIDIA Turing architecture whitepaper (WP-09183)", 16, 320, fp32=8.1, fp16=65),
    ]
)  # fmt: skip

_DRIVER_NAMES = {
    r"NVIDIA A100-(SXM4|PCIE)-40GB": "A100-40",
    r"NVIDIA A100-SXM4-80GB": "A100-80",
    r"NVIDIA A100 80GB PCIe": "A100-80-PCIe",
    r"NVIDIA H100 80GB HBM3": "H100-SXM",
    r"NVIDIA H100 PCIe": "H100-PCIe",
    r"NVIDIA H200": "H200",
    r"NVIDIA B200": "B200",
    r"NVIDIA GB200": "GB200",
    r"AMD Instinct MI300X(?: OAM)?": "MI300X",
    r"NVIDIA L40S": "L40S",
    r"NVIDIA GeForce RTX 4090": "RTX-4090",
    r"(Tesla|NVIDIA) V100-SXM2-32GB": "V100",
    r"(Tesla|NVIDIA) T4": "T4",
}
