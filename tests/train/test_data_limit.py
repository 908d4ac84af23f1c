"""A cache of tokens within its limit: what goes, and what never does while somebody reads it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from paceline.config.job_sections import Data
from paceline.train.data import prepare
from paceline.train.data.dataset import META_FILE
from paceline.train.data.limit import cached_tokens, keep_within, remove, too_much
from tests.command_line import paceline

# Reads a source in a process of its own; ends when its input does.
_READER = """
import sys
from paceline.config.job_sections import Data
from paceline.train.data import prepare

source, cache, most = sys.argv[1:]
limit = float(most) or None
found = prepare(Data(source=source, tokenizer="bytes", cache_dir=cache, cache_gb=limit))
print(found.folder.name, flush=True)
sys.stdin.read()
assert found.dataset("train").num_samples(8) > 0
"""
# Removes all that nobody reads, again and again.
_REMOVER = """
import sys
from pathlib import Path
from paceline.train.data.limit import keep_within

print("begun", flush=True)
while True:
    keep_within(Path(sys.argv[1]), 0.0)
"""


def source(folder: Path, number: int, size: int = 4000) -> Path:
    path = folder / f"{number}.txt"
    path.write_text(f"{number} is a number. " * (size // 16))
    return path


def reader(path: Path, cache: Path, most: float = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _READER, str(path), str(cache), str(most)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read(process: subprocess.Popen[str]) -> str:
    """The name of what a reader has; it keeps it."""
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert name, process.communicate()
    return name


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=300)
    assert process.returncode == 0


def read_once(path: Path, cache: Path, most: float = 0) -> str:
    process = reader(path, cache, most)
    name = read(process)
    end(process)
    return name


def stamp(cache: Path, name: str, at: float) -> None:
    os.utime(cache / "data" / name / META_FILE, (at, at))


def names(cache: Path) -> set[str]:
    return {one.folder.name for one in cached_tokens(cache / "data")}


def test_what_was_used_longest_ago_goes_first_and_what_is_in_use_stays(tmp_path):
    cache = tmp_path / "cache"
    made = [read_once(source(tmp_path, number), cache) for number in range(3)]
    held = reader(source(tmp_path, 3), cache)
    made.append(read(held))
    for at, name in enumerate([made[3], made[1], made[0], made[2]]):
        stamp(cache, name, 1000.0 + at)  # the oldest is in use
    found = cached_tokens(cache / "data")
    assert [one.folder.name for one in found] == [made[3], made[1], made[0], made[2]]
    assert [one.is_in_use for one in found] == [True, False, False, False]
    total = sum(one.num_bytes for one in found)
    most = (total - found[1].num_bytes - 1) / 1e9  # one byte more than one of them has to go
    assert [one.folder.name for one in too_much(cache / "data", most)] == [made[1], made[0]]
    assert names(cache) == set(made)
    assert [one.folder.name for one in keep_within(cache / "data", most)] == [made[1], made[0]]
    assert names(cache) == {made[3], made[2]}
    assert not remove(cache / "data" / made[3])
    end(held)
    assert remove(cache / "data" / made[3])
    assert {file.name for file in (cache / "data").glob("*.removed*")} == set()


def test_a_start_keeps_the_limit_and_its_own_source(tmp_path):
    cache = tmp_path / "cache"
    first = read_once(source(tmp_path, 0), cache)
    second = read_once(source(tmp_path, 1), cache, most=1e-9)
    assert first != second
    assert names(cache) == {second}
    assert read_once(source(tmp_path, 0), cache) == first  # made again


def test_readers_never_lose_what_they_read_while_others_remove(tmp_path):
    cache = tmp_path / "cache"
    path = source(tmp_path, 0)
    read_once(path, cache)
    program = [sys.executable, "-c", _REMOVER, str(cache / "data")]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as remover:
        try:
            assert remover.stdout is not None
            assert remover.stdout.readline() == b"begun\n"
            for _ in range(4):
                several = [reader(path, cache) for _ in range(2)]
                assert len({read(one) for one in several}) == 1
                assert len(names(cache)) == 1
                for one in several:
                    end(one)
        finally:
            remover.kill()
    keep_within(cache / "data", 0.0)  # also what the killed one had put aside
    assert {file.suffix for file in (cache / "data").iterdir()} <= {".lock", ".source"}


def test_this_process_keeps_what_it_opened(tmp_path):
    data = Data(source=str(source(tmp_path, 0)), tokenizer="bytes", cache_dir=str(tmp_path / "c"))
    found = prepare(data.replace(cache_gb=1e-9))
    assert keep_within(tmp_path / "c" / "data", 0.0) == []
    assert prepare(data).folder == found.folder


@pytest.mark.parametrize("is_meant", [False, True])
def test_the_command_says_what_goes_and_removes_it_where_it_is_meant(tmp_path, is_meant):
    cache = tmp_path / "cache"
    made = {read_once(source(tmp_path, number), cache) for number in range(2)}
    given = ("cache", "--folder", str(cache), "--most", "0")
    done = paceline(*given, *["--yes"] * is_meant, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("removed:" if is_meant else "--yes would remove") in done.stdout
    assert names(cache) == (set() if is_meant else made)
    told = json.loads(paceline(*given[:3], "--json", folder=tmp_path).stdout.splitlines()[-1])
    assert len(told["tokens"]) == (0 if is_meant else 2)


def test_what_a_killed_build_left_goes_after_a_day(tmp_path):
    left = [tmp_path / f"{name}.partial" for name in ("old", "new", "gone_on_with")]
    for folder in left:
        folder.mkdir()
    for folder in (left[0], left[2]):
        os.utime(folder, (0, 0))
    with FileLock(tmp_path / "gone_on_with.lock"):
        keep_within(tmp_path, 0.0)
    assert [folder.exists() for folder in left] == [False, True, True]
