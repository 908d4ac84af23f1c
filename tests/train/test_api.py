"""paceline.train: a person's own module and data.

In this process first (one rank: the contract, refusals, resuming), then on gloo ranks through a
script, which `paceline.train` starts again once per rank.
"""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.train.custom.task import custom_task
from paceline.train.custom.user_inputs import UserInputs
from tests.command_line import losses, python
from tests.ranks import run_ranks
from tests.train import api_cases, api_script

SCRIPT = api_script.__file__
ONE_RANK = {"devices_per_node": 1}


pytestmark = pytest.mark.usefixtures("as_if_alone")


def _here(folder: Path, sections: dict[str, Any] | None = None, **settings: Any):
    """Train on one rank in this process."""
    job = {"cluster": ONE_RANK, **(sections or {})}
    return api_script.train({"job": job, **settings}, folder / "runs")


def _script(folder: Path, num_ranks: int, *trainings: dict[str, Any]):
    """Train on ranks, once for each of the settings; return the finished process."""
    cluster = {"cluster": {"devices_per_node": num_ranks}}
    settings = [{**one, "job": {**cluster, **one.get("job", {})}} for one in trainings]
    return python(SCRIPT, *map(json.dumps, settings), folder=folder)


def _on_ranks(folder: Path, num_ranks: int, **settings: Any):
    """Step -> loss, and the weights that the script's module held afterwards."""
    done = _script(folder, num_ranks, settings)
    assert done.returncode == 0, done.stderr
    return losses(folder, "own"), torch.load(folder / "own.pt")


def _assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_a_job_of_plain_dicts_trains_and_the_module_holds_the_weights(tmp_path):
    before = api_script.module("plain").state_dict()
    run, model = _here(tmp_path)
    assert isinstance(run, paceline.Run)
    got = losses(tmp_path, "own")
    assert len(got) == 8
    assert got[8] < got[1]
    assert run.metrics()[-1]["eval_loss"] > 0
    assert run.report_file.is_file()
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_the_job_may_be_a_file_or_a_job(tmp_path):
    (tmp_path / "job.toml").write_text(
        'name = "own"\n[model]\nfamily = "custom"\n[cluster]\ndevices_per_node = 1\n'
        '[optim]\nlr = 1e-2\nschedule = "constant"\n[train]\nsteps = 8\nglobal_batch = 12\n'
    )
    given = (api_script.module("plain"), api_script.loss, api_script.samples())
    paceline.train(tmp_path / "job.toml", *given, runs=tmp_path / "file")
    job = paceline.Run(tmp_path / "file" / "own").job()
    given = (api_script.module("plain"), api_script.loss, api_script.samples())
    again = paceline.train(job, *given, runs=tmp_path / "runs")
    assert again.metrics()[-1]["loss"] == _here(tmp_path / "dict")[0].metrics()[-1]["loss"]


def test_a_dataset_is_shuffled_and_an_iterable_is_not(tmp_path):
    _here(tmp_path / "a")
    _here(tmp_path / "b", data="batches")
    shuffled, in_order = losses(tmp_path / "a", "own"), losses(tmp_path / "b", "own")
    assert len(shuffled) == len(in_order) == 8  # also beyond the 5 batches of one pass
    model = api_script.module("plain")
    with torch.no_grad():
        first = api_script.loss(model, next(iter(api_script.Batches(12))))
    assert in_order[1] == pytest.approx(first.item(), rel=1e-6)
    assert shuffled[1] != pytest.approx(first.item(), rel=1e-3)


def test_recomputing_changes_nothing(tmp_path):
    kept = _here(tmp_path / "kept")[1]
    recomputed = _here(tmp_path / "again", {"layout": {"recompute": "full"}})[1]
    assert losses(tmp_path / "again", "own") == losses(tmp_path / "kept", "own")
    _assert_equal(recomputed.state_dict(), kept.state_dict())


def test_micro_batches_add_up_to_the_batch(tmp_path):
    _here(tmp_path / "whole")
    _here(tmp_path / "cut", {"layout": {"micro_batch": 3}})
    whole = losses(tmp_path / "whole", "own")
    assert losses(tmp_path / "cut", "own") == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("module", ["plain", "batchnorm"])
def test_a_stopped_run_goes_on_as_if_it_never_had(module, tmp_path):
    _, whole = _here(tmp_path / "whole", data="batches", module=module)
    _here(tmp_path, data="batches", module=module, stop_at=3)
    assert len(losses(tmp_path, "own")) == 3
    _, model = _here(tmp_path, data="batches", module=module)
    assert losses(tmp_path, "own") == losses(tmp_path / "whole", "own")
    _assert_equal(model.state_dict(), whole.state_dict())


def test_after_training_a_signal_means_what_it_did_before(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    _here(tmp_path)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("data", ["dataset", "loader"])
def test_a_longer_job_trains_on(data, tmp_path):
    _here(tmp_path, {"train": {"steps": 5}}, data=data)
    _here(tmp_path, data=data)
    _here(tmp_path / "whole", data=data)
    assert losses(tmp_path, "own") == losses(tmp_path / "whole", "own")


def _generator(size: int = 12):
    yield from api_script.Batches(size)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (api_script.Batches(10), "a batch of 10 samples but train.global_batch = 12"),
        (_generator(), "data yields no batches"),
        (api_script.samples(11), "data has 11 samples, fewer than train.global_batch = 12"),
    ],
    ids=["wrong size", "generator", "too few"],
)
def test_data_that_cannot_be_trained_on_is_refused(data, sentence, tmp_path):
    job = {"name": "own", **api_script.JOB, "cluster": ONE_RANK}
    with pytest.raises(InputError, match=sentence):
        paceline.train(job, api_script.module("plain"), api_script.loss, data, runs=tmp_path)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"data": {"source": "text.txt"}}, r"a \[data\] section as well"),
        ({"model": {"family": "castom"}}, "castom"),
        ({"train": 3}, "train = 3 can't be used"),
        ({"comm": {"warmup_steps": 5}}, "comm.warmup_steps = 5 has no effect where nothing is"),
        ({"cluster": {"file": "no.toml"}}, "no.toml"),
        ({"train": {"steps": 4, "global_batch": 7}, "cluster": {"devices_per_node": 2}}, "2 ranks"),
    ],
    ids=["data", "model", "no section", "no effect", "no file", "batch"],
)
def test_a_job_that_does_not_fit_is_refused_and_nothing_is_written(section, sentence, tmp_path):
    job = {"name": "own", **api_script.JOB, "cluster": ONE_RANK, **section}
    given = (api_script.module("plain"), api_script.loss, api_script.samples())
    with pytest.raises(InputError, match=sentence):
        paceline.train(job, *given, runs=tmp_path / "runs")
    assert not (tmp_path / "runs" / "own").exists()


def test_settings_without_effect_are_refused_in_a_job_as_in_its_dicts(tmp_path):
    given = (api_script.module("plain"), api_script.loss, api_script.samples())
    raw = {"model": {"family": "custom"}, **api_script.JOB, "comm": {"compress_from": 7}}
    with pytest.raises(InputError, match="compress_from = 7 has no effect"):
        paceline.train(paceline.JobSpec.parse(raw), *given, runs=tmp_path)


def test_a_built_in_model_beside_a_module_is_refused(tmp_path):
    given = (api_script.module("plain"), api_script.loss, api_script.samples())
    job = paceline.JobSpec.parse(
        {
            "model": {
                "family": "decoder",
                "vocab_size": 64,
                "hidden_size": 8,
                "ffn_size": 16,
                "num_layers": 1,
                "num_heads": 2,
                "max_seq_len": 8,
            },
            "train": {"steps": 1, "global_batch": 2, "seq_len": 8},
        }
    )
    with pytest.raises(InputError, match="describes another"):
        paceline.train(job, *given, runs=tmp_path)


# --- on gloo ranks --------------------------------------------------------------------------------


def _assert_as_alone(folder: Path, name: str, alone: torch.nn.Module) -> None:
    """The script's training is that of one rank in runs/<name> of the folder "alone"."""
    wanted = losses(folder / "alone", name)
    assert losses(folder, name) == pytest.approx(wanted, rel=1e-5)
    weights = torch.load(folder / f"{name}.pt")
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-5)


def _weights_at_start(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(rank)
    module, ranks = torch.nn.Linear(2, 1), Ranks(rank, world_size, rank, world_size)
    brought = UserInputs(module, api_script.loss, api_script.samples())
    task = custom_task(api_cases.job_of(world_size, {"micro_batch": 6}), ranks, brought)
    return task.module.weight.flatten().tolist()


def test_ranks_whose_modules_differ_start_from_that_of_rank_0():
    first, second = run_ranks(_weights_at_start, 2)
    assert first == second


def test_a_script_that_trains_twice_trains_on_two_ranks_as_on_one(tmp_path):
    """Global batches, then a loader that shuffles and tied weights."""
    trainings = (
        {"name": "own", "data": "batches"},
        {"name": "tied", "module": "tied", "data": "loader"},
    )
    alone = [_here(tmp_path / "alone", **training)[1] for training in trainings]
    done = _script(tmp_path, 2, *trainings)
    assert done.returncode == 0, done.stderr
    _assert_as_alone(tmp_path, "own", alone[0])
    _assert_as_alone(tmp_path, "tied", alone[1])


def test_shards_recomputed_train_as_one_rank_does(tmp_path):
    _, alone = _here(tmp_path / "alone")
    _on_ranks(tmp_path, 2, job={"layout": {"fsdp": 2, "recompute": "full"}})
    _assert_as_alone(tmp_path, "own", alone)


def test_batch_norm_on_two_ranks_goes_on_bit_identically(tmp_path):
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    settings = {"data": "batches", "module": "batchnorm"}
    whole, weights = _on_ranks(tmp_path / "whole", 2, **settings)
    done, _ = _on_ranks(tmp_path / "stopped", 2, **settings, stop_at=3)
    assert len(done) == 3
    resumed, resumed_weights = _on_ranks(tmp_path / "stopped", 2, **settings)
    assert resumed == whole
    _assert_equal(resumed_weights, weights)


def test_what_a_rank_refuses_reaches_the_person(tmp_path):
    done = _script(tmp_path, 2, {"data": "batches", "size": 10})
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: data yielded a batch of 10 samples")
    assert done.stderr.count("\n") == 1


def test_a_failing_evaluation_loses_no_trained_step(tmp_path):
    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if not model.training:
            raise ValueError("no held-out loss today")
        return model(batch).square().mean()

    job = {
        "name": "failing",
        "cluster": ONE_RANK,
        "train": {"steps": 3, "global_batch": 4},
        "checkpoint": {"every": 0},
        "observe": {"profile_every": 0},
    }
    data = torch.arange(32.0).reshape(8, 4)
    with pytest.raises(ValueError, match="no held-out loss today"):
        paceline.train(job, torch.nn.Linear(4, 2), loss, data, data, runs=tmp_path)
    run = tmp_path / "failing"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert "eval_loss" not in steps[-1]
    assert (run / "checkpoints" / "step-3").is_dir()
