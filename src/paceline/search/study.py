"""Study: the journal of a search, through Optuna: what was asked, what came of it.

Optuna (extra `search`) is asked with the points that are proposed, and told their objectives at the
first rung. Its journal in the search's folder holds all that is known, so that a search is what
its journal says: killed at any moment it goes on with the next move, and its own tools read it.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter

from paceline.config.errors import InputError
from paceline.config.files import MOST_BYTES, read_bytes
from paceline.config.frozen import FrozenConfig
from paceline.config.outputs import shown_path
from paceline.search.forecast import Forecast
from paceline.search.halving import RungResult, Trial
from paceline.search.rules import Values
from paceline.search.space import Choices, Dimension, ObjectiveName, Point, Search, dimensions_of

_NAME, _FORECAST, _ANSWER = "search", "forecast", "answer"
Kind = Literal["refused", "unaffordable", "exhausted"]


class _Expected(FrozenConfig):
    """Kept with a trial that starts."""

    number: int = Field(ge=1)
    cost_s: float = Field(gt=0)
    figures: dict[ObjectiveName, float]


class Answer(FrozenConfig):
    """Kept with a point that never starts."""

    kind: Kind
    """It can't run or exceeds a limit; the budget has no room for it; nothing new can run."""
    reason: str
    within_s: float = Field(ge=0)
    """The budget then."""


class _Result(FrozenConfig):
    loss: float | None
    seconds: float = Field(ge=0)
    cpu_s: float = Field(ge=0)
    reason: str


@dataclass(frozen=True)
class Refused:
    """A point that never started."""

    point: Point
    answer: Answer


@dataclass(frozen=True)
class Known:
    """What the journal says."""

    trials: tuple[Trial, ...]
    refused: tuple[Refused, ...]

    def is_spent(self, within_s: float) -> bool:
        """Whether a budget has no room for a new trial, or the space has none."""
        answers = [one.answer for one in self.refused]
        return any(
            one.kind == "exhausted" or (one.kind == "unaffordable" and one.within_s >= within_s)
            for one in answers
        )


class SearchStudy:
    """The study of a search, in its folder, which this process owns."""

    def __init__(self, file: Path, search: Search) -> None:
        """Begin, or go on where the journal ends.

        Raises:
            InputError: Optuna is not installed, or the journal is damaged.
        """
        self._optuna = optuna = _optuna()
        self._file, self._search = file, search
        self._dimensions = dimensions_of(search)
        _mend(file)
        with _damage_told(file):
            backend = optuna.storages.journal.JournalFileBackend(str(file))
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                study_name=_NAME,
                directions=["minimize"] * len(search.objectives),
                load_if_exists=True,
            )
            if len(self._study.directions) != len(search.objectives):
                raise ValueError("it has other objectives")
            self._close_open()

    @property
    def known(self) -> Known:
        """What was asked and what came of it.

        Raises:
            InputError: the journal is damaged.
        """
        with _damage_told(self._file):
            return self._known()

    def _known(self) -> Known:
        results = {
            key: _RESULT.validate_python(value) for key, value in self._study.user_attrs.items()
        }
        trials: list[Trial] = []
        refused: list[Refused] = []
        for kept in self._study.get_trials(deepcopy=False):
            if _ANSWER in kept.user_attrs:
                answer = Answer.parse(kept.user_attrs[_ANSWER])
                refused.append(Refused(self._point(kept.params), answer))
            elif _FORECAST in kept.user_attrs:
                trials.append(self._trial(kept, results, len(trials) + 1))
        return Known(tuple(trials), tuple(refused))

    def _trial(self, kept: Any, results: Mapping[str, _Result], number: int) -> Trial:
        said = _Expected.parse(kept.user_attrs[_FORECAST])
        wanted = set(self._search.objectives) - {"loss"}
        if said.number != number or said.figures.keys() != wanted:
            raise ValueError("its trials don't follow each other")
        found: list[RungResult] = []
        while (result := results.get(f"{number}/{len(found)}")) is not None:
            found.append(RungResult(**vars(result)))
        return Trial(number, self._point(kept.params), said.figures, said.cost_s, tuple(found))

    # ---- questions -------------------------------------------------------------------------------

    def ask(self, point: Point) -> "Question":
        """Ask whether a point becomes a trial."""
        samplers, params = self._optuna.samplers, self._params(point)
        with warnings.catch_warnings():  # of a class that may change: its two arguments are old
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            fixed = samplers.PartialFixedSampler(params, samplers.RandomSampler(seed=0))
        self._study.sampler = fixed
        asked = self._study.ask()
        for name, dimension in self._dimensions.items():
            _suggest(asked, name, dimension)
        return Question(self._study, asked, self._search.within_s)

    def add_result(self, trial: Trial, result: RungResult, values: Values | None) -> None:
        """Keep what a trial came to; at the first rung Optuna is told.

        Args:
            trial: before it.
            values: its objectives; None: it failed.
        """
        self._study.set_user_attr(f"{trial.number}/{len(trial.results)}", vars(result))
        if not trial.results:
            self._tell(trial.number, values)

    def _tell(self, number: int, values: Sequence[float] | None) -> None:
        [kept] = [
            one
            for one in self._study.get_trials(deepcopy=False)
            if one.user_attrs.get(_FORECAST, {}).get("number") == number
        ]
        if values is None:
            self._study.tell(kept.number, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(kept.number, list(values))

    def _close_open(self) -> None:
        """What a killed process left: a question without an answer is asked again, a trial whose
        first rung is measured is told."""
        state = self._optuna.trial.TrialState
        known = {trial.number: trial for trial in self._known().trials}
        for kept in self._study.get_trials(deepcopy=False, states=(state.RUNNING,)):
            said = kept.user_attrs.get(_FORECAST)
            if said is None:
                self._study.tell(kept.number, state=state.FAIL)
            elif (trial := known[said["number"]]).results:
                values = None if trial.failed else trial.values(0, self._search.objectives)
                self._tell(trial.number, values)

    def _params(self, point: Point) -> dict[str, Any]:
        """As Optuna has them: choices by their JSON."""
        found = {}
        for name, dimension in self._dimensions.items():
            value = point[name]
            found[name] = dimension.key_of(value) if isinstance(dimension, Choices) else value
        return found

    def _point(self, params: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, dimension in self._dimensions.items():
            value = params[name]
            found[name] = dimension.values[value] if isinstance(dimension, Choices) else value
        return found


class Question:
    """A point that was asked, and its answer."""

    def __init__(self, study: Any, asked: Any, within_s: float) -> None:
        self._study, self._asked, self._within_s = study, asked, within_s

    def start(self, number: int, expected: Forecast) -> None:
        """It becomes a trial."""
        said = {
            "number": number,
            "cost_s": expected.cost_s,
            "figures": dict(expected.figures),
        }
        self._asked.set_user_attr(_FORECAST, said)

    def refuse(self, kind: Kind, reason: str) -> None:
        """It never starts."""
        answer = Answer(kind=kind, reason=reason, within_s=self._within_s)
        self._asked.set_user_attr(_ANSWER, answer.model_dump())
        self._study.tell(self._asked, state=_optuna().trial.TrialState.FAIL)


def _suggest(asked: Any, name: str, dimension: Dimension) -> None:
    if isinstance(dimension, Choices):
        asked.suggest_categorical(name, list(dimension.values))
    elif dimension.is_whole:
        step = dimension.step or 1
        asked.suggest_int(name, dimension.low, dimension.high, step=step, log=dimension.log)
    else:
        asked.suggest_float(name, dimension.low, dimension.high, log=dimension.log)


_RESULT = TypeAdapter(_Result)


def _optuna() -> Any:
    for name, package in (("Optuna", "optuna"), ("scikit-learn", "sklearn")):
        if find_spec(package) is None:
            raise InputError(
                f"a search needs {name}, which is not installed: pip install 'paceline[search]'."
            )
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _mend(file: Path) -> None:
    """Remove what a process left that was killed while it wrote: half a line, and its lock."""
    Path(f"{file}.lock").unlink(missing_ok=True)
    if not file.exists():
        return
    data = read_bytes(file, "put back a copy, or remove its folder to start over", MOST_BYTES)
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with file.open("r+b") as kept:
            kept.truncate(whole)


class _damage_told:  # noqa: N801  # reads as a statement
    """Whatever Optuna or a check makes of a journal that isn't one becomes one sentence."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, OSError):
            said = " ".join(str(error).split())[:120]
            raise InputError(
                f"{shown_path(self._file)} is no journal of this search ({type(error).__name__}: "
                f"{said}): put back a copy, or remove its folder to start over."
            ) from None
