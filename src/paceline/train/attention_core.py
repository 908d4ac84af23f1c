"""Which of torch's implementations of attention a run uses, decided once before its first step."""

import torch

from paceline.config.frozen import size
from paceline.config.job import Job
from paceline.config.model import Model
from paceline.kernels.attention import choose
from paceline.kernels.attention.rule import AttentionShape, BackendChoice
from paceline.kernels.attention.table import remembered
from paceline.parallel.apply import DTYPES


def attention_choice(job: Job, device: torch.device) -> BackendChoice | None:
    """What to run under the plain causal mask; None leaves every call to torch.

    With layout.kernels = "auto" only what was measured on this device, with "triton" also what a
    stated rule says.

    Args:
        job: concrete.
        device: of this rank.
    """
    layout, model = job.layout, job.model
    whole = isinstance(model, Model) and size(layout.cp) == 1
    if not whole or device.type != "cuda" or layout.kernels == "reference":
        return None
    assert isinstance(model, Model)
    tp = size(layout.tp)
    shape = AttentionShape(
        job.micro_batch,
        model.num_heads // tp,
        max(model.num_kv_heads // tp, 1),
        job.train.seq_len,
        model.head_dim,
        model.value_dim,
    )
    assert layout.precision != "auto"
    dtype = DTYPES[layout.precision]
    if layout.kernels == "auto" and remembered(shape, dtype, device, "causal") is None:
        return None
    return choose(shape, dtype, device)
