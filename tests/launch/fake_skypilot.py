"""A stand-in for SkyPilot, since no cloud can be had in a test.

A program `sky` on PATH asks a thread of the test, which does what managed jobs are documented to
do: rent the machines of a job, set them up, run its task on all of them, kill all others where one
ends with a failure, and rent others where one is taken away or an exit code asks for it. Machines
are processes, told apart by addresses of loopback. Tasks are held against the fields of SkyPilot
0.14's schemas. It is no proof that a real cloud does the same.
"""

import argparse
import ast
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import psutil

_TICK_S = 0.05
_RENT_S = 0.1
# `sky.utils.schemas`: get_task_schema, get_resources_schema, get_storage_schema.
_TASK = {
    *("name", "workdir", "num_nodes", "resources", "file_mounts", "volumes", "setup", "run"),
    *("envs", "secrets", "config", "event_callback", "service", "pool", "inputs", "outputs"),
}
_RESOURCES = {
    *("infra", "cpus", "memory", "accelerators", "instance_type", "use_spot", "job_recovery"),
    *("disk_size", "disk_tier", "network_tier", "local_disk", "max_hourly_cost", "ports"),
    *("labels", "accelerator_args", "image_id", "autostop", "priority", "any_of", "ordered"),
}
_STRINGS = ("infra", "cpus", "memory", "accelerators", "instance_type", "image_id")
_MOUNT = {"name", "source", "store", "persistent", "mode", "config"}
_MODES = ("MOUNT", "COPY", "MOUNT_CACHED")
_PROGRAM = """\
#!{python}
import sys
from multiprocessing.connection import Client
import os
with Client({address!r}, "AF_UNIX") as asked:
    asked.send_bytes(repr((os.getcwd(), sys.argv[1:])).encode())
    code = int(asked.recv_bytes())
    (sys.stderr if code else sys.stdout).write(asked.recv_bytes().decode())
sys.exit(code)
"""


class RefusedError(Exception):
    """What `sky` says before it ends with 1."""


@dataclass
class Job:
    """A managed one."""

    name: str
    task: dict[str, Any]
    number: int
    status: str = "PENDING"
    recoveries: int = 0
    machines: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ready_at: float = 0.0
    lost: bool = False

    @property
    def is_over(self) -> bool:
        return self.status in ("SUCCEEDED", "CANCELLED") or self.status.startswith("FAILED")

    def row(self) -> dict[str, Any]:
        failed = "see the logs" if self.status.startswith("FAILED") else None
        return {
            "job_id": self.number,
            "task_id": 0,
            "job_name": self.name,
            "task_name": self.name,
            "status": self.status,
            "schedule_state": "DONE" if self.is_over else "ALIVE",
            "recovery_count": self.recoveries,
            "failure_reason": failed,
            "details": None,
            "resources": f"{self.task.get('num_nodes', 1)}x[H100:2]",
        }

    def tear_down(self) -> None:
        for process in self.machines.values():
            kill_all(process.pid)
            process.wait()


class FakeSkyPilot:
    """The service, for as long as the context lasts."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "bin"
        self._address = str(folder / "sky.socket")
        self._jobs: list[Job] = []
        self._addresses = itertools.count(1)
        self._lock = threading.RLock()
        self._is_over = threading.Event()

    def __enter__(self) -> "FakeSkyPilot":
        self._listener = Listener(self._address, "AF_UNIX")
        self.programs.mkdir()
        program = self.programs / "sky"
        program.write_text(_PROGRAM.format(python=sys.executable, address=self._address))
        program.chmod(0o755)
        self._threads = [
            threading.Thread(target=one, daemon=True) for one in (self._serve, self._control)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_failure: object) -> None:
        self._is_over.set()
        subprocess.run([self.programs / "sky", "over"], capture_output=True, check=False)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        for job in self._jobs:
            job.tear_down()

    def lose(self, folder: Path, node: str) -> None:
        """A machine of the job of a folder vanishes."""
        with self._lock:
            job = next(one for one in self._jobs if str(folder) in one.task["run"])
            job.lost = True
            kill_all(job.machines[node].pid)

    def jobs(self) -> list[Job]:
        """All that were launched."""
        with self._lock:
            return list(self._jobs)

    # ---- the program ----

    def _serve(self) -> None:
        while not self._is_over.is_set():
            with self._listener.accept() as asked, suppress(EOFError, ConnectionError):
                directory, words = ast.literal_eval(asked.recv_bytes().decode())
                try:
                    code, said = 0, self._answer(Path(directory), words)
                except RefusedError as error:
                    code, said = 1, f"{error}\n"
                asked.send_bytes(str(code).encode())
                asked.send_bytes(said.encode())

    def _answer(self, directory: Path, words: list[str]) -> str:
        if self._is_over.is_set():
            return ""
        told = _parser().parse_args(words)
        with self._lock:
            if told.verb == "launch":
                task = json.loads((directory / told.entrypoint).read_text())
                validate(task)
                number = len(self._jobs) + 1
                self._jobs.append(Job(told.name or task["name"], task, number))
                return f"Job submitted, ID: {number}\n"
            if told.verb == "queue":
                if not self._jobs:
                    raise RefusedError("ClusterNotUpError: No in-progress managed jobs.")
                rows = [one.row() for one in reversed(self._jobs)]
                return "A newer SkyPilot is out.\n" + json.dumps(rows, indent=2) + "\n"
            job = next((one for one in self._jobs if one.name == told.name), None)
            if job is None:
                raise RefusedError(f"No managed job with name {told.name!r} found.")
            if told.verb == "cancel" and not job.is_over:
                job.status = "CANCELLING"
            return "launching\n\nrecovering\n"

    # ---- the controller ----

    def _control(self) -> None:
        while not self._is_over.wait(_TICK_S):
            with self._lock:
                for job in self._jobs:
                    if not job.is_over:
                        self._reconcile(job)

    def _reconcile(self, job: Job) -> None:
        if job.status == "CANCELLING":
            job.tear_down()
            job.status = "CANCELLED"
        elif job.status == "PENDING":
            job.status, job.ready_at = "STARTING", time.monotonic() + _RENT_S
        elif job.status in ("STARTING", "RECOVERING"):
            if time.monotonic() > job.ready_at:
                self._start(job)
        else:
            self._look(job)

    def _start(self, job: Job) -> None:
        addresses = [
            f"127.0.1.{next(self._addresses)}" for _ in range(job.task.get("num_nodes", 1))
        ]
        setup = job.task.get("setup")
        if setup and subprocess.run(["bash", "-c", setup], check=False).returncode:
            job.status = "FAILED_SETUP"
            return
        for rank, address in enumerate(addresses):
            job.machines[address] = subprocess.Popen(
                ["bash", "-c", job.task["run"]],
                env={
                    **os.environ,
                    "SKYPILOT_NODE_RANK": str(rank),
                    "SKYPILOT_NODE_IPS": "\n".join(addresses),
                    "SKYPILOT_NUM_NODES": str(len(addresses)),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        job.status = "RUNNING"

    def _look(self, job: Job) -> None:
        codes = [process.poll() for process in job.machines.values()]
        if job.lost:
            self._recover(job)
        elif any(codes):
            job.tear_down()
            recovery = job.task["resources"].get("job_recovery", {})
            again = recovery.get("recover_on_exit_codes", ())
            if any(code in again for code in codes):
                self._recover(job)
            else:
                job.status = "FAILED"
        elif all(code == 0 for code in codes):
            job.status = "SUCCEEDED"

    def _recover(self, job: Job) -> None:
        job.tear_down()
        job.machines, job.lost = {}, False
        job.recoveries += 1
        job.status, job.ready_at = "RECOVERING", time.monotonic() + _RENT_S


def kill_all(pid: int) -> None:
    """A process and those below it."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (*root.children(recursive=True), root):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


def validate(task: Mapping[str, Any]) -> None:
    """Refuse what SkyPilot's schemas refuse."""
    resources = task["resources"]
    wrong = [set(task) - _TASK, set(resources) - _RESOURCES]
    wrong += [set(one) - _RESOURCES for one in resources.get("any_of", ())]
    wrong += [set(one) - _MOUNT for one in task.get("file_mounts", {}).values()]
    if any(wrong):
        raise RefusedError(f"Invalid task YAML: {wrong}")
    for name in _STRINGS:
        if not isinstance(resources.get(name, ""), str):
            raise RefusedError(f"Invalid task YAML: {name}")
    for folder, mount in task.get("file_mounts", {}).items():
        if not folder.startswith("/") or mount["mode"] not in _MODES:
            raise RefusedError(f"Invalid task YAML: {folder}")


def _parser() -> argparse.ArgumentParser:
    """Options as `sky jobs --help` of SkyPilot 0.14 has them."""
    parser = argparse.ArgumentParser("sky", exit_on_error=False)
    jobs = parser.add_subparsers(required=True).add_parser("jobs").add_subparsers(dest="verb")
    launch = jobs.add_parser("launch")
    launch.add_argument("--yes", "-y", action="store_true", required=True)
    launch.add_argument("--detach-run", "-d", action="store_true", required=True)
    launch.add_argument("--name", "-n")
    launch.add_argument("entrypoint")
    queue = jobs.add_parser("queue")
    queue.add_argument("--verbose", "-v", action="store_true")
    queue.add_argument("--all", "-a", action="store_true", required=True)
    queue.add_argument("--output", "-o", choices=("table", "json"), required=True)
    cancel = jobs.add_parser("cancel")
    cancel.add_argument("--yes", "-y", action="store_true", required=True)
    cancel.add_argument("--name", "-n", required=True)
    logs = jobs.add_parser("logs")
    logs.add_argument("--controller", action="store_true")
    logs.add_argument("--no-follow", action="store_true", required=True)
    logs.add_argument("--tail", type=int)
    logs.add_argument("--name", "-n", required=True)
    return parser
