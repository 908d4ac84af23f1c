"""Rules about what the device computes with: arithmetic, attention, fusion, sizes."""

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from paceline.config.job import Job
from paceline.explain.changes import changed_job, runnable_changes
from paceline.explain.finding import Evidence, Finding
from paceline.explain.subject import Subject
from paceline.explain.what_if import fits, what_if
from paceline.observe.caveats import TraceDevice
from paceline.observe.terms import OTHER_IDS, TERM_ID
from paceline.render.figures import time_text

# Names of cuBLAS, cuDNN (engines take their type first: dgrad_engine<float, ...), CUTLASS, Tensile
# (Cijk_..._S..: single precision, where H and B are halves) and MIOpen. TF32 is looked for first.
_NARROW_KERNELS = re.compile(r"b?fp?16(?!gemm)|half|fp8|e4m3|e5m2")
_TF32_KERNELS = re.compile(r"tf32|s1688(gemm|cudnn|fprop|dgrad|wgrad)")
_FP32_KERNELS = re.compile(
    r"sgemm|scudnn|f32f32_f32f32|_ffma|simt_s|gemmsn?_f32|fp32_fp32|_s_nn_|(?<![a-z])fp32(?![a-z0-9])|"
    r"Cijk_A[a-z]+_B[a-z]+_S(?!_MX)[BS]?_|"
    r"(engine|conv\w*|winograd\w*|gemm\w*|gemv\w*|dgrad\w*|wgrad\w*|fprop\w*|kernel\w*)"
    r"<(int, ?)*float\b"
)
_AMD = re.compile(r"AMD|Radeon|Instinct|gfx", re.I)
_MI200 = re.compile(r"MI(2\d\d|3\d\d)", re.I)
# Peak rates over those of bf16 on the tensor cores of data-centre devices, roughly: 19.5 and 156 of
# 312 TFLOP/s (NVIDIA A100 datasheet). Products also move bytes, so half of it counts.
_TIME_LEFT = {"fp32": 0.15, "tf32": 0.55}
_SOFTMAX = re.compile(r"softmax", re.I)
_NO_ATTENTION = re.compile(r"log_?softmax|topk|gating|sampl|loss|cross_?entropy", re.I)
_FUSED_ATTENTION = re.compile(
    r"flash|fmha|attn|attention|sdpa|(?<![a-z])f?mha|(?<![a-z])(mla|paged|pa_(fwd|decode|mqa))",
    re.I,
)
_BATCHED_PRODUCT = re.compile(r"bmm|baddbmm|matmul|einsum")
# Fused attention takes a third of the time of separate kernels or less (arXiv:2205.14135).
_ATTENTION_LEFT = 0.4
# Element-wise kernels that read and write everything in between; fused they take half or less.
_FUSED_LEFT = 0.5
_MUCH_ELEMENTWISE = 0.2
_FUSED = re.compile(r"triton_|fused|liger|batch_?norm|(?<![a-z])bn_", re.I)
_ELEMENTWISE = re.compile(
    r"elementwise|vectorized|reduce|norm|softmax|[gs]elu|silu|sigmoid|relu|copy_kernel|cast|"
    r"transpose|fill|cat_|dropout|rotary|where|loss",
    re.I,
)
# On a device a kernel shorter than this ends before the next one is launched.
_SHORT_NS = 10_000
# Tokens of a micro-batch that fill a device, by whether it is a CPU: a core slows down again where
# activations leave its caches (see plan.resolve).
_FILLING_TOKENS = {True: 1024, False: 8192}
# Operators gain by larger sizes as well as the host does: of few rows they reach a part of their
# rate.
_BEYOND_SEEN = 3.0


def fp32(subject: Subject) -> Finding | None:
    """Products in fp32 (or fp64) where bf16 was at hand."""
    job = subject.job
    if job is None:
        return _of_trace(subject)
    now = job.layout.precision
    if now not in ("fp32", "fp64"):
        return None
    changes = _narrower(job)
    if not changes:
        return None
    asked = what_if(subject, changes)
    if asked is not None:
        gain_s = asked.gain_s
    elif now == "fp64":
        # Half the bytes, and twice as many numbers in a vector register: half the time.
        work = ("matmul", "attention", "other_kernels", "recompute", "optimizer")
        gain_s = 0.5 * subject.work_s(*work)
    else:
        return _wide_kernels(subject, changes, "bf16")
    return Finding.of(
        subject,
        f"Products are computed in {now}.",
        gain_s,
        [
            Evidence("settings", f"layout.precision is {now}."),
            Evidence(
                "machine",
                f"{job.cluster.device.name} computes in "
                f"{', '.join(job.cluster.device.precisions)}.",
            ),
        ],
        changes=changes,
        advice="bf16 keeps fp32's range and needs no loss scaling; parameters and optimizer stay "
        "in fp32.",
    )


def slow_attention(subject: Subject) -> Finding | None:
    """Attention written to memory as products and softmax, where a fused kernel is at hand."""
    if subject.account is None or not subject.account.is_device:
        return None
    names = subject.account.names
    kernels = subject.account.kernels
    if any(map(_is_fused_attention, (names[name] for name in np.unique(kernels["name"])))):
        return None
    attention = kernels[kernels["term"] == TERM_ID["attention"]]
    chosen = kernels[[_is_softmax(names, row) for row in kernels]]
    batched = kernels[[bool(_BATCHED_PRODUCT.search(names[op])) for op in kernels["op"]]]
    # Attention takes two batched products for each softmax; a loss and a router take none.
    if not len(chosen) or batched["count"].sum() < 2 * chosen["count"].sum():
        return None
    attention = attention if len(attention) else chosen
    seconds = float(attention["total_ns"].sum()) / len(subject.account.steps) / 1e9
    return Finding.of(
        subject,
        f"Attention runs as separate kernels: {time_text(seconds)} of a step.",
        seconds * (1 - _ATTENTION_LEFT) * subject.pace,
        [
            Evidence(
                "device",
                f"{chosen['count'].sum() / len(subject.account.steps):.0f} softmax kernels a step "
                f"beside {batched['count'].sum() / len(subject.account.steps):.0f} batched "
                "products, none of a fused attention.",
            )
        ],
        advice="Call torch.nn.functional.scaled_dot_product_attention with bf16 or fp16 inputs and "
        "is_causal instead of a mask, so that it can take FlashAttention.",
        basis="assumed",
    )


def unfused_elementwise(subject: Subject) -> Finding | None:
    """Much of the device's time goes into norms, activations and copies, kernel by kernel."""
    if subject.account is None or not subject.account.is_device:
        return None
    if subject.job is not None and subject.job.layout.compile is True:
        return None
    account = subject.account
    kernels = account.kernels[np.isin(account.kernels["term"], OTHER_IDS)]
    simple = [_is_simple(account.names[name]) for name in kernels["name"]]
    whole_ns, simple_ns = kernels["total_ns"].sum(), kernels["total_ns"][simple].sum()
    # Kernels beside products cost nothing: the term has what is left of them.
    seconds = subject.work_s("other_kernels") * float(simple_ns) / max(1.0, float(whole_ns))
    if seconds < _MUCH_ELEMENTWISE * subject.step_s:
        return None
    changes = runnable_changes(subject.job, "layout.compile=true")
    asked = what_if(subject, changes) if changes else None
    gain_s = seconds * (1 - _FUSED_LEFT)
    return Finding.of(
        subject,
        f"{seconds / subject.step_s:.0%} of the step is norms, activations, casts and copies, "
        "kernel by kernel.",
        gain_s if asked is None else min(asked.gain_s, seconds),
        longest(subject, "other_kernels"),
        changes=changes,
        advice="Fuse them: torch.compile, or fused norms, activations and losses.",
        with_job="The fused ones are layout.kernels.",
        basis="assumed" if asked is None else "predicted",
    )


def small_kernels(subject: Subject) -> Finding | None:
    """Micro-batches so small that launching takes longer than computing."""
    job = subject.job
    if subject.account is None:
        return None
    if job is None:
        return _short_kernels(subject)
    best = _best_micro_batch(subject, job)
    if best is None:
        return None
    return Finding.of(
        subject,
        f"Micro-batches of {job.micro_batch} are too small: {job.accumulation} passes a step, each "
        "with the same launches.",
        best.gain_s,
        [
            Evidence(
                "host",
                f"Between operators {time_text(subject.work_s('host_gap'))} of a step pass; "
                f"with micro-batches of {best.micro_batch}, passes: {best.passes}.",
            )
        ],
        changes=(f"layout.micro_batch={best.micro_batch}",),
        advice="Give each pass more to do.",
    )


def model_too_small(subject: Subject) -> Finding | None:
    """Ranks wait for each other longer than it would take one of them to do it all."""
    if subject.account is None:
        return None
    job = subject.job
    measured = subject.measured
    num_ranks = job.layout.num_ranks if job is not None else _ranks_of_trace(subject)
    if num_ranks < 2 or len(measured.ranks) < num_ranks:
        return None
    alone_s = num_ranks * (measured.step_s - measured.mean_s("exposed_comm"))
    if alone_s >= measured.step_s:
        return None
    return Finding.of(
        subject,
        f"Exchanges take so much of the step that one rank alone would be faster than {num_ranks}.",
        (measured.step_s - alone_s) * subject.pace,
        [
            Evidence(
                "ranks",
                f"{time_text(measured.step_s)} a step on {num_ranks} ranks, "
                f"{time_text(alone_s)} of work for one.",
            )
        ],
        advice="Use fewer devices, a larger global batch, or exchange less often.",
        with_job="comm.local exchanges every so many steps.",
    )


def _ranks_of_trace(subject: Subject) -> int:
    """How many ranks exchange as replicas do; 0 where they share a network that may be too large
    for one, or where that can't be told."""
    traffic = subject.traffic
    if not subject.ranks_belong_together or not traffic.is_axis("dp").all():
        return 0
    return int(traffic.rows["group_size"].max(initial=0))


def _is_fused_attention(name: str) -> bool:
    return bool(_FUSED_ATTENTION.search(name)) and not _SOFTMAX.search(name)


def _is_softmax(names: Sequence[str], row: Any) -> bool:
    """Whether a kernel may be an attention's softmax, by its own name and its operator's."""
    told = names[row["name"]], names[row["op"]]
    if any(_NO_ATTENTION.search(each) for each in told):
        return False
    return any(_SOFTMAX.search(each) for each in told)


def _is_simple(name: str) -> bool:
    """Whether a kernel does one simple thing that could be done within another one."""
    return bool(_ELEMENTWISE.search(name)) and not _FUSED.search(name)


# ---- what it rests on ----------------------------------------------------------------------------


class _Better(NamedTuple):
    micro_batch: int
    passes: int
    gain_s: float


def _best_micro_batch(subject: Subject, job: Job) -> _Better | None:
    """The larger micro-batch that gains most, among those that fit."""
    if job.layout.pp > 1:
        return None
    best = None
    most = _FILLING_TOKENS[job.cluster.device.is_cpu] // job.train.seq_len
    for factor in range(2, job.accumulation + 1):
        larger = job.micro_batch * factor
        if job.accumulation % factor or larger > most:
            continue
        changes = (f"layout.micro_batch={larger}",)
        other = changed_job(job, changes)
        if other is None or fits(other) is False:
            continue
        seconds = _fewer_passes_s(subject, job, other, changes)
        if best is None or seconds > 1.02 * best.gain_s:
            best = _Better(larger, other.accumulation, seconds)
    return best


def _fewer_passes_s(subject: Subject, job: Job, other: Job, changes: tuple[str, ...]) -> float:
    """What fewer passes save: by the planner, but not much more than operators were seen to take
    however little they compute."""
    share = 1 - other.accumulation / job.accumulation
    seen_s = (subject.work_s("host_gap") + _least_operator_s(subject)) * share
    asked = what_if(subject, changes)
    return seen_s if asked is None else min(asked.gain_s, _BEYOND_SEEN * seen_s)


def _least_operator_s(subject: Subject) -> float:
    """Seconds of a step if each of its operators were as short as the shortest ones."""
    account = subject.account
    assert account is not None
    kernels = account.kernels
    if account.is_device or not len(kernels):
        return 0.0
    each_ns = np.percentile(kernels["total_ns"] / np.maximum(kernels["count"], 1), 10)
    number = kernels["count"].sum() / len(account.steps)
    return float(each_ns * number) / 1e9 * subject.pace


def _short_kernels(subject: Subject) -> Finding | None:
    """Of a trace without a Job: a device whose kernels are mostly shorter than their launch."""
    account = subject.account
    assert account is not None
    if not account.is_device or not account.kernels["count"].sum():
        return None
    if any("GraphLaunch" in name for name in account.names):
        return None
    kernels = account.kernels
    short = kernels["total_ns"] < _SHORT_NS * kernels["count"]
    share = float(kernels["count"][short].sum() / kernels["count"].sum())
    idle_s = subject.work_s("host_gap")
    if share < 0.7 or idle_s < 0.2 * subject.step_s:
        return None
    return Finding.of(
        subject,
        f"{share:.0%} of the kernels take less than {_SHORT_NS // 1000} us, and the device is idle "
        f"for {idle_s / subject.step_s:.0%} of the step.",
        idle_s * share / 2,
        [Evidence("device", f"{int(kernels['count'].sum() / len(account.steps))} kernels a step.")],
        advice="Larger micro-batches, fused kernels, or CUDA graphs (torch.compile with "
        'mode="reduce-overhead").',
        basis="assumed",
    )


def _narrower(job: Job) -> tuple[str, ...]:
    """The settings that compute in bf16 where the device has it, else in fp32; none where not."""
    device, layout = job.cluster.device, job.layout
    dtype = () if layout.param_dtype == "fp32" else ('layout.param_dtype="fp32"',)
    for precision in ("bf16", "fp32"):
        if precision in device.precisions and precision != layout.precision:
            changes = runnable_changes(job, f'layout.precision="{precision}"', *dtype)
            if changes:
                return changes
    return ()


def _of_trace(subject: Subject) -> Finding | None:
    """Of a trace without a Job: only where it says on what it was recorded, for a device without
    16-bit products isn't wrong to compute in fp32."""
    found = {narrow_format(device) for device in subject.devices}
    if len(found) != 1 or (form := found.pop()) is None:
        return None
    return _wide_kernels(subject, (), form)


def narrow_format(device: TraceDevice) -> Literal["bf16", "fp16"] | None:
    """The 16-bit format in which a device's matrix units are at least four times as fast as in
    fp32: bf16 where it has both; None where it has neither, or that isn't known.

    Volta and Turing have fp16 alone (compute capability 7.0 and 7.5, not the GTX 16 series, which
    has no tensor cores). Ampere and later have bf16
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide, arithmetic by compute capability). AMD's
    MI200 and later have it at the rate of fp16 (CDNA 2's instruction set); MI100 has not.
    """
    if device.is_amd or _AMD.search(device.name):
        is_mi200 = device.capability >= (9, 4) or _MI200.search(device.name)
        return "bf16" if is_mi200 and device.capability < (10, 0) else None
    if device.capability >= (8, 0):
        return "bf16"
    has_tensor_cores = device.capability in ((7, 0), (7, 2), (7, 5))
    return "fp16" if has_tensor_cores and "GTX 16" not in device.name else None


def _wide_kernels(subject: Subject, changes: tuple[str, ...], narrow: str) -> Finding | None:
    """By the names of kernels: products that didn't take the matrix units' fast path."""
    account = subject.account
    if account is None or not account.is_device:
        return None
    kernels = account.kernels[account.kernels["term"] == TERM_ID["matmul"]]
    forms = np.array([_form_of(account.names[name]) for name in kernels["name"]], "U4")
    seconds = {
        form: float(kernels["total_ns"][forms == form].sum()) / len(account.steps) / 1e9
        for form in _TIME_LEFT
    }
    whole_s = float(kernels["total_ns"].sum()) / len(account.steps) / 1e9
    wide_s = sum(seconds.values())
    gain_s = sum(each * (1 - _TIME_LEFT[form]) for form, each in seconds.items())
    told = [
        Evidence("device", f"{time_text(each)} of a step in {form} kernels.")
        for form, each in seconds.items()
        if each
    ]
    names = " and ".join(sorted({device.name or "device" for device in subject.devices}))
    if names:
        told.append(Evidence("machine", f"The {names} computes products in {narrow}, too."))
    advice = {
        "bf16": "Run forward and loss under torch.autocast(device, torch.bfloat16).",
        "fp16": "Run forward and loss under torch.autocast(device, torch.float16), with "
        "torch.amp.GradScaler; this device has no bf16 at such a rate.",
    }
    return Finding.of(
        subject,
        f"{wide_s / max(whole_s, 1e-12):.0%} of the time of products is in fp32 or TF32, not in "
        "16 bits.",
        gain_s * subject.pace,
        told,
        changes=changes,
        advice=advice[narrow],
        basis="assumed",
    )


def _form_of(name: str) -> str:
    """What a kernel of products computes in, where that is more than 16 bits wide; else empty."""
    if _NARROW_KERNELS.search(name):
        return ""
    if _TF32_KERNELS.search(name):
        return "tf32"
    return "fp32" if _FP32_KERNELS.search(name) else ""


def _ids(terms: Sequence[str]) -> list[int]:
    """The terms' indices, those of their kinds and axes too."""
    prefixes = tuple(f"{term}." for term in terms)
    return [at for term, at in TERM_ID.items() if term in terms or term.startswith(prefixes)]


def longest(subject: Subject, *terms: str) -> list[Evidence]:
    """The kernels of some terms that take most, as a sentence."""
    account = subject.account
    assert account is not None
    kernels = account.kernels[np.isin(account.kernels["term"], _ids(terms))]
    if not len(kernels):
        return []
    names, which = np.unique(kernels["name"], return_inverse=True)
    totals = np.bincount(which.reshape(-1), kernels["total_ns"]) / len(account.steps)
    order = np.argsort(-totals)[:3]
    told = [f"{account.names[names[at]][:60]} {time_text(totals[at] / 1e9)}" for at in order]
    return [Evidence(subject.worker, f"Most of it: {'; '.join(told)}.")]
