"""Saving beside training.

How a save goes. On the training thread the ranks agree who writes which chunk, and each copies
*its own* chunks to host memory; that is all the step waits for. A background thread then writes
them into `step-<n>.tmp`; when every rank's file is on the disk, rank 0 adds the manifest, and one
rename to `step-<n>` makes the checkpoint exist. Whoever kills the process, and whenever, finds the
previous checkpoint as it was. `latest` is a relative symbolic link for people; nothing reads it.

DCP's planners are used (see `plan`), its own `async_save` is not. It copies the whole state on
every rank *before* it plans: under DDP the full model and optimizer, of which a share is written.
It keeps its metadata in a pickle, and leaves a half-written directory when a disk is full.
Planning first costs one small exchange; plan and host buffers are kept for as long as the layout
stays the same. Writing and hashing release the GIL, so a thread disturbs training no more than a
process would, and needs no second process group.

Not here: when to save (the loop), which tensors make up the state (`state`), reading (`loading`).
One Checkpointer at a time may own a directory: it sweeps what an interrupted save left there.

Sources: CheckFreq (Mohan et al., FAST 2021) for copying first and writing behind; "All File Systems
Are Not Created Equal" (Pillai et al., OSDI 2014) for what a rename needs around it to be atomic.
"""

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.errors import InputError
from paceline.config.files import to_disk
from paceline.train.checkpoint.copies import CheckpointCopies
from paceline.train.checkpoint.files import (
    FORMAT_VERSION,
    MANIFEST,
    FileEntry,
    FoundState,
    Manifest,
    complete_steps,
    encode_manifest,
    link_to,
    make_empty,
    remove_unfinished,
    rename_over,
    shard_name,
    write_shard,
)
from paceline.train.checkpoint.found import FoundCheckpoint
from paceline.train.checkpoint.loading import load, newest_good
from paceline.train.checkpoint.lockstep import LockstepRanks
from paceline.train.checkpoint.plan import (
    RankState,
    ShareRequest,
    Staging,
    WriteShare,
    as_json,
    divide_writes,
)
from paceline.train.checkpoint.store import CheckpointStore

_LOOK_S = 1.0


class Checkpointer:
    """Saves and loads the checkpoints of one run.

    Every method is called by every rank, in the same order. Call `finish` before the process groups
    are destroyed.

    Args:
        directory: where the `step-<n>` directories are, seen by all ranks; made where missing.
        keep_last: how many of the newest checkpoints to keep, at least 1.
        keep_every: also keep each one whose step is a multiple of this, for good.
        store: where rank 0 copies each checkpoint once it is complete; None: nowhere.
        waits: is called each second in which a call waits for a save that goes on: with True where
            this rank's part is written, and others write theirs.
        say: takes one sentence for a person; called on rank 0 only, on the calling thread.

    Raises:
        InputError: a number is out of range, or the directory can't be made.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int,
        keep_every: int | None = None,
        store: CheckpointStore | None = None,
        waits: Callable[[bool], None] = lambda _for_others: None,
        say: Callable[[str], None],
    ) -> None:
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise InputError(
                f"keep_last = {keep_last}, keep_every = {keep_every} were given; both count from 1."
            )
        self.directory = directory
        self._keeping = _Retention(keep_last, keep_every)
        self._say, self._waits = say, waits
        self.ranks = LockstepRanks.of_this_job()
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[_SaveOutcome] | None = None
        self._unwritten: Path | None = None
        """This rank's file of the running save; None: all of it is written."""
        self._staging: Staging | None = None
        self._cpu_s = 0.0
        self.ranks.on_first(lambda: _open(directory))
        self._copies: CheckpointCopies | None = None
        if store is not None and self.ranks.rank == 0:
            self._copies = CheckpointCopies(store, directory, self._stale_in_store)

    def save(
        self, step: int, tensors: dict[str, Any], facts: dict[str, Any], best: int | None = None
    ) -> float:
        """Start saving, and return once this rank's share is copied to host memory.

        Args:
            step: names the checkpoint; one of that step that is already there is replaced.
            tensors: nested dicts of tensors, DTensors, and plain numbers, text or lists of them.
                The same name on several ranks means the same thing; one rank's copy is saved.
            facts: any JSON data; rank 0's are saved.
            best: the step whose checkpoint is kept as the best one; the link `best` points to it.

        Returns:
            The seconds the step waited: a still running save, the plan if it changed, the copy.

        Raises:
            InputError: an entry or a fact can't be saved, or ranks disagree about a tensor's shape.
        """
        started_s = time.perf_counter()
        self.finish()  # a save under way removes what isn't kept
        self._keeping.best = best
        offer, facts = self.ranks.together(lambda: (RankState.of(tensors), as_json("facts", facts)))
        staging = self._agree_on_share(offer)
        offer.copy_to_host(staging)
        values = {name: offer.values[name] for name in staging.share.value_names}
        self._unwritten = self._partial(step) / shard_name(self.ranks.rank)
        self._running = self._background.submit(self._write, step, staging, values, facts)
        return time.perf_counter() - started_s

    def poll(self) -> None:
        """Say how a background save ended, if one did since the last call; else do nothing.

        A save that failed for want of disk is said, no more. An error in the program is raised.
        """
        if self._running is not None and self._running.done():
            self.finish()
        self._say_of_copies()

    def finish(self) -> None:
        """Wait for the running save, if there is one, and say how it ended."""
        if self._running is None:
            return
        running, self._running = self._running, None
        self._await(running)
        outcome = running.result()
        self._cpu_s += outcome.cpu_s
        kept = self._keeping.last_good
        if outcome.failure is None:
            self._keeping.accept(outcome.step)
        self.tell(outcome.sentence(kept))

    def _await(self, running: "Future[_SaveOutcome]") -> None:
        size_bytes = -1
        while not wait([running], _LOOK_S).done:
            before, size_bytes = size_bytes, _size_of(self._unwritten)
            if self._unwritten is None or size_bytes > before:
                self._waits(self._unwritten is None)

    def finish_copies(self) -> None:
        """Wait until the newest checkpoint is copied, or can't be; call `finish` before."""
        if self._copies is None:
            return
        self._copies.finish()
        self._say_of_copies()
        self._keeping.needed = self._copies.needed()
        if self._keeping.last_good is not None:  # what had to wait for its copy
            self._keeping.tidy(self.directory, self._keeping.last_good)

    def close(self) -> None:
        """Give up a copy that is under way. No other method may be called after it."""
        if self._copies is not None:
            self._copies.close()

    def _stale_in_store(self, steps: list[int], newest: int) -> list[int]:
        """None before the first save: only that says which is the best one."""
        return self._keeping.stale(steps, newest) if self._staging is not None else []

    def _say_of_copies(self) -> None:
        for sentence in () if self._copies is None else self._copies.take_sentences():
            self.tell(sentence)

    def take_cpu_s(self) -> float:
        """Seconds of processor time that writing took beside training, of the saves that ended
        since the last call."""
        taken, self._cpu_s = self._cpu_s, 0.0
        return taken + (self._copies.take_cpu_s() if self._copies is not None else 0.0)

    def latest_good(self) -> FoundCheckpoint | None:
        """Return the newest checkpoint whose every byte is as written, or None where there is none.

        The ranks share the reading. A damaged one is refused by name, and the one before it tried.

        Raises:
            InputError: there are checkpoints, but none of them is good.
        """
        self.finish()
        found, damaged = newest_good(self.directory, self.ranks, self.tell)
        self._keeping.damaged |= damaged
        if found is not None:
            self._keeping.accept(found.step)
            if self._copies is not None:
                # The last start may have ended before it had.
                self._copies.offer(found.step, is_new=False)
        return found

    def load(
        self, found: FoundState, tensors: dict[str, Any], ranks: LockstepRanks | None = None
    ) -> dict[str, Any]:
        """Fill `tensors` in place, as `loading.load` does.

        Args:
            ranks: that call this; None: those of the job.
        """
        self.finish()
        return load(found, tensors, ranks or self.ranks)

    def _agree_on_share(self, offer: RankState) -> Staging:
        """Divide the writing, or keep the last division where no rank's state changed its form."""
        last = self._staging
        is_same = last is not None and last.asked == offer.asked
        if all(self.ranks.all_gather(is_same)) and last is not None:
            return last
        asked = [ShareRequest.of_plain(record) for record in self.ranks.gather(offer.asked.plain())]
        shares = self.ranks.together(lambda: divide_writes(asked) if asked else [])
        mine = ShareRequest.of_plain(self.ranks.scatter([share.plain() for share in shares]))
        index = shares[0].tensors if shares else {}
        self._staging = Staging.of(offer.asked, WriteShare(mine.items, mine.value_names, index))
        return self._staging

    def _write(
        self, step: int, staging: Staging, values: dict[str, Any], facts: dict[str, Any]
    ) -> "_SaveOutcome":
        """Write one checkpoint. Runs in the background, on every rank."""
        started_s, began_s = time.perf_counter(), time.thread_time()
        partial = self._partial(step)
        shard = partial / shard_name(self.ranks.rank)
        try:
            self.ranks.on_first(lambda: make_empty(partial))
            file = self.ranks.together(lambda: write_shard(shard, staging.named_buffers()))
            self._unwritten = None
            mine: list[Any] = [shard.name, file.size_bytes, file.sha256, json.dumps(values)]
            parts = [_WrittenPart.of_plain(*record) for record in self.ranks.gather(mine)]
            size_bytes = self.ranks.on_first(
                lambda: self._publish(partial, _manifest(step, staging, parts, facts))
            )
        except OSError as error:
            if self.ranks.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            return _SaveOutcome(step, failure=str(error))
        if self._copies is not None:
            self._copies.offer(step)
            self._keeping.needed = self._copies.needed()
        trouble = self._keeping.tidy(self.directory, step) if self.ranks.rank == 0 else None
        cpu_s = time.thread_time() - began_s
        return _SaveOutcome(
            step, size_bytes, time.perf_counter() - started_s, cpu_s, trouble=trouble
        )

    def _partial(self, step: int) -> Path:
        return self.directory / f"step-{step}.tmp"

    def _publish(self, partial: Path, manifest: Manifest) -> int:
        """Make a written checkpoint exist. Returns the bytes of its shards."""
        for name, entry in manifest.files.items():
            if (partial / name).stat().st_size != entry.size_bytes:
                raise OSError(f"{name} isn't there as written; do all ranks see one directory?")
        (partial / MANIFEST).write_bytes(encode_manifest(manifest))
        to_disk(partial / MANIFEST)
        to_disk(partial)
        rename_over(partial, self.directory / f"step-{manifest.step}")
        to_disk(self.directory)  # the name: a file's own sync leaves it out
        return sum(entry.size_bytes for entry in manifest.files.values())

    def tell(self, sentence: str) -> None:
        """Say something of a checkpoint, on rank 0 only."""
        if self.ranks.rank == 0:
            self._say(sentence)


@dataclass(frozen=True)
class _WrittenPart:
    """What one rank wrote."""

    name: str
    file: FileEntry
    values: dict[str, Any]

    @staticmethod
    def of_plain(name: str, size_bytes: int, sha256: str, values: str) -> "_WrittenPart":
        """What another rank sent."""
        return _WrittenPart(
            name, FileEntry(size_bytes=size_bytes, sha256=sha256), json.loads(values)
        )


@dataclass(frozen=True)
class _SaveOutcome:
    """How a background save ended."""

    step: int
    size_bytes: int = 0
    duration_s: float = 0.0
    cpu_s: float = 0.0
    failure: str | None = None
    trouble: str | None = None

    def sentence(self, last_good: int | None) -> str:
        """Put it for a person; `last_good` is what there was before."""
        if self.failure is None:
            trouble = f", but tidying up failed ({self.trouble})" if self.trouble else ""
            size = f"{self.size_bytes / 1e6:.1f} MB in {self.duration_s:.1f} s"
            return f"checkpoint step-{self.step} is saved, {size}{trouble}."
        kept = "there is no earlier one"
        if last_good is not None:
            kept = f"the last good one, step-{last_good}, is kept"
        return f"checkpoint step-{self.step} was not saved ({self.failure}); {kept}."


@dataclass
class _Retention:
    """Which checkpoints stay."""

    keep_last: int
    keep_every: int | None
    best: int | None = None
    """Kept as long as it is the best one."""
    last_good: int | None = None
    damaged: set[int] = field(default_factory=set)
    needed: set[int] = field(default_factory=set)
    """Stay on the disk for now, whatever else is said."""

    def accept(self, step: int) -> None:
        """Note that a checkpoint is known to be whole."""
        self.last_good = step
        self.damaged.discard(step)

    def to_remove(self, steps: list[int], newest: int) -> list[int]:
        """Pick from all `steps` (ascending) those to remove, `newest` being just written.

        Damaged ones don't count as kept, and go: nothing can be loaded from them.
        """
        good = [step for step in steps if step not in self.damaged or step == newest]
        stale = self.stale(good, newest)
        return [s for s in steps if (s in stale or s not in good) and s not in self.needed]

    def stale(self, good: list[int], newest: int) -> list[int]:
        """Pick from the steps of whole checkpoints (ascending) those that nobody asked to keep."""
        kept = {newest, *good[-self.keep_last :], self.best}
        if self.keep_every is not None:
            kept |= {step for step in good if step % self.keep_every == 0}
        return [step for step in good if step not in kept]

    def tidy(self, directory: Path, newest: int) -> str | None:
        """Point `latest` to the newest checkpoint and remove old ones. Returns what went wrong."""
        try:
            link_to(directory, "latest", newest)
            if self.best in complete_steps(directory):
                link_to(directory, "best", self.best)
            for step in self.to_remove(complete_steps(directory), newest):
                shutil.rmtree(directory / f"step-{step}")
        except OSError as error:
            return str(error)
        return None


def _size_of(file: Path | None) -> int:
    try:
        return 0 if file is None else file.stat().st_size
    except OSError:
        return 0


def _open(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_unfinished(directory)
    except OSError as error:
        raise InputError(
            f"checkpoints can't be kept in {directory} ({error.strerror}); "
            "name a directory that can be written to."
        ) from None


def _manifest(
    step: int, staging: Staging, parts: list[_WrittenPart], facts: dict[str, Any]
) -> Manifest:
    return Manifest(
        format=FORMAT_VERSION,
        step=step,
        facts=facts,
        values={name: value for part in parts for name, value in part.values.items()},
        files={part.name: part.file for part in parts},
        tensors=staging.share.tensors,
    )
