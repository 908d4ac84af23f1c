"""Console: what the terminal shows while a run goes on, and the table of where its step time went.

`Progress` is fed the lines of metrics.jsonl. On a terminal it keeps one live line, redrawn by the
training thread itself a few times a second at most. Rich's refresh thread would wake up between
steps and take the interpreter from it. Anywhere else (a file, a pipe, the log of a scheduler) it
prints a plain line every ten seconds and no control codes.

It does not compute figures: those come with the lines, or from `summary`.
"""

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from paceline.observe import summary
from paceline.observe.generations import Generations
from paceline.observe.summary import Facts, Lines, StepTime, Summary
from paceline.observe.terms import colour
from paceline.render.figures import (
    amount_text,
    bytes_text,
    duration_text,
    loss_text,
    mfu_text,
    plural,
    share_text,
)
from paceline.render.table import Pairs, Table, share_bar

_REDRAW_S = 0.2
_PLAIN_LINE_S = 10.0
_BAR_WIDTH = 20
# A terminal with less room than this shows figures rather than a bar.
_WIDTH_FOR_BAR = 100
# Steps over which the remaining time is extrapolated.
_RECENT_STEPS = 100


class Progress:
    """The state of a run on the terminal: one live line, or plain lines now and then."""

    def __init__(self, num_steps: int, unit: str = "tokens", console: Console | None = None):
        """Nothing is shown before the first step.

        Args:
            num_steps: last step of the run, counted from 1.
            unit: what the run counts, "tokens" or "samples".
            console: where to show it; standard output where it is left out.
        """
        self._num_steps = num_steps
        self._unit = unit
        self._console = console or _standard_output()
        self._live: Live | None = None
        self._line: Mapping[str, Any] = {}
        self._ends_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._drawn_s = -1e9

    def update(self, line: Mapping[str, Any]) -> None:
        """Show a finished step; most calls only remember it (see the module)."""
        now_s = time.monotonic()
        # The held-out loss stays on show until the next evaluation.
        self._line = {"eval_loss": self._line.get("eval_loss"), **line}
        self._ends_s.append(now_s)
        live = self._console.is_interactive
        due = now_s - self._drawn_s >= (_REDRAW_S if live else _PLAIN_LINE_S)
        if due or line["step"] >= self._num_steps:
            self._drawn_s = now_s
            self._draw() if live else self._print(self._text(" | "))

    def say(self, message: RenderableType) -> None:
        """Print a message (plain text, or anything rich can render) above the live line."""
        self._print(Text(message) if isinstance(message, str) else message)

    def close(self) -> None:
        """Leave the last state on the terminal and give it back; closing twice does no harm."""
        if self._live:
            self._draw()
            self._live.stop()
            self._live = None

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        text = self._text("  ")
        text.no_wrap, text.overflow = True, "ellipsis"
        self._live.update(text, refresh=True)

    def _print(self, message: RenderableType) -> None:
        # A line of a log is never broken in two; on a terminal that would break the live line.
        whole = isinstance(message, Text) and not self._console.is_interactive
        self._console.print(message, soft_wrap=whole)

    def _text(self, separator: str) -> Text:
        step = self._line["step"]
        parts = [Text(f"step {step}/{self._num_steps}", "bold")]
        if self._console.is_interactive and self._console.width >= _WIDTH_FOR_BAR:
            parts.append(self._bar(step / self._num_steps))
        parts += [Text(part) for part in self._figures()]
        return Text(separator).join(parts)

    def _figures(self) -> list[str]:
        line = self._line
        figures = [f"loss {loss_text(summary.number(line.get('loss')))}"]
        if (eval_loss := summary.number(line["eval_loss"])) is not None:
            figures.append(f"held out {loss_text(eval_loss)}")
        rate = summary.number(line.get(f"{self._unit}_per_s"))
        figures.append(f"{amount_text(rate)} {self._unit}/s")
        if line["step"] < self._num_steps:
            figures.append(f"{duration_text(self._remaining_s())} left")
        if line.get("skipped"):
            figures.append(f"{line['skipped']} skipped")
        # Last, because a narrow terminal cuts the end.
        figures.append(mfu_text(summary.number(line.get("mfu"))))
        return figures

    def _remaining_s(self) -> float:
        per_step_s = summary.number(self._line.get("step_time_s")) or 0.0
        if len(self._ends_s) > 1:
            per_step_s = (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
        return per_step_s * (self._num_steps - self._line["step"])

    def _bar(self, share: float) -> Text:
        mark = "━" if self._console.encoding.startswith("utf") else "-"
        done = round(_BAR_WIDTH * min(share, 1.0))
        return Text.assemble((mark * done, "cyan"), (mark * (_BAR_WIDTH - done), "bright_black"))


def _standard_output() -> Console:
    # A file is not a terminal, even where the environment asks for colours everywhere.
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, force_terminal=False, force_interactive=False)


def step_time_table(
    lines: Lines,
    facts: Facts,
    *,
    has_windows: bool = False,
    generations: Generations | None = None,
) -> RenderableType:
    """Where the step time went by term, and the key figures of the run, for the terminal.

    Args:
        lines: the steps, as `Run.metrics` returns them; there may be none.
        facts: as `Run.facts` returns them; anything may be missing.
        has_windows: whether steps were recorded, though no line may have their terms.
        generations: of an elastic run.
    """
    if not lines:
        return Text("No step has finished yet.")
    times = summary.step_time(lines)
    parts: list[RenderableType] = [_terms_table(times, has_windows)] if times.terms_s else []
    rows = _figure_rows(summary.summarise(lines, facts))
    if generations is not None:
        rows.append(("interruptions", generations.summary))
    return Group(*parts, Pairs(rows))


def _terms_table(times: StepTime, has_windows: bool) -> Table:
    kind = "profiled step" if times.profiled else "step"
    return Table(
        ("term", "ms", "share", ""),
        [
            (term, f"{ms:.1f}", share_text(share), share_bar(share, colour(term), _BAR_WIDTH))
            for term, ms, share in times.rows()
        ],
        words=(0, 3),
        foot=("whole step", f"{times.total_s * 1e3:.1f}", "100.0%", ""),
        title=f"Step time, mean of {plural(times.num_steps, kind)}",
        note="" if times.profiled else _UNTOLD if has_windows else _UNPROFILED,
        ruled=True,
    )


_UNTOLD = (
    "The recorded steps were written down before their traces were read; paceline explain has "
    "their terms."
)
_UNPROFILED = (
    "No step was profiled, so computation and communication are in unattributed; "
    "observe.profile_every splits them."
)


def _figure_rows(figures: Summary) -> list[tuple[str, str]]:
    moved = f"{loss_text(figures.loss)} (from {loss_text(figures.first_loss)})"
    if figures.first_loss is None:
        moved = "no step had a finite loss"
    rows = [
        ("steps", f"{figures.step:,} in {duration_text(figures.total_s)}"),
        ("loss", moved),
        ("held out", _held_out(figures)),
        ("unigram bound", summary.unigram_sentence(figures) or ""),
        ("AUC", summary.auc_text(figures) or ""),
        ("throughput", f"{amount_text(figures.rate)} {figures.unit}/s (median)"),
        ("MFU", "peak unknown" if figures.mfu is None else f"{figures.mfu:.1%} (median)"),
        ("memory", f"{bytes_text(figures.memory_bytes)} (peak of rank 0)"),
        ("skipped steps", f"{figures.skipped}"),
    ]
    return [(name, text) for name, text in rows if text]


def _held_out(figures: Summary) -> str:
    if figures.eval_loss is None:
        return ""
    perplexity = figures.eval_perplexity
    return loss_text(figures.eval_loss) + (
        f" (perplexity {perplexity:.4g})" if perplexity is not None else ""
    )
