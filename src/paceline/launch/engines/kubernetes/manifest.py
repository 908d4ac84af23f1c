"""The JobSet of a job (pure).

It has one Indexed Job, whose pods are the nodes. How a pod ends decides what follows:

- 0 on all of them: the JobSet is Completed.
- 75 (saved), or a pod that the cluster took away (condition DisruptionTarget): the Job fails, and
  the JobSet starts all pods again, `Request.restarts` times. Where nodes may go on without one, a
  pod that was taken away is put in place again by itself.
- any other exit code: the JobSet is Failed.

Sources: kubernetes.io, "Pod failure policy"; jobset.sigs.k8s.io, "Failure policy";
kueue.sigs.k8s.io, "Run a JobSet" and "Topology Aware Scheduling". Kubernetes replaces $(NAME) in a
pod's command, so each $ is doubled.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.config.errors import EXIT_SAVED, InputError
from paceline.config.site import NodeType, Site
from paceline.launch.contract import ATTEMPT, Rendered, Request
from paceline.launch.job_folder import job_name
from paceline.launch.start_script import START_SCRIPT, start_script
from paceline.launch.supervision.engine import check_num_nodes, check_starts_whole

GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
MANIFEST = "jobset.json"
PLACE_FILE = "kubernetes.json"
"""Which cluster and namespace a job is in, its nodes, and the devices of one."""
_QUEUE, _PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
_TOGETHER = "kueue.x-k8s.io/podset-preferred-topology"
_RESTART_KEY = "jobset.sigs.k8s.io/restart-attempt"
NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
_GPU = "nvidia.com/gpu"
_LIMIT = "limits."
_KILLED = 137
_LABEL = re.compile(r"(?:[a-z0-9.-]+/)?[A-Za-z0-9][\w.-]*")
_QUANTITY = re.compile(r"\d+(?:\.\d+)?(?:m|k|[KMGTPE]i?)?")
_DNS = re.compile(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?")


def rendered(request: Request, site: Site) -> Rendered:
    """The JobSet, the script of a node, and where the job is.

    Raises:
        InputError: the site lacks what pods need, or the job asks for what a JobSet can't do.
    """
    _check(request, site)
    inside = site.replace(container="")  # the pod is the container
    place = {
        "context": site.context,
        "namespace": site.namespace,
        "num_nodes": request.num_nodes,
        "devices_per_node": request.devices_per_node,
    }
    files = {
        MANIFEST: json.dumps(_jobset(request, site), indent=1) + "\n",
        START_SCRIPT: start_script(request, inside),
        PLACE_FILE: json.dumps(place) + "\n",
    }
    return Rendered(files, MANIFEST)


def pod_spec(site: Site, command: list[str], **more: Any) -> dict[str, Any]:
    """A pod of the site's image that sees the shared folder.

    Args:
        more: of its container.
    """
    mounts = [
        {"name": "shared", "mountPath": site.shared},
        {"name": "memory", "mountPath": "/dev/shm"},
    ]
    literal = [word.replace("$", "$$") for word in command]
    container = {"name": "node", "image": site.container, "command": literal, **more}
    return {
        "restartPolicy": "Never",
        "containers": [{**container, "volumeMounts": mounts}],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": site.claim}},
            # What processes of a node share: a container has 64 MiB of it otherwise.
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _check(request: Request, site: Site) -> None:
    for name, what in (
        ("container", "an image with Paceline in it"),
        ("shared", "the folder where pods and this machine see the claim's volume"),
        ("claim", "the PersistentVolumeClaim of that volume"),
    ):
        if not getattr(site, name):
            raise InputError(f'a site with engine = "kubernetes" needs {name}: {what}.')
    for named in ("claim", "namespace", "partition", "spot_partition", "qos"):
        value = getattr(site, named)
        if value and not _DNS.fullmatch(value):
            raise InputError(
                f"{named} = {value!r} is no name of Kubernetes': it has small letters, digits, "
                "'-' and '.'."
            )
    for path in (request.directory, request.folder):
        if not path.is_relative_to(Path(site.shared)):
            raise InputError(
                f"{path} is not below {site.shared}, which is all that pods see: launch from a "
                "folder in there."
            )
    kind = site.node_type(request.node_type)
    check_starts_whole(request)
    if kind is not None:
        check_num_nodes(request, kind.num_nodes)
    if request.after:
        raise InputError(
            'engine "kubernetes" knows no order of jobs: leave --after out, and launch it when the '
            "other has finished."
        )
    if request.at_most is not None:
        raise InputError(
            'engine "kubernetes" can\'t bound the trials that run at once: leave at_most out; the '
            "quota of the queue bounds them."
        )
    if request.spot and not site.spot_partition:
        raise InputError(
            "the site names no spot_partition (a queue of machines that may be taken away): set "
            "it, or leave --spot out."
        )


def _jobset(request: Request, site: Site) -> dict[str, Any]:
    queue = site.spot_partition if request.spot else site.partition
    labels = {"app.kubernetes.io/managed-by": "paceline"}
    labels |= {_QUEUE: queue} if queue else {}
    labels |= {_PRIORITY: site.qos} if site.qos else {}
    metadata = {"name": job_name(request), "labels": labels}
    if site.namespace:
        metadata["namespace"] = site.namespace
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            # Pods find each other by name before all are ready.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": request.restarts,
                "rules": [
                    {
                        "name": "failed",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {"name": "n", "replicas": 1, "template": {"spec": _job(request, site)}}
            ],
        },
    }


def _job(request: Request, site: Site) -> dict[str, Any]:
    name = job_name(request)
    annotations = {_TOGETHER: site.topology} if site.topology else {}
    return {
        "completionMode": "Indexed",
        "completions": request.num_nodes,
        "parallelism": request.num_nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": list(_ends(request))},
        "template": {
            "metadata": {"annotations": annotations},
            "spec": {
                **pod_spec(
                    site,
                    list(_command(request)),
                    workingDir=str(request.folder),
                    env=list(_environment()),
                    resources={"limits": _limits(request, site.node_type(request.node_type))},
                ),
                "terminationGracePeriodSeconds": request.grace_s,
                "nodeSelector": dict(_selector(site.node_type(request.node_type))),
                "affinity": _one_on_each(name),
                "tolerations": [{"key": _GPU, "operator": "Exists"}],
            },
        },
    }


def _ends(request: Request) -> Iterator[dict[str, Any]]:
    """The first rule that fits a failed pod counts."""
    taken = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}

    def code(operator: str, *values: int) -> dict[str, Any]:
        about = {"containerName": "node", "operator": operator, "values": list(values)}
        return {"onExitCodes": about}

    yield {"action": "Count", **code("In", EXIT_SAVED)}
    yield {"action": "Ignore" if request.goes_on else "Count", **taken}
    if request.goes_on:
        yield {"action": "Ignore", **code("In", _KILLED)}
    yield {"action": "FailJob", **code("NotIn", EXIT_SAVED)}


def _command(request: Request) -> Iterator[str]:
    yield from ("bash", "-c", f'export {ATTEMPT}=$((RESTARTS + 1)); exec "$@"', "node")
    if request.time_limit_s is not None:
        # A pod's own deadline would fail the job, whatever it has saved.
        notice_s = max(1, request.time_limit_s - request.grace_s)
        ends = f"--kill-after={request.grace_s}"
        yield from ("timeout", "--foreground", "--preserve-status", ends, str(notice_s))
    yield from ("bash", START_SCRIPT)


def _environment() -> Iterator[dict[str, Any]]:
    for name, path in (
        ("PACELINE_NODE", "spec.nodeName"),
        ("PACELINE_ADDRESS", "status.podIP"),
        ("RESTARTS", f"metadata.annotations['{_RESTART_KEY}']"),
    ):
        yield {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _limits(request: Request, kind: NodeType | None) -> dict[str, str]:
    """What of a node a pod gets: its devices, and what the type says beside."""
    given = {_GPU: str(request.devices_per_node)}
    for word in kind.select if kind else ():
        name, _, amount = word.removeprefix(_LIMIT).partition("=")
        if word.startswith(_LIMIT):
            if not _LABEL.fullmatch(name) or not _QUANTITY.fullmatch(amount):
                raise _no_word(word)
            given[name] = amount
    return {name: amount for name, amount in given.items() if amount != "0"}


def _selector(kind: NodeType | None) -> Iterator[tuple[str, str]]:
    for word in kind.select if kind else ():
        name, found, value = word.partition("=")
        if not word.startswith(_LIMIT):
            if not found or not _LABEL.fullmatch(name) or not re.fullmatch(r"[\w.-]*", value):
                raise _no_word(word)
            yield name, value


def _no_word(word: str) -> InputError:
    return InputError(
        f'select: {word!r} is neither a label of nodes nor a limit: write "LABEL=VALUE", or '
        '"limits.RESOURCE=AMOUNT" such as "limits.memory=900Gi".'
    )


def _one_on_each(name: str) -> dict[str, Any]:
    """No two pods of a job on one node: agents know nodes by their names."""
    term = {
        "labelSelector": {"matchLabels": {NAME_LABEL: name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
