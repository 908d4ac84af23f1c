"""Gradients of replicas in compressed form: DDP's buckets, through the queue of collectives.

DDP decides when a bucket's gradients are there; its communication hook hands them over, and the
backward pass goes on while the queue's thread codes, sends and decodes them. The futures DDP gets
are those of the whole series: the last bucket's is ready when all buckets are, the others' at once.
What a bucket holds afterwards is the mean over the replicas, with the same bits on each of them.

Parameters with few values are summed up exactly, all together after the last bucket. So are, in the
first steps where the Job says so, all of them. Without compression there is no hook: DDP's own
all-reduce is the fastest exact sum there is here.

DDP and its hooks: https://arxiv.org/abs/2006.15704. What is sent: `comm.compress`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.collectives import Collectives
from paceline.comm.compress.compressors import compressor_of
from paceline.comm.compress.feedback import BufferPart, ErrorFeedback
from paceline.comm.compress.means import (
    CompressedMean,
    Compressor,
    UncompressedRest,
    buffer_part,
    exact_bytes,
    exact_mean,
    mean_of_parts,
)
from paceline.comm.queue import CollectiveQueue, Job
from paceline.config.comm import Comm, codec
from paceline.parallel.replicas import (
    COMM_SECTION,
    Replicas,
    State,
    correct_errors,
    errors_to_load,
    tensors_to_load,
)

# What sums of many ranks are added up in.
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class _Bucket:
    """A bucket of DDP's, and what is kept for it from step to step."""

    parts: tuple[BufferPart, ...]
    mean: CompressedMean | None
    """None where nothing in it is compressed."""
    wide: Tensor | None
    """Room for its values in fp32; None where the bucket itself has that or more."""

    def widened(self, values: Tensor) -> Tensor:
        """The values, at least in fp32: where they are, or copied."""
        return values if self.wide is None else self.wide.copy_(values)

    def exact(self, values: Tensor) -> list[Tensor]:
        """Views of the parameters in it that are not compressed."""
        views = values.split([part.num_values for part in self.parts])
        pairs = zip(self.parts, views, strict=True)
        return [view for part, view in pairs if not part.is_compressed]


class CompressedAllReduce(Replicas):
    """The mean of the replicas' gradients in compressed form, as DDP's communication hook.

    Args:
        module: whose gradients DDP reduces; the hook is registered here.
        compressor: of the larger ones; None: of none.
        collectives: that sum up exactly.
    """

    section = COMM_SECTION
    ordered_from = 2  # what is compressed together depends on the buckets as well

    def __init__(
        self,
        module: DistributedDataParallel,
        names: Mapping[nn.Parameter, str],
        compressor: Compressor | None,
        collectives: Collectives,
        comm: Comm,
    ) -> None:
        self._names, self._comm, self._compressor = names, comm, compressor
        self._group = module.process_group
        self._device = next(module.parameters()).device
        self._queue = CollectiveQueue(self._device, comm.priority)
        self._collectives = collectives
        self._rest = UncompressedRest(collectives)
        self._buckets: dict[tuple[BufferPart, ...], _Bucket] = {}
        self._to_narrow: list[tuple[Tensor, Tensor]] = []
        self._is_exact = True
        self.feedback = ErrorFeedback(self._group.rank(), self._group.size())
        self.sent_bytes = 0
        """What this rank sent since `begin`."""
        module.register_comm_hook(self, CompressedAllReduce._hook)

    def describe(self) -> str:
        """Which tensors are compressed, and until when none is."""
        if self._compressor is None:
            return f"Gradients are summed up exactly, by the algorithm {self._comm.dp.algorithm}."
        parts = [self._part(parameter) for parameter in self._names if parameter.requires_grad]
        total = sum(part.num_values for part in parts)
        rest = [part for part in parts if not part.is_compressed]
        num_rest = sum(part.num_values for part in rest)
        exact = [f"{len(rest)} of {len(parts)} tensors ({num_rest} of {total} values)"] * bool(rest)
        if self._comm.warmup_steps:
            exact.append(f"all in the first {self._comm.warmup_steps} steps")
        sentence = f"Gradients travel as {self._comm.dp.compress}, with error feedback"
        return f"{sentence}; exactly: {', '.join(exact)}." if exact else f"{sentence}."

    def begin(self, step: int | None) -> None:
        """In the first steps everything is exact, where the Job says so."""
        self._is_exact = self._compressor is None or step is None or step < self._comm.warmup_steps
        self.sent_bytes = 0

    def finish(self) -> None:
        """The queue's thread has to be done."""
        self._queue.wait()

    def _hook(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Hand a bucket over; called in the backward pass, in the same order on all ranks."""
        values = bucket.buffer()
        job = self._exact(values) if self._is_exact else self._coded(values, self._known(bucket))
        self._queue.submit(job)
        on: list[int | str | torch.device] = [self._device] if self._device.type == "cuda" else []
        arrived: torch.futures.Future[Tensor] = torch.futures.Future(devices=on)
        if bucket.is_last():
            self._queue.submit(self._rest.average())
            self._queue.flush()
            self._queue.submit(self._conclude())
            self._queue.flush(lambda: arrived.set_result(values))
        else:
            arrived.set_result(values)
        return arrived

    def _exact(self, values: Tensor) -> Job:
        yield from exact_mean(values, self._collectives)
        self.sent_bytes += exact_bytes(values.nbytes, self._group.size())

    def _coded(self, values: Tensor, known: _Bucket) -> Job:
        wide = known.widened(values)
        self._rest.take(known.exact(wide))
        if wide is not values:
            self._to_narrow.append((values, wide))
        if known.mean is not None:
            yield from known.mean.average(wide, self.feedback.span(known.parts, wide))
            self.sent_bytes += known.mean.sent_bytes

    def _conclude(self) -> Job:
        """What is left to do when all sums are there; waits for nothing."""
        yield from ()
        self.sent_bytes += exact_bytes(self._rest.put_back(), self._group.size())
        for values, wide in self._to_narrow:
            values.copy_(wide)
        self._to_narrow.clear()

    def _known(self, bucket: GradBucket) -> _Bucket:
        """What is kept for a bucket of these parameters, made when it is first seen."""
        parameters = cast(list[nn.Parameter], bucket.parameters())
        parts = tuple(map(self._part, parameters))
        if parts not in self._buckets:
            # DDP has rebuilt its buckets: those that held these parameters are no more.
            stale = [key for key in self._buckets if not set(key).isdisjoint(parts)]
            for key in stale:
                del self._buckets[key]
            self._buckets[parts] = self._bucket(parts, bucket.buffer())
        return self._buckets[parts]

    def _bucket(self, parts: tuple[BufferPart, ...], values: Tensor) -> _Bucket:
        wide = None if values.dtype in _WIDE else torch.empty_like(values, dtype=torch.float32)
        mean = mean_of_parts(self._compressor, parts, values if wide is None else wide)
        return _Bucket(parts, mean, wide)

    def _part(self, parameter: nn.Parameter) -> BufferPart:
        name, least = self._names[parameter], self._comm.compress_from
        return buffer_part(name, parameter, parameter.shape, self._compressor, least)

    def sent(self) -> dict[str, float]:
        """Since `begin`, by axis."""
        return {"dp.bytes": self.sent_bytes}

    def squared_error(self) -> Tensor:
        """Of all parameters together."""
        return self.feedback.squared_norm()

    def correct(self, is_bad: Tensor, scale: Tensor | None) -> None:
        """What is owed stays finite, and is of the new scale."""
        kept = [] if self._compressor is None else list(self._compressor.state().values())
        correct_errors(self.feedback.held, is_bad, scale, kept)

    def state(self) -> State:
        """What a checkpoint keeps: {"error": {rank: {name: (n,)}}, "factor": {name: ...}}."""
        kept = {} if self._compressor is None else self._compressor.state()
        return {"error": self.feedback.state(), "factor": kept}

    def targets(self, saved: Iterable[str], room: Callable[[str], Tensor]) -> State:
        """As in `Replicas`; paths are of the form "error.0.layer.weight"."""
        paths = list(saved)
        errors = errors_to_load("error", paths, self.feedback.takes_over, room)
        return {"error": errors, "factor": tensors_to_load("factor", paths, room)}

    def load(self, state: State) -> None:
        """Buckets begin anew."""
        self.finish()
        self._buckets.clear()
        self.feedback.load(state["error"])
        if self._compressor is not None:
            self._compressor.load(state["factor"])


def compressed_all_reduce_of(
    module: nn.Module, names: Mapping[nn.Parameter, str], comm: Comm, ranks_per_node: int
) -> CompressedAllReduce | None:
    """Give DDP's buckets the exchange that a Job asks for; None: DDP's own, or no DDP.

    Args:
        ranks_per_node: neighbours that share a host.
    """
    chosen, algorithm = codec(comm.dp.compress), comm.dp.algorithm
    by_backend = algorithm in ("auto", "backend")
    if not isinstance(module, DistributedDataParallel) or (chosen.kind == "none" and by_backend):
        return None
    group = module.process_group
    compressor = compressor_of(chosen, group)
    collectives = Collectives(group, "backend" if by_backend else algorithm, ranks_per_node)
    return CompressedAllReduce(module, names, compressor, collectives, comm)
