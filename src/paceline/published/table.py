"""A table of published runs: its lines, with every number checked.

A cell that is empty (or whose column is absent) says that nothing was published. A cell of a number
column that holds something else is an error that names line and column: a wrong number that passes
in silence would be scored as if it had been measured.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.files import read_text
from paceline.config.frozen import MOST

COUNTS = frozenset(
    (
        *("gpus", "gpus_per_node", "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim"),
        *("vocab", "experts", "topk", "moe_ffn", "seq", "micro_batch", "grad_accum"),
        *("global_batch_seqs", "dp", "tp", "pp", "vpp", "cp", "ep"),
        *("image_size", "batch_per_gpu", "global_batch"),
    )
)
"""Columns of whole numbers above 0."""
NUMBERS = frozenset(
    (
        *("params_b", "params_m", "tokens_per_s_per_gpu", "step_time_s", "step_time_ms"),
        *("tflops_per_gpu", "mfu_pct", "peak_mem_gb", "fwd_gflop_per_image"),
        *("images_per_s", "images_per_s_per_gpu", "confidence"),
    )
)
"""Columns of numbers above 0."""
OR_ZERO = frozenset(("shared_ffn", "dense_layers"))
"""Columns of whole numbers that may be 0."""
FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class PublishedLine:
    """One line of a table."""

    where: str
    """File and line, for messages."""
    file: str
    """Name of the file without folder and ending: short tables say there what they measured."""
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """A cell as it stands, "" where nothing was published."""
        return self.cells.get(column, "")

    def number(self, column: str) -> float | None:
        """A number above 0 (or 0 and more, see OR_ZERO), None where nothing was published.

        Raises:
            InputError: naming line and column of what is no such number.
        """
        text = self.text(column)
        if not text:
            return None
        value = _parsed(text)
        least = 0 if column in OR_ZERO else None
        if value is None or not value <= MOST * 1e9 or (value <= 0 and value != least):
            raise InputError(
                f"{self.where}: {column} = {text!r} must be a number above 0: correct the cell, or "
                "leave it empty where nothing was published."
            )
        return value

    def count(self, column: str) -> int | None:
        """A whole number, None where nothing was published; raises as `number`."""
        value = self.number(column)
        if value is None:
            return None
        if value != round(value):
            raise InputError(
                f"{self.where}: {column} = {self.text(column)!r} must be a whole number: "
                "correct the cell, or leave it empty where nothing was published."
            )
        return round(value)

    def flag(self, column: str) -> bool | None:
        """true or false, None where nothing was published.

        Raises:
            InputError: where the cell holds anything else.
        """
        text = self.text(column).lower()
        if not text:
            return None
        if text not in FLAGS:
            raise InputError(
                f"{self.where}: {column} = {self.text(column)!r} must be true or false: correct "
                "the cell, or leave it empty where nothing was published."
            )
        return FLAGS[text]


def read_lines(path: Path) -> list[PublishedLine]:
    """All lines of a table, checked.

    Raises:
        InputError: no such file, no table, or a cell that can't be right.
    """
    lines = [PublishedLine(where, path.stem, cells) for where, cells in _rows(path)]
    for line in lines:
        for column in line.cells:
            if column in COUNTS or column in OR_ZERO:
                line.count(column)
            elif column in NUMBERS:
                line.number(column)
    return lines


def _rows(path: Path) -> list[tuple[str, dict[str, str]]]:
    text = read_text(path, "give a CSV table of published runs, in UTF-8")
    reader = csv.reader(text.splitlines(keepends=True))
    try:
        return _checked_rows(path, reader, next(reader, []))
    except csv.Error as error:
        raise InputError(
            f"{path}:{reader.line_num}: {error}: give a CSV table, commas between cells."
        ) from None


def _checked_rows(
    path: Path, reader: object, header: list[str]
) -> list[tuple[str, dict[str, str]]]:
    columns = [name.strip() for name in header]
    repeated = {name for name in columns if name and columns.count(name) > 1}
    if repeated:
        raise InputError(
            f"{path}: column {sorted(repeated)[0]!r} stands twice in the first line: rename one."
        )
    rows = []
    assert hasattr(reader, "__next__")
    for cells in reader:  # type: ignore[attr-defined]
        where = f"{path}:{reader.line_num}"  # type: ignore[attr-defined]
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) > len(columns):
            raise InputError(
                f"{where}: {len(cells)} cells under {len(columns)} columns: quote the cell that "
                "has a comma in it."
            )
        rows.append((where, {k: v.strip() for k, v in zip(columns, cells, strict=False)}))
    return rows


def _parsed(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
