"""How wrong the planner is on published runs, beside what other public tools reach on them.

Writes planner.md beside this file. Every table says what its constants were fitted to; lines that
were fitted to have no part in its errors. Draws of lines are seeded, and a figure over several
draws is their mean with the worst.

The tables in `data/` are facts compiled from public sources, one source per line. vTrain's measured
Megatron steps (https://github.com/VIA-Research/vTrain, MIT) are another project's files: give the
folder that has vtrain_a100_single.csv and vtrain_a100_multi.csv by --vtrain or the environment
variable PACELINE_VTRAIN; without it those rows are left out, and the page says so.

    python benchmarks/planner.py [--vtrain FOLDER] [--draws 5] [--quick]
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from paceline.published import PublishedRun, read_runs
from paceline.published.validate.validate import (
    Calibration,
    PredictionErrors,
    Regret,
    Report,
    errors,
    mean_regrets,
    validate,
)

HERE = Path(__file__).resolve().parent
LLM = HERE / "data" / "published_llm_runs.csv"

# What others reach on the same rows: (rows, predictor, mean error). Calculon 1.2, llm-analysis and
# the kernel tables of aiconfigurator-core were run on them; vTrain's figures are its paper's.
OTHERS = {
    "vtrain_a100_single": (
        ("a fixed utilisation of 45 %", "57.6 %"),
        ("Calculon as shipped", "38.9 %"),
        ("kernel tables, nothing fitted", "28.5 %"),
        ("kernel tables, launch floor, 8 scalars fitted to 5 %", "6.6 %"),
        ("vTrain's own claim", "8.4 %"),
    ),
    "vtrain_a100_multi": (
        ("a fixed utilisation of 45 %", "19.5 %"),
        ("Calculon", "11.1 %"),
        ("kernel tables, launch floor, nothing fitted / 11 points", "11.2 % / 8.4 %"),
        ("vTrain's own claim", "14.7 %"),
    ),
    "llm-foundry": (
        ("kernel tables, median over-prediction A100 / H100", "32 % / 70 %"),
        ("kernel tables, six points per device A100 / H100", "6.9 % / 8.7 %"),
    ),
}
MEGATRON = "Megatron-Bridge"
Chosen = Callable[[PublishedRun], bool]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vtrain", type=Path, default=os.environ.get("PACELINE_VTRAIN"))
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one draw, no cross-validation")
    options = parser.parse_args()
    draws = 1 if options.quick else options.draws
    runs = read_runs([LLM])
    parts = ["# How wrong the planner is", *_preface()]
    parts += [*_vtrain(options.vtrain, draws)]
    parts += [*_sources(runs, draws, cross=not options.quick)]
    (HERE / "planner.md").write_text("\n".join(parts) + "\n")
    print(HERE / "planner.md")


def _preface() -> Iterator[str]:
    yield ""
    yield "Made by `python benchmarks/planner.py`; `paceline validate` prints such tables for any"
    yield "table of runs. Errors are mean absolute ones of the metric that the source measured,"
    yield "repeated set-ups counted once. Identical set-ups differ by 3 to 6 % between releases of"
    yield "one container: nothing below that is more than luck."


def _vtrain(folder: Path | None, draws: int) -> Iterator[str]:
    yield "\n## Megatron on A100, every layout of a small network (vTrain's measurements)\n"
    if folder is None:
        yield "Left out: give the folder of vTrain's files by `--vtrain`."
        return
    yield "The launch floor, the rule for vocabularies that a table leaves out and the cost of odd"
    yield "row lengths were found on these rows: they are development data, not a blind test.\n"
    yield "| rows | predictor | mean error | regret, mean | regret, worst | best chosen |"
    yield "|---|---|---:|---:|---:|---:|"
    regrets: list[Regret] = []
    for name in ("vtrain_a100_single", "vtrain_a100_multi"):
        runs = read_runs([Path(folder) / f"{name}.csv"])
        yield _row_of_draws(name, "nothing fitted", [_told(runs, Calibration())])
        fitted = [_told(runs, Calibration(share=0.05, seed=seed)) for seed in range(draws)]
        yield _row_of_draws(name, f"fitted to 5 % of the rows, {draws} draws", fitted)
        yield from _others(name, "", "| | | |")
        regrets += [one for report in fitted for one in report.regrets()]
    works = {(one.group, one.work) for one in regrets}
    mean = fmean(one.regret for one in regrets)
    yield f"\nFitted, over the {len(works)} works of both tables, the mean regret is {mean:.1%}."


def _others(name: str, start: str, end: str) -> Iterator[str]:
    for predictor, error in OTHERS[name]:
        yield f"| {start} | *{predictor}* | *{error}* {end}"


def _row_of_draws(name: str, predictor: str, reports: Sequence[Report]) -> str:
    found = [mean_regrets(report.regrets())[name] for report in reports]
    error = _mean_and_worst([report.by_source()[0].mean for report in reports])
    mean = _mean_and_worst([one["mean"] for one in found])
    worst = f"{max(one['worst'] for one in found):.1%}"
    best = f"{fmean(one['best_chosen'] for one in found):.0%}"
    return f"| {name} | {predictor} | {error} | {mean} | {worst} | {best} |"


def _sources(runs: list[PublishedRun], draws: int, cross: bool) -> Iterator[str]:
    zero = _told(runs, Calibration())
    six = [_told(runs, Calibration(points=6, seed=seed)) for seed in range(draws)]
    others = _told(runs, Calibration(by_source=True)) if cross else None
    yield "\n## Published runs, by source\n"
    yield "Defaults: nothing fitted here, **but these lines are what the planner was made with**."
    yield "Formulas were corrected while looking at their errors, and the usual constants of"
    yield "torchtitan and torchao (`published/software.py`) were derived from themselves:"
    yield "for these two the column flatters."
    yield "What the first flash attention costs in llm-foundry is the word"
    yield "of FlashAttention-2's paper, not of these lines. By others: constants fitted to other"
    yield "sources with the same software, or plain defaults where there is none, without those"
    yield "usual constants. Six: fitted to six lines of each device and stack, mean and worst of"
    yield f"{draws} draws.\n"
    yield "| source | lines | defaults | bias | by others | six | correlation |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for one in zero.by_source():
        yield _source_row(one, zero, others, six, partial(_is_of, one.name))
    yield from _megatron(zero, others, six)
    yield "\nWhat others reach on lines of these sources:\n"
    yield "| source | predictor | error |"
    yield "|---|---|---:|"
    yield from _others("llm-foundry", "llm-foundry", "|")
    yield from _memory(zero)
    yield from _unpredicted(zero)


def _megatron(zero: Report, others: Report | None, six: Sequence[Report]) -> Iterator[str]:
    """All releases together, by what their networks and arithmetic are."""
    parts: dict[str, Chosen] = {
        "dense, bf16 and fp8": lambda run: "experts" not in _key(run) and "4-bit" not in _key(run),
        "dense, fp4": lambda run: "experts" not in _key(run) and "4-bit" in _key(run),
        "experts": lambda run: "experts" in _key(run),
    }
    for words, chosen in parts.items():

        def keep(run: PublishedRun, chosen: Chosen = chosen) -> bool:
            return run.group.startswith(MEGATRON) and chosen(run)

        total = _pooled(zero, keep, f"**{MEGATRON}, {words}**")
        if total is not None:
            yield _source_row(total, zero, others, six, keep)


def _key(run: PublishedRun) -> str:
    return run.work.stack_key if run.work else ""


def _source_row(
    one: PredictionErrors, zero: Report, others: Report | None, six: Sequence[Report], keep: Chosen
) -> str:
    found = [e for report in six if (e := _pooled(report, keep)) is not None]
    fitted = _mean_and_worst([e.mean for e in found]) if found else "–"
    crossed = None if others is None else _pooled(others, keep)
    correlation = "–" if one.correlation is None else f"{one.correlation:.3f}"
    cells = [one.name, f"{one.lines}", f"{one.mean:.1%}", f"{one.bias:+.1%}"]
    cells += ["–" if crossed is None else f"{crossed.mean:.1%}", fitted, correlation]
    return f"| {' | '.join(cells)} |"


def _is_of(group: str, run: PublishedRun) -> bool:
    return run.group == group


def _pooled(report: Report, keep: Chosen, name: str = "") -> PredictionErrors | None:
    some = [one for one in report.tested if keep(one.run)]
    return errors(name, some) if some else None


def _memory(report: Report) -> Iterator[str]:
    yield "\n## Peak memory\n"
    yield "| source, and what it measured | lines | mean error | bias | over | under |"
    yield "|---|---:|---:|---:|---:|---:|"
    for one in report.memory():
        share = f"{one.mean:.1%} | {one.bias:+.1%}"
        yield f"| {one.name} | {one.lines} | {share} | {one.over} | {one.under} |"
    yield "\n| source | ran | of these said not to fit | ran out of memory | of these said to fit |"
    yield "|---|---:|---:|---:|---:|"
    for fits in (*report.fits_by_source(), report.fits()):
        refused, false_fits = fits.false_refusals, fits.false_fits
        yield f"| {fits.name} | {fits.ran} | {refused} | {fits.out_of_memory} | {false_fits} |"


def _unpredicted(report: Report) -> Iterator[str]:
    yield "\n## Lines that are not predicted\n"
    for group, reasons in report.unpredicted().items():
        yield f"- {group}: " + ", ".join(f"{count} {why}" for why, count in reasons.items())


def _told(runs: Sequence[PublishedRun], calibration: Calibration) -> Report:
    print(f"{len(runs)} lines, {calibration}", file=sys.stderr)
    return validate(runs, calibration)


def _mean_and_worst(values: Sequence[float]) -> str:
    mean = f"{fmean(values):.1%}"
    return mean if len(values) == 1 else f"{mean} (worst {max(values):.1%})"


if __name__ == "__main__":
    main()
