"""Parts: seconds of each part of a network for one micro-batch, from its list of work.

How it works: the kernels of each part (`paceline.plan.price.kernels`) and its collectives
(`paceline.plan.collectives`, one call per kind for all parts) are put together to passes: forward,
gradient of the input, gradient of the weights. What is recomputed is part of the second.
Collectives that run beside products or attention are hidden as far as the stack can; the computing
is slower meanwhile.

Experts' exchanges have nothing of their own micro-batch to run beside. Stacks that overlap them
(`Stack.overlaps_ep`) work on a forward and a backward pass of two micro-batches together, and each
one's exchanges run beside the other one's computing. What that wins is spread evenly over the
passes, those without a partner included (`paceline.plan.price.pipelined.paired_share`).

Legend of shapes: n points.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.config.layout import PRECISIONS, RECOMPUTE
from paceline.config.stack import constant
from paceline.plan.points import Array, Points, Setting
from paceline.plan.price.kernels import Kernels, kernels_of, stacked
from paceline.plan.price.pace import exchanged_s, slowed_s
from paceline.plan.price.pipelined import paired_share
from paceline.plan.work import CollectiveOp, PartWork

COMPUTE = ("matmul", "attention", "other_kernels", "recompute")
BLOCKING = ("exposed_comm.tp", "exposed_comm.cp", "exposed_comm.ep")
_FP8 = PRECISIONS.index("fp8")
_SELECTIVE, _FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")

# A kernel of a captured graph that is replayed takes one or two microseconds to start.
_GRAPH_SHARE_OF_LAUNCH = 0.04
# Compiled code calls its kernels without dispatch, and a block is one node for autograd: a launch
# of 4 to 6 us and Python's call around it.
_COMPILED_SHARE_OF_LAUNCH = 0.25
# Kernels that the host has to launch after it waited for the device, until the queue is fed again.
_LAUNCHES_AFTER_WAIT = 6
# A collective is a call through torch.distributed with events on both streams, and the node of
# autograd around it: `c10d::allreduce_` takes the host 81 us where a kernel takes 42 (A100), and 55
# where one takes 22 (MI300X), by the traces that `launch_us` is from.
_LAUNCHES_PER_EXCHANGE = 2
# An autograd function that repeats a block (Megatron's, DeepSpeed's, PyTorch's reentrant one) costs
# the host 350 us for a block of 32 operators, and hooks for each tensor that is saved 1,040 us
# (timed side by side on a CPU, on small tensors).
_OWN_FUNCTION_SHARE = 1 / 3
# Cut into pieces, a product runs beside its gather or scatter except at its ends, and the pieces
# are slower than the whole: half of the time is won, as published for torch's async tensor
# parallelism (https://discuss.pytorch.org/t/209487).
_ASYNC_TP_SHARE = 0.5


# Collectives that run beside something else than others of their axis.
_APART = ("send_recv", "broadcast")


class CollectiveRequest(NamedTuple):
    """A collective whose seconds are asked for."""

    op: str
    num_bytes: Array
    num_ranks: Array
    stride: Array


class PartPass(NamedTuple):
    """One pass of one part over one micro-batch; every array is (n,) or (1,)."""

    terms: dict[str, Array]
    """Seconds on the device by term of COMPUTE and BLOCKING; they sum to `device_s`."""
    device_s: Array
    host_s: Array
    """Seconds that the host takes to launch it."""
    wait_s: Array
    """Seconds in which the device waits for a host that had to wait for it."""

    @property
    def beside_s(self) -> Array:
        """Seconds in which the data axes, whose groups are their own, may communicate: all of it,
        a late host's delay included.
        """
        return np.maximum(self.device_s, self.host_s)


@dataclass(frozen=True, eq=False)
class NetworkPart:
    """Seconds of one part of a network."""

    forward: PartPass
    input_grad: PartPass
    weight_grad: PartPass
    """Empty where the backward pass can't be split."""

    @property
    def backward_s(self) -> Array:
        """Seconds on the device of the backward pass."""
        return self.input_grad.device_s + self.weight_grad.device_s

    @property
    def beside_backward_s(self) -> Array:
        """As `PartPass.beside_s`, of the backward pass."""
        return self.input_grad.beside_s + self.weight_grad.beside_s


def exchange_s(setting: Setting, requests: Sequence[CollectiveRequest]) -> list[Array]:
    """Seconds of collectives, in a call for each kind."""
    seconds: list[Array] = [np.zeros(1)] * len(requests)
    alive = [at for at, request in enumerate(requests) if np.max(request.num_ranks) > 1]
    for op in {requests[at].op for at in alive}:
        places = [at for at in alive if requests[at].op == op]
        columns = (
            stacked([getattr(requests[at], name) for at in places])
            for name in ("num_bytes", "num_ranks", "stride")
        )
        rows = exchanged_s(setting.cluster, setting.stack, op, *columns)
        for at, row in zip(places, rows, strict=True):
            seconds[at] = row
    return seconds


def hidden_share(setting: Setting) -> float:
    """Part of what could run beside computing that really does: on a CPU none, for gloo's threads
    run on the cores that compute.
    """
    return 0.0 if setting.device.is_cpu else constant(setting.stack, "overlap_share")


def part_seconds(setting: Setting, points: Points, works: Sequence[PartWork]) -> list[NetworkPart]:
    """Seconds of each part."""
    exchanges = [exchange for work in works for exchange in work.exchanges]
    all_seconds = iter(
        exchange_s(setting, [CollectiveRequest(*exchange[1:5]) for exchange in exchanges])
    )
    parts = []
    for work, kernels in zip(works, kernels_of(setting, points, works), strict=True):
        sent = [(exchange, next(all_seconds)) for exchange in work.exchanges]
        parts.append(_part(setting, points, work, kernels, sent))
    return parts


Sent = Sequence[tuple[CollectiveOp, Array]]


class _Beside(NamedTuple):
    """Seconds of computing that a pass's collectives may run beside."""

    products_s: Array
    """Of the products that they feed."""
    call_s: Array
    """Of a call of attention."""
    partner_s: Array
    """Of a pass of another micro-batch, for exchanges of experts."""


def _part(
    setting: Setting, points: Points, work: PartWork, kernels: Kernels, sent: Sent
) -> NetworkPart:
    kernels, sent = _reached(work, kernels, sent)
    terms = {
        "matmul": kernels.input_grad,
        "attention": kernels.core_backward * kernels.calls,
        "other_kernels": kernels.sweeps_backward,
    }
    share = _recompute_share(points, work)
    terms |= _recomputed(setting, points, kernels, share)
    backward = [(e, s * e.times) for e, s in sent if e.backward]
    backward += recomputed_collectives(points, sent)
    products_s = kernels.input_grad + kernels.weight_grad
    other_s = sum(terms.values(), np.zeros(1)) + kernels.weight_grad
    own_s = _room_in_weights(points, kernels, sent, other_s)
    ahead = _Beside(kernels.forward, kernels.core, other_s)
    forward = _forward(setting, points, work, kernels, sent, ahead)
    behind = _Beside(products_s, kernels.core_backward, _forward_s(kernels) + own_s)
    _send(setting, points, terms, backward, behind)
    launches = (
        work.reached * kernels.num_products
        + kernels.num_kernels_backward
        + share * _relaunched_kernels(setting, points, kernels)
    )
    input_grad = _pass(setting, points, terms, launches, backward)
    input_grad = input_grad._replace(
        host_s=input_grad.host_s + _recompute_hooks_s(setting, points, work, kernels)
    )
    sums = work.tensors - (kernels.num_trained if _adds_by_itself(setting) else 0)
    launches = kernels.num_trained + np.maximum(sums, 0)
    weight_grad = _pass(setting, points, {"matmul": kernels.weight_grad}, launches)
    return NetworkPart(forward, *_split(setting, points, kernels, input_grad, weight_grad))


def _reached(work: PartWork, kernels: Kernels, sent: Sent) -> tuple[Kernels, Sent]:
    """What a part does, backward only in the share of such parts that a gradient comes to."""
    share = work.reached
    if share == 1:
        return kernels, sent
    fewer = kernels._replace(
        input_grad=share * kernels.input_grad,
        cast_input_grad=share * kernels.cast_input_grad,
        core_backward=share * kernels.core_backward,
        sweeps_backward=share * kernels.sweeps_backward,
        num_kernels_backward=share * kernels.num_kernels_backward,
    )
    return fewer, [(e._replace(times=e.times * share) if e.backward else e, s) for e, s in sent]


def _forward_s(kernels: Kernels) -> Array:
    """Computing of a forward pass."""
    return kernels.forward + kernels.core * kernels.calls + kernels.sweeps


def _room_in_weights(points: Points, kernels: Kernels, sent: Sent, backward_s: Array) -> Array:
    """Seconds of a backward pass's own products for weights that its exchanges of experts may run
    beside: where they are apart, and the forward pass's exchanges leave them.
    """
    ahead_s = sum((s * e.times for e, s in sent if e.axis == "ep" and not e.backward), np.zeros(1))
    left_s = np.maximum(backward_s - ahead_s, 0)
    apart = points.splits_backward & ~_is_whole(points)
    return apart * np.minimum(kernels.weight_grad, left_s)


def _launched_forward(kernels: Kernels) -> Array:
    return kernels.num_products + kernels.num_kernels + kernels.num_cores


def _relaunched_kernels(setting: Setting, points: Points, kernels: Kernels) -> Array:
    """Kernels that a block's recomputation launches, or asks for and is given from memory."""
    if setting.stack.recompute_granularity != "attention":
        return _launched_forward(kernels)
    full = points.recompute == _FULL
    return np.where(full, _launched_forward(kernels), kernels.num_cores)


def _adds_by_itself(setting: Setting) -> bool:
    """Whether products add the gradients of weights to what was there. Otherwise an operation does
    that for each tensor, or keeps the first.
    """
    stack = setting.stack
    return stack.states == "buffers" and stack.adds_into_buffer and stack.grad_dtype == "fp32"


def _forward(
    setting: Setting, points: Points, work: PartWork, kernels: Kernels, sent: Sent, beside: _Beside
) -> PartPass:
    terms = {
        "matmul": kernels.forward,
        "attention": kernels.core * kernels.calls,
        "other_kernels": kernels.sweeps,
    }
    ahead = [(e, s * e.times) for e, s in sent if not e.backward]
    _send(setting, points, terms, ahead, beside)
    launches = _launched_forward(kernels)
    made = _pass(setting, points, terms, launches, ahead)
    waits = work.host_syncs * _LAUNCHES_AFTER_WAIT * _launch_s(setting, points)
    chosen_s = _select_s(setting, points, work, kernels)
    return made._replace(host_s=made.host_s + chosen_s, wait_s=np.asarray(waits, float))


def _send(
    setting: Setting, points: Points, terms: dict[str, Array], sent: Sent, beside: _Beside
) -> None:
    """Add what collectives leave exposed to a pass, and what hiding the rest costs it."""
    stack = setting.stack
    share = hidden_share(setting)
    rings = [(e, s) for e, s in sent if e.op == "send_recv"]
    hidden = np.zeros(1)
    if rings:
        # The hops of a ring are sent together, each beside a call of attention.
        calls = np.maximum(rings[0][0].times, 1)
        ring_s = sum((s for _, s in rings), np.zeros(1))
        hidden = hidden + share * np.minimum(ring_s, beside.call_s * calls)
        terms["exposed_comm.cp"] = ring_s - hidden
    of_products = np.where(points.async_tp, _ASYNC_TP_SHARE, 0.0)
    overlapped = {
        "tp": (np.ones(1) if stack.overlaps_tp else of_products, beside.products_s),
        "cp": (np.zeros(1), beside.products_s),
        "ep": (paired_share(points) if stack.overlaps_ep else np.zeros(1), beside.partner_s),
    }
    for axis, (overlaps, beside_s) in overlapped.items():
        whole = [s for e, s in sent if e.axis == axis and e.op not in _APART]
        if not whole:
            continue
        total = sum(whole, np.zeros(1))
        inside = overlaps * share * np.minimum(total, beside_s)
        term = f"exposed_comm.{axis}"
        terms[term] = terms.get(term, np.zeros(1)) + total - inside
        hidden = hidden + inside
    copies_s = sum((s for e, s in sent if e.op == "broadcast"), np.zeros(1))
    if np.any(copies_s):  # of experts, beside the products of a rank's own
        inside = share * np.minimum(copies_s, beside.products_s)
        terms["exposed_comm.ep"] = terms["exposed_comm.ep"] + copies_s - inside
        hidden = hidden + inside
    terms["matmul"] = terms["matmul"] + slowed_s(stack, hidden)


def _recomputed(
    setting: Setting, points: Points, kernels: Kernels, share: Array
) -> dict[str, Array]:
    """Kernels that run once more before the backward pass of a block, in a share of them."""
    core = kernels.core * kernels.calls
    stops_early = setting.stack.recompute_stops_early
    full = kernels.forward + core + kernels.sweeps - (kernels.last if stops_early else 0)
    by_granularity = {
        "block": kernels.sweeps,
        "attention": core,
        "half": kernels.sweeps + kernels.alternate,
    }
    selective = by_granularity[setting.stack.recompute_granularity]
    chosen = np.where(points.recompute == _FULL, full, selective)
    return {"recompute": chosen * share}


def recomputed_collectives(points: Points, sent: Sent) -> Sent:
    """Collectives of the forward pass that recomputation repeats."""
    repeated = []
    for exchange, seconds in sent:
        kinds = {"full": (_FULL,), "selective": (_SELECTIVE, _FULL)}.get(exchange.again, ())
        if kinds and not exchange.backward:
            does = np.isin(points.recompute, kinds) * points.recompute_share
            times = (exchange.times - exchange.spared) * does
            repeated.append((exchange._replace(times=times), seconds * times))
    return repeated


def _select_s(setting: Setting, points: Points, work: PartWork, kernels: Kernels) -> Array:
    """Python's decisions, operator by operator, whether a forward pass keeps their results; and as
    many when it is repeated.
    """
    selects = (points.recompute == _SELECTIVE) & ~points.compile
    return selects * _recomputing_s(setting, points, work, kernels, "select_us")


def _recompute_hooks_s(setting: Setting, points: Points, work: PartWork, kernels: Kernels) -> Array:
    """What Python does for a repetition: hooks for each tensor that autograd saves, when it is
    saved, when it is asked for and when it is made again, or a function of autograd; and what
    `_select_s` says.
    """
    each = 1.0 if setting.stack.recompute_stops_early else _OWN_FUNCTION_SHARE
    hooks_s = each * _recomputing_s(setting, points, work, kernels, "again_us")
    return ~points.compile * hooks_s + _select_s(setting, points, work, kernels)


def _recomputing_s(
    setting: Setting, points: Points, work: PartWork, kernels: Kernels, name: str
) -> Array:
    """A constant of the host for each operator of a forward pass that is repeated."""
    launches = _relaunched_kernels(setting, points, kernels)
    return constant(setting.stack, name) * 1e-6 * _recompute_share(points, work) * launches


def _recompute_share(points: Points, work: PartWork) -> Array:
    """Share of a part that is computed again: of a stage's blocks."""
    share = points.recompute_share * work.reached
    return np.where(work.in_block & (points.recompute > 0), share, 0.0)


def _is_whole(points: Points) -> Array:
    """Whether the backward pass is one piece whatever the schedule says."""
    return points.compile | (points.recompute > 0) | points.frees_weights


def _split(
    setting: Setting, points: Points, kernels: Kernels, input_grad: PartPass, weight_grad: PartPass
) -> tuple[PartPass, PartPass]:
    """Put both halves together where the runtime can't split them (parallel/pp/stage.py)."""
    whole = _is_whole(points)
    # The product of torchao is one node of the graph: each half computes both gradients.
    one_node = (points.precision == _FP8) & (not setting.stack.keeps_fp8)
    twice = one_node & points.splits_backward & ~whole
    weights_s = weight_grad.terms["matmul"]
    moved_s = np.where(whole, weights_s, twice * kernels.cast_weight_grad)
    late_s = np.where(whole, 0.0, weights_s) + twice * kernels.cast_input_grad
    terms = input_grad.terms | {"matmul": input_grad.terms["matmul"] + moved_s}
    late_host_s = np.where(whole, 0.0, weight_grad.host_s) + twice * input_grad.host_s
    return (
        input_grad._replace(
            terms=terms,
            device_s=input_grad.device_s + moved_s,
            host_s=input_grad.host_s + (whole | twice) * weight_grad.host_s,
        ),
        PartPass({"matmul": late_s}, late_s, late_host_s, np.zeros(1)),
    )


def _pass(
    setting: Setting,
    points: Points,
    terms: dict[str, Array],
    launches: Array,
    sent: Sent = (),
) -> PartPass:
    device_s = sum(terms.values(), np.zeros(1))
    host_s = (launches + _num_exchanges(sent)) * _launch_s(setting, points)
    if setting.device.is_cpu:
        rings = [(e, s) for e, s in sent if e.op == "send_recv"]
        others = [(e, s) for e, s in sent if e.op != "send_recv"]
        host_s = host_s + num_waits(others) * constant(setting.stack, "exchange_us") * 1e-6
        host_s = host_s + num_waits(rings) * constant(setting.stack, "hop_us") * 1e-6
    return PartPass(terms, device_s, host_s, np.zeros(1))


def _launch_s(setting: Setting, points: Points) -> Array:
    each = constant(setting.stack, "launch_us") * 1e-6
    if setting.stack.launch == "graph":
        each *= _GRAPH_SHARE_OF_LAUNCH
    return each * np.where(points.compile, _COMPILED_SHARE_OF_LAUNCH, 1.0)


def _num_exchanges(sent: Sent) -> Array:
    counts = (np.where(e.num_ranks > 1, e.times, 0.0) for e, _ in sent)
    return _LAUNCHES_PER_EXCHANGE * sum(counts, np.zeros(1))


def num_waits(sent: Sent) -> Array:
    """Exchanges that the host deals with; what goes back around a ring together counts once.

    A sum over tp stands for entering and leaving a layer: DTensor works on both, though nothing is
    sent for one of them.
    """
    ways = [2.0 if e.axis == "tp" and e.op == "all_reduce" else 1.0 for e, _ in sent]
    counts = [
        (e, np.where((s > 0) & (e.num_ranks > 1), way * e.times, 0.0))
        for way, (e, s) in zip(ways, sent, strict=True)
    ]
    rings = [count for e, count in counts if e.op == "send_recv" and e.backward]
    alone = (count for e, count in counts if e.op != "send_recv" or not e.backward)
    total = sum(alone, np.zeros(1))
    # Keys and values start in the first step, gradients two steps later (parallel/cp/ring.py).
    return total + rings[0] + np.minimum(rings[1], 2) if rings else total
