"""A client's end that stays: takes its messages from Flower, and answers each in a fork of itself.

Flower itself starts a process for each message, which imports Flower anew: 3.5 CPU-seconds, of
which a round with SecAgg+ has four. A fork has it already. The process that trains stays as well
(`training_process`).

    python -m paceline.federate.client_end HOST:PORT FOLDER
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from flwr.supercore.constant import ExecutorType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import LaunchResult, SubprocessExecutor
from flwr.supernode.runtime.run_clientapp import run_clientapp

import paceline.federate.client_app  # noqa: F401  forks have it
from paceline.federate import training_process
from paceline.train.stopping import exit_with_parent


class _Forking(SubprocessExecutor):
    """Flower's executor, but for how a process begins.

    Args:
        folder: the client's own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fork: int | None = None
        self._keep_running()

    def launch(self, spec: Any) -> LaunchResult:
        """Answer a message in a fork; whoever still answers an older one is of no use."""
        self._keep_running()
        if self._fork is not None:
            with suppress(ProcessLookupError):
                os.kill(self._fork, signal.SIGKILL)
            os.waitpid(self._fork, 0)
        self._fork = os.fork()
        if self._fork == 0:
            _answer(spec)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Take leave of a fork that is done; Flower calls it before each look for messages."""
        if self._fork is not None and os.waitpid(self._fork, os.WNOHANG)[0]:
            self._fork = None

    def _keep_running(self) -> None:
        """One that can't compute is tried again with each message, and not all the time."""
        training_process.keep_running(self._folder)


def _answer(spec: Any) -> NoReturn:
    """In the fork, which must not go on as its parent does."""
    code: Any = 1
    try:
        run_clientapp(
            spec.runtime_api_address, spec.token, spec.insecure, parent_pid=spec.parent_pid,
            runtime_dependency_install=False,
        )  # fmt: skip
    except SystemExit as error:
        code = error.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def main(address: str, folder: Path) -> None:
    """Take messages until the SuperNode's starter is gone."""
    exit_with_parent(os.getppid())
    executor = _Forking(folder)
    run_superexec.get_executor = lambda *_given, **_named: executor  # Flower has no way to give one
    run_superexec.run_superexec(address, insecure=True, executor_type=ExecutorType.SUBPROCESS)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
