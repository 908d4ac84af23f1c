"""Settings for every test."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
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


@pytest.fixture(scope="module")
def networks_alone() -> Iterator[None]:
    """Networks of namespaces are the machine's: with several workers, modules take turns."""
    with FileLock(Path(tempfile.gettempdir()) / "paceline-tests-networks.lock"):
        yield
