"""The main job on a CUDA device: the same command, NCCL, bf16 (processes; skips without a GPU)."""

import pytest
import torch

from tests.command_line import losses, metrics, paceline, write_tiny_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_trains_on_every_device_and_resumes(precision, tmp_path):
    write_tiny_job(tmp_path)
    num = torch.cuda.device_count()
    settings = ("--set", f"layout.precision={precision}", "--set", f"train.global_batch={12 * num}")
    first = paceline("train", "job.toml", *settings, "--set", "train.steps=6", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    again = paceline("train", "job.toml", *settings, "--set", "train.steps=9", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "going on after step 6" in again.stdout
    values = list(losses(tmp_path).values())
    assert len(values) == 9
    assert values[-1] < values[0]


@pytest.mark.parametrize("setting", ["layout.compile=true", "layout.recompute=selective"])
def test_switches_follow_the_plain_run(setting, tmp_path):
    runs = {}
    for name, extra in {"plain": (), "switched": ("--set", setting)}.items():
        folder = tmp_path / name
        folder.mkdir()
        write_tiny_job(folder)
        precision = ("--set", "layout.precision=fp32")
        done = paceline("train", "job.toml", *precision, *extra, folder=folder, timeout_s=280)
        assert done.returncode == 0, done.stderr
        runs[name] = list(losses(folder).values())
    assert runs["switched"] == pytest.approx(runs["plain"], rel=1e-4)


def test_profiled_steps_are_accounted_for_on_the_device(tmp_path):
    write_tiny_job(tmp_path)
    done = paceline("train", "job.toml", "--set", "observe.profile_every=6", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    profiled = [line for line in metrics(tmp_path) if line["profiled"]]
    assert profiled
    for line in profiled:
        assert sum(line["terms"].values()) == pytest.approx(line["step_time_s"])
        assert line["terms"]["matmul"] > 0
        assert line["terms"]["unattributed"] < 0.05 * line["step_time_s"]
