"""NVIDIA's devices, read from `nvidia-smi -q -x` and `nvidia-smi nvlink -s`.

The XML is taken, not the columns of --query-gpu: a driver that doesn't know one of the columns
answers nothing at all, while an element that isn't there is just unknown.

Sources: the schema that `nvidia-smi -q --dtd` prints; NVML's NvmlClocksEventReasons,
https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html.
"""

import re
from dataclasses import dataclass, field
from xml.etree import ElementTree

_REASON = re.compile(r"clocks_(?:event|throttle)_reason_(\w+)")
_DEPRECATED = "Requested functionality has been deprecated"
_COUNTER = re.compile(r"clocks_event_reasons_counters_(\w+)")


@dataclass(frozen=True)
class Pcie:
    """A device's link to its host; None: not told."""

    generation: int | None = None
    """The most that device and host can do together; an idle link runs slower."""
    device_generation: int | None = None
    """The most that the device can do."""
    width: int | None = None
    max_width: int | None = None


@dataclass(frozen=True)
class Health:
    """What is broken in a device's memory; None: not told (no ECC)."""

    ecc: bool | None = None
    uncorrected: int | None = None
    """Errors since the driver was loaded."""
    remap_pending: bool | None = None
    """Rows or pages wait for a reset to be replaced."""
    remap_failed: bool | None = None


@dataclass(frozen=True)
class ClockLimits:
    """What holds the clocks down."""

    reasons: tuple[str, ...] = ()
    """Active now, in NVML's words: sw_power_cap, hw_thermal_slowdown, gpu_idle, ..."""
    counters_s: dict[str, float] = field(default_factory=dict)
    """Seconds of a reason since the driver was loaded, where it counts them."""
    sm_mhz: float | None = None
    max_sm_mhz: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None


@dataclass(frozen=True)
class Gpu:
    """One device."""

    index: int
    name: str
    maker: str = "nvidia"
    architecture: str | None = None
    """Volta, Turing, Ampere, Ada Lovelace, Hopper, Blackwell."""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    persistence: bool | None = None
    mig: bool | None = None
    fabric: str | None = None
    """State of its registration with NVSwitch's fabric manager: "Completed" is good."""
    pcie: Pcie = Pcie()
    health: Health = Health()
    clocks: ClockLimits = ClockLimits()
    nvlinks: tuple[bool, ...] = ()
    """Whether each of its NVLinks is active."""


@dataclass(frozen=True)
class Driver:
    """The driver of all devices."""

    version: str
    cuda: str | None = None
    """The newest CUDA that it runs without its compatibility package."""


def failure(xml: str) -> str | None:
    """The sentence that nvidia-smi prints instead of XML when the driver doesn't answer."""
    text = xml.strip()
    return " ".join(text.split()) if text and not text.startswith("<") else None


def parse(xml: str, nvlink: str = "") -> tuple[Driver, tuple[Gpu, ...]]:
    """Driver and devices.

    Raises:
        ValueError: that is no output of nvidia-smi.
    """
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise ValueError(f"nvidia-smi.xml is not what nvidia-smi -q -x prints: {error}") from None
    links = _nvlinks(nvlink)
    gpus = tuple(_gpu(at, gpu, links.get(at, ())) for at, gpu in enumerate(root.iter("gpu")))
    return Driver(_text(root, "driver_version") or "", _text(root, "cuda_version")), gpus


def _gpu(index: int, gpu: ElementTree.Element, nvlinks: tuple[bool, ...]) -> Gpu:
    return Gpu(
        index=index,
        name=_text(gpu, "product_name") or "unknown",
        architecture=_text(gpu, "product_architecture"),
        memory_bytes=_mib(gpu, "fb_memory_usage/total"),
        used_bytes=_mib(gpu, "fb_memory_usage/used"),
        persistence=_is(gpu, "persistence_mode", "Enabled"),
        mig=_is(gpu, "mig_mode/current_mig", "Enabled"),
        fabric=_text(gpu, "fabric/state"),
        pcie=_pcie(gpu),
        health=_health(gpu),
        clocks=_clocks(gpu),
        nvlinks=nvlinks,
    )


def _pcie(gpu: ElementTree.Element) -> Pcie:
    link = "pci/pci_gpu_link_info"
    return Pcie(
        _whole(gpu, f"{link}/pcie_gen/max_link_gen"),
        _whole(gpu, f"{link}/pcie_gen/max_device_link_gen"),
        _whole(gpu, f"{link}/link_widths/current_link_width"),
        _whole(gpu, f"{link}/link_widths/max_link_width"),
    )


def _health(gpu: ElementTree.Element) -> Health:
    counted = [
        _whole(gpu, f"ecc_errors/volatile/{name}")
        for name in ("dram_uncorrectable", "sram_uncorrectable", "sram_uncorrectable_parity",
                     "sram_uncorrectable_secded", "double_bit/total")
    ]  # fmt: skip
    known = [number for number in counted if number is not None]
    pending = (
        _is(gpu, "remapped_rows/remapped_row_pending", "Yes"),
        _is(gpu, "retired_pages/pending_retirement", "Yes"),
    )
    return Health(
        ecc=_is(gpu, "ecc_mode/current_ecc", "Enabled"),
        uncorrected=sum(known) if known else None,
        remap_pending=True if True in pending else False if False in pending else None,
        remap_failed=_is(gpu, "remapped_rows/remapped_row_failure", "Yes"),
    )


def _clocks(gpu: ElementTree.Element) -> ClockLimits:
    said = [(each.tag, (each.text or "").strip()) for each in gpu.iter()]
    found = [(_REASON.fullmatch(tag), text) for tag, text in said]
    counted = [(_COUNTER.fullmatch(tag), text) for tag, text in said]
    return ClockLimits(
        reasons=tuple(match[1] for match, text in found if match and text == "Active"),
        counters_s={
            match[1]: float(text.split()[0]) / 1e6
            for match, text in counted
            if match and re.fullmatch(r"\d+ us", text)
        },
        sm_mhz=_number(gpu, "clocks/sm_clock"),
        max_sm_mhz=_number(gpu, "max_clocks/sm_clock"),
        power_limit_w=_power(gpu, "current_power_limit") or _power(gpu, "power_limit"),
        default_power_limit_w=_power(gpu, "default_power_limit"),
    )


def _power(gpu: ElementTree.Element, name: str) -> float | None:
    """Drivers from 530 on call the section gpu_power_readings."""
    return _number(gpu, f"gpu_power_readings/{name}") or _number(gpu, f"power_readings/{name}")


def _nvlinks(text: str) -> dict[int, tuple[bool, ...]]:
    """Of each device: "GPU 0: ..." and below it "Link 3: 26.562 GB/s" or "Link 3: <inactive>"."""
    links: dict[int, list[bool]] = {}
    for line in text.splitlines():
        if device := re.match(r"GPU (\d+):", line):
            current = links.setdefault(int(device[1]), [])
        elif (link := re.match(r"\s+Link \d+: (.+)", line)) and links:
            current.append("inactive" not in link[1])
    return {device: tuple(active) for device, active in links.items()}


def _text(place: ElementTree.Element, path: str) -> str | None:
    """What an element says; "N/A" and its like say nothing."""
    text = (place.findtext(path) or "").strip()
    return None if text in ("", "N/A", "[N/A]", _DEPRECATED) else text


def _is(place: ElementTree.Element, path: str, word: str) -> bool | None:
    text = _text(place, path)
    return None if text is None else text == word


def _number(place: ElementTree.Element, path: str) -> float | None:
    found = re.match(r"[\d.]+", _text(place, path) or "")
    return float(found[0]) if found else None


def _whole(place: ElementTree.Element, path: str) -> int | None:
    number = _number(place, path)
    return None if number is None else int(number)


def _mib(place: ElementTree.Element, path: str) -> int | None:
    number = _number(place, path)
    return None if number is None else int(number * 2**20)
