"""The ingester beside a run: a process of the first rank, for as long as that trains.

It is started again when it dies. Where somebody else appends to the log (`paceline stream` on its
own), it takes over when they end. It ends with its rank, however that ends.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.observe.run import Run
from paceline.train.data.stream.log import is_written

PARENT = "PACELINE_STREAM_PARENT"
"""The variable that tells an ingester the process that it ends with."""
_FIRST_PAUSE_S, _MOST_PAUSE_S, _LOOK_S, _GOODBYE_S = 0.5, 30.0, 0.2, 5.0


@contextmanager
def ingesting(run: Run, folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keep an ingester for a Run's Job.

    Args:
        folder: of the log.
        say: tells a person.
    """
    is_over = threading.Event()
    thread = threading.Thread(
        target=_keep, args=(run, folder, say, is_over), name="ingester", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_GOODBYE_S)


def _keep(run: Run, folder: Path, say: Callable[[str], None], is_over: threading.Event) -> None:
    pause_s = _FIRST_PAUSE_S
    while not is_over.is_set():
        if is_written(folder):
            is_over.wait(_FIRST_PAUSE_S)
            continue
        code = _ingest(run, is_over)
        if code is not None:
            log = run.log_folder / "stream.log"
            say(f"what appends to the stream's log ended with {code}, see {log}; it starts again.")
            is_over.wait(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)


def _ingest(run: Run, is_over: threading.Event) -> int | None:
    """Run one; its exit code, None where it ended because the run did."""
    run.log_folder.mkdir(exist_ok=True)
    # Ranks compute meanwhile: it takes one core to make tokens.
    environment = {"RAYON_NUM_THREADS": "1", **os.environ, PARENT: str(os.getpid())}
    command = [sys.executable, "-m", "paceline", "stream", str(run.path)]
    with (run.log_folder / "stream.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    while process.poll() is None:
        if is_over.wait(_LOOK_S):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_GOODBYE_S / 2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return None
    return process.returncode
