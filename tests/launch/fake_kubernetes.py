"""A stand-in for a Kubernetes cluster with JobSet and Kueue, since none can be had in a test.

An API server on loopback answers what the engine asks. A thread does what the controllers do, as
their documentation says: Kueue admits a JobSet when there are nodes for all of its pods; the Job
controller applies the pod failure policy; the JobSet controller starts all pods again. Pods are
processes of this machine. It is no proof that a real cluster does the same.
"""

import itertools
import json
import os
import re
import signal
import ssl
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

JOBSET, RESTART = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/restart-attempt"
QUEUE = "kueue.x-k8s.io/queue-name"
_TICK_S = 0.02
_REACTS_S = 5.0
"""From a pod's failure to the end of the others. A real one batches for a second, and its kubelets
take their time."""
_KUBERNETES = "1.31"
# The fields of a JobSet that the engine may set, as the custom resource's schema has them.
_SPEC = {"network", "failurePolicy", "replicatedJobs", "suspend"}
_RULE = {"name", "action", "onJobFailureReasons", "targetReplicatedJobs"}
_ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}


_MADE = itertools.count()


def made_at() -> str:
    """Of the next object: they are a second apart, since Kubernetes tells no less."""
    return (datetime.now(UTC) + timedelta(seconds=next(_MADE))).strftime("%Y-%m-%dT%H:%M:%SZ")


class RefusedError(Exception):
    """An answer of the server that is no success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Pod:
    """A process."""

    name: str
    node: str
    index: int
    labels: dict[str, str]
    process: subprocess.Popen[bytes]
    log: Path
    grace_s: float
    code: int | None = None
    is_disrupted: bool = False
    kill_at: float | None = None

    def end(self) -> None:
        """Tell its first process, and kill all of them later."""
        if self.code is None and self.kill_at is None:
            self.kill_at = time.monotonic() + self.grace_s
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def look(self) -> None:
        """Notice its end; with the first process all others of a container end."""
        if self.kill_at is not None and time.monotonic() > self.kill_at:
            self.kill()
        code = self.process.poll()
        if code is not None and self.code is None:
            self.kill()
            self.code = code if code >= 0 else 128 - code

    def tree(self) -> dict[str, Any]:
        phase = {None: "Running", 0: "Succeeded"}.get(self.code, "Failed")
        conditions = [{"type": "DisruptionTarget", "status": "True"}] if self.is_disrupted else []
        return {
            "metadata": {"name": self.name, "labels": self.labels},
            "spec": {"nodeName": self.node, "containers": [{"name": "node"}]},
            "status": {"phase": phase, "conditions": conditions},
        }


@dataclass
class JobSet:
    """One, and its pods."""

    manifest: dict[str, Any]
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    made: str = field(default_factory=made_at)
    restarts: int = 0
    pods: list[Pod] = field(default_factory=list)
    failure: str | None = None
    """Why its Job failed; its pods end."""
    failed_at: float = 0.0
    """By the monotonic clock."""
    ended: str | None = None
    """Completed or Failed."""
    is_admitted: bool = False
    is_going: bool = False
    """It was deleted, and its pods end."""

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def job(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        return spec

    @property
    def live(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.code is None]

    def tree(self) -> dict[str, Any]:
        conditions = [{"type": self.ended, "status": "True"}] if self.ended else []
        return {
            **self.manifest,
            "metadata": {
                **self.manifest["metadata"],
                "uid": self.uid,
                "creationTimestamp": self.made,
            },
            "spec": {**self.manifest["spec"], "suspend": not self.is_admitted},
            "status": {"restarts": self.restarts, "conditions": conditions},
        }

    def workload(self) -> dict[str, Any]:
        said = "couldn't assign flavors to pod set n: insufficient unused quota"
        reserved = {
            "type": "QuotaReserved",
            "status": "True" if self.is_admitted else "False",
            "message": "reserved" if self.is_admitted else said,
        }
        return {
            "metadata": {
                "name": f"jobset-{self.name}",
                "creationTimestamp": self.made,
                "ownerReferences": [{"uid": self.uid}],
            },
            "spec": {"queueName": self.manifest["metadata"]["labels"].get(QUEUE)},
            "status": {"conditions": [reserved]},
        }


class FakeKubernetes:
    """The cluster, for as long as the context lasts."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self._folder, self._nodes = folder, nodes
        self._jobsets: dict[str, JobSet] = {}
        self._alone: dict[str, Pod] = {}
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self.token = uuid.uuid4().hex

    def __enter__(self) -> "FakeKubernetes":
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            def _answer(self) -> None:
                raw = self._body()
                body = json.loads(raw) if raw else {}
                try:
                    if self.headers.get("Authorization") != f"Bearer {cluster.token}":
                        raise RefusedError(401, "Unauthorized")
                    status, said = 200, cluster.answer(self.command, self.path, body)
                except RefusedError as refused:
                    status = refused.status
                    reason = {404: "NotFound", 409: "AlreadyExists"}.get(status, "")
                    said = {
                        "apiVersion": "v1",
                        "kind": "Status",
                        "status": "Failure",
                        "reason": reason,
                        "message": str(refused),
                        "code": status,
                    }
                raw = said.encode() if isinstance(said, str) else json.dumps(said).encode()
                self.send_response(status)
                kind = "text/plain" if isinstance(said, str) else "application/json"
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - as http.server calls them

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        # kubectl gives its token to nobody without TLS.
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*self._certificate())
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._threads = [
            threading.Thread(target=self._server.serve_forever, daemon=True),
            threading.Thread(target=self._control, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_failure: object) -> None:
        self._is_over.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()
        pods = [pod for one in self._jobsets.values() for pod in one.pods]
        for pod in (*pods, *self._alone.values()):
            pod.kill()
            pod.process.wait()

    def kubeconfig(self) -> Path:
        """A file that names it."""
        url = f"https://127.0.0.1:{self._server.server_address[1]}"
        context = {"cluster": "fake", "user": "me", "namespace": "lab"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [
                {
                    "name": "fake",
                    "cluster": {"server": url, "certificate-authority": str(self._files[0])},
                }
            ],
            "users": [{"name": "me", "user": {"token": self.token}}],
            "contexts": [{"name": "fake", "context": context}],
        }
        file = self._folder / "kubeconfig"
        file.write_text(json.dumps(config))
        return file

    @property
    def _files(self) -> tuple[Path, Path]:
        return self._folder / "server.crt", self._folder / "server.key"

    def _certificate(self) -> tuple[Path, Path]:
        """Of the server, by itself; and its key."""
        file, key = self._files
        kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        name = ("-subj", "/CN=fake", "-addext", "subjectAltName=IP:127.0.0.1")
        command = ["openssl", "req", "-x509", *kind, *name, "-keyout", str(key), "-out", str(file)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        return file, key

    def lose(self, node: str) -> None:
        """A node vanishes with its pod, and comes back at once."""
        with self._lock:
            for one in self._jobsets.values():
                for pod in one.live:
                    if pod.node == node:
                        pod.is_disrupted = True
                        _kill_with_children(pod)

    def hold(self, names: Sequence[str]) -> None:
        """Somebody else has these nodes from now on."""
        with self._lock:
            self._nodes = [name for name in self._nodes if name not in names]

    # ---- the API server ----

    def answer(self, verb: str, path: str, body: dict[str, Any]) -> Any:
        parts = urlsplit(path)
        found = re.fullmatch(
            r"(/api/v1|/apis/jobset.x-k8s.io/v1alpha2|/apis/kueue.x-k8s.io/v1beta1)"
            r"/namespaces/lab/(jobsets|pods|workloads)(?:/([^/]+))?(?:/(\w+))?",
            parts.path,
        )
        if not found:
            raise RefusedError(404, "the server could not find the requested resource")
        _, kind, name, below = found.groups()
        with self._lock:
            if kind == "jobsets":
                return self._of_jobsets(verb, name, body)
            if kind == "workloads":
                queued = [one for one in self._jobsets.values() if not one.ended]
                return {"items": [one.workload() for one in queued]}
            return self._of_pods(verb, name, below, parse_qs(parts.query), body)

    def _of_jobsets(self, verb: str, name: str | None, body: dict[str, Any]) -> Any:
        if verb == "POST":
            _validate(body)
            made = JobSet(body)
            if made.name in self._jobsets:
                raise RefusedError(409, f'jobsets "{made.name}" already exists')
            self._jobsets[made.name] = made
            return made.tree()
        if name not in self._jobsets:
            raise RefusedError(404, f'jobsets "{name}" not found')
        one = self._jobsets[name]
        if verb == "DELETE":
            one.is_going = True
            for pod in one.live:
                pod.end()
        return one.tree()

    def _of_pods(
        self,
        verb: str,
        name: str | None,
        below: str | None,
        query: Mapping[str, list[str]],
        body: dict[str, Any],
    ) -> Any:
        if verb == "POST" and name is None:
            kubernetes_validate.validate(body, _KUBERNETES, strict=True)
            name = body["metadata"]["name"]
            self._alone[name] = self._start(name, self._nodes[0], 0, {}, body["spec"])
            return body
        pods = {pod.name: pod for one in self._jobsets.values() for pod in one.pods}
        if name is None:
            wanted = query["labelSelector"][0].split("=", 1)
            chosen = [pod for pod in pods.values() if pod.labels.get(wanted[0]) == wanted[1]]
            return {"kind": "PodList", "apiVersion": "v1", "items": [one.tree() for one in chosen]}
        pods |= self._alone
        if name not in pods:
            raise RefusedError(404, f'pods "{name}" not found')
        if below == "eviction":
            pods[name].is_disrupted = True
            pods[name].end()
            return {"kind": "Status", "status": "Success"}
        if below == "log":
            return pods[name].log.read_text()
        if verb == "DELETE":
            pods[name].end()
        return pods[name].tree()

    # ---- the controllers ----

    def _control(self) -> None:
        while not self._is_over.wait(_TICK_S):
            with self._lock:
                for pod in self._alone.values():
                    pod.look()
                for one in list(self._jobsets.values()):
                    self._reconcile(one)

    def _reconcile(self, one: JobSet) -> None:
        for pod in one.pods:
            pod.look()
        if one.is_going:
            if not one.live:
                del self._jobsets[one.name]
            return
        if one.ended:
            return
        if not one.pods and one.failure is None:
            free = [node for node in self._nodes if node not in self._held()]
            count = one.job["completions"]
            one.is_admitted = one.is_admitted or len(free) >= count
            if one.is_admitted and len(free) >= count:
                one.pods = [self._pod(one, index, free[index]) for index in range(count)]
            return
        for pod in [pod for pod in one.pods if pod.code]:
            self._failed(one, pod)
        if one.failure:
            if time.monotonic() > one.failed_at + _REACTS_S:
                for pod in one.live:
                    pod.end()
            if not one.live:
                self._restart(one)
        elif all(pod.code == 0 for pod in one.pods):
            one.ended = "Completed"

    def _failed(self, one: JobSet, pod: Pod) -> None:
        """Apply the pod failure policy."""
        action = next(
            (rule["action"] for rule in one.job["podFailurePolicy"]["rules"] if _fits(rule, pod)),
            "Count",
        )
        if action == "Ignore":
            if not one.failure:
                free = [node for node in self._nodes if node not in self._held()]
                if free:
                    one.pods[one.pods.index(pod)] = self._pod(one, pod.index, free[0])
        elif not one.failure:
            is_final = action == "FailJob"
            one.failure = "PodFailurePolicy" if is_final else "BackoffLimitExceeded"
            one.failed_at = time.monotonic()

    def _restart(self, one: JobSet) -> None:
        policy = one.manifest["spec"]["failurePolicy"]
        rule = next(
            (each for each in policy["rules"] if one.failure in each["onJobFailureReasons"]), None
        )
        is_final = rule is not None and rule["action"] == "FailJobSet"
        if is_final or one.restarts >= policy["maxRestarts"]:
            one.ended = "Failed"
            return
        one.restarts += 1
        one.failure, one.pods = None, []

    def _held(self) -> set[str]:
        return {pod.node for one in self._jobsets.values() for pod in one.live}

    def _pod(self, one: JobSet, index: int, node: str) -> Pod:
        labels = {JOBSET: one.name, RESTART: str(one.restarts)}
        name = f"{one.name}-n-0-{index}-{uuid.uuid4().hex[:5]}"
        return self._start(name, node, index, labels, one.job["template"]["spec"])

    def _start(
        self, name: str, node: str, index: int, labels: dict[str, str], spec: dict[str, Any]
    ) -> Pod:
        (container,) = spec["containers"]
        fields = {"spec.nodeName": node, "status.podIP": "127.0.0.1"}
        fields |= {f"metadata.annotations['{key}']": value for key, value in labels.items()}
        own = {
            each["name"]: fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            for each in container.get("env", ())
        }
        log = self._folder / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [_expanded(word, own) for word in container["command"]],
                cwd=container.get("workingDir", "/"),
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        grace_s = spec.get("terminationGracePeriodSeconds", 30)
        return Pod(name, node, index, labels, process, log, grace_s)


def _kill_with_children(pod: Pod) -> None:
    """As where the machine goes away: no process of it can say anything any more."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(pod.process.pid).children(recursive=True)
        pod.kill()
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    """As Kubernetes does: $$ is $, and $(NAME) what it names, where it names something."""

    def one(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, word)


def _fits(rule: Mapping[str, Any], pod: Pod) -> bool:
    if codes := rule.get("onExitCodes"):
        return (pod.code in codes["values"]) == (codes["operator"] == "In")
    wanted = [one["type"] for one in rule["onPodConditions"] if one["status"] == "True"]
    return "DisruptionTarget" in wanted and pod.is_disrupted


def _validate(jobset: dict[str, Any]) -> None:
    """Refuse what a real server would: by Kubernetes' schemas, and what is known of JobSet's."""
    spec = jobset["spec"]
    wrong = set(spec) - _SPEC or [
        rule
        for rule in spec["failurePolicy"]["rules"]
        if set(rule) - _RULE or rule["action"] not in _ACTIONS
    ]
    if wrong:
        raise RefusedError(422, f"JobSet is invalid: {wrong}")
    for one in spec["replicatedJobs"]:
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": jobset["metadata"]["name"]},
            "spec": one["template"]["spec"],
        }
        try:
            kubernetes_validate.validate(job, _KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise RefusedError(422, str(error)) from None
