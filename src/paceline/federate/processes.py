"""Flower's processes on this machine: its SuperLink, a SuperNode for each client, and the run.

All listen at 127.0.0.1 alone. They end with this process, however it ends.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from paceline.config.errors import RunError
from paceline.config.job_sections import LOCAL_HOST

_START_S = 300.0
_END_S = 10.0
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_PROJECT: Mapping[str, Any] = {
    "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
    "project": {"name": "federation", "version": "1.0.0", "description": "", "dependencies": []},
}
_COMPONENTS = {"serverapp": "federation.server:app", "clientapp": "federation.client:app"}
_ENDS: Mapping[str, str] = {
    "server": "paceline.federate.server_app.app",
    "client": "paceline.federate.client_app.app",
}


def write_app(folder: Path, config: Mapping[str, Any], ends: Mapping[str, str] = _ENDS) -> None:
    """Write the Flower app that `flwr run` takes: it imports the ends.

    Args:
        folder: must not exist yet.
        config: what both ends are told.
        ends: Flower's ServerApp as "server" and its ClientApp as "client", by their full names.
    """
    package = folder / "federation"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for end, name in ends.items():
        # Flower looks in the text for an assignment, before anything is imported.
        module = name.rpartition(".")[0]
        (package / f"{end}.py").write_text(f"import {module}\n\napp = {name}\n")
    of_flower = {"publisher": "local", "components": _COMPONENTS, "config": dict(config)}
    project = {**_PROJECT, "tool": {"flwr": {"app": of_flower}}}
    project["project"] = {**_PROJECT["project"], "license": "Apache-2.0"}
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project))


@contextmanager
def running(
    app: Path, home: Path, clients: int, logs: Path, folders: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start everything; the process that is given ends when the app's run is over.

    Args:
        app: folder of `write_app`.
        home: Flower's own files.
        clients: SuperNodes to start; each is told its number as "client".
        logs: folder of a log for each process.
        folders: has a folder of each client.

    Raises:
        RunError: the SuperLink didn't come up.
    """
    home.mkdir(parents=True)
    logs.mkdir(exist_ok=True)
    address, *own = _free_ports(1 + clients)
    link = f"{LOCAL_HOST}:{address}"
    connection = {"address": link, "insecure": True}
    (home / "config.toml").write_text(
        tomli_w.dumps({"superlink": {"default": "here", "here": connection}})
    )
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str) -> subprocess.Popen[bytes]:
        started.append(_start([*command], home, logs / f"{name}.log"))
        return started[-1]

    try:
        superlink = start(
            "superlink", "flower-superlink", "--insecure", "--host", LOCAL_HOST,
            "--port", str(address), "--disable-runtime-dependency-installation",
        )  # fmt: skip
        _wait_for(address, superlink, logs / "superlink.log")
        for client, port in enumerate(own):
            start(
                f"client-{client}", "flower-supernode", "--insecure", "--superlink", link,
                "--host", LOCAL_HOST, "--port", str(port), "--node-config", f"client={client}",
                "--isolation", "process",
            )  # fmt: skip
            start(
                f"client-{client}", Path(sys.executable).name, "-m", "paceline.federate.client_end",
                f"{LOCAL_HOST}:{port}", str(folders / str(client)),
            )  # fmt: skip
        yield start("run", "flwr", "run", str(app), "here", "--stream")
    finally:
        _end(started)


def _start(command: Sequence[str], home: Path, log: Path) -> subprocess.Popen[bytes]:
    program, *arguments = command
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    with log.open("ab") as out:
        return subprocess.Popen(
            [str(Path(sys.executable).with_name(program)), *arguments],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_ports(number: int) -> list[int]:
    """Different ones, as all are held until the last is found."""
    held = [socket.create_server((LOCAL_HOST, 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), socket.create_connection((LOCAL_HOST, port), timeout=1.0):
            return
        time.sleep(0.1)
    raise RunError(f"Flower's SuperLink didn't start: {log} says why.")


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes and what they started, those that are asked in vain by force."""
    everybody: list[psutil.Process] = []
    for process in started:
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(process.pid)
            everybody += [own, *own.children(recursive=True)]
    for each in everybody:
        with suppress(psutil.NoSuchProcess):
            each.terminate()
    _, left = psutil.wait_procs(everybody, timeout=_END_S)
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    for process in started:
        process.wait()
