"""The tables of `paceline validate`, which a terminal and the page show alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.published.validate.validate import FitVerdicts, PredictionErrors, Report, mean_regrets

_ERRORS = ("Lines", "Mean error", "Median", "Bias", "Correlation")


@dataclass(frozen=True)
class Shown:
    """A table as text: a name and its figures in each row."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    total: Sequence[str] = ()
    """Of all rows; none where there is one row or nothing to add up."""
    note: str = ""


def tables(report: Report) -> Iterator[Shown]:
    """Those that have rows."""
    for each in (
        _errors(report, "By source", report.by_source(), "Runtime"),
        _errors(report, "By device and stack", report.by_stack()),
        _regrets(report),
        _memory(report),
        _fits(report),
    ):
        if each.rows:
            yield each


def show(report: Report, console: Console | None = None) -> None:
    """Print everything that a report has to show."""
    console = console or Console()
    console.print(Text(sentence(report), style="bold"))
    for each in tables(report):
        console.print(_printed(each))
    if lines := unpredicted(report):
        told = "\n".join(f"  {group}: {reasons}" for group, reasons in lines)
        console.print(Text(f"Not predicted:\n{told}"))


def _printed(shown: Shown) -> RenderableType:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate((shown.title, *shown.heads[1:])):
        table.add_column(head.lower(), justify="right" if index else "left", overflow="fold")
    for row in shown.rows:
        table.add_row(*row)
    if shown.total:
        table.add_section()
        table.add_row(*shown.total, style="bold")
    return table


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


def _errors(report: Report, title: str, some: Sequence[PredictionErrors], *more: str) -> Shown:
    heads, overall = (title[3:].capitalize(), *_ERRORS, *more), report.overall()
    rows = [_error_cells(errors)[: len(heads)] for errors in some]
    total = _error_cells(overall)[: len(heads)] if overall is not None and len(some) > 1 else ()
    return Shown(title, heads, rows, total)


def _error_cells(errors: PredictionErrors) -> list[str]:
    correlation = "–" if errors.correlation is None else f"{errors.correlation:.3f}"
    share = [f"{errors.mean:.1%}", f"{errors.median:.1%}", f"{errors.bias:+.1%}"]
    runtimes = ", ".join(errors.runtimes)
    return [errors.name, f"{errors.lines:,}", *share, correlation, runtimes]


def _regrets(report: Report) -> Shown:
    rows = [
        [
            group,
            f"{figures['works']:.0f}",
            f"{figures['mean']:.1%}",
            f"{figures['worst']:.1%}",
            f"{figures['best_chosen']:.0%}",
        ]
        for group, figures in mean_regrets(report.regrets()).items()
    ]
    note = (
        "Where several layouts of the same work were measured: how much slower than the best of "
        "them is the one that is predicted fastest."
    )
    return Shown("Regret", ("Source", "Works", "Mean", "Worst", "Best chosen"), rows, note=note)


def _memory(report: Report) -> Shown:
    rows = [
        [
            errors.name,
            f"{errors.lines:,}",
            f"{errors.mean:.1%}",
            f"{errors.bias:+.1%}",
            f"{errors.over:,}",
            f"{errors.under:,}",
        ]
        for errors in report.memory()
    ]
    heads = ("Source, and what it measured", "Lines", "Mean error", "Bias", "Over", "Under")
    return Shown("Peak memory", heads, rows)


def _fits(report: Report) -> Shown:
    """False refusals and false fits, per source and of all."""
    some = report.fits_by_source()
    heads = ("Source", "Ran", "Refused", "Ran out of memory", "Said to fit")
    total = _fit_cells(report.fits()) if len(some) > 1 else ()
    note = (
        "Of lines that say enough to tell: how many of those that ran are said not to fit, and how "
        "many of those that ran out of memory are said to fit. Neither should be."
    )
    return Shown("Fits into memory", heads, [*map(_fit_cells, some)], total, note)


def _fit_cells(fits: FitVerdicts) -> list[str]:
    counts = (fits.ran, fits.false_refusals, fits.out_of_memory, fits.false_fits)
    return [fits.name, *(f"{count:,}" for count in counts)]


def unpredicted(report: Report) -> list[tuple[str, str]]:
    """Of each source, how many lines could not be predicted for which reason."""
    return [
        (group, ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common()))
        for group, reasons in report.unpredicted().items()
    ]
