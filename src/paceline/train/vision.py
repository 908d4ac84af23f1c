"""ResNets: their Task on synthetic textures, the accuracy they reach, their weights for others.

Images lie in memory with their channels together in 16-bit arithmetic, as tensor cores and the
fused norms read them, and as PyTorch lays them otherwise: what the planner prices
(`Stack.channels_last`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
from paceline.kernels.dtypes import DTYPES
from paceline.models.resnet import ResNetwork, torchvision_config, torchvision_state
from paceline.models.weights import write_state
from paceline.train.data.build import Progress
from paceline.train.data.images import samples
from paceline.train.family import Trained, TrainFamily
from paceline.train.synthetic import synthetic_eval_steps, synthetic_steps
from paceline.train.task import Task

SOURCE = "images"
_DATA_KEY = "synthetic textures"


class ImageMicroBatch(NamedTuple):
    """A micro-batch on this rank's device."""

    images: Tensor
    """(batch, 3, side, side)"""
    labels: Tensor
    """(batch,)"""


class ImageModels(TrainFamily[ResNet]):
    """See `TrainFamily`."""

    def read_inputs(
        self, model: ResNet, job: Job, progress: Progress, say: Callable[[str], None]
    ) -> str:
        """Nothing is read; what the images are made from is their name.

        Raises:
            InputError: the Job names another source.
        """
        if job.data.source != SOURCE:
            raise InputError(
                f"a ResNet trains on synthetic images, but data.source = {job.data.source!r}: set "
                f'data.source = "{SOURCE}", or train your own module and data with paceline.train.'
            )
        return _DATA_KEY

    def task(self, model: ResNet, job: Job, ranks: Ranks) -> Task:
        """The Job's own ResNet on synthetic textures."""
        make, seen = partial(_micro_batch, model, job, ranks), ImageScores()
        with torch.device("meta"):
            module = ResNetwork(model)
        return Task(
            module=module,
            loss=partial(_loss, seen, _memory_format(job)),
            steps_from=lambda first: synthetic_steps(job, ranks, make, first),
            eval_steps=lambda: synthetic_eval_steps(job, ranks, make),
            unit=model.unit,
            train_flops_per_unit=model.train_flops_per_image,
            data_key=_DATA_KEY,
            fill=partial(_fill, job.train.seed),
            facts={"num_params": model.num_params, "data": {"source": _DATA_KEY}},
            eval_figures=partial(seen.figures, ranks),
        )

    def export(self, model: ResNet, trained: Trained, folder: Path, dtype: torch.dtype) -> None:
        """Weights under torchvision's names, and the shapes in config.json."""
        weights = torchvision_state(model, trained.weights)
        write_state(folder, weights, dtype, torchvision_config(model))


def _fill(seed: int, module: nn.Module) -> None:
    assert isinstance(module, ResNetwork)
    module.init_weights(torch.Generator().manual_seed(seed))


def _micro_batch(model: ResNet, job: Job, ranks: Ranks, indices: NDArray) -> ImageMicroBatch:
    made = samples(model, job.train.seed, indices)
    images = torch.from_numpy(made.images).to(ranks.device, DTYPES[job.layout.param_dtype])
    return ImageMicroBatch(images, torch.from_numpy(made.labels).to(ranks.device))


def _memory_format(job: Job) -> torch.memory_format:
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
