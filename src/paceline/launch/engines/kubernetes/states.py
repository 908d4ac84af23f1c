"""How a JobSet stands, in the words of the contract (pure)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.launch.contract import Reason

Tree = Mapping[str, Any]
"""An object as the API server gives it."""
_NEVER = re.compile(r"exceeds maximum|doesn't exist|not found|inadmissible|didn't match", re.I)


def condition(of: Tree, kind: str) -> Tree | None:
    """One of an object's conditions; None: it has none of this kind."""
    found: Sequence[Tree] = of.get("status", {}).get("conditions") or ()
    return next((one for one in found if one.get("type") == kind), None)


def holds(of: Tree, kind: str) -> bool:
    """Whether a condition is there and true."""
    found = condition(of, kind)
    return found is not None and found.get("status") == "True"


def nodes_of(pods: Sequence[Tree]) -> tuple[str, ...]:
    """The nodes that pods hold: given to them, and not ended."""
    held = {
        pod.get("spec", {}).get("nodeName")
        for pod in pods
        if pod.get("status", {}).get("phase") in ("Pending", "Running")
    }
    return tuple(sorted(name for name in held if name))


def workload_of(jobset: Tree, workloads: Sequence[Tree]) -> Tree | None:
    """What Kueue made of a JobSet; None: it knows nothing of it."""
    own = jobset.get("metadata", {}).get("uid")
    for one in workloads:
        owners = one.get("metadata", {}).get("ownerReferences") or ()
        if own and own in [owner.get("uid") for owner in owners]:
            return one
    return None


def wait_of(jobset: Tree, pods: Sequence[Tree], workload: Tree | None) -> tuple[Reason, str]:
    """Why a JobSet is queued, and what the cluster itself says."""
    if jobset.get("spec", {}).get("suspend"):
        return _of_kueue(workload)
    for pod in pods:
        found = condition(pod, "PodScheduled")
        if found and found.get("status") == "False":
            said = str(found.get("message") or found.get("reason") or "")
            return "resources", said
    said = next((text for pod in pods for text in _waiting(pod)), "its pods start")
    return "starting", said


def _of_kueue(workload: Tree | None) -> tuple[Reason, str]:
    if workload is None:
        return "unknown", "suspended, and Kueue knows nothing of it"
    evicted = condition(workload, "Evicted")
    reserved = condition(workload, "QuotaReserved")
    said = str((reserved or {}).get("message") or "it waits for Kueue")
    if _NEVER.search(said):
        return "unschedulable", said
    if reserved is not None and reserved.get("status") == "True":
        return "starting", said
    if evicted is not None and evicted.get("status") == "True":
        return "requeued", str(evicted.get("message") or said)
    return "resources" if reserved is not None else "priority", said


def _waiting(pod: Tree) -> Iterator[str]:
    """Why a container of a pod doesn't run yet: ErrImagePull, ContainerCreating."""
    for container in pod.get("status", {}).get("containerStatuses") or ():
        waits = (container.get("state") or {}).get("waiting") or {}
        if waits.get("reason"):
            yield ": ".join(filter(None, (waits["reason"], waits.get("message"))))


def first_in_queue(own: Tree, workloads: Sequence[Tree]) -> list[str]:
    """The names of workloads that Kueue takes before this one, from the same queue: of a higher
    priority, or older."""

    def place(one: Tree) -> tuple[int, str]:
        return -int(one["spec"].get("priority") or 0), one["metadata"]["creationTimestamp"]

    queue = own["spec"].get("queueName")
    return [
        one["metadata"]["name"]
        for one in sorted(workloads, key=place)
        if one["spec"].get("queueName") == queue
        and not holds(one, "QuotaReserved")
        and not holds(one, "Finished")
        and place(one) < place(own)
    ]
