"""Steps on a device: what its streams do is the step, the host only explains why they idle.

A kernel's term comes from its name, unless the operator that launched it (found by correlation id)
stood in the optimizer, in a recomputed block or in attention. NCCL kernels are communication,
copies are a layer of their own. Where the device idles, a range of the host (waiting for data, a
checkpoint) claims the time; else it is `host_gap`, or stays unattributed where the trace has
nothing of the host.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe import terms as words
from paceline.observe.kineto.axes import axes_by_use
from paceline.observe.kineto.events import COPY, LAUNCH, OP, Trace
from paceline.observe.kineto.host import NONE, HostEvents, call_axes, comm_terms
from paceline.observe.terms import EXPOSED_COMM, OTHER, TERM_ID

_Array = npt.NDArray[Any]
_BY_OPERATOR = [TERM_ID[term] for term in ("recompute", "optimizer", "attention")]


def launches(host: HostEvents, device: _Array) -> _Array:
    """Return the host event that launched each event of the device, or NONE.

    The correlation id tells; where the calls of the driver weren't recorded, the operator's
    external id does.
    """
    events = host.events
    by_call = _match(events, "correlation", LAUNCH, device["correlation"])
    by_operator = _match(events, "external_id", OP, device["external_id"])
    if (by_call != NONE).any():
        return by_call
    return by_operator


def _match(events: _Array, field: str, kind: int, wanted: _Array) -> _Array:
    """Return the last event of a kind with each wanted number, or NONE."""
    have = np.flatnonzero((events["kind"] == kind) & (events[field] >= 0))
    have = have[np.argsort(events[field][have], kind="stable")]
    numbers = events[field][have]
    place = np.searchsorted(numbers, wanted, "right") - 1
    found = (place >= 0) & (wanted >= 0)
    found[found] = numbers[place[found]] == wanted[found]
    return np.where(found, np.append(have, NONE)[place], NONE)


def device_terms(
    trace: Trace, host: HostEvents, device: _Array, launch: _Array, *, serves: bool
) -> _Array:
    """Return the term of each kernel or copy; copies are copies, but between devices
    they communicate."""
    used, which = np.unique(device["name"], return_inverse=True)
    names = [trace.names[name] for name in used.tolist()]
    term = np.array([TERM_ID[words.kernel_term(name)] for name in names], np.int64)[which]
    claim = np.append(host.claim, NONE)[launch]
    communicates = term == TERM_ID[EXPOSED_COMM]
    term = np.where(np.isin(claim, _BY_OPERATOR) & ~communicates, claim, term)
    axis = call_axes(trace)[device["call"]]
    axis = np.where(axis == NONE, np.append(host.axis, host.default_axis)[launch], axis)
    by_use = axes_by_use(trace, host, device, launch, term, serves=serves)
    axis = np.where(axis == NONE, by_use, axis)
    term = np.where(communicates, comm_terms(axis), term)
    is_peer = np.array([words.is_peer_copy(name) for name in names], bool)[which]
    copies = np.where(is_peer, comm_terms(axis), TERM_ID[f"{OTHER}.copy"])
    return np.where(device["kind"] == COPY, copies, term)


def follow_device(windows: _Array, host: HostEvents, device: _Array, launch: _Array) -> _Array:
    """Let each step last until the kernels that it launched have finished.

    A host that runs ahead of its device shifts the windows: it doesn't empty them.
    """
    known = launch != NONE
    at = host.events["start"][launch[known]]
    place = np.searchsorted(windows["start_ns"], at, "right") - 1
    mine = (place >= 0) & (at < windows["end_ns"][place])
    reached = windows.copy()
    np.maximum.at(reached["end_ns"], place[mine], device["end"][known][mine])
    return reached
