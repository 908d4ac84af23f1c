"""Core contention: how fast the ranks of a pipeline are, by how many of their machine compute at a
time.

Ranks on a CPU share its cores, and one that waits leaves them to the others. By how much these get
faster is measured (`config.curves.SharingCurve`); here it is read for the ranks of a pipeline. On
devices of their own, and where nobody measured, the pace is always 1.

Legend of shapes: n points.
"""

import numpy as np

from paceline.config.curves import SharingCurve
from paceline.plan.points import Array, Points, Setting
from paceline.plan.schedules.contention import CoreContention


def core_contention_of(setting: Setting, points: Points) -> CoreContention | None:
    """The neighbours of one layout's pipeline on a machine; None where ranks don't slow each other
    down, as far as is known.
    """
    curve, count = sharing_curve_of(setting), int(_neighbours(setting, points)[0])
    if curve is None or count == 1:
        return None
    computing = np.arange(1, count + 1)
    return CoreContention(count, tuple(paces(setting, points, computing).tolist()), curve.spread)


def paces(setting: Setting, points: Points, computing: Array) -> Array:
    """How fast a rank is while so many ranks of the pipeline compute on its machine, over its speed
    while all do; the ranks of a stage compute together.

    Fewer ranks are never slower each, nor faster together: what a measurement says beyond is noise.
    """
    curve = sharing_curve_of(setting)
    if curve is None:
        return np.ones(1)
    on_node = curve.num_ranks[-1]
    ranks = np.clip(computing * on_node / _neighbours(setting, points), 1, on_node)
    pace = np.interp(np.log(ranks), np.log(curve.num_ranks), np.log(curve.pace))
    return np.clip(np.exp(pace), 1.0, on_node / ranks)


def sharing_curve_of(setting: Setting) -> SharingCurve | None:
    """What was measured of ranks that share cores."""
    curves = setting.device.curves
    return None if curves is None else curves.sharing


def _neighbours(setting: Setting, points: Points) -> Array:
    """Pipeline ranks on a machine: ranks are numbered stage by stage (comm/mesh.py)."""
    of_stage = points.num_ranks // points.pp
    return np.clip(setting.cluster.devices_per_node // of_stage, 1, points.pp)
