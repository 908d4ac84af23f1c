"""Chooses which implementation of causal attention runs: torch's own fused kernels, none of ours.

What is fastest depends on the device and the shape, and torch's default isn't it on Hopper (there
it is half as fast as cuDNN's, published in pytorch#142132). `choose` gives what was measured on
this device (`table.measure`, when asked: never in training), else what a stated rule says, and
always why. `backends.attend` runs it.

Not here: other masks, which stay torch's choice (`models/attention.py`), and ring attention
(`parallel/cp`).
"""

from pathlib import Path

import torch

from paceline.kernels.attention.backends import can_run
from paceline.kernels.attention.rule import AttentionShape, BackendChoice, rule
from paceline.kernels.attention.table import remembered


def choose(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, path: Path | None = None
) -> BackendChoice:
    """Which implementation to run, and why.

    Args:
        shape: of the call.
        dtype: of queries, keys and values.
        device: where it runs.
        path: the file of measured choices; by default the one that PACELINE_ATTENTION_TABLE names,
            or attention.json beside the table that PACELINE_KERNEL_TABLE names.
    """
    measured = remembered(shape, dtype, device, path)
    if measured is not None and can_run(measured.backend, shape, dtype, device):
        return measured
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return rule(shape, dtype, capability, lambda each: can_run(each, shape, dtype, device))
