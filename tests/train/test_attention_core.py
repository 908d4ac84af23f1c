"""Which attention a run uses: pure but for the file of measured choices, no GPU needed."""

import pytest
import torch

from paceline.kernels.attention.rule import BackendChoice
from paceline.models.attention import Sdpa
from paceline.train import attention_core
from tests.parallel.training import FP32, job_of

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def _job(kernels):
    job = job_of(1, (*FP32, "layout.micro_batch=2"))
    return job.replace(layout=job.layout.replace(kernels=kernels))


def _choice(kernels, device):
    job = _job(kernels)
    return attention_core.attention_choice(job.model, job, device)


@pytest.fixture
def measured(monkeypatch):
    """What `choose` was asked for; nothing is remembered unless a test says so."""
    asked = []

    def choose(shape, dtype, device):
        asked.append((shape, dtype))
        return BackendChoice("flash", "because")

    monkeypatch.setattr(attention_core, "choose", choose)
    monkeypatch.setattr(attention_core, "remembered", lambda *_: None)
    return asked


def test_kernels_ask_the_rule_for_this_runs_shape(measured):
    job = _job("triton")
    assert attention_core.attention_choice(job.model, job, CUDA) == BackendChoice(
        "flash", "because"
    )
    ((shape, dtype),) = measured
    assert shape.batch == 2
    assert shape.heads == job.model.num_heads
    assert shape.kv_heads == job.model.num_kv_heads
    assert shape.seq_len == job.train.seq_len
    assert dtype == torch.float32


def test_auto_takes_only_what_was_measured(measured, monkeypatch):
    assert _choice("auto", CUDA) is None
    monkeypatch.setattr(attention_core, "remembered", lambda *_: BackendChoice("flash", "measured"))
    assert _choice("auto", CUDA) is not None


def test_the_rest_is_left_to_torch(measured):
    assert _choice("reference", CUDA) is None
    assert _choice("triton", CPU) is None
    assert measured == []


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_chosen_backend_gives_what_torchs_own_choice_gives():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 8, 16, generator=generator) for _ in range(3))
    expected = Sdpa()(q, k, v, None)
    for backend in ("math", "flash", "flex"):
        torch.testing.assert_close(Sdpa(backend)(q, k, v, None), expected)
