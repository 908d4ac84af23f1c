"""Put a process on every device of this machine and wait for them.

The ranks are started by torchrun's elastic agent. Signals are this file's business: SIGINT and
SIGTERM become the Run's stop file, which every rank reads after its step.
"""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.config.errors import InputError, RunError
from paceline.observe.run import Run


def launch(
    run: Run, num_ranks: int, entry: Callable[..., Any] | str, arguments: Sequence[Any]
) -> None:
    """Run `entry` on `num_ranks` processes of this machine and wait for them.

    A rank that dies takes the others down within seconds. SIGINT and SIGTERM ask the ranks to stop
    after their step; a second one ends them at once.

    Args:
        entry: a module-level function, or a program to execute.
        arguments: of the entry, the same for each rank.

    Raises:
        InputError: a rank found wrong input.
        RunError: a rank died, or the ranks agreed that the run can't go on.
    """
    # Restarts over gloo fail on the addresses of the last attempt where the store is shared.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # The agent logs what is reported below, in pieces and per process.
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder, signals_stop(run):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=run.path.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGHUP",
        )
        try:
            elastic_launch(config, entry)(*arguments)
        except ChildFailedError as error:
            raise explained(*error.get_first_failure(), run) from None


@contextmanager
def signals_stop(run: Run) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into the stop file; a second one ends this process and its ranks."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if run.stop_file.exists():
            os._exit(130)  # the ranks watch their launcher
        run.stop_file.touch()
        print("\nstopping after this step (again: at once)", file=sys.stderr, flush=True)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, on_signal) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def explained(rank: int, failure: ProcessFailure, run: Run) -> Exception:
    """The exception that a rank's failure is for whoever started the run.

    The rank's own traceback is printed at once, so that it stands before any of this process.
    """
    message: Any = failure.error_file_data.get("message")
    if isinstance(message, dict):
        kind, _, sentence = message["message"].partition(": ")
        for known in (InputError, RunError):
            if kind == known.__name__:
                return known(sentence)
        print(message["extraInfo"]["py_callstack"], file=sys.stderr)
    died = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with {failure.exitcode}"
    return RunError(
        f"rank {rank} (pid {failure.pid}) ended {died} and took the run down; its log is "
        f"{run.log_folder / f'rank{rank}.log'}. Start it again to go on from the last checkpoint."
    )
