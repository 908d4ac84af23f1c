"""Kernels by name and by the operator that launched them; on a CPU, operators by their own time."""

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe.account import KERNEL
from paceline.observe.kineto.cpu import ThreadPieces
from paceline.observe.kineto.events import OP
from paceline.observe.kineto.host import NONE
from paceline.observe.kineto.recording import Recording
from paceline.observe.tables.names import Names, step_numbers, step_of

_Array = npt.NDArray[Any]


def kernels(recording: Recording, names: Names) -> _Array:
    """Sum kernels by step, name, operator and term.

    Returns:
        dtype `account.KERNEL`.
    """
    if recording.pieces is None:
        return _launched(recording, names)
    return _operators(recording, recording.pieces, names)


def launch_delays(recording: Recording) -> _Array:
    """Return, for each step, the median from the end of a kernel's launch to its start, or -1."""
    if recording.pieces is not None:
        return np.full(len(recording.windows), NONE)
    known = recording.launch != NONE
    launched = recording.host.events["end"][recording.launch[known]]
    began = recording.device["start"][known]
    delay, step = np.maximum(began - launched, 0), step_of(recording.windows, began)
    medians = [
        int(np.median(delay[step == index])) if (step == index).any() else NONE
        for index in range(len(recording.windows))
    ]
    return np.array(medians, np.int64)


def _launched(recording: Recording, names: Names) -> _Array:
    device, host = recording.device, recording.host
    table = names.of(host.names)
    op = np.append(host.op, NONE)[recording.launch]
    op_name = np.append(host.events["name"], NONE)[op]
    ones = np.ones(len(device), np.int64)
    lengths = device["end"] - device["start"]
    step = step_of(recording.windows, device["start"])
    labels = table[device["name"]], table[op_name]
    return _sums(recording, step, *labels, recording.terms, ones, lengths)


def _operators(recording: Recording, pieces: ThreadPieces, names: Names) -> _Array:
    """Count the main thread's operators where they begin, and their own time where it is."""
    host, windows = recording.host, recording.windows
    is_op = host.events["kind"] == OP
    began = np.flatnonzero(is_op & (host.events["thread"] == recording.main))
    run = pieces.take(np.append(is_op, False)[pieces.owner])
    at = np.concatenate([host.events["start"][began], run.start])
    term = np.concatenate([host.own_term()[began], run.term])
    count = np.repeat([1, 0], [len(began), len(run.owner)])
    total = np.concatenate([np.zeros(len(began), np.int64), run.end - run.start])
    label = names.of(host.names)[host.events["name"][np.concatenate([began, run.owner])]]
    return _sums(recording, step_of(windows, at), label, label, term, count, total)


def _sums(
    recording: Recording,
    step: _Array,
    name: _Array,
    op: _Array,
    term: _Array,
    count: _Array,
    total: _Array,
) -> _Array:
    """Add up the rows that are within steps."""
    code = np.zeros(len(step), np.int64)
    for key in (step, name, op, term):
        code = code * (int(key.max(initial=0)) + 2) + key + 1
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
    table = np.zeros(len(first), KERNEL)
    table["rank"], table["step"] = recording.rank, step_numbers(recording.windows, step[first])
    table["name"], table["op"], table["term"] = name[first], op[first], term[first]
    np.add.at(table["count"], place, count)
    np.add.at(table["total_ns"], place, total)
    return table[step[first] != NONE]
