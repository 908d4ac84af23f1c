"""Chooses which implementation of attention runs: torch's own fused kernels, none of ours.

What is fastest depends on the device, the shape and the mask, and torch's default isn't it on
Hopper (there it is half as fast as cuDNN's, published in pytorch#142132). `choose` gives what was
measured on this device (`measure`, when asked: never in training), else what a stated rule says,
and always why. `attend` runs it.

Not here: ring attention (`parallel/cp.py`) and layers (`models/attention.py`).
"""

from pathlib import Path

import torch

from paceline.kernels.attention.backends import asking
from paceline.kernels.attention.backends import attend as attend
from paceline.kernels.attention.backends import block_mask as block_mask
from paceline.kernels.attention.rule import AttentionShape, BackendChoice, Mask, rule
from paceline.kernels.attention.rule import Backend as Backend
from paceline.kernels.attention.table import measure as measure
from paceline.kernels.attention.table import remembered

SHAPES = (
    AttentionShape(4, 32, 8, 4096, 128, 128),
    AttentionShape(1, 32, 8, 32768, 128, 128),
    AttentionShape(8, 16, 16, 2048, 64, 64),
    AttentionShape(2, 128, 128, 4096, 192, 128),
)
"""Of layers that people train; the last is latent attention's."""


def choose(
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    mask: Mask = "causal",
    path: Path | None = None,
) -> BackendChoice:
    """Which implementation to run, and why.

    Args:
        shape: of the call.
        dtype: of queries, keys and values.
        device: where it runs.
        mask: who sees whom.
        path: the file of measured choices; by default the one that PACELINE_ATTENTION_TABLE names,
            or attention.json beside the table that PACELINE_KERNEL_TABLE names.
    """
    measured = remembered(shape, dtype, device, mask, path)
    can = asking(shape, dtype, device, mask)
    if measured is not None and can(measured.backend):
        return measured
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return rule(shape, dtype, capability, mask, can)
