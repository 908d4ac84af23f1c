"""The tables of `paceline validate` for a terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.plan.validate.validate import (
    Errors,
    Fits,
    MemoryErrors,
    Regret,
    Report,
    mean_regrets,
)


def tables(report: Report) -> RenderableType:
    """Everything that a report has to show."""
    parts: list[RenderableType] = [Text(sentence(report), style="bold")]
    overall = report.overall()
    if overall is not None:
        sources = _error_table("source", report.by_source(), "runtime")
        if len(report.by_source()) > 1:
            sources.add_section()
            sources.add_row(*_error_cells(overall), style="bold")
        parts.append(sources)
        parts.append(_error_table("device and stack", report.by_stack()))
    parts += _regret_table(report.regrets())
    parts += _memory_table(report.memory())
    parts += _fit_table(report)
    parts += _unpredicted(report)
    return Group(*parts)


def show(report: Report, console: Console | None = None) -> None:
    """Print the tables."""
    (console or Console()).print(tables(report))


def sentence(report: Report) -> str:
    """What was predicted, and with which constants."""
    lines = len(report.scored)
    done = sum(one.prediction is not None for one in report.scored)
    fitted = sum(one.fitted_to for one in report.scored)
    if report.calibration.by_source:
        how = "constants fitted to the other sources with the same software"
    elif fitted:
        how = f"constants fitted to {fitted} lines, which are left out of the errors"
    else:
        how = "default constants, nothing fitted"
    whose = "each as the software that ran it, not as Paceline's own runtime"
    return f"{done:,} of {lines:,} lines predicted, {whose}; {how}."


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _error_table(title: str, some: Sequence[Errors], *more: str) -> Table:
    table = _table(title, "lines", "mean error", "median", "bias", "correlation", *more)
    for errors in some:
        table.add_row(*_error_cells(errors)[: len(table.columns)])
    return table


def _error_cells(errors: Errors) -> list[str]:
    correlation = "–" if errors.correlation is None else f"{errors.correlation:.3f}"
    share = [f"{errors.mean:.1%}", f"{errors.median:.1%}", f"{errors.bias:+.1%}"]
    runtimes = ", ".join(errors.runtimes)
    return [errors.name, f"{errors.lines:,}", *share, correlation, runtimes]


def _regret_table(found: Sequence[Regret]) -> list[RenderableType]:
    if not found:
        return []
    table = _table("regret: slower than the best layout", "works", "mean", "worst", "best chosen")
    for group, figures in mean_regrets(found).items():
        table.add_row(
            group,
            f"{figures['works']:.0f}",
            f"{figures['mean']:.1%}",
            f"{figures['worst']:.1%}",
            f"{figures['best_chosen']:.0%}",
        )
    return [table]


def _memory_table(some: Sequence[MemoryErrors]) -> list[RenderableType]:
    if not some:
        return []
    table = _table("peak memory", "lines", "mean error", "bias", "over", "under")
    for errors in some:
        table.add_row(
            errors.name,
            f"{errors.lines}",
            f"{errors.mean:.1%}",
            f"{errors.bias:+.1%}",
            f"{errors.over}",
            f"{errors.under}",
        )
    return [table]


def _fit_table(report: Report) -> list[RenderableType]:
    """False refusals and false fits, per source and of all."""
    some, total = report.fits_by_source(), report.fits()
    if not some:
        return []
    table = _table("fits into memory", "ran", "refused", "ran out of memory", "said to fit")
    for fits in some:
        table.add_row(*_fit_cells(fits))
    if len(some) > 1:
        table.add_section()
        table.add_row(*_fit_cells(total), style="bold")
    return [table]


def _fit_cells(fits: Fits) -> list[str]:
    counts = (fits.ran, fits.false_refusals, fits.out_of_memory, fits.false_fits)
    return [fits.name, *(f"{count:,}" for count in counts)]


def _unpredicted(report: Report) -> list[RenderableType]:
    lines = [
        f"  {group}: " + ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        for group, reasons in report.unpredicted().items()
    ]
    return [Text("Not predicted:\n" + "\n".join(lines))] if lines else []
