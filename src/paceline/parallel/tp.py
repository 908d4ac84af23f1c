"""Tensor parallel: the ranks of the tp axis share the heads and columns of every layer.

How it works: each module gets the style its network asks for (`placements()`, plain data). A layer
is entered and left once: on entry the tokens come together (sequence parallel: all-gather), on
exit the ranks' sums are added up (all-reduce; sequence parallel: reduce-scatter over the tokens).
In between each rank computes with plain tensors, its own part of the parameters; that is why a
layer costs one collective at each end and not one per product. Entry and exit are DTensor
redistributions, so that their gradients are torch's, and compiled code can overlap them
(`enable_async`). Parameters are DTensors on the tp mesh, all of them, so that FSDP2, checkpoints
and the optimizer know what they hold.

The gradient of a parameter that every rank holds whole but used on its own tokens or heads (norms
under sequence parallel, norms of heads) is complete only after a sum over the ranks.
`finish_gradients` does it for all of them in one all-reduce a step, however many micro-batches
there are.

It knows no network: not what attention is, nor that there is any.

Papers: https://arxiv.org/abs/1909.08053, sequence parallel https://arxiv.org/abs/2205.05198,
overlap of collectives with products ("async TP")
https://discuss.pytorch.org/t/distributed-w-torchtitan-introducing-async-tensor-parallelism-in-pytorch/209487
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from paceline.comm.collectives import sum_together
from paceline.comm.local_part import local_part
from paceline.comm.rendezvous import collective_timeout
from paceline.parallel.forward import compute_with, replace_forward
from paceline.parallel.vocabulary import look_up

_SUMMED_OVER = "_paceline_gradient_summed_over"


@dataclass(frozen=True)
class _Ranks:
    """The tp ranks and how the residual stream (batch, seq, hidden) lies on them."""

    mesh: DeviceMesh
    stream: Placement

    def whole(self, x: Tensor) -> DTensor:
        """This rank's share of the stream -> all of it."""
        shared = DTensor.from_local(x, self.mesh, [self.stream], run_check=False)
        return shared.redistribute(placements=[Replicate()])

    def add_up(self, x: Tensor) -> Tensor:
        """This rank's summand of the whole -> its share of the sum."""
        summand = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
        return summand.redistribute(placements=[self.stream]).to_local()

    def neighbours(self, number: int) -> DeviceMesh:
        """So many ranks that follow each other, this one among them."""
        ranks = dist.get_process_group_ranks(self.mesh.get_group())
        first = self.mesh.get_local_rank() // number * number
        group = dist.new_group(
            ranks[first : first + number],
            timeout=collective_timeout(),
            use_local_synchronization=True,
            group_desc="mesh_tp",  # as traces name the whole axis
        )
        return DeviceMesh.from_group(group, self.mesh.device_type)

    def place(
        self,
        module: nn.Module,
        placement: Placement,
        others: Mapping[str, Placement] | None = None,
    ) -> None:
        """Make the parameters of a module DTensors; all ranks hold the same values before.

        Args:
            others: the placements of parameters that have another one, by name.
        """
        for name, p in module.named_parameters(recurse=False):
            where = [(others or {}).get(name, placement)]
            spread = distribute_tensor(p, self.mesh, where, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(spread, p.requires_grad))


def tensor_parallel(
    module: nn.Module,
    placements: Mapping[str, str],
    mesh: DeviceMesh,
    sequence_parallel: bool,
) -> None:
    """Spread a module over the tp ranks, in place.

    Args:
        module: on any device, meta too; the same on every rank. It may be a pipeline stage, which
            lacks some of the modules named: without sequence parallel its inputs and outputs are
            (batch, seq, hidden) on every rank, with it (batch, seq / tp, hidden).
        placements: styles of modules, see `style_of`; explained in `paceline.models.placements`.
        mesh: the tp axis.
        sequence_parallel: share out the tokens of the residual stream.

    Raises:
        ValueError: no style is given for a module that has parameters.
    """
    ranks = _Ranks(mesh, Shard(1) if sequence_parallel else Replicate())
    cared: set[nn.Module] = set()
    for name, child in list(module.named_modules()):
        style = style_of(name, placements)
        if style is not None:
            cared.add(child)
            _STYLES[style](child, ranks)
    _check_all_cared_for(module, cared)


def style_of(name: str, placements: Mapping[str, str]) -> str | None:
    """The style of a module: that of its name, else of its name with * for each number."""
    anywhere = ".".join("*" if part.isdigit() else part for part in name.split("."))
    return placements.get(name, placements.get(anywhere))


def finish_gradients(module: nn.Module) -> None:
    """Add up the gradients of which every tp rank has a part: one all-reduce.

    Call it once a step, after the last backward pass and before clipping. FSDP2 may have reduced
    the parts over its own ranks already; the order of the two sums is free.
    """
    parts: dict[DeviceMesh, list[Tensor]] = {}
    for child in module.modules():
        mesh = getattr(child, _SUMMED_OVER, None)
        if mesh is not None:
            grads = [p.grad for p in child.parameters(recurse=False) if p.grad is not None]
            parts.setdefault(mesh, []).extend(local_part(grad) for grad in grads)
    for mesh, grads in parts.items():
        sum_together(grads, mesh.get_group())


def enable_async(mesh: DeviceMesh) -> None:
    """Let torch.compile split products so that they overlap with the collectives they feed.

    Needs CUDA devices that reach each other's memory, compiled blocks and sequence parallel; call
    it before the first forward pass. The setting is torch's, for the whole process.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # torch 2.13 calls this out of date, but its compiler still asks whether it was done.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)


def _embedding(module: nn.Module, ranks: _Ranks) -> None:
    ranks.place(module, Shard(0))
    module.register_forward_hook(lambda _module, _inputs, output: ranks.add_up(output))
    replace_forward(module, partial(look_up, module))


def _norm(module: nn.Module, ranks: _Ranks) -> None:
    _inner(module, ranks)
    if ranks.stream.is_replicate():  # each rank saw all tokens: the gradient is complete
        delattr(module, _SUMMED_OVER)


def _final_norm(module: nn.Module, ranks: _Ranks) -> None:
    _norm(module, ranks)
    module.register_forward_hook(lambda _module, _inputs, output: ranks.whole(output))


def _input(module: nn.Module, ranks: _Ranks) -> None:
    def enter(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # The gradient that comes back is that of this rank's heads and columns only.
        return ranks.whole(inputs[0]).to_local(grad_placements=[Partial()]), *inputs[1:]

    module.register_forward_pre_hook(enter)


def _layer(module: nn.Module, ranks: _Ranks) -> None:
    _input(module, ranks)
    module.register_forward_hook(lambda _module, _inputs, output: ranks.add_up(output))


def _column(module: nn.Module, ranks: _Ranks) -> None:
    ranks.place(module, Shard(0))
    compute_with(module, local_part)


def _key_heads(module: nn.Module, ranks: _Ranks) -> None:
    """Let ranks that have parts of the same heads gather them; the gradients of what each did with
    a head are added up on the way back."""
    num_heads: Any = module.num_heads
    num_sharers = ranks.mesh.size() // num_heads
    if num_sharers <= 1:
        return
    mesh = ranks.neighbours(num_sharers)

    def enter(_module: nn.Module, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        together = DTensor.from_local(torch.stack(parts), mesh, [Shard(-1)], run_check=False)
        whole = together.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()]).unbind()

    module.register_forward_pre_hook(enter)


def _summand(module: nn.Module, ranks: _Ranks) -> None:
    ranks.place(module, Shard(1), {"bias": Replicate()})
    adds_bias = ranks.mesh.get_local_rank() == 0

    def seen_as(parameter: Tensor) -> Tensor:
        local = local_part(parameter)
        if parameter.ndim > 1 or adds_bias:
            return local
        # Zero, with a gradient: what comes back from the sum is whole on every rank.
        return local - local.detach()

    compute_with(module, seen_as)


def _row(module: nn.Module, ranks: _Ranks) -> None:
    _summand(module, ranks)
    module.register_forward_hook(lambda _module, _inputs, output: ranks.add_up(output))


def _inner(module: nn.Module, ranks: _Ranks) -> None:
    ranks.place(module, Replicate())
    compute_with(module, local_part)
    setattr(module, _SUMMED_OVER, ranks.mesh)


def _experts_inner(module: nn.Module, ranks: _Ranks) -> None:
    setattr(module, _SUMMED_OVER, ranks.mesh)


def _head(module: nn.Module, ranks: _Ranks) -> None:
    # Its input is a DTensor (final_norm), and so are its output and those of a tied head, which is
    # no module: DTensor's own rule for a product gives logits that are split over the vocabulary.
    ranks.place(module, Shard(0))


_STYLES: Mapping[str, Callable[[nn.Module, _Ranks], None]] = {
    "embedding": _embedding,
    "norm": _norm,
    "final_norm": _final_norm,
    "input": _input,
    "layer": _layer,
    "column": _column,
    "key_heads": _key_heads,
    "summand": _summand,
    "row": _row,
    "inner": _inner,
    "head": _head,
    "experts": lambda _module, _ranks: None,
    "experts_inner": _experts_inner,
}


def _check_all_cared_for(module: nn.Module, cared: set[nn.Module]) -> None:
    forgotten = [
        name
        for name, child in module.named_modules()
        if child not in cared
        and not all(isinstance(p, DTensor) for p in child.parameters(recurse=False))
    ]
    if forgotten:
        raise ValueError(f"placements say nothing of {', '.join(forgotten)}, which has parameters.")
