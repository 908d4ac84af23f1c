"""Ranks: one engine whose network is shared out over processes.

How it works: the first rank has the engine. Before each pass it tells the others through a pipe
what is computed: tokens, positions and blocks, as numbers. Then all compute it with their parts of
the network: heads and columns (tp) as in training (`parallel.tp`), and experts (ep). Only the first
rank gets the logits. What else changes a rank's state, blocks that are cleared and new weights, is
told the same way, so that every rank does the same things in the same order.

All ranks have all tokens, also those of an ep axis: none is sent to an expert. Each rank computes
its own experts, and a sum of what they give goes to all.

Waiting for word takes no core and has no limit: a process that has gone closes its pipe. Who starts
the processes, and says why one has gone, is not here (`serve.ranks`).
"""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from paceline.config.errors import InputError
from paceline.config.feasible import tensor_sizes
from paceline.config.model import Model
from paceline.config.serving import KeyForm, Serving
from paceline.generate.narrow_keys import kept_type
from paceline.generate.paged import KeyShape, Memory, Part
from paceline.generate.runner import Runner
from paceline.models.decoder import Decoder
from paceline.models.shares import assign
from paceline.parallel.ep import expert_layers, expert_parallel
from paceline.parallel.tp import tensor_parallel
from paceline.parallel.vocabulary import on_first_rank

_MEMORY, _CLEAR, _PASS, _WEIGHTS, _CHANGED = range(5)
"""What a rank is told: the first of its numbers."""
_KEY_FORMS: Sequence[KeyForm] = ("as_weights", "int8")


def check_ranks(model: Model, serving: Serving) -> None:
    """Check that a network can be shared out as the settings say.

    Raises:
        InputError: it can't, or a setting needs the whole of it on one rank.
    """
    tp, ep = serving.tp, serving.ep
    for name, value in tensor_sizes(model).items():
        if value % tp and name != "vocab_size":  # its last part may be smaller
            works = ", ".join(str(size) for size in range(1, tp) if value % size == 0)
            raise InputError(
                f"serve.tp = {tp} does not divide {name} = {value} of this network: use a divisor "
                f"({works})."
            )
    if tp > 1 and model.experts is not None and model.experts.bias:
        raise InputError(
            f"serve.tp = {tp} cuts experts by columns, which those with biases can't be: use "
            "serve.ep."
        )
    num_experts = 0 if model.experts is None else model.experts.num_experts
    if ep > 1 and (not num_experts or num_experts % ep):
        has = f"{num_experts} experts, which it does not divide" if num_experts else "no experts"
        raise InputError(f"serve.ep = {ep} shares out experts, and this network has {has}.")
    if serving.num_ranks == 1:
        return
    for_one_rank = {
        "exact": serving.exact,
        "weights": serving.weights not in ("auto", "as_trained"),
        "weights_gb": serving.weights_gb != "auto",
        "host_gb": serving.host_gb not in ("auto", 0),
        "disk_gb": serving.disk_gb,
        "speculate": serving.speculate == "heads",
    }
    for name, is_asked in for_one_rank.items():
        if is_asked:
            raise InputError(
                f"serve.{name} = {getattr(serving, name)} is for one rank, and serve.tp = {tp} and "
                f"serve.ep = {ep} ask for {serving.num_ranks}: leave one of them out."
            )


def part_of(model: Model, dtype: torch.dtype, tp: int, ep: int, device: torch.device) -> Decoder:
    """This rank's part of a network, without values. Every connected rank calls it.

    Args:
        tp, ep: their product is the number of ranks; those of tp are neighbours.
    """
    with torch.device("meta"):
        decoder = Decoder(model)
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(dtype)
    mesh = init_device_mesh(device.type, (ep, tp), mesh_dim_names=("ep", "tp"))
    axes = tuple(axis for axis, size in (("ep", ep), ("tp", tp)) if size > 1)
    if axes and model.experts is not None:
        expert_parallel(decoder, mesh[axes])
    if ep > 1:
        for layer in expert_layers(decoder):
            layer.exchange = _OwnExperts(mesh.get_group("ep"))
    if tp > 1:
        tensor_parallel(decoder, decoder.placements(), mesh["tp"], sequence_parallel=False)
    decoder.to_empty(device=device)
    decoder.reset_buffers()
    return decoder.eval()


@dataclass(frozen=True)
class _OwnExperts:
    """The exchange of ranks that have the same tokens (`models.moe.TokenDispatcher`): each computes
    the rows of its own experts, and all get all results."""

    group: dist.ProcessGroup

    def __call__(
        self, rows: Tensor, counts: Tensor, experts: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        by_rank, own = counts.view(self.group.size(), -1), self.group.rank()
        start, num = torch.stack((by_rank[:own].sum(), by_rank[own].sum())).tolist()
        results = torch.zeros_like(rows)
        results[start : start + num] = experts(rows[start : start + num], by_rank[own])
        dist.all_reduce(results, group=self.group)  # one summand of each isn't zero: it is exact
        return results


@torch.no_grad()
def _share_weight(own: Tensor, whole: Tensor | None) -> None:
    """Fill every rank's share of a weight.

    Args:
        own: this rank's share.
        whole: all of it, on the first rank; None on the others.
    """
    if whole is None:
        full = torch.empty(own.shape, dtype=own.dtype, device=own.device)
    else:
        full = whole.to(own.device, own.dtype).contiguous()
    dist.broadcast(full, src=0)
    assign(own, full)


class Others:
    """The other ranks, as the first one sees them.

    Args:
        ends: of a pipe to each.
        why: says which of them has gone, where one has.
    """

    def __init__(
        self, ends: Sequence[Connection], why: Callable[[], Exception | None] = lambda: None
    ) -> None:
        self._ends, self._why = ends, why

    def begin(
        self, decoder: Decoder, num_blocks: int, block_size: int, keys: KeyForm
    ) -> tuple[Memory, Runner]:
        """The memory and the passes of all ranks, for an engine on the first one.

        Args:
            decoder: the first rank's part of the network.
            keys: how keys and values are stored.
        """
        numbers = num_blocks, block_size, _KEY_FORMS.index(keys)
        self.tell([_MEMORY, *numbers])
        memory = _FirstMemory(self, *_memory_of(decoder, *numbers))
        return memory, _FirstRunner(self, decoder, memory)

    def take_weights(self, decoder: Decoder, parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Give every rank its part of other weights, one at a time.

        Args:
            decoder: the first rank's part of the network.
            parts: some whole weights each, by the network's names.
        """
        own = decoder.state_dict()
        place = {name: number for number, name in enumerate(own)}
        for part in parts:
            with self.together():
                self.tell([_WEIGHTS, *(place[name] for name in part)])
                for name, whole in part.items():
                    _share_weight(own[name], whole)
        self.tell([_CHANGED])

    def tell(self, numbers: Sequence[int]) -> None:
        """Tell all of them what to do."""
        data = np.array(numbers, np.int64).tobytes()
        with self.together():
            for end in self._ends:
                end.send_bytes(data)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do: Ctrl-C waits until they have done it, and where another rank
        has gone, that is the error."""
        try:
            with _interrupts_later():
                yield
        except (RuntimeError, OSError, EOFError) as error:
            if (why := self._why()) is not None:
                raise why from None
            raise error

    def check(self) -> None:
        """Check that all are there; raises why one has gone."""
        if (why := self._why()) is not None:
            raise why

    def watch(self, tell: Callable[[], object]) -> None:
        """Have somebody told when one has gone that nobody has asked to; not told here, where
        nobody knows their processes."""

    def close(self) -> None:
        """They end."""
        for end in self._ends:
            end.close()


class _FirstMemory(Memory):
    """Of the first rank."""

    def __init__(self, others: Others, *args: Any) -> None:
        self._others = others
        super().__init__(*args)

    def clear(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._others.tell([_CLEAR, *blocks])
        super().clear(blocks)


class _RankRunner(Runner):
    """Of a rank that has a part of the network."""

    def whole(self, logits: Tensor) -> Tensor:
        return on_first_rank(logits)


class _FirstRunner(_RankRunner):
    """Of the first rank."""

    def __init__(self, others: Others, decoder: Decoder, memory: Memory) -> None:
        self._others = others
        super().__init__(decoder, memory)

    def compute(self, tokens: list[int], parts: list[Part], wanted: list[int]) -> Tensor:
        with self._others.together():
            self._others.tell([_PASS, *_numbers_of(tokens, parts, wanted)])
            return super().compute(tokens, parts, wanted)


def follow(end: Connection, decoder: Decoder) -> None:
    """Do as the first rank says, until it has gone.

    Args:
        decoder: this rank's part of the network.
    """
    memory: Memory | None = None
    runner: Runner | None = None
    while True:
        try:
            kind, *numbers = np.frombuffer(end.recv_bytes(), np.int64).tolist()
        except (EOFError, OSError):
            return
        if kind == _MEMORY:
            memory = Memory(*_memory_of(decoder, *numbers))
            runner = _RankRunner(decoder, memory)
        elif kind == _WEIGHTS:
            own = [*decoder.state_dict().values()]
            for number in numbers:
                _share_weight(own[number], None)
        elif kind == _CHANGED:
            if runner is not None:
                runner.weights_changed()
        else:
            assert memory is not None
            assert runner is not None
            if kind == _CLEAR:
                memory.clear(numbers)
            else:
                runner.compute(*_pass_of(numbers))


def _memory_of(
    decoder: Decoder, num_blocks: int, block_size: int, keys: int
) -> tuple[KeyShape, int, int, torch.dtype, torch.device]:
    """The arguments of a rank's `Memory`."""
    first = next(decoder.parameters())
    dtype = kept_type(_KEY_FORMS[keys], first.dtype)
    return KeyShape.of(decoder), num_blocks, block_size, dtype, first.device


def _numbers_of(tokens: list[int], parts: list[Part], wanted: list[int]) -> list[int]:
    numbers = [len(tokens), len(wanted), *tokens, *wanted]
    for part in parts:
        numbers += [part.row, part.first, part.num_tokens, len(part.blocks), *part.blocks]
    return numbers


def _pass_of(numbers: list[int]) -> tuple[list[int], list[Part], list[int]]:
    """What `_numbers_of` was given."""
    num_tokens, num_wanted = numbers[:2]
    tokens, wanted = numbers[2 : 2 + num_tokens], numbers[2 + num_tokens :][:num_wanted]
    parts, place = [], 2 + num_tokens + num_wanted
    while place < len(numbers):
        row, first, count, num_blocks = numbers[place : place + 4]
        place += 4 + num_blocks
        parts.append(Part(row, first, count, numbers[place - num_blocks : place]))
    return tokens, parts, wanted


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Within the context Ctrl-C waits: a rank that leaves a pass halfway is lost to the others."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    came: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])
