"""Find the best launch of each kernel on this device: rows for the table of launches.

For each case, the kernels that it launches are found by running it, and of each the rule's launch
and every other that it lists are timed, as a part of the operator in the direction that launches
it. What wins is kept with its time, and with that of the best of eager and compiled torch:
`layout.kernels = "auto"` takes an operator where all its rows beat those.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.bench.kernels.cases import Case
from paceline.bench.kernels.timing import Timing, alternate, copies, variant
from paceline.kernels import launch, switch
from paceline.kernels.launch import Kernel, Launch, Measured

Row = dict[str, Any]
Tell = Callable[[str], None]


def tuned(case: Case, device: torch.device, turns: int, tell: Tell) -> list[Row]:
    """The best launches of the kernels of a case, one after the other.

    Args:
        case: its inputs' type is that of the rows.
        device: a CUDA device.
        turns: how often each launch is timed.
        tell: gets a line for each kernel.
    """
    inputs = copies(case, device)
    dtype = launch.word(inputs[0][0].dtype)
    rows = []
    for direction in [each for each in case.directions if each != "both"] or ["both"]:
        for kernel, size in _launched(case, inputs[0], direction, device):
            best, timing = _best(case, inputs, direction, (kernel, size, dtype), turns, device)
            peer_ms = _peer_ms(case, inputs, direction, turns, device)
            tell(f"{kernel.name} {dtype} {size}: {best.options} {timing.ms:.3f} ms ({peer_ms:.3f})")
            rows.append(_row(kernel, size, dtype, device, Measured(best, timing.ms, peer_ms)))
    return rows


def _launched(
    case: Case, inputs: tuple[Any, ...], direction: str, device: torch.device
) -> list[tuple[Kernel, int]]:
    """Kernels with their sizes, in the order in which they are first launched."""
    with switch.using("triton", device):
        call = variant(case.function, [inputs], direction, "triton", device).calls[0]
        with launch.watched() as seen:
            call()
    return list(dict.fromkeys(seen))


def _best(
    case: Case,
    inputs: list[tuple[Any, ...]],
    direction: str,
    key: tuple[Kernel, int, str],
    turns: int,
    device: torch.device,
) -> tuple[Launch, Timing]:
    kernel, size, dtype = key
    tried: list[tuple[Launch, Timing]] = []
    for candidate in {
        str(each): each for each in (kernel.rule(size), *kernel.others(size))
    }.values():
        with trial(device, kernel.name, dtype, size, candidate):
            try:
                made = variant(case.function, inputs, direction, "triton", device)
            except Exception:  # Triton refuses what asks for too much: not a launch for this device
                continue
            tried.append((candidate, alternate([made], turns, device)[0]))
    return min(tried, key=lambda each: each[1].ms)


def _peer_ms(
    case: Case, inputs: list[tuple[Any, ...]], direction: str, turns: int, device: torch.device
) -> float:
    compiled = torch.compile(case.function, dynamic=False)
    peers = [
        variant(each, inputs, direction, "reference", device) for each in (case.function, compiled)
    ]
    return min(timing.ms for timing in alternate(peers, turns, device))


@contextmanager
def trial(
    device: torch.device, kernel: str, dtype: str, size: int, candidate: Launch
) -> Iterator[None]:
    """Let a kernel be launched so for the length of a block."""
    rows = launch.table().setdefault((launch.device_name(device), kernel, dtype), {})
    before = dict(rows)
    rows[size] = Measured(candidate, 0.0, 0.0)
    try:
        yield
    finally:
        rows.clear()
        rows.update(before)


def _row(kernel: Kernel, size: int, dtype: str, device: torch.device, measured: Measured) -> Row:
    return {
        "device": launch.device_name(device),
        "kernel": kernel.name,
        "dtype": dtype,
        "size": size,
        "blocks": dict(measured.launch.blocks),
        "num_warps": measured.launch.num_warps,
        "num_stages": measured.launch.num_stages,
        "ms": round(measured.ms, 4),
        "peer_ms": round(measured.peer_ms, 4),
    }
