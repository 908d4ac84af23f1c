"""Asking a cluster's API server through the person's kubectl: her kubeconfig and credentials count.

Requests are raw ones, by path: kubectl then asks for nothing else, and says what the server says.
"""

import json
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.config.errors import InputError
from paceline.launch.contract import SilentError
from paceline.launch.engines.kubernetes.manifest import GROUP, NAME_LABEL, PLURAL, VERSION

_JOBSETS = f"/apis/{GROUP}/{VERSION}"
_WORKLOADS = "/apis/kueue.x-k8s.io/v1beta1"
_CORE = "/api/v1"
_PATIENCE_S = 60.0
_NOT_FOUND = "Error from server (NotFound)"
"""How kubectl begins the server's word that there is none; a program of hers that is not found, or
a server, is another thing."""
_WHEN_SILENT = "see that `kubectl get jobsets` works"
_CURES = {
    "could not find the requested resource": "have JobSet installed in the cluster",
    "unauthorized": "renew your credentials",
    "must be logged in": "renew your credentials",
    "forbidden": "ask for the right, or correct the site's namespace",
    "already exists": "stop the job of this name first",
    "context": "correct the site's context",
    "refused": _WHEN_SILENT,
    "unable to connect": _WHEN_SILENT,
    "error: eof": "give the kubeconfig's context a user, since it has no credentials",
    "no such host": _WHEN_SILENT,
}


@dataclass(frozen=True)
class Cluster:
    """A namespace of a cluster. Methods raise InputError, with the server's own words, where it
    refuses or is silent."""

    context: str
    """Of the kubeconfig; "": the current one."""
    namespace: str

    def create(self, jobset: dict[str, Any]) -> None:
        """Hand over a JobSet."""
        self._ask("create", f"{_JOBSETS}/{self._place}/{PLURAL}", jobset)

    def jobset(self, name: str) -> dict[str, Any] | None:
        """One as it stands; None: there is none of this name."""
        return self._get(f"{_JOBSETS}/{self._place}/{PLURAL}/{name}")

    def delete(self, name: str) -> None:
        """End a JobSet: its pods have their grace, and it is there until they have ended."""
        how = "propagationPolicy=Foreground"
        self._ask("delete", f"{_JOBSETS}/{self._place}/{PLURAL}/{name}?{how}")

    def pods(self, jobset: str) -> list[dict[str, Any]]:
        """The pods of a JobSet."""
        found = self._get(f"{_CORE}/{self._place}/pods?labelSelector={NAME_LABEL}%3D{jobset}")
        return list((found or {}).get("items") or ())

    def evict(self, pod: str) -> None:
        """Ask for a pod's end: it has its grace."""
        about = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }
        self._ask("create", f"{_CORE}/{self._place}/pods/{pod}/eviction", about)

    def workloads(self) -> list[dict[str, Any]]:
        """Kueue's view of the namespace's jobs; none where there is no Kueue."""
        found = self._get(f"{_WORKLOADS}/{self._place}/workloads")
        return list((found or {}).get("items") or ())

    def start_pod(self, pod: dict[str, Any]) -> None:
        """Start one by itself."""
        self._ask("create", f"{_CORE}/{self._place}/pods", pod)

    def pod(self, name: str) -> dict[str, Any] | None:
        """One as it stands; None: there is none of this name."""
        return self._get(f"{_CORE}/{self._place}/pods/{name}")

    def pod_log(self, name: str) -> str:
        """What it has printed."""
        return self._ask("get", f"{_CORE}/{self._place}/pods/{name}/log")

    def delete_pod(self, name: str) -> None:
        """Remove one."""
        self._ask("delete", f"{_CORE}/{self._place}/pods/{name}")

    @property
    def _place(self) -> str:
        return f"namespaces/{self.namespace}"

    def _get(self, path: str) -> dict[str, Any] | None:
        done = _kubectl(self.context, "get", "--raw", path)
        if done.returncode and done.stderr.startswith(_NOT_FOUND):
            return None
        found = None
        with suppress(ValueError):
            found = json.loads(_printed(done))
        if not isinstance(found, dict):
            raise InputError(
                f"the Kubernetes API server answers {done.stdout[:80]!r}, which is no object: see "
                "where the kubeconfig's server points."
            )
        return found

    def _ask(self, verb: str, path: str, body: dict[str, Any] | None = None) -> str:
        given = () if body is None else ("--filename=-",)
        text = "" if body is None else json.dumps(body)
        return _printed(_kubectl(self.context, verb, "--raw", path, *given, text=text))


def cluster(context: str, namespace: str) -> Cluster:
    """The cluster of a context of the person's kubeconfig.

    Args:
        context: "": the current one.
        namespace: "": the context's.

    Raises:
        InputError: there is no kubectl here, or no such context.
    """
    if not namespace:
        told = ("config", "view", "--minify", "--output=jsonpath={..namespace}")
        namespace = _printed(_kubectl(context, *told)).strip() or "default"
    return Cluster(context, namespace)


def _kubectl(context: str, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    program = shutil.which("kubectl")
    if program is None:
        raise InputError(
            "there is no kubectl here: install it, or launch where `kubectl get jobsets` works."
        )
    named = (f"--context={context}",) if context else ()
    try:
        return subprocess.run(
            [program, *named, *words],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SilentError(
            f"kubectl gave no answer within {_PATIENCE_S:.0f} s: {_WHEN_SILENT}."
        ) from None


def _printed(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode == 0:
        return done.stdout
    said = " ".join(done.stderr.split()).removeprefix("Error from server").lstrip(": ").rstrip(".")
    cures = (cure for part, cure in _CURES.items() if part in said.lower())
    cure = next(cures, "change the job or the site")
    kind = SilentError if cure == _WHEN_SILENT else InputError
    raise kind(f"Kubernetes says {said[:300]!r}: {cure}.")
