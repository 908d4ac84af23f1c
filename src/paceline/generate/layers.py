"""Layers: a network of which not all layers are in the device's memory at a time.

How it works: as many layers stay as a budget holds, beside embedding, head and norms. The weights
of the others lie in mapped files, with a CUDA device in pinned host memory, and go through two
buffers: while a layer computes, a thread copies the next one. Layers that stay are spread among the
others, so that a copy has their time, too. Nothing is computed differently.

Between passes the network has all of its weights: they may be read and changed. A network that is
opened this way (`decoder_in_layers`) is read into these places, and never in memory as a whole.
"""

import mmap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config.errors import InputError
from paceline.config.model import Model
from paceline.config.serving import Serving
from paceline.generate.paged import blocks_of
from paceline.generate.tier_folder import OwnFolder
from paceline.models.decoder import Block, Decoder
from paceline.models.weights import decoder_room

_ALIGNED = 64
"""Bytes: products may round differently where a matrix begins elsewhere."""


class StreamedLayers:
    """Of one network, whose layers' weights it moves.

    Args:
        budget_bytes: for what stays; two layers more are in the buffers.
        folder: for the files; None: host memory.
        device: that computes. Layers on the meta device get places, which are to be filled.

    Raises:
        InputError: the budget doesn't hold what has to stay.
    """

    def __init__(
        self, decoder: Decoder, budget_bytes: int, folder: OwnFolder | None, device: torch.device
    ) -> None:
        layers, self._folder, self._device = blocks_of(decoder), folder, device
        sizes = [_num_bytes(layer) for layer in layers]
        self.resident_bytes = sum(p.nbytes for p in decoder.parameters()) - sum(
            sum(p.nbytes for p in layer.parameters()) for layer in layers
        )
        if self.resident_bytes > budget_bytes:
            raise InputError(
                f"serve.weights_gb = {budget_bytes / 1e9:g} doesn't hold embedding, head and "
                f"norms, which take {self.resident_bytes / 1e9:.3g} GB: raise it."
            )
        num_kept = min(len(layers), int((budget_bytes - self.resident_bytes) // max(sizes)))
        num_moved, total = len(layers) - num_kept, len(layers)
        # Every so many layers one that moves, the first of them as late as possible.
        moved = [n for n in range(total) if (n + 1) * num_moved // total > n * num_moved // total]
        self.resident_bytes += sum(sizes[n] for n in range(total) if n not in moved)
        self._buffers = [self._empty(max(sizes)) for _ in moved[:2]]
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._layers = [
            _Moved(layers[n], self._home(sizes[n]), self._buffers[place % 2])
            for place, n in enumerate(moved)
        ]
        self._thread = ThreadPoolExecutor(1, "layers")
        self._coming: Future[None] | None = None

    @property
    def num_moved(self) -> int:
        """Layers that don't stay."""
        return len(self._layers)

    def leave_files(self) -> None:
        """What was read or written of files needs no memory of this process any more."""
        for moved in self._layers:
            moved.leave_file()

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Within the context the network computes a pass, each layer once and in order."""
        self._begin(0)
        for place, moved in enumerate(self._layers):
            moved.layer.__dict__["forward"] = partial(self._forward, place)
        try:
            yield
        finally:
            for moved in self._layers:
                del moved.layer.__dict__["forward"]
            if self._coming is not None:
                self._coming.result()

    def _forward(self, place: int, *args: Any) -> Tensor:
        moved, coming = self._layers[place], self._coming
        assert coming is not None
        coming.result()
        self._begin(place + 1)
        with moved.in_buffer():
            return Block.forward(moved.layer, *args)

    def _begin(self, place: int) -> None:
        """Copy a layer; the one before the last is computed, and its buffer free."""
        if place == len(self._layers):
            self._coming = None
            return
        is_free = None
        if self._stream is not None:
            is_free = torch.cuda.Event()
            is_free.record()
        self._coming = self._thread.submit(self._copy, self._layers[place], is_free)

    def _copy(self, moved: "_Moved", is_free: torch.cuda.Event | None) -> None:
        if self._stream is None or is_free is None:
            moved.copy()
            return
        with torch.cuda.stream(self._stream):
            is_free.wait(self._stream)
            moved.copy()
        self._stream.synchronize()

    def _empty(self, num_bytes: int) -> Tensor:
        """A buffer."""
        room = torch.empty(num_bytes + _ALIGNED, dtype=torch.uint8, device=self._device)
        start = -room.data_ptr() % _ALIGNED
        return room[start : start + num_bytes]

    def _home(self, num_bytes: int) -> "_Home":
        if self._folder is not None:
            mapped = self._folder.mapped(num_bytes)
            return _Home(torch.frombuffer(mapped, dtype=torch.uint8), mapped)
        return _Home(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True), None)


@dataclass(frozen=True)
class _Home:
    """Where a layer's weights are between passes."""

    data: Tensor
    mapped: mmap.mmap | None


class _Moved:
    """A layer whose weights are moved."""

    def __init__(self, layer: Block, home: _Home, buffer: Tensor) -> None:
        self.layer, self._home, self._buffer = layer, home, buffer[: home.data.numel()]
        self._parameters = list(layer.parameters())
        self._at_home = self._parts(home.data)
        self._in_buffer = self._parts(self._buffer)
        for (name, parameter), data in zip(layer.named_parameters(), self._at_home, strict=True):
            if parameter.is_meta:
                path, _, key = name.rpartition(".")
                setattr(layer.get_submodule(path), key, nn.Parameter(data, requires_grad=False))
            else:
                data.copy_(parameter.data)
                parameter.data = data
        self._parameters = list(layer.parameters())
        self.leave_file()

    def copy(self) -> None:
        """To the buffer."""
        self._buffer.copy_(self._home.data, non_blocking=True)
        self.leave_file()

    @contextmanager
    def in_buffer(self) -> Iterator[None]:
        """Within the context the layer computes with the buffer."""
        for parameter, data in zip(self._parameters, self._in_buffer, strict=True):
            parameter.data = data
        try:
            yield
        finally:
            for parameter, data in zip(self._parameters, self._at_home, strict=True):
                parameter.data = data

    def leave_file(self) -> None:
        """Its pages are the system's to keep or to drop."""
        if self._home.mapped is not None:
            self._home.mapped.madvise(mmap.MADV_DONTNEED)

    def _parts(self, data: Tensor) -> list[Tensor]:
        parts, start = [], 0
        for parameter in self._parameters:
            part = data[start : start + parameter.nbytes].view(parameter.dtype)
            parts.append(part.view(parameter.shape))
            start += _aligned(parameter.nbytes)
        return parts


def _num_bytes(layer: nn.Module) -> int:
    return sum(_aligned(parameter.nbytes) for parameter in layer.parameters())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def decoder_in_layers(
    model: Model, dtype: torch.dtype, device: torch.device, serving: Serving
) -> tuple[Decoder, StreamedLayers | None]:
    """A network without values, each of whose weights has its place.

    Raises:
        InputError: as `layers_of`.
    """
    if serving.weights_gb == "auto" or serving.num_ranks > 1:  # of which several refuse it
        return decoder_room(model, dtype, device), None
    decoder = decoder_room(model, dtype, "meta")
    layers = layers_of(decoder, serving, device)
    decoder._apply(lambda each: torch.empty_like(each, device=device) if each.is_meta else each)
    return decoder, layers


def layers_of(
    decoder: Decoder, serving: Serving, device: torch.device | None = None
) -> StreamedLayers | None:
    """What the settings ask for; None: all weights stay where they are.

    Args:
        device: that computes; None: where the decoder is.

    Raises:
        InputError: the budget is too small, or nothing says where layers are to lie.
    """
    if serving.weights_gb == "auto":
        return None
    device = device or next(decoder.parameters()).device
    folder = OwnFolder(Path(serving.disk_folder)) if serving.disk_folder else None
    if folder is None and device.type == "cpu":
        raise InputError(
            f"serve.weights_gb = {serving.weights_gb} on a CPU needs a place for the other layers: "
            "give serve.disk_folder."
        )
    try:
        return StreamedLayers(decoder, int(serving.weights_gb * 1e9), folder, device)
    finally:
        if folder is not None:
            folder.remove()
