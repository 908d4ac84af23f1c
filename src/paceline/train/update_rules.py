"""Update rules: how parameters step by their gradients, other than AdamW's own class.

Each works on the shards of this rank. What a rule needs of a whole parameter (its norm, sums of
rows and columns, for Muon all of the momentum) comes from the ranks that hold its other parts, so
that any layout steps as one rank does. SGD and AdamW are torch's functions. torch's `Adafactor` and
`Muon` are not used: on DTensors the first would ask the host for two norms of each parameter, and
the second multiply shards by shards; both are tested against ours. torch has no Lion, LARS, LAMB or
schedule-free AdamW.

| rule | source |
|---|---|
| sgd | `torch.optim.SGD` |
| lion | https://arxiv.org/abs/2302.06675, algorithm 2 |
| adafactor | https://arxiv.org/abs/1804.04235, as `torch.optim.Adafactor` |
| lars | https://arxiv.org/abs/1708.03888, algorithm 1 |
| lamb | https://arxiv.org/abs/1904.00962, algorithm 2 |
| muon | https://kellerjordan.github.io/posts/muon/; size: https://arxiv.org/abs/2502.16982, eq. 4 |
| schedulefree | https://arxiv.org/abs/2405.15682, algorithm 1, and the authors' AdamWScheduleFree |
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from paceline.comm.local_part import is_shared, local_part
from paceline.models.shares import assign
from paceline.train.sharded_state import like

Group = dict[str, Any]


@dataclass
class Piece:
    """A parameter and what belongs to it; plain tensors are this rank's part."""

    parameter: nn.Parameter
    values: Tensor
    """What steps: the parameter, or its fp32 master copy."""
    gradient: Tensor
    state: dict[str, Any]

    def moment(self, key: str) -> Tensor:
        """A tensor of state like the parameter, zero at first."""
        if key not in self.state:
            self.state[key] = like(self.parameter, torch.zeros_like(self.values))
        return local_part(self.state[key])

    def count(self) -> float:
        """The number of this step, from 1."""
        step = self.state.setdefault("step", torch.zeros(()))
        step += 1
        return float(step)


Rule = Callable[[Sequence[Piece], Group], None]


def sgd_rule(pieces: Sequence[Piece], group: Group) -> None:
    """Momentum, or with momentum = 0 none; weight decay is part of the gradient."""
    momentum = group["momentum"]
    sgd(
        [piece.values for piece in pieces],
        [piece.gradient for piece in pieces],
        [piece.moment("momentum_buffer") if momentum else None for piece in pieces],
        lr=group["lr"],
        momentum=momentum,
        nesterov=group["nesterov"],
        weight_decay=group["weight_decay"],
        dampening=0.0,
        maximize=False,
        foreach=True,
    )


def adamw_rule(pieces: Sequence[Piece], group: Group) -> None:
    """For what Muon leaves out."""
    for piece in pieces:
        piece.state.setdefault("step", torch.zeros(()))
    adamw(
        [piece.values for piece in pieces],
        [piece.gradient for piece in pieces],
        [piece.moment("exp_avg") for piece in pieces],
        [piece.moment("exp_avg_sq") for piece in pieces],
        [],
        [piece.state["step"] for piece in pieces],
        foreach=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def lion_rule(pieces: Sequence[Piece], group: Group) -> None:
    """The sign of momentum and gradient."""
    beta1, beta2 = group["betas"]
    for piece in pieces:
        mean = piece.moment("exp_avg")
        direction = mean.lerp(piece.gradient, 1 - beta1).sign_()
        piece.values.mul_(1 - group["lr"] * group["weight_decay"])
        piece.values.add_(direction, alpha=-group["lr"])
        mean.lerp_(piece.gradient, 1 - beta2)


def lars_rule(pieces: Sequence[Piece], group: Group) -> None:
    """Momentum of gradients that are as large as their parameters, but for vectors."""
    norms = _norms(pieces, [(piece.values, piece.gradient) for piece in pieces])
    for piece, (of_values, of_gradient) in zip(pieces, norms, strict=True):
        direction = piece.gradient.add(piece.values, alpha=group["weight_decay"])
        if piece.parameter.ndim > 1:
            whole = of_gradient + group["weight_decay"] * of_values
            direction.mul_(_ratio(group["trust"] * of_values, whole).to(direction))
        momentum = piece.moment("momentum_buffer")
        momentum.mul_(group["momentum"]).add_(direction, alpha=group["lr"])
        piece.values.sub_(momentum)


def lamb_rule(pieces: Sequence[Piece], group: Group) -> None:
    """Adam's direction, as large as the parameter, but for vectors."""
    directions = []
    for piece in pieces:
        direction = _adam_direction(piece, group, piece.moment("exp_avg"))
        directions.append(direction.add_(piece.values, alpha=group["weight_decay"]))
    norms = _norms(pieces, list(zip((p.values for p in pieces), directions, strict=True)))
    for piece, direction, (of_values, of_it) in zip(pieces, directions, norms, strict=True):
        if piece.parameter.ndim > 1:
            direction.mul_(_ratio(of_values, of_it).to(direction))
        piece.values.add_(direction, alpha=-group["lr"])


def schedulefree_rule(pieces: Sequence[Piece], group: Group) -> None:
    """Parameters are between where AdamW goes ("z") and the mean of where it was."""
    beta1, lr = group["betas"][0], group["lr"]
    for piece in pieces:
        if "z" not in piece.state:
            piece.state["z"] = like(piece.parameter, piece.values.clone())
            piece.state["weight_sum"] = torch.zeros((), dtype=torch.float64)
        direction = _adam_direction(piece, group, None)
        direction.add_(piece.values, alpha=group["weight_decay"])
        piece.state["weight_sum"] += lr * lr
        share = lr * lr / float(piece.state["weight_sum"]) if lr else 0.0
        z = local_part(piece.state["z"])
        piece.values.lerp_(z, share).add_(direction, alpha=lr * (beta1 * (1 - share) - 1))
        z.sub_(direction, alpha=lr)


def schedulefree_mean(values: Tensor, state: dict[str, Any], beta1: float) -> Tensor:
    """The mean that parameters which stepped by `schedulefree_rule` stand for."""
    return values.lerp(local_part(state["z"]), 1 - 1 / beta1) if "z" in state else values


def _adam_direction(piece: Piece, group: Group, mean: Tensor | None) -> Tensor:
    """Adam's, a new tensor; without a first moment where `mean` is None."""
    beta1, beta2 = group["betas"]
    step, gradient = piece.count(), piece.gradient
    square = piece.moment("exp_avg_sq")
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    size = square.div(1 - beta2**step).sqrt_().add_(group["eps"])
    if mean is None:
        return gradient / size
    return mean.lerp_(gradient, 1 - beta1).div(1 - beta1**step).div_(size)


# Of `torch.optim.Adafactor`, whose numbers are the paper's.
_BETA2_DECAY, _LEAST_SCALE = -0.8, 1e-3
_FACTORS = {"row_var": -1, "col_var": -2}
"""Adafactor's state of a matrix, and over which dimension each is a mean."""


def adafactor_rule(pieces: Sequence[Piece], group: Group) -> None:
    """Second moments of rows and columns stand for those of all values; steps are no larger than
    lr times the parameter, and less than 1 / sqrt(step) of it."""
    lr, steps = group["lr"], [piece.count() for piece in pieces]
    updates = [
        estimate.clamp_(min=_eps(piece) ** 2).rsqrt_().mul_(piece.gradient)
        for piece, estimate in zip(pieces, _second_moments(pieces, steps), strict=True)
    ]
    norms = _norms(pieces, list(zip((p.values for p in pieces), updates, strict=True)))
    for piece, update, step, (of_values, of_it) in zip(pieces, updates, steps, norms, strict=True):
        root = math.sqrt(piece.parameter.numel())
        scale = (of_values / root).clamp(min=_LEAST_SCALE) * min(lr, step**-0.5)
        piece.values.mul_(1 - lr * group["weight_decay"])
        piece.values.sub_(update.mul_((scale / (of_it / root).clamp(min=1)).to(update)))


def _second_moments(pieces: Sequence[Piece], steps: Sequence[float]) -> list[Tensor]:
    """Estimates of all pieces, new tensors, when their state has followed the gradients."""
    weights = [step**_BETA2_DECAY for step in steps]
    for piece, weight in zip(pieces, weights, strict=True):
        if piece.parameter.ndim == 1:
            piece.moment("variance").lerp_(piece.gradient.square(), weight)
    matrices = [(p, weight) for p, weight in zip(pieces, weights, strict=True) if _is_matrix(p)]
    held = [piece for piece, _ in matrices]
    for key, dim in _FACTORS.items():
        means = [piece.gradient.square().sum(dim=dim) for piece in held]
        _add_up(held, means, dim)
        for (piece, weight), mean in zip(matrices, means, strict=True):
            mean.div_(piece.parameter.shape[dim])
            _factor(piece, key, dim, mean).lerp_(mean, weight)
    row_sums = [local_part(piece.state["row_var"]).sum(dim=-1, keepdim=True) for piece in held]
    _add_up(held, row_sums, -2)
    estimates = iter([_estimate(*each) for each in zip(held, row_sums, strict=True)])
    return [
        next(estimates) if _is_matrix(piece) else piece.moment("variance").clone()
        for piece in pieces
    ]


def _estimate(piece: Piece, row_sum: Tensor) -> Tensor:
    rows, columns = (local_part(piece.state[key]) for key in _FACTORS)
    mean = (row_sum / piece.parameter.shape[-2]).clamp_(min=_eps(piece))
    return (rows / mean).unsqueeze(-1) * columns.unsqueeze(-2)


def _is_matrix(piece: Piece) -> bool:
    return piece.parameter.ndim > 1


def _eps(piece: Piece) -> float:
    return torch.finfo(piece.values.dtype).eps


def _factor(piece: Piece, key: str, dim: int, part: Tensor) -> Tensor:
    """State with the shape of the parameter but for one dimension, shared out as that is."""
    kept = piece.state.get(key)
    if kept is None or (is_shared(piece.parameter) and not is_shared(kept)):
        made = _without(piece.parameter, dim, torch.zeros_like(part))
        if kept is not None:  # a checkpoint's, whole
            assign(made, kept)
        piece.state[key] = made
    return local_part(piece.state[key])


def _without(parameter: Tensor, dim: int, part: Tensor) -> Tensor:
    """A tensor laid out over the ranks like a parameter that lacks a dimension (from the end)."""
    if not is_shared(parameter):
        return part
    gone = parameter.ndim + dim

    def moved(placement: Any) -> Placement:
        if placement.is_replicate() or placement.dim == gone:
            return Replicate()
        return Shard(placement.dim - 1) if placement.dim > gone else placement

    shape = parameter.shape[:gone] + parameter.shape[gone + 1 :]
    placements = tuple(map(moved, parameter.placements))
    return like(parameter, part, shape, placements)


# Keller Jordan's quintic iteration, steepest at zero.
_QUINTIC, _ITERATIONS, _TINY = (3.4445, -4.7750, 2.0315), 5, 1e-7
_RMS_OF_ADAMW = 0.2


def muon_rule(pieces: Sequence[Piece], group: Group) -> None:
    """The nearest orthogonal matrix to the momentum, of the same root mean square as AdamW's."""
    lr, momentum, updates = group["lr"], group["momentum"], []
    for piece in pieces:
        mean = piece.moment("momentum_buffer")
        mean.lerp_(piece.gradient, 1 - momentum)
        updates.append(piece.gradient.lerp(mean, momentum))
    directions = _directions(pieces, updates, group["arithmetic"])
    for piece, direction in zip(pieces, directions, strict=True):
        scale = _RMS_OF_ADAMW * math.sqrt(max(_as_matrices(piece.parameter).shape[-2:]))
        piece.values.mul_(1 - lr * group["weight_decay"])
        piece.values.add_(direction.to(piece.values.dtype), alpha=-lr * scale)


def _directions(
    pieces: Sequence[Piece], updates: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """This rank's parts of the `orthogonal` ones to matrices, of which it has parts.

    Matrices of one shape and layout go together. Ranks that have parts of them swap these, so that
    each has whole matrices, others than the others, and swap back what they make of them.
    """
    alike: dict[Any, list[int]] = {}
    for number, (piece, update) in enumerate(zip(pieces, updates, strict=True)):
        p = piece.parameter
        layout = (p.device_mesh, p.placements) if is_shared(p) else None
        alike.setdefault((p.shape, update.device, layout), []).append(number)
    found: dict[int, Tensor] = {}
    for numbers in alike.values():
        parameter, parts = pieces[numbers[0]].parameter, [updates[each] for each in numbers]
        cuts = _cuts(parameter)
        if cuts is None:
            made = [_of_gathered(parameter, part, dtype) for part in parts]
        else:
            stack = torch.stack(parts).to(dtype)
            stack = F.pad(stack, (0, 0) * (stack.ndim - 1) + (0, -len(stack) % _num_ranks(cuts)))
            for cut in cuts:
                stack = cut.whole(stack)
            shape = stack.shape
            stack = orthogonal(stack.flatten(2) if stack.ndim > 4 else stack, dtype).reshape(shape)
            for cut in reversed(cuts):
                stack = cut.parts(stack)
            made = list(stack[: len(parts)])
        found |= zip(numbers, made, strict=True)
    return [found[number] for number in range(len(pieces))]


@dataclass(frozen=True)
class _Cut:
    """Ranks among which matrices are cut evenly."""

    ranks: dist.ProcessGroup
    dim: int

    def whole(self, parts: Tensor) -> Tensor:
        """A part of each of many matrices -> all parts of some: (k, ..) -> (k / ranks, ..)."""
        mine = self._swapped(parts.unflatten(0, (self.ranks.size(), -1)))
        return torch.cat(mine.unbind(), self.dim + 1)

    def parts(self, whole: Tensor) -> Tensor:
        """The way back."""
        theirs = torch.stack(whole.chunk(self.ranks.size(), self.dim + 1))
        return self._swapped(theirs).flatten(0, 1)

    def _swapped(self, sent: Tensor) -> Tensor:
        received = torch.empty_like(sent, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, sent.contiguous(), group=self.ranks)
        return received


def _num_ranks(cuts: Sequence[_Cut]) -> int:
    return math.prod(cut.ranks.size() for cut in cuts)


def _cuts(p: Tensor) -> list[_Cut] | None:
    """How the matrices of a parameter are cut, the finest cut first; None: unevenly."""
    if not is_shared(p):
        return []
    mesh, places = p.device_mesh, cast(Sequence[Any], p.placements)
    # A layer's experts are a stack of matrices; one of many whole ones is not cut.
    axes = [axis for axis in _split_axes(p, None) if p.ndim != 3 or places[axis].dim != 0]
    for dim, size in enumerate(p.shape):
        if size % math.prod(mesh.size(axis) for axis in axes if places[axis].dim == dim):
            return None
    # FSDP cuts what tensor parallelism has left of a dimension, though it is the axis before.
    axes.sort(key=lambda axis: (not hasattr(places[axis], "split_factor"), -axis))
    return [_Cut(mesh.get_group(axis), places[axis].dim) for axis in axes]


def _of_gathered(p: nn.Parameter, part: Tensor, dtype: torch.dtype) -> Tensor:
    """The same for one matrix, which every rank gathers."""
    update = like(p, part)
    assert isinstance(update, DTensor)
    whole = update.full_tensor()
    assign(update, orthogonal(_as_matrices(whole), dtype).reshape(whole.shape).to(part.dtype))
    return local_part(update)


def _as_matrices(tensor: Tensor) -> Tensor:
    """A matrix, or the stack of a layer's experts; of a convolution's kernel what is flattened."""
    return tensor.flatten(1) if tensor.ndim > 3 else tensor


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """About the nearest orthogonal matrices: their singular values become 0.7 to 1.2.

    Args:
        matrices: (..., rows, columns).
        dtype: of the arithmetic.

    Returns:
        the same shape, of that type.
    """
    a, b, c = _QUINTIC
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if is_tall else matrices).to(dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_TINY)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def _norms(
    pieces: Sequence[Piece], tensors: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """The norms of two whole tensors for each piece, of which this rank has parts: () fp64."""
    squares = [torch.stack([part.norm().double().square() for part in parts]) for parts in tensors]
    _add_up(pieces, squares)
    return [(one.sqrt(), other.sqrt()) for one, other in squares]


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Their quotient, 1 where either is zero."""
    is_known = (above > 0) & (below > 0)
    return torch.where(is_known, above / below.clamp(min=torch.finfo(below.dtype).tiny), 1.0)


def _add_up(pieces: Sequence[Piece], sums: Sequence[Tensor], dim: int | None = None) -> None:
    """Add up tensors, one of each piece, in place over the ranks that hold its other parts.

    Args:
        dim: along this dimension of the parameter (from the end); None: any.
    """
    by_ranks: dict[Any, list[Tensor]] = {}
    for piece, each in zip(pieces, sums, strict=True):
        p = piece.parameter
        if is_shared(p) and (split := _split_axes(p, dim)):
            by_ranks.setdefault((p.device_mesh, split), []).append(each)
    for (mesh, split), held in by_ranks.items():
        flat = torch.cat([each.flatten() for each in held])
        for axis in split:
            dist.all_reduce(flat, group=mesh.get_group(axis))
        for each, whole in zip(held, flat.split([each.numel() for each in held]), strict=True):
            each.copy_(whole.view_as(each))


def num_parts(p: Tensor) -> int:
    """Into how many a parameter is cut."""
    return math.prod(map(p.device_mesh.size, _split_axes(p, None))) if is_shared(p) else 1


def _split_axes(p: DTensor, dim: int | None) -> tuple[int, ...]:
    """Axes of its mesh that cut a parameter, along a dimension (from the end) or any."""
    cut: dict[int, Any] = {
        axis: each for axis, each in enumerate(p.placements) if not each.is_replicate()
    }
    return tuple(axis for axis, each in cut.items() if dim is None or each.dim == p.ndim + dim)


RULES: dict[str, Rule] = {
    "sgd": sgd_rule,
    "adamw": adamw_rule,
    "lion": lion_rule,
    "adafactor": adafactor_rule,
    "lars": lars_rule,
    "lamb": lamb_rule,
    "muon": muon_rule,
    "schedulefree": schedulefree_rule,
}
