"""Which segments of a log may go: those that every checkpoint of every run which reads it passed.

A run that reads a log says so in it (`readers/`) before it reads. Of a run without a checkpoint
nothing goes, for it begins with the first token.
"""

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from paceline.config import files
from paceline.config.errors import InputError
from paceline.config.frozen import Count, FrozenConfig
from paceline.observe.run import Run, complete_steps, write_atomic
from paceline.render.figures import bytes_text
from paceline.train.checkpoint.files import DamagedError, decode_manifest, manifest_bytes
from paceline.train.data.stream.log import segments

_GB = 10**9
_FOLDER = "readers"


class Reader(FrozenConfig):
    """A run that reads a log."""

    run: str
    """Its directory."""
    seq_len: Count
    window: Count
    """Samples that are shuffled among themselves."""

    def passed(self) -> int | None:
        """Tokens that none of its checkpoints needs any more; None: it is gone.

        Raises:
            DamagedError: a checkpoint doesn't say it.
        """
        run = Run(Path(self.run))
        if not run.exists:
            return None
        kept = run.checkpoint_folder
        samples = [
            decode_manifest(manifest_bytes(kept / f"step-{step}"), step).facts.get("samples", 0)
            for step in complete_steps(kept)
        ]
        return min(samples, default=0) // self.window * self.window * self.seq_len


_READER = TypeAdapter(Reader)


def register(folder: Path, reader: Reader) -> None:
    """Say in a log that a run reads it."""
    name = hashlib.sha256(reader.run.encode()).hexdigest()[:16]
    write_atomic(folder / _FOLDER / f"{name}.json", reader.model_dump_json() + "\n")


def remove_passed(folder: Path, keep_gb: float, say: Callable[[str], None]) -> None:
    """Remove a log's oldest segments while it takes more, but none that a run still needs."""
    found = segments(folder)
    over = sum(segment.num_bytes for segment in found) - keep_gb * _GB
    if over <= 0:
        return
    passed, removed = _passed_by_all(folder), 0
    for segment, following in itertools.pairwise(found):
        # The last token of a sample is the first one of the next.
        if removed >= over or following.first_token > passed:
            break
        removed += segment.num_bytes
        segment.index.unlink(missing_ok=True)
        segment.path.unlink()
    if removed:
        say(f"{bytes_text(removed)} of the log were removed: all checkpoints have passed them")


def _passed_by_all(folder: Path) -> int:
    """Tokens; none where that can't be told now."""
    readers = [_passed(file) for file in (folder / _FOLDER).glob("*.json")]
    return min((passed for passed in readers if passed is not None), default=0)


def _passed(file: Path) -> int | None:
    try:
        return files.read_json(file, _READER, "remove it").passed()
    except (InputError, DamagedError, OSError):
        return 0  # a checkpoint is removed at this moment, or can't be read
