"""The tables of `paceline validate`, which a terminal and the page show alike."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from paceline.published.validate.validate import FitVerdicts, PredictionErrors, Report, mean_regrets
from paceline.render.table import Table

_ERRORS = ("lines", "mean error", "median", "bias", "correlation")


def tables(report: Report) -> Iterator[Table]:
    """Those that have rows."""
    found = (
        _errors(report, "by source", report.by_source(), "runtime"),
        _errors(report, "by device and stack", report.by_stack()),
        _regrets(report),
        _memory(report),
        _fits(report),
    )
    yield from filter(None, found)


def show(report: Report, console: Console | None = None) -> None:
    """Print everything that a report has to show."""
    console = console or Console()
    console.print(Text(sentence(report), style="bold"))
    for each in tables(report):
        console.print(each)
    if lines := unpredicted(report):
        told = "\n".join(f"  {group}: {reasons}" for group, reasons in lines)
        console.print(Text(f"Not predicted:\n{told}"))


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


def _errors(report: Report, title: str, some: Sequence[PredictionErrors], *more: str) -> Table:
    heads, overall = (title, *_ERRORS, *more), report.overall()
    rows = [_error_cells(errors)[: len(heads)] for errors in some]
    total = _error_cells(overall)[: len(heads)] if overall is not None and len(some) > 1 else ()
    # The last column, where there is one more, says whose runtime.
    return Table(heads, rows, (0, 6), foot=total, ruled=True)


def _error_cells(errors: PredictionErrors) -> list[str]:
    correlation = "–" if errors.correlation is None else f"{errors.correlation:.3f}"
    share = [f"{errors.mean:.1%}", f"{errors.median:.1%}", f"{errors.bias:+.1%}"]
    runtimes = ", ".join(errors.runtimes)
    return [errors.name, f"{errors.lines:,}", *share, correlation, runtimes]


def _regrets(report: Report) -> Table:
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
    heads = ("regret", "works", "mean", "worst", "best chosen")
    return Table(heads, rows, note=note, ruled=True)


def _memory(report: Report) -> Table:
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
    heads = ("peak memory", "lines", "mean error", "bias", "over", "under")
    return Table(heads, rows, ruled=True)


def _fits(report: Report) -> Table:
    """False refusals and false fits, per source and of all."""
    some = report.fits_by_source()
    heads = ("fits into memory", "ran", "refused", "ran out of memory", "said to fit")
    total = _fit_cells(report.fits()) if len(some) > 1 else ()
    note = (
        "Of lines that say enough to tell: how many of those that ran are said not to fit, and how "
        "many of those that ran out of memory are said to fit. Neither should be."
    )
    rows = [*map(_fit_cells, some)]
    return Table(heads, rows, foot=total, note=note, ruled=True)


def _fit_cells(fits: FitVerdicts) -> list[str]:
    counts = (fits.ran, fits.false_refusals, fits.out_of_memory, fits.false_fits)
    return [fits.name, *(f"{count:,}" for count in counts)]


def unpredicted(report: Report) -> list[tuple[str, str]]:
    """Of each source, how many lines could not be predicted for which reason."""
    return [
        (group, ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common()))
        for group, reasons in report.unpredicted().items()
    ]
