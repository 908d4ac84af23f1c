"""Copies of checkpoints in a store: complete or absent, whatever ends the copying."""

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from paceline.config.errors import InputError
from paceline.config.job import change_job, read_job
from paceline.observe.run import Run
from paceline.train.checkpoint import store as store_module
from paceline.train.checkpoint.checkpointer import Checkpointer
from paceline.train.checkpoint.copies import CheckpointCopies
from paceline.train.checkpoint.loading import newest_good
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.checkpoint.store import CheckpointStore, fetch_newer
from paceline.train.command import train_job
from tests.command_line import losses, metrics, paceline, write_tiny_job
from tests.ranks import WARM
from tests.small_job import work_in, write_small_job
from tests.train.conftest import CREDENTIALS

FILE = "rank0.safetensors"


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "s3":
        yield request.getfixturevalue("s3")
    elif request.param == "file":
        yield f"file://{tmp_path}/store"
    else:
        yield "memory://store"
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.arange(4000.0) + step, "b": torch.full((3,), float(step))}}


def save(directory: Path, *steps: int, **settings: Any) -> list[str]:
    """Checkpoints of these steps, and what was said of them."""
    said: list[str] = []
    checkpointer = Checkpointer(directory, keep_last=9, say=said.append, **settings)
    for step in steps:
        checkpointer.save(step, state(step), {"step": step})
        checkpointer.finish()
        checkpointer.finish_copies()
    checkpointer.close()
    return said


def put(store: CheckpointStore, directory: Path, step: int) -> int:
    return store.put(directory / f"step-{step}", step, lambda: None)


def fetched(store: CheckpointStore, directory: Path) -> tuple[int | None, list[str]]:
    """The step that a machine without checkpoints goes on from, and what it says."""
    said: list[str] = []
    fetch_newer(store, directory, lambda _facts: None, said.append, waits_s=())
    found, damaged = newest_good(directory, LockstepRanks.alone(), said.append)
    assert not damaged, "what was fetched is whole"
    if found is None:
        return None, said
    room = {"model": {name: torch.empty_like(each) for name, each in state(0)["model"].items()}}
    checkpointer = Checkpointer(directory, keep_last=9, say=said.append)
    checkpointer.load(found, room)
    for name, tensor in state(found.step)["model"].items():
        assert torch.equal(room["model"][name], tensor)
    return found.step, said


def test_a_store_says_when_a_copy_was_made(url, tmp_path):
    store = CheckpointStore(url, "run")
    began = time.time()
    save(tmp_path / "here", 4, store=store)
    written = store.written(4)
    assert written is not None
    assert began - 2 <= written <= time.time() + 2  # stores tell whole seconds
    assert store.written(8) is None


# ---- put and fetch -------------------------------------------------------------------------------


def test_each_checkpoint_is_copied_and_another_machine_goes_on_from_the_newest(url, tmp_path):
    store = CheckpointStore(url, "run")
    said = save(tmp_path / "here", 4, 8, store=store)
    assert [step for step in said if "is copied to" in step] == said[1::2]
    assert store.steps() == [4, 8]
    step, told = fetched(store, tmp_path / "there")
    assert step == 8
    assert told == [f"checkpoint step-8 is fetched from {url}/run."]
    for file in ("manifest.json", FILE):
        here, there = (tmp_path / side / "step-8" / file for side in ("here", "there"))
        assert here.read_bytes() == there.read_bytes()
    # What the disk has isn't fetched again.
    assert fetched(store, tmp_path / "there") == (8, [])


def test_what_is_there_already_is_not_sent_again(tmp_path):
    store = CheckpointStore(f"file://{tmp_path}/store", "run")
    save(tmp_path / "here", 4)
    assert put(store, tmp_path / "here", 4) > 16_000
    assert put(store, tmp_path / "here", 4) == 0


def test_a_checkpoint_that_is_saved_again_replaces_its_copy(url, tmp_path):
    store = CheckpointStore(url, "run")
    save(tmp_path / "here", 4)
    put(store, tmp_path / "here", 4)
    checkpointer = Checkpointer(tmp_path / "here", keep_last=9, say=lambda _: None)
    checkpointer.save(4, {"model": {"w": torch.zeros(5)}}, {"step": 4})
    checkpointer.finish()
    assert put(store, tmp_path / "here", 4) > 0
    fetch_newer(store, tmp_path / "there", lambda _facts: None, print)
    found, _ = newest_good(tmp_path / "there", LockstepRanks.alone(), print)
    assert found is not None
    assert found.manifest.tensors["model.w"].size == [5]


def test_the_store_keeps_what_the_disk_keeps(url, tmp_path):
    store = CheckpointStore(url, "run")
    checkpointer = Checkpointer(
        tmp_path / "here", keep_last=2, keep_every=4, store=store, say=lambda _: None
    )
    for step in range(2, 14, 2):
        checkpointer.save(step, state(step), {"step": step}, best=6)
        checkpointer.finish()
        checkpointer.finish_copies()
    assert store.steps() == [4, 6, 8, 10, 12]


def test_a_catching_up_start_removes_nothing_from_the_store(tmp_path):
    """It doesn't know yet which one is the best."""
    store = CheckpointStore(f"file://{tmp_path}/store", "run")
    save(tmp_path / "here", 2, 4, 6)
    for step in (2, 4):
        put(store, tmp_path / "here", step)
    said: list[str] = []
    checkpointer = Checkpointer(tmp_path / "here", keep_last=1, store=store, say=said.append)
    checkpointer.latest_good()
    checkpointer.finish_copies()
    assert store.steps() == [2, 4, 6]
    assert "step-6 is copied" in said[0]


# ---- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"",
        None,
    ],
    ids=["bit", "shorter", "longer", "empty", "gone"],
)
@pytest.mark.parametrize("name", [FILE, "manifest.json"])
def test_a_damaged_object_is_refused_and_the_one_before_it_taken(name, damage, s3, tmp_path):
    store = CheckpointStore(s3, "run")
    save(tmp_path / "here", 4, 8, store=store)
    place = f"bucket/prefix/run/step-8/{name}"
    if damage is None:
        store._files.rm_file(place)
    else:
        store._files.pipe_file(place, damage(store._files.cat_file(place)))
    step, said = fetched(store, tmp_path / "there")
    assert step == 4
    assert not (tmp_path / "there" / "step-8").exists()
    if (name, damage) != ("manifest.json", None):  # without one there is no checkpoint
        assert "checkpoint step-8 in s3://bucket/prefix/run is refused: " in said[0]


@pytest.mark.parametrize("is_gone", [False, True], ids=["bit", "gone"])
def test_a_checkpoint_made_again_replaces_its_damaged_copy(is_gone, url, tmp_path):
    """It is equal to the bit to what was copied, so the manifest in the store tells nothing."""
    store = CheckpointStore(url, "run")
    save(tmp_path / "here", 4, 8, store=store)
    place = f"{store._root}/step-8/{FILE}"
    whole = store._files.cat_file(place)
    if is_gone:
        store._files.rm_file(place)
    else:
        store._files.pipe_file(place, whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    assert fetched(store, tmp_path / "there")[0] == 4
    said = save(tmp_path / "there", 8, store=store)
    assert any("step-8 is copied" in sentence for sentence in said)
    assert store._files.cat_file(place) == whole
    assert not any("copied" in each for each in save(tmp_path / "there", 8, store=store))


def test_a_store_with_nothing_good_is_a_sentence(tmp_path):
    store = CheckpointStore(f"file://{tmp_path}/store", "run")
    save(tmp_path / "here", 4, store=store)
    (tmp_path / "store/run/step-4" / FILE).write_bytes(b"")
    with pytest.raises(InputError, match=r"none of the 1 checkpoints in file://.*--fresh\.$"):
        fetch_newer(store, tmp_path / "there", lambda _facts: None, lambda _: None, waits_s=())


def _put_and_die(directory: Path, url: str, at: int, variables: dict[str, str]) -> None:
    """Copy step 8, and be killed before the piece of this number."""
    os.environ.update(variables)
    store_module._PIECE_BYTES = 4096
    calls = iter(range(at + 1))
    next(calls)

    def go_on() -> None:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    CheckpointStore(url, "run").put(directory / "step-8", 8, go_on)


@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_copy_that_is_killed_is_absent(at, s3, s3_server, tmp_path):
    """While its file is sent, at the end of that, and while it is read back: five pieces each."""
    store = CheckpointStore(s3, "run")
    save(tmp_path / "here", 4, 8)
    put(store, tmp_path / "here", 4)
    variables = {**CREDENTIALS, "AWS_ENDPOINT_URL": s3_server}
    process = WARM.Process(target=_put_and_die, args=(tmp_path / "here", s3, at, variables))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert store.manifest(8) is None
    assert fetched(store, tmp_path / "there")[0] == 4
    # The next copy completes it, or takes the rest away.
    assert put(store, tmp_path / "here", 8) > 0
    shutil.rmtree(tmp_path / "there")
    assert fetched(store, tmp_path / "there")[0] == 8


def test_half_copies_are_taken_away_with_the_next_one(tmp_path):
    store = CheckpointStore(f"file://{tmp_path}/store", "run")
    half = tmp_path / "store/run/step-2"
    half.mkdir(parents=True)
    (half / FILE).write_bytes(b"half")
    save(tmp_path / "here", 4, store=store)
    assert store.steps() == [4]


class FaultyStore(CheckpointStore):
    """Answers so many errors first."""

    def __init__(self, url: str, errors: int) -> None:
        super().__init__(url, "run")
        self.errors, self.asked = errors, 0

    def manifest(self, step: int) -> bytes | None:
        self.asked += 1
        if self.asked <= self.errors:
            raise ConnectionError("the store says 503")
        return super().manifest(step)


def copied(store: CheckpointStore, directory: Path, *steps: int) -> list[str]:
    copies = CheckpointCopies(store, directory, lambda _all, _newest: [], waits_s=(0.0, 0.0))
    for step in steps:
        copies.offer(step)
        copies.finish()
    copies.close()
    return copies.take_sentences()


def test_a_store_that_answers_errors_is_asked_again(tmp_path):
    save(tmp_path / "here", 4)
    store = FaultyStore(f"file://{tmp_path}/store", errors=2)
    assert "step-4 is copied" in copied(store, tmp_path / "here", 4)[0]


def test_errors_without_end_are_said_and_the_next_checkpoint_is_tried(tmp_path):
    save(tmp_path / "here", 4, 8)
    store = FaultyStore(f"file://{tmp_path}/store", errors=3)
    first, second = copied(store, tmp_path / "here", 4, 8)
    assert first == (
        f"checkpoint step-4 was not copied to file://{tmp_path}/store/run (ConnectionError: the "
        "store says 503); the run goes on, and copies the next one, or this one when it is started "
        "again."
    )
    assert "step-8 is copied" in second


def test_the_newest_that_is_offered_wins_and_what_is_under_way_is_finished(tmp_path):
    save(tmp_path / "here", 2, 4, 6, 8)
    store = CheckpointStore(f"file://{tmp_path}/store", "run")
    copies = CheckpointCopies(store, tmp_path / "here", lambda _all, _newest: [])
    begun, go = _held_up(store)
    copies.offer(2)
    begun()
    for step in (4, 6, 8):
        copies.offer(step)
    assert copies.needed() == {2, 8}
    go()
    copies.finish()
    assert store.steps() == [2, 8]
    assert copies.needed() == set()


def _held_up(store: CheckpointStore) -> tuple[Callable[[], object], Callable[[], object]]:
    """Waits until a copy has begun; lets it go on."""
    begun, go, real = Event(), Event(), store.put

    def held(*arguments: Any, **options: Any) -> int:
        begun.set()
        assert go.wait(60)
        return real(*arguments, **options)

    store.put = held  # type: ignore[method-assign]
    return lambda: begun.wait(60), go.set


def test_what_is_copied_stays_on_the_disk_until_then(tmp_path):
    store = CheckpointStore(f"file://{tmp_path}/store", "run")
    here = tmp_path / "here"
    checkpointer = Checkpointer(here, keep_last=1, store=store, say=lambda _: None)
    begun, go = _held_up(store)
    for step in (2, 4):
        checkpointer.save(step, state(step), {})
        checkpointer.finish()
        begun()
    assert (here / "step-2").exists()
    go()
    checkpointer.finish_copies()
    assert store.steps() == [4]
    assert sorted(path.name for path in here.iterdir()) == ["latest", "step-4"]


def test_closing_gives_up_what_is_under_way(tmp_path):
    save(tmp_path / "here", 2, 4)
    store = CheckpointStore(f"file://{tmp_path}/store", "run")
    copies = CheckpointCopies(store, tmp_path / "here", lambda _all, _newest: [])
    begun, go = _held_up(store)
    copies.offer(2)
    begun()
    copies._closing.set()
    go()
    copies.close()
    assert store.manifest(2) is None
    assert copies.take_sentences() == []


def test_damage_on_the_disk_is_not_copied(tmp_path):
    save(tmp_path / "here", 4)
    file = tmp_path / "here/step-4" / FILE
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    store = CheckpointStore(f"file://{tmp_path}/store", "run")
    (said,) = copied(store, tmp_path / "here", 4)
    assert f"({FILE} doesn't match its checksum on the disk)" in said
    assert store.manifest(4) is None


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hidden@bucket/prefix",
        "s3://hidden@bucket",
        "https://host/x?sig=hidden",
        "s3://bucket/#hidden",
        "simplecache::s3://hidden/prefix",
    ],
)
def test_a_url_that_may_hold_a_secret_is_refused_without_repeating_it(url):
    with pytest.raises(InputError, match=r"credentials in the environment\.$") as refused:
        read_job(None, [f"checkpoint.copy_to={json.dumps(url)}"])
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("url", ["bucket/prefix", "s3://", "s3:// x", ""])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(InputError, match=r"give one such as s3://bucket/prefix\.$"):
        read_job(None, [f"checkpoint.copy_to={json.dumps(url)}"])


def test_a_missing_extra_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # By its full name: fsspec.registry is also the name of what it exports.
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(InputError, match=r"needs s3fs: pip install 'paceline\[s3\]'\.$"):
        CheckpointStore("s3://bucket/prefix", "run")


def test_an_unknown_kind_of_url_is_one_sentence():
    with pytest.raises(InputError, match=r"^checkpoint.copy_to = nosuch://x can't be used: .*\.$"):
        CheckpointStore("nosuch://x", "run")


# ---- a whole run ---------------------------------------------------------------------------------


def test_a_run_goes_on_from_the_store_on_another_machine(s3, tmp_path):
    """To the same losses; credentials are nowhere in the Run."""
    for machine in ("a", "b"):
        (tmp_path / machine).mkdir()
        write_tiny_job(tmp_path / machine)
    sets = ("job.toml", f"--set=checkpoint.copy_to={s3}")
    first = paceline("train", *sets, folder=tmp_path / "a")
    assert first.returncode == 0, first.stderr
    assert f"checkpoint step-12 is copied to {s3}/tiny" in first.stdout
    store = CheckpointStore(s3, "tiny")
    store.remove(12)
    (done,) = store.steps()  # 8, or 4 where the store was slow
    second = paceline("train", *sets, folder=tmp_path / "b")
    assert second.returncode == 0, second.stderr
    assert f"checkpoint step-{done} is fetched from {s3}/tiny." in second.stdout
    expected = losses(tmp_path / "a")
    there = {line["step"]: line["loss"] for line in metrics(tmp_path / "b")}
    assert there == {step: expected[step] for step in range(done + 1, 13)}
    assert store.steps()[-1] == 12
    for file in (tmp_path / "b/runs").rglob("*"):
        assert not file.is_file() or b"secret-of-a-test" not in file.read_bytes()
    other = paceline(
        "train", *sets, "--set=train.seed=1", f"--runs={tmp_path}/c", folder=tmp_path / "b"
    )
    assert other.returncode == 2
    assert f"{s3}/tiny has checkpoints of another training: train.seed" in other.stderr
    assert not (tmp_path / "c/tiny").exists()


def test_fresh_takes_the_copies_away_and_a_complete_run_makes_up_for_a_missing_one(
    tmp_path, monkeypatch
):
    work_in(tmp_path, monkeypatch)
    url, run = f"file://{tmp_path}/store", Run(tmp_path / "runs" / "small")
    job = read_job(write_small_job(tmp_path), [f"checkpoint.copy_to={json.dumps(url)}"])
    store = CheckpointStore(url, "small")
    train_job(job, run, fresh=False)
    assert store.steps() == [4]
    store.remove(4)
    train_job(job, run, fresh=False)
    assert store.steps() == [4]
    train_job(change_job(job, ["train.steps=2"]), run, fresh=True)
    assert store.steps() == [2]


def test_a_store_that_nobody_answers_for_is_one_sentence(s3, tmp_path, monkeypatch):
    """Where the disk has no checkpoint to go on from; else the run goes on."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    save(tmp_path / "here", 4)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        store = CheckpointStore(s3, "run")
        with pytest.raises(
            InputError, match=r"can't be fetched from s3://bucket/.*leave it out\.$"
        ):
            fetch_newer(store, tmp_path / "there", lambda _facts: None, print, waits_s=())
        assert not (tmp_path / "there").exists()
        step, (said,) = fetched(store, tmp_path / "here")
    assert step == 4
    assert said.endswith("; the run goes on from those of the disk.")
    assert "hidden" not in said
