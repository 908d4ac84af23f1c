"""A CUDA device for a build of torch without CUDA: `load`, import, `pretend`.

The C++ half (device.cpp) answers what torch asks below Python; this half answers `torch.cuda`.
Both are for a process of their own: nothing is taken back.
"""

import ctypes
import importlib.util
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
_ENTRIES = 4096


def compiler() -> str | None:
    """The C++ compiler that the device is built with, None where there is none."""
    return shutil.which("g++") or shutil.which("clang++")


def build(folder: Path) -> Path:
    """Compile the C++ half; a few seconds."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    torch_folder = Path(found.origin).parent
    library, libs = folder / "device.so", torch_folder / "lib"
    command = [
        compiler(), "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(SOURCE),
        f"-L{libs}", f"-Wl,-rpath,{libs}", "-lc10", "-ltorch_cpu", "-o", str(library),
    ]  # fmt: skip
    subprocess.run([str(part) for part in command], check=True)
    return library


class Log:
    """What streams and events were asked to do, in order."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._take = library.take_log
        self._take.restype = ctypes.c_int64
        self._room = (ctypes.c_int64 * (3 * _ENTRIES))()

    def take(self) -> Iterator[tuple[int, int, int]]:
        """(kind, event, stream) of everything since the last call; kinds as in device.cpp."""
        while taken := self._take(self._room, ctypes.c_int64(3 * _ENTRIES)):
            numbers = self._room[:taken]
            yield from zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)


def load(library: Path) -> Log:
    """Take the C++ half in: before torch is imported, which looks for its hooks once."""
    return Log(ctypes.CDLL(str(library)))


def pretend(name: str = "NVIDIA H100 80GB HBM3") -> None:
    """Make torch.cuda answer for one device: after all is imported that looks at the build."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Several threads launch kernels; the flag that a fake kernel is running is each thread's own.
    running = threading.local()
    FakeTensorMode.in_kernel_invocation = property(  # type: ignore[assignment]
        lambda _mode: getattr(running, "value", False),
        lambda _mode, value: setattr(running, "value", value),
    )
    # torch.tensor makes its values on the host first, as where torch was built without CUDA.
    FakeTensorMode.avoid_device_init = property(lambda _mode: True)  # type: ignore[assignment]
    properties = SimpleNamespace(
        name=name, major=9, minor=0, total_memory=84_900_000_000, multi_processor_count=132,
        L2_cache_size=50 << 20, warp_size=32, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536, shared_memory_per_block_optin=232_448,
        gcnArchName="", is_integrated=False,
    )  # fmt: skip
    state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = {
        "Stream": _stream_class(torch), "Event": _event_class(torch),
        "current_stream": lambda _device=None: torch.accelerator.current_stream(0),
        "default_stream": lambda _device=None: torch.Stream(0, 0, 1),
        "set_stream": torch.accelerator.set_stream,
        "stream": lambda stream: stream,
        "synchronize": lambda _device=None: torch.accelerator.synchronize(0),
        "_is_compiled": lambda: True, "_lazy_init": lambda: None, "init": lambda: None,
        "is_initialized": lambda: True, "is_available": lambda: True,
        "device_count": lambda: 1, "current_device": lambda: 0,
        "set_device": lambda _device: None, "_exchange_device": lambda _index: 0,
        "_maybe_exchange_device": lambda _index: 0,
        "get_device_properties": lambda _device=None: properties,
        "get_device_capability": lambda _device=None: (9, 0),
        "get_device_name": lambda _device=None: name,
        "get_rng_state": lambda _device="cuda": state.clone(),
        "set_rng_state": lambda _state, _device="cuda": None,
        "is_current_stream_capturing": lambda: False,
        "max_memory_reserved": lambda _device=None: 0,
        "max_memory_allocated": lambda _device=None: 0,
        "memory_allocated": lambda _device=None: 0, "memory_reserved": lambda _device=None: 0,
        "reset_peak_memory_stats": lambda _device=None: None, "empty_cache": lambda: None,
        "is_bf16_supported": lambda including_emulation=True: True,
    }  # fmt: skip
    for key, answer in answers.items():
        setattr(torch.cuda, key, answer)


def _stream_class(torch: Any) -> type:
    class Stream(torch.Stream):
        """torch.cuda.Stream as torch's generic one: (device, priority)."""

        def __new__(cls, device: Any = None, priority: int = 0, **_other: Any) -> Any:
            return super().__new__(cls, device="cuda", priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    return Stream


def _event_class(torch: Any) -> type:
    class Event(torch.Event):
        """torch.cuda.Event as torch's generic one."""

        def __new__(cls, enable_timing: bool = False, **_other: Any) -> Any:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    return Event
