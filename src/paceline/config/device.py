"""Device: one accelerator, its limits and what was measured of it, with the origin of every number.

Peak rates and bandwidths are the vendors' dense figures (structured sparsity, which doubles them on
paper, is never used in training), per device, in FLOP/s and bytes/s.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from paceline.config.curves import CodecCurve, DeviceCurves
from paceline.config.figure import Figure
from paceline.config.frozen import FrozenConfig


class Device(FrozenConfig):
    """One accelerator (or one CPU rank): what it can do at best."""

    name: str
    kind: Literal["cuda", "cpu", "other"]
    """torch's device type; ROCm devices are "cuda" there as well. "other" can be planned for, not
    trained on: TPUs, wafers."""
    memory_bytes: Figure | None = None
    """What a program may have of it, as torch's `total_memory` says: not the datasheet's number."""
    memory_bytes_per_s: Figure | None = None
    peak_flops: Mapping[str, Figure] = Field(default_factory=dict)
    """Dense peak in FLOP/s by arithmetic: fp64, fp32, tf32, bf16, fp16, fp8, fp4."""
    precisions: Annotated[tuple[str, ...], Field(strict=False)] = ("fp32",)
    """Arithmetic that training may ask for: what the device does natively."""
    curves: DeviceCurves | None = None
    """What was measured of it; None: the catalogue's data files, or nothing known."""
    codecs: Mapping[str, CodecCurve] = Field(default_factory=dict)
    """Measured: how fast it compresses, by the names of `comm`."""
    power_watts: Figure | None = None
    """The most it draws."""
    streamed_bytes_per_s: Figure | None = None
    """How fast weights come to a device that keeps none (and their gradients leave it), each way;
    None: weights wait in its own memory."""

    @property
    def safest_fast_precision(self) -> Literal["bf16", "fp32"]:
        """The fastest arithmetic that costs no stability: fp16 needs loss scaling, fp8 rounds.

        On a CPU bf16 is a wish of the person: eager kernels are not reliably faster there.
        """
        return "bf16" if self.kind != "cpu" and "bf16" in self.precisions else "fp32"

    @property
    def is_cpu(self) -> bool:
        """Whether it is the host's own cores: what the host does takes the device's time."""
        return self.kind == "cpu"

    def peak(self, precision: str) -> Figure | None:
        """Peak in FLOP/s for matrix products of this precision, None when unknown."""
        return self.peak_flops.get(precision)
