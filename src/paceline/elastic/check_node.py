"""Is a machine fit to be taken in (again)? A check of seconds, before its ranks start.

Each device multiplies two matrices whose product is known to the bit, and moves memory. Both must
be right, and at least half as fast as the Cluster says. That happens in a process of its own: it
takes the device's memory with it when it ends, and one that hangs is killed and refused. Then some
MiB go to a machine of the run and come back, over a connection of agents.

Not here: what is wrong with a machine (`paceline doctor`), and how fast it is (`paceline bench`).
"""

import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from paceline.config.device import Device
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import Job
from paceline.elastic.generation import Node
from paceline.plan.rates import matmul_s, memory_s
from paceline.render.figures import bytes_text

Transfer = Callable[[bytes], bytes]
"""Sends a block to a neighbour and gives what the neighbour sends back: the same. Raises
`NeighbourGoneError` where there is none, or none any more."""
Check = Callable[[Node, Transfer], str | None]
"""Of this machine, before it is taken in: a sentence about what is wrong with it, or None."""


class NeighbourGoneError(Exception):
    """Nobody is there who could send a block back: that says nothing about this machine."""


# Of what the Cluster says; a machine that others share may be slower for a while. Assumed.
LEAST_SHARE = 0.5
_LIMIT_S = 60.0
_MEASURE_S = 0.3
_SIZE = {"cpu": 512, "cuda": 4096}
_LENGTH = {"cpu": 1 << 21, "cuda": 1 << 26}
_TRANSFER_BYTES = 8 << 20
# A connection of agents is one of Python's, with a checksum for each line: it can't show that a
# faster link is as fast as it should be. Assumed.
_AGENTS_BYTES_PER_S = 1e8
_WAYS = 17


def node_check(job: Job) -> Check:
    """What an agent calls before its node is taken in.

    Args:
        job: concrete.
    """
    cluster = job.cluster
    if cluster.device.kind == "cpu":
        # Its cores may be shared with others for a while: only its bits are judged.
        bare = Device(name=cluster.device.name, kind="cpu")
        cluster = cluster.replace(device=bare, tiers=())

    def check(node: Node, transfer: Transfer) -> str | None:
        own = check_apart(cluster, job.layout.precision, node.num_devices)
        return own or check_transfer(cluster, transfer)

    return check


def no_check(_node: Node, _transfer: Transfer) -> str | None:
    """Nothing is wrong with a machine that nobody looks at."""
    return None


def check_apart(cluster: Cluster, precision: str, num_devices: int) -> str | None:
    """`check_devices` in a process of its own; a sentence where it doesn't end in a minute."""
    ours, theirs = get_context("forkserver").Pipe(duplex=False)
    process = get_context("forkserver").Process(
        target=_answer, args=(theirs, cluster, precision, num_devices), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(_LIMIT_S):
            return f"the check of its devices did not end in {_LIMIT_S:.0f} s"
        return ours.recv_bytes().decode() or None
    except EOFError:
        process.join()
        return f"the check of its devices ended by itself (exit code {process.exitcode})"
    finally:
        process.kill()
        process.join()


def _answer(out: Connection, cluster: Cluster, precision: str, num_devices: int) -> None:
    out.send_bytes((check_devices(cluster, precision, num_devices) or "").encode())


def check_devices(cluster: Cluster, precision: str, num_devices: int) -> str | None:
    """Whether each device of this machine multiplies right, and multiplies and moves fast enough.

    Args:
        precision: of the Job's products.
        num_devices: of this machine; CPU ranks share its cores, so one stands for all.

    Returns:
        a sentence about the first thing that is wrong; None: nothing is.
    """
    kind = cluster.device.kind
    if kind == "cuda" and torch.cuda.device_count() < num_devices:
        return f"it has {torch.cuda.device_count()} of {num_devices} devices"
    for index in range(num_devices if kind == "cuda" else 1):
        device = torch.device(kind, index) if kind == "cuda" else torch.device(kind)
        try:
            wrong = _wrong_bits(device) or _too_slow(cluster.device, precision, device)
        except RuntimeError as error:  # of CUDA: the device is gone, or out of memory
            wrong = str(error).partition("\n")[0]
        if wrong is not None:
            return f"{device} of this machine: {wrong}"
    return None


def check_transfer(cluster: Cluster, transfer: Transfer) -> str | None:
    """Whether a block comes back from a neighbour as it was sent, and fast enough; None where there
    is no neighbour."""
    block = bytes(range(256)) * (_TRANSFER_BYTES // 256)
    try:
        transfer(block[:1])
        began = time.perf_counter()
        came_back = transfer(block)
    except NeighbourGoneError:
        return None
    except OSError as error:
        return f"the transfer with a neighbour failed ({error.strerror or error})"
    seconds = time.perf_counter() - began
    if came_back != block:
        return f"{bytes_text(len(block))} came back from a neighbour with other bits"
    between = [tier for tier in cluster.tiers if tier.num_devices > cluster.devices_per_node]
    if not between:
        return None
    # There and back, each over one device's share of the node's links.
    known = min(between[0].bytes_per_s.value, _AGENTS_BYTES_PER_S)
    return _slower("a transfer with a neighbour", 2 * len(block) / seconds, known, "B/s")


def known_factors(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two matrices (size, size) fp32 and their product, exact in whatever order it is summed.

    Both hold (a row + b column) mod 17 - 8: small whole numbers, so that every sum is a whole
    number below 2^24.
    """
    row, column = torch.arange(size)[:, None], torch.arange(size)[None, :]
    x, y = (5 * row + 3 * column) % _WAYS - 8, (7 * row + 2 * column) % _WAYS - 8
    # Rows and columns repeat, so whole numbers of the host multiply only 17 of each.
    small = x[:_WAYS] @ y[:, :_WAYS]
    product = small[torch.arange(size) % _WAYS][:, torch.arange(size) % _WAYS]
    return x.float(), y.float(), product.float()


def _wrong_bits(device: torch.device) -> str | None:
    x, y, product = (each.to(device) for each in known_factors(_SIZE[device.type]))
    until = time.perf_counter() + _MEASURE_S
    while time.perf_counter() < until:
        num_wrong = int((x @ y != product).sum())
        if num_wrong:
            return f"a product of whole numbers has {num_wrong} wrong values of {product.numel()}"
    return None


def _too_slow(known: Device, precision: str, device: torch.device) -> str | None:
    size, length = _SIZE[device.type], _LENGTH[device.type]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    name = precision if dtype != torch.float32 else "fp32"
    with suppress(InputError):  # nothing is known of it
        expected = 2 * size**3 / float(matmul_s(known, name, size, size, size).item())
        x, y = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        rate = 2 * size**3 / _fastest_s(lambda: x @ y, device)
        if slow := _slower(f"a product in {name}", rate, expected, "FLOP/s"):
            return slow
    with suppress(InputError):
        expected = 12 * length / float(memory_s(known, 12 * length).item())
        a, b = torch.ones(length, device=device), torch.ones(length, device=device)
        out = torch.empty_like(a)
        rate = 12 * length / _fastest_s(lambda: torch.add(a, b, out=out), device)
        return _slower("moving memory", rate, expected, "B/s")
    return None


def _slower(what: str, rate: float, known: float, unit: str) -> str | None:
    if rate >= LEAST_SHARE * known:
        return None
    return (
        f"{what} runs at {rate:.3g} {unit}, which is {rate / known:.0%} of the {known:.3g} {unit} "
        f"that the Cluster says; at least {LEAST_SHARE:.0%} is required"
    )


def _fastest_s(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call: the fastest of as many as fit."""

    def once() -> float:
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    until, seconds = time.perf_counter() + _MEASURE_S, [once()]
    while time.perf_counter() < until:
        seconds.append(once())
    return min(seconds)
