"""Loop: one move after another until the budget is spent; what a move is, the journal decides.

So a search that was killed goes on as if it had not been.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.config.hardware import Cluster
from paceline.config.job import JobSpec
from paceline.observe.run import Run
from paceline.render.figures import duration_text
from paceline.search.halving import Halving, RungResult, Trial
from paceline.search.proposals import Candidate, Proposals, Refusal
from paceline.search.space import Search, job_at
from paceline.search.study import Known, SearchStudy
from paceline.search.trial_run import as_trial


@dataclass(frozen=True)
class Loop:
    """A search under way."""

    search: Search
    job: JobSpec
    cluster: Cluster
    halving: Halving
    proposals: Proposals
    study: SearchStudy
    folder: Path
    """Below which the Runs of trials are."""
    hear: Callable[[Known, Trial | None], None]
    """Told what is known, and which trial is trained next."""
    train_to: Callable[[Run, JobSpec, int], RungResult | None]
    """Trains a trial's Run to so many steps."""

    def run(self) -> bool:
        """Move until nothing is left to do; returns False where a trial was asked to stop."""
        while True:
            known = self.study.known
            trial = self._next_trial(known)
            self.hear(known, trial)
            if trial is not None:
                if not self._train(trial):
                    return False
            elif not known.is_spent(self.search.within_s):
                self._explore(known)
            else:
                return True

    def spent_s(self, known: Known) -> float:
        """Device-seconds so far, as predicted."""
        return sum(map(self.halving.spent, known.trials))

    def _next_trial(self, known: Known) -> Trial | None:
        """Whose next rung is due."""
        trials, left_s = known.trials, self.search.within_s - self.spent_s(known)
        begun = next((trial for trial in trials if not trial.results), None)
        if begun is not None:
            return begun
        promoted = self.halving.promotion(trials, left_s)
        if promoted is not None or not known.is_spent(self.search.within_s):
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
        """Keep what the planner refuses, and start what is worth most of what can be paid."""
        pool, trials = self.proposals.pool(known.trials), known.trials
        told = [one.point for one in known.refused]
        for refusal in (one for one in pool if isinstance(one, Refusal)):
            if refusal.point not in told:
                self.study.ask(refusal.point).refuse("refused", refusal.reason)
        candidates = [one for one in pool if isinstance(one, Candidate)]
        if not candidates:
            last = pool[-1].point if pool else trials[-1].point
            self.study.ask(last).refuse("exhausted", "the space has no more points that can run.")
            return
        left_s = self.search.within_s - self.spent_s(known) - self.halving.reserve(trials)
        affordable = [one for one in candidates if self._is_affordable(one, left_s)]
        if affordable:
            best = self.proposals.best(affordable, trials)
            self.study.ask(best.point).start(len(trials) + 1, best.expected)
        else:
            least = min(candidates, key=lambda one: one.expected.cost_s)
            whole_s = least.expected.cost_s * self.halving.steps[-1]
            why = "the device time that is left finishes others."
            if whole_s > self.search.within_s:
                why = (
                    f"training takes {duration_text(whole_s)} of device time, beyond search.within."
                )
            self.study.ask(least.point).refuse("unaffordable", why)

    def _is_affordable(self, candidate: Candidate, left_s: float) -> bool:
        """Whether its first rung can be paid, and its whole training could be from the start."""
        steps, cost_s = self.halving.steps, candidate.expected.cost_s
        return cost_s * steps[0] <= left_s and cost_s * steps[-1] <= self.search.within_s
