"""What goes wrong inside a rank: each function makes its own process slower in one way.

They are called in the rank's process before it trains, with the arguments that the fault drew. They
change what a rank does or waits for, never what is recorded of it.
"""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.diagnosis.gate import Gate
from paceline.config.layers import Experts
from paceline.config.layout import Layout
from paceline.models import moe
from paceline.models.decoder import Block
from paceline.observe.metrics import Line, Metrics
from paceline.train import language, passes, session
from paceline.train.checkpoint import checkpointer
from paceline.train.data import MicroBatch
from paceline.train.passes import Passes
from paceline.train.weighted_loss import WeightedLoss

_DIE_WITH_PARENT = "import ctypes; ctypes.CDLL(None).prctl(1, 9)"

Injections = Mapping[str, Mapping[str, Any]]
"""Name of a function below -> its arguments."""


def inject(injections: Injections, rank: int, gate: Gate) -> None:
    """Make this process, which is the rank, as faulty as asked."""
    for name, arguments in injections.items():
        mine = dict(arguments)
        if mine.pop("rank", rank) == rank:
            INJECTIONS[name](gate, **mine)


def slow_blocks(_gate: Gate, times: int) -> None:
    """Compute each layer's forward pass some more times, as a slower processor would need."""
    forward = Block.forward

    def slower(block: Block, *inputs: Any, **told: Any) -> Any:
        with torch.no_grad():
            for _ in range(times):
                forward(block, *inputs, **told)
        return forward(block, *inputs, **told)

    Block.forward = slower


def sleepy_blocks(_gate: Gate, seconds: float) -> None:
    """Stand still for so long in each layer's forward pass, as a processor that throttles."""
    forward = Block.forward

    def later(block: Block, *inputs: Any, **told: Any) -> Any:
        time.sleep(seconds)
        return forward(block, *inputs, **told)

    Block.forward = later


def busy_neighbour(gate: Gate, core: int, num_burners: int) -> None:
    """Stay on one core, and share it with processes that burn it while this run has its turn."""
    os.sched_setaffinity(0, {core})
    for _ in range(num_burners):
        _burn(gate)


def busy_machine(gate: Gate) -> None:
    """As many processes as ranks burn whatever core they get while this run has its turn."""
    _burn(gate)


def detect_anomaly(_gate: Gate) -> None:
    """Let autograd check every gradient, as for finding a NaN."""
    torch.autograd.set_detect_anomaly(True)


def _burn(gate: Gate) -> None:
    # It inherits this process' cores, and dies with it.
    burner = subprocess.Popen([sys.executable, "-c", f"{_DIE_WITH_PARENT}\nwhile True: pass"])
    gate.runs_in_turn(burner.pid)


def slow_loader(_gate: Gate, seconds: float) -> None:
    """Each step's batch is so much later."""
    batches = language.train_batches

    def later(*arguments: Any) -> Iterator[list[MicroBatch]]:
        for batch in batches(*arguments):
            time.sleep(seconds)
            yield batch

    language.train_batches = later


def metrics_of_every_micro_batch(_gate: Gate, num_metrics: int) -> None:
    """After each forward pass, average some numbers over the ranks and read them with .item()."""
    forward = Passes.forward

    def and_read(of: Passes, micro_batch: object) -> WeightedLoss:
        weighed = forward(of, micro_batch)
        for power in range(num_metrics):
            metric = weighed.loss.detach() ** (power + 1)
            dist.all_reduce(metric)
            metric.item()
        return weighed

    Passes.forward = and_read


def reduce_every_micro_batch(_gate: Gate) -> None:
    """As if nobody had heard of no_sync."""
    prepare = passes.prepare_micro_batch

    def as_the_last(
        module: nn.Module, layout: Layout, _number: int, total: int, **how: bool
    ) -> None:
        prepare(module, layout, total - 1, total, **how)

    passes.prepare_micro_batch = as_the_last


def collect_garbage(_gate: Gate, num_objects: int) -> None:
    """Make so many objects in the first pass, keep them, and collect before each one "to save
    memory"."""
    forward = Passes.forward
    kept: list[list[int]] = []

    def after_collecting(of: Passes, micro_batch: object) -> WeightedLoss:
        kept.extend([number] for number in range(num_objects - len(kept)))
        gc.collect()
        return forward(of, micro_batch)

    Passes.forward = after_collecting


def slow_disk(_gate: Gate, bytes_per_s: float) -> None:
    """Checkpoints' shards take so long to write."""
    write = checkpointer.write_shard

    def slowly(path: Any, named_buffers: Any) -> Any:
        entry = write(path, named_buffers)
        time.sleep(entry.size_bytes / bytes_per_s)
        return entry

    checkpointer.write_shard = slowly


def slow_log(_gate: Gate, seconds: float) -> None:
    """Each line takes so long to write."""
    record = Metrics.record

    def slowly(metrics: Metrics, line: Line) -> str | None:
        time.sleep(seconds)
        return record(metrics, line)

    Metrics.record = slowly


def shared_out(_gate: Gate, share: float) -> None:
    """Deal tokens out to experts in turn, so large a share of them to the first half only."""
    stream = torch.Generator().manual_seed(0)

    def choose(scores: Tensor, _bias: Tensor | None, shape: Experts) -> Tensor:
        tokens, num_experts = scores.shape
        is_bound = torch.rand(tokens, 1, generator=stream) < share
        turn = torch.arange(tokens).unsqueeze(1) + torch.arange(shape.experts_per_token)
        return turn % torch.where(is_bound, num_experts // 2, num_experts)

    moe.choose = choose


def more_threads(_gate: Gate, num_threads: int) -> None:
    """Each rank computes with so many threads, whatever else runs on its cores."""
    set_threads = torch.set_num_threads
    session.torch.set_num_threads = lambda _rule: set_threads(num_threads)


def python_work(_gate: Gate, seconds: float) -> None:
    """Python computes something of its own before each forward pass."""
    forward = Passes.forward

    def after_python(of: Passes, micro_batch: object) -> WeightedLoss:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            sum(range(1000))
        return forward(of, micro_batch)

    Passes.forward = after_python


def uneven_lengths(_gate: Gate, shortest: int, longest: int, seed: int) -> None:
    """Each micro-batch is cut to a length of its own, not the same on all ranks."""
    batches, draw = language.train_batches, Random(f"{seed} {os.environ['RANK']}")

    def cut(*arguments: Any) -> Iterator[list[MicroBatch]]:
        for batch in batches(*arguments):
            lengths = [draw.randint(shortest, longest) for _ in batch]
            yield [
                MicroBatch(part.tokens[:, :length], part.targets[:, :length], None)
                for part, length in zip(batch, lengths, strict=True)
            ]

    language.train_batches = cut


INJECTIONS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        slow_blocks, sleepy_blocks, busy_neighbour, busy_machine, detect_anomaly, slow_loader,
        metrics_of_every_micro_batch,
        reduce_every_micro_batch, collect_garbage, slow_disk, slow_log, shared_out, more_threads,
        python_work, uneven_lengths,
    )
}  # fmt: skip
