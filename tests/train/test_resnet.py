"""A ResNet through the ordinary run: its images (pure), its steps on gloo ranks, the command."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import Job, read_job
from paceline.config.vision import ResNet
from paceline.plan.resolve import resolve
from paceline.train.checkpoint.state import parameter_names
from paceline.train.data.images import samples
from paceline.train.families import task_of
from paceline.train.start import read_inputs
from paceline.train.synthetic import EVAL_START
from paceline.train.this_machine import why_only_planned
from paceline.train.trainer import Trainer
from tests.command_line import metrics, paceline
from tests.parallel.training import CPU, whole_tensor
from tests.ranks import run_ranks
from tests.train.judged import must_be_told_before

JOB = """
name = "textures"
[model]
family = "resnet"
depth = 18
image_size = 32
num_classes = 4
[data]
source = "images"
[cluster]
devices_per_node = 1
[train]
steps = 3
global_batch = 8
eval_batches = 1
[optim]
eps = 1e-3
[checkpoint]
every = 0
"""
FP64 = ("layout.precision=fp64", "layout.param_dtype=fp64")


@pytest.fixture(scope="module")
def job_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("jobs") / "job.toml"
    file.write_text(JOB)
    return file


# ---- images --------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, EVAL_START), min_size=2, max_size=6), st.integers(0, 2**31))
def test_a_sample_is_a_function_of_seed_and_index_alone(indices, seed):
    model = ResNet(image_size=32, num_classes=4)
    together = samples(model, seed, np.array(indices))
    alone = samples(model, seed, np.array(indices[-1:]))
    assert np.array_equal(together.images[-1:], alone.images)
    assert together.labels[-1] == alone.labels[0]
    others = samples(model, seed, np.array(indices) + 1)
    for other in (samples(model, seed + 1, np.array(indices)), others):
        assert not np.array_equal(other.images, together.images)


def test_classes_hide_in_phases_and_show_in_spectra():
    """Pixels alone tell nothing; the strengths of frequencies, which filters see, nearly all."""
    model = ResNet(image_size=32, num_classes=4)
    train, held_out = (samples(model, 5, np.arange(400) + first) for first in (0, EVAL_START))
    assert np.bincount(train.labels, minlength=4).min() > 60
    assert train.images.mean() == pytest.approx(0, abs=0.01)
    assert train.images.var() == pytest.approx(2, rel=0.1)
    assert _right(lambda images: images.reshape(len(images), -1), train, held_out) < 0.5
    assert (
        _right(
            lambda images: np.abs(np.fft.fft2(images)).reshape(len(images), -1), *(train, held_out)
        )
        > 0.95
    )


def _right(features, train, held_out) -> float:
    """Share of held-out images whose class has the nearest mean of features."""
    seen = features(train.images)
    means = np.stack([seen[train.labels == label].mean(axis=0) for label in range(4)])
    distances = ((features(held_out.images)[:, None] - means) ** 2).sum(axis=2)
    return (distances.argmin(axis=1) == held_out.labels).mean()


# ---- steps ---------------------------------------------------------------------------------------


def _job(file: Path, num_ranks: int, *overrides: str) -> Job:
    machine = Cluster(device=CPU, devices_per_node=num_ranks, num_nodes=1)
    here = f"cluster.devices_per_node={num_ranks}"
    return resolve(read_job(file, [here, *overrides]), machine).job


def _trained(rank: int, num_ranks: int, file: Path, overrides: list[tuple[str, ...]]) -> list:
    """Losses, parameters and buffers after two steps, for each list of overrides."""
    found = []
    for changes in overrides:
        job = _job(file, num_ranks, *changes)
        ranks = Ranks(rank, num_ranks, rank, num_ranks, "cpu")
        task = task_of(job, ranks)
        trainer = Trainer.of(job, ranks, task)
        steps = task.steps_from(0)
        losses = [trainer.step(index, next(steps))().loss for index in range(2)]
        names, _ = parameter_names(trainer.module)
        held = {name: whole_tensor(p) for p, name in names.items()}
        buffers = {
            name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""): buffer.clone()
            for name, buffer in trainer.module.named_buffers()
        }
        found.append((losses, held, buffers))
    return found


class _Compared(NamedTuple):
    """What of a rank's two steps leaves its process: parameters take 90 MB."""

    losses: list[float]
    apart: list[str]
    """Parameters and buffers that are not those of one process."""
    digest: str
    """Of all their bits."""


def _compared(
    rank: int, num_ranks: int, file: Path, overrides: list[tuple[str, ...]], alone: Path
) -> list[_Compared]:
    """`_trained`, each against the parameters and buffers that are saved in `alone`."""
    wanted = torch.load(alone)
    found = []
    for losses, *held in _trained(rank, num_ranks, file, overrides):
        digest = hashlib.blake2b()
        apart = []
        for got, expected in zip(held, wanted, strict=True):
            assert got.keys() == expected.keys()
            for name, value in got.items():
                digest.update(value.contiguous().view(-1).view(torch.uint8).numpy())
                if not torch.allclose(value, expected[name].to(value.dtype), 1e-10, 1e-12):
                    apart.append(name)
        found.append(_Compared(losses, apart, digest.hexdigest()))
    return found


def test_two_ranks_step_as_one_does_that_sees_their_images_one_after_the_other(job_file, tmp_path):
    """A micro-batch has its own statistics on whichever rank: the serial step accumulates."""
    [(losses, parameters, buffers)] = _trained(0, 1, job_file, [(*FP64, "layout.micro_batch=4")])
    torch.save((parameters, buffers), tmp_path / "alone")
    exact = [FP64, (*FP64, "comm.dp.algorithm=ring"), (*FP64, "layout.fsdp=2", "layout.zero=3")]
    bf16 = "layout.precision=bf16"
    [(rounded, _, _)] = _trained(0, 1, job_file, [(bf16, "layout.micro_batch=4")])
    lossy = (bf16, "comm.dp.compress=int8", "layout.bucket_mib=2")
    both = run_ranks(_compared, 2, job_file, [*exact, lossy], tmp_path / "alone")
    for *of_exact, coded in both:
        for got in of_exact:
            assert got.losses == pytest.approx(losses, rel=1e-10)
            assert set(got.apart) <= buffers.keys(), "each rank has statistics of its own images"
        assert coded.losses == pytest.approx(rounded, rel=0.05)
        assert set(coded.apart) >= parameters.keys()
    for one, other in zip(*both, strict=True):
        assert one.losses == other.losses
        assert one.digest == other.digest


def test_running_means_are_those_of_all_ranks_images(job_file):
    """Of the first norm, before which nothing is normalised; weights stay where they are."""
    still = ("optim.lr=1e-30", *FP64)
    [(_, _, alone)] = _trained(0, 1, job_file, [(*still, "layout.micro_batch=8")])
    for [(_, _, kept)] in run_ranks(_trained, 2, job_file, [still]):
        mean, all_images = kept["stem.norm.running_mean"], alone["stem.norm.running_mean"]
        torch.testing.assert_close(mean, all_images, rtol=1e-10, atol=1e-12)


SYNCHRONISED = (*FP64, "layout.sync_batch_norm=true", "layout.micro_batch=4")


def test_synchronised_norms_equal_one_rank_with_all_images(job_file, tmp_path):
    """Losses, parameters and running statistics, with gradients of ours on their way meanwhile."""
    [(losses, *held)] = _trained(0, 1, job_file, [(*FP64, "layout.micro_batch=8")])
    torch.save(held, tmp_path / "alone")
    cases = [
        SYNCHRONISED,
        (*SYNCHRONISED, "comm.dp.algorithm=ring", "layout.bucket_mib=1"),
        (*SYNCHRONISED, "layout.fsdp=2", "layout.zero=2", "layout.recompute=full"),
    ]
    for of_rank in run_ranks(_compared, 2, job_file, cases, tmp_path / "alone"):
        for got in of_rank:
            assert got.losses == pytest.approx(losses, rel=1e-10)
            assert got.apart == []


def test_images_of_16_bit_steps_have_their_channels_together(job_file):
    for precision, is_last in (("fp32", False), ("bf16", True)):
        job = _job(job_file, 1, f"layout.precision={precision}")
        task = task_of(job, Ranks())
        (batch,) = next(task.steps_from(0))
        task.loss(_Looking(is_last), batch)


class _Looking(torch.nn.Module):
    """Looks at how the images lie that it is given; its logits are four numbers."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert images.is_contiguous(memory_format=torch.channels_last) == self.is_last
        return F.pad(images.mean(dim=(2, 3)), (0, 1))


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_trains_evaluates_and_goes_on(job_file, tmp_path):
    done = paceline("train", str(job_file), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    last = metrics(tmp_path, "textures")[-1]
    assert last["samples"] == 24
    assert 0 <= last["eval_accuracy"] <= 1
    must_be_told_before(tmp_path, "textures")
    again = paceline("train", str(job_file), "--set", "train.steps=4", folder=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "going on after step 3 of 4" in again.stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("layout.precision=fp8", 'layout.precision = "fp8" has no effect on convolutions'),
        ("layout.micro_batch=1", "leaves the last batch norms one value a channel"),
        ("layout.tp=2", "layout.tp = 2 needs a model that Paceline knows the layers of"),
    ],
)
def test_layouts_that_a_resnet_can_t_have_are_refused_in_one_sentence(job_file, change, words):
    with pytest.raises(InputError) as error:
        _job(job_file, 2, change)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_networks_and_sources_without_a_training_are_refused(job_file):
    job = read_job(job_file, ["model.squeeze_excite=true"])
    assert "can be planned, not trained yet" in why_only_planned(job)
    with pytest.raises(InputError, match="has no images"):
        read_inputs(read_job(job_file, ["data.source=python-stdlib"]), print)
