"""Engines that serve a model: their iterations, and the phase that each kernel is of.

vLLM and SGLang name the range of an iteration after what is in its batch. A batch that has any
prompt is `prefill`, for its tokens are most of the work; else it is `decode`. What is launched
within the sampler, and kernels that nothing else has, are `sampling`.

Not here: engines that record no such ranges; their steps are told by kinds of kernels, as any are.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.observe.accounting import Intervals, union
from paceline.observe.kernel_names import samples
from paceline.observe.kineto.events import RANGE, Trace
from paceline.observe.kineto.host import NONE, HostEvents
from paceline.observe.terms import EXPOSED_IDS, TERM_ID
from paceline.observe.timeline import STEP

_Array = npt.NDArray[Any]
_PREFILL, _DECODE = TERM_ID["prefill"], TERM_ID["decode"]

# Each with the number of prompts, or a word for the phase, as its group.
_ITERATIONS = (
    re.compile(r"execute_context_(\d+)\(.*\)_generation_\d+\("),  # vLLM
    re.compile(r"execute_\d+_context_(\d+)\(.*\)_generation_\d+\("),  # with sums of lengths
    re.compile(r"execute_new_(\d+)_cached_\d+"),
    re.compile(r"step\[(\w+)"),  # SGLang: step[EXTEND bs=1 toks=512]
    re.compile(r"(prefill|decode)\["),  # ATOM
)
_PROMPTS = ("extend", "mixed", "prefill", "split_prefill", "dllm_extend")
_SAMPLERS = re.compile(
    r"gpu_model_runner: (sample|bookkeep)|(\S*/)?sampler\.py\(\d+\): (forward|sample|_sample)$"
)


@dataclass(frozen=True, eq=False)
class Iterations:
    """What an engine did, one after another."""

    starts: _Array
    ends: _Array
    """Of the host's ranges, in ns."""
    phases: _Array
    """Index of a term: prefill or decode."""
    main: int
    """Index of their thread."""

    def steps(self, rank: int, first: int) -> _Array:
        """Return them as steps: each lasts until the next begins, for between them no one works."""
        ends = np.append(self.starts[1:], self.ends[-1])
        numbers = range(first, first + len(ends))
        rows = zip(numbers, self.starts.tolist(), ends.tolist(), strict=True)
        return np.array([(rank, *row) for row in rows], STEP)


def iterations(host: HostEvents) -> Iterations | None:
    """Find the iterations of an engine that names them; None where there are none."""
    phases = np.array([_phase(name) for name in host.names], np.int64)
    ranges = host.events[(host.events["kind"] == RANGE) & (phases[host.events["name"]] != NONE)]
    if not len(ranges):
        return None
    ranges = ranges[np.argsort(ranges["start"], kind="stable")]
    main = int(ranges["thread"][0])
    mine = ranges[ranges["thread"] == main]
    return Iterations(mine["start"], mine["end"], phases[mine["name"]], main)


def phase_terms(
    trace: Trace, host: HostEvents, device: _Array, launch: _Array, kinds: _Array, found: Iterations
) -> _Array:
    """Return the term of each event of the device by its phase; communication keeps its own.

    Args:
        trace: that they are of.
        host: what launched them.
        device: kernels and copies.
        launch: the host event that launched each, or NONE.
        kinds: the terms of what they are.
        found: the engine's iterations.
    """
    at = np.where(launch != NONE, np.append(host.events["start"], 0)[launch], device["start"])
    place = np.maximum(np.searchsorted(found.starts, at, "right") - 1, 0)
    used, which = np.unique(device["name"], return_inverse=True)
    by_name = np.array([samples(trace.names[name]) for name in used.tolist()], bool)[which]
    sampler = _samplers(trace)
    inside = np.searchsorted(sampler.starts, at, "right") - 1
    in_sampler = (inside >= 0) & (at < np.append(sampler.ends, 0)[inside])
    phases = np.where(by_name | in_sampler, TERM_ID["sampling"], found.phases[place])
    return np.where(np.isin(kinds, EXPOSED_IDS), kinds, phases)


def _samplers(trace: Trace) -> Intervals:
    """Return when the host was in a sampler, by ranges and by functions of Python."""
    is_sampler = np.array([bool(_SAMPLERS.fullmatch(name)) for name in trace.names], bool)
    events = trace.events[is_sampler[trace.events["name"]]]
    return union(events["start"], events["end"])


def _phase(name: str) -> int:
    for pattern in _ITERATIONS:
        if said := pattern.match(name):
            word = said[1].lower()
            has_prompts = int(word) > 0 if word.isdecimal() else word in _PROMPTS
            return _PREFILL if has_prompts else _DECODE
    return NONE
