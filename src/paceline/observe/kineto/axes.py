"""The axis of collectives whose group names none, by what they are used for.

Process groups of other systems are called "undefined" or not at all. But an axis shows in what is
exchanged over its group and when. Shards of parameters are gathered, and their gradients scattered
in the backward pass. Parts of activations are summed in the forward pass too. Experts' tokens and
rows of tables are exchanged by all-to-all. What could be several things gets no axis.
"""

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe import terms as words
from paceline.observe.kineto.events import Trace
from paceline.observe.kineto.host import NONE, HostEvents, inherit_flags, inherit_values
from paceline.observe.terms import AXES, TERM_ID

_Array = npt.NDArray[Any]
_EXPERTS = re.compile(r"moe|expert|grouped_?(gemm|mm)|matmul_ogs|(^|:)ep::", re.IGNORECASE)
_DDP = "DistributedDataParallel.forward"
# Of a group's all-reduces, so many in the forward pass make them parts of activations: metrics and
# norms are reduced there as well, once or twice.
_IN_FORWARD, _MORE_THAN = 0.25, 2


def axes_by_use(
    trace: Trace, host: HostEvents, device: _Array, launch: _Array, terms: _Array, *, serves: bool
) -> _Array:
    """Return the axis of each event of the device, as its use shows it, or NONE.

    Args:
        trace: that they are of.
        host: what launched them.
        device: kernels and copies.
        launch: the host event that launched each, or NONE.
        terms: what they do by name; `exposed_comm` where they communicate.
        serves: whether it is an engine that serves a model.
    """
    axis = np.full(len(device), NONE)
    chosen = np.flatnonzero(terms == TERM_ID[words.EXPOSED_COMM])
    if not len(chosen):
        return axis
    events, asked = device[chosen], launch[chosen]
    kind, is_said = _kinds(trace, host, events, asked)
    groups = _of_calls(trace, host, events, asked, "group_name")
    is_backward = np.append(host.in_backward, False)[asked]
    in_optimizer = np.append(host.claim, NONE)[asked] == TERM_ID["optimizer"]
    is_forward = (asked != NONE) & ~is_backward & ~in_optimizer
    ddp = np.array([name == _DDP for name in host.names], bool)[host.events["name"]]
    in_ddp = np.append(inherit_flags(host.nest, ddp), False)[asked]
    for group in np.unique(groups).tolist():
        mine = groups == group
        for one in np.unique(kind[mine]).tolist():
            rows = mine & (kind == one)
            word = _KINDS[one]
            found = None
            if word in ("dispatch", "combine", "barrier") and not is_said[rows].any():
                found = "ep"
            elif word in ("send", "recv", "send_recv") and is_said[rows].all():
                found = "pp"
            elif word == "all_to_all":
                found = "ep" if _has_sparse_parts(trace, device, terms) else None
            elif serves and word in ("all_reduce", "all_gather", "reduce_scatter"):
                found = "tp"
            elif word in ("all_gather", "reduce_scatter"):
                scatters = mine & (kind == _KINDS.index("reduce_scatter"))
                gathers = mine & (kind == _KINDS.index("all_gather"))
                is_sharded = scatters.any() and gathers.any() and not is_forward[scatters].any()
                found = "fsdp" if is_sharded else None
            elif word == "all_reduce":
                found = _of_reductions(is_forward[rows], is_backward[rows])
            elif word == "broadcast":
                found = "dp" if in_ddp[rows].all() else None
            if found is not None:
                axis[chosen[rows]] = AXES.index(found)
    return axis


_KINDS = (*dict.fromkeys(words.COLLECTIVES.values()), "")


def _kinds(
    trace: Trace, host: HostEvents, events: _Array, asked: _Array
) -> tuple[_Array, npt.NDArray[np.bool_]]:
    """Return which collective each is, index into _KINDS, and whether its arguments said it.

    Kernels alone don't tell: NCCL's SendRecv is also its all-to-all.
    """
    number = {word: at for at, word in enumerate(_KINDS)}
    said = _of_calls(trace, host, events, asked, "name")
    texts = np.array([number.get(name, len(_KINDS) - 1) for name in (*trace.names, "")])
    used, which = np.unique(events["name"], return_inverse=True)
    by_kernel = np.array(
        [number[words.collective_name(trace.names[name]) or ""] for name in used.tolist()]
    )[which]
    return np.where(said == NONE, by_kernel, texts[said]), said != NONE


def _of_calls(trace: Trace, host: HostEvents, events: _Array, asked: _Array, field: str) -> _Array:
    """Return what an event's arguments say of a field, else those of the call that asked for it."""
    column = np.append(trace.calls[field], NONE)
    around = np.append(inherit_values(host.nest, column[host.events["call"]]), NONE)[asked]
    own = column[events["call"]]
    return np.where(own == NONE, around, own)


def _has_sparse_parts(trace: Trace, device: _Array, terms: _Array) -> bool:
    """Say whether a device has work of experts or of tables of embeddings."""
    if (terms == TERM_ID["other_kernels.embedding"]).any():
        return True
    return any(_EXPERTS.search(trace.names[name]) for name in np.unique(device["name"]).tolist())


def _of_reductions(is_forward: _Array, is_backward: _Array) -> str | None:
    count = int(np.count_nonzero(is_forward))
    if count > _MORE_THAN and count >= _IN_FORWARD * len(is_forward):
        return "tp" if is_backward.any() else None
    return "dp" if is_backward.all() else None
