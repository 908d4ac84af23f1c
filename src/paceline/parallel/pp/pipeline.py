"""Pipeline: the stages of one rank, run by torch's runtime as a Schedule says."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _Action as Op
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.compress.messages import CodedMessages
from paceline.config.errors import InputError
from paceline.config.schedule import Schedule
from paceline.parallel.pp.program import lower, lower_forward
from paceline.parallel.pp.stage import AfterBackward, Criterion, PipelineContext, Stage, StageLinks

MicroBatch = tuple[Tensor, dict[str, Any]]
"""What enters the first stage, and keyword arguments that every stage gets."""


class Pipeline:
    """Runs steps together with the other ranks of the pipeline.

    A part that FSDP2 has wrapped (`fully_shard`) gathers and reduces as its degree of ZeRO says
    (`parallel.fsdp`): once a step at 1, however many micro-batches there are. At 2 gradients are
    reduced behind each backward pass, at 3 blocks are gathered for each pass too.

    A stage that lives on two ranks (DualPipe) has on each the gradients of the micro-batches that
    went through it there: the sum over both is the caller's to take.
    """

    def __init__(
        self,
        schedule: Schedule,
        parts: Sequence[nn.Module],
        group: dist.ProcessGroup,
        device: torch.device,
        messages: CodedMessages | None = None,
        zero: int = 1,
    ) -> None:
        """Prepare the programs; nothing is sent yet.

        Args:
            schedule: for as many ranks as the group has.
            parts: this rank's stages, in the order of `schedule.stages_of(rank)`. Each maps
                (tensor, **keywords) to one plain tensor of floating point. They may be wrapped by
                FSDP2, but not by DistributedDataParallel: W goes around its hooks.
            group: the ranks of this pipeline, in its order.
            device: where the parts lie.
            messages: the form of activations and their gradients between ranks; as they are by
                default.
            zero: degree, of parts that FSDP2 has wrapped.
        """
        rank, places = dist.get_rank(group), schedule.stages_of(dist.get_rank(group))
        assert dist.get_world_size(group) == schedule.num_ranks, "the schedule is for other ranks"
        assert len(parts) == len(places), f"{len(parts)} parts for the stages {places}"
        assert not any(isinstance(part, DistributedDataParallel) for part in parts)
        self.schedule, self.device, self.messages = schedule, device, messages
        self._wires = StageLinks(group, device, max_sends=2 * schedule.num_ranks, messages=messages)
        self._stages = [
            Stage(part, schedule, place, device, group, zero)
            for part, place in zip(parts, places, strict=True)
        ]
        for part in parts:
            if isinstance(part, FSDPModule) and zero < 3:
                part.set_reshard_after_forward(False)
        self._keeps_gathered = zero < 3
        program = lower(schedule, rank, keeps_gathered=self._keeps_gathered)
        self._training = _Runtime(self._stages, schedule.num_micro_batches, program)
        self._evaluation: dict[int, _Runtime] = {}
        """By number of micro-batches."""

    def step(
        self,
        inputs: Sequence[MicroBatch],
        criterion: Criterion,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
        after_backward: AfterBackward = lambda _micro_batch, _part: None,
    ) -> Tensor:
        """Forward and backward of all micro-batches; adds to the gradients of the parts.

        Under autocast, forward passes and criterion compute in its type.

        Args:
            inputs: as many micro-batches as the schedule has, of one shape. Every rank passes the
                same; only first stages look into the tensor.
            criterion: called where a last stage lives. Nothing is averaged here: for the mean of
                the losses it divides by the number of micro-batches.
            scale: applied to each loss before its backward pass (GradScaler.scale).
            after_backward: told when a part has all gradients of a micro-batch.

        Returns:
            the losses that this rank computed, without scale: (losses,) fp64, of none where no last
            stage lives.

        Raises:
            InputError: another number of micro-batches, or shapes that differ.
        """
        if len(inputs) != self.schedule.num_micro_batches:
            raise InputError(
                f"{len(inputs)} micro-batches were given, but the pipeline's schedule is for "
                f"{self.schedule.num_micro_batches}; build it for as many as a step has."
            )
        with torch.enable_grad():
            return self._run(self._training, inputs, criterion, scale, after_backward)

    def forward_only(self, inputs: Sequence[MicroBatch], criterion: Criterion) -> Tensor:
        """The losses of any number of micro-batches, without gradients; else as `step`."""
        number = len(inputs)
        if number not in self._evaluation:
            program = lower_forward(
                self.schedule, number, self._training.rank, keeps_gathered=self._keeps_gathered
            )
            self._evaluation[number] = _Runtime(self._stages, number, program)
        with torch.no_grad():
            return self._run(self._evaluation[number], inputs, criterion)

    def _run(
        self,
        runtime: "_Runtime",
        inputs: Sequence[MicroBatch],
        criterion: Criterion,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
        after_backward: AfterBackward = lambda _micro_batch, _part: None,
    ) -> Tensor:
        forms = {(x.shape, x.dtype) for x, _ in inputs}
        if len(forms) != 1:
            raise InputError(
                f"micro-batches of {len(forms)} different shapes were given to a pipeline's step; "
                "pad them to one."
            )
        autocast = (
            torch.is_autocast_enabled(self.device.type),
            torch.get_autocast_dtype(self.device.type),
        )
        form = (*forms, autocast)
        current = PipelineContext(criterion, scale, after_backward, form, self._wires)
        for stage in self._stages:
            stage.start(current)
        runtime.run(inputs)
        for stage in self._stages:
            stage.finish()
        if not current.losses:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        return torch.stack(current.losses)


class _Runtime(_PipelineScheduleRuntime):
    """torch's runtime with one program."""

    def __init__(self, stages: list[Stage], num_micro_batches: int, program: list[Op]) -> None:
        super().__init__(list(stages), num_micro_batches, scale_grads=False)
        self.pipeline_order_with_comms = {self.rank: program}

    def _initialize_stages(self, *_: Any, **__: Any) -> None:
        """Nothing: torch's would run every stage once to learn shapes, which ours announce."""

    def _assert_unsharded(self, stage: Any) -> None:
        """At ZeRO-3 each pass gathers what it reads."""
        if stage.zero < 3:
            super()._assert_unsharded(stage)

    def run(self, inputs: Sequence[MicroBatch]) -> None:
        """Execute the program."""
        with _without_log():
            self._step_microbatches([(x,) for x, _ in inputs], [keywords for _, keywords in inputs])


@contextmanager
def _without_log() -> Iterator[None]:
    """Keep torch from logging the whole program where an action fails: the traceback says more."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
