"""Tiers: bytes come back as they went in or not at all, budgets are kept, and nothing is left."""

import random
import subprocess
import sys

import pytest
import torch

from paceline.config.errors import InputError
from paceline.generate.tier_folder import OwnFolder
from paceline.generate.tiers import Tiers

SIZE = 4096


def data_of(number):
    draw = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=draw)


def name_of(number):
    return number.to_bytes(16)


def put(tiers, *numbers):
    for number in numbers:
        tiers.put(name_of(number), data_of(number))
        tiers.settle()


def got(tiers, *numbers):
    """Which of them come back, in order."""
    read = tiers.get([name_of(number) for number in numbers])
    assert read.wait(60)
    for number, data in zip(numbers, read.data, strict=False):
        assert torch.equal(data, data_of(number))
    count = len(read.data)
    read.close()
    tiers.settle()
    return list(numbers[:count])


def where(tiers, *numbers):
    return [tiers.tier_of(name_of(number)) for number in numbers]


def files(folder):
    return {file for file in folder.rglob("*") if file.is_file() and file.name != "owner.lock"}


def test_what_was_used_longest_ago_goes_to_disk_and_then_away(tmp_path):
    tiers = Tiers(4 * SIZE, 6 * SIZE, tmp_path)
    put(tiers, 0, 1, 2, 3)
    assert where(tiers, 0, 1, 2, 3) == ["host"] * 4
    assert len(files(tmp_path)) == 2  # the oldest are written before they have to go
    put(tiers, 4, 5)
    assert where(tiers, 0, 1, 2, 3, 4, 5) == ["disk"] * 2 + ["host"] * 4
    assert got(tiers, 1, 0) == [1, 0]
    assert where(tiers, 0, 1, 2, 3, 4, 5) == ["host"] * 2 + ["disk"] * 2 + ["host"] * 2
    assert got(tiers, 2) == [2]
    assert where(tiers, 2, 3, 4) == ["host", "disk", "disk"]
    put(tiers, 6, 7, 8)
    assert (
        where(tiers, 0, 1, 2, 3, 4, 5, 6, 7, 8)
        == ["disk", "disk"] + ["host"] + [None] + ["disk"] * 2 + ["host"] * 3
    )
    assert got(tiers, 8, 3, 7) == [8]
    assert tiers.numbers()["dropped"] == 0


def test_budgets_are_kept_whatever_comes(tmp_path):
    tiers, draw = Tiers(5 * SIZE, 7 * SIZE, tmp_path), random.Random(0)
    found = 0
    for _ in range(400):
        if draw.random() < 0.5:
            tiers.put(name_of(number := draw.randrange(20)), data_of(number))
        else:
            numbers = draw.sample(range(20), draw.randint(1, 6))
            read = tiers.get([name_of(number) for number in numbers])
            if draw.random() < 0.7:
                read.wait(60)
            if read.is_done:
                assert all(map(torch.equal, read.data, map(data_of, numbers)))
                found += len(read.data)
            read.close()
        told = tiers.numbers()
        assert told["host_bytes"] <= 5 * SIZE
        assert told["disk_bytes"] <= 7 * SIZE
    tiers.settle()
    assert len(files(tmp_path)) == tiers.numbers()["disk"] > 3
    assert not any(held.num_readers for held in tiers._host.values())
    assert found > 0


def test_what_is_being_read_stays_and_makes_no_room():
    tiers = Tiers(2 * SIZE)
    put(tiers, 0, 1)
    read = tiers.get([name_of(0), name_of(1)])
    read.wait(60)
    assert not tiers.put(name_of(2), data_of(2))
    assert torch.equal(read.data[1], data_of(1))
    read.close()
    assert tiers.put(name_of(2), data_of(2))
    assert tiers.numbers()["dropped"] == 2


@pytest.mark.parametrize("damage", ["bytes", "short", "gone"])
def test_damaged_files_are_counted_said_once_and_never_used(tmp_path, damage, caplog):
    tiers = Tiers(4 * SIZE, 9 * SIZE, tmp_path)
    put(tiers, *range(8))
    for file in files(tmp_path):
        contents = bytearray(file.read_bytes())
        contents[77] ^= 4
        file.unlink()
        if damage != "gone":
            file.write_bytes(contents[:100] if damage == "short" else contents)
    assert where(tiers, 0, 1) == ["disk"] * 2
    for number in (0, 1):
        assert got(tiers, number) == []
    assert where(tiers, 0, 1) == [None] * 2
    assert tiers.numbers()["damaged"] == 2
    (said,) = caplog.messages
    assert str(tmp_path) in said
    put(tiers, 0)
    assert got(tiers, 0) == [0]


def test_damaged_memory_is_noticed():
    tiers = Tiers(4 * SIZE)
    put(tiers, 0, 1)
    tiers._host[name_of(0)].data[5] ^= 1
    assert got(tiers, 1, 0) == [1]
    assert tiers.numbers()["damaged"] == 1


def test_a_full_disk_ends_its_tier_and_nothing_else(tmp_path, caplog):
    tiers = Tiers(2 * SIZE, 9 * SIZE, tmp_path)
    (own,) = tmp_path.iterdir()
    (own / "owner.lock").unlink()
    own.rmdir()
    put(tiers, 0, 1, 2, 3)
    assert where(tiers, 0, 1, 2, 3) == [None, None, "host", "host"]
    assert got(tiers, 3) == [3]
    (said,) = caplog.messages
    assert "Nothing more is kept on disk" in said


def test_files_are_for_their_owner_alone_and_removed_at_the_end(tmp_path):
    tiers = Tiers(2 * SIZE, 9 * SIZE, tmp_path)
    put(tiers, 0, 1, 2, 3)
    (own,) = tmp_path.iterdir()
    assert own.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in own.iterdir()} == {0o600}
    tiers.forget_all()
    tiers.settle()
    assert where(tiers, 0, 1, 2, 3) == [None] * 4
    assert not files(tmp_path)
    put(tiers, 4, 5, 6)
    assert files(tmp_path)
    del tiers
    assert not list(tmp_path.iterdir())


def test_a_closed_one_keeps_nothing(tmp_path):
    tiers = Tiers(2 * SIZE, 9 * SIZE, tmp_path)
    put(tiers, 0, 1, 2, 3)
    tiers.close()
    assert not list(tmp_path.iterdir())
    assert not tiers.put(name_of(0), data_of(0))
    assert tiers.numbers()["host_bytes"] == tiers.numbers()["disk_bytes"] == 0


def test_what_a_dead_process_left_is_removed_and_nothing_else(tmp_path):
    text = (
        "import os, sys; from pathlib import Path; from paceline.generate.tier_folder import "
        "OwnFolder; own = OwnFolder(Path(sys.argv[1])); (own.path / '0').write_bytes(b'a'); "
        "os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", text, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    assert files(tmp_path)
    stranger = tmp_path / "paceline-tier-of-another-program"
    stranger.mkdir()
    first = OwnFolder(tmp_path)
    assert not left.exists()
    second = OwnFolder(tmp_path)
    assert {first.path, second.path, stranger} == set(tmp_path.iterdir())


def test_a_place_that_cannot_be_used_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"can't hold what is kept on disk .*serve.disk_folder"):
        Tiers(SIZE, SIZE, tmp_path / "file")
