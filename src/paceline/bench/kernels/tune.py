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

from paceline.bench.kernels.cases import KernelCase
from paceline.bench.kernels.timing import Timing, alternate, copies, variant
from paceline.kernels import launch, switch
from paceline.kernels.launch import Launch, Launched, MeasuredLaunch

Row = dict[str, Any]
Tell = Callable[[str], None]


def tuned(case: KernelCase, device: torch.device, turns: int, tell: Tell) -> list[Row]:
    """The best launches of the kernels of a case, one after the other.

    Args:
        case: its inputs' type is that of the rows.
        device: a CUDA device.
        turns: how often each launch is timed.
        tell: gets a line for each kernel.
    """
    inputs = copies(case, device)
    rows = []
    for direction in [each for each in case.directions if each != "both"] or ["both"]:
        peer_ms = _peer_ms(case, inputs, direction, turns, device)
        for seen in _launched(case, inputs[0], direction, device):
            best, timing = _best(case, inputs, direction, seen, turns, device)
            tell(f"{seen.kernel.name} {seen.dtype} {seen.size}: {best.options} {timing.ms:.3f} ms")
            rows.append(_row(seen, device, MeasuredLaunch(best, timing.ms, peer_ms)))
    return rows


def _launched(
    case: KernelCase, inputs: tuple[Any, ...], direction: str, device: torch.device
) -> list[Launched]:
    """Launches that differ, in the order in which they come first."""
    with switch.using("triton", device):
        call = variant(case.function, [inputs], direction, "triton", device).calls[0]
        with launch.record_launches() as seen:
            call()
    return list(dict.fromkeys(seen))


def _best(
    case: KernelCase,
    inputs: list[tuple[Any, ...]],
    direction: str,
    seen: Launched,
    turns: int,
    device: torch.device,
) -> tuple[Launch, Timing]:
    kernel, size, _ = seen
    tried: list[tuple[Launch, Timing]] = []
    for candidate in {
        str(each): each for each in (kernel.rule(size), *kernel.others(size))
    }.values():
        with trial(device, seen, candidate):
            try:
                made = variant(case.function, inputs, direction, "triton", device)
            except Exception:  # Triton refuses what asks for too much: not a launch for this device
                continue
            tried.append((candidate, alternate([made], turns, device)[0]))
    return min(tried, key=lambda each: each[1].ms)


def _peer_ms(
    case: KernelCase,
    inputs: list[tuple[Any, ...]],
    direction: str,
    turns: int,
    device: torch.device,
) -> float:
    compiled = torch.compile(case.function, dynamic=False)
    peers = [
        variant(each, inputs, direction, "reference", device) for each in (case.function, compiled)
    ]
    return min(timing.ms for timing in alternate(peers, turns, device))


@contextmanager
def trial(device: torch.device, seen: Launched, candidate: Launch) -> Iterator[None]:
    """Let a kernel be launched so for the length of a block."""
    key = (launch.device_name(device), seen.kernel.name, seen.dtype)
    rows = launch.table().setdefault(key, {})
    before = dict(rows)
    rows[seen.size] = MeasuredLaunch(candidate, 0.0, 0.0)
    try:
        yield
    finally:
        rows.clear()
        rows.update(before)


def _row(seen: Launched, device: torch.device, measured: MeasuredLaunch) -> Row:
    return {
        "device": launch.device_name(device),
        "kernel": seen.kernel.name,
        "dtype": seen.dtype,
        "size": seen.size,
        "blocks": dict(measured.launch.blocks),
        "num_warps": measured.launch.num_warps,
        "num_stages": measured.launch.num_stages,
        "ms": round(measured.ms, 4),
        "peer_ms": round(measured.peer_ms, 4),
    }
