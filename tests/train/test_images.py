"""Images in files: what is listed and read (pure), steps against a plain loop and on two ranks, the
command."""

import io
import random
import shutil
import tarfile
from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import Job, read_job
from paceline.models.resnet import torchvision_config, torchvision_state
from paceline.plan.resolve import resolve
from paceline.train.data.image_files import ImageDataset, MiddleBox, RandomBox, find_images
from paceline.train.families import task_of
from paceline.train.start import read_inputs
from paceline.train.trainer import Trainer
from tests.command_line import losses, metrics, paceline, ranks
from tests.models.torchvision_like import of_config
from tests.parallel.training import CPU
from tests.ranks import run_ranks
from tests.train.written_images import CLASSES, image_bytes, write_images, write_shard

Image = pytest.importorskip("PIL.Image")

JOB = """
name = "stripes"
[model]
family = "resnet"
depth = 18
image_size = 32
num_classes = 2
[data]
source = "photos"
eval_fraction = 0.3
[data.images]
label_smoothing = 0.1
[train]
steps = 6
global_batch = 8
eval_batches = 100
[optim]
name = "sgd"
lr = 0.02
schedule = "constant"
clip_norm = 0.0
[checkpoint]
every = 3
"""
FP64 = ("layout.precision=fp64", "layout.param_dtype=fp64")
NUM_IMAGES = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    write_images(folder / "photos", NUM_IMAGES)
    (folder / "job.toml").write_text(JOB)
    return folder


# ---- what is listed and read ---------------------------------------------------------------------


def _pixels(files, index=0, box=None):
    ids = np.arange(len(files.labels))
    return ImageDataset(files, ids, 32, box or MiddleBox(1), flips=False)[index]


def test_folders_and_shards_hold_the_same_images(folder, tmp_path):
    plain = find_images(str(folder / "photos"), "data.source")
    assert plain.classes == CLASSES
    assert np.bincount(plain.labels).tolist() == [NUM_IMAGES // 2] * 2
    write_shard(tmp_path / "a-0.tar", range(12))
    write_shard(tmp_path / "a-1.tar", range(12, NUM_IMAGES // 2))
    write_shard(tmp_path / "folders" / "b.tar", range(NUM_IMAGES // 2), with_numbers=False)
    shards = [find_images(str(tmp_path / name), "data.source") for name in ("a-*.tar", "folders")]
    assert [each.classes for each in shards] == [("0", "1"), CLASSES]

    def contents(files):
        return sorted((files.read(at), files.labels[at]) for at in range(len(files.labels)))

    assert contents(shards[0]) == contents(shards[1]) == contents(plain)
    assert find_images(str(tmp_path), "data.source").key == shards[0].key
    assert len({files.key for files in (plain, *shards)}) == 3


def test_an_image_is_what_pillow_makes_of_it(folder):
    files = find_images(str(folder / "photos"), "data.source")
    pixels, label = _pixels(files)
    assert (pixels.dtype, pixels.shape, label) == (torch.uint8, (32, 32, 3), 0)
    with Image.open(io.BytesIO(image_bytes(0, 0))) as image:
        wanted = image.resize((32, 32), Image.Resampling.BILINEAR, box=(4, 0, 44, 40))
    assert np.array_equal(pixels.numpy(), np.asarray(wanted))


def test_a_large_jpeg_is_decoded_at_a_part_of_its_size(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "large.jpg").write_bytes(image_bytes(0, 0, side=400))
    pixels, _ = _pixels(find_images(str(tmp_path), "data.source"))
    with Image.open(tmp_path / "a" / "large.jpg") as image:
        wanted = image.resize((32, 32), Image.Resampling.BILINEAR, box=(4, 0, 404, 400))
    assert np.abs(pixels.numpy().astype(int) - np.asarray(wanted).astype(int)).mean() < 6


def test_parts_have_every_area_and_ratio_within_the_image():
    random.seed(0)
    found = np.array([RandomBox(0.25)(40, 40) for _ in range(2000)])
    across, down = (found[:, 2:] - found[:, :2]).T
    assert found.min() >= 0
    assert found.max() <= 40
    shares, ratios = across * down / 1600, across / down
    assert (shares.min(), shares.max()) == pytest.approx((0.25, 1), abs=0.06)
    assert (ratios.min(), ratios.max()) == pytest.approx((3 / 4, 4 / 3), abs=0.01)
    assert RandomBox(1)(60, 40) == (0, 0, 60, 40)
    assert MiddleBox(0.5)(60, 40) == (20, 10, 40, 30)


def _refused(folder, *settings):
    with pytest.raises(InputError) as error:
        read_inputs(read_job(folder / "job.toml", list(settings)), print)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_sources_that_can_t_be_read_are_refused(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    (tmp_path / "empty").mkdir()
    for source in ("nowhere", tmp_path / "empty", "python-stdlib"):
        assert "has no images" in _refused(folder, f"data.source={source}")
    assert "has 2 classes of images" in _refused(folder, "model.num_classes=1")
    assert "is none" in _refused(folder, "data.eval_fraction=1e-9")
    shutil.copytree(folder / "photos", tmp_path / "val" / "x")
    others = (f"data.images.eval_source={tmp_path / 'val'}", "data.eval_fraction=0.01")
    assert "is of class 'x'" in _refused(folder, *others)

    whole = write_shard(tmp_path / "whole.tar", range(4)).read_bytes()
    for name, content in {"cut": whole[:3000], "none": b"x" * 2048, "small": b""}.items():
        (tmp_path / f"{name}.tar").write_bytes(content)
        assert "is no whole tar" in _refused(folder, f"data.source={tmp_path / name}.tar")
    with tarfile.open(tmp_path / "packed.tar", "w:gz") as tar:
        tar.add(folder / "photos")
    assert "without compression" in _refused(folder, f"data.source={tmp_path / 'packed.tar'}")
    (tmp_path / "bad.tar").write_bytes(whole.replace(b"1" + bytes(511), b"?" + bytes(511)))
    assert "no number of a class" in _refused(folder, f"data.source={tmp_path / 'bad.tar'}")


def test_a_damaged_image_is_named(folder, tmp_path):
    shutil.copytree(folder / "photos", tmp_path / "photos")
    file = tmp_path / "photos" / "across" / "003.jpg"
    raw = file.read_bytes()
    for content in (b"", raw[:200], b"x" * 500):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"003\.jpg can't be read as an image"):
            _pixels(find_images(str(tmp_path / "photos"), "data.source"), 3)


# ---- steps ---------------------------------------------------------------------------------------


def _job(folder, num_ranks: int, *settings: str) -> Job:
    machine = Cluster(device=CPU, devices_per_node=num_ranks, num_nodes=1)
    source = f"data.source={folder / 'photos'}"
    here = [source, f"cluster.devices_per_node={num_ranks}", *FP64]
    return resolve(read_job(folder / "job.toml", [*here, *settings]), machine).job


def _trained(rank: int, num_ranks: int, folder, *settings: str):
    """Losses of three steps, and loss and accuracy of what is held out."""
    place = Ranks(rank, num_ranks, rank, num_ranks, "cpu")
    job = _job(folder, num_ranks, *settings)
    task = task_of(job, place)
    trainer = Trainer.of(job, place, task)
    steps = task.steps_from(0)
    found = [trainer.step(index, next(steps))().loss for index in range(3)]
    loss, _ = trainer.evaluate(task.eval_steps())
    return [*found, loss, task.eval_figures()["eval_accuracy"]]


def test_steps_are_those_of_a_plain_loop(folder):
    job = _job(folder, 1, "layout.micro_batch=8")
    task = task_of(job, Ranks())
    trainer = Trainer.of(job, Ranks(), task)
    plain = of_config(torchvision_config(job.model)).double()
    plain.load_state_dict(torchvision_state(job.model, trainer.module.state_dict()))
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 1e-4}, {"params": vectors}]
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    scale = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]
    mean, deviation = torch.tensor(scale, dtype=torch.float64)
    for index, step in enumerate(islice(task.steps_from(0), 4)):
        [part] = step
        pixels, labels = part.batch
        images = ((pixels.double() / 255 - mean) / deviation).permute(0, 3, 1, 2)
        loss = F.cross_entropy(plain(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step(index, step)().loss == pytest.approx(loss.item(), rel=1e-8)


def test_two_ranks_are_equal_to_one(folder):
    """With statistics of all ranks as one with all images; with their own as one rank that sees
    their images one after the other."""
    together = ("layout.sync_batch_norm=true", "layout.micro_batch=4")
    [whole, halves] = (
        _trained(0, 1, folder, f"layout.micro_batch={size}", "data.images.workers=0")
        for size in (8, 4)
    )
    for found in run_ranks(_trained, 2, folder, *together):
        assert found == pytest.approx(whole, rel=1e-8)
    for found in run_ranks(_trained, 2, folder, "layout.micro_batch=4"):
        assert found[:3] == pytest.approx(halves[:3], rel=1e-8)
    assert whole[0] != pytest.approx(halves[0], rel=1e-4)


def test_parts_and_mirrors_are_others_in_each_epoch_and_the_same_again(folder):
    task = task_of(_job(folder, 1), Ranks())

    def read(first, count):
        steps = islice(task.steps_from(first), count)
        return torch.cat([part.batch[0] for step in steps for part in step])

    num = task.facts["data"]["images"]
    whole = read(0, 2 * num // 8)
    assert torch.equal(read(24, 2), whole[24:40])
    assert not any(torch.equal(one, two) for one in whole[:8] for two in whole[num : 2 * num])


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_trains_on_goes_on_and_tells_what_it_reached(folder):
    workers = ("--set", "data.images.workers=1")
    done = paceline("train", "job.toml", *ranks(1), folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "images of 2 classes" in done.stdout
    whole = metrics(folder, "stripes")[-1]
    assert 0 <= whole["eval_accuracy"] <= 1
    for more in ((), workers):
        short = ("--set", "name=again", "--set", "train.steps=3", "--fresh")
        assert paceline("train", "job.toml", *short, *ranks(1), folder=folder).returncode == 0
        done = paceline("train", "job.toml", *short[:2], *more, *ranks(1), folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        assert losses(folder, "again") == losses(folder, "stripes")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.source=images"], "label_smoothing = 0.1 is of images in files"),
        (["data.images.eval_source=val"], "data.eval_fraction = 0.3 has no effect"),
    ],
)
def test_settings_without_effect_are_refused(folder, settings, words):
    with pytest.raises(InputError, match=words):
        read_job(folder / "job.toml", settings)
