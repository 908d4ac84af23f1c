"""The engine: see the package."""

from collections.abc import Mapping
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.site import Site
from paceline.launch.contract import Attempt, Observation, Rendered, Request, Submitted, Wish
from paceline.launch.engines.slurm.commands import ask, run
from paceline.launch.engines.slurm.job_state import accounting, job_state
from paceline.launch.engines.slurm.probing import probe
from paceline.launch.engines.slurm.queue import estimate, must_end_in_time
from paceline.launch.engines.slurm.script import STOP, rendered
from paceline.launch.engines.slurm.states import reason_of, state_of
from paceline.launch.engines.slurm.submission import submit
from paceline.launch.engines.slurm.usage import attempts
from paceline.launch.engines.slurm.why import why
from paceline.launch.node_records import node_records
from paceline.launch.start_script import LOG_FOLDER


class SlurmEngine:
    """See `paceline.launch.contract.Engine`."""

    @property
    def name(self) -> str:
        """As sites call it."""
        return "slurm"

    def render(self, request: Request, site: Site) -> Rendered:
        """A batch script, and the script of a node."""
        return rendered(request, site)

    def expected_start(self, request: Request, rendered: Rendered) -> float | None:
        """As `sbatch --test-only` estimates it: by the time limits of the jobs that run."""
        must_end_in_time(rendered.files[rendered.main])
        return estimate(rendered.files[rendered.main])

    def submit(self, request: Request, rendered: Rendered) -> Submitted:
        """Hand it over, held until its id is written."""
        return submit(request, rendered)

    def observe(self, job: Submitted) -> Observation:
        """By the controller; of a job that it has forgotten by accounting, else by its records."""
        known = job_state(job.id)
        if known is None:
            return self._remembered(job)
        state = state_of(known.word, known.exit_code)
        is_queued = state == "queued"
        return Observation(
            state,
            reason_of(known.word, known.reason, known.restarts) if is_queued else None,
            known.word if known.reason in ("", "None") else f"{known.word}: {known.reason}",
            () if is_queued else known.nodes,
            known.restarts + 1,
            known.exit_code,
            known.start if is_queued else None,
        )

    def _remembered(self, job: Submitted) -> Observation:
        known = self.usage(job)
        if not known:
            return Observation("lost", said="Slurm knows nothing of it")
        last = known[-1]
        state = state_of(last.state, last.exit_code)
        return Observation(state, None, last.state, (), last.number, last.exit_code)

    def signal(self, job: Submitted, wish: Wish) -> None:
        """By scancel; one that is told to stop isn't started again, whatever ends it."""
        known = job_state(job.id)
        if known is None or state_of(known.word, known.exit_code) not in ("queued", "running"):
            return
        if wish == "save":
            run("scancel", "--quiet", "--signal=USR1", job.id)
            return
        ask("scontrol", "update", f"JobId={job.id}", "Requeue=0")
        is_heard = known.word == "RUNNING" and known.batch_node in known.nodes
        how = ("--batch", f"--signal={STOP}") if is_heard else ()
        run("scancel", "--quiet", *how, job.id)

    def logs(self, job: Submitted) -> tuple[Path, ...]:
        """By attempt and node. What the batch script and Slurm said stands beside, in slurm.log."""
        return tuple(sorted((job.folder / LOG_FOLDER).glob("*.log")))

    def usage(self, job: Submitted) -> tuple[Attempt, ...]:
        """By Slurm's accounting, to the second; where it keeps none, by the nodes' records."""
        now, records = job_state(job.id), node_records(job.folder)
        return attempts(job, accounting(job.id), records, now)

    def probe(self, site: Site, script: str) -> Mapping[str, str]:
        """On one node of each type, where one is free at once."""
        return probe(site, script)

    def why(self, job: Submitted, request: Request, site: Site) -> tuple[str, ...]:
        """Slurm's reason, what is ahead, how the free devices lie, and what would start now."""
        return why(job, request)

    def shrink(self, job: Submitted, request: Request, nodes: tuple[str, ...]) -> None:
        """By scontrol, as Slurm does where a node fails."""
        known = job_state(job.id)
        if known is None or known.word != "RUNNING":
            return
        if not request.goes_on:
            raise InputError(
                "the job ends with any node of it, since elastic.min_nodes is that of all."
            )
        if known.batch_node in nodes:
            raise InputError(f"{known.batch_node} has the job's batch script, and is never free.")
        kept = ",".join(name for name in known.nodes if name not in nodes)
        # It leaves two scripts for shells that go on, where it is called.
        ask("scontrol", "update", f"JobId={job.id}", f"NodeList={kept}", at=job.folder)
