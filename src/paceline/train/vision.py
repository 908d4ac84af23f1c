"""ResNets: their Task on images, in files or synthetic, what they reach, their weights for others.

Images of files stay bytes up to the device, which scales them: a quarter of the traffic.
Images lie in memory with their channels together in 16-bit arithmetic, as tensor cores and the
fused norms read them, and as PyTorch lays them otherwise: what the planner prices
(`Stack.channels_last`).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.job import Job, JobSpec
from paceline.config.job_sections import Data
from paceline.config.vision import SYNTHETIC, ResNet
from paceline.kernels.dtypes import DTYPES
from paceline.models.resnet import ResNetwork, torchvision_config, torchvision_state
from paceline.models.weights import write_state
from paceline.train.custom.feed import BatchPartition, check_enough, feed_of
from paceline.train.custom.reading import CustomMicroBatch
from paceline.train.data.build import Progress
from paceline.train.data.image_files import ImageDataset, MiddleBox, RandomBox, find_images
from paceline.train.data.images import samples
from paceline.train.family import Trained, TrainFamily
from paceline.train.synthetic import synthetic_eval_steps, synthetic_steps
from paceline.train.task import Loss, Task
from paceline.train.weighted_loss import WeightedLoss

_DATA_KEY = "synthetic textures"
# Means and deviations of ImageNet's channels, red, green and blue, which published weights go with.
_MEANS, _DEVIATIONS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageMicroBatch(NamedTuple):
    """A micro-batch on this rank's device."""

    images: Tensor
    """(batch, 3, side, side)"""
    labels: Tensor
    """(batch,)"""
    num_counted: int | None = None
    """Images that count, all or none; None: all."""


class ImageModels(TrainFamily[ResNet]):
    """See `TrainFamily`."""

    def read_inputs(
        self, model: ResNet, job: Job, progress: Progress, say: Callable[[str], None]
    ) -> str:
        """List the images; synthetic ones are made when they are needed.

        Raises:
            InputError: there are none, or they have more classes than the model.
        """
        if job.data.source == SYNTHETIC:
            return _DATA_KEY
        splits = _splits(model, job.data)
        say(
            f"{len(splits.train):,} images of {splits.num_classes:,} classes, "
            f"and {len(splits.held_out):,} held out"
        )
        return splits.key

    def num_samples(self, model: ResNet, job: JobSpec, progress: Progress | None) -> int | None:
        """See `TrainFamily.num_samples`."""
        return None if job.data.source == SYNTHETIC else len(_splits(model, job.data).train)

    def task(self, model: ResNet, job: Job, ranks: Ranks) -> Task:
        """The Job's own ResNet."""
        task = self.task_without_data(model, job, ranks)
        if job.data.source == SYNTHETIC:
            return task
        splits, deal = _splits(model, job.data), BatchPartition.of(job, ranks)
        check_enough(splits.train, deal.global_batch)
        given = job.data.images.workers
        workers = None if given == "auto" else given
        train, held_out = (feed_of(split, deal, None, workers) for split in splits[:2])
        return replace(
            task,
            loss=partial(_loss_of_files, task.loss, job),
            steps_from=train.steps,
            eval_steps=lambda: itertools.islice(held_out.once(), job.train.eval_batches),
            data_key=splits.key,
            facts=task.facts | {"data": splits.facts},
            tell_by=train.tell_by,
        )

    def task_without_data(self, model: ResNet, job: Job, ranks: Ranks) -> Task:
        """The same on synthetic textures."""
        seen, make = ImageScores(), partial(_micro_batch, model, job, ranks)
        with torch.device("meta"):
            module = ResNetwork(model)
        smoothing = job.data.images.label_smoothing
        return Task(
            module=module,
            loss=partial(_loss, seen, _memory_format(job), smoothing),
            steps_from=lambda first: synthetic_steps(job, ranks, make, first),
            eval_steps=lambda: synthetic_eval_steps(job, ranks, make),
            unit=model.unit,
            train_flops_per_unit=model.train_flops_per_image,
            data_key=_DATA_KEY,
            fill=partial(_fill, job.train.seed),
            facts={"num_params": model.num_params, "data": {"source": _DATA_KEY}},
            eval_figures=partial(seen.figures, ranks),
        )

    def eval_figures(self, model: ResNet, job: JobSpec) -> list[str]:
        """See `ImageScores`."""
        return ["eval_loss", "eval_accuracy"]

    def export(self, model: ResNet, trained: Trained, folder: Path, dtype: torch.dtype) -> None:
        """Weights under torchvision's names, and the shapes in config.json."""
        weights = torchvision_state(model, trained.weights)
        write_state(folder, weights, dtype, torchvision_config(model))


class _Splits(NamedTuple):
    """Images in files."""

    train: ImageDataset
    held_out: ImageDataset
    """In an order that mixes classes."""
    key: str

    @property
    def num_classes(self) -> int:
        """Of the images that are trained on."""
        return len(self.train.files.classes)

    @property
    def facts(self) -> dict[str, Any]:
        """What a Run keeps of them."""
        images, held_out = len(self.train), len(self.held_out)
        return {"source": "images", "images": images, "held_out": held_out}


def _splits(model: ResNet, data: Data) -> _Splits:
    """List the images of a Job.

    Raises:
        InputError: there are none, they have more classes than the model, or none are held out.
    """
    if find_spec("PIL") is None:
        raise InputError("Images in files need pillow: pip install 'paceline[images]'.")
    files, how = find_images(data.source, "data.source"), data.images
    if len(files.classes) > model.num_classes:
        raise InputError(
            f"data.source has {len(files.classes)} classes of images but model.num_classes = "
            f"{model.num_classes}: raise it, or leave classes out."
        )
    if how.eval_source is None:
        others, is_held_out = files, files.hashes < data.eval_fraction
        if not is_held_out.any():
            raise InputError(
                f"data.eval_fraction = {data.eval_fraction} of {len(is_held_out)} images is none: "
                "raise it, or give data.images.eval_source."
            )
    else:
        others = find_images(how.eval_source, "data.images.eval_source", files.classes)
        is_held_out = np.ones(len(others.labels), bool)
    mixed = np.random.default_rng(0).permutation(np.flatnonzero(is_held_out))
    of_training = np.flatnonzero(~is_held_out) if others is files else np.arange(len(files.labels))
    side, part, middle = model.image_size, RandomBox(how.least_area), MiddleBox(how.eval_crop)
    return _Splits(
        ImageDataset(files, of_training, side, part, flips=how.flip),
        ImageDataset(others, mixed, side, middle, flips=False),
        f"{files.key} without {data.eval_fraction if others is files else 0}",
    )


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


def _loss_of_files(
    loss: Loss,
    job: Job,
    module: nn.Module,
    part: CustomMicroBatch,
) -> WeightedLoss:
    """The last micro-batch of an evaluation may be smaller, or have none that counts."""
    pixels, labels = part.batch
    dtype = DTYPES[job.layout.param_dtype]
    means, deviations = (pixels.new_tensor(each, dtype=dtype) for each in (_MEANS, _DEVIATIONS))
    images = ((pixels.to(dtype) / 255 - means) / deviations).movedim(-1, 1)
    batch = ImageMicroBatch(images, labels, part.num_samples)
    weight = part.num_samples / job.micro_batch
    return replace(WeightedLoss.of(loss(module, batch)), weight=weight)


def _loss(
    seen: "ImageScores",
    memory_format: torch.memory_format,
    smoothing: float,
    module: nn.Module,
    batch: ImageMicroBatch,
) -> Tensor:
    logits = module(batch.images.contiguous(memory_format=memory_format))
    if not module.training:
        seen.add(logits[: batch.num_counted], batch.labels[: batch.num_counted])
    return F.cross_entropy(
        logits if logits.dtype == torch.float64 else logits.float(),
        batch.labels,
        label_smoothing=smoothing if module.training else 0.0,
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
