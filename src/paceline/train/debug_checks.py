"""Debug checks: what makes Python, torch or NCCL check itself, and every step slower for it.

Such settings are for finding an error, and stay switched on by mistake: in a shell's profile, in a
job script, in a model's code.
"""

import os
import sys
import tracemalloc

import torch

_BY_ENVIRONMENT = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "HIP_LAUNCH_BLOCKING": ("1",),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "NCCL_DEBUG": ("TRACE",),
    "NCCL_P2P_DISABLE": ("1",),
    "NCCL_SHM_DISABLE": ("1",),
    "NCCL_IB_DISABLE": ("1",),
    "PYTHONMALLOC": ("debug", "malloc_debug", "pymalloc_debug"),
    "MALLOC_CHECK_": ("1", "2", "3"),
}
"""Variables with the values that slow a job down."""


def enabled_checks() -> list[str]:
    """What is switched on in this process, as it would be written: "CUDA_LAUNCH_BLOCKING=1"."""
    found = [
        f"{name}={os.environ[name]}"
        for name, values in _BY_ENVIRONMENT.items()
        if os.environ.get(name) in values
    ]
    calls = {
        "torch.autograd.set_detect_anomaly(True)": torch.is_anomaly_enabled(),
        "tracemalloc.start()": tracemalloc.is_tracing(),
        "sys.settrace(..), as debuggers do": sys.gettrace() is not None,
        "python -X dev": sys.flags.dev_mode,
    }
    return found + [call for call, is_on in calls.items() if is_on]
