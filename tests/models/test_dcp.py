"""Folders of torch's DCP: to the bit there and back, and nothing that they say is run."""

import io
import os
import pickle
import resource
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

from paceline.config.errors import InputError
from paceline.config.job import change_job, read_job
from paceline.config.model import Model
from paceline.models.dcp import METADATA, DcpFolder, check_dcp, load_dcp
from paceline.models.dcp_names import halves
from paceline.models.decoder import Decoder
from paceline.observe.run import Run
from paceline.train.checkpoint.loading import newest_good
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.command import train_job
from paceline.train.export import export_dcp
from paceline.train.export import load as load_run
from paceline.train.kept_weights import room_for
from tests.command_line import paceline
from tests.ranks import run_ranks
from tests.small_job import work_in, write_small_job

SHAPES = {
    "family": "decoder",
    "vocab_size": 31,
    "hidden_size": 16,
    "ffn_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 32,
}


def decoder(seed: int = 0, **changes: Any) -> Decoder:
    network = Decoder(Model.parse({**SHAPES, **changes}))
    network.init_weights(torch.Generator().manual_seed(seed))
    return network


def write(folder: Path, state: dict[str, Any]) -> Path:
    with quiet():
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warning that one process writes or reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def same(one: Decoder, other: Decoder) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


# ---- there and back ------------------------------------------------------------------------------


def test_a_run_goes_through_dcp_to_the_bit(tmp_path, monkeypatch):
    work_in(tmp_path, monkeypatch)
    run = Run(tmp_path / "runs" / "small")
    job = read_job(write_small_job(tmp_path))
    train_job(job, run, fresh=False)
    folder = tmp_path / "dcp"
    assert export_dcp(run, folder) == 4
    network, expected = Decoder(run.job().model), Decoder(run.job().model)
    load_run(run, expected)
    load_dcp(network, folder)
    assert same(network, expected)
    # torch reads it, optimizer state among it.
    found, _ = newest_good(run.checkpoint_folder, LockstepRanks.alone(), print)
    entries = room_for(found, "optimizer")
    names = [name for name, _ in network.named_parameters()]
    state = {
        name: {
            key.removeprefix(f"{name}."): torch.full_like(room, 7)
            for key, room in entries.items()
            if key.startswith(f"{name}.")
        }
        for name in names
    }
    target = {
        "model": {name: torch.zeros_like(each) for name, each in network.state_dict().items()},
        "optimizer": {"state": state},
    }
    with quiet():
        load(target, storage_reader=FileSystemReader(folder), no_dist=True)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(target["model"][name], tensor)
    first = state[names[0]]
    assert {"exp_avg", "exp_avg_sq", "step"} <= first.keys()
    assert first["step"] == 4
    assert not torch.equal(first["exp_avg"], torch.full_like(first["exp_avg"], 7))
    # Nothing says where it was written.
    assert str(tmp_path).encode() not in (folder / METADATA).read_bytes()
    # Training starts from it: without a step of any size nothing changes.
    again = change_job(job, [f"train.weights={folder}", "optim.lr=1e-30", "train.steps=1"])
    train_job(again, Run(tmp_path / "runs" / "again"), fresh=False)
    load_run(Run(tmp_path / "runs" / "again"), network)
    assert same(network, expected)


def test_adapters_are_not_left_out_in_silence(tmp_path):
    adapter = {"blocks.0.attention.q_proj.lora_a.weight": torch.ones(2, 16)}
    folder = write(tmp_path / "dcp", {"model": {**decoder().state_dict(), **adapter}})
    with pytest.raises(InputError, match=r"lora_a\.weight in .* where they are merged\.$"):
        check_dcp(decoder().model, folder)


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    work_in(tmp_path, monkeypatch)
    run = Run(tmp_path / "runs" / "small")
    train_job(read_job(write_small_job(tmp_path)), run, fresh=False)
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    try:
        with pytest.raises(InputError, match=r"^[^\n]*dcp can't be written \([^\n]*room enough\.$"):
            export_dcp(run, tmp_path / "dcp")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert not [path for path in tmp_path.iterdir() if "dcp" in path.name]


def _save_sharded(rank: int, world_size: int, folder: str) -> None:
    network = decoder()
    for block in network.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (world_size,)))
    fully_shard(network, mesh=init_device_mesh("cpu", (world_size,)))
    save({"model": network.state_dict()}, storage_writer=FileSystemWriter(folder))


def test_chunks_of_several_ranks_are_put_together(tmp_path):
    run_ranks(_save_sharded, 2, str(tmp_path / "dcp"))
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    network = decoder(seed=1)
    load_dcp(network, tmp_path / "dcp")
    assert same(network, decoder())


def test_names_without_a_section_and_a_tied_head_are_read(tmp_path):
    write(tmp_path / "dcp", {**decoder(tie_embeddings=True).state_dict(), "step": 3})
    network = decoder(seed=1, tie_embeddings=True)
    load_dcp(network, tmp_path / "dcp")
    assert same(network, decoder(tie_embeddings=True))


def test_halves_turn_as_neighbours_do():
    weight, x = torch.randn(2 * 8, 5, dtype=torch.double), torch.randn(3, 5, dtype=torch.double)
    angle = torch.arange(3.0, dtype=torch.double)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    pairs = torch.view_as_complex((x @ weight.T).unflatten(1, (2, 4, 2)))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None])
    a, b = (x @ halves(weight, 2).T).unflatten(1, (2, 2, 4)).unbind(2)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    ours = torch.stack([a * cos - b * sin, b * cos + a * sin], -1)
    torch.testing.assert_close(ours, turned)


def test_the_command_refuses_what_does_not_go_together(tmp_path):
    for options, words in (
        (("--format", "dcp", "--dtype", "bf16"), "keeps the run's types"),
        (("--format", "pickle"), "is not one of safetensors, dcp, gguf, peft, "),
    ):
        done = paceline("export", "runs/none", "out", *options, folder=tmp_path)
        assert done.returncode == 2
        assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


# ---- hostile and damaged -------------------------------------------------------------------------


class Runs:
    """Runs something where it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.what = function, arguments

    def __reduce__(self) -> Any:
        return self.what


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "dcp", {"model": decoder().state_dict()})


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (os.system, ("touch ran",)),
        (eval, ("open('ran', 'w')",)),
        (getattr, (os, "system")),
        (subprocess.run, (["touch", "ran"],)),
        (torch.load, ("ran",)),
        (pickle.loads, (b"",)),
        (shutil.rmtree, ("dcp",)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_metadata_file_that_would_run_something_is_refused(
    function, arguments, folder, monkeypatch
):
    monkeypatch.chdir(folder.parent)
    metadata = pickle.loads((folder / METADATA).read_bytes())
    if function is getattr:
        arguments = (io.BytesIO, "read")
    metadata.planner_data = Runs(function, *arguments)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match=r"\(it names .*, which no metadata of DCP's does\)"):
        check_dcp(decoder().model, folder)
    assert [path.name for path in folder.parent.iterdir()] == ["dcp"]


def test_a_metadata_file_changes_no_class_of_torch(folder):
    """A pickle may give state to a class as well as to what is made of it."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    # Metadata, (None, {"planner_data": Metadata}): set as attributes of the class.
    hostile = name + b"(N}X\x0c\x00\x00\x00planner_data" + name + b"stb."
    (folder / METADATA).write_bytes(hostile)
    before = dict(vars(Metadata))
    with pytest.raises(InputError, match="is refused"):
        DcpFolder(folder)
    assert dict(vars(Metadata)) == before
    pickle.loads(hostile)  # what an unpickler that knows torch's classes does
    try:
        assert dict(vars(Metadata)) != before
    finally:
        Metadata.planner_data = before["planner_data"]


@pytest.mark.parametrize(
    "data", [b"", b"no pickle", pickle.dumps(3), pickle.dumps({"a": [1]})], ids=range(4)
)
def test_what_is_no_metadata_is_one_sentence(data, folder):
    (folder / METADATA).write_bytes(data)
    with pytest.raises(InputError, match=r"^[^\n]*is refused \([^\n]*checkpoint wrote\.$"):
        check_dcp(decoder().model, folder)


def test_a_chunk_outside_the_folder_is_refused(folder):
    metadata = pickle.loads((folder / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../{info.relative_path}"
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match="which is no name"):
        load_dcp(decoder(), folder)


def test_a_chunk_that_would_run_something_is_refused(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (file,) = folder.glob("*.distcp")
    hostile = io.BytesIO()
    torch.save(Runs(os.system, "touch ran"), hostile)
    metadata = pickle.loads((folder / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(hostile.getvalue())
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    file.write_bytes(hostile.getvalue())
    with pytest.raises(InputError, match=r"^[^\n]*is damaged at [^\n]*copy it anew\.$"):
        load_dcp(decoder(), folder)
    assert not Path("ran").exists()


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_file_that_was_cut_off_is_one_sentence(size, folder):
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(InputError, match=r"^[^\n]*is damaged at [^\n]*copy it anew\.$"):
        load_dcp(decoder(), folder)


def test_other_networks_and_other_names_are_refused(folder, tmp_path):
    with pytest.raises(InputError, match="has shape"):
        check_dcp(decoder(ffn_size=48).model, folder)
    with pytest.raises(InputError, match=r"blocks\.2\..* is missing"):
        check_dcp(decoder(num_layers=3).model, folder)
    with pytest.raises(InputError, match=r"blocks\.1\..* is not part of the model: "):
        check_dcp(decoder(num_layers=1).model, folder)
    write(tmp_path / "other", {"decoder.layers.0.weight": torch.zeros(2)})
    with pytest.raises(InputError, match=r"has no tensor model\.embed\.weight"):
        check_dcp(decoder().model, tmp_path / "other")
