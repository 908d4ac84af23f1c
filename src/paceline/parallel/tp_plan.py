"""Tensor parallelism of a person's own module, by a plan: a style for each module that is cut.

A plan maps names of modules, * standing for anything between two dots, to styles: torch's own
(`torch.distributed.tensor.parallel`), or the words that plans of `transformers` have for these.
torch cuts the modules; what a plan leaves out stays as it is, whole on every rank. Such a parameter
must get the same gradient on each of them. It does not where a module works on a rank's own heads
or columns and no style says so; that is looked at in the first step (`check_whole_gradients`).

Paper: https://arxiv.org/abs/1909.08053; the styles:
https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from paceline.comm.local_part import local_part
from paceline.config.errors import InputError
from paceline.parallel.forward import compute_with

TpPlan = Mapping[str, str | ParallelStyle]
"""Names of modules, with *, and their styles."""

# Of the gradient norm: ranks add up the same numbers, in bf16 and in another order at most.
_SAME = 1e-2


class _SummedGradients(ParallelStyle):
    """Whole on every rank, and works on what each has of its input: the gradient is a sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, p in module.named_parameters(recurse=False):
            whole = distribute_tensor(p, device_mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(whole, p.requires_grad))

        def seen_as(p: Any) -> Tensor:
            # After FSDP2 has gathered it, it is a DTensor of this axis again.
            whole: Tensor = p.to_local(grad_placements=[Partial()])
            return whole

        compute_with(module, seen_as)
        return module


def _rows_of_whole() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


_WORDS: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": _rows_of_whole,
    "embedding_rowwise": _rows_of_whole,
    "replicated_with_grad_allreduce": _SummedGradients,
}


def check_plan(module: nn.Module, plan: Any, tp: int) -> None:
    """Refuse a plan that can't be followed: pure, and before any rank starts.

    Args:
        module: a person's own.
        plan: what was given as a `TpPlan`, or None.
        tp: ranks that share it.

    Raises:
        InputError: one sentence.
    """
    if not isinstance(plan, Mapping) or not plan:
        raise InputError(
            f"layout.tp = {tp} cuts a module of your own by a plan, and there is none: give "
            'tp_plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"}, or set it to 1.'
        )
    modules = dict(module.named_modules())
    for pattern, style in plan.items():
        _check_style(pattern, style)
        if not any(_matches(name, pattern) for name in modules):
            raise InputError(
                f'tp_plan names "{pattern}", and no module of {type(module).__name__} is called '
                f"so: use names of named_modules(), as {_example(modules)}."
            )
    for name, child in modules.items():
        style = _style_of(name, plan)
        if isinstance(style, ColwiseParallel | RowwiseParallel):
            _check_cut(name, child, style, tp)
    for owners in _tied(module).values():
        cuts = {_cut_dim(modules[name], _style_of(name, plan)) for name, _ in owners}
        if len(cuts) > 1:
            names = " and ".join(f"{name}.{own}" for name, own in owners)
            raise InputError(
                f"{names} are one parameter, which tp_plan cuts in different ways: give both "
                'modules styles that cut it alike ("rowwise" for an embedding and "colwise" for '
                "a linear layer), or neither."
            )


def parallelize(module: nn.Module, plan: TpPlan, mesh: DeviceMesh) -> None:
    """Cut a module over the tp ranks, in place.

    Args:
        module: with the same values on every rank.
        plan: checked.
        mesh: the tp axis.
    """
    tied = _tied(module)
    for name, child in list(module.named_modules()):
        style = _style_of(name, plan)
        if style is not None:
            parallelize_module(child, mesh, style, src_data_rank=None)
    for owners in tied.values():
        first, own = owners[0]
        shared = module.get_submodule(first)._parameters[own]
        for name, other in owners[1:]:
            module.get_submodule(name).register_parameter(other, shared)


@torch.no_grad()
def finish_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add up the gradients that torch's styles left as summands of the tp ranks.

    Call it once a step, after the last backward pass; FSDP2 has done it where it holds parameters.
    """
    for p in parameters:
        grad = p.grad
        if isinstance(p, DTensor) and isinstance(grad, DTensor) and grad.placements != p.placements:
            p.grad = grad.redistribute(placements=p.placements)


@torch.no_grad()
def check_whole_gradients(
    named: Sequence[tuple[str, nn.Parameter]], group: dist.ProcessGroup
) -> None:
    """Refuse a plan under which a parameter that all tp ranks hold whole got different gradients.

    Args:
        named: the trained parameters, their gradients complete; all ranks have the same.
        group: the tp ranks.

    Raises:
        InputError: naming the parameter.
    """
    whole = [(name, p.grad) for name, p in named if p.grad is not None and not _is_cut(p)]
    if not whole:
        return
    norms = torch.stack([local_part(grad).double().norm() for _, grad in whole])
    ends = torch.stack([norms, -norms])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    most, least = ends[0], -ends[1]
    differ = (most - least > _SAME * most).tolist()
    if any(differ):
        name = next(name for (name, _), is_other in zip(whole, differ, strict=True) if is_other)
        raise InputError(
            f"{name} is whole on every rank of layout.tp and got another gradient on each, so it "
            "works on a part of something: give its module the style "
            '"replicated_with_grad_allreduce" in tp_plan, or gather what it works on.'
        )


def _is_cut(p: Tensor) -> bool:
    """Whether tp ranks hold different pieces of it."""
    if not isinstance(p, DTensor):
        return False
    axes = zip(p.device_mesh.mesh_dim_names or (), p.placements, strict=True)
    return any(axis == "tp" and not placement.is_replicate() for axis, placement in axes)


def _style_of(name: str, plan: TpPlan) -> ParallelStyle | None:
    """Of a module: that of its name, else of the first pattern that it matches."""
    found = plan.get(name) or next((plan[each] for each in plan if _matches(name, each)), None)
    return _WORDS[found]() if isinstance(found, str) else found


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _check_style(pattern: object, style: object) -> None:
    if not isinstance(pattern, str) or not isinstance(style, str | ParallelStyle):
        raise InputError(
            f"tp_plan maps {pattern!r} to {style!r}: map names of modules to a "
            "ParallelStyle of torch.distributed.tensor.parallel, or to its word."
        )
    if isinstance(style, str) and style not in _WORDS:
        raise InputError(
            f'tp_plan gives "{pattern}" the style "{style}", which is not known: use one of '
            f"{', '.join(_WORDS)}, or a ParallelStyle of torch.distributed.tensor.parallel."
        )


def _check_cut(name: str, child: nn.Module, style: ParallelStyle, tp: int) -> None:
    dim = _cut_dim(child, style)
    if dim is None:
        raise InputError(
            f"tp_plan cuts {name} by {type(style).__name__}, which is of Linear and Embedding, "
            f"and it is a {type(child).__name__}: name the layers in it."
        )
    weight: Any = child.weight
    if weight.shape[dim] % tp:
        raise InputError(
            f"layout.tp = {tp} does not divide the {weight.shape[dim]} that dimension {dim} of "
            f"{name}.weight has, along which tp_plan cuts it: use a divisor, or leave it out of "
            "the plan."
        )


def _cut_dim(child: nn.Module, style: ParallelStyle | None) -> int | None:
    """The dimension of a module's weight that is cut; None: none, or nobody knows."""
    if not isinstance(child, nn.Linear | nn.Embedding):
        return None
    if isinstance(style, ColwiseParallel):
        return 0 if isinstance(child, nn.Linear) else 1
    if isinstance(style, RowwiseParallel):
        return 1 if isinstance(child, nn.Linear) else 0
    return None


def _tied(module: nn.Module) -> dict[nn.Parameter, list[tuple[str, str]]]:
    """Parameters that several modules have, each with (module, its name there)."""
    owners: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for name, child in module.named_modules():
        for own, p in child.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(p, []).append((name, own))
    return {p: found for p, found in owners.items() if len(found) > 1}


def _example(modules: Mapping[str, nn.Module]) -> str:
    linear = (name for name, each in modules.items() if name and isinstance(each, nn.Linear))
    return f'"{next(linear, next(iter(list(modules)[1:]), ""))}"'
