"""Whole training steps on the stand-in device: models, arithmetic, kernels and layouts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.rendezvous import Ranks
from paceline.config.comm import Comm, DpComm
from paceline.config.device import Figure
from paceline.config.hardware import Cluster, Device
from paceline.config.job import Job, read_job
from paceline.parallel import offload
from paceline.parallel.replicate import compressed_all_reduce_of
from paceline.plan.resolve import resolve
from paceline.train.families import task_of
from paceline.train.language import decoder_task
from paceline.train.trainer import Trainer
from tests.parallel.training import DENSE, MODELS, SEQ, TRAIN, micro_batches

STEPS = 2
GPU = Device(
    name="H100-SXM",
    kind="cuda",
    memory_bytes=Figure(value=80e9, origin="assumed", source="stand-in"),
    precisions=("fp64", "fp32", "bf16", "fp16", "fp8"),
)
BF16 = "layout.precision=bf16"
CODECS = ("bf16", "int8", "fp8", "int4", "quinary", "onebit", "powersgd:2")
TINY = (*DENSE, *TRAIN)
SMALL = ("model.num_layers=2", "layout.micro_batch=12")
SIX = "layout.micro_batch=6"
KERNELS = "layout.kernels=triton"
EXPERTS, DOCUMENTS = MODELS["experts"], MODELS["documents"]


@dataclass(frozen=True)
class Case:
    """What rank 0 of some ranks does."""

    num_ranks: int
    run: Callable[[], None]
    answer: float | None = None
    """What the host reads from the device where the code can't do without."""


def decoder(*settings: str, num_ranks: int = 1, answer: float | None = None) -> Case:
    """Two steps of the tiny decoder."""
    return Case(num_ranks, partial(_train, num_ranks, settings), answer)


def _train(num_ranks: int, settings: tuple[str, ...]) -> None:
    job, ranks = job_of(num_ranks, (*SMALL, *settings)), Ranks(0, num_ranks, 0, num_ranks, "cuda")
    # First values are random numbers of the host: nothing to rehearse, and fakes have none.
    task = replace(decoder_task(job.model, job, ranks), fill=lambda module: None)
    trainer = Trainer.of(job, ranks, task)
    for step in range(STEPS):
        batches = micro_batches(step, job, 0)
        trainer.step(step, [_moved(batch) for batch in batches])


IMAGES = (
    'model={family="resnet", depth=18, num_classes=10, image_size=32}', 'data={source="images"}',
    "train={steps=3, global_batch=8}", "layout.micro_batch=4", "optim.warmup_steps=0",
)  # fmt: skip


def images(*settings: str) -> Case:
    """Two steps of a small ResNet."""
    return Case(1, partial(_train_on_images, settings))


def _train_on_images(settings: tuple[str, ...]) -> None:
    job, ranks = job_of(1, (*IMAGES, *settings), ()), Ranks(0, 1, 0, 1, "cuda")
    task = replace(task_of(job, ranks), fill=lambda module: None)
    trainer = Trainer.of(job, ranks, task)
    for step, batches in zip(range(STEPS), task.steps_from(0), strict=False):
        trainer.step(step, batches)


def _offloaded() -> None:
    """Activations go to the host; to the offload a fake must look like a plain tensor."""
    with mock.patch.object(offload, "Tensor", FakeTensor):
        _train(1, (BF16, "layout.offload=['activations']"))


def _exchanged(kind: str) -> None:
    """Two steps of compressed gradients, in three buckets, on the queue's thread and stream.

    What top-k sends depends on the values, which fakes haven't: it is not among these.
    """
    network = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))).to("cuda")
    names = {parameter: name for name, parameter in network.named_parameters()}
    replica = _Replica(network, dist.group.WORLD)
    exchange = compressed_all_reduce_of(replica, names, Comm(dp=DpComm(compress=kind)), 2)
    assert exchange is not None
    for step in range(STEPS):
        exchange.begin(step)
        network(torch.randn(64, 256, device="cuda")).square().mean().backward()
        with mock.patch("torch.futures.Future"):  # asks for addresses
            replica.hand_over(exchange, num_buckets=3)
            exchange.finish()
        for parameter in names:  # as the optimizer does
            parameter.grad.mul_(0.1)
        exchange.correct(torch.tensor(False, device="cuda"), None)
        network.zero_grad()


class _Replica(DistributedDataParallel):
    """DDP's side of a communication hook; its own reads addresses, which fakes haven't."""

    def __init__(self, network: torch.nn.Module, group: Any) -> None:
        torch.nn.Module.__init__(self)
        self.module, self.process_group = network, group

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def hand_over(self, exchange: Any, num_buckets: int) -> None:
        """Call the hook with gradients that are views of buckets."""
        parameters = list(self.module.parameters())
        size = len(parameters) // num_buckets
        for index in range(num_buckets):
            mine = parameters[index * size : (index + 1) * size]
            values = torch.cat([parameter.grad.flatten() for parameter in mine])
            parts = values.split([parameter.numel() for parameter in mine])
            for parameter, part in zip(mine, parts, strict=True):
                parameter.grad = part.view_as(parameter)
            bucket = SimpleNamespace(
                buffer=lambda values=values: values,
                parameters=lambda mine=mine: mine,
                is_last=lambda index=index: index == num_buckets - 1,
            )
            self._hook(exchange, bucket)


def job_of(num_ranks: int, settings: tuple[str, ...], tiny: tuple[str, ...] = TINY) -> Job:
    """The tiny Job on the stand-in device; what isn't said follows the stated rules."""
    machine = Cluster(device=GPU, devices_per_node=num_ranks, num_nodes=1)
    return resolve(read_job(None, [*tiny, *settings]), machine).job


def _moved(batch: Any) -> Any:
    return type(batch)(*(part if part is None else part.to("cuda") for part in batch))


CASES: Mapping[str, Case] = {
    "fp32": decoder("layout.precision=fp32"),
    "bf16": decoder(BF16),
    "fp16": decoder("layout.precision=fp16"),
    "fp8": decoder("layout.precision=fp8"),
    "bf16 parameters": decoder(BF16, "layout.param_dtype=bf16"),
    "documents": decoder(BF16, *DOCUMENTS),
    "experts": decoder(BF16, *EXPERTS),
    "kernels, documents": decoder(BF16, KERNELS, *DOCUMENTS),
    "kernels, experts": decoder(BF16, KERNELS, *EXPERTS),
    "recompute": decoder(BF16, "layout.recompute=full"),
    "selective recompute": decoder(BF16, "layout.recompute=selective"),
    "offloaded activations": Case(1, _offloaded),
    "offloaded optimizer": decoder(BF16, "layout.offload=['optimizer']"),
    "8-bit optimizer": decoder(BF16, "layout.optimizer_state=8bit"),
    "images": images(BF16),
    "images, kernels": images(BF16, KERNELS),
    "fsdp": decoder(BF16, SIX, "layout.fsdp=4", num_ranks=4),
    "fsdp, int8": decoder(BF16, SIX, "layout.fsdp=4", "comm.fsdp.compress=int8", num_ranks=4),
    "hsdp": decoder(BF16, SIX, "layout.dp=2", "layout.fsdp=2", num_ranks=4),
    "tp, kernels": decoder(BF16, "layout.tp=2", KERNELS, num_ranks=2),
    "tp, whole sequences": decoder(
        BF16, "layout.tp=2", "layout.sequence_parallel=false", num_ranks=2
    ),
    "cp": decoder(BF16, "layout.cp=2", num_ranks=2),
    "ulysses": decoder(BF16, "layout.cp=2", "layout.ulysses=2", num_ranks=2),
    "ep": decoder(
        BF16,
        SIX,
        "layout.fsdp=2",
        "layout.ep=2",
        *EXPERTS,
        num_ranks=2,
        answer=6 * SEQ,  # half of the two copies of each token
    ),
    **{f"dp, {kind}": Case(2, partial(_exchanged, kind)) for kind in CODECS},
    "pp, zero bubble": decoder(BF16, SIX, "layout.pp=2", "layout.schedule=zb_h1", num_ranks=2),
    "pp x fsdp x tp": decoder(
        BF16, SIX, "layout.pp=2", "layout.fsdp=2", "layout.tp=2", num_ranks=8
    ),
}


def _unordered_copy() -> None:
    """A copy on a stream of its own reads what the default stream may still be writing."""
    lane, values = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    values.add_(1)
    with torch.cuda.stream(lane):
        values.clone()


def _memory_given_back() -> None:
    """A tensor is dropped while a copy on another stream reads it."""
    lane, values = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    lane.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(lane):
        copy = values.clone()
    del values
    torch.zeros(8, device="cuda")
    lane.wait_event(torch.cuda.current_stream().record_event())
    del copy


def _two_devices() -> None:
    torch.zeros(8, device="cuda") + torch.zeros(8)


def _host_waits() -> None:
    float(torch.zeros((), device="cuda"))


FAULTS: Mapping[str, tuple[Case, str]] = {
    "a copy that isn't ordered": (Case(1, _unordered_copy), "RaceError"),
    "memory given back early": (Case(1, _memory_given_back), "was given back"),
    "host and device mixed": (Case(1, _two_devices), "on the same device"),
    "a host that waits": (Case(1, _host_waits), "DataDependentOutputException"),
}
"""What must be found, and a word of what is said then."""
