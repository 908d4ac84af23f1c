"""The software that trains: versions, and whether they belong together.

Which versions do is not written down a second time here: torch's own package names the cuDNN, NCCL
and Triton that it was built with, Paceline's names its torch. Only what no package says is a table:
which driver a CUDA needs, and which CUDA a device needs.
"""

import json
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata

import torch
from packaging.requirements import Requirement

MINIMUM_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""First driver for each major CUDA: a newer minor one runs on it too ("minor version
compatibility"). Source: https://docs.nvidia.com/deploy/cuda-compatibility and the table of drivers
in https://docs.nvidia.com/cuda/cuda-toolkit-release-notes."""
CUDA_OF_ARCHITECTURE = {
    "Maxwell": ((6, 5), (12, 9)),
    "Pascal": ((8, 0), (12, 9)),
    "Volta": ((9, 0), (12, 9)),
    "Turing": ((10, 0), None),
    "Ampere": ((11, 0), None),
    "Ada Lovelace": ((11, 8), None),
    "Hopper": ((11, 8), None),
    "Blackwell": ((12, 8), None),
}
"""First and last CUDA whose compiler knows a device. Source: the compute capabilities listed in the
release notes of CUDA 9.0 to 13.0."""
_MONITORS = ("dcgmi", "nv-hostengine", "dcgm-exporter", "amd-smi", "rocm-smi", "node_exporter",
             "prometheus-node-exporter")  # fmt: skip


@dataclass(frozen=True)
class Required:
    """What one installed package asks of another."""

    by: str
    package: str
    versions: str
    """As packages say it: "==2.27.3", ">=2.11,<2.14"."""
    installed: str | None
    """None: it is not."""
    fits: bool


@dataclass(frozen=True)
class Software:
    """Versions, None where there is none."""

    python: str
    torch: str
    cuda: str | None
    """That torch was built with."""
    hip: str | None
    """That torch was built with, of ROCm."""
    cudnn: str | None
    nccl: str | None
    num_devices: int
    """That torch sees."""
    required: tuple[Required, ...]
    monitors: tuple[str, ...]
    """Programs that watch devices or hosts, found on the path."""


def ask() -> str:
    """What is installed in this environment, as JSON."""
    seen = torch.cuda.is_available()
    return json.dumps(
        asdict(
            Software(
                python=platform.python_version(),
                torch=torch.__version__,
                cuda=torch.version.cuda,
                hip=torch.version.hip,
                cudnn=str(cudnn) if (cudnn := torch.backends.cudnn.version()) else None,
                nccl=".".join(map(str, torch.cuda.nccl.version())) if seen else None,
                num_devices=torch.cuda.device_count() if seen else 0,
                required=(*_required("paceline"), *_required("torch")),
                monitors=tuple(filter(shutil.which, _MONITORS)),
            )
        )
    )


def version(text: str) -> tuple[int, ...]:
    """The leading numbers: 550.54.15 is (550, 54, 15), 12.8+x is (12, 8)."""
    numbers = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits or len(digits) > 9:  # no version is that long
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _required(package: str) -> Iterator[Required]:
    """What a package asks for in this environment, its extras left out."""
    try:
        texts = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return
    for wish in map(Requirement, texts):
        if wish.marker is None or wish.marker.evaluate({"extra": ""}):
            installed = _installed(wish.name)
            fits = installed is not None and wish.specifier.contains(installed, prereleases=True)
            yield Required(package, wish.name, str(wish.specifier), installed, fits)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
