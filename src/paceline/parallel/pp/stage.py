"""A stage of a pipeline as torch's runtime calls it: one method for each kind of action.

It does without what torch's own `PipelineStage` costs. Nothing runs twice to learn shapes: a stage
announces the form of its output to the next one when it first sends it. A receive buffer lives from
its RECV to its use, instead of one per micro-batch all the time, and what is sent is let go of.

A backward pass is split in two (I and W) by torch's walk over the autograd graph. Where it can't
be, I does all of it and W nothing: where the stage's input needs no gradient (token ids), and where
the backward pass of a block is one piece (compiled), or can be done only once (recomputed), or
where the weights that W would read again are freed behind I (ZeRO-3).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.stage import _PipelineStageBase

from paceline.comm import records
from paceline.comm.compress.messages import CodedMessages
from paceline.config.schedule import Schedule
from paceline.parallel.fsdp import free_gathered, prepare_micro_batch
from paceline.parallel.pp.program import index_of

Criterion = Callable[[Tensor, int], Tensor]
"""Loss of a micro-batch, from the last stage's output and the number of the micro-batch."""
AfterBackward = Callable[[int, nn.Module], None]
"""Told a micro-batch and the part that has its gradients."""
Form = tuple[torch.Size, torch.dtype]


@dataclass
class PendingTensor:
    """A tensor on its way here."""

    tensor: Tensor
    """Before it is waited for, the memory for what comes."""
    work: dist.Work | None = None
    read: Callable[[Tensor], Tensor] = lambda came: came
    """Makes the tensor of what came."""

    def wait(self) -> Tensor:
        """The tensor, once it is there."""
        if self.work is not None:
            self.work.wait()
            self.tensor, self.work = self.read(self.tensor), None
        return self.tensor


@dataclass
class StageLinks:
    """Sends to and receives from the other ranks of a pipeline."""

    group: dist.ProcessGroup
    device: torch.device
    max_sends: int
    """How many may be under way: each keeps its tensor in memory."""
    messages: CodedMessages | None = None
    """The form of activations and gradients on their way; None: as they are."""
    sends: deque[dist.Work] = field(default_factory=deque)
    forms: dict[Hashable, Form] = field(default_factory=dict)

    def send(self, tensor: Tensor, peer: int) -> None:
        """Start a send."""
        sent = tensor.contiguous() if self.messages is None else self.messages.coded(tensor)
        work = dist.isend(sent, group=self.group, group_dst=peer)
        assert work is not None  # None is for ranks outside of the group
        self.sends.append(work)
        while len(self.sends) > self.max_sends:
            self.sends.popleft().wait()

    def receive(self, form: Form, peer: int) -> PendingTensor:
        """Start a receive."""
        size, dtype = form
        if self.messages is None:
            buffer = torch.empty(size, dtype=dtype, device=self.device)
            return PendingTensor(buffer, dist.irecv(buffer, group=self.group, group_src=peer))
        num_bytes = self.messages.num_bytes(size.numel(), dtype)
        payload = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        read = partial(self.messages.decoded, size=size, dtype=dtype)
        return PendingTensor(payload, dist.irecv(payload, group=self.group, group_src=peer), read)

    def announce(self, key: Hashable, tensor: Tensor, peer: int) -> None:
        """Tell the receiver a tensor's form, the first time that one of this key is sent."""
        form = (tensor.shape, tensor.dtype)
        if key not in self.forms:
            self.forms[key] = form
            dtype = str(tensor.dtype).removeprefix("torch.")
            records.send([list(tensor.shape), dtype], peer, self.group)
        if self.forms[key] != form:
            raise RuntimeError(f"a stage gave {form}, but {self.forms[key]} for inputs of one form")

    def learn(self, key: Hashable, peer: int) -> Form:
        """The counterpart of `announce`."""
        if key not in self.forms:
            size, dtype = records.receive(peer, self.group)
            self.forms[key] = torch.Size(size), getattr(torch, dtype)
        return self.forms[key]

    def finish(self) -> None:
        """Wait for all sends."""
        while self.sends:
            self.sends.popleft().wait()


@dataclass
class PipelineContext:
    """What all stages of a rank share during one run of a program."""

    criterion: Criterion
    scale: Callable[[Tensor], Tensor]
    """Applied to a loss before its backward pass."""
    after_backward: AfterBackward
    form: Hashable
    """What the forms of all tensors between stages follow from."""
    wires: StageLinks
    losses: list[Tensor] = field(default_factory=list)
    """Of micro-batches so far, () fp64 each."""


@dataclass
class _InFlight:
    """One micro-batch on one stage, from the arrival of its input to the end of its backward."""

    input: PendingTensor | None = None
    output: Tensor | None = None
    """On the last stage the loss."""
    gradient: PendingTensor | None = None
    """That of the output."""
    input_gradient: Tensor | None = None
    weights: list[dict[str, Any]] | None = None
    """Where W goes on; None where nothing is left to do."""


class Stage(_PipelineStageBase):
    """A part of the model at its place in the pipeline."""

    current: PipelineContext

    def __init__(
        self,
        part: nn.Module,
        schedule: Schedule,
        place: tuple[int, int],
        device: torch.device,
        group: dist.ProcessGroup,
        zero: int = 1,
    ) -> None:
        direction, self.stage = place
        self.zero = zero
        """Degree, where FSDP2 holds the part."""
        self.chain = schedule.stage_ranks[direction]
        num_indices = schedule.num_stages * len(schedule.stage_ranks)
        index = index_of(schedule, direction, self.stage)
        super().__init__(part, index, num_indices, device, group)
        is_split = any(action.kind == "I" for action in schedule.actions[self.group_rank])
        self.splits = is_split and can_split(part) and zero < 3
        self._num_backwards = schedule.num_micro_batches // len(schedule.stage_ranks)
        self._num_left = 0
        """Micro-batches of the step whose weights' gradients are still to come."""
        self.flights: dict[int, _InFlight] = defaultdict(_InFlight)

    @property
    def is_first(self) -> bool:
        """Of its direction."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Of its direction."""
        return self.stage == len(self.chain) - 1

    def start(self, current: PipelineContext) -> None:
        """Get ready to run a program."""
        self.current, self._num_left = current, self._num_backwards
        if isinstance(self.submod, FSDPModule) and torch.is_grad_enabled():
            # REDUCE_GRAD turns all of them on again, and does what they put off.
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)

    def finish(self) -> None:
        """Wait for what is still under way and let go of everything."""
        self.current.wires.finish()
        self.flights.clear()
        if self.zero == 3:
            free_gathered(self.submod)
        del self.current

    # Transfers. What they return the runtime would keep until the end of the step: nothing.

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the output on."""
        output, peer = self.flights[fwd_chunk_id].output, self.chain[self.stage + 1]
        assert output is not None
        self.current.wires.announce((self.current.form, self.stage_index, "out"), output, peer)
        self.current.wires.send(output.detach(), peer)
        return []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Start to receive the input."""
        wires, peer = self.current.wires, self.chain[self.stage - 1]
        form = wires.learn((self.current.form, self.stage_index, "in"), peer)
        self.flights[fwd_chunk_id].input = wires.receive(form, peer)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the input's gradient back."""
        (gradient,) = self.get_local_bwd_output(bwd_chunk_id)
        self.current.wires.send(gradient, self.chain[self.stage - 1])
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Start to receive the output's gradient."""
        flight = self.flights[bwd_chunk_id]
        assert flight.output is not None
        form = (flight.output.shape, flight.output.dtype)
        flight.gradient = self.current.wires.receive(form, self.chain[self.stage + 1])
        return []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the input from a stage on the same rank."""
        self.flights[mb_index].input = PendingTensor(prev_stage_outputs.detach())

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor]:
        """Hand out the input's gradient."""
        flight = self.flights[mb_index]
        gradient, flight.input_gradient = flight.input_gradient, None
        assert gradient is not None
        return (gradient,)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """Take the output's gradient from a stage on the same rank."""
        (gradient,) = next_stage_bwd_outputs
        assert gradient is not None
        self.flights[mb_index].gradient = PendingTensor(gradient)

    # Compute.

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Tensor:
        """F: the part, and on the last stage the loss."""
        flight, trains = self.flights[fwd_chunk_id], torch.is_grad_enabled()
        if self.is_first:
            flight.input = PendingTensor(args[0])
        assert flight.input is not None
        x = flight.input.wait() if self.is_first else flight.input.wait().requires_grad_(trains)
        with self._naming("forward", fwd_chunk_id):
            output = self.submod(x, **(kwargs or {}))
            if self.is_last:
                output = self._loss(output, fwd_chunk_id)
        # Splitting detaches the output in place, which a view doesn't allow.
        flight.output = output.clone() if self.splits and output._is_view() else output
        if not trains:
            flight.input = None
        return flight.output

    def _loss(self, output: Tensor, micro_batch: int) -> Tensor:
        loss = self.current.criterion(output, micro_batch)
        self.current.losses.append(loss.detach().double())
        return self.current.scale(loss)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: Any = False,
    ) -> None:
        """B, or I where the backward pass is not full."""
        flight = self.flights[bwd_chunk_id]
        assert flight.input is not None
        assert flight.output is not None
        x, output, gradient = flight.input.tensor, flight.output, flight.gradient
        flight.input = flight.output = flight.gradient = None
        incoming = None if gradient is None else gradient.wait()
        with self._naming("backward", bwd_chunk_id), self._without_autocast():
            if self.splits and not full_backward and x.requires_grad:
                flight.weights = self._backward_input(output, incoming, x)
            else:
                self._prepare_reduction()
                if output.requires_grad:
                    torch.autograd.backward(output, incoming)
        if flight.weights is None:
            self.current.after_backward(bwd_chunk_id, self.submod)
        if not self.is_first:
            flight.input_gradient = torch.zeros_like(x) if x.grad is None else x.grad
            x.grad = None

    def _backward_input(
        self, output: Tensor, gradient: Tensor | None, x: Tensor
    ) -> list[dict[str, Any]]:
        gradients = None if gradient is None else [gradient]
        with _own_memory([x] if self.is_first else []):
            _, weights = stage_backward_input([output], gradients, [x], self.submod.parameters())
        return weights

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: Any = False) -> None:
        """W: what I has left to do."""
        weights = self.flights.pop(bwd_chunk_id).weights
        if weights is not None:
            parameters = list(self.submod.parameters())
            with (
                self._naming("backward", bwd_chunk_id),
                self._without_autocast(),
                _own_memory(parameters),
            ):
                stage_backward_weight(iter(parameters), weights)
            if isinstance(self.submod, FSDPModule) and self._prepare_reduction():
                # W goes around FSDP2's hooks, which would reduce.
                self.submod._get_fsdp_state()._root_post_backward_final_callback()
            self.current.after_backward(bwd_chunk_id, self.submod)

    def _prepare_reduction(self) -> bool:
        """Whether gradients of weights that now come are reduced at once: FSDP2 is told so."""
        self._num_left -= 1
        if self.zero < 2 or not isinstance(self.submod, FSDPModule):
            return False
        is_last = self._num_left == 0
        prepare_micro_batch(self.submod, self.zero, is_last, reduces=True)
        # What is in no block stays: other micro-batches are under way.
        self.submod.set_reshard_after_backward(is_last, recurse=False)
        return True

    def _without_autocast(self) -> torch.autocast:
        """Backward computes in the types of forward; autocast would change them once more."""
        return torch.autocast(self.device.type, enabled=False)

    @contextmanager
    def _naming(self, what: str, micro_batch: int) -> Iterator[None]:
        """Add to an error where it happened."""
        try:
            yield
        except Exception as error:
            error.add_note(f"in the {what} pass of micro-batch {micro_batch}, stage {self.stage}")
            raise

    # Abstract in torch's class, where they learn shapes; never called.

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None: ...

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None: ...

    def _create_grad_recv_info(self, *_: Any) -> tuple[()]:
        return ()


@contextmanager
def _own_memory(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Give each first gradient memory of its own, as autograd does when it accumulates.

    torch's split functions keep what the graph gave them, which two leaves may share, or which may
    be one value seen as many; the next micro-batch would be added to it in place.
    """
    first = [leaf for leaf in leaves if leaf.grad is None]
    yield
    for leaf in first:
        if leaf.grad is not None:
            leaf.grad = leaf.grad.clone()


def can_split(part: nn.Module) -> bool:
    """Whether a part's gradients of input and weights can be computed one after the other."""
    return not any(
        isinstance(module, ActivationWrapper | OptimizedModule)
        or getattr(module, "_compiled_call_impl", None) is not None
        for module in part.modules()
    )
