"""The engine: see the package."""

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from paceline.config import files
from paceline.config.errors import EXIT_SAVED, InputError
from paceline.config.site import Site
from paceline.launch.contract import (
    ID_FILE,
    Attempt,
    Observation,
    Rendered,
    Request,
    State,
    Submitted,
    Wish,
)
from paceline.launch.engines.kubernetes.client import Cluster, cluster
from paceline.launch.engines.kubernetes.manifest import (
    PLACE_FILE,
    pod_spec,
    rendered,
)
from paceline.launch.engines.kubernetes.states import (
    first_in_queue,
    holds,
    nodes_of,
    wait_of,
    workload_of,
)
from paceline.launch.job_folder import job_folder, job_name
from paceline.launch.node_records import whole_attempts
from paceline.launch.start_script import LOG_FOLDER
from paceline.observe.run import write_atomic

_STOPPED = "stopped"
"""A file in the job's folder: a person ended it. Its JobSet is gone then."""
_CURE = "launch the job again, since its folder is damaged"
_PROBE_S, _LOOK_S = 180.0, 0.5


@dataclass(frozen=True)
class _Place:
    """What stands in PLACE_FILE."""

    context: str
    namespace: str
    num_nodes: int
    devices_per_node: int


class KubernetesEngine:
    """See `paceline.launch.contract.Engine`."""

    @property
    def name(self) -> str:
        """As sites call it."""
        return "kubernetes"

    def render(self, request: Request, site: Site) -> Rendered:
        """The JobSet, and the script of a node."""
        return rendered(request, site)

    def expected_start(self, request: Request, rendered: Rendered) -> float | None:
        """Nobody estimates it."""
        return None

    def submit(self, request: Request, rendered: Rendered) -> Submitted:
        """The id is written first, since the name is known: a submission that dies leaves nothing
        that nobody knows of."""
        folder, name = request.folder, job_name(request)
        with job_folder(request, rendered):
            write_atomic(folder / ID_FILE, name)
            _cluster(folder).create(json.loads(rendered.files[rendered.main]))
        return Submitted(name, folder)

    def observe(self, job: Submitted) -> Observation:
        """By its JobSet and pods; where that is gone, by the records of its nodes."""
        at = _cluster(job.folder)
        jobset = at.jobset(job.id)
        number, code = self._last(job)
        if jobset is None:
            if (job.folder / _STOPPED).exists():
                return Observation("cancelled", attempt=number, exit_code=code)
            return Observation("lost", said="the cluster has no JobSet of this name")
        number = int(jobset.get("status", {}).get("restarts") or 0) + 1
        if holds(jobset, "Completed"):
            return Observation("finished", None, "Completed", (), number, 0)
        if holds(jobset, "Failed"):
            state: State = "saved" if code == EXIT_SAVED else "failed"
            return Observation(state, None, "Failed", (), number, code)
        pods = at.pods(job.id)
        if any(pod["status"].get("phase") == "Running" for pod in pods):
            return Observation("running", None, "Running", nodes_of(pods), number)
        workload = workload_of(jobset, at.workloads())
        reason, said = wait_of(jobset, pods, workload)
        return Observation("queued", reason, said, (), number)

    def _last(self, job: Submitted) -> tuple[int, int | None]:
        """Number and exit code of the last attempt that its nodes have records of."""
        known = self.usage(job)
        return (known[-1].number, known[-1].exit_code) if known else (1, None)

    def signal(self, job: Submitted, wish: Wish) -> None:
        """A pod that is evicted is told by SIGTERM: it saves, and the JobSet starts again. One
        that is deleted does not."""
        at = _cluster(job.folder)
        jobset = at.jobset(job.id)
        if jobset is None or holds(jobset, "Completed") or holds(jobset, "Failed"):
            return
        if wish == "save":
            for pod in at.pods(job.id):
                if pod["status"].get("phase") == "Running":
                    at.evict(pod["metadata"]["name"])
            return
        mark = job.folder / _STOPPED
        mark.touch()
        try:
            at.delete(job.id)
        except InputError:
            mark.unlink(missing_ok=True)
            raise

    def logs(self, job: Submitted) -> tuple[Path, ...]:
        """One file for each attempt and node."""
        return tuple(sorted((job.folder / LOG_FOLDER).glob("*.log")))

    def usage(self, job: Submitted) -> tuple[Attempt, ...]:
        """By the records of the nodes, which lack what a pod takes to start."""
        place, submitted = _place(job.folder), (job.folder / PLACE_FILE).stat().st_mtime
        return whole_attempts(job.folder, place.num_nodes, place.devices_per_node, submitted)

    def probe(self, site: Site, script: str) -> Mapping[str, str]:
        """On one node, by a pod without devices."""
        at = cluster(site.context, site.namespace)
        name = f"paceline-probe-{uuid.uuid4().hex[:8]}"
        spec = pod_spec(site, ["bash", "-c", script])
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        at.start_pod(pod)
        try:
            node = _ended(at, name)
            return {node: at.pod_log(name)}
        finally:
            at.delete_pod(name)

    def why(self, job: Submitted, request: Request, site: Site) -> tuple[str, ...]:
        """Who comes first in the queue of Kueue; what it says itself is in the observation."""
        at = _cluster(job.folder)
        jobset, workloads = at.jobset(job.id), at.workloads()
        own = None if jobset is None else workload_of(jobset, workloads)
        if own is None or holds(own, "QuotaReserved"):
            return ()
        queue = own["spec"].get("queueName")
        first = first_in_queue(own, workloads)
        if not first:
            return (f"No job in queue {queue} comes first.",)
        number = "1 job comes" if len(first) == 1 else f"{len(first)} jobs come"
        shown = ", ".join(first[:5]) + (", ..." if len(first) > 5 else "")
        return (f"{number} first in queue {queue}: {shown}.",)


def _place(folder: Path) -> _Place:
    return files.read_json(folder / PLACE_FILE, TypeAdapter(_Place), _CURE)


def _cluster(folder: Path) -> Cluster:
    place = _place(folder)
    return cluster(place.context, place.namespace)


def _ended(at: Cluster, name: str) -> str:
    """Wait for a pod's end; the node that it was on."""
    end = time.monotonic() + _PROBE_S
    while True:
        pod = at.pod(name) or {}
        if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            return str(pod["spec"].get("nodeName") or name)
        if time.monotonic() > end:
            _, said = wait_of({}, [pod], None)
            raise InputError(
                f"a pod of the site did not end within {_PROBE_S:.0f} s ({said}): see "
                "`kubectl describe` of such a pod."
            )
        time.sleep(_LOOK_S)
