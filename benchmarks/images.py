"""Images: the accuracy that a Job reaches beside a plain loop, and what reading ahead brings.

The 1,797 handwritten digits of scikit-learn (8 x 8 pixels, 360 of them held out) lie as PNG files
in folders. A ResNet-18 learns them, enlarged to 32 x 32, from several seeds: by `paceline train`
with `data.images`, and by a loop of PyTorch as a person writes it, with a DataLoader and crops of
its own and the same settings. Orders of samples, crops and first weights are each one's own, so
accuracies agree within the noise of seeds, which the page states.

Then JPEGs (parts of scikit-learn's two photographs) are decoded between steps and by one process
ahead, in turns of some steps in one process.

    python -m benchmarks.images [--seeds 3] [--epochs 6] [--rounds 5]
"""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import Spread, markdown
from paceline.comm.rendezvous import Ranks
from paceline.config.job import read_job
from paceline.models.resnet import ResNetwork
from paceline.train.families import task_of
from paceline.train.length import length_in_steps
from paceline.train.this_machine import resolve_on_this_machine
from paceline.train.trainer import Trainer

BATCH, LR, WARMUP, MOMENTUM, DECAY, SMOOTHING, LEAST_AREA = 64, 0.05, 20, 0.9, 1e-4, 0.1, 0.5
JOB = f"""
name = "digits"
[model]
family = "resnet"
depth = 18
image_size = 32
num_classes = 10
[cluster]
devices_per_node = 1
[data]
source = "train"
[data.images]
eval_source = "held-out"
least_area = {LEAST_AREA}
eval_crop = 1.0
flip = false
label_smoothing = {SMOOTHING}
[optim]
name = "sgd"
lr = {LR}
momentum = {MOMENTUM}
weight_decay = {DECAY}
clip_norm = 0.0
warmup_steps = {WARMUP}
final_lr_ratio = 0.0
[train]
epochs = 1
global_batch = {BATCH}
eval_batches = 1000
[layout]
precision = "fp32"
[observe]
tensorboard = false
"""
_SHOWN = ("seed", "Paceline, % right", "plain loop, % right")


def write_digits(folder: Path, most: int) -> None:
    """The digits as files, every fifth held out; `most`: no more than so many."""
    found = load_digits()
    for number, (pixels, label) in enumerate(zip(found.images, found.target, strict=True)):
        if number >= most:
            break
        place = folder / ("train" if number % 5 else "held-out") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels * 255 / 16).astype(np.uint8))
        image.save(place / f"{number}.png")


# ---- as a Job ------------------------------------------------------------------------------------


def by_job(folder: Path, seed: int, epochs: float) -> float:
    """Share of the held-out digits that are right."""
    (folder / "job.toml").write_text(JOB)
    command = [sys.executable, "-m", "paceline", "train", "job.toml", "--fresh"]
    settings = (f"train.seed={seed}", f"train.epochs={epochs}")
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    lines = (folder / "runs" / "digits" / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])["eval_accuracy"])


# ---- as a plain loop -----------------------------------------------------------------------------


class Digits(Dataset):
    """The files of a folder; those that are trained on by parts of random area and ratio."""

    def __init__(self, folder: Path, *, is_cropped: bool) -> None:
        self.files = sorted(folder.glob("*/*.png"))
        self.is_cropped = is_cropped

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = self.files[index]
        image = Image.open(file).convert("RGB")
        if self.is_cropped:
            image = image.crop(_part(*image.size))
        pixels = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR), np.float32) / 255
        scaled = (pixels - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
        return torch.from_numpy(scaled.astype(np.float32)).permute(2, 0, 1), int(file.parent.name)


def _part(width: int, height: int) -> tuple[int, int, int, int]:
    """Whole pixels, as torchvision's RandomResizedCrop has them."""
    for _ in range(10):
        area = width * height * random.uniform(LEAST_AREA, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, upper = random.randint(0, width - w), random.randint(0, height - h)
            return left, upper, left + w, upper + h
    return 0, 0, width, height


def by_loop(folder: Path, seed: int, epochs: float) -> float:
    """Share of the held-out digits that are right."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = ResNetwork(read_job(folder / "job.toml").model)
    with torch.no_grad():
        model.init_weights(torch.Generator().manual_seed(1000 + seed))
    train = Digits(folder / "train", is_cropped=True)
    loader = DataLoader(train, BATCH, shuffle=True, drop_last=True)
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors}]
    optimizer = torch.optim.SGD(groups, LR, momentum=MOMENTUM)
    steps = math.ceil(epochs * len(train) / BATCH)
    batches = (batch for _ in range(steps) for batch in loader)
    for step, (images, labels) in enumerate(islice(batches, steps), start=1):
        rest = (step - WARMUP) / (steps - WARMUP)
        factor = step / WARMUP if step <= WARMUP else 0.5 * (1 + math.cos(math.pi * rest))
        for group in optimizer.param_groups:
            group["lr"] = LR * factor
        loss = F.cross_entropy(model(images), labels, label_smoothing=SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return _accuracy(model.eval(), Digits(folder / "held-out", is_cropped=False))


@torch.no_grad()
def _accuracy(model: nn.Module, digits: Digits) -> float:
    right = sum(
        int((model(images).argmax(dim=1) == labels).sum())
        for images, labels in DataLoader(digits, BATCH)
    )
    return right / len(digits)


def noise(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Difference of the means, and two standard errors of it: seeds, and images that were asked."""
    spread = sum(statistics.variance(each) / len(each) for each in (ours, theirs))
    mean = statistics.fmean(ours + theirs)
    asked = 2 * mean * (1 - mean) / 360
    return statistics.fmean(ours) - statistics.fmean(theirs), 2 * math.sqrt(spread + asked)


# ---- reading ahead -------------------------------------------------------------------------------


def write_photos(folder: Path, count: int = 256) -> None:
    """JPEGs of 400 x 300 pixels, parts of two photographs."""
    random.seed(0)
    photos = [Image.fromarray(each) for each in load_sample_images().images]
    for number in range(count):
        photo = photos[number % 2]
        left, upper = (random.randint(0, most) for most in (photo.width - 400, photo.height - 300))
        part = photo.crop((left, upper, left + 400, upper + 300))
        place = folder / "photos" / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        part.save(place / f"{number}.jpg", quality=90)


def reading(folder: Path, rounds: int) -> tuple[Spread, Spread, Spread]:
    """Milliseconds of a step that decodes itself, of one whose images were decoded ahead, and the
    ratio in each round."""
    torch.set_num_threads(1)
    trained = []
    photos = folder / "photos"
    settings = [f"data.source={photos}", f"data.images.eval_source={photos}", "train.epochs=1000"]
    for workers in (0, 1):
        more = [f"data.images.workers={workers}", "train.global_batch=16"]
        job = read_job(folder / "job.toml", [*settings, *more, "model.num_classes=2"])
        job = resolve_on_this_machine(length_in_steps(job)).job
        task = task_of(job, Ranks())
        trained.append((Trainer.of(job, Ranks(), task), task.steps_from(0)))
    blocks: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            trainer, steps = trained[which]
            for batch in islice(steps, 4):  # what was decoded during the other's turn
                trainer.step(0, batch)()
            began = time.perf_counter()
            for batch in islice(steps, 12):
                trainer.step(0, batch)()
            blocks[which].append((time.perf_counter() - began) / 12 * 1e3)
    alone, ahead = (block[1:] for block in blocks)
    ratios = [one / other for one, other in zip(alone, ahead, strict=True)]
    return Spread.of(alone), Spread.of(ahead), Spread.of(ratios)


# ---- the page ------------------------------------------------------------------------------------


def main() -> None:
    """Measure, show the page and write it."""
    options = _options()
    console, about = Console(highlight=False), taken_with("benchmarks.images", "pillow")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_digits(folder, options.most)
        found = []
        for seed in range(options.seeds):
            both = by_job(folder, seed, options.epochs), by_loop(folder, seed, options.epochs)
            console.print(f"seed {seed}: {both[0]:.2%}, plain loop {both[1]:.2%}")
            found.append(both)
        write_photos(folder)
        alone, ahead, ratio = reading(folder, options.rounds)
    difference, error = noise(*map(list, zip(*found, strict=True)))
    rows = [
        [str(seed), f"{100 * ours:.2f}", f"{100 * theirs:.2f}"]
        for seed, (ours, theirs) in enumerate(found)
    ]
    page = (
        f"# Images\n\n{options.epochs:g} epochs of digits by ResNet-18, held-out digits right.\n\n"
        f"{markdown(_SHOWN, rows)}\nThe means differ by {100 * difference:+.2f} points; two "
        f"standard errors of that are {100 * error:.2f}.\n\nA step of 16 JPEGs of 400 x 300 takes "
        f"{alone.text('.0f')} ms, and {ahead.text('.0f')} ms where a process decodes ahead: "
        f"{ratio.text('.2f')} times (median and range over turns).\n\n{signature(about)}\n"
    )
    data: dict[str, Any] = {"taken": about, "epochs": options.epochs, "accuracy": found}
    data["step_ms"] = {"alone": vars(alone), "ahead": vars(ahead), "ratio": vars(ratio)}
    console.print(page)
    console.print(f"results: {keep(folder_of(options.results, about), 'images', data, page)}")


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind, 2 at least")
    parser.add_argument("--epochs", type=float, default=6.0, help="of the digits")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way to read")
    parser.add_argument("--most", type=int, default=10_000, help="digits")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds must be at least 2")
    return options


if __name__ == "__main__":
    main()
