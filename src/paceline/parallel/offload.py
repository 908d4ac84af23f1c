"""Let what isn't needed yet wait in host memory: activations, or shards of parameters.

Activations: each block runs under a pair of saved-tensor hooks. What autograd keeps for the
backward pass is copied to (pinned) host memory on a stream of its own while the block computes, and
the device copy is given up two blocks later; the backward pass of a block first asks for the
activations of the block before it, so that they travel while it computes. One storage is copied
once, however many operators of however many blocks keep a view of it. Parameters and buffers are
never copied: they stay anyway. The newest two blocks keep their device copies until another runs,
so a backward pass that follows at once finds them there.

The same code runs on a CPU device, where the copies go from host memory to host memory: nothing is
gained there, but a Job can be tried.

With recompute = "full" a block keeps its inputs only, and only they travel. With "selective" the
products are kept in a cache of torch's that no hook sees: that pair has to be refused.

torch's own `save_on_cpu` copies every view by itself, fetches a tensor when the backward pass
already waits for it, and holds the forward pass up when the host is slow to release memory.

Parameters: FSDP2 keeps shards, their gradients and their optimizer state on the host and brings
each block's shard in when it gathers it (`host_shards`).

Papers: https://arxiv.org/abs/2101.06840 (ZeRO-Offload), https://arxiv.org/abs/1602.08124 (vDNN).
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.parallel.blocks import blocks_of
from paceline.parallel.recompute import replace_block

# The latency of a copy is that of moving some 100 KB; far below, nothing is gained by moving it.
MIN_BYTES = 1024


def offload_activations(
    module: nn.Module, device: torch.device, min_bytes: int = MIN_BYTES
) -> "HostTransfers":
    """Let the activations of a module's blocks wait in host memory, in place.

    Call it after `recompute`. `block.compile()` then compiles what is inside: the hooks work on
    what compiled code keeps.

    Args:
        module: a network, or one stage of it.
        device: what it computes on.
        min_bytes: storages smaller than this stay.

    Returns:
        what has been moved, for those who want to know.

    Raises:
        InputError: the module has no list of layers.
    """
    traffic = HostTransfers(device, min_bytes)
    for index, placed in enumerate(blocks_of(module)):
        wrapper = _Offloaded(placed.block, traffic, is_first=index == 0)
        replace_block(placed, wrapper, "offload", module)
    return traffic


def host_shards(device: torch.device) -> CPUOffloadPolicy:
    """What `fully_shard` needs to keep parameters, gradients and optimizer state on the host."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


class _Offloaded(ActivationWrapper):
    """A block whose saved tensors wait on the host."""

    def __init__(self, block: nn.Module, traffic: "HostTransfers", is_first: bool) -> None:
        super().__init__(block)
        self._traffic = traffic
        self._is_first = is_first

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block; its operators save through the hooks."""
        block = self._checkpoint_wrapped_module
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        traffic = self._traffic
        call = traffic.begin(self._is_first)
        own = [*block.parameters(), *block.buffers()]  # FSDP2 has put the gathered ones in place
        stays = {part.untyped_storage()._cdata for tensor in own for part in _parts(tensor)}
        keep = partial(traffic.keep, call=call, stays=stays)
        with saved_tensors_hooks(partial(_packed, keep=keep), _unpacked):
            return block(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the block only: the hooks are not for the compiler."""
        self._checkpoint_wrapped_module.compile(*args, **kwargs)


class _Call:
    """One run of one block, and the run of the block before it in the same forward pass."""

    def __init__(self, before: "_Call | None") -> None:
        self.before = before
        self.kept: WeakSet[_Kept] = WeakSet()
        self.is_awaited = False


class _Kept:
    """A storage that waits for the backward pass, as bytes: on the device, on the host, or both.

    It lives as long as autograd holds a view of it.
    """

    def __init__(self, part: Tensor, call: _Call) -> None:
        storage = part.untyped_storage()
        self.call = call
        self.original: Tensor | None = part.detach()
        """Has the count of changes; None once the device copy was given up."""
        self.version = part._version
        # While this lives, no other storage gets the address by which we know this one.
        self.source = StorageWeakRef(storage)
        self.on_device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=part.device).set_(
            storage
        )
        self.on_host = torch.empty(
            storage.nbytes(), dtype=torch.uint8, pin_memory=part.device.type == "cuda"
        )
        self.moved: torch.cuda.Event | None = None
        """The end of the last copy, out or in."""

    def check_unchanged(self) -> None:
        """Raise, as autograd does, if what was saved has been overwritten since."""
        if self.original is not None and self.original._version != self.version:
            raise RuntimeError(
                "a layer changes in place what its backward pass needs: "
                f"a tensor of shape {tuple(self.original.shape)}."
            )


class HostTransfers:
    """Moves storages between device and host: `num_out` were sent, `num_in` brought back so far."""

    def __init__(self, device: torch.device, min_bytes: int) -> None:
        self.device = device
        self.min_bytes = min_bytes
        self.num_out = self.num_in = 0
        self._out, self._in = _lane(device), _lane(device)
        self._newest: deque[_Call] = deque()
        self._kept: WeakValueDictionary[tuple[int, int], _Kept] = WeakValueDictionary()
        """By address of the storage and version of its content."""

    @property
    def num_kept(self) -> int:
        """Storages that some backward pass still needs."""
        return len(self._kept)

    def begin(self, is_first: bool) -> _Call:
        """A block starts to run; the last but one gives up its device copies."""
        call = _Call(self._newest[-1] if self._newest and not is_first else None)
        self._newest.append(call)
        if len(self._newest) > 2:
            for kept in self._newest.popleft().kept:
                kept.check_unchanged()
                self._wait(kept)  # nothing may overwrite what is still being copied
                kept.on_device = kept.original = None
        return call

    def keep(self, part: Tensor, call: _Call, stays: set[int]) -> "Tensor | _View":
        """Send a storage to the host, unless it stays or has been sent; what autograd holds."""
        storage = part.untyped_storage()
        address = storage._cdata
        is_small = storage.nbytes() < self.min_bytes
        if is_small or address in stays or part.device.type != self.device.type:
            return part
        kept = self._kept.get((address, part._version))
        if kept is None:
            kept = self._kept[address, part._version] = _Kept(part, call)
            call.kept.add(kept)
            assert kept.on_device is not None
            self._move(kept, self._out, kept.on_host, kept.on_device)
            self.num_out += 1
        return _View(self, kept, part.dtype, part.shape, part.stride(), int(part.storage_offset()))

    def fetch(self, kept: _Kept) -> Tensor:
        """A storage's bytes on the device, for the operators that are launched from now on."""
        call = kept.call
        if not call.is_awaited and call.before is not None:
            for earlier in call.before.kept:
                self._bring(earlier)
        call.is_awaited = True
        on_device = self._bring(kept)
        self._wait(kept)
        return on_device

    def _bring(self, kept: _Kept) -> Tensor:
        if kept.on_device is None:
            kept.on_device = torch.empty_like(kept.on_host, device=self.device)
            self._move(kept, self._in, kept.on_device, kept.on_host)
            self.num_in += 1
        kept.check_unchanged()
        return kept.on_device

    def _move(
        self, kept: _Kept, lane: torch.cuda.Stream | None, to: Tensor, source: Tensor
    ) -> None:
        if lane is None:
            to.copy_(source)
            return
        lane.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(lane):
            to.copy_(source, non_blocking=True)
            kept.moved = lane.record_event()
        for tensor in (to, source):
            if tensor.is_cuda:  # should autograd drop it unread
                tensor.record_stream(lane)

    def _wait(self, kept: _Kept) -> None:
        if kept.moved is not None:
            torch.cuda.current_stream(self.device).wait_event(kept.moved)


class _View(NamedTuple):
    """What autograd holds in place of a plain tensor."""

    traffic: HostTransfers
    kept: _Kept
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Wrapped(NamedTuple):
    """What autograd holds in place of a DTensor (or another tensor made of tensors)."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]


@_disable_dynamo  # compiled code calls the hooks too, outside of what is compiled
def _packed(tensor: Any, keep: Callable[[Tensor], Any]) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor  # a DTensor is made of a tensor and, since torch 2.13, its mesh
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        parts = {name: _packed(getattr(tensor, name), keep) for name in names}
        return _Wrapped(type(tensor), parts, context, tensor.shape, tensor.stride())
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
    return keep(tensor) if is_plain else tensor


@_disable_dynamo
def _unpacked(packed: Any) -> Any:
    if isinstance(packed, _View):
        on_device = packed.traffic.fetch(packed.kept)
        empty = torch.empty(0, dtype=packed.dtype, device=on_device.device)
        storage = on_device.untyped_storage()
        return empty.set_(storage, packed.offset, packed.shape, packed.stride)
    if isinstance(packed, _Wrapped):
        parts = {name: _unpacked(part) for name, part in packed.parts.items()}
        return packed.kind.__tensor_unflatten__(parts, packed.context, packed.shape, packed.stride)
    return packed


def _parts(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of."""
    if not isinstance(tensor, Tensor):
        return
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor


def _lane(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for copies in one direction."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
