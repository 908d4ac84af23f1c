"""What a checkpoint holds, and how it gets into tensors.

Whole tensors are read chunk by chunk. Where ranks hold parts, `plan` finds what overlaps: torch's
distributed tensors take as long to import as half of torch, and who serves a network needs none.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.comm.local_part import is_shared
from paceline.config.errors import InputError
from paceline.train.checkpoint.files import FoundState, Overlap, chunk_key
from paceline.train.checkpoint.leaves import Leaf, leaves
from paceline.train.checkpoint.regions import Region

# Entries below this name belong to one rank each; ranks that weren't there have none.
PER_RANK_SECTION = "rng"


def matching_entries(found: FoundState, nested: dict[str, Any]) -> dict[str, Leaf]:
    """Return the entries to load, having checked that the checkpoint has each as it is needed.

    Raises:
        InputError: a name is missing, or its shape, dtype or kind differs.
    """
    flat = leaves(nested)
    problems = {path: _misfit(found, path, leaf.value) for path, leaf in flat.items()}
    wrong = {path: problem for path, problem in problems.items() if problem is not None}
    per_rank = [path for path in wrong if path.startswith(f"{PER_RANK_SECTION}.")]
    serious = [path for path in wrong if path not in per_rank]
    if serious:
        what = first_few([wrong[path] for path in serious])
        raise InputError(
            f"checkpoint step-{found.step} doesn't fit: {what}; "
            "continue with the model, precision and optimizer that were saved."
        )
    return {path: leaf for path, leaf in flat.items() if path not in wrong}


def _misfit(found: FoundState, path: str, value: Any) -> str | None:
    entry = found.manifest.tensors.get(path)
    if not isinstance(value, Tensor):
        is_there = path in found.manifest.values
        return None if is_there else f"{path} is {'a tensor' if entry else 'not'} in it"
    if entry is None:
        return f"{path} is {'not a tensor' if path in found.manifest.values else 'not'} in it"
    if (entry.torch_dtype, entry.size) != (value.dtype, list(value.shape)):
        saved = f"{entry.torch_dtype} {tuple(entry.size)}"
        return f"{path} was saved as {saved} and is {value.dtype} {tuple(value.shape)}"
    return None


def unclaimed(found: FoundState, nested: Mapping[str, Any], taken: Collection[str]) -> set[str]:
    """Return the saved tensors that are not taken, though others of their section are asked for."""
    sections = set(nested) - {PER_RANK_SECTION}
    return {
        name
        for name in found.manifest.tensors
        if name.partition(".")[0] in sections and name not in taken
    }


def first_few(names: Sequence[str]) -> str:
    """Name the first few of a list in a sentence."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def fill(found: FoundState, wanted: Mapping[str, Leaf]) -> None:
    """Copy a state into the wanted tensors, in place, and replace the wanted values.

    Raises:
        InputError, DamagedError: as `FoundState.fill`.
    """
    values = found.manifest.values
    for path, leaf in wanted.items():
        if not isinstance(leaf.value, Tensor):
            is_tuple = isinstance(leaf.value, tuple)
            leaf.holder[leaf.key] = tuple(values[path]) if is_tuple else values[path]
    tensors = {path: leaf.value for path, leaf in wanted.items()}
    found.fill({path: value for path, value in tensors.items() if isinstance(value, Tensor)})


@dataclass(frozen=True)
class FoundCheckpoint(FoundState):
    """A complete checkpoint whose every file was read and matched its checksum."""

    path: Path
    opened: Mapping[str, Path] = field(default_factory=dict)
    """Files that are read elsewhere than in `path`."""

    @contextmanager
    def held(self) -> Iterator["FoundCheckpoint"]:
        """Within the context it can be read even after the run has removed it.

        Raises:
            OSError: it has been removed already.
        """
        with ExitStack() as stack:
            opened = {}
            for name in self.manifest.files:
                file = stack.enter_context((self.path / name).open("rb"))
                opened[name] = Path(f"/dev/fd/{file.fileno()}")
            yield replace(self, opened=opened)

    def fill(self, targets: dict[str, Tensor]) -> None:
        """Read what overlaps each target out of the files.

        Raises:
            InputError: a shard is no safetensors file or lacks a chunk, though its checksum is
                right.
        """
        if any(map(is_shared, targets.values())):
            from paceline.train.checkpoint.plan import overlaps

            wanted = overlaps(self, targets)
        else:
            wanted = self._whole(targets)
        by_file: dict[str, list[Overlap]] = {}
        for each in wanted:
            file = self.manifest.tensors[each.name].chunks[each.number].file
            by_file.setdefault(file, []).append(each)
        for file, of_file in by_file.items():
            self._read(file, of_file)

    def _whole(self, targets: Mapping[str, Tensor]) -> list[Overlap]:
        found = []
        for name, target in targets.items():
            entry = self.manifest.tensors[name]
            whole = Region.whole(entry.size)
            parts = [Region(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
            if whole.numel and not (
                whole.is_covered(parts) and all(whole.overlap(part) == part for part in parts)
            ):
                raise InputError(
                    f"checkpoint step-{self.step}: the chunks of {name} don't make up the whole of "
                    "it, as the manifest has them; put back a copy."
                )
            found += [
                Overlap(name, number, Region.whole(part.sizes), target[part.within(whole)])
                for number, part in enumerate(parts)
            ]
        return found

    @torch.no_grad()
    def _read(self, file: str, wanted: Sequence[Overlap]) -> None:
        try:
            with safe_open(self.opened.get(file, self.path / file), framework="pt") as shard:
                for name, number, part, target in wanted:
                    entry = self.manifest.tensors[name]
                    chunk = entry.chunks[number]
                    key = chunk_key(name, chunk.offsets, chunk.sizes, entry.size)
                    target.copy_(read_part(shard, key, part, chunk.sizes))
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"checkpoint step-{self.step}: {file} is not what its manifest says ({error}); "
                "put back a copy."
            ) from None


def read_part(shard: Any, key: str, part: Region, sizes: Sequence[int]) -> Tensor:
    """The part of a saved chunk of this shape that is asked for; the rest of it isn't read."""
    whole = Region.whole(sizes)
    return shard.get_tensor(key) if part == whole else shard.get_slice(key)[part.within(whole)]
