"""Activation checkpointing: keep less of the forward pass, compute it again for the backward pass.

How it works: a block that recomputes is wrapped in torch's checkpoint wrapper (the non-reentrant
one, which names, FSDP2 hooks, `torch.autograd.grad` and compiled code get along with).

- "full" keeps a block's inputs only;
- "selective" keeps, of what the block computes, what is slow to compute again: matrix products,
  attention, and sums over ranks. Norms, activations, rotations and gathers are done twice.

Only the first `num_layers` blocks recompute. In a pipeline the first layers of a stage are as good
as any others; without one their activations wait longest for their backward pass.

A pipeline schedule that splits the backward pass in two (zero-bubble) starts autograd twice, and
each time the block is computed again: once for the gradient of its input, once for those of its
weights. torch's own selective contexts allow one backward pass only, so eager code uses those
below; compiled code needs torch's, which tell the compiler's partitioner what to keep.

Buffers that a block changes in its forward pass (running statistics of batch norms, counts of an
expert layer) it changes once: what is computed again works on copies of them.

Papers: https://arxiv.org/abs/1604.06174; selective https://arxiv.org/abs/2205.05198, here by
operator as in torch.utils.checkpoint.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from paceline.config.errors import InputError
from paceline.parallel.blocks import PlacedBlock, blocks_of

_KEPT_OPERATORS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._grouped_mm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        # What tensor and expert parallelism send. A gather isn't kept: it is tp times as large as
        # what it was made from.
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_to_all_single.default,
    }
)


def recompute(
    module: nn.Module,
    kind: Literal["none", "selective", "full"],
    num_layers: Literal["all"] | int = "all",
) -> None:
    """Let the blocks of a module recompute what they don't keep, in place.

    Args:
        module: a network, or one stage of it.
        kind: what a block keeps: all, only what is slow to compute, or only its inputs.
        num_layers: how many blocks recompute, the first ones first.

    Raises:
        InputError: the module has no list of layers.
    """
    if kind == "none":
        return
    for placed in blocks_of(module)[: None if num_layers == "all" else num_layers]:
        options = _options(placed.block, kind == "selective")
        replace_block(placed, checkpoint_wrapper(placed.block, **options), "recompute", module)


def replace_block(placed: PlacedBlock, wrapper: nn.Module, setting: str, module: nn.Module) -> None:
    """Put a wrapper where a block stands.

    Raises:
        InputError: the block is the whole module, so that nothing holds it.
    """
    if placed.parent is None:
        raise InputError(
            f"layout.{setting} has nothing to work on: {type(module).__name__} has no "
            "ModuleList or Sequential of layers; leave it out or put the layers in a list."
        )
    placed.parent.register_module(placed.name, wrapper)


def _options(block: nn.Module, is_selective: bool) -> dict[str, Any]:
    """Of torch's wrapper; contexts only where they have something to do."""
    if not is_selective and next(block.buffers(), None) is None:
        return {}

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For the block's forward pass and for each repetition of it."""
        if torch.compiler.is_compiling():  # compiled code changes buffers once by itself
            if is_selective:
                return create_selective_checkpoint_contexts(_policy)
            return nullcontext(), nullcontext()
        kept: list[Any] = []
        forward, again = (_Keep(kept), _Reuse(kept)) if is_selective else (nullcontext(), None)
        return forward, _Apart(block, again)

    return {"context_fn": contexts}


class _Apart:
    """A block computes again on copies of its buffers, so that it leaves no trace in them."""

    def __init__(self, block: nn.Module, inner: AbstractContextManager[Any] | None) -> None:
        self._block, self._inner = block, inner or nullcontext()
        self._held: list[tuple[nn.Module, str, Tensor]] = []

    def __enter__(self) -> None:
        for module in self._block.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._held.append((module, name, buffer))
                    module._buffers[name] = buffer.clone()
        self._inner.__enter__()

    def __exit__(self, *failure: Any) -> None:
        self._inner.__exit__(*failure)
        while self._held:
            module, name, buffer = self._held.pop()
            module._buffers[name] = buffer


def _policy(_context: Any, operator: Any, *_args: Any, **_kw: Any) -> CheckpointPolicy:
    if operator in _KEPT_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class _Kept:
    """A result that is handed out again instead of being computed again."""

    def __init__(self, result: Tensor) -> None:
        # An alias, without which there would be a cycle through the graph; this key makes it share
        # the count of changes, although we are below autograd.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._alias = result.detach()
        self._version = self._alias._version

    def get(self) -> Tensor:
        """A new alias each time, for autograd to write its own history into."""
        if self._alias._version != self._version:
            raise RuntimeError(
                "a layer changes in place what selective recompute has kept; "
                'set layout.recompute to "full" or "none".'
            )
        return self._alias.detach()


class _Keep(TorchDispatchMode):
    """Runs all operators and keeps the results of some."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator in _KEPT_OPERATORS:
            self._kept.append(tree_map_only(Tensor, _Kept, result))
        return result


class _Reuse(TorchDispatchMode):
    """Takes the results of those operators, in the same order, from what was kept."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept = kept
        self._next: Iterator[Any] = iter(())

    def __enter__(self) -> Self:
        self._next = iter(self._kept)
        return super().__enter__()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operator in _KEPT_OPERATORS:
            return tree_map_only(_Kept, _Kept.get, next(self._next))
        return operator(*args, **(kwargs or {}))
