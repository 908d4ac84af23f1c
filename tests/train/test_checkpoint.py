"""Saving and finding checkpoints: pure functions first, then one process, then a killed process."""

import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from paceline.config.errors import InputError
from paceline.train.checkpoint import checkpointer as checkpointer_module
from paceline.train.checkpoint.checkpointer import Checkpointer, _Retention
from paceline.train.checkpoint.files import (
    DTYPES,
    FORMAT_VERSION,
    Chunk,
    DamagedError,
    FileEntry,
    Manifest,
    TensorEntry,
    decode_manifest,
    encode_manifest,
    write_shard,
)
from paceline.train.checkpoint.found import read_part
from paceline.train.checkpoint.leaves import leaves
from paceline.train.checkpoint.loading import newest_good
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.checkpoint.plan import RankState, divide_writes
from paceline.train.checkpoint.regions import Region
from tests.train import checkpoint_cases as cases
from tests.train.checkpoint_cases import opened


def manifest(**changes: Any) -> Manifest:
    chunk = Chunk(offsets=[0], sizes=[2], file="rank0.safetensors")
    whole_manifest: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "step": 7,
        "facts": {"seed": 3, "loss": 0.1},
        "values": {"lr": 1e-3},
        "files": {"rank0.safetensors": FileEntry(size_bytes=8, sha256="ab")},
        "tensors": {"w": TensorEntry(dtype="F32", size=[2], chunks=[chunk])},
    }
    return Manifest(**{**whole_manifest, **changes})


# Pure functions.


def test_manifest_survives_the_round_trip():
    assert decode_manifest(encode_manifest(manifest()), 7) == manifest()


def test_no_flipped_bit_of_a_manifest_passes():
    raw = encode_manifest(manifest())
    for position in range(len(raw)):
        flipped = bytearray(raw)
        flipped[position] ^= 1
        with pytest.raises(DamagedError):
            decode_manifest(bytes(flipped), 7)


@pytest.mark.parametrize(
    ("changes", "step", "wrong"),
    [
        ({"format": FORMAT_VERSION + 1}, 7, "format 1"),
        ({}, 8, "belongs to step 7"),
        ({"files": {"../../etc/passwd": FileEntry(size_bytes=1, sha256="")}}, 7, "passwd"),
        ({"files": {}}, 7, "rank0.safetensors"),
    ],
)
def test_a_wrong_manifest_is_refused_with_the_reason(changes, step, wrong):
    with pytest.raises(DamagedError, match=wrong):
        decode_manifest(encode_manifest(manifest(**changes)), step)


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b"\xff\x00", b'{"manifest":{}}', b"[" * 9999])
def test_what_is_no_manifest_is_refused(raw):
    with pytest.raises(DamagedError):
        decode_manifest(raw, 7)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "damaged", "removed"),
    [
        (1, None, set(), [10, 20, 25]),
        (2, None, set(), [10, 20]),
        (1, 20, set(), [10, 25]),
        (2, None, {25}, [10, 25]),
        (9, None, set(), []),
    ],
)
def test_which_checkpoints_stay(keep_last, keep_every, damaged, removed):
    keeping = _Retention(keep_last, keep_every, damaged=damaged)
    assert keeping.to_remove([10, 20, 25, 30], newest=30) == removed


def test_the_checkpoint_just_written_stays_even_among_later_ones():
    assert 10 not in _Retention(1, None).to_remove([10, 900], newest=10)


def test_replicated_tensors_are_divided_over_the_ranks_that_hold_them():
    offer = RankState.of({"a": torch.zeros(8), "b": torch.zeros(8), "lr": 0.1})
    shares = divide_writes([offer.asked, offer.asked])
    assert [[item.index.fqn for item in share.items] for share in shares] == [["a"], ["b"]]
    assert [share.value_names for share in shares] == [["lr"], []]
    assert shares[0].tensors["b"].chunks[0].file == "rank1.safetensors"


def test_names_of_a_state_must_be_text_and_differ():
    with pytest.raises(InputError, match=r"named a\.b"):
        leaves({"a.b": 1, "a": {"b": 2}})
    with pytest.raises(InputError, match="key 0"):
        leaves({"a": {0: 1}})


# One process.


def every_kind_of_tensor() -> dict[str, Tensor]:
    random_bytes = torch.randint(0, 256, (64,), dtype=torch.uint8)
    tensors = {
        name: (random_bytes % 2).bool() if dtype == torch.bool else random_bytes.view(dtype)
        for name, dtype in DTYPES.items()
    }
    return tensors | {
        "0-dim": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float64),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "part": torch.arange(12.0)[3:7],
    }


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    saved = every_kind_of_tensor()
    checkpointer = opened(tmp_path)
    checkpointer.save(1, {"model": saved}, {})
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    checkpointer.load(checkpointer.latest_good(), {"model": loaded})
    assert {name: bits(t) for name, t in loaded.items()} == {n: bits(t) for n, t in saved.items()}


@pytest.mark.parametrize("name", DTYPES)
def test_a_part_of_a_chunk_is_read_alone(tmp_path, name):
    whole = every_kind_of_tensor()[name][:8].view(2, 4)
    write_shard(tmp_path / "shard", [("w", whole)])
    part = Region((1, 1), (1, 2))
    with safe_open(tmp_path / "shard", framework="pt") as shard:
        assert bits(read_part(shard, "w", part, [2, 4])) == bits(whole[1:, 1:3])


def test_a_shard_is_a_safetensors_file_that_others_can_read(tmp_path):
    saved = every_kind_of_tensor()
    checkpointer = opened(tmp_path)
    checkpointer.save(1, saved, {})
    checkpointer.finish()
    read = safetensors.torch.load_file(tmp_path / "latest" / "rank0.safetensors")
    assert {name: bits(t) for name, t in read.items()} == {n: bits(t) for n, t in saved.items()}


def test_every_tensor_of_a_shard_is_aligned_to_its_elements(tmp_path):
    tensors = {"bytes": torch.zeros(3, dtype=torch.uint8), "wide": torch.zeros(2).double()}
    write_shard(tmp_path / "shard", tensors.items())
    raw = (tmp_path / "shard").read_bytes()
    end_of_header = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end_of_header])
    for name, tensor in tensors.items():
        assert (end_of_header + header[name]["data_offsets"][0]) % tensor.element_size() == 0


class HeldWrites:
    """Lets no write begin before `go` is set: what training does meanwhile must not be seen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        write = checkpointer_module.write_shard

        def wait_and_write(*args: Any) -> FileEntry:
            assert self.go.wait(30)
            return write(*args)

        monkeypatch.setattr(checkpointer_module, "write_shard", wait_and_write)


def test_what_changes_after_save_returned_is_not_saved(tmp_path, monkeypatch):
    held = HeldWrites(monkeypatch)
    checkpointer = opened(tmp_path)
    state = {"w": torch.ones(5), "betas": [0.9, 0.95]}
    facts = {"cursor": {"shard": 1}}
    checkpointer.save(1, {"model": state}, facts)
    state["w"].fill_(2.0)
    state["betas"][0] = 0.0
    facts["cursor"]["shard"] = 2
    held.go.set()
    found = checkpointer.latest_good()
    loaded = {"w": torch.zeros(5), "betas": (0.0, 0.0)}
    assert checkpointer.load(found, {"model": loaded}) == {"cursor": {"shard": 1}}
    assert loaded["w"].tolist() == [1.0] * 5
    assert loaded["betas"] == (0.9, 0.95)


def test_poll_is_quiet_until_the_save_ends_and_the_next_save_waits_for_it(tmp_path, monkeypatch):
    held, said = HeldWrites(monkeypatch), []
    checkpointer = opened(tmp_path, said)
    assert checkpointer.save(1, {"w": torch.ones(5)}, {}) >= 0
    checkpointer.poll()
    assert said == []
    held.go.set()
    checkpointer.save(2, {"w": torch.ones(5)}, {})
    assert len(said) == 1
    assert said[0].startswith("checkpoint step-1 is saved")
    checkpointer.finish()
    checkpointer.poll()
    assert len(said) == 2


def test_what_writing_takes_of_the_processor_is_told_once(tmp_path):
    checkpointer = opened(tmp_path)
    assert checkpointer.take_cpu_s() == 0
    checkpointer.save(1, {"w": torch.ones(1_000_000)}, {})
    checkpointer.finish()
    assert 0 < checkpointer.take_cpu_s() < 5
    assert checkpointer.take_cpu_s() == 0


def test_only_the_wanted_checkpoints_and_latest_remain(tmp_path):
    checkpointer = opened(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 10):
        checkpointer.save(step, {"w": torch.ones(5)}, {})
    checkpointer.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-4", "step-8", "step-9"]
    assert (tmp_path / "latest").readlink() == Path("step-9")


def test_a_state_of_another_form_is_planned_anew(tmp_path):
    checkpointer = opened(tmp_path)
    for step, state in enumerate([{"a": torch.ones(2)}, {"a": torch.ones(3), "b": torch.ones(1)}]):
        checkpointer.save(step, state, {})
    assert set(checkpointer.latest_good().manifest.tensors) == {"a", "b"}


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpointer = opened(tmp_path)
    for value in (1.0, 2.0):
        checkpointer.save(5, {"w": torch.tensor(value)}, {})
    loaded = {"w": torch.tensor(0.0)}
    checkpointer.load(checkpointer.latest_good(), loaded)
    assert loaded["w"] == 2.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-5"]


def test_what_a_crash_left_is_swept_or_given_back(tmp_path):
    checkpointer = opened(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.tensor(1.0)}, {})
    checkpointer.finish()
    # As if killed between the two renames of a replacement, and during another save.
    (tmp_path / "step-2").rename(tmp_path / "step-2.old")
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-1.old")
    (tmp_path / "step-3.tmp").mkdir()
    assert opened(tmp_path).latest_good().step == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1", "step-2"]


def test_who_only_reads_leaves_alone_what_a_run_is_saving(tmp_path):
    checkpointer = opened(tmp_path)
    checkpointer.save(1, {"w": torch.ones(2)}, {})
    checkpointer.finish()
    half = tmp_path / "step-2.tmp"
    half.mkdir()
    found, damaged = newest_good(tmp_path, LockstepRanks.alone(), print)
    assert (found.step, damaged) == (1, set())
    assert half.exists()
    assert newest_good(tmp_path / "nowhere", LockstepRanks.alone(), print) == (None, set())


def test_an_empty_directory_has_no_checkpoint(tmp_path):
    assert opened(tmp_path / "new").latest_good() is None


def test_wrong_settings_are_refused(tmp_path):
    with pytest.raises(InputError, match="keep_last = 0"):
        opened(tmp_path, keep_last=0)
    with pytest.raises(InputError, match="keep_every = 0"):
        opened(tmp_path, keep_every=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't be kept"):
        opened(tmp_path / "file")


@pytest.mark.parametrize(
    ("state", "facts", "wrong"),
    [
        ({"f": print}, {}, "f is a builtin"),
        ({"w": torch.zeros(1, dtype=torch.complex128)}, {}, "w is torch.complex128"),
        ({}, {"x": {1, 2}}, "facts"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(tmp_path, state, facts, wrong):
    with pytest.raises(InputError, match=wrong):
        opened(tmp_path).save(1, state, facts)


# Damage.


def truncate(checkpoint: Path) -> None:
    with (checkpoint / "rank0.safetensors").open("r+b") as file:
        file.truncate(100)


def flip_a_byte(checkpoint: Path) -> None:
    path = checkpoint / "rank0.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(bytes(raw))


def change_a_fact(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text().replace('"seed":2', '"seed":3'))


def take_manifest_of_another(checkpoint: Path) -> None:
    shutil.copy(checkpoint.with_name("step-1") / "manifest.json", checkpoint)


def remove(name: str) -> Any:
    return lambda checkpoint: (checkpoint / name).unlink()


DAMAGES = [
    (truncate, "rank0.safetensors has 100 bytes"),
    (flip_a_byte, "rank0.safetensors doesn't match its checksum"),
    (remove("rank0.safetensors"), "rank0.safetensors can't be read"),
    (remove("manifest.json"), "manifest.json can't be read"),
    (change_a_fact, "manifest.json doesn't match"),
    (take_manifest_of_another, "manifest.json belongs to step 1"),
]


def two_checkpoints(directory: Path, said: list[str]) -> Checkpointer:
    checkpointer = opened(directory, said)
    for step in (1, 2):
        checkpointer.save(step, {"model": {"w": torch.full((50,), float(step))}}, {"seed": step})
    checkpointer.finish()
    said.clear()
    return checkpointer


@pytest.mark.parametrize(("damage", "wrong"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_taken(tmp_path, damage, wrong):
    said: list[str] = []
    checkpointer = two_checkpoints(tmp_path, said)
    damage(tmp_path / "step-2")
    found = checkpointer.latest_good()
    loaded = {"w": torch.zeros(50)}
    assert checkpointer.load(found, {"model": loaded}) == {"seed": 1}
    assert loaded["w"].tolist() == [1.0] * 50
    assert said[0].startswith(f"checkpoint step-2 is refused: {wrong}")
    assert said[1:] == ["checkpoint step-1 is good and taken instead."]


def test_a_damaged_checkpoint_makes_room_and_its_step_can_be_saved_again(tmp_path):
    checkpointer = two_checkpoints(tmp_path, [])
    truncate(tmp_path / "step-2")
    checkpointer.latest_good()
    checkpointer.save(2, {"w": torch.ones(1)}, {})
    assert checkpointer.latest_good().step == 2


def test_if_none_is_good_that_is_said_and_nothing_is_loaded(tmp_path):
    checkpointer = two_checkpoints(tmp_path, [])
    for step in (1, 2):
        flip_a_byte(tmp_path / f"step-{step}")
    with pytest.raises(InputError, match=r"none of the 2 checkpoints .*step-2: .*step-1: "):
        checkpointer.latest_good()


class Malice:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_no_code_in_a_checkpoint_is_run(tmp_path):
    """Neither from a pickle of torch's name, nor from a shard whose checksum was made to fit."""
    checkpointer = two_checkpoints(tmp_path / "run", [])
    pwned = tmp_path / "pwned"
    evil = pickle.dumps(Malice(pwned))
    found = checkpointer.latest_good()
    (found.path / ".metadata").write_bytes(evil)
    (found.path / "rank0.safetensors").write_bytes(evil)
    entry = FileEntry(size_bytes=len(evil), sha256=hashlib.sha256(evil).hexdigest())
    forged = found.manifest.replace(files={"rank0.safetensors": entry})
    (found.path / "manifest.json").write_bytes(encode_manifest(forged))
    found = checkpointer.latest_good()
    assert found.step == 2
    with pytest.raises(InputError, match=r"step-2: rank0\.safetensors is not what"):
        checkpointer.load(found, {"model": {"w": torch.zeros(50)}})
    assert not pwned.exists()
    pickle.loads(evil)
    assert pwned.exists()  # the trap would have worked


@pytest.mark.parametrize(
    ("wanted", "wrong"),
    [
        ({"w": torch.zeros(50), "extra": torch.zeros(1)}, r"model\.extra is not in it"),
        ({"w": torch.zeros(49)}, r"saved as torch.float32 \(50,\)"),
        ({"w": torch.zeros(50).double()}, "is torch.float64"),
        ({"w": 1.0}, r"model\.w is a tensor in it"),
        ({}, r"holds model\.w, which the model"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_left_alone(tmp_path, wanted, wrong):
    checkpointer = two_checkpoints(tmp_path, [])
    found = checkpointer.latest_good()
    with pytest.raises(InputError, match=wrong):
        checkpointer.load(found, {"model": wanted})
    assert not isinstance(wanted.get("w"), Tensor) or not wanted["w"].any()


# A disk that is full.


def raise_no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["write_shard", "to_disk", "rename_over", "make_empty"])
def test_a_failed_save_leaves_nothing_and_the_run_goes_on(tmp_path, monkeypatch, where):
    said: list[str] = []
    checkpointer = two_checkpoints(tmp_path, said)
    with monkeypatch.context() as patch:
        patch.setattr(checkpointer_module, where, raise_no_space)
        checkpointer.save(3, {"w": torch.ones(1)}, {})
        checkpointer.finish()
    assert said == [
        "checkpoint step-3 was not saved ([Errno 28] No space left on device); "
        "the last good one, step-2, is kept."
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1", "step-2"]
    checkpointer.save(4, {"w": torch.ones(1)}, {})
    assert checkpointer.latest_good().step == 4


def test_a_full_file_system_is_said_and_survived(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        said: list[str] = []
        checkpointer = opened(tmp_path, said, keep_last=1)
        checkpointer.save(1, {"w": torch.ones(20_000)}, {})
        checkpointer.save(2, {"w": torch.ones(100_000)}, {})
        checkpointer.finish()
        assert "step-2 was not saved ([Errno 28] No space left" in said[1]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1"]
        assert checkpointer.latest_good().step == 1
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_an_untidy_directory_is_said_and_the_save_counts(tmp_path, monkeypatch):
    said: list[str] = []
    checkpointer = opened(tmp_path, said)
    monkeypatch.setattr(checkpointer_module, "link_to", raise_no_space)
    checkpointer.save(1, {"w": torch.ones(1)}, {})
    assert checkpointer.latest_good().step == 1
    assert "is saved" in said[0]
    assert "tidying up failed ([Errno 28]" in said[0]


def test_an_error_in_the_program_is_raised_not_said(tmp_path, monkeypatch):
    checkpointer = opened(tmp_path)
    monkeypatch.setattr(checkpointer_module, "write_shard", lambda *_: 1 / 0)
    checkpointer.save(1, {"w": torch.ones(1)}, {})
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        checkpointer.finish()


def test_a_manifest_is_plain_json(tmp_path):
    checkpointer = two_checkpoints(tmp_path, [])
    found = checkpointer.latest_good()
    read = json.loads((found.path / "manifest.json").read_text())
    assert read["manifest"]["facts"] == {"seed": 2}


# A process that is killed.


def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    dice = random.Random(0)
    context = multiprocessing.get_context("forkserver")
    last_step = 0
    for _ in range(12):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=cases.save_until_killed, args=(tmp_path, theirs))
        process.start()
        theirs.close()
        for _ in range(dice.randint(2, 9)):
            ours.recv()
        threading.Event().wait(dice.random() * 0.01)
        process.kill()
        process.join()
        ours.close()
        last_step = step_of_whole_checkpoint_after(last_step, tmp_path)


def step_of_whole_checkpoint_after(last_step: int, directory: Path) -> int:
    said: list[str] = []
    checkpointer = opened(directory, said)
    found = checkpointer.latest_good()
    loaded = {f"w{i}": torch.zeros(20_000) for i in range(4)}
    assert checkpointer.load(found, {"model": loaded}) == {"step": found.step}
    assert all((tensor == found.step).all() for tensor in loaded.values())
    assert said == []
    assert found.step > last_step
    return found.step


def test_who_waits_for_a_save_says_so_while_its_part_grows_and_when_others_write(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpointer_module, "_LOOK_S", 0.01)
    told: list[bool] = []
    go, others = threading.Event(), threading.Event()
    write, publish = checkpointer_module.write_shard, Checkpointer._publish

    def slowly(file: Path, *rest: Any) -> FileEntry:
        file.write_bytes(b"x")
        assert go.wait(30)
        return write(file, *rest)

    def after_others(self: Checkpointer, *rest: Any) -> int:
        assert others.wait(30)
        return publish(self, *rest)

    def waits(for_others: bool) -> None:
        told.append(for_others)
        (others if for_others else go).set()

    monkeypatch.setattr(checkpointer_module, "write_shard", slowly)
    monkeypatch.setattr(Checkpointer, "_publish", after_others)
    checkpointer = Checkpointer(tmp_path, keep_last=1, waits=waits, say=lambda _sentence: None)
    checkpointer.save(1, {"w": torch.ones(5)}, {})
    checkpointer.finish()
    assert told[0] is False
    assert told[-1] is True
    assert checkpointer.latest_good() is not None
