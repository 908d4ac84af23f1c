"""Cpu speed: what CPU ranks multiply and move, measured in a few seconds and kept for this machine.

Without it the machine that everybody tries first has no MFU and no prediction. It is measured once,
by the process that starts the ranks and before it does. As many threads as ranks multiply at once,
each with its share of the cores, so that what is found is a rank's part of the whole. The fastest
of a few short blocks counts. Where a rank has one thread, only the time that it had a core counts:
a peak that was measured while others had the cores would be too low for good. Several threads are
timed by the wall, and what others did shows: each also does the same alone, by the time that it had
a core, and all together are taken to be no slower than that.

Not here: the thorough measurement, with all sizes, attention, links and steps (`paceline bench`);
and CUDA devices, whose peaks stand in the catalogue.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from threading import Barrier
from typing import NamedTuple

import torch

from paceline.config.curves import DeviceCurves, MatmulCurve, MemoryCurve
from paceline.config.device import Device
from paceline.config.figure import Figure
from paceline.config.job import to_raw
from paceline.machine.discovery import num_cores
from paceline.observe.run import cache_home, write_atomic

# Set to "off", nothing is measured and nothing that was measured is used.
SWITCH = "PACELINE_MEASURE"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Rows, columns and the inner size of products: from where starting one takes most of its time to
# where its size no longer matters. Those of adapters are as narrow as their rank, and far from the
# peak.
_ROWS, _COLUMNS, _INNER = (256, 1024), (8, 64, 256, 1024), (8, 64, 256, 1024)
_WAYS = 3
# Vectors that are added: in a core's caches, in those that cores share, in none.
_LENGTHS = (1 << 13, 1 << 17, 1 << 21)
_BLOCKS, _BLOCK_S = 4, 0.005

Call = Callable[[], object]


class CpuWorkers(NamedTuple):
    """Who multiplies at once."""

    ranks: int
    """Those that the cores are shared by."""
    workers: int
    """Threads that stand for them: no more than cores."""
    threads: int
    """With which each multiplies, as a rank does."""

    @staticmethod
    def of(ranks: int, cores: int) -> "CpuWorkers":
        """For so many ranks on so many cores."""
        workers = min(ranks, cores)
        return CpuWorkers(ranks, workers, cores // workers)


def with_speed(
    device: Device, num_ranks: int, say: Callable[[str], None], *, may_measure: bool
) -> Device:
    """A CPU with what its ranks were measured to do; any other device, or a known one, as it is.

    Args:
        device: of one rank.
        num_ranks: those of this host.
        say: takes a sentence, where something was measured.
        may_measure: whether nobody else is at work here; otherwise only what is kept is used.
    """
    is_known = bool(device.peak_flops) or device.curves is not None
    if device.kind != "cpu" or is_known or os.environ.get(SWITCH) == "off":
        return device
    crew = CpuWorkers.of(num_ranks, num_cores())
    file = _file(device, crew)
    found = _kept(file)
    if found is None and may_measure:
        found = _measured_and_kept(device, crew, file, say)
    if found is None:
        return device
    return device.replace(
        peak_flops=found.peak_flops,
        curves=found.curves,
        memory_bytes_per_s=found.memory_bytes_per_s,
    )


def _file(device: Device, crew: CpuWorkers) -> Path:
    sizes = [_ROWS, _COLUMNS, _INNER, _LENGTHS]
    what = [device.name, platform.machine(), device.precisions, crew, torch.__version__, sizes]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return cache_home() / "machines" / f"{key}.json"


def _kept(file: Path) -> Device | None:
    """What was measured earlier; None where it wasn't, or where the file is damaged."""
    try:
        found = Device.model_validate_json(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if found.peak("fp32") and found.curves and found.curves.is_quick else None


def _measured_and_kept(
    device: Device, crew: CpuWorkers, file: Path, say: Callable[[str], None]
) -> Device:
    began_s = time.perf_counter()
    found = measure(device, crew)
    taken_s = time.perf_counter() - began_s
    peaks = ", ".join(
        f"{peak.value * crew.ranks / 1e9:.3g} GFLOP/s in {name}"
        for name, peak in found.peak_flops.items()
    )
    where = f"kept in {file}"
    try:
        write_atomic(file, json.dumps(to_raw(found)))
    except OSError as error:
        where = f"not kept: {file} can't be written ({error.strerror})"
    say(f"measured this machine's matmul peak: {peaks}, in {taken_s:.1f} s; {where}")
    return found


def measure(device: Device, crew: CpuWorkers) -> Device:
    """The device of one rank with its peaks, products and memory, while all ranks are at work."""
    source = (
        f"{platform.node()}, {datetime.now(UTC):%Y-%m-%d %H:%M UTC}, torch {torch.__version__}, "
        f"in a few seconds by {crew.workers} x {crew.threads} threads for {crew.ranks} ranks"
    )
    sizes = list(product(_ROWS, _COLUMNS, _INNER))
    peaks, matmul = {}, {}
    for precision, dtype in _DTYPES.items():
        if precision not in device.precisions:
            continue
        seconds = _seconds(crew, partial(_products, sizes, dtype))
        rates = [_WAYS * 2 * m * n * k / s for (m, n, k), s in zip(sizes, seconds, strict=True)]
        peaks[precision] = Figure(
            value=max(rates), origin="measured", source=f"the fastest product, {source}"
        )
        matmul[precision] = MatmulCurve(
            m=tuple(map(float, _ROWS)),
            n=tuple(map(float, _COLUMNS)),
            k=tuple(map(float, _INNER)),
            share=tuple(rate / max(rates) for rate in rates),
            source=source,
        )
    moved = tuple(12.0 * length for length in _LENGTHS)  # two vectors read, one written, of fp32
    seconds = _seconds(crew, lambda: [_addition(length) for length in _LENGTHS])
    memory = MemoryCurve(bytes=moved, seconds=seconds, source=source)
    return device.replace(
        peak_flops=peaks,
        curves=DeviceCurves(matmul=matmul, memory=memory, is_quick=True),
        memory_bytes_per_s=Figure(value=moved[-1] / seconds[-1], origin="measured", source=source),
    )


def _seconds(crew: CpuWorkers, make_calls: Callable[[], Sequence[Call]]) -> tuple[float, ...]:
    """Seconds that each call takes a rank: no more than one of its threads takes alone."""
    found = _at_once(crew, make_calls)
    if crew.threads == 1:
        return found
    return tuple(map(min, found, _at_once(crew._replace(threads=1), make_calls)))


def _at_once(crew: CpuWorkers, make_calls: Callable[[], Sequence[Call]]) -> tuple[float, ...]:
    """Seconds that each call takes a rank while all make the same one."""
    barrier, threads = Barrier(crew.workers), torch.get_num_threads()
    # Of several threads, the one that asks sleeps while it waits for the others.
    clock = time.thread_time if crew.threads == 1 else time.perf_counter

    def work(_worker: int) -> list[float]:
        torch.set_num_threads(crew.threads)  # of this thread
        try:
            return [_fastest_s(call, barrier, clock) for call in make_calls()]
        except BaseException:
            barrier.abort()
            raise

    try:
        with ThreadPoolExecutor(crew.workers) as pool:
            found = list(pool.map(work, range(crew.workers)))
    finally:
        torch.set_num_threads(threads)
    turns = crew.ranks / crew.workers
    return tuple(turns * sum(of_call) / crew.workers for of_call in zip(*found, strict=True))


def _fastest_s(call: Call, barrier: Barrier, clock: Callable[[], float]) -> float:
    """Mean seconds of a call in the fastest block."""
    call()
    blocks = []
    for _ in range(_BLOCKS):
        barrier.wait()
        began, number = clock(), 0
        while (taken := clock() - began) < _BLOCK_S:
            call()
            number += 1
        blocks.append(taken / number)
    return min(blocks)


def _products(sizes: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> list[Call]:
    return [_product(*size, dtype) for size in sizes]


def _product(m: int, n: int, k: int, dtype: torch.dtype) -> Call:
    """(m, k) x (k, n) as a layer multiplies: forward, for the gradient of its input, and for that
    of its matrix. Into the same memory, as training reuses it."""
    x, weight, grad = (torch.randn(*shape).to(dtype) for shape in ((m, k), (n, k), (k, m)))
    across, out = weight.T.contiguous(), torch.empty(m, n, dtype=dtype)

    def call() -> None:
        torch.mm(x, weight.T, out=out)
        torch.mm(x, across, out=out)
        torch.mm(grad.T, across, out=out)

    return call


def _addition(length: int) -> Call:
    x, y, out = torch.randn(length), torch.randn(length), torch.empty(length)
    return lambda: torch.add(x, y, out=out)
