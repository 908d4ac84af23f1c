"""Expert parallel: the ranks of the ep axis share the experts of every layer.

How it works: experts lie in numbered slots, and rank r of ep holds slots r * S / ep up to the next
rank's. A layer's router has sorted the tokens' copies by slot; `AllToAllDispatcher` sends each copy
to the rank that holds its expert and the result back: two all-to-alls forward, two backward. No
token is dropped and none padded: every rank first learns how many copies come from where, and that
is the one time in a layer that the host waits for the device.

The stacked weights are DTensors, split over their slots (ep) and, with tp, over the columns inside
each expert, so that FSDP2, the optimizer and checkpoints know what they hold. FSDP2 then shards or
replicates each rank's experts over the ranks that hold the same ones (`fsdp_dim` says which
dimension is free for that). Where training moves experts between ranks, `apply_placement` sends
their weights and optimizer state, bit for bit.

Of a few hot experts in each layer every rank may have a copy (`copy_experts`), so that their tokens
stay where they are: see `paceline.parallel.hot_experts`.

It knows no network: a layer with experts is any module with an `exchange` and a `slot_of_expert`
(see `HasExperts`). It does not choose placements (`paceline.plan.experts`) and has no capacity
factor.

Papers: GShard https://arxiv.org/abs/2006.16668, dropless https://arxiv.org/abs/2211.15841,
balancing by biases https://arxiv.org/abs/2412.19437
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from paceline.comm.compress.messages import CodedMessages, send_coded
from paceline.comm.local_part import local_part
from paceline.parallel.hot_experts import Copies
from paceline.parallel.statistics import mean_over_ranks

# The dimension of (slots, out, in) that goes through the inside of an expert, by parameter: what tp
# splits. The other one is the residual stream's, which FSDP2 may split; or an adapter's, which is
# narrow. The matrix of an adapter that isn't here has no such dimension.
_INNER_DIM = {
    "gate_proj": 1,
    "up_proj": 1,
    "down_proj": 2,
    "adapters.gate_up_proj.lora_b.weight": 1,
    "adapters.down_proj.lora_a.weight": 2,
}


class HasExperts(Protocol):
    """What a layer with experts has."""

    experts: nn.Module
    """Parameters gate_proj, up_proj (slots, ffn, hidden), down_proj (slots, hidden, ffn), which its
    forward takes `to_local`; biases (slots, out, 1), where tp cuts no experts; and adapters (slots,
    rank, in), (slots, out, rank)."""
    exchange: Callable[[Tensor, Tensor, Callable[..., Any]], Tensor]
    copied: Tensor | None
    """(copies,) int64: experts whose rows it puts behind those of all slots; None: of none."""
    mean_over_sequence: Callable[[Tensor], Tensor]
    """Averages numbers over the ranks that share the tokens of the same sequences."""
    slot_of_expert: Tensor
    """(experts,) int64."""
    expert_load: Tensor
    """(experts,) copies of tokens that this rank routed to each expert since it was last zeroed."""


@dataclass(frozen=True)
class AllToAllDispatcher:
    """Send rows to the ranks of their experts, and their outputs back."""

    group: dist.ProcessGroup
    messages: CodedMessages | None = None
    """The form of rows and gradients on their way; None: as they are."""
    copies: Copies = field(default_factory=Copies)
    """Of experts whose rows stay."""

    def __call__(self, rows: Tensor, counts: Tensor, experts: Callable[..., Any]) -> Tensor:
        """Apply experts to rows, wherever the experts are.

        Args:
            rows: (copies, hidden), sorted by slot; behind them those of copied experts.
            counts: (slots + copied experts,) int64, how many rows each of these gets; as many on
                every rank.
            experts: maps (rows sorted by local slot, local counts) to as many rows; and the rows of
                copied experts with what copies them, where there are any.

        Returns:
            (copies, hidden), in the order given.
        """
        num_copies = len(self.copies.slots)
        num_slots = len(counts) - num_copies
        sent = counts[:num_slots].view(self.group.size(), -1)  # (ep, local slots)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        to, come = torch.stack((sent.sum(1), received.sum(1))).tolist()  # waits for the device
        self.copies.count(len(rows) - sum(to) + to[self.group.rank()], len(rows))
        # Those that stay are copied: a part of all rows would keep all of them.
        away, here = (rows[: sum(to)], rows[sum(to) :].clone()) if num_copies else (rows, None)
        # From the order (sender, slot) to the order (slot, sender), which the experts want. Rows in
        # an order that nobody needs any more have no name, which would keep them.
        place, back = _transposition(received, sum(come)), _transposition(received.T, sum(come))
        arrived = _Put.apply(self._send(away.contiguous(), to, come), place)
        given = arrived, received.sum(0)
        of_here = None
        if num_copies:
            copied = partial(self.copies.of, group=self.group)
            outputs, of_here = experts(*given, (here, counts[num_slots:], copied))
        else:
            outputs = experts(*given)
        # The sum keeps the way back to the senders open when no row came: they wait for gradients.
        outputs = outputs if sum(come) else outputs + arrived.to(outputs.dtype)
        outputs = _Put.apply(outputs, back)
        outputs = self._send(outputs, come, to)
        return outputs if of_here is None else torch.cat((outputs, of_here))

    def _send(self, rows: Tensor, to: list[int], come: list[int]) -> Tensor:
        """Exchange rows, sorted by rank; gradients go back the same way."""
        if self.messages is None:
            return all_to_all_single_autograd(rows, come, to, self.group)
        return send_coded(rows, to, come, self.group, self.messages)


def expert_parallel(
    module: nn.Module, mesh: DeviceMesh, messages: CodedMessages | None = None
) -> None:
    """Spread the experts of every layer over ranks, in place.

    Args:
        module: on any device, meta too; the same on every rank.
        mesh: axes "ep", "tp" or both, in this order. With tp each rank computes a summand of its
            experts' outputs; whoever owns the layer adds them up where the layer is left.
        messages: the form of tokens on their way; as they are by default.
    """
    names = mesh.mesh_dim_names or ()
    for layer in expert_layers(module):
        for name, weights in list(layer.experts.named_parameters()):
            placements = [Shard(0) if axis == "ep" else _along_tp(name) for axis in names]
            spread = distribute_tensor(weights, mesh, placements, src_data_rank=None)
            owner, _, last = name.rpartition(".")
            held = nn.Parameter(spread, weights.requires_grad)
            layer.experts.get_submodule(owner).register_parameter(last, held)
        if "ep" in names:
            layer.exchange = AllToAllDispatcher(mesh.get_group("ep"), messages)


def _along_tp(name: str) -> Placement:
    return Shard(_INNER_DIM[name]) if name in _INNER_DIM else Replicate()


def share_sequences(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let layers with experts judge the balance of whole sequences, in place.

    Args:
        module: has layers with experts, or not.
        mesh: the cp axis, whose ranks each have as many tokens of every sequence.
    """
    for layer in expert_layers(module):
        layer.mean_over_sequence = partial(mean_over_ranks, group=mesh.get_group())


def fsdp_dim(parameter: nn.Parameter) -> Shard:
    """Where FSDP2 should split a parameter of experts: along the residual stream.

    It is the `shard_placement_fn` of `fully_shard`. Slots must stay whole, for they move between
    the ranks of ep; and ep, FSDP2 and tp on three dimensions need no strided shards.
    """
    assert isinstance(parameter, DTensor)
    taken = {p.dim for p in parameter.placements if isinstance(p, Shard)} | {0}
    free = [dim for dim in (2, 1) if dim not in taken]
    return Shard(next((dim for dim in free if parameter.shape[dim] > 1), free[0]))


def expert_layers(module: nn.Module) -> list[Any]:
    """The layers with experts (each an `HasExperts`), in the order of the network."""
    return [m for m in module.modules() if hasattr(m, "exchange") and hasattr(m, "slot_of_expert")]


def messages_in(module: nn.Module) -> list[CodedMessages]:
    """The forms in which a module's experts are sent tokens, each once."""
    exchanges = [layer.exchange for layer in expert_layers(module)]
    held = [each.messages for each in exchanges if isinstance(each, AllToAllDispatcher)]
    return list({id(each): each for each in held if each is not None}.values())


def expert_loads(module: nn.Module, mesh: DeviceMesh | None, reset: bool = True) -> Tensor:
    """Sum up what the experts had to do, over the ranks that see different tokens.

    Args:
        module: with the same layers on all ranks of the mesh.
        mesh: the axes whose ranks have different tokens (dp, fsdp, cp; not tp); None: no others.
        reset: start counting anew.

    Returns:
        (layers, experts): the same on every rank of the mesh.
    """
    counted = [layer.expert_load for layer in expert_layers(module)]
    loads = torch.stack(counted)
    for axis in range(mesh.ndim if mesh is not None else 0):
        assert mesh is not None
        dist.all_reduce(loads, group=mesh.get_group(axis))
    if reset:
        torch._foreach_zero_(counted)
    return loads


def copy_experts(module: nn.Module, experts: Sequence[Tensor]) -> None:
    """Let every rank of ep have copies of some experts of each layer from now on.

    Call it on every rank between two steps, and anew when experts have moved.

    Args:
        module: its experts spread by `expert_parallel` over ep.
        experts: of each layer (copies,) int64 on the CPU, or none; the same on every rank of ep.
    """
    for layer, chosen in zip(expert_layers(module), experts, strict=True):
        slots, order = layer.slot_of_expert.cpu()[chosen].sort()
        layer.copied = chosen[order].to(layer.slot_of_expert.device) if len(chosen) else None
        layer.exchange.copies.slots = tuple(slots.tolist())


def take_stayed(module: nn.Module) -> float | None:
    """Of the copies of tokens that this rank had since it was asked last, the share that it worked
    on itself; None: it had none."""
    exchanges = [layer.exchange for layer in expert_layers(module)]
    counts = [each.copies.take() for each in exchanges if isinstance(each, AllToAllDispatcher)]
    stayed, total = (sum(each) for each in zip((0, 0), *counts, strict=True))
    return stayed / total if total else None


def slots_of_experts(module: nn.Module) -> Tensor:
    """(layers, experts) int64 on the CPU: the placement that the layers have."""
    return torch.stack([layer.slot_of_expert for layer in expert_layers(module)]).cpu()


@torch.no_grad()
def apply_placement(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    slot_of_expert: Tensor,
    mesh: DeviceMesh | None,
) -> None:
    """Move the experts of every layer to new slots: weights and optimizer state, bit for bit.

    Call it on every rank between two steps, where no gradients wait.

    Args:
        module: its experts spread by `expert_parallel`, and possibly sharded by FSDP2.
        optimizer: steps these parameters. The first dimension of what it keeps for one, on this
            rank, is the parameter's own (scalars aside).
        slot_of_expert: (layers, experts), a permutation of the slots for each layer.
        mesh: the ep axis; None where every rank has all slots.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # state that is offloaded may still be on its way to the host
    for layer, slots in zip(expert_layers(module), slot_of_expert, strict=True):
        source = torch.empty_like(slots, device="cpu")
        source[slots.cpu()] = layer.slot_of_expert.cpu()  # where each slot's new expert comes from
        for parameter in layer.experts.parameters():
            state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            for tensor in (parameter, *_slotted(state, parameter)):
                move_slots(local_part(tensor), source, mesh)
        layer.slot_of_expert.copy_(slots)


def _slotted(state: Mapping[str, Any], parameter: Tensor) -> Iterator[Tensor]:
    """What an optimizer keeps for each slot: all but numbers for the whole parameter."""
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            continue
        if len(local_part(value)) != len(local_part(parameter)):
            raise ValueError(f"optimizer state {name} is not cut by slots, and can't be moved.")
        yield value


@torch.no_grad()
def move_slots(held: Tensor, source: Tensor, mesh: DeviceMesh | None) -> None:
    """Let slot s hold what slot source[s] held, in place; only what changes its rank is sent.

    Args:
        held: (local slots, ...), this rank's part; of the same shape on every rank.
        source: (slots,) int64 on the CPU, a permutation, the same on every rank.
        mesh: the ep axis; None where every rank has all slots.
    """
    rank, ranks = (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)
    size = len(source) // ranks
    if len(held) != size:
        raise ValueError(
            f"{len(held)} of {len(source)} slots are held by one of {ranks} ranks: FSDP2 must not "
            "split slots (fsdp_dim)."
        )
    to, come = torch.arange(len(source)) // size, source // size  # ranks, by new slot
    before = held.clone()
    stays = ((to == rank) & (come == rank)).nonzero().flatten()
    held[stays - rank * size] = before[source[stays] - rank * size]
    if mesh is None or not (to != come).any():
        return
    # Both sides list what they exchange in the order (other rank, new slot).
    leaves, enters = ((to != come) & (mine == rank) for mine in (come, to))
    sent = leaves.nonzero().flatten()  # sorted by new slot, hence by receiver
    got = enters.nonzero().flatten()
    got = got[come[got].argsort(stable=True)]
    device = torch.device(mesh.device_type)  # offloaded state is sent by way of the device
    outgoing = before[source[sent] - rank * size].to(device)
    incoming = outgoing.new_empty((len(got), *held.shape[1:]))
    dist.all_to_all_single(
        incoming,
        outgoing,
        torch.bincount(come[got], minlength=ranks).tolist(),
        torch.bincount(to[sent], minlength=ranks).tolist(),
        group=mesh.get_group(),
    )
    held[got - rank * size] = incoming.to(held.device)


def _transposition(counts: Tensor, num_rows: int) -> Tensor:
    """Where each row goes when rows in the order (a, b) are to be in the order (b, a).

    Args:
        counts: (a, b) rows of each pair.
        num_rows: their sum, which the host knows.

    Returns:
        (rows,) int64.
    """
    sizes, turned = counts.flatten(), counts.T.flatten()
    starts = sizes.cumsum(0) - sizes
    new_starts = (turned.cumsum(0) - turned).view_as(counts.T).T.flatten()
    shift = (new_starts - starts).repeat_interleave(sizes, output_size=num_rows)
    return torch.arange(num_rows, device=counts.device) + shift


class _Put(torch.autograd.Function):
    """Put row i at place[i]. It keeps the places alone: torch's own would keep the rows as well."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor) -> Tensor:
        """rows (rows, width) in another order; place (rows,) int64, a permutation."""
        ctx.save_for_backward(place)
        return rows.new_empty(rows.shape).index_copy_(0, place, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """A gather: nothing is added up."""
        (place,) = ctx.saved_tensors
        return grad[place], None
