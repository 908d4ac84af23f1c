"""Reads the curves of the catalogue's devices, each file when it is first asked for.

A device that was not measured may have a relative that was: the same chip with other memory or
another power limit, or the nearest generation of the same vendor. Its shares of its peak are then
assumed of the device too, and `KnownCurves.assumed` says so.
"""

import functools
import json
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from paceline.config.catalogue.devices import CATALOGUE
from paceline.config.curves import AttentionCurve, DeviceCurves, MatmulCurve


class StandIn(NamedTuple):
    """Whose curves stand in for a device's, and by how much it is slower or faster."""

    name: str
    scale: float
    """The device's share of its peak over the relative's."""
    why: str


# Those with a file of their own.
MEASURED = {
    *("A100-80", "H100-SXM", "H200", "B200", "B300", "GB200", "GB300", "L40S", "RTX-PRO-6000"),
}
_BEST = "best shapes of stas00/ml-engineering's table of achievable matmul rates"
RELATIVES = {
    "A100-40": StandIn("A100-80", 1.0, "the same chip"),
    "A100-80-PCIe": StandIn("A100-80", 0.93, f"the same chip at 300 W; {_BEST}: 81.1 to 86.9 %"),
    "A30": StandIn("A100-80", 1.0, "the same generation"),
    "A6000": StandIn("A100-80", 1.0, "the same generation"),
    "A800-80": StandIn("A100-80", 1.0, "the same chip"),
    "A40": StandIn("A100-80", 1.0, "the same generation"),
    "RTX-3090": StandIn("A100-80", 1.0, "the same generation"),
    "H800-80": StandIn("H100-SXM", 1.0, "the same chip"),
    "H20": StandIn("H100-SXM", 1.0, "the same generation"),
    "GH200-96": StandIn("H100-SXM", 1.0, "the same chip"),
    "H100-PCIe": StandIn("H100-SXM", 1.0, "the same chip with fewer processors"),
    "H100-96-HBM2e": StandIn(
        "H100-SXM", 0.87, "the same chip at 500 W; clocks about as the cube root of power"
    ),
    "L4": StandIn("L40S", 1.0, "the same generation"),
    "RTX-4090": StandIn("L40S", 1.0, "the same generation"),
    "V100": StandIn("A100-80", 1.0, "the next generation"),
    "V100-16": StandIn("A100-80", 1.0, "the next generation"),
    "P100": StandIn("A100-80", 1.0, "the second next generation"),
    "T4": StandIn("A100-80", 1.0, "the next generation"),
    "MI250X-GCD": StandIn("A100-80", 0.75, "another vendor's; the ratio of its next generation"),
    "MI300X": StandIn("H100-SXM", 0.64, f"another vendor's; {_BEST}: 51.4 to 80.3 %"),
    "MI325X": StandIn("H100-SXM", 0.75, f"another vendor's; {_BEST}: 60.4 to 80.3 %"),
    "MI355X": StandIn("B200", 0.87, f"another vendor's; {_BEST}: 68.0 to 77.6 %"),
    "Gaudi2": StandIn("A100-80", 1.11, f"another vendor's; {_BEST}: 96.9 to 86.9 %"),
    "Gaudi3": StandIn("H100-SXM", 0.92, f"another vendor's; {_BEST}: 74.1 to 80.3 %"),
    "TPUv2": StandIn("A100-80", 1.0, "another vendor's of its time"),
    "TPUv3": StandIn("A100-80", 1.0, "another vendor's of its time"),
    "TPUv4": StandIn("A100-80", 1.0, "another vendor's of its time"),
    "TPUv5e": StandIn("A100-80", 1.0, "another vendor's of its time"),
    "TPUv5p": StandIn("A100-80", 1.0, "another vendor's of its time"),
    "TPUv6e": StandIn("A100-80", 1.0, "another vendor's of its time"),
    "TPUv7": StandIn("A100-80", 1.0, "another vendor's, of an earlier time"),
    "CS-3": StandIn("A100-80", 1.0, "another vendor's, of another kind"),
    "Trainium2": StandIn("A100-80", 1.0, "another vendor's of its time"),
}


class KnownCurves(NamedTuple):
    """Curves of a device or of its relative."""

    curves: DeviceCurves
    scale: float
    """To multiply shares by: 1 for a device's own."""
    assumed: str
    """Why they are taken for the device's; "" for its own."""


@functools.cache
def catalogue_curves(name: str) -> KnownCurves | None:
    """Curves of a device of the catalogue, or of its relative; None where there are none."""
    if name in MEASURED:
        return KnownCurves(_read(name), 1.0, "")
    if name not in RELATIVES:
        return None
    relative = RELATIVES[name]
    curves = _read(relative.name)
    if CATALOGUE[name].kind == "other":
        curves = _without_processors(curves)
    why = f"assumed: {relative.scale:g} x the shares of {relative.name}, {relative.why}"
    return KnownCurves(curves, relative.scale, why)


def _without_processors(curves: DeviceCurves) -> DeviceCurves:
    """Without the steps that the many processors of a GPU make: a TPU has one or two."""
    matmul = {key: curve.replace(tile=None) for key, curve in curves.matmul.items()}
    return curves.replace(matmul=matmul, num_processors=None)


@functools.cache
def _read(name: str) -> DeviceCurves:
    text = resources.files("paceline.config.catalogue").joinpath(f"{name}.json").read_text("utf-8")
    raw = json.loads(text)
    origin = "; {package} ({licence})".format(**raw["origin"])
    peaks = CATALOGUE[name].peak_flops
    return DeviceCurves(
        matmul={
            key: _matmul(curve, peaks[key].value, origin) for key, curve in raw["matmul"].items()
        },
        attention={
            key: AttentionCurve.parse(curve | {"source": curve["source"] + origin})
            for key, curve in raw["attention"].items()
        },
        num_processors=raw["num_processors"],
    )


def _matmul(curve: dict[str, Any], peak: float, origin: str) -> MatmulCurve:
    """Files hold microseconds, as measured; a curve holds shares of the peak."""
    work = 2.0 * np.einsum("i,j,k->ijk", *(np.array(curve[axis], float) for axis in "mnk"))
    share = work.ravel() / (np.array(curve["us"], float) * 1e-6 * peak)
    return MatmulCurve(
        m=tuple(map(float, curve["m"])),
        n=tuple(map(float, curve["n"])),
        k=tuple(map(float, curve["k"])),
        share=tuple(np.minimum(share, 1.0).tolist()),
        tile=None if curve["tile"] is None else tuple(curve["tile"]),
        source=curve["source"] + origin,
    )
