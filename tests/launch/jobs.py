"""Jobs of tests: a line of shell on each node, submitted, watched, and ended with the test."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.config.errors import InputError
from paceline.launch.contract import Observation, Request, State, Submitted
from tests.command_line import COMMAND, metrics, write_tiny_job
from tests.launch.beds import Bed
from tests.launch.waiting import until

LIVE = ("queued", "running")


class Jobs:
    """Submits jobs on a bed."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        self._jobs: list[Submitted] = []

    def request(self, script: str, **changes: object) -> Request:
        """One that runs a script on every node of the bed."""
        given = {
            "name": f"job {len(self._jobs)}",
            "command": ("bash", "-c", script),
            "directory": self.folder,
            "folder": self.folder / f"job {len(self._jobs)}",
            "num_nodes": self.bed.num_nodes,
            "devices_per_node": 2,
            "grace_s": 30,
        }
        return Request(**{**given, **changes})

    def submit(self, script: str, **changes: object) -> Submitted:
        """Submit one."""
        request = self.request(script, **changes)
        rendered = self.bed.engine.render(request, self.bed.site)
        job = self.bed.engine.submit(request, rendered)
        self._jobs.append(job)
        return job

    def train(self, *settings: str, **changes: object) -> Submitted:
        """Submit an elastic training of 60 steps on two nodes of one rank, and wait until it is
        under way."""
        write_tiny_job(self.folder)
        size = ("cluster.num_nodes=2", "cluster.devices_per_node=1", "train.steps=60")
        elastic = ("elastic.min_nodes=1", "checkpoint.every=0")
        told = [f"--set={each}" for each in (*elastic, *size, *settings)]
        given = {
            "command": (sys.executable, COMMAND, "train", "job.toml", *told),
            "num_nodes": 2,
            "devices_per_node": 1,
            "min_nodes": 1,
            "environment": {
                "PACELINE_ADDRESS": "127.0.0.1",  # nodes of a laboratory are no hosts
                "GLOO_SOCKET_IFNAME": "lo",
                "XDG_CACHE_HOME": str(self.folder / "cache"),
            },
        }
        job = self.submit("", **{**given, **changes})
        file = self.folder / "runs" / "tiny" / "metrics.jsonl"

        def is_under_way() -> bool:
            if file.exists() and len(metrics(self.folder)) >= 2:
                return True
            seen = self.see(job)
            if seen.state == "failed":
                logs = "".join(file.read_text() for file in self.bed.engine.logs(job))
                raise AssertionError(f"{seen}: {logs[-2000:]}")
            return False

        until(is_under_way, 300)
        return job

    def see(self, job: Submitted) -> Observation:
        """How it stands."""
        return self.bed.engine.observe(job)

    def until(self, job: Submitted, *states: State) -> Observation:
        """Wait for one of the states."""
        until(lambda: self.see(job).state in states, self.bed.slow_s, lambda: self.see(job))
        return self.see(job)

    def until_over(self, job: Submitted) -> Observation:
        """Wait for its end."""
        until(lambda: self.see(job).state not in LIVE, self.bed.slow_s, lambda: self.see(job))
        return self.see(job)

    def until_file(self, name: str) -> None:
        """Wait for what a job writes."""
        until((self.folder / name).exists, self.bed.slow_s)

    def close(self) -> None:
        """End what is left."""
        for job in self._jobs:
            with suppress(InputError):
                self.bed.engine.signal(job, "stop")
        for job in self._jobs:
            self.until_over(job)


@contextmanager
def jobs_on(bed: Bed, folder: Path) -> Iterator[Jobs]:
    """Jobs that end with the block."""
    jobs = Jobs(bed, folder)
    try:
        yield jobs
    finally:
        jobs.close()
