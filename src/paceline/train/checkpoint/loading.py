"""Finding the newest checkpoint that is whole, and loading it into whatever layout there is now.

Nothing is written here: a folder may be read while a run saves into it. What a run removes in that
moment is reported like a damaged file.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config.errors import InputError
from paceline.train.checkpoint.files import (
    DamagedError,
    FoundState,
    check_file,
    complete_steps,
    decode_manifest,
    manifest_bytes,
)
from paceline.train.checkpoint.found import (
    FoundCheckpoint,
    fill,
    first_few,
    matching_entries,
    unclaimed,
)
from paceline.train.checkpoint.lockstep import LockstepRanks


def newest_good(
    directory: Path, ranks: LockstepRanks, say: Callable[[str], None]
) -> tuple[FoundCheckpoint | None, set[int]]:
    """Find the newest checkpoint whose every byte is as written. The ranks share the reading.

    A damaged one is refused by name, and the one before it tried.

    Args:
        directory: where the `step-<n>` directories are; it may be absent.
        ranks: all that call this.
        say: takes a sentence for a person about each one refused; called on every rank.

    Returns:
        the checkpoint, None where there is none, and the steps of the newer ones that are damaged.

    Raises:
        InputError: there are checkpoints, but none of them is good.
    """
    refused: dict[int, str] = {}
    for step in reversed(ranks.on_first(lambda: complete_steps(directory))):
        try:
            found = _verify(directory / f"step-{step}", step, ranks)
        except DamagedError as damage:
            refused[step] = f"step-{step}: {damage}"
            say(f"checkpoint step-{step} is refused: {damage}.")
            continue
        if refused:
            say(f"checkpoint step-{step} is good and taken instead.")
        return found, set(refused)
    if refused:
        raise InputError(
            f"none of the {len(refused)} checkpoints in {directory} is good "
            f"({'; '.join(refused.values())}); put back a copy, or remove the directory to start "
            "anew."
        )
    return None, set()


def has_good_after(directory: Path, step: int) -> bool:
    """Whether there is a checkpoint of a later step whose every byte is as written. One process
    reads it alone; a disk that it can't read has none."""
    alone = LockstepRanks.alone()
    with suppress(OSError):
        for later in reversed(complete_steps(directory)):
            if later <= step:
                break
            with suppress(DamagedError):
                _verify(directory / f"step-{later}", later, alone)
                return True
    return False


def good_at(directory: Path, step: int, ranks: LockstepRanks) -> FoundCheckpoint:
    """The checkpoint of a step. The ranks share the reading.

    Raises:
        InputError: there is none, or a byte of it isn't as written.
    """
    known = ranks.on_first(lambda: complete_steps(directory))
    if step not in known:
        there = ", ".join(map(str, known)) or "none"
        raise InputError(f"{directory} has no checkpoint of step {step}: there are {there}.")
    try:
        return _verify(directory / f"step-{step}", step, ranks)
    except DamagedError as damage:
        raise InputError(
            f"checkpoint step-{step} in {directory} is damaged ({damage}): take another one."
        ) from None


def load(found: FoundState, tensors: dict[str, Any], ranks: LockstepRanks) -> dict[str, Any]:
    """Fill `tensors` in place from a saved state, of whatever layout and number of ranks.

    Tensors are copied into, other entries replaced. Top-level sections that aren't asked for
    are left out; within one that is, checkpoint and `tensors` must hold the same names, shapes
    and dtypes. The section "rng" is per rank: entries that don't fit stay as they are.

    Returns:
        The facts that were given to `save`.

    Raises:
        InputError: names, shapes or dtypes differ; then nothing was changed.
        DamagedError: of a state in memory, what is left doesn't make up the whole.
    """
    wanted = ranks.together(lambda: matching_entries(found, tensors))
    # A name that no rank asks for, though its section is asked for, would be lost in silence.
    names = list(found.manifest.tensors)
    mine = unclaimed(found, tensors, wanted)
    # Who asks for nothing (and only hands over what it holds) has no say in that.
    is_loaded = ranks.any_of([bool(tensors) and name not in mine for name in names])
    lost = sorted(name for name, loaded in zip(names, is_loaded, strict=True) if not loaded)
    if lost:
        raise InputError(
            f"checkpoint step-{found.step} holds {first_few(lost)}, which the model or "
            "optimizer lacks; continue with the ones that were saved."
        )
    ranks.together(lambda: fill(found, wanted))
    return found.facts


def _verify(path: Path, step: int, ranks: LockstepRanks) -> FoundCheckpoint:
    manifest = decode_manifest(ranks.on_first(lambda: manifest_bytes(path)), step)
    mine = sorted(manifest.files)[ranks.rank :: ranks.size]
    problems = [check_file(path / name, manifest.files[name]) for name in mine]
    for of_rank in ranks.all_gather(problems):
        for problem in of_rank:
            if problem is not None:
                raise DamagedError(problem)
    return FoundCheckpoint(step, manifest, path)
