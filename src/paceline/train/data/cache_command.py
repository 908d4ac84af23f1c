"""`paceline cache`: what is kept of tokenised sources, and what would go."""

import json
import time

from rich.console import Console

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.render.figures import bytes_text, duration_text
from paceline.render.table import Table
from paceline.train.data.cache import cache_folder
from paceline.train.data.dataset import read_meta
from paceline.train.data.limit import CachedTokens, cached_tokens, remove, too_much


def cache_command(folder: str, most_gb: float | None, *, is_meant: bool, as_json: bool) -> None:
    """Show the cache, and remove what is too much.

    Args:
        folder: as `data.cache_dir`.
        most_gb: the most that it may take; None: nothing goes.
        is_meant: whether it is removed, and not only told.

    Raises:
        InputError: the folder can't be written.
    """
    cache = cache_folder(Data(cache_dir=folder))
    found = cached_tokens(cache)
    gone = [] if most_gb is None else too_much(cache, most_gb)
    if is_meant:
        gone = [one for one in gone if remove(one.folder)]
    if as_json:
        told = [_record(one, is_removed=is_meant and one in gone) for one in found]
        print(json.dumps({"folder": str(cache), "tokens": told}))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(found, gone, is_meant=is_meant))
    total = bytes_text(sum(one.num_bytes for one in found))
    console.print(f"{cache}: {total} in {len(found)} sources")
    if gone:
        freed = bytes_text(sum(one.num_bytes for one in gone))
        console.print(f"removed: {freed}" if is_meant else f"--yes would remove {freed}")


def _table(found: list[CachedTokens], gone: list[CachedTokens], *, is_meant: bool) -> Table:
    rows = []
    for one in found:
        state = "in use" if one.is_in_use else ""
        if one in gone:
            state = "removed" if is_meant else "would go"
        ago = duration_text(max(0.0, time.time() - one.used))
        rows.append((one.folder.name, _tokens(one), bytes_text(one.num_bytes), f"{ago} ago", state))
    return Table(("source", "tokens", "takes", "last read", ""), rows, words=(0, 4))


def _tokens(one: CachedTokens) -> str:
    try:
        meta = read_meta(one.folder)
    except InputError:  # of another version, or removed a moment ago
        return "unknown"
    return f"{meta.train_tokens + meta.eval_tokens:,}"


def _record(one: CachedTokens, *, is_removed: bool) -> dict[str, object]:
    return {
        "folder": str(one.folder),
        "bytes": one.num_bytes,
        "used": one.used,
        "is_in_use": one.is_in_use,
        "is_removed": is_removed,
    }
