"""`paceline stream`: append what arrives to the log of a Job's stream."""

import os
import signal
import threading
import time
from contextlib import suppress

from paceline.config.errors import InputError
from paceline.config.job import JobSpec
from paceline.train.data.stream.beside import PARENT
from paceline.train.data.stream.ingest import Ingester
from paceline.train.data.stream.prepare import prepare_stream
from paceline.train.stopping import exit_with_parent


def stream_command(job: JobSpec, *, once: bool) -> None:
    """Append until a signal asks for an end.

    Args:
        job: names sources and log.
        once: end when nothing is left to take.

    Raises:
        InputError: the Job has no stream, another process writes its log, or a source can't be
            used.
    """
    stream = job.data.stream
    if not stream.is_on:
        raise InputError(
            "this Job has no stream: give data.stream.folder, listen or kafka, for example --set "
            "data.stream.folder=incoming."
        )
    wants_stop = _stop_by_signals()
    ingester = Ingester(prepare_stream(job), stream, job.data.text_field, _say)
    try:
        ingester.run(wants_stop.is_set, once=once)
    finally:
        ingester.close()


def _stop_by_signals() -> threading.Event:
    """Beside a rank Ctrl-C is for that, which ends this process when it wants."""
    wants_stop, asking = threading.Event(), {signal.SIGTERM, signal.SIGINT}
    if parent := os.environ.get(PARENT):
        with suppress(ValueError):
            exit_with_parent(int(parent))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        asking.remove(signal.SIGINT)
    for number in asking:
        signal.signal(number, lambda *_: wants_stop.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, asking)  # a rank's children have them blocked
    return wants_stop


def _say(sentence: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), sentence, flush=True)
