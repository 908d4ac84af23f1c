"""The network benchmark's tables: blocks become rows, rows become text. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from benchmarks.netlab import rate_text
from benchmarks.network_cell import Block
from benchmarks.tables import markdown

LEFT = ("link", "way", "sent as")
"""Columns of text."""
CONTROL = "compute only"
PEER = "DDP fp32"


@dataclass(frozen=True)
class Row:
    """A way in a cell."""

    way: str
    step_s: tuple[float, float, float]
    """Median over all steps; least and most median of a block. Of rounds: over blocks' means."""
    sent_bytes: float
    """By a host, per step."""
    speed_up: float
    """Step time of DDP fp32 over this one's, within a round."""
    efficiency: float
    """Step time of the control over this one's, within a round."""
    form: str = ""
    """What our gradients travelled as, and in which buckets; "auto" chose it."""
    predicted_s: float | None = None
    """Step time by the planner, with a Cluster measured in such a laboratory."""

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one."""
        return None if self.predicted_s is None else self.predicted_s / self.step_s[0] - 1


def rows(blocks: Sequence[Block]) -> list[Row]:
    """A row for each way, in the order of their first blocks in the first round."""
    typical = {(block.way, block.round): _step_s(block) for block in blocks}
    names = list(dict.fromkeys(block.way for block in blocks if block.round == 0))
    rounds = sorted({block.round for block in blocks})

    def over(other: str, name: str) -> float:
        if (other, 0) not in typical:
            return float("nan")
        return median(typical[other, number] / typical[name, number] for number in rounds)

    table = []
    for name in names:
        mine = [block for block in blocks if block.way == name]
        of_blocks = [typical[name, number] for number in rounds]
        steps_s = median(step for block in mine for step in _alike(block))
        sent = mean(block.sent_bytes for block in mine)
        step_s = (steps_s, min(of_blocks), max(of_blocks))
        table.append(Row(name, step_s, sent, over(PEER, name), over(CONTROL, name)))
    return table


def _alike(block: Block) -> list[float]:
    """Seconds of a block's steps; where a round falls on some of them, the mean of all."""
    return [mean(block.steps_s)] if block.is_round else block.steps_s


def _step_s(block: Block) -> float:
    return median(_alike(block))


_TITLES = (
    *("hosts", "link", "way", "sent as", "step, s", "MB sent a step", f"x {PEER}"),
    *("efficiency", "predicted, s", "error"),
)


def table_lines(num_hosts: int, rate: float | None, table: Sequence[Row]) -> list[tuple[str, ...]]:
    """A cell's rows as text."""
    return [
        (
            str(num_hosts),
            rate_text(rate),
            row.way,
            row.form,
            f"{row.step_s[0]:.3f} ({row.step_s[1]:.3f} – {row.step_s[2]:.3f})",
            f"{row.sent_bytes / 1e6:.2f}",
            f"{row.speed_up:.2f}",
            f"{row.efficiency:.0%}",
            "" if row.predicted_s is None else f"{row.predicted_s:.3f}",
            "" if row.error is None else f"{row.error:+.0%}",
        )
        for row in table
    ]


def loss_lines(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[tuple[str, ...]]:
    """Way -> {"loss": of each seed, "eval_loss": of each seed}, as text beside DDP's.

    The difference to DDP's fp32 is that of the same seed, then their mean.
    """
    lines = []
    for name, of in found.items():
        apart = mean(
            a / b - 1 for a, b in zip(of["eval_loss"], found[PEER]["eval_loss"], strict=True)
        )
        spread = f"{min(of['eval_loss']):.4f} – {max(of['eval_loss']):.4f}"
        lines.append(
            (
                name,
                f"{mean(of['loss']):.4f}",
                f"{mean(of['eval_loss']):.4f} ({spread})",
                f"{apart:+.2%}",
            )
        )
    return lines


def place_of(cell: Mapping[str, Any]) -> tuple[int, float]:
    rate = cell["rate_bits_per_s"]
    return cell["num_hosts"], float("inf") if rate is None else rate


def cell_lines(cell: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A cell of the results as text."""
    table = [Row(**{**row, "step_s": tuple(row["step_s"])}) for row in cell["rows"]]
    return table_lines(cell["num_hosts"], cell["rate_bits_per_s"], table)


def summary(cells: Sequence[Mapping[str, Any]]) -> str:
    """The table of all cells, and how far predictions are off."""
    lines = [line for cell in cells for line in cell_lines(cell)]
    off = [
        abs(row["predicted_s"] / row["step_s"][0] - 1)
        for cell in cells
        for row in cell["rows"]
        if row["predicted_s"] is not None
    ]
    said = f"Predictions are off by {median(off):.1%} (median of {len(off)} rows)." if off else ""
    return f"{markdown(_TITLES, lines, LEFT)}\n{said}\n"
