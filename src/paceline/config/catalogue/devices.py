"""The vendors' figures: dense peaks, memory, bandwidth, the most power a device draws.

Every figure of an entry stands in the document that its `source` names. What a vendor does not
publish is not here. A device that is not here is unknown: it never gets another chip's numbers.

Memory is what a program finds, not the datasheet's round number: an "80 GB" H100 offers 85.0e9
bytes, an L40S of "48 GB", whose error correction takes its part, 47.7e9. `_SEEN_GIB` has them; the
datasheet's number stands for the few devices whose memory nobody printed.
"""

import re
from typing import Literal

from paceline.config.device import Device
from paceline.config.figure import Figure

# Of several drivers the one that leaves least: they differ by 0.1 GiB.
_SEEN = (
    "torch's total_memory (a TPU: XLA's hbm) as out-of-memory messages print it: "
    "pytorch/ao#4002 (B200), hiyouga/LlamaFactory#182 (V100), erfanzar/EasyDeL#166 (TPUv4) ..."
)
_SEEN_GIB = {
    "A100-40": 39.38,
    "A100-80": 79.14,
    "A100-80-PCIe": 79.14,
    "A800-80": 79.14,
    "H100-SXM": 79.11,
    "H800-80": 79.11,
    "H100-PCIe": 79.11,
    "H100-96-HBM2e": 94.5,
    "GH200-96": 94.5,
    "H20": 95.0,
    "H200": 139.72,
    "B200": 178.35,
    "B300": 267.69,
    "GB200": 184.31,
    "GB300": 276.5,
    "RTX-PRO-6000": 94.96,
    "A6000": 47.4,
    "A40": 44.34,
    "L40S": 44.39,
    "L4": 22.03,
    "RTX-3090": 23.56,
    "RTX-4090": 23.51,
    "V100": 31.73,
    "V100-16": 15.77,
    "T4": 14.56,
    "MI250X-GCD": 63.98,
    "MI300X": 191.69,
    "MI325X": 255.69,
    "MI355X": 287.98,
    "TPUv2": 2 * 7.48,
    "TPUv3": 2 * 15.48,
    "TPUv4": 30.75,
    "TPUv5e": 15.75,
    "TPUv5p": 95.74,
    "TPUv6e": 31.25,
}

_TRAINABLE = ("fp64", "fp32", "bf16", "fp16", "fp8")


def _entry(
    kind: Literal["cuda", "other"],
    name: str,
    source: str,
    memory_gb: float,
    gb_per_s: float,
    watts: float | None,
    peak_tflops: dict[str, float],
) -> tuple[str, Device]:
    def cited(value: float) -> Figure:
        return Figure(value=value, origin="cited", source=source)

    # Parameters may be kept in fp32 on every device, also where no peak of it is published.
    can = {*peak_tflops, "fp32"}
    memory = cited(memory_gb * 1e9)
    if name in _SEEN_GIB:
        memory = Figure(value=_SEEN_GIB[name] * 2**30, origin="cited", source=_SEEN)
    return name, Device(
        name=name,
        kind=kind,
        memory_bytes=memory,
        memory_bytes_per_s=cited(gb_per_s * 1e9),
        peak_flops={key: cited(value * 1e12) for key, value in peak_tflops.items()},
        precisions=tuple(p for p in _TRAINABLE if p in can),
        power_watts=None if watts is None else cited(watts),
    )


def _gpu(
    name: str, source: str, memory_gb: float, gb_per_s: float, watts: float, /, **tflops: float
) -> tuple[str, Device]:
    return _entry("cuda", name, source, memory_gb, gb_per_s, watts, tflops)


def _other(
    name: str,
    source: str,
    memory_gb: float,
    gb_per_s: float,
    watts: float | None,
    /,
    **tflops: float,
) -> tuple[str, Device]:
    return _entry("other", name, source, memory_gb, gb_per_s, watts, tflops)


_A100 = "NVIDIA A100 Tensor Core GPU datasheet (2188504)"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet (2287922) and Hopper architecture whitepaper"
_CS3 = "Cerebras CS-3 and WSE-3 data sheets: 44 GB of SRAM, 21 PB/s, 23 kW"
_TPU = "Google Cloud TPU documentation, system architecture of "
_HOPPER_SXM = {"fp64": 67, "fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}
_AMPERE = {"fp64": 19.5, "fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}
_VOLTA = {"fp64": 7.8, "fp32": 15.7, "fp16": 125}
_CDNA3 = {"fp64": 163.4, "fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4}

# name, source, the datasheet's memory in GB, memory bandwidth in GB/s, watts, peaks in TFLOP/s
CATALOGUE: dict[str, Device] = dict(
    [
        _gpu("A100-40", _A100, 40, 1555, 400, **_AMPERE),
        _gpu("A100-80", _A100 + ", SXM", 80, 2039, 400, **_AMPERE),
        _gpu("A100-80-PCIe", _A100 + ", PCIe", 80, 1935, 300, **_AMPERE),
        _gpu(
            "A30", "NVIDIA A30 Tensor Core GPU datasheet (1758950)", 24, 933, 165,
            fp64=10.3, fp32=10.3, tf32=82, bf16=165, fp16=165,
        ),
        _gpu(
            "A6000", "NVIDIA RTX A6000 datasheet and Ampere GA102 whitepaper, appendix", 48, 768,
            300, fp32=38.7, tf32=77.4, bf16=154.8, fp16=154.8,
        ),
        _gpu("H100-SXM", _H100 + ", SXM5", 80, 3350, 700, **_HOPPER_SXM),
        _gpu("A800-80", "NVIDIA A800 80GB datasheet, SXM: A100 with slower NVLink", 80, 2039, 400,
             **_AMPERE),
        _gpu(
            "A40", "NVIDIA A40 datasheet (1758950) and Ampere GA102 whitepaper", 48, 696, 300,
            fp32=37.4, tf32=74.8, bf16=149.7, fp16=149.7,
        ),
        _gpu(
            "RTX-3090", "NVIDIA Ampere GA102 whitepaper, appendix A", 24, 936, 350,
            fp32=35.6, tf32=35.6, bf16=71, fp16=71,
        ),
        _gpu(
            "H800-80", "NVIDIA H800 SXM5 datasheet: H100, slower NVLink and fp64", 80, 3350, 700,
            **_HOPPER_SXM | {"fp64": 1},
        ),
        _gpu("H20", "NVIDIA H20 datasheet, SXM5", 96, 4000, 400,
             fp64=1, fp32=44, tf32=74, bf16=148, fp16=148, fp8=296),
        _gpu("GH200-96", "NVIDIA GH200 Grace Hopper datasheet (96 GB HBM3), one GPU", 96, 4000,
             700, **_HOPPER_SXM),
        _gpu(
            "H100-PCIe", _H100 + ", PCIe", 80, 2000, 350,
            fp64=51, fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513,
        ),
        # Peaks of a full SXM part, which its power limit keeps it from holding for long.
        _gpu(
            "H100-96-HBM2e",
            "pytorch/torchtitan, benchmarks (96 GB HBM2e, 2.4 TB/s, 500 W); peaks of H100 SXM5",
            96, 2400, 500, **_HOPPER_SXM,
        ),
        _gpu("H200", "NVIDIA H200 Tensor Core GPU datasheet (3002446)", 141, 4800, 700,
             **_HOPPER_SXM),
        _gpu(
            "B200", "NVIDIA HGX B200 datasheet, one of eight GPUs", 180, 7700, 1000,
            fp64=37, fp32=75, tf32=1100, bf16=2250, fp16=2250, fp8=4500, fp4=9000,
        ),
        _gpu(
            "B300", "NVIDIA Blackwell Ultra datasheet, HGX B300, one of eight GPUs", 288, 7750,
            1100, fp64=1.25, fp32=75, tf32=1125, bf16=2250, fp16=2250, fp8=4500, fp4=13500,
        ),
        _gpu(
            "GB200", "NVIDIA GB200 NVL72 datasheet, one of 72 GPUs", 186, 8000, 1200,
            fp64=40, fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000, fp4=10000,
        ),
        _gpu(
            "GB300", "NVIDIA Blackwell Ultra datasheet, GB300 NVL72, one of 72 GPUs", 279, 8000,
            1400, fp64=1.39, fp32=83, tf32=1250, bf16=2500, fp16=2500, fp8=5000, fp4=15000,
        ),
        _gpu(
            "RTX-PRO-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet", 96, 1597, 600,
            fp32=120, tf32=251.9, bf16=503.8, fp16=503.8, fp8=1007.6, fp4=2015.2,
        ),
        _gpu(
            "L4", "NVIDIA L4 Tensor Core GPU datasheet (2535520)", 24, 300, 72,
            fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242.5,
        ),
        _gpu(
            "L40S", "NVIDIA L40S datasheet (2880802)", 48, 864, 350,
            fp32=91.6, tf32=183, bf16=362.05, fp16=362.05, fp8=733,
        ),
        # With fp32 accumulation, as training needs; the card does fp16 accumulation twice as fast.
        _gpu(
            "RTX-4090", "NVIDIA Ada GPU architecture whitepaper, appendix A", 24, 1008, 450,
            fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3,
        ),
        _gpu("V100", "NVIDIA V100 datasheet (WP-08608), SXM2 32 GB", 32, 900, 300, **_VOLTA),
        _gpu("V100-16", "NVIDIA V100 datasheet (WP-08608), SXM2 16 GB", 16, 900, 300, **_VOLTA),
        _gpu("P100", "NVIDIA Tesla P100 datasheet, SXM2", 16, 732, 300,
             fp64=5.3, fp32=10.6, fp16=21.2),
        _gpu("T4", "NVIDIA Turing architecture whitepaper (WP-09183)", 16, 320, 70,
             fp32=8.1, fp16=65),
        _gpu(
            "MI250X-GCD", "AMD Instinct MI250X data sheet, one of the two dies of a module", 64,
            1638.4, 280, fp64=47.9, fp32=47.9, bf16=191.5, fp16=191.5,
        ),
        _gpu("MI300X", "AMD Instinct MI300X data sheet (2023)", 192, 5300, 750,
             **_CDNA3, fp8=2614.9),
        _gpu("MI325X", "AMD Instinct MI325X data sheet (2024)", 256, 6000, 1000,
             **_CDNA3, fp8=2614.9),
        _gpu(
            "MI355X", "AMD Instinct MI355X data sheet (2025)", 288, 8000, 1400,
            fp64=78.6, fp32=157.3, bf16=2516.6, fp16=2516.6, fp8=5033.2, fp4=10066.3,
        ),
        _other("TPUv2", _TPU + "v2", 16, 700, None, bf16=45),
        _other("TPUv3", _TPU + "v3", 32, 900, 262, bf16=123),
        _other("TPUv4", _TPU + "v4", 32, 1200, 192, bf16=275),
        _other("TPUv5e", _TPU + "v5e", 16, 819, None, bf16=197),
        _other("TPUv5p", _TPU + "v5p", 95, 2765, None, bf16=459),
        _other("TPUv6e", _TPU + "v6e", 32, 1640, None, bf16=918),
        # 192 GiB; 7.37 TB/s by the announcement of Ironwood.
        _other("TPUv7", _TPU + "TPU7x (Ironwood)", 206.2, 7370, None, bf16=2307, fp8=4614),
        _other(
            "Trainium2", "AWS Neuron documentation, Trainium2 architecture", 96, 2900, None,
            fp32=181, tf32=667, bf16=667, fp16=667, fp8=1299,
        ),
        _other("Gaudi2", "Intel Gaudi 2 data sheet, HL-225H", 96, 2450, 600, bf16=432, fp8=865),
        _other("Gaudi3", "Intel Gaudi 3 white paper, HL-325L", 128, 3700, 900,
               bf16=1678, fp8=1678),
        _other("CS-3", _CS3, 44, 21e6, 23000),
    ]
)  # fmt: skip
# A wafer keeps activations; weights stream from a store outside, past 12 ports of 100 Gbit/s.
CATALOGUE["CS-3"] = CATALOGUE["CS-3"].replace(
    peak_flops={
        name: Figure(
            value=125e15 / 8,
            origin="assumed",
            source="an eighth of the 125 PFLOP/s of the WSE-3 data sheet: no dense peak is "
            "published, and sparsity is said to give up to eight times the speed",
        )
        for name in ("bf16", "fp16")
    },
    precisions=("fp32", "bf16", "fp16"),
    streamed_bytes_per_s=Figure(
        value=150e9, origin="cited", source="Cerebras CS-3 data sheet: system I/O of 1.2 Tbit/s"
    ),
)

_DRIVER_NAMES = {
    r"NVIDIA A100-(SXM4|PCIE)-40GB": "A100-40",
    r"NVIDIA A100-SXM4-80GB": "A100-80",
    r"NVIDIA A100 80GB PCIe": "A100-80-PCIe",
    r"NVIDIA A30": "A30",
    r"NVIDIA RTX A6000": "A6000",
    r"NVIDIA H100 80GB HBM3": "H100-SXM",
    r"NVIDIA H100 PCIe": "H100-PCIe",
    r"NVIDIA H200": "H200",
    r"NVIDIA B200": "B200",
    r"NVIDIA B300(?: SXM6 AC)?": "B300",
    r"NVIDIA GB200": "GB200",
    r"NVIDIA GB300": "GB300",
    r"NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX-PRO-6000",
    r"AMD Instinct MI300X(?: OAM)?": "MI300X",
    r"AMD Instinct MI325X(?: OAM)?": "MI325X",
    r"AMD Instinct MI355X(?: OAM)?": "MI355X",
    r"NVIDIA L4": "L4",
    r"NVIDIA L40S": "L40S",
    r"NVIDIA GeForce RTX 4090": "RTX-4090",
    r"(Tesla|NVIDIA) V100-SXM2-32GB": "V100",
    r"(Tesla|NVIDIA) V100-SXM2-16GB": "V100-16",
    r"(Tesla|NVIDIA) T4": "T4",
}


def recognise(driver_name: str) -> Device | None:
    """Return the catalogue's entry for a name that a driver reports, None when unknown.

    Matches are of whole names: cut-down parts ("H100 NVL", 96 GB HBM2e parts that call themselves
    "NVIDIA H100") have other clocks and memory, and stay unknown.
    """
    for pattern, short in _DRIVER_NAMES.items():
        if re.fullmatch(pattern, driver_name.strip()):
            return CATALOGUE[short]
    return None
