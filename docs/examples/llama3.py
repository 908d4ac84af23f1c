"""The page of Llama 3 405B on 16,384 H100."""

import math

import numpy as np
from examples.markdown import MADE, table

from paceline.config.feasible import check_layout
from paceline.config.hardware import Cluster
from paceline.config.layout import Layout
from paceline.config.model import Model
from paceline.config.stack import Stack
from paceline.plan.points import Array, Setting
from paceline.plan.prediction import Prediction
from paceline.plan.price.step import predict
from paceline.plan.scale import (
    LARGE_RUN_MTBF,
    Resilience,
    bill,
    checkpoint_bytes,
    goodput,
    resilience,
)

LLAMA = Model(
    vocab_size=128256,
    hidden_size=16384,
    ffn_size=53248,
    num_layers=126,
    num_heads=128,
    num_kv_heads=8,
    max_seq_len=131072,
)
DAYS, STOPS = 54, 419


def h100s(num_devices: int) -> Cluster:
    """Nodes of eight H100."""
    return Cluster.parse(
        {"device": "H100-SXM", "devices_per_node": 8, "num_nodes": num_devices // 8}
    )


def split_of(num_layers: int, stages: int) -> tuple[int, ...]:
    """As even as can be; what is left goes to the stages after the first."""
    each, left = divmod(num_layers, stages)
    return tuple(each + (0 < stage <= left) for stage in range(stages))


def llama(
    data_ranks: int,
    cp: int = 1,
    seq_len: int = 8192,
    global_batch: int = 2048,
    stages_per_rank: int = 4,
    **changes: object,
) -> Prediction:
    """Tensor parallel 8, pipeline 16, as published; the rest data and context parallel."""
    cluster = h100s(data_ranks * cp * 128)
    stack = Stack(elementwise="fused")
    axes = {"dp": 1, "fsdp": data_ranks, "zero": 1, "tp": 8, "pp": 16, "cp": cp, "ep": 1}
    rest = {"sequence_parallel": True, "ulysses": 1, "schedule": "interleaved"}
    stages = {
        "stages_per_rank": stages_per_rank,
        "split": split_of(LLAMA.num_layers, 16 * stages_per_rank),
    }
    types = {"precision": "bf16", "param_dtype": "bf16", "compile": False, "bucket_mib": 25.0}
    chosen = {"recompute": "none", "micro_batch": 1, **changes}
    layout = Layout.parse({**axes, **rest, **stages, **types, **chosen})
    check_layout(layout, LLAMA, cluster, seq_len, global_batch)
    return predict(Setting(LLAMA, cluster, seq_len, global_batch, stack), layout)


def page() -> str:
    """The page of the 405B run."""
    params = LLAMA.num_params
    published = [
        ("8,192: fsdp 64", llama(64), 8192, 430, "43 %"),
        ("16,384: fsdp 128", llama(128), 8192, 400, "41 %"),
        (
            "16,384: fsdp 8, cp 16, 128 K tokens",
            llama(8, cp=16, seq_len=131072, global_batch=128),
            131072,
            380,
            "38 %",
        ),
    ]
    fitting = {
        "nothing recomputed": llama(128),
        "norms and activations recomputed": llama(128, recompute="selective"),
        "every second block recomputed, cp 2, fsdp 64": llama(
            64, cp=2, recompute="full", recompute_layers=1
        ),
        "all blocks recomputed": llama(128, recompute="full"),
        "nothing recomputed, cp 4, fsdp 32": llama(32, cp=4),
    }
    fits = {name: one for name, one in fitting.items() if one.peak_memory_bytes < 80e9}
    best = max(fits, key=lambda name: 1 / fits[name].step_s)
    return f"""# Llama 3 405B on 16,384 H100

{LLAMA.num_params:,} parameters: 126 blocks, 16,384 wide, 128 heads over 8 of keys and values.
Layouts and rates that are quoted as published: arXiv 2407.21783, tables 3 and 4, section 3.3.4.

{MADE}
## States alone

{table(("what", "bytes a parameter", "GB"), _states(params))}
Weights, gradients and 8-bit optimizer are {params * 6 / 1e12:.2f} TB:
{math.ceil(params * 6 / 80e9)} cards of 80 GB for the states alone, before any activation. With
fp32 moments they are
{params * 12 / 1e12:.2f} TB, {math.ceil(params * 12 / 80e9)} cards. (Rounded to 405 B parameters:
810 + 810 + 810 GB, and 3.24 TB.)

## A layout that fits

tp 8 x pp 16 cuts the parameters into 128 parts of {params / 128 / 1e9:.2f} B. With
fsdp 128 the optimizer's fp32 master copy and moments are cut further, {params * 12 / 1e9:,.0f} GB /
16,384 = {params * 12 / 16384 / 1e9:.2f} GB a card (ZeRO 1: parameters and gradients stay whole in a
pipeline). A step of 2,048 sequences of 8,192 tokens leaves each pipeline 16 micro-batches, of
which the interleaved schedule (4 stages a rank) keeps all in flight. Memory of the heaviest
rank, GB:

{table(_FIT_HEAD, (_fit_row(name, one) for name, one in fitting.items()))}
The bf16 parameters that the passes use stand under "gathered". {len(fits)} of these fit in 80 GB;
the fastest is "{best}": {fits[best].peak_memory_bytes / 1e9:.0f} GB and {fits[best].step_s:.2f} s a
step, {fits[best].mfu:.1%} MFU. The published run kept all activations and fitted; it
says that it frees at once whatever is not used again. Megatron, for one, gathers once more in the
backward pass what sequence parallelism gathered. Ours keeps what the products read, two whole
copies of the residual stream a block. That
is 2 x 8,192 x 16,384 x 2 bytes = {2 * 8192 * 16384 * 2 / 1e9:.2f} GB for a block and
micro-batch, {2 * 8192 * 16384 * 2 * 8 * 16 / 1e9:.0f} GB for 8 blocks and 16 micro-batches.

## Time

Model FLOPs of a token: 6 x {LLAMA.num_matmul_params / 1e9:.1f} B matmul parameters + 6 L h s causal
attention = {LLAMA.train_flops_per_token(8192) / 1e12:.2f} TFLOP at 8 K tokens and
{LLAMA.train_flops_per_token(131072) / 1e12:.2f} at 128 K. The paper does not say whether it counts
attention as causal; the full square is {LLAMA.train_flops_per_token(8192, causal=False) / 1e12:.2f}
and {LLAMA.train_flops_per_token(131072, causal=False) / 1e12:.2f} TFLOP, so both are given.
Predicted without a fit, with fused element-wise kernels and nothing recomputed:

{table(_SPEED_HEAD, (_speed_row(*row) for row in published))}
The step of 16,384 GPUs by term, seconds:

{table(("term", "s", "share"), _terms(published[1][1]))}
## Failures

{_llama_failures()}"""


def _states(params: int) -> list[tuple[str, str, str]]:
    kinds = [
        ("weights, bf16", 2),
        ("gradients, bf16", 2),
        ("Adam's two moments in 8 bits", 2),
        ("the same in fp32", 8),
        ("fp32 master copy of the weights", 4),
    ]
    return [(name, f"{num}", f"{params * num / 1e9:,.0f}") for name, num in kinds]


_FIT_HEAD = (
    *("layout", "params", "grads", "optimizer", "activations", "gathered", "comm buffers"),
    *("slack", "context", "all", "step, s", "MFU"),
)


def _fit_row(name: str, one: Prediction) -> tuple[str, ...]:
    terms = one.heaviest.terms
    order = (
        *("params", "grads", "optimizer", "activations", "gather_buffers", "comm_buffers"),
        *("allocator_slack", "context"),
    )
    assert one.mfu is not None
    return (
        name,
        *(f"{terms[term] / 1e9:.1f}" for term in order),
        f"**{one.peak_memory_bytes / 1e9:.0f}**",
        f"{one.step_s:.2f}",
        f"{one.mfu:.0%}",
    )


_SPEED_HEAD = (
    *("GPUs and axes beside tp 8, pp 16", "step, s", "TFLOP/s causal", "full square"),
    *("published TFLOP/s", "published MFU"),
)


def _speed_row(name: str, one: Prediction, seq_len: int, tflops: int, mfu: str) -> tuple[str, ...]:
    assert one.mfu is not None
    causal = one.mfu * 989.4
    full = causal * LLAMA.train_flops_per_token(seq_len, causal=False)
    full /= LLAMA.train_flops_per_token(seq_len)
    return name, f"{one.step_s:.2f}", f"{causal:.0f}", f"{full:.0f}", f"{tflops}", mfu


def _terms(one: Prediction) -> list[tuple[str, str, str]]:
    found = sorted(one.time_s.items(), key=lambda item: -item[1])
    rows = [(name, f"{value:.2f}", f"{value / one.step_s:.1%}") for name, value in found]
    return [row for row in rows if row[1] != "0.00"]


def _llama_failures() -> str:
    cluster, state = h100s(16384), float(checkpoint_bytes(LLAMA.num_params))
    mtbf_hours = DAYS * 24 / STOPS
    found = [
        resilience(cluster, 16384, state, restart_s=minutes * 60, storage_bytes_per_s=2e12)
        for minutes in (5, 10, 20)
    ]
    assert all(one is not None for one in found)
    middle = found[1]
    assert middle is not None
    tau, save = float(middle.interval_s), float(middle.save_s)
    mtbf = float(middle.mtbf_s)
    line = 1 - save / tau - (tau / 2 + 600) / mtbf
    rows = [
        (f"{minutes}", f"{float(one.interval_s):.0f}", f"{float(one.goodput):.1%}")
        for minutes, one in zip((5, 10, 20), found, strict=True)
        if one is not None
    ]
    sizes = np.array([1024, 4096, 16384, 65536, 131072])
    others = resilience(cluster, sizes, state)
    assert others is not None
    spent = bill(cluster, 16384, DAYS * 86400.0)
    assert spent.energy_kwh is not None
    return f"""{STOPS} unexpected stops in {DAYS} days: mean time between failures M = {DAYS} x 24 h
/ {STOPS} = {mtbf_hours:.2f} h = {mtbf:,.0f} s; of one GPU x 16,384 = {LARGE_RUN_MTBF.value:,.0f} h.

- A checkpoint: 12 bytes a parameter (fp32 weights and moments) = {state / 1e12:.2f} TB,
  {state / 16384 / 1e9:.2f} GB a card.
- A save blocks for the copy to the host and for agreeing:
  D = {state / 16384 / 1e9:.2f} GB / 20 GB/s + 2 s = {save:.2f} s (both assumed); the files are
  written beside (at 2 TB/s in
  {state / 2e12:.1f} s).
- Young: tau = sqrt(2 D M) = {math.sqrt(2 * save * mtbf):.0f} s; Daly: {tau:.0f} s.
- R = 10 min from a failure to the next good step (assumed):
  goodput = 1 - D / tau - (tau / 2 + R) / M = 1 - {save / tau:.3f} - {(tau / 2 + 600) / mtbf:.3f} =
  {line:.1%}; exactly, for failures at
  random   moments, {float(middle.goodput):.1%}. Published: more than 90 % effective training time.

{table(("R, min", "tau, s", "goodput"), rows)}
With the same reliability a GPU, R = 10 min, and other numbers of GPUs:

{table(("GPUs", "M, h", "tau, s", "goodput"), _sizes(sizes, others))}
Checkpointing once an hour instead would leave {float(goodput(3600, save, 600, mtbf)):.1%} of 16,384
GPUs. At 700 W each they draw {float(spent.energy_kwh) / 1e6:.1f} GWh in {DAYS} days at most, hosts,
network and cooling not counted.
"""


def _sizes(sizes: Array, found: Resilience) -> list[tuple[str, ...]]:
    columns = (found.mtbf_s, found.interval_s, found.goodput)
    return [
        (f"{size:,}", f"{mtbf / 3600:.1f}", f"{tau:.0f}", f"{share:.1%}")
        for size, mtbf, tau, share in zip(sizes, *columns, strict=True)
    ]
