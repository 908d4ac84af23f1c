"""The vocabulary of a step's time, and the tables that put a recorded name under a term.

Every instant of a step belongs to one of `TERMS`. The simulator names terms itself; what a profiler
recorded has only the names of operators and kernels. Operators are translated by the tables here,
substrings seen in real traces that are checked in the order given; kernels by `kernel_names`.

Not here: anything that depends on where an operator ran (inside the optimizer, inside a recomputed
block, beside a collective). `observe.kineto` knows the surroundings and has the last word.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from paceline.observe.kernel_names import EXPOSED_COMM as EXPOSED_COMM
from paceline.observe.kernel_names import OTHER as OTHER
from paceline.observe.kernel_names import OTHER_KINDS, is_communication
from paceline.observe.kernel_names import kernel_term as kernel_term

AXES = ("dp", "fsdp", "tp", "pp", "cp", "ep")

# In order of priority: where two spans of one layer overlap, the instant belongs to the earlier
# term. Useful work comes first, so that a term of waste never hides a term of progress.
TERMS = (
    "sampling",  # of an engine that serves a model, whose steps are told by phase
    "prefill",
    "decode",
    "matmul",
    "attention",
    "recompute",
    "optimizer",
    *(f"{OTHER}.{kind}" for kind in OTHER_KINDS),
    OTHER,  # what isn't known by its name, and on a CPU all of these
    *(f"{EXPOSED_COMM}.{axis}" for axis in AXES),
    EXPOSED_COMM,  # the axis is not known: traces of other systems
    "checkpoint_stall",
    "data_wait",
    "straggler_wait",
    "bubble",
    "host_gap",
    "idle",  # the device's, in an engine that serves a model: it may have no requests
    "unattributed",
)
TERM_ID = {term: index for index, term in enumerate(TERMS)}
OTHER_IDS = tuple(TERM_ID[term] for term in TERMS if term.startswith(OTHER))
EXPOSED_IDS = tuple(TERM_ID[term] for term in TERMS if term.startswith(EXPOSED_COMM))

# The vocabulary of step time in the order it is shown, with the colour a term has everywhere, on
# light and on dark ground: cool where the device computes, violet where it waits for the network,
# warm where it waits for anything else.
TERM_COLOURS = {
    "prefill": "#2b6cb0",
    "decode": "#3f9bd1",
    "sampling": "#2f9e8f",
    "matmul": "#2b6cb0",
    "attention": "#3f9bd1",
    "other_kernels.norm": "#6fb0da",
    "other_kernels.elementwise": "#8cc1e3",
    "other_kernels.copy": "#a9d2ec",
    "other_kernels.embedding": "#79b8c9",
    "other_kernels.routing": "#9cc8d6",
    "other_kernels": "#c3dfef",
    "recompute": "#5a6fc4",
    "optimizer": "#2f9e8f",
    "bubble": "#b39b5d",
    "exposed_comm": "#8e63ce",
    "exposed_comm.dp": "#8e63ce",
    "exposed_comm.fsdp": "#a983dc",
    "exposed_comm.tp": "#7549b5",
    "exposed_comm.pp": "#c3a6e8",
    "exposed_comm.cp": "#9c4fb0",
    "exposed_comm.ep": "#c27bd3",
    "data_wait": "#e2903a",
    "host_gap": "#d2504b",
    "idle": "#d98c89",
    "straggler_wait": "#a83e5c",
    "checkpoint_stall": "#d9b13b",
    "unattributed": "#9aa1a9",
}

# What our own loop records with torch.profiler.record_function.
STEP_RANGE = "paceline.step"
_RANGES = {
    "paceline.optimizer": "optimizer",
    "paceline.data_wait": "data_wait",
    "paceline.checkpoint_stall": "checkpoint_stall",
    "paceline.recompute": "recompute",
    "paceline.attention": "attention",
    "paceline.wait": EXPOSED_COMM,  # for other ranks, see comm.busy_clock
}
COMM_RANGE = "paceline.comm."  # + axis
# What PyTorch records around the loop's next batch, and Lightning.
_LOADERS = re.compile(r"enumerate\((DataLoader|DataPipe)\)#|.*\btrain_dataloader_next\b")
# PyTorch before 1.12 wrote ranges as operators.
_RANGE_NAMES = re.compile(
    r"ProfilerStep#|Optimizer\.\w+#|paceline\.|enumerate\((DataLoader|DataPipe)\)#|## |"
    r"DistributedDataParallel\.forward$"
)

_ATTENTION_OPS = ("scaled_dot_product", "flash_attn", "attention")
_MATMUL_OPS = re.compile(
    r"(add|badd)?(mm|bmm|mv)_?$|addbmm|matmul|linear$|linear_backward|mkldnn_linear|dot$|einsum|"
    r"tensordot|bilinear|_scaled_mm|_grouped_mm|_scaled_grouped_mm|_int_mm|_linear_pointwise|"
    r"_addmm_activation|((mkldnn|cudnn|miopen|thnn|slow)?_)?conv(olution|_|\d)"
)
# Bookkeeping that encloses operators: its own time is the host's, not a kernel's.
_HOST_OPS = re.compile(
    r"autograd::engine|torch::autograd::|\w*Backward\d*$|PythonSubclass|Torch-Compiled|"
    r"CompiledFunction|TorchDynamo|Pregraph|AOTDispatcher|## "
)
_COMM_OPS = ("c10d::", "_c10d_functional::", "c10d_functional::", "record_param_comms", "nccl:")

# Collectives by what their kernels, operators and ranges are called, underscores left out; the
# first that fits.
COLLECTIVES = {
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "crossdevicereduce": "all_reduce",  # vLLM's
    "alltoall": "all_to_all",
    "dispatch": "dispatch",  # of tokens to experts: DeepEP
    "combine": "combine",
    "cachednotify": "barrier",  # before a dispatch whose layout is known: it sends no tokens
    "broadcast": "broadcast",
    "barrier": "barrier",
    "sendrecv": "send_recv",
    "send": "send",
    "recv": "recv",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}

# `.item()` and its like read one value; on a device that waits for all work before it.
_SYNC_OPS = ("aten::item", "aten::_local_scalar_dense")
_SYNC_CALLS = (
    "StreamSynchronize",
    "DeviceSynchronize",
    "EventSynchronize",
    "CtxSynchronize",
    "Memcpy",  # without Async: until the copy is done
    "MemcpyDtoH",
    "MemcpyHtoD",
    "MemcpyWithStream",
)

# Mesh dimensions as other systems name them.
_AXIS_ALIASES = {
    "ddp": "dp",
    "replicate": "dp",
    "dp_replicate": "dp",
    "shard": "fsdp",
    "dp_shard": "fsdp",
    "dp_shard_cp": "fsdp",
    "batch_shard": "fsdp",
}


def range_term(name: str) -> str | None:
    """Return the term that a recorded range claims for everything within it, or None."""
    if name.startswith("Optimizer."):  # torch.optim records Optimizer.step#AdamW.step by itself
        return "optimizer"
    if _LOADERS.match(name):
        return "data_wait"
    return _RANGES.get(name)


def is_range(name: str) -> bool:
    """Say whether a name is a range's, as which category it may have been recorded."""
    return _RANGE_NAMES.match(name) is not None


@lru_cache(maxsize=4096)
def op_term(name: str) -> str:
    """Return the term of a host operator's own time, judged by its name alone."""
    if is_attention_op(name):
        return "attention"
    namespace, _, base = name.rpartition("::")
    if namespace and _MATMUL_OPS.match(base):
        return "matmul"
    return "host_gap" if _HOST_OPS.match(name) else "other_kernels"


def is_attention_op(name: str) -> bool:
    """Say whether an operator computes scaled dot-product attention, forward or backward."""
    lowered = name.lower()
    return lowered.startswith(("aten::", "flash", "xformers")) and any(
        word in lowered for word in _ATTENTION_OPS
    )


def is_comm_op(name: str) -> bool:
    """Say whether a host operator starts or awaits a collective."""
    return name.startswith(_COMM_OPS)


def is_collective(name: str) -> bool:
    """Say whether a host operator, a range of a backend's thread or a kernel communicates."""
    return is_comm_op(name) or name.startswith("gloo:") or is_communication(name)


def collective_name(name: str) -> str | None:
    """Return a collective's name as torch.distributed spells it ("all_reduce"), or None."""
    squeezed = name.lower().replace("_", "").replace(" ", "")
    return next((word for key, word in COLLECTIVES.items() if key in squeezed), None)


def is_sync(name: str) -> bool:
    """Say whether the host waits in this operator or call until a device has done its work."""
    return name in _SYNC_OPS or name.removeprefix("cuda").removeprefix("hip") in _SYNC_CALLS


def is_peer_copy(name: str) -> bool:
    """Say whether a copy goes from one device to another ("Memcpy PtoP (Device -> Device)")."""
    return "ptop" in name.lower() or "peer" in name.lower()


def coarse(seconds: Mapping[str, float]) -> dict[str, float]:
    """Sum up the kinds of other kernels, which plans and metrics don't tell apart."""
    result: dict[str, float] = {}
    for term, value in seconds.items():
        key = OTHER if term.startswith(OTHER) else term
        result[key] = result.get(key, 0.0) + value
    return result


def comm_term(axis: str | None) -> str:
    """Return `exposed_comm.<axis>`, or `exposed_comm` where the axis is unknown."""
    return f"{EXPOSED_COMM}.{axis}" if axis in AXES else EXPOSED_COMM


def axis_of_group(description: str) -> str | None:
    """Return the mesh axis that a process group's description names ("mesh_fsdp"), or None."""
    word = description.removeprefix("mesh_").lower()
    return word if word in AXES else _AXIS_ALIASES.get(word)


def is_all_to_all(name: str) -> bool:
    """Say whether a communication operator exchanges, as only experts and sequences do."""
    return "alltoall" in name or "all_to_all" in name


def axis_hint(name: str) -> str | None:
    """Return the mesh axis that a host range or operator speaks for, or None."""
    if name.startswith(COMM_RANGE):
        return axis_of_group(name.removeprefix(COMM_RANGE))
    if name.startswith("FSDP::"):
        return "fsdp"
    if name.startswith("PP:"):  # torch.distributed.pipelining's actions
        return "pp"
    # Started while a gradient is accumulated: by DDP's reducer or its communication hooks.
    return "dp" if name.endswith("evaluate_function: torch::autograd::AccumulateGrad") else None


def in_order(terms: Iterable[str]) -> list[str]:
    """Terms in the order of the vocabulary, unknown ones last."""
    order = list(TERM_COLOURS)
    return sorted(terms, key=lambda term: order.index(term) if term in order else len(order))


def colour(term: str) -> str:
    """The term's colour; a term outside the vocabulary is grey."""
    return TERM_COLOURS.get(term, TERM_COLOURS["unattributed"])
