"""Trial launch: trains a trial to a rung on a site, as `paceline launch` does.

The launched Run is an ordinary one of the whole Job. This process follows its metrics, and asks the
launch to stop once the rung is evaluated; what the Run does meanwhile is kept for the next rung,
which is another launch of the same Run. Both sides see one file system.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.hardware import Cluster
from paceline.config.job import JobSpec
from paceline.launch.command import submit
from paceline.launch.prepare import Asked, prepare_job
from paceline.launch.records import LIVE, Launch, launches_of
from paceline.launch.sizes import planned_sizes
from paceline.observe.run import Run
from paceline.plan.resolve import concrete_cluster
from paceline.search.halving import RungResult
from paceline.search.trial_run import eval_loss

_LOOK_S = 0.5


@dataclass(frozen=True)
class OnSite:
    """Where trials are launched: one node each."""

    asked: Asked
    sources: Sequence[Path]
    """Files and folders that are no code."""
    machine: Callable[[], Cluster]

    @property
    def is_here(self) -> bool:
        """Whether trials run on this machine."""
        return self.asked.site.engine == "local"

    def cluster(self, job: JobSpec) -> Cluster:
        """A node of the first kind that can run the Job.

        Raises:
            InputError: none can.
        """
        sizes = planned_sizes(job, self.asked.site, 1, self.machine, is_spot=False)
        fit = next((one for one in sizes if not one.size.refused), None)
        if fit is None:
            raise InputError(f"--on {self.asked.site_name}: {sizes[0].size.refused}")
        return concrete_cluster(fit.job.cluster, self.machine())[0]

    def train_to(self, run: Run, job: JobSpec, steps: int) -> RungResult | None:
        """As `TrialProcess.train_to`; its CPU time is not known.

        A launch of an earlier search that still lives is followed, not started again.

        Raises:
            InputError: the site takes no job, or doesn't answer; the search goes on from there.
        """
        if (loss := eval_loss(run, steps)) is not None:
            self._end(run)
            return RungResult(loss)  # a search that was killed before it kept that
        began = time.perf_counter()
        launch = self._live(run) or self._launched(run, job)
        try:
            while (now := launch.observe()).state in LIVE and eval_loss(run, steps) is None:
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            self._end(run)
            raise
        self._end(run)
        seconds = time.perf_counter() - began
        if (loss := eval_loss(run, steps)) is not None:
            return RungResult(loss, seconds)
        if now.state in ("saved", "cancelled"):
            return None
        said = f": {now.said}" if now.said else ""
        return RungResult(None, seconds, reason=f"its launch has {now.state}{said}"[:1000])

    def _live(self, run: Run) -> Launch | None:
        newest = launches_of(run.path)[-1:]
        return next((one for one in newest if one.observe().state in LIVE), None)

    def _launched(self, run: Run, job: JobSpec) -> Launch:
        asked = replace(self.asked, num_nodes=1)
        submit(prepare_job(job, asked, run.path.parent.absolute(), self.sources, self.machine))
        return launches_of(run.path)[-1]

    def _end(self, run: Run) -> None:
        """Ask what still runs to stop, and wait until it has."""
        if (launch := self._live(run)) is None:
            return
        launch.engine.signal(launch.job, "stop")
        while launch.observe().state in LIVE:
            time.sleep(_LOOK_S)
