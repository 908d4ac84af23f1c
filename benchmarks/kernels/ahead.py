"""Compile kernels for GPUs that aren't there, and read what they need of one.

Triton's wheel brings NVIDIA's assembler, which needs no driver: registers, spilled bytes and shared
memory of every launch that ships are known on any Linux machine, before a GPU ever runs it.

Not in the interpreter (TRITON_INTERPRET=1): its functions can't be compiled.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.kernels.launch import Kernel, Launch

OPERATORS = (
    "activations",
    "batch_norm",
    "norm",
    "experts",
    "loss",
    "rope",
    "adamw",
    "quantize",
    "select",
)
"""Packages of `paceline.kernels` that have a `kernel` module with KERNELS."""
CAPABILITIES = (80, 90, 100)
"""A100, H100 and H200, B200."""
MOST_SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one program can have, see CUDA's programming guide."""
_WARP = 32
_PTXAS_FIGURES = re.compile(
    r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
)


class Compilation(NamedTuple):
    """A kernel as one launch of it is compiled."""

    kernel: Kernel
    capability: int
    dtype: str
    size: int
    variant: Mapping[str, Any]
    launch: Launch


class Resources(NamedTuple):
    """What a compiled kernel needs."""

    registers: int
    """Of a thread; 255 at most."""
    spilled_bytes: int
    """Of a thread, kept in local memory for want of registers."""
    shared_bytes: int
    """Of a program."""
    programs_per_processor: int
    """How many fit one streaming multiprocessor, by registers, shared memory and threads."""


def all_kernels() -> list[Kernel]:
    """Every kernel that ships."""
    modules = (import_module(f"paceline.kernels.{name}.kernel") for name in OPERATORS)
    return [kernel for module in modules for kernel in module.KERNELS]


def compilations(kernel: Kernel) -> Iterator[Compilation]:
    """Everything of a kernel that ships: each device, type, variant and distinct launch."""
    for capability in CAPABILITIES:
        if capability < kernel.least_capability:
            continue
        for dtype in kernel.dtypes:
            for variant in kernel.variants:
                seen = set()
                for size in kernel.sizes:
                    launch = kernel.rule(size)
                    if (key := str(launch)) not in seen:
                        seen.add(key)
                        yield Compilation(kernel, capability, dtype, size, variant, launch)


def resources(compilation: Compilation) -> Resources:
    """Compile it, and read what it needs."""
    made, num_warps = compiled(compilation), compilation.launch.num_warps
    registers, stack = _figures(made.asm["cubin"])
    shared = made.metadata.shared
    programs = _programs(registers, shared, num_warps, compilation.capability)
    return Resources(registers, stack, shared, programs)


def compiled(compilation: Compilation) -> Any:
    """Compile it; Triton's own object, with the code of each stage in `asm`."""
    kernel, capability, dtype, _, variant, launch = compilation
    constants = {**variant, **launch.blocks}
    names = kernel.function.arg_names
    signature = dict.fromkeys(names, "constexpr")
    attributes = {}
    for name, word in kernel.argument_types.items():
        signature[name] = word.replace("*T", f"*{dtype}")
        if word[:1] in "*i":
            # As in launches on torch's tensors: pointers and strides of 16 bytes or values.
            attributes[names.index(name),] = [["tt.divisibility", 16]]
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel.function, signature, values, attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, _WARP), options=options)


def _figures(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _PTXAS_FIGURES.search(said)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of registers: {said!r}")
    return int(found[2]), int(found[3]) + int(found[5])


def _programs(registers: int, shared: int, num_warps: int, capability: int) -> int:
    """How many programs fit a processor: 64 Ki registers in units of 256 a warp, 64 warps."""
    per_warp = -(-registers * _WARP // 256) * 256
    limits = [65536 // (per_warp * num_warps), 64 // num_warps, 32]
    if shared:
        limits.append((MOST_SHARED[capability] + 1024) // (shared + 1024))
    return min(limits)
