"""The CUDA C++ example of docs/kernels.md: it compiles for Hopper, uses tensor cores, and is right.

It is compiled by NVRTC, which needs no GPU: torch's CUDA builds bring it, elsewhere
`pip install 'paceline[cuda-example]'` does (NVIDIA's licence).
"""

import ctypes
import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[2] / "docs/kernels/gemm_bias_relu.cu"
ARCHITECTURE = "sm_90"


def _nvidia() -> list[Path]:
    """Folders of NVIDIA's wheels."""
    found = importlib.util.find_spec("nvidia")
    return [Path(each) for each in found.submodule_search_locations or ()] if found else []


def _nvrtc() -> ctypes.CDLL | None:
    libraries = [path for folder in _nvidia() for path in folder.glob("*/lib/libnvrtc.so.*")]
    libraries = [path for path in libraries if "builtins" not in path.name]
    return ctypes.CDLL(str(libraries[0])) if libraries else None


def _headers() -> list[Path]:
    """Where mma.h is, and what it includes."""
    wanted = ("mma.h", "cuda_fp16.h", "crt/mma.h")
    folders = [path for folder in _nvidia() for path in folder.glob("*/include")]
    held = [[folder for folder in folders if (folder / name).exists()] for name in wanted]
    return [each[0] for each in held] if all(held) else []


needs_compiler = pytest.mark.skipif(
    _nvrtc() is None or not _headers(),
    reason="NVRTC or CUDA's headers are missing: pip install 'paceline[cuda-example]'",
)


def _compiled() -> bytes:
    """The cubin."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    assert nvrtc is not None
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), SOURCE.read_bytes(), SOURCE.name.encode(), 0, None, None
    )
    options = [f"--gpu-architecture={ARCHITECTURE}", "-std=c++17"]
    options += [f"-I{folder}" for folder in _headers()]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    log = _said(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    assert not failed, log.decode()
    return _said(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)


def _said(size_of, get, program) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    get(program, text)
    return text.raw


@needs_compiler
def test_it_compiles_for_hopper_without_spilling_and_uses_tensor_cores(tmp_path):
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin = tmp_path / "example.cubin"
    cubin.write_bytes(_compiled())

    def show(what: str) -> str:
        return subprocess.run([tool, what, cubin], capture_output=True, text=True).stdout

    assert "STACK:0 " in show("-res-usage")
    assert "LOCAL:0 " in show("-res-usage")
    # A step of 32 along K: 4 x 2 fragments twice, each two instructions of 16 x 8 x 16.
    assert show("-sass").count("HMMA.16816") == 4 * 2 * 2 * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(128, 128, 32), (1, 8, 8), (200, 136, 72), (300, 512, 1000)])
def test_it_is_right(shape):
    m, n, k = shape
    kernel = torch.cuda._compile_kernel(
        SOURCE.read_text(), "gemm_bias_relu", cuda_include_dirs=[str(each) for each in _headers()]
    )
    generator = torch.Generator("cuda").manual_seed(0)
    a, b, bias = (
        torch.randn(size, generator=generator, device="cuda") for size in ((m, k), (k, n), (n,))
    )
    a, b = a.half(), b.half()
    out = torch.full((m, n), float("nan"), device="cuda")
    kernel(((n + 127) // 128, (m + 127) // 128, 1), (256, 1, 1), (a, b, bias, out, m, n, k))
    right = torch.relu(a.double() @ b.double() + bias.double())
    assert (out - right).norm() <= 1e-3 * right.norm()
