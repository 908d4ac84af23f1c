# ruff: noqa: E501 (lines as Kineto writes them)
"""A made-up trace of any size, as Kineto writes it: what a long window of a large model looks like.

The mix is that of the real traces of A100s: about four host operators and two calls of the runtime
to a kernel, flow arrows between them, on two host threads and three streams; shapes and the
settings of launches fill most of the bytes, as they do there.
"""

from collections.abc import Iterator
from pathlib import Path

_HEADER = """{
  "schemaVersion": 1,
  "deviceProperties": [
    {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85174583296}
  ],
  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1740461646000000000,
  "traceEvents": [
"""
_FOOTER = """
  {
    "name": "Record Window End", "ph": "i", "s": "g",
    "pid": "", "tid": "", "ts": 0
  }
  ],
  "traceName": "large.json"
}
"""
_OP = """  {
    "ph": "X", "cat": "cpu_op", "name": "%s", "pid": 4037, "tid": %d,
    "ts": %%d.%03d, "dur": %d.250,
    "args": {
      "External id": %%d,"Record function id": 0, "Concrete Inputs": ["", "", "[8, 4096]"], "Input type": ["c10::BFloat16", "c10::BFloat16", "ScalarList"], "Input Strides": [[4096, 1], [1, 4096], []], "Input Dims": [[8192, 4096], [4096, 4096], []]%s, "Ev Idx": %%d
    }
  },
"""
_LAUNCH = """  {
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4037, "tid": %d,
    "ts": %%d.100, "dur": 4.500,
    "args": {
      "External id": %%d, "cbid": 211, "correlation": %%d
    }
  },
  {
    "ph": "s", "id": %%d, "pid": 4037, "tid": %d, "ts": %%d.100,
    "cat": "ac2g", "name": "ac2g"
  },
"""
_KERNEL = """  {
    "ph": "X", "cat": "kernel", "name": "%s", "pid": 0, "tid": %d,
    "ts": %%d.500, "dur": %d.125,
    "args": {
      "External id": %%d, "queued": 0, "device": 0, "context": 1, "stream": %d, "correlation": %%d, "registers per thread": 128, "shared memory": 49152, "blocks per SM": 4.740741, "warps per SM": 37.925926, "grid": [512, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %%%%": 60%s
    }
  },
  {
    "ph": "f", "id": %%d, "pid": 0, "tid": %d, "ts": %%d.500,
    "cat": "ac2g", "name": "ac2g", "bp": "e"
  },
"""
_NCCL = (
    ', "Collective name": "allreduce", "In msg nelems": 6637568, "Out msg nelems": 6637568, '
    '"Group size": 8, "dtype": "Float", "In split size": "[]", "Out split size": "[]", '
    '"Process Group Name": "0", "Process Group Description": "default_pg", '
    '"Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"'
)
_NODE = "autograd::engine::evaluate_function: AddmmBackward0"
_KERNELS = (
    "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x16",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<c10::BFloat16>)",
    "void cutlass::device_kernel<flash::enable_sm80_to_sm89<flash::FlashAttnFwdSm80<...> > >",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
)
_LAYER_US = 400
_LAYERS = 200


def write_large_trace(path: Path, size_bytes: int) -> int:
    """Write a trace of about a size.

    Returns:
        the number of its complete events.
    """
    text, values = _step()
    num_events = 0
    with path.open("w") as file:
        written = file.write(_HEADER)
        step = 0
        while written < size_bytes:
            written += file.write(text % tuple(v + step * by for v, by in values))
            step += 1
            num_events += text.count('"ph": "X"')
        file.write(_FOOTER)
    return num_events


def _step() -> tuple[str, list[tuple[int, int]]]:
    """Return a step with its numbers left open, and those of step 0 with what a step adds."""
    parts: list[str] = []
    values: list[tuple[int, int]] = []
    length = _LAYER_US * _LAYERS * 2
    parts.append(
        '  {\n    "ph": "X", "cat": "user_annotation", "name": "ProfilerStep#%d", "pid": 4037, '
        f'"tid": 4037,\n    "ts": %d.000, "dur": {length - 10}.000,\n    "args": {{\n      '
        '"External id": 1\n    }\n  },\n'
    )
    values += [(0, 1), (0, length)]
    for layer in range(2 * _LAYERS):
        for part, numbers in _layer(layer):
            parts.append(part)
            values += numbers
    return "".join(parts), values


def _layer(layer: int) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield the events of a forward or backward layer: eight kernels, each with its operators."""
    backward = layer >= _LAYERS
    thread = 4111 if backward else 4037
    step_us, ids = _LAYER_US * _LAYERS * 2, 100_000

    def op(name: str, at: int, length: int, extra: str = "") -> tuple[str, list[tuple[int, int]]]:
        number = layer * 100 + at % 100
        text = _OP % (name, thread, at % 1000, length, extra)
        return text, [(at, step_us), (number, ids), (number, ids)]

    for k in range(8):
        at = layer * _LAYER_US + 50 * k
        graph = f', "Sequence number": {1000 + (layer % _LAYERS) * 8 + k}'
        if backward:
            yield op(_NODE, at, 45, graph + ', "Fwd thread id": 1')
        else:
            yield op("aten::linear", at, 45, graph)
        yield op("aten::matmul", at + 1, 40)
        yield op("aten::addmm", at + 2, 35, "" if backward else graph)
        yield op("aten::empty", at + 3, 2)
        correlation = layer * 8 + k
        numbers = [(correlation, ids), (correlation, ids), (correlation, ids)]
        begin = [(at + 8, step_us)]
        yield _LAUNCH % (thread, thread), [*begin, *numbers, *begin]
        kind = 3 if backward and k == 7 else k % 3
        stream = 20 if kind == 3 else 7
        collective = _NCCL if kind == 3 else ""
        length = 300 if kind == 3 else 40
        start = [(at + 20, step_us)]
        text = _KERNEL % (_KERNELS[kind], stream, length, stream, collective, stream)
        yield text, [*start, numbers[0], numbers[0], numbers[0], *start]
