"""Validate: predict published runs, and say how wrong the planner is.

Every line of the tables is predicted as it stands (`zero-shot`), or after fitting the constants of
its software stack: to a few of its own lines, chosen by a seeded draw and left out of the errors
(`Calibration.points`), or to other sources' lines of the same stack, never to its own
(`Calibration.by_source`). Nothing is ever fitted per line or per source.

A line is priced as the software that ran it, by its published features, never as our own runtime.

An error is that of the metric which the source measured: tokens per second or seconds of a step. A
set-up that was published several times counts once (weights 1 / repeats). Regret is the question
that matters: where a source measured several layouts for the same work, how much slower than the
best of them is the one that the planner ranks first?
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.config.errors import InputError
from paceline.config.frozen import whole
from paceline.config.stack import CONSTANTS
from paceline.plan.calibrate import CalibrationSample, Constants, fit_constants, tangent
from paceline.plan.prediction import Prediction
from paceline.published import PublishedRun, PublishedWork

# More lines than this make a fit slower and no better: it has about eleven constants.
_MOST_CASES = 48
Progress = Callable[[str, float], None]
"""Told what is being done and which share of it is done, 0 to 1."""


@dataclass(frozen=True)
class Calibration:
    """Which lines the constants are fitted to."""

    points: int = 0
    """Lines of each stack; 0: none."""
    share: float = 0.0
    """Or this part of them, of each stack and source, at least one."""
    by_source: bool = False
    """Or all lines of the other sources that have the same stack."""
    seed: int = 0

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> "Calibration":
        """From "6" (lines per stack), "5%" (of the lines) or "others" (the other sources).

        Raises:
            InputError: anything else.
        """
        plain = text.strip().removesuffix("-per-stack")
        if plain == "others":
            return cls(by_source=True, seed=seed)
        points = whole(plain)
        if points is not None:
            return cls(points=points, seed=seed)
        with suppress(ValueError):
            if plain.endswith("%") and 0 < float(plain[:-1]) < 100:
                return cls(share=float(plain[:-1]) / 100, seed=seed)
        raise InputError(
            f'--calibrate-on {text[:200]!r} must be a number of lines per stack ("6"), a part of '
            'the lines ("5%") or "others" (the other sources of the tables).'
        )


@dataclass(frozen=True)
class Scored:
    """One line and its prediction."""

    run: PublishedRun
    prediction: Prediction | None
    reason: str = ""
    """Why there is no prediction."""
    fitted_to: bool = False
    """Whether the constants were fitted to this very line: then it has no part in the errors."""

    @property
    def ratio(self) -> float | None:
        """Predicted over measured, of the metric that was measured."""
        if self.prediction is None or self.run.step_s is None:
            return None
        ratio = self.prediction.step_s / self.run.step_s
        return ratio if self.run.measures_steps else 1 / ratio

    @property
    def memory_ratio(self) -> float | None:
        """Predicted over measured peak memory; None too where the layout leaves it open."""
        if self.memory_bytes is None or self.run.peak_memory_bytes is None:
            return None
        if self.run.is_memory_open:
            return None
        return self.memory_bytes / self.run.peak_memory_bytes

    @property
    def memory_bytes(self) -> float | None:
        """Predicted peak of what was measured: allocated, reserved or all memory in use."""
        if self.prediction is None:
            return None
        terms = self.prediction.heaviest.terms
        unseen = {"allocated": ("context", "allocator_slack"), "reserved": ("context",)}
        left_out = unseen.get(self.run.memory_kind, ())
        return sum(value for name, value in terms.items() if name not in left_out)


@dataclass(frozen=True)
class PredictionErrors:
    """How well some lines were predicted."""

    name: str
    lines: int
    mean: float
    """Mean absolute relative error."""
    median: float
    bias: float
    """Mean relative error: above 0 the metric was predicted too high."""
    correlation: float | None
    """Of the logarithms of predicted and measured; None for fewer than three lines."""
    runtimes: tuple[str, ...]
    """Whose steps were predicted: kinds of software, by what is published of the lines' own."""


@dataclass(frozen=True)
class Regret:
    """One piece of work that a source measured several layouts for."""

    group: str
    work: str
    layouts: int
    regret: float
    """Measured step of the layout that is predicted fastest, over that of the best, less 1."""


@dataclass(frozen=True)
class MemoryErrors:
    """How well the peak memory of some lines was predicted."""

    name: str
    lines: int
    mean: float
    bias: float
    over: int
    under: int


@dataclass(frozen=True)
class FitVerdicts:
    """Verdicts on whether layouts fit (`Prediction.fits`), of lines that leave memory closed."""

    name: str
    ran: int
    """Published to run."""
    ran_and_fits: int
    out_of_memory: int
    """Published not to fit."""
    out_of_memory_and_refused: int

    @property
    def false_refusals(self) -> int:
        """Those that ran, and are said not to fit."""
        return self.ran - self.ran_and_fits

    @property
    def false_fits(self) -> int:
        """Those that ran out of memory, and are said to fit."""
        return self.out_of_memory - self.out_of_memory_and_refused


@dataclass(frozen=True)
class Report:
    """Everything that `validate` finds."""

    calibration: Calibration
    scored: tuple[Scored, ...]

    @property
    def tested(self) -> list[Scored]:
        """Lines that count: predicted, measured and not fitted to."""
        return [one for one in self.scored if one.ratio is not None and not one.fitted_to]

    def by_source(self) -> list[PredictionErrors]:
        """Errors per source."""
        return _errors_by(self.tested, lambda one: one.run.group)

    def by_stack(self) -> list[PredictionErrors]:
        """Errors per device and stack."""
        return _errors_by(self.tested, lambda one: _work(one).stack_key)

    def overall(self) -> PredictionErrors | None:
        """Errors over all lines."""
        return errors("all", self.tested) if self.tested else None

    def unpredicted(self) -> dict[str, Counter[str]]:
        """Per source, how many lines could not be predicted for which reason."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for one in self.scored:
            if one.reason:
                found[one.run.group][one.reason] += 1
        return dict(found)

    def regrets(self) -> list[Regret]:
        """Every piece of work with several layouts."""
        return regrets(self.tested)

    def memory(self) -> list[MemoryErrors]:
        """Errors of the peak memory, per source and what was measured there."""
        grouped = _grouped(
            [one for one in self.scored if one.memory_ratio is not None],
            lambda one: f"{one.run.group} ({one.run.memory_kind})",
        )
        return [_memory_errors(name, some) for name, some in grouped.items()]

    def fits(self) -> FitVerdicts:
        """Whether what ran was predicted to fit, and what did not fit to be refused."""
        return _verdicts("all", self._judged)

    def fits_by_source(self) -> list[FitVerdicts]:
        """The same, per source."""
        grouped = _grouped(self._judged, lambda one: one.run.group)
        return [_verdicts(name, some) for name, some in grouped.items()]

    @property
    def _judged(self) -> list[Scored]:
        return [one for one in self.scored if _fits(one) is not None]


def validate(
    runs: Sequence[PublishedRun],
    calibration: Calibration | None = None,
    progress: Progress = lambda what, share: None,
) -> Report:
    """Predict published runs.

    Args:
        runs: as `paceline.published.read_runs` gives them.
        calibration: which of them the constants are fitted to; none by default.
        progress: told how far it is.
    """
    chosen = calibration or Calibration()
    constants, used = _constants_of(runs, chosen, progress)
    scored = []
    for index, run in enumerate(runs):
        progress("predicting", index / len(runs))
        scored.append(_score(run, constants.get(_fit_key(run, chosen), {}), run.name in used))
    progress("predicting", 1.0)
    return Report(chosen, tuple(scored))


def errors(name: str, some: Sequence[Scored]) -> PredictionErrors:
    """Errors of lines that have a prediction and a measurement."""
    ratios = np.array([one.ratio for one in some], float)
    weights = np.array([one.run.weight for one in some])
    off = np.abs(ratios - 1)
    return PredictionErrors(
        name=name,
        lines=len(some),
        mean=float(np.average(off, weights=weights)),
        median=_weighted_median(off, weights),
        bias=float(np.average(ratios - 1, weights=weights)),
        correlation=_correlation(some),
        runtimes=tuple(dict.fromkeys(_work(one).software.family for one in some)),
    )


def regrets(some: Sequence[Scored]) -> list[Regret]:
    """Where several layouts did the same work: what the planner's choice loses."""
    found = []
    for (group, work), same in _grouped(some, _same_work).items():
        layouts: dict[str, list[Scored]] = _grouped(same, lambda one: str(_work(one).layout))
        if len(layouts) < 2:
            continue
        rates = [(_rate(ones, measured=False), _rate(ones)) for ones in layouts.values()]
        best, chosen = max(rate for _, rate in rates), max(rates)[1]
        found.append(Regret(group, work, len(layouts), best / chosen - 1))
    return found


def _constants_of(
    runs: Sequence[PublishedRun], calibration: Calibration, progress: Progress
) -> tuple[dict[str, Constants], set[str]]:
    """Fitted constants by `_fit_key`, and the names of the lines that they were fitted to."""
    measured = [run for run in runs if run.work is not None and run.step_s is not None]
    plans = (
        _other_sources(measured, calibration.seed)
        if calibration.by_source
        else _own_points(measured, calibration)
    )
    own = not calibration.by_source
    samples: dict[str, CalibrationSample] = {}
    lines = _distinct(plans.values())
    for index, run in enumerate(lines):
        progress("pricing lines", index / len(lines))
        # Lines that many fits share are priced once.
        samples[run.name] = _sample(run) if own else _tangent(run)
    constants: dict[str, Constants] = {}
    if not own:
        constants |= {_fit_key(run, calibration): _unfitted(run) for run in measured}
    for index, (key, points) in enumerate(plans.items()):
        progress("calibrating", index / len(plans))
        if points:
            constants[key] = _fitted(points, [samples[run.name] for run in points], own)
    return constants, {run.name for run in lines if own}


def _distinct(groups: Iterable[Sequence[PublishedRun]]) -> list[PublishedRun]:
    return list({run.name: run for group in groups for run in group}.values())


def _own_points(
    runs: Sequence[PublishedRun], calibration: Calibration
) -> dict[str, list[PublishedRun]]:
    """Per stack a few of its lines, drawn at random; never more than half of them."""
    plans: dict[str, list[PublishedRun]] = {}
    if not calibration.points and not calibration.share:
        return plans
    for key, some in _grouped(runs, lambda run: _fit_key(run, calibration)).items():
        drawn = random.Random(f"{calibration.seed} {key}")
        if calibration.points:
            plans[key] = drawn.sample(some, min(calibration.points, len(some) // 2))
            continue
        for ones in _grouped(some, lambda run: run.group).values():
            number = min(math.ceil(calibration.share * len(ones)), len(ones) // 2)
            plans.setdefault(key, []).extend(drawn.sample(ones, number))
    return plans


def _other_sources(runs: Sequence[PublishedRun], seed: int) -> dict[str, list[PublishedRun]]:
    """Per source and stack the lines of other sources with that stack, else of that software."""
    plans: dict[str, list[PublishedRun]] = {}
    for run in runs:
        key = _fit_key(run, Calibration(by_source=True))
        if key in plans:
            continue
        others = [other for other in runs if other.group != run.group]
        same = [other for other in others if _key(other) == _key(run)]
        if len(same) < 3:
            same = [other for other in others if _features(other) == _features(run)]
        drawn = random.Random(f"{seed} {key}")
        plans[key] = drawn.sample(same, min(len(same), _MOST_CASES))
    return plans


def _fit_key(run: PublishedRun, calibration: Calibration) -> str:
    return f"{run.group} / {_key(run)}" if calibration.by_source else _key(run)


def _key(run: PublishedRun) -> str:
    return run.work.stack_key if run.work else ""


def _features(run: PublishedRun) -> str:
    """The stack's key without the device."""
    return _key(run).partition(" ")[2]


def _sample(run: PublishedRun) -> CalibrationSample:
    assert run.work is not None
    assert run.step_s is not None
    return CalibrationSample(run.work.seconds, run.step_s, run.weight)


def _tangent(run: PublishedRun) -> CalibrationSample:
    assert run.work is not None
    return tangent(_sample(run), _unfitted(run), run.work.fitted)


def _unfitted(run: PublishedRun) -> Constants:
    """Plain defaults in place of the usual constants of a kind of system.

    Those were themselves derived from published runs (`published.software`): a source that is
    predicted from the others must not meet itself in them.
    """
    assert run.work is not None
    return {name: CONSTANTS[name].default for name in run.work.software.stack.constants}


def _fitted(
    points: Sequence[PublishedRun], samples: Sequence[CalibrationSample], own: bool
) -> Constants:
    """Constants of lines with one stack; `own`: their usual constants are where to start."""
    work = points[0].work
    assert work is not None
    start = work.software.stack.constants if own else _unfitted(points[0])
    return fit_constants(samples, start, work.fitted)


def _score(run: PublishedRun, constants: Constants, fitted_to: bool) -> Scored:
    if run.work is None:
        return Scored(run, None, run.reason)
    try:
        prediction = run.work.predict(constants)
    except InputError as error:
        return Scored(run, None, str(error).split(":")[0][:60])
    return Scored(run, prediction, fitted_to=fitted_to)


def _errors_by(some: Sequence[Scored], key: Callable[[Scored], str]) -> list[PredictionErrors]:
    return [errors(name, ones) for name, ones in _grouped(some, key).items()]


def _memory_errors(name: str, some: Sequence[Scored]) -> MemoryErrors:
    ratios = np.array([one.memory_ratio for one in some], float)
    weights = np.array([one.run.weight for one in some])
    return MemoryErrors(
        name=name,
        lines=len(some),
        mean=float(np.average(np.abs(ratios - 1), weights=weights)),
        bias=float(np.average(ratios - 1, weights=weights)),
        over=int((ratios >= 1).sum()),
        under=int((ratios < 1).sum()),
    )


def _verdicts(name: str, judged: Sequence[Scored]) -> FitVerdicts:
    ran = [_fits(one) for one in judged if not one.run.out_of_memory]
    oom = [_fits(one) for one in judged if one.run.out_of_memory]
    return FitVerdicts(name, len(ran), ran.count(True), len(oom), oom.count(False))


def _fits(one: Scored) -> bool | None:
    if one.prediction is None or one.run.is_memory_open:
        return None
    return one.prediction.fits(_work(one).device)


def _correlation(some: Sequence[Scored]) -> float | None:
    if len(some) < 3:
        return None
    measured = np.log([_metric(one) for one in some])
    predicted = measured + np.log(np.array([one.ratio for one in some], float))
    if measured.std() == 0 or predicted.std() == 0:
        return None
    return float(np.corrcoef(measured, predicted)[0, 1])


def _metric(one: Scored) -> float:
    """What was measured: seconds of a step, or tokens (images) per second and device."""
    assert one.run.step_s is not None
    work = _work(one)
    units = work.units / work.num_devices
    return one.run.step_s if one.run.measures_steps else units / one.run.step_s


def _rate(ones: Sequence[Scored], measured: bool = True) -> float:
    """Mean samples per second of lines with one layout."""
    rates = []
    for one in ones:
        assert one.prediction is not None
        assert one.run.step_s is not None
        seconds = one.run.step_s if measured else one.prediction.step_s
        rates.append(_work(one).global_batch / seconds)
    return sum(rates) / len(rates)


def _same_work(one: Scored) -> tuple[str, str]:
    """Source and work: lines with equal ones may differ in their layout only."""
    work = _work(one)
    # Batches that were cut to close over different meshes differ by less than 3 %.
    batch = round(math.log(work.global_batch) / 0.03)
    parts = (
        f"{work.num_devices} {work.device.name}",
        *work.network_words,
        f"batch ~{math.exp(batch * 0.03):.0f}",
        work.software.precision,
        work.stack_key.partition(" ")[2],
    )
    return one.run.group, ", ".join(part for part in parts if part)


def _work(one: Scored) -> PublishedWork:
    assert one.run.work is not None
    return one.run.work


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def _grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return dict(found)


def summary(report: Report) -> dict[str, Any]:
    """The whole report as plain data, for `--json`."""
    overall = report.overall()
    return {
        "lines": len(report.scored),
        "predicted": sum(one.prediction is not None for one in report.scored),
        "fitted_to": sum(one.fitted_to for one in report.scored),
        "overall": vars(overall) if overall else None,
        "by_source": [vars(one) for one in report.by_source()],
        "by_stack": [vars(one) for one in report.by_stack()],
        "regret": mean_regrets(report.regrets()),
        "memory": [vars(one) for one in report.memory()],
        "fits": vars(report.fits()),
        "fits_by_source": [vars(one) for one in report.fits_by_source()],
        "unpredicted": {group: dict(reasons) for group, reasons in report.unpredicted().items()},
    }


def mean_regrets(found: Sequence[Regret]) -> dict[str, Mapping[str, float]]:
    """Per source: works, mean and worst regret, part of the works where the best was chosen."""
    return {
        group: {
            "works": len(some),
            "mean": sum(one.regret for one in some) / len(some),
            "worst": max(one.regret for one in some),
            "best_chosen": sum(one.regret < 1e-9 for one in some) / len(some),
        }
        for group, some in _grouped(found, lambda one: one.group).items()
    }
