"""Are the streams in order? Every operator is a kernel on its thread's stream; races are errors.

The happens-before is torch's own (`torch.cuda._sanitizer`), fed with what the stand-in device
logged.
Besides, memory that another stream used must not be given back to its own stream before that use is
over (the caching allocator would hand it out again): the last use is waited for, or
`Tensor.record_stream` is called.

A storage is named by the address of torch's own record of it, which lives as long as it does.
"""

import re
import threading
import traceback
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.cuda._sanitizer import ArgumentHandler, EventHandler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rehearsal.device import Log

_OWN_FRAMES = re.compile(r"paceline/(?!.*tests)")


class RaceError(Exception):
    """Two streams touch the same memory, and nothing orders them."""


class _Arguments(ArgumentHandler):
    """As torch's, for tensors without addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None,
        is_output: bool = False,
    ) -> None:  # fmt: skip
        if not isinstance(value, Tensor) or value.device.type != "cuda":
            return
        storage = value.untyped_storage()
        key = storage._cdata
        self.storages[key] = storage
        if is_write:
            self.dataptrs_written.add(key)
        elif not metadata_only:
            self.dataptrs_read.add(key)
        self.tensor_aliases.setdefault(key, []).append(name or "output")
        if is_output:
            self.outputs.add(key)


class _Life:
    """One storage: which stream it was made on, and who else used it when."""

    def __init__(self, storage: torch.UntypedStorage, home: int) -> None:
        self.reference, self.home = StorageWeakRef(storage), home
        self.others: dict[int, tuple[int, str]] = {}
        """Last use by other streams: number of the kernel, and what it was."""
        self.is_recorded = False


class Watch(TorchDispatchMode):
    """Raises RaceError at the first kernel that races, with both places in the code."""

    def __init__(self, log: Log, answer: float | None = None) -> None:
        """`answer` is every number that the host reads; without it such a read is an error."""
        super().__init__()
        self.answer = answer
        self._log, self._handler, self._lock = log, EventHandler(), threading.RLock()
        self._lives: dict[int, _Life] = {}
        self._given_back: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        """By the stream whose memory it was: (stream, kernel's number, its name) of last uses."""
        self.num_kernels = 0
        self.streams: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_on_device(args, kwargs):
            with unset_fake_temporarily():  # the host's own numbers are real
                return func(*args, **kwargs)
        name = func._schema.name
        if name.startswith("prim::"):  # questions about a tensor, which launch nothing
            return func(*args, **kwargs)
        with self._lock:
            self._take_log()
            self._bury_the_dead()
            if name == "aten::record_stream" and (life := self._life_of(args[0])) is not None:
                life.is_recorded = True
        if name == "aten::record_stream":
            return None
        if name == "aten::_local_scalar_dense":  # the host waits for the device
            return self.answer if self.answer is not None else func(*args, **kwargs)
        is_factory = bool(re.match(r"aten::(new_.*|.*_like)", name))
        given = _Arguments()
        given.parse_inputs(func._schema, args, kwargs, is_factory=is_factory)
        outputs = func(*args, **kwargs)
        given.parse_outputs(func._schema, outputs, is_factory=is_factory)
        if given.storages:
            with self._lock:
                self._launch(func, given)
        return outputs

    def _launch(self, func: Any, given: _Arguments) -> None:
        stream = torch.accelerator.current_stream(0).stream_id
        self._take_log()
        self.streams.add(stream)
        self.num_kernels += 1
        used = given.dataptrs_read | given.dataptrs_written
        for key, storage in given.storages.items():
            life = self._lives.get(key)
            if life is None or life.reference.expired():
                self._handler.tensors_accessed.accesses.pop(key, None)
                life = self._lives[key] = _Life(storage, stream)
                self._take_memory(stream)
            if stream != life.home and key in used:
                life.others[stream] = (self._handler.seq_num + 1, str(func))
        errors = self._handler._handle_kernel_launch(
            stream, given.dataptrs_read - given.dataptrs_written, given.dataptrs_written,
            given.outputs, str(func._schema), given.tensor_aliases,
        )  # fmt: skip
        for error in errors:
            raise RaceError(_told(error))

    def _take_memory(self, stream: int) -> None:
        """A stream gets memory: perhaps some that was given back while others still used it."""
        given_back, self._given_back[stream] = self._given_back[stream], []
        for other, number, operator in given_back:
            if not self._handler.syncs.is_ordered_after(stream, number, other):
                raise RaceError(
                    f"stream {stream} may write to memory that {operator} on stream {other} still "
                    f"uses: it was given back without waiting for that, or record_stream"
                )

    def _take_log(self) -> None:
        handler = self._handler
        for kind, event, stream in self._log.take():
            if kind == 0:
                handler._handle_event_record(event, stream)
            elif kind == 1:
                handler._handle_event_wait(event, stream)
            elif kind == 2:
                handler._handle_event_synchronization(event)
            elif stream < 0:
                handler._handle_device_synchronization()
            else:
                handler._handle_stream_synchronization(stream)

    def _life_of(self, tensor: Tensor) -> _Life | None:
        return self._lives.get(tensor.untyped_storage()._cdata)

    def _bury_the_dead(self) -> None:
        for key in [key for key, life in self._lives.items() if life.reference.expired()]:
            life = self._lives.pop(key)
            self._handler.tensors_accessed.accesses.pop(key, None)
            if not life.is_recorded:
                self._given_back[life.home] += [(of, *last) for of, last in life.others.items()]


def _is_on_device(args: Any, kwargs: Any) -> bool:
    """Whether an operator reads or makes something on the device."""
    given = torch.utils._pytree.tree_leaves((args, kwargs))
    if any(isinstance(each, Tensor) and each.device.type == "cuda" for each in given):
        return True
    if any(isinstance(each, FakeTensor) for each in given):
        return True
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"


def _told(error: Any) -> str:
    """Both accesses, each with the frames of this project."""
    lines = []
    for access in (error.current_access, error.previous_access):
        frames = [frame for frame in access.stack_trace if _OWN_FRAMES.search(frame.filename)]
        where = "".join(traceback.format_list(frames[-6:]))
        lines.append(f"stream {access.stream} {access.type} {access.operator}\n{where}")
    return "\nbefore it, unordered: ".join(lines)
