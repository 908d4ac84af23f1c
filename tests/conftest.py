"""Settings for every test."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Kernels are tested with torch's deterministic mode on, which cuBLAS needs to be told beforehand.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if not torch.cuda.is_available():
    # Before anything imports Triton: then its kernels run on the CPU, in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests are many small tensors on few cores: threads would wait for each other.
torch.set_num_threads(1)

# How long an example takes depends on what else the machine does.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")

# Networks of namespaces are the machine's: tests that build them take turns.
_ONE_AFTER_ANOTHER = "test_net"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers (make test), a file is one worker's: its fixtures are made once."""
    for item in items:
        file = Path(item.path)
        group = _ONE_AFTER_ANOTHER if file.name.startswith(_ONE_AFTER_ANOTHER) else str(file)
        item.add_marker(pytest.mark.xdist_group(group))
