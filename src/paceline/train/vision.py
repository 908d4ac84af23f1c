"""The Task of a ResNet: synthetic textures, their classes, and the accuracy it reaches.

Images lie in memory with their channels together in 16-bit arithmetic, as tensor cores and the
fused norms read them, and as PyTorch lays them otherwise: what the planner prices
(`Stack.channels_last`).
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.config.vision import ResNet
from paceline.models.resnet import ResNetwork
from paceline.parallel.apply import DTYPES
from paceline.train.data.images import samples
from paceline.train.synthetic import synthetic_eval_steps, synthetic_steps
from paceline.train.task import Task

SOURCE = "images"


class ImageMicroBatch(NamedTuple):
    """A micro-batch on this rank's device."""

    images: Tensor
    """(batch, 3, side, side)"""
    labels: Tensor
    """(batch,)"""


def data_key(job: Job) -> str:
    """Names the images by what they are made from.

    Raises:
        InputError: the Job names another source.
    """
    if job.data.source != SOURCE:
        raise InputError(
            f"a ResNet trains on synthetic images, but data.source = {job.data.source!r}: set "
            f'data.source = "{SOURCE}", or train your own module and data with paceline.train.'
        )
    return "synthetic textures"


def image_task(job: Job, ranks: Ranks) -> Task:
    """The Job's own ResNet on synthetic textures."""
    model = job.model
    assert isinstance(model, ResNet)
    make, seen = partial(_micro_batch, job, ranks), ImageScores()
    with torch.device("meta"):
        module = ResNetwork(model)
    return Task(
        module=module,
        loss=partial(_loss, seen, _memory_format(job)),
        steps_from=lambda first: synthetic_steps(job, ranks, make, first),
        eval_steps=lambda: synthetic_eval_steps(job, ranks, make),
        unit="samples",
        train_flops_per_unit=model.train_flops_per_image,
        data_key=data_key(job),
        fill=partial(_fill, job.train.seed),
        facts={"num_params": model.num_params, "data": {"source": data_key(job)}},
        eval_figures=partial(seen.figures, ranks),
    )


def _fill(seed: int, module: nn.Module) -> None:
    assert isinstance(module, ResNetwork)
    module.init_weights(torch.Generator().manual_seed(seed))


def _micro_batch(job: Job, ranks: Ranks, indices: NDArray) -> ImageMicroBatch:
    assert isinstance(job.model, ResNet)
    made = samples(job.model, job.train.seed, indices)
    images = torch.from_numpy(made.images).to(ranks.device, DTYPES[job.layout.param_dtype])
    return ImageMicroBatch(images, torch.from_numpy(made.labels).to(ranks.device))


def _memory_format(job: Job) -> torch.memory_format:
    assert job.layout.precision != "auto"
    is_narrow = DTYPES[job.layout.precision].itemsize == 2
    return torch.channels_last if is_narrow else torch.contiguous_format


def _loss(
    seen: "ImageScores",
    memory_format: torch.memory_format,
    module: nn.Module,
    batch: ImageMicroBatch,
) -> Tensor:
    logits = module(batch.images.contiguous(memory_format=memory_format))
    if not module.training:
        seen.add(logits, batch.labels)
    return F.cross_entropy(
        logits if logits.dtype == torch.float64 else logits.float(), batch.labels
    )


@dataclass
class ImageScores:
    """Held-out images that an evaluation has classified on this rank."""

    num_right: float = 0.0
    num_images: float = 0.0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Note a micro-batch."""
        self.num_right += (logits.argmax(dim=1) == labels).sum().item()
        self.num_images += len(labels)

    def figures(self, ranks: Ranks) -> dict[str, float]:
        """Share of all ranks' images whose class is the most likely one; then forget them."""
        counts = torch.tensor([self.num_right, self.num_images], device=ranks.device)
        self.num_right = self.num_images = 0.0
        if ranks.world_size > 1:
            dist.all_reduce(counts)
        return {"eval_accuracy": (counts[0] / counts[1]).item()}
