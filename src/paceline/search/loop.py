"""Loop: one move after another until the budget is spent; what a move is, the journal decides.

So a search that was killed goes on as if it had not been.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import JobSpec
from paceline.observe.run import Run
from paceline.render.figures import duration_text
from paceline.search.forecast import forecast
from paceline.search.halving import Halving, RungResult, Trial
from paceline.search.space import Search, job_at, settings_of
from paceline.search.study import Known, SearchStudy
from paceline.search.trial_run import as_trial

# Points in a row that are refused or were asked before: then the space has no more to give.
_MOST_IN_VAIN = 200


@dataclass(frozen=True)
class Loop:
    """A search under way."""

    search: Search
    job: JobSpec
    cluster: Cluster
    halving: Halving
    study: SearchStudy
    folder: Path
    """Below which the Runs of trials are."""
    hear: Callable[[Known, Trial | None], None]
    """Told what is known, and which trial is trained next."""
    train_to: Callable[[Run, JobSpec, int], RungResult | None]
    """Trains a trial's Run to so many steps."""
    is_here: bool = True
    """Whether the cluster is this machine."""

    def run(self) -> bool:
        """Move until nothing is left to do; returns False where a trial was asked to stop."""
        while True:
            known = self.study.known
            trial = self._next_trial(known)
            self.hear(known, trial)
            if trial is not None:
                if not self._train(trial):
                    return False
            elif self._explores(known):
                self._explore(known)
            else:
                return True

    def spent_s(self, known: Known) -> float:
        """Device-seconds so far, as predicted."""
        return sum(map(self.halving.spent, known.trials))

    def _explores(self, known: Known) -> bool:
        return known.since_last < _MOST_IN_VAIN and not known.is_spent(self.search.within_s)

    def _next_trial(self, known: Known) -> Trial | None:
        """Whose next rung is due."""
        trials, left_s = known.trials, self.search.within_s - self.spent_s(known)
        begun = next((trial for trial in trials if not trial.results), None)
        if begun is not None:
            return begun
        promoted = self.halving.promotion(trials, left_s)
        if promoted is not None or self._explores(known):
            return promoted
        return self.halving.last_promotion(trials, left_s)

    def _train(self, trial: Trial) -> bool:
        rung = len(trial.results)
        steps = self.halving.steps
        job = as_trial(job_at(self.job, trial.point), f"{trial.number:04}", steps[0])
        job = job.replace(cluster=self.cluster)
        result = self.train_to(Run(self.folder / job.name), job, steps[rung])
        if result is None:
            return False
        after = trial.with_result(result)
        values = None if after.failed else after.values(rung, self.search.objectives)
        self.study.add_result(trial, result, values)
        return True

    def _explore(self, known: Known) -> None:
        """Ask for a point, and answer at once where it can't become a trial."""
        question = self.study.ask()
        settings = settings_of(question.point)
        earlier = [one.point for one in known.trials] + [one.point for one in known.refused]
        if any(settings_of(point) == settings for point in earlier):
            question.refuse("repeated", "it was asked before.")
            return
        try:
            job = job_at(self.job, question.point)
            expected = forecast(job, self.cluster, self.search, is_here=self.is_here)
        except InputError as error:
            question.refuse("refused", str(error))
            return
        steps, within_s = self.halving.steps, self.search.within_s
        whole_s, first_s = expected.cost_s * steps[-1], expected.cost_s * steps[0]
        left_s = within_s - self.spent_s(known)
        if whole_s > within_s:
            takes = f"training takes {duration_text(whole_s)} of device time"
            question.refuse("refused", f"{takes}, beyond search.within.")
        elif first_s + self.halving.reserve(known.trials) > left_s:
            question.refuse("unaffordable", "the device time that is left finishes others.")
        else:
            question.start(len(known.trials) + 1, expected)
