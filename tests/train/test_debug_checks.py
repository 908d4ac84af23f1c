"""What makes torch or Python check themselves is seen in the process where it is switched on."""

import tracemalloc

import pytest
import torch

from paceline.train.debug_checks import enabled_checks


def test_an_ordinary_process_checks_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    monkeypatch.setattr("sys.gettrace", lambda: None)  # coverage traces
    assert enabled_checks() == []


def test_each_setting_is_told_as_it_would_be_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.gettrace", lambda: None)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with torch.autograd.set_detect_anomaly(True):
        tracemalloc.start()
        told = enabled_checks()
        tracemalloc.stop()
    assert told == [
        "CUDA_LAUNCH_BLOCKING=1",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL",
        "torch.autograd.set_detect_anomaly(True)",
        "tracemalloc.start()",
    ]
