"""Device: how fast this rank's device multiplies, attends, moves bytes and is told what to do.

How it works: curves over grids of sizes, of the operators that a training step runs, with random
data, while all ranks measure the same (`RankTimer`). The operands of a call rotate through more
memory than the innermost caches hold, as the layers of a network do. A product's time is the mean
over the three ways in which a layer multiplies: forward, gradient of the input, gradient of the
weight.

On a CPU the host's own time is part of every call. The planner counts that by the number of calls
(`launch_us` of a Stack), so it is taken off the curves.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.bench.clock import Call, RankTimer
from paceline.bench.convolution import conv_time
from paceline.bench.core_contention import measure_sharing
from paceline.config.curves import AttentionCurve, DeviceCurves, MatmulCurve, MemoryCurve
from paceline.config.hardware import Device, Figure
from paceline.config.layout import Layout
from paceline.config.optim import Optim
from paceline.models.attention import Sdpa
from paceline.train.optimizers import build_optimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Operands of a call rotate through this much: more than a core's own caches, or twice the
# largest L2 of a GPU.
_FOOTPRINT_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
# The host's part, which is taken off, is itself measured: at least this share of a time stays.
_LEAST_SHARE = 0.2
_CHAIN = 200


class SizeGrid(NamedTuple):
    """Sizes that are measured."""

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    seq_len: tuple[int, ...]
    head_dim: tuple[int, ...]
    tokens: int
    """Of one attention call, over all samples and heads."""
    bytes: tuple[int, ...]
    """Read and written by a kernel that only moves data."""
    optimizer_params: int


def _powers(low: int, high: int, base: int = 2) -> tuple[int, ...]:
    return tuple(base**power for power in range(low, high + 1))


_CPU = SizeGrid(
    m=(64, 256, 1024, 4096),
    n=(8, 32, 64, 128, 256, 512, 1024, 4096),
    k=(8, 32, 64, 128, 256, 512, 1024, 4096),
    seq_len=_powers(5, 11),
    head_dim=(16, 32, 64, 128),
    tokens=4096,
    bytes=_powers(6, 13, 4),
    optimizer_params=2 << 20,
)
_CPU_QUICK = _CPU._replace(
    m=(64, 256, 1024),
    n=(8, 32, 64, 128, 256, 1024),
    k=(8, 32, 64, 128, 256, 1024),
    seq_len=(32, 128, 512),
    head_dim=(16, 32, 64),
    tokens=2048,
)
_CUDA = SizeGrid(
    m=_powers(7, 15, 2),
    n=_powers(7, 15, 2),
    k=_powers(7, 15, 2),
    seq_len=_powers(9, 15),
    head_dim=(64, 128),
    tokens=1 << 18,
    bytes=_powers(6, 15, 4),
    optimizer_params=64 << 20,
)
_CUDA_QUICK = _CUDA._replace(
    m=_powers(4, 7, 4), n=_powers(4, 7, 4), k=_powers(4, 7, 4), seq_len=_powers(9, 13, 2)
)
# A product of more than this is left out of a CUDA grid: its curve is flat by then.
_MOST_FLOPS = 4e13


def grid_of(device_type: str, *, quick: bool) -> SizeGrid:
    """The sizes that are worth measuring on a kind of device."""
    if device_type == "cuda":
        return _CUDA_QUICK if quick else _CUDA
    return _CPU_QUICK if quick else _CPU


class Launching(NamedTuple):
    """Host seconds per operator of an eager chain."""

    forward_s: float
    backward_s: float


class DeviceRates(NamedTuple):
    """What was measured of a device."""

    device: Device
    launching: Launching
    optimizer_s_per_param: float
    conv_time: float
    """Convolutions over the products they imply."""


Say = Callable[[str], None]


def num_measurements(grid: SizeGrid, device: Device) -> int:
    """How many times `measure_device` will speak."""
    attentions = len(_attention_precisions(device)) * len(grid.seq_len)
    return 5 + len(_precisions(device)) + attentions


def measure_device(
    clock: RankTimer, device: Device, grid: SizeGrid, source: str, say: Say
) -> DeviceRates:
    """Measure this device; every rank must call it.

    Args:
        clock: measures.
        device: what is known of it already: a peak of the catalogue stays.
        grid: the sizes.
        source: where, when and by which command.
        say: called with what was done.
    """
    bench = DeviceBench(clock, grid, source)
    launching = bench.launching()
    say("launch overhead")
    bench = DeviceBench(clock, grid, source, launching.forward_s if device.kind == "cpu" else 0.0)
    memory = bench.memory()
    say("memory")
    seconds = {}
    for precision in _precisions(device):
        seconds[precision] = bench.products(DTYPES[precision])
        say(f"products in {precision}")
    device = device.replace(peak_flops=_peaks(device, seconds, grid, source))
    attention = {
        key: bench.attention(device, precision, say)
        for key, precision in _attention_precisions(device).items()
    }
    curves = DeviceCurves(
        matmul={name: bench.curve(device, name, each) for name, each in seconds.items()},
        attention=attention,
        memory=memory,
        sharing=measure_sharing(clock, source),
    )
    say("sharing of cores")
    optimizer_s = bench.optimizer()
    say("optimizer")
    # What images are trained in: a CPU convolves no faster in bf16.
    precision = "bf16" if device.kind == "cuda" and "bf16" in device.precisions else "fp32"
    measured = device.replace(curves=curves)
    conv = conv_time(clock, measured, precision, DTYPES[precision])
    say("convolutions")
    bandwidth = Figure(
        value=memory.bytes[-1] / memory.seconds[-1], origin="measured", source=source
    )
    return DeviceRates(
        measured.replace(memory_bytes_per_s=device.memory_bytes_per_s or bandwidth),
        launching,
        optimizer_s / grid.optimizer_params,
        conv,
    )


def _precisions(device: Device) -> list[str]:
    """Arithmetic to measure: what the device trains in; fp64 is for tests."""
    return [name for name in DTYPES if name in device.precisions]


def _attention_precisions(device: Device) -> dict[str, str]:
    """Keys of attention's curves, and in what arithmetic each is measured.

    A CPU trains in either, and its fused attention may be slower in bf16 (seen: 2.4 times).
    """
    has_bf16 = "bf16" in device.precisions
    if device.kind == "cuda":
        return {"flash": "bf16" if has_bf16 else "fp32"}
    return {"flash": "fp32"} | ({"flash.bf16": "bf16"} if has_bf16 else {})


def _peaks(
    device: Device, seconds: dict[str, list[float]], grid: SizeGrid, source: str
) -> dict[str, Figure]:
    """The known peaks, and where there is none the best product."""
    sizes = list(product(grid.m, grid.n, grid.k))
    best = {
        name: Figure(
            value=max(2 * m * n * k / s for (m, n, k), s in zip(sizes, each, strict=True)),
            origin="measured",
            source=f"the fastest product, {source}",
        )
        for name, each in seconds.items()
    }
    return {**best, **device.peak_flops}


class DeviceBench(NamedTuple):
    """What all measurements share."""

    clock: RankTimer
    grid: SizeGrid
    source: str
    host_s: float = 0.0
    """The host's part of a call, taken off."""

    def seconds(self, *calls: Call) -> float:
        """Seconds of a call without the host's part."""
        whole = self.clock.seconds(*calls)
        return max(whole - self.host_s, _LEAST_SHARE * whole)

    def _randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=self.clock.ranks.device)

    def _copies(self, num_bytes: float) -> range:
        """Sets of operands of this size to go through in turn."""
        footprint = _FOOTPRINT_BYTES[self.clock.ranks.device_type]
        return range(max(2, min(16, int(footprint / num_bytes))))

    def launching(self) -> Launching:
        """Host seconds per operator: a chain of operators on hardly any data."""
        x = torch.ones(8, device=self.clock.ranks.device, requires_grad=True)

        def chain() -> Tensor:
            y = x
            for _ in range(_CHAIN):
                y = y * 1.0
            return y

        if not x.is_cuda:  # by blocks: ranks that share cores are in each other's way
            forward_s = self.clock.seconds(chain)
            both_s = self.clock.seconds(lambda: chain().backward(torch.ones_like(x)))
            return Launching(forward_s / _CHAIN, max(both_s - forward_s, forward_s) / _CHAIN)
        forward, backward = [], []
        for _ in range(4 * self.clock.num_blocks):
            began = time.perf_counter()
            y = chain()
            between = time.perf_counter()
            y.backward(torch.ones_like(y))
            ended = time.perf_counter()
            forward.append(between - began)
            backward.append(ended - between)
            torch.cuda.synchronize()
        means = (self.clock.mean(median(each)) / _CHAIN for each in (forward, backward))
        return Launching(*means)

    def memory(self) -> MemoryCurve:
        """Adding two vectors: two thirds of the bytes are read, one third is written."""
        sizes, seconds = [], []
        for wanted in self.grid.bytes:
            length = max(1, wanted // 12)
            calls = [
                _addition(self._randn(length), self._randn(length))
                for _ in self._copies(12 * length)
            ]
            sizes.append(12.0 * length)
            seconds.append(self.seconds(*calls))
        return MemoryCurve(bytes=tuple(sizes), seconds=tuple(seconds), source=self.source)

    def products(self, dtype: torch.dtype) -> list[float]:
        """Seconds of every product of the grid, k running fastest."""
        return [self._product(*sizes, dtype) for sizes in product(*self.grid[:3])]

    def _product(self, m: int, n: int, k: int, dtype: torch.dtype) -> float:
        if 2.0 * m * n * k > _MOST_FLOPS:
            half = max(m, n, k)
            m, n, k = (size // 2 if size == half else size for size in (m, n, k))
            return 2 * self._product(m, n, k, dtype)
        calls: list[Call] = []
        for _ in self._copies(3 * (m * k + k * n) * dtype.itemsize):
            calls += _products(lambda *shape: self._randn(*shape, dtype=dtype), m, n, k)
        return self.seconds(*calls)

    def curve(self, device: Device, precision: str, seconds: Sequence[float]) -> MatmulCurve:
        """The products as shares of the peak."""
        peak = _value(device.peak(precision))
        shares = tuple(
            2 * m * n * k / each / peak
            for (m, n, k), each in zip(product(*self.grid[:3]), seconds, strict=True)
        )
        m, n, k = (tuple(map(float, sizes)) for sizes in self.grid[:3])
        return MatmulCurve(m=m, n=n, k=k, share=shares, source=self.source)

    def attention(self, device: Device, precision: str, say: Say) -> AttentionCurve:
        """Causal attention, forward and backward."""
        peak, dtype = _value(device.peak(precision)), DTYPES[precision]
        forward, backward = [], []
        for seq_len in self.grid.seq_len:
            for head_dim in self.grid.head_dim:
                heads = max(1, self.grid.tokens // seq_len)
                flops = 2.0 * heads * seq_len**2 * head_dim
                forward_s, backward_s = self._attention(heads, seq_len, head_dim, dtype)
                forward.append(flops / forward_s / peak)
                backward.append(2.5 * flops / backward_s / peak)
            say(f"attention to {seq_len} tokens in {precision}")
        return AttentionCurve(
            seq_len=tuple(map(float, self.grid.seq_len)),
            head_dim=tuple(map(float, self.grid.head_dim)),
            forward=tuple(forward),
            backward=tuple(backward),
            source=f"{self.source}, in {precision}",
        )

    def _attention(
        self, heads: int, seq_len: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[float, float]:
        """Seconds forward and backward; the backward pass is what both take more."""
        runs, passes = [], []
        for _ in self._copies(8 * heads * seq_len * head_dim * dtype.itemsize):
            shape = (1, heads, seq_len, head_dim)
            q, k, v = (self._randn(*shape, dtype=dtype).requires_grad_() for _ in range(3))
            runs.append(_attention(q, k, v))
            passes.append(_both(q, k, v, self._randn(*shape, dtype=dtype)))
        forward_s, both_s = self.clock.seconds(*runs), self.clock.seconds(*passes)
        backward_s = max(both_s - forward_s, _LEAST_SHARE * both_s)
        return tuple(  # type: ignore[return-value]
            max(each - self.host_s, _LEAST_SHARE * each) for each in (forward_s, backward_s)
        )

    def optimizer(self) -> float:
        """Seconds of our AdamW's step over the grid's number of parameters."""
        layout = Layout(optimizer_state="full", offload=())
        rows = 16
        shape = (rows, self.grid.optimizer_params // (8 * rows))
        parameters = [torch.nn.Parameter(self._randn(*shape)) for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
        return self.clock.seconds(build_optimizer(named, Optim(), layout).step)


def _value(figure: Figure | None) -> float:
    assert figure is not None, "a measured device has a peak"
    return figure.value


def _addition(x: Tensor, y: Tensor) -> Call:
    return lambda: x + y


def _products(randn: Callable[..., Tensor], m: int, n: int, k: int) -> Iterator[Call]:
    """The product (m, k) x (k, n) with operands stored as in the three passes of a layer."""
    for left, right in (
        (randn(m, k), randn(n, k).T),  # forward: x @ weight.T
        (randn(m, k), randn(k, n)),  # gradient of the input: grad @ weight
        (randn(k, m).T, randn(k, n)),  # gradient of the weight: grad.T @ x
    ):
        yield _product_of(left, right)


def _product_of(left: Tensor, right: Tensor) -> Call:
    return lambda: left @ right


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Call:
    return lambda: Sdpa()(q, k, v, None)


def _both(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Call:
    return lambda: torch.autograd.grad(Sdpa()(q, k, v, None), (q, k, v), grad)
