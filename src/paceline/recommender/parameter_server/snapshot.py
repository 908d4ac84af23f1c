"""A server's checkpoints on disk: complete and as written, or not there.

    part-<k>/step-<n>.safetensors    ids, values and optimizer state of the rows that k holds
    part-<k>/step-<n>.json           its size and sha256; written last, so it makes the file count

Each file is written under another name, synced and renamed; a reader takes only files whose
checksum is right. Any number of holders reads what another number wrote, by the ids in the files.
No pickle. As with the run's own checkpoints, a checksum finds damage, it doesn't prove an author.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from paceline.config.errors import RunError
from paceline.config.files import to_disk
from paceline.recommender.parameter_server.consistent_hash import Numbering
from paceline.recommender.parameter_server.rows import Rows

Arrays = dict[str, NDArray[Any]]
# Own checkpoints beside those that belong to one of the run's.
_KEEP_OWN = 2
_MANIFEST = re.compile(r"step-(\d+)\.json")


class ServerCheckpoints:
    """The checkpoints of one holder of rows among several.

    Args:
        folder: of all holders.
        part: which one this is.
        num_parts: how many there are.
    """

    def __init__(self, folder: Path, part: int, num_parts: int) -> None:
        self.folder, self.part, self.num_parts = folder, part, num_parts

    def write(self, step: int, arrays: Arrays) -> None:
        """Keep the state after `step` steps.

        Raises:
            OSError: the disk is full, ...
        """
        own = _part(self.folder, self.part)
        own.mkdir(parents=True, exist_ok=True)
        body, manifest = _files(own, step)
        partial = body.with_suffix(".tmp")
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, partial)
        facts = {"step": step, "num_parts": self.num_parts, **_seal(partial)}
        partial.rename(body)
        draft = manifest.with_suffix(".tmp-json")
        draft.write_text(json.dumps(facts))
        to_disk(draft)
        draft.rename(manifest)
        to_disk(own)

    def steps(self) -> list[int]:
        """Steps of this holder's own complete checkpoints, ascending."""
        own = _part(self.folder, self.part)
        names = [path.name for path in own.iterdir()] if own.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := _MANIFEST.fullmatch(name)))

    def newest_good(self) -> tuple[int, Arrays] | None:
        """This holder's newest checkpoint that is as written, None where there is none.

        One that was written when there were more or fewer holders has other rows, and is left out.
        """
        own = _part(self.folder, self.part)
        for step in reversed(self.steps()):
            facts = _facts(own, step)
            if facts is None or facts.get("num_parts") != self.num_parts:
                continue
            arrays = _read(own, step)
            if arrays is not None:
                return step, arrays
        return None

    def read(self, step: int) -> Iterator[Arrays]:
        """What all holders kept at a step, one after another, however many they were.

        Raises:
            RunError: one of them is missing or damaged.
        """
        first = _facts(_part(self.folder, 0), step)
        for part in range(first["num_parts"] if first else 1):
            arrays = _read(_part(self.folder, part), step)
            if arrays is None:
                raise RunError(
                    f"{_files(_part(self.folder, part), step)[0]} is missing or damaged, and the "
                    f"run can't go on from step {step} without it: remove that step's checkpoint "
                    "to go on from the one before, or start over with --fresh."
                )
            yield arrays

    def tidy(self, run_checkpoints: Path) -> None:
        """Keep the newest ones, and whatever belongs to a checkpoint of the run."""
        old = self.steps()[:-_KEEP_OWN]
        self.forget([step for step in old if not (run_checkpoints / f"step-{step}").exists()])

    def forget(self, steps: list[int]) -> None:
        """Remove some of this holder's checkpoints, the manifest first."""
        for step in steps:
            for path in reversed(_files(_part(self.folder, self.part), step)):
                path.unlink(missing_ok=True)


def whole_tables(folder: Path, step: int, numbering: Numbering) -> list[Rows]:
    """The rows of each table (rows, dim) as all holders kept them at a step.

    Raises:
        RunError: some are missing or damaged.
    """
    kept = list(ServerCheckpoints(folder, 0, 1).read(step))
    ids = np.concatenate([arrays["ids"] for arrays in kept])
    if (num_kept := len(np.unique(ids))) != numbering.num_rows:
        raise RunError(
            f"{folder} has {num_kept} of {numbering.num_rows} rows of step {step}: train on to "
            "another checkpoint, or start over with --fresh."
        )
    values = np.concatenate([arrays["values"] for arrays in kept])[np.argsort(ids, kind="stable")]
    return np.split(values, numbering.offsets[1:-1])


def _part(folder: Path, part: int) -> Path:
    return folder / f"part-{part}"


def _files(own: Path, step: int) -> tuple[Path, Path]:
    return own / f"step-{step}.safetensors", own / f"step-{step}.json"


def _seal(path: Path) -> dict[str, Any]:
    """Put a file onto the disk; return its size and checksum."""
    to_disk(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size_bytes": path.stat().st_size, "sha256": digest}


def _facts(own: Path, step: int) -> dict[str, Any] | None:
    try:
        facts = json.loads(_files(own, step)[1].read_bytes())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and facts.get("step") == step else None


def _read(own: Path, step: int) -> Arrays | None:
    """A checkpoint, None where it is missing or not what was written."""
    facts, body = _facts(own, step), _files(own, step)[0]
    try:
        sealed = _seal(body)
    except OSError:
        return None
    if facts is None or any(facts.get(name) != value for name, value in sealed.items()):
        return None
    return load_file(body)
