"""Which of torch's implementations of attention a run uses, decided once before its first step."""

import torch

from paceline.config.job import Job
from paceline.config.model import Model
from paceline.kernels.attention import choose
from paceline.kernels.attention.rule import AttentionShape, BackendChoice
from paceline.kernels.attention.table import remembered
from paceline.kernels.dtypes import DTYPES


def attention_choice(model: Model, job: Job, device: torch.device) -> BackendChoice | None:
    """What to run under the plain causal mask; None leaves every call to torch.

    With layout.kernels = "auto" only what was measured on this device, with "triton" also what a
    stated rule says.
    """
    layout = job.layout
    if model.sinks or model.score_cap is not None:
        return None
    if not model.causal or layout.cp != 1 or device.type != "cuda" or layout.kernels == "reference":
        return None
    tp = layout.tp
    shape = AttentionShape(
        job.micro_batch,
        model.num_heads // tp,
        max(model.num_kv_heads // tp, 1),
        job.train.seq_len,
        model.head_dim,
        model.value_dim,
    )
    dtype = DTYPES[layout.precision]
    if layout.kernels == "auto" and remembered(shape, dtype, device) is None:
        return None
    return choose(shape, dtype, device)
