"""The command `paceline index`: an index from documents."""

import json
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.serve.retrieval.build import Cut, build_index
from paceline.serve.retrieval.encoder import open_encoder

_NOTES = Console(stderr=True, highlight=False, soft_wrap=True)


def index_command(
    documents: Path,
    encoder_path: Path,
    out: Path,
    tokens: int,
    overlap: int,
    step: int | None,
    *,
    as_json: bool,
) -> None:
    """Make an index, and say what it is.

    Args:
        step: of the encoder's checkpoint, where it is a run; None: the newest good one.

    Raises:
        InputError: as `open_encoder` and `build_index`.
    """
    begun_s = time.perf_counter()
    encoder = open_encoder(encoder_path, step)
    columns = (TextColumn("chunks"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    is_shown = _NOTES.is_terminal
    with Progress(*columns, console=_NOTES, transient=True, disable=not is_shown) as bar:
        task = bar.add_task("chunks", visible=False)
        made = build_index(
            documents,
            encoder,
            encoder_path,
            out,
            Cut(tokens, overlap),
            lambda done, total: bar.update(task, completed=done, total=total, visible=True),
        )
    seconds = time.perf_counter() - begun_s
    told = made.model_dump(exclude={"files", "format_version"}) | {"seconds": seconds}
    if as_json:
        print(json.dumps(told))
        return
    print(
        f"{made.num_documents:,} documents, {made.num_chunks:,} chunks in {made.num_lists:,} lists "
        f"in {seconds:.1f} s\nsearches look at {made.probes:,} of them: recall {made.recall:.3f} "
        f"of the nearest 10, beside looking at all"
    )
